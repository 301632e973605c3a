"""The ledger of a connection: every change of state, episode of drops, pause and close, with its cause, bounded.

A viewer that is at the edge of its link for hours fills its ledger, and there may be thousands of such viewers. So
entries are kept packed (a change of state in 73 bytes with the header of the object, as objects with words it is 330),
and what can be worded from an entry's figures is worded when it is read.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Final

from flowctl.core.flow.counts import Counts
from flowctl.core.flow.limits import Axis
from flowctl.core.flow.state import CLASS_COUNT, Cause, SendState, StateChange
from flowctl.reasons import CloseReason, DropReason
from flowctl.units import format_count, format_duration, format_size

LEDGER_ENTRIES: Final = 16
"""Entries kept per connection; others are forgotten, see `Ledger.add`."""
LEDGER_WORDS_BYTES: Final = 160
"""Most bytes that are kept of the words of an entry; they have up to 140."""


class LedgerKind(enum.Enum):
    """What an entry is about."""

    STATE = "state"
    DROPS = "drops"
    PAUSE = "pause"
    RESUME = "resume"
    LIMITS = "limits"
    LATE = "late"
    RETURN = "return"
    SWITCH = "switch"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One thing that was done to a peer, and why.

    Args:
        kind: what it is about.
        at: time in seconds on the Sender's clock; that of the edge, for STATE.
        why: one line: cause, axis, value, limit. Given empty, it is made from the edge, or from what was dropped.
        change: the edge, for STATE.
        dropped: what an episode of drops took, by reason, for DROPS.
        duration_s: length of the episode, for DROPS and RESUME, or of the stay that ended, for SWITCH; else 0.
        reason: why the connection ended, for CLOSE.
        delay_removed_ms: by how much what waits became younger, for DROPS and RETURN; 0 for the others.
        picture_share: share of the pictures of the episode that were sent, 0 to 1, for DROPS; 1 for the others.
        line_share: share of the episode in which the peer's line was in use, 0 to 1, for DROPS; 0: not measured.
        delay_max_ms: how far behind the peer was at most, of the samples of the episode, for DROPS.
    """

    kind: LedgerKind
    at: float
    why: str
    change: StateChange | None = None
    dropped: dict[DropReason, Counts] | None = None
    duration_s: float = 0.0
    reason: CloseReason | None = None
    delay_removed_ms: float = 0.0
    picture_share: float = 1.0
    line_share: float = 0.0
    delay_max_ms: float = 0.0


class Ledger:
    """The last entries of one connection. Not thread-safe: its Sender's lock guards it."""

    __slots__ = ("_entries", "_unread")

    def __init__(self) -> None:
        self._entries: list[bytes] = []  # packed; a deque is 760 bytes however few there are
        self._unread = 0

    def add(self, entry: LedgerEntry) -> None:
        """Append one entry; where the ledger is full, forget one: the oldest flap, or else the oldest.

        An unread entry is forgotten last, whatever it is: records would miss it. A flap is an edge between
        READY and OVERLOADED. They come with every large key frame at the edge of a link and say little; episodes of
        drops from before are what one looks for.
        """
        entries = self._entries
        if len(entries) >= LEDGER_ENTRIES:
            read = len(entries) - self._unread
            oldest = next((place for place, packed in enumerate(entries[:read] or entries) if _is_flap(packed)), 0)
            if oldest >= read:
                self._unread -= 1
            del entries[oldest]
        entries.append(_pack(entry))
        self._unread += 1

    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(map(_unpack, self._entries))

    def unread(self) -> tuple[LedgerEntry, ...]:
        """Return the entries added since the last call, oldest first."""
        count, self._unread = self._unread, 0
        return tuple(map(_unpack, self._entries[-count:])) if count else ()


# -- packing

_KINDS: Final = tuple(LedgerKind)
_CAUSES: Final = tuple(Cause)
_AXES: Final = tuple(Axis)
_CLOSES: Final = tuple(CloseReason)
_DROPS: Final = tuple(DropReason)
_NONE: Final = 255
_EDGE: Final = struct.Struct("<BBBBBdIdq")  # mark, old, new, cause, axis, time, sequence, value, limit
_OTHER: Final = struct.Struct("<BBBdddddd")  # kind, reason, parts, then the figures in their order
_PART: Final = struct.Struct("<BBQQ")  # reason, class, messages, bytes: what was dropped, as many as there are parts
_EDGE_MARK: Final = 254
"""Stands for the kind of an entry that has an edge: it is STATE."""
_FLAP: Final = max(SendState.READY, SendState.OVERLOADED)


def _is_flap(packed: bytes) -> bool:
    return packed[0] == _EDGE_MARK and max(packed[1], packed[2]) <= _FLAP


def _pack(entry: LedgerEntry) -> bytes:
    change = entry.change
    words = entry.why.encode()[:LEDGER_WORDS_BYTES]
    if change is not None:
        axis = _NONE if change.axis is None else _AXES.index(change.axis)
        value = nan if change.value is None else change.value
        limit = -1 if change.limit is None else change.limit
        cause = _CAUSES.index(change.cause)
        edge = _EDGE.pack(_EDGE_MARK, change.old, change.new, cause, axis, change.at, change.sequence, value, limit)
        return edge + words
    parts = [
        _PART.pack(_DROPS.index(reason), item, counts.messages[item], counts.sizes_bytes[item])
        for reason, counts in (entry.dropped or {}).items()
        for item in range(CLASS_COUNT)
        if counts.messages[item]
    ]
    head = _OTHER.pack(
        _KINDS.index(entry.kind),
        _NONE if entry.reason is None else _CLOSES.index(entry.reason),
        _NONE if entry.dropped is None else len(parts),
        entry.at,
        entry.duration_s,
        entry.delay_removed_ms,
        entry.picture_share,
        entry.line_share,
        entry.delay_max_ms,
    )
    return b"".join((head, *parts, words))


