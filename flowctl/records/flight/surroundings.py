"""Host and transport of a recorded Sender: the real ones, with their answers noted on the tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flowctl.core.outgoing.transport import Transport
from flowctl.core.sending.contract import SenderHost
from flowctl.records.flight.tape import Tape


class TapedHost:
    """A Sender's host, whose answers are noted; everything else is passed on. See `SenderHost`."""

    __slots__ = (
        "_ask_kernel",
        "_ask_strained",
        "_now",
        "_tape",
        "handler_failed",
        "ledger_grew",
        "limit_unsent",
        "request_flush",
        "set_deadline",
        "terminate",
        "want_writable",
        "wrote",
    )

    def __init__(self, host: SenderHost, tape: Tape) -> None:
        self._tape = tape
        self._now = host.now
        self._ask_kernel = host.kernel_bytes
        self._ask_strained = host.strained
        self.wrote: Final = host.wrote
        self.request_flush: Final = host.request_flush
        self.want_writable: Final = host.want_writable
        self.set_deadline: Final = host.set_deadline
        self.terminate: Final = host.terminate
        self.handler_failed: Final = host.handler_failed
        self.ledger_grew: Final = host.ledger_grew
        self.limit_unsent: Final = host.limit_unsent

    def now(self) -> float:
        """Return the time of the call in progress, else that of the host in whole microseconds."""
        return self._tape.time_s(self._now())

    def in_thread(self) -> bool:
        """Return what was noted with the call in progress."""
        return not self._tape.foreign

    def kernel_bytes(self) -> int:
        """Ask once per call."""
        return self._tape.kernel_bytes(self._ask_kernel)

    def strained(self) -> bool:
        """Ask once per call."""
        return self._tape.strained(self._ask_strained)


class TapedTransport:
    """A transport, of which is noted what each write was offered and took. See `Transport`."""

    __slots__ = ("_tape", "_transport")

    def __init__(self, transport: Transport, tape: Tape) -> None:
        self._transport = transport
        self._tape = tape

    def send(self, data: bytes, /) -> int:
        """Write, and note what came of it."""
        try:
            count = self._transport.send(data)
        except Exception as error:
            self._tape.write_failed(len(data), error)
            raise
        self._tape.wrote(len(data), count)
        return count

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Write, and note what came of it."""
        offered = sum(map(len, buffers))
        try:
            count = self._transport.sendmsg(buffers)
        except Exception as error:
            self._tape.write_failed(offered, error)
            raise
        self._tape.wrote(offered, count)
        return count
