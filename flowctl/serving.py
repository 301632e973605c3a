"""What `flowctl serve NAME` needs of a server program.

Others add theirs through the entry point group ``flowctl.servers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowctl.admission import AdmissionLimits
from flowctl.fanout import DEFAULT_FLUSH_INTERVAL_S
from flowctl.limits import Limits
from flowctl.pollgroup import LoopFactory
from flowctl.sender_types import SenderSettings
from flowctl.server import DEFAULT_LIMITS, Server
from flowctl.sockets import SocketOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What the command line, or a caller, wants of a server.

    Args:
        host: address to listen on.
        port: port, 0 for any.
        limits: soft and hard limits of each connection.
        settings: times and budgets of each connection's Sender.
        admission: who may connect.
        socket_options: set on each socket.
        group_count: number of poll groups (threads).
        flush_interval_s: least time between two flushes of a stream.
        loop_factory: makes the groups' loops. None: uvloop where it can be had.
        on_error: told of every exception of a handler, with where it was raised.
        extra: settings of the one program, as text (``--set name=value``).
    """

    host: str = "127.0.0.1"
    port: int = 0
    limits: Limits = DEFAULT_LIMITS
    settings: SenderSettings = field(default_factory=SenderSettings)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    socket_options: SocketOptions = field(default_factory=SocketOptions)
    group_count: int = 1
    flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S
    loop_factory: LoopFactory | None = None
    on_error: Callable[[str, Exception], None] | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProgram:
    """A server that `flowctl serve` can run.

    Args:
        name: as in ``flowctl serve NAME``.
        summary: one line for the help.
        default_port: port where none is given.
        build: makes the server, not started.
        extra: name of each setting that `ServeOptions.extra` may hold, and what it does.
        has_streams: whether `ServeOptions.flush_interval_s` means something to it; if not, ``--flush`` is refused.
    """

    name: str
    summary: str
    default_port: int
    build: Callable[[ServeOptions], Server]
    extra: Mapping[str, str] = field(default_factory=dict)
    has_streams: bool = True
