"""Two messengers of one identity at one listener: the last one is heard, the other one is told, and both say so."""

from __future__ import annotations

import shutil
from queue import Queue

import pytest
import zmq
from connection_kit import wait_until

from flowctl.core.outcomes.backoff import Backoff
from flowctl.nodes.messenger import peer
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.messenger.store import open_store
from flowctl.nodes.messenger.wire import Extension

WAIT_S = 20.0
QUICK = DeliverySettings(retry=Backoff(first_s=0.05, most_s=0.2), max_attempts=None)


def logged(caplog, level: str) -> list[str]:
    found = [item for item in caplog.records if item.name == "flowctl.messenger" and item.levelname == level]
    return [item.getMessage() for item in found]


@pytest.mark.parametrize("kind", ["tcp", "ipc", "inproc", "store"])
def test_messengers_when_two_have_one_identity_the_last_is_heard_and_the_other_is_told(make, tmp_path, caplog, kind):
    got = Queue()
    server = make("server")
    address = {"tcp": "tcp://127.0.0.1:0", "inproc": "inproc://twins"}.get(kind, f"ipc://{tmp_path}/s")
    server.listen_for_connection(Destination("s", address), "server", lambda _, message: got.put(message.message))
    where = Destination("s", server.endpoints()[0])

    def start(name: str):
        store = {"open_store": open_store(tmp_path / name)} if kind == "store" else {}
        messenger = make("twin", settings=QUICK, **store)
        return messenger, messenger.make_connection(where)

    older, by_older = start("older.db")
    older.send_message(by_older, "first")
    assert got.get(timeout=WAIT_S) == b"first"
    wait_until(lambda: not older.pending_count(by_older), "the acknowledgement")
    if kind == "store":
        shutil.copy(tmp_path / "older.db", tmp_path / "newer.db")
        shutil.copy(tmp_path / "older.db-wal", tmp_path / "newer.db-wal")
    newer, by_newer = start("newer.db")
    for number in range(20):
        newer.send_message(by_newer, b"%d" % number)
    wait_until(lambda: older.taken_over(by_older), "the older one is told")
    older.send_message(by_older, "lost")
    newer.send_message(by_newer, "last")
    assert sorted(got.get(timeout=WAIT_S) for _ in range(21)) == sorted(
        [*(b"%d" % item for item in range(20)), b"last"]
    )
    server.send_message((0, "twin"), "to the newer one")
    wait_until(lambda: newer.statistics().received == 1, "it is sent to")
    assert (older.pending_count(by_older), older.statistics().received, newer.taken_over(by_newer)) == (1, 0, False)
    assert [item.statistics().duplicates for item in (server, older, newer)] == [1, 1, 0]
    assert (server.duplicate_count(0, "twin"), server.duplicate_count(0, "other")) == (1, 0)
    (warning,), (error,) = logged(caplog, "WARNING"), logged(caplog, "ERROR")
    assert "two messengers come as b'twin' to " + where.endpoint in warning
    shown = {"tcp": "127.0.0.1:", "inproc": "this process"}.get(kind, "localhost:")
    assert warning.count(shown) == 2 + (kind == "tcp")
    assert where.endpoint + " as b'twin', this one stays away" in error
    assert "hint: give each an identity of its own" in warning
    assert "hint: give each an identity" in error


def test_messenger_when_it_does_not_heed_that_it_was_taken_over_is_refused_and_told_of_once(make, raw, address, caplog):
    server = make("server")
    server.listen_for_connection(Destination("s", address), "server")
    stubborn = raw(zmq.DEALER, b"twin", connect=address, incarnation=7)

    def send(number: int) -> None:
        stubborn.send_multipart([b"", b"%d-0-0-x" % number, Extension(7, number + 1).encode()])

    send(0)
    assert stubborn.recv_multipart()[2] == b"0-0-2-7:0-0"
    newer = make("twin", settings=QUICK)
    connection = newer.make_connection(Destination("s", address))
    newer.send_message(connection, "hello")
    wait_until(lambda: server.statistics().received == 2, "the newer one")
    wait_until(lambda: stubborn.poll(50) or send(1), "an answer to one that was cut off")
    assert stubborn.recv_multipart()[2] == b"0-0-2-7:taken-over"
    for number in range(2, 50):
        send(number)
    newer.send_message(connection, "still here")
    wait_until(lambda: server.statistics().received == 3, "the newer one, again")
    assert (server.statistics().duplicates, len(logged(caplog, "WARNING"))) == (1, 1)
    assert not newer.taken_over(connection)


