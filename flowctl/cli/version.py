"""``flowctl version``: which flowctl this is, and on what it runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Annotated

import typer

from flowctl.cli.common import print_json
from flowctl.core.text.output import say


def version(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show the version of flowctl, of Python, and of the loop."""
    loop = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"
    try:
        number = importlib.metadata.version("flowctl")
    except importlib.metadata.PackageNotFoundError:
        number = "unknown (not installed)"
    if as_json:
        print_json({"flowctl": number, "python": platform.python_version(), "loop": loop, "system": platform.system()})
        return
    say(f"flowctl {number} (Python {platform.python_version()}, {loop}, {platform.system()})")


def add_to(app: typer.Typer) -> None:
    app.command("version")(version)
