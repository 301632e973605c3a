"""A recorded Sender: what it notes, that it does what any Sender does, and what ends a flight."""

from __future__ import annotations

import errno
import json

import pytest
from fanout_kit import Stage
from flight_kit import RecordedViewer, Rows, check_flight, outputs, recorded_scene, slow_history
from flow_kit import AUDIO, CONTROL, INTER, KEY, Viewer, check_accounts, check_edges, check_stream, frame, move
from slow_kit import Steady

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import KeepAll, LivePolicy, Thin
from flowctl.core.flow.state import SendState
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.errors import LocalProtocolError, ReentryError
from flowctl.live.playing import Muted
from flowctl.reasons import CloseReason
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.replay import compare, replay
from flowctl.records.flight.tape import Identity, Tape
from flowctl.records.flight.words import FlightRow
from flowctl.records.telemetry.schema import FLIGHT, FlightKind
from flowctl.sender import Sender
from flowctl.testing import ManualGroup, ScriptedTransport, would_block


def close_of(result):
    (close,) = outputs(result, FlightKind.CLOSE)
    return close


def kinds(rows):
    return [row[FLIGHT.names.index("kind")] for row in rows]


def calls(rows):
    at = FLIGHT.names.index("reason")
    return [row[at] for row in rows if row[FLIGHT.names.index("kind")] == "call"]


def test_row_when_written_has_the_columns_of_the_table():
    assert FLIGHT.names[-len(FlightRow._fields) :] == FlightRow._fields


def test_history_when_recorded_is_that_of_an_unrecorded_sender():
    recorded, plain = slow_history(), slow_history(SoloViewer)
    assert [(item.old, item.new, item.cause) for item in recorded.edges.changes] == [
        (item.old, item.new, item.cause) for item in plain.edges.changes
    ]
    assert len(plain.edges.changes) > 5
    assert recorded.sender.statistics().dropped == plain.sender.statistics().dropped
    assert recorded.peer.received == plain.peer.received


class SoloViewer(Viewer):
    """A viewer that never becomes a member of a cohort, as a recorded one: else the two are not to be compared."""

    def make_sender(self, host, transport, **settings):
        return SoloSender(host, transport, **settings)


class SoloSender(Sender):
    """See `SoloViewer`."""

    __slots__ = ()

    def joins_cohort_at(self, tail):
        del tail


@pytest.mark.parametrize("leads", [0, 2])
def test_flight_when_of_a_slow_viewer_replays_identically(leads):
    viewer = slow_history(leads=leads)
    viewer.sender.close(CloseReason.KICKED)
    flight, result, comparison = check_flight(viewer.rows)
    assert comparison.complete
    assert comparison.transitions == len(viewer.edges.changes) > 5
    assert comparison.dropped_messages == viewer.sender.statistics().dropped_messages > 100
    for kind in (FlightKind.LATE, FlightKind.DROPPED, FlightKind.DRAINED):
        assert outputs(result, kind), kind
    assert close_of(result).reason == "kicked"
    assert flight.limits == viewer.sender.limits


def test_flight_when_of_a_viewer_that_stalls_has_its_return():
    viewer = slow_history(limits=Limits.parse("1MiB,9000", "2MiB,9000"))
    _, result, _ = check_flight(viewer.rows)
    assert outputs(result, FlightKind.RETURN)
    assert result.statistics.returns == len(outputs(result, FlightKind.RETURN))


def test_flight_when_closed_for_the_hard_limit_ends_with_it():
    group = ManualGroup()
    viewer = RecordedViewer(group, limits=Limits.parse("400,0", "900,0"))
    viewer.peer.room = 0
    for number in range(12):
        viewer.sender.send(frame(b"O", AUDIO, number, 100), AUDIO)
        group.run(0.01)
    _, result, comparison = check_flight(viewer.rows)
    assert comparison.complete
    assert close_of(result).reason == CloseReason.HARD_LIMIT.value
    assert "close" not in calls(viewer.rows)
    assert kinds(viewer.rows)[-1] == "end"


def test_flight_when_the_sender_is_stuck_replays_the_tick_that_ended_it():
    group = ManualGroup()
    viewer = RecordedViewer(group, settings=SenderSettings(stuck_s=2.0))
    viewer.peer.room = 0
    viewer.sender.send(frame(b"O", AUDIO, 0, 100), AUDIO)
    group.run(3.0)
    flight, result, _ = check_flight(viewer.rows)
    assert close_of(result).reason == CloseReason.STUCK.value
    assert close_of(result).offset_us == flight.rows[-1].offset_us == 2_000_000


