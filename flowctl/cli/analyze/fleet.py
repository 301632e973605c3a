"""``flowctl analyze fleet``: how each stream, node, minute and subnet fared."""

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
    """Per stream, node and minute, and per subnet: viewers, share of each state, delay, drops, joins and leaves.

    Exit status: 0 done; 1 it failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal.
    """
    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.pipeline.spark.session import check_available

    check_available()
    from flowctl.pipeline.jobs.fleet import run

    options = session_options(master, conf, driver_memory, "fleet")
    run_job("fleet", lambda spark, _: run(spark, events, out), options, as_json=as_json, folders=(events, out))
