"""What a Sender gives back, what it needs of frontend, fan-out and thread, and where it stands with its fan-out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from flowctl.core.flow.sharedstall import StallSpan
from flowctl.core.flow.state import SendState, StateChange
from flowctl.core.loop.faults import as_exception, log_error
from flowctl.core.outgoing.backlog import Item
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.reasons import CloseReason

SenderT_contra = TypeVar("SenderT_contra", contravariant=True)


class SendOutcome(enum.Enum):
    """What became of a message: it will be sent, the policy refused it, or the Sender is closed."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"
    CLOSED = "closed"


class SendResult(NamedTuple):
    """What `Sender.send` returns, so that a caller need not race the callback.

    Attributes:
        outcome: what became of the message.
        state: the Sender's state after it.
    """

    outcome: SendOutcome
    state: SendState


class FlushResult(enum.Enum):
    """How a flush ended: all taken, turn used up, kernel full, or connection over."""

    DRAINED = "drained"
    MORE = "more"
    BLOCKED = "blocked"
    CLOSED = "closed"


class Frontend(Protocol):
    """The application's end of a Sender."""

    def send_state_changed(self, state: SendState, change: StateChange) -> None:
        """Note one edge.

        Called once per edge, in order, under the Sender's lock, from whichever thread caused it. Must not block and
        must not call a Sender, this one or another: that raises `ReentryError`. Pausing a Receiver is allowed; anything
        else that is to be done with the connection is scheduled on its Registration. What it raises is contained, and
        reported when the lock is released.
        """


class CohortLike(Protocol[SenderT_contra]):
    """What a Sender needs of the fan-out that writes a log to viewers that keep up (see `core.fanout.fanout`)."""

    @property
    def log(self) -> StreamLog:
        """The log that is fanned out."""

    def add(self, sender: SenderT_contra) -> None:
        """Serve `sender` from its own cursor until it has caught up. Owning thread."""

    def serve_alone(self, sender: SenderT_contra) -> None:
        """Serve a member from its own cursor from now on. Owning thread."""

    def serve_in_turn(self, sender: SenderT_contra) -> None:
        """Serve `sender` in its turn: the kernel takes more again, or it has more to write. Owning thread."""

    def remove(self, sender: SenderT_contra) -> None:
        """Serve `sender` no longer. Owning thread."""

    def limits_changed(self, sender: SenderT_contra) -> None:
        """The limits of `sender` are new, or more counts against them. Owning thread."""

    def guide_changed(self, sender: SenderT_contra) -> None:
        """A member of the cohort has another guide now, or none any more. Owning thread."""

    def brings_on(self, start: Entry) -> bool:
        """Return whether a viewer that takes all from `start` on is to join before it has caught up. Owning thread."""


class Hop(NamedTuple):
    """A guide's answer: where a viewer goes on, served by `cohort`, at `start` of its log, behind `prefix`."""

    cohort: CohortLike[Any]
    start: Entry
    prefix: tuple[Item, ...] = ()
    wait_for_key: bool = False  # whether pictures begin with the next key frame: `start` is none
    why: str = ""  # for the ledger
    stayed_s: float = 0.0  # how long it was in the log that it leaves, likewise


class Guide(Protocol):
    """Is asked at crossroads, before a key frame or any picture, in which log to go on (`Sender.set_guide`)."""

    def choose_log(self, key: Entry) -> Hop | float | None:
        """Return where to go on at `key`, the next to be sent. Owning thread, under the Sender's lock; calls no Sender.

        Returns:
            The hop to another log; until when to wait at most, in seconds, to be asked again; None: stay in this log
            up to the next crossroads.
        """


