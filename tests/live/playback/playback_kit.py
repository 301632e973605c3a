"""What tests of playback share: a folder of recordings, written by recorders on a clock turned by hand."""

from __future__ import annotations

import io

import av
from remux_kit import source

from flowctl.core.flow.state import MessageClass
from flowctl.live.remux.files import NameTemplate
from flowctl.live.remux.flvform import FlvForm
from flowctl.live.remux.intake import MessageTaken, PublicationEnded
from flowctl.live.remux.recorder import RecordSettings, StreamRecorder
from flowctl.live.remux.retention import TEMPLATE
from flowctl.testing import ManualClock
from flowctl.wire.rtmp.media.media import inspect

BEGAN_S = 1_764_496_800.0  # 2025-11-30T10:00:00Z
FIRST = "20251130T100000.000Z.flv"


class Recorder:
    """Records a stream with a key frame each second, from a time on."""

    def __init__(self, folder, stream="room", make_form=FlvForm, *, began_s=BEGAN_S, **settings) -> None:
        self.wall, self.began_s = began_s, began_s
        settings = RecordSettings(folder=folder, template=NameTemplate(TEMPLATE), **settings)
        self.recorder = StreamRecorder("live", stream, settings, make_form, clock=ManualClock(), wall=lambda: self.wall)
        self.folder = folder / "live" / stream

    def feed(self, tags) -> None:
        for tag in tags:
            self.wall = self.began_s + tag.timestamp / 1000
            self.recorder.work([MessageTaken(tag.type_id, tag.timestamp, tag.payload)])

    def end(self) -> None:
        self.recorder.work([PublicationEnded("the stream ended")])

    def all(self, seconds, **options):
        self.feed(source(seconds, **options))
        self.end()
        return self


def frames(tags):
    """Return the frames among tags."""
    return [tag for tag in tags if inspect(tag.type_id, tag.payload).message_class is not MessageClass.HEADER]


def is_key(tag):
    return inspect(tag.type_id, tag.payload).message_class is MessageClass.KEY


def packets_of(data):
    """Return the packets of a file: of which track, when, and what is in it."""
    with av.open(io.BytesIO(data)) as file:
        return [
            (packet.stream.type, round(float(packet.dts * packet.time_base) * 1000), bytes(packet))
            for packet in file.demux()
            if packet.dts is not None
        ]
