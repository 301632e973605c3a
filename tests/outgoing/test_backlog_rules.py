"""A Sender's own queue, rule by rule: lanes, marks, key waits, thinning; and its books over any history."""

from __future__ import annotations

import pytest
from flow_kit import AUDIO, CLASS_OF, CONTROL, DATA, DISPOSABLE, HEADER, INTER, KEY
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.flow.counts import total
from flowctl.flow.limits import OFF_MARK
from flowctl.flow.policy import BROKEN_MASK, DROPPABLE_MASK, KEY_WAIT_S, Room
from flowctl.flow.state import MessageClass
from flowctl.outgoing.backlog import Backlog
from flowctl.reasons import DropReason

LETTERS = "CHKIDAX"


class Queue:
    """A backlog with a clock and a mask; messages are letters, their numbers the order of offering."""

    def __init__(self):
        self.backlog = Backlog()
        self.now = 100.0
        self.mask = 0
        self.number = 0

    def offer(self, text, size=10, **options):
        """Offer one message per letter; return the reasons for which they were refused."""
        options = {"mask": self.mask, "droppable": None, "track": 0} | options
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
        self.backlog.take(len(items))
        return "".join(LETTERS[item[0]] for item in items)

    def thin(self, messages=OFF_MARK, size=OFF_MARK):
        """Thin to what fits into so many messages and bytes."""
        self.backlog.thin_to_key_frame(Room(size, messages, -float(OFF_MARK), 0), self.now)
        return self.look()

    def lose_an_inter_frame(self):
        self.mask = BROKEN_MASK
        assert self.offer("I") == [DropReason.REFUSED]
        self.mask = 0

    def check(self):
        """Check accepted = taken + dropped + queued, and that lengths, sizes and age are those of what is there."""
        backlog = self.backlog
        items = backlog.peek(OFF_MARK, OFF_MARK)
        queued = backlog.queued()
        for item in MessageClass:
            assert queued.messages[item] == sum(kind is item for kind, _, _ in items)
            assert queued.sizes_bytes[item] == sum(len(wire) for kind, wire, _ in items if kind is item)
        assert len(backlog) == len(items)
        assert backlog.size_bytes == sum(len(wire) for _, wire, _ in items)
        assert backlog.oldest_at == min((since for _, _, since in items), default=None)


@pytest.fixture
def queue():
    queue = Queue()
    yield queue
    queue.check()


def test_lanes_when_empty_hold_no_memory(queue):
    """An idle peer keeps no empty deques: the block of one alone is 600 bytes."""
    queue.offer("CKI")
    queue.take()
    assert (queue.backlog.control, queue.backlog._media) == (None, None)
    assert (len(queue.backlog), queue.backlog.size_bytes, queue.backlog.oldest_at) == (0, 0, None)


def test_oldest_when_lanes_differ_is_the_older_of_the_two(queue):
    """The age is that of the oldest message, in whatever lane."""
    queue.offer("K")
    queue.now += 1
    queue.offer("C")
    assert queue.backlog.oldest_at == 100.0
    queue.take()
    queue.now += 1
    queue.offer("C")
    queue.now += 1
    queue.offer("K")
    assert queue.backlog.oldest_at == 102.0


def test_mark_when_given_beats_the_class_but_for_control(queue):
    """The application decides what may be dropped; control never is."""
    queue.mask = (1 << len(MessageClass)) - 1
    assert queue.offer("K", droppable=False) == [None]
    assert queue.offer("XH", droppable=True) == [DropReason.REFUSED] * 2
    assert queue.offer("H") == [None]
    assert queue.offer("C", droppable=True) == [None]
    assert queue.look() == "CKH"


def test_disposable_frame_when_lost_breaks_nothing(queue):
    """No other frame refers to it."""
    queue.mask = 1 << DISPOSABLE
    assert queue.offer("KDI") == [None, DropReason.REFUSED, None]
    assert not queue.backlog.waiting_for_key


def test_header_when_refused_is_still_the_one_of_the_restart(queue):
    """The newest header counts, whether it was sent or not: the stream has moved on to it."""
    queue.offer("H", size=20)
    queue.mask = DROPPABLE_MASK | 1 << HEADER
    assert queue.offer("H", size=30, droppable=True) == [DropReason.REFUSED]
    queue.lose_an_inter_frame()
    queue.offer("K")
    assert [len(wire) for _, wire, _ in queue.backlog.peek(99, 999)] == [20, 30, 10]


def test_wait_when_it_has_expired_is_over(queue):
    """Headers come once, before the first frame that is taken again; then frames flow as before."""
    queue.offer("HK")
    queue.take()
    queue.lose_an_inter_frame()
    queue.now += KEY_WAIT_S - 0.1
    assert queue.offer("IA") == [DropReason.KEY_WAIT, None]
    queue.now += 0.1
    assert queue.offer("IDID") == [None] * 4
    assert queue.look() == "AHIDID"
    assert (queue.backlog.key_waits_expired, queue.backlog.restarts) == (1, 0)


