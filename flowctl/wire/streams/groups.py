"""Where the groups of pictures of a publication begin for its viewers, and which pictures need a remark (pure).

Of several tracks viewers start at the key frames of the lowest one. Tracks have their key frames at one time, one
message after the other: who starts at one of them gets those that come before it with the headers, and the others right
behind it. A track that ends gives way to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.media import MediaInfo, refers_back
from flowctl.wire.rtmp.wire import signed_difference
from flowctl.wire.streams.wirelog import HEADERS, HEADERS_BYTES

LONGEST_KEY_INTERVAL_S: Final = 10.0
"""Longest time between key frames that encoders are usually set to. Frames before the first one are held back for so
long, since no player could decode them; of encoders that refresh without key frames they pass then."""
FRAMES: Final = frozenset({MessageClass.INTER, MessageClass.DISPOSABLE})


class GroupPlace(NamedTuple):
    """What a message is to those who follow the publication; as `WireLog.append` takes it."""

    message_class: MessageClass  # KEY of the lowest track alone: a key frame of any other is INTER
    # whether a picture is a leading one, which is shown before the key frame of its open group; of a key frame: whether
    # such pictures may follow
    leading: bool = False
    ahead: bool | None = None  # whether it is for those too who start at the next key frame


# Bound once: an attribute of an Enum class is looked up by code in Python, for each message.
_KEY, _INTER = MessageClass.KEY, MessageClass.INTER
_USUAL: Final = tuple(GroupPlace(message_class) for message_class in MessageClass)
"""What nearly every message is, by class."""


@dataclass(slots=True, eq=False)
class PictureGroups:
    """The groups of one publication, message by message. Not thread-safe: its owner's lock guards it."""

    _track: int | None = None  # video track at whose key frames viewers start
    _key_at: float = 0.0  # when its last one came
    # When its last one is shown, in ms, where pictures that are shown before it may refer to ones that came before it
    # (open GOP).
    _open_from: int | None = None
    # Size of the pictures of other tracks that go before its next key frame. None: there are none.
    _ahead_bytes: int | None = None

    def place(self, info: MediaInfo, timestamp: int, payload: bytes, now: float) -> GroupPlace:
        message_class = info.message_class
        if message_class is not _KEY and self._open_from is None and self._ahead_bytes is None:
            return _USUAL[message_class]
        if message_class is _KEY:
            track = min(info.tracks)
            if self._track is None or track <= self._track or now - self._key_at > LONGEST_KEY_INTERVAL_S:
                self._track, self._key_at, self._ahead_bytes = track, now, None
                self._open_from = timestamp + (info.composition_ms or 0) if refers_back(info, payload) else None
                return GroupPlace(message_class, self._open_from is not None)
            return GroupPlace(_INTER, ahead=self._goes_ahead(info, len(payload), opens=True))
        if message_class not in FRAMES:
            return GroupPlace(message_class)
        ahead = self._goes_ahead(info, len(payload), opens=False) if message_class is _INTER else None
        return GroupPlace(message_class, self._leads(info, timestamp), ahead)

    def _leads(self, info: MediaInfo, timestamp: int) -> bool:
        if self._open_from is None or info.tracks != (self._track,):
            return False
        if signed_difference(timestamp + (info.composition_ms or 0), self._open_from) < 0:
            return True
        self._open_from = None
        return False

    def _goes_ahead(self, info: MediaInfo, size_bytes: int, *, opens: bool) -> bool | None:
        """Judge a key frame of another track, and what follows it in that one up to the next picture of the lowest.

        Where that is no key frame, the tracks have theirs at different times, and there is nothing to be done.
        """
        before = self._ahead_bytes
        if self._track in info.tracks:
            self._ahead_bytes = None
            return None if before is None else False
        if not (opens or before is not None):
            return None
        self._ahead_bytes = (before or 0) + max(size_bytes, HEADERS_BYTES // HEADERS)
        if self._ahead_bytes <= HEADERS_BYTES:
            return True
        self._ahead_bytes = None
        return False
