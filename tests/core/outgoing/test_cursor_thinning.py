"""A viewer's cursor in a log: thinning, what it keeps alive, a log that grows meanwhile, and random lives."""

from __future__ import annotations

import random

import pytest
from cursor_kit import LETTERS, ROOMY, Follower, Wire, alive
from flow_kit import AUDIO, CLASS_OF, KEY, RESTART, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import as_counts, total
from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, Headroom
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.outgoing.thinning import drop_droppable, thin_to_key_frame
from flowctl.reasons import DropReason

__all__ = ["alive"]  # a fixture

VIDEO_MASK = 1 << KEY | BROKEN_MASK


# --- thinning ----------------------------------------------------------------------------------------------------


def test_thin_when_again_before_the_headers_are_out_replaces_them():
    follower = Follower()
    follower.publish("KIKI")
    thin_to_key_frame(follower.cursor, Headroom(22, 99, 0, 0), follower.now)
    follower.publish("IKI")
    thin_to_key_frame(follower.cursor, Headroom(22, 99, 0, 0), follower.now)
    assert follower.queued == "HHKI"
    assert follower.dropped(DropReason.THINNED) == "HHKKIII"
    ((origin, _, number, _),) = parse(follower.cursor.peek(1, 1)[0][1])[0]
    assert (origin, number) == (RESTART, 5)


# --- what it keeps alive -----------------------------------------------------------------------------------------


def publish_wires(log, classes, count, size, now=100.0):
    for number in range(count):
        log.append(Wire(bytes(size)), CLASS_OF[classes[number % len(classes)]], now)


@pytest.mark.parametrize("refused", [DROPPABLE_MASK, DROPPABLE_MASK & ~VIDEO_MASK, BROKEN_MASK, 1 << AUDIO])
def test_log_when_a_viewer_passes_refusals_is_let_go(alive, refused):
    log = StreamLog()
    cursor = LogCursor(log, now=100.0)
    cursor.joining_to = None
    publish_wires(log, "KIAD", 4, 10)
    cursor.refuse(refused, DropReason.HELD, 100.0)
    for _ in range(50):
        publish_wires(log, "IADAX", 100, 10)
        cursor.poll(100.0)
        while items := cursor.peek(64, 10_000):
            cursor.pass_messages(len(items))
    log.drop_cache()
    assert alive() <= 1


@pytest.mark.parametrize("with_keys", [False, True])
def test_log_when_a_viewer_is_stuck_and_refused_nearly_all_is_not_kept_for_it(alive, with_keys):
    log = StreamLog()
    cursor = LogCursor(log, now=100.0)
    cursor.joining_to = None
    publish_wires(log, "KIAI", 8, 1000)
    cursor.refuse(DROPPABLE_MASK, DropReason.HELD, 100.0)
    expected = as_counts(cursor.balance())[2]
    most = 0
    for _ in range(40):
        publish_wires(log, "KIDA" if with_keys else "IDA", 100, 1000)
        cursor.poll(100.0, replace=True)
        cursor.compact()
        log.drop_cache()
        most = max(most, alive())
    assert most <= 8 + 1200
    assert as_counts(cursor.balance())[2] == expected
    assert cursor.load() == (8000, 8)
    cursor.refuse(0, DropReason.REFUSED, 100.0)
    assert [item[0] for item in cursor.peek(99, 10**6)] == [CLASS_OF[letter] for letter in "KIAIKIAI"]


def test_compact_when_sound_goes_on_keeps_order_and_restarts():
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    for _ in range(5):
        follower.publish("IIIIIIIIII", 50_000)
        follower.publish("AC")
        follower.cursor.compact()
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("K")
    for _ in range(3):
        follower.publish("I")
    follower.cursor.poll(follower.now)
    follower.cursor.compact()
    assert follower.queued == "CCCCCHHKIIIAAAAA"
    assert follower.take() == "ACACACACACrrKIII"
    assert follower.numbers == sorted(follower.numbers)


def test_compact_when_the_queue_is_worth_its_log_does_nothing():
    follower = Follower("K")
    follower.cursor.refuse(1 << MessageClass.DISPOSABLE, DropReason.REFUSED, follower.now)
    follower.publish("ID" * 20, 100_000)
    follower.cursor.compact()
    assert not follower.cursor.copies
    follower.take()
    follower.cursor.compact()
    assert not follower.cursor.copies


# --- a publisher on another thread -------------------------------------------------------------------------------