@pytest.mark.parametrize(
    "error", [OSError(errno.ECONNRESET, "reset"), OSError(errno.EBADF, "bad"), RuntimeError("odd")]
)
def test_flight_when_a_write_fails_replays_the_end(error):
    stage = Stage(script="KI")
    viewer = RecordedViewer(stage.group)
    viewer.follow(stage.fanout)
    stage.group.run(0.1)
    viewer.peer.failure = error
    stage.publish("KIA")
    stage.group.run(1.0)
    _, result, _ = check_flight(viewer.rows)
    assert close_of(result).reason == viewer.sender.statistics().close_reason.value
    assert not any("odd" in str(cell) for row in viewer.rows for cell in row)


def test_flight_when_writes_are_partial_and_immediate_replays():
    group = ManualGroup()
    viewer = RecordedViewer(group, ScriptedTransport([3, would_block, 1, 1, would_block, 50]), deferred=False)
    for number in range(4):
        viewer.sender.send(frame(b"O", AUDIO, number, 40), AUDIO)
        group.run(0.1)
        viewer.host.poll_writable()
    flight, _, _ = check_flight(viewer.rows)
    assert sum(row.taken_bytes or 0 for row in flight.rows if row.kind == "sent") == 160


@pytest.mark.parametrize("item", [KEY, INTER])
def test_flight_when_a_frame_is_refused_to_its_caller_holds_nothing_of_it(item):
    """What never was in the queue is no row: who views the flight would see it queued."""
    viewer = RecordedViewer(ManualGroup())
    before = len(viewer.rows)
    for droppable in (None, True):
        with pytest.raises(LocalProtocolError):
            viewer.sender.send(bytes(5000), item, droppable=droppable)
    assert len(viewer.rows) == before
    viewer.sender.send(bytes(30), item, droppable=False)
    viewer.group.run(0.1)
    flight, _, _ = check_flight(viewer.rows)
    assert [row.size_bytes for row in flight.rows if row.kind == "queued"] == [30]


def test_flight_when_limits_and_policy_change_from_another_thread_replays():
    stage = Stage(script="KIIAIDA")
    viewer = RecordedViewer(stage.group, policy=LivePolicy(), limits=Limits.parse("300,30", "90000,900"))
    viewer.peer.room = 200
    viewer.follow(stage.fanout)
    stage.publish("IDAIDA", 50)
    viewer.host.foreign = True
    viewer.sender.set_limits(Limits.parse("200,4,1s", "4000,400"))
    viewer.sender.set_policy(KeepAll())
    viewer.sender.thin(Thin.DROPPABLE)
    viewer.sender.relieve("somebody's address")
    viewer.host.foreign = False
    stage.publish("KIA", 50)
    flight, _, _ = check_flight(viewer.rows)
    foreign = [row for row in flight.rows if row.detail and json.loads(row.detail).get("foreign")]
    assert [row.kind for row in foreign] == ["limits_set", "call", "call", "call"]
    assert not any("somebody" in str(cell) for row in viewer.rows for cell in row)


def test_flight_when_the_viewer_moves_between_fan_outs_replays():
    stage = Stage(script="KIA")
    other = Fanout(stage.published.log, stage.group)
    viewer = RecordedViewer(stage.group, policy=LivePolicy())
    viewer.follow(stage.fanout)
    stage.group.run(0.1)
    viewer.sender.suspend_following()
    stage.published.script("IAIAIA")
    viewer.sender.resume_following(other)
    stage.group.run(0.1)
    check_stream(viewer, stage.published)
    assert viewer.numbers() == list(range(9))
    check_flight(viewer.rows)
    move(viewer.sender, stage.fanout)
    viewer.sender.unfollow()
    assert viewer.sender.following is None
    check_flight(viewer.rows)


def test_flight_when_the_viewer_pauses_and_mutes_has_each_following():
    stage = Stage(script="KIA")
    viewer = RecordedViewer(stage.group, policy=LivePolicy())
    viewer.follow(stage.fanout)
    stage.publish("IA")
    viewer.sender.unfollow()
    stage.publish("IAKIA")
    viewer.follow(stage.fanout)
    stage.group.run(0.1)  # nothing is refused to a joiner
    viewer.sender.set_policy(Muted(LivePolicy(), audio=False, video=True))
    stage.publish("IADIAKIA")
    assert "A" not in viewer.classes()[-5:]
    flight, _, _ = check_flight(viewer.rows)
    followings = [row.reason for row in flight.rows if row.reason in {"follow", "unfollow"}]
    assert followings == ["follow", "unfollow", "follow"]


