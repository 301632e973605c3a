"""What a connection was, in one row: the columns of `flow_closes` and `flow_opens` from the books of its Sender (pure).

Pictures that are still queued are neither wanted nor sent yet; those that were queued at the close, that came after the
viewer had left the stream, or that it has muted, it does not miss. `lost_messages` are those whose loss is seen or
heard and that slowness has caused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flowctl.core.flow.counts import Counts, total
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass, SendState
from flowctl.core.sending.figures import SenderStatistics
from flowctl.reasons import DropReason
from flowctl.records.telemetry.schema import CLASS_NAMES, STATE_NAMES

_NEEDED: Final = (MessageClass.KEY, MessageClass.INTER, MessageClass.AUDIO)
_NOT_MISSED: Final = (DropReason.UNFOLLOWED, DropReason.CLOSED)
_NO_LOSS: Final = (*_NOT_MISSED, DropReason.REQUESTED)
_MESSAGES: Final = {
    what: tuple(f"{what}_messages_{name}" for name in CLASS_NAMES) for what in ("accepted", "sent", "dropped")
}
_TIMES: Final = tuple(f"time_{name}_ms" for name in STATE_NAMES)
_DROPPED_BY: Final = {reason: f"dropped_by_{reason.name.lower()}" for reason in DropReason}
_NOTHING_DROPPED: Final = dict.fromkeys((*_MESSAGES["dropped"], *_DROPPED_BY.values(), "dropped_bytes"), 0)


def sender_columns(statistics: SenderStatistics) -> dict[str, Any]:
    accepted, sent, dropped = statistics.accepted, statistics.sent, statistics.dropped
    columns: dict[str, Any] = dict(zip(_MESSAGES["accepted"], accepted.messages, strict=True))
    columns.update(zip(_MESSAGES["sent"], sent.messages, strict=True))
    columns.update(zip(_TIMES, (time_s * 1000 for time_s in statistics.time_in_states_s), strict=True))
    columns.update(_NOTHING_DROPPED)
    if dropped:
        whole = total(dropped.values())
        columns.update(zip(_MESSAGES["dropped"], whole.messages, strict=True))
        columns.update((_DROPPED_BY[reason], counts.total_messages) for reason, counts in dropped.items())
        columns["dropped_bytes"] = whole.total_bytes
    return columns | {
        "recoveries": statistics.recoveries,
        "returns": statistics.returns,
        "accepted_bytes": accepted.total_bytes,
        "sent_bytes": statistics.bytes_sent,
        "pictures_wanted": _of(accepted, VIDEO_CLASSES) - _of(statistics.queued, VIDEO_CLASSES) - _not_missed(dropped),
        "pictures_sent": _of(sent, VIDEO_CLASSES),
        "lost_messages": sum(_of(counts, _NEEDED) for reason, counts in dropped.items() if reason not in _NO_LOSS)
        - _muted(dropped, _NEEDED),
    }


def rendition_columns(book: RenditionBook | None, at: float) -> dict[str, Any]:
    """Return the columns of what a connection followed of sets. None: it never followed one."""
    if book is None:
        return {}
    seconds = {name: round(seconds, 3) for name, seconds in book.seconds(at).items()}
    return {
        "renditions": json.dumps(seconds, separators=(",", ":")),
        "smaller_ms": book.smaller_s(at) * 1000,
        "why_smaller": book.why_smaller(at) or None,
        "switches": book.ups + book.downs,
    }


def _of(counts: Counts, classes: Iterable[MessageClass]) -> int:
    messages = counts.messages
    return sum(messages[item] for item in classes)


def _not_missed(dropped: Mapping[DropReason, Counts]) -> int:
    """Return the pictures that were dropped and that a viewer does not miss."""
    return _muted(dropped, VIDEO_CLASSES) + sum(
        _of(dropped[reason], VIDEO_CLASSES) for reason in _NOT_MISSED if reason in dropped
    )


def _muted(dropped: Mapping[DropReason, Counts], classes: Iterable[MessageClass]) -> int:
    """Return how many messages of `classes` were dropped because the viewer has muted them."""
    refused = dropped.get(DropReason.REFUSED)
    if refused is None:
        return 0
    muted = (MessageClass.AUDIO, *(VIDEO_CLASSES if refused.messages[MessageClass.KEY] else ()))
    return _of(refused, tuple(item for item in classes if item in muted))


@dataclass(slots=True)
class ConnectionCourse:
    """What happened to a connection that did not simply keep up: counted as its events are told, on its thread."""

    episodes: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # how often it came into each from a better one
    hard_at_once: int = 0
    late_episodes: int = 0
    input_pauses: int = 0
    limit_hits: int = 0
    recover_ms: float = 0.0
    recover_max_ms: float = 0.0
    input_paused_ms: float = 0.0
    paused_at: float | None = None  # since when its input is paused, in seconds; None: it is not

    def edge(self, old: SendState, new: SendState, recover_ms: float | None) -> None:
        """Count a change of state; `recover_ms`: how long it was not READY, where it is again and that is known."""
        if new > old:
            self.episodes[new] += 1
            self.hard_at_once += old is SendState.READY and new is SendState.HARD_LIMIT
        if recover_ms is not None:
            self.recover_ms += recover_ms
            self.recover_max_ms = max(self.recover_max_ms, recover_ms)

    def columns(self, at: float) -> dict[str, Any]:
        pause_s = 0.0 if self.paused_at is None else max(at - self.paused_at, 0.0)
        names = ("hard_at_once", "recover_ms", "recover_max_ms", "late_episodes", "input_pauses", "limit_hits")
        columns = {name: getattr(self, name) for name in names}
        columns.update((f"episodes_{name}", self.episodes[index]) for index, name in enumerate(STATE_NAMES) if index)
        return columns | {"input_paused_ms": self.input_paused_ms + pause_s * 1000}


NO_COURSE: Final = ConnectionCourse().columns(0.0)
