"""A viewer's cursor in a log: its queue, refusing and key waits, joining, return to live, ending; in any steps."""

from __future__ import annotations

import pytest
from cursor_kit import ROOMY, Follower
from flow_kit import AUDIO, DISPOSABLE, HEADER, INTER, KEY, LOG, RESTART, Published, frame, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import as_counts, total
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, KEY_WAIT_S, Room
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.reasons import DropReason
from flowctl.testing import ManualGroup

VIDEO_MASK = 1 << KEY | BROKEN_MASK


# --- the queue ---------------------------------------------------------------------------------------------------


def test_load_when_nothing_is_refused_is_what_lies_ahead():
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
    log = StreamLog()
    entry = log.append(b"old", KEY, 92.0)
    cursor = LogCursor(log, now=100.0, start=entry)
    assert cursor.oldest_at() == 100.0
    assert cursor.peek(1, 1) == [(KEY, b"old", 100.0)]


def test_peek_when_bounded_returns_at_most_that():
    follower = Follower(prefix=(b"1" * 10, b"2" * 10, b"3" * 10))
    follower.publish("KIII", 20)
    assert [len(item[1]) for item in follower.cursor.peek(2, OFF_MARK)] == [10, 10]
    assert [len(item[1]) for item in follower.cursor.peek(5, OFF_MARK)] == [10, 10, 10, 20, 20]
    assert [len(item[1]) for item in follower.cursor.peek(99, 11)] == [10, 10]
    assert [len(item[1]) for item in follower.cursor.peek(99, 31)] == [10, 10, 10, 20]
    assert follower.cursor.peek(0, OFF_MARK) == []
    assert follower.cursor.peek(OFF_MARK, 0) == []


def test_take_when_given_part_of_what_was_peeked_moves_just_that_far():
    follower = Follower(prefix=(frame(RESTART, HEADER, 0),))
    follower.publish("KIDAX")
    for letter in "rKIDAX":
        assert follower.take(1) == letter
    assert follower.cursor.caught_up
    with pytest.raises(AssertionError, match="more messages than the log holds"):
        follower.cursor.pass_messages(1)


def test_prefix_when_joining_is_counted_as_offered_and_handed_over_first():
    follower = Follower(prefix=(b"meta", b"codec"))
    assert as_counts(follower.cursor.books())[0].of(HEADER) == 2
    assert follower.queued == "HH"
    assert follower.cursor.load() == (9, 2)
    follower.cursor.pass_messages(2)
    assert follower.queued == ""
    assert follower.cursor.caught_up


# --- refusing ----------------------------------------------------------------------------------------------------


def test_refuse_when_a_class_is_dropped_takes_the_rest_in_order():
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
    follower = Follower()
    follower.publish("KI")
    for _ in range(5):
        follower.publish("D")
        follower.cursor.refuse(1 << MessageClass.DISPOSABLE, DropReason.REFUSED, follower.now)
    assert len(follower.cursor._refusals.ahead) == 1
    follower.publish("II")
    follower.cursor.refuse(1 << MessageClass.AUDIO, DropReason.REFUSED, follower.now)
    assert len(follower.cursor._refusals.ahead) == 2
    assert follower.take() == "KIDII"


def test_refuse_inter_when_none_is_published_meanwhile_needs_no_key_frame():
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
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    for _ in range(3):
        follower.publish("IAKIA")
        follower.cursor.poll(follower.now)
    assert follower.take() == "ArrKAArrKAArrKA"
    assert follower.cursor.restarts == 3


def test_key_frames_when_several_come_to_a_blocked_viewer_the_newest_replaces_what_is_queued():
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
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("I")
    follower.now += 60
    assert follower.cursor.poll(follower.now) is False
    follower.publish("I")
    assert follower.take() == ""
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("I")
    assert follower.cursor.poll(follower.now) is False
    assert follower.take() == ""
    follower.now += KEY_WAIT_S
    assert follower.cursor.poll(follower.now) is True
    assert follower.cursor.key_waits_expired == 1


def test_sound_alone_when_frames_are_refused_needs_no_key_frame():
    follower = Follower("AA")
    follower.cursor.refuse(BROKEN_MASK, DropReason.REFUSED, follower.now)
    follower.publish("AA")
    assert not follower.cursor.waiting_for_key
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    assert follower.take() == "AA"
    assert follower.cursor.plain


def test_video_when_it_begins_while_refused_is_waited_for():
    follower = Follower("A")
    follower.cursor.refuse(VIDEO_MASK, DropReason.REFUSED, follower.now)
    follower.publish("KIA")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IKI")
    assert follower.take() == "ArrKI"


