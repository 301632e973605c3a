"""The playlist of HLS: which segments there are now, which have to go, and the text of it (pure).

Sources: RFC 8216, and draft-pantos-hls-rfc8216bis for parts. A segment that left the playlist stays for as long as the
playlist is (section 6.2.2), since players that fetched the one before may still ask for it; so do its parts.

For low latency a segment is listed by its parts as they come, and as a whole when it is complete. The name of the part
behind the last one is there ahead, so that players can ask for it before it is made.
"""

from __future__ import annotations

import math
from collections import deque
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


class Playlist:
    """A playlist that slides. Not locked: its owner has one thread."""

    __slots__ = (
        *("_discontinuities", "_listed", "_number", "_open", "_part_s", "_past", "_segments", "_target_s"),
        *("ended", "next_part"),
    )

    def __init__(self, number: int, listed: int, target_s: float, part_s: float = 0.0) -> None:
        self._number = number
        self._listed = listed
        self._target_s = max(math.ceil(target_s), 1)
        self._part_s = part_s
        self._segments: deque[HlsSegment] = deque()
        self._open: HlsSegment | None = None  # what there is of the next one
        self._past: deque[HlsSegment] = deque()  # not in the playlist any more, and still there
        self._discontinuities = 0  # that have left the playlist
        self.ended = False
        """No segment will be added."""
        self.next_part = ""
        """Name that the next part will have."""

    @property
    def next_number(self) -> int:
        return self._number + len(self._segments)

    @property
    def is_empty(self) -> bool:
        return not self._segments

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
        self._target_s = max(self._target_s, math.floor(round(segment.duration_s, 3) + 0.5))
        self._segments.append(segment)
        while len(self._segments) > self._listed:
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
        if self._part_s:  # which holds for all parts, unless pictures are further apart than that
            part_s = max([self._part_s, *(part.duration_s for segment in segments for part in segment.parts)])
            lines.append(f"#EXT-X-SERVER-CONTROL:PART-HOLD-BACK={_HOLD_BACK_PARTS * part_s:.3f}")
            lines.append(f"#EXT-X-PART-INF:PART-TARGET={part_s:.3f}")
        lines.append(f"#EXT-X-MEDIA-SEQUENCE:{self._number}")
        if self._discontinuities:
            lines.append(f"#EXT-X-DISCONTINUITY-SEQUENCE:{self._discontinuities}")
        init, behind_s = "", sum(segment.duration_s for segment in segments)
        for segment in segments:
            if segment.discontinuity:
                lines.append("#EXT-X-DISCONTINUITY")
            if segment.init != init:
                init = segment.init
                lines.append(f'#EXT-X-MAP:URI="{quote(init)}"')
            if segment.began_at is not None:
                time = datetime.fromtimestamp(segment.began_at, UTC).isoformat(timespec="milliseconds")
                lines.append(f"#EXT-X-PROGRAM-DATE-TIME:{time.replace('+00:00', 'Z')}")
            behind_s -= segment.duration_s
            if behind_s < _HOLD_BACK_TARGETS * self._target_s:
                lines += map(_part_line, segment.parts)
            if segment is not self._open:
                lines += [f"#EXTINF:{segment.duration_s:.3f},", quote(segment.name)]
        if self.ended:
            lines.append("#EXT-X-ENDLIST")
        elif self._part_s:
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