def test_move_when_to_another_log_is_refused_as_ever():
    stage, other = Stage(script="K"), Stage(script="K")
    viewer = RecordedViewer(stage.group)
    viewer.follow(stage.fanout)
    with pytest.raises(LocalProtocolError):
        move(viewer.sender, other.fanout)
    with pytest.raises(LocalProtocolError):
        viewer.sender.follow(stage.fanout)
    stage.publish("KI")
    check_flight(viewer.rows)


def test_viewer_when_recorded_is_no_member_and_misses_nothing():
    stage = Stage(count=3, script="KIA")
    viewer = RecordedViewer(stage.group, policy=LivePolicy())
    viewer.follow(stage.fanout)
    stage.publish("IDAIDAKIA")
    assert stage.fanout.statistics().members == 3
    assert stage.fanout.statistics().alone == 1
    assert viewer.numbers() == list(range(12))
    check_accounts(viewer)
    check_edges(viewer)
    assert viewer.sender.following is stage.published.log
    place = viewer.sender.account().entry
    tail = stage.published.log.tail
    assert (place.offset, place.sequence, place.counts, place.sizes) == (
        tail.offset,
        tail.sequence,
        tail.counts,
        tail.sizes,
    )


def test_log_when_the_viewer_has_gone_is_not_held():
    stage = Stage(script="KIA")
    viewer = RecordedViewer(stage.group)
    viewer.follow(stage.fanout)
    stage.group.run(0.1)
    assert viewer.sender._feed is not None
    viewer.sender.unfollow()
    assert viewer.sender._feed is None
    viewer.follow(stage.fanout)
    viewer.sender.close(CloseReason.KICKED)
    assert viewer.sender._feed is None


def test_viewer_when_it_joins_late_knows_the_stream_as_others_do():
    stage = Stage(script="K")
    for _ in range(8):
        stage.published.script("KIDAIDA", 700)
        stage.group.run(1.0)
    viewer = RecordedViewer(stage.group, policy=LivePolicy())
    viewer.follow(stage.fanout)
    log, private = stage.published.log, viewer.sender._feed.private
    now = stage.group.now()
    tail = log.tail
    expected = log.rates.per_second(now, tail.counts, tail.sizes)
    actual = private.rates.per_second(now, private.tail.counts, private.tail.sizes)
    assert actual == expected
    assert private.gop_duration_s == pytest.approx(log.gop_duration_s, abs=2e-6)
    assert private.largest_bytes == log.largest_bytes
    check_flight(viewer.rows)


def test_looking_when_messages_are_refused_is_noted():
    stage = Stage(script="KI")
    viewer = RecordedViewer(stage.group, policy=LivePolicy(), limits=Limits.parse("100,0", "9000,0"))
    viewer.peer.room = 0
    viewer.follow(stage.fanout)
    stage.publish("IDAIDAIDA", 60)
    stage.group.run(3.0)
    stage.publish("IDAIDAIDA", 60)
    sender = viewer.sender
    for look in (sender.statistics, sender.account, sender.load, sender.why, sender.forecast):
        before = calls(viewer.rows).count("look")
        look()
        assert calls(viewer.rows).count("look") == before + 1
    check_flight(viewer.rows)


def test_flight_when_the_delay_is_the_age_axis_replays_samples():
    stage = Stage(script="KIA")
    settings = SenderSettings(age_from=AgeSource.DELAY, sample_s=0.1)
    viewer = RecordedViewer(stage.group, policy=LivePolicy(), limits=Limits.parse("0,0,1s"), settings=settings)
    viewer.host.unacknowledged = lambda: 900
    viewer.follow(stage.fanout)
    for number in range(40):
        viewer.peer.room = 40
        stage.published.script("IDA", 30)
        stage.group.run(0.2)
        viewer.host.poll_writable()
        viewer.host.foreign = bool(number % 2)
        viewer.sender.sample_delay(None if number % 3 else 500)
        if number < 16 or number > 30:  # for longer than reports are believed
            viewer.sender.peer_acknowledged(number * 20)
        viewer.host.foreign = False
    assert viewer.edges.changes
    flight, _, _ = check_flight(viewer.rows)
    assert {"kernel", "sample_delay", "peer_acknowledged"} <= {row.reason for row in flight.rows}


def test_flight_when_turns_came_late_for_a_strained_thread_notes_it():
    rows = Rows()
    scene = recorded_scene(Steady, rows, 0.3).go(10.0)
    assert "strained" not in calls(rows)
    scene.group.is_strained = True
    for _ in range(20):  # time passes in which nothing has its turn, and the kernel runs dry
        scene.group.clock.advance(0.1)
        scene.kernel.carry()
    scene.go(1.0)
    assert "strained" in calls(rows)
    assert scene.sender.statistics().returns == 1
    check_flight(rows)


