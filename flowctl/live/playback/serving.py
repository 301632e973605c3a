"""Recordings over HTTP, where the live server serves streams: to those who may play the stream, if settings let them.

=========================================== ===============================================================
``/recordings/live/room?from=&to=``         which there are, as JSON, the latest first
``/recordings/live/room/NAME.flv``          a file as it is, in ranges too; of one being written what is whole
``/recordings/live/room.flv?from=&to=``     a part by time, as one FLV stream; ``.mp4`` of what is recorded as that
=========================================== ===============================================================

Who asks is asked as for a play of ``live/room``, with the same keys and tokens, and is one viewer for hooks whatever it
fetches. A disk that has to look for what nobody has read for days may take its time, and a folder may have a hundred
thousand files. So nothing of that is done on the threads of the media: one thread looks, another one reads, and each
rests for as long as it has worked. Bodies go out as those of HLS: the next part when the kernel has taken the last.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote
from weakref import ref

import structlog

from flowctl.core.text.addresses import address_key
from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.live.httpd.exchange import Exchange, Handler
from flowctl.live.httpd.formats import FLV_TYPE
from flowctl.live.playback.library import (
    DAMAGED,
    LATEST_S,
    Library,
    OpenedFile,
    Span,
    is_recording,
    parse_time,
    time_text,
)
from flowctl.live.remux.flvform import SUFFIX
from flowctl.live.remux.serving import KEPT, FileBody, give_file
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.url import RtmpUrl, canonical

_log: Final = structlog.get_logger("flowctl.live")
FOLDER: Final = "/recordings/"
_TYPES: Final = {SUFFIX: FLV_TYPE, ".mp4": "video/mp4"}
MOST_LISTED: Final = 1000
_LISTED: Final = 100
MOST_OPEN: Final = 256
"""Recordings that are fetched at a time: 16 MiB of parts on their way."""
_ADDRESS_SHARE: Final = 4
"""An address may have one in so many of them: behind one router may be many viewers."""
_QUIET_S: Final = 1.0
_MOST_FIELDS: Final = 64
_T = TypeVar("_T")


class _Asked(NamedTuple):
    """What a path asks for."""

    app: str
    stream: str
    name: str  # of a file; ".flv", ".mp4": a part by time; empty: a list


class _WrongError(Exception):
    """A parameter is wrong, in words."""


class Recordings:
    """Serves one folder of recordings: a `flowctl.live.httpd.exchange.Handler`.

    `may_play` says of a stream whether its recordings are for those who may play it. It is asked each time.
    """

    in_files: Final = True
    own_parameters: Final = ("from=", "to=", "before=", "limit=")

    def __init__(self, folder: Path, may_play: Callable[[str], bool]) -> None:
        self._library: Final = Library(folder)
        self._may_play: Final = may_play
        self._looks, self._reads = _Worker(), _Worker()  # who plays does not wait for those who look
        self._bodies: dict[ref[FileBody], str] = {}  # that go out, and to whose address; each step of it is one

    def stream_of(self, path: str) -> str | None:
        asked = _parse(path)
        stream = None if asked is None else f"{asked.app}/{asked.stream}"
        return stream if stream is not None and self._may_play(stream) else None

    def handle(self, exchange: Exchange) -> None:
        asked = _parse(exchange.request.path)
        if asked is None:
            exchange.respond(HTTPStatus.NOT_FOUND)
            return
        try:
            if not asked.name:
                self._list(exchange, asked)
            elif asked.name in _TYPES:
                self._find_part(exchange, asked)
            else:
                self._find_file(exchange, asked)
        except _WrongError as error:
            exchange.respond(HTTPStatus.BAD_REQUEST, str(error))

    # -- what there is

    def _list(self, exchange: Exchange, asked: _Asked) -> None:
        given = _parameters(exchange)
        from_s, to_s = _time(given, "from"), _time(given, "to")
        before, limit = given.get("before", ""), given.get("limit", str(_LISTED))
        if before and not is_recording(before):
            raise _WrongError("before is the name of a recording, the last one of the list before.")
        if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= MOST_LISTED:
            raise _WrongError(f"limit is a number, 1 to {MOST_LISTED}.")

        def look() -> bytes:
            found, more = self._library.recordings(asked.app, asked.stream, from_s, to_s, before, int(limit))
            folder = quote(f"{FOLDER}{asked.app}/{asked.stream}/")
            rows = [{**item.row(), "address": folder + item.name} for item in found]
            said = {"stream": f"{asked.app}/{asked.stream}", "recordings": rows}
            return json.dumps({**said, "next": found[-1].name if more else None}).encode()

        def answer(body: bytes) -> None:
            headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
            exchange.respond(HTTPStatus.OK, headers=headers, body=body)

        self._looks.do(exchange, look, answer)

    # -- what is in them

    def _find_file(self, exchange: Exchange, asked: _Asked) -> None:
        def give(found: OpenedFile) -> FileBody | None:
            cache = "no-cache" if found.being_written else KEPT
            of_type, size = _TYPES[asked.name[-4:]], found.whole_bytes
            return give_file(exchange, found.take(), of_type, size=size, cache=cache, elsewhere=self._reads.do)

        self._fetch(exchange, lambda: self._library.open(*asked), give)

    def _find_part(self, exchange: Exchange, asked: _Asked) -> None:
        given = _parameters(exchange)
        from_s, to_s = _time(given, "from"), _time(given, "to")
        if from_s is None:
            raise _WrongError("Say from when: from=2026-11-30T10:00:00Z, and to.")
        if to_s is not None and to_s <= from_s:
            raise _WrongError("to is a time after from.")
        until_s = LATEST_S if to_s is None else to_s

        def give(span: Span | None) -> FileBody | None:
            if span is None:
                exchange.respond(HTTPStatus.NOT_FOUND, "Nothing was recorded then.")
                return None
            start, end = time_text(span.start_s), time_text(span.start_s + span.length_s)
            # Without ranges: Chromium looks at each fragment of MP4 before it plays any, by a connection each.
            headers = [("Content-Type", _TYPES[asked.name]), ("Cache-Control", "no-store"), ("Accept-Ranges", "none")]
            headers += [("Recording-Start", start), ("Recording-End", end)]
            exchange.begin(HTTPStatus.OK, [*headers, ("Content-Length", str(span.size_bytes))])
            if exchange.request.method == "HEAD":
                exchange.end()
                return None
            parts = self._library.parts(asked.app, asked.stream, span)
            body = FileBody(exchange, parts, span.size_bytes, self._reads.do)
            body.give()
            return body

        self._fetch(exchange, lambda: self._library.span(asked.app, asked.stream, from_s, until_s, asked.name), give)

    def _fetch(self, exchange: Exchange, look: Callable[[], _T], give: Callable[[_T], FileBody | None]) -> None:
        def give_if_room(found: _T) -> None:
            if self._has_room(exchange) and (body := give(found)) is not None:  # others may have come meanwhile
                self._bodies[ref(body, self._forget)] = address_key(exchange.connection.peer[0])

        if self._has_room(exchange):
            self._looks.do(exchange, look, give_if_room)

    def _forget(self, body: ref[FileBody]) -> None:
        self._bodies.pop(body, None)

    def _has_room(self, exchange: Exchange) -> bool:
        whose = list(self._bodies.values())
        own = whose.count(address_key(exchange.connection.peer[0]))
        if len(whose) < MOST_OPEN and own < MOST_OPEN // _ADDRESS_SHARE:
            return True
        words = "Too many recordings are fetched. Try again later."
        exchange.respond(HTTPStatus.SERVICE_UNAVAILABLE, words, [("Retry-After", "5")])
        return False


class _Worker:
    """A thread for what may wait for a disk; it is there while there is something to do. Any thread may ask.

    Addresses have their turns: who asks much waits for itself. What a client has asked for that has gone is left.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._came: Final = threading.Condition(self._lock)
        # By address, who waits longest first; one of a connection at most. Guarded by _lock.
        self._jobs: OrderedDict[str, deque[Callable[[], object]]] = OrderedDict()
        self._works = False  # whether there is the thread; guarded by _lock

    def do(self, exchange: Exchange, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Do `work` there, and go on with its result on the connection's thread."""
        with self._lock:
            if not self._works:  # it raises where there is no room for a thread
                threading.Thread(target=self._run, name="flowctl-recordings", daemon=True).start()
                self._works = True
            own = self._jobs.setdefault(address_key(exchange.connection.peer[0]), deque())
            own.append(partial(_answered, exchange, work, then))
            self._came.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._came.wait(_QUIET_S)
                if not self._jobs:
                    self._works = False
                    return
                address, own = self._jobs.popitem(last=False)
                job = own.popleft()
                if own:
                    self._jobs[address] = own  # it is its turn again after all others
            begin = time.thread_time()
            job()
            del job  # it may hold the last part of a body
            time.sleep(max(time.thread_time() - begin, 0.0))


def _answered(exchange: Exchange, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
    answer: Callable[[], object]
    if exchange.connection.ended is not None:
        return
    try:
        answer = partial(then, work())
    except DAMAGED:
        answer = partial(exchange.respond, HTTPStatus.NOT_FOUND)
    except Exception:  # noqa: BLE001 - the client is answered, and the thread goes on, whatever it is
        _log.exception("recordings could not be looked at", path=exchange.request.path)
        answer = partial(exchange.respond, HTTPStatus.INTERNAL_SERVER_ERROR)
    try:
        exchange.connection.call_soon(answer)
    except LocalProtocolError:  # it has more to do than there is room for: its client hears nothing
        exchange.connection.close(CloseReason.INTERNAL, "a recording could not be given")


def recording_handlers(folder: Path, may_play: Callable[[str], bool]) -> dict[str, Handler]:
    return {FOLDER: Recordings(folder, may_play)}


def _parse(path: str) -> _Asked | None:
    """Return what a path, decoded, asks for. None: nothing that is here."""
    named = path.removeprefix(FOLDER)
    stream, _, last = named.rpartition("/")
    if named == path:
        return None
    if is_recording(last):
        name, named = last, stream
    else:
        name = next((suffix for suffix in _TYPES if named.endswith(suffix)), "")
        named = named.removesuffix(name)
    if not all(named.partition("/")[::2]):
        return None
    try:
        url = canonical(RtmpUrl().with_stream(named), decoded=True)
    except RemoteProtocolError:
        return None
    return _Asked(url.app, url.stream, name)


def _parameters(exchange: Exchange) -> dict[str, str]:
    try:
        pairs = parse_qsl(exchange.request.raw_query, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise _WrongError("There are too many parameters.") from error
    return dict(reversed(pairs))  # the first of a name counts


def _time(given: dict[str, str], name: str) -> float | None:
    if (text := given.get(name)) is None:
        return None
    time_s = parse_time(text.replace(" ", "+"))  # the plus of a time zone, as queries are decoded
    if time_s is None:
        raise _WrongError(f"{name} is a time such as 2026-11-30T10:00:00Z.")
    return time_s
