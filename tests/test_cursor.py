"""A viewer's cursor in a log: its queue by subtraction, gates, key waits, thinning, joining, what it keeps alive."""

from __future__ import annotations

import gc
import random

import pytest
from flow_kit import AUDIO, CLASS_OF, CONTROL, HEADER, INTER, KEY, LOG, RESTART, frame, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.counts import total
from flowctl.cursor import LogCursor
from flowctl.flow import MessageClass
from flowctl.lane import Lane
from flowctl.limits import OFF_MARK
from flowctl.policy import BROKEN_MASK, DROPPABLE_MASK, KEY_WAIT_S, Room, refused_mask
from flowctl.reasons import DropReason
from flowctl.streamlog import StreamLog

ROOMY = Room(OFF_MARK, OFF_MARK, -float(OFF_MARK), 0)
LETTERS = "CHKIDAX"
VIDEO_MASK = 1 << KEY | BROKEN_MASK


class Follower:
    """A log with `text` on it, a cursor at its end, and a clock; what is handed over is kept as letters and numbers."""

    def __init__(self, text="", **options):
        self.now = 100.0
        self.log = StreamLog()
        self.classes = ""
        self.publish(text)
        self.cursor = LogCursor(self.log, now=self.now, **options)
        self.cursor.joining_to = None
        self.got = ""
        self.numbers = []
        self.restarted = set()  # key frames whose restart messages were handed over

    def publish(self, text, size=11):
        for letter in text:
            item = CLASS_OF[letter]
            restart = (frame(RESTART, HEADER, self.number), frame(RESTART, HEADER, self.number, 20))
            self.log.append(frame(LOG, item, self.number, size), item, self.now, restart=restart if item is KEY else ())
            self.number += 1
        return self.log.tail

    def take(self, count=OFF_MARK, budget_bytes=OFF_MARK):
        """Take up to `count` messages, asking as often as it needs; return their letters (r: restart message)."""
        letters = ""
        while count:
            items = self.cursor.peek(count, budget_bytes)
            if not items:
                break
            self.cursor.take(len(items))
            count -= len(items)
            for _, wire, _ in items:
                ((origin, message_class, number, _),) = parse(wire)[0]
                letters += "r" if origin == RESTART else LETTERS[message_class]
                if origin == LOG:
                    self.numbers.append(number)
                else:
                    self.restarted.add(number)
        self.got += letters
        return letters

    @property
    def queued(self):
        """What is queued, as letters in the order of classes."""
        counts = self.cursor.accounts()[2]
        return "".join(LETTERS[item] * counts.messages[item] for item in MessageClass)

    def dropped(self, reason=None):
        """What was dropped, for one reason or all, as letters in the order of classes."""
        dropped = self.cursor.accounts()[1]
        counts = total(dropped.values()) if reason is None else total(dropped[key] for key in dropped if key is reason)
        return "".join(LETTERS[item] * counts.messages[item] for item in MessageClass)


# --- the queue ---------------------------------------------------------------------------------------------------


def test_load_when_nothing_is_refused_is_what_lies_ahead():
    """Bytes and messages are the distance to the tail; the age is that of the message at the cursor."""
    follower = Follower()
    assert follower.cursor.load() == (0, 0)
    assert follower.cursor.oldest_at() is None
    assert follower.cursor.caught_up
    follower.publish("K", 100)
    follower.now = 105.0
    follower.publish("II", 50)
    assert follower.cursor.load() == (200, 3)
    assert follower.cursor.oldest_at() == 100.0
    assert follower.take(1) == "K"
    assert follower.cursor.oldest_at() == 105.0
    assert not follower.cursor.caught_up
    assert follower.take() == "II"
    assert follower.cursor.caught_up


