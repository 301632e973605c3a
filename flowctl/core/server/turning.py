"""Connections that admission refuses, told so where their protocol has words for it: HTTP has 429, and 403 for a ban.

A reset tells the person before a browser nothing, and players try again at once. What is said is a constant, behind the
first octets of a request: a browser throws away a connection on which an answer comes unasked. Whatever one does, it is
a socket and no session, for some seconds without a word. Where many are there already, the oldest of the address that
has most is reset: it had most time to ask.

Who is refused may come as often as it likes, so what costs more than a socket has a rate, for all of a listener: the
handshake of TLS, without which nothing can be said there, and any word to those that are banned, who mostly are no
browsers. Beyond it they are reset. Rates, since a peer that is quick is there for some milliseconds.

One address has a quarter of the places and of each rate at most, so that it leaves words to the others.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter, OrderedDict
from functools import partial
from typing import Any, Final

from flowctl.core.loop.lingering import Lingering
from flowctl.core.loop.sockets import close_socket, end_output
from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.server.certificate import Certificate
from flowctl.core.text.addresses import address_key
from flowctl.errors import RemoteProtocolError
from flowctl.pollgroup import PollGroup

MOST_TOLD: Final = 64
"""Most connections of a listener that are told at a time."""
_ASKS_WITHIN_S: Final = 2.0
"""Time to ask within, behind the handshake of TLS where there is one, which has the same once more."""
HANDSHAKES_PER_S: Final = 20.0
"""Handshakes of TLS with those that are refused, and as many at once: 1 ms each with a certificate of RSA."""
BANNED_PER_S: Final = 0.2
"""Banned peers that are told, after the first `BANNED_AT_ONCE`: a person who tries for a minute learns it."""
BANNED_AT_ONCE: Final = 4
_REQUEST_BYTES: Final = 16 * 1024
_SHARES: Final = 4
"""Parts of the places, and of what comes by rates, of which an address has one at most."""
_MOST_ADDRESSES: Final = 1024
"""Addresses whose part of a rate is remembered; those seen longest ago are forgotten, and the rate of all counts on."""


class SharedRate:
    """A rate for all, of which one address has a part at most. Not locked."""

    def __init__(self, rate_per_s: float, most: float) -> None:
        self._rate_per_s: Final = rate_per_s
        self._most: Final = most
        self._all = TokenBucket(most, 0.0)
        self._of: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        own = self._of.setdefault(address, TokenBucket(self._most / _SHARES, now))
        self._of.move_to_end(address)
        if len(self._of) > _MOST_ADDRESSES:
            self._of.popitem(last=False)
        if not own.take_tokens(self._rate_per_s / _SHARES, self._most / _SHARES, now):
            return False
        return self._all.take_tokens(self._rate_per_s, self._most, now)


class TurnedAway:
    """The refused connections of one listener that are told so. The thread of its group.

    `words` are for those that are too many, and for those that are banned. Empty: nothing is said.
    """

    def __init__(self, words: tuple[bytes, bytes], tls: Certificate | None) -> None:
        self._words: Final = words
        self._tls: Final = tls
        self._handshakes: Final = SharedRate(HANDSHAKES_PER_S, HANDSHAKES_PER_S)
        self._banned: Final = SharedRate(BANNED_PER_S, BANNED_AT_ONCE)
        self._there: dict[socket.socket, Any] = {}  # with the timer, or the lingering, of each; oldest first
        self._addresses: dict[socket.socket, str] = {}

    def __len__(self) -> int:
        return len(self._there)

    def turn_away(self, group: PollGroup, sock: socket.socket, host: str, *, banned: bool) -> None:
        """Say that it is refused, and close; without words, or where it came to that often lately, reset."""
        words, address = self._words[banned], address_key(host)
        if not words or not self._may_be_told(address, group.clock(), banned=banned):
            close_socket(sock, abortive=True)
            return
        self._make_room(group, address)
        if self._tls is not None:
            try:
                sock = self._tls.wrap(sock)
            except OSError:  # it has gone, and its socket is closed
                return
        sock.setblocking(False)
        self._addresses[sock] = address
        within_s = _ASKS_WITHIN_S * (1 if self._tls is None else 2)
        self._there[sock] = group.call_later(within_s, partial(self._end, group, sock, reset=True))
        group.watch_input(sock, partial(self._asked, group, sock, words))

    def _may_be_told(self, address: str, now: float, *, banned: bool) -> bool:
        if banned and not self._banned.take(address, now):
            return False
        return self._tls is None or self._handshakes.take(address, now)

    def _make_room(self, group: PollGroup, address: str) -> None:
        """End the oldest of an address that has its part, or where all places are taken of the one that has most."""
        counts = Counter(self._addresses.values())
        if len(self._there) >= MOST_TOLD:
            address = max(counts, key=lambda item: (counts[item], item == address))
        elif counts[address] < max(MOST_TOLD // _SHARES, 1):
            return
        self._give_up(group, next(sock for sock, other in self._addresses.items() if other == address))

    def _asked(self, group: PollGroup, sock: socket.socket, words: bytes) -> None:
        try:
            told = bool(sock.recv(_REQUEST_BYTES)) and sock.send(words) == len(words)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError):
            told = False
        if not told or end_output(sock):
            self._end(group, sock, reset=not told)
            return
        self._there[sock].cancel()
        self._there[sock] = Lingering(sock, group, partial(self._close, sock))

    def _end(self, group: PollGroup, sock: socket.socket, *, reset: bool) -> None:
        self._there[sock].cancel()
        group.unwatch_input(sock)
        self._close(sock, reset)

    def _close(self, sock: socket.socket, reset: bool) -> None:  # noqa: FBT001 - the signature of what Lingering calls
        self._there.pop(sock, None)
        self._addresses.pop(sock, None)
        close_socket(sock, abortive=reset)

    def _give_up(self, group: PollGroup, sock: socket.socket) -> None:
        waits = self._there[sock]
        if isinstance(waits, Lingering):
            waits.stop()
            self._close(sock, reset=False)
        else:
            with contextlib.suppress(OSError):
                self._end(group, sock, reset=True)

    def close(self, group: PollGroup) -> None:
        for sock in list(self._there):
            self._give_up(group, sock)
