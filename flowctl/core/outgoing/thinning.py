"""Where a viewer goes on whose queue is to become shorter at once: at which key frame, or behind which sound (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, Headroom
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.streamlog import Entry
from flowctl.reasons import DropReason

_KEY: Final = MessageClass.KEY
_AUDIO: Final = MessageClass.AUDIO
_KEPT: Final = (MessageClass.CONTROL, MessageClass.HEADER)
_KEY_BIT: Final = 1 << _KEY
_ALL_BUT_KEY: Final = DROPPABLE_MASK & ~_KEY_BIT
_ALL_BUT_KEY_AND_AUDIO: Final = _ALL_BUT_KEY & ~(1 << _AUDIO)


def drop_droppable(cursor: LogCursor, reason: DropReason, now: float) -> None:
    """Drop all of the queue that may be dropped; a lost frame leads to waiting for the next key frame."""
    if reason is DropReason.REQUESTED and cursor.values is not None:
        cursor.account.lost(reason).add_figures(cursor.values.drop()[1])
    cursor.go_on_at(None, reason, now, BROKEN_MASK)


def thin_to_key_frame(cursor: LogCursor, room: Headroom, now: float, reason: DropReason = DropReason.THINNED) -> None:
    """Skip to a key frame so that what stays fits.

    That is the first key frame from which on everything fits; else the newest one with its audio alone; else the
    next one to be published, with nothing before it. Without video, the oldest messages go.
    """
    cursor.poll(now)
    if _sound_only(cursor):
        _thin_oldest(cursor, room, reason)
        return
    tail = cursor.tail
    newest: Entry | None = None
    for key in _keys(cursor.entry, tail):
        if room.fits(tail.offset - key.offset, tail.sequence - key.sequence, key.enqueued_at):
            cursor.go_on_at(key, reason, now)
            return
        newest = key
    if newest is not None and _key_and_audio_fit(newest, tail, room):
        cursor.go_on_at(newest, reason, now, _ALL_BUT_KEY_AND_AUDIO)
    else:
        cursor.go_on_at(None, reason, now, _ALL_BUT_KEY)


def skip_to_key(cursor: LogCursor, room: Headroom, now: float) -> bool:
    """Go to the newest key frame; return whether there is one ahead.

    Where none would get through, the oldest messages go until what is left fits `room`.
    """
    if cursor.joining_to is not None:
        cursor.end_joining(DropReason.REFUSED, now)
    cursor.poll(now)
    start = cursor.entry
    if _sound_only(cursor):
        _thin_oldest(cursor, room, DropReason.RETURNED)
        return cursor.entry is not start
    if cursor.mask & _KEY_BIT:
        return False  # nothing newer will be handed over; what is queued from before is all that there is
    newest = start
    for key in _keys(start, cursor.tail):
        newest = key
    if newest is start:
        return False
    cursor.go_on_at(newest, DropReason.RETURNED, now)
    return True


def newest_key_alike(start: Entry, tail: Entry) -> Entry | None:
    """Return the newest key frame behind `start` at which who got all up to there can go on with nothing before it.

    None: there is none, or headers or control messages lie in between, or pictures that refer to what does.
    """
    newest: Entry | None = None
    for key in _keys(start, tail):
        newest = key
    if newest is None or newest is start or newest.leading:
        return None
    return newest if all(newest.counts[item] == start.counts[item] for item in _KEPT) else None


def _keys(entry: Entry, tail: Entry) -> Iterator[Entry]:
    """Yield the key frames from `entry` on, up to `tail`."""
    key = entry if entry.gop.key_sequence == entry.sequence else entry.gop.next_key
    while key is not None and key.sequence < tail.sequence:
        yield key
        key = key.gop.next_key


def _sound_only(cursor: LogCursor) -> bool:
    """Whether no frame will be handed over, from the cursor to the log's end: there is none, or all are refused."""
    refusals, copies = cursor.refusals, cursor.copies
    if not cursor.log.has_video:
        return True
    return (
        refusals is not None
        and bool(refusals.here.mask & _KEY_BIT)
        and all(gate.refusal.mask & _KEY_BIT for gate in refusals.ahead)
        and not (copies.tally[_KEY] or copies.tally[MessageClass.INTER])
    )


def _thin_oldest(cursor: LogCursor, room: Headroom, reason: DropReason) -> None:
    tail, entry, copies = cursor.tail, cursor.entry, cursor.copies
    size, messages = cursor.copied
    since = copies.oldest_at if copies else entry.enqueued_at
    if room.fits(size + tail.offset - entry.offset, messages + tail.sequence - entry.sequence, since):
        return
    while (
        entry is not tail
        and entry.next is not None
        and not room.fits(tail.offset - entry.offset, tail.sequence - entry.sequence, entry.enqueued_at)
    ):
        entry = entry.next
    cursor.drop_up_to(entry, reason, kept=_KEPT)


def _key_and_audio_fit(key: Entry, tail: Entry, room: Headroom) -> bool:
    audio_bytes = tail.sizes[_AUDIO] - key.sizes[_AUDIO]
    audio_messages = tail.counts[_AUDIO] - key.counts[_AUDIO]
    return room.fits(len(key.wire) + audio_bytes, 1 + audio_messages, key.enqueued_at)
