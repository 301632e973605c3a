"""Origins and edges as processes: what viewers get when an origin is killed and another lies, frame by frame."""

from __future__ import annotations

import time

import pytest
from e2e_kit import wait_until

from flowctl.demo.cluster.frames import Encoder, FrameViewer, judge
from flowctl.demo.line import ProxyLine
from flowctl.demo.processes import ServerProcesses
from flowctl.pollgroup import PollGroup

STREAM = "live/cluster"
SECONDS = 5.0
KILL_S = 2.5


@pytest.fixture
def group():
    found = PollGroup("e2e-cluster")
    found.start()
    yield found
    found.stop(2.0)


@pytest.fixture
def nodes(tmp_path):
    with ServerProcesses(tmp_path) as found:
        yield found


def test_cluster_when_an_origin_is_killed_and_one_lies_loses_and_doubles_no_frame(nodes, group):
    serve = ("serve", "live", "--origin", "127.0.0.1:0")
    origins = nodes.start_all(dict.fromkeys(("liar", "a", "b"), serve))
    with ProxyLine(origins["liar"].segments_port, lies=True) as lying:
        good = [f"127.0.0.1:{origins[name].segments_port}/{origins[name].port}" for name in "ab"]
        edges = nodes.start_all(
            {
                "segments": ("edge", f"127.0.0.1:{lying.port}", *good, "--origin", "127.0.0.1:0"),
                "follows": ("edge", *good, "--follow"),
            }
        )
        edges["of the edge"] = nodes.start("of the edge", "edge", f"127.0.0.1:{edges['segments'].segments_port}")
        encoder = Encoder(group, [node.url(STREAM) for node in origins.values()], bit_rate=800_000, duration_s=SECONDS)
        viewers = {name: FrameViewer(name, node.url(STREAM)) for name, node in edges.items()}
        for viewer in viewers.values():
            viewer.start(group)
        # As long as the liar alone has the stream, it is the one that is asked.
        encoder.start(lambda: wait_until(lambda: lying.lies_told, "a lie"))
        wait_until(lambda: all(viewer.seen for viewer in viewers.values()), "the first frames")
        begun_us = encoder.frames.begun_us
        wait_until(lambda: time.time() * 1e6 > begun_us + KILL_S * 1e6, "the middle of the stream")
        origins["a"].kill()
        killed_us = time.time_ns() // 1000
        wait_until(lambda: encoder.finished, "the end of the stream")
        last = encoder.frames.last
        wait_until(
            lambda: all(viewer.has(*item) for viewer in viewers.values() for item in last.items()), "the last frames"
        )
    for name, viewer in viewers.items():
        found = judge(name, viewer.seen, encoder.frames.checksums, killed_us)
        assert found.whole, found
        assert found.frames > 100
        assert not viewer.cut
