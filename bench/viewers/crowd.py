"""What a crowd gets that comes all at once: when a show begins, and when its server has been restarted.

`join`: a thousand viewers come within 3 s and read nothing until the server has answered them all; then all read.
`restart`: all play, the server ends, another one starts, and all connect to it in the same moment. Reported is what
the median and the slowest tenth get, second by second, and after how many seconds that is the whole stream; beside
nginx-rtmp. ``python bench crowd``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from crowds.readers import Readers
from crowds.scene import HEAD_S, SERVERS, Case, Scene, back, options, percents, present, scene, serving
from kit import processes
from kit.tables import print_rows

_WITHIN_S: Final = 3.0
_AFTER_S: Final = 20


def join(case: Case, after_s: int) -> dict[str, Any]:
    """Let a crowd come, wait for the last one, and read."""
    with serving(case, after_s + 60) as (running, port, rate), Readers(case.viewers, case.scheme) as readers:
        time.sleep(HEAD_S)
        joined_s = readers.join(port, _WITHIN_S, holds=True)
        return row("join", case, joined_s, Scene(running, readers, rate), after_s)


def restart(case: Case, after_s: int) -> dict[str, Any]:
    """Let a crowd play, end its server, and let all come back to the next one."""
    with Readers(case.viewers, case.scheme) as readers:
        with scene(case, 10, readers) as crowd:
            crowd.second(2.0)
        with serving(case, after_s + 60) as (running, port, rate):
            joined_s = readers.join(port, 0.0)
            return row("restart", case, joined_s, Scene(running, readers, rate), after_s)


def row(kind: str, case: Case, joined_s: float, crowd: Scene, after_s: int) -> dict[str, Any]:
    """Let a crowd that has come read; return what it got."""
    after = crowd.seconds(after_s)
    medians = [second.median for second in after]
    return {
        "crowd": kind,
        "server": case.label,
        "viewers": case.viewers,
        "joined_s": round(joined_s, 1),
        **back(medians),
        "closed": crowd.readers.closed,
        "median_percent": percents(medians),
        "slowest_tenth_percent": percents([second.tenth for second in after]),
        "us_per_viewer": " ".join(f"{second.us:.0f}" for second in after),
    }


def run(viewers: int = 1000, after_s: int = _AFTER_S, servers: Sequence[str] = SERVERS) -> list[dict[str, Any]]:
    """Let crowds come; return a row for each kind, server and way to play."""
    processes.raise_open_files()
    found = [Case(server=name, viewers=viewers) for name in present(servers)]
    found += [Case(server="flowctl", viewers=viewers, scheme="http")] if "flowctl" in servers else []
    return [measure(case, after_s) for measure in (join, restart) for case in found]


QUICK: Final[dict[str, Any]] = {"viewers": 10, "after_s": 5}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = options(__doc__, 1000)
    parser.add_argument("--after", type=int, default=_AFTER_S, help="seconds to look at")
    arguments = parser.parse_args()
    rows = run(arguments.viewers, arguments.after, arguments.servers)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
