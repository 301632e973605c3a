"""Delivery and arrivals without sockets: scripts, and random histories over a link that loses, doubles, reorders."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from chance_kit import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.state import SendState
from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import BusyError, ConfigError
from flowctl.nodes.messenger.arrivals import MAX_HELD, Arrivals, ArrivalVerdict, Arrived
from flowctl.nodes.messenger.delivery import Delivery, DeliverySettings, Outgoing, _within, decode_record, encode_record
from flowctl.nodes.messenger.wire import Extension

STEADY = Backoff(first_s=1.0, factor=2.0, most_s=8.0, jitter=0.0)


def delivery_of(**options) -> Delivery:
    return Delivery(DeliverySettings(**{"retry": STEADY, **options}), Random(1), 0.0)


def outgoing(number: int, **options) -> Outgoing:
    return Outgoing(number, 0, 0, b"body", **options)


def taken(delivery: Delivery, now: float) -> list[int]:
    messages = delivery.take_ready(now, 1000)
    delivery.note_taken(messages, now)
    return [message.message_id for message in messages]


def arrived(number: int, incarnation: int = 1, sequence: int = 0, floor: int = 0, after: int = 0) -> Arrived:
    extension = Extension(incarnation, sequence, floor, after) if sequence else None
    return Arrived(incarnation, number, extension, 10, number)


def test_message_when_not_acknowledged_is_tried_again_with_backoff_until_given_up():
    """After 1, 2, 4 seconds, and after the last attempt one more wait; then it is REJECTED, once (ME-23)."""
    delivery = delivery_of(max_attempts=3)
    delivery.submit(outgoing(7), 0.0)
    assert taken(delivery, 0.0) == [7]
    times = []
    now = 0.0
    for _ in range(3):
        now = delivery.next_deadline()
        times.append(now)
        given_up = delivery.take_due(now)
        taken(delivery, now)
    assert times == [1.0, 3.0, 7.0]
    assert [(message.message_id, outcome) for message, outcome in given_up] == [(7, Outcome.REJECTED)]
    assert (len(delivery), delivery.next_deadline(), delivery.note_acknowledged(7, 7, now)) == (0, None, [])


def test_attempt_when_the_peer_works_through_what_went_before_is_put_off():
    delivery = delivery_of(max_attempts=1)
    for number in range(4):
        delivery.submit(outgoing(number), 0.0)
    taken(delivery, 0.0)
    delivery.note_acknowledged(0, 0, 0.9)
    assert (delivery.take_due(1.0), taken(delivery, 1.0)) == ([], [])
    delivery.note_acknowledged(2, 2, 1.5)  # past 1, which is lost
    assert [message.message_id for message, _ in delivery.take_due(1.95)] == [1]
    assert delivery.take_due(2.4) == []
    assert [message.message_id for message, _ in delivery.take_due(delivery.next_deadline())] == [3]


def test_attempt_when_the_one_before_waits_still_in_its_connection_is_put_off():
    """A copy would only wait behind it, and attempts that were none would give it up."""
    delivery = delivery_of(max_attempts=2)
    delivery.submit(outgoing(0), 0.0)
    delivery.submit(outgoing(1, deadline=30.0), 0.0)
    taken(delivery, 0.0)
    now = 0.0
    while now < 30.0:
        now = delivery.next_deadline()
        given_up = delivery.take_due(now, held=True)
        assert taken(delivery, now) == []
    assert [(message.message_id, outcome) for message, outcome in given_up] == [(1, Outcome.TIMEOUT)]
    now = delivery.next_deadline()
    assert (delivery.take_due(now), taken(delivery, now)) == ([], [0])


def test_state_when_a_message_is_refused_for_its_bytes_is_the_hard_limit_until_there_is_room():
    delivery = delivery_of(window=100, window_bytes=1000)
    for number in range(2):
        delivery.submit(outgoing(number, payload=(bytes(300),)), 0.0)
    assert delivery.state is SendState.SOFT_LIMIT
    with pytest.raises(BusyError, match="its window is 100 messages, 1000 bytes"):
        delivery.submit(outgoing(2, payload=(bytes(300),)), 0.0)
    assert delivery.state is SendState.HARD_LIMIT
    taken(delivery, 0.0)
    delivery.note_acknowledged(0, 1, 0.1)
    assert delivery.state is SendState.READY


def test_acknowledgement_when_repeated_or_unknown_is_ignored_and_counted():
    """The first one removes the message, the others find nothing (ME-11)."""
    delivery = delivery_of()
    delivery.submit(outgoing(0), 0.0)
    taken(delivery, 0.0)
    assert [len(delivery.note_acknowledged(number, number, 0.1)) for number in (0, 0, 99)] == [1, 0, 0]
    assert (len(delivery), delivery.late_count) == (0, 2)


def test_acknowledgement_when_of_a_vast_range_takes_what_is_there():
    delivery = delivery_of()
    for number in (3, 4, 9):
        delivery.submit(outgoing(number), 0.0)
    assert [item.message_id for item in delivery.note_acknowledged(4, 2**64 - 1, 0.0)] == [4, 9]


def test_deadline_when_it_passes_comes_before_the_next_attempt_and_once():
    delivery = delivery_of()
    delivery.submit(outgoing(1, deadline=0.5), 0.0)
    assert delivery.next_deadline() == 0.5
    taken(delivery, 0.0)
    assert delivery.take_due(0.25) == []
    assert [outcome for _, outcome in delivery.take_due(0.5)] == [Outcome.TIMEOUT]
    assert delivery.take_due(9.0) == []


def test_refused_messages_when_the_peer_is_heard_from_go_at_once():
    """What ZeroMQ would not take needs not wait for its time once somebody is there (ME-31)."""
    delivery = delivery_of()
    for number in range(3):
        delivery.submit(outgoing(number), 0.0)
    delivery.note_refused(delivery.take_ready(0.0, 10), 0.0)
    assert delivery.state is SendState.OVERLOADED
    assert taken(delivery, 0.1) == []
    assert delivery.retry_refused()
    assert taken(delivery, 0.2) == [0, 1, 2]
    assert delivery.state is SendState.READY


def test_peer_when_it_speaks_and_cannot_be_reached_costs_one_attempt_between_two():
    """However much it says: its words must not be worth more of our work than the timer's."""
    delivery = delivery_of()
    for number in range(3):
        delivery.submit(outgoing(number), 0.0)
    delivery.note_refused(delivery.take_ready(0.0, 10), 0.0)
    for _ in range(100):
        delivery.retry_refused()
        delivery.note_refused(delivery.take_ready(0.1, 10), 0.1)
    assert delivery.retry_count == 3
    delivery.take_due(delivery.next_deadline())
    delivery.note_refused(delivery.take_ready(2.0, 10), 2.0)
    assert delivery.retry_refused()
    assert taken(delivery, 2.1) == [0, 1, 2]
    assert (delivery.retry_refused(), delivery.state) == (False, SendState.READY)


