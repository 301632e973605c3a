"""A connection of an attacker: a socket on the running loop, and as much RTMP as is needed to get where it hurts.

Nothing here is checked or hidden: octets of any kind can be sent at any time, nothing is acknowledged, no ping is
answered, and what is not asked for is not read. The well-behaved steps (handshake, connect, createStream, publish,
play) use the wire code of `flowctl.wire.rtmp`, each with its own wait for the answer.

Sockets are used through the loop's ``sock_`` calls rather than streams: a transport reads ahead, so a peer that is to
leave its data in the kernel could not be made of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flowctl.core.text.addresses import join_host_port
from flowctl.errors import RemoteProtocolError
from flowctl.load.hostile.secrecy import Secrecy
from flowctl.load.peers.ownfault import TesterFailedError, own_fault
from flowctl.wire.client.base import peer_gone
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.chunk.writer import ChunkWriter
from flowctl.wire.rtmp.handshake import Handshake
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import Command, decode_message
from flowctl.wire.rtmp.wire import (
    TYPE_AUDIO,
    TYPE_COMMAND_AMF0,
    TYPE_COMMAND_AMF3,
    TYPE_VIDEO,
    Message,
)

_READ_BYTES: Final = 256 * 1024
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 10.0
"""Time that the server has to answer a request, as `ClientSessionConfig.reply_time_s`."""
_LENIENT_LIMITS: Final = WireLimits(chunk_size_min_bytes=1, chunk_streams=1024)
"""Limits on what the server sends: an attacker does not complain about its manners."""
_COMMANDS: Final = frozenset({TYPE_COMMAND_AMF0, TYPE_COMMAND_AMF3})
_CHUNK_SIZE: Final = 65536
_FINAL_CODES: Final = frozenset({commands.PLAY_STOP, commands.PLAY_UNPUBLISH_NOTIFY, commands.UNPUBLISH_SUCCESS})
"""Codes by which a server ends a stream without calling it an error."""
_WORDS_KEPT: Final = 200


class PeerGoneError(Exception):
    """The server ended the connection."""


class RefusedError(Exception):
    """The server refused a request."""


class UnreachableError(Exception):
    """The server did not answer."""


@dataclass(eq=False)
class Peer:
    """One connection; not connected yet."""

    host: str
    port: int
    app: str
    rng: random.Random
    query: str = ""  # what is brought behind the name of a stream
    secrecy: Secrecy | None = None  # its TLS. None: it speaks none.
    opened: bool = False
    connect_s: float | None = None
    handshake_s: float | None = None  # time of the handshake. None: it is not done.
    spoke: bool = False  # whether the server has sent anything at all
    # how the server ended the connection: ``closed`` or ``reset``. None: it has not.
    ended: Literal["closed", "reset"] | None = None
    refusal: str | None = None  # the server's words when it said no. None: it has not.
    code: str | None = None  # last error or final status code of the server
    last_words: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    frames: int = 0  # audio and video messages read
    media: list[Message] | None = None  # audio and video messages read. None: they are counted only.
    results: int = 0  # answers read, whether awaited or not
    controls: dict[int, int] = field(default_factory=dict)  # messages of types 1 to 6 read, by type
    stream_id: int = 0  # message stream of publish or play; 0 before
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _sock: socket.socket | None = None
    _reader: ChunkReader = field(default_factory=lambda: ChunkReader(_LENIENT_LIMITS))
    _writer: ChunkWriter = field(default_factory=ChunkWriter)
    _inbox: list[Command] = field(default_factory=list)
    _next_id: int = 0

    # -- the socket

    @property
    def sock(self) -> socket.socket:
        if self._sock is None:
            raise PeerGoneError("not connected")
        return self._sock

    async def open(self, *, source: str | None = None, receive_buffer_bytes: int = 0) -> None:
        began = self._loop.time()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive_buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            if source is not None:
                sock.bind((source, 0))
            async with asyncio.timeout(_CONNECT_S):
                await self._loop.sock_connect(sock, (self.host, self.port))
                if self.secrecy is not None:
                    await self.secrecy.shake_hands(self._loop, sock)
        except OSError as error:  # TimeoutError is one
            self.close()
            if own_fault(error):
                raise TesterFailedError(f"cannot connect: {error.strerror}") from error
            raise UnreachableError(f"cannot connect: {error.strerror or 'no answer'}") from error
        self.opened = True
        self.connect_s = self._loop.time() - began

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send octets as they are; waits while the server does not take them."""
        try:
            await self._loop.sock_sendall(self.sock, data if self.secrecy is None else self.secrecy.seal(data))
        except OSError as error:
            await self._hear_last_words()
            raise self._gone_error("reset") from error
        self.sent_bytes += len(data)

    async def read(self) -> bytes:
        """Return the octets that have come, at least one."""
        data = await self._receive(_READ_BYTES)
        self.spoke = True
        return data

    async def read_some(self, most_bytes: int) -> int:
        """Read and discard at most `most_bytes`; return how many came. Raises as `read`."""
        return len(await self._receive(most_bytes))

    async def _receive(self, most_bytes: int) -> bytes:
        try:
            if self.secrecy is None:
                data = await self._loop.sock_recv(self.sock, most_bytes)
            else:
                data = await self.secrecy.receive(self._loop, self.sock, most_bytes)
        except OSError as error:
            raise self._gone_error("reset") from error
        if not data:
            raise self._gone_error("closed")
        self.received_bytes += len(data)
        return data

    async def read_to_end(self) -> None:
        """Read and handle messages until the server ends the connection; does not raise then."""
        with contextlib.suppress(PeerGoneError):
            while True:
                await self.pump()

    async def _hear_last_words(self) -> None:
        """After a failed write: the server may have said why before it closed."""
        with contextlib.suppress(PeerGoneError, RemoteProtocolError, TimeoutError):
            async with asyncio.timeout(0.2):
                while True:
                    await self.pump()

    def _gone_error(self, how: Literal["closed", "reset"]) -> PeerGoneError:
        if self.ended is None:
            self.ended = how
        return PeerGoneError(f"the server {'closed' if how == 'closed' else 'reset'} the connection")

    def check_open(self) -> None:
        """Ask the kernel, without reading, whether the server has ended the connection."""
        if peer_gone(self.sock):
            raise self._gone_error("reset")

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def reset(self) -> None:
        with contextlib.suppress(OSError, PeerGoneError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    # -- RTMP

    async def handshake(self) -> None:
        began = self._loop.time()
        shake = Handshake.client("simple", self.rng)
        await self.write(shake.start())
        async with _answer_in_time("handshake"):
            while not shake.done:
                reply = shake.receive(await self.read())
                if reply:
                    await self.write(reply)
        self.handshake_s = self._loop.time() - began
        self._feed(shake.leftover)

    async def pump(self) -> None:
        """Read once and handle the messages: statuses, refusals, counts."""
        self._feed(await self.read())

    def _feed(self, data: bytes) -> None:
        if self.handshake_s is None:
            return  # what a server says to a broken handshake is not for us to read
        for message in self._reader.feed(data):
            if message.type_id in (TYPE_AUDIO, TYPE_VIDEO):
                self.frames += 1
                if self.media is not None:
                    self.media.append(message)
            elif message.type_id in _COMMANDS:
                self._take_command(message)
            elif message.type_id < TYPE_AUDIO:
                self.controls[message.type_id] = self.controls.get(message.type_id, 0) + 1

    def _take_command(self, message: Message) -> None:
        command = decode_message(message, _LENIENT_LIMITS)
        if not isinstance(command, Command):
            return
        self.results += command.name == "_result"
        status = commands.first_properties(list(command.arguments))
        code, level = commands.text(status.get("code")), commands.text(status.get("level"))
        if code and (level == "error" or code in _FINAL_CODES):
            self.code = code
            self.last_words = f"{code}: {commands.text(status.get('description'), _WORDS_KEPT)}"
        if len(self._inbox) < 256:
            self._inbox.append(command)

    def chunks(self, message: Message) -> bytes:
        """Return a message as chunks of the size that we announced last."""
        return self._writer.write(message)

    async def send(self, message: Message) -> None:
        await self.write(self._writer.write(message))

    async def command(self, name: str, *values: Any, stream_id: int = 0, transaction_id: float | None = None) -> float:
        if transaction_id is None:
            self._next_id += 1
            transaction_id = float(self._next_id)
        await self.send(commands.command(name, transaction_id, *values, stream_id=stream_id))
        return transaction_id

    async def call(self, name: str, *values: Any, stream_id: int = 0) -> Command:
        return await self.answer(await self.command(name, *values, stream_id=stream_id), name)

    async def answer(self, transaction_id: float, what: str) -> Command:
        """Wait for the answer to a command that was sent. Raises as `call`."""

        def wanted(command: Command) -> bool:
            return command.name in ("_result", "_error") and command.transaction_id == transaction_id

        command = await self._wait_command(what, wanted)
        if command.name == "_error":
            raise self._refusal_error(what)
        return command

    async def _wait_command(self, what: str, fits: Callable[[Command], bool]) -> Command:
        async with _answer_in_time(what):
            while True:
                while self._inbox:
                    if fits(command := self._inbox.pop(0)):
                        return command
                await self.pump()

    def _refusal_error(self, what: str) -> RefusedError:
        self.refusal = self.last_words or what
        return RefusedError(f"{what} refused")

    async def connect(self, *, app: str | None = None, tc_url: str | None = None, **members: Any) -> None:
        """Send connect and wait for consent; announces a chunk size of 64 KiB first."""
        await self.write(self._writer.set_chunk_size(_CHUNK_SIZE))
        await self.call("connect", self.connect_object(app=app, tc_url=tc_url, **members))

    def connect_object(self, *, app: str | None = None, tc_url: str | None = None, **members: Any) -> dict[str, Any]:
        name = self.app if app is None else app
        scheme = "rtmp" if self.secrecy is None else "rtmps"
        usual = f"{scheme}://{join_host_port(self.host, self.port)}/{name}"
        return {
            "app": name,
            "type": "nonprivate",
            "flashVer": "FMLE/3.0 (compatible; flowctl hostile)",
            "tcUrl": usual if tc_url is None else tc_url,
            "objectEncoding": 0.0,
            **members,
        }

    async def create_stream(self) -> int:
        reply = await self.call("createStream", None)
        value = reply.arguments[0] if reply.arguments else 1.0
        return int(commands.number(value, 1.0))

    async def check_alive(self) -> None:
        """See that the server still answers on this connection."""
        with contextlib.suppress(RefusedError):
            await self.call("_checkbw", None)
        self.refusal = None

    async def publish(self, name: str) -> None:
        """Publish `name`; returns when the server agrees."""
        self.stream_id = await self.create_stream()
        await self.command("publish", None, self._named(name), "live", stream_id=self.stream_id)
        await self.wait_status("publish")

    async def play(self, name: str) -> None:
        """Ask to play `name`; does not wait for the answer."""
        self.stream_id = await self.create_stream()
        await self.command("play", None, self._named(name), -2000.0, stream_id=self.stream_id)

    def _named(self, name: str) -> str:
        return f"{name}?{self.query}" if self.query else name

    async def wait_status(self, what: str) -> str:
        """Wait for the next ``onStatus``; return its code."""
        command = await self._wait_command(what, lambda command: command.name == "onStatus")
        status = commands.first_properties(list(command.arguments))
        if commands.text(status.get("level")) == "error":
            raise self._refusal_error(what)
        return commands.text(status.get("code"))

    async def wait_frames(self, count: int) -> None:
        while self.frames < count:
            await self.pump()

    def media_message(self, type_id: int, timestamp: int, payload: bytes) -> Message:
        return Message(4 if type_id == TYPE_AUDIO else 6, timestamp, type_id, self.stream_id, payload)


@contextlib.asynccontextmanager
async def _answer_in_time(what: str) -> AsyncIterator[None]:
    """Limit the time of an answer: one that is late counts as one that never came."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            yield
    except TimeoutError as error:
        raise UnreachableError(f"no answer to {what} within {_ANSWER_S:g} s") from error
