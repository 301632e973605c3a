"""Sources for a publisher: an FLV file or a pipe that is read while it is sent, and a filter of tracks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
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
        if is_pipe(self.path):
            raise ConfigError(f"{self.path} is a pipe, it can be read once", hint="write it to a file first")
        _first_of(self, self.path)

    def __iter__(self) -> Iterator[FlvTag]:
        return filter(None, _tags_of(self.path))


class FlvPipe(Iterator[FlvTag | None]):
    """The tags of a pipe, once, as they come; None: the next one has not come yet.

    Its first one is waited for when this is made, and no other: a publisher has its connection to look after.
    """

    def __init__(self, path: str | Path) -> None:
        tags = _tags_of(Path(path))
        self._tags: Final = chain([_first_of(tags, Path(path))], tags)

    def __next__(self) -> FlvTag | None:
        return next(self._tags)


def is_pipe(path: Path) -> bool:
    """Return whether there is something that can be read only once: a pipe, a terminal."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _first_of(source: Iterable[FlvTag | None], path: Path) -> FlvTag:
    try:
        first = next(iter(source), None)
    except RemoteProtocolError as error:
        raise ConfigError(f"{path} is no FLV file: {error}", hint=_NO_FLV_HINT) from error
    if first is None:
        raise ConfigError(f"{path} holds no FLV tags", hint=_NO_FLV_HINT)
    return first


def _tags_of(path: Path) -> Iterator[FlvTag | None]:
    """Yield the tags of a file; of a pipe, behind its first tag, None where it has nothing at the moment."""
    reader = FlvReader()
    try:
        with path.open("rb", buffering=0) as file:
            while (piece := file.read(_PIECE_BYTES)) != b"":
                if piece is None:
                    yield None
                elif tags := reader.feed(piece):
                    os.set_blocking(file.fileno(), False)  # without effect on regular files
                    yield from tags
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="give an FLV file, or synthetic") from error
    try:
        reader.finish()  # raises what was found behind the last whole tag, too
    except RemoteProtocolError as error:
        if error.code != "flv-truncated":
            raise


class Tracks:
    """A source without one of its tracks; can be iterated over as often as the source."""

    def __init__(self, source: Iterable[FlvTag | None], *, audio: bool = True, video: bool = True) -> None:
        if not (audio or video):
            raise ConfigError("audio and video are both off: nothing to send")
        self._source = source
        self._left_out = {type_id for type_id, kept in ((TAG_AUDIO, audio), (TAG_VIDEO, video)) if not kept}

    def __iter__(self) -> Iterator[FlvTag | None]:
        return (tag for tag in self._source if tag is None or tag.type_id not in self._left_out)


def check_has_media(source: Iterable[FlvTag | None], name: str) -> None:
    """Refuse a source in which no audio and no video comes."""
    for tag in source:
        if tag is not None and tag.type_id in (TAG_AUDIO, TAG_VIDEO):
            return
    raise FlowctlError(f"{name} holds no audio and no video to send", hint="check --audio and --video")
