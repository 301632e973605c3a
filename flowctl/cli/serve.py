"""``flowctl serve``: runs a server program until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowctl.flow.limits import Limits
    from flowctl.sending.settings import SenderSettings
    from flowctl.server.program import ServeOptions, ServerProgram
    from flowctl.server.server import Server
    from flowctl.server.signals import EndSignals


_OF_STREAMS = (
    *("flush", "target_delay", "policy", "age_axis", "return_after", "memory_budget", "shadow_limits"),
    *("limits", "bans", "events", "flights"),
)
"""Options that mean nothing to a server without streams."""


# Options that take several lines each; the others stand in the signature.
_LimitsFile = Annotated[
    Path | None, typer.Option(metavar="TOML", help="Read the limits from this file, now and when it changes.")
]
_BansFile = Annotated[
    Path | None, typer.Option(metavar="JSONL", help="Keep out whom this file names, now and when it changes.")
]
_EventsFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Record what happens to each connection as Parquet files there.")
]
_FlightsShare = Annotated[
    str, typer.Option(metavar="SHARE", help="Share of the connections to record for flowctl replay, such as 1%.")
]
_AgeAxis = Annotated[
    str, typer.Option(metavar="queue|delay", help="Age limit: of what is queued, or the viewer's whole delay.")
]
_ReturnAfter = Annotated[
    str, typer.Option(help="Bring a viewer back to live that took nothing for so long; 0: send all that is old.")
]
_MemoryBudget = Annotated[
    str, typer.Option(help="What may wait for all slow viewers of this server, for example 2GiB; 0: no limit.")
]
_ShadowLimits = Annotated[
    str | None,
    typer.Option(metavar="B,N[,T][/B,N[,T]]", help="Compare with these soft (and hard) limits; they do nothing."),
]
_NewPerAddress = Annotated[float, typer.Option(min=0, help="New connections of one address per second; 0: any number.")]
_MaxConnections = Annotated[
    int, typer.Option(min=0, help="Connections in all; 0: what the limit of open files allows.")
]
_TrustedProxies = Annotated[
    str, typer.Option(metavar="CIDR,...", help="Proxies that say first whom they speak for (PROXY protocol v1, v2).")
]
_ListSettings = Annotated[bool, typer.Option("--list-settings", help="Show what --set takes for this server, and end.")]
_TargetDelay = Annotated[
    str, typer.Option(metavar="auto|off|T", help="How late pictures may reach a slow viewer; later ones are left out.")
]
_Policy = Annotated[
    str, typer.Option(metavar="NAME", help="Left out for slow viewers: all-or-cut, audio-first or pictures-first.")
]
_NotsentLowat = Annotated[
    str, typer.Option(help="Unsent bytes the kernel takes before it says stop; 0: its own choice.")
]


def serve(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="live, echo, or any installed server.")] = "live",
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port; 0 for any free one. Default: the server's own.")] = None,
    soft: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Soft limit: bytes,messages,age.")] = None,
    hard: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Hard limit; default twice the soft one.")] = None,
    low: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Low mark; default half the soft one.")] = None,
    limits: _LimitsFile = None,
    bans: _BansFile = None,
    events: _EventsFolder = None,
    flights: _FlightsShare = "0",
    flush: Annotated[str, typer.Option(help="Longest time between two flushes of a stream.")] = "40ms",
    groups: Annotated[int, typer.Option(min=1, max=256, help="Poll groups, that is threads.")] = 1,
    stuck: Annotated[str, typer.Option(help="Cut a peer whose connection takes nothing for so long; 0: off.")] = "15s",
    soft_too_long: Annotated[str, typer.Option(help="Cut a peer above its soft limit for so long; 0: off.")] = "60s",
    target_delay: _TargetDelay = "auto",
    policy: _Policy = "all-or-cut",
    age_axis: _AgeAxis = "queue",
    return_after: _ReturnAfter = "3s",
    memory_budget: _MemoryBudget = "0",
    shadow_limits: _ShadowLimits = None,
    per_address: Annotated[int, typer.Option(min=0, help="Connections of one address; 0: any number.")] = 64,
    new_per_address: _NewPerAddress = 20.0,
    max_connections: _MaxConnections = 0,
    trusted_proxies: _TrustedProxies = "",
    notsent_lowat: _NotsentLowat = "128KiB",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Setting of the server program; repeatable.")
    ] = None,
    list_settings: _ListSettings = False,
    stats: Annotated[str | None, typer.Option(help="Log a line of figures each time this has passed; 0: off.")] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object per line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object when the server is ready.")] = False,
) -> None:
    """Run a server until SIGINT, SIGTERM or SIGQUIT.

    Limits are bytes,messages,age of what waits for one peer, for example 2MiB,2048,4s; 0 turns an axis off. Without
    limits they are 2MiB,2048,4s soft and 4MiB,4096,8s hard. Files of limits and bans are looked at each second, and at
    once on SIGHUP; one that is not valid changes nothing. SIGUSR1 and SIGUSR2 log a line of figures.
    """
    from flowctl.cli.common import given, optional_duration, set_up_log
    from flowctl.cli.servers import check_extra, load_server
    from flowctl.flight.flights import parse_share
    from flowctl.flow.policy import LIVE_POLICIES
    from flowctl.server.signals import EndSignals
    from flowctl.units import parse_duration, parse_size

    ended = context.with_resource(EndSignals())  # first of all: no signal is to kill a server that begins
    set_up_log(as_json=log_json)
    program = load_server(name)
    if list_settings:
        _list_settings(program, as_json=as_json)
        return
    _check_given(program, [option for option in _OF_STREAMS if given(context, option)])
    _check_alone(
        [option for option in ("soft", "hard", "low", "target_delay") if limits is not None and given(context, option)]
    )
    options = _options(
        host=host,
        port=program.default_port if port is None else port,
        limits=_limits(soft, hard, low, target_delay),
        flush_s=parse_duration(flush, "--flush"),
        groups=groups,
        settings=_settings(stuck, soft_too_long, age_axis),
        policy=_choice(policy, "--policy", list(LIVE_POLICIES)),
        return_after_s=parse_duration(return_after, "--return-after"),
        memory_budget_bytes=parse_size(memory_budget, "--memory-budget"),
        shadow_limits=_shadow(shadow_limits),
        admission=(max_connections, per_address, new_per_address),
        trusted_proxies=tuple(part for part in trusted_proxies.split(",") if part.strip()),
        notsent_lowat_bytes=parse_size(notsent_lowat, "--notsent-lowat"),
        files=(limits, bans),
        events=events,
        flights=parse_share(flights),
        extra=check_extra(program, settings or []),
    )
    _run(program, options, ended, stats_s=optional_duration(stats, "--stats"), as_json=as_json)


def _settings(stuck: str, soft_too_long: str, age_axis: str) -> SenderSettings:
    from flowctl.sending.settings import AgeSource, SenderSettings
    from flowctl.units import parse_duration

    return SenderSettings(
        stuck_s=parse_duration(stuck, "--stuck"),
        soft_too_long_s=parse_duration(soft_too_long, "--soft-too-long"),
        age_from=AgeSource(_choice(age_axis, "--age-axis", [item.value for item in AgeSource])),
    )


def _list_settings(program: ServerProgram, *, as_json: bool) -> None:
    """Write every setting with what it is, its unit and its default to standard output."""
    import textwrap

    from flowctl.cli.common import print_json
    from flowctl.text.output import say

    if as_json:
        print_json({name: program.extra[name] for name in sorted(program.extra)})
        return
    for name in sorted(program.extra):
        say(name)
        say(textwrap.fill(program.extra[name], 78, initial_indent="    ", subsequent_indent="    "))
    if not program.extra:
        say(f"server {program.name!r} has no settings")


def _limits(soft: str | None, hard: str | None, low: str | None, target_delay: str) -> Limits:
    """Return the limits that were asked for; the soft marks are the default where only others are given.

    Raises:
        ConfigError: one does not parse, or they do not go together.
    """
    from dataclasses import replace

    from flowctl.errors import ConfigError
    from flowctl.flow.limits import Limits, parse_target_delay
    from flowctl.server.server import DEFAULT_LIMITS

    target_ms = parse_target_delay(target_delay, "--target-delay")
    if soft is not None:
        return Limits.parse(soft, hard, low, target_delay_ms=target_ms)
    if hard is None and low is None:
        return replace(DEFAULT_LIMITS, target_delay_ms=target_ms)
    Limits.parse("0,0", hard, low)  # raises what is wrong with them by themselves
    default = DEFAULT_LIMITS
    try:
        soft = f"{default.size.soft},{default.messages.soft},{default.age_ms.soft}ms"
        return Limits.parse(soft, hard, low, target_delay_ms=target_ms)
    except ConfigError as error:
        raise ConfigError(f"{error}, which is the default", hint="give --soft as well") from error


def _check_given(program: ServerProgram, of_streams: list[str]) -> None:
    """Refuse options for streams that were given for a server that has none."""
    from flowctl.errors import ConfigError

    if of_streams and not program.has_streams:
        shown = "--" + of_streams[0].replace("_", "-")
        raise ConfigError(f"server {program.name!r} has no streams, it would ignore {shown}", hint="leave it out")


def _check_alone(marks: list[str]) -> None:
    """Refuse marks beside a limits file: one of the two would be ignored."""
    from flowctl.errors import ConfigError

    if marks:
        shown = "--" + marks[0].replace("_", "-")
        raise ConfigError(f"{shown} and --limits both set the limits", hint="leave one of the two out")


def _choice(text: str, option: str, choices: list[str]) -> str:
    from flowctl.errors import ConfigError

    if text not in choices:
        raise ConfigError(f"{option} is {text!r}, it must be {', '.join(choices[:-1])} or {choices[-1]}")
    return text


def _shadow(text: str | None) -> Limits | None:
    """Return the limits in ``soft`` or ``soft/hard``; only their marks count."""
    from flowctl.flow.limits import Limits

    if text is None:
        return None
    soft, slash, hard = text.partition("/")
    return Limits.parse(soft, hard if slash else None)


def _options(
    *,
    host: str,
    port: int,
    limits: Limits,
    flush_s: float,
    groups: int,
    settings: SenderSettings,
    policy: str,
    return_after_s: float,
    memory_budget_bytes: int,
    shadow_limits: Limits | None,
    admission: tuple[int, int, float],
    trusted_proxies: tuple[str, ...],
    notsent_lowat_bytes: int,
    files: tuple[Path | None, Path | None],
    events: Path | None,
    flights: float,
    extra: dict[str, str],
) -> ServeOptions:
    from flowctl.errors import ConfigError
    from flowctl.loop.sockets import SocketOptions
    from flowctl.server.admission import AdmissionLimits
    from flowctl.server.program import ServeOptions

    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}, it must be 0 (any) to 65535")
    connections, per_address, new_per_address = admission
    return ServeOptions(
        host=host,
        port=port,
        limits=limits,
        settings=settings,
        policy=policy,
        return_after_s=return_after_s,
        memory_budget_bytes=memory_budget_bytes,
        shadow_limits=shadow_limits,
        admission=AdmissionLimits(
            connections=connections, connections_per_address=per_address, new_per_address_and_s=new_per_address
        ),
        trusted_proxies=trusted_proxies,
        socket_options=SocketOptions(notsent_lowat_bytes=notsent_lowat_bytes),
        limits_file=files[0],
        bans_file=files[1],
        events=events,
        flights=flights,
        group_count=groups,
        flush_interval_s=flush_s,
        extra=extra,
    )


def _run(
    program: ServerProgram, options: ServeOptions, ended: EndSignals, *, stats_s: float | None, as_json: bool
) -> None:
    """Build, start, wait for a signal, stop."""
    import os
    import signal

    from flowctl.cli.common import print_json
    from flowctl.live import LiveServer
    from flowctl.log import get_logger

    logger = get_logger("flowctl.serve")
    server = program.build(options)
    calls: dict[int, Callable[[], None]] = dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), lambda: _log_figures(server))
    if isinstance(server, LiveServer) and server.reload.watching:
        calls[signal.SIGHUP] = server.reload.look_now
    ended.calls = calls
    try:
        server.start()
        host, port = server.address
        logger.info("serving", server=program.name, host=host, port=port, limits=str(server.limits))
        if as_json:
            print_json(_ready(program, server, os.getpid()))
        while not ended.wait(stats_s or None):
            _log_figures(server)
    finally:
        stopped = server.stop()
    logger.info("stopped", server=program.name, accepted=server.accepted_count, in_time=stopped)


def _ready(program: ServerProgram, server: Server, pid: int) -> dict[str, Any]:
    """Return what a program that started us has to know."""
    host, port = server.address
    ready: dict[str, Any] = {"server": program.name, "host": host, "port": port, "pid": pid}
    if program.default_port == 1935:  # the registered port of RTMP
        shown = f"[{host}]" if ":" in host else host
        ready["url"] = f"rtmp://{shown}:{port}/"
    ready["limits"] = str(server.limits)
    return ready


def _log_figures(server: Server) -> None:
    from flowctl.cli.figures import summary
    from flowctl.log import get_logger

    get_logger("flowctl.serve").info("figures", **summary(server))
