"""A viewer that goes on in other logs: its flight has each switch, and replays to the last bit."""

from __future__ import annotations

import json

from fanout_kit import Stage
from flight_kit import LIMITS, STEERED, RecordedViewer, check_flight
from flow_kit import AUDIO, CONTROL, HEADER, OWN, Published, Viewer, check_accounts, check_edges, frame
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.sending.contract import Hop
from flowctl.reasons import CloseReason
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.replay import compare, replay
from flowctl.sender import Sender
from flowctl.testing import ManualGroup

SIZES = {"small": 30, "large": 90}


class Renditions:
    """Two logs with the same messages in two sizes, their fan-outs, and a viewer that begins in the small one.

    As a guide it leads into the other log at the frame after the number of key frames in `stays`; each time in `holds`
    it has the viewer wait there first.
    """

    def __init__(self, viewer_class=RecordedViewer, **options) -> None:
        self.group = ManualGroup()
        self.published = {name: Published(self.group) for name in SIZES}
        self.fanouts = {name: Fanout(one.log, self.group) for name, one in self.published.items()}
        for one in self.published.values():
            one.log.keep_keys(60.0)
        options = {"limits": LIMITS, "settings": STEERED} | options
        self.viewer = viewer_class(self.group, policy=LivePolicy(), **options)
        self.asked = []
        self.stays, self.holds = 0, []
        self.present = "small"
        self.publish("CKIDA")
        self.viewer.follow(self.fanouts["small"])

    @property
    def sender(self):
        return self.viewer.sender

    @property
    def other(self) -> str:
        return "large" if self.present == "small" else "small"

    def publish(self, text: str) -> None:
        for name, one in self.published.items():
            one.script(text, SIZES[name])

    def hop_at(self, sequence: int, *, prefix=()) -> Hop:
        key = next(key for key in self.published[self.other].log.keys if key.sequence == sequence)
        headers = tuple((HEADER, wire, key.enqueued_at) for wire in key.gop.restart)
        return Hop(self.fanouts[self.other], key, (*headers, *prefix))

    def choose_log(self, key):
        self.asked.append((key.sequence, key.wire == self.wires(key.sequence)))
        if self.stays:
            self.stays -= 1
            return None
        if self.holds:
            return self.group.now() + self.holds.pop()
        hop = self.hop_at(key.sequence)
        self.present = self.other
        return hop

    def wires(self, sequence: int) -> bytes:
        return frame(b"L", self.published[self.present].classes[sequence], sequence, SIZES[self.present])

    def lead(self, *, stays=0, holds=()) -> None:
        self.stays, self.holds = stays, [*holds]
        self.sender.set_guide(self)

    def go_on(self, seconds: float, room=None) -> None:
        """Let time pass with a group of pictures each second; give the link `room` bytes each quarter of it."""
        for number in range(round(seconds * 4)):
            self.publish("KIDA" if number % 4 == 0 else "IDA")
            self.group.run(0.25)
            if room is not None:
                self.viewer.give(room)

    def end(self) -> None:
        self.viewer.drain()
        self.sender.close(CloseReason.KICKED)


class SoloSender(Sender):
    """A Sender that is never served with others, as a recorded one."""

    __slots__ = ()

    def joins_cohort_at(self, tail):
        del tail


class SoloViewer(Viewer):
    def make_sender(self, host, transport, **options):
        return SoloSender(host, transport, **options)


def troubled(viewer_class=RecordedViewer) -> Renditions:
    """Return a history with switches of all kinds by a viewer on a line that changes."""
    world = Renditions(viewer_class)
    world.viewer.peer.room = 0
    world.go_on(1, 400)
    world.lead(stays=1)
    world.go_on(3, 300)
    world.lead(holds=[0.3, 0.1])
    world.go_on(3, 60)
    world.sender.send(frame(OWN, CONTROL, 0, 50), CONTROL)
    world.lead()
    world.go_on(2, 0)
    world.viewer.give(900)
    world.go_on(2, 900)
    world.lead(holds=[30.0])
    world.go_on(1, 900)
    world.sender.set_guide(None)
    world.go_on(2, 150)
    sequence = world.published["small"].log.gop.key_sequence
    hop = world.hop_at(sequence)
    world.present = world.other
    world.sender.switch(hop)
    world.go_on(2, 400)
    return world


def rows_of(world, reason):
    return [row for row in read_flights(world.viewer.rows).rows if row.reason == reason]


def test_flight_when_a_viewer_switches_replays_identically():
    world = troubled()
    world.end()
    _, result, comparison = check_flight(world.viewer.rows)
    assert comparison.complete
    assert len(rows_of(world, "switched")) == 5
    assert comparison.transitions == len(world.viewer.edges.changes) > 3
    assert result.statistics.accepted == world.sender.statistics().accepted
    assert {json.loads(row.detail)["left"] for row in rows_of(world, "switched")} - {0}
    assert all(right for _, right in world.asked)
    check_accounts(world.viewer)
    check_edges(world.viewer)


