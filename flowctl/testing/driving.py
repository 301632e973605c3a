"""Drive a `Session` in a test: real connection, Sender and Receiver; the socket, the thread and the clock are made up.

How it works. `MemoryWire` stands for the socket: what the peer sends is put into it, and it takes what is sent. A
`HandGroup` stands for the poll group: what would be done by its thread is done by `turn`. Coroutine handlers run on an
event loop that is turned along, and whose time is the manual clock's, so `asyncio.sleep` costs none.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from typing import ClassVar, Final, TypeVarTuple, Unpack, cast

from flowctl.connection import Connection, Session
from flowctl.core.connecting.core import ConnectionCore
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import DropPolicy
from flowctl.core.loop.deadlines import Deadlines
from flowctl.core.loop.processor import DeferredProcessor
from flowctl.core.loop.work import ThreadWork
from flowctl.core.sending.settings import SenderSettings
from flowctl.deferred import Registration
from flowctl.pollgroup import GroupState, PollGroup
from flowctl.reasons import CloseReason
from flowctl.testing.host import ManualClock, ManualGroup

_Ts = TypeVarTuple("_Ts")
_MOST_TURNS: Final = 5000
_STEP_S: Final = 0.01
_SCRATCH_BYTES: Final = 256 * 1024
_PEER: Final = ("192.0.2.1", 40_000)


class MemoryWire:
    """Both directions of a connection in memory; the server's socket, as far as a connection uses one."""

    family: Final = socket.AF_UNIX
    _numbers: ClassVar[Iterator[int]] = itertools.count(1000)

    def __init__(self, peer: tuple[str, int]) -> None:
        self.peer = peer
        self.number = next(self._numbers)
        self.up, self.down = bytearray(), bytearray()  # octets on their way to the server, and to the client
        self.room: int | None = None  # octets that `down` takes before it says EAGAIN. None: any number
        self.piece = 1 << 20  # octets that one read returns at most
        self.ended = self.closed = self.reset = False  # by the peer; by the server, and that with a reset
        self.broken: OSError | None = None  # of the next read or write

    def setblocking(self, _flag: bool) -> None:  # noqa: FBT001 - the signature of a socket
        """Do nothing: nothing here blocks."""

    def setsockopt(self, _level: int, option: int, _value: object) -> None:
        """Note what makes the close a reset."""
        self.reset = self.reset or option == socket.SO_LINGER

    def getpeername(self) -> tuple[str, int]:
        return self.peer

    def getsockopt(self, level: int, option: int, _size: int | None = None) -> int:
        """Return the pending error; there are no figures of TCP."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            return errno.ECONNRESET if self.broken is not None else 0
        raise OSError(errno.EOPNOTSUPP, "this is no TCP socket")

    def fileno(self) -> int:
        """Return a number that is no descriptor."""
        return -1 if self.closed else self.number

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def recv_into(self, memory: memoryview) -> int:
        self._check()
        count = min(len(memory), len(self.up), self.piece)
        if not count:
            if self.ended:
                return 0
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        memory[:count] = self.up[:count]
        del self.up[:count]
        return count

    def recv(self, most: int, _flags: int = 0) -> bytes:
        self._check()
        data = bytes(self.up[:most])
        del self.up[:most]
        if not data and not self.ended:
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        return data

    def send(self, data: bytes | memoryview) -> int:
        self._check()
        count = len(data) if self.room is None else min(len(data), max(self.room - len(self.down), 0))
        if not count:
            raise BlockingIOError(errno.EAGAIN, "full")
        self.down += data[:count]
        return count

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, _how: int) -> None:
        self._check()

    def close(self) -> None:
        self.closed = True


class HandGroup(ManualGroup):
    """A poll group that is turned by hand: what a connection needs of one, and `turn`."""

    state = GroupState.RUNNING
    name = "hand"

    def __init__(self, clock: ManualClock | None = None) -> None:
        super().__init__(clock)
        self.processor = DeferredProcessor(lambda: None, self.report)
        self.deadlines = Deadlines(self._arm, self.report)
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.bytes_in = self.bytes_out = 0
        self.failures: list[tuple[str, BaseException]] = []  # where a handler raised, and what
        self.inputs: dict[MemoryWire, Callable[[], object]] = {}
        self.outputs: dict[MemoryWire, Callable[[], object]] = {}
        self.ends: dict[MemoryWire, Callable[[bool], object]] = {}
        self.work = ThreadWork(self.call_soon)
        self.gathered: dict[MemoryWire, bool] = {}  # whether a wire's input may wait for more
        self._loop: _ManualLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of coroutine handlers; made when first asked for."""
        if self._loop is None:
            self._loop = _ManualLoop(self)
            weakref.finalize(self, self._loop.close)
        return self._loop

    def report(self, where: str, error: BaseException) -> None:
        self.failures.append((where, error))

    def _arm(self, when: float) -> None:
        self.call_later(max(0.0, when - self.clock()), lambda: self.deadlines.run_due(self.clock()))

    def add_pollable(self, pollable: ConnectionCore, registration: Registration) -> None:
        """Have `pollable` live here at once, as a poll group does soon."""
        registration.bind(self.processor, hold=True)
        pollable.attached(cast("PollGroup", self))
        registration.activate()

    def remove_pollable(self, pollable: ConnectionCore) -> None:
        """Have it live here no longer."""
        pollable.detached(cast("PollGroup", self))
        pollable.host.registration.unbind()

    def watch_input(self, wire: MemoryWire, callback: Callable[[], object], *, gather: bool = False) -> None:
        self.ends.pop(wire, None)
        self.inputs[wire] = callback
        self.gathered[wire] = gather

    def watch_end(self, wire: MemoryWire, callback: Callable[[bool], object]) -> None:
        """Call when the connection has broken; its input is not read."""
        self.inputs.pop(wire, None)
        self.ends[wire] = callback

    def unwatch_input(self, wire: MemoryWire) -> None:
        self.inputs.pop(wire, None)
        self.ends.pop(wire, None)

    def watch_output(self, wire: MemoryWire, callback: Callable[[], object]) -> None:
        self.outputs[wire] = callback

    def unwatch_output(self, wire: MemoryWire) -> None:
        self.outputs.pop(wire, None)

    rest_output = unwatch_output

    def turn(self) -> bool:
        """Do what a turn of the loop would; return whether there was anything to do."""
        busy = False
        for wire, callback in list(self.inputs.items()):
            if wire in self.inputs and (wire.up or wire.ended or wire.broken):
                callback()
                busy = True
        for wire, callback in list(self.outputs.items()):
            if wire in self.outputs and (wire.broken or wire.room is None or wire.room > len(wire.down)):
                callback()
                busy = True
        for wire, broken in list(self.ends.items()):
            if wire in self.ends and wire.broken:
                del self.ends[wire]
                broken(True)
                busy = True
        pending = self.processor.statistics().pending
        self.processor.run_round()
        self.run()
        if self._loop is not None:
            busy = self._loop.step() or busy
        return busy or bool(pending) or bool(self.processor.statistics().pending)


