"""A Sender's own queue: the control lane, and messages sent to this peer alone (pure).

The control lane is never refused and never thinned; it has a small limit of its own, so that a peer cannot make us
queue replies without end. Media sent without a stream log goes through the other lane: the policy decides when a
message is offered, and the queue can be thinned later, with the same contract as for a log: after the loss of a key or
inter frame nothing but audio and data goes out until the next key frame, before which the newest header of each track
is sent again. The wait for it ends without one after `KEY_WAIT_S` or two groups of pictures, whichever is longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from flowctl.flow.counts import Counts, Tally, total
from flowctl.flow.policy import BROKEN_MASK, DROPPABLE_MASK, KEY_WAIT_S, Room
from flowctl.flow.state import MessageClass
from flowctl.outgoing.lane import Item
from flowctl.reasons import DropReason

_KEY: Final = MessageClass.KEY
_HEADER: Final = MessageClass.HEADER
_CONTROL: Final = MessageClass.CONTROL
_AUDIO: Final = MessageClass.AUDIO
_BREAKING: Final = frozenset({MessageClass.KEY, MessageClass.INTER})
_VIDEO: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})
MOST_TRACKS: Final = 32
"""Headers that are remembered per peer; beyond, the track that came first is forgotten. Streams have two or three."""


class QueuedMessage:
    """A message that waits in a Sender's own queue."""

    __slots__ = ("droppable", "enqueued_at", "message_class", "track", "wire")

    def __init__(
        self, wire: bytes, message_class: MessageClass, enqueued_at: float, track: int, *, droppable: bool
    ) -> None:
        self.wire = wire
        self.message_class = message_class
        self.enqueued_at = enqueued_at
        self.track = track
        self.droppable = droppable


