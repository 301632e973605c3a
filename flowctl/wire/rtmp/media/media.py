"""What an audio, video or data message is, read from its first octets and without decoding.

How it works: the body of an RTMP media message is the body of an FLV tag. Its first octets say the codec, whether it is
configuration or a frame, and for video whether decoding can start there. `inspect` reads them and answers with a
`MediaInfo`, whose `message_class` is what the drop policy goes by. Three layouts exist and all are read:

- classic FLV (Adobe FLV 10.1, annex E.4): codec number in the first octet; H.264 and AAC have a packet type after it;
- HEVC and AV1 as classic codec numbers 12 and 13, laid out like H.264, which Chinese cameras and delivery networks send
  (CDN-Union/H265, tencentyun/flv);
- Enhanced RTMP v1 and v2 (Veovera): FourCC instead of numbers, several tracks in a message, ModEx prefixes. It is read
  whether or not the publisher announced it in connect, because OBS does not.

`inspect` is called for every published message, so it copies nothing, looks at a bounded number of octets however long
the body is, and hands out shared immutable answers. It never raises, whatever the octets: a body that is too short or
contradicts itself is INTER (video), AUDIO or DATA, that is: pass it on, start nothing with it, cache nothing of it.
"""

from __future__ import annotations

import struct
from typing import Final

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.enhanced import (
    AUDIO_MALFORMED,
    VIDEO_COMMAND,
    VIDEO_MALFORMED,
    inspect_enhanced_audio,
    inspect_enhanced_video,
)
from flowctl.wire.rtmp.media.frames import (
    Body,
    MediaInfo,
    Packet,
    audio_info,
    classify_audio,
    classify_config,
    frame_class,
    read_composition_ms,
    video_info,
)
from flowctl.wire.rtmp.media.nal import is_open

__all__ = ["Body", "MediaInfo", "Packet", "inspect", "named_tracks", "refers_back"]

# Message type ids, Adobe RTMP 1.0 section 7.1; the same numbers are FLV tag types.
_TYPE_AUDIO, _TYPE_VIDEO = 8, 9

# FLV 10.1 E.4.3.1 CodecID; 8 and 9 are FFmpeg's (libavformat/flv.h), whose codec names are used where no FourCC exists.
_CLASSIC_VIDEO: Final = {2: "flv1", 3: "flashsv", 4: "vp6f", 5: "vp6a", 6: "flashsv2", 8: "h263", 9: "mpeg4"}
# These have a packet type and a composition time in front of the data (E.4.3.1 AVCVIDEOPACKET).
_PACKETISED_VIDEO: Final = {7: "avc1", 12: "hvc1", 13: "av01"}
# FLV 10.1 E.4.2.1 SoundFormat; 9 is the mark of Enhanced RTMP, 10 (AAC) has a packet type and is treated apart.
_CLASSIC_AUDIO: Final = {
    0: "pcm",
    1: "adpcm_swf",
    2: ".mp3",
    3: "pcm_le",
    4: "nellymoser",
    5: "nellymoser",
    6: "nellymoser",
    7: "pcm_alaw",
    8: "pcm_mulaw",
    11: "speex",
    14: ".mp3",
    15: "native",
}
_EX_AUDIO, _AAC = 9, 10
_COMMAND_FRAME: Final = 5
_UNDEFINED_PACKET_TYPE: Final = 15  # reserved in Enhanced RTMP as well

_VIDEO_EMPTY: Final = MediaInfo("video", MessageClass.INTER, "", "empty")
_AUDIO_SILENCE: Final = MediaInfo("audio", MessageClass.AUDIO, "", "silence")
_AAC_CODED: Final = audio_info("mp4a", MessageClass.AUDIO, "coded", None)
_DATA_METADATA: Final = MediaInfo("data", MessageClass.HEADER, "", "metadata")
_DATA_OTHER: Final = MediaInfo("data", MessageClass.DATA, "", "data")


def inspect(type_id: int, payload: Body) -> MediaInfo:
    """Return what a media message is. Looks at a bounded number of octets, copies none, raises on none of them.

    Source: Adobe FLV 10.1 annex E.4.2 to E.4.4; Enhanced RTMP v2, "Enhanced Audio" and "Enhanced Video".
    """
    if type_id == _TYPE_VIDEO:
        return _inspect_video(payload)
    if type_id == _TYPE_AUDIO:
        return _inspect_audio(payload)
    return _inspect_data(payload)


def refers_back(info: MediaInfo, payload: Body) -> bool:
    """Return whether pictures that follow a key frame may refer to ones before it: it begins an open GOP.

    Such pictures are shown before the key frame, so it has a composition time. Of a message with several tracks or a
    ModEx prefix this says no.
    """
    if not info.composition_ms or info.multitrack or len(payload) < 2:
        return False
    extended = payload[0] & 0x80
    if extended and payload[0] & 15 != 1:
        return False
    return is_open(info.codec, payload, 8 if extended else 5)


