"""A viewer's place in a log with keys, against examples worked out by hand."""

from __future__ import annotations

import gc
import random
import sys
import threading
from itertools import islice

import pytest
from chance_kit import seeds
from cursor_kit import Wire, alive

from flowctl.core.flow.counts import NO_COUNTS, Counts, as_counts
from flowctl.core.flow.policy import Headroom
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing import latest
from flowctl.core.outgoing.conflation import ConflatingCursor
from flowctl.core.outgoing.latest import NO_END, LatestValues, Value
from flowctl.core.outgoing.streamlog import Entry, Place, StreamLog
from flowctl.core.outgoing.thinning import drop_droppable, thin_to_key_frame
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.reasons import DropReason

__all__ = ["alive"]  # a fixture

DATA = MessageClass.DATA


def keyed_log(text="", **options):
    log = StreamLog("prices", **{"max_keys": 4} | options)
    publish(log, text)
    return log


def publish(log, text):
    """Append words: `a1` is the value 1 of key a, `.1` a message without a key."""
    for word in text.split():
        log.append(word.encode(), DATA, 1.0, key=None if word[0] == "." else word[0])


def take(cursor, most=100):
    items = cursor.peek(most, 10_000)
    cursor.pass_messages(len(items))
    return " ".join(wire.decode() for _, wire, _ in items)


def account(cursor):
    """Return (accepted, sent, superseded, queued) messages."""
    accepted, dropped, queued = as_counts(cursor.balance())
    lost = {reason: counts.total_messages for reason, counts in dropped.items()}
    sent = accepted.total_messages - sum(lost.values()) - queued.total_messages
    return accepted.total_messages, sent, lost.get(DropReason.SUPERSEDED, 0), queued.total_messages


def test_peek_when_values_were_superseded_gives_the_newest_among_all_messages_without_a_key():
    log = keyed_log("a0")
    cursor = ConflatingCursor(log, now=0.0)
    publish(log, "a1 .1 b1 a2 .2 b2 a3")
    assert cursor.load() == (8, 4)
    assert take(cursor, 2) == ".1 .2"
    publish(log, "b3")
    assert take(cursor) == "a3 b3"
    assert account(cursor) == (8, 4, 4, 0)


def test_enter_when_all_is_taken_goes_on_with_every_message_as_the_cohort():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    publish(log, "a1 a2 .1")
    assert not cursor.stands_at(log.tail)
    assert take(cursor) == "a2 .1"
    cursor.end_joining(DropReason.REFUSED, 0.0)
    assert cursor.stands_at(log.tail)
    assert cursor.plain
    cursor.enter(Place(log.tail))
    publish(log, "a3 a4")
    assert account(cursor) == (5, 2, 1, 2)
    assert take(cursor) == "a3 a4"
    publish(log, "a5 a6")
    cursor.stand_alone()
    assert take(cursor) == "a6"
    assert account(cursor) == (7, 5, 2, 0)


def test_dropped_when_values_come_while_it_enters_the_cohort_never_falls():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    cursor.end_joining(DropReason.REFUSED, 0.0)
    at = log.tail
    publish(log, "a1 .1 a2")
    assert account(cursor) == (3, 0, 1, 2)
    assert not cursor.stands_at(at), "the first is told of as superseded"
    assert take(cursor) == ".1 a2"
    at = log.tail
    assert cursor.stands_at(at)
    publish(log, "a3 .2 a4")
    assert account(cursor) == (6, 2, 1, 3), "as a member from there on"
    assert cursor.load() == (6, 3)
    cursor.enter(Place(at))
    assert account(cursor) == (6, 2, 1, 3)
    assert take(cursor) == "a3 .2 a4"


def test_dropped_when_it_does_not_enter_after_all_counts_what_was_superseded():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    cursor.end_joining(DropReason.REFUSED, 0.0)
    assert cursor.stands_at(log.tail)
    publish(log, "a1 a2")
    assert take(cursor) == "a2"
    assert account(cursor) == (2, 1, 1, 0)


def test_latest_when_a_newcomer_joins_is_the_newest_value_of_each_key_first():
    log = keyed_log("a1 b1 .1 a2 c1")
    log.forget("c")
    cursor = ConflatingCursor(log, now=0.0, latest=True)
    assert log.values() == [b"b1", b"a2"]
    publish(log, "b2 d1")
    assert take(cursor) == "a2 b2 d1"
    assert account(cursor) == (4, 3, 1, 0)


