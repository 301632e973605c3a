"""What the data of one track is: configuration, key frame, frame, disposable frame, or something beside the frames.

How it works: the layouts of classic FLV and of Enhanced RTMP differ in front of this point and agree behind it: a
codec, a packet type, for video a frame type, and a range of octets. Those four give the message class. The frame type
is the publisher's word; H.264 and HEVC pictures are also looked at (see `wire.rtmp.media.nal`), because encoders
do not mark non-reference pictures as disposable and a drop policy wants to know them.
"""

from __future__ import annotations

import functools
from typing import Final, Literal, NamedTuple, TypeAlias

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.nal import AVC_VERDICTS, HEVC_VERDICTS, survey

Body: TypeAlias = bytes | memoryview
Kind: TypeAlias = Literal["audio", "video", "data"]
Packet: TypeAlias = Literal[
    "sequence_header",  # codec configuration; sticky
    "mpeg2ts_sequence_header",  # codec configuration in MPEG-2 TS form; takes the place of the one above
    "metadata",  # onMetaData of a data message, colour information of a video message; sticky
    "channels",  # Enhanced RTMP audio channel layout; sticky
    "coded",  # a frame
    "sequence_end",  # the track ends or pauses; not sticky
    "command",  # video info/command frame (start or end of a client-side seek)
    "data",  # a data message that is not onMetaData: cue points, captions, timecodes
    "silence",  # audio message of 0 octets: Enhanced RTMP v2 documents it as "a period of silence"
    "empty",  # a frame header with no frame behind it
    "unknown",  # a packet type no specification defines
    "malformed",  # too short for its own header, or lengths that contradict each other
]
StickyKey: TypeAlias = tuple[Kind, str, tuple[int, ...]]


class MediaInfo(NamedTuple):
    """What one message is. Immutable and shared between equal messages: compare it, never rely on its identity."""

    kind: Kind  # ``audio``, ``video`` or ``data``
    message_class: MessageClass
    # FourCC as text (``avc1``, ``hvc1``, ``av01``, ``vp09``, ``mp4a``, ``.mp3``, ``Opus``, ``fLaC``, ``ac-3`` and so
    # on); classic codecs without a FourCC in Enhanced RTMP have the name FFmpeg gives them. An unknown FourCC is given
    # as it is when printable, else in hexadecimal; empty when the body does not say.
    codec: str
    packet: Packet
    # presentation minus decoding time in milliseconds, -2^23 to 2^23-1, negative with some B-frame encoders; None when
    # the packet does not carry one.
    composition_ms: int | None = None
    # ids of all tracks in the message, in their order. Several only with Enhanced RTMP v2 multitrack.
    tracks: tuple[int, ...] = (0,)
    codecs: tuple[str, ...] = ()
    multitrack: bool = False  # whether the message uses the multitrack form, even for one track

    @property
    def sticky_key(self) -> StickyKey | None:
        """The place this message takes in a cache of headers, or None when it is no header.

        A newer header with an equal key replaces the older one. The codec is no part of it: a publisher that changes
        from H.264 to HEVC replaces its configuration. Headers are to be re-sent in the order in which they came,
        because one for tracks (0, 1) and a later one for track 0 are both kept.
        """
        if self.message_class is not MessageClass.HEADER:
            return None
        slot = "sequence_header" if self.packet == "mpeg2ts_sequence_header" else self.packet
        return (self.kind, slot, self.tracks)


# Bound once: looking up an attribute of an Enum class costs as much as the rest of the quick path together.
_HEADER, _KEY, _INTER = MessageClass.HEADER, MessageClass.KEY, MessageClass.INTER
_DISPOSABLE, _AUDIO, _DATA = MessageClass.DISPOSABLE, MessageClass.AUDIO, MessageClass.DATA

_ANSWERS_KEPT: Final = 1024  # one per codec, class and composition time; a stream with B-frames uses fewer than ten

