"""Sessions made of a handful of events and samples by hand: what each figure is, written out."""

from __future__ import annotations

import json
import math

import pytest
from record_kit import at, event, sample, write, write_samples

from flowctl.errors import ConfigError
from flowctl.pipeline.jobs import blame
from flowctl.pipeline.jobs.sessions import COLUMNS, run
from flowctl.pipeline.tables import delays

PEER = {"peer_ip": "192.0.2.1", "peer_port": 50_000}
WATCHES = PEER | {"role": "play", "app": "live", "stream": "s"}
DETAIL = {
    "accepted": {"key": 5, "inter": 95},
    "sent": {"key": 5, "inter": 85},
    "dropped": {"thinned from the queue": {"inter": 6}, "queued at close": {"inter": 3, "audio": 1}},
    "connected_s": 60.0,
    "agent": "LNX 9,0,124,2",
}


MUTED_AND_LATE = {
    "accepted": {"key": 10, "inter": 90},
    "dropped": {"refused by policy": {"key": 4, "inter": 36}, "late": {"inter": 6}},
}


def edge(seconds, conn_id, old, new, state_ms, **columns):
    return event(
        seconds, conn_id, "state_changed", state_from=old, state_to=new, state_ms=state_ms, **columns, **WATCHES
    )


def slow_viewer(conn_id):
    """Events of a viewer that is in trouble twice in its minute: once down to the soft limit, once overloaded."""
    return [
        event(0, conn_id, "conn_opened", role="unknown", **PEER),
        event(0.05, conn_id, "handshake_done", value=50.0, role="unknown", **PEER),
        event(0.2, conn_id, "play_started", value=200.0, **WATCHES),
        edge(10, conn_id, "READY", "OVERLOADED", 10_000.0),
        edge(12, conn_id, "OVERLOADED", "SOFT_LIMIT", 2_000.0),
        edge(15, conn_id, "SOFT_LIMIT", "OVERLOADED", 3_000.0),
        edge(16, conn_id, "OVERLOADED", "READY", 1_000.0, value=6_000.0),
        event(17, conn_id, "dropped", dropped_messages=6, dropped_bytes=6_000, **WATCHES),
        edge(30, conn_id, "READY", "OVERLOADED", 14_000.0),
        edge(32, conn_id, "OVERLOADED", "READY", 2_000.0, value=2_000.0),
        event(40, conn_id, "input_paused", **WATCHES),
        event(41, conn_id, "limit_hit", axis="commands_per_second", value=51.0, limit=50.0, **WATCHES),
        event(42, conn_id, "returned", value=900.0, **WATCHES),
        event(43, conn_id, "sample", viewer_delay_ms=100.0, sent_bytes=5_000, **WATCHES),
        event(44, conn_id, "sample", viewer_delay_ms=2_000.0, sent_bytes=6_000, **WATCHES),
        event(
            60, conn_id, "conn_closed", state_from="READY", state_ms=28_000.0, reason="peer reset", sent_bytes=9_000,
            dropped_messages=10, dropped_bytes=10_000, detail=json.dumps(DETAIL), **WATCHES,
        ),
    ]  # fmt: skip


