"""The process that writes what a server's settings say of its streams: recordings and HLS.

How it works. Lines on a socket say which streams there are, and where (`flowctl.live.cluster.media.keeper`). A stream
is played on one connection, and each recording, and the HLS of each stream, is written on a thread of its own, so that
a disk that is slow for one costs no other one anything. What all hold has a limit (`StreamMemory`). A stream that has
gone is kept for some seconds: a publisher that comes back goes on in the same playlist. What cannot begin, because
another process still writes it as in a rolling restart, or since others have the places (`Places`), is tried again;
until then its row says why.

The end of the socket is the end of the server: files are finished then. Signals end nothing, since systemd and
terminals send them to the server and to this process at once, and the server has more to send.

Another thread finishes the recordings that a process before has left behind, and removes those that are too old.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, TypeAlias

import structlog

from flowctl import log
from flowctl.core.server.heap import use_few_heaps
from flowctl.errors import ClosedError, FlowctlError, LocalProtocolError
from flowctl.live.cluster.follow import FollowState, Source, StreamFollower
from flowctl.live.cluster.media.order import RENDITION, MediaProcessConfig, StreamOrder
from flowctl.live.cluster.workers.child import serve_orders
from flowctl.live.remux.files import NameTemplate, recover
from flowctl.live.remux.flvform import FlvForm, whole_bytes
from flowctl.live.remux.intake import BACKOFF, HOLD_S, MESSAGE_BYTES
from flowctl.live.remux.playlist import AWAY_S
from flowctl.live.remux.recorder import RecordSettings, StreamRecorder
from flowctl.live.remux.retention import RECORDING, TEMPLATE, remove_ended, remove_old
from flowctl.live.remux.shares import Places, StreamMemory, WorkTime
from flowctl.live.remux.writer import RecorderState, StreamWriter
from flowctl.live.settings.media import RecordFormat
from flowctl.pollgroup import PollGroup
from flowctl.wire.rtmp.url import url_of

if TYPE_CHECKING:
    from flowctl.live.remux.variants.variantset import VariantSet

_log: Final = structlog.get_logger("flowctl.media")
MOST_WRITTEN: Final = 500
"""Recordings and playlists at a time: of 2.5 Mbit/s a core carries some sixty."""
_BYTE_S: Final = 1e-7
"""Processor time that a byte accounts for: twice what one of a stream of 2.5 Mbit/s takes."""
_MOST_SHARE: Final = 0.5
"""Processor time beyond that which all may take, of a core: some hundred streams of sound that are recorded and written
as HLS. The threads share one interpreter, in which others wait for it."""
_TIME_HINT: Final = "it goes on by itself; longer segments and parts (hls_segment, hls_part) take less"
_DROP_S: Final = AWAY_S + 2.0
"""Time for which a stream that has gone is kept: until its playlist has ended."""
_STOP_S: Final = 30.0
"""Longest wait for a disk that takes the rest; the next start finds what is on it then."""
_LOOK_S: Final = 1.0
_LAST_S: Final = 1.0
"""Longest wait for what a server that has gone has sent: it is in the sockets."""
_LAST_LOOK_S: Final = 0.01
_CLEAN_S: Final = 60.0
_LISTED: Final = 6
"""Segments in a playlist: with those of 2 s it takes 12 s, from which players begin 6 s before the end."""


class _Spec(NamedTuple):
    """What is written of a stream, of one kind: two that are equal go on in the same files."""

    form: str = ""  # of a recording
    length_s: float = 0.0  # longest recording, or least segment
    part_s: float = 0.0
    rendition: str = ""  # that alone, as a variant of the set


class _Wanted(NamedTuple):
    """What is to be written, from where, of the stream of which address."""

    path: str
    spec: _Spec
    address: str
    source: str = ""  # what is asked for of a rendition


_Key: TypeAlias = tuple[str, str]
"""Name of a stream, and kind of what is written of it; of a variant, with a slash and the name of its rendition."""
_RECORD: Final = "record"
_HLS: Final = "hls"
_COUNTED: Final = ("files", "written_bytes", "media_s", "lost_messages")
_UNWRITTEN: Final = "not written"
"""State of what is to be written and is not: its row says why."""
_LACKING: Final = frozenset({_UNWRITTEN, RecorderState.NO_ROOM.value, RecorderState.ENDED.value})
_UNWRITTEN_ROW: Final = {"state": _UNWRITTEN, "file": "", **dict.fromkeys(_COUNTED, 0)}


def _specs(order: StreamOrder) -> dict[str, _Spec | None]:
    return {
        _RECORD: _Spec(order.record_format, order.record_length_s) if order.record_format else None,
        _HLS: _Spec("", order.hls_segment_s, order.hls_part_s) if order.hls and not order.renditions else None,
        **{
            f"{_HLS}/{name}": _Spec("", order.hls_segment_s, order.hls_part_s, name)
            for name in (order.renditions if order.hls else ())
        },
    }


def _is_variant(key: _Key) -> bool:
    return key[1].startswith(f"{_HLS}/")


class _Follow:
    """The connection that brings a stream, once for all that is written of it: they hold the same messages.

    Raises:
        RemoteProtocolError: it cannot be asked for.
    """

    def __init__(self, name: str, wanted: _Wanted, memory: StreamMemory, group: PollGroup) -> None:
        self.name: Final = name
        self._memory: Final = memory
        self._writers: tuple[StreamWriter, ...] = ()  # replaced as a whole, by the main thread
        self._follow: Final = StreamFollower(self._source(wanted), self, group, backoff=BACKOFF, hold_s=HOLD_S)

    def _source(self, wanted: _Wanted) -> Source:
        url = url_of(self.name, "media")
        if wanted.source:
            url = dataclasses.replace(url, raw_query=f"{RENDITION}={wanted.source}")
        return Source(url, wanted.path, "server")

    # -- main thread

    def add(self, writer: StreamWriter) -> None:
        """Write it in one more way; before `start`, since what comes later has no beginning."""
        self._writers += (writer,)

    def start(self) -> None:
        self._memory.holders += (self,)
        self._follow.start()

    def move(self, wanted: _Wanted) -> None:
        self._follow.move(self._source(wanted))

    def leave(self, writer: StreamWriter) -> None:
        """Have nothing more come for a writer."""
        others = tuple(item for item in self._writers if item is not writer)
        if others:
            self._writers = others
        else:
            self._memory.holders = tuple(item for item in self._memory.holders if item is not self)
            self._follow.stop("its settings changed, or the server stops")

    @property
    def runs(self) -> bool:
        return self._follow.statistics().state is FollowState.RUNNING

    # -- the thread that receives

    def begin(self, now: float) -> None:
        for writer in self._writers:
            writer.intake.begin(now)

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        for writer in self._writers:
            writer.intake.take(type_id, timestamp, payload, now)
        self._memory.note(len(payload) + MESSAGE_BYTES)

    def end(self, why: str) -> None:
        for writer in self._writers:
            writer.intake.end(why)

    @property
    def held_bytes(self) -> int:
        held = [(writer.intake.size_bytes, *writer.held_bytes) for writer in self._writers]
        return max((waiting + open_ for waiting, open_, _ in held), default=0) + sum(made for _, _, made in held)

    def cut(self, why: str) -> None:
        for writer in self._writers:
            writer.intake.cut(why)

    def go_on(self) -> None:
        for writer in self._writers:
            writer.intake.go_on()


class WrittenStream:
    """One stream that is recorded, or written as HLS.

    Raises:
        ConfigError: another process writes it, or it has no name for files.
    """

    def __init__(
        self,
        key: _Key,
        wanted: _Wanted,
        config: MediaProcessConfig,
        follow: _Follow,
        sets: dict[str, VariantSet] | None = None,
    ) -> None:
        self.key: Final = key
        self.wanted = wanted
        self.drop_at: float | None = None  # when it is forgotten. None: it is published.
        app, _, stream = key[0].rpartition("/")
        if key[1] == _RECORD:
            writer = _recorder(app or stream, stream, wanted.spec, config)
        else:
            writer = _hls_writer(app or stream, stream, wanted.spec, config, {} if sets is None else sets)
        self._writer: Final = writer
        self._follow: Final = follow
        follow.add(self._writer)
        self._writer.start()

    def move(self, wanted: _Wanted) -> None:
        self.wanted = wanted
        self._follow.move(wanted)

    def leave(self) -> None:
        """Have nothing more come."""
        self._follow.leave(self._writer)

    def hand_over(self) -> None:
        """Leave a playlist to another process, which goes on with it: it does not end."""
        self._writer.goes_on = True

    def drop_unwritten(self) -> None:
        """Leave out HLS of which no segment is whole: a publication shows behind its beginning that it is a set."""
        if self.key[1] != _RECORD and not self._writer.statistics().files:
            self._writer.given_up = True

    @property
    def runs(self) -> bool:
        """Whether it has a connection that brings something, which may still be read."""
        return self._follow.runs

    def finish(self, patience_s: float) -> None:
        """Have the rest written; waits for the disk."""
        self._writer.stop(patience_s)

    @property
    def charged_s(self) -> float:
        """Processor time that writing it took beyond what its bytes account for; that may fall. Any thread."""
        return self._writer.spent_s - self._writer.taken_bytes * _BYTE_S

    def row(self) -> dict[str, Any]:
        figures = self._writer.statistics()
        return {
            "stream": self.key[0],
            "kind": self.key[1].partition("/")[0],
            "rendition": self.wanted.spec.rendition,
            "state": figures.state.value,
            "why": figures.why,
            "file": "" if figures.path is None else str(figures.path),
            "files": figures.files,
            "written_bytes": figures.written_bytes,
            "media_s": round(figures.media_s, 1),
            "lost_messages": figures.lost_messages,
        }


def _recorder(app: str, stream: str, spec: _Spec, config: MediaProcessConfig) -> StreamWriter:
    settings = RecordSettings(
        folder=config.options.record_folder,
        template=NameTemplate(TEMPLATE),
        max_s=spec.length_s,
        keep_free_bytes=config.options.keep_free_bytes,
    )
    if spec.form == RecordFormat.FLV.value:
        return StreamRecorder(app, stream, settings, FlvForm)
    # Loaded where it is asked for: it brings FFmpeg's libraries.
    from flowctl.live.remux.container import Mp4Form  # noqa: PLC0415 - as said

    return StreamRecorder(app, stream, settings, Mp4Form)


def _hls_writer(
    app: str, stream: str, spec: _Spec, config: MediaProcessConfig, sets: dict[str, VariantSet]
) -> StreamWriter:
    # As above.
    from flowctl.live.remux.hls import HlsSettings, HlsWriter  # noqa: PLC0415 - as said
    from flowctl.live.remux.variants.variantset import VariantSet  # noqa: PLC0415 - as said
    from flowctl.live.remux.variants.writer import VariantWriter  # noqa: PLC0415 - as said

    settings = HlsSettings(
        folder=config.hls_folder,
        listed=_LISTED,
        segment_s=spec.length_s,
        part_s=spec.part_s,
        keep_free_bytes=config.options.keep_free_bytes,
    )
    if spec.rendition:
        its = sets.setdefault(f"{app}/{stream}", VariantSet(app, stream, settings))
        writer: HlsWriter = VariantWriter(app, stream, spec.rendition, settings, its)
    else:
        writer = HlsWriter(app, stream, settings)
    writer.claim()
    return writer


class MediaProcess:
    """What the process does. Main thread, unless something else is said."""

    def __init__(self, config: MediaProcessConfig, clock: Callable[[], float]) -> None:
        self._config: Final = config
        self._clock: Final = clock
        self._conn: Final = socket.socket(fileno=config.socket_fd)
        self._group: Final = PollGroup("media")
        self._memory: Final = StreamMemory(config.memory_bytes)
        self._lines: Final[queue.SimpleQueue[dict[str, Any] | None]] = queue.SimpleQueue()  # None: the end
        self._written: dict[_Key, WrittenStream] = {}
        self._finishing: dict[_Key, tuple[threading.Thread, WrittenStream]] = {}  # whose files are being finished
        self._waiting: dict[_Key, _Wanted] = {}  # to be written once that can be
        self._why: dict[_Key, str] = {}  # of those, why they are not written; it is in the log
        self._places: Final[Places[_Key]] = Places()
        self._sets: Final[dict[str, VariantSet]] = {}  # by stream, while any of its variants are written
        self._time: Final[WorkTime[_Key]] = WorkTime(_MOST_SHARE)
        self._past: Final = {_RECORD: Counter[str](), _HLS: Counter[str]()}  # of streams that have gone
        self._clean_at = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        if self._config.hls_streams.patterns:
            from flowctl.live.remux import hls as _  # noqa: F401, PLC0415 - loaded before there are streams
        self._group.start()
        threading.Thread(target=self._read, name="flowctl-media-orders", daemon=True).start()
        threading.Thread(target=self._clean, name="flowctl-media-clean", daemon=True).start()
        said: dict[str, Any] | None = {}
        while said is not None:
            if "ask" in said:
                self._look()
                with contextlib.suppress(OSError):  # the end comes
                    self._conn.sendall(json.dumps(self._figures()).encode() + b"\n")
            elif said:
                self._take(said)
            if self._lines.empty():  # once for many lines: a look costs something for each stream that waits
                self._look()
            try:
                said = self._lines.get(timeout=_LOOK_S)
            except queue.Empty:
                said = {}
        self._over.set()
        until = time.monotonic() + _LAST_S
        while any(stream.runs for stream in self._written.values()) and time.monotonic() < until:
            time.sleep(_LAST_LOOK_S)
        for variants in self._sets.values():
            variants.want(())
        for stream in self._written.values():
            stream.hand_over()  # the server may be started again
            stream.leave()
        self._group.stop(_LOOK_S)
        for key in list(self._written):
            self._finish(key)
        until = time.monotonic() + _STOP_S
        for thread, _stream in self._finishing.values():
            thread.join(max(0.0, until - time.monotonic()))
        self._conn.close()

    def _look(self) -> None:
        now = self._clock()
        for key, (thread, stream) in list(self._finishing.items()):
            if not thread.is_alive():
                del self._finishing[key]
                self._memory.due = True  # its last files were made after what it held was let go
                row = stream.row()
                self._past[row["kind"]].update({name: row[name] for name in _COUNTED})
        spent = {key: (stream.wanted.address, stream.charged_s) for key, stream in self._written.items()}
        for key, why in self._time.look(now, spent).items():
            self._give_way(key, why, _TIME_HINT)
        self._begin_waiting()
        self._look_at_sets()
        for key, stream in list(self._written.items()):
            if stream.drop_at is not None and stream.drop_at <= now:
                self._end(key)
        with contextlib.suppress(ClosedError, LocalProtocolError):  # the group has ended
            self._group.call_soon(self._memory.look)
        self._memory.give_back()
        if now >= self._clean_at:
            self._clean_at = now + _CLEAN_S
            self._memory.due = True  # what making files takes stays in the heap, and many small streams add up
            remove_ended(self._config.hls_folder, self._config.hls_streams.fits, time.time())

    def _look_at_sets(self) -> None:
        """Tell each set which of its variants are published, and forget those that have none any more."""
        published: dict[str, list[str]] = {}
        for key in (*self._written, *self._waiting):
            if _is_variant(key) and (key in self._waiting or self._written[key].drop_at is None):
                published.setdefault(key[0], []).append(key[1].partition("/")[2])
        there = {key[0] for key in (*self._written, *self._waiting, *self._finishing) if _is_variant(key)}
        for name in list(self._sets):
            self._sets[name].want(published.get(name, ()))
            if name not in there:
                del self._sets[name]

    def _take(self, said: dict[str, Any]) -> None:
        name, path, order = said["stream"], said["path"], said["order"]
        known = [key for key in (*self._written, *self._waiting) if key[0] == name]
        if order is None:
            for key in known:
                self._forget(key)
                if key in self._written:
                    self._written[key].drop_at = self._clock() + _DROP_S
            return
        wanted = StreamOrder(**order)
        specs = _specs(wanted)
        for kind, spec in (specs | {kind: specs.get(kind) for _, kind in known}).items():
            key = name, kind
            source = "" if spec is None else wanted.renditions.get(spec.rendition, "")
            self._forget(key)
            stream = self._written.get(key)
            if stream is not None and stream.wanted.spec == spec:
                stream.drop_at = None
                stream.move(_Wanted(path, spec, wanted.address, source))
                self._places.take(key, wanted.address, MOST_WRITTEN)
                continue
            if stream is not None and wanted.moves:
                stream.hand_over()
                stream.drop_at = self._clock() + _LAST_S  # what it has sent last is still read
            elif stream is not None and spec is None and _is_variant(key) and specs[_HLS] is None:
                stream.drop_at = stream.drop_at or self._clock() + _DROP_S  # its publisher may be back
            elif stream is not None:
                stream.drop_unwritten()
                self._end(key)
            if spec is not None:
                self._waiting[key] = _Wanted(path, spec, wanted.address, source)

    def _forget(self, key: _Key) -> None:
        self._waiting.pop(key, None)
        self._why.pop(key, None)

    def _begin_waiting(self) -> None:
        follows: dict[_Key, _Follow] = {}  # by stream and rendition: what begins together has one connection
        taken = {(key[0], _is_variant(key)) for key in (*self._written, *self._finishing) if key[1] != _RECORD}
        for key in [key for key in self._waiting if key not in self._finishing]:
            if key[1] == _RECORD or (key[0], not _is_variant(key)) not in taken:  # a playlist has one of two meanings
                self._begin(key, self._waiting.pop(key), follows)
        for follow in follows.values():
            follow.start()

    def _begin(self, key: _Key, wanted: _Wanted, follows: dict[_Key, _Follow]) -> None:
        """Begin to write, or note that it has to wait."""
        try:
            self._time.check(key, wanted.address, self._clock())
            if len(self._places) >= MOST_WRITTEN:
                self._end_longest_gone()
            victim = self._places.take(key, wanted.address, MOST_WRITTEN)
            if victim is not None:
                self._give_way(victim, "its place went to an address that has fewer")
            its = key[0], wanted.source
            follow = follows.get(its) or _Follow(key[0], wanted, self._memory, self._group)
            self._written[key] = WrittenStream(key, wanted, self._config, follow, self._sets)
            follows[its] = follow
        except (FlowctlError, OSError) as error:
            self._wait(key, wanted, str(error), getattr(error, "hint", None))
            self._places.free(key)
        else:
            self._why.pop(key, None)

    def _wait(self, key: _Key, wanted: _Wanted, why: str, hint: str | None = None) -> None:
        self._waiting[key] = wanted
        if key not in self._why:
            _log.error("a stream is not written yet", stream=key[0], kind=key[1], why=why, hint=hint)
        self._why[key] = why

    def _give_way(self, key: _Key, why: str, hint: str | None = None) -> None:
        stream = self._written[key]
        if stream.drop_at is None:
            self._wait(key, stream.wanted, why, hint)
        self._end(key)

    def _end_longest_gone(self) -> None:
        """Make room: a publisher of one name after the other shall keep no other stream from being written."""
        gone = [(stream.drop_at, key) for key, stream in self._written.items() if stream.drop_at is not None]
        if gone:
            self._end(min(gone)[1])

    def _end(self, key: _Key) -> None:
        self._written[key].leave()
        self._finish(key)

    def _finish(self, key: _Key) -> None:
        """Finish the files of a stream; a thread of its own waits for the disk."""
        stream = self._written.pop(key)
        self._places.free(key)
        thread = threading.Thread(target=stream.finish, args=(_STOP_S,), name="flowctl-media-finish", daemon=True)
        self._finishing[key] = thread, stream
        thread.start()

    def _figures(self) -> dict[str, Any]:
        rows = [stream.row() for stream in self._written.values()]
        totals = {kind: Counter(past) for kind, past in self._past.items()}
        for row in (*rows, *(stream.row() for _, stream in self._finishing.values())):
            totals[row["kind"]].update({name: row[name] for name in _COUNTED})
        for (name, kind), why in self._why.items():
            plain, _, rendition = kind.partition("/")
            rows.append(_UNWRITTEN_ROW | {"stream": name, "kind": plain, "rendition": rendition, "why": why})
        unwritten: dict[str, dict[str, str]] = {}
        for row in rows:
            if row["state"] in _LACKING:
                unwritten.setdefault(row["stream"], {})[row["kind"]] = row["why"] or row["state"]
        return {"streams": rows, "totals": totals, "unwritten": unwritten}

    # -- threads of their own

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._conn.makefile("rb") as lines:
            for line in lines:
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def _clean(self) -> None:
        options = self._config.options
        for path in recover(options.record_folder, whole_bytes, RECORDING.fullmatch):
            _log.warning("a recording of an earlier run was finished", file=str(path))
        keep_s = options.record_keep_s
        while keep_s and not self._over.is_set():
            for path in remove_old(options.record_folder, keep_s, time.time()):
                _log.info("a recording was removed, it was too old", file=str(path))
            self._over.wait(min(_CLEAN_S, keep_s / 2))


def main(parent_pid: int, words_fd: int, file: BinaryIO) -> None:
    del parent_pid  # that it has gone is seen by the end of the socket
    config: MediaProcessConfig = pickle.load(file)  # noqa: S301 - from the process that started this one, in memory without a name
    file.close()
    serve_orders(words_fd, lambda: _serve(config))


def _serve(config: MediaProcessConfig) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    log.configure(**config.log, fields={"worker": "media"})
    use_few_heaps()
    MediaProcess(config, time.monotonic).run()
