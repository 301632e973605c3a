"""What publisher and player share: an RTMP client session on a connection, its one timer, and how it ended.

How it works: `RtmpClient` is a `flowctl.Session` over the sans-I/O `ClientSession`. Octets go in, events come out and
are handed to the derived class; what the protocol wants to say goes out in the Sender's control lane, before
the media that waits. A connection has one timer; the protocol's deadline and the derived class's wish share it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from flowctl.connection import Session
from flowctl.core.flow.state import MessageClass
from flowctl.core.text.printable import printable
from flowctl.errors import InternalError
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.commands import ENDING_CODES, RECONNECT_REQUEST
from flowctl.wire.rtmp.events import ClientEvent, ReconnectRequested, Rejected, StatusReceived, StreamEnded
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.states import ClientState
from flowctl.wire.rtmp.url import RtmpUrl
from flowctl.wire.rtmp.wire import Message

LEAVE_S: Final = 5.0
"""Longest time that leaving may go on without progress, as `SenderSettings.close_deadline_s`."""

_LEAVE_LOOK_S: Final = 0.02
_BY_SERVER: Final = frozenset({CloseReason.PEER_CLOSED, CloseReason.PEER_RESET})

BEFORE_HANDSHAKE: Final = "before the handshake was done"
"""How a connection ends with a server that speaks something else."""

STATUSES_KEPT: Final = 32
"""Statuses remembered of one connection; servers send about five. Later ones are counted only."""

DEFAULT_CONFIG: Final = ClientSessionConfig()
"""One object for all clients that want nothing special."""


@dataclass(frozen=True, slots=True)
class Status:
    """One thing that the server said with ``onStatus`` or a refusal."""

    level: str
    code: str
    description: str

    @property
    def explains_end(self) -> bool:
        """Whether a connection that ends behind it ends for this."""
        return self.level == "error" or self.code in ENDING_CODES


def status_of(event: ClientEvent) -> Status | None:
    """Return what the server said with an event; None for one without words of its own."""
    match event:
        case StatusReceived():
            return Status(event.level, event.code, event.description)
        case Rejected():
            return Status("error", event.code, event.description)
        case ReconnectRequested():
            return Status("status", RECONNECT_REQUEST, event.description)
        case StreamEnded():
            return Status("status", event.reason, "")
    return None


@dataclass(frozen=True, slots=True)
class ClientEnd:
    # as the connection saw it: FINISHED where we closed it ourselves, PEER_CLOSED, PEER_RESET and so on.
    reason: CloseReason
    details: str
    # the last error that the server told us, or what it ended the stream with. None: it said neither.
    status: Status | None
    after_s: float

    @property
    def as_wanted(self) -> bool:
        """Whether we ended it ourselves, in order, and the server had nothing to complain about."""
        refused = self.status is not None and self.status.level == "error"
        return self.reason is CloseReason.FINISHED and not refused

    def as_dict(self) -> dict[str, Any]:
        status = self.status
        return {
            "reason": self.reason.value,
            "details": self.details,
            "code": None if status is None else status.code,
            "description": None if status is None else status.description,
            "after_s": round(self.after_s, 3),
        }

    def __str__(self) -> str:
        # Reasons are worded for servers, whose peers are clients; here it is the other way round.
        reason = self.reason.value.replace("peer", "server")
        text = reason + (f" ({self.details})" if self.details else "")
        if self.status is not None:
            description = f": {self.status.description}" if self.status.description else ""
            text += f"; the server said {self.status.code}{description}"
        return printable(text)  # a line: what the server says may hold breaks of lines


@dataclass(slots=True, eq=False, repr=False)
class RtmpClient(Session):
    """One RTMP client; derive from it and override `media`, `event` and `due`.

    What it is for is said when it is made: ``self._protocol.play()`` or ``self._protocol.publish()``.
    """

    url: RtmpUrl
    _: KW_ONLY
    config: ClientSessionConfig = DEFAULT_CONFIG
    parameters: str = ""  # what authentication appends to the connect
    on_end: Callable[[Any], None] | None = None  # called with the client when it has ended
    statuses: list[Status] = field(default_factory=list)  # what the server said, oldest first, at most `STATUSES_KEPT`
    rejected: Rejected | None = None  # the server's refusal. None: it has not refused us.
    end: ClientEnd | None = None  # how it ended. None: it has not.
    # set by `flowctl.wire.client.connect`; used to look whether a peer we do not read is still there.
    sock: socket.socket | None = None
    _protocol: ClientSession = field(init=False)
    _due_at: float | None = None
    _leaving: str | None = None  # why we are leaving; None: we are not
    _leave_by: float = 0.0  # when leaving is given up
    _leave_look: float | None = None  # when to look next how leaving goes
    _left_bytes: int = 0  # what was queued when we looked last
    _shut: bool = False  # the sending half is closed: nothing more may be sent

    def __post_init__(self) -> None:
        self._protocol = ClientSession(self.config)

    # -- for derived classes to override; all on the connection's thread

    def media(self, message: Message, now: float) -> None:
        """Handle one audio, video or data message."""

    def event(self, event: ClientEvent, now: float) -> None:
        """Handle any other event."""

    def due(self, now: float) -> None:
        """Do what was asked for with `wake_at`."""

    def send_last(self, data: bytes) -> None:
        """Send the end of the stream, not in the control lane: it must not overtake the media that it follows."""
        self.connection.sender.send(data, MessageClass.DATA, droppable=False)

    # -- for derived classes to use

    def wake_at(self, when: float | None) -> None:
        """Call `due` at `when`, instead of at an earlier wish. None: not at all."""
        self._due_at = when
        self._arm(self.connection.now())

    def flush_protocol(self) -> None:
        data = self._protocol.data_to_send()
        if data and not self._shut:
            self.connection.sender.send(data, MessageClass.CONTROL)

    def finish(self, details: str) -> None:
        """Leave the stream in order, send what is queued, and close when the server has closed as well.

        Closing at once would lose data: when input waits unread in the kernel, or comes later, it resets the connection
        and forgets what it had not delivered yet (RFC 1122 section 4.2.2.13). So the sending half is closed first, and
        reading goes on until the server has closed, or for `LEAVE_S` without any progress. A client that does not read
        on purpose cannot wait for that; it has nothing to deliver either, and closes at once.
        """
        if self._leaving is not None or self.end is not None or self.connection.sender.closed:
            return
        self._leaving = details
        protocol = self._protocol
        if protocol.stream_id:
            protocol.close_stream()
            data = protocol.data_to_send()
            if data:
                self.send_last(data)
        if self.connection.receiver.paused:
            self.connection.close_after_flush(details)
            return
        self._leave_by = self.connection.now() + LEAVE_S
        self._leave(self.connection.now())

    @property
    def ended(self) -> bool:
        return self.end is not None

    # -- the connection's calls

    def opened(self) -> None:
        self._protocol.connect(self.url, parameters=self.parameters)
        self.flush_protocol()
        self._arm(self.connection.now())

    def received(self, data: memoryview) -> None:
        now = self.connection.now()
        try:
            for event in self._protocol.receive(data, now):
                if isinstance(event, Message):
                    self.media(event, now)
                else:
                    self._take_event(event, now)
        finally:
            self.flush_protocol()
        self._arm(now)

    def timer(self, now: float) -> None:
        if self._leave_look is not None and now >= self._leave_look:
            self._leave(now)
        due_at = None if self._leaving is not None else self._due_at
        if due_at is not None and now >= due_at:
            self._due_at = None
            self.due(now)
        if self.end is None and not self.connection.sender.closed:
            self._protocol.tick(now)
            self.flush_protocol()
        self._arm(now)

    def peer_ended(self) -> bool:
        """The server has closed: the end we wait for when leaving, otherwise the end all the same."""
        if self._leaving is None:
            return False
        self.connection.close(CloseReason.FINISHED, self._leaving)
        return True

    def closed(self, reason: CloseReason, details: str) -> None:
        if self._shut and reason is CloseReason.PEER_RESET:
            # All was sent, and it is up to the server in which way it closes.
            reason, details = CloseReason.FINISHED, self._leaving or details
        if reason in _BY_SERVER and self._protocol.state is ClientState.HANDSHAKE:
            details = details or BEFORE_HANDSHAKE
        explaining = [status for status in self.statuses if status.level == "error"]
        explaining = explaining or [status for status in self.statuses[-1:] if status.explains_end]
        after_s = self.connection.now() - self.connection.opened_at
        self.end = ClientEnd(reason, details, explaining[-1] if explaining else None, after_s)
        self.sock = None
        if self.on_end is not None:
            self.on_end(self)

    def _leave(self, now: float) -> None:
        """Carry out the next step of leaving: close the sending half when all is sent; give up when nothing moves."""
        queued_bytes = self.connection.sender.load().size_bytes
        if queued_bytes != self._left_bytes:
            self._left_bytes = queued_bytes
            self._leave_by = now + LEAVE_S
        if not queued_bytes and not self._shut and self.sock is not None:
            self._shut = True
            self._leave_by = now + LEAVE_S
            with contextlib.suppress(OSError):  # the server was faster
                self.sock.shutdown(socket.SHUT_WR)
        if now >= self._leave_by:
            self.connection.close(CloseReason.FINISHED if self._shut else CloseReason.STUCK, self._leaving or "")
        self._leave_look = self._leave_by if self._shut else now + _LEAVE_LOOK_S
        self._arm(now)

    def _take_event(self, event: ClientEvent, now: float) -> None:
        status = status_of(event)
        if status is not None and not (self.statuses and isinstance(event, StreamEnded)):
            self.statuses = [*self.statuses[1 - STATUSES_KEPT :], status]  # the last ones say how it ended
        if isinstance(event, Rejected):
            self.rejected = event
            self.connection.close_after_flush(f"{event.what} refused")
        self.event(event, now)

    def _arm(self, now: float) -> None:
        if self.end is not None or self.connection.sender.closed:
            return
        times = [] if self._leave_look is None else [self._leave_look]
        if self._due_at is not None and self._leaving is None:
            times.append(self._due_at)
        deadline = self._protocol.next_deadline(now)
        if deadline is not None:
            times.append(deadline)
        self.connection.set_timer(min(times) if times else None)


def peer_gone(sock: socket.socket | None) -> bool:
    """Return whether the other end has closed or reset a connection that is not being read.

    A reader learns it from `recv`; who does not read has to ask the kernel for the state (TCP_INFO, its first octet).
    Where there is no such question to be asked, the answer is False.
    """
    if sock is None or sock.fileno() < 0:
        return True
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return False
    try:
        state = sock.getsockopt(socket.IPPROTO_TCP, option, 1)
    except OSError as error:
        raise InternalError(f"the state of a socket cannot be read: {error}") from error
    return bool(state) and state[0] in _ENDED_STATES


_ENDED_STATES: Final = frozenset({7, 8, 9})
"""TCP_CLOSE, TCP_CLOSE_WAIT and TCP_LAST_ACK of Linux, include/net/tcp_states.h."""
