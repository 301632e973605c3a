"""Lingering close: a socket that is done is kept for a while, so that its peer gets what it was sent last.

A kernel answers what comes for a closed socket with a reset, and the reset overtakes what is still on its way: a peer
that goes on sending, or had sent more than was read, loses the tail of a stream, or never learns why it was refused.
So our half is ended (shutdown), what still comes is read and thrown away, and the socket is closed when the peer ends
its half, when nothing moves any more, or after a while. This is nginx's ``lingering_close`` and Apache's too.

What a peer can make of it is bounded: so many bytes are read and no more. Who sends more although it has acknowledged
all that we sent, the end included, is reset; otherwise the rest stays in the kernel, whose window closes. And the place
that admission gave the connection is kept until the socket is closed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Final

from flowctl.core.loop.sockets import end_output, unacknowledged_bytes
from flowctl.core.loop.tls import TlsSocket
from flowctl.pollgroup import PollGroup

LINGER_S: Final = 30.0
"""Longest time that a socket lingers: that of nginx (``lingering_time``) and of Apache (MAX_SECS_TO_LINGER)."""
LINGER_QUIET_S: Final = 2.0
"""Time without input and acknowledgements after which lingering ends: Apache's SECONDS_TO_LINGER."""
LINGER_BYTES: Final = 1024 * 1024
"""Most input that is thrown away: most of a second of a 10 Mbit/s publisher, which has heard of our end by then."""
_TURN_BYTES: Final = 64 * 1024
"""Most input that is thrown away at a time, before the others on the thread get their turn."""


Part = bytes | memoryview
"""A part of what is sent last: a view, so that many who are cut within one large message share it."""


def write_parts(sock: socket.socket, parts: list[Part]) -> None:
    """Have the kernel take what it takes of `parts`, and leave the rest in there.

    Raises:
        OSError: the connection is broken.
    """
    while parts:
        try:
            parts[0] = memoryview(parts[0])[sock.send(parts[0]) :]
        except (BlockingIOError, InterruptedError):
            return
        if not parts[0]:
            del parts[0]


class Lingering:
    """A socket between the end of its connection and its close; a deadline owner. The thread of its group.

    A peer may acknowledge nothing of what it was sent for `unread_s`, where that is longer than `LINGER_QUIET_S`. The
    window of a slow reader opens in steps of up to half its receive buffer, each of which takes it seconds.

    `unsaid` is what the kernel has not taken yet of the last that is sent; the end of the stream goes behind it.
    """

    __slots__ = (
        *("_discarded_bytes", "_group", "_moved_at", "_over"),
        *("_peer_done", "_seen", "_sock", "_unread_s", "_unsaid", "_until"),
    )

    def __init__(
        self,
        sock: socket.socket,
        group: PollGroup,
        over: Callable[[bool], None],
        unread_s: float = 0.0,
        unsaid: Sequence[Part] = (),
    ) -> None:
        self._sock: Final = sock
        self._group: Final = group
        self._over: Final = over
        self._discarded_bytes = 0
        self._peer_done = False  # it has ended its stream: what lies in the kernel is all that comes
        self._seen = (unacknowledged_bytes(sock), 0)  # what was unacknowledged and what discarded at the last look
        self._moved_at = group.now()  # when a look first found them so
        self._until: Final = self._moved_at + LINGER_S
        self._unread_s: Final = unread_s
        self._unsaid: Final = list(unsaid)
        group.watch_input(sock, self._input_ready)
        if self._unwritten:
            group.watch_output(sock, self._push)
        group.deadlines.set(self, self._moved_at + LINGER_QUIET_S)

    def stop(self) -> None:
        """Watch and wait no more; `over` is not called."""
        self._group.unwatch_input(self._sock)
        self._group.unwatch_output(self._sock)
        self._group.deadlines.remove(self)

    @property
    def delivered(self) -> bool:
        """Whether the peer's kernel has all that it is sent. Any thread."""
        return not self._unsaid and not unacknowledged_bytes(self._sock)

    @property
    def _unwritten(self) -> bool:
        """Whether our kernel has not got all that is sent yet."""
        return bool(self._unsaid) or (isinstance(self._sock, TlsSocket) and self._sock.kept_bytes > 0)

    def _push(self) -> None:
        """Have the kernel take what is left, and what TLS has kept, and the end of the stream behind it."""
        sock = self._sock
        try:
            if self._unsaid:
                write_parts(sock, self._unsaid)
                if not self._unsaid and end_output(sock):
                    self._end(reset=False)
                    return
            if not self._unsaid and (not isinstance(sock, TlsSocket) or sock.push()):
                self._group.unwatch_output(sock)
                self._group.watch_input(sock, self._input_ready)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(reset=False)

    def _input_ready(self) -> None:
        try:
            count = len(self._sock.recv(_TURN_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(reset=False)
            return
        self._discarded_bytes += count
        if not count and self._unwritten:
            self._group.unwatch_input(self._sock)  # it has ended its half, and may be reading to the end of ours
        elif not count:
            self._end(reset=False)
        elif self._discarded_bytes >= LINGER_BYTES and not self._peer_done:
            if unacknowledged_bytes(self._sock):
                self._group.watch_end(self._sock, self._peer_ended)
            else:
                self._end(reset=True)

    def _peer_ended(self, broken: bool) -> None:  # noqa: FBT001 - the signature of `watch_end`
        if broken:
            self._end(reset=False)
        else:
            self._peer_done = True
            self._group.watch_input(self._sock, self._input_ready)

    def deadline_due(self, now: float) -> None:
        seen = (unacknowledged_bytes(self._sock), self._discarded_bytes)
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        useless = self._discarded_bytes >= LINGER_BYTES and not seen[0]
        unread = seen[0] > 0 or bool(self._unsaid)
        still = now >= self._moved_at + max(LINGER_QUIET_S, self._unread_s if unread else 0.0)
        if now >= self._until or still or useless:
            # What is not acknowledged by now is not read, and the kernel would keep it for minutes.
            self._end(reset=useless or unread)
        else:
            self._group.deadlines.set(self, min(self._until, now + LINGER_QUIET_S))

    def _end(self, *, reset: bool) -> None:
        self.stop()
        self._over(reset)
