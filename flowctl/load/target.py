"""Where a load goes: the address is resolved and checked before anything is started.

Load goes to the loopback interface unless it is said otherwise. The name of the server is resolved once, every address
that it stands for is checked, and the one that is used is handed to the workers as it is: a name that means another
machine a moment later changes nothing.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from flowctl.core.loop.trust import secured
from flowctl.core.text.addresses import is_loopback
from flowctl.errors import BrokenError, ConfigError
from flowctl.load.peers.link import Target
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import once_it_listens
from flowctl.wire.rtmp.url import RtmpUrl

SPARE_DESCRIPTORS: Final = 64
"""Descriptors for the loop, pipes, and connections that are just closing."""

_GENEROUS_DESCRIPTORS: Final = 16_384
_ANSWER_S: Final = 2.0
_TLS_S: Final = 5.0
_Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]


SCHEMES: Final = ("rtmp", "rtmps", "http", "https", "ws", "wss")
"""Schemes of addresses over which streams may be played."""


def resolve(text: str, *, allow_remote: bool) -> tuple[RtmpUrl, Target]:
    """Return the address of the stream, and where to connect to."""
    url = parse_address(text, SCHEMES)
    try:
        answers = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BrokenError(f"cannot resolve {url.host}: {error.strerror}", hint="check the host's name") from error
    addresses = [(family, address) for family, _, _, _, address in answers]
    remote = [address[0] for _, address in addresses if not is_loopback(str(address[0]))]
    if remote and not allow_remote:
        raise ConfigError(
            f"{url.host} is {remote[0]}, which is not the loopback interface",
            hint="load goes to this machine only; --allow-remote is for servers that are yours to load",
        )
    answering = None
    with contextlib.suppress(BrokenError):
        answering = once_it_listens(lambda: _answering(addresses), url)
    family, address = answering or addresses[0]
    if answering and url.tls:
        _shake_hands(url, family, address)
    return url, Target(family, tuple(address))


def _shake_hands(url: RtmpUrl, family: socket.AddressFamily, address: tuple[Any, ...]) -> None:
    """See that TLS is spoken there and the certificate is trusted, before thousands find out that it is not."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_ANSWER_S)
        sock.connect(address)
        secured(sock, url.host, timeout_s=_TLS_S).close()


def can_spread(target: Target) -> bool:
    """Return whether viewers of `target` can have addresses of their own: of IPv4's loopback network, and to it."""
    return target.family == socket.AF_INET and is_loopback(str(target.address[0]))


def _answering(addresses: Sequence[_Address]) -> _Address:
    """Return where a server listens: localhost may stand for ::1 and 127.0.0.1, and a server for one of them."""
    last: OSError | None = None
    for family, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(_ANSWER_S)
                sock.connect(address)
                return family, address
        except OSError as error:
            last = error
    raise BrokenError("nobody listens") from last


def check_descriptors(viewers: int) -> None:
    """Raise the limit on descriptors as far as needed; the workers inherit it."""
    needed = viewers + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= max(needed, _GENEROUS_DESCRIPTORS):
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{viewers} viewers in one process need {needed} descriptors, allowed are {hard}",
            hint=f"ulimit -Hn {needed} as root, or more --workers",
        )
    # Attackers open more than one connection each: they get what there is.
    generous = max(needed, _GENEROUS_DESCRIPTORS)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (generous if hard == resource.RLIM_INFINITY else min(generous, hard), hard)
    )
