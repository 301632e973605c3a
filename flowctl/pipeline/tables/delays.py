"""Quantiles of delay from counts: a histogram of logarithmic buckets as plain sums, made by one hash aggregation.

Spark's own `percentile_approx` keeps an object per group, and an aggregation with objects sorts its input once it has
more groups than a few hundred; millions of connections are more. Here a delay falls into one of `BUCKETS` buckets, each
`RATIO` times as wide as the one before, and three counters of 21 bits share a 64 bit sum: 16 sums hold all of it. A
quantile is the geometric middle of its bucket, never more than the largest delay seen.

Error: the middle is off by at most a factor of sqrt(`RATIO`), 12.2 %; what is below 1 ms counts as below 1 ms (0.5),
what is above the last edge, 65 s, as the last bucket (and is cut to the largest seen). A counter overflows after
2 million samples of one bucket in one session: 24 days at one a second.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column

PER_OCTAVE: Final = 3
BUCKETS: Final = 48
RATIO: Final = 2.0 ** (1 / PER_OCTAVE)
COUNTER_BITS: Final = 21
PER_WORD: Final = 3
WORDS: Final = BUCKETS // PER_WORD
MASK: Final = (1 << COUNTER_BITS) - 1
LARGEST_RATIO_ERROR: Final = math.sqrt(RATIO) - 1
"""How far a quantile can be off by, as a share of itself, for delays of 1 ms to 65 s."""


def bucket_sql(delay: str) -> str:
    """Return the number of the bucket of a delay, 0 to `BUCKETS` - 1, in Spark's SQL; 0 for null (see `greatest`).

    Args:
        delay: expression of a delay in ms.
    """
    return f"CAST(least({BUCKETS - 1}, floor(log2(greatest({delay}, 1.0D)) * {PER_OCTAVE})) AS INT)"


def prepared(delay: str, prefix: str) -> list[Column]:
    """Return two columns that `words` sums up, to be selected before it: ``<prefix>_word`` and ``<prefix>_one``.

    On their own they are computed once per row; inside of the sums Spark would take a logarithm for each of them.

    Args:
        delay: expression of a delay in ms; null: not counted.
        prefix: of the names.
    """
    bucket = bucket_sql(delay)
    return [
        f.expr(f"CASE WHEN {delay} IS NULL THEN -1L ELSE {bucket} DIV {PER_WORD} END").alias(f"{prefix}_word"),
        f.expr(f"shiftleft(1L, {COUNTER_BITS} * ({bucket} % {PER_WORD}))").alias(f"{prefix}_one"),
    ]


def words(prefix: str) -> list[Column]:
    """Return the sums that hold the histogram: `WORDS` aggregate columns, named ``<prefix>0`` and on.

    Args:
        prefix: that of the columns of `prepared`, over which they are.
    """
    return [
        f.expr(f"sum(CASE WHEN {prefix}_word = {number} THEN {prefix}_one ELSE 0L END)").alias(f"{prefix}{number}")
        for number in range(WORDS)
    ]


def middle_ms(bucket: int) -> float:
    """Return the delay that stands for a bucket, ms: its geometric middle; of the first, which has 0, a half."""
    if bucket == 0:
        return 0.5
    return math.pow(2.0, (bucket + 0.5) / PER_OCTAVE)


def _counter(word: str, place: int) -> str:
    return f"(shiftright({word}, {COUNTER_BITS * place}) & {MASK}L)"


def totals(prefix: str, present: str = "true") -> dict[str, str]:
    """Return the running totals of the words: names ``<prefix>t0`` and on, with their expressions in Spark's SQL.

    Each is written out, not built on the one before, so that one select makes all of them.

    Args:
        prefix: of the columns.
        present: condition under which there is anything to add up; most connections are never measured.
    """
    parts = [" + ".join(_counter(f"{prefix}{number}", place) for place in range(PER_WORD)) for number in range(WORDS)]
    return {
        f"{prefix}t{number}": f"CASE WHEN {present} THEN {' + '.join(parts[: number + 1])} ELSE 0L END"
        for number in range(WORDS)
    }


def quantile_sql(prefix: str, share: float, largest: str) -> str:
    """Return a quantile in ms, in Spark's SQL, over `words` and `totals`; null where nothing was counted.

    Args:
        prefix: of the columns.
        share: 0 to 1, like 0.95.
        largest: expression of the largest delay, exact.
    """
    rank = f"ceil({share}D * {prefix}t{WORDS - 1})"
    cases = []
    for number in range(WORDS):
        before = f"{prefix}t{number - 1}" if number else "0L"
        word = f"{prefix}{number}"
        first, second = _counter(word, 0), _counter(word, 1)
        inner = (
            f"CASE WHEN {before} + {first} >= {rank} THEN {middle_ms(number * PER_WORD)!r}D "
            f"WHEN {before} + {first} + {second} >= {rank} THEN {middle_ms(number * PER_WORD + 1)!r}D "
            f"ELSE {middle_ms(number * PER_WORD + 2)!r}D END"
        )
        cases.append(f"WHEN {prefix}t{number} >= {rank} THEN {inner}")
    return f"CASE WHEN {prefix}t{WORDS - 1} > 0 THEN least({largest}, CASE {' '.join(cases)} END) END"
