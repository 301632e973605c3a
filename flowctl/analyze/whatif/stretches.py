"""What is kept of the viewers of an hour for a what-if: a bounded sample of them, and of each only what can matter.

The sample are those with the `most` smallest hashes of (node, conn_id): samples of hours merge into the sample of the
whole. While a viewer keeps up, every choice does the same for it, and Senders that have drained keep nothing: so only
*stretches* around its trouble are kept message by message, with `BEFORE_S` and `AFTER_S`; of the rest only its outcome
(`calm`). A viewer that always kept up is one row, made of its row in ``flow_closes`` or ``flow_opens``.

Of samples the intervals are kept; stream and link are made up of these when they are tried (`intervals`).
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flowctl.analyze.engine import Window
from flowctl.analyze.engine import functions as f
from flowctl.analyze.job import arrow_schema
from flowctl.analyze.records.addresses import with_unit
from flowctl.analyze.whatif.intervals import MOST_MESSAGE_BYTES, NORMAL_MS, begin_s, packed
from flowctl.analyze.whatif.trials import DELAY, of_outcome
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.state import MessageClass
from flowctl.errors import FlowctlError
from flowctl.reasons import SLOW_ENDS, DropReason
from flowctl.records.flight.whatif.engine import evaluate
from flowctl.records.flight.whatif.types import (
    MOST_EVENTS,
    REFUSED,
    TAKEN,
    Choice,
    Event,
    RecordedViewer,
    delay_bucket,
    on_grid,
)
from flowctl.records.telemetry.schema import CLASS_NAMES, VIEWING, EventName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from flowctl.analyze.job import Records
    from flowctl.analyze.options import WhatifOptions
    from flowctl.analyze.records.window import Hour
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
    "intervals": "array<bigint>",
}
"""Contract of the part. Grain: one stretch of a viewer in an hour, or one that was calm all the time. `reason`: why it
is no viewer (`NO_VIEWER`), or damaged. `settings`: what its flight says of the limits in force; of source `SERVER`,
which is no viewer, what a server said when it started or its limits changed. `calm`: sums of the time without trouble,
by measure (`flowctl.analyze.whatif.trials.of_outcome`). `recorded`: with the last stretch of a flight that is here as
a whole, and whose limits did not change: whether the viewer was cut, and what was dropped, by measure likewise.
`at_us`, `what`, `bytes`: events (`records.flight.whatif.types.Event`), times from the first; `ended_us` likewise.
`switched_us`: when messages of another rendition begin, likewise. `intervals`: instead of events, of samples
(`flowctl.analyze.whatif.intervals`)."""
_APPLIED: Final = {**STRETCH_COLUMNS, "date": "string", "hour": "string"}
NO_STREAM: Final = "it followed no stream"
SHORT: Final = f"it was there for less than {LEAST_STAY_S:g} s"
NO_VIEWER: Final = (NO_STREAM, SHORT)
"""Reasons of connections that are sound, but not viewers."""
SERVER: Final = "server"
_AT_THE_END: Final = (DropReason.CLOSED.value, DropReason.UNFOLLOWED.value)
"""Drop reasons that do not count: messages that were queued when the viewer left or was cut."""
_ANY: Final = Choice(limits=NO_LIMITS)

_KEY: Final = int(MessageClass.KEY)
_T = TypeVar("_T")
_FLIGHT_COLUMNS: Final = (
    *("ts", "node", "seq", "conn_id", "peer_ip", "role", "app", "stream", "number"),
    *("offset_us", "kind", "message_class", "size_bytes", "taken_bytes", "reason", "queued_age_ms"),
)
_SAMPLE_COLUMNS: Final = (
    *("ts", "node", "seq", "conn_id", "interval_ms", "state", "sent_bytes"),
    *(f"accepted_{unit}_{name}" for unit in ("messages", "bytes") for name in CLASS_NAMES),
)


# -- on Spark


def stretches(records: Records, options: WhatifOptions) -> DataFrame:
    source, trouble_s, most = options.source, options.cut_s, options.most
    flown: set[Hour] = set(records.hours("flight")) if source == "auto" else set()
    frames = []
    if source == "flights" or (source == "auto" and records.has("flight")):
        frames.append(_of_flights(records.table("flight"), trouble_s, most))
    if source == "samples" or (source == "auto" and records.newest.keys() - flown):
        frames.append(_of_samples(records, flown, trouble_s, most))
    detail, reason = f.col("detail"), f.col("reason")
    changed = (f.col("event") == EventName.CONFIG_CHANGED.value) & (
        reason.isin("limits file", "limits") | detail.contains('"marks"')
    )
    told = records.table("flow_events").where((f.col("event") == EventName.SERVER_STARTED.value) | changed)
    frames.append(_rows(told, {"at": f.col("ts"), "source": f.lit(SERVER), "settings": detail}))
    return reduce(lambda one, other: one.unionByName(other), frames)


def sampled(frame: DataFrame, most: int) -> DataFrame:
    """Return the `most` rows of each hour with the smallest `picked`, a hash of node and conn_id that is added."""
    frame = frame.withColumn("picked", f.xxhash64("node", "conn_id"))
    if not most:
        return frame
    order = Window.partitionBy("date", "hour").orderBy("picked", "node", "conn_id")
    return frame.withColumn("_rank", f.row_number().over(order)).where(f.col("_rank") <= most).drop("_rank")


def _of_flights(flight: DataFrame, trouble_s: float, most: int) -> DataFrame:
    """Return the stretches of the flights that began in the hour; one whose use nobody said is looked at closer."""
    watching = f.coalesce(f.max(f.col("role").isin(*VIEWING)), f.lit(True))
    hours = ("date", "hour", "node", "conn_id")
    found = flight.groupBy(*hours).agg(
        f.max("peer_ip").alias("peer_ip"), watching.alias("watching"), f.min("number").alias("number")
    )
    keys = sampled(found.where(f.col("watching") & (f.col("number") == 0)), most)
    keys = with_unit(keys).select(*hours, "picked", "address")
    restarts = (f.col("kind") == "queued") & (f.col("message_class") == "key")  # with the sizes of their headers
    needed = f.col("kind").isin("begin", "call", "limits_set", "end") | restarts
    rows = flight.select("date", "hour", *_FLIGHT_COLUMNS, f.when(needed, f.col("detail")).alias("detail"))
    return _applied(rows.join(f.broadcast(keys), list(hours)), "flight", trouble_s)


def _of_samples(records: Records, flown: Collection[Hour], trouble_s: float, most: int) -> DataFrame:
    """Return the stretches of viewers by their samples; which ones, and who was calm, rows of whole connections say."""

    def table(name: str) -> DataFrame:
        found = records.table(name)
        left_out = [" ".join(hour) for hour in flown]
        return found.where(~f.concat_ws(" ", "date", "hour").isin(left_out)) if flown else found

    keys = with_unit(sampled(_connections(table), most))
    calm = f.coalesce(f.col("episodes") == 0, f.lit(False))
    hours = ["date", "hour", "node", "conn_id"]
    troubled = keys.where(~calm).select(*hours, "picked", "address", "close_reason")
    rows = table("flow_samples").where(f.col("role").isin(*VIEWING))
    rows = rows.select("date", "hour", *_SAMPLE_COLUMNS).join(f.broadcast(troubled), hours)
    return _calm_rows(keys.where(calm)).unionByName(_applied(rows, "samples", trouble_s))


def _connections(table: Callable[[str], DataFrame]) -> DataFrame:
    """Return the viewers of the hour, and what their last rows there say of them as a whole."""
    totals = [f"accepted_messages_{name}" for name in CLASS_NAMES]
    names = "date hour ts node conn_id peer_ip role opened_at duration_s reason sent_bytes episodes_overloaded"
    columns = (*names.split(), *totals)
    frames = [table(name).select(*columns) for name in ("flow_closes", "flow_opens")]
    rows = frames[0].unionByName(frames[1]).where(f.col("role").isin(*VIEWING))
    return (
        rows.groupBy("date", "hour", "node", "conn_id")
        .agg(
            f.max("ts").alias("ts"),
            f.max("peer_ip").alias("peer_ip"),
            f.min("opened_at").alias("opened_at"),
            f.max("duration_s").alias("duration_s"),
            f.max("reason").alias("close_reason"),
            f.max("sent_bytes").alias("sent_bytes"),
            f.max("episodes_overloaded").alias("episodes"),  # null: nobody counted, so samples are asked
            *(f.max(name).alias(name) for name in totals),
        )
        .where((f.col("duration_s") >= LEAST_STAY_S) | (f.coalesce("episodes", f.lit(1)) > 0))
    )


def _calm_rows(found: DataFrame) -> DataFrame:
    """Return the rows of viewers who were never refused anything: their part of the hour, evenly of their whole."""
    begin = f.greatest(f.col("opened_at"), f.date_trunc("hour", "ts"))
    seconds = f.least(f.col("ts").cast("double") - begin.cast("double"), f.col("duration_s"))
    seconds = f.greatest(seconds, f.lit(0.0))
    share = f.least(f.try_divide(seconds, f.col("duration_s")), f.lit(1.0))

    def part(name: str) -> Column:
        return f.coalesce(f.round(f.col(name) * share).cast("bigint"), f.lit(0).cast("bigint"))

    us = f.round(seconds * 1_000_000).cast("bigint")
    messages = (part(f"accepted_messages_{name}") for name in CLASS_NAMES)
    sums = _even(us, sum(messages, f.lit(0)), part(f"accepted_messages_{CLASS_NAMES[_KEY]}"), part("sent_bytes"))
    calm = f.create_map(*(item for name, column in sums.items() for item in (f.lit(name), column)))
    named = {name: f.col(name) for name in ("conn_id", "picked", "address", "close_reason")}
    return _rows(found, named | {"at": begin, "source": f.lit("samples"), "calm": calm})


def _rows(found: DataFrame, known: Mapping[str, Column]) -> DataFrame:
    zeros = dict.fromkeys(("conn_id", "picked", "ended_us"), f.lit(0))  # with a null pandas would have them as floats
    known = {"node": f.col("node"), **zeros, **known}
    columns = (known.get(name, f.lit(None)).cast(kind).alias(name) for name, kind in STRETCH_COLUMNS.items())
    return found.select(*columns, "date", "hour")


def _applied(rows: DataFrame, source: str, trouble_s: float) -> DataFrame:
    """Return the stretches of each viewer of `rows`: one call of a worker each."""

    def of_connection(table: pa.Table) -> pa.Table:
        return of_viewer(table, source, trouble_s)

    ddl = ", ".join(f"{name} {kind}" for name, kind in _APPLIED.items())
    return rows.groupBy("date", "hour", "node", "conn_id").applyInArrow(of_connection, ddl)


# -- of one viewer


def of_viewer(table: pa.Table, source: str, trouble_s: float) -> pa.Table:
    """Return the stretches of a viewer, for `applyInArrow`; a row with a `reason` where there is no viewer."""
    import pyarrow as pa

    rows = sorted(table.to_pylist(), key=lambda row: row["seq"])
    head = {name: rows[0][name] for name in ("node", "conn_id", "picked", "address", "date", "hour")}
    if source == "flight":
        head["settings"] = next((row["detail"] for row in rows if row["kind"] == "begin"), None)
    try:
        found = list(of_flight(rows, trouble_s) if source == "flight" else of_samples(rows, trouble_s))
    except FlowctlError as error:
        found = [{"reason": str(error)[:500]}]
    began_at = rows[0]["ts"]
    made = [
        {"ended_us": 0} | head | {"source": source} | row | {"at": began_at + timedelta(seconds=row.get("at", 0.0))}
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
    figures, last = flight.figures, found[-1]
    whole = last.pop("whole", False) and in_force(flight) == (flight.limits, flight.policy)
    if figures and whole and sum(row.reason == "follow" for row in flight.rows) == 1:
        dropped = Counter({"disconnected": int(link.close_reason in SLOW_ENDS)})
        for reason, classes in figures["dropped"].items():
            for name, (count, _) in classes.items() if reason not in _AT_THE_END else ():
                dropped[f"dropped_messages_{name}"] += count
        last["recorded"] = [*dropped.items()]
    yield from found


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


def _even(us: _T, messages: _T, keys: _T, sent_bytes: _T) -> dict[str, _T]:
    """Return the sums of a calm time of which totals are known, as numbers or as columns."""
    sums = {"watched_us": us, "ready_us": us, f"{DELAY}{delay_bucket(NORMAL_MS)}": us, "sent_bytes": sent_bytes}
    return {**sums, "offered_messages": messages, "key_offered": keys, "key_sent": keys}


def of_samples(rows: Sequence[Mapping[str, Any]], trouble_s: float) -> Iterator[dict[str, Any]]:
    """Yield the stretches that the samples of one viewer tell of."""
    lengths = [min(max(float(row["interval_ms"] or 0.0) / 1000, 0.04), 60.0) for row in rows]
    starts = [0.0, *itertools.accumulate(lengths)]
    count, reason = len(rows), rows[0]["close_reason"]
    if not any(row[f"accepted_messages_{name}"] for row in rows for name in CLASS_NAMES):
        yield {"reason": NO_STREAM}
    elif reason not in SLOW_ENDS and starts[-1] < LEAST_STAY_S:
        yield {"reason": SHORT}
    else:
        ready = [row["state"] == "READY" for row in rows]
        for troubled, first, last in cuts(starts[:count], [not one for one in ready], ready, trouble_s):
            part, seconds = rows[first:last], lengths[first:last]
            head = {"at": starts[first], "close_reason": reason if last == count else None}
            intervals = packed(part, seconds)
            if troubled and (began := begin_s(intervals)) is not None:
                yield head | {"intervals": intervals, "ended_us": round((sum(seconds) - began) * 1e6)}
            else:
                counts = [sum(int(row[f"accepted_messages_{name}"] or 0) for row in part) for name in CLASS_NAMES]
                us, sent_bytes = round(sum(seconds) * 1e6), sum(int(row["sent_bytes"] or 0) for row in part)
                yield head | {"calm": [*_even(us, sum(counts), counts[_KEY], sent_bytes).items()]}
