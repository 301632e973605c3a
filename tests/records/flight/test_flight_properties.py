"""Random histories of recorded Senders: every rule of the core holds, and each flight replays to the last bit."""

from __future__ import annotations

from flight_kit import RecordedViewer, check_flight, outputs
from hypothesis import settings
from set_kit import Connection
from test_properties import FanoutHistory, OwnQueueHistory

from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.replay import compare, replay
from flowctl.records.telemetry.schema import FlightKind
from tests.core.fanout.test_streamset_model import LossyHistory, UnevenHistory


class RecordedFanoutHistory(FanoutHistory):
    """Viewers of a log, all of them recorded: served alone, by the same rules, and their flights replay."""

    viewer_class = RecordedViewer

    @property
    def alone_at_the_end(self):
        return sum(viewer.sender.following is not None for viewer in self.viewers)

    def teardown(self):
        for viewer in self.viewers:
            check_cut(viewer)  # as a crash would leave it
        super().teardown()
        for viewer in self.viewers:
            check_outcome(viewer)


class RecordedOwnHistory(OwnQueueHistory):
    """One recorded Sender without a log."""

    viewer_class = RecordedViewer

    def teardown(self):
        super().teardown()
        if hasattr(self, "viewer"):
            check_outcome(self.viewer)


class RecordedConnection(Connection):
    """What a set needs of a connection, whose Sender is recorded."""

    viewer_class = RecordedViewer


class RecordedSets:
    """Viewers of a set, all of them recorded, that go from log to log: by the same rules, and their flights replay."""

    connection_class = RecordedConnection

    def teardown(self):
        for connection in self.viewers:
            check_cut(connection.viewer)
        super().teardown()
        for connection in self.viewers:
            check_outcome(connection.viewer)


class RecordedSetHistory(RecordedSets, LossyHistory):
    """Some viewers are sent less than their rendition has."""


class RecordedUnevenHistory(RecordedSets, UnevenHistory):
    """Key frames of the renditions do not meet."""


def check_cut(viewer):
    """Check a flight that has no end yet, unless the Sender is closed."""
    flight = read_flights(viewer.rows)
    result = replay(flight)
    comparison = compare(flight, result)
    assert comparison.identical, str(comparison)
    assert flight.complete is (viewer.sender.statistics().close_reason is not None)


def check_outcome(viewer):
    viewer.sender.end_flight()
    flight, result, comparison = check_flight(viewer.rows)
    told = [(change.old.name, change.new.name, change.cause.value, change.value) for change in viewer.edges.changes]
    again = [(row.state_from, row.state_to, row.cause, row.value) for row in outputs(result, FlightKind.STATE)]
    assert again == told
    assert comparison.transitions == len(told)
    statistics = viewer.sender.statistics()
    assert result.statistics.accepted == statistics.accepted
    assert result.statistics.sent == statistics.sent
    assert result.statistics.dropped == statistics.dropped
    assert result.statistics.queued == statistics.queued
    assert result.statistics.time_in_states_s[1:3] == statistics.time_in_states_s[1:3]
    assert flight.complete


TestRecordedFanoutHistory = RecordedFanoutHistory.TestCase
TestRecordedFanoutHistory.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
TestRecordedOwnHistory = RecordedOwnHistory.TestCase
TestRecordedOwnHistory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRecordedSetHistory = RecordedSetHistory.TestCase
TestRecordedUnevenHistory = RecordedUnevenHistory.TestCase
TestRecordedSetHistory.settings = TestRecordedUnevenHistory.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


def test_flight_when_a_refused_viewer_is_moved_replays():
    history = RecordedSetHistory()
    history.start(text="000000000000")
    history.kernel_takes(index=0, room=0)
    history.want(index=0, name="360", size=11, text="000000000000")
    history.move(index=0, text="")
    history.wait_while_a_group_stands_still(seconds=0.6)
    history.teardown()