def test_age_when_messages_are_older_than_the_viewer_counts_from_its_joining():
    """A viewer that is given a message of 8 s ago has waited for it since it came, not for 8 s."""
    log = StreamLog()
    entry = log.append(b"old", KEY, 92.0)
    cursor = LogCursor(log, now=100.0, start=entry)
    assert cursor.oldest_at() == 100.0
    assert cursor.peek(1, 1) == [(KEY, b"old", 100.0)]


def test_peek_when_bounded_returns_at_most_that():
    """Never more messages than asked for, the lane included; none after the budget of bytes is used."""
    follower = Follower(prefix=(b"1" * 10, b"2" * 10, b"3" * 10))
    follower.publish("KIII", 20)
    assert [len(item[1]) for item in follower.cursor.peek(2, OFF_MARK)] == [10, 10]
    assert [len(item[1]) for item in follower.cursor.peek(5, OFF_MARK)] == [10, 10, 10, 20, 20]
    assert [len(item[1]) for item in follower.cursor.peek(99, 11)] == [10, 10]
    assert [len(item[1]) for item in follower.cursor.peek(99, 31)] == [10, 10, 10, 20]
    assert follower.cursor.peek(0, OFF_MARK) == []
    assert follower.cursor.peek(OFF_MARK, 0) == []


def test_take_when_given_part_of_what_was_peeked_moves_just_that_far():
    """Messages are handed over one by one, whatever the steps."""
    follower = Follower(prefix=(frame(RESTART, HEADER, 0),))
    follower.publish("KIDAX")
    for letter in "rKIDAX":
        assert follower.take(1) == letter
    assert follower.cursor.caught_up
    with pytest.raises(AssertionError, match="more messages than the log holds"):
        follower.cursor.take(1)


def test_prefix_when_joining_is_counted_as_offered_and_handed_over_first():
    """Restart messages of a joiner are headers beside those of the log: offered, queued, then handed over."""
    follower = Follower(prefix=(b"meta", b"codec"))
    assert follower.cursor.accounts()[0].of(HEADER) == 2
    assert follower.queued == "HH"
    assert follower.cursor.load() == (9, 2)
    follower.cursor.take(2)
    assert follower.queued == ""
    assert follower.cursor.caught_up


# --- refusing ----------------------------------------------------------------------------------------------------


