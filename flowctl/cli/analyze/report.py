"""``flowctl analyze report``: one HTML page of what the other jobs found."""

from __future__ import annotations

from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Events, Master, Memory, Out


def command(
    events: Events,
    *,
    out: Out,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Write report.html of the tables that the other jobs left in DIR.

    Exit status: 0 done; 1 it failed; 2 wrong use, or nothing to report on; 130 or 143 ended by a signal.
    """
    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.pipeline.spark.session import check_available

    check_available()
    from flowctl.pipeline.report.job import run

    options = session_options(master, conf, driver_memory, "report")
    run_job("report", lambda spark, _: run(spark, events, out), options, as_json=as_json)
