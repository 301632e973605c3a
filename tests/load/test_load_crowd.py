"""One crowd with thirty viewers of each slow profile against our own server: each shows on the wire what it claims.

What is asserted is of a crowd that was all there when it was looked at. Where a machine is too busy for thirty of each,
it has fewer.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from live_kit import viewer_figures
from load_kit import open_server, unacknowledged, url_of

from flowctl.load.plan import LoadPlan
from flowctl.load.results.result import PeerEnd, PeerKind, RunSample
from flowctl.load.run import run_load
from flowctl.reasons import CloseReason

pytestmark = pytest.mark.realtime

EACH = (30, 15, 8)
SECONDS = 5.0
LOOK_AT_S = 4.0
BIT_RATE = 1_000_000
HALF = BIT_RATE // 8 * SECONDS / 2

PROFILES = (
    "healthy",
    "slow@200k",
    "sawtooth@100k-300k/1s",
    "pause@500ms/1s",
    "stall@1s",
    "never-read",
    "ack-only@1M",
    "tiny-window@2KiB",
    "half-close",
    "vanish@1s",
    "churn@1s",
    "burst@2s",
)


LEAVING = {"half-close", "vanish@1s", "churn@1s"}
"""Profiles whose connections end before the run, or are not known to be there."""
BLIND = {"never-read", "ack-only@1M"}
"""Profiles that see no frame."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Run as many as this machine has time for; keep the result, and what server and kernel said of them."""
    link = tmp_path_factory.mktemp("trace") / "link.csv"
    link.write_text("seconds,bit_rate\n0,150000\n1,250000\n")
    names = (*PROFILES, f"trace@{link}")
    for each in EACH:
        ran = run_crowd(names, each)
        if all_there(ran, names):
            break
    return ran


def run_crowd(names, each):
    """Run the profiles called `names` with `each` of them, and look three seconds after all were to be there."""
    seen = {}
    with open_server() as server:
        port = server.address[1]

        def look(sample):
            if sample.at_s == LOOK_AT_S:
                seen["viewers"] = {viewer.peer[1]: viewer_figures(viewer) for _, viewer in server.hub.viewing()}
                seen["unacknowledged"] = unacknowledged(port)

        plan = LoadPlan(
            url=url_of(server),
            profiles=dict.fromkeys(names, each),
            publishers=1,
            bit_rate=BIT_RATE,
            key_interval_s=1.0,
            ramp_s=1.0,
            duration_s=SECONDS - 1,
            measure_every=1,
            server_pid=os.getpid(),
        )
        result = run_load(plan, look)
        closed = server.closed_by_reason
    rows = {name: [peer for peer in result.peers if peer.profile == name] for name in names}
    return SimpleNamespace(each=each, result=result, rows=rows, closed=closed, trace=names[-1], **seen)


def all_there(crowd, names):
    """Return whether all who stay had what they came for, a moment of the run before it was looked at."""
    early = [sample for sample in crowd.result.samples if sample.at_s < LOOK_AT_S]
    last = early[-1] if early else RunSample(at_s=0.0)
    return hasattr(crowd, "viewers") and all(
        (last.connected if name in BLIND else last.playing).get(name) == crowd.each
        for name in names
        if name not in LEAVING
    )


def port_of(row):
    return int(row.address.rpartition(":")[2])


def at_server(crowd, name):
    """Return the server's figures of the viewers of a profile that were there after four seconds."""
    return [crowd.viewers[port_of(row)] for row in crowd.rows[name] if port_of(row) in crowd.viewers]


