"""Sums, shares and differences of columns that may be null."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Final

from flowctl.analyze.engine import DUCKDB, running
from flowctl.analyze.engine import functions as f

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.group import GroupedData


_LAST: Final = (1 << 63) - 1


def summed(groups: GroupedData, sums: Iterable[str], *more: Column) -> DataFrame:
    """Add up columns of whole numbers by group, beside other aggregates; null of nulls alone.

    A sum that does not fit 64 bits is 2^63 - 1: who writes among the records may write counts that no check can call
    wrong and that no sum can hold. `try_sum` is null then, as it is of nulls; one more aggregate tells which it was.
    """
    if running() == DUCKDB:  # whose sums are wider
        return groups.agg(*(f.expr(f"sum_to_last(`{name}`) as `{name}`") for name in sums), *more)
    # As text: handed over one by one, expressions of Python take longer than small data do.
    bits = {f"`{name}`": 1 << place for place, name in enumerate(sums)}
    seen = f.expr(f"bit_or({' | '.join(f'if({name} is null, 0, {bit}L)' for name, bit in bits.items())}) as _seen")
    found = groups.agg(*(f.expr(f"try_sum({name}) as {name}") for name in bits), *more, seen)
    whole = {name: f"nvl({name}, if(_seen & {bit}L = 0, null, {_LAST})) as {name}" for name, bit in bits.items()}
    return found.selectExpr(*(whole.get(f"`{name}`", f"`{name}`") for name in found.columns if name != "_seen"))


def zero(value: Column | str) -> Column:
    return f.coalesce(value, f.lit(0))


def added(values: Iterable[Column | str]) -> Column:
    return reduce(add, map(zero, values))


def share(part: Column, whole: Column) -> Column:
    """Return a share, 1 at most; null where either is not known, or there is nothing of the whole."""
    return f.try_divide(f.when(part > whole, whole).otherwise(part), whole)


def not_negative(value: Column) -> Column:
    """Return the value, or 0 if it is less; null stays null, which `greatest` would make a figure of."""
    return f.when(value < 0, 0).otherwise(value)
