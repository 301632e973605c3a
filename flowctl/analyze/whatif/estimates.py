"""From trials to figures of all viewers, and how far off these may be.

Each viewer that was tried stands for as many of its stratum, as the mean of its trials. What chance does to a figure is
found by drawing the viewers again, with replacement (Efron, 1979): each of `AGAIN` draws is a crowd like this one. What
is promised will come once, so each viewer is drawn with one of its trials for that; what is better is so on average,
and judged by the mean of all. A
choice and the one in force are drawn together, so that what is common to both is in no difference. Figures are of both
ends of what is not known. Of cuts, which are few, the bounds are Wilson's (1927), where none in ten is not
none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from flowctl.analyze.whatif.trials import DELAY, LIVED, PEAK, Sums, Trial
from flowctl.records.flight.whatif.types import bucket_ms

AGAIN: Final = 200
"""Draws of a crowd: the fifth of a hundred is then known to a few."""
SURE: Final = 1.645
"""Standard errors of a range: it has the truth nine times of ten."""
_MOST_DELAY_MS: Final = 10_000.0
"""Delay from which a later picture is no worse, and which a viewer counts with that was cut."""
JUDGED: Final = ("cut", "missed", "late", "delay", "join")
"""What choices are judged by, over honest viewers in trouble: the share that is cut, or leaves before its line comes
back; of the others, what they did not get of what they should have had; p95 of the delay and its mean, with the time
after a cut as the longest; mean time to the first picture."""
Change = dict[str, tuple[float, float]]
"""How much more than in force, and how far off that may be; delays and joins as shares of what they are in force."""


class Estimate(NamedTuple):
    """What a choice does to all viewers."""

    totals: Mapping[str, float]  # sums by measure, of the middle between both ends
    cut: tuple[float, float]  # viewers that it cuts, at least and at most
    honest_cut: tuple[float, float]
    dropped_share: tuple[float, float]
    delay_p95_ms: tuple[float, float]
    changes: tuple[Change, Change]  # at both ends
    on_time: tuple[bool, bool]  # whether p95 of the delay is within the target then


def estimates(
    calm: Sums,
    sizes: Mapping[int, int],
    strata: Sequence[int],
    trials: Sequence[Sequence[Trial]],
    choices: int,
    on_time_s: float,
) -> list[Estimate]:
    """Return what each choice does.

    `calm` are the sums of those that always kept up, `sizes` how many viewers there are of each other stratum, `strata`
    and `trials` those of each viewer that was tried; `on_time_s` is the target delay.
    """
    names = sorted({name for some in trials for trial in some for end in trial.ends for one in end for name in one})
    place = {name: number for number, name in enumerate(names)}
    cube = np.zeros((2, sum(map(len, trials)), choices, len(names)))
    for number, trial in enumerate(itertools.chain.from_iterable(trials)):
        for end, found in enumerate(trial.ends):
            for choice in range(choices):
                for name, value in found[choice if len(found) > 1 else 0].items():
                    cube[end, number, choice, place[name]] = value
    of = np.asarray(strata, dtype=int)
    tried = {stratum: int((of == stratum).sum()) for stratum in sizes}
    chance = np.random.default_rng(1)
    times = np.ones((1 + AGAIN, len(trials)), dtype=int)  # how often each viewer is drawn
    for stratum, count in tried.items():
        if count:
            times[1:, of == stratum] = chance.multinomial(count, np.full(count, 1 / count), size=AGAIN)
    counts = [len(some) for some in trials]
    each = np.repeat([sizes[stratum] / tried[stratum] for stratum in strata], counts)
    means = np.repeat(times / np.maximum(counts, 1), counts, axis=1) * each
    one = [chance.multinomial(times[:, number], np.full(count, 1 / count)) for number, count in enumerate(counts)]
    crowds = np.concatenate([means[:1], (np.concatenate(one, axis=1) * each)[1:]]) if one else means
    weight, few = means[0], _few(len(trials))
    figures, expected = ([_Figures(part, place, some, calm, few) for part in cube] for some in (crowds, means))
    made = []
    for choice in range(choices):
        values = cube[:, :, choice]
        totals = {name: float((values[:, :, at] @ weight).mean()) for name, at in place.items()}
        for name, value in calm.items():
            totals[name] = totals.get(name, 0.0) + value
        if PEAK in place and len(trials):
            totals[PEAK] = float(values[:, :, place[PEAK]].max())
        cut, honest = (
            _bounds([one.of(name)[:, choice] @ weight for one in figures], len(trials), float(sum(weight)))
            for name in ("disconnected", "honest_disconnected")
        )
        dropped, p95 = (_span([getattr(one, name)[:, choice] for one in figures], few) for name in ("dropped", "p95"))
        changes = (expected[0].change(choice), expected[1].change(choice))
        low, high = (bool(one.judged["late"][0, choice] <= on_time_s * 1000) for one in figures)
        made.append(Estimate(totals, cut, honest, dropped, p95, changes, (low, high)))
    return made


class _Figures:
    """Figures of the crowds by choice, at one end; the first crowd is the one that was recorded."""

    def __init__(self, cube: Any, place: Mapping[str, int], crowds: Any, calm: Sums, few: float) -> None:
        self._cube, self._place, self._crowds = cube, place, crowds
        self._few = few
        honest = crowds * self.of("honest")[:, 0] if cube.size else crowds
        self.honest = honest

        def total(name: str, who: Any = crowds) -> Any:
            return who @ self.of(name)

        def ratio(part: Any, whole: Any) -> Any:
            return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)

        drops = sum(total(name) for name in place if name.startswith("dropped_messages_")) + np.zeros_like(
            total("join_us")
        )
        self.dropped = ratio(drops, total("offered_messages") + calm["offered_messages"])
        buckets = {int(name.partition(".")[2]) for name in (*place, *calm) if name.startswith((DELAY, LIVED))}
        order = sorted(buckets)
        watched = np.stack([total(f"{DELAY}{bucket}") + calm[f"{DELAY}{bucket}"] for bucket in order], axis=-1)
        self.p95 = _quantile(watched, order)
        whole = np.stack([total(f"{LIVED}{bucket}", honest) for bucket in order], axis=-1)
        ms = np.minimum([bucket_ms(bucket) for bucket in order], _MOST_DELAY_MS)
        self.judged = {
            "cut": ratio(total("honest_lost", honest), total("viewers", honest)),
            "missed": ratio(total("missed", honest), total("wanted", honest)),
            "late": np.minimum(_quantile(whole, order), _MOST_DELAY_MS),
            "delay": ratio(whole @ ms, whole.sum(axis=-1)),
            "join": ratio(total("join_us", honest), total("joins", honest)),
        }

    def of(self, name: str) -> Any:
        """Return what each viewer has of a measure, by choice."""
        if name not in self._place:
            return np.zeros(self._cube.shape[:2])
        return self._cube[:, :, self._place[name]]

    def change(self, choice: int) -> Change:
        found: Change = {}
        for name, values in self.judged.items():
            more = values[:, choice] - values[:, 0]
            if name in ("late", "delay", "join"):
                more = more / (values[0, 0] or math.inf)
            found[name] = float(more[0]), SURE * float(more.std()) * self._few
        return found


def _quantile(time: Any, buckets: Sequence[int], share: float = 0.95) -> Any:
    """Return the upper end of the bucket below which that share of the time lies, in ms."""
    so_far = time.cumsum(axis=-1)
    at = (so_far < share * so_far[..., -1:] - 1e-3).sum(axis=-1)
    return np.asarray([bucket_ms(bucket) for bucket in buckets])[np.minimum(at, len(buckets) - 1)]


def _bounds(cut: Sequence[float], tried: int, troubled: float) -> tuple[float, float]:
    """Return how many of those in trouble are cut, at least and at most, by how many that is at both ends."""
    if not tried:
        return 0.0, 0.0
    ends = []
    for value, side in ((min(cut), -1), (max(cut), 1)):
        share, square = min(value / troubled, 1.0), SURE**2 / tried
        spread = math.sqrt(share * (1 - share) * square + square**2 / 4)
        ends.append(troubled * (share + square / 2 + side * spread) / (1 + square))
    return max(ends[0], 0.0), min(ends[1], troubled)


def _few(tried: int) -> float:
    """Return how much further off so few may be than these say, drawn again: Student's t, and their own mean."""
    others = max(tried - 1, 1)
    return math.sqrt(tried / others) * (1 + 1.2 / others)


def _span(values: Sequence[Any], few: float) -> tuple[float, float]:
    """Return a range of the first, which is the figure of the crowd itself, by how those drawn again differ from it."""
    low, high = ([one[0] + few * (np.quantile(one, share) - one[0]) for one in values] for share in (0.05, 0.95))
    return max(float(min(low)), 0.0), float(max(high))


def sums_of(rows: Sequence[Mapping[str, Any]]) -> Sums:
    """Return the sums of a viewer that always kept up."""
    sums = Sums()
    for row in rows:
        sums.update(dict(row["calm"] or ()))
    sums.update(viewers=1, honest=1, wanted=sums["offered_messages"])
    return sums
