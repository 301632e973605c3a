"""Writes one stream as HLS: segments cut at key frames, a playlist that slides, and no more files than it needs.

How it works. What comes waits in an `Intake`; a segment, from one key frame to the first one after `segment_s`, is kept
in memory and written when it is whole, beside its name and then renamed; then the playlist likewise. So what is fetched
is always whole. In ``app/`` of the folder stand ``stream.m3u8`` and ``stream-NUMBER.ts`` (or ``.m4s`` and
``stream-NUMBER-init.mp4``). Numbers begin with the time of the start, so no player or cache takes a segment for one of
an earlier run, whose files are removed. So that they are not those of a run beside it, ``.stream.lock`` is locked.

H.264 with AAC or MP3 goes into MPEG-TS, which everything plays, all else into fragmented MP4, as Apple asks for.

For low latency a segment is written in parts as they come: each is a file of its own, ``stream-NUMBER.COUNT.m4s``, and
the segment, when it is complete, is all of them in one. Parts are counted on over the ends of segments, so the name of
the next one is known ahead.

No segment and no part is longer than the playlist has announced. Where no key frame comes in time a segment ends
without one, and the next key frame begins another. Where pictures are far apart a part ends by the clock: its last
picture is shown until the next one, which belongs to the part behind. A hole in all that comes is taken out of the
clock, as if the publisher had stopped it: a browser does not play over a hole in the sound without a halt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from flowctl.core.flow.state import MessageClass
from flowctl.core.folders.folders import names_below, opened_folder, replacing_below
from flowctl.errors import ConfigError
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.remux.container import DecodeTimes, fragment, last_frames, program_map, transport
from flowctl.live.remux.course import Unit
from flowctl.live.remux.dates import JUMP_S, ProgramDates
from flowctl.live.remux.files import PART, VARIANT, DiskRoom, encoded, hls_file, lock_file
from flowctl.live.remux.intake import MESSAGE_BYTES, Intake
from flowctl.live.remux.playlist import AWAY_S, PLAYLIST, HlsPart, HlsSegment, Playlist
from flowctl.live.remux.writer import RecorderState, StreamWriter

_log: Final = structlog.get_logger("flowctl.remux")
_MOST_SEGMENT_S: Final = 60.0
"""Longest segment where no key frame comes: what is kept is memory, and players wait for it."""
_GONE_MS: Final = 10_000
"""Time in which pictures or sound that are not there are believed to come, as of FLV (`BELIEVED_S`)."""
_MOST_BYTES: Final = 32 << 20
_HOLE_MS: Final = 500
"""Time without picture and sound that is taken out of the clock: where sound comes, it has some frames in it."""
_STEP_MS: Final = 20
"""What is left of it: a frame of sound."""
_EARLY_S: Final = 0.1
"""How much before its longest a segment is cut without a key frame, so that a frame is there to begin the next one."""
_FIRST_SEGMENT_MS: Final = 10_000
"""Time of the first segment: sound may be a little earlier, and no time may be less than 0."""
_PICTURES: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})
_TS_CODECS: Final = frozenset({"avc1", "mp4a", ".mp3"})
_NAME_BYTES: Final = 230
"""Longest encoded name of an application or stream; file systems have 255, of which number and suffixes need some."""
_PART_SHARE: Final = 0.85
"""Share of the longest part from which one ends at a picture: fewer are not allowed but at the end of a segment."""
_LEAST_PART_S: Final = 0.1


class SegmentForm(enum.Enum):
    AUTO = "auto"  #: as the codecs need it
    TS = "ts"
    FMP4 = "fmp4"


@dataclass(frozen=True, kw_only=True, slots=True)
class HlsSettings:
    folder: Path
    listed: int  # segments in the playlist, 3 to 100; as many more stay for players that are behind
    segment_s: float = 4.0  # least length of a segment, 1 to 30 s; it ends at the next key frame
    part_s: float = 0.0  # longest part of a segment, 0.1 s to half of `segment_s`, for low latency. 0: no parts.
    form: SegmentForm = SegmentForm.AUTO
    keep_free_bytes: int = 0  # room on the disk that is left to others. 0: none.

    def __post_init__(self) -> None:
        if not 1 <= self.segment_s <= 30:
            raise ConfigError(f"segment_s is {self.segment_s:g}, it must be 1 to 30 s")
        if not 3 <= self.listed <= 100:
            raise ConfigError(f"listed is {self.listed}, it must be 3 to 100")
        if self.part_s and not _LEAST_PART_S <= self.part_s <= self.segment_s / 2:
            limits = f"0, or {_LEAST_PART_S:g} to {self.segment_s / 2:g} s, half of a segment"
            raise ConfigError(f"part_s is {self.part_s:g}, it must be {limits}")
        if self.part_s and self.form is SegmentForm.TS:
            raise ConfigError("parts are written in fragmented MP4 alone", hint="leave the form out")


class HlsWriter(StreamWriter):
    what = "HLS"
    hint = "make room on its disk: HLS goes on by itself"

    def __init__(
        self,
        app: str,
        stream: str,
        settings: HlsSettings,
        *,
        variant: str = "",
        room: DiskRoom | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        room = room or DiskRoom(settings.folder, settings.keep_free_bytes)
        super().__init__(f"{app}/{stream}", Intake(), room, clock, wall)
        self._settings = settings
        self._folder = settings.folder / encoded(app)
        self._stem = encoded(stream) + (VARIANT + encoded(variant) if variant else "")
        if max(len(self._folder.name), len(self._stem)) > _NAME_BYTES:
            raise ConfigError(
                f"{self._name:.60}... is too long for the name of a file: its application and its stream may have"
                f" {_NAME_BYTES} letters each, and one that is no plain letter counts as 3 to 12",
                hint="publish it under a shorter name",
            )
        self.playlist_path: Final = self._folder / (self._stem + PLAYLIST)
        self._lock_number: int | None = None  # descriptor of the file that says that we write the stream
        self._playlist: Playlist | None = None
        self._units: list[Unit] = []  # units of the open part; without low latency, of the open segment
        self._opening: tuple[tuple[int, bytes], ...] = ()  # headers at its beginning
        self._segment: HlsSegment | None = None  # what was made of the open segment
        self._bodies: list[bytes] = []  # the same, as it is written when it is complete
        self._complete = False  # it is
        self._begin_ms: int | None = None  # where it begins, on the publisher's clock less `_taken_ms`
        self._part_ms: int | None = None  # the same of the open part
        self._newest_ms: int | None = None  # the latest time in the open timeline
        self._shown_ms: int | None = None  # of that, of the last picture
        self._apart_ms = 0  # how far pictures are apart of late
        self._slow = False  # further than a part, without sound, before that was announced
        self._heard = False  # sound has come since the last hole
        self._hole_ms = 0  # what was taken out before the unit that is being written
        self._taken_ms = 0  # what was taken out of the publisher's clock
        self._forced = False  # the open segment begins without a key frame
        self._frame_ms: dict[int, int] = {}  # length of a frame in the part before, by type
        self._decode_times = DecodeTimes()
        self._open_bytes = 0  # what of it is kept in memory
        self._made_bytes = 0  # of that, what was made of messages
        self._has_key = False  # it can be decoded
        self._picture: Unit | None = None  # the key frame that it has
        self._picture_ms: int | None = None  # when the last picture came; before the first one, when the timeline began
        self._sound: Unit | None = None  # any sound of these tracks
        self._zero_ms: int | None = None  # zero of the publisher's clock; None: not known yet
        self._at_ms = _FIRST_SEGMENT_MS  # where the next segment stands on our clock
        self._dates = ProgramDates()
        self._apart = False  # something is missing, or other, before the next segment
        self._init = b""
        self._init_name = ""
        self._tracks = b""  # what files say of them: the initialisation, or the map of MPEG-TS. Empty: none is written.
        self._fragments = 0
        self._first_number = self._parts = 0  # of parts: the number of this run, and how many it has
        self._useless: list[str] = []  # files to remove
        self._end_at: float | None = None  # when the playlist ends, if nothing comes. None: it does not
        self._covered_ms = 0

    # -- any thread

    def claim(self) -> None:
        """Have the stream's files to ourselves until the end; before `start`."""
        try:
            self._lock_number = lock_file(self._folder / f".{self._stem}.lock")
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.playlist_path} is being written by another process",
                hint="end that one, or name another folder (--out)",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self._folder}: {error.strerror}", hint="name a folder that you may write to"
            ) from error

    def _path(self) -> Path | None:
        return None if self._playlist is None else self.playlist_path

    def _media_ms(self) -> int:
        return self._covered_ms

    @property
    def held_bytes(self) -> tuple[int, int]:
        return self._open_bytes - self._made_bytes, self._made_bytes

    # -- the writer's thread

    def _give_way(self, error: OSError) -> None:
        self._note_no_room(error)
        if self._playlist is not None:
            with contextlib.suppress(OSError):  # then it is lost as well
                self._close_segment(self._playlist)
        segment, self._segment, self._bodies, self._made_bytes = self._segment, None, [], 0
        self._useless += [part.name for part in segment.parts] if segment is not None else []
        self._lose(self._units)
        self._units = []
        self._begin_apart()

    def _write_out(self) -> None:
        if self._end_at is not None and self._clock() >= self._end_at:
            self._end_list()

    def _end_publication(self, why: str, *, gone: bool) -> None:
        self._break()
        self._picture = None
        if gone:
            self._show_list()
        self._end_at = self._clock() + AWAY_S if gone else None
        if gone:
            self._state = RecorderState.WAITING

    def _finish_all(self) -> None:
        try:
            if not self.given_up:
                self._break()
                self._show_list()
            if not (self.goes_on or self.given_up):
                self._end_list()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock_number is not None:
            os.close(self._lock_number)
            self._lock_number = None

    def _write_unit(self, unit: Unit) -> None:
        if unit.broken:
            self._break()
        if unit.message_class is MessageClass.HEADER and not self._units:
            return  # it stands before what comes next
        if self._lacks_key(unit):
            return
        unit = self._cut_where_blind(self._placed(unit))
        hole_s = self._hole_ms / 1000
        dated = bool(hole_s) and hole_s + self._dates.holes_s >= JUMP_S  # by the segment that begins behind it
        if (unit.cut and self._due(unit.at_ms)) or self._full(unit.at_ms) or dated:
            self._write(unit.at_ms, before=unit.type_id)
            self._forced = not unit.cut
        elif self._part_due(unit):
            self._write(unit.at_ms, before=unit.type_id, last=False)
        if hole_s:
            self._dates.note_hole(hole_s)
        if self._lacks_key(unit):
            return  # what it needs was lost just now
        if unit.cut:
            self._has_key = True
            self._picture = unit if unit.type_id == TAG_VIDEO else None
        if unit.message_class is MessageClass.AUDIO:
            self._sound, self._heard = unit, True
        self._dates.note_unit(unit.at_ms, self._clock(), self._wall())
        if not self._units:
            self._opening = self._timeline.headers
        if self._part_ms is None:
            self._part_ms = unit.at_ms
        if self._begin_ms is None:
            self._begin_ms = self._part_ms
        self._units.append(unit)
        self._open_bytes += len(unit.payload) + MESSAGE_BYTES

    def _placed(self, unit: Unit) -> Unit:
        """Return a unit on the publisher's clock without its holes."""
        unit = unit._replace(at_ms=unit.at_ms - self._taken_ms)
        newest_ms, self._hole_ms = self._newest_ms, 0
        if unit.type_id not in {TAG_VIDEO, TAG_AUDIO}:
            return unit
        if newest_ms is not None and self._part_ms is not None:
            hole_ms = unit.at_ms - newest_ms
            self._slow = self._slow or (self._sound is None and hole_ms > self._settings.part_s * 1000)
            most_ms = self._most_ms()
            late_ms = unit.at_ms - self._part_ms - most_ms
            if hole_ms > _HOLE_MS and self._heard and self._sound and newest_ms - self._sound.at_ms < _HOLE_MS:
                unit, self._heard = self._without(unit, hole_ms - _STEP_MS), False
            elif most_ms and late_ms >= min(most_ms, _HOLE_MS):  # no part, or segment, can hold it
                unit = self._without(unit, late_ms)
        self._newest_ms = unit.at_ms if newest_ms is None else max(newest_ms, unit.at_ms)
        if unit.message_class in _PICTURES:
            step_ms = 0 if self._shown_ms is None else unit.at_ms - self._shown_ms
            self._apart_ms, self._shown_ms = max(step_ms, self._apart_ms - self._apart_ms // 64), unit.at_ms
        return unit

    def _without(self, unit: Unit, hole_ms: int) -> Unit:
        self._taken_ms += hole_ms
        self._hole_ms = hole_ms
        return unit._replace(at_ms=unit.at_ms - hole_ms)

    def _most_ms(self) -> int:
        """Return how long the open part may be; 0: that is not known yet."""
        (segment_s, part_s), known = self._most(), self._announced() is not None
        # Without sound the pictures say how long a part has to be, until that is announced.
        known = known or (bool(part_s) and (self._sound is not None or not self._slow))
        return int((part_s or segment_s) * 1000 + 1e-6) if known else 0

    def _most(self) -> tuple[float, float]:
        """Return how long a segment and a part may be."""
        return self._announced() or (_MOST_SEGMENT_S, self._settings.part_s)

    def _announced(self) -> tuple[float, float] | None:
        """Return the same as the playlist has announced it. None: it has not yet."""
        playlist = self._playlist
        return (playlist.most_s, playlist.part_s) if playlist is not None and playlist.announced else None

    def _cut_where_blind(self, unit: Unit) -> Unit:
        """Have a segment begin with sound as well, where pictures were announced and none has come for long."""
        if unit.type_id == TAG_VIDEO or self._picture_ms is None:
            self._picture_ms = unit.at_ms
        blind = unit.message_class is MessageClass.AUDIO and unit.at_ms - self._picture_ms >= _GONE_MS
        return unit._replace(cut=True) if blind else unit

    def _lacks_key(self, unit: Unit) -> bool:
        """Return whether nothing can be made of a picture, since the key frame before it is not there."""
        lacks = not (self._has_key and self._picture) and unit.message_class in _PICTURES and not unit.cut
        if lacks and self._no_room_until is not None:
            self._lose([unit])
        return lacks

    def _due(self, now_ms: int) -> bool:
        began = self._begin_ms
        long = self._forced or (began is not None and now_ms - began >= self._settings.segment_s * 1000)
        return began is not None and self._has_key and long

    def _full(self, now_ms: int) -> bool:
        began, most_s = self._begin_ms, self._most()[0] - _EARLY_S
        return began is not None and (self._open_bytes >= _MOST_BYTES or now_ms - began >= most_s * 1000)

    def _part_due(self, unit: Unit) -> bool:
        """Return whether the open part ends before `unit`: a picture, or sound where pictures are too far apart."""
        part_ms = self._most()[1] * 1000
        if not (part_ms and self._units and unit.type_id in {TAG_VIDEO, TAG_AUDIO}) or self._part_ms is None:
            return False
        late = unit.type_id == TAG_AUDIO and "video" in self._timeline.codecs
        if self._picture is None and unit.cut and unit.type_id == TAG_VIDEO:
            return self._segment is not None  # which has sound alone: the first picture begins another one
        return unit.at_ms - self._part_ms >= part_ms * (1 if late else _PART_SHARE)

    def _break(self) -> None:
        """End the open segment: what follows is of another timeline, or other tracks."""
        if self._units:
            self._write(max(map(self._end_of, {unit.type_id for unit in self._units})))
        self._decode_times, self._sound, self._picture_ms = DecodeTimes(), None, None
        self._begin_apart()
        self._zero_ms = None
        self._taken_ms, self._slow, self._heard = 0, False, False
        self._dates.restart()

    def _end_of(self, type_id: int) -> int:
        """Return where the last message of a type ends, which is taken to be as long as the others."""
        times = self._times(type_id)
        own_ms = (times[-1] - times[0]) // (len(times) - 1) if len(times) > 1 else self._frame_ms.get(type_id, 1)
        return times[-1] + own_ms

    def _times(self, type_id: int) -> list[int]:
        return sorted({unit.at_ms for unit in self._units if unit.type_id == type_id})

    def _begin_apart(self) -> None:
        """Have the next segment begin behind a break, with a key frame."""
        self._has_key = False
        self._complete = True
        self._begin_ms = self._part_ms = self._newest_ms = self._shown_ms = None
        self._forced, self._open_bytes = False, 0
        self._apart = self._playlist is not None

    def _write(self, next_ms: int, *, before: int = 0, last: bool = True) -> None:
        """Write the open part, and its segment if it is the last, `before` a message of that type at `next_ms`."""
        units, begin_ms, most_ms = self._units, self._part_ms or 0, self._most_ms()
        if next_ms <= begin_ms:  # the clock went back, by less than makes it another one
            next_ms = max(begin_ms, *(unit.at_ms for unit in units)) + 1
        until_ms = min(next_ms, begin_ms + most_ms) if most_ms else next_ms
        for type_id in {unit.type_id for unit in units}:
            times = self._times(type_id)
            if len(times) > 1 or type_id == units[0].type_id:
                self._frame_ms[type_id] = max((until_ms - times[0]) // len(times), 1)
        if self._zero_ms is None:
            self._zero_ms = begin_ms - self._at_ms
        try:
            # A browser takes a gap between pictures for a break, and what follows for lost until the next key frame.
            least_ms = 0 if before == TAG_VIDEO else self._apart_ms
            self._write_part(next_ms, (until_ms - begin_ms) / 1000, least_ms, self._zero_ms, last=last)
        except OSError as error:
            self._note_no_room(error)
        except ValueError as error:
            self._note_unwritable(error, units)
        else:
            self._note_written()
            self._covered_ms += until_ms - begin_ms
            self._part_ms = until_ms
        if self._units:
            self._lose(self._units)
            self._units = []
            self._begin_apart()
        if last:
            self._begin_ms, self._open_bytes = None, 0
        self._at_ms = until_ms - self._zero_ms

    def _write_part(self, next_ms: int, duration_s: float, least_ms: int, zero_ms: int, *, last: bool) -> None:
        """Write the open part. Its units are gone when nothing of it can be lost any more."""
        if self._no_room_until is not None and self._clock() < self._no_room_until:
            raise OSError(0, self._why)  # looked for again later
        self._room.check(again=self._no_room_until is not None)
        playlist = self._playlist = self._playlist or self._begin_list()
        if self._complete:
            self._close_segment(playlist)
        init, data = self._made(next_ms, least_ms, zero_ms)
        if data:
            tracks = init or program_map(data)
            if tracks != self._tracks:
                self._close_segment(playlist)
                self._begin_tracks(playlist, init, tracks)
                self._begin_ms = self._part_ms
            elif self._segment is not None and round(self._segment.duration_s + duration_s, 3) > self._most()[0]:
                self._close_segment(playlist)
                self._begin_ms, self._forced = self._part_ms, not self._units[0].cut
            segment = self._segment or self._begin_segment(playlist)
            if late_s := self._dates.mend():
                segment = self._mended(segment, late_s, playlist)
            if self._settings.part_s:
                name = playlist.next_part
                self._replace(name, data)
                self._parts += 1
                playlist.next_part = self._part_name()
                part = HlsPart(name, duration_s, any(unit.cut for unit in self._units))
                segment = dataclasses.replace(segment, parts=(*segment.parts, part))
            self._segment = dataclasses.replace(segment, duration_s=segment.duration_s + duration_s)
            self._bodies.append(data)
            self._made_bytes += len(data)
            playlist.show(self._segment)
            self._apart = False
        self._units = []
        self._complete = last
        if last:
            self._close_segment(playlist)
        self._write_list(playlist)

    def _made(self, next_ms: int, least_ms: int, zero_ms: int) -> tuple[bytes, bytes]:
        """Return the open part: its initialisation, empty where it needs none, and its media, empty if it has none."""
        units = self._decode_times.applied(self._units)
        form = self._settings.form
        if form is SegmentForm.AUTO:
            plain = set(self._timeline.codecs.values()) <= _TS_CODECS and not self._settings.part_s
            form = SegmentForm.TS if plain else SegmentForm.FMP4
        frames = last_frames(self._units)
        sound = self._sound
        if sound is not None and self._segment is None and self._units[0].at_ms - sound.at_ms >= _GONE_MS:
            self._sound = None  # players that join would wait for what is announced
        known = [unit for unit in (self._picture, self._sound) if unit is not None and unit.type_id not in frames]
        if form is SegmentForm.TS:
            return b"", transport(self._opening, units, zero_ms, known)
        self._fragments += 1
        last_ms = max(next_ms - frames[TAG_VIDEO].at_ms, least_ms) if TAG_VIDEO in frames else 0
        return fragment(self._opening, units, zero_ms, self._fragments, known, max(last_ms, 0))

    def _begin_tracks(self, playlist: Playlist, init: bytes, tracks: bytes) -> None:
        self._apart = self._apart or bool(self._tracks)  # RFC 8216, 4.3.2.3
        self._tracks = self._init = b""  # its file goes with the last segment that needs it
        self._init_name = f"{self._stem}-{playlist.next_number}-init.mp4" if init else ""
        if init:
            self._replace(self._init_name, init)
        self._init, self._tracks = init, tracks

    def _begin_segment(self, playlist: Playlist) -> HlsSegment:
        name = f"{self._stem}-{playlist.next_number}.{'m4s' if self._init else 'ts'}"
        began_at, apart = self._dates.begin_segment(self._begin_ms or 0, apart=self._apart, may_jump=not self._forced)
        return HlsSegment(name, 0.0, self._init_name, apart, began_at)

    def _mended(self, segment: HlsSegment, late_s: float, playlist: Playlist) -> HlsSegment:
        """Return a segment with an earlier date, as all since the last discontinuity get it."""
        if not segment.discontinuity:
            playlist.redate(-late_s)
        return segment.redated(-late_s)

    def _close_segment(self, playlist: Playlist) -> None:
        """Write the open segment, if there is one. Where that fails it is tried again before the next one."""
        segment = self._segment
        if segment is None:
            return
        self._replace(segment.name, *self._bodies)
        self._dates.end_segment(segment.duration_s)
        self._files += 1
        self._written_bytes += self._made_bytes
        self._segment, self._bodies, self._made_bytes = None, [], 0
        self._useless += playlist.add(segment)

    def _write_list(self, playlist: Playlist) -> None:
        if playlist.is_empty or not playlist.announced:
            return  # players take one with parts alone for an error
        self._replace(self.playlist_path.name, playlist.text().encode())
        if self._useless:
            with opened_folder(self._folder) as folder:
                while self._useless:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._useless[-1], dir_fd=folder)
                    self._useless.pop()

    def _show_list(self) -> None:
        """Show the playlist as it is, though no segment was long enough."""
        playlist = self._playlist
        if playlist is None or playlist.announced or playlist.ended:
            return
        playlist.announce()
        try:
            self._write_list(playlist)
        except OSError as error:
            self._note_no_room(error)

    def _part_name(self) -> str:
        return f"{self._stem}-{self._first_number}.{self._parts}.m4s"

    def _begin_list(self) -> Playlist:
        """Begin a playlist, and remove what an earlier run left of this stream."""
        number = self._first()
        with opened_folder(self._folder) as folder:
            for name in names_below(folder):
                if (found := hls_file(name)) and found[0] == self._stem:
                    number = max(number, found[1] + 1)  # the clock may have been set back
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
        _log.info("HLS begins", stream=self._name, playlist=str(self.playlist_path))
        self._first_number, self._parts = number, 0
        playlist = Playlist(number, self._settings.listed, self._settings.segment_s, self._settings.part_s)
        playlist.next_part = self._part_name()
        return playlist

    def _first(self) -> int:
        """Return the number of the first segment, where no earlier one is higher."""
        return int(self._wall())

    def _replace(self, name: str, *data: bytes) -> None:
        """Write a file beside its name, then give it that."""
        with (
            opened_folder(self._folder) as folder,  # made again where somebody has removed it
            replacing_below(folder, name, name + PART, 0o666) as file,
        ):
            file.writelines(data)

    def _end_list(self) -> None:
        self._end_at = None
        playlist = self._playlist
        if playlist is None or playlist.ended or not self._files:
            return
        self._state = RecorderState.WAITING
        try:
            self._close_segment(playlist)
            playlist.ended = True
            self._write_list(playlist)
            playlist.forget_targets()
        except OSError as error:
            _log.error("the playlist could not be ended", stream=self._name, why=error.strerror or str(error))
