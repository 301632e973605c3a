"""``flowctl fleet``: how several servers with the same bans and limits stand."""

from __future__ import annotations

import typer

from flowctl.cli.control.operations import add_operation
from flowctl.control.operations import BY_NAME


def add_to(program: typer.Typer) -> None:
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show how the fleet of a server stands.")
    add_operation(app, "status", BY_NAME["fleet"])
    program.add_typer(app, name="fleet")
