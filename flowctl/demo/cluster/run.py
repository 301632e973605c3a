"""Runs the demonstration of a cluster: origins and edges as processes, one encoder and the viewers in this one.

Four origins get the same stream. One is killed in the middle; one has a slow line; of one, everything that it sends to
edges is changed on the way, so that its segments have wrong hashes. Two edges fetch from all four, one of them follows
one origin frame by frame beside it. The edges are asked for their figures a few times a second, and every frame of
every viewer is held against what was published.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from flowctl.demo.cluster import page
from flowctl.demo.cluster.frames import Encoder, FrameViewer, delay_line, judge
from flowctl.demo.cluster.report import (
    BIT_RATE,
    BY_SEGMENTS,
    DIRECT,
    FOLLOWING,
    KEY_INTERVAL_S,
    LIAR,
    ORIGIN_A,
    ORIGIN_B,
    ORIGINS,
    SLOW,
    SLOW_RATE,
    STREAM,
    ClusterPlan,
    ClusterReport,
    Fetched,
)
from flowctl.demo.line import ProxyLine
from flowctl.demo.processes import ServerProcesses
from flowctl.demo.runner import cache_directory, hand_over, tell, write_page
from flowctl.errors import FlowctlError
from flowctl.pollgroup import PollGroup

_LOOK_S: Final = 0.25
_END_S: Final = 12.0
"""Time after the encoder's end for what is still under way."""
_LIE_S: Final = 5.0
"""Longest wait for the first lie: a segment is offered after a group of pictures, in a second."""
_STOP_S: Final = 2.0


class _Cluster:
    """The processes of one run, and their figures over time."""

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowctl-cluster-")))
        nodes = stack.enter_context(ServerProcesses(folder))
        serve = ("serve", "live", "--origin", "127.0.0.1:0")
        self.origins = nodes.start_all(dict.fromkeys(ORIGINS, serve))
        slow = ProxyLine(self.origins[SLOW].segments_port, rate=SLOW_RATE)
        lying = ProxyLine(self.origins[LIAR].segments_port, lies=True)
        self.lines = {SLOW: stack.enter_context(slow), LIAR: stack.enter_context(lying)}
        ports = {
            name: self.lines[name].port if name in self.lines else self.origins[name].segments_port for name in ORIGINS
        }
        self._names = {f"127.0.0.1:{port}": name for name, port in ports.items()}
        # The one that follows has the two that do as they should: which of them it follows is its own choice.
        followed = [f"127.0.0.1:{ports[name]}/{self.origins[name].port}" for name in (ORIGIN_A, ORIGIN_B)]
        self.edges = nodes.start_all({FOLLOWING: ("edge", *followed, "--follow"), BY_SEGMENTS: ("edge", *self._names)})
        self.fetched: list[Fetched] = []
        self.per_segment: dict[str, float | None] = {}

    def followed(self) -> str:
        """Return the name of the origin that is followed now. Empty: none is."""
        return self._names.get(self.edges[FOLLOWING].stats()["edge"]["followed"].get(STREAM, ""), "")

    def note_fetched(self, at_s: float) -> None:
        for name, node in self.edges.items():
            figures = node.stats()["edge"]
            followed = figures["followed"].get(STREAM)
            for source in figures["origins"]:
                self.fetched.append(
                    Fetched(
                        at_s=at_s,
                        edge=name,
                        origin=self._names[source["origin"]],
                        requests=source["requests"],
                        size_bytes=source["requested_bytes"],
                        faults=source["faults"],
                        connected=source["state"] == "fetching",
                        followed=source["origin"] == followed,
                    )
                )
            if name == BY_SEGMENTS and figures["kept_bytes"]:
                self.per_segment[name] = round(figures["received_bytes"] / figures["kept_bytes"], 3)


