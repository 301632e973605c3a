"""What a viewer that lags is not sent because it would come too late (pure).

Whether a message would be late is reckoned in `core.flow.timing`. What is late is left out when it comes next: a
picture with the rest of its group, which is a key wait.
"""

from __future__ import annotations

from math import inf
from typing import Final

from flowctl.core.flow.policy import BROKEN_MASK
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.accounts import PICTURES
from flowctl.core.outgoing.backlog import Item
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.refusals import KeyWait
from flowctl.core.outgoing.streamlog import Entry
from flowctl.reasons import DropReason

_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER
_AUDIO: Final = MessageClass.AUDIO

_CUT_WAIT_S: Final = 60.0
"""Time for which the next key frame is waited for after a cut: encoders in their default state make groups of up to 50
s (250 pictures, the default of x264, of a camera with 5 a second), and what goes out without one cannot be decoded."""
_NEAR_MESSAGES: Final = 64
"""Messages ahead in which a picture is sought that could be left out for sound: more than come between two."""


def peek_in_time(cursor: LogCursor, most: int, budget_bytes: int, timing: Timing) -> list[Item]:
    """Return what `LogCursor.peek` does, up to what would be late; what comes next and would be is left out before."""
    if not cursor.cuts_end:
        return cursor.peek(most, budget_bytes)
    leave_out_late(cursor, timing)
    return cursor.peek(most, budget_bytes, timing)


def leave_out_late(cursor: LogCursor, timing: Timing) -> None:
    """Leave out for good what comes next and would be late, where a key frame would end a cut.

    That is a key frame with the restart messages that are for it alone.
    """
    cursor.settle()
    cursor.leave_out_leading()
    while (entry := cursor.entry) is not cursor.tail and entry.next is not None:
        item, copies, ahead = entry.message_class, cursor.copies, cursor.copied[0]
        if not _is_late(cursor, entry, timing, ahead):
            return
        if item is _INTER:
            _cut_from(cursor, KeyWait(entry, timing.now, lost=True), timing.now)
        elif item is _KEY:
            size, since = len(entry.wire), max(entry.enqueued_at, cursor.joined_at)
            firm = timing.key_firm or (timing.large(size) and timing.late(_KEY, 0, since, ahead))
            if not (firm or entry.gop.next_key is not None or _delays_sound(cursor, timing, ahead)):
                return  # nothing could stand in for it
            if copies and tuple(wire for _, wire, _ in copies) == entry.gop.restart:
                # Else what comes with every key frame would take the line from those that are in time.
                cursor.drop_copies(DropReason.LATE, kept=())
            cursor.pass_by(DropReason.LATE)
            _cut_from(cursor, KeyWait.after(entry), timing.now)
        elif item is MessageClass.DISPOSABLE or not timing.sound_last or _without_pictures(cursor, timing, ahead):
            cursor.pass_by(DropReason.LATE)
        else:
            return
        cursor.settle()
        cursor.leave_out_leading()


def cut_behind(cursor: LogCursor, timing: Timing) -> bool:
    """Leave out the rest of the open group from where it would be late behind all that waits; return whether any.

    Sooner than when it comes next: for a queue that nears its limit while a large message is on its way.
    """
    refusals, entry, tail = cursor.refusals, cursor.entry, cursor.tail
    changes = cursor.wait is not None or (refusals is not None and refusals.ahead)
    if changes or not cursor.cuts_end or entry.gop is not tail.gop:
        return False
    ahead = cursor.copied[0]
    while entry is not tail and entry.next is not None:
        message_class = entry.message_class
        if not cursor.mask >> message_class & 1:
            if message_class is _INTER and _is_late(cursor, entry, timing, ahead):
                _cut_from(cursor, KeyWait(entry, timing.now, lost=True), timing.now, entry)
                return True
            ahead += len(entry.wire)
        entry = entry.next
    return False


def _cut_from(cursor: LogCursor, wait: KeyWait, now: float, start: Entry | None = None) -> None:
    """Leave out the rest of a group of pictures from `start`, or from the cursor on, whatever else is refused."""
    wait.lost, wait.least_s, wait.reason = True, _CUT_WAIT_S, DropReason.LATE
    cursor.wait_from(wait, start or cursor.entry, BROKEN_MASK, DropReason.LATE, now)


def _is_late(
    cursor: LogCursor, entry: Entry, timing: Timing, ahead_bytes: int, as_class: MessageClass | None = None
) -> bool:
    """Whether `entry`, or a message of class `as_class` in its place, would be late behind `ahead_bytes`."""
    since = max(entry.enqueued_at, cursor.joined_at)
    as_class = entry.message_class if as_class is None else as_class
    return timing.late(as_class, len(entry.wire), since, ahead_bytes, *cursor.key_before(entry))


def _delays_sound(cursor: LogCursor, timing: Timing, ahead_bytes: int) -> bool:
    """Whether sound is kept longest and a key frame is so late that the sound after it would be left out too."""
    entry, size = cursor.entry, len(cursor.entry.wire)
    since = max(entry.enqueued_at, cursor.joined_at)
    return (
        timing.sound_last
        and not cursor.mask >> _AUDIO & 1
        and timing.late(_AUDIO, size, since, ahead_bytes, size, key_s_ago=inf)  # of sound that comes long after it
        and cursor.log.sounds
    )


def _without_pictures(cursor: LogCursor, timing: Timing, ahead_bytes: int) -> bool:
    """Whether no picture comes next that could be left out in the place of sound, or that is late as well."""
    refusals = cursor.refusals
    if not cursor.log.has_video or (refusals is not None and refusals.here.mask >> _INTER & 1):
        return True
    # A stream that has had pictures may have none any more: a camera is off, or one picture stands for a radio.
    tail, entry = cursor.tail, cursor.entry
    if not any(tail.counts[item] != entry.counts[item] for item in PICTURES):
        rates = cursor.log.rates.per_second(timing.now, tail.counts, tail.sizes)
        return rates is not None and not any(rates[0][item] for item in PICTURES)
    for _ in range(_NEAR_MESSAGES):
        item = entry.message_class
        if item in PICTURES:  # late even if it came now?
            return _is_late(cursor, entry, timing, ahead_bytes, _INTER if item is _KEY else item)
        if entry.next is None:
            return False
        entry = entry.next
    return True  # it waits behind much sound
