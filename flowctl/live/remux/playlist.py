"""The playlist of HLS: which segments there are now, which have to go, and the text of it (pure).

Sources: RFC 8216, and draft-pantos-hls-rfc8216bis for parts. A segment that left the playlist stays for as long as the
playlist is (section 6.2.2), since players that fetched the one before may still ask for it; so do its parts.

For low latency a segment is listed by its parts as they come, and as a whole when it is complete. The name of the part
behind the last one is there ahead, so that players can ask for it before it is made.

The target durations never change while a playlist is there (section 6.2.1). So they are set by what came before it is
shown: that is when a segment was long enough, and the distance of key frames is known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

PLAYLIST: Final = ".m3u8"
CONTENT_TYPES: Final = {
    ".m3u8": "application/vnd.apple.mpegurl",
    ".ts": "video/mp2t",
    ".m4s": "video/iso.segment",
    ".mp4": "video/mp4",
}
"""Content types of the files of HLS, by suffix."""


_HOLD_BACK_PARTS: Final = 3
"""Parts that players shall be behind the newest one: what RFC 8216bis recommends (section 4.4.3.8); 2 are the least."""
_HOLD_BACK_TARGETS: Final = 3
"""Target durations from the end in which segments are listed by their parts, too (section 6.2.2)."""
_LEAST_TARGETS: Final = 3
"""Target durations that are listed, if there were as many (section 6.2.2)."""
ROUNDED_S: Final = 0.499
"""What a segment may be longer than the target, since its length is rounded (section 4.4.3.1)."""
_ROOM_S: Final = 0.25
"""Of that, what is left to the segments that come."""
_PART_ROOM: Final = 1.1
"""Target of parts where pictures are further apart than it, as a share of that: they may come a little late."""


AWAY_S: Final = 10.0
"""Time that a publisher may be away before the playlist ends: players that have read its end never look again."""


@dataclass(frozen=True, slots=True)
class HlsPart:
    name: str
    duration_s: float
    independent: bool  # it has a key frame


@dataclass(frozen=True, slots=True)
class HlsSegment:
    name: str
    duration_s: float
    init: str = ""  # name of the file with its initialisation. Empty: it needs none.
    discontinuity: bool = False  # what comes before it is of another timeline, or other tracks, or missing
    began_at: float | None = None  # time of day at which its first picture came, in s
    parts: tuple[HlsPart, ...] = ()

    def redated(self, by_s: float) -> HlsSegment:
        return self if self.began_at is None else replace(self, began_at=self.began_at + by_s)


_Agree = Callable[[int, float], tuple[int, float]]


class Playlist:
    """A playlist that slides. Not locked: its owner has one thread."""

    __slots__ = (
        *("_agree", "_discontinuities", "_listed", "_number", "_open", "_parts_from", "_past", "_segments"),
        *("_target_s", "_wanted", "announced", "ended", "next_part", "part_s"),
    )

    def __init__(self, number: int, listed: int, segment_s: float, part_s: float = 0.0) -> None:
        self._number = number
        self._listed = listed
        self._wanted = segment_s, part_s
        self.forget_targets()
        self._segments: deque[HlsSegment] = deque()
        self._open: HlsSegment | None = None  # what there is of the next one
        self._past: deque[HlsSegment] = deque()  # not in the playlist any more, and still there
        self._discontinuities = 0  # that have left the playlist
        self._agree: _Agree = lambda *own: own  # gives the targets, for those that it would set by itself
        self.ended = False
        """No segment will be added."""
        self.next_part = ""
        """Name that the next part will have."""

    def continue_from(self, discontinuities: int, agree: _Agree) -> None:
        """Count discontinuities, and set targets, as other playlists of the same content do; before any segment."""
        self._discontinuities, self._agree = discontinuities, agree

    @property
    def next_number(self) -> int:
        return self._number + len(self._segments)

    @property
    def is_empty(self) -> bool:
        return not self._segments

    @property
    def most_s(self) -> float:
        """Longest duration that a segment may have."""
        return self._target_s + ROUNDED_S if self.announced else math.inf

    def forget_targets(self) -> None:
        """Have the targets set anew: nobody follows what was announced any more."""
        segment_s, self.part_s = self._wanted
        self._target_s = max(math.ceil(segment_s), 1)
        self._parts_from = self._number  # segment whose parts are listed first
        self.announced = False  # the targets are set; before that no playlist is shown

    def announce(self) -> None:
        """Set the targets by what there is."""
        if self.announced:
            return
        self.announced = True
        part_s = max((part.duration_s for segment in self._segments for part in segment.parts), default=0.0)
        part_s = round(part_s * _PART_ROOM, 3) if part_s > self.part_s else self.part_s
        longest_s = max((segment.duration_s for segment in self._segments), default=0.0)
        target_s = max(self._target_s, math.ceil(round(longest_s - _ROOM_S, 3)), math.ceil(part_s))
        self._target_s, agreed_s = self._agree(target_s, part_s)
        if not self.part_s == part_s == agreed_s:
            self._parts_from = self.next_number  # those that are there may be too short for that, or too long
        self.part_s = agreed_s
        while any(segment.duration_s > self.most_s for segment in self._segments):
            self._slide()

    def show(self, segment: HlsSegment) -> None:
        """List the parts that there are of the segment that is added next."""
        last = self._segments[-1] if self._segments else segment
        if self.ended or bool(last.init) != bool(segment.init):
            # Players shall not begin with what is over; and a map of MP4 holds for all that follow it in a playlist.
            self.ended = False
            while self._segments:
                self._slide()
        self._open = segment

    def add(self, segment: HlsSegment) -> list[str]:
        """Append a segment; return the names of files that are of no use any more."""
        self.show(segment)
        self._open = None
        self._segments.append(segment)
        if round(segment.duration_s, 3) >= self._wanted[0] or len(self._segments) > self._listed:
            self.announce()
        listed_s = sum(segment.duration_s for segment in self._segments)
        while len(self._segments) > self._listed:
            listed_s -= self._segments[0].duration_s
            if listed_s < _LEAST_TARGETS * self._target_s:
                break
            self._slide()
        return self._useless()

    def redate(self, by_s: float) -> None:
        """Move the dates of the segments since the last discontinuity."""
        for number in reversed(range(len(self._segments))):
            self._segments[number] = self._segments[number].redated(by_s)
            if self._segments[number].discontinuity:
                break

    def text(self) -> str:
        segments = [*self._segments, *([] if self._open is None else [self._open])]
        version = 6 if any(segment.init for segment in segments) else 3
        lines = ["#EXTM3U", f"#EXT-X-VERSION:{version}", f"#EXT-X-TARGETDURATION:{self._target_s}"]
        if self.part_s:
            lines.append(f"#EXT-X-SERVER-CONTROL:PART-HOLD-BACK={_HOLD_BACK_PARTS * self.part_s:.3f}")
            lines.append(f"#EXT-X-PART-INF:PART-TARGET={self.part_s:.3f}")
        lines.append(f"#EXT-X-MEDIA-SEQUENCE:{self._number}")
        if self._discontinuities:
            lines.append(f"#EXT-X-DISCONTINUITY-SEQUENCE:{self._discontinuities}")
        init, behind_s = "", sum(segment.duration_s for segment in segments)
        for number, segment in enumerate(segments, self._number):
            if segment.discontinuity:
                lines.append("#EXT-X-DISCONTINUITY")
            if segment.init != init:
                init = segment.init
                lines.append(f'#EXT-X-MAP:URI="{quote(init)}"')
            if segment.began_at is not None:
                time = datetime.fromtimestamp(segment.began_at, UTC).isoformat(timespec="milliseconds")
                lines.append(f"#EXT-X-PROGRAM-DATE-TIME:{time.replace('+00:00', 'Z')}")
            behind_s -= segment.duration_s
            if behind_s < _HOLD_BACK_TARGETS * self._target_s and number >= self._parts_from:
                lines += map(_part_line, segment.parts)
            if segment is not self._open:
                lines += [f"#EXTINF:{segment.duration_s:.3f},", quote(segment.name)]
        if self.ended:
            lines.append("#EXT-X-ENDLIST")
        elif self.part_s:
            lines.append(f'#EXT-X-PRELOAD-HINT:TYPE=PART,URI="{quote(self.next_part)}"')
        return "\n".join(lines) + "\n"

    def _slide(self) -> None:
        segment = self._segments.popleft()
        self._number += 1
        self._discontinuities += segment.discontinuity
        self._past.append(segment)

    def _useless(self) -> list[str]:
        names: list[str] = []
        while len(self._past) > self._listed:
            gone = self._past.popleft()
            names += [gone.name, *(part.name for part in gone.parts)]
            if gone.init and all(item.init != gone.init for item in (*self._past, *self._segments)):
                names.append(gone.init)
        return names


def _part_line(part: HlsPart) -> str:
    independent = ",INDEPENDENT=YES" if part.independent else ""
    return f'#EXT-X-PART:DURATION={part.duration_s:.3f},URI="{quote(part.name)}"{independent}'