def watch_cluster(plan: ClusterPlan) -> tuple[ClusterReport, dict[str, list[tuple[float, float]]]]:
    """Run the demonstration; return its report, and the delay of a viewer at each server over time."""
    with ExitStack() as stack:
        group = PollGroup("demo-cluster")
        group.start()
        stack.callback(group.stop, _STOP_S)
        tell("starting four origins and two edges")
        cluster = _Cluster(stack)
        urls = [cluster.origins[name].url(STREAM) for name in (LIAR, SLOW, ORIGIN_A, ORIGIN_B)]
        encoder = Encoder(group, urls, bit_rate=BIT_RATE, duration_s=plan.duration_s, key_interval_s=KEY_INTERVAL_S)
        viewers = _viewers(plan, cluster, group)
        # As long as the liar alone has the stream, it is the one that is asked.
        encoder.start(lambda: _await_lie(cluster.lines[LIAR]))
        killed, killed_us = _play(plan, cluster, encoder, [viewer for _, viewer in viewers])
        return _report(plan, cluster, encoder, viewers, killed, killed_us)


def _await_lie(line: ProxyLine) -> None:
    end = time.monotonic() + _LIE_S
    while not line.lies_told and time.monotonic() < end:
        time.sleep(_LOOK_S)


def _viewers(plan: ClusterPlan, cluster: _Cluster, group: PollGroup) -> list[tuple[str, FrameViewer]]:
    """Let viewers join: some at each edge, and one at an origin that lives, to compare with."""
    places = [(DIRECT, cluster.origins[SLOW], 1)]
    places += [(name, node, plan.viewers) for name, node in cluster.edges.items()]
    viewers = []
    for name, node, count in places:
        for number in range(count):
            viewer = FrameViewer(f"viewer {number + 1}", node.url(STREAM))
            viewer.start(group)
            viewers.append((name, viewer))
    return viewers


def _play(plan: ClusterPlan, cluster: _Cluster, encoder: Encoder, viewers: list[FrameViewer]) -> tuple[str, int]:
    """Let the stream run, kill the followed origin in the middle, wait for the last frames; return which, and when."""
    frames, killed, killed_us, ended_at = encoder.frames, "", 0, None
    while True:
        time.sleep(_LOOK_S)
        begun_us = frames.begun_us
        if begun_us is None:
            if encoder.finished:
                raise FlowctlError("no origin has let the encoder in")
            continue
        at_s = time.time() - begun_us / 1e6
        if not killed_us and at_s >= plan.kill_s:
            killed = cluster.followed() or ORIGIN_A
            cluster.origins[killed].kill()
            killed_us = time.time_ns() // 1000
            tell(f"{at_s:5.1f} s: {killed} killed")
        cluster.note_fetched(at_s)
        if encoder.finished:
            ended_at = ended_at or time.monotonic()
            whole = all(viewer.has(*frame) for viewer in viewers for frame in frames.last.items())
            if whole or time.monotonic() - ended_at > _END_S:
                tell(f"{at_s:5.1f} s: the stream has ended")
                return killed, killed_us


def _report(
    plan: ClusterPlan,
    cluster: _Cluster,
    encoder: Encoder,
    viewers: list[tuple[str, FrameViewer]],
    killed: str,
    killed_us: int,
) -> tuple[ClusterReport, dict[str, list[tuple[float, float]]]]:
    frames = encoder.frames
    begun_us = frames.begun_us or 0
    report = ClusterReport(
        watched=[
            judge(viewer.label, list(viewer.seen), frames.checksums, killed_us, node=name) for name, viewer in viewers
        ],
        fetched=cluster.fetched,
        per_segment=cluster.per_segment,
        killed=killed,
        killed_s=(killed_us - begun_us) / 1e6,
        duration_s=plan.duration_s,
        lies_told=cluster.lines[LIAR].lies_told,
        sent_all=encoder.sent_all,
    )
    delays = {name: delay_line(viewer.seen, begun_us) for name, viewer in reversed(viewers)}
    return report, delays


def run_cluster(plan: ClusterPlan, *, as_json: bool = False, path: Path | None = None) -> bool:
    """Run the demonstration, and write its report to standard output and as a page with pictures."""
    report, delays = watch_cluster(plan)
    path = cache_directory() / "demo-cluster.html" if path is None else path
    write_page(path, page.render(report, delays))
    last = f"who fetched from whom, and when, with pictures: {path}"
    return hand_over(report, as_json=as_json, files={"page": str(path)}, last=(last,))
