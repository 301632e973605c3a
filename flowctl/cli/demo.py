"""``flowctl demo``: shows what flowctl does, on this machine alone, in about half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    *,
    duration: Annotated[str, typer.Option(help="How long the viewers watch.")] = "24s",
    healthy: Annotated[int, typer.Option(min=1, max=500, help="Number of healthy viewers.")] = 20,
    soft: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Soft limit of the server.")] = None,
    hard: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Hard limit of the server.")] = None,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Show a live table on a terminal.")] = True,
    log: Annotated[bool, typer.Option("--log", help="Show the server's log as well.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Where to write a report with plots. Default: said at the end."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON.")] = False,
) -> None:
    """Run a server, a publisher and viewers of all kinds; report who lost what and why.

    The exit status is 1 if a healthy viewer lost a frame or a limit did not act.
    """
    from flowctl.cli.common import set_up_log
    from flowctl.demo import DemoPlan, run_demo
    from flowctl.demo.plan import DEFAULT_HARD, DEFAULT_SOFT
    from flowctl.errors import FlowctlError
    from flowctl.loadtest.files import check_target
    from flowctl.units import parse_duration

    set_up_log(level=None if log else "error")
    plan = DemoPlan(
        duration_s=parse_duration(duration, "--duration"),
        healthy=healthy,
        soft=soft or DEFAULT_SOFT,
        hard=hard or DEFAULT_HARD,
    )
    if report is not None:
        check_target(report, "--report")
    if not run_demo(plan, table=table and not as_json, as_json=as_json, page=report):
        raise FlowctlError("the demo did not go as it should; the report says what")
