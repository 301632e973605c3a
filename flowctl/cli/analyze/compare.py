"""``flowctl analyze compare``: what got better or worse from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from flowctl.text.output import say

_A: Final = typer.Argument(metavar="OUT_A", help="Folder of results, of before.")
_B: Final = typer.Argument(metavar="OUT_B", help="Folder of results, of after.")
_Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write DIR/compare.html too.")]


def compare(
    before: Annotated[str, _A],
    after: Annotated[str, _B],
    *,
    out: _Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result as one JSON object.")] = False,
) -> None:
    """Say what got better or worse from OUT_A to OUT_B, and how sure that is. No records are read.

    Both are folders that `flowctl analyze all` wrote with --out. Exit status: 0 done; 2 wrong use, or results that
    cannot be compared.
    """
    from flowctl.cli.common import print_json
    from flowctl.pipeline import compare as runs
    from flowctl.text.files import check_target, write_text

    found = runs.compare(before, after)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        check_target(out / runs.COMPARE_FILE, "--out")
        write_text(out / runs.COMPARE_FILE, found.as_html())
    if as_json:
        print_json(found.as_dict())
        return
    say(found.as_text())
    if out is not None:
        say(f"page: {out / runs.COMPARE_FILE}")