def test_state_when_the_window_fills_and_empties_goes_through_the_four_states():
    delivery = delivery_of(window=8)
    delivery.submit(outgoing(0), 0.0)
    delivery.note_refused(delivery.take_ready(0.0, 10), 0.0)
    for number in range(1, 8):
        delivery.submit(outgoing(number), 0.0)
    with pytest.raises(BusyError, match="window is 8 messages"):
        delivery.submit(outgoing(8), 0.0)
    delivery.retry_refused()
    taken(delivery, 0.1)
    delivery.note_acknowledged(0, 5, 0.2)
    edges = delivery.take_edges()
    assert [edge.new.name for edge in edges] == ["OVERLOADED", "SOFT_LIMIT", "HARD_LIMIT", "READY"]
    assert [edge.sequence for edge in edges] == [1, 2, 3, 4]
    assert delivery.take_edges() == []
    delivery.submit(outgoing(8), 0.2)


def test_state_when_the_oldest_message_grows_old_is_at_its_soft_limit():
    delivery = delivery_of(slow_age_s=5.0)
    delivery.submit(outgoing(0), 0.0)
    now = 0.0
    while now < 5.0:
        taken(delivery, now)
        now = delivery.next_deadline()
        delivery.take_due(now)
    assert delivery.state is SendState.SOFT_LIMIT


def test_window_when_in_octets_takes_one_message_of_any_size_alone():
    """A message larger than the window would else wait for ever."""
    delivery = delivery_of(window_bytes=100)
    delivery.submit(Outgoing(0, 0, 0, b"x" * 1000), 0.0)
    with pytest.raises(BusyError):
        delivery.submit(outgoing(1), 0.0)


