"""``flowctl analyze synth``: makes records of any size, with worlds planted in them whose truth is known."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flowctl.cli.analyze.common import started
from flowctl.cli.analyze.options import SPARK, shared
from flowctl.core.text.output import say


@shared(SPARK)
def synth(
    out: Annotated[str, typer.Argument(metavar="OUT", help="New folder for the data.")],
    *,
    events: Annotated[str, typer.Option(metavar="NUMBER", help="About how many closes and events, like 10M.")] = "100k",
    seed: Annotated[int, typer.Option(help="The same seed gives the same data.")] = 1,
    worlds: Annotated[
        str | None, typer.Option(metavar="NAMES", help="What is planted, like nat,proxy. Default: all worlds.")
    ] = None,
    days: Annotated[float, typer.Option(help="Time in which connections begin.")] = 1.0,
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="When that begins, UTC. Default: so that it ends this hour.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Servers.")] = 4,
    samples: Annotated[str | None, typer.Option(metavar="TIME", help="Make flow_samples too, one per TIME.")] = None,
    truth: Annotated[bool, typer.Option("--truth/--no-truth", help="Write who was planted to OUT/_truth.")] = True,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace what synth made in OUT before; never what a server wrote.")
    ] = False,
    **values: Any,
) -> None:
    """Make records of any size, with worlds planted in them. They are as servers would have written them.

    Exit status: 0 done; 1 it failed; 2 wrong use; 130 or 143 ended by a signal.
    """
    import time

    from flowctl.analyze.options import moment, number
    from flowctl.analyze.said import figures
    from flowctl.analyze.synth.people import SynthOptions
    from flowctl.cli.common import optional_duration, print_json

    # Evidence ages: what ended long ago would be worth nothing to a job that judges as of now.
    begin_s = int(time.time() // 3600 * 3600 - days * 86400)
    options = SynthOptions(
        events=number(events, "--events"),
        seed=seed,
        days=days,
        start_s=begin_s if start is None else int(moment(start, "--start")),
        nodes=nodes,
        samples_s=optional_duration(samples, "--samples"),
        truth=truth,
        replace=replace,
        **({} if worlds is None else {"worlds": tuple(name.strip() for name in worlds.split(","))}),
    )
    with started("synth", values, out=out) as (start_spark, _):
        from flowctl.analyze.synth.job import run

        result = run(start_spark, out, options)
    if values["json"]:
        print_json(result.as_dict())
    else:
        say(f"synth: {figures(result.summary)}")
        say("\n".join(f"  {name}: {path}" for name, path in result.outputs.items()))
