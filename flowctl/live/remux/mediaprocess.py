"""The process that writes what a server's settings say of its streams: recordings and HLS.

How it works. Lines on a socket say which streams there are, and where (`flowctl.live.cluster.media.keeper`). Of each it
plays one connection, whose messages go to a recorder, a writer of HLS, or both; each has a thread of its own, so a disk
that is slow for one costs no other one anything. A stream that has gone is kept for some seconds: a publisher that
comes back goes on in the same playlist. When the server has gone, or says so by SIGTERM, files are finished.

Another thread finishes the recordings that a process before has left behind, and removes those that are too old.
"""

from __future__ import annotations

import json
import pickle
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from flowctl import log
from flowctl.core.server.signals import EndSignals
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.live.cluster.follow import Sink, Source, StreamFollower
from flowctl.live.cluster.media.order import MediaProcessConfig, StreamOrder
from flowctl.live.cluster.workers.child import serve_orders
from flowctl.live.remux.files import NameTemplate, recover
from flowctl.live.remux.flvform import FlvForm, whole_bytes
from flowctl.live.remux.intake import BACKOFF, HOLD_S
from flowctl.live.remux.playlist import AWAY_S
from flowctl.live.remux.recorder import Form, RecordSettings, StreamRecorder
from flowctl.live.remux.retention import RECORDING, TEMPLATE, remove_ended, remove_old
from flowctl.live.remux.writer import StreamWriter
from flowctl.live.settings.media import MediaOptions, RecordFormat
from flowctl.pollgroup import PollGroup
from flowctl.wire.rtmp.url import url_of

_log: Final = structlog.get_logger("flowctl.media")
MOST_STREAMS: Final = 500
"""Streams that are written at a time: of 2.5 Mbit/s a core carries some thirty."""
_DROP_S: Final = AWAY_S + 2.0
"""Time for which a stream that has gone is kept: until its playlist has ended."""
_STOP_S: Final = 30.0
"""Longest wait for a disk that takes the rest; the next start finds what is on it then."""
_LOOK_S: Final = 1.0
_CLEAN_S: Final = 60.0
_LISTED: Final = 6
"""Segments in a playlist: with those of 2 s it takes 12 s, from which players begin 6 s before the end."""


