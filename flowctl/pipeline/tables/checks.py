"""What a row must be like to be used: the list of checks per table, and each as an expression of Spark.

A check looks at one column. Those that statistics can answer (`provable`) cost nothing where they do; those that are
left are one boolean expression of built-in functions, compiled into the same pass as the job itself. Each column that
an expression names has to be read, which is why as few as possible are left.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from flowctl.flow.state import SendState
from flowctl.telemetry.schema import FLIGHT, FLOW_EVENTS, FLOW_SAMPLES, EventName, FlightKind, Kind, Role, Table

OLDEST_US: Final = int(dt.datetime(2020, 1, 1, tzinfo=dt.UTC).timestamp()) * 1_000_000
"""Before flowctl existed: a clock that was never set."""
MAX_AHEAD_S: Final = 86_400
"""A clock may be in the wrong time zone; more than a day ahead it is wrong."""
SIGNED: Final = frozenset({"value", "limit", "seq"})
"""Columns that mean what their event says, so that below zero is not wrong by itself; seq only orders."""
MOST_COUNT_BITS: Final = 60
MOST_COUNT: Final = 1 << MOST_COUNT_BITS
"""A count, a size or a `seq` is below: an exabyte, or a time in microseconds of 36,000 years. Sums of larger ones would
overflow, which ends a job."""
MOST_REAL: Final = 1e15
"""A figure is at most so large: 30,000 years in ms. A larger one, infinity and NaN end a job where it counts in whole
numbers, and make every sum worthless elsewhere."""
UNUSED: Final = frozenset({"limit", "queued_age_ms", "drain_bytes_per_s"})
"""Figures that no job computes with: reading them only to check them would cost more than they are worth. The list is
the same for all jobs, so that the accounts of a table are."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one column.

    Args:
        column: its name.
        what: ``null``, ``negative``, ``too large``, ``no number``, ``too old``, ``in the future``, ``not its date`` or
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

    @property
    def provable(self) -> bool:
        """Whether statistics can answer it: neither words nor NaN lie between a least and a largest value."""
        return self.what not in {"unknown word", "no number"}


def _checks(table: Table, words: dict[str, tuple[str, ...]]) -> tuple[Check, ...]:
    found = [Check(column.name, "null") for column in table.columns if not column.nullable]
    found += [Check("ts", what) for what in ("too old", "in the future", "not its date")]
    found += [
        Check(column.name, "negative")
        for column in table.columns
        if column.kind in (Kind.INT, Kind.REAL) and column.name not in SIGNED
    ]
    # The upper bits of a connection's identity are a time: it may be large, and nobody adds it up.
    found += [
        Check(column.name, "too large")
        for column in table.columns
        if column.kind is Kind.INT and column.name != "conn_id"
    ]
    found += [
        Check(column.name, "no number")
        for column in table.columns
        if column.kind is Kind.REAL and column.name not in UNUSED
    ]
    return (*found, *(Check(name, "unknown word", allowed) for name, allowed in words.items()))


_ROLES: Final = tuple(item.value for item in Role)
_STATES: Final = tuple(item.name for item in SendState)
_OLD_STEPS: Final = ("FULL", "NO_DISPOSABLE", "KEY_FRAMES", "AUDIO_ONLY", "CLOSE")
"""Of a step-down ladder, in records of format 1: its moves are in the same columns as edges."""

CHECKS: Final[dict[str, tuple[Check, ...]]] = {
    "flow_events": _checks(
        FLOW_EVENTS,
        {
            "event": tuple(item.value for item in EventName),
            "role": _ROLES,
            "state_from": (*_STATES, *_OLD_STEPS),
            "state_to": (*_STATES, *_OLD_STEPS),
        },
    ),
    "flow_samples": _checks(FLOW_SAMPLES, {"role": _ROLES, "state": _STATES, "step": _OLD_STEPS}),
    "flight": _checks(FLIGHT, {"kind": tuple(item.value for item in FlightKind), "role": _ROLES}),
}
"""All checks of each table; the first that fails names the reason."""


def open_checks(table: str, unproven: Collection[str]) -> tuple[Check, ...]:
    """Return the checks that must be made row by row.

    Args:
        table: name of the table.
        unproven: keys of checks that the statistics of at least one file left open.
    """
    return tuple(check for check in CHECKS[table] if not check.provable or check.key in unproven)


def sql_of(check: Check, now_us: int) -> str:
    """Return the condition under which a row *fails* `check`, in Spark's SQL; never null.

    Args:
        check: the check.
        now_us: time of the run, microseconds since the epoch.
    """
    column = f"`{check.column}`"
    if check.what == "null":
        return f"{column} IS NULL"
    if check.what == "negative":
        return f"coalesce({column} < 0, false)"
    if check.what == "too large":
        return f"coalesce({column} >= {MOST_COUNT}L, false)"
    if check.what == "no number":
        # NaN is larger than any number to Spark.
        return f"coalesce(abs({column}) > {MOST_REAL:.0e}D, false)"
    if check.what == "too old":
        return f"coalesce({column} < timestamp_micros({OLDEST_US}L), false)"
    if check.what == "in the future":
        return f"coalesce({column} > timestamp_micros({now_us + MAX_AHEAD_S * 1_000_000}L), false)"
    if check.what == "not its date":
        day = "try_to_date(regexp_extract(_metadata.file_path, '/date=([0-9]{4}-[0-9]{2}-[0-9]{2})(/|$)', 1))"
        return f"coalesce(abs(datediff(to_date({column}), {day})) > 1, false)"
    words = ", ".join(f"'{word}'" for word in check.words)
    return f"coalesce({column} NOT IN ({words}), false)"


def any_of(checks: Sequence[Check], now_us: int) -> str:
    """Return the condition under which a row fails any of `checks`.

    Counts that are negative or too large are found together, since both have a bit set above the lowest 60: a term per
    check would make the filter of a table of fifty counts too long to be compiled.
    """
    small = [check.column for check in checks if check.what == "too large" and check.column not in SIGNED]
    joined = [check for check in checks if check.column not in small or check.what not in {"negative", "too large"}]
    terms = [f"({sql_of(check, now_us)})" for check in joined]
    if small:
        bits = " | ".join(f"coalesce(`{name}`, 0L)" for name in small)
        terms.append(f"(shiftright({bits}, {MOST_COUNT_BITS}) <> 0)")
    return " OR ".join(terms) or "false"


def reason_of(checks: Sequence[Check], now_us: int) -> str:
    """Return the expression that names the first check that a row fails; null: none."""
    cases = " ".join(f"WHEN {sql_of(check, now_us)} THEN '{check.key}'" for check in checks)
    return f"CASE {cases} END" if cases else "CAST(NULL AS STRING)"
