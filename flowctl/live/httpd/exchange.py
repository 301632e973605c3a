"""One request and its answer, and the table of handlers.

A handler is asked which stream a path belongs to; the session then asks the gate of the server whether the client may
play that, and lets the handler answer. It answers at once or later, on the connection's thread, with one call of
`Exchange.respond`, or with `begin`, any number of `write` and `end`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Protocol

from flowctl.connection import Connection
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.live.access.request import LiveRequest
from flowctl.wire.websocket.handshake import wants_websocket


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Limits of one connection; immutable, one object for all."""

    header_bytes: int = 16 * 1024
    """Request line and headers together (h11, uvicorn: 16 KiB or 64; nginx: 4 x 8 KiB). More is answered with 431."""

    header_count: int = 64
    """Headers; browsers send some 15 (Apache: 100). More is answered with 431."""

    target_bytes: int = 8 * 1024
    """Path and query, with room for a signed token of 4 KiB (nginx: 8 KiB). More is answered with 414."""

    body_bytes: int = 64 * 1024
    """Body of a request; no request here needs one, so it is read and dropped. More is answered with 413."""

    request_time_s: float = 10.0
    """Time from accept, or the first octet of a request, to its end: headers and body (nginx: 60 s). Then comes 408."""

    idle_s: float = 60.0
    """Time between two requests (nginx ``keepalive_timeout``: 75 s). The connection is closed then."""

    requests: int = 1000
    """Requests on one connection (nginx ``keepalive_requests``: 1000); the last answer says that it closes."""

    wait_s: float = 60.0
    """Longest wait of a player for a stream that is not published, where it may wait at all and `player_wait_s` of RTMP
    does not end it earlier: clients and proxies give up after about that. Then comes 404."""

    frames_per_second: float = 50.0
    """WebSocket frames that a player may send, after a burst of two seconds' worth. More is read later; a player that
    goes on for `cut_after_s` of `WorkLimits` is cut."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} is {getattr(self, field.name)}, it must be more than 0")


HeaderFields = Iterable[tuple[str, str]]
SERVER: Final = "flowctl"
DIRECTIVE: Final = "_HLS_"
"""Prefix of what players of HLS add to the query of a playlist (draft-pantos-hls-rfc8216bis section 6.2.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str  # in capitals, GET, HEAD or OPTIONS
    path: str
    raw_query: str  # the query as it came, without the question mark
    headers: tuple[tuple[bytes, bytes], ...]
    version: str = "1.1"
    # What parameters begin with that belong to this request alone, and not to the play that it is of.
    own: tuple[str, ...] = ()
    live: LiveRequest | None = None  # what is asked of the gate. None: the path belongs to no stream.

    @property
    def directives(self) -> dict[str, str]:
        """What is asked of a playlist beside its stream, without the prefix of the names."""
        pairs = [pair.partition("=") for pair in self.raw_query.split("&") if pair.startswith(DIRECTIVE)]
        return {name.removeprefix(DIRECTIVE): value for name, _, value in pairs}

    @property
    def kept_query(self) -> str:
        """The query without what belongs to this request alone."""
        if not self.own or not any(word in self.raw_query for word in self.own):
            return self.raw_query
        return "&".join(pair for pair in self.raw_query.split("&") if not pair.startswith(self.own))

    def header(self, name: str) -> str:
        wanted = name.encode()
        return next((value.decode("latin-1") for found, value in self.headers if found == wanted), "")

    @property
    def wants_websocket(self) -> bool:
        """Whether the client asks to go on with WebSocket frames."""
        return wants_websocket(self.headers, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request, which is to be answered. The connection's thread."""

    request: Request
    connection: Connection  # whose `when_drained` says when the next part of a long body may go
    # Begins an answer, given its status and headers, with a ``Content-Length`` where it has a body.
    begin: Callable[[int, HeaderFields], None]
    write: Callable[[bytes], None]  # sends a part of the body; nothing is ever left out of it. Not for HEAD.
    end: Callable[[], None]  # the answer is complete: what the client asked for behind it is next
    play: Callable[[], None]  # answers with the stream, as long as it is published

    def respond(self, status: int, text: str = "", headers: HeaderFields = (), *, body: bytes | None = None) -> None:
        if body is None:
            body = b"" if status == HTTPStatus.NO_CONTENT else f"{text or HTTPStatus(status).phrase}\n".encode()
            headers = (*headers, ("Content-Type", "text/plain; charset=utf-8")) if body else headers
        if status >= HTTPStatus.BAD_REQUEST:  # caches keep a 404 unless told, and what is missing may come soon
            headers = (*headers, ("Cache-Control", "no-store"))
        length = () if status == HTTPStatus.NO_CONTENT else (("Content-Length", str(len(body))),)
        self.begin(status, (*headers, *length))
        if body and self.request.method != "HEAD":
            self.write(body)
        self.end()


class Handler(Protocol):
    """Answers GET and HEAD for some paths; one object for all connections."""

    @property
    def in_files(self) -> bool:
        """Whether players fetch a stream file by file here, so that many requests are one play."""

    @property
    def own_parameters(self) -> tuple[str, ...]:
        """What parameters begin with that differ from request to request of one play."""

    def stream_of(self, path: str) -> str | None:
        """Return the stream, ``app/stream``, that `path` (decoded) belongs to. None: there is nothing of that name."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request that the gate allows."""


class Routes:
    """Handlers of paths, by their first folder (``/recordings/``), if it has what is asked for, or by their suffix."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers: Final = dict(handlers)

    def find(self, path: str) -> Handler | None:
        of_folder = self._handlers.get("/" + path[1:].partition("/")[0] + "/")
        if of_folder is not None and of_folder.stream_of(path) is not None:
            return of_folder
        name = path.rpartition("/")[2]
        return self._handlers.get("." + name.rpartition(".")[2]) if "." in name else None


def usual_headers() -> list[tuple[str, str]]:
    return [("Date", formatdate(time.time(), usegmt=True)), ("Server", SERVER)]
