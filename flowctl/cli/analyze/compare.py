"""``flowctl analyze compare``: what got better or worse from one run to another."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

from flowctl.core.text.output import say


def compare(
    before: Annotated[str, typer.Argument(metavar="OUT_A", help="Folder of results, of before.")],
    after: Annotated[str, typer.Argument(metavar="OUT_B", help="Folder of results, of after.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result as one JSON object.")] = False,
) -> None:
    """Say what got better or worse from OUT_A to OUT_B. How sure that is, too; no records are read.

    Both are folders that `flowctl analyze all` wrote with --out. Exit status: 0 done; 2 wrong use, or results that
    cannot be compared: of another version, or without a figure that both have. What else there is, is written then too.
    """
    from flowctl.analyze import compare as runs
    from flowctl.cli.common import print_json
    from flowctl.errors import ConfigError

    found = runs.compare(before, after)
    if as_json:
        print_json(found.as_dict())
    else:
        say(found.as_text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if not found.known:
        told = f"{before} and {after} cannot be compared: no figure is known of enough viewers in both"
        raise ConfigError(told, hint="name runs in which viewers played and the jobs sessions and experience were done")