def test_append_when_a_key_or_its_value_is_too_much_names_the_limit():
    log = keyed_log("a1 b1", max_keys=2, max_value_bytes=7)
    with pytest.raises(LocalProtocolError, match=r"max_keys.*'c'"):
        publish(log, "c1")
    with pytest.raises(LocalProtocolError, match="max_value_bytes"):
        publish(log, "a123")
    log.forget("b")
    publish(log, "c1 a12")
    assert log.values() == [b"c1", b"a12"]
    assert log.tail.sequence == 4
    log.forget("c")
    with pytest.raises(LocalProtocolError, match="max_value_bytes"):
        log.append(b"x", DATA, 1.0, key="key")
    log.append(b"x", DATA, 1.0, key="ke")


def test_append_when_keys_and_the_rest_do_not_go_together_says_why():
    with pytest.raises(LocalProtocolError, match="takes no keys"):
        StreamLog("plain").append(b"x", DATA, 0.0, key="a")
    with pytest.raises(LocalProtocolError, match="a key is a str, not int"):
        keyed_log().append(b"x", MessageClass.DATA, 0.0, key=7)
    with pytest.raises(LocalProtocolError, match="no pictures"):
        keyed_log().append(b"x", MessageClass.KEY, 0.0)
    with pytest.raises(LocalProtocolError, match="not AUDIO"):
        keyed_log().append(b"x", MessageClass.AUDIO, 0.0, key="a")
    with pytest.raises(ConfigError, match="max_keys"):
        StreamLog(max_keys=-1)


def test_peek_when_less_is_taken_than_published_gives_every_key_its_turn():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    taken = []
    for _ in range(6):
        publish(log, "a1 b1 c1 d1")
        taken.append(take(cursor, 1))
    assert " ".join(taken) == "a1 b1 c1 d1 a1 b1"


def test_peek_when_it_stopped_with_values_waiting_gives_them_before_newer_ones():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    publish(log, "a1 b1 c1 d1")
    assert take(cursor, 2) == "a1 b1"
    publish(log, "a2 b2 .1 c2")
    assert take(cursor) == "d1 .1 c2 a2 b2"
    publish(log, "a3 b3")
    assert take(cursor) == "a3 b3", "once all was taken, the order is that of the log again"


def test_load_when_limits_are_judged_is_what_has_no_key():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    for at, word in enumerate(["a1", "b1", "a2"]):
        log.append(word.encode(), DATA, float(at), key=word[0])
    assert cursor.load() == (4, 2)
    assert cursor.oldest_at() == 1.0
    assert cursor.counted(0.5) == (0, 0, 0.5)
    assert cursor.bounded() == log.reach == (0, 0)
    publish(log, ".1 b2")
    assert cursor.bounded() == log.reach == (2, 1)
    assert cursor.counted(0.5) == (2, 1, 0.5)
    take(cursor)
    assert cursor.counted(0.5) == (0, 0, None)


def test_bounded_when_nothing_more_is_taken_is_nothing():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    cursor.end_joining(DropReason.REFUSED, 0.0)
    publish(log, "a1 .1 b1")
    cursor.finish(0.0)
    assert (cursor.load(), cursor.bounded(), cursor.counted(0.5)) == ((6, 3), (0, 0), (0, 0, 0.5))
    take(cursor)
    assert cursor.counted(0.5) == (0, 0, None)


def test_thin_when_the_policy_asks_leaves_values_and_when_the_application_asks_drops_them():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    cursor.end_joining(DropReason.REFUSED, 0.0)
    publish(log, "a1 .1 b1 .2 .3")
    thin_to_key_frame(cursor, Headroom(4, 2, -1.0, 0), 0.0)
    assert cursor.load() == (8, 4), "values take no room of the others"
    drop_droppable(cursor, DropReason.THINNED, 0.0)
    assert cursor.load() == (4, 2)
    drop_droppable(cursor, DropReason.REQUESTED, 0.0)
    assert cursor.load() == (0, 0)
    publish(log, "b2")
    assert take(cursor) == "b2"
    assert account(cursor) == (6, 1, 0, 0)


def test_finish_when_values_wait_sends_those_of_that_moment():
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    cursor.end_joining(DropReason.REFUSED, 0.0)
    publish(log, "a1 .1 b1 a2")
    cursor.finish(0.0)
    publish(log, "a3 .2")
    assert take(cursor) == ".1 b1 a2"
    assert account(cursor) == (4, 3, 1, 0)