class HalfWayLog(StreamLog):
    """A log that lets a test act while a key frame is being appended, as another thread may."""

    __slots__ = ("act",)

    def _open_gop(self, entry, restart, now):
        super()._open_gop(entry, restart, now)
        self.act()


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("take", [False, True])
@pytest.mark.parametrize(
    "action",
    [
        lambda cursor, now: cursor.refuse(BROKEN_MASK, DropReason.REFUSED, now),
        lambda cursor, now: cursor.refuse(VIDEO_MASK, DropReason.REFUSED, now),
        lambda cursor, now: cursor.poll(now),
        lambda cursor, now: cursor.poll(now, replace=True),
        lambda cursor, now: thin_to_key_frame(cursor, Headroom(0, 0, 0, 0), now),
        lambda cursor, now: thin_to_key_frame(cursor, ROOMY, now),
        lambda cursor, now: drop_droppable(cursor, DropReason.REQUESTED, now),
        lambda cursor, now: None,
        lambda cursor, now: (cursor.load(), cursor.oldest_at(), as_counts(cursor.balance()), cursor.caught_up),
    ],
    ids=["refuse", "refuse keys", "poll", "replace", "thin", "thin roomy", "drop", "nothing", "look"],
)
def test_cursor_when_a_key_frame_is_half_appended_neither_misses_nor_repeats_it(action, take, waiting):
    follower = Follower()
    follower.log = HalfWayLog()
    follower.log.act = lambda: None
    follower.publish("KI")
    cursor = follower.cursor = LogCursor(follower.log, now=follower.now)
    cursor.joining_to = None
    if waiting:
        cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
        follower.publish("I")
        cursor.refuse(0, DropReason.REFUSED, follower.now)
    else:
        follower.publish("A")
    follower.log.act = lambda: (action(cursor, follower.now), follower.take() if take else None)
    key = follower.publish("K").sequence - 1
    follower.log.act = lambda: None
    cursor.poll(follower.now)
    cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IAKI")
    follower.take()
    assert follower.numbers == sorted(set(follower.numbers))
    assert follower.numbers[-2:] == [key + 3, key + 4]
    last = None if waiting else key - 2  # the last frame before, which was handed over
    for number in follower.numbers:
        item = follower.classes[number]
        if item in "KI":
            whole = last is not None and not any(letter in "KI" for letter in follower.classes[last + 1 : number])
            assert whole or (item == "K" and number in follower.restarted), f"{item}{number} after {last}"
            last = number
    accepted, dropped, queued = as_counts(cursor.balance())
    assert accepted.total_messages == len(follower.got) + total(dropped.values()).total_messages
    assert queued.total_messages == 0


# --- against a plain list ----------------------------------------------------------------------------------------


class PlainQueue:
    """The queue of one viewer as a list of its own, with every decision taken message by message.

    Without thinning and without losing key or inter frames, gates must come to the same.
    """

    def __init__(self):
        self.queue = []
        self.dropped = []
        self.mask = 0

    def offer(self, letter):
        (self.dropped if self.mask >> CLASS_OF[letter] & 1 else self.queue).append(letter)


harmless = [CLASS_OF[letter] for letter in "DAX"]
steps = st.one_of(
    st.tuples(st.just("publish"), st.text("CHKIDAX", max_size=8)),
    st.tuples(st.just("refuse"), st.sets(st.sampled_from(harmless))),
    st.tuples(st.just("take"), st.integers(0, 6)),
    st.tuples(st.just("drop"), st.none()),
)


@given(st.lists(steps, max_size=30))
@settings(max_examples=200, deadline=None)
def test_gates_for_any_history_do_what_a_plain_queue_does(history):
    follower, plain = Follower("K"), PlainQueue()
    follower.take()
    for step, argument in history:
        if step == "publish":
            follower.publish(argument)
            for letter in argument:
                plain.offer(letter)
        elif step == "refuse":
            plain.mask = sum(1 << item for item in argument)
            follower.cursor.refuse(plain.mask, DropReason.REFUSED, follower.now)
        elif step == "take":
            expected, plain.queue = "".join(plain.queue[:argument]), plain.queue[argument:]
            assert follower.take(argument) == expected
        elif not {"K", "I"} & set(plain.queue):
            plain.dropped += [letter for letter in plain.queue if letter in "DAX"]
            plain.queue = [letter for letter in plain.queue if letter not in "DAX"]
            drop_droppable(follower.cursor, DropReason.REQUESTED, follower.now)
        assert sorted(follower.queued) == sorted(plain.queue)
        assert sorted(follower.dropped()) == sorted(plain.dropped)
        assert follower.cursor.load() == (11 * len(plain.queue), len(plain.queue))


def test_cursor_over_a_long_random_life_keeps_its_books():
    random_source = random.Random(20110710)
    follower = Follower("K")
    offered = dict.fromkeys(LETTERS, 0)
    handed = dict(offered)
    follower.cursor = LogCursor(follower.log, now=follower.now)
    follower.cursor.joining_to = None
    for _ in range(3000):
        follower.now += random_source.random() / 4
        step = random_source.randrange(9)
        if step < 4:
            text = random_source.choices("CHKIIIDDAAAX", k=random_source.randrange(12))
            follower.publish(text, random_source.choice([11, 100, 1000]))
            for letter in text:
                offered[letter] += 1
        elif step == 4:
            mask = sum(1 << CLASS_OF[letter] for letter in random_source.sample("KIDAX", random_source.randrange(5)))
            follower.cursor.refuse(mask, DropReason.REFUSED, follower.now)
        elif step == 5:
            follower.cursor.poll(follower.now, replace=random_source.random() < 0.5)
        elif step == 6:
            room = Headroom(random_source.randrange(4000), random_source.randrange(12), follower.now - 1, 96)
            thin_to_key_frame(follower.cursor, room, follower.now)
        elif step == 7 and random_source.random() < 0.2:
            drop_droppable(follower.cursor, DropReason.REQUESTED, follower.now)
        for letter in follower.take(random_source.randrange(6)):
            handed["H" if letter == "r" else letter] += 1
        accepted, dropped, queued = as_counts(follower.cursor.balance())
        lost = total(dropped.values())
        for letter, item in CLASS_OF.items():
            assert accepted.messages[item] == handed[letter] + lost.messages[item] + queued.messages[item]
            assert letter == "H" or accepted.messages[item] == offered[letter]
    assert follower.numbers == sorted(set(follower.numbers))
    assert follower.cursor.restarts > 10
