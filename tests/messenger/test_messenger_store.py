"""Messengers with stores: what was sent and what was seen outlive them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Queue

import pytest

from flowctl.core.outcomes.backoff import Backoff
from flowctl.errors import LocalProtocolError
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination, ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store

WAIT_S = 20.0
QUICK = DeliverySettings(retry=Backoff(first_s=0.02, factor=1.5, most_s=0.1), max_attempts=None)


@pytest.fixture
def make(loop_factory, tmp_path) -> Iterator[Callable[..., Messenger]]:
    """Make messengers with a store each, named as they are; they are stopped at the end."""
    made: list[Messenger] = []

    def new(identity: str, **options) -> Messenger:
        options.setdefault("open_store", open_store(tmp_path / f"{identity}.db"))
        options.setdefault("on_error", lambda where, error: None)
        made.append(Messenger(identity=identity, loop_factory=loop_factory, settings=QUICK, **options))
        made[-1].start()
        return made[-1]

    yield new
    for item in made:
        item.stop()


@pytest.fixture
def here(tmp_path) -> Destination:
    return Destination.ipc("server", f"{tmp_path}/s")


def kept(connection: sqlite3.Connection, message: ReceivedMessage) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS kept (body BLOB)")
    connection.execute("INSERT INTO kept VALUES (?)", (message.message,))


def _set(event: threading.Event, _: sqlite3.Connection) -> None:
    event.set()


def rows(path) -> list[bytes]:
    with sqlite3.connect(path) as connection:
        found = [row[0] for row in connection.execute("SELECT body FROM kept ORDER BY rowid")]
    connection.close()
    return found


def test_messages_when_their_sender_restarts_before_anybody_listens_arrive(make, here):
    """Under their old numbers, before those of the new life, in order."""
    first = make("client")
    connection = first.make_connection(here)
    for number in range(5):
        first.send_message(connection, b"%d" % number, ordered=True)
    stored = threading.Event()
    first.send_message(connection, "5", ordered=True, effect=lambda _: stored.set())
    assert stored.wait(WAIT_S)
    first.stop()
    got = Queue()
    make("server").listen_for_connection(here, "server", lambda _, message: got.put((message.id, message.message)))
    second = make("client")
    assert second.incarnation == first.incarnation
    assert second.send_message(second.make_connection(here), "6", ordered=True) == 6
    assert [got.get(timeout=WAIT_S) for _ in range(7)] == [(number, b"%d" % number) for number in range(7)]


def test_messages_when_sent_just_before_the_end_are_kept(make, here):
    """What was sent is in the store when `stop` returns, whether the loop had got to it or not."""
    first = make("client")
    connection = first.make_connection(here)
    for number in range(300):
        first.send_message(connection, b"%d" % number)
    first.stop()
    got = Queue()
    make("server").listen_for_connection(here, "server", lambda _, message: got.put(message.message))
    make("client").make_connection(here)
    assert sorted((got.get(timeout=WAIT_S) for _ in range(300)), key=int) == [b"%d" % number for number in range(300)]


def test_messages_when_both_sides_restart_again_and_again_are_applied_once(make, here, tmp_path):
    """What the handler keeps and the note that it was seen are in the disk together."""

    def handler(_: Messenger, message: ReceivedMessage) -> None:
        message.apply(lambda connection: kept(connection, message))

    def serve() -> Messenger:
        server = make("server")
        server.listen_for_connection(here, "server", handler)
        return server

    server, sent = serve(), 0
    for life in range(6):
        client = make("client")
        connection = client.make_connection(here)
        stored = threading.Event()
        for number in range(sent, sent + 50):
            effect = partial(_set, stored) if number == sent + 49 else None
            client.send_message(connection, b"%d" % number, ordered=life % 2 == 1, effect=effect)
        sent += 50
        assert stored.wait(WAIT_S)
        if life % 2:
            server.stop()  # in the middle of it
            server = serve()
        client.stop()
    client = make("client")
    done = threading.Event()
    client.send_message(client.make_connection(here), b"%d" % sent, on_ack=lambda *_: done.set())
    assert done.wait(WAIT_S)
    for _ in range(2000):
        if not client.pending_count():
            break
        threading.Event().wait(0.01)
    server.stop()
    assert sorted(rows(tmp_path / "server.db"), key=int) == [b"%d" % number for number in range(sent + 1)]


def test_message_when_its_effect_raises_comes_again(make, here, tmp_path):
    """Nothing of it was kept, so it was not received; then it is, once."""
    tries, done = [], threading.Event()

    def effect(connection: sqlite3.Connection, message: ReceivedMessage) -> None:
        kept(connection, message)
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("not yet")

    server, client = make("server"), make("client")
    server.listen_for_connection(here, "server", lambda _, message: message.apply(lambda item: effect(item, message)))
    client.send_message(client.make_connection(here), "x", on_ack=lambda *_: done.set())
    assert done.wait(WAIT_S)
    server.stop()
    assert rows(tmp_path / "server.db") == [b"x"]


def test_effect_when_there_is_no_store_is_refused(make, here):
    """It could not be kept together with anything."""
    client = make("client", open_store=None)
    with pytest.raises(LocalProtocolError, match="no store"):
        client.send_message(client.make_connection(here), "x", effect=lambda _: None)
    errors = Queue()
    server = make("server", open_store=None, on_error=lambda _, error: errors.put(error))
    server.listen_for_connection(here, "server", lambda _, message: message.apply(lambda _: None))
    client.send_message(client.make_connection(here), "x")
    assert "no store" in str(errors.get(timeout=WAIT_S))


def test_outbox_when_all_is_acknowledged_is_empty(make, here, tmp_path):
    """Pending empties, on the disk too."""
    server, client = make("server"), make("client")
    server.listen_for_connection(here, "server", None)
    connection, left, done = client.make_connection(here), [500], threading.Event()

    def acknowledged(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            done.set()

    for number in range(500):
        client.send_message(connection, b"%d" % number, on_ack=acknowledged)
    assert done.wait(WAIT_S)
    client.stop()
    server.stop()
    with sqlite3.connect(tmp_path / "client.db") as item:
        assert item.execute("SELECT count(*) FROM messenger_outbox").fetchone() == (0,)
    item.close()
    with sqlite3.connect(tmp_path / "server.db") as item:
        assert item.execute("SELECT count(*) FROM messenger_seen").fetchone()[0] <= 4
    item.close()


def test_start_when_it_fails_after_the_store_was_opened_closes_the_store(loop_factory, tmp_path, here):
    """What reads the store, or anything behind that, may fail: the file is free again, and so is a second start."""
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
