"""One recording in FLV, read by time without reading all of it.

How it works. FLV has no index, but each tag stands between its own size and a copy of it, so tags can be read in both
directions from any place that is known: the beginning, the end, and, for what is between, wherever a tag, the one
behind it and the copies of their sizes agree. A time is found by halves: some twenty places, each with the tags about
it, of a file however long. Then the way goes back, tag by tag, to the key frame.

Where nothing agrees, as in a file that is being written, its end is the end of the last whole tag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.flv import (
    BACK_POINTER_BYTES,
    HEADER_BYTES,
    MAX_TAG_BYTES,
    TAG_HEADER_BYTES,
    TAG_SCRIPT,
    TAG_VIDEO,
    header,
)
from flowctl.flv import tag as tag_bytes
from flowctl.live.remux.course import HEADERS, HEADERS_BYTES
from flowctl.live.remux.flvform import told_lengths
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import CLOCK_MASK

FRONT_BYTES: Final = HEADER_BYTES + BACK_POINTER_BYTES
PART_BYTES: Final = 64 * 1024
"""What of a recording is read at a time, and waits for a client."""
_WINDOW_BYTES: Final = 64 * 1024
_NEAR_BYTES: Final = 256 * 1024
"""What is read tag by tag, once a time lies in it."""
_TAG: Final = re.compile(rb"(?=[\x08\x09\x12].{7}\0{3})", re.DOTALL)
_LAST_TAGS: Final = 8
"""Tags from the end, of which one has the latest time: sound and pictures take turns."""
_MOST_BACK: Final = 20_000
"""Tags between a time and its key frame, four minutes of them; of a group that is longer all is given."""
_MOST_TRIES: Final = 20_000
"""Places that look like a tag and are none, in all searches of one file: 0.1 s. Publishers may make millions."""
_MOST_WALKED: Final = 70_000
"""Tags that are gone through one after the other: 1 MiB of the smallest, 0.2 s."""
_END_BYTES: Final = (1 << 20, 4 << 20, 16 << 20)
"""Octets at the end of a file that is being written in which its last whole tag is looked for, one after the other."""
_AUDIO_FLAG, _VIDEO_FLAG = 4, 1
_KEY_FRAME: Final = 0x10
"""Frame type of a key frame, in the first octet of a picture (FLV 10.1 E.4.3.1, Enhanced RTMP)."""


class Stretch(NamedTuple):
    """A part of one file, of a span."""

    name: str
    begin: int
    end: int
    from_ms: int  # time in the file that is `at_ms` in the span
    at_ms: int


class Tag(NamedTuple):
    """One tag of a file, without its body."""

    at: int  # where it begins
    type_id: int
    time_ms: int
    size_bytes: int  # size of the body

    @property
    def body(self) -> int:
        """Where its body begins."""
        return self.at + TAG_HEADER_BYTES

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.body + self.size_bytes + BACK_POINTER_BYTES


class FlvFile:
    """A file by its descriptor, which stays the caller's."""

    step_ms: Final = 20  # time behind the last frame: it is a frame's, and no file says which

    def __init__(self, number: int) -> None:
        self._number: Final = number
        self._window, self._begin = b"", 0
        self._tries = 0
        self._size: Final = os.fstat(number).st_size
        front = self.read(0, FRONT_BYTES)
        if not front.startswith(b"FLV\1") or len(front) < FRONT_BYTES:
            raise ValueError("no FLV")
        self.audio, self.video = bool(front[4] & _AUDIO_FLAG), bool(front[4] & _VIDEO_FLAG)  # which tracks there are
        self.end = self._size
        self.end = self._whole_end()  # of its last whole tag
        self.headers: tuple[tuple[int, bytes], ...] = ()
        self.first = self._read_headers()  # where the first frame is

    def read(self, at: int, count: int) -> bytes:
        """Return what is there, less at the end of the file."""
        if not self._begin <= at <= self._begin + len(self._window) - count:
            if count > _WINDOW_BYTES // 2:
                return os.pread(self._number, count, at)
            back = at < self._begin  # then what stands before it is read next
            self._begin = max(at + count - _WINDOW_BYTES, 0) if back else at
            self._window = os.pread(self._number, _WINDOW_BYTES, self._begin)
        return self._window[at - self._begin : at - self._begin + count]

    def tag_at(self, at: int) -> Tag | None:
        """Return the tag that begins at a place, if one does and is whole."""
        head = self.read(at, TAG_HEADER_BYTES)
        if not _TAG.match(head):
            return None
        time_ms = int.from_bytes(head[7:8] + head[4:7], "big")
        tag = Tag(at, head[0], time_ms, int.from_bytes(head[1:4], "big"))
        if tag.size_bytes > MAX_TAG_BYTES or tag.end > self.end:
            return None
        return tag if self._size_before(tag.end) == TAG_HEADER_BYTES + tag.size_bytes else None

    def tag_before(self, at: int) -> Tag | None:
        begin = at - BACK_POINTER_BYTES - self._size_before(at)
        tag = self.tag_at(begin) if FRONT_BYTES <= begin < at else None
        return tag if tag is not None and tag.end == at else None

    def tags(self, at: int) -> Iterator[Tag]:
        while (tag := self.tag_at(at)) is not None:
            yield tag
            at = tag.end

    def body(self, tag: Tag) -> bytes:
        return self.read(tag.body, tag.size_bytes)

    @property
    def length_ms(self) -> int:
        """The time of its last frame; times begin at 0."""
        latest, at = 0, self.end
        for _ in range(_LAST_TAGS):
            if (tag := self.tag_before(at)) is None:
                break
            latest, at = max(latest, tag.time_ms), tag.at
        return latest

    @property
    def kind(self) -> object:
        """What has to be the same in a file that goes on with this one: its codecs."""
        return {item for item in self.headers if item[0] != TAG_SCRIPT}

    def head(self, length_s: float, rest_bytes: int) -> bytes:
        """Return what stands before the frames of a file that is so long, and has so many octets of them."""
        size = FRONT_BYTES + sum(len(data) + TAG_HEADER_BYTES + BACK_POINTER_BYTES for _, data in self.headers)
        told = (
            tag_bytes(type_id, 0, told_lengths(type_id, data, length_s, size + rest_bytes))
            for type_id, data in self.headers
        )
        return header(self.audio, self.video) + b"".join(told)

    def time_before(self, at: int) -> int:
        """Return the time of what ends at a place."""
        last = self.tag_before(at)
        return self.length_ms if at == self.end or last is None else last.time_ms

    def place_of(self, time_ms: int) -> int:
        """Return where the first tag of that time or later is; the end, where none is."""
        low, high = self.first, self.end
        while high - low > _NEAR_BYTES:
            middle = (low + high) // 2
            tag = self._tag_behind(middle, high)
            if tag is None or tag.time_ms >= time_ms:
                high = middle
            else:
                low = tag.at
        near = islice(self.tags(low), _MOST_WALKED)  # what was found by halves may be none of them
        return next((tag.at for tag in near if tag.time_ms >= time_ms), self.end)

    def cut_before(self, time_ms: int) -> Tag | None:
        """Return the last tag with which playing can begin so that `time_ms` is seen; None: no frame is there."""
        at = self.place_of(time_ms + 1)
        for _ in range(_MOST_BACK):
            tag = self.tag_before(at)
            if tag is None or tag.at < self.first:
                break
            at = tag.at
            if tag.time_ms <= time_ms and self._is_cut(tag):
                return tag
        return self.tag_at(self.first)  # it begins with one

    def _is_cut(self, tag: Tag) -> bool:
        if not self.video or tag.type_id != TAG_VIDEO:
            return not self.video and tag.type_id != TAG_SCRIPT
        octet = self.read(tag.body, 1)
        if not octet or octet[0] & 0x70 != _KEY_FRAME:
            return False
        return inspect(tag.type_id, self.body(tag)).message_class is MessageClass.KEY

    def _read_headers(self) -> int:
        at, size, found = FRONT_BYTES, 0, list[tuple[int, bytes]]()
        for tag in self.tags(FRONT_BYTES):
            size += tag.size_bytes
            if tag.time_ms or len(found) >= HEADERS or size > HEADERS_BYTES:
                break
            body = self.body(tag)
            if inspect(tag.type_id, body).message_class is not MessageClass.HEADER:
                break
            found.append((tag.type_id, body))
            at = tag.end
        self.headers = tuple(found)
        return at

    def _size_before(self, at: int) -> int:
        return int.from_bytes(self.read(at - BACK_POINTER_BYTES, BACK_POINTER_BYTES), "big")

    def _tag_behind(self, at: int, end: int) -> Tag | None:
        """Return the first tag that begins at `at` or later: with another behind it, or at the end of the file."""
        while at < end:
            piece = self.read(at, min(_WINDOW_BYTES // 2, end - at))
            for found in _TAG.finditer(piece):
                tag = self.tag_at(at + found.start())
                if tag is not None and (tag.end == self.end or self.tag_at(tag.end) is not None):
                    return tag
                self._tries += 1
                if self._tries > _MOST_TRIES:
                    raise ValueError("it is full of what looks like tags")
            at += max(len(piece) - TAG_HEADER_BYTES + 1, 1)
        return None

    def _whole_end(self) -> int:
        if self.tag_before(self._size) is not None:
            return self._size
        begin = FRONT_BYTES
        for size in _END_BYTES:
            begin = max(self._size - size, FRONT_BYTES)
            if begin == FRONT_BYTES:
                break
            if (tag := self._tag_behind(begin, self._size)) is not None:
                begin = tag.at
                break
        else:
            raise ValueError("its end has no tags")
        return max((tag.end for tag in islice(self.tags(begin), _MOST_WALKED)), default=FRONT_BYTES)


def moved_tags(number: int, place: Stretch, span_s: float, span_bytes: int) -> Iterator[bytes]:
    """Read a stretch of a file, in parts, with the times and the lengths of a span."""
    at, skip = place.begin, 0  # `skip`: of a tag whose head was before
    while at < place.end:
        data = bytearray(os.pread(number, min(PART_BYTES, place.end - at), at))
        where = skip
        while where + TAG_HEADER_BYTES <= len(data):
            size = int.from_bytes(data[where + 1 : where + 4], "big")
            time_ms = int.from_bytes(data[where + 7 : where + 8] + data[where + 4 : where + 7], "big")
            moved = (max(time_ms - place.from_ms, 0) + place.at_ms & CLOCK_MASK).to_bytes(4, "big")
            data[where + 4 : where + 8] = moved[1:] + moved[:1]
            body = where + TAG_HEADER_BYTES
            if data[where] == TAG_SCRIPT and body + size > len(data) and where:
                del data[where:]  # the next part begins with it, and has all of it
                break
            if data[where] == TAG_SCRIPT and body + size <= len(data):
                data[body : body + size] = told_lengths(TAG_SCRIPT, bytes(data[body : body + size]), span_s, span_bytes)
            where = body + size + BACK_POINTER_BYTES
        if where < len(data) and at + len(data) < place.end:
            del data[where:]  # the head of a tag that is cut
        if not data:
            return  # the file became shorter
        at += len(data)
        skip = max(where - len(data), 0)
        yield bytes(data)