_FOURCC_NAMES: Final = {
    int.from_bytes(name.encode(), "big"): name
    for name in ("vp08", "vp09", "av01", "avc1", "hvc1", "vvc1", "ac-3", "ec-3", "Opus", ".mp3", "fLaC", "mp4a")
}
_NAL_VERDICTS: Final = {"avc1": AVC_VERDICTS, "hvc1": HEVC_VERDICTS}
_WITH_COMPOSITION: Final = frozenset({"avc1", "hvc1", "vvc1"})
# Fewest octets a configuration can have; with less it is a truncated one. avcC: ISO/IEC 14496-15 5.3.3.1 without
# parameter sets; hvcC: 8.3.3.1 without arrays; AudioSpecificConfig: ISO/IEC 14496-3 1.6.2.1. Opus may be empty by
# Enhanced RTMP v2; AC-3, E-AC-3 and MP3 describe themselves in every frame. Everything else: at least something.
_FEWEST_CONFIG_OCTETS: Final = {"avc1": 7, "hvc1": 23, "mp4a": 2, "Opus": 0, "ac-3": 0, "ec-3": 0, ".mp3": 0}

FrameFacts: TypeAlias = tuple[MessageClass, Packet, int | None]
"""Class, packet and composition time in milliseconds of one track's data."""

_VIDEO_MALFORMED: Final[FrameFacts] = (_INTER, "malformed", None)
_AUDIO_MALFORMED: Final[FrameFacts] = (_AUDIO, "malformed", None)


@functools.lru_cache(maxsize=_ANSWERS_KEPT)
def video_info(codec: str, message_class: MessageClass, packet: Packet, composition_ms: int | None) -> MediaInfo:
    """Return the answer for a video message of one track; remembered, since the same few are given again and again."""
    return MediaInfo("video", message_class, codec, packet, composition_ms=composition_ms, codecs=(codec,))


@functools.lru_cache(maxsize=_ANSWERS_KEPT)
def audio_info(codec: str, message_class: MessageClass, packet: Packet, _composition_ms: int | None) -> MediaInfo:
    return MediaInfo("audio", message_class, codec, packet, codecs=(codec,))


def codec_name(fourcc: int) -> str:
    """Return a FourCC (32 bits, first letter highest) as text, in hexadecimal when it is not printable ASCII."""
    name = _FOURCC_NAMES.get(fourcc)
    if name is not None:
        return name
    # Four octets of the peer's choice that end up in logs and metrics: nothing unprintable is let through.
    text = fourcc.to_bytes(4, "big").decode("latin-1")
    return text if text.isascii() and text.isprintable() else f"0x{fourcc:08x}"


def frame_class(codec: str, frame_type: int, body: Body, start: int, end: int) -> MessageClass:
    """Return the class of the video frame in ``body[start:end]``, at least one octet, by its type and its NAL units."""
    if frame_type == 3:
        # "Disposable inter frame": the specification means H.263 only, but it is the publisher's own word.
        return _DISPOSABLE
    if frame_type > 4:
        return _INTER
    verdicts = _NAL_VERDICTS.get(codec)
    if verdicts is None:
        marked = frame_type != 2 and (frame_type != 0 or is_key_frame(codec, body, start, end))
        return _KEY if marked else _INTER
    seen = survey(body, start, end, verdicts)
    if seen is None:
        # Empty NAL units or supplemental information alone: neither a place to start at nor known to be unneeded.
        return _INTER
    # An IDR picture in a message not marked as key frame is KEY: a viewer can start there. The mark "key" stands
    # whatever the slices are, because periodic intra refresh (x264 --intra-refresh) marks recovery points that way, and
    # whatever the lengths are, because with length fields of 1 or 2 octets nobody could ever start otherwise.
    return seen if frame_type in (0, 2) else _KEY


def read_composition_ms(body: Body, position: int) -> int:
    value = body[position] << 16 | body[position + 1] << 8 | body[position + 2]
    return value - 0x1000000 if value & 0x800000 else value


def classify_config(codec: str, start: int, end: int, packet: Packet = "sequence_header") -> FrameFacts:
    """Return the verdict on a video configuration in ``body[start:end]``: HEADER when it can be whole.

    A truncated one is passed on but is no HEADER: a cache would give it to every later viewer in place of the good one.
    """
    if end - start < _FEWEST_CONFIG_OCTETS.get(codec, 1):
        return _VIDEO_MALFORMED
    return (_HEADER, packet, None)


