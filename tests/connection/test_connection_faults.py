"""One connection's fault is one connection's: whatever a handler raises, the others on its thread notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from connection_kit import WAIT_S, Noting, wait_until

from flowctl.connection import Session
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.reasons import CloseReason

NO_EXCEPTIONS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
HANDLERS = ["opened", "received", "peer_ended", "timer", "input_resumed", "ledger_entry", "closed"]


def echoes(peer, session) -> bool:
    before = len(session.got)
    peer.sendall(b"still here")
    wait_until(lambda: len(session.got) == before + 10)
    return True


@pytest.mark.parametrize("kind", [ValueError, *NO_EXCEPTIONS])
@pytest.mark.parametrize("name", HANDLERS)
def test_handler_when_it_raises_anything_ends_only_its_connection(link, failures, name, kind):
    neighbour = Noting()
    _, other = link(neighbour)
    closed = threading.Event()

    def fail(*args):
        raise kind(name)

    failing = type("Failing", (Noting,), {name: fail})()
    connection, peer = link(failing, on_closed=lambda _: closed.set())
    if name == "timer":
        assert connection.call_soon(lambda: connection.set_timer(connection.now())) in {True, False}
    elif name == "input_resumed":
        connection.receiver.trigger_input()
    elif name == "ledger_entry":
        connection.pause_input("test", "test")
    elif name == "received":
        peer.sendall(b"x")
    elif name in {"peer_ended", "closed"}:
        peer.shutdown(socket.SHUT_WR)
    assert closed.wait(WAIT_S)
    assert connection.core.host.sock.fileno() == -1
    assert connection.ended[0] is (CloseReason.PEER_CLOSED if name == "closed" else CloseReason.INTERNAL)
    assert failing.calls.count("closed") == (name != "closed")
    assert echoes(other, neighbour)
    wait_until(lambda: failures)
    failures.clear()


@pytest.mark.parametrize("kind", NO_EXCEPTIONS)
def test_send_state_changed_when_it_raises_what_is_no_exception_leaves_the_sender_whole(link, failures, kind):
    class Failing(Noting):
        def send_state_changed(self, state, change) -> None:
            self.edges.append(change)
            raise kind

    session = Failing()
    connection, _ = link(
        session, tcp=True, options=SocketOptions(send_buffer_bytes=4096), limits=Limits.parse("100KiB,0", "9MiB,0")
    )
    wait_until(lambda: session.calls)
    while connection.sender.state < SendState.SOFT_LIMIT:
        connection.sender.send(b"x" * 50_000)
    assert [change.new for change in session.edges][-1] is SendState.SOFT_LIMIT
    connection.close(CloseReason.KICKED, "bye")
    assert session.wait_end() == (CloseReason.KICKED, "bye")
    wait_until(lambda: failures)
    failures.clear()


@pytest.mark.parametrize("kind", [ValueError, *NO_EXCEPTIONS])
def test_closed_when_it_raises_for_one_is_called_for_all_others(link, groups, failures, kind):
    class Failing(Noting):
        def closed(self, reason, details) -> None:
            super().closed(reason, details)
            raise kind("closed")

    def fail(connection) -> None:
        raise kind("on_closed")

    sessions = [Failing() for _ in range(5)]
    connections = [link(session, on_closed=fail)[0] for session in sessions]
    wait_until(lambda: all(session.calls == ["opened"] for session in sessions))
    assert groups[0].stop(WAIT_S)
    assert [session.ends for session in sessions] == [[(CloseReason.SHUTDOWN, "poll group one stopped")]] * 5
    assert {connection.core.host.sock.fileno() for connection in connections} == {-1}
    assert len(failures) == 10
    failures.clear()


def test_jobs_when_an_application_uses_flowctls_names_are_not_taken_for_its_own(link):
    """An application may call its jobs and holds as it likes; the connection still reads, calls, pauses and closes."""
    ran = []

    class Named(Noting):
        def opened(self) -> None:
            super().opened()
            for name in ("close", "receiver", "calls", "ledger", "deadline", "flush"):
                self.connection.core.host.registration.job(lambda name=name: ran.append(name), name)

    session = Named()
    connection, peer = link(session)
    wait_until(lambda: session.calls)
    assert echoes(peer, session)
    called = threading.Event()
    assert connection.call_soon(called.set)
    assert called.wait(WAIT_S)
    for owner in ("opening", "receiver"):
        connection.pause_input(owner, owner)
        connection.resume_input(owner)
    assert echoes(peer, session)
    wait_until(lambda: len(session.entries) == 4, "the ledger's entries")
    connection.close(CloseReason.KICKED, "bye")
    assert session.wait_end() == (CloseReason.KICKED, "bye")
    assert ran == []


def test_opening_when_the_application_resumes_that_name_stays_held(link):
    class Opening(Noting):
        gate = None

        async def opened(self) -> None:
            self.gate = asyncio.Event()
            self.connection.resume_input("opening")
            self.connection.receiver.resume("opening")
            await self.gate.wait()
            self._note("opened")

    session = Opening()
    connection, peer = link(session)
    peer.sendall(b"x")
    wait_until(lambda: session.gate is not None)
    done = threading.Event()
    assert connection.call_soon(lambda: (session.gate.set(), done.set()))
    assert done.wait(WAIT_S)
    wait_until(lambda: bytes(session.got) == b"x")
    assert session.calls == ["opened", "received"]


# -- coroutines


class Ending(Session):
    def __init__(self, how) -> None:
        self.how, self.ends, self.over = how, [], threading.Event()

    def closed(self, reason, details) -> None:
        self.ends.append((reason, details))
        self.over.set()


async def cancel_itself() -> None:
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def await_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(WAIT_S))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def exit_now() -> None:
    raise SystemExit(2)


async def interrupt() -> None:
    raise KeyboardInterrupt


async def give_up() -> None:
    raise GeneratorExit


@pytest.mark.parametrize("where", ["opened", "received"])
@pytest.mark.parametrize("how", [cancel_itself, await_cancelled, exit_now, interrupt, give_up])
def test_coroutine_when_it_does_not_return_ends_its_connection(link, failures, where, how):
    neighbour = Noting()
    _, other = link(neighbour)

    async def handler(self, *args):
        await self.how()

    session = type("Coroutine", (Ending,), {where: handler})(how)
    _, peer = link(session)
    with contextlib.suppress(BrokenPipeError):  # where `opened` has ended it already
        peer.sendall(b"x")
    assert session.over.wait(WAIT_S), "the connection hangs"
    assert session.ends[0][0] is CloseReason.INTERNAL
    assert echoes(other, neighbour)
    assert [name.split(": ")[1].startswith(where) for name, _ in failures] == [True]
    failures.clear()


def test_coroutine_when_cancelled_by_the_end_is_not_reported(link, groups):
    class Waiting(Ending):
        async def received(self, data) -> None:
            self.how.set()
            await asyncio.Event().wait()

    started = threading.Event()
    session = Waiting(started)
    connection, peer = link(session)
    peer.sendall(b"x")
    assert started.wait(WAIT_S)
    connection.close(CloseReason.KICKED, "bye")
    assert session.over.wait(WAIT_S)
    assert session.ends == [(CloseReason.KICKED, "bye")]
    assert groups[0].statistics().errors == 0