class _ManualLoop(asyncio.SelectorEventLoop):
    """An event loop that is turned by hand, with the group's time."""

    def __init__(self, group: HandGroup) -> None:
        self._group = weakref.ref(group)
        self._clock = group.clock
        self._made = 0  # callbacks scheduled so far
        super().__init__()

    def time(self) -> float:
        return self._clock()

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._made += 1
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        group = self._group()
        if group is not None:
            group.call_later(max(0.0, when - group.clock()), self.step)
        return super().call_at(when, callback, *args, context=context)

    def step(self) -> bool:
        """Run what is ready; return whether more became ready by it."""
        if self.is_closed() or self.is_running():
            return False
        self.call_soon(self.stop)
        before = self._made
        self.run_forever()
        return self._made > before


class Driven:
    """A session and its connection, driven by a test; see `drive`.

    Attributes:
        session: the session.
        connection: its connection, as it would be in a server.
        clock: the time, which `run` moves.
        failures: every (where, exception) of the session's handlers.
    """

    def __init__(self, connection: Connection, session: Session, group: HandGroup, wire: MemoryWire) -> None:
        self.session: Final = session
        self.connection: Final = connection
        self.clock: Final = group.clock
        self.failures: Final = group.failures
        self._group: Final = group
        self._wire: Final = wire

    def receive(self, data: bytes, *, piece_bytes: int = 1 << 20) -> bytes:
        """Have the peer send `data`, and return what it is sent then.

        Args:
            data: any octets.
            piece_bytes: what one read finds at most; 1 hands them over one by one.
        """
        self._wire.up += data
        self._wire.piece = piece_bytes
        return self.run()

    def run(self, seconds: float = 0.0) -> bytes:
        """Let `seconds` pass, timers and coroutines included, until everything is quiet; return what the peer was sent.

        Raises:
            AssertionError: it does not come to rest.
        """
        end = self.clock() + seconds
        step = max(_STEP_S, seconds / 1000)
        self._settle()
        while self.clock() < end:
            self._group.run(min(step, end - self.clock()))
            self._settle()
        return self.sent()

    def sent(self) -> bytes:
        """Return and forget what the peer was sent and `receive` or `run` has not returned."""
        data = bytes(self._wire.down)
        if self._wire.room is not None:
            self._wire.room = max(0, self._wire.room - len(data))
        self._wire.down.clear()
        return data

    def take(self, count: int | None) -> bytes:
        """Have the peer take `count` octets more and then nothing, until told otherwise; return what it was sent.

        Args:
            count: number of octets; 0 is a peer that has stopped reading. None: it takes everything again.
        """
        self._wire.room = count
        return self.run()

    def end_input(self) -> bytes:
        """Have the peer end its stream in order; return what it was sent then."""
        self._wire.ended = True
        return self.run()

    def break_off(self) -> None:
        """Have the connection break: the peer is gone without a word."""
        self._wire.broken = ConnectionResetError(errno.ECONNRESET, "reset by peer")
        self.run()

    @property
    def closed(self) -> tuple[CloseReason, str] | None:
        """Why the connection ended, and the details. None: it has not."""
        return self.connection.ended

    def _settle(self) -> None:
        for _ in range(_MOST_TURNS):
            if not self._group.turn():
                return
        raise AssertionError(f"{_MOST_TURNS} turns without an end in sight: the session always has more to do")


def drive(
    session: Session,
    *,
    limits: Limits = NO_LIMITS,
    policy: DropPolicy | None = None,
    settings: SenderSettings | None = None,
    peer: tuple[str, int] = _PEER,
    clock: ManualClock | None = None,
) -> Driven:
    """Return `session` on a connection of its own, opened: no socket, no thread, and no time that passes by itself.

    Args:
        session: of any class, plain handlers or coroutine functions.
        limits: of its Sender.
        policy: of its Sender. None: nothing is dropped.
        settings: of its Sender.
        peer: address and port of the peer.
        clock: shared with others. None: one of its own.
    """
    group, wire = HandGroup(clock), MemoryWire(peer)
    connection = Connection(
        cast("socket.socket", wire), session, limits=limits, policy=policy, settings=settings, clock=group.clock
    )
    connection.live_on(cast("PollGroup", group))
    driven = Driven(connection, session, group, wire)
    driven._settle()  # noqa: SLF001 - `opened` is called
    return driven
