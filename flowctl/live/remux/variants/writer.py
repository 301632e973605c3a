"""Writes one rendition of a set as HLS, alike to the others (`VariantSet`), and measures what it takes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from functools import partial
from typing import Any, Final

from flowctl.core.flow.state import VIDEO_CLASSES, MessageClass
from flowctl.flv import TAG_AUDIO
from flowctl.live.remux.course import Unit
from flowctl.live.remux.dates import ProgramDates
from flowctl.live.remux.hls import HlsSettings, HlsWriter, SegmentForm
from flowctl.live.remux.intake import MESSAGE_BYTES
from flowctl.live.remux.playlist import ROUNDED_S, HlsSegment, Playlist
from flowctl.live.remux.variants.tracks import Tracks, read_tracks
from flowctl.live.remux.variants.variantset import Measures, VariantSet

_EARLY_SHARE: Final = 1 / 8
"""Part of a segment by which a key frame may be early: times are whole ms, and most key frames come at full seconds."""
_LATE_MS: Final = 200
"""Media for which a key frame waits for the sound before it; no more than `_LATE_COUNT` messages."""
_LATE_COUNT: Final = 16
_MEASURED: Final = 60
"""Segments of which it is measured what a variant takes."""


class VariantWriter(HlsWriter):
    """Writes one rendition of a set."""

    def __init__(
        self, app: str, stream: str, rendition: str, settings: HlsSettings, variants: VariantSet, **clocks: Any
    ) -> None:
        settings = dataclasses.replace(settings, form=SegmentForm.FMP4)
        super().__init__(app, stream, settings, variant=rendition, **clocks)
        self._rendition: Final = rendition
        self._variants: Final = variants
        self._dates = ProgramDates(self._agree)
        self._timeline_number = 0  # of those of the set; 0: of none yet
        self._last_begin_ms = -1  # where the last segment began on it
        self._sound_ms = -1  # time of the last sound
        self._late: list[Unit] = []  # a key frame that begins a segment, and what came behind it: sound is waited for
        self._early: list[Unit] = []  # sound that has come before the key frame whose segment it belongs to
        self._discontinuities = 0  # so far
        self._pictures = 0  # in the open segment
        self._measured: deque[tuple[int, float, int]] = deque(maxlen=_MEASURED)  # bytes, seconds and pictures of each
        self._news: Tracks | None = None  # of a segment that the set has not been told of

    def claim(self) -> None:
        super().claim()
        try:
            self._variants.enter(self._rendition)
        except BaseException:
            self._let_go()
            raise

    def _finish_all(self) -> None:
        try:
            super()._finish_all()
        finally:
            self._variants.leave(self._rendition)

    def _cell(self, at_ms: int) -> int:
        """Return in which segment a time is, counted from the beginning of the clock."""
        segment_ms = self._settings.segment_s * 1000
        return int((at_ms + segment_ms * _EARLY_SHARE) // segment_ms)

    def _due(self, now_ms: int) -> bool:
        began = self._begin_ms
        return began is not None and self._has_key and self._cell(now_ms) > self._cell(began)

    def _write(self, next_ms: int, *, before: int = 0, last: bool = True) -> None:
        if self._zero_ms is None:
            begin_ms = self._units[0].at_ms
            back, before = begin_ms <= self._last_begin_ms, self._timeline_number
            self._zero_ms, self._timeline_number = self._variants.zero(begin_ms, self._at_ms, before, back=back)
        if last:  # what came early here may have come late in another variant
            early = [unit for unit in self._units if unit.type_id == TAG_AUDIO and unit.at_ms >= next_ms]
            self._early, self._units = early, [unit for unit in self._units if unit not in early] or self._units
        super()._write(next_ms, before=before, last=last)

    def _without(self, unit: Unit, hole_ms: int) -> Unit:
        """Begin anew behind a hole in the clock: taken out of it, that would not be alike in all variants."""
        del hole_ms
        self._break()
        return unit

    def _write_unit(self, unit: Unit) -> None:
        """Write a message; a key frame that begins a segment when sound of its time has come, that of before it first.

        The sound of a set comes from one member, so it is here in another order with the pictures of each.
        """
        if unit.message_class is MessageClass.AUDIO:
            self._sound_ms = unit.at_ms
        if not self._late:
            sounds = "audio" in self._timeline.codecs and not unit.broken
            if unit.cut and sounds and self._sound_ms < unit.at_ms and self._due(unit.at_ms):
                self._late.append(unit)
            else:
                self._pass_on(unit)
            return
        begin_ms = self._late[0].at_ms
        if unit.type_id == TAG_AUDIO and unit.at_ms < begin_ms and not unit.broken:
            self._pass_on(unit)
            return
        self._late.append(unit)
        waited = unit.type_id == TAG_AUDIO or unit.at_ms - begin_ms >= _LATE_MS or len(self._late) >= _LATE_COUNT
        if waited or unit.broken:
            self._pass_late_on()

    def _pass_late_on(self) -> None:
        late, self._late = self._late, []
        for unit in late:
            self._pass_on(unit)

    def _pass_on(self, unit: Unit) -> None:
        super()._write_unit(unit)
        if self._early and self._units:
            self._open_bytes += sum(len(early.payload) + MESSAGE_BYTES for early in self._early)
            self._units += self._early
            self._early = []

    def _break(self) -> None:
        self._pass_late_on()
        super()._break()
        self._sound_ms = -1

    def _begin_apart(self) -> None:
        self._lose([*self._early, *self._late])
        self._early, self._late = [], []
        super()._begin_apart()

    @property
    def held_bytes(self) -> tuple[int, int]:
        waiting, made = super().held_bytes
        return waiting + sum(len(unit.payload) + MESSAGE_BYTES for unit in tuple(self._late)), made

    def _agree(self, at_ms: int, due: float) -> float:
        return self._variants.date(self._rendition, self._cell(at_ms), at_ms, due)

    def _first(self) -> int:
        number = self._variants.number(self._cell(self._begin_ms or 0))
        return super()._first() if number is None else number

    def _begin_list(self) -> Playlist:
        playlist = super()._begin_list()
        self._discontinuities = self._variants.discontinuities
        playlist.continue_from(self._discontinuities, partial(self._variants.announce, self._rendition))
        return playlist

    def _announced(self) -> tuple[float, float] | None:
        targets = self._variants.targets
        return (targets[0] + ROUNDED_S, targets[1]) if targets is not None else super()._announced()

    def _end_list(self) -> None:
        super()._end_list()
        if self._playlist is not None and self._playlist.ended:
            self._variants.forget_targets(self._rendition)

    def _begin_segment(self, playlist: Playlist) -> HlsSegment:
        segment, self._last_begin_ms = super()._begin_segment(playlist), self._begin_ms or 0
        if self._discontinuities + segment.discontinuity < self._variants.discontinuities:
            segment = dataclasses.replace(segment, discontinuity=True)
        self._discontinuities += segment.discontinuity
        at_ms, date, number = self._last_begin_ms, segment.began_at or 0.0, playlist.next_number
        self._variants.begin(self._rendition, self._cell(at_ms), at_ms, number, date, self._discontinuities)
        return segment

    def _mended(self, segment: HlsSegment, late_s: float, playlist: Playlist) -> HlsSegment:
        self._variants.mend(self._rendition, self._cell(self._last_begin_ms), late_s)
        return super()._mended(segment, late_s, playlist)

    def _made(self, next_ms: int, least_ms: int, zero_ms: int) -> tuple[bytes, bytes]:
        self._pictures += sum(unit.message_class in VIDEO_CLASSES for unit in self._units)
        return super()._made(next_ms, least_ms, zero_ms)

    def _close_segment(self, playlist: Playlist) -> None:
        segment, made_bytes = self._segment, self._made_bytes
        super()._close_segment(playlist)
        if segment is not None:
            usual = segment.duration_s >= self._settings.segment_s / 2
            if usual or not self._measured:  # one that was cut short says little
                self._measured.append((made_bytes, segment.duration_s, self._pictures))
            self._pictures = 0
            with contextlib.suppress(ValueError):
                self._news = read_tracks(self._init)

    def _write_list(self, playlist: Playlist) -> None:
        super()._write_list(playlist)
        if self._news is not None:
            bits = [size * 8 / max(length_s, 0.001) for size, length_s, _ in self._measured]
            sizes, lengths_s, pictures = map(sum, zip(*self._measured, strict=True))
            measures = Measures(max(bits), sizes * 8 / max(lengths_s, 0.001), pictures / max(lengths_s, 0.001))
            self._variants.note(self._rendition, measures, self._news)
            self._news = None
