"""``flowctl demo``: shows what flowctl does, on this machine alone, in about half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from flowctl.cli.common import given, named_by_options, set_up_log
from flowctl.cli.errors import terminable
from flowctl.errors import ConfigError, FlowctlError
from flowctl.units import parse_duration

_UNUSED_OPTIONS: Final = {
    "--cluster": ("pipeline", "soft", "hard", "table", "log", "folder", "stay"),
    "--pipeline": ("soft", "hard", "table", "log", "report", "stay"),
    "": ("folder",),
}
"""Options that mean nothing to a demonstration, by its option."""
_OPTIONS: Final = {"duration_s": "--duration", "viewers": "--healthy", "healthy": "--healthy"}
"""Field of a plan, and the option that sets it."""


def demo(
    context: typer.Context,
    *,
    pipeline: Annotated[
        bool,
        typer.Option("--pipeline", help="Close the loop instead: load, records, analysis, new limits and bans, load."),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Show origins and edges instead: one origin is killed, one lies, one is slow."),
    ] = False,
    duration: Annotated[str, typer.Option(help="How long the viewers watch; with --pipeline twice 15s.")] = "24s",
    healthy: Annotated[
        int, typer.Option(min=1, max=500, help="Number of healthy viewers; with --cluster at each edge, 4.")
    ] = 20,
    soft: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Soft limit of the server.")] = None,
    hard: Annotated[str | None, typer.Option(metavar="B,N[,T]", help="Hard limit of the server.")] = None,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Show a live table on a terminal.")] = True,
    log: Annotated[bool, typer.Option("--log", help="Show the server's log as well.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Where to write a report with plots. Default: said at the end."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --pipeline: folder for all that is written.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Leave server and dashboard running afterwards, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON.")] = False,
) -> None:
    """Show who of a crowd loses what on a live server, and why.

    A server, a publisher and viewers of all kinds run on this machine. The exit status is 1 if a healthy viewer lost a
    frame or a limit did not act. It can be watched in a browser (needs the admin extra): the address is said at the
    beginning and at the end.

    With --pipeline, a server is loaded with honest slow and abusive viewers, and records them; the analysis recommends
    limits and bans; the same server takes both while it runs; the same load comes again. The status is 1 if honest slow
    viewers were not cut less, or abusers were let in. It takes three minutes on two busy cores, and needs the pipeline
    extra.

    With --cluster, one encoder publishes to four origins and viewers play at two edges; one origin is killed in the
    middle, one sends wrong segments, one is slow. The status is 1 if a viewer lost a frame.
    """
    from flowctl.core.text.files import check_target

    which = "--cluster" if cluster else "--pipeline" if pipeline else ""
    for name in _UNUSED_OPTIONS[which]:
        if given(context, name):
            beside = f"means nothing beside {which}" if which else "is for --pipeline"
            raise ConfigError(f"--{name} {beside}", hint="leave it out")
    set_up_log(level=None if log else "error")
    if report is not None:
        check_target(report, "--report")
    duration_s = parse_duration(duration, "--duration")
    if cluster:
        from flowctl.demo.cluster.report import ClusterPlan
        from flowctl.demo.cluster.run import run_cluster

        with named_by_options(_OPTIONS):
            cluster_plan = ClusterPlan(duration_s=duration_s, viewers=healthy if given(context, "healthy") else 4)
        with terminable():  # its servers end with it
            passed = run_cluster(cluster_plan, as_json=as_json, path=report)
    elif pipeline:
        passed = _close_the_loop(duration_s if given(context, "duration") else 15.0, healthy, folder, as_json=as_json)
    else:
        from flowctl.demo import DemoPlan, run_demo
        from flowctl.demo.plan import DEFAULT_HARD, DEFAULT_SOFT

        soft, hard = soft or DEFAULT_SOFT, hard or DEFAULT_HARD
        with named_by_options(_OPTIONS):
            plan = DemoPlan(duration_s=duration_s, healthy=healthy, soft=soft, hard=hard)
        passed = run_demo(plan, table=table and not as_json, as_json=as_json, page=report, stays=stay)
    if not passed:
        raise FlowctlError("the demo did not go as it should; the report says what")


def _close_the_loop(duration_s: float, healthy: int, folder: Path | None, *, as_json: bool) -> bool:
    from flowctl.analyze.engine import DUCKDB, check_available
    from flowctl.demo.loop import LoopPlan, run_loop
    from flowctl.demo.runner import cache_directory

    # Before the load: nobody should watch a crowd for a quarter of a minute to learn that nothing can analyse it.
    check_available(DUCKDB)
    with named_by_options(_OPTIONS):
        plan = LoopPlan(duration_s=duration_s, healthy=healthy)
    return run_loop(plan, folder or cache_directory() / "demo-pipeline", as_json=as_json)


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo)
