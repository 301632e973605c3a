"""A folder of HLS over HTTP: the playlists and segments in it that HLS has, and nothing else.

``/app/stream.m3u8`` is ``app/stream.m3u8`` in the folder, names encoded as `live.remux.hls` does it. Every part of
the path is opened below the one before it and never through a link, so no name leads out of the folder. Whether a
client may have a file is asked as for a play of its stream, whichever file it is; for clients that show who they are in
the query, a playlist is given the query of its request at each address in it. What players of low latency ask for ahead
is waited for (`flowctl.live.remux.waiting`).

Bodies go out in parts, the next one when the kernel has taken the last, through the Sender of the connection.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Generator
from email.utils import formatdate, parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote

from flowctl.errors import RemoteProtocolError
from flowctl.live.httpd.exchange import DIRECTIVE, Exchange, Handler, Request
from flowctl.live.remux.files import VARIANT, encoded
from flowctl.live.remux.playlist import CONTENT_TYPES, PLAYLIST
from flowctl.live.remux.waiting import HlsPlaylists, ServedPlaylist, open_below
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.url import RtmpUrl, canonical

_SEGMENT: Final = re.compile(r"([A-Za-z0-9._~%-]{1,800})-\d{1,20}(?:\.ts|(?:\.\d{1,20})?\.m4s|-init\.mp4)")
_VARIANT: Final = re.compile(r"([A-Za-z0-9._~%-]{1,800})\.m3u8")
_PART_BYTES: Final = 64 * 1024
"""Part of a body that waits for a client that does not read: 32 MiB for 512 of them."""
KEPT: Final = "max-age=3600"
"""How files that are whole are cached: none changes, and no name comes again; an hour, since access may change."""
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z", re.IGNORECASE | re.ASCII)
_NONE: Final = (0, 0)
_DIGITS: Final = re.compile(r"\d{1,19}\Z", re.ASCII)
Elsewhere = Callable[[Exchange, Callable[[], bytes], Callable[[bytes], None]], None]
"""Has a part read on another thread, and told to the connection's."""


