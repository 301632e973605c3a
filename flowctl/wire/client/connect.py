"""From an address to a connection on a poll group: resolve, connect with a time limit, shake hands of TLS, place.

Connecting blocks the caller, never a poll group: tools and tests connect their clients one after the other from their
own thread, which also spreads the joins. What has to be known before the three-way handshake is set here: the receive
buffer (the window scale is agreed on in the SYN) and the segment size.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import structlog

from flowctl.connection import Connection
from flowctl.core.loop.trust import secured
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.text.addresses import join_host_port
from flowctl.errors import BrokenError
from flowctl.pollgroup import PollGroup
from flowctl.receiver import DEFAULT_CAPACITY_BYTES
from flowctl.wire.client.address import MOST_REDIRECTS, redirected
from flowctl.wire.client.base import RtmpClient
from flowctl.wire.client.throttle import shrink_receive_buffer
from flowctl.wire.rtmp.url import RtmpUrl

DEFAULT_TIMEOUT_S: Final = 5.0
"""Time to connect, for all addresses of the host together: a lost SYN is sent again after 1 and 3 s.
The handshake of TLS has as long."""

STARTING_S: Final = 15.0
"""Time in which a server that was started on the line before comes to listen: 1 s, and 8 s on a busy machine."""
_AGAIN_S: Final = 0.1
_Found = TypeVar("_Found")
_log: Final = structlog.get_logger("flowctl.connect")


def once_it_listens(connect: Callable[[], _Found], url: RtmpUrl) -> _Found:
    """Return what `connect` returns, tried again for `STARTING_S` while the server refuses, which is said once."""
    until = None
    while True:
        try:
            return connect()
        except BrokenError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            if until is None:
                until = time.monotonic() + STARTING_S
                _log.info("nobody listens there yet, trying again", url=str(url), for_s=STARTING_S)
            elif time.monotonic() >= until:
                raise
        time.sleep(_AGAIN_S)


def connect_socket(
    url: RtmpUrl, *, host: str = "", timeout_s: float = DEFAULT_TIMEOUT_S, receive_buffer_bytes: int = 0
) -> socket.socket:
    """Return a connected socket, tried at each address of `host`, or that of `url`, in turn; blocks the caller.

    With ``rtmps`` its TLS handshake is done, for which the certificate has been verified.
    """
    host = host or url.host
    where = join_host_port(host, url.port)
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
            return secured(sock, url.host, timeout_s=timeout_s) if url.tls else sock
    if isinstance(last, TimeoutError):
        raise BrokenError(f"nobody answers at {where} within {timeout_s:g} s", hint="check host and port") from last
    raise BrokenError(
        f"cannot connect to {where}: {last.strerror or last}", hint="check host and port, and that the server runs"
    ) from last


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
        connection.live_on(group)
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

    def start(self, parameters: str = "", url: RtmpUrl | None = None) -> None:
        """Connect, to another address than the client's own where one is given; blocks until the connection is made."""
        self._ended.clear()
        self.client = client = self._make(parameters, lambda _: self._ended.set())
        client.url = url or client.url

        def connect() -> Connection:
            return start_client(self._group, client, **self._settings)

        if parameters or url:  # it was there a moment ago, or another server says that it is
            connect()
        else:
            once_it_listens(connect, client.url)

    def wait(self) -> None:
        """Wait until the client has ended, logging in where the server wants it, and following where it sends us."""
        redirects = 0
        while self._ended.wait() and (rejected := self.client.rejected) is not None:
            url = redirected(self.client.url, rejected) if redirects < MOST_REDIRECTS else None
            if url is not None:
                redirects += 1
                self.start("", url)
            elif rejected.retry_parameters is not None:
                self.start(rejected.retry_parameters, self.client.url)
            else:
                return

    def finish(self, details: str, deadline_s: float = _STOP_S) -> bool:
        if not self.client.ended:
            self._group.call_soon(self.client.finish, details)
        return self._ended.wait(deadline_s)
