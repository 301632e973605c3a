"""What `flowctl serve NAME` needs of a server program.

Others add theirs through the entry point group ``flowctl.servers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowctl.core.flow.limits import DEFAULT_LIMITS, Limits
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.text.addresses import LAST_PORT
from flowctl.core.text.fieldtypes import check_fields
from flowctl.core.text.logfile import LogFileOptions
from flowctl.errors import ConfigError
from flowctl.pollgroup import LoopFactory
from flowctl.pollgroups import MAX_GROUPS

if TYPE_CHECKING:
    from flowctl.core.server.server import Server


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What the command line, or a caller, wants of any server; `flowctl.live.LiveConfig` adds what streams need.

    Args:
        host: address to listen on, or several with commas between.
        port: port, 0 for any.
        listen_fd: descriptor of a socket that listens already, in place of host and port. None: there is none.
        listen_fds: the same of a server with several listeners, by what they are for (``rtmp``, ``rtmps``, ``http``,
            ``https``); in place of all addresses of that name.
        limits: soft and hard limits of each connection.
        settings: times and budgets of each connection's Sender.
        admission: limits on new connections.
        trusted_proxies: addresses and networks of proxies, which name the peer they speak for; see `Server`.
        socket_options: set on each socket.
        group_count: number of poll groups (threads), 1 to 256.
        loop_factory: makes the groups' loops. None: uvloop where it can be had.
        log: file of the log of ``flowctl serve``, and its rotation; code sets its log up by itself.
        on_error: told of every exception of a handler, with where it was raised.
        extra: settings that only this program has, as text: those that `ServerProgram.extra` names.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None
    listen_fds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    limits: Limits = DEFAULT_LIMITS
    settings: SenderSettings = field(default_factory=SenderSettings)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    trusted_proxies: tuple[str, ...] = ()
    socket_options: SocketOptions = field(default_factory=SocketOptions)
    group_count: int = 1
    loop_factory: LoopFactory | None = None
    log: LogFileOptions = field(default_factory=LogFileOptions)
    on_error: Callable[[str, Exception], None] | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.port <= LAST_PORT:
            raise ConfigError(f"port is {self.port}, it must be 0 (any) to {LAST_PORT}")
        if not 1 <= self.group_count <= MAX_GROUPS:
            raise ConfigError(f"group_count is {self.group_count}, it must be 1 to {MAX_GROUPS}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProgram:
    """A server that `flowctl serve` can run.

    Args:
        name: as in ``flowctl serve NAME``.
        summary: one line for the help.
        default_port: port where none is given.
        build: makes the server, not started.
        check: sees whether a server would start that is built of these options, without listening: raises ConfigError
            where it would not. Asked at the start, by ``flowctl config check``, and before a running server takes other
            contents of its file, which the next start will read. None: options that can be made are good.
        extra: name of each setting that only this program has, and what it does.
        has_streams: whether `build` is given a `flowctl.live.LiveConfig`; if not, it is given plain `ServeOptions`, and
            settings of streams are refused.
    """

    name: str
    summary: str
    default_port: int
    build: Callable[[ServeOptions], Server]
    check: Callable[[ServeOptions], None] | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    has_streams: bool = True
