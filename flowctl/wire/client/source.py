"""Sources for a publisher: an FLV file that is read while it is sent, and a filter of tracks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from flowctl.errors import ConfigError, FlowctlError, RemoteProtocolError
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader, FlvTag

_PIECE_BYTES: Final = 64 * 1024
_NO_FLV_HINT: Final = "convert it without loss: ffmpeg -i INPUT -c copy out.flv"


class FlvFile:
    """The tags of a file; each iteration reads it from the start, a piece at a time.

    A file that ends in the middle of a tag (a recording that was interrupted) ends with the tag before.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Final = Path(path)
        try:
            first = next(iter(self), None)
        except RemoteProtocolError as error:
            raise ConfigError(f"{self.path} is no FLV file: {error}", hint=_NO_FLV_HINT) from error
        if first is None:
            raise ConfigError(f"{self.path} holds no FLV tags", hint=_NO_FLV_HINT)

    def __iter__(self) -> Iterator[FlvTag]:
        reader = FlvReader()
        try:
            with self.path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield from reader.feed(piece)
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            reader.finish()  # raises what was found behind the last whole tag, too
        except RemoteProtocolError as error:
            if error.code != "flv-truncated":
                raise


class Tracks:
    """A source without one of its tracks; can be iterated over as often as the source."""

    def __init__(self, source: Iterable[FlvTag], *, audio: bool = True, video: bool = True) -> None:
        if not (audio or video):
            raise ConfigError("audio and video are both off: nothing to send")
        self._source = source
        self._left_out = {type_id for type_id, kept in ((TAG_AUDIO, audio), (TAG_VIDEO, video)) if not kept}

    def __iter__(self) -> Iterator[FlvTag]:
        return (tag for tag in self._source if tag.type_id not in self._left_out)


def check_has_media(source: Iterable[FlvTag], name: str) -> None:
    """Refuse a source in which no audio and no video comes."""
    for tag in source:
        if tag.type_id in (TAG_AUDIO, TAG_VIDEO):
            return
    raise FlowctlError(f"{name} holds no audio and no video to send", hint="check --audio and --video")