def classify_video(codec: str, packet_type: int, frame_type: int, body: Body, start: int, end: int) -> FrameFacts:
    if packet_type in (1, 3):
        composition_ms: int | None = None
        if codec in _WITH_COMPOSITION:
            composition_ms = 0  # implied by CodedFramesX (3)
            if packet_type == 1:
                if end - start < 3:
                    return _VIDEO_MALFORMED
                composition_ms = read_composition_ms(body, start)
                start += 3
        if start >= end:
            return (_INTER, "empty", composition_ms)
        return (frame_class(codec, frame_type, body, start, end), "coded", composition_ms)
    if packet_type == 0:
        return classify_config(codec, start, end)
    if packet_type == 5:
        return classify_config(codec, start, end, "mpeg2ts_sequence_header")
    if packet_type == 4:
        # Colour information for the pictures that follow; each one replaces the last, so the newest is re-sent.
        return (_HEADER, "metadata", None) if start < end else _VIDEO_MALFORMED
    # The end of a sequence must not take the place of the configuration in a cache of headers, so it is no HEADER.
    return (_DATA, "sequence_end", None) if packet_type == 2 else (_INTER, "unknown", None)


def classify_audio(codec: str, packet_type: int, _frame_type: int, _body: Body, start: int, end: int) -> FrameFacts:
    """Return the verdict on the Enhanced RTMP audio data in ``body[start:end]``; arguments as `classify_video`.

    Audio has no frame type and no composition time; classic AAC has the same packet types 0 and 1.
    """
    if packet_type == 1:
        return (_AUDIO, "coded" if start < end else "empty", None)
    if packet_type == 0:
        if end - start < _FEWEST_CONFIG_OCTETS.get(codec, 1):
            return _AUDIO_MALFORMED
        return (_HEADER, "sequence_header", None)
    if packet_type == 4:
        # Channel order and channel count take an octet each.
        return (_HEADER, "channels", None) if end - start >= 2 else _AUDIO_MALFORMED
    # The end of a sequence means "no less than silence" (Enhanced RTMP v2): it keeps its place among the audio.
    return (_AUDIO, "sequence_end" if packet_type == 2 else "unknown", None)


_MAX_OBUS: Final = 8  # looked at for the first frame: delimiter, sequence header, metadata and padding come before it
_MAX_SIZE_OCTETS: Final = 8  # leb128() reads at most 8 octets (AV1 4.10.5)

_OBU_FRAME_HEADER: Final = 3
_OBU_FRAME: Final = 6


def is_key_frame(codec: str, body: bytes | memoryview, start: int, end: int) -> bool:
    """Return whether the unmarked frame in ``body[start:end]``, at least one octet, is a key frame; in doubt it is not.

    gortmplib, and so MediaMTX, leaves the frame type 0 (reserved) for FourCC codecs: to believe it would mean a stream
    that nobody could join. `survey` knows H.264 and HEVC, this the rest.
    Source: RFC 6386 9.1 (VP8); VP9 bitstream specification 6.2; AV1 bitstream specification 5.3, 5.9.2.
    """
    if codec == "av01":
        return _is_av1_key_frame(body, start, end)
    first = body[start]
    if codec == "vp08":
        return first & 1 == 0
    if codec != "vp09" or first >> 6 != 2:
        return False
    # Marker 10, two bits of profile; profile 3 has a reserved bit after it. Then show_existing_frame, which means that
    # there is no frame here, and frame_type: both have to be 0.
    two_bits = first >> 1 if first & 0x30 == 0x30 else first >> 2
    return two_bits & 3 == 0


def _is_av1_key_frame(body: bytes | memoryview, start: int, end: int) -> bool:
    """Find the first frame of the temporal unit and look at its first four bits."""
    at = start
    for _ in range(_MAX_OBUS):
        if at >= end:
            return False
        # Forbidden bit, type (4), extension flag, has-size flag, reserved bit.
        obu = body[at]
        at += 2 if obu & 4 else 1
        size = end - at
        if obu & 2:
            size, at = _read_leb128(body, at, end)
        if size < 0 or size > end - at:
            return False
        if obu >> 3 & 15 in (_OBU_FRAME_HEADER, _OBU_FRAME):
            # show_existing_frame 0, frame_type 00 (key frame), show_frame 1. A key frame that is not shown is no place
            # to start at: the pictures shown next may refer to earlier ones.
            return size > 0 and body[at] >> 4 == 1
        at += size
    return False


def _read_leb128(body: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and the offset behind it; the number is -1 when it does not end in time."""
    value = 0
    for place in range(min(_MAX_SIZE_OCTETS, end - at)):
        octet = body[at + place]
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return (value, at + place + 1)
    return (-1, at)
