"""The setting of which streams are renditions of one content (pure).

``tracks``, the default: the tracks of a multitrack publication. ``_1080,_720,_360``: those, and streams whose names end
so, the largest first: `live/show_1080` and `live/show_720` are renditions of `live/show`. ``off``: none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

MOST_RENDITIONS: Final = 8
"""Renditions of a set: encoders send three to five, OBS ten at most. Each costs a log with a GOP cache."""
_SUFFIX_CHARS: Final = 32
_SEPARATORS: Final = "_-."
_TRACKS, _OFF = "tracks", "off"
_HEIGHTS: Final = "144 240 270 288 360 432 480 504 540 576 600 648 720 900 1080 1440 2160 4320"
_WORDS: Final = "low lo sd mid medium med hd hi high fhd uhd src source"
"""How names of streams end that are sizes of one content: in lines, with or without a p and frames per second, or in
words; the smallest first."""
_RANKS: Final = {word: rank for words in (_WORDS, _HEIGHTS) for rank, word in enumerate(words.split())}
_LOOKS_SO: Final = re.compile(rf"([_.-])({'|'.join(_RANKS)})(p(?:25|30|50|60)?)?$", re.IGNORECASE)
_HINT: Final = "write tracks, off, or suffixes of names with commas between, the largest first: _1080,_720,_360"


class Member(NamedTuple):
    """A stream as one of the renditions of another."""

    face: str  # name of the set, under which viewers ask for it
    rendition: str
    rank: int  # 0: the largest


@dataclass(frozen=True, slots=True)
class RenditionNames:
    """What makes a set of renditions."""

    tracks: bool = True  # the tracks of a multitrack publication
    suffixes: tuple[str, ...] = ()  # of names of streams, the largest first

    def __post_init__(self) -> None:
        if len(self.suffixes) > MOST_RENDITIONS:
            raise ConfigError(f"renditions is a list of {len(self.suffixes)}, {MOST_RENDITIONS} are allowed")
        for suffix in self.suffixes:
            if not suffix.isprintable() or not 0 < len(suffix) <= _SUFFIX_CHARS or set(suffix) & set("/ ,?&"):
                raise ConfigError(f"renditions is {short(str(self))}: {short(suffix)} cannot end a name", hint=_HINT)
        if len({self._rendition(suffix) for suffix in self.suffixes}) < len(self.suffixes):
            raise ConfigError(f"renditions is {short(str(self))}: a suffix is there twice", hint=_HINT)

    def __str__(self) -> str:
        return ",".join(self.suffixes) if self.suffixes else _TRACKS if self.tracks else _OFF

    @staticmethod
    def _rendition(suffix: str) -> str:
        return suffix.lstrip(_SEPARATORS) or suffix

    def member(self, name: str) -> Member | None:
        """Return which rendition of which set the stream `name` is. None: of none."""
        fitting = [item for item in self.suffixes if name.endswith(item) and name[: -len(item)].rpartition("/")[2]]
        if not fitting:
            return None
        suffix = max(fitting, key=len)
        return Member(name[: -len(suffix)], self._rendition(suffix), self.suffixes.index(suffix))


def guess_suffix(name: str) -> str:
    """Return how the name of a stream ends if it looks like a rendition; empty: it does not."""
    found = _LOOKS_SO.search(name)
    return "" if found is None or not name[: found.start()].rpartition("/")[2] else found[0]


def guessed_setting(suffixes: Iterable[str]) -> RenditionNames | None:
    """Return the setting that makes a set of streams with such suffixes. None: they are too few, too many or alike."""
    ranked = sorted(suffixes, key=lambda item: -_RANKS[_LOOKS_SO.sub(r"\2", item).lower()])
    try:
        return RenditionNames(suffixes=tuple(ranked)) if len(ranked) > 1 else None
    except ConfigError:
        return None


def parse_renditions(text: str, source: str) -> RenditionNames:
    words = [word.strip() for word in text.split(",")]
    lowered = [word.lower() for word in words]
    if lowered in ([_TRACKS], [_OFF]):
        return RenditionNames(tracks=lowered == [_TRACKS])
    if {_TRACKS, _OFF} & set(lowered):
        raise ConfigError(f"{source} is {short(text)}: tracks and off stand alone", hint=_HINT)
    return RenditionNames(suffixes=tuple(words))
