"""The playlists of a folder as they are served, and the requests that wait for what is not in them yet.

Players of low latency ask for the next part before it is there: for the playlist that lists it (``_HLS_msn``,
``_HLS_part``), or for the part itself, whose name the last playlist gave ahead (draft-pantos-hls-rfc8216bis sections
6.2.5.2 and 6.2.6). Nothing tells the server that a file has come, since another process writes them. So while requests
wait, a thread looks at the playlists that they wait for, `LOOK_S` apart: one look for a playlist, however many wait. A
playlist is read once for each change.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

from flowctl.live.httpd.exchange import Exchange
from flowctl.live.remux.playlist import AWAY_S

LOOK_S: Final = 0.02
_PLAYLIST_BYTES: Final = 256 * 1024
"""Largest playlist that is served; one of 100 segments has 10 KiB."""
_MOST_KEPT: Final = 256
_WAIT_TARGETS: Final = 3
"""Target durations that a request waits, as RFC 8216bis says; but until a publisher that is away is taken for gone."""
_AHEAD: Final = 2
"""Segments behind the last one that may be asked for."""
_QUIET_S: Final = 1.0
_ADDRESS: Final = re.compile(rb'^(?:[^#\n].*|#EXT-X-(?:MAP|PART|PRELOAD-HINT):.*?URI="[^"]*)', re.MULTILINE)
_NUMBER: Final = re.compile(rb"#EXT-X-MEDIA-SEQUENCE:(\d{1,19})")
_TARGET: Final = re.compile(rb"#EXT-X-TARGETDURATION:(\d{1,9})")
_PART_TARGET: Final = re.compile(rb"#EXT-X-PART-INF:PART-TARGET=([\d.]{1,20})")
_HINT: Final = re.compile(rb'#EXT-X-PRELOAD-HINT:TYPE=PART,URI="([^"]*)"')
_CONTROL: Final = b"#EXT-X-SERVER-CONTROL:"


class ServedPlaylist(NamedTuple):
    """A playlist as it was read."""

    pieces: tuple[bytes, ...]  # its text, cut behind each address, where the query of a request has its place
    check: int  # checksum of the text
    number: int  # of the segment that is not complete
    parts: int  # parts of that segment
    last_parts: int  # parts of the one before it
    hint: str  # name of the part that comes next. Empty: nothing can be waited for.
    target_s: float
    part_s: float

    def has(self, number: int, part: int | None) -> bool:
        """Return whether it has a part of a segment, or without `part`, all of the segment."""
        if part is None or number != self.number - 1:
            return number < self.number or (number == self.number and part is not None and part < self.parts)
        return part < max(self.last_parts, 1) or self.parts > 0  # behind its last part it is the first of the next one

    def is_near(self, number: int, part: int | None) -> bool:
        """Return whether what is asked for will be there soon."""
        most = math.ceil(3 / self.part_s) if 0 < self.part_s < 1 else 3
        if number == self.number and part is not None:
            return part < self.parts + most
        return number < self.number + _AHEAD and (part or 0) < most + self.last_parts


def parse_playlist(text: bytes) -> ServedPlaylist:
    """Parse a playlist of ours, and say in it that requests may wait."""
    text = text.replace(_CONTROL, _CONTROL + b"CAN-BLOCK-RELOAD=YES,")
    ends = [found.end() for found in _ADDRESS.finditer(text)]
    pieces = tuple(text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True))
    segments = text.split(b"#EXTINF:")
    parts = [segment.count(b"#EXT-X-PART:") for segment in segments]
    first, target, part_s, hint = (found.search(text) for found in (_NUMBER, _TARGET, _PART_TARGET, _HINT))
    return ServedPlaylist(
        pieces=pieces,
        check=zlib.crc32(text),
        number=(int(first[1]) if first else 0) + len(segments) - 1,
        parts=parts[-1],
        last_parts=parts[-2] if len(parts) > 1 else 0,
        hint=unquote(hint[1].decode()) if hint else "",
        target_s=float(target[1]) if target else 1.0,
        part_s=float(part_s[1]) if part_s else 0.0,
    )


class _Waiter(NamedTuple):
    exchange: Exchange
    until: float
    ready: Callable[[ServedPlaylist], bool]
    # Answers, on the connection's thread, given the playlist. None: it has gone, or what was wanted did not come.
    answer: Callable[[ServedPlaylist | None], None]


class _Kept(NamedTuple):
    playlist: ServedPlaylist
    state: tuple[int, int, int]  # of the file that was read
    looked_at: float


def _state_of(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_ino, found.st_size


class HlsPlaylists:
    """The playlists of one folder. Any thread may call its methods."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder: Final = folder
        self._clock: Final = clock
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()  # used longest ago first; guarded by _lock
        self._waiters: dict[tuple[str, str], list[_Waiter]] = {}  # by application and name; guarded by _lock
        self._looking = False  # the thread runs; guarded by _lock

    def get(self, app: str, name: str, *, at_once: bool = False) -> ServedPlaylist:
        """Return a playlist, as it is now or, unless `at_once`, was `LOOK_S` ago.

        Raises:
            OSError: there is none.
            ValueError: it is none of ours.
        """
        key, now = (app, name), self._clock()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and not at_once and now - kept.looked_at < LOOK_S:
                self._kept.move_to_end(key)
                return kept.playlist
        if kept is not None and kept.state == _state_of((self._folder / app / name).lstat()):
            kept = kept._replace(looked_at=now)
        else:
            number = open_below(self._folder, app, name)
            try:
                kept = _Kept(parse_playlist(os.pread(number, _PLAYLIST_BYTES, 0)), _state_of(os.fstat(number)), now)
            finally:
                os.close(number)
        with self._lock:
            newest = self._kept.get(key)
            if newest is not None and newest.looked_at > now:  # another thread has looked meanwhile, and later
                return newest.playlist
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return kept.playlist

    def wait(
        self,
        exchange: Exchange,
        app: str,
        name: str,
        ready: Callable[[ServedPlaylist], bool],
        answer: Callable[[ServedPlaylist | None], None],
    ) -> None:
        """Have `answer` called on the connection's thread when a playlist is `ready`, or at the end of its time."""
        try:
            playlist = self.get(app, name)
        except (OSError, ValueError):
            answer(None)
            return
        if ready(playlist):
            answer(playlist)
            return
        until = self._clock() + max(_WAIT_TARGETS * playlist.target_s, AWAY_S)
        with self._lock:
            if not self._looking:  # first, since there may be no thread to be had
                threading.Thread(target=self._run, name="flowctl-hls", daemon=True).start()
                self._looking = True
            self._waiters.setdefault((app, name), []).append(_Waiter(exchange, until, ready, answer))
            self._came.notify()

    # -- the thread, which is there while requests wait

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiters:
                    self._came.wait(_QUIET_S)
                if not self._waiters:
                    self._looking = False
                    return
                keys = list(self._waiters)
            for key in keys:
                self._look(key)
            time.sleep(LOOK_S)

    def _look(self, key: tuple[str, str]) -> None:
        """Answer the requests whose playlist is ready; forget those whose client has gone."""
        try:
            playlist = self.get(*key)
        except (OSError, ValueError):
            playlist = None
        now = self._clock()
        over: list[_Waiter] = []
        left: list[_Waiter] = []
        with self._lock:
            for waiter in self._waiters.pop(key):
                ready = playlist is None or now >= waiter.until or waiter.ready(playlist)
                (over if ready or waiter.exchange.connection.ended is not None else left).append(waiter)
            if left:
                self._waiters[key] = left
        for waiter in over:
            late = playlist is None or not waiter.ready(playlist)
            waiter.exchange.connection.call_soon(waiter.answer, None if late else playlist)


def open_below(folder: Path, app: str, name: str) -> int:
    """Return a descriptor of a file in the folder of an application, never through a link."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    top = os.open(folder, flags | os.O_DIRECTORY)
    try:
        below = os.open(app, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    finally:
        os.close(top)
    try:
        number = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=below)
    finally:
        os.close(below)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileNotFoundError(name)
    return number