def test_refuse_when_a_class_is_dropped_takes_the_rest_in_order():
    """From the log's end on the class is refused, what was queued before is not; 0 accepts everything again."""
    follower = Follower()
    follower.publish("KDID")
    follower.cursor.refuse(1 << MessageClass.DISPOSABLE, DropReason.REFUSED, follower.now)
    follower.publish("DIDA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("DI")
    assert follower.queued == "KIIIDDDA"
    assert follower.cursor.load() == (8 * 11, 8)
    assert follower.dropped(DropReason.REFUSED) == "DD"
    assert follower.take() == "KDIDIADI"
    assert not follower.cursor.waiting_for_key
    assert follower.cursor.plain


def test_refuse_when_the_same_again_opens_no_second_gate():
    """Repeating what is in force costs nothing."""
    follower = Follower()
    follower.publish("KI")
    for _ in range(5):
        follower.publish("D")
        follower.cursor.refuse(1 << MessageClass.DISPOSABLE, DropReason.REFUSED, follower.now)
    assert len(follower.cursor._gates.ahead) == 1
    follower.publish("II")
    follower.cursor.refuse(1 << MessageClass.AUDIO, DropReason.REFUSED, follower.now)
    assert len(follower.cursor._gates.ahead) == 2
    assert follower.take() == "KIDII"


def test_refuse_inter_when_none_is_published_meanwhile_needs_no_key_frame():
    """A refusal that cost no frame ends without a wait: the references are whole."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    assert not follower.cursor.waiting_for_key
    follower.publish("AD")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IA")
    assert follower.take() == "AIA"
    assert follower.dropped() == "D"
    assert follower.cursor.restarts == 0


def test_refuse_inter_when_one_is_lost_waits_for_headers_and_a_key_frame():
    """Sound goes on; frames come again with the next key frame, its restart messages right before it."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("IA")
    assert follower.cursor.waiting_for_key
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IDAKIDA")
    assert follower.take() == "AArrKIDA"
    assert follower.cursor.restarts == 1
    assert not follower.cursor.waiting_for_key
    assert follower.dropped(DropReason.REFUSED) + follower.dropped(DropReason.KEY_WAIT) == "IID"
    assert follower.cursor.plain


def test_key_frame_when_awaited_and_not_polled_still_ends_the_wait_in_its_place():
    """A key frame published between two looks, on another thread, never passes without its headers."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("I")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    for text in ("IA", "K", "I"):
        follower.publish(text)
        follower.take(1)
    follower.take()
    assert follower.got == "ArrKI"


def test_key_frames_when_only_they_get_through_each_come_with_headers():
    """While inter frames are refused and the viewer keeps up, each key frame is a restart; sound keeps its place."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    for _ in range(3):
        follower.publish("IAKIA")
        follower.cursor.poll(follower.now)
    assert follower.take() == "ArrKAArrKAArrKA"
    assert follower.cursor.restarts == 3


def test_key_frames_when_several_come_to_a_blocked_viewer_the_newest_replaces_what_is_queued():
    """With only key frames getting through and nothing going out, the queue is one restart, not a row of them."""
    follower = Follower("K")
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    for _ in range(4):
        follower.publish("IACKIA")
        follower.cursor.poll(follower.now, replace=True)
    assert follower.queued == "CCCCHHKA"
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    assert follower.take() == "CCCCrrKA"
    assert follower.cursor.waiting_for_key
    follower.publish("IKI")
    assert follower.take() == "rrKI"


def test_wait_when_key_frames_are_refused_too_is_for_the_next_after_that():
    """Key frames that were refused cure nothing, however long ago they came."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(DROPPABLE_MASK, DropReason.HELD, follower.now)
    follower.publish("IKIAHC")
    follower.cursor.poll(follower.now)
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IAK")
    assert follower.take() == "HCArrK"
    assert follower.dropped(DropReason.HELD) == "KIIA"


def test_wait_when_no_key_frame_comes_ends_after_ten_seconds_and_is_counted():
    """The wait has an end; the last headers come then, young, and frames flow again."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("I")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.now += KEY_WAIT_S - 0.1
    follower.publish("IA")
    assert follower.cursor.poll(follower.now) is False
    follower.now += 0.1
    assert follower.cursor.poll(follower.now) is True
    follower.take()
    follower.publish("ID")
    assert follower.cursor.oldest_at() == follower.now
    assert follower.take() == "ID"
    assert follower.got == "ArrID"
    assert (follower.cursor.key_waits_expired, follower.cursor.restarts) == (1, 0)
    assert follower.cursor.plain


def test_wait_when_groups_are_long_lasts_two_of_them():
    """A stream with a key frame each 20 s is waited for 40 s."""
    follower = Follower("K")
    follower.now += 20
    follower.publish("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("I")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.now += 39.9
    assert follower.cursor.poll(follower.now) is False
    follower.now += 0.1
    assert follower.cursor.poll(follower.now) is True


def test_wait_when_the_policy_still_refuses_inter_frames_does_not_expire():
    """Giving up the wait would not bring a frame; it ends once the policy would let some through."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("I")
    follower.now += 60
    assert follower.cursor.poll(follower.now) is False
    follower.publish("I")
    assert follower.take() == ""
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    assert follower.cursor.poll(follower.now) is True
    assert follower.cursor.key_waits_expired == 1


def test_sound_alone_when_frames_are_refused_needs_no_key_frame():
    """A policy for video does nothing to a log without any, and leaves nothing behind."""
    follower = Follower("AA")
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("AA")
    assert not follower.cursor.waiting_for_key
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    assert follower.take() == "AA"
    assert follower.cursor.plain


def test_video_when_it_begins_while_refused_is_waited_for():
    """Inter frames of a video that began during the refusal are lost like others."""
    follower = Follower("A")
    follower.cursor.refuse(VIDEO_MASK, DropReason.REFUSED, follower.now)
    follower.publish("KIA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IKI")
    assert follower.take() == "ArrKI"


def test_key_refused_when_inter_frames_are_not_still_breaks_references():
    """A policy that drops key frames alone must not make the viewer decode against a wrong one."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(1 << KEY, DropReason.REFUSED, follower.now)
    follower.publish("IK")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IKI")
    assert follower.take() == "rrKI"


# --- thinning ----------------------------------------------------------------------------------------------------


def test_thin_when_a_later_key_frame_fits_skips_to_the_first_that_does():
    """Everything before that key frame goes, sound included; its headers come first."""
    follower = Follower()
    follower.publish("KIAIKIAKIA")
    follower.cursor.thin_to_key_frame(Room(6 * 11, 99, 0, 0), follower.now)
    assert follower.queued == "HHKKIIAA"
    assert follower.take() == "rrKIAKIA"
    assert follower.dropped(DropReason.THINNED) == "KIIA"
    assert follower.cursor.restarts == 1
    assert follower.cursor.plain


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (Room(3 * 11, 99, 0.0, 0), "rrKIA"),
        (Room(OFF_MARK, 3, 0.0, 0), "rrKIA"),
        (Room(OFF_MARK, 99, 101.0, 0), "rrKIA"),
        (Room(3 * 11 + 3 * 96, 99, 0.0, 96), "rrKIA"),
        (ROOMY, "KIIKIA"),
    ],
    ids=["bytes", "messages", "age", "overhead", "no limit"],
)
def test_thin_for_each_axis_takes_what_fits(room, expected):
    """Bytes with overhead, messages and age all have a say in what may stay."""
    follower = Follower()
    follower.publish("KII")
    follower.now += 1
    follower.publish("KIA")
    follower.cursor.thin_to_key_frame(room, follower.now)
    assert follower.take() == expected