class HlsFiles:
    """Serves one folder: a `flowctl.live.httpd.exchange.Handler`."""

    in_files: Final = True
    own_parameters: Final = (DIRECTIVE,)

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder: Final = folder
        self.playlists: Final = HlsPlaylists(folder, clock)

    def stream_of(self, path: str) -> str | None:
        app, _, name = path.removeprefix("/").rpartition("/")
        plain = name.endswith(PLAYLIST) and VARIANT not in name
        if plain:
            stream = name.removesuffix(PLAYLIST)
        elif found := _SEGMENT.fullmatch(name) or _VARIANT.fullmatch(name):
            stream = unquote(found[1].partition(VARIANT)[0])
        else:
            return None
        if not app or not stream:
            return None
        try:
            url = canonical(RtmpUrl().with_stream(f"{app}/{stream}"), decoded=True)
        except RemoteProtocolError:
            return None
        return url.path if plain or url.stream == stream else None  # files have the name as it is

    def handle(self, exchange: Exchange) -> None:
        path = exchange.request.path
        name, (app, _, stream) = path.rpartition("/")[2], (self.stream_of(path) or "").rpartition("/")
        try:
            if name.endswith(PLAYLIST):
                file = name if VARIANT in name else encoded(stream) + PLAYLIST
                self._answer_playlist(exchange, encoded(app), file)
            else:
                self._answer_segment(exchange, encoded(app), name)
        except (OSError, ValueError):
            exchange.respond(HTTPStatus.NOT_FOUND)

    def _answer_playlist(self, exchange: Exchange, app: str, name: str) -> None:
        """Answer with a playlist: as it is, or when it has what is asked for."""
        playlist = self.playlists.get(app, name)
        wanted = exchange.request.directives
        number, part = wanted.get("msn"), wanted.get("part")
        if not playlist.hint or (number is None and part is None):
            _give_playlist(exchange, playlist)
            return
        words = [word for word in (number, part) if word is not None]
        if number is None or not all(map(_DIGITS.match, words)):
            exchange.respond(HTTPStatus.BAD_REQUEST, "_HLS_msn is a number, and so is _HLS_part beside it.")
            return
        place = int(number), None if part is None else int(part)
        if not playlist.is_near(*place):
            exchange.respond(HTTPStatus.BAD_REQUEST, "That is too far ahead.")
            return

        def answer(found: ServedPlaylist | None) -> None:
            if found is None:
                exchange.respond(HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                _give_playlist(exchange, found)

        self.playlists.wait(exchange, app, name, lambda found: not found.hint or found.has(*place), answer)

    def _answer_segment(self, exchange: Exchange, app: str, name: str) -> None:
        """Answer with a file, or when it is there, if it is the next part."""
        content_type = CONTENT_TYPES[PurePosixPath(name).suffix]
        try:
            number = open_below(self._folder, app, name)
        except FileNotFoundError:
            of_stream = _SEGMENT.fullmatch(name)
            playlist = "" if of_stream is None else of_stream[1] + PLAYLIST
            # As it is now: the client may have it from another process, which has looked later.
            if self.playlists.get(app, playlist, at_once=True).hint == name:
                self._wait_for_part(exchange, app, name, playlist)
                return
            number = open_below(self._folder, app, name)  # it may have come meanwhile
        give_file(exchange, number, content_type)

    def _wait_for_part(self, exchange: Exchange, app: str, name: str, playlist: str) -> None:
        def answer(found: ServedPlaylist | None) -> None:
            try:
                if found is None:
                    raise FileNotFoundError(name)
                give_file(exchange, open_below(self._folder, app, name), CONTENT_TYPES[PurePosixPath(name).suffix])
            except OSError:
                exchange.respond(HTTPStatus.NOT_FOUND)

        self.playlists.wait(exchange, app, playlist, lambda found: found.hint != name, answer)


def hls_handlers(folder: Path) -> dict[str, Handler]:
    files = HlsFiles(folder)
    return dict.fromkeys(CONTENT_TYPES, files)


def _give_playlist(exchange: Exchange, playlist: ServedPlaylist) -> None:
    request, pieces = exchange.request, playlist.pieces
    query = request.kept_query.replace('"', "%22").encode()
    query = b"?" + query if query else b""
    size = sum(map(len, pieces)) + (len(pieces) - 1) * len(query)
    tag = f'"{playlist.check:08x}-{zlib.crc32(query):x}-{size:x}"'
    # What was asked for ahead does not change, so a cache may have it for others that ask for the same.
    cache = f"max-age={playlist.target_s:.0f}" if request.directives else "no-cache"
    headers = [("Content-Type", CONTENT_TYPES[PLAYLIST]), ("Cache-Control", cache), ("ETag", tag)]
    if _has(request, tag):
        exchange.begin(HTTPStatus.NOT_MODIFIED, headers)
        exchange.end()
        return
    exchange.begin(HTTPStatus.OK, [*headers, ("Content-Length", str(size))])
    if request.method == "HEAD" or not size:
        exchange.end()
    else:
        FileBody(exchange, _joined(pieces, query), size).give()


def _joined(pieces: tuple[bytes, ...], query: bytes) -> Generator[bytes]:
    """Join a playlist and the query at each address in it, in parts: a query has up to 8 KiB."""
    at_once = max(_PART_BYTES * len(pieces) // (sum(map(len, pieces)) + len(pieces) * len(query)), 1)
    for begin in range(0, len(pieces), at_once):
        yield (query if begin else b"") + query.join(pieces[begin : begin + at_once])


def _has(request: Request, tag: str) -> bool:
    known = request.header("if-none-match")
    return known == "*" or tag in {item.strip().removeprefix("W/") for item in known.split(",")}


def give_file(
    exchange: Exchange,
    number: int,
    content_type: str,
    *,
    size: int | None = None,
    cache: str = KEPT,
    elsewhere: Elsewhere | None = None,
) -> FileBody | None:
    """Answer with a file, or what of it is whole, whose descriptor is closed then; return its body, if it has one."""
    request, found = exchange.request, os.fstat(number)
    size = found.st_size if size is None else size
    tag = f'"{found.st_mtime_ns:x}-{size:x}"'
    headers = [("Cache-Control", cache), ("ETag", tag), ("Accept-Ranges", "bytes")]
    headers.append(("Last-Modified", formatdate(found.st_mtime, usegmt=True)))
    if _has(request, tag) or (not request.header("if-none-match") and _not_since(request, found.st_mtime)):
        os.close(number)
        exchange.begin(HTTPStatus.NOT_MODIFIED, headers)
        exchange.end()
        return None
    begin, end, status = 0, size, HTTPStatus.OK
    if request.method == "GET" and request.header("range") and request.header("if-range") in {"", tag}:
        found_range = _range(request.header("range"), size)
        if found_range == _NONE:
            os.close(number)
            exchange.respond(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=[("Content-Range", f"bytes */{size}")])
            return None
        if found_range is not None:
            begin, end = found_range
            status = HTTPStatus.PARTIAL_CONTENT
            headers.append(("Content-Range", f"bytes {begin}-{end - 1}/{size}"))
    exchange.begin(status, [*headers, ("Content-Type", content_type), ("Content-Length", str(end - begin))])
    if request.method == "HEAD":
        os.close(number)
        exchange.end()
        return None
    parts = _of_file(number, begin, end)
    next(parts)  # begun, so it closes the descriptor even where nothing is ever read
    body = FileBody(exchange, parts, end - begin, elsewhere)
    body.give()
    return body


def _of_file(number: int, begin: int, end: int) -> Generator[bytes]:
    """Read a file in parts; its descriptor is closed whatever becomes of the connection."""
    try:
        yield b""
        while begin < end and (data := os.pread(number, min(_PART_BYTES, end - begin), begin)):
            begin += len(data)
            yield data
    finally:
        os.close(number)


def _not_since(request: Request, changed_s: float) -> bool:
    """Whether the file has not changed since the client got it."""
    try:
        return int(changed_s) <= parsedate_to_datetime(request.header("if-modified-since")).timestamp()
    except (ValueError, TypeError):
        return False


def _range(text: str, size: int) -> tuple[int, int] | None:
    """Return begin and end of what a Range header asks for; None: it is of another form; `_NONE`: there is nothing."""
    match = _RANGE.match(text)
    if match is None or match[0].endswith("=-"):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        return (size - length, size) if length else _NONE
    begin = int(match[1])
    end = min(int(match[2]) + 1, size) if match[2] else size
    if match[2] and int(match[2]) < begin:
        return None
    return (begin, end) if begin < size else _NONE


class FileBody:
    """A body that goes out in parts."""

    __slots__ = ("__weakref__", "_elsewhere", "_exchange", "_left_bytes", "_parts")

    def __init__(
        self, exchange: Exchange, parts: Generator[bytes], left_bytes: int, elsewhere: Elsewhere | None = None
    ) -> None:
        self._exchange = exchange
        self._parts = parts
        self._left_bytes = left_bytes
        self._elsewhere = elsewhere

    def give(self) -> None:
        """Send the next part, and have the one after it sent when the kernel has taken it."""
        if self._elsewhere is None:
            self._send(self._read())
        else:
            self._elsewhere(self._exchange, self._read, self._send)

    def _read(self) -> bytes:
        try:
            return next(self._parts, b"")
        except OSError:
            return b""  # the disk cannot read it

    def _send(self, data: bytes) -> None:
        exchange = self._exchange
        self._left_bytes -= len(data)
        if data:
            exchange.write(data)
        if self._left_bytes > 0:
            if data:
                exchange.connection.sender.when_drained(self._go_on)
            else:
                exchange.connection.close(CloseReason.FINISHED, "a file could not be read while it was sent")
            return
        self._parts.close()
        exchange.end()

    def _go_on(self, taken: bool) -> None:  # noqa: FBT001 - what a waiter of a Sender is given
        """Have the next part sent, unless the connection has ended. Any thread."""
        if taken:
            self._exchange.connection.call_soon(self.give)
        else:
            self._parts.close()