def test_key_refused_when_inter_frames_are_not_still_breaks_references():
    follower = Follower("K")
    follower.take()
    follower.cursor.refuse(1 << KEY, DropReason.REFUSED, follower.now)
    follower.publish("IK")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IKI")
    assert follower.take() == "rrKI"


# --- joining -----------------------------------------------------------------------------------------------------


def test_joining_when_it_lasts_refuses_nothing_and_counts_nothing_against_limits():
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
    cursor.pass_messages(3)
    assert cursor.allowance() == (50, 1)
    assert not cursor.cache_taken
    cursor.pass_messages(1)
    assert cursor.allowance() == (0, 0)
    assert cursor.cache_taken
    cursor.end_joining(DropReason.REFUSED, 101.0)
    log.append(b"i" * 50, INTER, 101.0)
    assert cursor.load() == (50, 1)


def test_joining_when_there_is_no_key_frame_waits_for_one():
    follower = Follower("KIA", wait_for_key=True)
    assert follower.cursor.waiting_for_key
    follower.publish("IADKIA")
    assert follower.take() == "ArrKIA"
    assert follower.dropped(DropReason.KEY_WAIT) == "ID"


# --- leaving and ending ------------------------------------------------------------------------------------------


def test_finish_when_called_ends_at_what_was_published():
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
    accepted, dropped, queued = as_counts(follower.cursor.books())
    assert accepted.total_messages == 2
    assert queued.total_messages + total(dropped.values()).total_messages == 2
    follower.take()
    assert follower.cursor.caught_up


def test_finish_when_an_awaited_key_frame_has_come_hands_it_over_with_headers():
    follower = Follower("KI", wait_for_key=True)
    follower.publish("IAKI")
    follower.cursor.finish(follower.now)
    follower.publish("KI")
    assert follower.take() == "ArrKI"
    assert follower.cursor.caught_up


@pytest.mark.parametrize("state", ["plain", "copies", "gates", "wait", "expired", "joining", "finished"])
def test_drop_everything_in_any_state_leaves_nothing_uncounted(state):
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
    if state == "copies":
        follower.publish("ICKI")
        follower.cursor.thin_to_key_frame(Room(22, 2, 0, 0), follower.now)
    follower.publish("CHIA")
    if state == "finished":
        follower.cursor.finish(follower.now)
    follower.cursor.drop_everything(DropReason.UNFOLLOWED)
    taken = len(follower.got)
    follower.publish("CHKIA")
    accepted, dropped, queued = as_counts(follower.cursor.books())
    assert queued.total_messages == 0
    assert accepted.total_messages == taken + total(dropped.values()).total_messages
    assert follower.cursor.load() == (0, 0)


NO_DISPOSABLE = 1 << DISPOSABLE
KEY_FRAMES = NO_DISPOSABLE | 1 << INTER
SOUND = KEY_FRAMES | 1 << KEY


def room(messages):
    return Room(OFF_MARK, messages, -float(OFF_MARK), 0)


def refuse(follower, mask):
    """Refuse classes from the log's end on."""
    follower.cursor.refuse(mask, DropReason.REFUSED, follower.now)


def test_thinning_when_frames_go_with_the_sound_waits_for_a_key_frame_afterwards():
    follower = Follower("K")
    follower.publish("IIA")
    follower.cursor.refuse(SOUND, DropReason.REFUSED, follower.now)
    follower.cursor.thin_to_key_frame(room(0), follower.now)
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IA")
    assert follower.take() == ""
    follower.publish("KI")
    assert follower.take() == "rrKI"


def test_skip_when_nothing_newer_is_wanted_leaves_what_was_accepted_before():
    follower = Follower("K")
    follower.publish("IAKI")
    follower.cursor.refuse(SOUND, DropReason.HELD, follower.now)
    follower.publish("KIA")
    assert not follower.cursor.skip_to_live(room(1), follower.now)
    assert follower.take() == "IAKI" + "A"


def test_skip_when_a_key_frame_is_ahead_goes_to_the_newest():
    follower = Follower("K")
    follower.publish("IAKAIKAI")
    assert follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.take() == "rrKAI"
    assert follower.dropped(DropReason.RETURNED) == "KIIAA"


@pytest.mark.parametrize("script", ["", "IA", "IDA"])
def test_skip_when_no_key_frame_is_ahead_leaves_everything(script):
    follower = Follower("K")
    follower.publish(script)
    assert not follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.take() == script
    assert follower.dropped() == ""


def test_skip_when_the_viewer_is_joining_ends_that():
    follower = Follower("KI")
    follower.cursor.joining_to = follower.log.tail
    follower.publish("AKI")
    assert follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.cursor.joining_to is None
    assert follower.take() == "rrKI"


def test_skip_when_control_messages_lie_between_hands_them_over():
    follower = Follower("K")
    follower.publish("ICACKI")
    assert follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.take() == "CCrrKI"