def test_thin_when_the_newest_group_is_too_large_keeps_its_key_frame_and_sound():
    """The picture stands and the sound goes on until the next key frame."""
    follower = Follower()
    follower.publish("KIA")
    follower.publish("K", 50)
    follower.publish("IAXIAD", 50)
    follower.cursor.thin_to_key_frame(Room(150, 99, 0, 0), follower.now)
    assert follower.queued == "HHKAA"
    follower.publish("IDXA")
    follower.publish("KIX")
    assert follower.take() == "rrKAAArrKIX"
    assert follower.cursor.restarts == 2


def test_thin_when_a_key_frame_alone_is_too_large_waits_for_the_next_one():
    """With limits below one key frame nothing is kept: an honest gap instead of half a picture."""
    follower = Follower()
    follower.publish("K", 5000)
    follower.publish("IAC")
    follower.cursor.thin_to_key_frame(Room(1000, 99, 0, 0), follower.now)
    assert follower.queued == "C"
    assert follower.cursor.waiting_for_key
    follower.publish("IAXKI")
    assert follower.take() == "CrrKI"
    assert follower.dropped(DropReason.KEY_WAIT) == "IAX"


def test_thin_when_nothing_is_queued_breaks_nothing():
    """A message in flight may be what reached the limit: with nothing lost there is nothing to wait for."""
    follower = Follower("KI")
    follower.take()
    follower.cursor.thin_to_key_frame(Room(-1, 0, 0, 0), follower.now)
    follower.publish("IA")
    assert follower.take() == "IA"
    assert follower.dropped() == ""


def test_thin_when_only_sound_is_queued_drops_it_without_a_wait():
    """In a stream with video, sound queued alone goes without costing the pictures after it."""
    follower = Follower("KI")
    follower.take()
    follower.publish("AAA")
    follower.cursor.thin_to_key_frame(Room(11, 99, 0, 0), follower.now)
    follower.publish("IA")
    assert follower.take() == "IA"
    assert follower.dropped() == "AAA"


