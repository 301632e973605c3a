"""From an rtmp:// address to a connection on a poll group: resolve, connect with a time limit, place.

Connecting blocks the caller, never a poll group: tools and tests connect their clients one after the other from their
own thread, which also spreads the joins. What has to be known before the three-way handshake is set here: the receive
buffer (the window scale is agreed on in the SYN) and the segment size.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from flowctl.connection import Connection
from flowctl.core.loop.tls import LEAST_VERSION, with_tls
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import BrokenError, ConfigError, RemoteProtocolError
from flowctl.pollgroup import PollGroup
from flowctl.receiver import DEFAULT_CAPACITY_BYTES
from flowctl.wire.client.base import RtmpClient
from flowctl.wire.client.throttle import shrink_receive_buffer
from flowctl.wire.rtmp.url import DEFAULT_APP, RtmpUrl, parse_url

_AUTHORITIES: Final = "SSL_CERT_FILE"
"""Environment variable with a file of certificate authorities; OpenSSL itself reads it."""
_INSECURE: Final = "FLOWCTL_TLS_INSECURE"
DEFAULT_TIMEOUT_S: Final = 5.0
"""Time to connect, for all addresses of the host together: a lost SYN is sent again after 1 and 3 s."""


def parse_address(text: str, schemes: Collection[str] = ("rtmp", "rtmps")) -> RtmpUrl:
    """Return the address of a stream to publish or play, of one of `schemes`.

    In an address of one segment, ``rtmp://host/room``, that segment is sent as the application and the name is empty,
    as FFmpeg does it.
    """
    try:
        url = parse_url(text)
    except RemoteProtocolError as error:
        raise ConfigError(f"{text!r}: {error}", hint="write it like rtmp://host/app/stream") from error
    if url.scheme not in schemes:
        usable = " or ".join(f"{scheme}://" for scheme in schemes)
        raise ConfigError(f"scheme {url.scheme!r} is not supported", hint=f"use an {usable} address")
    if not url.host:
        raise ConfigError("the address has no host", hint="write it like rtmp://host/app/stream")
    if not url.stream and url.app == DEFAULT_APP:
        raise ConfigError(f"{url} names no stream", hint="write it like rtmp://host/app/stream")
    return url


def connect_socket(
    url: RtmpUrl, *, host: str = "", timeout_s: float = DEFAULT_TIMEOUT_S, receive_buffer_bytes: int = 0
) -> socket.socket:
    """Return a connected socket, tried at each address of `host`, or that of `url`, in turn; blocks the caller.

    With ``rtmps`` it speaks TLS; the handshake comes when it is read, and an error of it ends the connection.
    """
    host = host or url.host
    where = f"{host}:{url.port}"
    try:
        infos = socket.getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BrokenError(f"cannot resolve {host}: {error.strerror}", hint="check the host's name") from error
    end = time.monotonic() + timeout_s
    last: OSError = TimeoutError("no address")
    for family, kind, protocol, _, address in infos:
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            if receive_buffer_bytes:
                shrink_receive_buffer(sock, receive_buffer_bytes)
            sock.settimeout(left_s)
            sock.connect(address)
            sock.setblocking(False)
        except OSError as error:
            last = error
            sock.close()
        else:
            return sock if url.scheme != "rtmps" else with_tls(sock, client_context(), host=url.host)
    if isinstance(last, TimeoutError):
        raise BrokenError(f"nobody answers at {where} within {timeout_s:g} s", hint="check host and port") from last
    raise BrokenError(
        f"cannot connect to {where}: {last.strerror or last}", hint="check host and port, and that the server runs"
    ) from last


def trust(*, authorities: Path | None = None, insecure: bool = False) -> None:
    """Set whose certificates are trusted by all clients of this process and of processes that it starts."""
    if authorities is not None:
        os.environ[_AUTHORITIES] = str(authorities)
    if insecure:
        os.environ[_INSECURE] = "1"


def client_context() -> ssl.SSLContext:
    """Return what a client's TLS goes by: the certificate and the name in it are verified; see `trust`."""
    file = os.environ.get(_AUTHORITIES) or None
    try:
        context = ssl.create_default_context(cafile=file)
    except OSError as error:
        raise ConfigError(f"cannot use the authorities in {file}: {error}", hint="it must be a file in PEM") from error
    context.minimum_version = LEAST_VERSION
    if os.environ.get(_INSECURE) == "1":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def start_client(
    group: PollGroup,
    client: RtmpClient,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    receive_buffer_bytes: int = 0,
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    settings: SenderSettings | None = None,
) -> Connection:
    """Connect `client` to its address and place it on `group`; blocks the caller, not the group."""
    sock = connect_socket(client.url, timeout_s=timeout_s, receive_buffer_bytes=receive_buffer_bytes)
    return place_client(group, client, sock, capacity_bytes=capacity_bytes, settings=settings)


def place_client(group: PollGroup, client: RtmpClient, sock: socket.socket, **settings: Any) -> Connection:
    """Place `client` on `group` with a connected socket; settings as for `Connection`."""
    client.sock = sock
    connection = Connection(sock, client, clock=group.clock, **settings)
    try:
        group.add_pollable(connection, connection.registration)
    except BaseException:
        sock.close()
        raise
    return connection


_STOP_S: Final = 2.0

ClientT = TypeVar("ClientT", bound=RtmpClient)


class ClientRun(Generic[ClientT]):
    """One client and its poll group; use it as a context."""

    client: ClientT  # the present attempt. Set by `start`.

    def __init__(self, make: Callable[[str, Callable[[Any], None]], ClientT], **settings: Any) -> None:
        self._make = make
        self._settings = settings
        self._group = PollGroup("client")
        self._ended = threading.Event()

    def __enter__(self) -> ClientRun[ClientT]:
        self._group.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._group.stop(_STOP_S)

    def start(self, parameters: str = "") -> None:
        """Connect; blocks until the connection is made."""
        self._ended.clear()
        self.client = self._make(parameters, lambda _: self._ended.set())
        start_client(self._group, self.client, **self._settings)

    def wait(self) -> None:
        """Wait until the client has ended, logging in where the server wants it."""
        while self._ended.wait() and (rejected := self.client.rejected) is not None:
            if rejected.retry_parameters is None:
                return
            self.start(rejected.retry_parameters)

    def finish(self, details: str, deadline_s: float = _STOP_S) -> bool:
        if not self.client.ended:
            self._group.call_soon(self.client.finish, details)
        return self._ended.wait(deadline_s)
