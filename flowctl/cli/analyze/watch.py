"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any

import typer

from flowctl.cli.analyze.common import Events, check_apart, started
from flowctl.cli.analyze.options import BANS, SPARK, given, shared
from flowctl.text.output import say


@shared(BANS, SPARK)
def watch(
    events: Events,
    *,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of bans.jsonl, which a server watches.")],
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="Of the stream. Default: OUT/_checkpoint.")
    ] = None,
    trigger: Annotated[str, typer.Option(help="Time between two looks for new files.")] = "5s",
    window: Annotated[str, typer.Option(help="Evidence is added up over so long.")] = "60s",
    watermark: Annotated[str, typer.Option(help="How much later than the newest a record may come.")] = "2min",
    once: Annotated[bool, typer.Option("--once", help="Work off what is there, and end.")] = False,
    max_files: Annotated[int, typer.Option(min=1, help="Files per trigger.")] = 500,
    **values: Any,
) -> None:
    """Watch the events of servers and keep OUT/bans.jsonl up to date. A restart loses and repeats nothing.

    Ends in order with SIGINT or SIGTERM. Exit status: 0 ended; 1 it failed; 2 wrong use.
    """
    from flowctl.cli.common import print_json
    from flowctl.pipeline.abuse.job import AbuseOptions
    from flowctl.pipeline.abuse.watch import WatchOptions, run
    from flowctl.units import parse_duration

    check_apart(events, out)
    options = WatchOptions(
        trigger_s=parse_duration(trigger, "--trigger"),
        window_s=parse_duration(window, "--window"),
        watermark_s=parse_duration(watermark, "--watermark"),
        checkpoint=checkpoint,
        once=once,
        most_files=max_files,
        judge=AbuseOptions(**given(values, BANS)),
    )
    with started("watch", values) as (spark, _), _signals() as stop:
        result = run(spark, events, out, options, stop=stop, tell=lambda line: say(line, to_stderr=True))
    print_json(result.as_dict())


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Give an event that the first SIGINT or SIGTERM sets; the second one ends the process as signals do."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()
        for item, handler in before.items():
            signal.signal(item, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, end)
    try:
        yield stop
    finally:
        for item, handler in before.items():
            signal.signal(item, handler)
