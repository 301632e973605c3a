"""Host and transport of a recorded Sender: the real ones, with their answers noted on the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from flowctl.core.outgoing.transport import Transport
from flowctl.core.sending.contract import SenderHost
from flowctl.records.flight.tape import Tape

_T = TypeVar("_T")


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
        return self._tape.time_s(self._now())

    def in_thread(self) -> bool:
        """Return what was noted with the call in progress."""
        return not self._tape.foreign

    def kernel_bytes(self) -> int:
        return self._tape.kernel_bytes(self._ask_kernel)

    def strained(self) -> bool:
        return self._tape.strained(self._ask_strained)


class TapedTransport:
    """A transport, of which is noted what each write was offered and took. See `Transport`."""

    __slots__ = ("_tape", "_transport")

    def __init__(self, transport: Transport, tape: Tape) -> None:
        self._transport = transport
        self._tape = tape

    def send(self, data: bytes, /) -> int:
        return self._write(self._transport.send, data, len(data))

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        return self._write(self._transport.sendmsg, buffers, sum(map(len, buffers)))

    def _write(self, write: Callable[[_T], int], data: _T, offered_bytes: int) -> int:
        try:
            count = write(data)
        except Exception as error:
            self._tape.write_failed(offered_bytes, error)
            raise
        self._tape.wrote(offered_bytes, count)
        return count
