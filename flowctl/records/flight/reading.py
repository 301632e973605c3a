"""Rows of the table `flight`, back into flights, with what is wrong with them (pure).

A flight that is damaged is not replayed as far as it goes: a row that is missing changes all that follows. One that was
cut off is whole up to its last row, and is replayed up to there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowctl.core.flow.limits import Limits
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import ConfigError, DamagedFlightError
from flowctl.records.flight.tape import MOST_ROWS
from flowctl.records.flight.words import (
    FLIGHT_FORMAT,
    OUTPUT_KINDS,
    FlightRow,
    TablePolicy,
    detail_of,
    limits_from,
    settings_from,
)
from flowctl.records.telemetry.schema import FLIGHT, FlightKind

_NAMES: Final = FLIGHT.names
_KINDS: Final = frozenset(kind.value for kind in FlightKind)
_OWN_FROM: Final = _NAMES.index(FlightRow._fields[0])
_MOST_ROWS_BEYOND: Final = 1024
"""Most rows that a flight may have beyond its bound: those of the call in which it was reached, and END."""
_MOST_OFFSET_US: Final = 366 * 86_400 * 1_000_000
_REALS: Final = frozenset({"queued_age_ms", "value", "limit"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """One recorded connection."""

    node: str
    conn_id: int
    peer_ip: str | None  # its peer, as the privacy settings let it through
    role: str | None  # what it was used for, as far as that was known at the last row
    app: str | None
    stream: str | None
    limits: Limits
    settings: SenderSettings
    policy: TablePolicy
    deferred: bool
    clock_us: int
    began_at_us: int | None  # the same in microseconds since the epoch. None: the rows do not say.
    rows: tuple[FlightRow, ...]
    complete: bool

    @property
    def outputs(self) -> list[FlightRow]:
        """Rows that came out of the core, in order: edges, drops, first late messages, returns, the close."""
        return [row for row in self.rows if row.kind in OUTPUT_KINDS]

    @property
    def figures(self) -> dict[str, Any] | None:
        """Figures in END: see `flowctl.records.flight.words.figures_of`. None: the flight was cut off."""
        if not self.complete:
            return None
        try:
            return detail_of(self.rows[-1].detail)
        except ValueError as error:
            raise DamagedFlightError(f"{self}: what end says cannot be read: {error!r}") from error

    @property
    def duration_s(self) -> float:
        return self.rows[-1].offset_us / 1e6

    def __str__(self) -> str:
        return f"flight of connection {self.conn_id} on {self.node or 'an unnamed node'}"


def read_flights(rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> Flight:
    taken: list[FlightRow] = []
    first: Mapping[str, Any] | Sequence[Any] | None = None
    last: Mapping[str, Any] | Sequence[Any] | None = None  # it knows best what the connection was used for
    highest = -1
    for item in rows:
        row = _row(item)
        taken.append(row)
        if row.number == 0:
            first = item
        if row.number > highest:
            highest, last = row.number, item
        if len(taken) > MOST_ROWS + _MOST_ROWS_BEYOND:
            raise DamagedFlightError(f"a flight of more than {MOST_ROWS} rows: the recorder writes none")
    if last is None:
        raise DamagedFlightError("a flight without rows")
    heads = (_mapping(last if first is None else first), _mapping(last))
    taken.sort(key=lambda row: row.number)
    where = f"flight of connection {heads[0].get('conn_id')}"
    _check(taken, where)
    return _flight(taken, heads, where)


def _mapping(item: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any]:
    return item if isinstance(item, Mapping) else dict(zip(_NAMES, item, strict=False))


def _row(item: Mapping[str, Any] | Sequence[Any]) -> FlightRow:
    if not isinstance(item, Mapping):
        if len(item) == len(_NAMES):  # of our own files: every cell has its type
            return _typed(FlightRow(*item[_OWN_FROM:]))
        item = _mapping(item)
    cells: dict[str, Any] = {}
    for name in FlightRow._fields:
        value = item.get(name)
        # Through pandas, numbers of a column with empty places come as floats, and empty places as NaN.
        if value is None or value != value:  # noqa: PLR0124 - NaN
            continue
        cells[name] = int(value) if isinstance(value, float) and name not in _REALS else value
    try:
        return _typed(FlightRow(**cells))
    except TypeError as error:
        raise DamagedFlightError("a row without offset_us or kind", hint="is this the table flight?") from error


def _typed(row: FlightRow) -> FlightRow:
    """Return `row`, whose place and kind are what they must be."""
    if not (type(row.offset_us) is type(row.number) is int and isinstance(row.kind, str)):
        raise DamagedFlightError("a row without number, offset_us or kind", hint="is this the table flight?")
    if row.offset_us > _MOST_OFFSET_US:
        raise DamagedFlightError(f"row {row.number} is at {row.offset_us} us, no flight is so long")
    return row


def _check(rows: Sequence[FlightRow], where: str) -> None:
    """See that the rows are all there, in order, and of known kinds."""
    before = 0
    for number, row in enumerate(rows):
        if row.number != number:
            what = "is there twice" if row.number < number else "is missing"
            raise DamagedFlightError(
                f"{where}: row {min(number, row.number)} {what}",
                hint="a file of the flight is not there, or there twice; flowctl replay reads the whole folder",
            )
        if row.kind not in _KINDS:
            raise DamagedFlightError(f"{where}: row {number} is of the unknown kind {row.kind!r}")
        if row.offset_us < before:
            raise DamagedFlightError(f"{where}: row {number} is {before - row.offset_us} us before the one before it")
        before = row.offset_us
        if (row.kind == FlightKind.BEGIN.value) is not (number == 0):
            raise DamagedFlightError(f"{where}: row {number} is {row.kind!r}; begin is the first row and no other")
        if row.kind == FlightKind.END.value and number != len(rows) - 1:
            raise DamagedFlightError(f"{where}: row {number} is the end, but {len(rows) - 1 - number} rows follow")


def _flight(rows: Sequence[FlightRow], heads: Sequence[Mapping[str, Any]], where: str) -> Flight:
    first, last = heads[0], heads[-1]
    try:
        begin = detail_of(rows[0].detail)
        if begin["format"] != FLIGHT_FORMAT:
            raise DamagedFlightError(
                f"{where}: it is of format {begin['format']!r}, this flowctl reads {FLIGHT_FORMAT}",
                hint="replay it with the flowctl that recorded it",
            )
        began_at = first.get("ts")
        return Flight(
            node=str(first.get("node") or ""),
            conn_id=int(first.get("conn_id") or 0),
            peer_ip=first.get("peer_ip"),
            role=last.get("role"),
            app=last.get("app"),
            stream=last.get("stream"),
            limits=limits_from(begin["limits"]),
            settings=settings_from(begin["settings"]),
            policy=TablePolicy.from_dict(begin["policy"]),
            deferred=bool(begin["deferred"]),
            clock_us=int(begin["clock_us"]),
            began_at_us=began_at if isinstance(began_at, int) else None,
            rows=tuple(rows),
            complete=rows[-1].kind == FlightKind.END.value,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, ConfigError) as error:
        raise DamagedFlightError(f"{where}: what begin says cannot be read: {error!r}") from error
