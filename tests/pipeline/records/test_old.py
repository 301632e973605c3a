"""Records of formats 1 and 2: what servers wrote as events is read as closes, with the figures that they told."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from record_kit import at, close, event, read_hours, sample, schema_of, write, write_closes, write_samples

from flowctl.analyze.records.listing import list_records
from flowctl.records.telemetry.schema import FLOW_CLOSES, FLOW_EVENTS, FLOW_SAMPLES

PEER = {"peer_ip": "192.0.2.1", "peer_port": 50_000}
WATCHES = PEER | {"role": "play", "app": "live", "stream": "s"}
DETAIL = {
    "accepted": {"key": 5, "inter": 95},
    "sent": {"key": 5, "inter": 85},
    "dropped": {"thinned from the queue": {"inter": 6}, "queued at close": {"inter": 3, "audio": 1}},
    "connected_s": 60.5,
    "states_ms": {"READY": 52_000.0, "OVERLOADED": 5_000.0, "SOFT_LIMIT": 3_000.0},
    "agent": "LNX 9,0,124,2",
    "edges_missed": 2,
}


def old(root, table, rows, number, name="a", **more):
    """Write a file of an old format: without the column that came later; samples of format 1 have a step."""
    schema = schema_of(table)
    if table is FLOW_EVENTS:
        schema = schema.remove(schema.get_field_index("count"))
    elif number == 1:
        schema = schema.append(pa.field("step", pa.string()))
    metadata = {
        "flowctl.table": table.name,
        "flowctl.format": str(number),
        "flowctl.uid": f"{table.name} {name} {more}",
    }
    return write(root, rows, name, table=table, schema=schema, metadata=metadata, **more)


def edge(seconds, conn_id, before, after, state_ms, **columns):
    columns |= {"state_from": before, "state_to": after, "state_ms": state_ms} | WATCHES
    return event(seconds, conn_id, "state_changed", **columns)


def viewer(conn_id, begin=0.0, **told):
    """Events of a viewer that is in trouble twice in its minute; the second half of them is from second 40 on."""
    detail = json.dumps(DETAIL | told)
    return [
        event(begin, conn_id, "conn_opened", role="unknown", **PEER),
        event(begin + 0.05, conn_id, "handshake_done", value=50.0, role="unknown", **PEER),
        event(begin + 0.1, conn_id, "command", reason="play", role="unknown", **PEER),
        event(begin + 0.2, conn_id, "play_started", value=200.0, **WATCHES),
        edge(begin + 10, conn_id, "READY", "OVERLOADED", 10_000.0, sent_bytes=1_000),
        edge(begin + 12, conn_id, "OVERLOADED", "SOFT_LIMIT", 2_000.0),
        edge(begin + 15, conn_id, "SOFT_LIMIT", "READY", 3_000.0, value=5_000.0),
        event(begin + 40, conn_id, "input_paused", **WATCHES),
        event(begin + 40.5, conn_id, "input_resumed", value=500.0, **WATCHES),
        event(begin + 41, conn_id, "limit_hit", axis="commands_per_second", value=51.0, limit=50.0, **WATCHES),
        event(begin + 43, conn_id, "sample", viewer_delay_ms=100.0, sent_bytes=5_000, **WATCHES),
        event(begin + 60, conn_id, "conn_closed", state_from="READY", state_ms=28_000.0, reason="peer reset",
              sent_bytes=9_000, dropped_messages=10, dropped_bytes=10_000, detail=detail, **WATCHES),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def read(spark, tmp_path_factory):
    """Read two hours of both old formats and of today's, together."""
    root = tmp_path_factory.mktemp("old")
    spans = viewer(2, begin=3600 - 30)
    refused = event(5, 0, "conn_refused", reason="banned", detail='{"count": 7}', **PEER)
    open_ = [event(100, 3, "play_started", value=80.0, **WATCHES), edge(110, 3, "READY", "HARD_LIMIT", 9_000.0)]
    old(root, FLOW_EVENTS, [*viewer(1), *spans[:7], *open_, refused], 1)
    old(root, FLOW_EVENTS, [*spans[7:], event(3700, 3, "sample", sent_bytes=70, rtt_us=900, **WATCHES)], 2, hour="13")
    write_closes(root, [close(200, 9)])
    write(root, [event(201, 9, "limit_hit", axis="bytes", count=3)], "b")
    late = {"state": "OVERLOADED", "accepted_bytes_inter": 1_000, "viewer_delay_ms": 900.0}
    rows = [sample(10.5, 1, **late), sample(20, 1, viewer_delay_ms=100.0), sample(21, 1, picture_share=0.5)]
    stalled = sample(22, 1, stalled_ms=800.0, dropped_messages_inter=2)
    old(root, FLOW_SAMPLES, [*rows, stalled, sample(23, 1) | {"step": "KEY_FRAMES"}], 1)
    write_samples(root, [sample(202, 9)], "b")
    listing = list_records(str(root))
    return read_hours(spark, listing, listing.hours(), now_us=int(at(7200).timestamp() * 1e6))


