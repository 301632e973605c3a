"""The answer of `flowctl.wire.rtmp.media.media.inspect`: what one audio, video or data message is."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from flowctl.core.flow.state import MessageClass

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
    track: int = 0  # id of the first (usually the only) track; 0, the default track, without multitrack
    # presentation minus decoding time in milliseconds, -2^23 to 2^23-1, negative with some B-frame encoders; None when
    # the packet does not carry one.
    composition_ms: int | None = None
    # ids of all tracks in the message, in their order. Several only with Enhanced RTMP v2 multitrack.
    tracks: tuple[int, ...] = (0,)
    codecs: tuple[str, ...] = ()
    multitrack: bool = False  # whether the message uses the multitrack form, even for one track
    nano_offset_ns: int = 0  # what ModEx adds to the timestamp, 0 to 999,999 nanoseconds

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
