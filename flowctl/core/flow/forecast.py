"""Time to the hard limit: when a queue that goes on as it does now reaches its first hard mark (pure)."""

from __future__ import annotations

from typing import NamedTuple

from flowctl.core.flow.limits import OFF_MARK, Axis, Limits
from flowctl.core.flow.state import Load


class Forecast(NamedTuple):
    """When the hard limit will be reached.

    Attributes:
        seconds: from now on; 0: it is reached.
        axis: the axis that gets there first.
    """

    seconds: float
    axis: Axis


def time_to_hard(
    load: Load, limits: Limits, *, fill_bytes_per_s: float, fill_messages_per_s: float, drain_bytes_per_s: float
) -> Forecast | None:
    """Return when the first axis reaches its hard mark if filling and draining go on as they do now.

    The age of the oldest message grows by a second each second while nothing is taken, and by the share of the stream
    that is not taken otherwise: a peer that takes 80 % of the rate falls behind by a fifth of a second each second.
    """
    share = drain_bytes_per_s / fill_bytes_per_s if fill_bytes_per_s > 0 else 1.0
    messages_per_s = fill_messages_per_s * (1 - share)
    bytes_per_s = fill_bytes_per_s - drain_bytes_per_s + messages_per_s * limits.overhead_bytes
    axes = (
        (Axis.BYTES, limits.size.marks[2], load.size_bytes, bytes_per_s),
        (Axis.MESSAGES, limits.messages.marks[2], load.messages, messages_per_s),
        (Axis.AGE, limits.age_ms.marks[2], load.age_ms, 1000 * (1 - share) if load.messages else 0.0),
    )
    earliest: Forecast | None = None
    for axis, mark, value, growth in axes:
        if mark >= OFF_MARK or (value < mark and growth <= 0):
            continue
        seconds = max(mark - value, 0.0) / growth if growth > 0 else 0.0
        if earliest is None or seconds < earliest.seconds:
            earliest = Forecast(seconds, axis)
    return earliest
