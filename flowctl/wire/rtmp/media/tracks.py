"""Multitrack messages of Enhanced RTMP v2, taken apart into plain messages of one track each, and put together.

How it works: `split_tracks` gives each track's data the header that a message of one track has, so that what was one
track of several plays in a player that knows nothing of tracks. Where classic FLV has the codec (H.264, AAC, MP3) that
is the classic header, which every player knows; else that of Enhanced RTMP without ModEx prefixes, whose nanoseconds
are less than the clock of RTMP can say. `wrap_track` is the way back, for publishers.

Octets are the peer's: no length is believed, nothing raises, and each track's data is copied once.

Source: Enhanced RTMP v2 (Veovera), "Enhanced Audio" and "Enhanced Video"; Adobe FLV 10.1 annex E.4.2 and E.4.3.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.enhanced import (
    AUDIO_MULTITRACK,
    COMMAND_FRAME,
    VIDEO_METADATA,
    VIDEO_MULTITRACK,
    find_tracks,
    read_fourcc,
    read_packet_type,
)
from flowctl.wire.rtmp.media.frames import classify_audio, classify_video, codec_name
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO

_CLASSIC_AVC: Final = 7
_CLASSIC_AVC_PACKETS: Final = {0: 0, 1: 1, 2: 2, 3: 1}
"""Packet types of Enhanced RTMP that classic H.264 has as well; colour information (4) is not among them."""
_CLASSIC_VIDEO: Final = {_CLASSIC_AVC: b"avc1", 12: b"hvc1", 13: b"av01"}
_CLASSIC_AUDIO: Final = {2: b".mp3", 10: b"mp4a", 14: b".mp3"}
_AAC: Final = 0xAF
"""First octet of every AAC message, whatever its rate and channels are (FLV 10.1 E.4.2.1)."""
_MP3: Final = 0x2F
"""First octet of an MP3 message; its rate and channels are in each frame, which is what players go by."""
_EX_VIDEO, _EX_AUDIO = 0x80, 0x90
_SEQUENCE_START, _CODED_FRAMES, _SEQUENCE_END = 0, 1, 2
_NO_COMPOSITION: Final = b"\0\0\0"


class TrackMessage(NamedTuple):
    """What one message says of one track."""

    track: int  # 0 to 255; 0 is the default track, and that of every message without tracks
    payload: bytes  # body of an audio or video message of one track


def split_tracks(type_id: int, payload: bytes) -> list[TrackMessage]:
    """Return the plain message of each track in an RTMP message, in their order.

    A message of one track is track 0; classic ones, and what is neither audio nor video, come back as they are.
    Left out is what no player of one track could read: command frames, colour information of H.264, channel layout and
    end of AAC, and what `inspect` calls malformed or unknown.
    """
    size = len(payload)
    video = type_id == TYPE_VIDEO
    if not size or not (payload[0] & _EX_VIDEO if video else type_id == TYPE_AUDIO and payload[0] >> 4 == 9):
        return [TrackMessage(0, payload)]
    frame_type = payload[0] >> 4 & 7 if video else 0
    multitrack = VIDEO_MULTITRACK if video else AUDIO_MULTITRACK
    packet_type, position = read_packet_type(payload, size)
    if frame_type == COMMAND_FRAME and packet_type != VIDEO_METADATA:
        return []
    if packet_type == multitrack:
        packet_type, ranges = find_tracks(payload, position, size, multitrack)
    elif position + 4 <= size:
        ranges = [(0, codec_name(read_fourcc(payload, position)[0]), position + 4, size)]
    else:
        return []
    if packet_type < 0:
        return []
    found: list[TrackMessage] = []
    for track, codec, start, end in ranges:
        head = _head(payload, codec, packet_type, start, end, frame_type if video else None)
        if head:
            whole = len(head) == start and payload.startswith(head)
            plain = payload if whole else b"".join((head, memoryview(payload)[start:end]))
            found.append(TrackMessage(track, plain))
    return found


def _head(payload: bytes, codec: str, packet_type: int, start: int, end: int, frame_type: int | None) -> bytes:
    """Return what stands before the data of one track in a plain message; empty: there is none.

    `frame_type` is None for sound.
    """
    fourcc = codec.encode() if len(codec) == 4 else bytes.fromhex(codec[2:])  # see `codec_name`
    if frame_type is None:
        if classify_audio(codec, packet_type, 0, payload, start, end)[1] in ("malformed", "unknown"):
            return b""
        if codec == "mp4a":
            return bytes((_AAC, packet_type)) if packet_type in (_SEQUENCE_START, _CODED_FRAMES) else b""
        if codec == ".mp3":
            return bytes((_MP3,)) if packet_type == _CODED_FRAMES else b""
        return bytes((_EX_AUDIO | packet_type,)) + fourcc
    message_class, packet, _ = classify_video(codec, packet_type, frame_type, payload, start, end)
    if packet in ("malformed", "unknown"):
        return b""
    if packet_type == VIDEO_METADATA:
        frame_type = COMMAND_FRAME  # it has no meaning here, but FFmpeg reads no other
    elif frame_type == 0:  # gortmplib marks nothing, and players go by the mark
        frame_type = 1 if message_class in (MessageClass.KEY, MessageClass.HEADER) else 2
    if codec != "avc1":
        return bytes((_EX_VIDEO | frame_type << 4 | packet_type,)) + fourcc
    classic = _CLASSIC_AVC_PACKETS.get(packet_type)
    if classic is None:
        return b""
    head = bytes((frame_type << 4 | _CLASSIC_AVC, classic))
    return head if packet_type == _CODED_FRAMES else head + _NO_COMPOSITION


def wrap_track(type_id: int, track: int, payload: bytes) -> bytes | None:
    """Return a message of one track as one of `track` (0 to 255) in a multitrack publication.

    That of track 0 stays as it is: servers that know nothing of tracks take it, and OBS and FFmpeg send it so. None:
    there is no such message, because the codec has no FourCC, it is no audio or video, or it is a multitrack one.
    """
    if not track:
        return payload
    found = unwrap_track(type_id, payload)
    if found is None:
        return None
    frame_type, packet_type, fourcc, data = found
    video = type_id == TYPE_VIDEO
    first = _EX_VIDEO | frame_type << 4 | VIDEO_MULTITRACK if video else _EX_AUDIO | AUDIO_MULTITRACK
    return b"".join((bytes((first, packet_type)), fourcc, bytes((track,)), data))


def unwrap_track(type_id: int, payload: bytes) -> tuple[int, int, bytes, memoryview] | None:
    """Return frame type, packet type, FourCC and data of a message of one track, as Enhanced RTMP has them."""
    size, view = len(payload), memoryview(payload)
    if size < 2 or type_id not in (TYPE_AUDIO, TYPE_VIDEO):
        return None
    video = type_id == TYPE_VIDEO
    frame_type = payload[0] >> 4 & 7
    command = video and frame_type == COMMAND_FRAME
    if payload[0] & _EX_VIDEO if video else payload[0] >> 4 == 9:
        packet_type, position = read_packet_type(payload, size)
        if packet_type in (-1, VIDEO_MULTITRACK if video else AUDIO_MULTITRACK) or position + 4 > size:
            return None
        if command:
            if packet_type != VIDEO_METADATA:
                return None
            frame_type = 1  # in a multitrack message, 5 would be a command
        return frame_type, packet_type, payload[position : position + 4], view[position + 4 :]
    if not video:
        fourcc = _CLASSIC_AUDIO.get(payload[0] >> 4)
        if fourcc is None:
            return None
        if fourcc == b".mp3":
            return frame_type, _CODED_FRAMES, fourcc, view[1:]
        return (frame_type, payload[1], fourcc, view[2:]) if payload[1] <= _CODED_FRAMES else None
    fourcc = _CLASSIC_VIDEO.get(payload[0] & 15)
    if command or fourcc is None or payload[1] > _SEQUENCE_END:
        return None
    composed = payload[1] == _CODED_FRAMES and fourcc != b"av01"
    return frame_type, payload[1], fourcc, view[2 if composed else 5 :]
