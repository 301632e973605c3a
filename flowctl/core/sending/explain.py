"""One line that says why a peer is in its state, and who is to blame (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from flowctl.core.flow.ledger import describe_change
from flowctl.core.flow.state import FlowCore, Load, SendState
from flowctl.core.sending.blame import Blame, Lag, blame
from flowctl.reasons import CloseReason
from flowctl.units import format_count, format_duration, format_size


def explain(
    core: FlowCore,
    load: Load,
    now: float,
    lag: Lag | None = None,
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
    who = blame(core, load, lag, largest_bytes=largest_bytes, stalled_s=stalled_s)
    if who is not Blame.NOBODY:
        parts.append(f"to blame: {who.value}")
    soft = core.limits.size.marks[1]
    if largest_bytes * 2 > soft:
        parts.append(f"the soft limit is below twice the largest message, {format_size(largest_bytes)}")
    return "; ".join(parts)
