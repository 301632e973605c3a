"""One line that says why a peer is in its state, and who is to blame (pure)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from flowctl.core.flow.ledger import describe_change
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.state import Cause, FlowCore, Load, SendState
from flowctl.reasons import CloseReason
from flowctl.units import format_count, format_duration, format_size

_BURST_S: Final = 1.0
"""Time after the kernel last had nothing to send in which a queue still counts as one burst of the publisher."""
_LATE_MS: Final = 250.0
"""Time after which a queue that the kernel was not offered is our loop's: several flush intervals."""


class Blame(enum.Enum):
    NOBODY = "nobody"
    PEER_LINE = "peer's line"
    SERVER_LOOP = "our loop"
    PUBLISHER_BURST = "publisher burst"
    POLICY = "policy"


def blame(core: FlowCore, load: Load, *, largest_bytes: int, stalled_s: float) -> Blame:
    """Return who is to blame for the present load.

    A kernel that takes nothing is the viewer's link, unless what is queued is one oversized message that came less
    than a second ago. A queue that the kernel was not even offered is our loop if it is old, else a burst.
    """
    change = core.last_change
    if core.state is SendState.READY:
        return Blame.NOBODY
    if change is not None and change.cause is Cause.LIMITS_SET:
        return Blame.POLICY
    soft = core.limits.size.marks[1]
    burst = soft < OFF_MARK and largest_bytes * 2 > soft
    if core.would_block:
        return Blame.PUBLISHER_BURST if burst and stalled_s < _BURST_S else Blame.PEER_LINE
    return Blame.SERVER_LOOP if load.age_ms > _LATE_MS else Blame.PUBLISHER_BURST


def explain(
    core: FlowCore,
    load: Load,
    now: float,
    *,
    largest_bytes: int = 0,
    joining: bool = False,
    waiting_for_key: bool = False,
    stalled_s: float = 0.0,
    remarks: Sequence[str] = (),
    close_reason: CloseReason | None = None,
    details: str = "",
) -> str:
    if close_reason is not None:
        return f"closed: {close_reason.value}" + (f" ({details})" if details else "")
    parts = [f"{core.state.name} for {format_duration(now - core.since)}"]
    change = core.last_change
    if change is not None and core.state is not SendState.READY:
        parts.append(describe_change(change))
    queue = f"queued {format_size(load.size_bytes)} in {format_count(load.messages, 'message')}"
    parts.append(f"{queue}, oldest {format_duration(load.age_ms / 1000)}" if load.messages else "nothing queued")
    if stalled_s:
        parts.append(f"the kernel has taken nothing for {format_duration(stalled_s)}")
    if joining:
        parts.append("still taking the GOP cache")
    if waiting_for_key:
        parts.append("waiting for a key frame")
    parts.extend(remarks)
    who = blame(core, load, largest_bytes=largest_bytes, stalled_s=stalled_s)
    if who is not Blame.NOBODY:
        parts.append(f"to blame: {who.value}")
    soft = core.limits.size.marks[1]
    if largest_bytes * 2 > soft:
        parts.append(f"the soft limit is below twice the largest message, {format_size(largest_bytes)}")
    return "; ".join(parts)
