"""What a row must be like to be used: the checks of each table, over Arrow tables and over statistics of footers.

A check looks at one column. Most are answered by what a footer says of the column: where the smallest of `queued_bytes`
in a file is 0, no row of it has a negative one. Neither words nor NaN lie between a least and a largest value: these
columns are read, where they hold anything. So nothing is left for Spark to check.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from flowctl.flow.state import SendState
from flowctl.telemetry.schema import TABLES, EventName, FlightKind, Kind, Role, Table

OLDEST_US: Final = int(dt.datetime(2020, 1, 1, tzinfo=dt.UTC).timestamp()) * 1_000_000
"""Before flowctl existed: a clock that was never set."""
MAX_AHEAD_US: Final = 86_400_000_000
"""A clock may be in the wrong time zone; more than a day ahead it is wrong."""
SIGNED: Final = frozenset({"value", "limit", "seq"})
"""Columns that mean what their event says, so that below zero is not wrong by itself; seq only orders."""
MOST_COUNT: Final = 1 << 60
"""A count, a size or a `seq` is below: an exabyte, or a time in microseconds of 36,000 years. Sums of larger ones would
overflow, which ends a job."""
MOST_REAL: Final = 1e15
"""A figure is at most so large: 30,000 years in ms. A larger one, infinity and NaN end a job where it counts in whole
numbers, and make every sum worthless elsewhere."""


_LAST: Final = (1 << 63) - 1


class Times(NamedTuple):
    """Between which moments `ts` must lie, microseconds since the epoch.

    Attributes:
        now_us: time of the run.
        begin_us: of the hour that the file's folder names, or of the day before in old formats. None: any.
        end_us: exclusive.
    """

    now_us: int
    begin_us: int | None = None
    end_us: int | None = None


class Bounds(NamedTuple):
    """What a footer says of a column of a row group: None is what it does not say.

    Attributes:
        rows: of the row group.
        nulls: how many are null.
        low: least value that is not null; a time in microseconds since the epoch.
        high: largest.
    """

    rows: int
    nulls: int | None
    low: Any
    high: Any


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one column.

    Args:
        column: its name.
        what: ``null``, ``negative``, ``too large``, ``no number``, ``too old``, ``in the future``, ``not its hour`` or
            ``unknown word``.
        words: what is allowed, for the last.
    """

    column: str
    what: str
    words: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Reason under which rows that fail are put aside, like ``queued_bytes: negative``."""
        return f"{self.column}: {self.what}"

    def fails(self, values: Any, times: Times) -> Any:
        """Return which of `values`, a column of the table's own type, fail: booleans, never null."""
        if self.what == "null":
            return pc.is_null(values)
        if self.what == "unknown word":
            return pc.and_(pc.is_valid(values), pc.invert(pc.is_in(values, pa.array(self.words, pa.string()))))
        if self.what == "no number":  # NaN is not at most anything
            return pc.invert(pc.fill_null(pc.less_equal(pc.abs(values), MOST_REAL), True))
        if self.what == "negative":
            found = pc.less(values, 0)
        elif self.what == "too large":
            found = pc.greater_equal(values, MOST_COUNT)
        else:
            low, high = self._range(times)
            us = values.cast(pa.int64())
            found = pc.or_(pc.less(us, low), pc.greater_equal(us, high))
        return pc.fill_null(found, False)

    def proved(self, bounds: Bounds, times: Times) -> bool:
        """Return whether what the footer says of the column shows that no row of the row group fails."""
        rows, nulls, low, high = bounds
        if self.what == "null":
            return nulls == 0
        if rows == nulls:
            return True
        if low is None or high is None or self.what == "no number":
            return False
        if self.what == "unknown word":
            return bool(low == high and low in self.words)
        if self.what == "negative":
            return bool(low >= 0)
        if self.what == "too large":
            return bool(high < MOST_COUNT)
        least, most = self._range(times)
        return bool(least <= low and high < most)

    def _range(self, times: Times) -> tuple[int, int]:
        """Return between which moments it lets times through, microseconds."""
        if self.what == "too old":
            return OLDEST_US, _LAST
        if self.what == "in the future":
            return -_LAST, times.now_us + MAX_AHEAD_US + 1
        return times.begin_us or -_LAST, times.end_us or _LAST


def _checks(table: Table) -> tuple[Check, ...]:
    found = [Check(column.name, "null") for column in table.columns if not column.nullable]
    for column in table.columns:
        if column.kind is Kind.TIMESTAMP:
            found += [Check(column.name, "in the future"), Check(column.name, "too old")]
        if column.kind in (Kind.INT, Kind.REAL) and column.name not in SIGNED:
            found.append(Check(column.name, "negative"))
        # The upper bits of a connection's identity are a time: it may be large, and nobody adds it up.
        if column.kind is Kind.INT and column.name != "conn_id":
            found.append(Check(column.name, "too large"))
        if column.kind is Kind.REAL:
            found.append(Check(column.name, "no number"))
    found.append(Check("ts", "not its hour"))
    return (
        *found,
        *(
            Check(name, "unknown word", _WORDS[table.name, name])
            for name in table.names
            if (table.name, name) in _WORDS
        ),
    )


_STATES: Final = tuple(item.name for item in SendState)
_OLD_STEPS: Final = ("FULL", "NO_DISPOSABLE", "KEY_FRAMES", "AUDIO_ONLY", "CLOSE")
"""Of a step-down ladder, in records of format 1: its moves are in the same columns as edges."""
_WORDS: Final = {
    **{(table, "role"): tuple(item.value for item in Role) for table in TABLES},
    ("flow_events", "event"): tuple(item.value for item in EventName),
    ("flow_events", "state_from"): (*_STATES, *_OLD_STEPS),
    ("flow_events", "state_to"): (*_STATES, *_OLD_STEPS),
    ("flow_samples", "state"): _STATES,
    ("flight", "kind"): tuple(item.value for item in FlightKind),
}
CHECKS: Final[dict[str, tuple[Check, ...]]] = {name: _checks(table) for name, table in TABLES.items()}
"""All checks of each table; the first that fails names the reason."""


def reasons(rows: Any, checks: Sequence[Check], times: Times) -> Any:
    """Return why each row cannot be used: the key of the first check that it fails; null: it can be.

    Args:
        rows: Arrow table with the columns of `checks`, in the types of the table.
        checks: which.
        times: see `Times`.
    """
    found = pa.nulls(rows.num_rows, pa.string())
    for check in checks:
        fails = check.fails(rows[check.column], times)
        if pc.any(fails).as_py():
            found = pc.if_else(pc.and_(fails, pc.is_null(found)), check.key, found)
    return found
