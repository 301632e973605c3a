"""Sums, shares and differences of columns that may be null."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column


_LAST: Final = (1 << 63) - 1


def totals(values: Mapping[str, Column]) -> list[Column]:
    """Return aggregates by name: sums of whole numbers, null of nulls alone; one that does not fit 64 bits is 2^63 - 1.

    Whoever writes among the records may write counts that no check can call wrong and that no sum can hold.
    """
    largest = f.max(f.greatest(f.lit(0), *values.values())).cast("double")
    beyond = f.when(largest * f.count("*") >= float(_LAST), _LAST)
    return [f.coalesce(f.try_sum(value), beyond).alias(name) for name, value in values.items()]


def zero(value: Column | str) -> Column:
    """Return a column with 0 where it is null."""
    return f.coalesce(value, f.lit(0))


def added(values: Iterable[Column | str]) -> Column:
    """Return the sum of columns, 0 for those that are null."""
    return reduce(add, map(zero, values))


def share(part: Column, whole: Column) -> Column:
    """Return a share, 1 at most; null where either is not known, or there is nothing of the whole."""
    return f.try_divide(f.when(part > whole, whole).otherwise(part), whole)


def not_negative(value: Column) -> Column:
    """Return the value, or 0 if it is less; null stays null, which `greatest` would make a figure of."""
    return f.when(value < 0, 0).otherwise(value)