def test_values_when_all_are_asked_for_need_no_size_beyond_32_bits(monkeypatch):
    """Of a platform with pointers of 32 bits, `islice` takes none."""
    sizes = []

    def sliced(items, most):
        sizes.append(most)
        return islice(items, most)

    monkeypatch.setattr(latest, "islice", sliced)
    log = keyed_log("a0 b0")
    cursor = ConflatingCursor(log, now=0.0, latest=True)
    assert log.values() == [b"a0", b"b0"]
    cursor.finish(0.0)
    assert take(cursor) == "a0 b0"
    assert sizes
    assert all(size is None or size < 1 << 31 for size in sizes)


def test_finish_when_keys_take_turns_sends_them_as_it_would_have():
    """Without the end it would go on behind the key at which it stopped, with the end as well."""
    told = []
    for ends in (False, True):
        log = keyed_log()
        cursor = ConflatingCursor(log, now=0.0)
        publish(log, "a1 b1 c1 d1")
        assert take(cursor, 1) == "a1"
        publish(log, "a2 b2 c2 d2")
        if ends:
            cursor.finish(2.0)
        told.append(take(cursor))
    assert told == ["b2 c2 d2 a2"] * 2


def test_memory_when_a_viewer_is_stalled_is_one_value_of_each_key(alive):
    log = keyed_log()
    before = sum(isinstance(item, Entry) for item in gc.get_objects())
    cursor = ConflatingCursor(log, now=0.0, latest=True)
    for number in range(5000):
        log.append(Wire(b"%d" % number), DATA, 0.0, key="abcd"[number % 4])
        if number == 2500:
            assert len(cursor.peek(100, 10_000)) == 4  # and the kernel takes nothing
    assert cursor.load()[1] == 4
    assert alive() <= 5, "the four, and the one at the log's end"
    assert sum(isinstance(item, Entry) for item in gc.get_objects()) - before < 5


@pytest.mark.parametrize("keys", [3, 700])
def test_latest_values_when_put_and_forgotten_at_random_are_those_of_a_dict(keys):
    values, expected, chance = LatestValues("prices", keys, 1 << 20), {}, random.Random(keys + seeds(1)[0])
    for sequence in range(6 * keys + 50):
        key = str(chance.randrange(keys))
        value = Value(sequence, 0, bytes(chance.randrange(1, 9)), 0.0, key)
        values.put(value)
        expected.pop(key, None)
        expected[key] = value
        if chance.random() < 0.1:
            key = str(chance.randrange(keys))
            values.forget(key)
            expected.pop(key, None)
        if sequence % 29 == 0:
            first = chance.randrange(sequence + 2)
            span = first, chance.choice([NO_END, first + chance.randrange(1000)])
            inside = [item for item in expected.values() if span[0] <= item.sequence < span[1]]
            assert values.values((span,)) == inside
            assert values.amount((span,)) == (len(inside), sum(len(item.wire) for item in inside))
            assert values.size_bytes == sum(len(item.wire) for item in expected.values())


class CountedList(list):
    """A list that counts which of its items were looked at."""

    looked = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.looked += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        for item in super().__iter__():
            self.looked += 1
            yield item


def test_latest_values_when_asked_for_few_of_many_walk_over_few():
    most = 5000
    values = LatestValues("prices", most, 1 << 20)
    for sequence in range(2 * most):
        values.put(Value(sequence, 0, b"1", 0.0, str(sequence % most)))
    counted = values._slots.values = CountedList(values._slots.values)
    assert [item.sequence for item in values.firsts(((0, NO_END), (2 * most - 9, NO_END)))] == [most, 2 * most - 9]
    assert [item.sequence for item in values.values(((7000, NO_END),), 3)] == [7000, 7001, 7002]
    assert counted.looked < 1000, "what a viewer has behind it costs it nothing"


def test_twin_when_values_are_from_before_it_is_handed_few_at_a_time_in_its_form_each_made_once():
    """And it costs nothing to begin: what came before is the same objects."""
    log, made = StreamLog(max_keys=1000), []
    for number in range(1000):
        log.append(b"%d" % number + b"." * 1000, DATA, 1.0, key=str(number))
    log.append(b"large" * 100_000, DATA, 1.0, key="0")

    def transform(wire):
        made.append(wire)
        return wire.rstrip(b".")

    for _ in range(3):
        twin = log.begin_twin(transform)
        cursor, got = ConflatingCursor(twin, now=0.0, latest=True), []
        assert (twin.latest, twin.tail.sequence) == (log.latest, 1001)
        done = len(made)
        while items := cursor.peek(512, 1 << 20):
            assert len(made) - done < 64, "too much work for one turn"
            done = len(made)
            cursor.pass_messages(len(items))
            got += [wire for _, wire, _ in items]
        assert got == [b"%d" % number for number in range(1, 1000)] + [b"large" * 100_000]
        assert len(made) == 999
        log.twin = None


