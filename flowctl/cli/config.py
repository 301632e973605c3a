"""``flowctl config``: is a file of settings valid, and what do settings come to?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowctl.cli.common import print_json
from flowctl.core.text.output import say
from flowctl.errors import ConfigError
from flowctl.units import format_count

if TYPE_CHECKING:
    from flowctl.core.server.program import ServerProgram
    from flowctl.live.settings.sources import Settings

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Check files of settings, and show their effect.")

_Server = Annotated[str, typer.Option(metavar="NAME", help="Of which server: live, or any installed one.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object.")]
_Pairs = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As for serve; repeatable.")]


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="TOML file of settings.", show_default=False)],
    *,
    server: _Server = "live",
    pairs: _Pairs = None,
    as_json: _AsJson = False,
) -> None:
    """Check a file of settings, and the files that it names.

    They are read as by a server that is started with them. Variables FLOWCTL_NAME and --set go before the file, as for
    serve. Exits with 2 where it is not valid.
    """
    from flowctl.live.config import LiveConfig
    from flowctl.live.settings.sources import SERVER, check_hosts, read_named_files, read_settings

    try:
        program, given = _gather(server, file, pairs)
        options = read_settings(program, pairs=pairs or (), environment=os.environ, file=file)
        read_named_files(options)
        check_hosts(options)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"valid": False, "error": str(error), "hint": error.hint})
        raise typer.Exit(2) from error
    levels = sum(1 for place, values in given.items() if place != SERVER and values)
    if as_json:
        print_json({"valid": True, "settings": len(given[SERVER]), "levels": levels})
    else:
        said = format_count(len(given[SERVER]), "setting")
        say(f"{file} is valid: {said} of the server, {format_count(levels, 'level')}")
    live = [options, *map(options.with_level, options.levels)] if isinstance(options, LiveConfig) else []
    for missing in dict.fromkeys(filter(None, (item.access.missing() for item in live))):
        say(f"hint: nobody will be let in: {missing}", to_stderr=True)
    log_file = options.log.path
    if log_file is not None and not log_file.resolve().parent.is_dir():  # another user's server may have one
        say(f"hint: log_file: there is no folder {log_file.parent}; the server does not make it", to_stderr=True)


@app.command("show")
def show(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of settings.", envvar="FLOWCTL_CONFIG", show_default=False)
    ] = None,
    *,
    server: _Server = "live",
    stream: Annotated[str, typer.Option(metavar="APP/STREAM", help="Show what holds for this stream.")] = "",
    role: Annotated[str, typer.Option(metavar="viewer|publisher", help="And for this role.")] = "",
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not the default.")] = False,
    pairs: _Pairs = None,
    as_json: _AsJson = False,
) -> None:
    """Show the value of each setting and where it came from.

    That is an option, a variable, a line of the file, or the default. Secrets are masked. With --stream or --role: what
    may differ there, and which level says it.
    """
    from flowctl.live.settings.levels import Role
    from flowctl.live.settings.showing import effective
    from flowctl.live.settings.sources import read_named_files, settings_of_all

    roles = {item.value: item for item in Role}
    if role and role not in roles:
        raise ConfigError(f"--role is {role!r:.40}, it must be viewer or publisher")
    program, given = _gather(server, file, pairs)
    limits = read_named_files(settings_of_all(program, given))
    found = effective(program, given, stream=stream, role=roles.get(role), limits_file=limits)
    found = [item for item in found if not (changed and item.source == "default")]
    if as_json:
        print_json({item.name: {"value": item.value, "source": item.source} for item in found})
        return
    width = max((len(item.name) for item in found), default=0)
    for item in found:
        say(f"{item.name:<{width}}  {item.value or '-'}  ({item.source})")


def _gather(server: str, file: Path | None, pairs: list[str] | None) -> tuple[ServerProgram, Settings]:
    from flowctl.cli.servers import load_server
    from flowctl.live.settings.sources import gather

    program = load_server(server)
    return program, gather(program, pairs=pairs or (), environment=os.environ, file=file)


def add_to(program: typer.Typer) -> None:
    program.add_typer(app, name="config")