def test_wait_when_frames_are_refused_by_the_policy_does_not_expire(queue):
    """The clock of the wait gives way to the policy."""
    queue.mask = BROKEN_MASK
    queue.offer("KI")
    queue.now += 60
    assert queue.offer("I") == [DropReason.REFUSED]
    assert queue.backlog.key_waits_expired == 0


def test_thin_when_undroppable_messages_fill_the_room_counts_them(queue):
    """What stays in any case takes its part of the room."""
    queue.offer("AXA", droppable=False)
    queue.offer("KIKI")
    assert queue.thin(messages=5) == "AXAKI"
    assert queue.thin(messages=3) == "AXA"


def test_thin_when_the_newest_group_is_too_large_keeps_its_key_frame_and_sound(queue):
    """The picture stands and the sound goes on; frames after it wait for the next key frame."""
    queue.offer("HKIAK")
    queue.offer("IDXA", size=50)
    assert queue.thin(size=80) == "HHKA"
    assert queue.backlog.waiting_for_key
    assert queue.offer("IK") == [DropReason.KEY_WAIT, None]
    assert queue.look() == "HHKAHK"


def test_thin_when_no_key_frame_fits_waits_for_the_next(queue):
    """Limits below one key frame leave nothing but what may not be dropped."""
    queue.offer("HK", size=500)
    queue.offer("IA")
    assert queue.thin(size=100) == "H"
    assert queue.offer("IA") == [DropReason.KEY_WAIT, None]


def test_thin_when_a_later_frame_was_refused_keeps_waiting(queue):
    """A key frame that is queued already does not cure a loss behind it."""
    queue.offer("KIK")
    queue.lose_an_inter_frame()
    assert queue.thin(messages=1) == "K"
    assert queue.offer("I") == [DropReason.KEY_WAIT]


def test_thin_when_it_is_a_restart_keeps_the_age_of_the_key_frame(queue):
    """Headers that are put before an old key frame do not make the queue look young."""
    queue.offer("HKIK")
    queue.take(1)
    queue.now += 5
    assert queue.thin(messages=1) == "HK"
    assert queue.backlog.oldest_at == 100.0


def test_drop_droppable_when_nothing_may_be_dropped_changes_nothing(queue):
    """Control, headers and marked messages stay, and nobody waits."""
    queue.offer("CH")
    queue.offer("I", droppable=False)
    queue.backlog.drop_droppable(DropReason.REQUESTED, queue.now)
    assert queue.look() == "CHI"
    assert queue.backlog.dropped() == {}
    assert not queue.backlog.waiting_for_key


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
    """Accepted is taken, dropped or queued, by class and in bytes; control is never dropped; order is kept."""
    queue, held, taken = Queue(), False, []
    for step, argument, option in history:
        if step == "offer":
            queue.offer(argument, droppable=option, held=held)
        elif step == "mask":
            queue.mask, held = argument & DROPPABLE_MASK, option
        elif step == "take":
            items = queue.backlog.peek(argument, OFF_MARK)
            queue.backlog.take(len(items))
            taken += items
        elif step == "thin":
            queue.thin(messages=argument)
        elif step == "drop":
            queue.backlog.drop_droppable(DropReason.REQUESTED, queue.now)
        else:
            queue.now += argument
        queue.check()
        dropped = total(queue.backlog.dropped().values())
        assert dropped.messages[CONTROL] == 0
        for item in MessageClass:
            sent = sum(kind is item for kind, _, _ in taken)
            assert queue.backlog.taken.messages[item] == sent
            accounted = sent + dropped.messages[item] + queue.backlog.queued().messages[item]
            assert queue.backlog.accepted.messages[item] == accounted
    for lane in ((CONTROL,), (KEY, INTER, DISPOSABLE, AUDIO, DATA)):
        numbers = [wire[:4] for kind, wire, _ in taken if kind in lane]
        assert numbers == sorted(set(numbers))


def test_key_frame_when_it_ends_a_loss_by_thinning_has_no_older_sound_before_it(queue):
    """Sound offered after the queue was thrown away and still waiting is dropped: headers, key frame, then sound."""
    queue.offer("HKIIA")
    assert queue.thin(messages=0) == "H"
    queue.take()
    queue.offer("AAX")
    queue.offer("A", droppable=False)
    queue.offer("KAI")
    assert queue.look() == "XAHKAI"
    assert queue.backlog.dropped()[DropReason.THINNED].messages[AUDIO] == 3


def test_key_frame_when_it_ends_a_refusal_leaves_the_sound(queue):
    """Where frames were refused and nothing thrown away, sound stays in its place: a viewer may have muted pictures."""
    queue.offer("HK")
    queue.lose_an_inter_frame()
    queue.offer("AKA")
    assert queue.look() == "HKAHKA"
