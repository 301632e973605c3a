"""The commands put together, and the options in front of them.

A package brings commands by an entry point of the group ``flowctl.commands``: a function that is handed the program and
adds them to it. flowctl's own are found in the same way.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Final

import typer
from typer.core import TyperGroup

from flowctl.cli import version
from flowctl.cli.errors import complain

GROUP: Final = "flowctl.commands"


class SortedGroup(TyperGroup):
    """Lists commands by name: entry points have no order."""

    def list_commands(self, ctx: object) -> list[str]:
        del ctx
        return sorted(self.commands)


app = typer.Typer(
    cls=SortedGroup,
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


def add_commands(program: typer.Typer) -> None:
    """Add what the installed packages bring; one that cannot be loaded is named, and the others work."""
    for point in sorted(importlib.metadata.entry_points(group=GROUP)):
        try:
            point.load()(program)
        except Exception as error:  # noqa: BLE001 - code of other packages
            complain(f"commands of {point.value} cannot be loaded: {error}", "reinstall, or remove, its package")


add_commands(app)
