"""What tests of recordings share: recorders without threads and clocks, and what is in the files they made."""

from __future__ import annotations

import errno
import io
import zlib
from pathlib import Path

from flowctl.flv import FlvReader
from flowctl.live.remux.files import NameTemplate, PartFile
from flowctl.live.remux.flvform import FlvForm
from flowctl.live.remux.intake import MessageTaken, PublicationBegan, PublicationEnded
from flowctl.live.remux.recorder import RecordSettings, StreamRecorder
from flowctl.testing import ManualClock
from flowctl.wire.media.synthetic import SyntheticSource


class Disk:
    """A disk of a given size, for files of recordings."""

    def __init__(self, free_bytes=1 << 40):
        self.free_bytes = free_bytes

    def open(self, path):
        return DiskFile(path, self)


class DiskFile(PartFile):
    """A file on it: what does not fit is refused, in the middle of an append, as a full disk does it."""

    def __init__(self, path, disk):
        super().__init__(path)
        self._disk = disk

    def append(self, data):
        if len(data) > self._disk.free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.free_bytes -= len(data)
        super().append(data)


class Bench:
    """A recorder that is fed by hand."""

    def __init__(self, folder, make_form=FlvForm, *, disk=None, name="{app}-{stream}", app="live", **settings):
        self.folder = Path(folder)
        self.finished = []
        self.clock = ManualClock()
        self.disk = disk or Disk()
        self.recorder = StreamRecorder(
            app,
            "room",
            RecordSettings(folder=self.folder, template=NameTemplate(name), **settings),
            make_form,
            on_finished=self.finished.append,
            open_file=self.disk.open,
            clock=self.clock,
            wall=lambda: 1_800_000_000.5,
        )

    def feed(self, tags, *, at_once=10):
        items = [MessageTaken(tag.type_id, tag.timestamp, tag.payload) for tag in tags]
        for begin in range(0, len(items), at_once):
            self.recorder.work(items[begin : begin + at_once])

    def begin(self):
        self.recorder.work([PublicationBegan()])

    def end(self):
        self.recorder.work([PublicationEnded("the stream ended")])

    @property
    def files(self):
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    @property
    def figures(self):
        return self.recorder.statistics()


def tags_of(path):
    """Return the tags of a file; it has to be whole."""
    reader = FlvReader(check_back_pointers=True)
    tags = reader.feed(Path(path).read_bytes())
    reader.finish()
    assert not reader._buffer
    return tags


def source(seconds, **settings):
    """Return the tags of a synthetic stream, with a key frame each second and frames of some hundred octets."""
    options = {"video_bit_rate": 100_000, "fps": 10, "key_interval_s": 1.0} | settings
    tags = []
    for tag in SyntheticSource(**options):
        if tag.timestamp >= seconds * 1000:
            return tags
        tags.append(tag)
    return tags


def moved(tags, by_ms):
    return [tag._replace(timestamp=(tag.timestamp + by_ms) & 0xFFFFFFFF) for tag in tags]


def pictures_of(data, form=None):
    """Return (time in s, checksum) of each picture and of each frame of sound that a decoder gives, in order."""
    import av

    found = {"video": [], "audio": []}
    for kind, frames in found.items():
        opened = av.open(io.BytesIO(data) if isinstance(data, bytes) else str(data), format=form)
        with opened as container:
            if any(stream.type == kind for stream in container.streams):
                for frame in container.decode(**{kind: 0}):
                    frames.append((round(float(frame.time), 2), zlib.crc32(frame.to_ndarray().tobytes())))
    return found


def checksums(found):
    return {kind: [checksum for _, checksum in frames] for kind, frames in found.items()}
