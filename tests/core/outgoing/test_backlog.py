"""A peer's own messages, and the outbox that sends them before the log."""

from __future__ import annotations

import pytest
from flow_kit import AUDIO, CLASS_OF, CONTROL, HEADER
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import Tally, total
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import DROPPABLE_MASK, Headroom
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.backlog import NO_MESSAGES, Backlog, MessageQueue
from flowctl.reasons import DropReason

LETTERS = "CHKIDAX"


def room(messages=OFF_MARK, size=OFF_MARK, since=-float(OFF_MARK)):
    """Return room for so many messages and bytes that were queued at `since` or later."""
    return Headroom(size, messages, since, 0)


class Own:
    """A backlog with a clock and a mask; messages are letters, their numbers the order of offering."""

    def __init__(self):
        self.backlog = Backlog()
        self.now = 100.0
        self.mask = 0
        self.number = 0
        self.taken = []

    def offer(self, text, size=10, **options):
        """Offer one message per letter; return the reasons for which they were refused."""
        options = {"mask": self.mask, "droppable": None} | options
        reasons = []
        for letter in text:
            wire = self.number.to_bytes(4, "big") + letter.encode() * (size - 4)
            self.number += 1
            reasons.append(self.backlog.offer(wire, CLASS_OF[letter], self.now, **options))
        return reasons

    def look(self):
        """Return what is queued as letters, in order."""
        return "".join(LETTERS[item[0]] for item in self.backlog.peek(OFF_MARK, OFF_MARK))

    def take(self, count=OFF_MARK):
        """Take up to `count` messages; return their letters."""
        items = self.backlog.peek(count, OFF_MARK)
        self.backlog.pass_messages(len(items))
        self.taken += items
        return "".join(LETTERS[item[0]] for item in items)

    def check(self):
        """Check accepted = taken + dropped + queued, and that lengths, sizes and age are those of what is there."""
        backlog = self.backlog
        items = backlog.peek(OFF_MARK, OFF_MARK)
        queued = total(queue.tally.frozen() for queue in backlog.queues)
        dropped = total(tally.frozen() for tally in (backlog.dropped or {}).values())
        accepted = backlog.accepted.frozen()
        for item in MessageClass:
            mine = [message[1] for message in items if message[0] is item]
            gone = [message[1] for message in self.taken if message[0] is item]
            assert queued.messages[item] == len(mine)
            assert queued.sizes_bytes[item] == sum(map(len, mine))
            assert accepted.messages[item] == len(mine) + len(gone) + dropped.messages[item]
            assert accepted.sizes_bytes[item] == sum(map(len, mine + gone)) + dropped.sizes_bytes[item]
        assert len(backlog) == len(items)
        assert backlog.size_bytes == sum(len(item[1]) for item in items)
        assert backlog.oldest_at == min((item[2] for item in items), default=None)


@pytest.fixture
def own():
    own = Own()
    yield own
    own.check()


def test_peek_when_both_queues_hold_messages_gives_control_first_within_bounds(own):
    own.offer("XCDC")
    assert own.look() == "CCXD"
    assert len(own.backlog.peek(3, 1000)) == 3
    assert len(own.backlog.peek(1000, 11)) == 2
    assert own.take(3) == "CCX"
    assert own.look() == "D"


def test_queues_when_empty_hold_no_memory(own):
    own.offer("CAX")
    own.take()
    assert own.backlog.queues == (NO_MESSAGES, NO_MESSAGES)
    assert [*NO_MESSAGES, *filter(None, NO_MESSAGES.tally)] == [], "what all share"
    assert (len(own.backlog), own.backlog.size_bytes, own.backlog.oldest_at) == (0, 0, None)


def test_oldest_when_queues_differ_is_the_older_of_the_two(own):
    own.offer("X")
    own.now += 1
    own.offer("C")
    assert own.backlog.oldest_at == 100.0
    own.take()
    own.now += 1
    own.offer("C")
    own.now += 1
    own.offer("X")
    assert own.backlog.oldest_at == 102.0


