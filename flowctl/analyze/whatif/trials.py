"""What choices do to viewers: the server's Sender over each, and how far off sums over these may be (pure).

What a choice does to a viewer that always kept up is known: these are all counted. The others are tried one by one, in
an order that is chance's, as many as there is time for; of those that were cut, and of those that were not, each that
was tried stands for as many. What would have followed a cut is drawn several times (`Draw`), between two ends.

All choices are held against the same time of the same viewers: of one that a choice cuts, the rest of its time counts
as later than anything, and what would have come then as missed. So no choice looks good for whom it has cut.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from flowctl.analyze.whatif.grid import in_force
from flowctl.analyze.whatif.survival import Length, Survival, drawn_again
from flowctl.core.flow.state import MessageClass
from flowctl.reasons import SLOW_ENDS
from flowctl.records.flight.whatif.engine import evaluate, recorded_viewer
from flowctl.records.flight.whatif.types import (
    REFUSED,
    TAKEN,
    Choice,
    ChoiceOutcome,
    RecordedViewer,
    delay_bucket,
)
from flowctl.records.telemetry.schema import CLASS_NAMES

HONEST_SHARE: Final = 0.05
"""Least share of the stream that a viewer takes: with less it stands still or pretends to read."""
PEAK: Final = "memory_peak_bytes"
"""Measure of which the largest value counts, not the sum."""
DELAY: Final = "delay."
"""Prefix of the measures of time per delay bucket, in microseconds."""
LIVED: Final = "lived."
"""The same of those who would still be there; the time after a cut is of the largest."""
_CUT_BUCKET: Final = delay_bucket(3_600_000)
DRAWS: Final = 4
"""Times that what would have followed a cut is drawn."""
_LATER_S: Final = 0.3
"""Time by which the line of each draw is later than that before it: a part of any group of pictures."""

_KEY: Final = int(MessageClass.KEY)
DROPS: Final = tuple(f"dropped_messages_{name}" for name in CLASS_NAMES)
Rows = Sequence[Mapping[str, Any]]
"""The stretches of one viewer, in order."""
Sums = Counter[str]


class Draw(NamedTuple):
    """What may have followed the cut of a viewer."""

    rests_s: tuple[float, float]  # how long its stall goes on, at least and at most
    stays_s: float  # how long it stays
    later_s: float  # by how much its line is later than its stream


class Lives:
    """Lengths of the stalls of all viewers of a sample, and of their stays, and what they say of a cut."""

    def __init__(self, stalls_us: Sequence[int], stays_us: Sequence[int], extend_s: float) -> None:
        stalls, stays = ([Length(abs(us) / 1e6, us > 0) for us in some] for some in (stalls_us, stays_us))
        self._stalls: list[Survival] = [drawn_again(stalls, number) for number in range(DRAWS)]
        self._stays, self._extend_s = Survival(stays), extend_s

    def draw(self, rows: Rows, number: int) -> Draw:
        last = rows[-1]
        if last["close_reason"] not in SLOW_ENDS:
            return Draw((0.0, 0.0), 0.0, number * _LATER_S)
        chance = random.Random(f"{last['picked']} {number}")
        stays = self._stays.rest(abs(rows[0]["stay_us"] or 0) / 1e6, chance.random())
        stays_s = self._extend_s if stays is None else min(stays, self._extend_s)
        stalls = rows[0]["stalls"] or ()
        seen = -min(stalls[-1], 0) / 1e6 if stalls else 0.0
        if not seen or not self._extend_s:  # or nothing beyond a cut is asked for
            return Draw((0.0, 0.0), stays_s, number * _LATER_S)
        if seen >= self._extend_s:  # who has seen nothing for so long has left, whatever its line does
            return Draw((math.inf, math.inf), stays_s, number * _LATER_S)
        known = self._stalls[number]
        rest = known.rest(seen, chance.random())
        ends = (max(known.longest - seen, 0.0), math.inf) if rest is None else (rest, rest)
        return Draw(ends, stays_s, number * _LATER_S)


class Trial(NamedTuple):
    """Sums of one viewer by choice, one for all where they cannot differ, at both ends of what is not known."""

    ends: tuple[list[Sums], list[Sums]]


def try_viewer(rows: Rows, choices: Sequence[Choice], draw: Draw) -> Trial:
    """Raises `FlowctlError` where what was recorded is damaged."""
    low, high = draw.rests_s
    found = _tried(rows, choices, draw, low)
    return Trial((found, found if low == high else _tried(rows, choices, draw, high)))


def viewer_of(row: Mapping[str, Any], stays_s: float, rest_s: float | None, later_s: float) -> RecordedViewer | None:
    """Return a stretch as the engine takes it; None: it was calm."""
    if not row["at_us"]:
        return None
    events = list(zip((at / 1e6 for at in row["at_us"]), row["what"], row["bytes"], strict=True))
    return recorded_viewer(
        events,
        given=row["given"] or 0,
        restart_bytes=row["restart_bytes"] or 0,
        ended_s=max(row["ended_us"] / 1e6, events[-1][0]),
        close_reason=row["close_reason"],
        switched=[at / 1e6 for at in row.get("switched_us") or ()],
        extend_s=stays_s,
        rest_s=rest_s,
        later_s=later_s,
    )


def _tried(rows: Rows, choices: Sequence[Choice], draw: Draw, rest_s: float) -> list[Sums]:
    """Return the sums of one viewer. Once a choice has closed it, what comes later is missed.

    One whose line stands still for as long as it would have stayed is lost, whether a choice closes it or not, and
    nothing else is judged of it: else the widest limits would be best, which keep the dead for longer than is tried.
    """
    recorded = [viewer_of(row, draw.stays_s, rest_s, draw.later_s) for row in rows]
    refused = any(viewer is not None and viewer.refused for viewer in recorded)
    totals = [Sums() for _ in (choices if refused else choices[:1])]
    wanted, whole_us = 0, 0
    for row, viewer in zip(rows, recorded, strict=True):
        calm = Sums(dict(row["calm"] or ()))
        left = [number for number, total in enumerate(totals) if not total["disconnected"]]
        for number in left:
            totals[number].update(calm, got=calm["offered_messages"])
        wanted, whole_us = wanted + calm["offered_messages"], whole_us + calm["watched_us"]
        if viewer is None:
            continue
        wanted += sum(what >= 0 for _, what, _ in viewer.events)
        whole_us += _us(max(viewer.ended_at, viewer.events[-1][0]) - viewer.events[0][0])
        outcomes = evaluate(viewer, [choices[number] for number in left]) if left else []
        for number, outcome in zip(left, outcomes, strict=True):
            total = totals[number]
            peak = max(total[PEAK], outcome.memory_peak_bytes)
            total.update(of_outcome(outcome))
            if row["given"]:
                total.update(joins=1, join_us=_us(outcome.joined_s))
            total["assumed_us"] += max(_us(outcome.watched_s) - int(row["ended_us"]), 0)
            total[PEAK] = peak
    # A line that is later meets the stream at another moment: it need not do what was recorded.
    if not draw.later_s and in_force(rows[0].get("settings")) == choices[0]:
        _calibrate(rows[-1].get("recorded"), totals)
    honest, gone = not refused or _honest(rows, recorded), 0 < rest_s >= draw.stays_s
    # The kernel refuses something to most viewers as they join: in trouble is who then loses messages or is cut.
    troubled = any(totals[0][name] for name in ("disconnected", *DROPS))
    for total in totals:
        watched_s, closed = total["watched_us"] / 1e6, total["disconnected"]
        total["memory_mean_bytes"] = round(total.pop("held_byte_ms", 0) / 1000 / watched_s) if watched_s else 0
        total.update(viewers=1, honest=honest, honest_disconnected=closed and honest, troubled=troubled)
        total["honest_lost"] = honest and (closed or gone)
        if not gone:
            lived = {name.replace(DELAY, LIVED): us for name, us in total.items() if name.startswith(DELAY)}
            total.update(lived)
            total[f"{LIVED}{_CUT_BUCKET}"] += max(whole_us - total["watched_us"], 0)
            got = total["offered_messages"] - sum(total[name] for name in DROPS)
            got = min(total["got"], got) if closed else got  # what is queued is late, until a close throws it away
            total.update(wanted=wanted, missed=min(max(wanted - got, 0), wanted))
    return totals


def _calibrate(recorded: Any, totals: Sequence[Sums]) -> None:
    """Have the choice in force do what was recorded, and the others so much more or less than that as when tried.

    Where the trial is wrong about the cut itself, it says nothing of this viewer: what was recorded counts for all.
    """
    if not recorded:
        return
    known, tried = dict(recorded), Counter(totals[0])
    wrong = tried["disconnected"] != known["disconnected"]
    for number, total in enumerate(totals):
        if wrong:
            total["disconnected"] = known["disconnected"]
        for name in DROPS if not (wrong and number) else ():
            total[name] = max(total[name] + known.get(name, 0) - tried[name], 0)


def of_outcome(outcome: ChoiceOutcome) -> dict[str, int]:
    return {
        "disconnected": int(outcome.closed is not None),
        "watched_us": _us(outcome.watched_s),
        "ready_us": _us(outcome.time_in_states_s[0]),
        "stall_us": _us(outcome.stall_s),
        "held_byte_ms": round(outcome.memory_byte_s * 1000),
        "offered_messages": sum(outcome.offered_messages),
        "got": sum(outcome.sent_messages),
        **dict(zip(DROPS, outcome.dropped_messages, strict=True)),
        "key_offered": outcome.offered_messages[_KEY],
        "key_sent": outcome.sent_messages[_KEY],
        "sent_bytes": outcome.sent_bytes,
        "edges": outcome.edges,
        "returns": outcome.returns,
        **{f"{DELAY}{bucket}": _us(seconds) for bucket, seconds in outcome.delay},
    }


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _honest(rows: Rows, recorded: Sequence[RecordedViewer | None]) -> bool:
    calm = sum(int(dict(row["calm"] or ()).get("sent_bytes", 0)) for row in rows)
    events = [event for viewer in recorded if viewer is not None for event in viewer.events]
    offered = calm + sum(size for _, what, size in events if what >= 0)
    return calm + sum(size for _, what, size in events if what in (TAKEN, REFUSED)) >= HONEST_SHARE * offered


# -- which viewers, in which order

CALM: Final = 0
CUT: Final = 1
"""Cut for being slow while recorded: what would have followed is drawn."""
TROUBLED: Final = 2


class Viewer(NamedTuple):
    """A viewer of the sample."""

    stratum: int
    rows: Rows


def stratum_of(rows: Rows) -> int:
    if rows[-1]["close_reason"] in SLOW_ENDS and rows[-1]["at_us"]:
        return CUT
    return TROUBLED if any(row["at_us"] for row in rows) else CALM


def in_turn(viewers: Sequence[Viewer]) -> Iterator[tuple[int, int]]:
    """Yield (number of a viewer, number of its draw): each once, then again those of whom something is drawn.

    The strata take turns by their sizes, so that the first of any number are of each.
    """
    places: list[tuple[float, int]] = []
    for stratum in (CUT, TROUBLED):
        of = [number for number, viewer in enumerate(viewers) if viewer.stratum == stratum]
        places += [(place / len(of), number) for place, number in enumerate(of)]
    order = [number for _, number in sorted(places)]
    for draw in range(DRAWS):
        yield from ((number, draw) for number in order if not draw or viewers[number].stratum == CUT)