class _Fork:
    """A sink of several."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks: Final = sinks

    def begin(self, now: float) -> None:
        for sink in self._sinks:
            sink.begin(now)

    def take(self, type_id: int, timestamp: int, payload: bytes, now: float) -> None:
        for sink in self._sinks:
            sink.take(type_id, timestamp, payload, now)

    def end(self, why: str) -> None:
        for sink in self._sinks:
            sink.end(why)


class WrittenStream:
    """One stream that is written as an order says."""

    def __init__(self, name: str, path: str, order: StreamOrder, config: MediaProcessConfig, group: PollGroup) -> None:
        self.order: Final = order
        self.drop_at: float | None = None  # when it is forgotten. None: it is published.
        url = url_of(name, "media")
        app, _, stream = name.rpartition("/")
        self.writers: Final[dict[str, StreamWriter]] = {}
        options = config.options
        if order.record_format:
            settings = RecordSettings(
                folder=options.record_folder,
                template=NameTemplate(TEMPLATE),
                max_s=order.record_length_s,
                keep_free_bytes=options.keep_free_bytes,
            )
            self.writers["record"] = StreamRecorder(app or stream, stream, settings, _form(order.record_format))
        if order.hls and config.hls_folder is not None:
            try:
                self.writers["hls"] = _hls_writer(app or stream, stream, order, config.hls_folder, options)
            except ConfigError as error:
                _log.error("a stream is not written as HLS", stream=name, why=str(error), hint=error.hint)
        sink = _Fork([writer.intake for writer in self.writers.values()])
        self._follow: Final = StreamFollower(Source(url, path, "server"), sink, group, backoff=BACKOFF, hold_s=HOLD_S)
        for writer in self.writers.values():
            writer.start()
        self._follow.start()

    def move(self, name: str, path: str) -> None:
        self._follow.move(Source(url_of(name, "media"), path, "server"))

    def leave(self) -> None:
        """Have nothing more come."""
        self._follow.stop("the server does not publish it any more")

    def finish(self, patience_s: float) -> None:
        """Have the rest written; waits for the disk."""
        until = time.monotonic() + patience_s
        for writer in self.writers.values():
            writer.intake.close()
        for writer in self.writers.values():
            writer.stop(max(0.0, until - time.monotonic()))

    def rows(self, name: str) -> list[dict[str, Any]]:
        found = []
        for kind, writer in self.writers.items():
            figures = writer.statistics()
            found.append(
                {
                    "stream": name,
                    "kind": kind,
                    "state": figures.state.value,
                    "why": figures.why,
                    "file": "" if figures.path is None else str(figures.path),
                    "files": figures.files,
                    "written_bytes": figures.written_bytes,
                    "media_s": round(figures.media_s, 1),
                    "lost_messages": figures.lost_messages,
                }
            )
        return found


def _hls_writer(app: str, stream: str, order: StreamOrder, folder: Path, options: MediaOptions) -> StreamWriter:
    # Loaded where it is asked for: it brings FFmpeg's libraries.
    from flowctl.live.remux.hls import HlsSettings, HlsWriter  # noqa: PLC0415 - as said

    settings = HlsSettings(
        folder=folder,
        listed=_LISTED,
        segment_s=order.hls_segment_s,
        part_s=order.hls_part_s,
        keep_free_bytes=options.keep_free_bytes,
    )
    writer = HlsWriter(app, stream, settings)
    writer.claim()
    return writer


def _form(name: str) -> Callable[[], Form]:
    if name == RecordFormat.FLV.value:
        return FlvForm
    # As above.
    from flowctl.live.remux.container import Mp4Form  # noqa: PLC0415 - as said

    return Mp4Form


_COUNTED: Final = ("files", "written_bytes", "media_s", "lost_messages")


class MediaProcess:
    """What the process does. Main thread, unless something else is said."""

    def __init__(self, config: MediaProcessConfig, ended: EndSignals, clock: Callable[[], float]) -> None:
        self._config: Final = config
        self._ended: Final = ended
        self._clock: Final = clock
        self._conn: Final = socket.socket(fileno=config.socket_fd)
        self._group: Final = PollGroup("media")
        self._lines: Final[queue.SimpleQueue[dict[str, Any]]] = queue.SimpleQueue()
        self._streams: dict[str, WrittenStream] = {}
        self._finishing: dict[str, threading.Thread] = {}  # of streams whose files are being finished
        self._later: dict[str, dict[str, Any]] = {}  # what was said of them meanwhile
        self._past: Final = {"record": Counter[str](), "hls": Counter[str]()}  # of streams that have gone
        self._clean_at = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        if self._config.hls_streams.patterns:
            from flowctl.live.remux import hls as _  # noqa: F401, PLC0415 - loaded before there are streams
        self._group.start()
        threading.Thread(target=self._read, name="flowctl-media-orders", daemon=True).start()
        threading.Thread(target=self._clean, name="flowctl-media-clean", daemon=True).start()
        try:
            while not self._ended.wait(_LOOK_S):
                self._look()
        finally:
            self._over.set()
            for stream in self._streams.values():
                stream.leave()
            self._group.stop(_LOOK_S)
            for name in list(self._streams):
                self._finish(name)
            until = time.monotonic() + _STOP_S
            for thread in self._finishing.values():
                thread.join(max(0.0, until - time.monotonic()))

    def _read(self) -> None:
        """Take what the server says; a thread of its own. Its end is ours."""
        try:
            with self._conn.makefile("rb") as lines:
                for line in lines:
                    self._lines.put(json.loads(line))
                    self._ended.wake()
        finally:
            self._ended.end()

    def _look(self) -> None:
        for name, thread in list(self._finishing.items()):
            if not thread.is_alive():
                del self._finishing[name]
                if name in self._later:
                    self._take(self._later.pop(name))
        while not self._lines.empty():
            said = self._lines.get()
            if "ask" in said:
                self._conn.sendall(json.dumps(self._figures()).encode() + b"\n")
            else:
                self._take(said)
        now = self._clock()
        for name, stream in list(self._streams.items()):
            if stream.drop_at is not None and stream.drop_at <= now:
                stream.leave()
                self._finish(name)
        if self._config.hls_folder is not None and now >= self._clean_at:
            self._clean_at = now + _CLEAN_S
            remove_ended(self._config.hls_folder, self._config.hls_streams.fits, time.time())

    def _take(self, said: dict[str, Any]) -> None:
        name, path = said["stream"], said["path"]
        order = None if said["order"] is None else StreamOrder(**said["order"])
        stream = self._streams.get(name)
        if name in self._finishing:
            self._later[name] = said
        elif order is None:
            if stream is not None:
                stream.drop_at = self._clock() + _DROP_S
        elif stream is not None and stream.order == order:
            stream.drop_at = None
            stream.move(name, path)
        elif stream is not None:  # something else is to be written of it, or nothing
            stream.leave()
            self._later[name] = said
            self._finish(name)
        elif not order.writes:
            pass
        elif len(self._streams) >= MOST_STREAMS:
            hint = "write fewer in the settings, or record with other servers that pull them"
            _log.error("nothing is written of a stream, there are too many", stream=name, most=MOST_STREAMS, hint=hint)
        else:
            try:
                self._streams[name] = WrittenStream(name, path, order, self._config, self._group)
            except RemoteProtocolError as error:
                _log.error("nothing is written of a stream", stream=name, why=str(error))

    def _finish(self, name: str) -> None:
        """Finish the files of a stream; a thread of its own waits for the disk."""
        stream = self._streams.pop(name)

        def finish() -> None:
            stream.finish(_STOP_S)
            for row in stream.rows(name):
                self._past[row["kind"]].update({key: row[key] for key in _COUNTED})

        thread = self._finishing[name] = threading.Thread(target=finish, name="flowctl-media-finish", daemon=True)
        thread.start()

    def _figures(self) -> dict[str, Any]:
        rows = [row for name, stream in self._streams.items() for row in stream.rows(name)]
        totals = {kind: Counter(past) for kind, past in self._past.items()}
        for row in rows:
            totals[row["kind"]].update({key: row[key] for key in _COUNTED})
        return {"streams": rows, "totals": totals}

    # -- a thread of its own

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
    with EndSignals() as ended:
        log.configure(**config.log, fields={"worker": "media"})
        MediaProcess(config, ended, time.monotonic).run()
