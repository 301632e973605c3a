"""What viewers that lag cost a server, beside the same viewers while they are healthy, and beside nginx-rtmp.

A crowd reads all that comes; then each reads evenly what a line of 85, 70 or 50 % of the stream's rate carries: over
RTMP, and over HTTP, which nginx-rtmp does not have. Last a large crowd of which a tenth lags. Reported are the server's
processor time per viewer and second, healthy and lagging, and what of their lines the laggards used.
``python bench laggards``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from crowds.readers import Scheme
from crowds.scene import SERVERS, Case, options, present, scene
from kit.tables import print_rows

_SHARES: Final = (0.85, 0.7, 0.5)
_FILL_S: Final = 8.0
"""In which the buffers of the kernel fill: as long as they do, a laggard is none."""


def measure(case: Case, slow: int, share: float, seconds: float, fill_s: float) -> dict[str, Any]:
    """Let the first `slow` viewers of a crowd lag; return a row."""
    with scene(case, 2 * seconds + fill_s) as crowd:
        healthy, before = crowd.healthy(seconds)
        crowd.second(fill_s, slow=slow, share=share)
        lagging = crowd.second(seconds, slow=slow, share=share)
        used = sorted(found / share for found in lagging.shares[:slow])
        # What the others cost is what they cost before; the rest is for those who lag.
        each = (lagging.us * case.viewers - healthy.us * (case.viewers - slow)) / slow
        return {
            "server": case.label,
            "viewers": case.viewers,
            "lagging": slow,
            "line_percent": round(100 * share),
            **before,
            "laggard_us": round(each),
            "ratio": round(each / healthy.us, 2),
            "line_used_p10_percent": round(100 * used[len(used) // 10]),
            "line_used_median_percent": round(100 * used[len(used) // 2]),
            "closed": crowd.readers.closed,
        }


def run(
    viewers: int = 200,
    many: int = 1000,
    shares: Sequence[float] = _SHARES,
    seconds: float = 12.0,
    fill_s: float = _FILL_S,
    servers: Sequence[str] = SERVERS,
) -> list[dict[str, Any]]:
    """Let crowds lag; return a row for each server, way to play and line, and those of the large crowd."""
    kinds: list[tuple[str, Scheme]] = [(name, "rtmp") for name in present(servers)]
    kinds += [("flowctl", "http")] if "flowctl" in servers else []
    few = [Case(server=name, viewers=viewers, scheme=scheme) for name, scheme in kinds]
    rows = [measure(case, viewers, share, seconds, fill_s) for share in shares for case in few]
    large = [Case(server=name, viewers=many, scheme=scheme) for name, scheme in kinds if many]
    return rows + [measure(case, many // 10, shares[-1], seconds, fill_s) for case in large]


QUICK: Final[dict[str, Any]] = {"viewers": 10, "many": 20, "shares": (0.5,), "seconds": 3.0, "fill_s": 3.0}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    parser = options(__doc__, 200)
    parser.add_argument("--many", type=int, default=1000, help="the crowd of which a tenth lags; 0: none")
    parser.add_argument("--shares", default=",".join(map(str, _SHARES)), help="lines, of the stream's rate")
    arguments = parser.parse_args()
    shares = [float(text) for text in arguments.shares.split(",")]
    rows = run(arguments.viewers, arguments.many, shares, servers=arguments.servers)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
