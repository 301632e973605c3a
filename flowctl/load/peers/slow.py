"""What makes a viewer slow: for each profile the socket it uses, the pace at which it reads, and its manners.

A `Manner` is shared by all viewers of a profile; each gets a pace of its own. What the kernel must know before it
connects (receive buffer, segment size) is set on the socket here.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flowctl.load.peers.paces import ReadPace
from flowctl.load.results.result import PeerKind
from flowctl.wire.client.throttle import shrink_receive_buffer

_SO_ATTACH_FILTER: Final = 26  # Linux, asm-generic/socket.h; Python has no name for it
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of BPF: return 0 octets, which drops the packet


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How the viewers of one profile behave."""

    # makes the pace of a viewer, given the time of its first frame. None: reads all there is.
    pace: Callable[[float], ReadPace] | None = None
    reads_never: bool = False
    receive_buffer_bytes: int = 0
    window_bytes: int = 0
    ack_rate: float = 0.0  # bits per second that are acknowledged without being read; 0 for none
    half_close: bool = False
    vanish_after_s: float | None = None  # when it is gone, from its first frame. None: it is not.
    stay_s: float | None = None  # leaves after so long, from its first frame, and comes back. None: stays.
    join_at_s: float | None = None  # joins at this moment of the run instead of its place in the ramp. None: the ramp.


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One kind of peer."""

    name: str  # as written on the command line, without parameters
    kind: PeerKind = PeerKind.SLOW
    summary: str
    explanation: str
    parameters: str = ""  # how the parameters are written, "" for none; in brackets when they may be left out
    example: str = ""
    expectation: str = ""
    alias: str = ""
    over_http: bool = False
    # returns the manner of its viewers, of the parameters by their names in lower case
    make: Callable[..., Manner] = Manner

    @property
    def usage(self) -> str:
        if self.parameters.startswith("["):
            return f"{self.name}[@{self.parameters[1:]}"
        return f"{self.name}@{self.parameters}" if self.parameters else self.name


def prepare_socket(sock: socket.socket, manner: Manner) -> None:
    """Set what has to be known before the connection is made."""
    if manner.receive_buffer_bytes:
        shrink_receive_buffer(sock, manner.receive_buffer_bytes)
    clamp = getattr(socket, "TCP_WINDOW_CLAMP", None)
    if manner.window_bytes and clamp is not None:
        sock.setsockopt(socket.IPPROTO_TCP, clamp, manner.window_bytes)


def drop_everything(sock: socket.socket) -> bool:
    """Make the kernel drop every packet that comes in for `sock`, unanswered; return whether it does.

    A classic BPF filter sees packets before TCP does, so the other end gets no acknowledgement, no window, no reset:
    to it the machine is gone. It needs no privileges. (Closing a socket under TCP_REPAIR, which does, would not be
    enough: on the same machine the kernel answers for the missing socket with a reset.)
    """
    instruction = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return False
    return True