def median(values):
    return sorted(values)[len(values) // 2]


def test_crowd_when_it_has_run_has_a_row_for_each_peer(crowd):
    assert {*range(crowd.each * 13)} == {row.number for row in crowd.result.peers if row.kind is not PeerKind.PUBLISHER}
    unfinished = [row for row in crowd.result.peers if row.connect_s is None or row.handshake_s is None]
    # Who churns may have come back in the last moment of the run.
    assert [
        (row.profile, row.end, row.end_details, row.started_s)
        for row in unfinished
        if row.profile != "churn@1s" or row.end is not PeerEnd.RUN_ENDED or row.started_s < SECONDS - 0.5
    ] == []
    publisher = [row for row in crowd.result.peers if row.kind is PeerKind.PUBLISHER]
    assert [row.end for row in publisher] == [PeerEnd.RUN_ENDED]
    assert publisher[0].video > SECONDS * 30 * 0.9


def test_crowd_when_it_has_run_has_samples_of_server_and_tester(crowd):
    samples = crowd.result.samples
    assert len(samples) >= SECONDS - 1
    last = samples[-1]
    assert last.connected["healthy"] == last.playing["healthy"] == crowd.each
    assert min(last.server_rss_bytes, last.server_fds, last.server_cpu_percent, last.load_cpu_percent) > 0
    assert last.frames_per_s > 0
    assert last.received_bytes_per_s > 0
    assert crowd.result.server_cpu_s > 0
    assert crowd.result.delay_source == "stamp"
    assert "interrupted" not in " ".join(crowd.result.warnings)


@pytest.mark.parametrize("name", ["healthy", "burst@2s", "churn@1s"])
def test_healthy_when_others_are_slow_loses_nothing(crowd, name):
    rows = crowd.rows[name]
    assert {0} == {row.missing_video + row.missing_audio + row.broken_restarts for row in rows}
    assert {True} == {row.started_on_key for row in rows if row.video}
    assert {False} == {row.cut for row in rows}
    assert all(row.delay_p50_ms is not None for row in rows if row.delays)
    assert sum(row.delays for row in rows) > crowd.each * 10
    assert crowd.result.delays_ms[name] == sorted(crowd.result.delays_ms[name])


@pytest.mark.parametrize("name", ["slow@200k", "sawtooth@100k-300k/1s", "trace"])
def test_slow_when_it_reads_at_a_rate_takes_no_more_than_that(crowd, name):
    name = crowd.trace if name == "trace" else name
    rows = crowd.rows[name]
    # What comes before the first frame is read at once: handshake and answers.
    assert median([row.wire_bytes for row in rows]) < 250_000 / 8 * SECONDS + 16 * 1024
    assert median([row.wire_bytes for row in rows]) < median([row.wire_bytes for row in crowd.rows["healthy"]]) * 0.7
    assert all(row.video for row in rows)
    waiting = [crowd.unacknowledged[port_of(row)] for row in rows]
    assert 2_000 < median(waiting) < 100_000  # the kernel is given some 200 ms of the rate ahead


def test_pause_when_it_reads_again_has_seen_the_delay(crowd):
    rows = crowd.rows["pause@500ms/1s"]
    assert median([row.delay_max_ms for row in rows]) > 500
    assert median([row.wire_bytes for row in rows]) > median([row.wire_bytes for row in crowd.rows["stall@1s"]])


def test_stall_when_its_time_has_come_takes_nothing_more(crowd):
    rows = crowd.rows["stall@1s"]
    assert max(row.video for row in rows) < median([row.video for row in crowd.rows["healthy"]])
    assert {PeerEnd.RUN_ENDED} == {row.end for row in rows}
    assert len(at_server(crowd, "stall@1s")) == crowd.each
    assert median([viewer.sender.bytes_sent for viewer in at_server(crowd, "stall@1s")]) > median(
        [row.wire_bytes for row in rows]
    )


@pytest.mark.parametrize("name", ["never-read", "ack-only@1M"])
def test_never_read_when_it_has_asked_to_play_takes_nothing(crowd, name):
    rows = crowd.rows[name]
    assert {(0, 0, None)} == {(row.video, row.audio, row.first_frame_s) for row in rows}
    assert all(viewer.sender.bytes_sent > HALF / 2 for viewer in at_server(crowd, name))
    assert len(at_server(crowd, name)) == crowd.each


def test_ack_only_when_it_reads_nothing_acknowledges_all_the_same(crowd):
    for row in crowd.rows["ack-only@1M"]:
        words = row.notes.replace(",", "").split()
        assert int(words[1]) > 200_000 > int(words[4])


def test_tiny_window_when_served_meets_full_windows(crowd):
    assert all(row.video for row in crowd.rows["tiny-window@2KiB"])
    tiny = [viewer.sender.transitions for viewer in at_server(crowd, "tiny-window@2KiB")]
    waiting = [crowd.unacknowledged[port_of(row)] for row in crowd.rows["tiny-window@2KiB"]]
    assert max(tiny) > 0 or max(waiting) > 0


def test_half_close_when_it_has_sent_its_fin_is_closed_in_order(crowd):
    rows = crowd.rows["half-close"]
    assert {(PeerEnd.SERVER_CLOSED, True)} == {(row.end, row.cut) for row in rows}
    assert crowd.closed[CloseReason.PEER_CLOSED] >= crowd.each


def test_vanish_when_it_is_gone_acknowledges_nothing_to_the_kernel(crowd):
    """The server still has it, and its kernel holds everything since, unacknowledged; a healthy one's is taken."""
    rows = crowd.rows["vanish@1s"]
    assert {None} == {row.cut for row in rows}
    assert all("every packet is dropped" in row.notes for row in rows)
    assert len(at_server(crowd, "vanish@1s")) == crowd.each
    held = [crowd.unacknowledged[port_of(row)] for row in rows]
    taken = [crowd.unacknowledged[port_of(row)] for row in crowd.rows["healthy"]]
    assert median(held) > 10_000
    assert median(taken) < median(held)
    assert max(row.video for row in rows) < median([row.video for row in crowd.rows["healthy"]])


def test_churn_when_it_has_left_comes_back(crowd):
    """Each visit is a row of the same peer; all but the last ended because it left."""
    rows = crowd.rows["churn@1s"]
    visits = {}
    for row in rows:
        visits.setdefault(row.number, []).append(row)
    assert len(visits) == crowd.each
    assert median([len(items) for items in visits.values()]) >= 2
    assert {PeerEnd.LEFT, PeerEnd.RUN_ENDED} == {row.end for row in rows}
    for items in visits.values():
        ends = [row.ended_s for row in items]
        assert ends == sorted(ends)


def test_burst_when_its_moment_has_come_joins_at_once(crowd):
    starts = [row.started_s for row in crowd.rows["burst@2s"]]
    assert min(starts) > 1.99  # timers are good for half a millisecond
    assert max(starts) < 4.0
    assert all(row.video for row in crowd.rows["burst@2s"])
