"""A faulty link between two ends that speak ZeroMQ: whole messages are lost, doubled, late, overtaken; it is cut.

Theory of operation. TCP loses nothing, and ZeroMQ sends nothing again: what is lost in life is what was under way when
a connection ended. To lose more than that, one has to stand between the two, below ZeroMQ and above TCP: connections
are passed on as octets, but what passes is cut into the messages of ZMTP 3 (RFC 23), and for each the dice are thrown.
So handshakes, properties, routing ids and heartbeats of the two ends are their own, and no frame of a message is ever
parted from the others. CURVE is passed on too; it has a nonce that counts, so nothing but cutting is possible there.

Dice are thrown with a seed: the same messages in the same order meet the same faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import threading
from dataclasses import dataclass, field
from typing import Final

_GREETING_BYTES: Final = 64
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_READ_BYTES: Final = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to messages, in each direction.

    Args:
        duplicate: share that comes twice, the second one late.
    """

    drop: float = 0.2
    duplicate: float = 0.05
    late: float = 0.1
    late_s: float = 0.02
    cut_messages: int = 0


@dataclass
class Passed:
    """What a link did so far."""

    messages: int = 0  #: that came, from both ends
    dropped: int = 0
    duplicated: int = 0
    late: int = 0
    cuts: int = 0  #: connections cut
    connections: int = 0


@dataclass
class _Way:
    """One direction of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kept: bytearray = field(default_factory=bytearray)  # the beginning of a message
    greeting_bytes: int = _GREETING_BYTES  # of the greeting, that are still to come; sent in parts that are answered


class FaultyLink:
    """A link to one end; the others connect to its `address`. A thread of its own, until `stop`.

    Attributes:
        address: where to connect to, once `start` has returned.
    """

    def __init__(self, port: int, faults: Faults, seed: int) -> None:
        self.address = ""
        self.passed: Final = Passed()
        self.faults = faults  # may be replaced while it runs
        self.port = port  # of the receiver; another one from the next connection on
        self._dice: Final = random.Random(seed)
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._run, name="faulty-link", daemon=True)
        self._ready: Final = threading.Event()
        self._ends: Final = asyncio.Event()

    def start(self) -> None:
        """Listen, and return once that is so."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End all connections, and the thread."""
        with contextlib.suppress(RuntimeError):  # stopped before
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(task)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._ends.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on between one connection and the other end until one of them, or the dice, ends it."""
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
            writers.append(far_writer)
            self.passed.connections += 1
            ways = (_Way(reader, far_writer), _Way(far_reader, writer))
            tasks = [asyncio.ensure_future(self._pass_on(way)) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            pass  # the other end is not there: the one that connected tries again
        except asyncio.CancelledError:
            pass  # by `stop`; streams of Python 3.11 log a cancelled handler as an error
        finally:
            for item in writers:
                item.transport.abort()  # as a cable that is pulled: what is under way is lost

    async def _pass_on(self, way: _Way) -> None:
        while octets := await way.reader.read(_READ_BYTES):
            if way.greeting_bytes:
                greeting = octets[: way.greeting_bytes]
                way.greeting_bytes -= len(greeting)
                way.writer.write(greeting)
                octets = octets[len(greeting) :]
            way.kept += octets
            out, cut = self._cast(way)
            if out:
                way.writer.write(b"".join(out))
            if cut:
                self.passed.cuts += 1
                return
            await way.writer.drain()

    def _cast(self, way: _Way) -> tuple[list[bytes], bool]:
        """Throw the dice for each whole message; return what passes now, and whether the connection is cut."""
        dice, faults, passed = self._dice.random, self.faults, self.passed
        out: list[bytes] = []
        for message, is_command in _take_messages(way.kept):
            if is_command:
                out.append(message)
                continue
            passed.messages += 1
            if faults.cut_messages and dice() * faults.cut_messages < 1:
                return out, True
            if dice() < faults.drop:
                passed.dropped += 1
                continue
            if dice() < faults.duplicate:
                passed.duplicated += 1
                self._later(way, message)
            if dice() < faults.late:
                passed.late += 1
                self._later(way, message)
            else:
                out.append(message)
        return out, False

    def _later(self, way: _Way, message: bytes) -> None:
        self._loop.call_later(self._dice.random() * self.faults.late_s, self._write_late, way.writer, message)

    def _write_late(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        if not writer.transport.is_closing():
            writer.write(message)


def _take_messages(kept: bytearray) -> list[tuple[bytes, bool]]:
    """Take the whole messages out of `kept`, each with all its frames, and whether it is a command."""
    found: list[tuple[bytes, bool]] = []
    begin = at = 0
    size = len(kept)
    while at < size:
        flags = kept[at]
        if flags & _LONG:
            if at + 9 > size:
                break
            end = at + 9 + int(struct.unpack_from(">Q", kept, at + 1)[0])
        else:
            if at + 2 > size:
                break
            end = at + 2 + kept[at + 1]
        if end > size:
            break
        at = end
        if not flags & _MORE:
            found.append((bytes(kept[begin:at]), bool(flags & _COMMAND)))
            begin = at
    del kept[:begin]
    return found