class Backlog:
    """Control lane and own media lane of one Sender. Not thread-safe: its Sender's lock guards it.

    Attributes:
        control: the control lane. None until it is first used, as is the media lane: most viewers of a stream log have
            nothing of their own queued.
        accepted: what was offered, by class.
        taken: what was handed over to be sent.
        has_video: whether a frame was ever offered.
        waiting_for_key: whether inter frames are refused until the next key frame.
        restarts: times a key frame ended such a wait, or the queue was skipped to one.
        key_waits_expired: times none came in time.
    """

    __slots__ = (
        "_dropped",
        "_gop_s",
        "_headers",
        "_key_at",
        "_media",
        "_thinned",
        "_wait_since",
        "accepted",
        "control",
        "control_bytes",
        "has_video",
        "key_waits_expired",
        "media_bytes",
        "restarts",
        "taken",
        "waiting_for_key",
    )

    def __init__(self) -> None:
        # A list, not a deque of 760 bytes: a stalled peer has one ping in it for all its time, and it is bounded.
        self.control: list[QueuedMessage] | None = None
        self._media: deque[QueuedMessage] | None = None
        self.control_bytes = 0
        self.media_bytes = 0
        self.accepted = Tally()
        self.taken = Tally()
        self.has_video = False
        self.waiting_for_key = False
        self.restarts = 0
        self.key_waits_expired = 0
        self._wait_since = 0.0
        self._thinned = False  # the queue was thrown away, and with the next key frame goes the sound before it
        self._key_at: float | None = None  # when the last key frame was offered
        self._gop_s = 0.0  # time between the last two
        self._dropped: dict[DropReason, Tally] | None = None
        self._headers: dict[int, bytes] | None = None  # newest header per track

    def __len__(self) -> int:
        return len(self.control or ()) + len(self._media or ())

    @property
    def media_messages(self) -> int:
        """Messages queued in the media lane."""
        return len(self._media or ())

    @property
    def size_bytes(self) -> int:
        """Wire bytes queued in both lanes."""
        return self.control_bytes + self.media_bytes

    @property
    def oldest_at(self) -> float | None:
        """Enqueue time of the oldest queued message in seconds. None: nothing is queued."""
        control, media = self.control, self._media
        if control and media:
            return min(control[0].enqueued_at, media[0].enqueued_at)
        lane = control or media
        return lane[0].enqueued_at if lane else None

    # -- offering

    def offer(
        self,
        wire: bytes,
        message_class: MessageClass,
        now: float,
        *,
        mask: int,
        held: bool = False,
        full: bool = False,
        droppable: bool | None,
        track: int,
    ) -> DropReason | None:
        """Queue one message unless it is refused; return why it is refused, or None.

        Args:
            wire: the message, complete.
            message_class: CONTROL goes to the control lane.
            now: time in seconds.
            mask: classes that the policy refuses in the present state.
            held: refuse all but CONTROL and HEADER, whatever its mark: the hard limit is held.
            full: refuse all that may be dropped: what waits is at the hard limit, before anything was offered.
            droppable: None: all but CONTROL and HEADER may be dropped.
            track: which header a HEADER message replaces.
        """
        self.accepted.add(message_class, len(wire))
        if message_class is _CONTROL:
            if self.control is None:
                self.control = []
            self.control.append(QueuedMessage(wire, message_class, now, track, droppable=False))
            self.control_bytes += len(wire)
            return None
        self._learn(wire, message_class, now, track)
        may_drop = bool(DROPPABLE_MASK >> message_class & 1) if droppable is None else droppable
        reason = self._refusal(message_class, now, mask, may_drop=may_drop, held=held or (full and may_drop))
        if reason is not None:
            self._tally(reason).add(message_class, len(wire))
            if message_class in _BREAKING:
                self._wait(now)
            return reason
        if message_class is _KEY and self.waiting_for_key:
            self.waiting_for_key = False
            self._drop_old_sound()
            self._restart(now)
        self._push(QueuedMessage(wire, message_class, now, track, droppable=may_drop))
        return None

    def pass_by(self, wire: bytes, message_class: MessageClass, now: float, track: int) -> None:
        """Count a message that goes to the kernel without being queued."""
        self.accepted.add(message_class, len(wire))
        self.taken.add(message_class, len(wire))
        self._learn(wire, message_class, now, track)

    def _learn(self, wire: bytes, message_class: MessageClass, now: float, track: int) -> None:
        """Remember what a restart needs: the newest header per track, and how far key frames are apart."""
        if message_class is _HEADER:
            if self._headers is None:
                self._headers = {}
            elif track not in self._headers and len(self._headers) >= MOST_TRACKS:
                del self._headers[next(iter(self._headers))]
            self._headers[track] = wire
        elif message_class in _VIDEO:
            self.has_video = True
            if message_class is _KEY:
                self._gop_s = 0.0 if self._key_at is None else now - self._key_at
                self._key_at = now

    def _refusal(
        self, message_class: MessageClass, now: float, mask: int, *, may_drop: bool, held: bool
    ) -> DropReason | None:
        if held and message_class is not _HEADER:
            return DropReason.HELD
        if not may_drop:
            return None
        if mask >> message_class & 1:
            return DropReason.REFUSED
        if self.waiting_for_key and BROKEN_MASK >> message_class & 1:
            if now - self._wait_since < max(KEY_WAIT_S, 2 * self._gop_s):
                return DropReason.KEY_WAIT
            self.waiting_for_key = self._thinned = False
            self.key_waits_expired += 1
            self._push_headers(now)
        return None

    def _wait(self, now: float) -> None:
        if not self.waiting_for_key:
            self.waiting_for_key = True
            self._wait_since = now

    def _push(self, message: QueuedMessage) -> None:
        if self._media is None:
            self._media = deque()
        self._media.append(message)
        self.media_bytes += len(message.wire)

    def _restart(self, now: float) -> None:
        """A key frame follows after a loss: queue the newest header of each track in front of it."""
        self.restarts += 1
        self._push_headers(now)

    def _push_headers(self, now: float) -> None:
        for track, wire in (self._headers or {}).items():
            self.accepted.add(_HEADER, len(wire))
            self._push(QueuedMessage(wire, _HEADER, now, track, droppable=False))

    # -- taking

    def peek(self, most: int, budget_bytes: int) -> list[Item]:
        """Return the next messages as (class, wire, enqueued at), control first."""
        items: list[Item] = []
        size = 0
        for lane in (self.control, self._media):
            for message in lane or ():
                if len(items) >= most or size >= budget_bytes:
                    return items
                items.append((message.message_class, message.wire, message.enqueued_at))
                size += len(message.wire)
        return items

    def take(self, count: int) -> None:
        """Remove the first `count` messages that `peek` returned: they are sent, or in flight."""
        control, media = self.control, self._media
        while control and count:
            size = len(control.pop(0).wire)
            self.control_bytes -= size
            self.taken.add(_CONTROL, size)
            count -= 1
        while media and count:
            message = media.popleft()
            self.media_bytes -= len(message.wire)
            self.taken.add(message.message_class, len(message.wire))
            count -= 1
        # An empty deque still holds a block of 64 places (760 bytes): nothing a thousand idle viewers should pay for.
        if not control:
            self.control = None
        if not media:
            self._media = None

    # -- thinning

    def thin_to_key_frame(self, room: Room, now: float, reason: DropReason = DropReason.THINNED) -> None:
        """Skip to a key frame so that what stays fits.

        That is the first key frame from which on everything fits; else the newest one with its audio alone; else the
        next one to be offered. Without video the oldest messages go. What may not be dropped stays in any case.
        """
        media = list(self._media or ())
        size, count = self.media_bytes, len(media)
        kept_size = kept_count = 0  # what may not be dropped stays, whatever lies behind it
        newest: int | None = None
        for index, item in enumerate(media):
            key = item.message_class is _KEY
            newest = index if key else newest
            if (key or not self.has_video) and room.fits(size + kept_size, count + kept_count, item.enqueued_at):
                self._keep(media, index, reason, now, audio_only=False)
                return
            size -= len(item.wire)
            count -= 1
            if not item.droppable:
                kept_size += len(item.wire)
                kept_count += 1
        if newest is not None and self._key_and_audio_fit(media, newest, room):
            self._keep(media, newest, reason, now, audio_only=True)
        else:
            self.drop_droppable(reason, now)

    def _key_and_audio_fit(self, media: list[QueuedMessage], key: int, room: Room) -> bool:
        rest = [item for index, item in enumerate(media) if _stays(index, item, key, audio_only=True)]
        return room.fits(sum(len(item.wire) for item in rest), len(rest), media[key].enqueued_at)

    def _keep(
        self, media: list[QueuedMessage], start: int, reason: DropReason, now: float, *, audio_only: bool
    ) -> None:
        """Drop what may be dropped before `start`, and after it all but audio; where a frame went, restart there."""
        lost: list[QueuedMessage] = []
        self._media = deque()
        self.media_bytes = 0
        for index, item in enumerate(media):
            if index == start and any(gone.message_class in _BREAKING for gone in lost):
                self._restart(item.enqueued_at)
            if index == start:
                self._count(lost, reason)
                lost.clear()
            if _stays(index, item, start, audio_only=audio_only):
                self._push(item)
            else:
                lost.append(item)
        self._count(lost, reason)
        # A key frame that is queued already cures no loss behind it: a wait that has begun goes on.
        if audio_only and any(gone.message_class in _BREAKING for gone in lost):
            self._wait(now)

    def drop_droppable(self, reason: DropReason, now: float) -> None:
        """Drop all that may be dropped; a lost frame leads to waiting for the next key frame."""
        lost = [item for item in self._media or () if item.droppable]
        if not lost:
            return
        self._count(lost, reason)
        self._media = deque(item for item in self._media or () if not item.droppable)
        self.media_bytes = sum(len(item.wire) for item in self._media)
        if any(item.message_class in _BREAKING for item in lost):
            self._wait(now)
            self._thinned = True

    def _drop_old_sound(self) -> None:
        """A key frame follows after the queue was thrown away: sound that still waits is older than the picture."""
        if not self._thinned:
            return
        self._thinned = False
        old = [item for item in self._media or () if item.message_class is _AUDIO and item.droppable]
        self._count(old, DropReason.THINNED)
        self._media = deque(
            item for item in self._media or () if item.message_class is not _AUDIO or not item.droppable
        )
        self.media_bytes = sum(len(item.wire) for item in self._media)

    def drop_everything(self, reason: DropReason) -> None:
        """Drop both lanes, whatever the class: the connection is over."""
        self._count([*(self.control or ()), *(self._media or ())], reason)
        self.control = self._media = None
        self.control_bytes = self.media_bytes = 0

    # -- accounts

    def _tally(self, reason: DropReason) -> Tally:
        if self._dropped is None:
            self._dropped = {}
        return self._dropped.setdefault(reason, Tally())

    def _count(self, messages: list[QueuedMessage], reason: DropReason) -> None:
        if messages:
            tally = self._tally(reason)
            for message in messages:
                tally.add(message.message_class, len(message.wire))

    def dropped(self) -> dict[DropReason, Counts]:
        """What was refused or thrown away, by reason."""
        return {reason: tally.frozen() for reason, tally in (self._dropped or {}).items()}

    def tallies(self) -> Iterable[Tally]:
        """What was refused or thrown away, for each reason."""
        return (self._dropped or {}).values()

    def queued(self) -> Counts:
        """What is queued in both lanes."""
        return self.accepted.frozen() - self.taken.frozen() - total(self.dropped().values())


def _stays(index: int, item: QueuedMessage, start: int, *, audio_only: bool) -> bool:
    """Whether `item` outlasts a skip to the message at `start`."""
    wanted = index == start or (index > start and (not audio_only or item.message_class is _AUDIO))
    return wanted or not item.droppable
