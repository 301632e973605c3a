"""``flowctl serve``: runs a server program until it is told to stop."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from flowctl.cli.common import log_to_file, optional_duration, print_json, set_up_log, settings
from flowctl.core.text.output import say
from flowctl.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowctl.core.server.handover import Successor
    from flowctl.core.server.program import ServeOptions, ServerProgram
    from flowctl.core.server.server import Server
    from flowctl.core.server.signals import EndSignals
    from flowctl.core.server.systemd import Notifier

_GIVEN: Final = "flowctl.settings"
"""Key of the settings that were given as options, in the context of the command."""


class ServeCommand(TyperCommand):
    """`serve` with an option for each setting; what settings there are is loaded when it is asked for its options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the command: those of the settings stand before those of `serve`."""
        name, *own = super().get_params(ctx)
        return [name, *_setting_options(), *own]


@functools.cache  # typer asks several times
def _setting_options() -> list[Any]:
    """Return an option for each setting, as typer makes it of a parameter of that name."""
    from flowctl.live.settings.model import settings_of

    def settings(**_: str | None) -> None: ...

    options_command: Any = settings  # its signature is what typer looks at
    parameters = []
    for item in filter(lambda item: item.is_text, settings_of()):
        option = typer.Option(
            item.option,
            help=item.what + (f" [default: {item.default}]" if item.default else ""),
            metavar=item.metavar,
            show_default=False,
            callback=_note,
            expose_value=False,
        )
        hint = Annotated[str | None, option]
        parameters.append(inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    options_command.__annotations__ = {item.name: item.annotation for item in parameters}
    options_command.__signature__ = inspect.Signature(parameters)
    one = typer.Typer(add_completion=False)
    one.command()(options_command)
    return typer.main.get_command(one).params


def _note(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> None:
    """Keep what an option says for `serve`."""
    if value is not None:
        context.meta.setdefault(_GIVEN, {})[parameter.name] = value


Replace = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Take over the sockets of the server that has this port, which drains within so long. None there: start.",
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option(metavar="TOML", envvar="FLOWCTL_CONFIG", help="File of settings; FLOWCTL_NAME and options go first."),
]


def serve(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="live, echo, or any installed server.")] = "live",
    *,
    config: _Config = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; repeatable.")
    ] = None,
    list_settings: Annotated[
        bool, typer.Option("--list-settings", help="Show the settings of this server, and end.")
    ] = False,
    stats: Annotated[str | None, typer.Option(help="Log a line of figures each time this has passed; 0: off.")] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object per line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object when the server is ready.")] = False,
    replace: Replace = None,
) -> None:
    """Run a server until SIGINT, SIGTERM or SIGQUIT.

    Each setting is an option, a variable FLOWCTL_NAME, or a line name = "value" of the file: the first that is there
    counts. Limits are bytes,messages,age of what waits for one peer; 0 turns an axis off. Files of settings, limits and
    bans are looked at each second, and at once on SIGHUP; one that is not valid changes nothing. SIGUSR1 opens
    the log file again, SIGUSR2 logs a line of figures.
    """
    from flowctl.cli.servers import load_server
    from flowctl.core.server.signals import EndSignals
    from flowctl.live.config import worker_count

    ended = context.with_resource(EndSignals())  # first of all: no signal is to kill a server that begins
    set_up_log(as_json=log_json)
    program = load_server(name)
    if list_settings:
        _list_settings(program, as_json=as_json)
        return
    options = options_of(context, program, pairs, config)
    log_to_file(options.log, as_json=log_json)
    options, successor = take_place(context, program, options, replace)
    stats_s = optional_duration(stats, "--stats")
    count = worker_count(getattr(options, "workers", 1))
    if count > 1:
        _run_workers(program, options, count, ended, stats_s, successor, as_json=as_json, log_json=log_json)
        return
    run_server(program, options, ended, stats_s=stats_s, as_json=as_json, successor=successor)


def options_of(context: typer.Context, program: ServerProgram, pairs: list[str] | None, config: Path | None) -> Any:
    """Return the settings of a server from options, pairs, environment and file."""
    from flowctl.live.settings.sources import read_settings

    return read_settings(
        program, options=context.meta.get(_GIVEN, {}), pairs=pairs or (), environment=os.environ, file=config
    )


def take_place(
    context: typer.Context, program: ServerProgram, options: Any, replace: str | None
) -> tuple[Any, Successor | None]:
    """Return the settings with the sockets that systemd, or the server whose place it takes, hands to this one.

    The other server drains once this one serves, see `Successor.take_over`; nobody is there: None.
    """
    from flowctl.core.server.systemd import handed_sockets

    handed = handed_sockets(os.environ)
    if handed:
        options = dataclasses.replace(options, listen_fds=handed)
        check = getattr(options, "check_start", None)
        if check is not None:
            check()
    within_s = optional_duration(replace, "--replace")
    if within_s is None:
        return options, None
    from flowctl.control.handover import ask_predecessor

    if program.check is not None:
        program.check(options)
    found = ask_predecessor(options, within_s)
    if found is None:
        return options, None
    successor, taken = found
    context.with_resource(successor)
    return dataclasses.replace(options, listen_fds=taken | handed), successor


def _list_settings(program: ServerProgram, *, as_json: bool) -> None:
    """Write every setting to standard output: its form, its default and what it does."""
    from flowctl.live.settings.model import settings_of

    settings = settings_of(program)
    if as_json:
        print_json({item.name: {"type": item.kind, "default": item.default, "what": item.what} for item in settings})
        return
    for item in settings:
        default = f" (default {item.default})" if item.default else ""
        say(textwrap.fill(f"{item.name}: {item.kind}{default}", 78, subsequent_indent="    "))
        say(textwrap.fill(item.what, 78, initial_indent="    ", subsequent_indent="    "))


def run_server(
    program: ServerProgram,
    options: ServeOptions,
    ended: EndSignals,
    *,
    stats_s: float | None,
    as_json: bool,
    successor: Successor | None = None,
) -> None:
    from flowctl.core.server.systemd import Notifier
    from flowctl.live import LiveServer
    from flowctl.log import get_logger, look_at_file

    logger = get_logger("flowctl.serve")
    notifier = Notifier(os.environ)
    server = program.build(options)
    if successor is not None and isinstance(server, LiveServer):
        from flowctl.live.cluster.succession import share_streams

        share_streams(server, successor)
    calls: dict[int, Callable[[], None]] = {signal.SIGUSR1: look_at_file, signal.SIGUSR2: lambda: _log_figures(server)}
    if isinstance(server, LiveServer) and (server.reload.watching or server.certificate is not None):
        calls[signal.SIGHUP] = functools.partial(_reload, server, notifier)
    ended.calls = calls
    server.on_stopped = ended.end
    try:
        server.start()
        if successor is not None:
            successor.take_over()
        host, port = server.address
        logger.info("serving", server=program.name, host=host, port=port, limits=str(server.limits))
        if as_json:
            companions = getattr(server, "companions", ())
            control = [address for item in companions for address in item.bound]
            ready = _ready(program, server.address, str(server.limits), control) | {"pid": os.getpid()}
            ready |= _listening([(item.name, item.address) for item in server.listeners])
            offers = [item.offers for item in companions if getattr(item, "offers", "")]
            print_json(ready | {"origin": offers[0]} if offers else ready)
        notifier.ready(_status(server))
        _tend(server, ended, notifier, stats_s)
    finally:
        notifier.stopping()
        stopped = server.stop()
    logger.info("stopped", server=program.name, accepted=server.accepted_count, in_time=stopped)


def _tend(server: Server, ended: EndSignals, notifier: Notifier, stats_s: float | None) -> None:
    """Wait for the end; meanwhile log figures, and tell systemd that all threads are alive."""
    from flowctl.core.server.systemd import STATUS_S, ThreadProbe

    probe = ThreadProbe(group.call_soon for group in server.groups.groups)
    ticks: list[tuple[float, Callable[[], None]]] = []
    if stats_s:
        ticks.append((stats_s, lambda: _log_figures(server)))
    if notifier.active:
        ticks.append((STATUS_S, lambda: notifier.status(_status(server))))
    if notifier.watchdog_s is not None:
        ticks.append((notifier.watchdog_s, lambda: notifier.alive() if probe.probe_threads() else None))
    due = [time.monotonic() + every_s for every_s, _ in ticks]
    while not ended.wait(max(min(due) - time.monotonic(), 0.001) if due else None):
        now = time.monotonic()
        for number, (every_s, call) in enumerate(ticks):
            if now >= due[number]:
                due[number] = now + every_s
                call()


def _status(server: Server) -> str:
    where = _where([(item.name, item.address) for item in server.listeners])
    return f"{format_count(len(server.connections()), 'connection')}, listening on {where}"


def _where(listeners: list[tuple[str, tuple[str, int]]]) -> str:
    from flowctl.core.server.listener import shown

    return ", ".join(shown(*address, name) for name, address in listeners)


def _reload(server: Any, notifier: Notifier) -> None:
    """Have the files of settings read now; systemd is told when that begins and ends."""
    notifier.reloading()
    server.reload.look_now()
    server.reload.run_later(lambda: notifier.ready(_status(server)))


def _run_workers(
    program: ServerProgram,
    options: Any,
    count: int,
    ended: EndSignals,
    stats_s: float | None,
    successor: Successor | None,
    *,
    as_json: bool,
    log_json: bool,
) -> None:
    """Start the workers of a server, look after them, wait for a signal or the end of a drain, end them."""
    from flowctl.core.server.systemd import Notifier
    from flowctl.live.cluster.workers.supervisor import Supervisor
    from flowctl.log import get_logger, look_at_file

    logger = get_logger("flowctl.serve")
    notifier = Notifier(os.environ)  # before there are workers: it is ours alone
    supervisor = Supervisor(program, options, count, wake=ended.wake, log_level=settings.log_level, log_json=log_json)

    def tell() -> None:
        logger.info("figures", **supervisor.figures())

    def reload() -> None:
        notifier.reloading()
        supervisor.signal_workers(signal.SIGHUP)
        notifier.ready(f"{count} workers, listening on {_where(supervisor.listening)}")

    def open_again() -> None:
        look_at_file()
        supervisor.signal_workers(signal.SIGUSR1)

    ended.calls = {signal.SIGUSR1: open_again, signal.SIGUSR2: tell}
    if any(
        item is not None for item in (options.source, options.limits_file, options.bans_file, options.tls_certificate)
    ):
        ended.calls = {**ended.calls, signal.SIGHUP: reload}
    try:
        if supervisor.start(ended.wait):
            if successor is not None:
                successor.take_over()
            host, port = supervisor.address
            logger.info("serving", server=program.name, host=host, port=port, workers=count, limits=supervisor.limits)
            if as_json:
                ready = _ready(program, supervisor.address, supervisor.limits, supervisor.bound)
                ready |= _listening(supervisor.listening)
                print_json(ready | {"pid": os.getpid(), "workers": [worker.pid for worker in supervisor.workers()]})
            notifier.ready(f"{count} workers, listening on {_where(supervisor.listening)}")
            told_at = alive_at = time.monotonic()
            while not supervisor.finished and not ended.wait(min(supervisor.next_look_s, notifier.watchdog_s or 1.0)):
                supervisor.look()
                if notifier.watchdog_s is not None and time.monotonic() - alive_at >= notifier.watchdog_s:
                    alive_at = time.monotonic()
                    notifier.alive()  # whether its workers are is for the supervisor to see
                if stats_s and time.monotonic() - told_at >= stats_s:
                    told_at = time.monotonic()
                    tell()
    finally:
        notifier.stopping()
        stopped = supervisor.stop()
    logger.info("stopped", server=program.name, in_time=stopped)


def _ready(program: ServerProgram, address: tuple[str, int], limits: str, control: list[str]) -> dict[str, Any]:
    from flowctl.core.text.addresses import join_host_port

    host, port = address
    ready: dict[str, Any] = {"server": program.name, "host": host, "port": port}
    if program.default_port == 1935:  # the registered port of RTMP
        ready["url"] = f"rtmp://{join_host_port(host, port)}/"
    ready["limits"] = limits
    if control:
        ready["control"] = control
    return ready


def _listening(listeners: list[tuple[str, tuple[str, int]]]) -> dict[str, list[str]]:
    """Return the addresses of a server by their use: ``rtmp``, ``rtmps``, ``http``, ``https``."""
    from flowctl.core.server.listener import shown

    addresses: dict[str, list[str]] = {}
    for name, address in listeners:
        if name:
            addresses.setdefault(name, []).append(shown(*address))
    return addresses


def _log_figures(server: Server) -> None:
    from flowctl.control.summary import summary
    from flowctl.log import get_logger

    get_logger("flowctl.serve").info("figures", **summary(server))


def add_to(app: typer.Typer) -> None:
    app.command("serve", cls=ServeCommand)(serve)
