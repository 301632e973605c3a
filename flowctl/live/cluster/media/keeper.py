"""Keeps the media process running: starts it, tells it of streams, asks how it fares, starts it again, and ends it.

Theory of operation. The process has one end of a socket pair, the keeper's thread the other: lines of JSON go to it,
one per stream that is to be written, and a question every two seconds; lines with figures come back. So nobody else can
tell it anything, and it knows by the end of the socket that its server has gone. It plays the streams at a Unix socket
in a folder that is the user's alone (`flowctl.live.cluster.links`), as other workers of the server do: without keys,
and as no viewer. When it ends the server serves on, and the next process is told everything again.

The thread that starts the process lives as long as it does, and only that one thread knows which streams are wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import shutil
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import structlog

from flowctl import log
from flowctl.core.folders.folders import found_folder
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import ConfigError
from flowctl.live.cluster.links import Links
from flowctl.live.cluster.media.order import MediaProcessConfig, StreamOrder
from flowctl.live.cluster.media.watch import MediaWatch
from flowctl.live.cluster.workers.child import Child, make_folder
from flowctl.live.cluster.workers.restarts import ASKED_EVERY_S, HUNG_S, WorkerPulse, WorkerRestarts
from flowctl.live.config import HLS_FOLDER, LiveConfig
from flowctl.live.server import LiveServer

_log: Final = structlog.get_logger("flowctl.media")
_STOP_S: Final = 10.0
"""Time that the process has to finish its files; what is not finished then is so at the next start."""
_WORDS_S: Final = 0.5
"""Time that a process that hangs has to say where."""
_READY_S: Final = 5.0
"""Time for which a server waits for the process before it says that it serves: what is published then is whole."""
_MEMORY_BYTES: Final = 512 << 20
"""What it may hold where `memory_budget` says nothing: a hundred streams of 2.5 Mbit/s in groups of 10 s hold half."""
_QUESTION: Final = b'{"ask": "figures"}\n'
_MODULE: Final = "flowctl.live.remux.mediaprocess"


@dataclass(frozen=True, slots=True)
class _Want:
    """A stream is to be written from where a Unix socket has it; without an order: it has gone from there."""

    stream: str
    path: str
    order: StreamOrder | None
    at: float = 0.0  # when its publisher's process said so, monotonic seconds of the machine


@dataclass(frozen=True, slots=True)
class _Gone:
    """What serves a Unix socket has ended, and so have its streams."""

    path: str


_WAKE: Final = _Gone("")
"""Says nothing: the keeper is to look."""


class MediaKeeper:
    """Keeps the media process of one server. Any thread, unless something else is said.

    Args:
        tell: called with a stream, the Unix socket that it is at, and what of it is to be written and is not, by kind
            with the reason; again and again while that is so, and once when nothing lacks any more.
    """

    def __init__(
        self,
        config: LiveConfig,
        tell: Callable[[str, str, dict[str, str]], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config: Final = config
        self._options: Final = dataclasses.replace(config.media, record_folder=found_folder(config.media.record_folder))
        self._hls_folder: Final = found_folder(config.hls_folder or HLS_FOLDER)
        self._tell: Final = tell
        self._clock: Final = clock
        self._news: Final[queue.SimpleQueue[_Want | _Gone | None]] = queue.SimpleQueue()
        self._wanted: dict[str, _Want] = {}  # the keeper's thread
        self._restarts: Final = WorkerRestarts(Random())
        self._starts = 0
        self._ending = False  # the keeper's thread
        self._lock: Final = OwnedLock()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._answered: Final = threading.Event()  # a process has answered
        # Replaced as a whole by the keeper's threads:
        self._state, self._pid = "none", 0
        self._streams: list[dict[str, Any]] = []
        self._unwritten: dict[str, dict[str, str]] = {}  # as it was told last
        self._totals: dict[str, Counter[str]] = {}  # of the present process
        self._before: dict[str, Counter[str]] = {}  # of those that have ended

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flowctl-media", daemon=True)
                self._thread.start()

    def wait_ready(self, patience_s: float) -> None:
        """Wait until the first process has loaded, or will not."""
        self._answered.wait(patience_s)

    def want(self, stream: str, path: str, order: StreamOrder | None, at: float = 0.0) -> None:
        """Have a stream written, from what serves the Unix socket `path`. None: it has gone.

        Of several sockets it is the one that said so last, `at`: what they say may come in another order.
        """
        self._news.put(_Want(stream, path, order, at))
        self.start()

    def gone(self, path: str) -> None:
        """Note that what serves a Unix socket has ended."""
        self._news.put(_Gone(path))

    def stop(self) -> None:
        """End the process, which finishes its files."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._news.put(None)
            thread.join(_STOP_S + 2 * _WORDS_S)

    def figures(self) -> dict[str, Any]:
        """Return figures, as JSON: those of streams are of the last answer."""
        totals = {kind: dict(self._before.get(kind, Counter()) + found) for kind, found in self._totals.items()}
        return {
            "state": self._state,
            "pid": self._pid,
            "starts": self._starts,
            "streams": self._streams,
            "totals": totals or {kind: dict(found) for kind, found in self._before.items()},
        }

    # -- the keeper's thread

    def _run(self) -> None:
        while not self._ending:
            began = self._clock()
            try:
                child, conn = self._started()
            except OSError as error:
                _log.error("media process cannot be started", fault=error.strerror or str(error))
            else:
                self._attend(child, conn)
            self._state, self._pid, self._streams = "being started", 0, []
            if not self._ending:
                self._rest(self._restarts.pause_after(self._clock() - began))
        self._state = "ended"

    def _rest(self, pause_s: float) -> None:
        until = self._clock() + pause_s
        while not self._ending and (left_s := until - self._clock()) > 0:
            with contextlib.suppress(queue.Empty):
                self._take(self._news.get(timeout=left_s))

    def _started(self) -> tuple[Child, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            # A write that takes so long has met a process that hangs.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(HUNG_S), 0))
            order = MediaProcessConfig(
                socket_fd=theirs.fileno(),
                options=self._options,
                hls_folder=self._hls_folder,
                hls_streams=self._config.asked_for("hls"),
                memory_bytes=self._config.memory_budget_bytes or _MEMORY_BYTES,
                log=log.in_force(),
            )
            try:
                child = Child(_MODULE, order, "media", (theirs.fileno(),))
            except BaseException:
                ours.close()
                raise
        self._starts += 1
        self._state, self._pid = "running", child.pid
        return child, ours

    def _attend(self, child: Child, conn: socket.socket) -> None:
        """Tell a process what there is to write, until it has ended, hangs, or is to end; then see to its end."""
        pulse, ended = WorkerPulse(self._clock()), threading.Event()
        listening = threading.Thread(
            target=self._listen, args=(conn, pulse, ended), name="flowctl-media-figures", daemon=True
        )
        listening.start()
        with conn, contextlib.suppress(OSError):  # it has ended, or takes nothing
            conn.sendall(_QUESTION)
            for want in self._wanted.values():
                _say(conn, want)
            while not (self._ending or ended.is_set() or pulse.is_hung(self._clock())):
                if pulse.should_ask(self._clock()):
                    conn.sendall(_QUESTION)
                with contextlib.suppress(queue.Empty):
                    for want in self._take(self._news.get(timeout=ASKED_EVERY_S)):
                        _say(conn, want)
            conn.shutdown(socket.SHUT_RDWR)  # it finishes its files
        if not self._ending and pulse.is_hung(self._clock()):
            _log.error("media process hangs, it is killed", pid=child.pid)
            child.signal(signal.SIGABRT)
        if not child.end(_STOP_S if self._ending else _WORDS_S) and self._ending:
            _log.warning("media process killed, it did not end in time", within_s=_STOP_S)
        listening.join(_WORDS_S)
        if not self._ending:
            _log.error("media process has ended, it is started again", **child.how_it_ended())
        child.close()
        for kind, found in self._totals.items():
            self._before[kind] = self._before.get(kind, Counter()) + found
        self._totals = {}

    def _take(self, news: _Want | _Gone | None) -> list[_Want]:
        """Note what is new; return what the process has to know of it."""
        match news:
            case None:
                self._ending = True
            case _Gone(path):
                gone = [_Want(item.stream, path, None) for item in self._wanted.values() if item.path == path]
                return [said for item in gone for said in self._take(item)]
            case _Want(stream, path, order, at):
                known = self._wanted.get(stream)
                if known is not None and known.path != path and (order is None or at < known.at):
                    return []  # it is published elsewhere by now
                if order is not None:
                    self._wanted[stream] = news
                elif known is None:
                    return []
                else:
                    del self._wanted[stream]
                return [news]
        return []

    # -- a thread that only reads

    def _listen(self, conn: socket.socket, pulse: WorkerPulse, ended: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError), conn.makefile("rb") as lines:
            for line in lines:
                said = json.loads(line)
                pulse.note_answer(self._clock())
                self._answered.set()
                self._streams = said["streams"]
                self._totals = {kind: Counter(found) for kind, found in said["totals"].items()}
                before, self._unwritten = self._unwritten, said["unwritten"]
                for stream in before | self._unwritten:
                    if (want := self._wanted.get(stream)) is not None:
                        self._tell(stream, want.path, self._unwritten.get(stream, {}))
        ended.set()
        self._news.put(_WAKE)


def _say(conn: socket.socket, want: _Want) -> None:
    order = None if want.order is None else dataclasses.asdict(want.order)
    conn.sendall(json.dumps({"stream": want.stream, "path": want.path, "order": order}).encode() + b"\n")


class ServerMedia:
    """The media process of a server that is one process alone; a companion of it.

    Nothing of it is there before the settings ask for it, which may be when they are read again.
    """

    def __init__(self, server: LiveServer) -> None:
        self.title: Final = "media"
        self.bound: list[str] = []  # nothing: only its own process reaches it
        self._server: Final = server
        self._keeper: Final = MediaKeeper(server.config, lambda name, _, why: server.hub.note_unwritten(name, why))
        self._links: Links | None = None  # set on the starting thread, or that of the first group
        MediaWatch(server, self._tell, copies=True)

    def start(self) -> None:
        if self._server.config.writes_media:
            self._begin()
            self._keeper.start()
            self._keeper.wait_ready(_READY_S)

    def stop(self, deadline_s: float) -> None:
        del deadline_s  # files take what they take
        self._keeper.stop()
        if self._links is not None:
            self._links.stop()
            shutil.rmtree(self._links.path.parent, ignore_errors=True)

    def figures(self) -> dict[str, Any]:
        return self._keeper.figures()

    def _begin(self) -> Links:
        if self._links is None:
            self._links = Links(self._server, make_folder("media") / "streams.sock")
            self._links.start()
        return self._links

    def _tell(self, stream: str, order: StreamOrder | None) -> None:
        try:
            links = self._begin()
        except (ConfigError, OSError) as error:
            _log.error("nothing is written of a stream", stream=stream, why=str(error))
        else:
            self._keeper.want(stream, str(links.path), order)
