"""Checks that a row must pass to be used: those of each table, over Arrow columns and over statistics of footers.

A check says what one column may hold: something, a value between two others, or one of some words. Most are answered by
the least and largest value in a footer; words and NaN do not lie between, so these columns are read.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from flowctl.analyze.records.window import Hour, begin_of
from flowctl.core.flow.state import SendState
from flowctl.records.telemetry.schema import FLIGHT, TABLES, EventName, FlightKind, Kind, RecordedRole

OLDEST_US: Final = int(dt.datetime(2020, 1, 1, tzinfo=dt.UTC).timestamp()) * 1_000_000
"""Oldest time that is believed, before flowctl existed: an older one is of a clock that was never set."""
DAY_US: Final = 86_400_000_000
"""Most that a clock may be ahead: it may be in the wrong time zone."""
HOUR_US: Final = DAY_US // 24
SIGNED: Final = frozenset({"value", "limit", "seq"})
"""Columns that may be negative: they mean what their event says, and seq only orders."""
MOST_COUNT: Final = 1 << 48
"""Counts and sizes are below this: in octets, 26 days of 1 Gbit/s. The sum of 32,768 such fits 64 bits; a larger sum
becomes 2^63 - 1 and ends no job (``nvl(try_sum(x), :most)`` in models)."""
MOST_REAL: Final = 1e12
"""Largest figure that is believed: 30 years in ms, a terabyte. Infinity and NaN make every sum worthless."""
MOST_S: Final = 60 * 86_400.0
"""Longest duration that is believed: a row is made per minute, and 30 years would make 16 million."""
MOST_BY_COLUMN: Final = {"duration_s": MOST_S, "picture_share": 10.0, "thread_busy": 10.0, "seq": 1 << 60}
"""Largest value of columns with a bound of their own. Shares are up to 1, but for rounding; `seq`, microseconds since
1970, is not added up."""
_LAST: Final = (1 << 63) - 1
NO_NUMBER: Final = "no number"


class Bounds(NamedTuple):
    """Statistics of one column in a footer; None: the footer does not tell."""

    rows: int
    nulls: int | None
    low: Any  # least value that is not null; a time in microseconds since the epoch
    high: Any


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one column; null passes all but the first kind. Times are in microseconds since the epoch."""

    column: str
    what: str  # fault of a row that fails: ``null``, or in words
    low: Any = -_LAST  # least value that is allowed
    high: Any = _LAST  # largest
    words: tuple[str, ...] = ()  # allowed values of a text, instead of bounds

    @property
    def key(self) -> str:
        """Reason under which rows that fail are put aside, like ``queued_bytes: negative``."""
        return f"{self.column}: {self.what}"

    def fails(self, values: Any) -> Any:
        """Return which of `values`, a column of the table's own type, fail: booleans, never null."""
        if self.what == "null":
            return pc.is_null(values)
        if self.words:
            fits = pc.is_in(values, pa.array(self.words, pa.string()))
        else:
            figures = values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values
            fits = pc.and_(pc.greater_equal(figures, self.low), pc.less_equal(figures, self.high))
        return pc.and_kleene(pc.is_valid(values), pc.invert(fits))

    def proved(self, bounds: Bounds) -> bool:
        rows, nulls, low, high = bounds
        if self.what == "null":
            return nulls == 0
        if rows == nulls:
            return True
        if low is None or self.what == NO_NUMBER:
            return False
        return low == high and low in self.words if self.words else bool(self.low <= low and high <= self.high)


_STATES: Final = tuple(item.name for item in SendState)
_WORDS: Final = {
    **{(table, "role"): tuple(item.value for item in RecordedRole) for table in TABLES},
    ("flow_events", "event"): tuple(item.value for item in EventName),
    ("flow_events", "state_from"): _STATES,
    ("flow_events", "state_to"): _STATES,
    ("flow_samples", "state"): _STATES,
    ("flight", "kind"): tuple(item.value for item in FlightKind),
}


def _checks(table: str) -> tuple[Check, ...]:
    """Return the checks that are the same whenever and wherever a file is read."""
    columns = TABLES[table].columns
    checks = [Check(column.name, "null") for column in columns if not column.nullable]
    for name, kind in ((column.name, column.kind) for column in columns):
        if kind is Kind.TIMESTAMP:
            checks.append(Check(name, "too old", low=OLDEST_US))
        if kind is Kind.REAL:
            most = MOST_BY_COLUMN.get(name, MOST_REAL)
            checks.append(Check(name, NO_NUMBER, -most, most))
        # The upper bits of a connection's identity are a time: it may be large, and nobody adds it up.
        if kind is Kind.INT and name != "conn_id":
            checks.append(Check(name, "too large", high=int(MOST_BY_COLUMN.get(name, MOST_COUNT)) - 1))
        if kind in (Kind.INT, Kind.REAL) and name not in SIGNED:
            checks.append(Check(name, "negative", 0, _LAST if kind is Kind.INT else math.inf))
        if words := _WORDS.get((table, name)):
            checks.append(Check(name, "unknown word", words=words))
    return tuple(checks)


WORDED: Final = {table: frozenset(name for of, name in _WORDS if of == table) for table in TABLES}
"""Columns of each table that hold one of a few words."""
_OF_TABLES: Final = {name: _checks(name) for name in TABLES}


def checks_of(table: str, hour: Hour | None, now_us: int) -> tuple[Check, ...]:
    """Return all checks of a file; the first that fails names the reason."""
    times = [column.name for column in TABLES[table].columns if column.kind is Kind.TIMESTAMP]
    checks = [Check(name, "in the future", high=now_us + DAY_US) for name in times]
    if hour is not None:
        begin_us = int(begin_of(hour).timestamp()) * 1_000_000
        hours = 3 if table == FLIGHT.name else 1  # a flight lies where it began, and ends an hour later at the most
        checks.append(Check("ts", "not its hour", begin_us, begin_us + hours * HOUR_US - 1))
    return (*_OF_TABLES[table], *checks)


def reasons(rows: Any, checks: Sequence[Check]) -> Any:
    """Return why each row of an Arrow table cannot be used: the key of the first check that it fails; null: it can."""
    keys = pa.nulls(rows.num_rows, pa.string())
    for check in checks:
        fails = check.fails(rows[check.column])
        if pc.any(fails).as_py():
            keys = pc.if_else(pc.and_(fails, pc.is_null(keys)), check.key, keys)
    return keys
