"""``flowctl analyze capacity``: how many viewers a node carries, and how many nodes a crowd takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Master, Memory, Out


def command(
    events: Annotated[
        str | None, typer.Argument(metavar="[EVENTS]", help="Folder that a server wrote with --events.")
    ] = None,
    *,
    out: Out,
    measurements: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Crowds that were measured: JSON of flowctl load --json, or of bench/results."
        ),
    ] = None,
    viewers: Annotated[str, typer.Option(metavar="N", help="The crowd to be carried, like 1M.")] = "1M",
    bit_rate: Annotated[str | None, typer.Option(metavar="RATE", help="Of the stream. Default: as recorded.")] = None,
    slow_share: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Viewers that do not keep up, like 5%. Default: as recorded.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean length of a session. Default: as recorded.")
    ] = None,
    busy: Annotated[str, typer.Option(metavar="SHARE", help="Of a thread that may be used.")] = "70%",
    p99: Annotated[str, typer.Option(metavar="TIME", help="Delay that healthy viewers may have.")] = "100ms",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a node. Default: any.")] = None,
    headroom: Annotated[
        str, typer.Option(metavar="SHARE", help="Of each node of a fleet, kept free while all live.")
    ] = "20%",
    regions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where networks are: lines NETWORK REGION. Default: not known.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated crowd.")] = 1,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Fit a node to what was measured, simulate a crowd, and say how many viewers a node carries.

    Measurements go first; else records with crowds of 200 viewers and more; else the figures of a reference machine,
    and the answer says so. Nodes of more than 4 times the largest measured crowd are not answered for. From records of
    all nodes (EVENTS) it says what each was loaded with, and how many origins and edges the crowd takes when any one
    node may die, where, and which streams are worth having at an edge.

    Exit status: 0 done; 1 it failed; 2 wrong use, or nothing to read; 130 or 143 ended by a signal.
    """
    from flowctl.cli.analyze.common import run_job, session_options
    from flowctl.pipeline.spark.session import check_available
    from flowctl.units import parse_bit_rate, parse_duration, parse_share, parse_size

    check_available()
    from flowctl.pipeline.capacity.answer import CapacityOptions
    from flowctl.pipeline.capacity.regions import parse_regions
    from flowctl.pipeline.jobs.capacity import run

    wanted = CapacityOptions(
        viewers=_count(viewers),
        bit_rate=None if bit_rate is None else parse_bit_rate(bit_rate, "--bit-rate"),
        slow_share=None if slow_share is None else parse_share(slow_share, "--slow-share"),
        session_s=None if session is None else parse_duration(session, "--session"),
        busy=parse_share(busy, "--busy"),
        p99_ms=parse_duration(p99, "--p99") * 1000,
        memory_bytes=None if memory is None else parse_size(memory, "--memory"),
        measurements=None if measurements is None else _text(measurements, "--measurements"),
        measurements_name=str(measurements),
        seed=seed,
        headroom=parse_share(headroom, "--headroom"),
        regions=() if regions is None else parse_regions(_text(regions, "--regions"), str(regions)),
    )
    options = session_options(master, conf, driver_memory, "capacity")
    folders = None if events is None else (events, out)
    run_job("capacity", lambda spark, _: run(spark, events, out, wanted), options, as_json=as_json, folders=folders)


def _text(path: Path, option: str) -> str:
    """Return what a file holds."""
    from flowctl.errors import ConfigError

    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error}") from error


def _count(text: str) -> int:
    """Return a number of viewers, like 250000, 250k or 1M."""
    from flowctl.errors import ConfigError

    factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
        raise ConfigError(f"--viewers is {text!r}, it must be a whole number, like 250k or 1M")
    return int(digits) * factor
