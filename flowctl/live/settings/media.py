"""Settings of what a server writes to files of its streams: recordings and HLS (pure)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.wire.rtmp.url import NAMES_HINT, fits_names

_MOST_PATTERNS: Final = 64
_WILD: Final = frozenset("/*?[")
_OFF: Final = "off"
_OF_PATHS: Final = ("/", "./", "../", "~")
_FOLDER_HINT: Final = (
    "say which streams, as in live/*, with no / before it; the folder has a setting of its own, hls_folder or "
    "record_folder (--hls-folder, --record-folder)"
)


class RecordFormat(enum.Enum):
    FLV = "flv"  #: as it came
    MP4 = "mp4"  #: fragmented


@dataclass(frozen=True, slots=True)
class StreamPatterns:
    """Which streams: by patterns of ``app/stream``."""

    patterns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(self.patterns) or _OFF

    def fits(self, stream: str) -> bool:
        return any(fnmatchcase(stream, pattern) for pattern in self.patterns)


def parse_patterns(text: str, source: str) -> StreamPatterns:
    patterns = tuple(filter(None, map(str.strip, text.split(","))))
    if patterns == (_OFF,):
        return StreamPatterns()
    if len(patterns) > _MOST_PATTERNS:
        raise ConfigError(f"{source} has {len(patterns)} patterns, {_MOST_PATTERNS} are allowed")
    for pattern in patterns:
        if _WILD.isdisjoint(pattern):
            hint = f"write app/stream, as in live/{pattern:.60}; * and ? stand for others: live/*; off: none"
            raise ConfigError(f"{source}: {short(pattern)} fits no stream", hint=hint)
        if not fits_names(pattern):
            hint = _FOLDER_HINT if pattern.startswith(_OF_PATHS) else NAMES_HINT
            raise ConfigError(f"{source}: {short(pattern)} fits no stream", hint=hint)
    return StreamPatterns(patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """What a server writes to files.

    Args:
        record: streams that are recorded.
        record_folder: a folder per stream is made there.
        record_length_s: a file ends at the key frame behind so much time; 0: with the publication.
        record_keep_s: age at which a finished file is removed; 0: never.
        record_play: streams whose recordings those may list and play who may play the stream, where HTTP is served.
        keep_free_bytes: room on a disk that is left to others, by recordings and HLS; 0: none.
        hls: streams that are written as HLS.
        hls_segment_s: a segment ends at the key frame behind so much time, 1 to 30 s.
        hls_part_s: longest part of a segment, for low latency, 0.1 to 2 s, but half of one at most; 0: no parts.
    """

    record: StreamPatterns = StreamPatterns()
    record_folder: Path = Path("recordings")
    record_format: RecordFormat = RecordFormat.FLV
    record_length_s: float = 3600.0
    record_keep_s: float = 0.0
    record_play: StreamPatterns = StreamPatterns()
    keep_free_bytes: int = 256 << 20
    hls: StreamPatterns = StreamPatterns()
    hls_segment_s: float = 2.0
    hls_part_s: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("record_length_s", "record_keep_s", "keep_free_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 or more")
        if not 1 <= self.hls_segment_s <= 30:
            raise ConfigError(f"hls_segment_s is {self.hls_segment_s:g}, it must be 1 to 30 s")
        if self.hls_part_s and not 0.1 <= self.hls_part_s <= 2:
            raise ConfigError(f"hls_part_s is {self.hls_part_s:g}, it must be 0, or 0.1 to 2 s")
