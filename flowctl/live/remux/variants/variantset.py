"""HLS of a set of renditions: variants that are written alike, and the multivariant playlist that names them.

How it works. Each rendition is HLS of its own, with a writer of its own: ``show%2b720.m3u8`` and its segments. Other
escapes in names of files are in capitals, so no stream has files of such a name, and who may play ``show`` may have all
of them. For players to go from one to another in the middle, the same picture is at the same place in each: segments
begin at the first key frame of each `segment_s` of the set's clock, wherever a writer began, on one timeline, and the
writer that comes to a segment first gives its number and its date to those that follow. Where one has a discontinuity,
the others have one with their next segment, since players compare how many there were.

``show.m3u8`` names the variants, the smallest first: players that begin with the first one begin at once. What they
take is measured, of the segments of the last minutes. The file is written by the thread of a writer that has news: when
all have a first segment, or some of them for long enough; again when one comes or goes, or what it takes has changed by
a tenth. Players read it once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from urllib.parse import quote

import structlog

from flowctl.core.folders.folders import names_below, opened_folder, replacing_below
from flowctl.errors import ConfigError
from flowctl.live.remux.files import PART, VARIANT, encoded, hls_file, lock_file
from flowctl.live.remux.hls import HlsSettings
from flowctl.live.remux.playlist import PLAYLIST
from flowctl.live.remux.variants.tracks import Tracks

_log: Final = structlog.get_logger("flowctl.remux")
_CHANGE: Final = 0.1
_PATIENCE_SEGMENTS: Final = 2
"""Segments of the first variant for which the others are waited for: players that come before know less of them."""
_JUMP_MS: Final = 60_000
"""What clocks of renditions may differ by: they are one, and what is further off is of another publication."""
_KEPT_CELLS: Final = 64


class Measures(NamedTuple):
    """What a variant takes."""

    peak_bits: float  # per second, of its largest segment
    mean_bits: float
    fps: float


class _Facts(NamedTuple):
    measures: Measures
    tracks: Tracks

    def differs(self, other: _Facts) -> bool:
        moved = (abs(new - old) > _CHANGE * old for new, old in zip(self.measures, other.measures, strict=True))
        return self.tracks != other.tracks or any(moved)


class _Begun(NamedTuple):
    """A segment as the first writer began it."""

    rendition: str
    at_ms: int
    number: int
    date: float


class VariantSet:
    """What the writers of a set share. Any thread."""

    def __init__(
        self, app: str, stream: str, settings: HlsSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock: Final = clock
        self._name: Final = f"{app}/{stream}"
        self._folder: Final = settings.folder / encoded(app)
        self._stem: Final = encoded(stream)
        self._patience_s: Final = _PATIENCE_SEGMENTS * settings.segment_s
        self._writing: Final = threading.Lock()  # of the thread that writes the playlist
        self._lock: Final = threading.Lock()
        self._wanted: tuple[str, ...] = ()  # names of the renditions that are published; guarded by _lock
        self._inside: set[str] = set()  # those that have a writer; guarded by _lock
        self._file: int | None = None  # locked, while there are any; guarded by _lock
        self._facts: dict[str, _Facts] = {}  # of those that have segments; guarded by _lock
        self._told: dict[str, _Facts] = {}  # as the playlist has them; guarded by _lock
        self._first_at: float | None = None  # when the first one had a segment; guarded by _lock
        self._zero_ms: int | None = None  # where the timeline of all begins on their clock; guarded by _lock
        self._timeline = 0  # how many have begun; guarded by _lock
        self._last_ms = 0  # where it was last; guarded by _lock
        self._discontinuities = 0  # guarded by _lock
        self._targets: tuple[int, float] | None = None  # that all playlists announce; guarded by _lock
        self._announced: set[str] = set()  # renditions whose playlists have; guarded by _lock
        self._begun: dict[int, _Begun] = {}  # by place on the clock in segments; guarded by _lock

    def want(self, renditions: Iterable[str]) -> None:
        """Note which renditions are published; none: the set has ended, and its playlist stays as it is."""
        with self._lock:
            self._wanted = tuple(renditions)

    def enter(self, rendition: str) -> None:
        with self._lock:
            if self._file is None:
                path = self._folder / f".{self._stem}.lock"
                try:
                    self._file = lock_file(path)
                except BlockingIOError as error:
                    raise ConfigError(f"{self._name} is being written by another process") from error
            self._inside.add(rendition)

    def leave(self, rendition: str) -> None:
        """Forget a variant: its playlist has ended, or another process goes on with it."""
        with self._lock:
            self._inside.discard(rendition)
            self._facts.pop(rendition, None)
            self._forget_targets_locked(rendition)
            goes_on = bool(self._wanted and self._facts)
            if not self._inside and self._file is not None:
                os.utime(self._file)  # the playlist stays for as long as those of its variants
                os.close(self._file)
                self._file = None
        if goes_on:
            self._tell()

    def note(self, rendition: str, measures: Measures, tracks: Tracks) -> None:
        """Note what a variant is, and write the playlist where that is news."""
        with self._lock:
            now = self._clock()
            self._first_at = now if self._first_at is None else self._first_at
            self._facts[rendition] = _Facts(measures, tracks)
            missing = set(self._wanted) & self._inside - self._facts.keys()
            ready = bool(self._told) or not missing or now - self._first_at >= self._patience_s
            ready = ready and bool(self._wanted)  # else the set has ended, and one variant ends behind the other
        if ready:
            self._tell()

    def zero(self, begin_ms: int, own_ms: int, timeline: int, *, back: bool) -> tuple[int, int]:
        """Return where the timeline begins, and its number.

        For a writer that begins at `begin_ms`, which is `own_ms` behind it if it were alone, and was on `timeline`
        before, 0 if on none. Where its clock went `back`, or far on, the first that says so begins another one.
        """
        with self._lock:
            zero_ms = self._zero_ms
            away = timeline in {0, self._timeline} and (back or abs(begin_ms - self._last_ms) > _JUMP_MS)
            if zero_ms is None or begin_ms < zero_ms or away:
                self._zero_ms = zero_ms = begin_ms - own_ms
                self._timeline += 1
                self._begun.clear()
            self._last_ms = begin_ms
            return zero_ms, self._timeline

    def number(self, cell: int) -> int | None:
        """Return the number of the segment at a place on the clock. None: there is none near it yet."""
        with self._lock:
            known = max((item for item in self._begun if item <= cell), default=None)
            return None if known is None else self._begun[known].number + cell - known

    def date(self, rendition: str, cell: int, at_ms: int, own: float) -> float:
        """Return the date of a segment that begins there; `own`: what it would be without others."""
        with self._lock:
            first = self._begun.get(cell)
            if first is None or first.rendition == rendition:
                return own
            return first.date + (at_ms - first.at_ms) / 1000

    @property
    def discontinuities(self) -> int:
        """The most that a variant has had."""
        with self._lock:
            return self._discontinuities

    def begin(self, rendition: str, cell: int, at_ms: int, number: int, date: float, discontinuities: int) -> None:
        """Note that a segment begins, behind how many discontinuities."""
        with self._lock:
            self._last_ms = at_ms
            self._discontinuities = max(self._discontinuities, discontinuities)
            begun = _Begun(rendition, at_ms, number, date)
            if self._begun.setdefault(cell, begun).rendition == rendition:
                self._begun[cell] = begun
            while len(self._begun) > _KEPT_CELLS:
                del self._begun[next(iter(self._begun))]

    @property
    def targets(self) -> tuple[int, float] | None:
        """The target durations of segments and of parts. None: they are not set."""
        with self._lock:
            return self._targets

    def announce(self, rendition: str, target_s: int, part_s: float) -> tuple[int, float]:
        """Return what a playlist is to announce, which has to be the same in all (section 6.2.4 of RFC 8216)."""
        with self._lock:
            self._announced.add(rendition)
            self._targets = self._targets or (target_s, part_s)
            return self._targets

    def forget_targets(self, rendition: str) -> None:
        """Note that a playlist has ended: behind the last one they are set anew."""
        with self._lock:
            self._forget_targets_locked(rendition)

    def _forget_targets_locked(self, rendition: str) -> None:
        self._announced.discard(rendition)
        self._targets = self._targets if self._announced else None

    def mend(self, rendition: str, cell: int, late_s: float) -> None:
        """Move the dates of all segments where the rendition that was first has moved its own: the others follow."""
        with self._lock:
            if cell in self._begun and self._begun[cell].rendition == rendition:
                self._begun = {at: item._replace(date=item.date - late_s) for at, item in self._begun.items()}

    def _tell(self) -> None:
        """Write the playlist, if there is news."""
        with self._writing:
            with self._lock:
                told, facts = self._told, dict(self._facts)
            if facts.keys() != told.keys() or any(item.differs(told[name]) for name, item in facts.items()):
                try:
                    self._write(facts, first=not told)
                except OSError as error:  # tried again with the next segment
                    why = error.strerror or str(error)
                    _log.error("the playlist of a set is not written", stream=self._name, why=why)
                    return
                if told.keys() != facts.keys():
                    _log.info("HLS of a set", stream=self._name, variants=", ".join(facts))
                with self._lock:
                    self._told = facts

    def _write(self, facts: dict[str, _Facts], *, first: bool) -> None:
        name = self._stem + PLAYLIST
        text = multivariant({self._stem + VARIANT + encoded(rendition): item for rendition, item in facts.items()})
        with opened_folder(self._folder) as folder:
            with replacing_below(folder, name, name + PART, 0o666) as file:
                file.write(text)
            for other in names_below(folder) if first else ():  # what the stream had before it was a set
                if other != name and (found := hls_file(other)) and found[0] == self._stem:
                    os.unlink(other, dir_fd=folder)


def multivariant(variants: dict[str, _Facts]) -> bytes:
    """Return the playlist of variants, by the names of theirs without the suffix (RFC 8216, 4.3.4.2)."""
    lines = ["#EXTM3U", "#EXT-X-VERSION:6"]
    for stem, (measures, tracks) in sorted(variants.items(), key=lambda item: item[1].measures.mean_bits):
        words = [f"BANDWIDTH={measures.peak_bits:.0f}", f"AVERAGE-BANDWIDTH={measures.mean_bits:.0f}"]
        words.append(f'CODECS="{",".join(tracks.codecs)}"')
        if tracks.size is not None:
            words.append("RESOLUTION={}x{}".format(*tracks.size))
        if measures.fps:
            words.append(f"FRAME-RATE={measures.fps:.3f}")
        lines += ["#EXT-X-STREAM-INF:" + ",".join(words), quote(stem + PLAYLIST)]
    return ("\n".join(lines) + "\n").encode()
