"""From one log of a content into another, at a key frame: what a viewer gets there so that no sound is missing (pure).

All logs get the same sound, message by message and in the same order, but not at the same places between their
pictures. So the number of sound messages before an entry says what its viewer has heard. What it would miss is taken
from the log that is left; what it would get twice is left out of the log that is entered. Of the headers it gets those
that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from flowctl.core.flow.counts import Tally
from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass
from flowctl.core.outgoing.backlog import NO_MESSAGES, Item
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.refusals import KeyWait
from flowctl.core.outgoing.streamlog import Entry, Place, StreamLog
from flowctl.reasons import DropReason

_AUDIO: Final = MessageClass.AUDIO
_KEY_BIT: Final = 1 << MessageClass.KEY
MOST_SOUND: Final = 2048
"""Sound messages that are taken over or left out at most, some 40 s: logs that are further apart have other sound."""

_WRAP_MS: Final = 1 << 32
"""Times of media have 32 bits."""


def apart_ms(one: int, other: int) -> int:
    """Return by how many milliseconds `one` is later than `other`."""
    apart = (one - other) % _WRAP_MS
    return apart - _WRAP_MS if apart >= _WRAP_MS // 2 else apart


class Splice(NamedTuple):
    """What to send first, and the entry from which on to follow the log that is entered."""

    prefix: tuple[Item, ...]
    start: Entry


def splice(place: Entry, key: Entry, heard: int) -> Splice | None:
    """Return how a viewer that stands at `place` of one log goes on at the key frame `key` of another.

    Args:
        place: what it would be sent next.
        key: where it goes on.
        heard: sound messages that it was sent, less those that stand before `key` in the other log.

    Returns:
        None: what it needs is not published yet.
    """
    headers = new_headers(place, key)
    if abs(heard) > MOST_SOUND:
        return Splice(headers, key)
    if heard > 0:
        behind = _without_sound(key, heard)
        return None if behind is None else Splice((*headers, *behind.prefix), behind.start)
    missing = next_sound(place, -heard)
    return Splice((*headers, *missing), key) if len(missing) == -heard else None


def new_headers(place: Entry, key: Entry) -> tuple[Item, ...]:
    """Return the headers of the group of `key` that are others than those of `place`."""
    known = place.gop.restart  # what is in there is not sent again: players make a new stream of some of it
    return tuple((MessageClass.HEADER, wire, key.enqueued_at) for wire in key.gop.restart if wire not in known)


def next_sound(place: Entry, count: int) -> tuple[Item, ...]:
    """Return the next `count` sound messages from `place` on, or as many as there are."""
    found: list[Item] = []
    entry = place
    while len(found) < count and entry.next is not None:
        if entry.message_class is _AUDIO:
            found.append((_AUDIO, entry.wire, entry.enqueued_at))
        entry = entry.next
    return tuple(found)


def _without_sound(key: Entry, count: int) -> Splice | None:
    """Return what there is from `key` on, up to the last of `count` sound messages, but for these."""
    items: list[Item] = []
    entry = key
    while count:
        if entry.next is None:
            return None
        if entry.message_class is _AUDIO:
            count -= 1
        elif entry.message_class is MessageClass.KEY or not entry.leading:  # those refer to the group before
            items.append((entry.message_class, entry.wire, entry.enqueued_at))
        entry = entry.next
    return Splice(tuple(items), entry)


class MediaTimes(NamedTuple):
    """How the times of a picture's message are read and written, in ms: when it is decoded, and when it is shown."""

    time_of: Callable[[bytes], int]
    shown_at: Callable[[bytes], int]
    retime: Callable[[bytes, int, int], bytes]