@pytest.mark.parametrize("twin", [False, True])
def test_cursor_when_another_thread_publishes_has_true_accounts_and_the_newest_values_in_order(twin):
    published = log = keyed_log("a0 b0 c0 d0")
    if twin:
        log = published.begin_twin(bytes.rstrip)
    cursor = ConflatingCursor(log, now=0.0)
    cursor.end_joining(DropReason.REFUSED, 0.0)
    most, interval, chance = 6000, sys.getswitchinterval(), random.Random(seeds(1)[0])

    def publish_all():
        for number in range(most):
            wire, key = b"%d  " % number, None if number % 7 == 0 else "abcd"[number % 4]
            published.append(wire, DATA, 1.0, key, twin_wire=None if number % 5 else wire.rstrip())
            if number % 50 == 0:
                published.forget("d")

    sys.setswitchinterval(1e-6)
    publisher = threading.Thread(target=publish_all)
    publisher.start()
    received, received_bytes, stopped, before = [], 0, False, NO_COUNTS
    try:
        while not stopped:
            stopped = not publisher.is_alive()
            items = cursor.peek(chance.randrange(1, 9), 1 << 20)
            cursor.pass_messages(len(items))
            received += [int(wire) for _, wire, _ in items]
            received_bytes += sum(len(wire) for _, wire, _ in items)
            accepted, dropped, queued = as_counts(cursor.balance())
            superseded = dropped.get(DropReason.SUPERSEDED, NO_COUNTS)
            assert superseded.messages[DATA] >= before.messages[DATA], "one more was counted too early"
            assert superseded.sizes_bytes[DATA] >= before.sizes_bytes[DATA]
            before = superseded
            assert accepted == superseded + queued + Counts.of_figures(figures_of(len(received), received_bytes))
            at = log.tail
            if cursor.stands_at(at):
                cursor.enter(Place(at))
                items = cursor.peek(3, 1 << 20)
                cursor.pass_messages(len(items))
                received += [int(wire) for _, wire, _ in items]
                received_bytes += sum(len(wire) for _, wire, _ in items)
                cursor.stand_alone()
    finally:
        sys.setswitchinterval(interval)
        publisher.join()
    while text := take(cursor):
        received += [int(item) for item in text.split()]
    assert [number for number in received if number % 7 == 0] == list(range(0, most, 7))
    missing = iter(range(0, most, 7))
    due = next(missing)
    for number in received:
        assert number <= due, "a value came before a message that was published before it"
        due = next(missing, most) if number == due else due
    for key in range(4):
        values = [number for number in received if number % 4 == key and number % 7]
        assert values == sorted(set(values))
        assert values[-1] == max(number for number in range(key, most, 4) if number % 7)


def figures_of(messages, size):
    """Return them by class."""
    figures = [0] * (2 * len(MessageClass))
    figures[DATA], figures[DATA + len(MessageClass)] = messages, size
    return figures


@pytest.mark.parametrize("change", ["b2", "forget"])
def test_look_when_the_log_changes_meanwhile_is_made_again(change):
    log, seen = keyed_log("a1 b1"), []

    def read():
        seen.append(log.latest.amount())
        if len(seen) == 1:
            log.forget("b") if change == "forget" else publish(log, change)
        return seen[-1]

    tail, amount = log.look(read)
    assert tail is log.tail
    assert amount == log.latest.amount()
    assert len(seen) == 2


def test_sequence_of_when_a_value_is_just_being_put_finds_it_or_nothing():
    log = keyed_log("b1")
    found = []

    class Places(dict):
        def __setitem__(self, key, place):
            super().__setitem__(key, place)
            found.append(log.latest.sequence_of(key))

    log.latest._slots.places = Places(log.latest._slots.places)
    publish(log, "a1 b2")
    assert found == [1, 2]


def test_peek_when_messages_come_behind_a_refused_one_meanwhile_keeps_the_order(monkeypatch):
    """What is published behind the moment at which values are looked at waits for the next one, also where refused."""
    log = keyed_log()
    cursor = ConflatingCursor(log, now=0.0)
    cursor.joining_to = None
    cursor.refuse(1 << DATA, DropReason.REFUSED, 0.0)
    look, done = StreamLog.look, []

    def look_and_publish(self, read):
        found = look(self, read)
        if not done:
            done.append(True)
            publish(self, ".1 a1")
            self.append(b"sound", MessageClass.AUDIO, 1.0)
        return found

    monkeypatch.setattr(StreamLog, "look", look_and_publish)
    taken = [take(cursor), take(cursor)]
    assert " ".join(filter(None, taken)) == "a1 sound"
