"""One connection to a listener, made again whenever it has ended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.inproc import Dial, DirectEnd, InprocNames
from flowctl.wire.zmtp.link import Link, LinkOptions, ZmtpLink, why_cut
from flowctl.wire.zmtp.mechanism import Mechanism, Properties

_CONNECT_S: Final = 10.0
"""Time for resolving a name and connecting."""


class ZmtpDialler:
    """Dials; all methods on the group's thread.

    Args:
        endpoint: where: ``tcp://HOST:PORT``, ``ipc://PATH`` or ``inproc://NAME``.
        own: what it says of itself.
        mechanism: makes what a connection of ZMTP begins with, given `own`.
        names: those of inproc.
        message: called with each message.
        up: called with the link, once the listener is known.
        down: called once it has ended, with why it was cut if it was, or none could be made; before it is tried again.

    Attributes:
        link: None: there is none, or not yet.
        redials: the times between two tries.
    """

    def __init__(
        self,
        group: PollGroup,
        endpoint: str,
        own: Properties,
        mechanism: Callable[[Properties], Mechanism],
        options: LinkOptions,
        names: InprocNames,
        backoff: Backoff,
        *,
        message: Callable[[list[bytes]], object],
        up: Callable[[Link], object],
        down: Callable[[str], object],
    ) -> None:
        self.link: Link | None = None
        self.redials: Final = Redial(backoff)
        self.closed = False
        self._group: Final = group
        self._scheme, _, self._place = endpoint.partition("://")
        self._own: Final = own
        self._mechanism: Final = mechanism
        self._options: Final = options
        self._names: Final = names
        self._message: Final = message
        self._up, self._down = up, down
        self._on_its_way: asyncio.Task[None] | ZmtpLink | Dial | asyncio.TimerHandle | None = None

    def dial(self) -> None:
        """Make a connection."""
        if self.closed or self.link is not None:
            return
        self._give_up()
        self.redials.begin()
        if self._scheme == "inproc":
            self._on_its_way = Dial(self._group, self._own, self._linked_directly)
            self._names.dial(self._place, self._on_its_way)
        else:
            self._on_its_way = self._group.loop.create_task(self._connect())

    def close(self) -> None:
        """Dial no more. A link that there is stays, to be ended."""
        self.closed = True
        self._give_up()

    # --- inner steps ---------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Stop what is on its way to be a link."""
        going, self._on_its_way = self._on_its_way, None
        if isinstance(going, ZmtpLink):
            going.close("given up")
        elif isinstance(going, Dial):
            self._names.withdraw(self._place, going)
        elif going is not None:
            going.cancel()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                sock = await _connected(self._scheme, self._place)
        except (OSError, TimeoutError, UnicodeError):  # the last of a name that cannot be one
            self._failed()
            return
        link = ZmtpLink(
            *(self._options, self._mechanism(self._own), self._message),
            known=lambda: self._linked(link),
            gone=lambda reason, details: self._ended(link, reason, details),
        )
        self._on_its_way = link
        link.live_on(self._group, sock)

    def _linked_directly(self, end: DirectEnd) -> None:
        if self.closed or self.link is not None:
            end.end("")
            return
        end.message, end.gone = self._message, lambda: self._ended(end, CloseReason.PEER_CLOSED, "")
        self._linked(end)

    def _linked(self, link: Link) -> None:
        self._on_its_way = None
        self.link = link
        self._up(link)

    def _ended(self, link: Link, reason: CloseReason, details: str) -> None:
        if link in {self.link, self._on_its_way}:
            self.link = None
            self._failed(why_cut(reason, details))

    def _failed(self, why: str = "") -> None:
        self._on_its_way = None
        self._down(why)
        if not self.closed:
            self._on_its_way = self._group.call_later(self.redials.delay_s(), self.dial)


async def _connected(scheme: str, place: str) -> socket.socket:
    """Return a socket that is connected.

    Raises:
        OSError: it cannot be.
    """
    loop = asyncio.get_running_loop()
    places: list[tuple[int, Any]]
    if scheme == "ipc":
        places = [(socket.AF_UNIX, "\0" + place[1:] if place.startswith("@") else place)]
    else:
        host, _, port = place.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET  # a name is one of IPv4, as ZeroMQ has it
        bare = host.removeprefix("[").removesuffix("]")
        infos = await loop.getaddrinfo(bare, int(port), family=family, type=socket.SOCK_STREAM)
        places = [(info[0], info[4]) for info in infos]
    error: OSError | None = None
    for kind, where in places:
        sock = socket.socket(kind, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
        except BaseException as fault:
            sock.close()
            if not isinstance(fault, OSError):
                raise
            error = fault
        else:
            return sock
    raise error or OSError(f"{place} has no address")
