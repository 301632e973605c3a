"""Connections that admission refuses, told so where their protocol has words for it: HTTP has 429.

A reset tells the person before a browser nothing, and players try again at once. What is said is a constant, behind the
first octets of a request: a browser throws away a connection on which an answer comes unasked. Whatever one does, it is
a socket and no session, for two seconds without a word; where many are there already, the others are reset as ever.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from typing import Any, Final

from flowctl.core.loop.lingering import Lingering
from flowctl.core.loop.sockets import close_socket, end_output
from flowctl.pollgroup import PollGroup

MOST_TOLD: Final = 64
"""Most connections of a listener that are told at a time."""
_ASKS_WITHIN_S: Final = 2.0
_REQUEST_BYTES: Final = 16 * 1024


class TurnedAway:
    """The refused connections of one listener that are told so. The thread of its group."""

    def __init__(self) -> None:
        self._there: dict[socket.socket, Any] = {}  # with the timer, or the lingering, of each

    def __len__(self) -> int:
        return len(self._there)

    def turn_away(self, group: PollGroup, sock: socket.socket, words: bytes) -> None:
        """Answer with `words`, and close; without words, or room, reset."""
        if not words or len(self._there) >= MOST_TOLD:
            close_socket(sock, abortive=True)
            return
        sock.setblocking(False)
        self._there[sock] = group.call_later(_ASKS_WITHIN_S, partial(self._end, group, sock, reset=True))
        group.watch_input(sock, partial(self._asked, group, sock, words))

    def _asked(self, group: PollGroup, sock: socket.socket, words: bytes) -> None:
        try:
            told = bool(sock.recv(_REQUEST_BYTES)) and sock.send(words) == len(words)
        except BlockingIOError:
            return
        except OSError:
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
        close_socket(sock, abortive=reset)

    def close(self, group: PollGroup) -> None:
        for sock, waits in list(self._there.items()):
            if isinstance(waits, Lingering):
                waits.stop()
                self._close(sock, reset=False)
            else:
                with contextlib.suppress(OSError):
                    self._end(group, sock, reset=True)