def test_mark_when_given_beats_the_class_but_for_control(own):
    own.mask = (1 << len(MessageClass)) - 1
    assert own.offer("K", droppable=False) == [None]
    assert own.offer("XH", droppable=True) == [DropReason.REFUSED] * 2
    assert own.offer("H") == [None]
    assert own.offer("C", droppable=True) == [None]
    assert own.look() == "CKH"


@pytest.mark.parametrize(
    ("text", "where", "left"),
    [
        pytest.param("AXAX", room(), "AXAX", id="all-fits"),
        pytest.param("AXAX", room(messages=2), "AX", id="messages"),
        pytest.param("AXAX", room(size=35), "XAX", id="bytes"),
        pytest.param("AXAX", room(since=100.5), "", id="age"),
        pytest.param("HAXAX", room(messages=3), "HAX", id="headers-take-room"),
        pytest.param("CAX", room(messages=0), "C", id="nothing-fits"),
    ],
)
def test_drop_oldest_when_room_is_given_keeps_the_newest_that_fit(own, text, where, left):
    own.offer(text)
    own.backlog.drop_oldest(where, DropReason.THINNED)
    assert own.look() == left


def test_drop_oldest_when_messages_may_not_be_dropped_leaves_them_in_place(own):
    own.offer("XC")
    own.offer("AX", droppable=False)
    own.offer("AX")
    own.backlog.drop_oldest(room(messages=3), DropReason.THINNED)
    assert own.look() == "CAXX"
    own.backlog.drop_oldest(room(messages=0), DropReason.THINNED)
    assert own.look() == "CAX"


def test_queue_when_filtered_keeps_order_and_counts():
    queue, lost = MessageQueue(), Tally()
    for number in range(300):  # long enough to change its shape
        item = HEADER if number % 3 else AUDIO
        queue.push((item, bytes([number % 256]) * 4, float(number)))
    queue.drop(lambda item: item[0] is AUDIO, lost)
    assert len(queue) == 200
    assert queue.size_bytes == 800
    assert queue.oldest_at == 1.0
    assert queue.tally.frozen().by_name() == {"header": 200}
    assert lost.frozen().by_name() == {"audio": 100}
    assert [item[2] for item in queue] == [float(number) for number in range(300) if number % 3]
    assert queue.pass_messages(1) == 1
    assert queue.oldest_at == 2.0
    assert queue.pass_messages(1000) == 199
    assert (len(queue), queue.size_bytes, any(queue.tally)) == (0, 0, False)


steps = st.one_of(
    st.tuples(st.just("offer"), st.text(LETTERS, max_size=6), st.sampled_from([None, None, True, False])),
    st.tuples(st.just("mask"), st.integers(0, 127), st.booleans()),
    st.tuples(st.just("take"), st.integers(0, 5), st.none()),
    st.tuples(st.just("thin"), st.integers(0, 8), st.none()),
    st.tuples(st.just("drop"), st.none(), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 6.0]), st.none()),
)


@given(st.lists(steps, max_size=40))
@settings(max_examples=200, deadline=None)
def test_backlog_for_any_history_keeps_its_books_and_order(history):
    own, held = Own(), False
    for step, argument, option in history:
        if step == "offer":
            own.offer(argument, droppable=option, held=held)
        elif step == "mask":
            own.mask, held = argument & DROPPABLE_MASK, option
        elif step == "take":
            own.take(argument)
        elif step == "thin":
            own.backlog.drop_oldest(room(messages=argument), DropReason.THINNED)
        elif step == "drop":
            own.backlog.drop_droppable(DropReason.REQUESTED)
        else:
            own.now += argument
        own.check()
        assert not any(tally[CONTROL] for tally in (own.backlog.dropped or {}).values())
    for control in (True, False):
        numbers = [wire[:4] for kind, wire, *_ in own.taken if (kind is CONTROL) is control]
        assert numbers == sorted(set(numbers))
