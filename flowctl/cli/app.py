"""The commands put together, and the options in front of them."""

from __future__ import annotations

from typing import Annotated

import typer

from flowctl.cli import config, demo, edge, key, load, play, publish, remux, replay, serve, version
from flowctl.cli.analyze import app as analyze
from flowctl.cli.control import fleet, rpc, top
from flowctl.cli.control.operations import add_operations

app = typer.Typer(
    name="flowctl",
    help="Flow control for servers that push data to many peers of unequal speed, and a live RTMP server built on it.",
    no_args_is_help=True,
    # Plain text: tables of options cut names that are long where the terminal is narrow.
    rich_markup_mode=None,
    # Locals in a traceback could be stream keys; errors are printed by flowctl.cli.errors.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if wanted:
        version.version()
        raise typer.Exit


@app.callback()
def options(
    *,
    log_level: Annotated[
        str, typer.Option(help="Least level of log lines: debug, info, warning, error.", envvar="FLOWCTL_LOG_LEVEL")
    ] = "info",
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="As the command version.")
    ] = False,
) -> None:
    """Flow control for servers that push data to many peers of unequal speed."""
    del show_version  # its callback has ended the program
    del debug  # looked for by flowctl.cli.errors, which must know it even if parsing fails
    from flowctl.cli import common

    common.settings.log_level = log_level


app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("edge", cls=serve.ServeCommand)(edge.edge)
app.command("publish")(publish.publish)
app.command("play")(play.play)
app.command("record")(remux.record)
app.command("hls")(remux.hls)
app.command("load")(load.load)
app.command("replay")(replay.replay)
add_operations(app)
app.command("top")(top.top)
app.add_typer(rpc.app, name="rpc")
app.add_typer(fleet.app, name="fleet")
app.add_typer(config.app, name="config")
app.add_typer(key.app, name="key")
app.add_typer(analyze.app, name="analyze")
app.command("demo")(demo.demo)
app.command("version")(version.version)
