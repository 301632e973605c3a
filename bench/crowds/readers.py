"""A crowd of viewers that read what they are told: all that comes, what a line carries, or nothing.

One thread, plain sockets and one epoll. Nothing is parsed: a viewer over RTMP sends what it has to say in two pieces,
one over HTTP in one, and from then on the kernel discards what arrived (MSG_TRUNC) and says how much it was. So a
crowd keeps no bytes of its own, and costs less than the server that it reads from.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Final, Literal, Self

from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.wire import TYPE_COMMAND_AMF0

Scheme = Literal["rtmp", "http"]
STREAM: Final = "crowd"
TICK_S: Final = 0.05
"""A viewer on a line takes so often what its line has brought."""
_SAVED_S: Final = 0.15
"""What a line could have brought and nobody had sent is lost after this: a line saves nothing up."""
_SINK: Final = bytearray(1 << 20)
_HELLO: Final = b"\3" + bytes(1536)
"""Version and first part of the handshake; its second part is what the server said, sent back."""
_ANSWER_BYTES: Final = 1 + 2 * 1536
_PER_ADDRESS: Final = 250


def _request(scheme: Scheme, port: int) -> bytes:
    """Return what a viewer says after the handshake, in one piece: it does not wait for the answers."""
    if scheme == "http":
        return f"GET /live/{STREAM}.flv HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    app = {"app": "live", "flashVer": "LNX 9,0,124,2", "tcUrl": f"rtmp://127.0.0.1:{port}/live"}
    commands = [
        (3, 0, encode("connect", 1, app)),
        (3, 0, encode("createStream", 2, None)),
        (8, 1, encode("play", 3, None, STREAM, -2000)),
    ]
    return b"".join(serialise(TYPE_COMMAND_AMF0, msid, 0, body, csid, 128) for csid, msid, body in commands)


class Viewer:
    """One connection: how far it has come, and what it got since somebody asked."""

    __slots__ = ("bytes", "credit", "heard", "open", "sock", "step", "watched")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.step: Literal["connects", "greets", "asks", "reads"] = "connects"
        self.heard = b""
        self.open = self.watched = True
        self.bytes, self.credit = 0, 0.0


class Readers:
    """So many viewers of one stream of a server on loopback.

    Args:
        viewers: those of the last `join`, also those that the server has closed.
    """

    def __init__(self, count: int, scheme: Scheme = "rtmp") -> None:
        self.count, self.scheme = count, scheme
        self.viewers: list[Viewer] = []
        self._by_fd: dict[int, Viewer] = {}
        self._poll = select.epoll()
        self._request = b""
        self._holds = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        self._poll.close()

    def _leave(self) -> None:
        for viewer in self.viewers:
            self._close(viewer)
        self.viewers.clear()

    @property
    def closed(self) -> int:
        """Viewers that the server has closed, as far as has been read, or never let in."""
        return sum(not viewer.open for viewer in self.viewers)

    def take(self) -> list[int]:
        """Return what each viewer has read since the last time, in bytes."""
        found = [viewer.bytes for viewer in self.viewers]
        for viewer in self.viewers:
            viewer.bytes = 0
        return found

    def join(self, port: int, within_s: float, *, holds: bool = False, timeout_s: float = 30.0) -> float:
        """Connect anew, evenly within a time, until the server has answered all that it lets in; return after how long.

        Viewers that it has answered read all that comes, or with `holds` nothing, until `read`. Those that it has not
        answered in time give up.
        """
        self._leave()
        self._request, self._holds = _request(self.scheme, port), holds
        began = time.monotonic()
        for number in range(self.count):
            self._pump(began + within_s * number / self.count)
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((f"127.0.{1 + number // _PER_ADDRESS}.{1 + number % _PER_ADDRESS}", 0))
            sock.connect_ex(("127.0.0.1", port))
            self.viewers.append(Viewer(sock))
            self._by_fd[sock.fileno()] = self.viewers[-1]
            self._poll.register(sock, select.EPOLLOUT)
        while waiting := [viewer for viewer in self.viewers if viewer.open and viewer.step != "reads"]:
            if time.monotonic() > began + timeout_s:
                for viewer in waiting:
                    self._close(viewer)
                break
            self._pump(time.monotonic() + TICK_S)
        return time.monotonic() - began

    def read(self, seconds: float, *, slow: int = 0, line: float = 0.0) -> None:
        """Let all viewers read for a time: the first `slow` ones what a line of `line` bytes per second carries."""
        self._holds = False
        for number, viewer in enumerate(self.viewers):
            self._watch(viewer, wanted=number >= slow)
        now = brought = time.monotonic()
        end = now + seconds
        while now < end:
            if slow:
                self._bring(self.viewers[:slow], line * (now - brought), line * _SAVED_S)
                brought = now
            self._pump(min(end, now + TICK_S))
            now = time.monotonic()

    def _bring(self, viewers: list[Viewer], more: float, most: float) -> None:
        for viewer in viewers:
            if viewer.open:
                viewer.credit = min(viewer.credit + more, most)
                viewer.credit -= self._receive(viewer, int(viewer.credit))

    def _watch(self, viewer: Viewer, *, wanted: bool) -> None:
        if viewer.open and viewer.watched != wanted:
            if wanted:
                self._poll.register(viewer.sock, select.EPOLLIN)
            else:
                self._poll.unregister(viewer.sock)
            viewer.watched = wanted

    def _pump(self, until: float) -> None:
        """Serve those who are watched until a time, at least once."""
        poll, by_fd = self._poll.poll, self._by_fd
        while True:
            for fd, _ in poll(max(0.0, until - time.monotonic())):
                viewer = by_fd[fd]
                if viewer.step == "reads":
                    self._receive(viewer, len(_SINK))
                else:
                    self._greet(viewer)
            if time.monotonic() >= until:
                return

    def _greet(self, viewer: Viewer) -> None:
        """Take the next step towards the stream: with RTMP a handshake comes before the request."""
        try:
            if viewer.step == "connects":
                viewer.sock.send(_HELLO if self.scheme == "rtmp" else self._request)  # raises where it was refused
                self._poll.modify(viewer.sock, select.EPOLLIN)
                viewer.step = "greets" if self.scheme == "rtmp" else "asks"
            elif viewer.step == "greets":
                piece = viewer.sock.recv(_ANSWER_BYTES - len(viewer.heard))
                viewer.heard += piece
                if len(viewer.heard) == _ANSWER_BYTES:
                    viewer.sock.send(viewer.heard[1 : len(_HELLO)] + self._request)
                    viewer.step, viewer.heard = "asks", b""
                elif not piece:
                    self._close(viewer)
            else:
                viewer.step = "reads"
                self._watch(viewer, wanted=not self._holds)
        except OSError:
            self._close(viewer)

    def _receive(self, viewer: Viewer, most: int) -> int:
        """Read up to so many bytes; return how many there were."""
        if most <= 0:
            return 0
        try:
            count = viewer.sock.recv_into(_SINK, most, socket.MSG_TRUNC)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        viewer.bytes += count
        if not count:
            self._close(viewer)
        return count

    def _close(self, viewer: Viewer) -> None:
        if viewer.open:
            self._watch(viewer, wanted=False)
            del self._by_fd[viewer.sock.fileno()]
            viewer.sock.close()
            viewer.open = False