def test_thin_while_waiting_for_a_key_frame_keeps_waiting_for_the_same():
    """Thinning again in a wait drops what has gathered, and the next key frame still ends it."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("IAA")
    follower.cursor.thin_to_key_frame(Room(11, 99, 0, 0), follower.now)
    assert follower.queued == ""
    follower.publish("IA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IAKIA")
    assert follower.take() == "rrKIA"


def test_thin_when_the_awaited_key_frame_has_come_counts_it():
    """A key frame that was waited for, and not looked at yet, is one to skip to."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("IAA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("KI")
    follower.cursor.thin_to_key_frame(Room(50, 99, 0, 0), follower.now)
    assert follower.take() == "rrKI"
    assert follower.dropped(DropReason.THINNED) == "AA"


def test_thin_when_repeated_at_the_same_key_frame_sends_no_headers_twice():
    """Who stands at the key frame already has its headers."""
    follower = Follower()
    follower.publish("KIKI")
    for _ in range(3):
        follower.cursor.thin_to_key_frame(Room(22, 99, 0, 0), follower.now)
    assert follower.take() == "rrKI"
    assert follower.cursor.restarts == 1


def test_thin_when_again_before_the_headers_are_out_replaces_them():
    """Headers of a restart that never happened are superseded, and counted."""
    follower = Follower()
    follower.publish("KIKI")
    follower.cursor.thin_to_key_frame(Room(22, 99, 0, 0), follower.now)
    follower.publish("IKI")
    follower.cursor.thin_to_key_frame(Room(22, 99, 0, 0), follower.now)
    assert follower.queued == "HHKI"
    assert follower.dropped(DropReason.THINNED) == "HHKKIII"
    ((origin, _, number, _),) = parse(follower.cursor.peek(1, 1)[0][1])[0]
    assert (origin, number) == (RESTART, 5)


def test_thin_audio_alone_drops_the_oldest_and_keeps_headers():
    """Without video the oldest sound goes until the rest fits; no wait, no gap after it."""
    follower = Follower()
    follower.publish("HAAAAA")
    follower.cursor.thin_to_key_frame(Room(OFF_MARK, 2, 0, 0), follower.now)
    assert follower.take() == "HAA"
    assert follower.numbers == [0, 4, 5]
    assert follower.dropped(DropReason.THINNED) == "AAA"
    assert follower.cursor.plain


def test_thin_audio_alone_when_all_fits_drops_nothing():
    """The room is a limit, not an order."""
    follower = Follower()
    follower.publish("AAA")
    follower.cursor.thin_to_key_frame(Room(33, 3, 0, 0), follower.now)
    assert follower.take() == "AAA"


def test_drop_droppable_when_frames_are_lost_waits_and_headers_are_superseded():
    """All that may go goes; control stays; the headers of the next restart replace those that were queued."""
    follower = Follower()
    follower.publish("KHICADX")
    follower.cursor.drop_droppable(DropReason.REQUESTED, follower.now)
    assert follower.queued == "C"
    assert follower.dropped(DropReason.REQUESTED) == "HKIDAX"
    follower.publish("IAKI")
    assert follower.take() == "CArrKI"


def test_drop_droppable_when_no_frame_is_lost_keeps_headers():
    """Without a loss no restart follows, so the headers that are queued must arrive."""
    follower = Follower("KI")
    follower.take()
    follower.publish("AHDXC")
    follower.cursor.drop_droppable(DropReason.REQUESTED, follower.now)
    follower.publish("IA")
    assert follower.take() == "HCIA"


# --- joining -----------------------------------------------------------------------------------------------------