def _inspect_video(body: Body) -> MediaInfo:
    """Read a VIDEODATA body: frame type (4 bits) | codec (4), then for packetised codecs packet type and time."""
    size = len(body)
    if size < 2:
        # One octet may say "key frame", but with nothing behind it no viewer can start there.
        return VIDEO_MALFORMED if size else _VIDEO_EMPTY
    first = body[0]
    if first & 0x80:
        return inspect_enhanced_video(body, size)
    frame_type = first >> 4
    if frame_type == _COMMAND_FRAME:
        return VIDEO_COMMAND
    codec = _PACKETISED_VIDEO.get(first & 15)
    if codec is None:
        codec = _CLASSIC_VIDEO.get(first & 15, f"flv-{first & 15}")
        return video_info(codec, frame_class(codec, frame_type, body, 1, size), "coded", None)
    packet_type = body[1]
    if packet_type == 1 and size >= 5:
        composition_ms = read_composition_ms(body, 2)
        if size == 5:
            return video_info(codec, MessageClass.INTER, "empty", composition_ms)
        return video_info(codec, frame_class(codec, frame_type, body, 5, size), "coded", composition_ms)
    if packet_type == 0:
        # A header is one whatever its frame type says; DJI cameras repeat it every second (bluenviron/mediamtx #4116).
        return video_info(codec, *classify_config(codec, 5, size))
    if packet_type == 2:
        return video_info(codec, MessageClass.DATA, "sequence_end", None)
    return VIDEO_MALFORMED


def _inspect_audio(body: Body) -> MediaInfo:
    """Read an AUDIODATA body: sound format (4 bits) | rate, size, channels (4), for AAC a packet type."""
    size = len(body)
    if size == 0:
        # Enhanced RTMP v2 documents what Flash did: an empty audio message is a period of silence.
        return _AUDIO_SILENCE
    sound_format = body[0] >> 4
    if sound_format == _EX_AUDIO:
        return inspect_enhanced_audio(body, size)
    if sound_format == _AAC:
        if size < 2:
            return AUDIO_MALFORMED
        if body[1] == 1 and size > 2:
            return _AAC_CODED  # nearly every message of sound
        packet_type = body[1] if body[1] < 2 else _UNDEFINED_PACKET_TYPE
        return audio_info("mp4a", *classify_audio("mp4a", packet_type, 0, body, 2, size))
    codec = _CLASSIC_AUDIO.get(sound_format, f"flv-{sound_format}")
    return audio_info(codec, MessageClass.AUDIO, "coded" if size > 1 else "empty", None)


def _amf_string_prefixes(text: bytes) -> tuple[bytes, bytes]:
    """Return `text` as an AMF0 string (marker 2, length in 2 octets) and as an AMF3 one (marker 6, length * 2 + 1)."""
    return (b"\x02" + struct.pack(">H", len(text)) + text, bytes((6, len(text) << 1 | 1)) + text)


_ON_METADATA: Final = _amf_string_prefixes(b"onMetaData")
_SET_DATA_FRAME: Final = _amf_string_prefixes(b"@setDataFrame")
_NAMES_OF_TRACKS: Final = {  # in AMF0; what stands behind is the marker of a value
    "audio": (b"\0\x0caudiocodecid", b"\0\x08hasAudio"),
    "video": (b"\0\x0cvideocodecid", b"\0\x08hasVideo"),
}
_NUMBER, _TRUE, _STRING = b"\0", b"\1\1", b"\2"
_DATA_PREFIX_OCTETS: Final = 48  # both names with their markers, the octets in front of them, the marker of the value


def _inspect_data(body: Body) -> MediaInfo:
    """Tell onMetaData, with or without @setDataFrame before it, from other data messages; a value must follow.

    An AMF3 data message (type 15) starts with an octet 0 and goes on in AMF0 or, behind marker 0x11, in AMF3; encoders
    send that octet before AMF0 as well (ossrs/srs #681), or another number in its place. FFmpeg's four-octet timecodes
    (ossrs/srs #3803) and messages that start with no string at all (ossrs/srs #2731) are DATA like everything else.
    """
    head = bytes(body[:_DATA_PREFIX_OCTETS])
    head = (head[1:] if head[1:3] == b"\x02\x00" else head.removeprefix(b"\x00")).removeprefix(b"\x11")
    for prefix in _SET_DATA_FRAME:
        if head.startswith(prefix):
            head = head.removeprefix(prefix).removeprefix(b"\x11")
    for prefix in _ON_METADATA:
        if head.startswith(prefix):
            return _DATA_METADATA if len(head) > len(prefix) else _DATA_OTHER
    return _DATA_OTHER


def named_tracks(metadata: bytes) -> frozenset[str]:
    """Return which of ``audio`` and ``video`` onMetaData says that there are; a codec 0 or "" is none.

    The names are looked for and nothing is parsed: it is asked for whatever a publisher sends.
    """
    return frozenset(kind for kind, names in _NAMES_OF_TRACKS.items() if any(_is_set(metadata, name) for name in names))


def _is_set(metadata: bytes, name: bytes) -> bool:
    _, _, behind = metadata.partition(name)
    value = behind[:9]
    if value[:1] == _NUMBER:
        return len(value) == 9 and any(value)
    return value[:2] == _TRUE or (value[:1] == _STRING and any(value[1:3]))
