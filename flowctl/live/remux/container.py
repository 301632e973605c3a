"""Groups of pictures as fragmented MP4 and as MPEG-TS, made by FFmpeg's libraries (PyAV) without transcoding.

How it works. A group is written as a small FLV file into memory, with the headers that it needs, and read by FFmpeg's
demuxer, which knows every codec that FLV may hold, Enhanced RTMP too; its packets go, untouched, to a muxer that lives
for this group alone. The clock goes on from group to group, so what they give can be put behind each other: fragments
behind one ``moov``, or segments of HLS. That costs some milliseconds a group, and nothing has to be kept between two.

Not for the thread of a poll group: it computes.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import av

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_SCRIPT, TAG_VIDEO
from flowctl.live.remux.course import Unit
from flowctl.live.remux.flvform import MP4, flv_of
from flowctl.wire.rtmp.media.composition import is_composed, with_composition
from flowctl.wire.rtmp.media.media import MediaInfo, inspect

_MARGIN_MS: Final = 60_000
"""Time of the first picture: sound may be a little earlier than it, and in FLV no time is less than 0."""
_FRAGMENT: Final = {
    # `frag_discont` and no edit list: times in a fragment are those of its packets, and not counted from 0.
    "movflags": "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer",
    "use_editlist": "0",
    "avoid_negative_ts": "disabled",
}
_TS: Final = {
    # Each segment is written by a muxer of its own, which counts its packets from 0; this says so.
    "mpegts_flags": "initial_discontinuity",
    "avoid_negative_ts": "disabled",
}
_PACKET_BYTES: Final = 188
_MAP_PID: Final = 0x1000
"""The packets in which FFmpeg's muxer says which tracks there are (``mpegts_pmt_start_pid``)."""
_LARGE_BYTES: Final = 1 << 20
_LARGE_ONES: Final = threading.Lock()
"""Held while a large group is made, one at a time: on its way through FFmpeg it is there some six times over."""
_BOX_HEADER_BYTES: Final = 8
_FRAMES: Final = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE, MessageClass.AUDIO})
_MOST_EARLY_MS: Final = 10_000


class Fragment(NamedTuple):
    init: bytes  # ``ftyp`` and ``moov``: the same for all groups of the same tracks
    body: bytes  # ``moof`` and ``mdat``. Empty: the group has no frames.


def fragment(
    headers: Sequence[tuple[int, bytes]],
    units: Sequence[Unit],
    zero_ms: int,
    number: int,
    known: Sequence[Unit] = (),
    last_ms: int = 0,
) -> Fragment:
    """Return a group as a fragment.

    FFmpeg knows a track by what is in it. `known` is any picture of the stream, or any sound, for a group that has
    none, and is not written. `last_ms` is how long the last picture is shown; 0: as long as others.
    """
    data = _remuxed(headers, units, zero_ms, "mp4", {**_FRAGMENT, "fragment_index": str(number)}, known, last_ms)
    begin = next((at for kind, at, _ in _boxes(data) if kind == b"moof"), len(data))
    return Fragment(data[:begin], data[begin:])


def transport(
    headers: Sequence[tuple[int, bytes]], units: Sequence[Unit], zero_ms: int, known: Sequence[Unit] = ()
) -> bytes:
    """Return a group as MPEG-TS, empty if it has no frames; arguments and errors as `fragment`."""
    return _remuxed(headers, units, zero_ms, "mpegts", _TS, known)


def program_map(data: bytes) -> bytes:
    """Return what MPEG-TS of ours says of its tracks (ISO/IEC 13818-1, 2.4.4.8): the same for the same tracks."""
    packets = range(0, len(data), _PACKET_BYTES)
    begin = next((at for at in packets if int.from_bytes(data[at + 1 : at + 3], "big") & 0x1FFF == _MAP_PID), None)
    return b"" if begin is None else data[begin + 4 : begin + _PACKET_BYTES]  # its header counts packets


def _remuxed(
    headers: Sequence[tuple[int, bytes]],
    units: Sequence[Unit],
    zero_ms: int,
    form: str,
    options: dict[str, str],
    known: Sequence[Unit] = (),
    last_ms: int = 0,
) -> bytes:
    base_ms = units[0].at_ms - _MARGIN_MS
    shown = last_frames([*known, *units])
    if not shown:
        return b""
    # A header without a frame, as at the end of a group, would make a track of which FFmpeg knows too little.
    headers = [item for item in headers if item[0] in shown or item[0] == TAG_SCRIPT]
    units = [unit for unit in units if unit.message_class is not MessageClass.HEADER or unit.type_id in shown]
    first = [unit._replace(at_ms=units[0].at_ms) for unit in known]
    left_out = {"video" if unit.type_id == TAG_VIDEO else "audio" for unit in known}
    last = max((unit.at_ms - base_ms for unit in units if last_ms and unit.type_id == TAG_VIDEO), default=0), last_ms
    large = sum(len(unit.payload) for unit in units) >= _LARGE_BYTES
    with _LARGE_ONES if large else contextlib.nullcontext():
        return _made(flv_of(headers, [*first, *units], base_ms), base_ms - zero_ms, form, options, left_out, last)