def test_joining_when_it_lasts_refuses_nothing_and_counts_nothing_against_limits():
    """The cache that was given at once is an allowance; refusals begin when joining ends."""
    log = StreamLog()
    key = log.append(b"k" * 100, KEY, 99.0, restart=(b"meta", b"codec"))
    log.append(b"i" * 50, INTER, 99.5)
    cursor = LogCursor(log, now=100.0, start=key, prefix=key.gop.restart)
    assert cursor.load() == cursor.allowance() == (159, 4)
    assert cursor.oldest_counted_at() is None
    cursor.refuse(BROKEN_MASK, DropReason.REFUSED, 100.0)
    log.append(b"i" * 50, INTER, 101.0)
    assert cursor.load() == (209, 5)
    assert cursor.allowance() == (159, 4)
    assert cursor.oldest_counted_at() == 101.0
    assert not cursor.plain
    cursor.take(3)
    assert cursor.allowance() == (50, 1)
    assert not cursor.cache_taken
    cursor.take(1)
    assert cursor.allowance() == (0, 0)
    assert cursor.cache_taken
    cursor.end_joining(DropReason.REFUSED, 101.0)
    log.append(b"i" * 50, INTER, 101.0)
    assert cursor.load() == (50, 1)


def test_joining_when_there_is_no_key_frame_waits_for_one():
    """A viewer that comes between key frames gets sound, then headers and the next key frame."""
    follower = Follower("KIA", wait_for_key=True)
    assert follower.cursor.waiting_for_key
    follower.publish("IADKIA")
    assert follower.take() == "ArrKIA"
    assert follower.dropped(DropReason.KEY_WAIT) == "ID"


# --- leaving and ending ------------------------------------------------------------------------------------------


