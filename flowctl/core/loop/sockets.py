"""The sockets of connections: their options, with the reasons for the values; what the kernel tells of one; its end.

What the kernel holds of a socket's output is the part of a peer's delay that our own queue does not show: what it was
given and the peer has not acknowledged (SIOCOUTQ; man 7 tcp). What lies unread in the peer's own receive buffer is
acknowledged and cannot be seen from here; see `flowctl.core.flow.meters` for what becomes of the figure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.core.loop.tls import TlsSocket
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError

NOTSENT_LOWAT_BYTES: Final = 128 * 1024
"""Default of TCP_NOTSENT_LOWAT: how much unsent data the kernel takes before it says EAGAIN.

Without it a stalled viewer of a 2.5 Mbit/s stream is noticed after about 4 MB, that is 13 s. Small enough that
what our own kernel hides is less than a second of media, large enough that the key frame of a 10 Mbit/s stream does
not look like a slow viewer; the measurements are in docs/benchmarks.md. The receive buffer of the peer, which its
kernel may tune up to megabytes, comes on top and is not ours to set.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketOptions:
    """What is set on every accepted or connected socket.

    Args:
        notsent_lowat_bytes: TCP_NOTSENT_LOWAT; 0 leaves the kernel's default.
        send_buffer_bytes: SO_SNDBUF; 0 leaves the kernel's autotuning, which is right for nearly everybody.
        receive_buffer_bytes: SO_RCVBUF; 0 leaves the kernel's autotuning.

    Raises:
        ConfigError: a size is negative.
    """

    notsent_lowat_bytes: int = NOTSENT_LOWAT_BYTES
    send_buffer_bytes: int = 0
    receive_buffer_bytes: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("notsent_lowat_bytes", "send_buffer_bytes", "receive_buffer_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 (the kernel's choice) or more")

    def apply(self, sock: socket.socket) -> None:
        """Make `sock` non-blocking and set the options on it."""
        sock.setblocking(False)
        if sock.family in {socket.AF_INET, socket.AF_INET6}:
            # Media is written in whole flushes: waiting to fill a segment would only add delay.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.notsent_lowat_bytes and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self.notsent_lowat_bytes)
        if self.send_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer_bytes)
        if self.receive_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer_bytes)


def limit_unsent(sock: socket.socket, size_bytes: int) -> None:
    """Set TCP_NOTSENT_LOWAT of `sock`; 0 is the kernel's default. Harmless for what is closed, or no TCP socket."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT") and sock.family in {socket.AF_INET, socket.AF_INET6}:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


_SLOWED_RECEIVE_BYTES: Final = 256 * 1024
"""Receive buffer of a peer that sends more than it may: enough for 10 Mbit/s from 200 ms away."""


def limit_received(sock: socket.socket) -> None:
    """Have the kernel receive less ahead: its own tuning goes up to tens of megabytes, minutes of small messages."""
    with contextlib.suppress(OSError):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > 2 * _SLOWED_RECEIVE_BYTES:  # as Linux tells it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOWED_RECEIVE_BYTES)


_PROBES: Final = 3
"""Probes without an answer after which a silent peer is dead; they fill the second half of the time it is given."""


def notice_dead_peer(sock: socket.socket, after_s: float) -> None:
    """Have the kernel end a TCP connection whose other end has acknowledged nothing for `after_s` seconds."""
    half_s = max(1, int(after_s / 2))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", half_s),
        ("TCP_KEEPINTVL", max(1, half_s // _PROBES)),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", int(after_s * 1000)),  # where something was sent, the system does not probe
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def acknowledge(sock: socket.socket) -> None:
    """Have the kernel acknowledge at once what has come (TCP_QUICKACK). Harmless for what is no TCP socket."""
    if hasattr(socket, "TCP_QUICKACK") and sock.family in {socket.AF_INET, socket.AF_INET6}:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


_NO_BYTES: Final = bytes(4)
_SIOCOUTQ: Final = 0x5411
"""Linux's number of the request, the same as TIOCOUTQ."""

_TCP_INFO: Final = struct.Struct("=2xBBB19xI28xI8xI48xQ100xI")
"""Layout of struct tcp_info up to `tcpi_snd_wnd`, which Linux has since 5.4 (linux/tcp.h)."""


class LineFigures(NamedTuple):
    """What the kernel knows of the line to a peer, and of the kernel at its other end.

    A peer whose kernel answers while its window is closed does not read; one whose kernel is silent has lost its line.
    """

    retransmits: int  # times that the oldest data was sent again since an acknowledgement of anything new
    probes: int  # probes of a closed window since the peer's kernel last answered
    backoff: int  # how often the wait before the next of either has doubled
    unacked_segments: int
    heard_ms: int  # time since the last acknowledgement
    rtt_us: int  # smoothed
    acked_bytes: int  # since the connection began
    window_bytes: int  # room that the peer's kernel has told of, at most; what is under way counts as taken


def line_figures(sock: socket.socket) -> LineFigures | None:
    """Return what the kernel knows of the line; None where the socket is closed, no TCP socket, or the kernel old."""
    with contextlib.suppress(OSError, ValueError, struct.error):
        return LineFigures(*_TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)))
    return None


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel holds of `sock`'s output: unsent, and sent but not acknowledged.

    What TLS keeps for the kernel counts too. 0 where the socket is closed or the system cannot tell.
    """
    try:
        held_bytes = int.from_bytes(fcntl.ioctl(sock.fileno(), _SIOCOUTQ, _NO_BYTES), sys.byteorder)
    except (OSError, ValueError):  # a closed socket has the descriptor -1
        held_bytes = 0
    return held_bytes + sock.kept_bytes if isinstance(sock, TlsSocket) else held_bytes


_LEFT_UNREAD_BYTES: Final = 256 * 1024
"""Most input that is thrown away at once."""


def close_socket(sock: socket.socket, *, abortive: bool) -> None:
    """Close `sock`; `abortive` resets the connection, so that the kernel frees what it still holds for the peer.

    An orderly close does what `end_output` does first. Where the peer may send more, see `flowctl.core.loop.lingering`.
    """
    if abortive:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        end_output(sock)
    sock.close()


def drop_socket(sock: socket.socket) -> None:
    """Close this process's copy of `sock` and nothing else, even where a loop holds on to it: in a forked child."""
    with contextlib.suppress(OSError):  # closed already
        os.close(sock.detach())


def end_output(sock: socket.socket) -> bool:
    """Send the end of our stream, and return whether the peer has ended its own, or the connection is broken.

    What has come and is not wanted any more is read: the kernel resets a connection that is closed with unread input,
    and the reset overtakes what was sent last, which is why the peer was refused.
    """
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        return True
    return ended_by_peer(sock) and not (isinstance(sock, TlsSocket) and sock.kept_bytes)


def ended_by_peer(sock: socket.socket) -> bool:
    """Throw away what has come, up to a bound; return whether the peer's end, or a broken connection, is behind it."""
    left = _LEFT_UNREAD_BYTES
    try:
        while left > 0 and (count := len(sock.recv(min(left, 64 * 1024), socket.MSG_DONTWAIT))):
            left -= count
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return left > 0


def peer_name(sock: socket.socket) -> tuple[str, int]:
    """Return (address, port) of the other end; ("local", 0) for a socket without an address."""
    try:
        name = sock.getpeername()
    except OSError:
        return "gone", 0
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]), int(name[1])
    return "local", 0
