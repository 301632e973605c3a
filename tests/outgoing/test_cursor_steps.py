"""A viewer's place in a log: peek and take at any step, gates and their accounts, joining, finishing, compacting."""

from __future__ import annotations

import pytest
from flow_kit import HEAD_BYTES, LOG, RESTART, Published, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.counts import as_counts, total
from flowctl.core.flow.policy import Room
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.reasons import DropReason
from flowctl.testing import ManualGroup

CONTROL, HEADER, KEY, INTER, DISPOSABLE, AUDIO, DATA = MessageClass


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
            self.cursor.take(len(items))
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


def test_cursor_when_nothing_is_refused_is_a_subtraction():
    """Bytes and messages queued are what lies between cursor and tail; taking moves it."""
    reader = Reader()
    reader.published.script("KIAX", 50)
    assert reader.cursor.load() == (200, 4)
    assert reader.take(3) == [0, 1, 2]
    assert reader.cursor.load() == (50, 1)
    assert not reader.cursor.caught_up
    reader.take()
    assert reader.cursor.caught_up
    assert reader.cursor.oldest_at() is None


def test_peek_when_bounds_are_reached_ends_there():
    """`most` bounds the number; the message that passes the budget is the last one."""
    reader = Reader()
    reader.published.script("X" * 4, 50)
    assert len(reader.cursor.peek(3, 1 << 40)) == 3
    assert len(reader.cursor.peek(10, 51)) == 2
    assert len(reader.cursor.peek(10, 50)) == 1


def test_refuse_when_policy_changes_on_the_way_counts_each_stretch():
    """Each refusal begins at the tail of its time and ends at that of the next: nothing older is touched."""
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


def test_refuse_when_no_frame_was_lost_meanwhile_needs_no_key_frame():
    """A refusal of inter frames that met none leaves nothing to wait for."""
    reader = Reader()
    reader.published.script("KI")
    reader.cursor.refuse(mask(INTER, DISPOSABLE), DropReason.REFUSED, reader.now)
    reader.published.script("A")
    reader.cursor.refuse(0, DropReason.REFUSED, reader.now)
    reader.published.script("I")
    assert reader.take() == [0, 1, 2, 3]
    assert reader.cursor.restarts == 0


def test_refuse_when_a_frame_was_lost_restarts_at_the_next_key_frame():
    """After a lost inter frame come only sound and data, then headers and the key frame."""
    reader = Reader()
    reader.published.script("K")
    reader.cursor.refuse(mask(INTER), DropReason.REFUSED, reader.now)
    reader.published.script("I")
    reader.cursor.refuse(0, DropReason.REFUSED, reader.now)
    reader.published.script("IDAKI")
    assert reader.take() == [0, 4, "R", "R", 5, 6]
    assert reader.cursor.restarts == 1
    assert reader.cursor.waiting_for_key is False


def test_thin_when_control_messages_lie_in_the_skipped_part_keeps_them():
    """Control of the log is never dropped: skipping carries it along, before the headers of the key frame."""
    reader = Reader()
    reader.published.script("KICAIKI")
    reader.cursor.thin_to_key_frame(Room(1 << 40, 5, 0.0, 0), reader.now)
    assert reader.take() == [2, "R", "R", 5, 6]


def test_thin_when_only_key_frame_and_sound_fit_refuses_pictures_until_the_next():
    """Where the newest group is too large, its key frame and sound stay, and the next key frame brings all back."""
    reader = Reader()
    reader.published.script("KIIKIIIA")
    reader.cursor.thin_to_key_frame(Room(1 << 40, 4, 0.0, 0), reader.now)
    reader.published.script("IAKI")
    assert reader.take() == ["R", "R", 3, 7, 9, "R", "R", 10, 11]


def test_thin_when_everything_fits_leaves_all():
    """A queue within its room, from a key frame on, loses nothing and gets no headers it does not need."""
    reader = Reader()
    reader.published.script("KIA")
    reader.cursor.thin_to_key_frame(Room(1 << 40, 3, 0.0, 0), reader.now)
    assert reader.take() == [0, 1, 2]
    assert reader.cursor.restarts == 0


def test_joining_when_refusals_begin_meanwhile_applies_them_at_its_end():
    reader = Reader()
    reader.published.script("KD")
    cursor = reader.cursor = LogCursor(
        reader.published.log, now=reader.now, start=reader.published.log.cached, prefix=(b"R" + bytes(10),)
    )
    assert cursor.allowance() == (11 + 2 * HEAD_BYTES, 3)
    cursor.refuse(mask(DISPOSABLE), DropReason.REFUSED, reader.now)
    reader.published.script("D")
    assert cursor.load()[1] == 4
    assert cursor.allowance()[1] == 3
    cursor.end_joining(DropReason.REFUSED, reader.now)
    reader.published.script("DA")
    assert [item[0] for item in cursor.peek(100, 1 << 40)] == [HEADER, KEY, DISPOSABLE, DISPOSABLE, AUDIO]
    assert cursor.allowance() == (0, 0)


@pytest.mark.parametrize("wait", [False, True])
def test_finish_when_log_goes_on_ends_at_its_place(wait):
    """What is published after the end is not for this viewer, a key frame included, and is not counted for it."""
    reader = Reader(wait_for_key=wait)
    reader.published.script("IA")
    reader.cursor.finish(reader.now)
    reader.published.script("KIA")
    assert reader.take() == ([1] if wait else [0, 1])
    assert reader.cursor.caught_up
    assert as_counts(reader.cursor.books())[0].total_messages == 2


def test_drop_everything_when_gates_lie_ahead_counts_each_message_once():
    """Leaving counts what was queued as left behind, what was refused before under its own reason."""
    reader = Reader()
    reader.published.script("KC")
    reader.cursor.refuse(mask(DISPOSABLE), DropReason.REFUSED, reader.now)
    reader.published.script("DAI")
    reader.cursor.drop_everything(DropReason.UNFOLLOWED)
    dropped = {reason: counts.by_name() for reason, counts in as_counts(reader.cursor.books())[1].items()}
    assert dropped == {
        DropReason.REFUSED: {"disposable": 1},
        DropReason.UNFOLLOWED: {"control": 1, "key": 1, "inter": 1, "audio": 1},
    }
    assert reader.cursor.load() == (0, 0)
    reader.check()


def test_compact_when_little_is_left_of_much_lets_the_log_go():
    """A few messages that hold megabytes of refused ones are copied out; order and accounts stay what they were."""
    reader = Reader()
    reader.published.script("XX")
    reader.cursor.refuse(mask(AUDIO), DropReason.HELD, reader.now)
    reader.published.script("A" * 100, 20_000)
    reader.published.script("X")
    before = reader.cursor.load(), as_counts(reader.cursor.books())
    reader.cursor.compact()
    assert (reader.cursor.load(), as_counts(reader.cursor.books())) == before
    assert reader.cursor.entry is reader.published.log.tail
    assert reader.take() == [0, 1, 102]


def test_compact_when_little_would_be_won_leaves_the_log():
    """A queue that is most of what it spans stays in the log, where it costs nothing."""
    reader = Reader()
    reader.published.script("X" * 100, 20_000)
    reader.cursor.refuse(mask(AUDIO), DropReason.HELD, reader.now)
    reader.cursor.compact()
    assert reader.cursor.entry.sequence == 0


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
    """What a viewer gets does not depend on how it is read, and accounts hold after each step."""
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
