"""What an edge costs and saves: delay that it adds, octets fetched per segment, and what viewers notice of a kill.

Three origins get the same stream of one encoder, so that each of them has the same segments. A viewer plays at each
origin, and two at each of these: an edge by segments with redundancy 1, 2 and 3, one that follows, and an edge of each
of the first and the last. In the middle one origin is killed with SIGKILL: the one that is followed. Delays are of the
time before, from when a frame was due to when it came; `added` is the median beyond that of viewers at origins. What
was lost, doubled or changed is of every frame to the end. ``python bench cluster [--seconds 40]``.

All processes share one machine and loopback: the delays are what software adds, without any of a network.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from flowctl.demo.cluster.frames import Encoder, FrameViewer, ViewerVerdict, judge
from flowctl.demo.processes import ServerProcess, ServerProcesses
from flowctl.pollgroup import PollGroup
from kit.tables import print_rows, table

STREAM: Final = "bench/cluster"
ORIGINS: Final = ("origin 1", "origin 2", "origin 3")
AT_ORIGIN: Final = "at an origin"
FOLLOWS: Final = "edge, follows"
SEGMENTS: Final = {number: f"edge, segments, redundancy {number}" for number in (1, 2, 3)}
OF_SEGMENTS: Final = "edge of that edge, segments"
OF_FOLLOWS: Final = "edge of that edge, follows"
_END_S: Final = 15.0
_LOOK_S: Final = 0.1
_KEY_S: Final = 1.0


def start(nodes: ServerProcesses) -> tuple[dict[str, ServerProcess], dict[str, ServerProcess]]:
    """Start origins and edges; return both by name."""
    origins = nodes.start_all(dict.fromkeys(ORIGINS, ("serve", "live", "--origin", "127.0.0.1:0")))
    sources = [f"127.0.0.1:{node.segments_port}/{node.port}" for node in origins.values()]
    offers = ("--origin", "127.0.0.1:0")
    edges = nodes.start_all(
        {
            FOLLOWS: ("edge", *sources, "--follow", *offers),
            **{name: ("edge", *sources, "--redundancy", str(number), *offers) for number, name in SEGMENTS.items()},
        }
    )
    first, following = edges[SEGMENTS[1]], edges[FOLLOWS]
    edges |= nodes.start_all(
        {
            OF_SEGMENTS: ("edge", f"127.0.0.1:{first.segments_port}"),
            OF_FOLLOWS: ("edge", f"127.0.0.1:{following.segments_port}/{following.port}", "--follow"),
        }
    )
    return origins, edges


def row_of(
    case: str, before: list[ViewerVerdict], after: list[ViewerVerdict], direct_ms: float, edge: ServerProcess | None
) -> dict[str, Any]:
    delay_ms = round(statistics.median(one.delay_p50_ms or 0.0 for one in before), 1)
    figures = None if edge is None else edge.stats()["edge"]
    return {
        "viewers": case,
        "count": len(after),
        "delay_p50_ms": delay_ms,
        "delay_p99_ms": max(one.delay_p99_ms or 0.0 for one in before),
        "added_p50_ms": round(delay_ms - direct_ms, 1),
        "fetched_per_byte": (
            round(figures["received_bytes"] / figures["kept_bytes"], 2) if figures and figures["kept_bytes"] else None
        ),
        "recovered_s": max(one.recovered_s or 0.0 for one in after),
        "pause_s": max(one.longest_pause_s for one in after),
        "frames": sum(one.frames for one in after),
        "lost": sum(one.lost for one in after),
        "doubled": sum(one.doubled for one in after),
        "changed": sum(one.changed + one.disordered for one in after),
    }


QUICK: Final[dict[str, Any]] = {"seconds": 9.0, "viewers": 1}
"""Arguments of `run` for a look at whether it works."""


def run(seconds: float = 40.0, viewers: int = 2, bit_rate: int = 1_600_000) -> list[dict[str, Any]]:
    """Run the cluster once."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowctl-bench-cluster-")))
        group = PollGroup("bench-cluster")
        group.start()
        stack.callback(group.stop, 2.0)
        origins, edges = start(stack.enter_context(ServerProcesses(folder)))
        urls = [node.url(STREAM) for node in origins.values()]
        encoder = Encoder(group, urls, bit_rate=bit_rate, duration_s=seconds, key_interval_s=_KEY_S)
        encoder.start()
        places: list[tuple[str, FrameViewer]] = [
            (AT_ORIGIN, FrameViewer(name, node.url(STREAM))) for name, node in origins.items()
        ]
        places += [
            (name, FrameViewer(f"{name} {n}", node.url(STREAM))) for name, node in edges.items() for n in range(viewers)
        ]
        for _, viewer in places:
            viewer.start(group)
        killed, killed_us = _play(encoder, origins, edges, [viewer for _, viewer in places], seconds / 2)
        return _rows(encoder, [(name, viewer) for name, viewer in places if viewer.label != killed], killed_us, edges)


def _play(
    encoder: Encoder,
    origins: dict[str, ServerProcess],
    edges: dict[str, ServerProcess],
    viewers: list[FrameViewer],
    kill_s: float,
) -> tuple[str, int]:
    """Let the stream run to its last frame at each viewer; return which origin was killed in the middle, and when."""
    killed, killed_us, end = "", 0, None
    while end is None or time.monotonic() < end:
        time.sleep(_LOOK_S)
        begun_us = encoder.frames.begun_us
        if not killed and begun_us is not None and time.time() - begun_us / 1e6 >= kill_s:
            where = edges[FOLLOWS].stats()["edge"]["followed"].get(STREAM)
            killed = next(
                (name for name, node in origins.items() if where == f"127.0.0.1:{node.segments_port}"), ORIGINS[0]
            )
            origins[killed].kill()
            killed_us = time.time_ns() // 1000
            print(f"# {killed} killed", file=sys.stderr)
        if encoder.finished:
            end = end or time.monotonic() + _END_S
            last = encoder.frames.last.items()
            if all(viewer.label == killed or all(viewer.has(*frame) for frame in last) for viewer in viewers):
                break
    return killed, killed_us


def _rows(
    encoder: Encoder, places: list[tuple[str, FrameViewer]], killed_us: int, edges: dict[str, ServerProcess]
) -> list[dict[str, Any]]:
    sent = encoder.frames.checksums
    before: dict[str, list[ViewerVerdict]] = {}
    after: dict[str, list[ViewerVerdict]] = {}
    for name, viewer in places:
        seen = list(viewer.seen)
        before.setdefault(name, []).append(judge(viewer.label, [x for x in seen if x.came_us < killed_us], sent))
        after.setdefault(name, []).append(judge(viewer.label, seen, sent, killed_us))
    direct_ms = statistics.median(one.delay_p50_ms or 0.0 for one in before[AT_ORIGIN])
    return [row_of(name, before[name], after[name], direct_ms, edges.get(name)) for name in before]


def document(rows: list[dict[str, Any]], images: Path) -> str:  # noqa: ARG001 - every bench's is called with both
    """Return the part of the document; there is no picture for `images`."""
    return table(rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of the stream; an origin is killed in its middle")
    parser.add_argument("--viewers", type=int, default=2, help="at each edge")
    parser.add_argument("--bit-rate", type=int, default=1_600_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print_rows(run(arguments.seconds, arguments.viewers, arguments.bit_rate), as_json=arguments.json)


if __name__ == "__main__":
    main()
