"""The one sound of a set of renditions (pure): that of the largest member that sends any.

How it works. A viewer that goes from one rendition to another must hear neither a gap nor anything twice, so all
renditions have the same sound messages. They come from one member, the *source*. What the others send is kept for a
second: when the source goes, or is silent for half of that, the next one takes over behind the last moment that was
heard, with what it has sent meanwhile. A larger member takes over as soon as it sends sound.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowctl.errors import LimitExceededError
from flowctl.live.settings.renditions import MOST_RENDITIONS
from flowctl.wire.rtmp.media.media import MediaInfo
from flowctl.wire.rtmp.wire import signed_difference
from flowctl.wire.streams.wirelog import KeptHeaders

_SILENT_S: Final = 0.5
"""Silence of the source after which another one takes over: encoders send sound some 20 to 50 times a second."""
_KEPT_S: Final = 1.0
_KEPT_MESSAGES: Final = 256
_KEPT_BYTES: Final = 256 * 1024
"""Sound that is kept of a member that is not the source: a second of 1 Mbit/s, and of messages of 4 ms."""
_JUMP_MS: Final = 5000
"""Difference between the clocks of two members beyond which the last moment heard says nothing about the next one."""


class Sound(NamedTuple):
    """A sound message."""

    timestamp: int
    payload: bytes
    info: MediaInfo


@dataclass(slots=True)
class _Member:
    """A member that has sent sound."""

    headers: KeptHeaders[Sound] = field(default_factory=KeptHeaders)
    recent: deque[tuple[float, Sound]] = field(default_factory=deque)  # with the time of arrival, in seconds
    recent_bytes: int = 0

    def keep(self, sound: Sound, now: float) -> None:
        self.recent.append((now, sound))
        self.recent_bytes += len(sound.payload)
        while self.recent and (
            len(self.recent) > _KEPT_MESSAGES or self.recent_bytes > _KEPT_BYTES or now - self.recent[0][0] > _KEPT_S
        ):
            self.recent_bytes -= len(self.recent.popleft()[1].payload)


class CommonSound:
    """Chooses the source, and what is passed on of it; members are known by rank, 0 for the largest."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self.source: int | None = None  # rank of the member whose sound is passed on. None: none has sent any.
        self.headers: tuple[Sound, ...] = ()  # what a rendition that begins now needs first
        self._heard_at = float("-inf")  # when the last sound was passed on
        self._heard_ms: int | None = None  # its timestamp. None: there was none yet.
        self._behind = False  # whether the source, which took over, has still to come to that moment

    def offer(self, rank: int, sound: Sound, now: float) -> list[Sound]:
        """Return what is passed on to all renditions now that a member has sent a sound message."""
        member = self._members.get(rank)
        if member is None:
            if len(self._members) >= MOST_RENDITIONS:  # a publication may have 256 tracks of sound
                return []
            member = self._members[rank] = _Member()
        key = sound.info.sticky_key
        if key is not None:
            with contextlib.suppress(LimitExceededError):
                member.headers.keep(key, len(sound.payload), sound)
            if self.source is None or (self._heard_ms is None and rank < self.source):
                self.source = rank
            return self._news(member) if rank == self.source else []
        if rank == self.source:
            return self._pass([sound], now)
        member.keep(sound, now)
        if self.source is None or rank < self.source or now - self._heard_at > _SILENT_S:
            return self._take_over(rank, now)
        return []

    def withdraw(self, rank: int, now: float) -> list[Sound]:
        """Return what is passed on now that a member has gone: of the next one, where it was the source."""
        self._members.pop(rank, None)
        if rank != self.source:
            return []
        self.source = None
        others = [other for other, member in self._members.items() if member.recent]
        return self._take_over(min(others), now) if others else []

    def _take_over(self, rank: int, now: float) -> list[Sound]:
        self.source, member = rank, self._members[rank]
        recent = [sound for _, sound in member.recent]
        member.recent.clear()
        member.recent_bytes = 0
        last = self._heard_ms
        self._behind = last is not None and abs(signed_difference(recent[-1].timestamp, last)) <= _JUMP_MS
        return [*self._news(member), *self._pass(recent if self._behind or last is None else recent[-1:], now)]

    def _news(self, member: _Member) -> list[Sound]:
        """Return the headers of the source that are others than those in force."""
        before = {sound.payload for sound in self.headers}
        self.headers = member.headers.values
        return [sound for sound in self.headers if sound.payload not in before]

    def _pass(self, sounds: list[Sound], now: float) -> list[Sound]:
        """Return what has not been heard yet."""
        passed = []
        for sound in sounds:
            if self._behind and self._heard_ms is not None and signed_difference(sound.timestamp, self._heard_ms) <= 0:
                continue
            self._behind = False
            passed.append(sound)
        if passed:
            self._heard_at, self._heard_ms = now, passed[-1].timestamp
        return passed