@pytest.mark.parametrize("known", [True, False])
def test_ordered_messages_when_the_peer_keeps_no_order_go_one_at_a_time(known):
    delivery = delivery_of(max_attempts=1)
    delivery.announced = False if known else None
    for number, ordered in enumerate([True, True, False, True]):
        delivery.submit(outgoing(number, ordered=ordered), 0.0)
    assert taken(delivery, 0.0) == [0, 2]
    delivery.announced = False
    delivery.note_acknowledged(0, 0, 0.1)
    assert taken(delivery, 0.1) == [1]
    delivery.take_due(1.2)  # 1 and 2 are given up
    assert taken(delivery, 1.2) == [3]


def test_ordered_messages_when_sent_before_the_first_word_follow_it_at_once():
    delivery = delivery_of()
    for number in range(5):
        delivery.submit(outgoing(number, ordered=True), 0.0)
    assert taken(delivery, 0.0) == [0]
    delivery.announced = True
    assert taken(delivery, 0.05) == []  # in one form and in the other they would be in no order
    delivery.note_acknowledged(0, 0, 0.1)
    messages = delivery.take_ready(0.1, 10)
    assert [(message.plain, message.after) for message in messages] == [(False, 2), (False, 2), (False, 3), (False, 4)]


def test_ordered_message_when_it_goes_plain_after_all_is_kept_as_such_before():
    """On the disk it was undecided: in another life it would go in the other form, and be two to its peer."""
    delivery = Delivery(DeliverySettings(), Random(1), 0.0, durable=True)
    for number in range(2):
        delivery.submit(message := outgoing(number, ordered=True), 0.0)
        delivery.release(message)
    assert taken(delivery, 0.0) == [0]
    delivery.announced = False
    delivery.note_acknowledged(0, 0, 0.1)
    assert (taken(delivery, 0.1), [item.plain for item in delivery.take_decided()]) == ([], [True])
    delivery.release(message)
    assert (taken(delivery, 0.2), delivery.take_decided()) == ([1], [])


def test_ordered_messages_when_the_peer_keeps_the_order_go_at_once_and_name_the_one_before():
    delivery = delivery_of()
    delivery.announced = True
    for number, ordered in enumerate([True, False, True, True]):
        delivery.submit(outgoing(number, ordered=ordered), 0.0)
    messages = delivery.take_ready(0.0, 10)
    assert [(message.sequence, message.after) for message in messages] == [(1, 1), (2, 0), (3, 1), (4, 3)]
    assert delivery.floor == 1


@pytest.mark.parametrize("wrong", [{"window": 0}, {"window_bytes": 0}, {"max_attempts": 0}, {"slow_age_s": -1.0}])
def test_settings_when_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DeliverySettings(**wrong)


def test_record_when_read_again_is_the_message():
    message = Outgoing(5, 7, 8, b"b-\0", (b"", b"p"), ordered=True, target=9)
    message.after = 4
    again, after, deadline_at = decode_record(5, encode_record(message, 12.5))
    assert (after, deadline_at) == (4, 12.5)
    fields = ("plain", "message_id", "source_callback", "destination_callback", "body", "payload", "ordered", "target")
    assert [getattr(again, name) for name in fields] == [getattr(message, name) for name in fields]
    for damaged in (b"", b"\1", encode_record(message, None)[:-1], encode_record(message, None) + b"x"):
        with pytest.raises(Exception, match="stored message 5"):
            decode_record(5, damaged)


def test_arrival_when_it_is_being_handled_is_neither_handed_on_nor_acknowledged():
    arrivals = Arrivals()
    first = arrived(0)
    assert [arrivals.arrive(first), arrivals.arrive(arrived(0))] == [ArrivalVerdict.HANDLE, ArrivalVerdict.WAIT]
    arrivals.note_failed(first)
    assert arrivals.arrive(first) is ArrivalVerdict.HANDLE
    assert arrivals.note_handled(first)
    assert arrivals.arrive(arrived(0)) is ArrivalVerdict.SEEN


