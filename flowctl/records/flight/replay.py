"""Runs recorded flights again, through the real Sender, flow core and cursor, and compares what comes out.

Theory of operation. The rows of a flight are calls, each with the answers that the Sender was given while it lasted
(what writes took, what the kernel held), and what came out of it. Here the same calls are made of a `Sender` built
from BEGIN, at the same microseconds; its transport gives the answers that were written down, and complains if it is
asked another question: a write of another size is a divergence of its own. What comes out is noted by the same
function that noted it then, so that comparing is comparing rows.

A flight that was cut off is replayed up to its last row. All of it is pure but `read_flight`, which reads files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowctl.core.sending.figures import SenderStatistics
from flowctl.errors import ConfigError, DamagedFlightError
from flowctl.records.flight.reading import Flight, read_flights
from flowctl.records.flight.rerun import CutError, DivergedError, Rerun, belongs_to_call
from flowctl.records.flight.words import OUTPUT_KINDS, FlightRow, figures_of
from flowctl.records.telemetry.flightfiles import flight_files, flight_rows, list_flights
from flowctl.records.telemetry.schema import FlightKind
from flowctl.units import format_count

__all__ = ["Comparison", "Flight", "ReplayResult", "compare", "read_flight", "read_flights", "replay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """What came out of a replay.

    Args:
        outputs: edges, drops, first late messages, returns and the close, in order, as rows (their `number` is 0).
        divergence: where the Sender asked for something else than was recorded. None: nowhere.
        diverged_at: number of that row. None likewise.
    """

    outputs: tuple[FlightRow, ...]
    statistics: SenderStatistics
    figures: dict[str, Any]
    calls: int
    divergence: str | None = None
    diverged_at: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Whether a replay brought what was recorded.

    Args:
        complete: the flight has an end, so that all accounts were compared; if not, outputs only.
        number: number of the recorded row at which it is. None: there is none, or it is in the figures of the end.
    """

    identical: bool
    transitions: int
    dropped_messages: int
    complete: bool
    difference: str | None = None
    number: int | None = None

    def __str__(self) -> str:
        if not self.identical:
            where = "at the end" if self.number is None else f"at row {self.number}"
            return f"diverges {where}: {self.difference}"
        cut = "" if self.complete else " (cut off; replayed up to its last row)"
        edges = format_count(self.transitions, "transition")
        return f"identical: {edges}, {format_count(self.dropped_messages, 'drop')}{cut}"


def read_flight(path: Path, conn_id: int | None = None, node: str | None = None) -> Flight:
    """Return one flight out of record files. Reads files; needs pyarrow."""
    files = flight_files(path)
    if conn_id is None:
        there = [item for item in list_flights(files) if node in (None, item.node)]
        if len(there) != 1:
            raise ConfigError(
                f"{path} holds {len(there)} flights", hint="name one by its conn_id; flowctl replay lists them"
            )
        conn_id, node = there[0].conn_id, there[0].node
    rows = list(flight_rows(files, conn_id, node))
    if not rows:
        raise ConfigError(f"{path} holds no flight of connection {conn_id}", hint="flowctl replay lists them")
    return read_flights(rows)


def replay(flight: Flight) -> ReplayResult:
    run = Rerun(flight)
    rows = flight.rows
    end = len(rows) - 1 if flight.complete else len(rows)
    index, difference, diverged_at = 1, None, None
    while index < end:
        row = rows[index]
        following = index + 1
        while following < end and belongs_to_call(rows[following]):
            following += 1
        answers = [item for item in rows[index + 1 : following] if item.kind not in OUTPUT_KINDS]
        try:
            run.call(row, answers, last=following == len(rows))
        except DivergedError as error:
            difference, diverged_at = str(error), row.number
            break
        except CutError:
            break
        except (ConfigError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise DamagedFlightError(f"{flight}: row {row.number} cannot be read: {error!r}") from error
        index = following
    if flight.complete and difference is None:
        run.around.now_us = flight.clock_us + rows[-1].offset_us
    statistics = run.sender.statistics()
    return ReplayResult(
        outputs=tuple(run.outputs),
        statistics=statistics,
        figures=figures_of(statistics),
        calls=run.calls,
        divergence=difference,
        diverged_at=diverged_at,
    )


def compare(flight: Flight, result: ReplayResult) -> Comparison:
    """Return whether `result`, of a replay of `flight`, is what was recorded; if not, the first difference."""
    recorded, figures = flight.outputs, flight.figures
    difference: str | None = None
    number: int | None = None
    for place, row in enumerate(recorded):
        again = result.outputs[place] if place < len(result.outputs) else None
        if again is None or again != row._replace(number=0):
            difference = _unlike(row, again)
            number = row.number
            break
    if difference is None and len(result.outputs) > len(recorded) and flight.complete:
        more = result.outputs[len(recorded)]
        difference = f"{more.kind} at {more.offset_us} us was not recorded"
    if result.divergence is not None and (number is None or (result.diverged_at or 0) < number):
        difference, number = result.divergence, result.diverged_at
    if difference is None and figures is not None:
        again_figures = json.loads(json.dumps(result.figures))
        names = [name for name in figures if figures[name] != again_figures.get(name)]
        if names:
            name = names[0]
            difference = f"{name} is {again_figures.get(name)}, recorded is {figures[name]}"
    same = recorded if number is None else [row for row in recorded if row.number < number]
    return Comparison(
        identical=difference is None,
        transitions=sum(row.kind == FlightKind.STATE.value for row in same),
        dropped_messages=sum(row.dropped_messages or 0 for row in same),
        complete=flight.complete,
        difference=difference,
        number=number,
    )


def _unlike(row: FlightRow, again: FlightRow | None) -> str:
    """Say in which columns two outputs differ."""
    if again is None:
        return f"{row.kind} at {row.offset_us} us did not come again"
    fields = [name for name in FlightRow._fields if name != "number" and getattr(row, name) != getattr(again, name)]
    parts = [f"{name} is {getattr(again, name)}, recorded is {getattr(row, name)}" for name in fields]
    return f"{row.kind}: " + "; ".join(parts)
