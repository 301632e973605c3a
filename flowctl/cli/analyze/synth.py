"""``flowctl analyze synth``: makes event data of any size, with planted slow viewers and abusers."""

from __future__ import annotations

from typing import Annotated

import typer

from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Master, Memory


def command(
    out: Annotated[str, typer.Argument(metavar="OUT", help="New folder for the data.")],
    *,
    events: Annotated[str, typer.Option(metavar="NUMBER", help="About how many events, like 10M or 500k.")] = "100k",
    seed: Annotated[int, typer.Option(help="The same seed gives the same data.")] = 1,
    viewers: Annotated[str | None, typer.Option(metavar="NUMBER", help="Clients. Default: each comes 8 times.")] = None,
    days: Annotated[float, typer.Option(help="Time that the events span.")] = 1.0,
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="When they begin, UTC. Default: so that they end this hour.")
    ] = None,
    slow: Annotated[str, typer.Option(metavar="SHARE", help="Honest slow clients, like 5%.")] = "5%",
    abusers: Annotated[str, typer.Option(metavar="SHARE", help="Abusers, like 1%.")] = "1%",
    streams: Annotated[int | None, typer.Option(min=1, help="Streams. Default: one for 200 clients.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Servers.")] = 4,
    samples: Annotated[str | None, typer.Option(metavar="TIME", help="Make flow_samples too, one per TIME.")] = None,
    truth: Annotated[bool, typer.Option("--truth/--no-truth", help="Write who was planted to OUT/_truth.")] = True,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace what synth made in OUT before; never what a server wrote.")
    ] = False,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Make event data of any size, as a server would have written it, with planted slow viewers and abusers.

    Exit status: 0 done; 1 it failed; 2 wrong use; 130 or 143 ended by a signal.
    """
    import time

    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.cli.common import optional_duration
    from flowctl.pipeline.spark.session import check_available
    from flowctl.pipeline.synth.plan import SynthOptions
    from flowctl.server.bans import parse_utc

    # Evidence ages: what ended long ago would be worth nothing to a job that judges as of now.
    begin_s = int(time.time() // 3600 * 3600 - days * 86400)
    options = SynthOptions(
        events=_number(events, "--events"),
        seed=seed,
        viewers=None if viewers is None else _number(viewers, "--viewers"),
        days=days,
        start_s=begin_s if start is None else int(parse_utc(start).timestamp()),
        slow=_share(slow, "--slow"),
        abusers=_share(abusers, "--abusers"),
        streams=streams,
        nodes=nodes,
        samples_s=optional_duration(samples, "--samples"),
        truth=truth,
        replace=replace,
    )
    session = session_options(master, conf, driver_memory, "synth")
    check_available()
    from flowctl.pipeline.synth.job import run

    run_job("synth", lambda spark, _: run(spark, "", out, options), session, as_json=as_json)


def _number(text: str, option: str) -> int:
    """Return a whole number written like ``10M``, ``500k`` or ``1234``.

    Raises:
        ConfigError: it is none.
    """
    import re

    from flowctl.errors import ConfigError

    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kMG]?)", text)
    if match is None:
        raise ConfigError(f"{option} is {text!r}, allowed is a number", hint="write it like 10M, 500k or 1234")
    return round(float(match[1]) * {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}[match[2]])


def _share(text: str, option: str) -> float:
    """Return a share written like ``5%`` or ``0.05``.

    Raises:
        ConfigError: it is none.
    """
    import re

    from flowctl.errors import ConfigError

    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)(%?)", text)
    if match is None:
        raise ConfigError(f"{option} is {text!r}, allowed is a share", hint="write it like 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)
