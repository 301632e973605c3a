"""A Sender's own queue: the control lane, and messages sent to this peer alone (pure).

The control lane is never refused and never thinned; it has a small limit of its own, so that a peer cannot make us
queue replies without end. Media sent without a stream log goes through the other lane: the policy decides when a
message is offered, and the queue can be thinned later, with the same contract as for a log: after the loss of a key or
inter frame nothing but audio and data goes out until the next key frame, before which the newest header of each track
is sent again.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from flowctl.counts import Counts, Tally, total
from flowctl.flow import MessageClass
from flowctl.policy import BROKEN_MASK, DROPPABLE_MASK, Room
from flowctl.reasons import DropReason

_KEY: Final = MessageClass.KEY
_HEADER: Final = MessageClass.HEADER
_CONTROL: Final = MessageClass.CONTROL
_BREAKING: Final = frozenset({MessageClass.KEY, MessageClass.INTER})
_VIDEO: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})


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
    """Control lane and own media lane of one Sender. Not thread-safe: its Sender's lock guards it."""

    __slots__ = (
        "_dropped",
        "_headers",
        "_media",
        "accepted",
        "control",
        "control_bytes",
        "has_video",
        "media_bytes",
        "taken",
        "waiting_for_key",
    )

    def __init__(self) -> None:
        self.control: deque[QueuedMessage] | None = None  # both lanes are made when first used: most viewers
        self._media: deque[QueuedMessage] | None = None  # of a stream log have nothing of their own queued
        self.control_bytes = 0
        self.media_bytes = 0
        self.accepted = Tally()
        self.taken = Tally()  # handed over to be sent
        self.has_video = False
        self.waiting_for_key = False
        self._dropped: dict[DropReason, Tally] | None = None
        self._headers: dict[int, bytes] | None = None  # newest header per track

    def __len__(self) -> int:
        return len(self.control or ()) + len(self._media or ())

    @property
    def size_bytes(self) -> int:
        """Wire bytes queued in both lanes."""
        return self.control_bytes + self.media_bytes

    @property
    def oldest_at(self) -> float | None:
        """Enqueue time of the oldest queued message in seconds. None: nothing is queued."""
        fronts = [lane[0].enqueued_at for lane in (self.control, self._media) if lane]
        return min(fronts) if fronts else None

    def offer(
        self, wire: bytes, message_class: MessageClass, now: float, *, mask: int, droppable: bool | None, track: int
    ) -> DropReason | None:
        """Queue one message unless it is refused; return why it is refused, or None.

        Args:
            wire: the message, complete.
            message_class: CONTROL goes to the control lane.
            now: time in seconds.
            mask: classes that the policy refuses in the present state.
            droppable: None: all but CONTROL and HEADER may be dropped.
            track: which header a HEADER message replaces.
        """
        self.accepted.add(message_class, len(wire))
        if message_class is _CONTROL:
            if self.control is None:
                self.control = deque()
            self.control.append(QueuedMessage(wire, message_class, now, track, droppable=False))
            self.control_bytes += len(wire)
            return None
        may_drop = bool(DROPPABLE_MASK >> message_class & 1) if droppable is None else droppable
        reason = self._refusal(message_class, mask) if may_drop else None
        if reason is not None:
            self._tally(reason).add(message_class, len(wire))
            self.waiting_for_key = self.waiting_for_key or message_class in _BREAKING
            return reason
        if message_class in _VIDEO:
            self.has_video = True
        if message_class is _HEADER:
            if self._headers is None:
                self._headers = {}
            self._headers[track] = wire
        elif message_class is _KEY and self.waiting_for_key:
            self._restart(now)
        self._push(QueuedMessage(wire, message_class, now, track, droppable=may_drop))
        return None

    def _refusal(self, message_class: MessageClass, mask: int) -> DropReason | None:
        if mask >> message_class & 1:
            return DropReason.REFUSED
        if self.waiting_for_key and BROKEN_MASK >> message_class & 1:
            return DropReason.KEY_WAIT
        return None

    def _push(self, message: QueuedMessage) -> None:
        if self._media is None:
            self._media = deque()
        self._media.append(message)
        self.media_bytes += len(message.wire)

    def _restart(self, now: float) -> None:
        """A key frame comes after a loss: queue the newest header of each track in front of it."""
        self.waiting_for_key = False
        for track, wire in (self._headers or {}).items():
            self.accepted.add(_HEADER, len(wire))
            self._push(QueuedMessage(wire, _HEADER, now, track, droppable=False))

    # -- taking

    def peek(self, most: int, budget_bytes: int) -> list[tuple[MessageClass, bytes, float]]:
        """Return the next messages as (class, wire, enqueued at), control first."""
        items: list[tuple[MessageClass, bytes, float]] = []
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
            size = len(control.popleft().wire)
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

    def thin_to_key_frame(self, room: Room, now: float) -> None:
        """Skip to the first key frame from which on everything fits; without one, to the next one offered.

        Without video the oldest messages go.
        """
        media = list(self._media or ())
        size, count = self.media_bytes, len(media)
        for index, message in enumerate(media):
            start = message.message_class is _KEY or not self.has_video
            if start and room.fits(size, count, message.enqueued_at):
                self._drop_before(index, media, now, restart=message.message_class is _KEY)
                return
            size -= len(message.wire)
            count -= 1
        self.drop_droppable(DropReason.THINNED)

    def _drop_before(self, index: int, media: list[QueuedMessage], now: float, *, restart: bool) -> None:
        """Drop what may be dropped before `index`; where a frame went, send the headers again before the key frame."""
        kept = [item for item in media[:index] if not item.droppable]
        lost = [item for item in media[:index] if item.droppable]
        if not lost:
            return
        self._count(lost, DropReason.THINNED)
        self._media = deque(kept)
        self.media_bytes = sum(len(item.wire) for item in kept)
        if restart and any(item.message_class in _BREAKING for item in lost):
            self._restart(now)
        for item in media[index:]:
            self._push(item)

    def drop_droppable(self, reason: DropReason) -> None:
        """Drop all that may be dropped; a lost frame leads to waiting for the next key frame."""
        media = list(self._media or ())
        lost = [item for item in media if item.droppable]
        self._count(lost, reason)
        self._media = deque(item for item in media if not item.droppable)
        self.media_bytes = sum(len(item.wire) for item in self._media)
        if any(item.message_class in _BREAKING for item in lost):
            self.waiting_for_key = True

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

    def queued(self) -> Counts:
        """What is queued in both lanes."""
        return self.accepted.frozen() - self.taken.frozen() - total(self.dropped().values())
