"""What the kernel holds of a socket's output: the part of a peer's delay that our own queue does not show.

That is what it was given and the peer has not acknowledged (SIOCOUTQ; man 7 tcp). What lies unread in the peer's own
receive buffer is acknowledged and cannot be seen from here; see `flowctl.flow.drain` for what becomes of the figure.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from typing import Final

_SIOCOUTQ: Final = 0x5411
"""Linux's number of the request, the same as TIOCOUTQ."""


_RTT: Final = struct.Struct("=68xI")
"""Up to `tcpi_rtt` of struct tcp_info: eight single bytes, and fifteen numbers before it (linux/tcp.h)."""


def round_trip_us(sock: socket.socket) -> int:
    """Return the smoothed round-trip time that the kernel has measured, in us.

    0 where the socket is closed or no TCP socket.
    """
    with contextlib.suppress(OSError, ValueError, struct.error):
        found: int = _RTT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size))[0]
        return found
    return 0


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel holds of `sock`'s output: unsent, and sent but not acknowledged.

    0 where the socket is closed or the system cannot tell.
    """
    value = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # a closed socket has the descriptor -1
        fcntl.ioctl(sock.fileno(), _SIOCOUTQ, value)
    return value[0]