class SenderHost(Protocol):
    """What a Sender needs of the thread that owns it; a `ConnectionHost` is one."""

    def now(self) -> float:
        """Return the time in seconds."""

    def wrote(self, size_bytes: int) -> None:
        """Count what the kernel has taken; writes of a cohort are counted by its fan-out. The writing thread."""

    def request_flush(self) -> None:
        """Call `Sender.flush` soon on the owning thread. Any thread; idempotent while pending."""

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - one flag, named by the method
        """Call, or stop calling, `Sender.writable` when the kernel can take more. Owning thread, or any in tests."""

    def set_deadline(self, when: float) -> None:
        """Call `Sender.tick` at `when` or, if asked for an earlier time before, already then. Any thread."""

    def terminate(self, reason: CloseReason, details: str) -> None:
        """End the connection soon, on the owning thread. Any thread; the first reason counts."""

    def in_thread(self) -> bool:
        """Return whether the caller is on the owning thread."""

    def handler_failed(self, where: str, error: BaseException) -> None:
        """Log that a handler or policy of the application raised. Any thread, no lock held."""

    def ledger_grew(self) -> None:
        """The Sender has something in `Sender.unread_ledger`. Any thread; must only schedule."""

    def kernel_bytes(self) -> int:
        """Return what the kernel has taken and the peer has not acknowledged; 0 where that cannot be told."""

    def limit_unsent(self, size_bytes: int) -> None:
        """Have the kernel take no more than about `size_bytes` ahead of what it sends; 0: as usual. Owning thread."""

    def strained(self) -> bool:
        """Return whether the owning thread had no room a moment ago: a peer that seems slow may not be. Any thread."""

    def shared_stall(self) -> StallSpan | None:
        """Return when most viewers of the owning thread stopped last, and up to when. None: never. Any thread."""


@dataclass(frozen=True, slots=True)
class NoHost:
    """Stands in for the host of a Sender that is over, whose connection is gone."""

    ended_at: float

    def now(self) -> float:
        return self.ended_at

    def in_thread(self) -> bool:
        return True

    def kernel_bytes(self) -> int:
        return 0

    def strained(self) -> bool:
        return False

    def shared_stall(self) -> StallSpan | None:
        return None

    def handler_failed(self, where: str, error: BaseException) -> None:
        log_error(where, as_exception(error))

    def _nothing(self, *args: object) -> None: ...

    wrote = request_flush = want_writable = set_deadline = terminate = ledger_grew = limit_unsent = _nothing


class Standing(enum.IntEnum):
    """The place of a viewer of a log with the fan-out that serves it.

    It comes to be served from its own cursor, QUEUED for a turn. In its turn it is SERVED: it has been offered all that
    there was. If the kernel took everything and nothing is refused for it, it enters the COHORT. One that lags and
    takes something is PACED: its next turn comes before its kernel runs dry. If the kernel took nothing it is REFUSED
    until that asks for more; otherwise it is queued again. A member that the kernel refuses something, or that has to
    be treated alone, leaves the cohort and is QUEUED. One that leaves its fan-out is SUSPENDED: no thread owns it until
    another fan-out takes it, or it follows the log no longer.

    An IntEnum, because its members are hashed in C: a step is taken in every turn.
    """

    GONE = 0  #: it follows no log
    QUEUED = 1  #: its turn is to come
    SERVED = 2  #: it has had its turn; the next one comes with the next round, or when it asks for it
    PACED = 3  #: it has had its turn; the next one comes at its time
    REFUSED = 4  #: the kernel took nothing; its turn comes when the kernel asks for more
    COHORT = 5  #: written to with its squad
    SUSPENDED = 6  #: between two fan-outs: it follows its log, and none serves it


STEPS: Final = {
    (Standing.GONE, Standing.QUEUED): "it follows a log",
    (Standing.QUEUED, Standing.SERVED): "its turn",
    (Standing.SERVED, Standing.QUEUED): "more to write, the next round, or the kernel takes more",
    (Standing.SERVED, Standing.PACED): "it lags, and takes something",
    (Standing.SERVED, Standing.REFUSED): "EAGAIN, and nothing taken",
    (Standing.SERVED, Standing.COHORT): "it has taken everything",
    (Standing.PACED, Standing.QUEUED): "its time has come, or a key frame that it waits for",
    (Standing.REFUSED, Standing.QUEUED): "the kernel takes more",
    (Standing.COHORT, Standing.QUEUED): "EAGAIN, or it is to be treated alone",
    **{(old, Standing.SUSPENDED): "it leaves its fan-out" for old in Standing if 0 < old < Standing.COHORT},
    (Standing.SUSPENDED, Standing.QUEUED): "another fan-out takes it",
    (Standing.SUSPENDED, Standing.GONE): "it follows the log no longer",
}
"""The legal steps, from which standing to which, and what causes them."""
