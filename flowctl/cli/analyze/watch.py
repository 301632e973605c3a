"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any

import typer

from flowctl.cli.analyze.abuse import Allow, JudgePrivate, MaxBans, ReplaceBans, Threshold, WeightsFile
from flowctl.cli.analyze.common import DEFAULT_MEMORY, AsJson, Conf, Events, Master, Memory
from flowctl.text.output import say


def command(
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
    weights: WeightsFile = None,
    allow: Allow = None,
    judge_private: JudgePrivate = False,
    threshold: Threshold = None,
    max_bans: MaxBans = 10_000,
    replace_bans: ReplaceBans = False,
    master: Master = None,
    conf: Conf = None,
    driver_memory: Memory = DEFAULT_MEMORY,
    as_json: AsJson = False,
) -> None:
    """Watch the events of servers and keep OUT/bans.jsonl up to date. A restart loses and repeats nothing.

    Ends in order with SIGINT or SIGTERM. Exit status: 0 ended; 1 it failed; 2 wrong use.
    """
    from flowctl.cli.analyze.abuse import read_weights
    from flowctl.cli.analyze.common import check_apart, session_options, show
    from flowctl.pipeline.spark.session import check_available, session
    from flowctl.units import parse_duration

    check_available()
    check_apart(events, str(out))
    from flowctl.pipeline.tables.addresses import parse_networks
    from flowctl.pipeline.watch.job import run
    from flowctl.pipeline.watch.rules import WatchOptions

    options = WatchOptions(
        trigger_s=parse_duration(trigger, "--trigger"),
        window_s=parse_duration(window, "--window"),
        watermark_s=parse_duration(watermark, "--watermark"),
        checkpoint=checkpoint,
        once=once,
        most_files=max_files,
        weights=read_weights(weights, threshold),
        allow=tuple(parse_networks(allow or [], "--allow")),
        private=judge_private,
        most_bans=max_bans,
        replace_bans=replace_bans,
    )
    start = session_options(master, conf, driver_memory, "watch")
    with _signals() as stop, session(start) as spark:
        result = run(spark, events, out, options, stop=stop, tell=lambda line: say(line, to_stderr=True))
    result.check()
    show(result, as_json=as_json)


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
