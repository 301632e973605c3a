"""``flowctl analyze sessions``: one row per connection."""

from __future__ import annotations

from typing import Annotated

import typer

from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Events, Master, Memory, Out


def command(
    events: Events,
    *,
    out: Out,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Use flow_samples where there are any.")
    ] = True,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """One row per connection: time in each state, drops, delay, stalls, and whose fault it was.

    Exit status: 0 done; 1 it failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal.
    """
    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.pipeline.spark.session import check_available

    check_available()
    from flowctl.pipeline.jobs.sessions import SessionsOptions, run

    options = session_options(master, conf, driver_memory, "sessions")
    run_job(
        "sessions",
        lambda spark, _: run(spark, events, out, SessionsOptions(samples=samples)),
        options,
        as_json=as_json,
        folders=(events, out),
    )
