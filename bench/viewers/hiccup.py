"""What a crowd gets after a hiccup of the line that it shares: nobody reads for some seconds, then all read again.

All at once are behind, and what a server does for those who are behind it has to do for all. Reported are, second by
second, the share of the stream's rate that the median gets and the server's processor time per viewer and second, and
after how many seconds all is as before; beside nginx-rtmp, with a longer flush interval, beside a busy process, and
after a pause that must cost nobody the connection. ``python bench hiccup``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from crowds.scene import FLUSH_S, SERVERS, Case, back, options, percents, present, scene
from flowctl.units import parse_duration
from kit.tables import print_rows

_COUNTS: Final = (1000, 1500, 2000)
_PAUSES_S: Final = (1.0, 2.0, 5.0, 8.0)
_LONG_S: Final = 20.0
"""Nobody is closed for this, as long as memory has room."""
_SLOW_FLUSH_S: Final = 0.35
_SPECIAL_S: Final = 5.0
_AFTER_S: Final = 20


def measure(case: Case, pause_s: float, after_s: int) -> dict[str, Any]:
    """Let a crowd read, pause, and read again; return a row."""
    with scene(case, 5 + pause_s + after_s) as crowd:
        _, before = crowd.healthy(5.0)
        time.sleep(pause_s)
        after = crowd.seconds(after_s)
        medians = [second.median for second in after]
        return {
            "server": case.label,
            "viewers": case.viewers,
            "pause_s": pause_s,
            **before,
            **back(medians),
            "closed": crowd.readers.closed,
            "median_percent": percents(medians),
            "us_per_viewer": " ".join(f"{second.us:.0f}" for second in after),
        }


def cases(
    counts: Sequence[int], pauses_s: Sequence[float], long_s: float, servers: Sequence[str]
) -> list[tuple[Case, float]]:
    """Return all crowds with their pauses: sizes and pauses first, then what is special with the smallest crowd."""
    found = [
        (Case(server=name, viewers=count), pause) for count in counts for pause in pauses_s for name in present(servers)
    ]
    few = counts[0]
    found += [(Case(server=name, viewers=few), long_s) for name in present(servers) if long_s]
    found += [(Case(server=name, viewers=few, busy=True), _SPECIAL_S) for name in present(servers) if long_s]
    slow_flush = Case(server="flowctl", viewers=few, flush_s=_SLOW_FLUSH_S)
    return found + [(slow_flush, _SPECIAL_S)] * bool(long_s and "flowctl" in servers)


def run(
    counts: Sequence[int] = _COUNTS,
    pauses_s: Sequence[float] = _PAUSES_S,
    long_s: float = _LONG_S,
    after_s: int = _AFTER_S,
    servers: Sequence[str] = SERVERS,
) -> list[dict[str, Any]]:
    """Let crowds have hiccups; return a row for each. Without a long pause there are no special ones."""
    return [measure(case, pause_s, after_s) for case, pause_s in cases(counts, pauses_s, long_s, servers)]


QUICK: Final[dict[str, Any]] = {"counts": (10,), "pauses_s": (1.0,), "long_s": 0.0, "after_s": 5}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print all cases, or with a number of viewers one."""
    parser = options(__doc__, 0)  # all cases, unless there is a number of viewers
    parser.add_argument("--pause", type=float, default=_SPECIAL_S, help="of one crowd, in seconds")
    parser.add_argument("--flush", type=parse_duration, default=FLUSH_S, help="flush interval of flowctl: 350ms")
    parser.add_argument("--busy", action="store_true", help="beside a process that only computes")
    parser.add_argument("--after", type=int, default=_AFTER_S, help="seconds to look at")
    arguments = parser.parse_args()
    if arguments.viewers:
        one = Case(server="", viewers=arguments.viewers, busy=arguments.busy)
        flushes = {"flowctl": arguments.flush}
        found = [replace(one, server=name, flush_s=flushes.get(name, FLUSH_S)) for name in present(arguments.servers)]
        rows = [measure(case, arguments.pause, arguments.after) for case in found]
    else:
        rows = run(after_s=arguments.after, servers=arguments.servers)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
