"""What a flight says of stream and link alone, for trying other limits on it (`flowctl.whatif`) (pure).

Of the calls only two things remain: messages as they came, and writes with what the kernel took of them. Times are
those at which the Sender saw them, so that they do not fall.
"""

from __future__ import annotations

from typing import Final

from flowctl.flight.reading import Flight
from flowctl.flight.words import LOG_LANE
from flowctl.flow import MessageClass
from flowctl.telemetry.schema import CLASS_NAMES, FlightKind

TAKEN: Final = -1
"""A write of which the kernel took everything; as in `flowctl.whatif`."""
REFUSED: Final = -2
"""A write that met EAGAIN; what was taken before it counts; likewise."""

_CLASSES: Final = {name: int(item) for item, name in zip(MessageClass, CLASS_NAMES, strict=True)}


def stream_and_link(flight: Flight) -> tuple[list[tuple[float, int, int]], int]:
    """Return the events of the followed logs and the link, and how many of the first ones joining gave.

    A call's writes are one event: what they took together, and whether the last one met EAGAIN. What was sent to this
    peer alone (replies of its session) is no part of the stream and is left out; its writes are in, by their sizes.

    Args:
        flight: of a connection that followed a log; without one there are no messages.

    Returns:
        ([(seconds since BEGIN, `MessageClass` or TAKEN or REFUSED, bytes)], number of messages of the GOP cache).
    """
    events: list[tuple[float, int, int]] = []
    given = 0
    followed = False
    taken, wrote_at = 0, -1
    for row in flight.rows:
        kind = row.kind
        if wrote_at >= 0 and (row.offset_us != wrote_at or kind in _BREAKS):
            events.append((wrote_at / 1e6, TAKEN, taken))
            taken, wrote_at = 0, -1
        if kind == FlightKind.QUEUED.value and row.reason == LOG_LANE:
            events.append((row.offset_us / 1e6, _CLASSES[row.message_class or ""], row.size_bytes or 0))
            given += not followed
        elif kind == FlightKind.SENT.value and row.taken_bytes is not None:
            taken, wrote_at = taken + row.taken_bytes, row.offset_us
        elif kind == FlightKind.WOULD_BLOCK.value:
            events.append((row.offset_us / 1e6, REFUSED, taken))
            taken, wrote_at = 0, -1
        elif row.reason == "follow":
            followed = True
    if wrote_at >= 0:
        events.append((wrote_at / 1e6, TAKEN, taken))
    return events, given


_BREAKS: Final = frozenset(
    {FlightKind.QUEUED.value, FlightKind.CALL.value, FlightKind.TICK.value, FlightKind.END.value}
)
