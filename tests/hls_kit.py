"""A validator of HLS: playlists and their segments, by the rules of RFC 8216 and draft-pantos-hls-rfc8216bis.

What a playlist says about itself, about the one before it, and about the files that it names: their boxes, samples and
decode times. `Validator.check` is given each state of a playlist, in order; what it finds wrong is in `faults`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar
from urllib.parse import unquote, urlsplit

_ATTRIBUTE = re.compile(r'([A-Z0-9-]+)=("[^"]*"|[^,]*)')
_ONCE = ("#EXT-X-VERSION", "#EXT-X-TARGETDURATION", "#EXT-X-MEDIA-SEQUENCE", "#EXT-X-PART-INF", "#EXT-X-SERVER-CONTROL")
_LEAST_PART_SHARE = 0.85
_SLACK_S = 0.002
"""Times are written in whole milliseconds."""
_FRAME_S = 0.06
"""Frames of sound and of pictures: a part, and a segment, may begin and end with either."""
_LATE_S = 0.5
"""What the first frame of a part, or a segment, may come behind its beginning, and the last one end behind its end."""
_DATE_SHARE = 1 / 8
"""What the time of day may be behind the end of the segment before, as a share of it: a slow clock is followed. It may
never be before it, or players would see time run backwards."""
_HOLE_S = 0.9
"""Least hole that is in the dates of an odd stream, and no discontinuity."""
_SEAM_S = 0.005
"""A muxer knows no length of the last sample, and takes that of the one before it."""
_ODD_SEAM_S = 0.5
"""Longest hole of an odd stream; of pictures it is filled by the last one."""


@dataclass
class Part:
    name: str
    duration_s: float
    independent: bool


@dataclass
class Segment:
    number: int
    parts: list[Part] = field(default_factory=list)
    name: str = ""  # empty: it is not complete
    duration_s: float = 0.0
    init: str = ""
    discontinuity: int = 0  # its discontinuity sequence number
    began_at: float | None = None


@dataclass
class Listing:
    """A playlist, parsed."""

    target_s: int
    part_s: float
    control: dict[str, str]
    segments: list[Segment]  # the last one may not be complete
    hint: str
    ended: bool
    version: int

    @property
    def whole(self):
        return [segment for segment in self.segments if segment.name]


def attributes(text):
    return {name: value.strip('"') for name, value in _ATTRIBUTE.findall(text)}


def name_of(uri):
    return unquote(urlsplit(uri).path)


class ListingReader:
    """Parses a playlist strictly; `Listing` is in `made`. Raises ValueError or KeyError."""

    def __init__(self, text):
        lines = text.splitlines()
        if lines[0] != "#EXTM3U":
            raise ValueError("it does not begin with #EXTM3U")
        head = [line.partition(":")[::2] for line in lines if line.partition(":")[0] in _ONCE]
        if len(dict(head)) != len(head):
            raise ValueError("a tag is there twice")
        head = dict(head)
        self._segment = Segment(int(head.get("#EXT-X-MEDIA-SEQUENCE", 0)))
        self._segments = []
        self._init, self._discontinuity, self._hint, self._ended = "", 0, "", False
        for line in lines[1:]:
            if self._ended or (self._hint and line != "#EXT-X-ENDLIST"):
                raise ValueError(f"{line} is behind the end")
            tag, _, value = line.partition(":")
            if tag in self._TAGS:
                self._TAGS[tag](self, value)
            elif line.startswith("#EXT") and tag not in _ONCE:
                raise ValueError(f"{line} is not known")
            elif line and not line.startswith("#"):
                self._end_segment(name_of(line))
        if self._segment.parts:
            self._end_segment("")
        self.made = Listing(
            target_s=int(head["#EXT-X-TARGETDURATION"]),
            part_s=float(attributes(head.get("#EXT-X-PART-INF", "")).get("PART-TARGET", 0)),
            control=attributes(head.get("#EXT-X-SERVER-CONTROL", "")),
            segments=self._segments,
            hint=self._hint,
            ended=self._ended,
            version=int(head.get("#EXT-X-VERSION", 1)),
        )

    def _end_segment(self, name):
        segment = self._segment
        if name and not segment.duration_s:
            raise ValueError(f"{name} has no EXTINF")
        segment.name, segment.init, segment.discontinuity = name, self._init, self._discontinuity
        self._segments.append(segment)
        self._segment = Segment(segment.number + 1)

    def _count_discontinuities(self, value):
        if self._segments or self._segment.parts:
            raise ValueError("the discontinuity sequence is behind a segment")
        self._discontinuity = int(value)

    def _break(self, _):
        self._discontinuity += 1

    def _map(self, value):
        self._init = name_of(attributes(value)["URI"])

    def _date(self, value):
        self._segment.began_at = datetime.fromisoformat(value).timestamp()

    def _part(self, value):
        found = attributes(value)
        part = Part(name_of(found["URI"]), float(found["DURATION"]), found.get("INDEPENDENT") == "YES")
        self._segment.parts.append(part)

    def _duration(self, value):
        self._segment.duration_s = float(value.split(",")[0])

    def _announce(self, value):
        found = attributes(value)
        if found["TYPE"] != "PART":
            raise ValueError("the hint is of no part")
        self._hint = name_of(found["URI"])

    def _end(self, _):
        self._ended = True

    _TAGS: ClassVar = {
        "#EXT-X-DISCONTINUITY-SEQUENCE": _count_discontinuities,
        "#EXT-X-DISCONTINUITY": _break,
        "#EXT-X-MAP": _map,
        "#EXT-X-PROGRAM-DATE-TIME": _date,
        "#EXT-X-PART": _part,
        "#EXTINF": _duration,
        "#EXT-X-PRELOAD-HINT": _announce,
        "#EXT-X-ENDLIST": _end,
    }


def boxes(data):
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size < 8 or at + size > len(data):
            raise ValueError(f"a box at {at} has {size} octets of {len(data) - at}")
        yield data[at + 4 : at + 8], data[at + 8 : at + size]
        at += size


def inside(data, *path):
    """Return the contents of the boxes at a path of types."""
    found = [data]
    for kind in path:
        found = [body for outer in found for name, body in boxes(outer) if name == kind]
    return found


@dataclass
class Run:
    """The samples of one track in a fragment: decode times in units of the track."""

    track: int
    begin: int
    end: int
    last: int  # length of the last one
    size_bytes: int
    keys: list[bool]  # of the samples: whether it is a random access point


def runs_of(data, defaults):
    """Return the runs of media without its initialisation; `defaults`: of the tracks, duration, size and flags."""
    kinds = [kind for kind, _ in boxes(data)]
    if not kinds or kinds != [b"moof", b"mdat"] * (len(kinds) // 2):
        raise ValueError(f"it has the boxes {kinds}")
    found, order = [], list(boxes(data))
    for (_, moof), (_, mdat) in zip(order[::2], order[1::2], strict=True):
        made = [run for traf in inside(moof, b"traf") for run in _runs(traf, defaults)]
        if sum(run.size_bytes for run in made) != len(mdat):
            raise ValueError("the samples are not all of the media")
        found += made
    return found


def _runs(traf, defaults):
    (header,) = inside(traf, b"tfhd")
    flags, track, at = int.from_bytes(header[1:4], "big"), int.from_bytes(header[4:8], "big"), 8
    usual = list(defaults.get(track, (0, 0, 0)))
    at += 8 * bool(flags & 1) + 4 * bool(flags & 2)
    for place, bit in enumerate((8, 0x10, 0x20)):
        if flags & bit:
            usual[place] = int.from_bytes(header[at : at + 4], "big")
            at += 4
    (time,) = inside(traf, b"tfdt")
    begin = int.from_bytes(time[4:12] if time[0] else time[4:8], "big")
    for run in inside(traf, b"trun"):
        flags, count, at = int.from_bytes(run[1:4], "big"), int.from_bytes(run[4:8], "big"), 8
        at += 4 * bool(flags & 1)
        first = int.from_bytes(run[at : at + 4], "big") if flags & 4 else None
        at += 4 * bool(flags & 4)
        end, size_bytes, keys = begin, 0, []
        for number in range(count):
            sample = list(usual)
            for place, bit in enumerate((0x100, 0x200, 0x400)):
                if flags & bit:
                    sample[place] = int.from_bytes(run[at : at + 4], "big")
                    at += 4
            at += 4 * bool(flags & 0x800)
            if number == 0 and first is not None:
                sample[2] = first
            keys.append(not sample[2] & 0x10000)
            end, size_bytes = end + sample[0], size_bytes + sample[1]
        yield Run(track, begin, end, sample[0], size_bytes, keys)
        begin = end


@dataclass
class Track:
    scale: int
    video: bool


class Validator:
    """Checks the states of one playlist, one after the other.

    Args:
        read: returns the octets of a file that a playlist names; raises OSError where there is none.
        odd: its frames come at any time, so they may leave gaps; but none that a browser takes for a break.
    """

    def __init__(self, read, *, odd=False):
        self._read = read
        self._odd = odd
        self._last = None
        self._files = {}  # octets by name
        self._places = {}  # what a name is of: number and part, of segments None; it is of nothing else, ever
        self._declared = {}  # by discontinuity: where its media begins, and how long all is that was declared since
        self._ends = {}  # where the decode times of a track go on, by discontinuity and track
        self._shown_from = 0  # segment behind those that the first playlist, or that behind an end, had
        self._seen = set()  # numbers of segments whose parts were looked at
        self.faults = []
        self.looked_at = 0  # segments and parts whose samples were looked at

    def check(self, text):
        try:
            listing = ListingReader(text).made
        except (ValueError, KeyError) as error:
            self.faults.append(f"no playlist: {error!r}")
            return None
        if self._last is None or self._last.ended:
            self._shown_from = listing.whole[-1].number + 1
        self._check_alone(listing)
        if self._last is not None:
            self._check_behind(self._last, listing)
        self._check_files(listing)
        self._last = listing
        return listing

    def _claim(self, holds, text):
        if not holds:
            self.faults.append(text)

    def _check_alone(self, listing):
        claim = self._claim
        for segment, behind in itertools.pairwise(listing.segments):
            if segment.discontinuity == behind.discontinuity and None not in (segment.began_at, behind.began_at):
                off_s = behind.began_at - segment.began_at - segment.duration_s
                most_s = segment.duration_s * _DATE_SHARE + _SLACK_S
                hole = self._odd and off_s >= _HOLE_S  # in which nothing came
                claim(
                    -_SLACK_S <= off_s <= most_s or hole, f"{behind.name} is dated {off_s:+.3f} s off the end before it"
                )
        for segment in listing.whole:
            rounded = int(segment.duration_s + 0.5)
            claim(rounded <= listing.target_s, f"{segment.name} has {segment.duration_s} s, more than the target")
            if segment.parts:
                spent_s = sum(part.duration_s for part in segment.parts)
                same = abs(spent_s - segment.duration_s) <= _SLACK_S * (len(segment.parts) + 1)
                claim(same, f"the parts of {segment.name} have {spent_s:.3f} s, it has {segment.duration_s}")
        claim(
            listing.version >= 6 or not any(segment.init for segment in listing.segments), "EXT-X-MAP needs version 6"
        )
        if not listing.part_s:
            claim(not any(segment.parts for segment in listing.segments), "there are parts and no EXT-X-PART-INF")
            return
        hold_back_s = float(listing.control.get("PART-HOLD-BACK", 0))
        claim(
            hold_back_s >= 3 * listing.part_s - _SLACK_S, f"PART-HOLD-BACK of {hold_back_s} s is less than three parts"
        )
        claim(listing.part_s <= listing.target_s, f"parts of {listing.part_s} s are longer than segments")
        claim(listing.ended or listing.hint, "there is no hint")
        claim(not (listing.ended and listing.hint), "there is a hint behind the end")
        for segment in listing.segments:
            for number, part in enumerate(segment.parts):
                claim(part.duration_s <= listing.part_s, f"{part.name} has {part.duration_s} s")
                last = number == len(segment.parts) - 1 and (segment.name or listing.hint)
                long = part.duration_s >= _LEAST_PART_SHARE * listing.part_s - _SLACK_S
                claim(long or part.independent or last, f"{part.name} has {part.duration_s} s, too few")
        # Parts for three target durations from the end, each segment with all of them or none.
        behind_s = sum(part.duration_s for segment in listing.segments if not segment.name for part in segment.parts)
        for segment in reversed(listing.whole):
            early = segment.number < self._shown_from  # it was complete before there was a playlist
            claim(
                early or segment.parts or behind_s >= 3 * listing.target_s,
                f"{segment.name} is listed without its parts",
            )
            behind_s += segment.duration_s
        names = [part.name for segment in listing.segments for part in segment.parts]
        claim(len(set(names)) == len(names) and listing.hint not in names, "a part has the name of another one")

    def _check_behind(self, last, listing):
        claim = self._claim
        claim(not last.ended or listing.segments[-1].number > last.segments[-1].number, "it goes on behind its end")
        for name, was, now in (
            ("target duration", last.target_s, listing.target_s),
            ("target of parts", last.part_s, listing.part_s),
        ):
            claim(last.ended or was == now, f"the {name} changed from {was} to {now} s")
        first, before = listing.segments[0].number, last.segments[0].number
        claim(first >= before, f"the media sequence went back from {before} to {first}")
        claim(first <= last.segments[-1].number + 1, "segments were left out")
        kept_s = sum(segment.duration_s for segment in listing.whole)
        left = [segment for segment in last.segments if segment.number < first]
        enough = kept_s >= 3 * listing.target_s - _SLACK_S
        claim(last.ended or not left or enough, f"a segment was removed, {kept_s:.3f} s are left")
        known = {segment.number: segment for segment in last.segments}
        for segment in listing.segments:
            was = known.get(segment.number)
            if was is None:
                continue
            claim(not was.name or was.name == segment.name, f"segment {segment.number} has another name now")
            same = was.discontinuity == segment.discontinuity
            claim(
                same, f"segment {segment.number} was in discontinuity {was.discontinuity}, now {segment.discontinuity}"
            )
            if segment.parts:
                claim(segment.parts[: len(was.parts)] == was.parts, f"the parts of segment {segment.number} changed")
        old = {part.name for segment in last.segments for part in segment.parts}
        come = [part.name for segment in listing.segments for part in segment.parts if part.name not in old]
        claim(not come or not last.hint or come[0] == last.hint, f"{come[:1]} came, {last.hint} was announced")

    def _check_files(self, listing):
        for segment in listing.segments:
            names = [(part.name, number) for number, part in enumerate(segment.parts)]
            for name, place in (*names, *([(segment.name, None)] if segment.name else [])):
                known = self._places.setdefault(name, (segment.number, place))
                self._claim(known == (segment.number, place), f"{name} is of {known} and of {segment.number}, {place}")
            for part in segment.parts:
                if part.name not in self._files:
                    self._check_media(part.name, segment, part.duration_s, independent=part.independent)
            if segment.parts:
                self._seen.add(segment.number)
            if not segment.name or segment.name in self._files:
                continue
            if segment.parts:
                made = b"".join(self._file(part.name) for part in segment.parts)
                self._claim(self._file(segment.name) == made, f"{segment.name} is not made of its parts")
            elif segment.number not in self._seen:
                self._check_media(segment.name, segment, segment.duration_s)

    def _file(self, name):
        if name not in self._files:
            try:
                self._files[name] = self._read(name)
            except OSError:
                self.faults.append(f"{name} is listed and not there")
                self._files[name] = b""
        return self._files[name]

    def _check_media(self, name, segment, duration_s, *, independent=None):
        data = self._file(name)
        if not segment.init or not data:
            return
        tracks, defaults = tracks_of(self._file(segment.init))
        try:
            runs = runs_of(data, defaults)
        except ValueError as error:
            self.faults.append(f"{name}: {error}")
            return
        self.looked_at += 1
        ends = self._ends.setdefault(segment.discontinuity, {})
        for run in runs:
            end, last, count = ends.get(run.track, (run.begin, 0, 0))
            seam_s, last_s = (run.begin - end) / tracks[run.track].scale, last / tracks[run.track].scale
            most_s = _SEAM_S if not self._odd else last_s if tracks[run.track].video else _ODD_SEAM_S
            least_s = -_SEAM_S if not self._odd else -last_s
            close = least_s - _SLACK_S <= seam_s <= most_s + _SLACK_S
            close = close or (self._odd and count == 1)  # how long a first picture is shown nobody knows
            self._claim(close, f"{name}: track {run.track} goes on {seam_s:+.3f} s from its end, {last_s:.3f} s long")
            ends[run.track] = run.end, run.last, count + len(run.keys)
        spans = [(run.begin / tracks[run.track].scale, run.end / tracks[run.track].scale) for run in runs]
        first_s, end_s = min(begin for begin, _ in spans), max(end for _, end in spans)
        declared = self._declared.setdefault(segment.discontinuity, [first_s, 0.0])
        late_s = first_s - sum(declared)
        self._claim(-_FRAME_S <= late_s < min(duration_s, _LATE_S) + _FRAME_S, f"{name} begins {late_s:+.3f} s late")
        declared[1] += duration_s
        long_s = end_s - sum(declared)
        self._claim(long_s >= -_FRAME_S, f"{name} ends {long_s:+.3f} s behind its end")
        pictures = [run for run in runs if tracks[run.track].video]
        if pictures and independent is not None:
            keys = [key for run in pictures for key in run.keys]
            self._claim(
                any(keys) == independent, f"{name} is independent: {independent}; it has {sum(keys)} key frames"
            )


def tracks_of(init):
    """Return the tracks of an initialisation, and their defaults of samples, by number."""
    tracks = {}
    for trak in inside(init, b"moov", b"trak"):
        (header,), (media,) = inside(trak, b"tkhd"), inside(trak, b"mdia", b"mdhd")
        (handler,) = inside(trak, b"mdia", b"hdlr")
        number = int.from_bytes(header[20:24] if header[0] else header[12:16], "big")
        scale = int.from_bytes(media[20:24] if media[0] else media[12:16], "big")
        tracks[number] = Track(scale, handler[8:12] == b"vide")
    defaults = {}
    for trex in inside(init, b"moov", b"mvex", b"trex"):
        values = [int.from_bytes(trex[at : at + 4], "big") for at in range(4, 24, 4)]
        defaults[values[0]] = tuple(values[2:5])
    return tracks, defaults
