"""What the media process is told: its settings, and what it is to write of each stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flowctl.live.settings.media import MediaOptions, StreamPatterns

RENDITION: Final = "rendition"
"""What the query of an address calls a rendition of the stream, where the media process asks for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOrder:
    """What is written of one stream."""

    record_format: str = ""  # empty: it is not recorded
    record_length_s: float = 0.0
    hls: bool = False
    hls_segment_s: float = 0.0
    hls_part_s: float = 0.0
    address: str = ""  # of its publisher. Empty: it comes from another server.
    renditions: dict[str, str] = field(default_factory=dict)  # that HLS has as variants: names, and what to ask for
    moves: bool = False  # it goes on at the server that takes the place of this one, which writes it then

    @property
    def writes(self) -> bool:
        return bool(self.record_format) or self.hls


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaProcessConfig:
    """All that the process needs to know to start."""

    socket_fd: int
    options: MediaOptions
    hls_folder: Path
    hls_streams: StreamPatterns  # those that any level of the settings names
    memory_bytes: int  # that all streams may hold
    log: dict[str, Any]  # as `flowctl.log.configure` takes it