def _unpack(packed: bytes) -> LedgerEntry:
    if packed[0] == _EDGE_MARK:
        return _unpack_edge(packed)
    kind, reason, count, at, duration_s, removed_ms, pictures, line, delay_max_ms = _OTHER.unpack_from(packed)
    parts = 0 if count == _NONE else count
    words_at = _OTHER.size + parts * _PART.size
    dropped = None if count == _NONE else _unpack_drops(packed[_OTHER.size : words_at])
    why = packed[words_at:].decode(errors="ignore")  # it may have been cut within a character
    entry = LedgerEntry(
        _KINDS[kind],
        at,
        why,
        dropped=dropped,
        duration_s=duration_s,
        reason=None if reason == _NONE else _CLOSES[reason],
        delay_removed_ms=removed_ms,
        picture_share=pictures,
        line_share=line,
        delay_max_ms=delay_max_ms,
    )
    return entry if why or not dropped else replace(entry, why=describe_episode(entry))


def _unpack_edge(packed: bytes) -> LedgerEntry:
    _, old, new, cause, axis, at, sequence, value, limit = _EDGE.unpack_from(packed)
    change = StateChange(
        sequence,
        SendState(old),
        SendState(new),
        _CAUSES[cause],
        None if axis == _NONE else _AXES[axis],
        None if isnan(value) else value,
        None if limit < 0 else limit,
        at,
    )
    words = packed[_EDGE.size :].decode(errors="ignore")
    return LedgerEntry(LedgerKind.STATE, at, words or describe_change(change), change=change)


def _unpack_drops(packed: bytes) -> dict[DropReason, Counts]:
    tallies: dict[DropReason, tuple[list[int], list[int]]] = {}
    for reason, item, messages, size_bytes in _PART.iter_unpack(packed):
        by_class = tallies.setdefault(_DROPS[reason], ([0] * CLASS_COUNT, [0] * CLASS_COUNT))
        by_class[0][item], by_class[1][item] = messages, size_bytes
    return {reason: Counts(tuple(messages), tuple(sizes)) for reason, (messages, sizes) in tallies.items()}


# -- words


_CAUSE_WORDS: Final = {Cause.WOULD_BLOCK: "blocked", Cause.TICK: "waited"}
"""Words for a cause whose name is an internal one."""


def describe_change(change: StateChange) -> str:
    return describe_edge(change.cause, change.axis, change.value, change.limit)


def describe_edge(cause: Cause, axis: Axis | None, value: float | None, limit: float | None) -> str:
    """Return why a state was left, for example ``waited: oldest 4.0 s, limit 4.0 s``."""
    word = _CAUSE_WORDS.get(cause, cause.value.replace("_", " "))
    if axis is None or value is None:
        return word
    oldest = "oldest " if axis is Axis.AGE else ""
    return f"{word}: {oldest}{_measured(axis, value)}, limit {_measured(axis, limit or 0)}"


def _measured(axis: Axis, value: float) -> str:
    if axis is Axis.BYTES:
        return format_size(value)
    return format_duration(value / 1000) if axis is Axis.AGE else format_count(round(value), "message")


def describe_drops(lost: dict[DropReason, Counts]) -> str:
    parts = []
    for reason, counts in lost.items():
        what = ", ".join(f"{count} {name}" for name, count in counts.by_name().items())
        parts.append(f"{reason.value}: {what}")
    return "; ".join(parts)


def describe_episode(entry: LedgerEntry) -> str:
    """Return what an episode of drops took, and what the peer was given all the same, in one line."""
    parts = [describe_drops(entry.dropped or {})]
    if shares := describe_shares(entry):
        parts.append(shares)
    if entry.delay_removed_ms:
        parts.append(f"{entry.delay_removed_ms / 1000:.1f} s of delay removed")
    return "; ".join(parts)


def describe_shares(entry: LedgerEntry) -> str:
    """Return what a peer got in an episode in which something was left out for being late; else nothing."""
    if DropReason.LATE not in (entry.dropped or {}):
        return ""
    line = f", its line in use {entry.line_share:.0%} of the time" if entry.line_share else ""
    return f"{entry.picture_share:.0%} of the pictures, up to {entry.delay_max_ms / 1000:.1f} s behind{line}"


def difference(after: dict[DropReason, Counts], before: dict[DropReason, Counts]) -> dict[DropReason, Counts]:
    """Return what was dropped between two accounts, by reason, without the reasons that stayed as they were.

    What stands behind a key frame that is waited for counts as refused until its viewer looks: less than before is 0.
    """
    result = {}
    for reason, counts in after.items():
        delta = counts - before[reason] if reason in before else counts
        if min(delta.messages) < 0:
            delta = Counts(*(tuple(max(item, 0) for item in items) for items in (delta.messages, delta.sizes_bytes)))
        if delta.total_messages:
            result[reason] = delta
    return result
