"""The playlist of HLS: which segments there are now, which have to go, and the text of it (pure).

Source: RFC 8216. A segment that left the playlist stays for as long as the playlist is (section 6.2.2), since players
that fetched the one before may still ask for it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class HlsSegment:
    name: str
    duration_s: float
    init: str = ""  # name of the file with its initialisation. Empty: it needs none.
    discontinuity: bool = False  # what comes before it is of another timeline, or other tracks, or missing


class Playlist:
    """A playlist that slides. Not locked: its owner has one thread."""

    __slots__ = ("_discontinuities", "_listed", "_number", "_past", "_segments", "_target_s", "ended")

    def __init__(self, number: int, listed: int, target_s: float) -> None:
        self._number = number
        self._listed = listed
        self._target_s = max(math.ceil(target_s), 1)
        self._segments: deque[HlsSegment] = deque()
        self._past: deque[HlsSegment] = deque()  # not in the playlist any more, and still there
        self._discontinuities = 0  # that have left the playlist
        self.ended = False
        """No segment will be added."""

    @property
    def next_number(self) -> int:
        return self._number + len(self._segments)

    def add(self, segment: HlsSegment) -> list[str]:
        """Append a segment; return the names of files that are of no use any more."""
        last = self._segments[-1] if self._segments else segment
        if self.ended or bool(last.init) != bool(segment.init):
            # Players shall not begin with what is over; and a map of MP4 holds for all that follow it in a playlist.
            self.ended = False
            while self._segments:
                self._slide()
        self._target_s = max(self._target_s, math.floor(round(segment.duration_s, 3) + 0.5))
        self._segments.append(segment)
        while len(self._segments) > self._listed:
            self._slide()
        return self._useless()

    def text(self) -> str:
        segments = self._segments
        version = 6 if any(segment.init for segment in segments) else 3
        lines = ["#EXTM3U", f"#EXT-X-VERSION:{version}", f"#EXT-X-TARGETDURATION:{self._target_s}"]
        lines.append(f"#EXT-X-MEDIA-SEQUENCE:{self._number}")
        if self._discontinuities:
            lines.append(f"#EXT-X-DISCONTINUITY-SEQUENCE:{self._discontinuities}")
        init = ""
        for segment in segments:
            if segment.discontinuity:
                lines.append("#EXT-X-DISCONTINUITY")
            if segment.init != init:
                init = segment.init
                lines.append(f'#EXT-X-MAP:URI="{quote(init)}"')
            lines += [f"#EXTINF:{segment.duration_s:.3f},", quote(segment.name)]
        if self.ended:
            lines.append("#EXT-X-ENDLIST")
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
            names.append(gone.name)
            if gone.init and all(item.init != gone.init for item in (*self._past, *self._segments)):
                names.append(gone.init)
        return names
