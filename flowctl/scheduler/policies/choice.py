"""Power of two choices: the cheaper of two drawn at random, again and again, without going through all (pure).

To take the cheapest of all costs O(n), and sends everybody to the same peer at the same moment; the cheaper of two
avoids the worst peers at O(1). Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random


def two_choices(count: int, cost: Callable[[int], float], rng: Random) -> Iterator[int]:
    """Yield each of the numbers 0 to ``count - 1`` once, the cheaper of two that are left each time.

    Drawn lazily, from a shuffle of which only the places that were touched are kept: the first few of ten thousand
    cost as much as the first few of ten.

    Args:
        count: how many there are, 0 or more.
        cost: of a number, when it is drawn.
        rng: the dice.
    """
    moved: dict[int, int] = {}  # place: the number there, where that is not the place itself
    for first in range(count):
        one = rng.randrange(first, count)
        left = count - first
        if left > 1:
            other = first + rng.randrange(left - 1)
            if other >= one:
                other += 1  # any place but `one`
            if cost(moved.get(other, other)) < cost(moved.get(one, one)):
                one = other
        chosen = moved.get(one, one)
        moved[one] = moved.pop(first, first)
        yield chosen