def test_messenger_when_a_raw_peer_had_its_identity_meanwhile_is_heard_again(make, raw, address):
    got, server = Queue(), make("server")
    server.listen_for_connection(Destination("s", address), "server", lambda _, message: got.put(message.message))
    client = make("twin", settings=QUICK)
    connection = client.make_connection(Destination("s", address))
    client.send_message(connection, "before")
    assert got.get(timeout=WAIT_S) == b"before"
    raw(zmq.DEALER, b"twin", connect=address).send_multipart([b"", b"900-0-0-raw"])
    assert got.get(timeout=WAIT_S) == b"raw"
    client._on_thread(client._connections[connection].hang_up)
    client.send_message(connection, "behind")
    assert got.get(timeout=WAIT_S) == b"behind"
    wait_until(lambda: not client.pending_count(connection), "the acknowledgement")
    assert (got.qsize(), server.statistics().duplicates, client.taken_over(connection)) == (0, 0, False)


def test_listeners_when_two_lives_take_turns_at_one_address_are_told_of(make, raw, address, caplog):
    """As behind an address that leads to two machines: what one has acknowledged the other does not know."""
    client = make("client", settings=QUICK)
    connection = client.make_connection(Destination("s", address))
    for life in (5, 6, 5):
        client.send_message(connection, "hello")
        router = raw(zmq.ROUTER, bind=address, incarnation=life)
        while (frames := router.recv_multipart())[2:] == []:
            pass  # it shows itself where it was before
        router.send_multipart([frames[0], b"server", b"", frames[2].split(b"-")[0] + b"-0-2-"])
        wait_until(lambda: not client.pending_count(connection), "the acknowledgement")
        router.close(linger=0)
    wait_until(lambda: client.statistics().duplicates == 1, "it is counted")
    (warning,) = logged(caplog, "WARNING")
    assert f"two messengers answer in turn at {address}" in warning


def test_messenger_when_its_identity_was_taken_before_it_was_heard_notices_by_the_silence(make, address, monkeypatch):
    """As of two that start at once: the listener has not heard of the first. It comes again, so now it is the last."""
    monkeypatch.setattr(peer, "SILENCE_S", 0.1)
    got, server = Queue(), make("server")
    server.listen_for_connection(Destination("s", address), "server", lambda _, message: got.put(message.message))
    messengers = [make("twin", settings=QUICK) for _ in range(2)]
    (first, by_first), (second, by_second) = ((item, connected(item, address)) for item in messengers)
    second.send_message(by_second, "second")
    assert got.get(timeout=WAIT_S) == b"second"
    first.send_message(by_first, "first")
    assert got.get(timeout=WAIT_S) == b"first"
    wait_until(lambda: second.taken_over(by_second), "the other one is told")
    assert not first.taken_over(by_first)


def test_messenger_when_a_raw_peer_is_silent_keeps_its_connection(make, raw, address, monkeypatch):
    """It need not answer (ME-39), and without handover it would not take a second connection of an identity."""
    monkeypatch.setattr(peer, "SILENCE_S", 0.1)
    router = raw(zmq.ROUTER, bind=address)
    accepted = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
    client = make("client", settings=QUICK)
    connection = client.make_connection(Destination("s", address))
    client.send_message(connection, "hello")
    router.recv_multipart()
    router.send_multipart([b"client", b"server", b"", b"0-0-0-reply"])
    wait_until(lambda: client.statistics().received == 1, "the reply")
    for _ in range(12):
        router.recv_multipart()
    accepted.recv_multipart()
    again = accepted.poll(0)
    router.disable_monitor()
    accepted.close(linger=0)
    assert not again


def connected(messenger, address: str) -> int:
    """Connect, and wait until that is so."""
    connection = messenger.make_connection(Destination("s", address))
    wait_until(lambda: messenger._connections[connection].link_to(b"") is not None, "the connection")
    return connection
