"""The seam between two connections that carry the same stream: nothing twice, and what is missing is told (pure).

A source begins with its GOP cache, so behind a lost connection comes again what came before. The last messages are
remembered by fingerprint: what of them is repeated is left out, and the stream goes on with the first message that is
new. It goes on without a gap where that stood right behind the last one that came. Where nothing is repeated,
timestamps tell whether it is the same timeline, some of which is missing, or another one, whose headers count from then
on.
"""

from __future__ import annotations

import enum
import zlib
from collections import deque
from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import signed_difference

MOST_REMEMBERED: Final = 4096
"""Messages whose fingerprints are remembered: a minute of 25 pictures and 43 audio frames a second, longer than groups
of pictures are, in some 300 kB."""
_MOST_HEADERS: Final = 64
"""Headers that are remembered: as many as a stream keeps of its publisher."""
_SLACK_MS: Final = 2000
"""Lead of timestamps over the clock that is still the same timeline: encoders send in bursts."""


class SeamVerdict(enum.Enum):
    """What a message of a new connection is to what came before."""

    NEXT = "next"  #: it goes on
    REPEATED = "repeated"  #: it came before
    HELD = "held"  #: a header; what follows it decides
    GAP = "gap"  #: it goes on, and something before it is missing, or may be
    RESTART = "restart"  #: another timeline begins


class SeamPiece(NamedTuple):
    type_id: int
    timestamp: int
    payload: bytes


class SeamResult(NamedTuple):
    """What becomes of a message of a new connection."""

    verdict: SeamVerdict
    pieces: tuple[SeamPiece, ...] = ()  #: what is to be passed on now, in order


class Seam:
    """Joins connections that carry one stream.

    Not locked: its owner has one thread at a time.
    """

    __slots__ = ("_again", "_headers", "_held", "_last_at", "_last_timestamp", "_recent", "_repeats", "repeated_count")

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=MOST_REMEMBERED)
        self._headers: dict[object, tuple[int, int]] = {}  # by sticky key: type and checksum
        self._again: frozenset[int] | None = None  # what may be repeated. None: the connection has shown where it is
        self._repeats: int | None = None  # fingerprint of the last message that was repeated
        self._held: list[tuple[object, SeamPiece]] = []  # headers, until a frame shows which timeline it is
        self._last_timestamp = 0
        self._last_at = 0.0
        self.repeated_count = 0  #: messages left out because they came before

    def reconnected(self) -> None:
        self._held.clear()
        self._repeats = None
        self._again = frozenset(self._recent) if self._recent or self._headers else None

    def forget(self) -> None:
        self._recent.clear()
        self._headers.clear()
        self._held.clear()
        self._again = self._repeats = None

    def join(self, type_id: int, timestamp: int, payload: bytes, now: float) -> SeamResult:
        piece = SeamPiece(type_id, timestamp, payload)
        info = inspect(type_id, payload)
        if info.message_class is MessageClass.HEADER:
            if self._again is not None:
                self._held = [*self._held[1 - _MOST_HEADERS :], (info.sticky_key, piece)]
                return SeamResult(SeamVerdict.HELD)
            self._keep(info.sticky_key, piece)
            return SeamResult(SeamVerdict.NEXT, (piece,))
        mark = timestamp << 40 | type_id << 32 | zlib.crc32(payload)
        if self._again is None:
            self._note(mark, timestamp, now)
            return SeamResult(SeamVerdict.NEXT, (piece,))
        if mark in self._again:
            self._repeats = mark
            self.repeated_count += 1
            return SeamResult(SeamVerdict.REPEATED)
        return self._go_on(piece, mark, now)

    def _go_on(self, piece: SeamPiece, mark: int, now: float) -> SeamResult:
        verdict = self._verdict_of(piece.timestamp, now)
        if verdict is SeamVerdict.RESTART:
            self._recent.clear()
            self._headers.clear()
        held, self._held, self._again = self._held, [], None
        news = [header for key, header in held if self._keep(key, header)]
        self._note(mark, piece.timestamp, now)
        return SeamResult(verdict, (*news, piece))

    def _verdict_of(self, timestamp: int, now: float) -> SeamVerdict:
        if self._repeats is not None:
            return SeamVerdict.NEXT if self._repeats == self._recent[-1] else SeamVerdict.GAP
        if not self._recent:
            return SeamVerdict.NEXT  # nothing but headers came so far
        ahead_ms = signed_difference(timestamp, self._last_timestamp)
        elapsed_ms = (now - self._last_at) * 1000
        return SeamVerdict.GAP if 0 <= ahead_ms <= elapsed_ms + _SLACK_MS else SeamVerdict.RESTART

    def _note(self, mark: int, timestamp: int, now: float) -> None:
        self._recent.append(mark)
        self._last_timestamp, self._last_at = timestamp, now

    def _keep(self, key: object, header: SeamPiece) -> bool:
        value = header.type_id, zlib.crc32(header.payload)
        previous = self._headers.pop(key, None)
        if len(self._headers) >= _MOST_HEADERS:
            del self._headers[next(iter(self._headers))]
        self._headers[key] = value
        return previous != value
