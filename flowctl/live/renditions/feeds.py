"""What a set gets of a stream: a stream is one member, a publication with several tracks is one member per track."""

from __future__ import annotations

from typing import Final

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.live.renditions.renditionset import Rendition, RenditionSet
from flowctl.live.stream import StreamFeed
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.media.media import MediaInfo, inspect
from flowctl.wire.rtmp.media.tracks import split_tracks
from flowctl.wire.rtmp.wire import TYPE_DATA_AMF0, TYPE_VIDEO

_OF_ONE_TRACK: Final = frozenset({"width", "height", "videodatarate", "framerate", "videocodecid"})
"""Values of metadata that are of the pictures of one track: of the first, where the publisher says no more."""
_TRACK_MAPS: Final = ("videoTrackIdInfoMap", "audioTrackIdInfoMap")
"""Objects by track id in the metadata of a multitrack publication (Enhanced RTMP v2, "Enhanced onMetaData")."""
_REWRITTEN: Final = AmfLimits(nodes=256)
"""What metadata may hold that is written anew for each track: that of OBS with ten tracks has some 100 values."""


class MemberFeed(StreamFeed):
    """A stream that is one rendition; of several tracks, the first."""

    def __init__(self, renditions: RenditionSet, rendition: Rendition) -> None:
        self.renditions: Final = renditions
        self.rendition: Final = rendition
        self.as_published = bool(rendition.expected)
        self.sees_jumps = rendition.clock is not None

    def accept(self, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float) -> None:
        if info.multitrack:
            parts = [part.payload for part in split_tracks(type_id, payload) if not part.track]
            if not parts:
                return
            payload, info = parts[0], inspect(type_id, parts[0])
        self.renditions.accept(self.rendition, type_id, timestamp, payload, info, now)


class TrackFeed(StreamFeed):
    """A publication with several tracks, each of which is a rendition; the sound is that of the first sound track."""

    def __init__(self, renditions: RenditionSet) -> None:
        self.renditions: Final = renditions
        self.as_published = self.sees_jumps = False
        self._tracks: dict[int, Rendition] = {}
        self._metadata: bytes | None = None  # that the publisher sent last
        self._told: dict[int, tuple[int, int] | None] = {}  # tracks that were given it, with this size of pictures

    def accept(self, type_id: int, timestamp: int, payload: bytes, info: MediaInfo, now: float) -> None:
        if info.packet == "metadata" and info.kind == "data":
            if payload == self._metadata:
                return  # some encoders repeat it
            self._metadata = payload if type_id == TYPE_DATA_AMF0 else None
            self._told.clear()
            for track, rendition in self._tracks.items():
                self._tell_metadata(track, rendition, now)
            return
        # A track that is there twice is there once: else one message of 32 parts were 32 in each rendition.
        for track, plain in dict(split_tracks(type_id, payload)).items():
            self._accept_part(type_id, timestamp, track, plain, now)

    def _accept_part(self, type_id: int, timestamp: int, track: int, payload: bytes, now: float) -> None:
        info = inspect(type_id, payload)
        if type_id != TYPE_VIDEO:
            self.renditions.accept_common(track, type_id, timestamp, payload, info, now)
            return
        rendition = self._tracks.get(track)
        if rendition is None or rendition.forgotten:
            rendition = self.renditions.add(f"track{track}", track, now)
            if rendition is None:
                return
            self._tracks[track] = rendition
            self._told.pop(track, None)
        self.renditions.accept(rendition, type_id, timestamp, payload, info, now)
        if info.packet == "sequence_header":
            self._tell_metadata(track, rendition, now)

    def _tell_metadata(self, track: int, rendition: Rendition, now: float) -> None:
        """Give a rendition the metadata of the publication, with what is known of its own pictures."""
        if self._metadata is not None and (track not in self._told or self._told[track] != rendition.size):
            self._told[track] = rendition.size
            payload = metadata_of_track(self._metadata, track, rendition.size)
            self.renditions.accept(rendition, TYPE_DATA_AMF0, 0, payload, inspect(TYPE_DATA_AMF0, payload), now)


def metadata_of_track(payload: bytes, track: int, size: tuple[int, int] | None) -> bytes:
    """Return metadata of a publication as that of one of its tracks, whose pictures have the `size`, if known."""
    try:
        *names, values = amf0.decode(payload, _REWRITTEN) or [None]
    except RemoteProtocolError:
        return payload
    if not isinstance(values, dict):
        return payload
    own: object = values.get(_TRACK_MAPS[0])
    own = own.get(str(track)) if isinstance(own, dict) else None
    told = type(values)(values)
    for name in (*_TRACK_MAPS, *(_OF_ONE_TRACK if track else ())):
        told.pop(name, None)
    told |= {name: value for name, value in own.items() if name in _OF_ONE_TRACK} if isinstance(own, dict) else {}
    told |= {} if size is None else {"width": float(size[0]), "height": float(size[1])}
    try:
        return amf0.encode(*names, told)
    except LocalProtocolError:  # values that only AMF3 has
        return payload