def test_finish_when_called_ends_at_what_was_published():
    """What is queued stays, what comes after is for nobody here, and key frames after it end no wait."""
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("IA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.cursor.finish(follower.now)
    follower.publish("IAKI")
    assert follower.cursor.poll(follower.now + 60) is False
    follower.cursor.refuse(DROPPABLE_MASK, DropReason.REFUSED, follower.now)
    follower.cursor.thin_to_key_frame(ROOMY, follower.now)
    follower.cursor.finish(follower.now)
    accepted, dropped, queued = follower.cursor.accounts()
    assert accepted.total_messages == 2
    assert queued.total_messages + total(dropped.values()).total_messages == 2
    follower.take()
    assert follower.cursor.caught_up


def test_finish_when_an_awaited_key_frame_has_come_hands_it_over_with_headers():
    """A key frame that was published before the end is still for this viewer, and complete."""
    follower = Follower("KI", wait_for_key=True)
    follower.publish("IAKI")
    follower.cursor.finish(follower.now)
    follower.publish("KI")
    assert follower.take() == "ArrKI"
    assert follower.cursor.caught_up


@pytest.mark.parametrize("state", ["plain", "lane", "gates", "wait", "expired", "joining", "finished"])
def test_drop_everything_in_any_state_leaves_nothing_uncounted(state):
    """Whatever the cursor was doing, all it had not handed over is dropped, and the log may go on without it."""
    follower = Follower("K")
    if state == "joining":
        follower.cursor.joining_to = follower.log.tail
    if state in ("gates", "wait", "expired"):
        follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
        follower.publish("IA")
    if state in ("wait", "expired"):
        follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
        follower.take()
    if state == "expired":
        follower.cursor.poll(follower.now + 20)
    if state == "lane":
        follower.publish("ICKI")
        follower.cursor.thin_to_key_frame(Room(22, 2, 0, 0), follower.now)
    follower.publish("CHIA")
    if state == "finished":
        follower.cursor.finish(follower.now)
    follower.cursor.drop_everything(DropReason.UNFOLLOWED)
    taken = len(follower.got)
    follower.publish("CHKIA")
    accepted, dropped, queued = follower.cursor.accounts()
    assert queued.total_messages == 0
    assert accepted.total_messages == taken + total(dropped.values()).total_messages
    assert follower.cursor.load() == (0, 0)


# --- what it keeps alive -----------------------------------------------------------------------------------------


class Wire(bytes):
    """A message that knows how many of its kind are alive."""

    __slots__ = ()
    alive = 0

    def __new__(cls, size):
        Wire.alive += 1
        return super().__new__(cls, size)

    def __del__(self):
        Wire.alive -= 1


@pytest.fixture
def alive():
    """Return how many `Wire` messages live; the cycle collector is off, so only reference counts free them."""
    gc.collect()
    gc.disable()
    Wire.alive = 0
    yield lambda: Wire.alive
    gc.enable()


def publish_wires(log, classes, count, size, now=100.0):
    for number in range(count):
        log.append(Wire(size), CLASS_OF[classes[number % len(classes)]], now)


@pytest.mark.parametrize("refused", [DROPPABLE_MASK, DROPPABLE_MASK & ~VIDEO_MASK, BROKEN_MASK, 1 << AUDIO])
def test_log_when_a_viewer_passes_refusals_is_let_go(alive, refused):
    """Neither gates behind the cursor nor a wait for a key frame hold what the viewer has passed."""
    log = StreamLog()
    cursor = LogCursor(log, now=100.0)
    cursor.joining_to = None
    publish_wires(log, "KIAD", 4, 10)
    cursor.refuse(refused, DropReason.HELD, 100.0)
    for _ in range(50):
        publish_wires(log, "IADAX", 100, 10)
        cursor.poll(100.0)
        while items := cursor.peek(64, 10_000):
            cursor.take(len(items))
    log.drop_cache()
    assert alive() <= 1


@pytest.mark.parametrize("with_keys", [False, True])
def test_log_when_a_viewer_is_stuck_and_refused_nearly_all_is_not_kept_for_it(alive, with_keys):
    """A viewer that stands still keeps the few messages it will get, not the megabytes that it is refused."""
    log = StreamLog()
    cursor = LogCursor(log, now=100.0)
    cursor.joining_to = None
    publish_wires(log, "KIAI", 8, 1000)
    cursor.refuse(DROPPABLE_MASK, DropReason.HELD, 100.0)
    expected = cursor.accounts()[2]
    most = 0
    for _ in range(40):
        publish_wires(log, "KIDA" if with_keys else "IDA", 100, 1000)
        cursor.poll(100.0, replace=True)
        cursor.compact()
        log.drop_cache()
        most = max(most, alive())
    assert most <= 8 + 1200
    assert cursor.accounts()[2] == expected
    assert cursor.load() == (8000, 8)
    cursor.refuse(0, DropReason.REFUSED, 100.0)
    assert [item[0] for item in cursor.peek(99, 10**6)] == [CLASS_OF[letter] for letter in "KIAIKIAI"]


def test_compact_when_sound_goes_on_keeps_order_and_restarts():
    """Copying the queue out of the log changes nothing of what is handed over, restart messages included."""
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
    """A viewer that is refused little keeps reading from the log."""
    follower = Follower("K")
    follower.cursor.refuse(1 << MessageClass.DISPOSABLE, DropReason.REFUSED, follower.now)
    follower.publish("ID" * 20, 100_000)
    follower.cursor.compact()
    assert follower.cursor._lane is None
    follower.take()
    follower.cursor.compact()
    assert follower.cursor._lane is None


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
        lambda cursor, now: cursor.thin_to_key_frame(Room(0, 0, 0, 0), now),
        lambda cursor, now: cursor.thin_to_key_frame(ROOMY, now),
        lambda cursor, now: cursor.drop_droppable(DropReason.REQUESTED, now),
        lambda cursor, now: None,
        lambda cursor, now: (cursor.load(), cursor.oldest_at(), cursor.accounts(), cursor.caught_up),
    ],
    ids=["refuse", "refuse keys", "poll", "replace", "thin", "thin roomy", "drop", "nothing", "look"],
)
def test_cursor_when_a_key_frame_is_half_appended_neither_misses_nor_repeats_it(action, take, waiting):
    """Whatever a viewer's thread does at that instant: the key frame comes once, with headers if a frame was lost."""
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
    print(follower.got, follower.numbers)
    assert follower.numbers == sorted(set(follower.numbers))
    assert follower.numbers[-2:] == [key + 3, key + 4]
    last = None if waiting else key - 2  # the last frame before, which was handed over
    for number in follower.numbers:
        item = follower.classes[number]
        if item in "KI":
            whole = last is not None and not any(letter in "KI" for letter in follower.classes[last + 1 : number])
            assert whole or (item == "K" and number in follower.restarted), f"{item}{number} after {last}"
            last = number
    accepted, dropped, queued = cursor.accounts()
    assert accepted.total_messages == len(follower.got) + total(dropped.values()).total_messages
    assert queued.total_messages == 0


