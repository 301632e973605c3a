"""What a crowd gets from a server with too little processor time, and when there is enough again.

The server is held to 50, 30, 20 and 10 % of what it used for the same crowd (a quota of its control group, which takes
root), then let go; once with a hiccup meanwhile, in which nobody reads. Reported are, second by second, the shares of
the stream's rate that the median and the slowest tenth get, what a second of processor time delivers against before
(1: nothing is wasted), and after how many seconds all is as before; beside nginx-rtmp. ``python bench squeeze``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from crowds import quota
from crowds.scene import SERVERS, Case, back, options, percents, present, scene
from kit.tables import print_rows

_SHARES: Final = (0.5, 0.3, 0.2, 0.1)
_PAUSE_S: Final = 5.0
_SQUEEZED_S: Final = 12
_AFTER_S: Final = 20
_BEFORE_PAUSE_S: Final = 4


def measure(case: Case, share: float, pause_s: float, squeezed_s: int, after_s: int) -> dict[str, Any]:
    """Hold a server to a share of what it uses, with a pause of its crowd or none, and let it go; return a row."""
    with scene(case, 5 + squeezed_s + pause_s + after_s) as crowd:
        healthy, before = crowd.healthy(5.0)
        with quota.limited(crowd.running.pids) as limit:
            limit(share * healthy.cpu_s / healthy.took_s)
            squeezed = crowd.seconds(_BEFORE_PAUSE_S)
            time.sleep(pause_s)
            squeezed += crowd.seconds(squeezed_s - _BEFORE_PAUSE_S)
            limit(None)
            after = crowd.seconds(after_s)
        medians = [second.median for second in after]
        delivered = sum(sum(second.shares) * second.took_s for second in squeezed)
        used_s = sum(second.cpu_s for second in squeezed)
        return {
            "server": case.label,
            "viewers": case.viewers,
            "processor_percent": round(100 * share),
            "pause_s": pause_s,
            **before,
            "per_processor_s_of_before": round(delivered / max(used_s, 1e-9) / healthy.per_cpu_s, 2),
            **back(medians),
            "closed": crowd.readers.closed,
            "median_squeezed_percent": percents([second.median for second in squeezed]),
            "slowest_tenth_squeezed_percent": percents([second.tenth for second in squeezed]),
            "median_after_percent": percents(medians),
        }


def run(
    viewers: int = 1000,
    shares: Sequence[float] = _SHARES,
    pause_s: float = _PAUSE_S,
    squeezed_s: int = _SQUEEZED_S,
    after_s: int = _AFTER_S,
    servers: Sequence[str] = SERVERS,
) -> list[dict[str, Any]]:
    """Squeeze each server; return a row for each share, and one for the largest with a pause of the crowd."""
    if why := quota.why_not():
        raise SystemExit(f"error: {why}")
    kinds = [(share, 0.0) for share in shares] + [(shares[0], pause_s)] * bool(pause_s)
    found = [Case(server=name, viewers=viewers) for name in present(servers)]
    return [measure(case, *kind, squeezed_s, after_s) for kind in kinds for case in found]


QUICK: Final[dict[str, Any]] = {"viewers": 10, "shares": (0.3,), "pause_s": 0.0, "squeezed_s": 6, "after_s": 5}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = options(__doc__, 1000)
    parser.add_argument("--shares", default=",".join(map(str, _SHARES)), help="of the processor time that is used")
    parser.add_argument("--pause", type=float, default=_PAUSE_S, help="hiccup while squeezed, in seconds; 0: none")
    arguments = parser.parse_args()
    shares = [float(text) for text in arguments.shares.split(",")]
    rows = run(arguments.viewers, shares, arguments.pause, servers=arguments.servers)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
