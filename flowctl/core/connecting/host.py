"""The output side of a connection: what its Sender has as host, of thread, socket and time. See `SenderHost`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.loop.jobs import Purpose
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.loop.sockets import (
    LineFigures,
    SocketOptions,
    limit_unsent,
    line_figures,
    peer_name,
    unacknowledged_bytes,
)
from flowctl.core.sending.contract import NoHost
from flowctl.deferred import Registration
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.sender import Sender

_NEVER: Final = float("inf")
_DEADLINE: Final = Purpose("deadline")
_GONE: Final = NoHost(0.0)


class HostOwner(Protocol):
    """What a host leaves to the core of its connection."""

    def terminate(self, reason: CloseReason, details: str) -> None: ...
    def handler_failed(self, where: str, error: BaseException) -> None: ...
    def ledger_grew(self) -> None: ...


class ConnectionHost:
    """Host of the Sender of one connection, with its socket; a deadline owner."""

    __slots__ = (
        *("_core", "_due", "_flush_job", "_notsent_lowat_bytes"),
        *("group", "now", "number", "over", "owner", "peer", "registration", "sender", "sock"),
    )
    sender: Sender  # made for its host, and set when both are there

    def __init__(
        self,
        number: int,
        owner: Any,
        core: HostOwner,
        sock: socket.socket,
        options: SocketOptions,
        now: Callable[[], float],
        peer: tuple[str, int] | None,
        lock: OwnedLock,
    ) -> None:
        options.apply(sock)
        self.number: Final = number
        self.owner = owner  # the Connection; None once it is over
        self._core: HostOwner = core
        self.sock: Final = sock
        self.now: Final = now
        self.peer: Final = peer or peer_name(sock)
        self.registration: Final = Registration(lock)
        self._notsent_lowat_bytes: Final = options.notsent_lowat_bytes
        self._flush_job: Final = self.registration.job(self._flush, "flush")
        self.group: PollGroup | None = None  # where the connection lives; None on the way between two groups
        self.over = False  # the end has begun: everything is being taken down, once
        self._due = _NEVER  # when the Sender is to tick

    # -- where it lives, told by the core

    def attached(self, group: PollGroup) -> None:
        self.group = group
        if self._due < _NEVER:
            group.deadlines.set(self, self._due)

    def unwatch(self, group: PollGroup) -> None:
        """Watch and time nothing on `group` any more."""
        group.unwatch_input(self.sock)
        group.unwatch_output(self.sock)
        group.deadlines.remove(self)

    def let_go(self) -> None:
        """Forget the connection, for it holds this: it is over."""
        self.owner, self._core = None, _GONE

    # -- SenderHost

    def terminate(self, reason: CloseReason, details: str) -> None:
        self._core.terminate(reason, details)

    def handler_failed(self, where: str, error: BaseException) -> None:
        self._core.handler_failed(where, error)

    def ledger_grew(self) -> None:
        self._core.ledger_grew()

    def in_thread(self) -> bool:
        """Return whether the caller may do what belongs to the owning thread; between two groups no thread may."""
        group = self.group
        return group is not None and group.in_thread()

    def wrote(self, size_bytes: int) -> None:
        group = self.group
        if group is not None:
            group.bytes_out += size_bytes

    def kernel_bytes(self) -> int:
        return unacknowledged_bytes(self.sock)

    def limit_unsent(self, size_bytes: int) -> None:
        most_bytes = self._notsent_lowat_bytes
        limit_unsent(self.sock, min(size_bytes or most_bytes, most_bytes or size_bytes))

    def strained(self) -> bool:
        group = self.group
        return group is not None and group.strained()

    def shared_stall(self) -> StallSpan | None:
        group = self.group
        return None if group is None else group.stall.span(group.now())

    def request_flush(self) -> None:
        self.registration.schedule(self._flush_job)

    def _flush(self) -> None:
        self.sender.flush()

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - the protocol's signature
        group = self.group
        if group is None or self.over:
            return
        if wanted:
            group.watch_output(self.sock, self.sender.writable)
        else:
            group.rest_output(self.sock)

    def set_deadline(self, when: float) -> None:
        group = self.group
        if group is not None and group.in_thread():
            self._set_due(when)
            return
        # A tick on its own thread sets all that is still to come.
        self.registration.run_soon(self.sender.tick, _DEADLINE)

    def _set_due(self, when: float) -> None:
        if when < self._due:
            self._due = when
            if self.group is not None and not self.over:
                self.group.deadlines.set(self, when)

    def deadline_due(self, now: float) -> None:
        """Have the Sender tick; called by the group."""
        del now
        self._due = _NEVER
        self.sender.tick()

    # -- what the kernel knows, for samples

    def line_figures(self) -> LineFigures | None:
        """Return what the kernel knows of the line to the peer; None: nothing, or it is that of a proxy. Any thread."""
        return line_figures(self.sock) if self.peer == peer_name(self.sock) else None

    def taken_bytes(self) -> int:
        """Return what the peer's kernel has acknowledged so far. Any thread."""
        return self.sender.statistics().bytes_sent - unacknowledged_bytes(self.sock)
