"""What `flowctl serve NAME` needs of a server program.

Others add theirs through the entry point group ``flowctl.servers``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowctl.fanout.fanout import DEFAULT_FLUSH_INTERVAL_S
from flowctl.fieldtypes import check_fields
from flowctl.flow.limits import Limits
from flowctl.loop.sockets import SocketOptions
from flowctl.pollgroup import LoopFactory
from flowctl.sending.settings import SenderSettings
from flowctl.server.admission import AdmissionLimits
from flowctl.server.server import DEFAULT_LIMITS, Server


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What the command line, or a caller, wants of a server.

    Args:
        host: address to listen on.
        port: port, 0 for any.
        limits: soft and hard limits of each connection.
        settings: times and budgets of each connection's Sender.
        admission: who may connect.
        trusted_proxies: addresses and networks of proxies, which say whom they speak for; see `Server`.
        socket_options: set on each socket.
        group_count: number of poll groups (threads).
        flush_interval_s: longest time between two flushes of a stream while there is something to send.
        policy: what a program with streams leaves out for a slow viewer, a key of `flowctl.flow.policy.LIVE_POLICIES`.
        return_after_s: when a viewer's kernel takes something again after so long, a program with streams skips what
            became old meanwhile. 0: it sends everything.
        memory_budget_bytes: what may wait for all slow viewers of this server together. 0: there is no limit.
        shadow_limits: limits to be compared with the real ones, which they do not change. None: there are none.
        limits_file: file of limits that a program with streams reads at its start, instead of `limits`, and again
            whenever it changes; see `flowctl.flow.limitsfile`. None: there is none.
        bans_file: the same of a ban list, which need not be there yet; see `flowctl.server.bans`. None: there is none.
        events: folder for records of what happens, of a program with streams; see `flowctl.telemetry.schema`. None:
            nothing is recorded.
        flights: share of the connections, 0 to 1, that are recorded so that they can be replayed; needs `events`.
        loop_factory: makes the groups' loops. None: uvloop where it can be had.
        on_error: told of every exception of a handler, with where it was raised.
        extra: settings of the one program, as text (``--set name=value``).
    """

    host: str = "127.0.0.1"
    port: int = 0
    limits: Limits = DEFAULT_LIMITS
    settings: SenderSettings = field(default_factory=SenderSettings)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    trusted_proxies: tuple[str, ...] = ()
    socket_options: SocketOptions = field(default_factory=SocketOptions)
    group_count: int = 1
    flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S
    policy: str = "all-or-cut"
    return_after_s: float = 3.0
    memory_budget_bytes: int = 0
    shadow_limits: Limits | None = None
    limits_file: Path | None = None
    bans_file: Path | None = None
    events: Path | None = None
    flights: float = 0.0
    loop_factory: LoopFactory | None = None
    on_error: Callable[[str, Exception], None] | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProgram:
    """A server that `flowctl serve` can run.

    Args:
        name: as in ``flowctl serve NAME``.
        summary: one line for the help.
        default_port: port where none is given.
        build: makes the server, not started.
        extra: name of each setting that `ServeOptions.extra` may hold, and what it does.
        has_streams: whether what `ServeOptions` has for streams means something to it (flush interval, policy, memory
            budget, shadow); if not, those options of the command line are refused.
    """

    name: str
    summary: str
    default_port: int
    build: Callable[[ServeOptions], Server]
    extra: Mapping[str, str] = field(default_factory=dict)
    has_streams: bool = True


def settings_hint(name: str, known: Mapping[str, str]) -> str:
    """Return a hint for a setting that does not exist: the nearest one first, then all.

    Args:
        name: what was asked for.
        known: name of each setting, and what it does.
    """
    if not known:
        return "it has none"
    names = {key.partition("_")[2]: key for key in known} | {key: key for key in known}  # also without their prefix
    near = difflib.get_close_matches(name, names, 1)
    if not near:
        return "; ".join(f"{key}: {text}" for key, text in sorted(known.items()))
    meant = names[near[0]]
    return f"did you mean {meant} ({known[meant]})? known settings: {', '.join(sorted(known))}"
