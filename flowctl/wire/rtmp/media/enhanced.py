"""Enhanced RTMP v1 and v2 bodies: FourCC headers, ModEx prefixes, several tracks in one message.

How it works: the first octet says that the header is an extended one and which packet type follows. A packet type of
ModEx announces a prefix and, behind it, the next packet type; Multitrack announces a list of tracks that share packet
type and frame type. What remains is one range of octets per track, judged by `flowctl.wire.rtmp.media.frames`.

Every length is the peer's, so each is compared with the body before it is used, and lists are cut at a fixed count.

Source: Enhanced RTMP v2 (Veovera), "Enhanced Audio" and "Enhanced Video", tables of extended tag headers and bodies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.frames import (
    Body,
    FrameFacts,
    Kind,
    MediaInfo,
    audio_info,
    classify_audio,
    classify_video,
    codec_name,
    video_info,
)

MAX_TRACKS: Final = 32
"""Tracks looked at in one multitrack message; with more it is malformed. OBS has 10 video and 6 audio tracks."""

MAX_MODIFIERS: Final = 8
"""ModEx prefixes looked at in one message. One kind is defined; without a limit 10 MiB hold three million of them."""

VIDEO_MALFORMED: Final = MediaInfo("video", MessageClass.INTER, "", "malformed")
AUDIO_MALFORMED: Final = MediaInfo("audio", MessageClass.AUDIO, "", "malformed")

VIDEO_COMMAND: Final = MediaInfo("video", MessageClass.DATA, "", "command")
"""A command frame carries no picture: dropping it breaks nothing and no decoder waits for it, hence DATA."""

VIDEO_METADATA, VIDEO_MULTITRACK, AUDIO_MULTITRACK = 4, 6, 5
COMMAND_FRAME: Final = 5
_MOD_EX: Final = 7

_read_u16: Final = struct.Struct(">H").unpack_from
read_fourcc: Final = struct.Struct(">I").unpack_from

TrackRange: TypeAlias = tuple[int, str, int, int]
"""Id of a track, its codec, and where its data starts and ends."""
_Classify: TypeAlias = Callable[[str, int, int, Body, int, int], FrameFacts]


def inspect_enhanced_video(body: Body, size: int) -> MediaInfo:
    """Return what a video body with the extended header bit is.

    Shape: 1 | frame type (3 bits) | packet type (4), ModEx prefixes, FourCC (4 octets), data.
    """
    frame_type = body[0] >> 4 & 7
    packet_type, position = read_packet_type(body, size)
    if packet_type < 0:
        return VIDEO_MALFORMED
    if frame_type == COMMAND_FRAME and packet_type != VIDEO_METADATA:
        return VIDEO_COMMAND
    if packet_type == VIDEO_MULTITRACK:
        return _inspect_tracks("video", body, position, size, frame_type)
    if size < position + 4:
        return VIDEO_MALFORMED
    codec = codec_name(read_fourcc(body, position)[0])
    return video_info(codec, *classify_video(codec, packet_type, frame_type, body, position + 4, size))


def inspect_enhanced_audio(body: Body, size: int) -> MediaInfo:
    """Return what an audio body with sound format 9 is.

    Shape: 9 (4 bits) | packet type (4), ModEx prefixes, FourCC (4 octets), data.
    """
    packet_type, position = read_packet_type(body, size)
    if packet_type < 0:
        return AUDIO_MALFORMED
    if packet_type == AUDIO_MULTITRACK:
        return _inspect_tracks("audio", body, position, size, 0)
    if size < position + 4:
        return AUDIO_MALFORMED
    codec = codec_name(read_fourcc(body, position)[0])
    return audio_info(codec, *classify_audio(codec, packet_type, 0, body, position + 4, size))


def read_packet_type(body: Body, size: int) -> tuple[int, int]:
    """Return the packet type behind all ModEx prefixes, and the offset behind it; type -1 when they are broken.

    Shape of one: length - 1 (1 octet; 255: the next 2 hold length - 1), data, ModEx type (4 bits) | packet type (4).
    """
    packet_type, position = body[0] & 15, 1
    if packet_type != _MOD_EX:
        return packet_type, position
    for _ in range(MAX_MODIFIERS):
        if position >= size:
            break
        length = body[position] + 1
        position += 1
        if length == 256:
            if position + 2 > size:
                break
            length = _read_u16(body, position)[0] + 1
            position += 2
        after = position + length
        if after >= size:
            break
        packet_type, position = body[after] & 15, after + 1
        if packet_type != _MOD_EX:
            return packet_type, position
    return -1, 0


# Per kind: how a track is judged, the answer to a broken message, the packet type that may not occur inside, and the
# class of a message whose tracks disagree.
_TRACK_RULES: Final[dict[Kind, tuple[_Classify, MediaInfo, int, MessageClass]]] = {
    "video": (classify_video, VIDEO_MALFORMED, VIDEO_MULTITRACK, MessageClass.INTER),
    "audio": (classify_audio, AUDIO_MALFORMED, AUDIO_MULTITRACK, MessageClass.AUDIO),
}


def _inspect_tracks(kind: Kind, body: Body, position: int, size: int, frame_type: int) -> MediaInfo:
    """Return what a multitrack message is: KEY when its lowest track is, DISPOSABLE or HEADER only when every track is.

    The lowest is the one that players show first (0 is the default track), so it says where one can start.
    """
    classify, malformed, nested, otherwise = _TRACK_RULES[kind]
    packet_type, ranges = find_tracks(body, position, size, nested)
    if not ranges:
        return malformed
    verdicts = [classify(codec, packet_type, frame_type, body, start, end) for _, codec, start, end in ranges]
    message_class, packet, composition_ms = verdicts[0]
    if any(verdict[0] is not message_class for verdict in verdicts):
        lowest = min(zip(ranges, verdicts, strict=True), key=lambda pair: pair[0][0])[1][0]
        message_class = lowest if lowest is MessageClass.KEY else otherwise
        packet = next((verdict[1] for verdict in verdicts if verdict[1] == "malformed"), packet)
    return MediaInfo(
        kind=kind,
        message_class=message_class,
        codec=ranges[0][1],
        packet=packet,
        composition_ms=composition_ms,
        tracks=tuple(track for track, _, _, _ in ranges),
        codecs=tuple(codec for _, codec, _, _ in ranges),
        multitrack=True,
    )


def find_tracks(body: Body, position: int, size: int, nested: int) -> tuple[int, list[TrackRange]]:
    """Return the packet type of all tracks, and where each one's data is.

    No track: a length does not fit, they are too many, or the packet type is `nested`, that of multitrack itself.

    Shape: form (4 bits) | packet type (4), then for form 0 (one track) FourCC, id, data; for form 1 (many) FourCC and
    per track id, size (3 octets), data; for form 2 (many codecs) per track FourCC, id, size, data.
    """
    if position >= size:
        return -1, []
    form, packet_type = body[position] >> 4, body[position] & 15
    if form > 2 or packet_type in (nested, _MOD_EX):
        return -1, []
    return packet_type, _track_ranges(body, position + 1, size, form)


def _track_ranges(body: Body, position: int, size: int, form: int) -> list[TrackRange]:
    codec = ""
    if form < 2:
        if position + 4 > size:
            return []
        codec = codec_name(read_fourcc(body, position)[0])
        position += 4
    head_octets = (1, 4, 8)[form]
    ranges: list[TrackRange] = []
    while position < size:
        start = position + head_octets
        if start > size or len(ranges) == MAX_TRACKS:
            return []
        if form == 2:
            codec = codec_name(read_fourcc(body, position)[0])
        if form == 0:
            track, end = body[start - 1], size
        else:
            track = body[start - 4]
            end = start + (body[start - 3] << 16 | body[start - 2] << 8 | body[start - 1])
        if end > size:
            return []
        ranges.append((track, codec, start, end))
        position = end
    return ranges
