"""Least squares of a few columns with no factor below 0 (pure): costs add up from parts, and no part is negative."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

_ALIKE: Final = 1e-9
"""Columns of length 1 whose difference is below this cannot be told apart in floating point."""


def least_squares(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Return the factors, none below 0, with which the columns of `rows` come closest to their values.

    Every choice of columns is solved by itself and the closest without a negative factor wins: with three columns that
    is seven small systems, and no iteration that could stop short.

    Args:
        rows: (columns, value), weighted already; at least one.
    """
    count = len(rows[0][0])
    best, least = [0.0] * count, sum(value * value for _, value in rows)
    for chosen in _choices(count):
        factors = _solved(rows, chosen)
        if factors is None or min(factors) < 0:
            continue
        full = [0.0] * count
        for column, factor in zip(chosen, factors, strict=True):
            full[column] = factor
        squares = sum((sum(x * factor for x, factor in zip(xs, full, strict=True)) - y) ** 2 for xs, y in rows)
        if squares < least:
            best, least = full, squares
    return best


def _choices(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all choices of columns but none, small ones first."""
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)


def _solved(rows: Sequence[tuple[Sequence[float], float]], chosen: Sequence[int]) -> list[float] | None:
    """Return the factors of the chosen columns alone by the normal equations; None: they cannot be told apart."""
    scales = [sum(xs[column] ** 2 for xs, _ in rows) ** 0.5 for column in chosen]
    if not all(scales):
        return None
    scaled = [([xs[column] / scale for column, scale in zip(chosen, scales, strict=True)], y) for xs, y in rows]
    size = len(chosen)
    table = [
        [sum(xs[i] * xs[j] for xs, _ in scaled) for j in range(size)] + [sum(xs[i] * y for xs, y in scaled)]
        for i in range(size)
    ]
    for step in range(size):  # elimination; the matrix is that of squares, so no rows need to change places
        if table[step][step] < _ALIKE:
            return None
        for other in range(size):
            if other != step:
                factor = table[other][step] / table[step][step]
                table[other] = [a - factor * b for a, b in zip(table[other], table[step], strict=True)]
    return [table[step][size] / table[step][step] / scales[step] for step in range(size)]
