"""From rows of one connection to what every choice would have done for it: the part that runs on Spark's workers.

A worker is handed one connection at a time as an Arrow table, builds a `RecordedViewer`, runs all choices over it with
`flowctl.flight.whatif.engine.evaluate`, and gives back one row per choice. All sums are whole numbers, so that
adding them up in any order, on any cluster, gives the same.

Of a flight, stream and link are those of `flowctl.flight.viewing`. Of samples, which say once a second what happened in
it, they are made up: messages are spread evenly over the interval, class by class; while the viewer was READY all was
taken each 40 ms, else the bytes that were sent are spread over five writes a second, each of which met EAGAIN. That is
coarser: bursts within a second (a key frame, a refusal that lasted 100 ms) are not seen, ages are off by up to the
interval, and a viewer that drained within it counts as having drained at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowctl.errors import FlowctlError
from flowctl.flight.whatif.engine import (
    MOST_EVENTS,
    REFUSED,
    TAKEN,
    Choice,
    Event,
    Outcome,
    RecordedViewer,
    Work,
    bucket_of,
    evaluate,
    extended,
    on_grid,
    recorded_viewer,
)
from flowctl.flow.state import MessageClass
from flowctl.pipeline.report.data import LEAST_STAY_S
from flowctl.reasons import SLOW_ENDS
from flowctl.telemetry.schema import CLASS_NAMES

if TYPE_CHECKING:
    import pyarrow as pa

ALL_CHOICES: Final = -1
"""`choice_id` of a viewer that was never refused anything: one row that stands for every choice."""
DAMAGED: Final = -2
"""`choice_id` of a connection whose rows make no viewer; `reason` says why."""
NO_VIEWER: Final = -3
"""`choice_id` of a connection that never followed a stream, or was there for a moment only: nothing is wrong."""
WRITES_PER_S: Final = 5
"""Writes made up per second of a viewer in trouble: a refused one is sampled as often."""
NORMAL_MS: Final = 40.0
"""Delay of a viewer in no trouble, where only samples say so: the flush interval."""
_SHORT: Final = f"it was there for less than {LEAST_STAY_S:g} s"
HONEST_SHARE: Final = 0.05
"""A viewer that takes less than this share of its stream is not watching: it stands still or pretends to read."""

VIEWERS_DDL: Final = (
    "node string, conn_id bigint, peer_ip string, choice_id int, source string, honest boolean, assumed boolean, "
    "closed string, watched_us bigint, assumed_us bigint, offered_messages bigint, sent_messages bigint, "
    + ", ".join(f"dropped_messages_{name} bigint" for name in CLASS_NAMES)
    + ", key_offered bigint, key_sent bigint, sent_bytes bigint, edges bigint, recoveries bigint, ready_us bigint, "
    "overloaded_us bigint, soft_us bigint, hard_us bigint, stall_us bigint, memory_peak_bytes bigint, "
    "memory_mean_bytes bigint, returns bigint, delay_us map<int,bigint>, inputs bigint, shown bigint, reason string"
)
"""Columns of ``whatif_viewers``. Grain: one connection and choice; `delay_us`: time by bucket of delay."""

_KEY: Final = int(MessageClass.KEY)


def flight_viewer(rows: Sequence[Mapping[str, Any]], extend_s: float) -> RecordedViewer:
    """Return the viewer of a flight.

    Args:
        rows: of table ``flight``, all of one connection, in any order.
        extend_s: how much to add where the server closed the viewer for being slow, seconds.

    Raises:
        FlowctlError: the rows make no flight.
    """
    from flowctl.flight.reading import read_flights
    from flowctl.flight.viewing import stream_and_link

    found = stream_and_link(read_flights(rows))
    return recorded_viewer(
        found.events,
        given=found.given,
        restart_bytes=found.restart_bytes,
        ended_s=found.ended_s,
        close_reason=found.close_reason,
        extend_s=extend_s,
    )


def sample_viewer(rows: Sequence[Mapping[str, Any]], extend_s: float) -> RecordedViewer:
    """Return the viewer that the samples of one connection tell of; see the module for what is made up.

    Args:
        rows: of table ``flow_samples``, in order of time.
        extend_s: as of `flight_viewer`, where the last sample is not READY and something waits.
    """
    events: list[Event] = []
    at, queued = 0.0, 0
    for row in rows:
        seconds = min(max(float(row["interval_ms"] or 0.0) / 1000, 0.04), 60.0)
        ready = row["state"] == "READY" and not row["queued_bytes"]
        taken = int(row["sent_bytes"] or 0)
        queued = max(queued, 0)
        pieces = _spread(row, at, seconds)
        queued += sum(size for _, _, size in pieces)
        per_s = 1000 / NORMAL_MS if ready else WRITES_PER_S
        step = seconds / max(round(seconds * per_s), 1)
        writes = _writes(at, seconds, step, queued if ready else taken, ready=ready)
        events.extend(sorted([*pieces, *writes], key=_by_time))
        queued = 0 if ready else queued - taken
        at += seconds
    if len(events) > MOST_EVENTS:
        events = events[:MOST_EVENTS]
    end = on_grid(at)
    viewer = RecordedViewer(events=events, ended_at=max(end, events[-1][0] if events else 0.0))
    in_trouble = bool(rows) and rows[-1]["state"] in {"SOFT_LIMIT", "HARD_LIMIT"}
    return extended(viewer, extend_s) if in_trouble else viewer


def _by_time(event: Event) -> tuple[float, bool]:
    return event[0], event[1] < 0


def _spread(row: Mapping[str, Any], at: float, seconds: float) -> list[Event]:
    """Return the messages of an interval, each class spread evenly, a key frame first of all."""
    events = []
    for item, name in enumerate(CLASS_NAMES):
        count = min(int(row[f"accepted_messages_{name}"] or 0), 10_000)
        total = int(row[f"accepted_bytes_{name}"] or 0)
        for number in range(count):
            size = max(total * (number + 1) // count - total * number // count, 1)
            place = number / count if item == _KEY else (number + 0.5) / count
            events.append((on_grid(at + seconds * place), item, size))
    return events


def _writes(at: float, seconds: float, step: float, total: int, *, ready: bool) -> list[Event]:
    """Return the writes of an interval: what was taken, in equal parts."""
    count = max(round(seconds / step), 1)
    parts = [total * (number + 1) // count - total * number // count for number in range(count)]
    return [(on_grid(at + step * (n + 1)), TAKEN if ready else REFUSED, part) for n, part in enumerate(parts)]


def _untroubled_samples(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(row["state"] == "READY" and not row["queued_bytes"] for row in rows)


def evaluated(table: pa.Table, choices: Sequence[Choice], source: str, extend_s: float, buffer_s: float) -> pa.Table:
    """Return the rows of ``whatif_viewers`` of one connection; for `applyInArrow`.

    Args:
        table: its rows.
        choices: in order of `choice_id`.
        source: ``flight`` or ``samples``.
        extend_s: see `flight_viewer`.
        buffer_s: what the player has buffered, seconds.
    """
    rows = table.to_pylist()
    rows.sort(key=lambda row: (row["seq"],))
    head = {name: rows[0][name] for name in ("node", "conn_id", "peer_ip")}
    return _arrow(list(_rows(rows, head, choices, source, extend_s, buffer_s)))


def _rows(
    rows: list[dict[str, Any]],
    head: dict[str, Any],
    choices: Sequence[Choice],
    source: str,
    extend_s: float,
    buffer_s: float,
) -> Iterator[dict[str, Any]]:
    if source == "samples" and _untroubled_samples(rows):
        if sum(float(row["interval_ms"] or 0.0) for row in rows) < LEAST_STAY_S * 1000:
            yield {**head, "source": source, "choice_id": NO_VIEWER, "reason": _SHORT}
            return
        yield {**head, "source": source, **_calm(rows, len(choices))}
        return
    try:
        viewer = _viewer(rows, source, extend_s)
        if not any(event[1] >= 0 for event in viewer.events):
            yield {**head, "source": source, "choice_id": NO_VIEWER, "reason": "it followed no stream"}
            return
        # Who was cut early is what limits are about.
        left = viewer.assumed_from is None and viewer.close_reason not in SLOW_ENDS
        if left and viewer.ended_at - viewer.events[0][0] < LEAST_STAY_S:
            yield {**head, "source": source, "choice_id": NO_VIEWER, "reason": _SHORT}
            return
        work = Work()
        outcomes = evaluate(viewer, choices, player_buffer_s=buffer_s, work=work)
    except FlowctlError as error:
        yield {**head, "source": source, "choice_id": DAMAGED, "reason": str(error)[:500]}
        return
    offered = sum(size for _, what, size in viewer.events if what >= 0)
    taken = sum(size for _, what, size in viewer.events if what < 0)
    common = {
        **head,
        "source": source,
        "honest": taken >= HONEST_SHARE * offered,
        "assumed": viewer.assumed_from is not None,
    }
    if not viewer.refused:
        yield {**common, **_figures(outcomes[0]), "choice_id": ALL_CHOICES, "inputs": work.inputs, "shown": work.shown}
        return
    for number, outcome in enumerate(outcomes):
        counted = {"inputs": work.inputs, "shown": work.shown} if number == 0 else {"inputs": 0, "shown": 0}
        yield {**common, **_figures(outcome), "choice_id": number, **counted}


def _viewer(rows: list[dict[str, Any]], source: str, extend_s: float) -> RecordedViewer:
    """Return the viewer of a connection.

    Raises:
        FlowctlError: the rows make none.
    """
    return flight_viewer(rows, extend_s) if source == "flight" else sample_viewer(rows, extend_s)


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _figures(outcome: Outcome) -> dict[str, Any]:
    times = dict(zip(("ready_us", "overloaded_us", "soft_us", "hard_us"), outcome.time_in_states_s, strict=True))
    return {
        "closed": None if outcome.closed is None else outcome.closed.value,
        "watched_us": _us(outcome.watched_s),
        "assumed_us": _us(outcome.assumed_s),
        "offered_messages": sum(outcome.offered_messages),
        "sent_messages": sum(outcome.sent_messages),
        **{f"dropped_messages_{name}": outcome.dropped_messages[item] for item, name in enumerate(CLASS_NAMES)},
        "key_offered": outcome.offered_messages[_KEY],
        "key_sent": outcome.sent_messages[_KEY],
        "sent_bytes": outcome.sent_bytes,
        "edges": outcome.edges,
        "recoveries": outcome.recoveries,
        **{name: _us(value) for name, value in times.items()},
        "stall_us": _us(outcome.stall_s),
        "memory_peak_bytes": outcome.memory_peak_bytes,
        "memory_mean_bytes": round(outcome.memory_byte_s / outcome.watched_s) if outcome.watched_s else 0,
        "returns": outcome.returns,
        "delay_us": [(bucket, _us(seconds)) for bucket, seconds in outcome.delay],
        "reason": None,
    }


def _calm(rows: Sequence[Mapping[str, Any]], choices: int) -> dict[str, Any]:
    """Return the row of a viewer that its samples show in no trouble at all."""
    watched = sum(_us(float(row["interval_ms"] or 0.0) / 1000) for row in rows)
    by_class = [sum(int(row[f"accepted_messages_{name}"] or 0) for row in rows) for name in CLASS_NAMES]
    figures: dict[str, Any] = dict.fromkeys((f"dropped_messages_{name}" for name in CLASS_NAMES), 0)
    zeros = ("edges", "recoveries", "overloaded_us", "soft_us", "hard_us", "stall_us", "returns")
    figures |= dict.fromkeys((*zeros, "memory_peak_bytes", "memory_mean_bytes"), 0)
    return {
        **figures,
        "choice_id": ALL_CHOICES,
        "honest": True,
        "assumed": False,
        "watched_us": watched,
        "assumed_us": 0,
        "ready_us": watched,
        "offered_messages": sum(by_class),
        "sent_messages": sum(by_class),
        "key_offered": by_class[_KEY],
        "key_sent": by_class[_KEY],
        "sent_bytes": sum(int(row["sent_bytes"] or 0) for row in rows),
        "delay_us": [(bucket_of(NORMAL_MS), watched)],
        "inputs": sum(by_class) * choices,
        "shown": 0,
    }


def _arrow(rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    kinds = {"string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), "boolean": pa.bool_()}
    fields = []
    for part in VIEWERS_DDL.replace("map<int,bigint>", "map").split(", "):
        name, kind = part.split()
        fields.append((name, pa.map_(pa.int32(), pa.int64()) if kind == "map" else kinds[kind]))
    schema = pa.schema(fields)
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema=schema)
