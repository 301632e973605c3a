"""What viewers and publishers of a load run share: one connection of a worker, from SYN to its row of the results.

Theory of operation. A link connects without blocking, shakes hands (of TLS before, where the address says so) and asks
for its stream through the sans-I/O `ClientSession`, or over HTTP through `HttpSpeech`. Then the derived class takes
over what comes in (`input`). A link ends exactly once, in `end`, which says how; whatever the reason, its row is
complete then. Nothing here raises towards the reactor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.loop.tls import TlsSocket, with_tls
from flowctl.core.loop.trust import step_of_handshake
from flowctl.core.text.addresses import join_host_port
from flowctl.errors import RemoteProtocolError
from flowctl.load.peers.http import HTTP_SCHEMES, HttpSpeech
from flowctl.load.peers.ownfault import OWN_FAULTS
from flowctl.load.peers.reactor import READ, WRITE, Reactor
from flowctl.load.results.result import PeerEnd, PeerResult
from flowctl.wire.client.base import Status, status_of
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.events import ClientEvent, HandshakeDone, Rejected
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import Message

PENDING_MAX_BYTES: Final = 64 * 1024
"""Most octets of a viewer that may wait to be sent: a server that does not read acknowledgements needs none."""

LINGER_S: Final = 0.5
"""Time that a link that leaves waits for the server to close."""

HANDSHAKE_BYTES: Final = 1 + 1536 + 1536
_PIECE_BYTES: Final = 256 * 1024
SCRATCH: Final = memoryview(bytearray(_PIECE_BYTES))
"""All links of a process read into the same memory; what they keep of it they copy."""

_CUTS: Final = frozenset({PeerEnd.SERVER_CLOSED, PeerEnd.SERVER_RESET, PeerEnd.ERROR})


@dataclass(frozen=True, slots=True)
class Target:
    """Where links connect to.

    Args:
        address: resolved once, so that what was checked is what is used.
    """

    family: int
    address: tuple[Any, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class PeerLink:
    """One connection; derive from it and override `input`, `event` and `tuned`.

    Attributes:
        began: start of the run on `time.monotonic`.
        sees_end: whether it would hear of it if the server ended the connection.
        shaken: whether the handshake is done.
        leaving: how it will have ended when the server has closed. None: it does not leave.
        out: what the kernel has not taken yet.
        context: what its TLS goes by. None: it speaks none.
    """

    reactor: Reactor
    target: Target
    url: RtmpUrl
    result: PeerResult
    config: ClientSessionConfig
    began: float
    on_end: Callable[[Any], None]
    asks: Callable[[ClientSession], None] = ClientSession.play
    connected: bool = False
    ended: bool = False
    sees_end: bool = True
    shaken: bool = False
    session: ClientSession | HttpSpeech | None = None
    sock: socket.socket | None = None
    started: float = 0.0  # when it began to connect
    leaving: tuple[PeerEnd, str] | None = None
    out: bytearray = field(default_factory=bytearray)
    context: ssl.SSLContext | None = None
    _tls: TlsSocket | None = None  # the same socket, where it speaks TLS
    _watched: int = 0  # events asked of epoll
    _half_closed: bool = False  # we have closed the sending half and went on reading

    # -- for derived classes

    def tuned(self, sock: socket.socket) -> None:
        """Set options of the socket before it connects."""

    def input(self, now: float) -> None:
        """Read the input that is there."""
        self.read_session(now, _PIECE_BYTES)

    def event(self, event: ClientEvent, now: float) -> None:
        """Handle an event of the session."""

    def ending(self, now: float) -> None:
        """Complete the row; called once, before `on_end`."""

    # -- connecting

    def start(self, source: str, timeout_s: float) -> None:
        """Begin to connect."""
        now = time.monotonic()
        self.started = now
        self.result.started_s = max(now - self.began, 0.0)  # timers are good for half a millisecond
        self.reactor.call_at(now + timeout_s, self._timed_out)
        try:
            sock = socket.socket(self.target.family, socket.SOCK_STREAM)
        except OSError as error:
            self.end(PeerEnd.TESTER_FAILED, f"no socket: {error.strerror}", now)
            return
        self.sock = sock
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.tuned(sock)
            if source and self.target.family == socket.AF_INET:
                # The port is chosen when it connects: one per pair of addresses, not one of all there are.
                sock.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
                sock.bind((source, 0))
            code = sock.connect_ex(self.target.address)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            self.end(PeerEnd.TESTER_FAILED if code in OWN_FAULTS else PeerEnd.NOT_CONNECTED, os.strerror(code), now)
            return
        self._watched = WRITE
        self.reactor.add(sock.fileno(), self, WRITE)

    def _timed_out(self, now: float) -> None:
        if not self.ended and not self.shaken:
            what = "handshake" if self.connected else "connection"
            self.end(PeerEnd.NOT_CONNECTED, f"no {what} within {now - self.started:.1f} s", now)

    def _established(self, now: float) -> None:
        sock = self.sock
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.end(PeerEnd.NOT_CONNECTED, os.strerror(code), now)
            return
        self.connected = True
        self.result.connect_s = now - self.started
        self.result.address = join_host_port(*sock.getsockname()[:2])
        if self.context is None:
            self.watch(READ)
            self._speak(now)
        else:
            self.sock = self._tls = with_tls(sock, self.context, host=self.url.host)
            self._shake(self._tls, now)

    def _shake(self, sock: TlsSocket, now: float) -> None:
        """Go on with the handshake of TLS; speak when it is done."""
        try:
            wanted = step_of_handshake(sock)
        except RemoteProtocolError as error:
            self.end(PeerEnd.NOT_CONNECTED, error.with_hint, now)
            return
        self.watch(wanted or READ)
        if not wanted:
            self._speak(now)

    def _speak(self, now: float) -> None:
        """Say what the peer is here for."""
        if self.url.scheme in HTTP_SCHEMES:
            self.session = HttpSpeech(self.url)
        else:
            self.session = session = ClientSession(self.config, now=now)
            self.asks(session)
            session.connect(self.url)
        self.send(self.session.data_to_send(), now)

    # -- input and output

    def ready(self, events: int, now: float) -> None:
        """Handle readiness of the socket."""
        try:
            if not self.connected:
                self._established(now)
                return
            tls = self._tls
            if tls is not None and not tls.established:
                self._shake(tls, now)
                return
            if events & WRITE:
                self._flush(now)
            if events & ~WRITE and not self.ended:
                if self.leaving is not None:
                    self._drain(now)
                elif events & READ or self._watched & READ:
                    self.input(now)
                    # Of what is left in TLS the descriptor does not tell.
                    while tls is not None and self._watched & READ and not self.over and tls.pending_input():
                        self.input(now)
                else:
                    self.check_end(now)
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken(error, now)
        except RemoteProtocolError as error:
            self.end(PeerEnd.ERROR, f"{error.code}: {error}", now)
        except Exception as error:  # noqa: BLE001 - a mistake of ours ends one peer, not thousands, and says so
            self.end(PeerEnd.TESTER_FAILED, f"in the load tester: {type(error).__name__}: {error}", now)

    def watch(self, events: int) -> None:
        """Ask to be told of these events, and of room to write while something waits."""
        mask = events | (WRITE if self.out or (self._tls is not None and self._tls.kept_bytes) else 0)
        if mask != self._watched and self.sock is not None and not self.ended:
            self._watched = mask
            self.reactor.watch(self.sock.fileno(), mask)

    def send(self, octets: bytes, now: float) -> bool:
        """Send, or keep what the kernel does not take; return False and forget it when too much waits already."""
        if not octets or self.sock is None or self.ended or self._half_closed:
            return True  # after our own FIN the kernel would say EPIPE, which looks like a reset of the server
        if self.out:
            if len(self.out) > PENDING_MAX_BYTES:
                return False
            self.out += octets
            return True
        try:
            sent = self.sock.send(octets)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._broken(error, now)
            return False
        self.out += octets[sent:]
        self.watch(self._watched)
        return True

    def half_close(self) -> None:
        """Close the sending half, and go on reading; nothing is sent any more, what waits to be sent is forgotten."""
        if self.sock is None:
            return
        self.out.clear()
        self._half_closed = True
        self.watch(self._watched & ~WRITE)
        socket.socket.shutdown(self.sock, socket.SHUT_WR)  # of TLS too: its own way would end reading

    def _flush(self, now: float) -> None:
        if self._tls is not None and not self._tls.push():
            return
        if self.out and self.sock is not None:
            sent = self.sock.send(self.out)
            del self.out[:sent]
        if not self.out:
            self.watch(self._watched & ~WRITE)
            self.drained(now)

    def drained(self, now: float) -> None:
        """Go on sending when much waits."""

    def receive(self, most: int, now: float) -> int:
        """Read into `SCRATCH`; return how much, 0 when the link has ended."""
        if self.sock is None:
            return 0
        count = self.sock.recv_into(SCRATCH, min(most, _PIECE_BYTES))
        if not count:
            self.closed_by_server(now)
            return 0
        self.result.wire_bytes += count
        return count

    def read_session(self, now: float, most: int) -> memoryview:
        count = self.receive(most, now)
        octets = SCRATCH[:count]
        session = self.session
        if count and session is not None:
            events = session.receive(octets, now)
            self.send(session.data_to_send(), now)
            for event in events:
                if not isinstance(event, Message):
                    self._note(event, now)
                    self.event(event, now)
                    if self.ended:
                        break
        return octets

    def _note(self, event: ClientEvent, now: float) -> None:
        if isinstance(event, HandshakeDone):
            self.shaken = True
            self.result.handshake_s = now - self.started - (self.result.connect_s or 0.0)
        elif isinstance(event, Rejected):
            self.result.end_code = event.code or None
            self.end(PeerEnd.REFUSED, f"{event.what} refused: {event.description or event.code}", now)
        elif (status := status_of(event)) is not None:
            self.note_status(status)

    def note_status(self, status: Status) -> None:
        """Remember the server's last error, or the status with which it ended the stream."""
        if status.explains_end:
            self.result.end_code = status.code
            self.result.end_details = status.description[:200]

    # -- ending

    def check_end(self, now: float) -> None:
        """End a link that is not being read: it was reset, or all that came before its end fits our buffer."""
        if self.sock is None:
            return
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._broken(OSError(code, os.strerror(code)), now)
        else:
            self.closed_by_server(now)

    def closed_by_server(self, now: float) -> None:
        """The server has ended its stream of bytes."""
        words = "closed by the server" if self.shaken else "closed before the handshake was done"
        self._end_by_server(PeerEnd.SERVER_CLOSED, words, now)

    def _broken(self, error: OSError, now: float) -> None:
        self._end_by_server(PeerEnd.SERVER_RESET, error.strerror or str(error), now)

    def _end_by_server(self, end: PeerEnd, words: str, now: float) -> None:
        """End as a connection that the other side has ended."""
        if self.leaving is not None:
            self.end(*self.leaving, now)
        elif not self.connected:
            self.end(PeerEnd.NOT_CONNECTED, words, now)
        elif not self.shaken:
            self.end(PeerEnd.REFUSED, words, now)
        else:
            self.end(end, self._end_reason() or words, now)

    def _end_reason(self) -> str:
        """Return why the server has ended it, by its own words or by what we did; "" when neither tells."""
        if self.result.end_details or not self._half_closed:
            return self.result.end_details
        return "after this peer had closed its sending half"

    def leave(self, end: PeerEnd, details: str, farewell: Sequence[bytes], now: float) -> None:
        """Leave in order: say farewell, close the sending half, and wait a moment for the server to close."""
        sock = self.sock
        if self.ended or self.leaving is not None:
            return
        self.leaving = (end, details)
        if sock is None or not self.shaken:
            self.end(end, details, now)
            return
        for octets in farewell:
            self.send(octets, now)
        if self.sock is None:
            return  # it broke while we said farewell
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self.out.clear()
        self.watch(READ)
        self.reactor.call_at(now + LINGER_S, self._linger_over)

    @property
    def over(self) -> bool:
        """Whether it has ended, or only waits for the server to close."""
        return self.ended or self.leaving is not None

    def _linger_over(self, now: float) -> None:
        if not self.ended and self.leaving is not None:
            self.end(*self.leaving, now)

    def _drain(self, now: float) -> None:
        """Throw away what comes while the link waits for the server to close."""
        if self.sock is not None and not self.sock.recv_into(SCRATCH, _PIECE_BYTES, socket.MSG_TRUNC):
            self.closed_by_server(now)

    def end(self, end: PeerEnd, details: str, now: float) -> None:
        """End, once: complete the row, close the socket, tell `on_end`."""
        if self.ended:
            return
        self.ended = True
        self.connected = False
        result = self.result
        result.end = end
        result.end_details = details[:200]
        result.ended_s = now - self.began
        result.cut = end in _CUTS if self.sees_end else None
        sock, self.sock = self.sock, None
        self.session = None
        self.out.clear()
        self.ending(now)
        if sock is not None:
            self.reactor.remove(sock.fileno())
            sock.close()
        self.on_end(self)
