"""The HTTP listeners of a live server: what its settings name, with the table of handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from flowctl.connection import Session
from flowctl.live.config import Redirect
from flowctl.live.httpd.exchange import Handler, HttpLimits, Routes
from flowctl.live.httpd.session import CONNECTION_COST, FlvRoute, HttpSessions, PlaylistRoute
from flowctl.live.server import LiveServer

NAME: Final = "http"
SECURE: Final = "https"


def listen_http(
    server: LiveServer,
    host: str,
    port: int,
    *,
    handlers: Mapping[str, Handler] | None = None,
    limits: HttpLimits | None = None,
) -> tuple[str, int]:
    """Have a live server, before its start, serve HTTP on one more address; return address and port."""
    factory = _factory(server, handlers, limits)
    return server.listen(host, port, session_factory=factory, name=NAME, cost=CONNECTION_COST)


def serve_http(server: LiveServer, handlers: Mapping[str, Handler] | None = None) -> list[tuple[str, int]]:
    """Have a live server, before its start, serve HTTP where its settings say so, with TLS and without."""
    factory = _factory(server, handlers, None)
    where = dict(server.config.listening)
    listen = partial(server.listen_all, session_factory=factory, cost=CONNECTION_COST)
    return listen(NAME, where[NAME]) + listen(SECURE, where[SECURE], tls=server.certificate)


def _factory(
    server: LiveServer, handlers: Mapping[str, Handler] | None, limits: HttpLimits | None
) -> Callable[[], Session]:
    own: list[FlvRoute | PlaylistRoute] = [FlvRoute()]
    if server.config.redirect is not Redirect.OFF:
        own.append(PlaylistRoute())
    routes = Routes({**{item.suffix: item for item in own}, **(handlers or {})})
    return HttpSessions(server.hub, routes, server.config.http_origin_set, limits)
