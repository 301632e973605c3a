"""What a connection calls of its session, and what the answers and exceptions of a session stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, Final, Protocol, cast

from flowctl.core.flow.ledger import LedgerEntry
from flowctl.core.flow.state import SendState, StateChange
from flowctl.errors import BrokenError, FlowctlError, InternalError, LimitExceededError, RemoteProtocolError
from flowctl.reasons import CloseReason
from flowctl.receiver import ALL, DONE, InputResult, InputVerdict

_IDLE_LIMITS: Final = frozenset({"first_command_s", "first_media_s", "media_silence_s", "ping_silence_s"})
"""Limits that say that a peer does nothing, rather than too much."""


class SessionHooks(Protocol):
    """What is called of a session: see `flowctl.connection.Session`."""

    @property
    def pinned(self) -> bool: ...
    def opened(self) -> Awaitable[None] | None: ...
    def received(self, data: memoryview) -> Awaitable[int | None] | InputResult | int | None: ...
    def received_control(self, data: memoryview) -> InputResult | int | None: ...
    def input_resumed(self) -> None: ...
    def peer_ended(self) -> bool: ...
    def send_state_changed(self, state: SendState, change: StateChange) -> None: ...
    def ledger_entry(self, entry: LedgerEntry) -> None: ...
    def work_exceeded(self, error: LimitExceededError, *, ends: bool) -> None: ...
    def timer(self, now: float) -> None: ...
    def last_words(self, reason: CloseReason, details: str) -> bytes: ...
    def closed(self, reason: CloseReason, details: str) -> Awaitable[None] | None: ...


OVER: Final = cast("SessionHooks", SimpleNamespace(pinned=False))
"""Stands in for the session of a connection that is over, for that holds its connection: nothing of it is called."""


def as_result(answer: Any, size: int) -> InputResult:
    """Return what `received` has answered, given `size` bytes, in full."""
    if answer is None:
        return DONE
    if isinstance(answer, InputResult):
        return answer
    if isinstance(answer, int):
        return InputResult(InputVerdict.NEED_MORE, ALL if answer == size else answer)
    if asyncio.iscoroutine(answer):
        answer.close()
    raise InternalError(
        f"received() returned {type(answer).__name__}, it must return a number of bytes, an InputResult or None",
        hint="declare a coroutine with async def",
    )


def reason_for(error: BaseException) -> tuple[CloseReason, str]:
    """Return the close reason and details that `error`, of a read or of flowctl's own tree, stands for."""
    if isinstance(error, LimitExceededError):
        if error.limit == "handshake_time_s":
            return CloseReason.HANDSHAKE_TIMEOUT, str(error)
        return (CloseReason.IDLE if error.limit in _IDLE_LIMITS else CloseReason.LIMIT_HIT), str(error)
    if isinstance(error, RemoteProtocolError):
        return CloseReason.PROTOCOL_ERROR, f"{error.code}: {error}"
    if isinstance(error, (BrokenError, OSError)):
        return CloseReason.PEER_RESET, str(error)
    return CloseReason.INTERNAL, f"{type(error).__name__}: {error}"


def handler_reason(error: BaseException) -> tuple[CloseReason, str]:
    """Return the same for what a handler raised: its OSError says nothing about this connection's socket."""
    if isinstance(error, FlowctlError):
        return reason_for(error)
    return CloseReason.INTERNAL, f"{type(error).__name__}: {error}"
