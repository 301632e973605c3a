"""What a flight says of stream and link alone, for trying other limits on it (`flowctl.whatif`) (pure).

Of the calls only two things remain: messages as they came, and writes with what the kernel took of them. A message has
the time at which it was published: who is blocked sees it only when something makes its Sender look, which may be a
second later, and other limits would have been crossed meanwhile. Times do not fall all the same: what a write has not
met was published after it.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from flowctl.flight.reading import Flight
from flowctl.flight.words import LOG_LANE, FlightRow
from flowctl.flow import MessageClass
from flowctl.telemetry.schema import CLASS_NAMES, FlightKind

TAKEN: Final = -1
"""A write of which the kernel took everything; as in `flowctl.whatif`."""
REFUSED: Final = -2
"""A write that met EAGAIN; what was taken before it counts; likewise."""

_CLASSES: Final = {name: int(item) for item, name in zip(MessageClass, CLASS_NAMES, strict=True)}


class StreamAndLink(NamedTuple):
    """What a flight says of stream and link.

    Attributes:
        events: (seconds since BEGIN, `MessageClass` or TAKEN or REFUSED, bytes); times do not fall.
        given: number of messages of the GOP cache, the first of `events`.
        restart_bytes: of the metadata and configuration in front of a key frame after a loss. 0: not known.
    """

    events: list[tuple[float, int, int]]
    given: int
    restart_bytes: int


def stream_and_link(flight: Flight) -> StreamAndLink:
    """Return the events of the followed logs and of the link.

    Writes without a message between them are one event: what they took together, and whether the last met EAGAIN. What
    was sent to this peer alone (replies of its session) is no part of the stream and is left out; its writes are in, by
    their sizes.

    Writes from before the first message of a log, replies of the session too, are left out.

    Args:
        flight: of a connection that followed a log; without one there are no messages.
    """
    events: list[tuple[float, int, int]] = []
    given = restart_bytes = 0
    followed = False
    taken, wrote_at = 0, -1
    last_us = 0  # of the events so far
    for row in (*flight.rows, _OVER):
        kind = row.kind
        if kind in _BREAKS and wrote_at >= 0:
            last_us = max(last_us, wrote_at)
            if events:  # before there is anything of a stream, a write tells nothing of one
                events.append((last_us / 1e6, TAKEN, taken))
            taken, wrote_at = 0, -1
        if kind == FlightKind.QUEUED.value and row.reason == LOG_LANE:
            lay_us = round((row.queued_age_ms or 0.0) * 1000) if followed else 0  # a cache is given when it is joined
            last_us = max(last_us, row.offset_us - lay_us)
            events.append((last_us / 1e6, _CLASSES[row.message_class or ""], row.size_bytes or 0))
            given += not followed
            if row.detail and not restart_bytes:
                restart_bytes = sum(json.loads(row.detail).get("restart", ()))
        elif kind == FlightKind.SENT.value and row.taken_bytes is not None:
            taken, wrote_at = taken + row.taken_bytes, row.offset_us
        elif kind == FlightKind.WOULD_BLOCK.value:
            last_us = max(last_us, row.offset_us)
            events.append((last_us / 1e6, REFUSED, taken))
            taken, wrote_at = 0, -1
        elif row.reason == "follow":
            followed = True
    return StreamAndLink(events, given, restart_bytes)


_OVER: Final = FlightRow(0, FlightKind.END.value)
_BREAKS: Final = frozenset({FlightKind.QUEUED.value, FlightKind.END.value})
"""What ends a write. Nothing else does: who writes twice, and nothing was queued in between, had something left after
the first, because a turn was used up or a restart came. What the kernel took then is no sign of what it would have."""
