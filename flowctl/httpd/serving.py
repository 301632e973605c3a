"""The HTTP listeners of a live server: what its settings name, with the table of handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flowctl.httpd.exchange import Handler, Routes
from flowctl.httpd.limits import HttpLimits
from flowctl.httpd.session import FlvRoute, session_factory
from flowctl.live.server import LiveServer

NAME: Final = "http"


def listen_http(
    server: LiveServer,
    host: str,
    port: int,
    *,
    handlers: Mapping[str, Handler] | None = None,
    limits: HttpLimits | None = None,
) -> tuple[str, int]:
    """Have a live server, before its start, serve HTTP on one more address; return address and port.

    Args:
        server: the server.
        host: address.
        port: 0 lets the system choose one.
        handlers: who answers paths of other suffixes than ``.flv``.
        limits: of each connection.

    Raises:
        ConfigError: the address cannot be used.
    """
    flv = FlvRoute()
    routes = Routes({flv.suffix: flv, **(handlers or {})})
    factory = session_factory(server.hub, routes, server.config.http_origin_set, limits)
    return server.listen(host, port, session_factory=factory, name=NAME)


def serve_http(server: LiveServer, handlers: Mapping[str, Handler] | None = None) -> list[tuple[str, int]]:
    """Have a live server, before its start, serve HTTP where its settings say so; return the addresses.

    Raises:
        ConfigError: one cannot be used.
    """
    return [listen_http(server, host, port, handlers=handlers) for host, port in server.config.http_addresses]