# --- the lane ----------------------------------------------------------------------------------------------------


def test_lane_when_filtered_keeps_order_and_counts():
    """What is thrown away is counted by class; the rest keeps its order, sizes and age."""
    lane = Lane()
    for number, letter in enumerate("CHAHC"):
        lane.push(CLASS_OF[letter], bytes(number + 1), float(number))
    lost = Lane().tally
    assert lane.has_any_but((CONTROL, HEADER))
    lane.drop_all_but((CONTROL, HEADER), lost)
    assert not lane.has_any_but((CONTROL, HEADER))
    assert ([item[2] for item in lane], lane.size_bytes, len(lane)) == ([0.0, 1.0, 3.0, 4.0], 1 + 2 + 4 + 5, 4)
    assert (lost.messages[AUDIO], lost.sizes[AUDIO]) == (1, 3)
    lane.pop()
    assert (lane.oldest_at, lane.size_bytes) == (1.0, 11)
    assert (lane.tally.messages[CONTROL], lane.tally.sizes[CONTROL]) == (1, 5)


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
    """Subtraction per gate gives the same queue, the same losses and the same order as deciding one by one."""
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
            follower.cursor.drop_droppable(DropReason.REQUESTED, follower.now)
        assert sorted(follower.queued) == sorted(plain.queue)
        assert sorted(follower.dropped()) == sorted(plain.dropped)
        assert follower.cursor.load() == (11 * len(plain.queue), len(plain.queue))


def test_cursor_over_a_long_random_life_keeps_its_books():
    """Thousands of steps of everything at once: offered is handed over, dropped or queued, by class."""
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
            room = Room(random_source.randrange(4000), random_source.randrange(12), follower.now - 1, 96)
            follower.cursor.thin_to_key_frame(room, follower.now)
        elif step == 7 and random_source.random() < 0.2:
            follower.cursor.drop_droppable(DropReason.REQUESTED, follower.now)
        for letter in follower.take(random_source.randrange(6)):
            handed["H" if letter == "r" else letter] += 1
        accepted, dropped, queued = follower.cursor.accounts()
        lost = total(dropped.values())
        for letter, item in CLASS_OF.items():
            assert accepted.messages[item] == handed[letter] + lost.messages[item] + queued.messages[item]
            assert letter == "H" or accepted.messages[item] == offered[letter]
    assert follower.numbers == sorted(set(follower.numbers))
    assert follower.cursor.restarts > 10


def test_masks_when_used_here_leave_control_and_headers_alone():
    """Whatever a policy says, the log's control messages and headers are nobody's to refuse."""

    class DropsAll:
        def decide(self, state, message_class):
            from flowctl.policy import Verdict

            return Verdict.DROP

    assert refused_mask(DropsAll(), 0) == DROPPABLE_MASK
    assert not DROPPABLE_MASK & (1 << CONTROL | 1 << HEADER)
