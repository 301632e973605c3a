"""The inside of a connection that speaks TLS: the handshake, and what else its socket waits for.

What reading needs to go on may be to write, and the other way round. So the socket is watched for output while TLS
waits for that, as well as for the Sender; and the descriptor does not tell of input that was decrypted already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flowctl.core.connecting.core import ConnectionCore
from flowctl.core.connecting.host import ConnectionHost
from flowctl.core.loop.jobs import Purpose
from flowctl.core.loop.tls import HANDSHAKE_S, TlsSocket
from flowctl.errors import RemoteProtocolError
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason

_NEVER: Final = float("inf")
_SECURE: Final = Purpose("TLS output")
_SECURE_INPUT: Final = Purpose("TLS input")


class SecureHost(ConnectionHost):
    """The host of a Sender whose output TLS encrypts: the socket is watched for both."""

    __slots__ = ("secure",)
    secure: SecureCore

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - the protocol's signature
        self.secure.tls.write_waits = wanted
        self.secure.watch_output()


class SecureCore(ConnectionCore):
    """The inside of one connection that speaks TLS; `sock` is a `TlsSocket`."""

    __slots__ = ("tls",)
    host_class = SecureHost

    def __init__(self, owner: Any, sock: Any, *args: Any) -> None:
        super().__init__(owner, sock, *args)
        self.tls: Final[TlsSocket] = sock
        self.host.secure = self  # type: ignore[attr-defined]  # it is of `host_class`
        if not sock.established:
            sock.handshake_by = self.opened_at + HANDSHAKE_S
        sock.on_kept = partial(self.host.registration.run_soon, self.watch_output, _SECURE)

    def _reader(self) -> Callable[[memoryview], int]:
        return self._read

    def attached(self, group: PollGroup) -> None:
        first = self._home is None
        super().attached(group)
        if self.ending is not None:
            return
        if first and not self.tls.server_side:
            self._input_ready()  # the client speaks first
        if not self.host.sender.blocked:
            self.watch_output()

    def _last_words(self, reason: CloseReason, details: str) -> bytes:
        return super()._last_words(reason, details) if self.tls.established else b""  # they cannot be said

    # -- input

    def _read(self, buffer: memoryview) -> int:
        tls = self.tls
        if not tls.established:
            return self._step_of_handshake(buffer)
        began = self.host.now()
        try:
            count = tls.recv_into(buffer)
        except BlockingIOError:
            self._charge(began)  # what held no data is work all the same
            if tls.read_wants_write:
                self.watch_output()
            raise
        if tls.pending_input():  # the descriptor does not tell of it
            self.host.registration.run_soon(self.receiver.input_ready, _SECURE_INPUT)
        return count

    def _step_of_handshake(self, buffer: memoryview) -> int:
        """Go on with the handshake: it is the peer's work, and waits where there is no time for it in this turn."""
        tls, group = self.tls, self.group
        if group is not None and tls.server_side and (group.work.handshakes_wait or self.work.turn_over):
            raise BlockingIOError  # it stays readable: the loop asks again in its next turn
        began = self._begin_turn()
        try:
            return tls.recv_into(buffer)
        finally:
            took_s = self._charge(began)
            if group is not None:
                group.work.handshake(took_s)
            if tls.established:
                tls.handshake_by = _NEVER
                self._arm()
            self.watch_output()

    def _input_ready(self) -> None:
        """Go on with reading; while input is held, with the handshake alone."""
        if self.host.over or self.receiver.reading:
            self.receiver.input_ready()
            return
        try:
            self._step_of_handshake(memoryview(bytearray()))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, RemoteProtocolError) as error:
            self.process_error(error)
            return
        if self.tls.established:
            self.reading_changed(self.receiver.reading)
        else:
            self.terminate(CloseReason.PEER_CLOSED, "")

    def reading_changed(self, wanted: bool) -> None:  # noqa: FBT001 - the Receiver's signature
        group = self.group
        if group is not None and not wanted and not self.tls.established:
            # What is to be sent waits for the handshake, and may be what the hold is about.
            group.watch_input(self.tls, self._input_ready)
            return
        super().reading_changed(wanted)
        if group is not None and wanted:
            self.watch_output()
            if self.tls.pending_input():
                self.host.registration.run_soon(self.receiver.input_ready, _SECURE_INPUT)

    # -- output

    def watch_output(self) -> None:
        """Watch the socket for output while TLS waits for that, or the Sender does and TLS can help it."""
        group, tls = self.group, self.tls
        if group is None or self.host.over:
            return
        reads = self.receiver.reading or not tls.established  # else its wish waits for the end of the hold
        if (tls.read_wants_write and reads) or (tls.established and (tls.kept_bytes or tls.write_waits)):
            group.watch_output(tls, self._output_ready)
        else:
            group.unwatch_output(tls)

    def _output_ready(self) -> None:
        """The kernel takes more: go on with what waits for it, in the order in which it came."""
        tls = self.tls
        if tls.read_wants_write:
            self._input_ready()
        try:
            free = tls.push()
        except OSError as error:
            self.host.sender.broken(error.with_traceback(None))
            return
        if free and tls.write_waits:
            self.host.sender.writable()
        self.watch_output()

    # -- deadlines

    def _arm(self, at_latest: float = _NEVER) -> None:
        super()._arm(min(at_latest, self.tls.handshake_by))

    def deadline_due(self, now: float) -> None:
        if now >= self.tls.handshake_by:
            self.tls.handshake_by = _NEVER
            self.terminate(CloseReason.HANDSHAKE_TIMEOUT, f"the TLS handshake took more than {HANDSHAKE_S:g} s")
        super().deadline_due(now)