@pytest.fixture(scope="module")
def closes(read):
    return {row.conn_id: row for row in read.table("flow_closes").collect()}


def test_old_events_when_a_connection_ended_are_one_close_in_the_hour_of_its_end(closes):
    """Closes of old connections stand beside those that servers write, each in its own hour."""
    hours = {conn_id: (row.date, row.hour) for conn_id, row in closes.items()}
    assert hours == {1: ("2026-03-01", "12"), 2: ("2026-03-01", "13"), 9: ("2026-03-01", "12")}


TOLD = {
    "peer_ip": "192.0.2.1",
    "peer_port": 50_000,
    "role": "play",
    "stream": "s",
    "agent": "LNX 9,0,124,2",
    "duration_s": 60.5,
    "reason": "peer reset",
    "handshake_ms": 50.0,
    "asked_ms": 100.0,
    "startup_ms": 200.0,
    "time_ready_ms": 52_000.0,
    "time_overloaded_ms": 5_000.0,
    "time_soft_ms": 3_000.0,
    "time_hard_ms": 0.0,
    "episodes_overloaded": 1,
    "episodes_soft": 1,
    "episodes_hard": 0,
    "hard_at_once": 0,
    "recoveries": 1,
    "recover_ms": 5_000.0,
    "recover_max_ms": 5_000.0,
    "input_pauses": 1,
    "input_paused_ms": 500.0,
    "limit_hits": 1,
    "edges_missed": 2,
    "events_count": 7,
    "accepted_messages_key": 5,
    "accepted_messages_inter": 95,
    "accepted_messages_audio": 0,
    "sent_messages_inter": 85,
    "dropped_messages_inter": 9,
    "dropped_messages_audio": 1,
    "dropped_by_thinned": 6,
    "dropped_by_closed": 4,
    "dropped_by_late": 0,
    "sent_bytes": 9_000,
    "dropped_bytes": 10_000,
    "pictures_wanted": 97,
    "pictures_sent": 90,
    "lost_messages": 6,
    "unrecovered_ms": None,
    "target_delay_ms": None,
}


@pytest.mark.parametrize("name", TOLD)
def test_old_close_when_made_of_events_has_what_they_told(closes, name):
    """Each column is what the events of the connection say, also where they lie in two hours."""
    assert [closes[conn_id][name] for conn_id in (1, 2)] == [TOLD[name]] * 2


SAMPLED = {
    "samples_count": 5,
    "sampled_ms": 5_000.0,
    "accepted_bytes": 1_000,
    "delay_p99_ms": 900.0,
    "delay_max_ms": 900.0,
    "delay_mean_ms": 200.0,
    "stall_count": 1,
    "stall_ms": 800.0,
    "trouble_ms": 3_000.0,
}


@pytest.mark.parametrize("name", SAMPLED)
def test_old_close_when_there_are_samples_has_what_they_saw(closes, name):
    """Columns of samples are summed up of old samples, a step of format 1 among the trouble; without any, null."""
    assert closes[1][name] == SAMPLED[name]
    if not name.startswith("delay"):
        assert closes[2][name] is None


def test_old_events_when_a_connection_did_not_end_are_one_that_is_open(read):
    """It is counted in the hour of its last event, and the time since its last change of state is that state's."""
    (row,) = read.table("flow_opens").collect()
    assert row.asDict() | {
        "conn_id": 3, "date": "2026-03-01", "hour": "13", "reason": None, "time_ready_ms": 9_000.0,
        "time_hard_ms": 3_590_000.0, "hard_at_once": 1, "unrecovered_ms": 3_590_000.0, "rtt_us": 900,
        "startup_ms": 80.0, "accepted_messages_inter": None, "ts": at(3700).replace(tzinfo=None),
    } == row.asDict()  # fmt: skip
    assert row.asDict().keys() == {*FLOW_CLOSES.names, "date", "hour"}


def test_old_events_when_read_have_only_what_servers_write_today(read):
    """Openings, commands and closes are gone; how many refusals a row stands for is a column."""
    rows = read.table("flow_events").collect()
    assert not {"conn_opened", "handshake_done", "command", "play_started", "conn_closed"} & {row.event for row in rows}
    counts = {(row.event, row["count"]) for row in rows if row["count"] is not None}
    assert counts == {("conn_refused", 7), ("limit_hit", 3)}
    assert sum(row.conn_id == 1 for row in rows) == TOLD["events_count"]


