"""The stream log: totals, groups of pictures, bounds of the cache, and that nobody keeps what nobody needs."""

from __future__ import annotations

import sys
import threading

import pytest
from cursor_kit import Wire, alive
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.outgoing.streamlog import CacheLimits, Place, StreamLog
from flowctl.errors import ConfigError, LocalProtocolError

__all__ = ["alive"]  # a fixture

CONTROL, HEADER, KEY, INTER, DISPOSABLE, AUDIO, DATA = MessageClass
NO_CACHE = CacheLimits(size_bytes=0)
JOIN_S = 60.0
"""Longest wait for a thread: only a test that is going to fail waits that long."""


def entries_from(entry):
    """Return the filled entries from `entry` on."""
    entries = []
    while entry.next is not None:
        entries.append(entry)
        entry = entry.next
    return entries


def fill(log, classes, now=0.0):
    """Append one `Wire` message per class and return the entries' sequence numbers by class."""
    return [log.append(Wire(), item, now).sequence for item in classes]


@given(st.lists(st.tuples(st.sampled_from(MessageClass), st.integers(1, 50)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_append_for_any_messages_keeps_totals_by_class(messages):
    log = StreamLog()
    first, counts, sizes = log.tail, [0] * CLASS_COUNT, [0] * CLASS_COUNT
    for number, (item, size) in enumerate(messages):
        entry = log.append(bytes([number]) * size, item, float(number))
        assert (entry.sequence, entry.offset) == (number, sum(sizes))
        assert (entry.counts, entry.sizes) == (tuple(counts), tuple(sizes))
        assert (entry.wire, entry.message_class, entry.enqueued_at) == (bytes([number]) * size, item, float(number))
        counts[item] += 1
        sizes[item] += size
    assert [(entry.message_class, len(entry.wire)) for entry in entries_from(first)] == messages
    assert (log.tail.counts, log.tail.sizes) == (tuple(counts), tuple(sizes))
    assert (log.tail.sequence, log.tail.offset) == (len(messages), sum(sizes))
    assert (log.tail.wire, log.tail.next) == (b"", None)
    assert log.largest_bytes == max((size for _, size in messages), default=0)
    assert log.has_video is any(item in {KEY, INTER, DISPOSABLE} for item, _ in messages)


@pytest.mark.parametrize(
    ("wire", "restart"), [(b"", ()), (b"key", (b"",)), (b"key", (b"header", b""))], ids=["wire", "restart", "second"]
)
def test_append_when_a_message_is_empty_is_refused_and_changes_nothing(wire, restart):
    log = StreamLog()
    log.append(b"before", KEY, 0.0)
    before = (log.tail, log.gop, log.cached, log.largest_bytes, log.gop_duration_s)
    with pytest.raises(LocalProtocolError, match="empty"):
        log.append(wire, KEY, 1.0, restart=restart)
    assert (log.tail, log.gop, log.cached, log.largest_bytes, log.gop_duration_s) == before
    assert (log.tail.wire, log.tail.next) == (b"", None)


def test_gop_when_key_frames_come_links_each_group_to_the_next_key_frame():
    log = StreamLog()
    before = log.append(b"audio", AUDIO, 1.0)
    assert (before.gop.key_sequence, before.gop.next_key, before.gop.restart) == (-1, None, ())
    first = log.append(b"key", KEY, 2.0, restart=(b"meta", b"codec"))
    inter = log.append(b"inter", INTER, 2.5)
    second = log.append(b"key", KEY, 4.5, restart=(b"codec 2",))
    assert before.gop.next_key is first
    assert first.gop is inter.gop
    assert (first.gop.key_sequence, first.gop.restart, first.gop.started_at) == (1, (b"meta", b"codec"), 2.0)
    assert first.gop.next_key is second
    assert second.gop is log.gop is log.tail.gop
    assert (log.gop.key_sequence, log.gop.next_key, log.gop.restart) == (3, None, (b"codec 2",))


def test_gop_duration_when_groups_end_is_that_of_the_last_complete_one():
    log, durations = StreamLog(), []
    for now, item in ((0.0, AUDIO), (3.0, KEY), (4.0, INTER), (5.5, KEY), (9.5, KEY)):
        log.append(b"x", item, now)
        durations.append(log.gop_duration_s)
    assert durations == [0.0, 0.0, 0.0, 2.5, 4.0]


def test_cached_when_key_frames_come_is_always_the_newest():
    log = StreamLog()
    log.append(b"x", INTER, 0.0)
    assert log.cached is None
    keys = []
    for _ in range(3):
        keys.append(log.append(b"k", KEY, 1.0))
        assert log.cached is keys[-1]
        log.append(b"x", INTER, 1.0)
        assert log.cached is keys[-1]
    log.drop_cache()
    assert log.cached is None
    log.append(b"x", INTER, 1.0)
    assert log.cached is None, "an emptied cache waits for the next key frame"
    assert log.append(b"k", KEY, 1.0) is log.cached


@pytest.mark.parametrize(
    ("bounds", "within"),
    [
        ({"size_bytes": 100}, 9),  # the key frame and nine more of 10 bytes
        ({"messages": 4}, 3),
        ({"duration_s": 2.5}, 5),  # a message each half second: exactly at the bound is within
    ],
)
def test_cache_when_a_bound_is_passed_is_empty_until_the_next_key_frame(bounds, within):
    log = StreamLog(cache=CacheLimits(**bounds))
    key = log.append(b"k" * 10, KEY, 0.0)
    for number in range(1, within + 1):
        log.append(b"i" * 10, INTER, number / 2)
        assert log.cached is key, f"emptied after {number}"
    log.append(b"i" * 10, INTER, (within + 1) / 2)
    assert log.cached is None
    again = log.append(b"k" * 10, KEY, 100.0)
    assert log.cached is again


@pytest.mark.parametrize("name", ["size_bytes", "messages", "duration_s"])
def test_cache_limits_when_negative_name_the_field(name):
    with pytest.raises(ConfigError, match=f"{name} of the GOP cache is -1, it must be 0 or more"):
        CacheLimits(**{name: -1})


class Listener:
    """Keeps what it could see when it was called."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def appended(self, log):
        self.calls.append((self.name, log.tail.sequence))


def test_listeners_when_log_grows_are_called_in_order_and_see_the_message():
    log, calls = StreamLog(), []
    one, two = Listener(calls, "one"), Listener(calls, "two")
    log.listen(one)
    log.listen(two)
    log.append(b"x", DATA, 0.0)
    assert calls == [("one", 1), ("two", 1)]
    log.unlisten(one)
    log.unlisten(one)
    log.append(b"x", DATA, 0.0)
    assert calls[2:] == [("two", 2)]


def test_listener_when_it_leaves_while_called_takes_no_other_with_it():
    """A listener may stop listening from within the call; all others are still called."""
    log, calls = StreamLog(), []

    class Once(Listener):
        def appended(self, log):
            super().appended(log)
            log.unlisten(self)

    for name in ("one", "two"):
        log.listen(Once(calls, name))
    log.append(b"x", DATA, 0.0)
    log.append(b"x", DATA, 0.0)
    assert calls == [("one", 1), ("two", 1)]


def test_log_when_nobody_follows_keeps_only_its_cache(alive):
    log = StreamLog()
    fill(log, [AUDIO] * 50)
    assert alive() == 0
    fill(log, [KEY, *[INTER] * 9])
    assert alive() == 10
    fill(log, [KEY, INTER])
    assert alive() == 2
    log.drop_cache()
    assert alive() == 0


def test_log_when_cache_overflows_frees_it(alive):
    log = StreamLog(cache=CacheLimits(messages=10))
    fill(log, [KEY, *[INTER] * 9])
    assert alive() == 10
    fill(log, [INTER])
    assert alive() == 0


def test_keys_when_kept_hold_no_more_than_the_cache_may():
    """A publisher of key frames alone made a log hold eight seconds of whatever its line carries."""
    log = StreamLog(cache=CacheLimits(size_bytes=10_000))
    log.keep_keys(8.0)
    for number in range(40):
        log.append(bytes(1000), MessageClass.KEY, number * 0.1)
    assert [key.sequence for key in log.keys] == [*range(29, 40)]


def test_entries_when_a_cursor_lags_live_from_where_it_stands(alive):
    log = StreamLog(cache=NO_CACHE)
    slow, fast = Place(log.tail), Place(log.tail)
    fill(log, [KEY, *[INTER] * 9] * 3)
    assert alive() == 30
    fast.entry = log.tail
    assert alive() == 30
    for passed in range(1, 31):
        slow.entry = slow.entry.next
        assert alive() == 30 - passed
    assert slow.entry is fast.entry is log.tail


def test_group_when_only_its_end_is_held_does_not_live_whole(alive):
    log = StreamLog()
    fill(log, [KEY, *[INTER] * 99])
    at_end = Place(log.tail)
    fill(log, [INTER, KEY])
    assert at_end.entry.message_class is INTER
    assert alive() == 2
    assert at_end.entry.gop.next_key is log.cached


def test_chain_when_long_is_released_without_recursion(alive):
    log = StreamLog(cache=NO_CACHE)
    place = Place(log.tail)
    for number in range(100_000):
        log.append(Wire(), KEY if number % 100 == 0 else INTER, number / 100)
    assert alive() == 100_000
    assert sys.getrecursionlimit() < 100_000
    place.entry = log.tail
    assert alive() == 0


def test_reader_on_another_thread_while_appending_sees_whole_entries():
    log, total, wrong = StreamLog(), 30_000, []
    entry, seen = log.tail, []
    stop = threading.Event()

    def read(entry):
        offset = 0
        while len(seen) < total and not stop.is_set():
            following = entry.next
            if following is None:
                continue
            number = len(seen)
            complete = (
                entry.sequence == number
                and entry.offset == offset
                and entry.wire == b"%d" % number
                and entry.message_class is (KEY if number % 50 == 0 else INTER)
                and entry.enqueued_at == float(number)
                and entry.gop.key_sequence == number - number % 50
                and sum(following.counts) == number + 1
                and following.offset == offset + len(entry.wire)
            )
            if not complete:
                wrong.append(number)
            seen.append(number)
            offset += len(entry.wire)
            entry = following

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns hundreds of times more often than by default
    reader = threading.Thread(target=read, args=(entry,))
    try:
        reader.start()
        for number in range(total):
            log.append(b"%d" % number, KEY if number % 50 == 0 else INTER, float(number))
        reader.join(JOIN_S)
    finally:
        stop.set()
        reader.join(JOIN_S)
        sys.setswitchinterval(interval)
    assert (len(seen), wrong) == (total, [])


def test_append_when_marked_is_dropped_or_kept_whatever_its_class():
    log = StreamLog()
    marks = [
        (AUDIO, False),
        (DATA, False),
        (AUDIO, True),
        (HEADER, True),
        (HEADER, False),
        (CONTROL, True),
        (INTER, True),
    ]
    entries = [log.append(Wire(), item, 0.0, droppable=droppable) for item, droppable in marks]
    filed = [entry.message_class for entry in entries]
    assert filed == [CONTROL, CONTROL, AUDIO, DATA, HEADER, CONTROL, INTER]
    for item in (KEY, INTER):
        with pytest.raises(LocalProtocolError, match=item.name):
            log.append(Wire(), item, 0.0, droppable=False)
    assert log.tail.sequence == len(marks)