def test_sender_when_it_begins_a_new_life_is_heard_and_its_old_life_is_not():
    """Ids from 0 again are new in another incarnation; late packets of the old one are dropped (ME-21)."""
    arrivals = Arrivals()
    for number in range(3):
        message = arrived(number, incarnation=1)
        assert arrivals.arrive(message) is ArrivalVerdict.HANDLE
        arrivals.note_handled(message)
    slow = arrived(3, incarnation=1)
    arrivals.arrive(slow)
    assert arrivals.arrive(arrived(0, incarnation=2)) is ArrivalVerdict.HANDLE
    assert arrivals.arrive(arrived(4, incarnation=1)) is ArrivalVerdict.STALE
    assert arrivals.note_handled(slow) is False


def test_message_when_first_sent_without_its_sequence_stays_without_it():
    """What the peer says meanwhile is for the messages after: in two forms it would be two messages."""
    delivery = delivery_of()
    delivery.submit(outgoing(0), 0.0)
    delivery.announced = True
    delivery.submit(outgoing(1), 0.0)
    assert [(message.plain, message.sequence) for message in delivery.take_ready(0.0, 9)] == [(True, 1), (False, 2)]


def test_ordered_message_when_the_one_before_has_its_outcome_waits_for_nothing():
    delivery = delivery_of()
    delivery.announced = True
    delivery.submit(outgoing(0), 0.0)
    delivery.submit(outgoing(1, ordered=True), 0.0)
    delivery.submit(outgoing(2, ordered=True), 0.0)
    assert [message.after for message in delivery.take_ready(0.0, 9)] == [0, 2, 2]
    delivery.note_acknowledged(1, 1, 0.1)
    delivery.take_due(1.2)
    assert [(message.message_id, message.after) for message in delivery.take_ready(1.2, 9)] == [(0, 0), (2, 3)]
    assert delivery.floor == 1


def test_sequences_when_a_million_messages_go_to_others_leave_no_gap():
    """A pair counts its own messages: two to us among a million to others are 1 and 2 (ME-22)."""
    arrivals = Arrivals()
    for number, sequence in ((0, 1), (1_000_001, 2)):
        message = arrived(number, sequence=sequence)
        assert arrivals.arrive(message) is ArrivalVerdict.HANDLE
        arrivals.note_handled(message)
    assert arrivals.gap_count == 0


def test_ordered_message_when_the_one_before_was_given_up_is_let_go():
    arrivals = Arrivals()
    assert arrivals.arrive(arrived(1, sequence=2, after=1)) is ArrivalVerdict.WAIT
    assert arrivals.arrive(arrived(2, sequence=3, after=2)) is ArrivalVerdict.WAIT
    assert arrivals.take_released() == []
    assert arrivals.arrive(arrived(1, sequence=2, floor=2, after=1)) is ArrivalVerdict.WAIT  # it is being handled
    (let_go,) = arrivals.take_released()
    assert let_go.number == 2
    arrivals.note_handled(let_go)
    assert [item.number for item in arrivals.take_released()] == [3]


def test_held_messages_when_as_many_as_are_kept_are_not_taken():
    arrivals = Arrivals()
    fates = [arrivals.arrive(arrived(n, sequence=n + 2, after=n + 1)) for n in range(1, MAX_HELD + 2)]
    assert fates.count(ArrivalVerdict.WAIT) == MAX_HELD
    assert fates[-1] is ArrivalVerdict.FULL


def test_life_when_a_peer_that_announces_nothing_came_in_between_goes_on_where_it_was():
    """It is not told that another one had its identity, so it tries again: what was handled is not handled twice."""
    arrivals = Arrivals()
    first, running, before = (arrived(n, incarnation=7, sequence=n + 1) for n in range(3))
    other = arrived(0, incarnation=0)
    for message in (first, running, before, other):
        assert arrivals.arrive(message) is ArrivalVerdict.HANDLE
        if message is not running:
            arrivals.note_handled(message)
    assert not arrivals.note_handled(running)
    again = [arrivals.arrive(arrived(n, incarnation=7, sequence=n + 1)) for n in range(4)]
    assert again == [ArrivalVerdict.SEEN] * 3 + [ArrivalVerdict.HANDLE]
    assert arrivals.arrive(arrived(0, incarnation=8, sequence=1)) is ArrivalVerdict.HANDLE
    assert [arrivals.arrive(item) for item in (first, other, first)] == [
        ArrivalVerdict.STALE,
        ArrivalVerdict.HANDLE,
        ArrivalVerdict.STALE,
    ]