def test_skip_when_there_is_only_sound_keeps_what_fits():
    follower = Follower("A")
    follower.publish("AAAA")
    assert not follower.cursor.skip_to_live(room(4), follower.now)
    assert follower.cursor.skip_to_live(room(2), follower.now)
    assert follower.take() == "AA"
    assert follower.dropped(DropReason.RETURNED) == "A" * 2
    assert as_counts(follower.cursor.books())[0].of(AUDIO) == 4


class Reader:
    """A cursor at the start of a log, past joining, and what was taken from it."""

    def __init__(self, **options):
        self.group = ManualGroup()
        self.published = Published(self.group)
        self.cursor = LogCursor(self.published.log, now=self.group.now(), **options)
        self.cursor.end_joining(DropReason.REFUSED, self.group.now())
        self.taken = []

    @property
    def now(self):
        return self.group.now()

    def take(self, count=1000, budget=1 << 40):
        """Take up to `count` messages as far as `peek` goes, and check load and accounts on the way."""
        self.check()
        while count and (items := self.cursor.peek(count, budget)):
            self.cursor.pass_messages(len(items))
            self.taken += [wire for _, wire, _ in items]
            count -= len(items)
            self.check()
        return self.text()

    def text(self):
        """What was taken: number of each message of the log, R for a restart message."""
        frames, rest = parse(b"".join(self.taken))
        assert not rest
        return [number if origin == LOG else "R" for origin, _, number, _ in frames if origin in (LOG, RESTART)]

    def check(self):
        accepted, dropped, queued = as_counts(self.cursor.books())
        lost = total(dropped.values())
        sent = accepted - lost - queued
        assert sent.total_messages == len(self.taken)
        assert sent.total_bytes == sum(map(len, self.taken))
        assert min(queued.messages) >= 0
        size, messages = self.cursor.load()
        assert (queued.total_bytes, queued.total_messages) == (size, messages)


def mask(*classes):
    return sum(1 << item for item in classes)


def test_refuse_when_policy_changes_on_the_way_counts_each_stretch():
    reader = Reader()
    reader.published.script("DA")
    reader.cursor.refuse(mask(DISPOSABLE), DropReason.REFUSED, reader.now)
    reader.published.script("DA")
    reader.cursor.refuse(mask(DISPOSABLE, AUDIO), DropReason.HELD, reader.now)
    reader.published.script("DAX")
    reader.cursor.refuse(0, DropReason.REFUSED, reader.now)
    reader.published.script("DA")
    assert reader.cursor.load()[1] == 6
    assert reader.take() == [0, 1, 3, 6, 7, 8]
    dropped = as_counts(reader.cursor.books())[1]
    assert {reason: counts.by_name() for reason, counts in dropped.items()} == {
        DropReason.REFUSED: {"disposable": 1},
        DropReason.HELD: {"disposable": 1, "audio": 1},
    }
    assert reader.cursor.plain is True


def test_thin_when_control_messages_lie_in_the_skipped_part_keeps_them():
    reader = Reader()
    reader.published.script("KICAIKI")
    reader.cursor.thin_to_key_frame(Room(1 << 40, 5, 0.0, 0), reader.now)
    assert reader.take() == [2, "R", "R", 5, 6]


@given(
    st.lists(
        st.one_of(
            st.text("CHKIDAX", min_size=1, max_size=6).map(lambda text: ("script", text)),
            st.sampled_from([0, mask(DISPOSABLE), mask(INTER, DISPOSABLE), mask(KEY, INTER, DISPOSABLE)]).map(
                lambda value: ("refuse", value)
            ),
            st.integers(1, 5).map(lambda count: ("take", count)),
            st.integers(0, 8).map(lambda count: ("thin", count)),
            st.just(("drop", 0)),
        ),
        max_size=30,
    )
)
@settings(max_examples=150, deadline=None)
def test_cursor_over_random_histories_when_read_in_any_steps_gives_the_same(history):
    readers = [(Reader(), 1 << 40), (Reader(), 1)]
    for action, value in history:
        for reader, budget in readers:
            cursor = reader.cursor
            if action == "script":
                reader.published.script(value)
            elif action == "refuse":
                cursor.refuse(value, DropReason.REFUSED, reader.now)
            elif action == "take":
                reader.take(value, budget)
            elif action == "thin":
                cursor.thin_to_key_frame(Room(1 << 40, value, 0.0, 0), reader.now)
            else:
                cursor.drop_droppable(DropReason.REQUESTED, reader.now)
            reader.check()
    texts = [reader.take(1000, budget) for reader, budget in readers]
    assert texts[0] == texts[1]
    numbers = [item for item in texts[0] if item != "R"]
    assert numbers == sorted(set(numbers))
