"""What the tests of connections and servers share: sessions that note everything, connections on groups, waiting."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from flowctl.connection import Connection, Session
from flowctl.pollgroup import PollGroup

WAIT_S = 20


def wait_until(condition, what="it"):
    """Return the first true value of `condition()`; fail when none comes."""
    end = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {WAIT_S} s"
        time.sleep(0.002)
    return value


def ask(connection, function, *args):
    done, answers = threading.Event(), []
    assert connection.call_soon(lambda: (answers.append(function(*args)), done.set()))
    assert done.wait(WAIT_S)
    return answers[0]


class Noting(Session):
    """Notes what it is told; `answer` decides what `received` returns."""

    def __init__(self, answer=None) -> None:
        self.answer = answer or (lambda data: None)
        self.got = bytearray()
        self.calls, self.ends, self.edges, self.entries = [], [], [], []
        self.threads = set()
        self.over = threading.Event()
        self.stays = False

    def _note(self, what) -> None:
        self.calls.append(what)
        self.threads.add(threading.get_ident())

    def opened(self) -> None:
        self._note("opened")

    def received(self, data):
        self._note("received")
        answer = self.answer(bytes(data))
        self.got += data if answer is None else data[:answer]
        return answer

    def peer_ended(self) -> bool:
        self._note("peer_ended")
        return self.stays

    def timer(self, now) -> None:
        self._note("timer")

    def send_state_changed(self, state, change) -> None:
        self.edges.append(change)

    def ledger_entry(self, entry) -> None:
        self.entries.append(entry)

    def closed(self, reason, details) -> None:
        self._note("closed")
        self.ends.append((reason, details))
        self.over.set()

    def wait_end(self):
        """Return (reason, details) once the connection is over."""
        assert self.over.wait(WAIT_S)
        return self.ends[0]


class Reader(threading.Thread):
    def __init__(self, sock) -> None:
        super().__init__(daemon=True)
        self.sock, self.data, self.error = sock, bytearray(), None
        sock.settimeout(WAIT_S)
        self.start()

    def run(self) -> None:
        try:
            while data := self.sock.recv(65536):
                self.data += data
        except OSError as error:
            self.error = error
        finally:
            self.sock.close()

    def wait(self) -> bytes:
        """Return everything that came, once it has ended."""
        self.join(WAIT_S)
        assert not self.is_alive()
        return bytes(self.data)


@pytest.fixture
def failures():
    """What the groups reported; a test that expects some empties it."""
    found = []
    yield found
    assert found == []


@pytest.fixture
def groups(loop_factory, failures):
    """Two poll groups on their own threads."""
    made = [
        PollGroup(name, loop_factory=loop_factory, on_error=lambda *error: failures.append(error))
        for name in ("one", "two")
    ]
    for group in made:
        group.start()
    yield made
    for group in made:
        assert group.stop(WAIT_S)


@pytest.fixture
def link(groups):
    """Make connections on the first group: (connection, socket of the peer)."""
    sockets = []

    def make(session, *, tcp=False, **options):
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                peer = socket.create_connection(listener.getsockname(), WAIT_S)
                ours, _ = listener.accept()
        else:
            ours, peer = socket.socketpair()
        peer.settimeout(WAIT_S)
        sockets.append(peer)
        connection = Connection(ours, session, **options)
        connection.live_on(groups[0])
        return connection, peer

    yield make
    for peer in sockets:
        with contextlib.suppress(OSError):
            peer.close()
