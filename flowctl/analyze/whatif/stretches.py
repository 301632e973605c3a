"""What is kept of the viewers of an hour for a what-if: a bounded sample of them, and of each only what can matter.

The sample are those with the `most` smallest hashes of (node, conn_id): samples of hours merge into the sample of the
whole. While a viewer keeps up, every choice does the same for it, and Senders that have drained keep nothing: so only
*stretches* around its trouble are kept message by message, with `BEFORE_S` and `AFTER_S`; of the rest only its outcome
(`calm`). A viewer that always kept up is one row, made of its row in ``flow_closes`` or ``flow_opens``.

With the first of a viewer goes how long its line stood still each time, and how long it stayed (`trials.Lives`). Of
viewers that were not recorded message by message only how they ended is kept (`COUNTED`).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from flowctl.analyze.job import arrow_schema
from flowctl.analyze.models import query, run_text
from flowctl.analyze.records.addresses import with_unit
from flowctl.analyze.whatif.trials import of_outcome
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.errors import FlowctlError
from flowctl.reasons import SLOW_ENDS, DropReason
from flowctl.records.flight.whatif.engine import LEAST_STALL_S, evaluate, stalls
from flowctl.records.flight.whatif.types import (
    MOST_EVENTS,
    REFUSED,
    TAKEN,
    Choice,
    Event,
    RecordedViewer,
    on_grid,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Records
    from flowctl.analyze.options import WhatifOptions
    from flowctl.records.flight.whatif.viewing import StreamAndLink

BEFORE_S: Final = 20.0
"""Time kept before trouble: two key frames at the longest usual distance, so that the log is as it was."""
AFTER_S: Final = 30.0
"""Time kept after trouble: a choice that queued more has drained by then, unless the link is hardly faster."""
LEAST_STAY_S: Final = 2.0
"""Least stay of a viewer: shorter ones are checks of monitors, and pages that were closed at once."""

STRETCH_COLUMNS: Final[dict[str, str]] = {
    "at": "timestamp",
    "node": "string",
    "conn_id": "bigint",
    "picked": "bigint",
    "address": "string",
    "source": "string",
    "reason": "string",
    "close_reason": "string",
    "settings": "string",
    "calm": "map<string,bigint>",
    "recorded": "map<string,bigint>",
    "given": "int",
    "restart_bytes": "int",
    "ended_us": "bigint",
    "at_us": "array<bigint>",
    "what": "array<int>",
    "bytes": "array<bigint>",
    "switched_us": "array<bigint>",
    "stalls": "array<bigint>",
    "stay_us": "bigint",
}
"""Contract of the part. Grain: one stretch of a viewer in an hour, or one that was calm all the time. `reason`: why it
is no viewer (`NO_VIEWER`), or damaged. `settings`: what its flight says of the limits in force; of source `SERVER`,
which is no viewer, what a server said when it started or its limits changed. `calm`: sums of the time without trouble,
by measure (`flowctl.analyze.whatif.trials.of_outcome`). `recorded`: with the last stretch of a flight that is here as
a whole, and whose limits did not change: whether the viewer was cut, and what was dropped, by measure likewise.
`at_us`, `what`, `bytes`: events (`records.flight.whatif.types.Event`), times from the first; `ended_us` likewise.
`switched_us`: when messages of another rendition begin, likewise. With the first stretch of a flight: `stalls`, how
long its line stood still each time, in microseconds, the last one less than 0 where it had not ended; `stay_us`: how
long the viewer stayed, less than 0 where it did not leave by itself. Of source `COUNTED`: how many viewers ended for
`close_reason`, as `calm`."""
_APPLIED: Final = {**STRETCH_COLUMNS, "date": "string", "hour": "string"}
NO_STREAM: Final = "it followed no stream"
SHORT: Final = f"it was there for less than {LEAST_STAY_S:g} s"
NO_VIEWER: Final = (NO_STREAM, SHORT)
"""Reasons of connections that are sound, but not viewers."""
SERVER: Final = "server"
COUNTED: Final = "closes"
MOST_MESSAGE_BYTES: Final = (1 << 24) - 1
"""Largest message (RTMP 1.0, section 5.3.1.2.1): a trial would have to make what a false row says."""
_AT_THE_END: Final = (DropReason.CLOSED.value, DropReason.UNFOLLOWED.value)
"""Drop reasons that do not count: messages that were queued when the viewer left or was cut."""
_ANY: Final = Choice(limits=NO_LIMITS)

# -- on Spark


def stretches(records: Records, options: WhatifOptions) -> DataFrame:
    beside = {name: records.table(name) for name in ("flow_closes", "flow_events")}
    frames = {"beside": query("whatif/beside", beside, least_stay_s=LEAST_STAY_S)}
    if records.has("flight"):
        frames["flights"] = _of_flights(records.table("flight"), options.cut_s, options.most)
    return run_text(" UNION ALL ".join(f"SELECT {', '.join(_APPLIED)} FROM {name}" for name in frames), frames)


def _of_flights(flight: DataFrame, trouble_s: float, most: int) -> DataFrame:
    """Return the stretches of the flights that began in the hour."""
    keys = with_unit(query("whatif/flights", {"flight": flight}, most=most))
    rows = query("whatif/events", {"flight": flight, "keys": keys})

    def of_connection(table: pa.Table) -> pa.Table:
        return of_viewer(table, trouble_s)

    ddl = ", ".join(f"{name} {kind}" for name, kind in _APPLIED.items())
    return rows.groupBy("date", "hour", "node", "conn_id").applyInArrow(of_connection, ddl)  # one call for each viewer


# -- of one viewer


def of_viewer(table: pa.Table, trouble_s: float) -> pa.Table:
    """Return the stretches of a viewer, for `applyInArrow`; a row with a `reason` where there is no viewer."""
    import pyarrow as pa

    rows = sorted(table.to_pylist(), key=lambda row: row["seq"])
    head = {name: rows[0][name] for name in ("node", "conn_id", "picked", "address", "date", "hour")}
    head["settings"] = next((row["detail"] for row in rows if row["kind"] == "begin"), None)
    try:
        found = list(of_flight(rows, trouble_s))
    except FlowctlError as error:
        found = [{"reason": str(error)[:500]}]
    began_at = rows[0]["ts"]
    made = [
        {"ended_us": 0} | head | {"source": "flight"} | row | {"at": began_at + timedelta(seconds=row.get("at", 0.0))}
        for row in found
    ]
    return pa.Table.from_pylist(made, arrow_schema(_APPLIED))


def of_flight(rows: Sequence[Mapping[str, Any] | Sequence[Any]], trouble_s: float) -> Iterator[dict[str, Any]]:
    """Yield the stretches of a flight, `at` in seconds since its first event."""
    from flowctl.records.flight.reading import read_flights
    from flowctl.records.flight.whatif.viewing import in_force, stream_and_link

    flight = read_flights(rows)
    link = stream_and_link(flight)
    found = list(of_events(link, trouble_s))
    if "reason" not in found[0]:
        found[0] |= stall_columns(link)
    figures, last = flight.figures, found[-1]
    whole = last.pop("whole", False) and in_force(flight) == (flight.limits, flight.policy)
    if figures and whole and sum(row.reason == "follow" for row in flight.rows) == 1:
        dropped = Counter({"disconnected": int(link.close_reason in SLOW_ENDS)})
        for reason, classes in figures["dropped"].items():
            for name, (count, _) in classes.items() if reason not in _AT_THE_END else ():
                dropped[f"dropped_messages_{name}"] += count
        last["recorded"] = [*dropped.items()]
    yield from found


def stall_columns(link: StreamAndLink) -> dict[str, Any]:
    """Return how long the line stood still each time, and how long the viewer stayed."""
    ended, stopped = stalls(link.events, link.ended_s)
    still_us, stay_us = round((link.ended_s - stopped) * 1e6), round((link.ended_s - link.events[0][0]) * 1e6)
    left = link.close_reason is not None and link.close_reason not in SLOW_ENDS
    told = [round(seconds * 1e6) for seconds in ended] + ([-still_us] if still_us >= LEAST_STALL_S * 1e6 else [])
    return {"stalls": told, "stay_us": stay_us if left else -stay_us}


def of_events(found: StreamAndLink, trouble_s: float) -> Iterator[dict[str, Any]]:
    """Yield the stretches of what a flight says of stream and link; `whole` with the last: nothing is left out."""
    events = [
        (on_grid(at), what, min(size, MOST_MESSAGE_BYTES) if what >= 0 else size)
        for at, what, size in found.events[:MOST_EVENTS]
    ]
    if not any(what >= 0 for _, what, _ in events):
        yield {"reason": NO_STREAM}
        return
    began, ended = events[0][0], max(on_grid(found.ended_s), events[-1][0])
    if found.close_reason not in SLOW_ENDS and ended - began < LEAST_STAY_S:
        yield {"reason": SHORT}
        return
    times = [at for at, _, _ in events]
    bad = [what == REFUSED for _, what, _ in events]
    for number, (_, what, _) in enumerate(events[1:], 1):
        bad[number] |= bad[number - 1] and what != TAKEN
    for troubled, first, last in cuts(times, bad, [what == TAKEN for _, what, _ in events], trouble_s):
        until = ended if last == len(events) else times[last]
        row: dict[str, Any] = {"close_reason": found.close_reason if last == len(events) else None}
        if troubled:
            row |= {
                "given": found.given if first == 0 else 0,
                "restart_bytes": min(found.restart_bytes, MOST_MESSAGE_BYTES),
            }
            row |= _stretch(events[first:last], until)
            row["switched_us"] = [
                round((at - times[first]) * 1e6) for at in found.switched if times[first] < at <= until
            ]
        else:
            (outcome,) = evaluate(RecordedViewer(events=events[first:last], ended_at=until), [_ANY])
            row["calm"] = [(measure, value) for measure, value in of_outcome(outcome).items() if value]
        yield {"at": times[first] - began, **row} | ({"whole": True} if last == len(events) else {})


def cuts(
    times: Sequence[float], bad: Sequence[bool], whole: Sequence[bool], trouble_s: float
) -> Iterator[tuple[bool, int, int]]:
    """Yield (is there trouble, first, behind the last) of each part, until there was trouble for long enough."""
    ends = [number + 1 for number, taken in enumerate(whole) if taken]
    ended_at = [times[end - 1] for end in ends]
    begin = number = 0
    while number < len(bad):
        if not bad[number]:
            number += 1
            continue
        before = bisect.bisect_right(ended_at, times[number] - BEFORE_S)
        first = max(ends[before - 1] if before else 0, begin)
        last = number
        while number < len(bad) and (bad[number] or number < last):
            if bad[number]:  # one more time of trouble: so much later it is over
                after = bisect.bisect_left(ended_at, times[number] + AFTER_S)
                last = ends[after] if after < len(ends) else len(bad)
            number += 1
        if begin < first:
            yield False, begin, first
        short = bisect.bisect_left(times, times[first] + BEFORE_S + trouble_s, first + 1, last)
        yield True, first, short
        trouble_s -= times[short - 1] - times[first]
        if short < last or trouble_s <= 0:
            return
        begin = number = last
    if begin < len(bad):
        yield False, begin, len(bad)


def _stretch(events: Sequence[Event], until: float) -> dict[str, Any]:
    began = events[0][0]
    columns = {"at_us": [round((at - began) * 1e6) for at, _, _ in events], "what": [what for _, what, _ in events]}
    return {**columns, "bytes": [size for _, _, size in events], "ended_us": round((until - began) * 1e6)}