def flicker(conn_id, lasted_ms, thinned):
    """Events of a viewer that is overloaded once, for so long, and loses these messages, in a session of 10 s."""
    detail = {"dropped": {"thinned from the queue": thinned, "queued at close": {"key": 1}}}
    back = 1 + lasted_ms / 1000
    return [
        event(0, conn_id, "play_started", **WATCHES),
        edge(1, conn_id, "READY", "OVERLOADED", 1_000.0),
        edge(back, conn_id, "OVERLOADED", "READY", lasted_ms, value=lasted_ms),
        event(10, conn_id, "conn_closed", state_from="READY", state_ms=9_000.0 - lasted_ms, reason="peer closed",
              dropped_messages=4, dropped_bytes=400, detail=json.dumps(detail), **WATCHES),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def found(spark, tmp_path_factory):
    """Run the job once over sessions of several kinds; return their rows by conn_id, and the result."""
    root = tmp_path_factory.mktemp("events")
    rows = [event(0, 0, "server_started"), *slow_viewer(1), *slow_viewer(6)]
    # 2: still open, in SOFT_LIMIT since 8 s; 3: refused before it played; 4: one message was too large for the limits;
    # 5: seen only in the middle.
    rows += [
        event(0, 2, "conn_opened", role="unknown", **PEER),
        event(1, 2, "play_started", **WATCHES),
        edge(8, 2, "READY", "SOFT_LIMIT", 8_000.0),
        event(9, 2, "pictures_late", **WATCHES),
        event(10, 2, "dropped", dropped_messages=4, dropped_bytes=400, **WATCHES),
        event(0, 3, "conn_opened", role="unknown", **PEER),
        event(5, 3, "conn_closed", state_from="READY", state_ms=5_000.0, reason="handshake timeout", role="unknown"),
        event(0, 4, "play_started", **WATCHES),
        edge(1, 4, "READY", "HARD_LIMIT", 1_000.0),
        event(1, 4, "conn_closed", state_from="HARD_LIMIT", state_ms=0.0, reason="hard limit", **WATCHES),
        event(3, 5, "sample", viewer_delay_ms=1.0, **WATCHES),
    ]
    rows += [*flicker(7, 20.0, {"disposable": 3}), *flicker(8, 20.0, {"inter": 3}), *flicker(9, 1_500.0, {})]
    # 10: left READY by its own link, and the thread was busy afterwards; 11: the stream burst then; 12: the clock was
    # set back by an hour meanwhile, and its close is told by the monotonic one; 13: the same, open.
    rows += [
        *(event(0, n, "play_started", **WATCHES) for n in (10, 11)),
        *(edge(9.5, n, "READY", "SOFT_LIMIT", 9_500.0) for n in (10, 11)),
        event(3600, 12, "conn_opened", role="unknown", **PEER),
        event(3600.3, 12, "play_started", value=300.0, **WATCHES),
        event(60, 12, "conn_closed", state_from="READY", state_ms=60_000.0, reason="peer closed", **WATCHES,
              detail=json.dumps({"connected_s": 60.0} | MUTED_AND_LATE)),
        event(3600, 13, "conn_opened", role="unknown", **PEER),
        event(60, 13, "play_started", **WATCHES),
    ]  # fmt: skip
    write(root, rows)
    after = {"state": "SOFT_LIMIT", "accepted_bytes_inter": 1_000, "drain_bytes_per_s": 850.0}
    busy = {"state": "OVERLOADED", "strained": True, "viewer_delay_ms": 500.0, "accepted_bytes_inter": 1_000}
    write_samples(
        root,
        [
            *(sample(10 + n, 6, **busy) for n in range(3)),
            sample(13, 6, state="OVERLOADED", stalled_ms=600.0, accepted_bytes_inter=1_000, viewer_delay_ms=1_500.0),
            sample(14, 6, state="OVERLOADED", stalled_ms=1_600.0, accepted_bytes_inter=1_000, viewer_delay_ms=2_500.0),
            *(sample(20 + n, 6, viewer_delay_ms=0.0, accepted_bytes_inter=1_000) for n in range(5)),
            *(sample(n, 10, accepted_bytes_inter=1_000) for n in range(1, 10)),
            sample(10, 10, **after),
            *(sample(n, 10, strained=True, **after) for n in range(11, 20)),
            *(sample(n, 11, accepted_bytes_inter=1_000) for n in range(1, 10)),
            sample(10, 11, **after | {"accepted_bytes_inter": 9_000}),
            *(sample(n, 11, **after) for n in range(11, 20)),
        ],
    )
    out = str(root / "out")
    result = run(spark, str(root), out)
    frame = spark.read.parquet(result.outputs["sessions"])
    return {row["conn_id"]: row for row in frame.collect()}, result, frame


def figures(row, *names):
    return tuple(row[name] for name in names)


def test_sessions_when_written_have_the_columns_of_the_contract(found):
    """Columns, their order and types are those that other jobs read; the server itself is no session."""
    sessions, result, frame = found
    assert dict(frame.dtypes) == COLUMNS
    assert frame.columns == list(COLUMNS)
    assert sorted(sessions) == list(range(1, 14))
    assert [item.rows_in for item in result.accounts] == [65, 48]
    assert all(item.rows_out == item.rows_in and item.settled for item in result.accounts)
    assert result.summary["sessions"] == 13
    assert (result.summary["open"], result.summary["without_address"]) == (5, 1)


def test_session_when_closed_has_its_times_and_episodes(found):
    """Times in states are sums of state_ms, recoveries are measured from leaving READY to being back."""
    row = found[0][1]
    assert figures(row, "opened_at", "closed_at") == (at(0).replace(tzinfo=None), at(60).replace(tzinfo=None))
    assert figures(row, "duration_s", "close_reason", "closed_by") == (60.0, "peer reset", "peer")
    assert figures(row, "time_ready_ms", "time_overloaded_ms", "time_soft_ms", "time_hard_ms") == (52e3, 5e3, 3e3, 0.0)
    assert figures(row, "episodes_overloaded", "episodes_soft", "episodes_hard", "recoveries") == (2, 1, 0, 2)
    assert figures(row, "recover_mean_ms", "recover_max_ms") == (4_000.0, 6_000.0)
    assert figures(row, "handshake_ms", "startup_ms", "exit_before_start") == (50.0, 200.0, False)
    assert figures(row, "worst_state", "input_pauses", "limit_hits", "returns_to_live") == ("SOFT_LIMIT", 1, 1, 1)


def test_session_when_closed_is_named_and_counted_by_its_close(found):
    """Peer, stream and totals by class come from the record of the close; drops are summed over reasons."""
    row = found[0][1]
    assert figures(row, "peer_ip", "peer_port", "role", "app", "stream", "user_agent") == (
        "192.0.2.1", 50_000, "play", "live", "s", "LNX 9,0,124,2",
    )  # fmt: skip
    assert figures(row, "sent_bytes", "dropped_messages", "dropped_bytes", "events_count") == (9_000, 10, 10_000, 16)
    assert figures(row, "accepted_messages_key", "accepted_messages_inter", "accepted_messages_audio") == (5, 95, 0)
    assert figures(row, "dropped_messages_inter", "dropped_messages_audio", "dropped_messages_key") == (9, 1, 0)


def test_session_when_pictures_were_left_out_tells_shares(found):
    """Of the pictures up to its end, without those it had muted; its line by what it took; unknown is not all."""
    sessions = found[0]
    assert sessions[1]["picture_share"] == pytest.approx(1 - 6 / 97)
    assert sessions[12]["picture_share"] == pytest.approx(1 - 6 / 60)
    assert figures(sessions[5], "picture_share", "line_of_stream") == (None, None)
    assert sessions[10]["line_of_stream"] == pytest.approx(0.85)
    assert [sessions[number]["episodes_late"] for number in (1, 2)] == [0, 1]


def test_session_when_open_counts_its_last_state_up_to_the_last_event(found):
    """Who is still there has no close, and the time since its last change of state counts for the state it is in."""
    row = found[0][2]
    assert figures(row, "closed_at", "close_reason", "closed_by", "duration_s") == (None, None, "open", 10.0)
    assert figures(row, "time_ready_ms", "time_soft_ms") == (8_000.0, 2_000.0)
    assert figures(row, "stream", "dropped_messages", "recover_mean_ms") == ("s", 4, None)


def test_session_when_it_never_played_exits_before_start(found):
    """A connection that ends without a play is an exit before video start, and the server ended this one."""
    row = found[0][3]
    assert figures(row, "exit_before_start", "startup_ms", "closed_by", "blame") == (True, None, "server", "none")


def test_blame_when_one_message_fills_the_queue_is_the_limits(found):
    """From READY straight to HARD_LIMIT: the limits are too small for a message, and so it is policy."""
    row = found[0][4]
    assert figures(row, "blame", "blame_share_policy", "worst_state") == ("policy", 1.0, "HARD_LIMIT")


def test_blame_when_a_viewer_only_flickers_is_none(found):
    """20 ms of OVERLOADED and disposable frames dropped are no trouble; a frame that others need, or 1.5 s, are."""
    sessions = found[0]
    assert figures(sessions[7], "worst_state", "dropped_messages_disposable", "blame") == ("OVERLOADED", 3, "none")
    assert sum(sessions[7][f"blame_share_{name}"] for name in blame.BLAMES) == 0
    assert [sessions[number]["blame"] for number in (8, 9)] == ["viewer_link", "viewer_link"]
    assert found[1].summary["in_trouble"] == sum(row["blame"] != "none" for row in sessions.values()) == 8


def test_blame_when_there_are_no_samples_is_the_link(found):
    """Without samples there is no evidence against the server, so a viewer in trouble has a slow link."""
    assert figures(found[0][1], "blame", "blame_share_viewer_link", "stall_ratio") == ("viewer_link", 1.0, None)
    assert found[0][5]["blame"] == "none"


def test_blame_when_the_thread_had_no_room_is_the_server_loop(found):
    """When READY was left the thread was strained: it is ours, also for the time in which the link catches up."""
    row = found[0][6]
    assert row["blame"] == "server_loop"
    shares = [row[f"blame_share_{name}"] for name in ("server_loop", "viewer_link", "publisher_burst", "policy")]
    assert shares == pytest.approx([1.0, 0.0, 0.0, 0.0])


def test_blame_when_the_thread_was_busy_only_afterwards_is_the_link(found):
    """Nine of ten seconds in trouble are strained, but READY was left before: that was the viewer's link."""
    assert figures(found[0][10], "blame", "blame_share_viewer_link") == ("viewer_link", 1.0)


def test_blame_when_the_stream_burst_as_ready_was_left_is_the_publishers(found):
    """Nine times the usual in the second in which the queue began to grow; the rate afterwards says nothing."""
    row = found[0][11]
    mean = (18 * 1_000 + 9_000) / 19
    assert figures(row, "blame") == ("publisher_burst",)
    assert row["blame_share_publisher_burst"] == pytest.approx(1 - mean / 9_000)


def test_session_when_the_clock_was_set_back_lasts_as_long_as_it_did(found):
    """Durations are those of the monotonic clock where it is told, and never negative."""
    sessions = found[0]
    assert figures(sessions[12], "duration_s", "startup_ms") == (60.0, 300.0)
    assert figures(sessions[13], "duration_s", "startup_ms", "closed_by") == (0.0, 0.0, "open")
    assert all(row[f"time_{name}_ms"] >= 0 for row in sessions.values() for name in ("ready", "overloaded", "soft"))


def test_stalls_when_sampled_are_counted_once_and_measured(found):
    """A stall seen by two samples is one, of the time that they saw it: 0.6 s and then a whole second."""
    row = found[0][6]
    assert figures(row, "stall_count", "stall_ms", "samples_count") == (1, 1_600.0, 10)
    assert row["stall_ratio"] == pytest.approx(1_600.0 / 59_800.0)


def test_delay_when_sampled_has_quantiles_within_the_stated_error(found):
    """Samples count, not events, where there are samples; the largest is exact."""
    row = found[0][6]
    assert row["delay_max_ms"] == 2_500.0
    assert row["delay_p50_ms"] == pytest.approx(0.5)
    assert row["delay_p95_ms"] == pytest.approx(2_500.0, rel=delays.LARGEST_RATIO_ERROR)
    assert found[0][1]["delay_p50_ms"] == pytest.approx(100.0, rel=delays.LARGEST_RATIO_ERROR)


def test_quantiles_when_compared_with_exact_ones_are_off_by_the_stated_share_at_most(spark):
    """Over 2,000 delays from 2 ms to 40 s, each quantile is within the error that `delays` states."""
    values = [2.0 * 10 ** (4.3 * math.sin(number) ** 2) for number in range(2_000)]
    frame = spark.createDataFrame([(value,) for value in values], "d double")
    summed = frame.select(*delays.prepared("d", "h")).groupBy().agg(*delays.words("h"))
    for name, text in delays.totals("h").items():
        summed = summed.selectExpr("*", f"{text} AS {name}")
    shares = (0.01, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
    row = summed.selectExpr(
        *(f"{delays.quantile_sql('h', share, '1e9D')} AS q{n}" for n, share in enumerate(shares))
    ).first()
    exact = [sorted(values)[math.ceil(share * len(values)) - 1] for share in shares]
    assert list(row) == [pytest.approx(value, rel=delays.LARGEST_RATIO_ERROR + 1e-9) for value in exact]


def test_sessions_when_records_are_there_twice_say_so(spark, tmp_path):
    """The same records in two files that are no copies would count twice: that is an error, not a result."""
    rows = slow_viewer(1)
    write(tmp_path, rows, "a")
    write(tmp_path, rows[:-1], "b")
    write(tmp_path, rows[-1:], "c")
    with pytest.raises(ConfigError, match="some records are there twice"):
        run(spark, str(tmp_path), str(tmp_path / "out"))