def test_old_samples_when_read_stand_beside_those_of_today(read):
    """The rows of both are in one table, in today's columns, and the accounts have every row once."""
    assert read.table("flow_samples").count() == 6
    assert [read.has(name) for name in ("flow_closes", "flow_opens", "flight")] == [True, True, False]
    sums = [sum(item.rows_in for (_, name), item in read.accounts.items() if name == table) for table in read_tables()]
    assert sums == [1, 29, 6]


def read_tables():
    return ("flow_closes", "flow_events", "flow_samples")


def test_old_close_when_a_viewer_has_muted_something_counts_it_as_no_loss(spark, tmp_path):
    """Sound that is refused is muted, and pictures are where key frames are among them; other pictures are lost."""
    refused = {1: {"audio": 20}, 2: {"key": 2, "inter": 8, "disposable": 1, "audio": 20}, 3: {"inter": 8}}
    told = {conn_id: {"dropped": {"refused by policy": counts}} for conn_id, counts in refused.items()}
    old(tmp_path, FLOW_EVENTS, [row for conn_id in refused for row in viewer(conn_id, **told[conn_id])], 1)
    listing = list_records(str(tmp_path))
    closes = read_hours(spark, listing, listing.hours(), now_us=int(at(7200).timestamp() * 1e6)).table("flow_closes")
    found = {row.conn_id: (row.lost_messages, row.pictures_wanted) for row in closes.collect()}
    assert found == {1: (0, 100), 2: (0, 89), 3: (8, 100)}


def alone(spark, root, rows):
    """Read events of an old format that lie in one hour, and return the closes of them."""
    old(root, FLOW_EVENTS, rows, 2)
    listing = list_records(str(root))
    read = read_hours(spark, listing, listing.hours(), now_us=int(at(7200).timestamp() * 1e6))
    return read.table("flow_events").collect(), read.table("flow_closes").orderBy("conn_id").collect()


def test_old_close_when_it_never_asked_says_nothing_of_a_play(spark, tmp_path):
    """What events do not tell is null: a health check has no time of a request, nor of a first frame."""
    ended = event(60, 1, "conn_closed", reason="peer closed", detail='{"connected_s": 60}', **PEER)
    _, (row,) = alone(spark, tmp_path, [event(0, 1, "conn_opened", **PEER), ended])
    names = ("asked_ms", "startup_ms", "sent_messages_inter", "pictures_sent", "pictures_wanted", "accepted_bytes")
    assert [row[name] for name in names] == [None] * 6
    assert (row.duration_s, row.opened_at) == (60.0, at(0).replace(tzinfo=None))


def test_old_close_when_it_was_opened_in_an_hour_before_tells_when(spark, tmp_path):
    """Of its last hour alone, its close tells the whole time; when it began to play is not known, and not 0."""
    _, (row,) = alone(spark, tmp_path, viewer(1, begin=3600 - 30)[7:8] + viewer(1, begin=-30)[-1:])
    assert (row.duration_s, row.opened_at) == (60.5, at(-30.5).replace(tzinfo=None))
    assert (row.asked_ms, row.startup_ms, row.time_ready_ms) == (None, None, 52_000.0)


ODD = [
    *('{"connected_s": NaN}', '{"connected_s": "NaN"}', '{"connected_s": 1e300}', '{"connected_s": -3}', "[[[", "null"),
    *('{"connected_s": null, "agent": 5}', '{"connected_s": "soon", "dropped": {"queued at close": {"inter": 1e300}}}'),
]


def test_old_close_when_its_detail_is_odd_goes_by_its_events(spark, tmp_path):
    """Nothing has checked what stands in a detail: a number that cannot be right is none, and ends no job."""
    rows = []
    for conn_id, text in enumerate(ODD, 1):
        rows += [event(0, conn_id, "conn_opened", **PEER), event(9, conn_id, "conn_closed", detail=text, **PEER)]
    most = '{"accepted": {"key": -1, "inter": 9223372036854775807}, "dropped": {"queued at close": {"key": true}}}'
    rows += [event(9, 99, "conn_closed", detail=most), event(9, 0, "conn_refused", detail='{"count": "many"}')]
    events, closes = alone(spark, tmp_path, rows)
    assert [row.duration_s for row in closes] == [9.0] * len(ODD) + [0.0]
    assert (closes[-1].accepted_messages_inter, closes[-1].accepted_messages_key) == (0, 0)
    assert [row["count"] for row in events] == [None]
