"""A viewer's place in a log: peek and take at any step, gates and their accounts, joining, finishing, compacting."""

from __future__ import annotations

from flow_kit import LOG, RESTART, Published, parse
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
