"""``flowctl analyze whatif``: which limits would have been better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Events, Master, Memory, Out


def command(
    events: Events,
    *,
    out: Out,
    grid: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="What to try. Default: about 50 choices around the present."),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="What to ask for: balanced (fewest honest viewers cut, then the least sum of delay, memory and lost "
            'key frames), or like "disconnects<=1% then delay_p95".',
        ),
    ] = "balanced",
    source: Annotated[str, typer.Option(metavar="NAME", help="flights, samples, or auto: flights if any.")] = "auto",
    cut: Annotated[str, typer.Option(metavar="TIME", help="How much of each connection is used.")] = "30m",
    extend: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Added for a viewer that was cut: its stall again, then the last 10 s again and again."
        ),
    ] = "30s",
    most: Annotated[
        int, typer.Option(metavar="N", min=0, help="Evaluate so many viewers, a random sample of more. 0: all.")
    ] = 2_000,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Try limits and policies on recorded viewers, and recommend: OUT/limits.toml for serve live --limits.

    Exit status: 0 done; 1 it failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal.
    """
    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.errors import ConfigError
    from flowctl.pipeline.spark.session import check_available
    from flowctl.units import parse_duration

    check_available()
    from flowctl.pipeline.jobs.whatif import WhatifOptions, run

    text = None
    if grid is not None:
        try:
            text = grid.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--grid: {grid} cannot be read: {error}") from error
    wanted = WhatifOptions(
        grid=text,
        grid_name=str(grid),
        objective=objective,
        source=source,
        cut_s=parse_duration(cut, "--cut"),
        extend_s=parse_duration(extend, "--extend"),
        most=most,
    )
    options = session_options(master, conf, driver_memory, "whatif")
    run_job("whatif", lambda spark, _: run(spark, events, out, wanted), options, as_json=as_json, folders=(events, out))
