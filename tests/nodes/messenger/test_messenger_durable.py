"""Messengers whose messages outlive them, and messengers over a link that loses: real sockets, real files."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import LocalProtocolError
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination, Failure, ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from flowctl.nodes.messenger.storefile import IDS, Transaction
from messenger.link import Faults, FaultyLink

WAIT_S = 20.0
QUICK = DeliverySettings(window=2000, retry=Backoff(first_s=0.02, factor=1.5, most_s=0.3), max_attempts=None)


class Told:
    """What handlers were told, and a wait for more; handlers run on the messenger's thread, the test on another."""

    def __init__(self) -> None:
        self.items: list = []
        self._changed = threading.Condition()

    def add(self, item: object) -> None:
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()

    def until(self, reached: Callable[[list], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: reached(self.items), WAIT_S), f"got {len(self.items)}"


@pytest.fixture
def start() -> Iterator[Callable[..., Messenger]]:
    made: list[Messenger] = []

    def start(identity: str, *, port: int | None = None, **options: object) -> Messenger:
        made.append(Messenger(port, identity, settings=QUICK, **options))
        made[-1].start()
        return made[-1]

    yield start
    for messenger in made:
        messenger.stop()


def listen(messenger: Messenger, told: Told, address: str = "tcp://127.0.0.1:0") -> str:
    """Listen, note the bodies of what comes, and return where."""
    number = messenger.listen_for_connection(
        Destination("here", address), "here", lambda _, message: told.add(message.message)
    )
    return messenger.endpoints(number)[0]


def until_empty(messenger: Messenger) -> None:
    """Wait until nothing is unacknowledged."""
    empty = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        if not messenger.pending_count():
            return
        empty.wait(0.001)
    raise AssertionError(f"{messenger.pending_count()} are pending")


def column(path: Path, statement: str) -> list:
    connection = sqlite3.connect(path)
    try:
        return [row[0] for row in connection.execute(statement)]
    finally:
        connection.close()


def make_table(transaction: Transaction) -> None:
    transaction.execute("CREATE TABLE IF NOT EXISTS effects (number INTEGER)")


def insert(number: int, transaction: Transaction) -> None:
    transaction.execute("INSERT INTO effects VALUES (?)", (number,))


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
def test_messages_when_the_link_loses_a_fifth_are_each_handled_once(start, tmp_path, durable):
    """1000 messages, a link that drops 20 %, doubles, re-orders: each is handled once, pending empties (ME-33)."""
    stores = {name: {"open_store": open_store(tmp_path / name)} if durable else {} for name in ("one", "two")}
    told = Told()
    address = listen(start("two", **stores["two"]), told)
    link = FaultyLink(int(address.rpartition(":")[2]), Faults(drop=0.2, duplicate=0.1, late=0.2, late_s=0.02), 33)
    link.start()
    one = start("one", **stores["one"])
    to = one.make_connection(Destination("two", link.address))
    for number in range(1000):
        one.send_message(to, b"%d" % number)
    told.until(lambda items: len(items) >= 1000)
    until_empty(one)
    link.stop()
    assert Counter(told.items) == Counter({b"%d" % number: 1 for number in range(1000)})
    assert link.passed.dropped > 200
    assert link.passed.duplicated > 50
    assert one.statistics().retries > 200


def test_ordered_messages_when_the_link_overtakes_stay_in_order(start):
    told = Told()
    address = listen(start("two"), told)
    faults = Faults(drop=0.1, duplicate=0.1, late=0.3, late_s=0.01, cut_messages=300)
    link = FaultyLink(int(address.rpartition(":")[2]), faults, 5)
    link.start()
    one = start("one")
    to = one.make_connection(Destination("two", link.address))
    for number in range(300):
        one.send_message(to, b"%d" % number, ordered=True)
    told.until(lambda items: len(items) >= 300)
    until_empty(one)
    link.stop()
    assert [b"%d" % number for number in range(300)] == told.items


def test_outbox_when_its_sender_was_stopped_is_delivered_by_the_next_life(start, tmp_path):
    sent = Told()
    path = tmp_path / "one"
    address = f"ipc://{tmp_path}/two"
    one = start("one", open_store=open_store(path))
    to = one.make_connection(Destination("two", address))
    for number in range(100):
        one.send_message(to, b"%d" % number, effect=lambda _, number=number: sent.add(number))
    sent.until(lambda items: len(items) == 100)
    one.stop()
    assert len(column(path, "SELECT message_id FROM messenger_outbox")) == 100
    told = Told()
    listen(start("two"), told, address)
    again = start("one", open_store=open_store(path))
    assert again.incarnation != one.incarnation
    to = again.make_connection(Destination("two", address))
    again.send_message(to, b"new")
    told.until(lambda items: len(items) >= 101)
    until_empty(again)
    again.stop()
    assert Counter(told.items) == Counter([b"new", *(b"%d" % number for number in range(100))])
    assert column(path, "SELECT message_id FROM messenger_outbox") == []


@pytest.mark.parametrize("first_word", [True, False], ids=["known", "stranger"])
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
@pytest.mark.parametrize("pending", [False, True], ids=["empty", "pending"])
def test_messages_when_the_store_of_their_sender_is_an_old_copy_are_handled_or_not_told(
    start, tmp_path, durable, pending, first_word
):
    """What `deliver` says was delivered was handled, although the copy gives numbers that the receiver has seen."""
    told, path, copy = Told(), tmp_path / "one", tmp_path / "copy"
    options = {"open_store": open_store(tmp_path / "two")} if durable else {}
    place = Destination("two", listen(start("two", **options), told, f"ipc://{tmp_path}/s"))
    nobody = Destination("nobody", f"ipc://{tmp_path}/nobody")

    def life(bodies: list[bytes]) -> None:
        one = start("one", open_store=open_store(path))
        kept = Told()
        if pending:
            one.send_message(one.make_connection(nobody), b"waits", effect=kept.add)
            kept.until(len)
        to = one.make_connection(place)
        asyncio.run(asyncio.wait_for(deliver_all(one, to, bodies), WAIT_S))
        one.stop()

    async def deliver_all(one: Messenger, to: int, bodies: list[bytes]) -> None:
        await asyncio.gather(*(one.deliver(to, body) for body in bodies))

    life([b"a0", b"a1"] if first_word else [])
    shutil.copy(path, copy)
    life([b"b%d" % number for number in range(20)])
    life([b"c%d" % number for number in range(20)])
    shutil.copy(copy, path)
    life([b"d%d" % number for number in range(60)])
    counts = Counter(told.items)
    assert {b"d%d" % number for number in range(60)} <= set(counts)
    assert {1} == set(counts.values())


def test_messages_when_sent_again_to_the_next_life_of_a_receiver_are_known(start, tmp_path):
    told, path = Told(), tmp_path / "two"
    opens = open_store(path, prepare=make_table)

    def apply(_: Messenger, message: ReceivedMessage) -> None:
        message.apply(partial(insert, int(message.message)))
        told.add(message.message)

    def receiver() -> tuple[Messenger, int]:
        two = start("two", open_store=opens)
        listener = two.listen_for_connection(Destination("two", "tcp://127.0.0.1:0"), "two", apply)
        return two, int(two.endpoints(listener)[0].rpartition(":")[2])

    two, port = receiver()
    link = FaultyLink(port, Faults(drop=0, duplicate=0, late=0), 1)
    link.start()
    one = start("one", open_store=open_store(tmp_path / "one"))
    to = one.make_connection(Destination("two", link.address))
    one.send_message(to, b"0")
    until_empty(one)
    link.faults = Faults(drop=0.5, duplicate=0, late=0)  # half of the acknowledgements, too
    for number in range(1, 200):
        one.send_message(to, b"%d" % number)
    told.until(lambda items: len(items) >= 60)
    two.stop()
    link.faults = Faults(drop=0.1, duplicate=0, late=0)
    two, link.port = receiver()  # not the one of before, which another program may have by now
    until_empty(one)
    link.stop()
    assert list(range(200)) == sorted(column(path, "SELECT number FROM effects"))


def test_effect_when_it_raises_leaves_the_message_for_another_time(start, tmp_path):
    path, tries, errors = tmp_path / "two", Told(), Told()

    def apply(_: Messenger, message: ReceivedMessage) -> None:
        message.apply(partial(insert, 1))
        message.apply(fails)

    def fails(_: Transaction) -> None:
        tries.add(len(tries.items))
        if len(tries.items) < 3:
            raise ValueError("not yet")

    two = start("two", open_store=open_store(path, prepare=make_table), on_error=lambda _, error: errors.add(error))
    listener = two.listen_for_connection(Destination("two", "tcp://127.0.0.1:0"), "two", apply)
    one = start("one")
    one.send_message(one.make_connection(Destination("two", two.endpoints(listener)[0])), b"x")
    until_empty(one)
    assert (len(tries.items), len(errors.items)) == (3, 2)
    assert column(path, "SELECT number FROM effects") == [1]


def test_effect_of_a_message_to_send_when_it_raises_refuses_the_message(start, tmp_path):
    failures, errors = Told(), Told()

    def fails(_: Transaction) -> None:
        raise ValueError("no")

    opens = open_store(tmp_path / "one", prepare=make_table)
    one = start("one", open_store=opens, on_error=lambda _, error: errors.add(error))
    to = one.make_connection(Destination("two", f"ipc://{tmp_path}/two"))
    one.send_message(to, b"bad", effect=fails, on_failure=lambda _, failure: failures.add(failure))
    one.send_message(to, b"good", effect=partial(insert, 1))
    failures.until(bool)
    assert (failures.items[0].outcome, failures.items[0].message) == (Outcome.REJECTED, b"bad")
    told = Told()
    listen(start("two"), told, f"ipc://{tmp_path}/two")
    until_empty(one)
    assert told.items == [b"good"]
    assert column(tmp_path / "one", "SELECT number FROM effects") == [1]


def test_outbox_when_its_file_is_full_refuses_and_goes_on_afterwards(start, tmp_path):
    failures, errors, told = Told(), Told(), Told()
    opens = open_store(tmp_path / "one", max_bytes=1 << 20)
    one = start("one", open_store=opens, on_error=lambda _, error: errors.add(error))
    to = one.make_connection(Destination("two", f"ipc://{tmp_path}/two"))
    for number in range(100):
        one.send_message(to, b"%d-" % number + bytes(20_000), on_failure=lambda _, failure: failures.add(failure))
    errors.until(bool)
    listen(start("two"), told, f"ipc://{tmp_path}/two")
    until_empty(one)
    refused = {failure.message for failure in failures.items if isinstance(failure, Failure)}
    assert len(refused) + len(told.items) == 100
    assert refused
    assert "max_store_bytes" in errors.items[0].hint
    one.send_message(to, b"later")
    until_empty(one)
    assert told.items[-1] == b"later"


def test_messages_when_their_sender_connects_anew_are_not_taken_for_those_of_another(start):
    told, goes_on = Told(), threading.Event()

    def slow(_: Messenger, message: ReceivedMessage) -> None:
        told.add(message.message)
        goes_on.wait(WAIT_S)

    two = start("two")
    listener = two.listen_for_connection(Destination("two", "tcp://127.0.0.1:0"), "two", slow)
    with zmq.Context() as context:
        first, second = (context.socket(zmq.DEALER) for _ in range(2))
        for dealer in (first, second):
            dealer.set(zmq.ROUTING_ID, b"same")
            dealer.set(zmq.RCVTIMEO, int(WAIT_S * 1000))
            dealer.connect(two.endpoints(listener)[0])
            for number in range(200):
                dealer.send_multipart([b"", b"%d-0-0-%d" % (number, number)])
            told.until(bool)
            if dealer is first:
                first.close(linger=int(WAIT_S * 1000))
        goes_on.set()
        acknowledged: set[bytes] = set()
        while len(acknowledged) < 200:
            acknowledged.add(second.recv_multipart()[-1])
        second.close(linger=0)
    two.stop()
    assert Counter(told.items) == Counter(b"%d" % number for number in range(200))


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
def test_messages_when_a_connection_is_made_again_are_new_ones(start, tmp_path, durable):
    stores = {name: {"open_store": open_store(tmp_path / name)} if durable else {} for name in ("one", "two")}
    told = Told()
    address = listen(start("two", **stores["two"]), told)
    one = start("one", **stores["one"])
    for word in (b"a", b"b", b"c"):
        to = one.make_connection(Destination("two", address))
        for number in range(5):
            one.send_message(to, word + b"%d" % number)
            until_empty(one)
        one.close_connection(to)
    assert [word + b"%d" % number for word in (b"a", b"b", b"c") for number in range(5)] == told.items


def test_ids_of_a_raw_peer_when_they_leave_ever_more_gaps_keep_few_rows(start, raw, address, tmp_path):
    path, told = tmp_path / "two", Told()
    two = start("two", open_store=open_store(path))
    listen(two, told, address)
    dealer = raw(zmq.DEALER, b"raw", connect=address)
    for number in range(0, 3000, 2):
        dealer.send_multipart([b"", b"%d-0-0-" % number])
    for _ in range(0, 3000, 2):
        dealer.recv_multipart()
    two.stop()
    assert len(column(path, "SELECT first FROM messenger_seen")) < 1100
    listen(start("two", open_store=open_store(path)), told, address)
    for number in (1, 2, 2998, 2999):
        dealer.send_multipart([b"", b"%d-0-0-" % number])
    assert [dealer.recv_multipart()[-1] for _ in range(2)] == [b"2998-0-2-", b"2999-0-2-"]
    assert len(told.items) == 1501


def test_messages_when_they_come_by_several_ways_are_each_applied_once(start, tmp_path):
    """One listener's tcp, ipc and inproc number their messages each for itself, on the disk too (ME-28)."""
    told, done = Told(), tmp_path / "two"

    def handler(_: Messenger, message: ReceivedMessage) -> None:
        told.add(message.message)
        message.apply(partial(insert, int(message.message)))

    two = start("two", port=0, ipc_dir=tmp_path, callback=handler, open_store=open_store(done, prepare=make_table))
    one = start("one")
    ways = [one.make_connection(Destination("two", address)) for address in two.endpoints()]
    for number in range(12):
        one.send_message(ways[number % 3], b"%d" % number)
        until_empty(one)
    assert told.items == [b"%d" % number for number in range(12)]
    two.stop()
    assert column(done, "SELECT number FROM effects ORDER BY number") == list(range(12))


def test_messages_in_a_process_when_sent_before_there_is_a_listener_do_not_hide_later_ones(start):
    told = Told()

    def handler(_: Messenger, message: ReceivedMessage) -> None:
        if message.message == b"first" and b"third" not in told.items:
            raise ValueError("not yet")
        told.add(message.message)

    here = Destination.inproc("two", "before-there-is-a-listener")
    one = start("one")
    to = one.make_connection(here)
    for body in (b"zeroth", b"first"):
        one.send_message(to, body)
    one.make_connection(Destination.inproc("two", "nobody"))  # a round trip to its thread: they are in ZeroMQ's queue
    start("two", on_error=lambda where, error: None).listen_for_connection(here, "two", handler)
    for body in (b"second", b"third"):
        one.send_message(to, body)
        told.until(lambda items, body=body: body in items)
    told.until(lambda items: b"first" in items)
    one.send_message(to, b"fourth")
    until_empty(one)
    assert sorted(told.items) == sorted([b"zeroth", b"first", b"second", b"third", b"fourth"])


def test_messages_when_over_ipv6_arrive(start, tmp_path):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    told = Told()
    two = start("two", port=0, host="::1", ipc_dir=tmp_path, callback=lambda _, message: told.add(message.message))
    one = start("one")
    one.send_message(one.make_connection(Destination.tcp("two", "::1", two.port)), b"six")
    told.until(lambda items: items == [b"six"])


async def test_messages_when_sent_just_before_the_end_are_kept(loop_factory, start, tmp_path):
    """Though the loop has not got to them, that they were taken was a promise."""
    here, opens = Destination.ipc("server", f"{tmp_path}/s"), open_store(tmp_path / "client")
    async with Messenger(identity="client", open_store=opens) as first:
        connection = first.make_connection(here)
        for number in range(300):
            first.send_message(connection, b"%d" % number)
    told = Told()
    listen(start("server"), told, here.endpoint)
    start("client", open_store=opens).make_connection(here)
    told.until(lambda items: len(items) >= 300)
    assert sorted(told.items, key=int) == [b"%d" % number for number in range(300)]


def test_effect_when_there_is_no_store_is_refused(start, tmp_path):
    here, errors = Destination.ipc("server", f"{tmp_path}/s"), Told()
    client = start("client")
    with pytest.raises(LocalProtocolError, match="no store"):
        client.send_message(client.make_connection(here), "x", effect=lambda _: None)
    server = start("server", on_error=lambda _, error: errors.add(error))
    server.listen_for_connection(here, "server", lambda _, message: message.apply(lambda _: None))
    client.send_message(client.make_connection(here), "x")
    errors.until(bool)
    assert "no store" in str(errors.items[0])


def test_start_when_it_fails_after_the_store_was_opened_closes_the_store(loop_factory, tmp_path):
    opens, opened = open_store(tmp_path / "client.db"), []

    def breaks(post):
        opened.append(opens(post))
        opened[-1].pending = lambda: 1 / 0
        return opened[-1]

    broken = Messenger(identity="client", loop_factory=loop_factory, open_store=breaks)
    with pytest.raises(ZeroDivisionError):
        broken.start()

    async def on_the_callers_loop() -> None:
        with pytest.raises(ZeroDivisionError):
            async with Messenger(identity="client", open_store=breaks):
                pass

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(on_the_callers_loop())
    assert [store.closed for store in opened] == [True, True]
    opens(print).close()


def test_ack_when_its_sender_begins_anew_before_it_is_on_the_disk_is_not_that_of_a_message_of_the_new_life(
    start, raw, tmp_path
):
    held, opened, address = Told(), [], f"ipc://{tmp_path}/s"

    def opens(post):
        opened.append(open_store(tmp_path / "two")(post))
        mark = opened[0].mark
        opened[0].mark = lambda *change: held.add(partial(mark, *change)) if change[0][:1] == IDS else mark(*change)
        return opened[0]

    two = start("two", open_store=opens, ack_on_receipt=True)
    listen(two, Told(), address)
    for life in (7, 8):
        dealer = raw(zmq.DEALER, b"one", connect=address, incarnation=life)
        dealer.send_multipart([b"", b"%d-0-0-" % life])
        held.until(lambda items, life=life: len(items) == life - 6)
    for change in held.items:
        two._group.call_soon(change)
    assert dealer.recv_multipart()[-1] == b"8-0-2-8:8-8"


def test_extension_when_a_peer_is_found_to_understand_it_is_used_once_that_is_on_the_disk(start, raw, tmp_path):
    """Else the next life would send the same message without it, and to the peer it would be another one."""
    held, opened = [], []

    def opens(post):
        opened.append(open_store(tmp_path / "one")(post))
        mark, opened[0].mark = opened[0].mark, lambda *change: held.append(partial(mark, *change))
        return opened[0]

    router = raw(zmq.ROUTER, bind=f"ipc://{tmp_path}/two", incarnation=7)
    one = start("one", open_store=opens)
    to = one.make_connection(Destination("two", f"ipc://{tmp_path}/two"))

    def frames_of_next(number: int) -> int:
        one.send_message(to, b"%d" % number)
        count = len(router.recv_multipart())
        router.send_multipart([b"one", b"two", b"", b"%d-0-2-" % number])
        until_empty(one)
        return count

    assert [frames_of_next(number) for number in range(3)] == [3, 3, 3]
    assert len(held) == 1
    one._group.call_soon(held[0])
    while not one._connections[to].peers[b""].delivery.announced:
        pass
    assert frames_of_next(3) == 4