def _made(
    flv: bytes, offset_ms: int, form: str, options: dict[str, str], left_out: set[str], last: tuple[int, int]
) -> bytes:
    source, target = io.BytesIO(flv), io.BytesIO()
    try:
        with av.open(source, format="flv") as read:
            count = _copied(read, target, offset_ms, form, options, left_out, last)
    except (av.FFmpegError, ValueError, LookupError, ArithmeticError) as error:
        # LookupError: PyAV knows no track that shows itself only behind what FFmpeg looks through at the beginning.
        raise ValueError(f"{form} cannot hold it: {error}") from error
    return target.getvalue() if count else b""


def last_frames(units: Sequence[Unit]) -> dict[int, Unit]:
    """Return the last picture and the last frame of sound, by type, as far as there are any."""
    return {unit.type_id: unit for unit in units if unit.message_class in _FRAMES}


class DecodeTimes:
    """The times at which frames behind each other are decoded: in order, and before they are shown.

    Only FLV can hold others. Some encoders with B-frames give the time at which a picture is shown as the one at which
    it is decoded, so that composition times are negative: all pictures are decoded earlier then, by the most that was
    needed so far. And some give two frames one time, or one that is a little behind.
    """

    __slots__ = ("_early_ms", "_last_ms")

    def __init__(self) -> None:
        self._early_ms = 0
        self._last_ms: dict[int, int] = {}  # by type

    def applied(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return a group with the times at which its frames are decoded; they are shown when they were."""
        infos = [inspect(unit.type_id, unit.payload) for unit in units]
        early = -min((info.composition_ms or 0 for info in infos if info.packet == "coded"), default=0)
        if early <= _MOST_EARLY_MS:
            self._early_ms = max(self._early_ms, early)
        made = []
        for unit, info in zip(units, infos, strict=True):
            if unit.message_class in _FRAMES and not info.multitrack:
                room_ms = unit.at_ms - self._last_ms.get(unit.type_id, -_MARGIN_MS) - 1
                by_ms = min(self._early_ms, room_ms) if is_composed(unit.payload, info) else min(room_ms, 0)
                unit = _earlier(unit, info, by_ms) if by_ms else unit  # noqa: PLW2901 - the same frame
                self._last_ms[unit.type_id] = unit.at_ms
            made.append(unit)
        return made


def _earlier(unit: Unit, info: MediaInfo, by_ms: int) -> Unit:
    """Return a frame that is decoded earlier, or later for a negative `by_ms`, and shown at its time where it can."""
    payload, at_ms = unit.payload, unit.at_ms - by_ms
    if is_composed(payload, info):
        composed = with_composition(payload, info, (info.composition_ms or 0) + by_ms)
        return unit if composed is None else _with(unit, at_ms, composed)
    return _with(unit, at_ms, payload)


def _with(unit: Unit, at_ms: int, payload: bytes) -> Unit:
    return unit._replace(at_ms=at_ms, payload=payload)


def _copied(
    read: Any,
    target: io.BytesIO,
    offset_ms: int,
    form: str,
    options: dict[str, str],
    left_out: set[str],
    last: tuple[int, int],
) -> int:
    streams = [item for item in read.streams if item.type in {"audio", "video"}]
    if not streams:
        return 0
    count = 0
    with av.open(target, "w", format=form, options=options) as write:
        tracks = {item.index: write.add_stream_from_template(item, opaque=True) for item in streams}
        for item in streams:
            if item.codec_context.name == "hevc" and form == "mp4":
                tracks[item.index].codec_context.codec_tag = "hvc1"  # players of Apple take no "hev1"
        for packet in read.demux(streams):
            if packet.dts is None or packet.pts is None:
                continue  # the end
            if packet.stream.type in left_out:
                continue
            if last[1] and packet.stream.type == "video" and packet.dts == last[0]:
                packet.duration = last[1]
            packet.dts += offset_ms  # FLV counts in ms
            packet.pts += offset_ms
            packet.stream = tracks[packet.stream.index]
            write.mux(packet)
            count += 1
    return count


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 0
    while at + _BOX_HEADER_BYTES <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 8], at, size
        at += max(size, _BOX_HEADER_BYTES)


class Mp4Form:
    """One fragmented MP4 file: readable up to its last whole fragment, whatever ended it."""

    suffix: Final = MP4
    by_groups: Final = True

    def __init__(self) -> None:
        self._zero_ms: int | None = None
        self._times: Final = DecodeTimes()
        self._known: dict[int, Unit] = {}  # a frame of each track
        self._init = b""
        self._fragments = 0

    def add(self, headers: Sequence[tuple[int, bytes]], units: Sequence[Unit]) -> bytes | None:
        """Return the octets that a group is; None: its tracks are others than those of the file."""
        if self._zero_ms is None:
            self._zero_ms = min(unit.at_ms for unit in units)
        frames = last_frames(units)
        known = [unit for type_id, unit in self._known.items() if type_id not in frames]
        made = fragment(headers, self._times.applied(units), self._zero_ms, self._fragments + 1, known)
        if not made.body:
            return b""
        if self._init and made.init != self._init:
            return None
        self._fragments += 1
        self._known |= frames
        if self._init:
            return made.body
        self._init = made.init
        return made.init + made.body

    def lengths(self, media_s: float, size_bytes: int) -> dict[int, bytes]:
        """Return nothing: players add up fragments."""
        del media_s, size_bytes
        return {}