def raise_times(found: Splice, sent_ms: int, times: MediaTimes, *, in_order: bool = False) -> Splice | None:
    """Let pictures come after the last one that was sent: those that are not later than it, a millisecond apart.

    They are needed to decode what follows, and a player shows them in no time.

    Args:
        found: begins with a key frame.
        sent_ms: when the last picture was decoded that was sent.
        times: of the messages.
        in_order: also show them after it, which may be shown later than pictures behind it are decoded.

    Returns:
        None: what is later is not published yet.
    """
    passed = list(takewhile(lambda wire: apart_ms(times.time_of(wire), sent_ms) <= 0, _pictures(found)))
    if not passed:
        return found
    first_ms = apart_ms(times.shown_at(passed[0]), sent_ms)
    step_ms = max(-apart_ms(times.time_of(passed[0]), sent_ms) // len(passed), 1)
    ahead_ms = max(apart_ms(times.shown_at(wire), times.time_of(wire)) for wire in passed) if in_order else 0
    last_ms = 0
    items: list[Item] = []
    waiting, entry = iter(found.prefix), found.start
    while True:
        item = next(waiting, None)
        from_log = item is None
        if item is None:
            if entry.next is None:
                return None
            item = (entry.message_class, entry.wire, entry.enqueued_at)
        message_class, wire, since = item
        if message_class in VIDEO_CLASSES:
            own_ms, shown_ms = (apart_ms(at, sent_ms) for at in (times.time_of(wire), times.shown_at(wire)))
            least_ms = ahead_ms + 1 + (shown_ms - first_ms) // step_ms
            if from_log and own_ms > max(last_ms, least_ms):  # so is what follows, which is shown when it is decoded
                return Splice(tuple(items), entry)
            last_ms = max(own_ms, last_ms + 1)
            if last_ms != own_ms or shown_ms < least_ms:
                raised_ms = max(shown_ms, least_ms, last_ms)
                wire = times.retime(wire, (sent_ms + last_ms) % _WRAP_MS, (sent_ms + raised_ms) % _WRAP_MS)
        if not from_log or message_class is MessageClass.KEY or not entry.leading:
            items.append((message_class, wire, since))
        if from_log and entry.next is not None:
            entry = entry.next


def _pictures(found: Splice) -> Iterator[bytes]:
    yield from (wire for message_class, wire, _ in found.prefix if message_class in VIDEO_CLASSES)
    entry = found.start
    while entry.next is not None:
        if entry.message_class in VIDEO_CLASSES:
            yield entry.wire
        entry = entry.next


def go_on_in(
    cursor: LogCursor, log: StreamLog, start: Entry, prefix: Sequence[Item], now: float, *, wait_for_key: bool = False
) -> None:
    """Have a viewer go on in `log` at `start`, behind `prefix`, instead of with what is queued of the present log.

    The account goes on: what was queued is not dropped, but was never for this viewer. What the state refuses is
    refused from `start` on. A wait for a key frame ends, unless one is to begin: `start` is a key frame, or follows
    one that is in `prefix`.
    """
    entry, account, copies, extra = cursor.place.entry, cursor.account, cursor.copies, cursor.account.extra
    passed = Tally(account.passed(entry))
    for figures, _ in cursor.lose_refused(entry, cursor.tail):  # it stays lost: no count of what was dropped falls
        passed.add_figures(figures)
    for wire in () if cursor.refusals is None else cursor.refusals.restarts():
        extra.subtract(MessageClass.HEADER, len(wire))
    if copies:
        superseded = Tally()
        # Sound among them comes before `start`, and is still to be sent.
        copies.drop(lambda item: item[0] not in {MessageClass.CONTROL, _AUDIO}, superseded)
        extra.subtract_figures(superseded)
        cursor.copies = copies or NO_MESSAGES
    account.count_from(start, passed)
    cursor.log = cursor.chain = log
    cursor.place, cursor.joining_to, cursor.wait, cursor.refusals = Place(start), None, None, None
    cursor.leading, cursor.behind = (start.gop.key_sequence,), None
    mask = cursor.mask
    cursor.accept_from(start, mask, DropReason.REFUSED, (), now)
    if wait_for_key or mask & (_KEY_BIT | 1 << MessageClass.INTER):
        key_first = any(item[0] is MessageClass.KEY for item in prefix)  # it is lost with what is behind it
        lost = wait_for_key or mask & _KEY_BIT or key_first
        wait = cursor.wait = KeyWait(start, now, lost=True) if lost else KeyWait.after(start)
        cursor.refuse_from(start, wait.mask, wait.reason, now)
    for message_class, wire, since in prefix:
        if not mask >> message_class & 1:
            extra.add(message_class, len(wire))
            cursor.push_copy(message_class, wire, since)
