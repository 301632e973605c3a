"""``flowctl analyze watch``: bans while it happens, from the files that servers finish every few seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from flowctl.cli.analyze.common import Events, check_apart, started
from flowctl.cli.analyze.options import BANS, SPARK, WATCH, given, shared
from flowctl.core.text.output import say

_ANSWER: Final = (
    "watch: {batches} batches, {judgements} alarms judged, {late} records too late; "
    "{bans} bans and limits of it in {list}"
)


@shared(WATCH, BANS, SPARK)
def watch(
    events: Events,
    *,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of bans.jsonl, which a server watches.")],
    **values: Any,
) -> None:
    """Watch events of servers and keep OUT/bans.jsonl fresh. A restart loses and repeats nothing.

    Ends in order with SIGINT or SIGTERM. Exit status: 0 ended; 1 it failed; 2 wrong use.
    """
    from flowctl.analyze.abuse.job import BANS_FILE
    from flowctl.analyze.abuse.watch import run
    from flowctl.analyze.options import AbuseOptions, WatchOptions
    from flowctl.analyze.records.place import RecordPlace
    from flowctl.cli.common import print_json

    check_apart(events, out)
    RecordPlace(out)  # before Java is started
    options = WatchOptions(**given(values, WATCH), judge=AbuseOptions(**given(values, BANS)))
    with started("watch", values) as (start, _):
        spark = start()
        with _signals() as stop:
            result = run(spark, events, out, options, stop=stop, tell=lambda line: say(line, to_stderr=True))
    if values["json"]:
        print_json(result.as_dict())
    else:
        say(_ANSWER.format(**result.summary, list=result.outputs[BANS_FILE]))


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Give an event that the first SIGINT or SIGTERM sets; the second one ends the process as signals do."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(*_: object) -> None:
        stop.set()
        restore()

    for number in before:
        signal.signal(number, end)
    try:
        yield stop
    finally:
        restore()