def test_flight_when_most_viewers_had_stopped_notes_when():
    stage = Stage(script="KIA")
    limits, settings = Limits.parse("0,0", "90000,0,4s"), SenderSettings(stuck_s=3, soft_too_long_s=3, return_after_s=1)
    viewers = [RecordedViewer(stage.group, policy=LivePolicy(), limits=limits, settings=settings) for _ in range(9)]
    for viewer in viewers:
        viewer.follow(stage.fanout)
    for step in range(30):
        for viewer in viewers:
            viewer.peer.room = 0 if 5 < step < 20 else None
            if viewer.peer.room is None:
                viewer.host.poll_writable()
        stage.published.script("KIAIAI", 40)
        stage.group.run(0.5)
    for viewer in viewers:
        assert "stall" in calls(viewer.rows)
        assert not viewer.host.closed
        viewer.sender.close(CloseReason.KICKED)
        check_flight(viewer.rows)


def test_handler_when_it_calls_back_is_refused_and_not_noted():
    stage = Stage(script="K")
    viewer = RecordedViewer(stage.group, limits=Limits.parse("100,0", "9000,0"))
    seen = []

    def call_back(state, change):
        del state, change
        with pytest.raises(ReentryError):
            viewer.sender.flush()
        seen.append(1)

    viewer.edges.hook = call_back
    viewer.peer.room = 0
    viewer.sender.send(frame(b"O", CONTROL, 0, 200), CONTROL)
    stage.group.run(0.1)
    assert seen
    check_flight(viewer.rows)


# -- the end of a flight


def test_flight_when_it_has_reached_its_rows_ends_and_the_viewer_goes_on():
    class Bounded(RecordedViewer):
        most_rows = 300

    viewer = slow_history(Bounded)
    assert 300 <= len(viewer.rows) < 330
    flight, _, comparison = check_flight(viewer.rows)
    assert comparison.complete
    assert flight.rows[-1].reason == "limit"
    assert not viewer.sender.recording
    check_accounts(viewer)


def test_flight_when_its_time_is_over_ends():
    group = ManualGroup()
    rows = Rows()
    viewer = RecordedViewer(group)
    sender = RecordedSender(viewer.host, viewer.peer, tape=Tape(rows, Identity(conn_id=1, began_at_us=0), most_s=5.0))
    sender.flush()
    assert sender.recording
    group.run(6.0)
    sender.flush()
    assert not sender.recording
    assert kinds(rows)[-1] == "end"


def test_flight_when_the_recorder_has_no_room_is_cut_and_replays_up_to_there():
    class Cut(RecordedViewer):
        room = 400

    viewer = slow_history(Cut)
    assert len(viewer.rows) == 400
    flight, _, comparison = check_flight(viewer.rows)
    assert not flight.complete
    assert not comparison.complete
    assert comparison.transitions >= 3
    check_accounts(viewer)


def test_flight_when_cut_at_any_row_replays_up_to_there():
    viewer = slow_history(seconds=4)
    rows = viewer.rows
    for length in range(1, len(rows)):
        flight = read_flights(rows[:length])
        comparison = compare(flight, replay(flight))
        assert comparison.identical, f"cut after {length} rows: {comparison}"


def test_flight_when_ended_on_demand_is_complete():
    viewer = slow_history(seconds=2)
    viewer.sender.end_flight()
    viewer.sender.end_flight()
    _, _, comparison = check_flight(viewer.rows)
    assert comparison.complete
    assert not viewer.sender.closed


def test_policy_when_it_fails_is_recorded_as_it_acts():
    class Broken(LivePolicy):
        def decide(self, state, message_class):
            if state is SendState.SOFT_LIMIT:
                raise RuntimeError("no")
            return super().decide(state, message_class)

    group = ManualGroup()
    viewer = RecordedViewer(group, policy=Broken(), limits=Limits.parse("100,0", "9000,0"))
    assert [where for where, _ in viewer.host.failures] == ["decide"]
    viewer.peer.room = 0
    for number in range(5):
        viewer.sender.send(frame(b"O", AUDIO, number, 60), AUDIO)
        group.run(0.1)
    check_flight(viewer.rows)


def test_published_when_own_messages_are_between_keeps_all_accounts():
    stage = Stage(script="KIA")
    viewer = RecordedViewer(stage.group, policy=LivePolicy())
    viewer.follow(stage.fanout)
    viewer.sender.send(frame(b"O", CONTROL, 0, 20), CONTROL)
    stage.publish("IA")
    flight, _, _ = check_flight(viewer.rows)
    lanes = [(row.reason, row.message_class) for row in flight.rows if row.kind == "queued"]
    assert lanes.count(("own", "control")) == 1
    assert [lane for lane, _ in lanes].count("log") == 5
