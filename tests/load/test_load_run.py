"""Whole load runs against a real server: what they find, and how they end when something goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from load_kit import free_port, open_server, url_of
from source_kit import ROOT

from flowctl.core.server.admission import AdmissionLimits
from flowctl.errors import BrokenError
from flowctl.flv import FlvWriter
from flowctl.live.config import LiveConfig
from flowctl.live.httpd.serving import listen_http
from flowctl.live.server import LiveServer
from flowctl.load.plan import LoadPlan
from flowctl.load.procfs import _children, figures_of
from flowctl.load.results.failon import parse_condition
from flowctl.load.results.figures import RunFigures
from flowctl.load.results.result import PeerEnd, PeerKind
from flowctl.load.results.summary import what_failed
from flowctl.load.run import run_load
from flowctl.wire.client import connect
from flowctl.wire.media.synthetic import SyntheticSource

pytestmark = pytest.mark.realtime

RATE = 800_000


@pytest.fixture(scope="module")
def server():
    with open_server() as running:
        yield running


def viewers(result):
    return [row for row in result.peers if row.kind is not PeerKind.PUBLISHER]


def run(url, on_sample=None, **fields):
    settings = {"publishers": 1, "bit_rate": RATE, "key_interval_s": 1.0, "duration_s": 2.0, **fields}
    return run_load(LoadPlan(url=url, **settings), on_sample)


def test_run_when_most_viewers_are_not_parsed_counts_their_bytes(server):
    result = run(url_of(server, "live/part"), profiles={"healthy": 12}, measure_every=4)
    parsed = [row for row in viewers(result) if row.parsed]
    others = [row for row in viewers(result) if not row.parsed]
    assert (len(parsed), len(others)) == (3, 9)
    # Those of both sorts that joined together were sent the same, give or take a flush at the end.
    assert min(row.wire_bytes for row in others) > 0.8 * max(row.wire_bytes for row in parsed)
    assert {None} == {row.delay_p50_ms for row in others}
    assert all(row.first_frame_s for row in others)
    assert result.measured_every == 4
    assert any("every 4th viewer" in text for text in result.warnings)


def test_run_when_there_are_several_streams_spreads_viewers_and_addresses(server):
    result = run(url_of(server, "live/many"), profiles={"healthy": 6}, publishers=3, spread_addresses=True, workers=2)
    streams = sorted(row.url.rpartition("/")[2] for row in viewers(result))
    assert streams == ["many-1", "many-1", "many-2", "many-2", "many-3", "many-3"]
    assert len({row.address.partition(":")[0] for row in viewers(result)}) == 6
    assert len([row for row in result.peers if row.kind is PeerKind.PUBLISHER]) == 3
    assert all(row.video and not row.missing_video for row in viewers(result))


def test_run_when_a_file_is_published_measures_against_our_clock(server, tmp_path):
    path = tmp_path / "plain.flv"
    with path.open("wb") as file:
        writer = FlvWriter(file)
        for tag in SyntheticSource(video_bit_rate=400_000, key_interval_s=0.5).tags(1.5):
            plain = tag.payload.replace(b"flowctl.stamp", b"nothing.there")
            writer.write(tag.type_id, tag.timestamp, plain)
    result = run(url_of(server, "live/file"), profiles={"healthy": 4}, source=str(path), duration_s=2.5)
    assert result.delay_source == "publisher's clock"
    rows = viewers(result)
    assert all(row.delays > 20 and row.delay_p50_ms < 2000 for row in rows)
    assert {0} == {row.missing_video for row in rows}


def test_run_when_a_profile_is_hostile_has_its_verdict(server):
    result = run(url_of(server, "live/attacked"), profiles={"healthy": 5, "B03": 1}, duration_s=3.0)
    (row,) = [row for row in result.peers if row.kind is PeerKind.HOSTILE]
    assert True is row.expectation_met, row
    assert row.ended_s is not None
    assert {0} == {item.missing_video for item in result.peers if item.kind is PeerKind.HEALTHY}


def test_run_when_nobody_listens_has_a_row_for_each_that_could_not_connect(monkeypatch):
    monkeypatch.setattr(connect, "STARTING_S", 0.0)
    url = f"rtmp://127.0.0.1:{free_port()}/live/room"
    result = run(url, profiles={"healthy": 3}, publishers=0, duration_s=60.0)
    assert result.duration_s < 30  # nobody is there and nobody is to come
    assert {PeerEnd.NOT_CONNECTED} == {row.end for row in result.peers}
    assert result.samples[0].failed["healthy"] == 3
    with pytest.raises(BrokenError, match="was not let publish"):
        run(url, profiles={"healthy": 1})


def test_run_when_the_stream_is_taken_says_that_the_publisher_was_refused(server):
    refused = []

    def once_more(_sample):
        if not refused:
            with pytest.raises(BrokenError, match="was not let publish") as caught:
                run(url_of(server, "live/taken"), profiles={"healthy": 1})
            refused.append(caught.value)

    run(url_of(server, "live/taken"), once_more, profiles={"healthy": 1}, duration_s=1.5)
    assert refused


def test_run_when_interrupted_ends_in_order_with_what_it_has(server):
    before = signal.getsignal(signal.SIGINT)
    result = run(
        url_of(server, "live/cut"),
        lambda _sample: os.kill(os.getpid(), signal.SIGINT),
        profiles={"healthy": 5, "B14": 1},
        duration_s=60.0,
    )
    assert result.interrupted
    assert result.duration_s < 30
    assert len(result.peers) == 7
    assert {PeerEnd.RUN_ENDED} == {row.end for row in result.peers if row.kind is PeerKind.HEALTHY}
    assert before == signal.getsignal(signal.SIGINT)


def test_run_when_a_worker_dies_reports_its_peers_and_goes_on(server):
    killed = []

    def kill_one(sample):
        if not killed:
            killed.append(_workers()[-1])  # publishers are started first
            os.kill(killed[0], signal.SIGKILL)

    result = run(url_of(server, "live/dead"), kill_one, profiles={"healthy": 10}, workers=2, duration_s=2.5)
    ends = [row.end for row in viewers(result)]
    assert len(ends) == 10
    assert {end: ends.count(end) for end in set(ends)} == {PeerEnd.TESTER_FAILED: 5, PeerEnd.RUN_ENDED: 5}
    assert any("worker process died, 5 peers" in text for text in result.warnings)
    assert what_failed(result) == "the load tester failed for 5 of its peers: its worker process died"
    assert len(result.samples) >= 2


def _workers():
    found = sorted(_children(os.getpid()))
    return [pid for pid in found if b"flowctl.load.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_run_when_it_is_over_leaves_no_process_behind(server):
    run(url_of(server, "live/clean"), profiles={"healthy": 1}, duration_s=0.3)
    assert _workers() == []


def test_run_when_the_server_ends_has_failed_and_ends_soon():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(open_server())
        result = run(
            url_of(server), lambda _sample: stack.close(), profiles={"healthy": 3, "stall@100ms": 1}, duration_s=60.0
        )
    assert result.duration_s < 30
    assert result.failure.startswith("the server ended in mid run")
    assert what_failed(result) == result.failure
    verdict = parse_condition("healthy.missing>0").judge(RunFigures(result))
    assert str(verdict) == "not judged  healthy.missing <= 0  (the run went wrong; measured 0)"
    assert verdict.as_dict()["failed"] is None


def test_run_when_the_publisher_is_lost_has_failed_and_ends_soon(server):
    killed = []

    def kill_publisher(_sample):
        if not killed:
            killed.append(_workers()[0])  # publishers are started first
            os.kill(killed[0], signal.SIGKILL)

    result = run(url_of(server, "live/lost"), kill_publisher, profiles={"healthy": 2}, duration_s=60.0)
    assert result.duration_s < 30
    assert result.failure == "the publisher was lost: its process died (exit status -9)"
    assert what_failed(result) == result.failure


def test_run_when_everybody_is_about_to_come_back_goes_on(server):
    result = run(url_of(server, "live/churning"), profiles={"churn@300ms": 1}, duration_s=2.5)
    assert result.duration_s >= 2.5
    assert len(viewers(result)) >= 3
    assert result.failure == ""


def test_run_when_a_viewer_is_behind_a_line_tells_what_of_it_was_in_use(server):
    result = run(url_of(server, "live/line"), profiles={"healthy": 1, "slow@400k": 1})
    rows = {row.profile: row for row in viewers(result)}
    slow, healthy = rows["slow@400k"], rows["healthy"]
    assert slow.line_bytes == pytest.approx(50_000 * (slow.ended_s - slow.started_s), rel=0.3)
    assert 0 < slow.line_used_bytes <= 1.05 * slow.line_bytes + 3000
    assert healthy.line_bytes is None
    assert all(row.longest_freeze_s is not None for row in rows.values())
    assert 0 < result.samples[-1].pictures["healthy"] <= healthy.video
    assert result.samples[-1].missing_pictures["healthy"] == 0
    assert RunFigures(result).value("line_share", "healthy") is None


def test_run_when_a_viewer_stops_reading_says_since_when(server):
    result = run(url_of(server, "live/deaf"), profiles={"healthy": 1, "stall@500ms": 1, "never-read": 1})
    since = {row.profile: row.stopped_reading_s for row in viewers(result)}
    assert since["healthy"] is None
    assert 0.5 <= since["stall@500ms"] <= result.duration_s
    assert 0 <= since["never-read"] <= result.duration_s


def test_run_when_the_stream_ends_may_end_as_well(server):
    result = run(url_of(server, "live/early"), profiles={"half-close": 3}, until="stream-end", duration_s=60.0)
    assert result.duration_s < 30
    assert all(row.cut for row in viewers(result))
    # What the server did is told; nothing is written after our own end, so nothing looks like a reset of the server.
    assert {(PeerEnd.SERVER_CLOSED, "after this peer had closed its sending half")} == {
        (row.end, row.end_details) for row in viewers(result)
    }
    assert result.failure == ""


def test_figures_when_of_this_process_grow_with_its_work():
    before = figures_of(os.getpid())
    with Path("/dev/null").open("rb"):
        assert sum(range(3_000_000)) > 0
        after = figures_of(os.getpid())
    assert after.cpu_s >= before.cpu_s
    assert after.rss_bytes > 1_000_000
    assert after.fds == before.fds + 1
    assert figures_of(2**22 + 12345) is None


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_run_when_over_http_measures_viewers_as_over_rtmp(scheme):
    server = LiveServer(LiveConfig(admission=AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)))
    address = listen_http(server, "127.0.0.1", 0)
    program = [sys.executable, str(ROOT / "bench" / "programs" / "publisher.py"), url_of(server)]
    with server, subprocess.Popen([*program, "--bit-rate", "400000", "--duration", "30"]) as publisher:
        try:
            until = time.monotonic() + 20.0
            while not server.hub.is_published("live/room"):
                assert time.monotonic() < until
                time.sleep(0.02)
            url = f"{scheme}://127.0.0.1:{address[1]}/live/room.flv"
            result = run_load(LoadPlan(url=url, profiles={"healthy": 4}, duration_s=1.5, ramp_s=0.1))
        finally:
            publisher.kill()
    rows = viewers(result)
    assert len(rows) == 4
    assert all(row.first_frame_s is not None and row.missing_video == 0 and row.video > 10 for row in rows)