def test_viewer_when_recorded_is_switched_as_one_that_is_not():
    recorded, plain = troubled(), troubled(SoloViewer)
    assert recorded.viewer.peer.received == plain.viewer.peer.received
    assert recorded.asked == plain.asked
    assert recorded.sender.statistics().dropped == plain.sender.statistics().dropped
    assert recorded.present == plain.present
    sizes = {size for _, _, _, size in recorded.viewer.frames}
    assert set(SIZES.values()) <= sizes


def test_flight_when_cut_at_any_row_of_a_switch_replays_up_to_there():
    rows = troubled().viewer.rows
    for length in range(1, len(rows)):
        flight = read_flights(rows[:length])
        comparison = compare(flight, replay(flight))
        assert comparison.identical, f"cut after {length} rows: {comparison}"


def test_flight_when_what_was_said_at_a_key_frame_is_missing_diverges():
    world = troubled()
    flight = read_flights(world.viewer.rows)
    kept = [row for row in flight.rows if row.reason != "key"]
    rows = tuple(row._replace(number=number) for number, row in enumerate(kept))
    changed = type(flight)(**{name: getattr(flight, name) for name in flight.__slots__} | {"rows": rows})
    comparison = compare(changed, replay(changed))
    assert not comparison.identical
    assert "key frame" in comparison.difference or "not asked for" in comparison.difference


def test_guide_when_it_fails_leaves_the_viewer_where_it_is():
    world = Renditions()
    world.hop_at = lambda sequence: 1 / 0
    world.lead()
    world.go_on(2)
    assert [where for where, _ in world.viewer.host.failures] == ["choose_log"] * 3
    assert world.sender.following is world.published["small"].log
    check_flight(world.viewer.rows)


def test_switch_when_no_log_is_followed_is_nothing_and_not_noted():
    stage = Stage(script="KIA")
    viewer = RecordedViewer(stage.group)
    viewer.sender.switch(Hop(stage.fanout, stage.published.log.cached, ()))
    assert viewer.sender.following is None
    flight, _, _ = check_flight(viewer.rows)
    assert [row for row in flight.rows if row.reason in ("switch", "switched")] == []


def test_flight_when_the_viewer_moves_after_a_switch_replays():
    world = Renditions()
    world.lead()
    world.go_on(1)
    assert world.sender.following is world.published["large"].log
    second = Fanout(world.published["large"].log, world.group)
    world.sender.suspend_following()
    world.sender.resume_following(second)
    world.go_on(2, 200)
    world.end()
    check_flight(world.viewer.rows)


def test_headers_when_they_came_in_the_middle_of_a_group_are_those_of_the_log_that_is_entered():
    world = Renditions()
    log = world.published["large"].log
    log.headers = (frame(b"R", HEADER, 99, 40),)
    world.lead()
    world.publish("K")
    log.headers = (frame(b"R", HEADER, 99, 40),)
    world.group.run(1.0)
    (row,) = rows_of(world, "switched")
    assert json.loads(row.detail)["restart"] == [40]
    check_flight(world.viewer.rows)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go on", "lead", "lead later", "hold", "stay", "switch", "own", "move", "limits"]),
        st.sampled_from([0, 30, 90, 200, 700, None]),
    ),
    min_size=3,
    max_size=16,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_flight_when_a_viewer_switches_at_random_replays_and_keeps_its_accounts(steps):
    world = Renditions()
    for what, room in steps:
        act(world, what)
        world.go_on(0.5 if what == "hold" else 1, room)
        check_accounts(world.viewer)
    flight = read_flights(world.viewer.rows)
    assert compare(flight, replay(flight)).identical
    if not world.sender.closed:
        world.end()
    check_flight(world.viewer.rows)
    check_edges(world.viewer)


def act(world: Renditions, what: str) -> None:
    sender = world.sender
    if sender.closed:
        return
    match what:
        case "lead":
            world.lead()
        case "lead later":
            world.lead(stays=1)
        case "hold":
            world.lead(holds=[0.2, 0.4])
        case "stay":
            sender.set_guide(None)
        case "switch":
            missed = (AUDIO, frame(b"L", AUDIO, 3, 25), world.group.now() - 0.5)
            hop = world.hop_at(world.published["small"].log.gop.key_sequence, prefix=(missed,))
            world.present = world.other
            sender.switch(hop)
        case "own":
            sender.send(frame(OWN, CONTROL, 0, 40), CONTROL)
        case "move":
            sender.suspend_following()
            sender.resume_following(world.fanouts[world.present])
        case "limits":
            sender.set_limits(LIMITS)