class Outbox:
    """A sender with a disk, of which what was not written is lost when it is killed."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.disk, self.told = rng, {}, False
        self.now, self.next_sequence = 0.0, 1
        self.changes: list[tuple[Outgoing | None, bytes | None]] = []  # no message: that the peer was understood
        self.begin()

    def begin(self) -> None:
        chosen = DeliverySettings(retry=STEADY, max_attempts=None, window=16)
        self.delivery = Delivery(chosen, self.rng, self.now, self.next_sequence, durable=True)
        self.delivery.announced = self.told or None
        for number, (sequence, record) in sorted(self.disk.items()):
            message, after, _ = decode_record(number, record)
            self.delivery.restore(message, sequence, after, self.now)

    def keep(self, message: Outgoing) -> None:
        self.next_sequence = max(self.next_sequence, message.sequence + 1)
        self.changes.append((message, encode_record(message, None)))

    def write(self, most: int) -> None:
        written, self.changes = self.changes[:most], self.changes[most:]
        for message, record in written:
            if message is None:
                self.told = self.delivery.announced = True
            elif record is None:
                self.disk.pop(message.message_id, None)
            else:
                self.disk[message.message_id] = (message.sequence, record)
                self.delivery.release(message)

    def kill(self) -> set[int]:
        """End it; return the messages that were never kept, which is no promise."""
        lost = {message.message_id for message, record in self.changes if message and record} - self.disk.keys()
        self.changes = []
        self.begin()
        return lost


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([True, False, None]), st.booleans())
def test_messages_when_the_link_loses_and_the_sender_is_killed_are_each_handled_once(seed, count, announced, fails):
    """Whatever happens on the way, each is handled once, ordered ones in order, and nothing stays pending (ME-33).

    A peer of the extension (True), a raw one (False), or one that says it with its first word (None).
    """
    rng = Random(seed)
    outbox = Outbox(rng)
    outbox.told, outbox.delivery.announced = announced is True, announced
    arrivals, handled = Arrivals(), []
    to_peer: list[Arrived] = []
    to_us: list[int] = []
    ordered_ones, sent, now = [], 0, 0.0
    handling: list[Arrived] = []
    lost: set[int] = set()
    while sent < count or len(outbox.delivery):
        if rng.random() < 0.02:
            lost |= outbox.kill()
        delivery = outbox.delivery
        while sent < count and not delivery.full(4) and rng.random() < 0.7:
            message = outgoing(sent * 3, ordered=rng.random() < 0.5)
            delivery.submit(message, now)
            outbox.keep(message)
            ordered_ones += [message.message_id] * message.ordered
            sent += 1
        outbox.write(rng.randint(0, 30))
        for message in delivery.take_ready(now, 5):
            extension = Extension(1, message.sequence, delivery.floor, message.after) if not message.plain else None
            packet = Arrived(1, message.message_id, extension, 4, None)
            to_peer += [packet] * rng.choice([0, 1, 1, 1, 2])
        rng.shuffle(to_peer)
        for packet in [to_peer.pop() for _ in range(rng.randint(0, len(to_peer)))]:
            fate = arrivals.arrive(packet)
            if fate is ArrivalVerdict.HANDLE:
                handling.append(packet)
            elif fate is ArrivalVerdict.SEEN:
                to_us.append(packet.message_id)
            handling += arrivals.take_released()
        while handling and rng.random() < 0.8:
            packet = handling.pop(rng.randrange(len(handling)))
            if fails and rng.random() < 0.2:
                arrivals.note_failed(packet)
                continue
            handled.append(packet.message_id)
            arrivals.note_handled(packet)
            to_us.append(packet.message_id)
            handling += arrivals.take_released()
        to_us = [number for number in to_us if rng.random() > 0.2]
        rng.shuffle(to_us)
        for message in delivery.take_decided():
            outbox.keep(message)
        for number in [to_us.pop() for _ in range(rng.randint(0, len(to_us)))]:
            if announced is None and not delivery.announced:
                outbox.changes.append((None, None))  # it is learned with the first word, and counts once on the disk
            elif announced is False:
                delivery.announced = False
            outbox.changes += [(message, None) for message in delivery.note_acknowledged(number, number, now)]
        outbox.now = now = now + 0.3
        assert delivery.take_due(now) == []
    assert sorted(handled) == [number * 3 for number in range(count) if number * 3 not in lost]
    wanted = set(ordered_ones) - lost
    ordered_ones = [number for number in ordered_ones if number in wanted]
    assert [number for number in handled if number in wanted] == ordered_ones
    assert (delivery.size_bytes, delivery.state, delivery.next_deadline()) == (0, SendState.READY, None)


@pytest.mark.parametrize("seed", seeds(20))
def test_acknowledgement_when_of_many_ranges_takes_each_message_in_one_of_them_once(seed):
    rng = Random(seed)
    delivery = Delivery(DeliverySettings(window=300), rng, 0.0)
    numbers = sorted(rng.sample(range(1000), 200))
    for number in numbers:
        delivery.submit(Outgoing(number, 0, 0, b"x"), 0.0)
    ranges = []
    for _ in range(rng.choice((1, 2, 9, 90))):
        first = rng.randrange(1000)
        ranges.append((first, first + rng.choice((-3, -1, 0, 0, 1, 2, 20, 2**40 if seed % 3 == 0 else 3))))
    wanted = [number for number in numbers if any(first <= number <= last for first, last in ranges)]
    assert sorted(item.message_id for item in delivery.note_acknowledged_ranges(ranges, 0.1)) == wanted
    assert len(delivery) == 200 - len(wanted)


def test_acknowledgement_when_of_thousands_of_vast_ranges_looks_at_each_message_once():
    """One small frame of a peer must not cost the product of its ranges and our messages."""
    looks = []

    class Counted(dict[int, None]):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                looks.append(number)
                yield number

        def __contains__(self, number: object) -> bool:
            looks.append(number)
            return super().__contains__(number)

    numbers = Counted.fromkeys(range(2000))
    assert _within(numbers, [(2**40, 2**62)] * 2000) == []
    assert _within(numbers, [(2**40 + 1500 * part, 2**40 + 1500 * part + 1400) for part in range(2000)]) == []
    assert len(looks) <= 4000


@pytest.mark.parametrize("seed", seeds(12))
def test_ordered_messages_when_some_are_given_up_are_never_handled_after_later_ones(seed):
    rng, now = Random(seed), 0.0
    retry = Backoff(first_s=1.0, factor=1.5, most_s=4.0)
    delivery = Delivery(DeliverySettings(window=64, retry=retry, max_attempts=None), rng, 0.0)
    delivery.announced = True
    arrivals, handled, link, running = Arrivals(), [], [], []

    def begin(items: list[Arrived]) -> None:
        for item in items:
            in_order = item.extension is not None and bool(item.extension.after)
            assert not (in_order and any(other.extension.after for _, other in running))
            running.append((now + rng.choice((0.0, 0.0, 0.0, 1.0, 4.0)), item))

    for number in range(4000):
        now += 0.5 * rng.random()
        if number < 120 and not delivery.full(1):
            given_up_at = now + 6.0 * rng.random() if rng.random() < 0.3 else None
            delivery.submit(Outgoing(number, 0, 0, b"x", (), rng.random() < 0.6, given_up_at), now)
        delivery.take_due(now)
        for message in delivery.take_ready(now, 64):
            extension = Extension(7, message.sequence, delivery.floor, message.after)
            for _ in range(rng.choice((0, 1, 1, 1, 2))):
                due = now + rng.choice((0.0, 0.0, 0.1, 1.0, 5.0))
                link.append((due, Arrived(7, message.message_id, extension, 1, None)))
        for item in sorted((item for item in link if item[0] <= now), key=lambda item: item[0]):
            link.remove(item)
            fate = arrivals.arrive(item[1])
            if fate is ArrivalVerdict.SEEN:
                delivery.note_acknowledged(item[1].message_id, item[1].message_id, now)
            begin([item[1]] if fate is ArrivalVerdict.HANDLE else [])
            begin(arrivals.take_released())
        for item in [item for item in running if item[0] <= now]:
            running.remove(item)
            if rng.random() < 0.1:
                arrivals.note_failed(item[1])
                continue
            handled.append(item[1])
            arrivals.note_handled(item[1])
            if rng.random() < 0.8:
                delivery.note_acknowledged(item[1].message_id, item[1].message_id, now)
            begin(arrivals.take_released())
        if number > 120 and not delivery:
            break
    numbers = [item.number for item in handled]
    in_order = [item.number for item in handled if item.extension.after]
    assert (len(set(numbers)), in_order) == (len(numbers), sorted(in_order))
    assert not len(delivery)
