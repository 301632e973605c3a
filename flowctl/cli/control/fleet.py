"""``flowctl fleet``: keeps limits and bans of several servers the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Keep limits and bans of several servers the same.",
)

_Config = Annotated[
    Path,
    typer.Option(metavar="TOML", envvar="FLOWCTL_FLEET", help="What the agent is told; docs/fleet.toml is a sample."),
]


@app.command("run")
def run(
    *,
    config: _Config = Path("fleet.toml"),
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object per line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object when the agent is ready.")] = False,
) -> None:
    """Run the agent of one member, beside its server, until SIGINT, SIGTERM or SIGQUIT.

    A ban, an unban or limits that a command gives to one server are given to all, once each; also to one that is down,
    when it comes back. What a server reads from its own files stays its own.
    """
    import os

    from flowctl.cli.common import print_json, set_up_log
    from flowctl.control.fleet.config import read_config
    from flowctl.control.fleet.process import AgentProcess
    from flowctl.core.server.signals import EndSignals

    with EndSignals() as ended:
        set_up_log(as_json=log_json)
        found = read_config(config)
        process = AgentProcess(found, ended.end)
        process.start()
        try:
            if as_json:
                print_json({"member": found.name, "listens_at": found.listens_at, "pid": os.getpid()})
            ended.wait()
        finally:
            process.stop()
    if process.fault is not None:
        raise process.fault


@app.command("status")
def status(
    *,
    config: _Config = Path("fleet.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show how the fleet stands, as the agent on this machine sees it: who is behind, and by how much."""
    import asyncio
    import json

    from flowctl.cli.common import print_json
    from flowctl.control.client import OperationError, call_parts
    from flowctl.control.fleet.config import read_config
    from flowctl.core.text.output import say
    from flowctl.errors import FlowctlError

    found = read_config(config)
    try:
        (text,) = asyncio.run(call_parts(f"ipc://{found.status_socket}", "fleet.status", [], None, 5.0))
    except OperationError as error:
        if error.code != "NOT_THERE":
            raise
        raise FlowctlError(
            f"no agent of {found.name} runs here", hint=f"flowctl fleet run --config {config} starts it"
        ) from error
    answer = json.loads(text)
    if as_json:
        print_json(answer)
        return
    for line in lines(answer):
        say(line)


def lines(answer: Mapping[str, Any]) -> list[str]:
    """Return a status as people read it, in 80 columns."""
    from flowctl.units import format_count

    entries, applied, server = answer["entries"], answer["applied"], answer["server"]
    limits = ", limits" if entries["limits"] else ""
    reached = "reached" if server["reached"] else f"NOT reached: {server['fault']}"
    waiting = f", {server['waiting']} to be told" if server["waiting"] else ""
    told = f"told it: {format_count(applied['bans'], 'ban')}, {format_count(applied['lifts'], 'unban')}"
    told += f", {format_count(applied['limits'], 'change')} of limits"
    bans = format_count(entries["bans"], "ban")
    found = [
        f"{answer['member']}: {bans}{limits}; {entries['remembered']} lifted ones remembered",
        f"server: {reached}{waiting}",
        f"{told}; found at it: {applied['local']}",
    ]
    if applied["refused"]:
        found.append(f"it refused {applied['refused']}, the last because: {applied['fault']}")
    if answer["stale"]:
        found.append("this member was away for so long that it takes the table of the others")
    found += ["", f"{'member':<20} {'last heard':>10} {'same':>5} {'waiting':>8} {'entries':>8}  dropped"]
    for name, member in answer["members"].items():
        heard = "never" if member["heard_s_ago"] is None else f"{member['heard_s_ago']:g} s"
        same = {True: "yes", False: "no", None: "?"}[member["same"]]
        count = "?" if member["entries"] is None else member["entries"]
        dropped = ", ".join(f"{kind} {number}" for kind, number in member["dropped"].items())
        found.append(f"{name:<20} {heard:>10} {same:>5} {member['pending']:>8} {count:>8}  {dropped}".rstrip())
    return found


def add_to(program: typer.Typer) -> None:
    program.add_typer(app, name="fleet")
