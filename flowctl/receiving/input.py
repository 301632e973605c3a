"""What passes between a `Receiver`, its handler and its poll group: answers, protocols and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowctl.loop.deadlines import Deadlines

#: `InputResult.consumed_bytes` for "everything that was offered".
ALL: Final = -1


class Verdict(Enum):
    """What a handler wants after `InputHandler.process_input`."""

    DONE = "done"  #: took `consumed_bytes`; offer the rest, if any, again at once (it must have taken some)
    NEED_MORE = "need more"  #: took `consumed_bytes`; offer the rest again together with what comes next
    BLOCK = "block"  #: took `consumed_bytes`; read nothing and offer nothing until `Receiver.trigger_input`
    ERROR = "error"  #: the input is wrong: deliver `error` to `process_error`, read no more


class InputResult(NamedTuple):
    """The answer of `InputHandler.process_input`."""

    verdict: Verdict
    consumed_bytes: int = ALL  #: 0 to the length offered; `ALL` for all of it
    error: Exception | None = None  #: for ERROR; None: a `RemoteProtocolError` is made


#: The usual answers, made once.
DONE: Final = InputResult(Verdict.DONE)
NEED_MORE: Final = InputResult(Verdict.NEED_MORE)
BLOCK: Final = InputResult(Verdict.BLOCK)


class InputHandler(Protocol):
    """Whoever makes sense of the input; always called on the owning thread, with no lock held, never re-entered."""

    def process_input(self, data: memoryview, *, control_only: bool) -> InputResult:
        """Take what can be taken from `data` and say what is wanted.

        Args:
            data: all bytes not consumed so far, oldest first. Valid during this call only: copy what is to stay.
                Empty when `trigger_input` or a resumption found nothing kept: a chance to go on with what the handler
                itself has set aside.
            control_only: somebody holds the input; only protocol control may be acted upon.

        An exception counts as ERROR with that exception; one that is not flowctl's own is wrapped in `InternalError`.
        """

    def reading_changed(self, wanted: bool) -> None:  # noqa: FBT001 - one argument, and the only one
        """Watch (True) or do not watch (False) the descriptor for input from now on."""

    def process_eof(self) -> None:
        """Learn that the peer ended the stream; what NEED_MORE left over never became complete. Called once."""

    def process_error(self, error: Exception) -> None:
        """Learn that reading failed (OSError) or the input was wrong. Called once; nothing is called after it."""


class ReceiverHost(Protocol):
    """What a Receiver uses of its `PollGroup`."""

    bytes_in: int

    @property
    def scratch(self) -> memoryview:
        """Memory to read into, shared by everybody on the thread."""

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of the thread, on the Receiver's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStatistics:
    """One Receiver at one moment."""

    bytes_in: int  #: read in total
    control_bytes_in: int  #: of those, read while only control was
    reads: int  #: reads that returned bytes
    kept_bytes: int  #: read, not yet consumed by the handler
    reading: bool  #: the descriptor is to be watched
    blocked: bool  #: the handler answered BLOCK
    held_by: Mapping[str, int]  #: reasons of the present holders and how many give each
    pauses: Mapping[str, int]  #: pauses since the start, by reason
    paused_s: float  #: time that anybody held input, the present pause included
    longest_pause_s: float  #: the longest such time, the present one included
