"""What other limits would have done for a recorded viewer: the server's own Sender, run over what was recorded (pure).

`evaluate` runs all choices over one viewer at once. Every choice has a real `Sender` with a real `LogCursor`, policy
and ledger; only socket, clock and fan-out are stood in for (`flowctl.records.flight.whatif.run`). The link is known
only from what the kernel took (`RecordedLine`): what the line carried is what the kernel was given less what it still
holds; each choice has a kernel of its own, and what passes an empty kernel is lost. Where nothing is known of the
kernel, what was taken while the viewer was blocked is what the line carried. So the choice that was recorded meets the
answers that were recorded: with limits alone to the byte, with a target delay within some per cent.

After a viewer had been closed nothing was recorded: `extended` goes on with its stream, and with its line as it was
before the stall that the close cut short; how long that stall would have lasted the caller says. Delay
is the age of the oldest message that the viewer has not taken when a write comes, weighted by the time since the write
before; it is a *stall* while that is above the player's buffer. Of a viewer that switched between renditions, a choice
without a set has the switches as they were made; with one, see `flowctl.records.flight.whatif.sets`.
"""

from __future__ import annotations

import bisect
import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from flowctl.errors import ConfigError
from flowctl.reasons import SLOW_ENDS
from flowctl.records.flight.whatif.run import WhatifRun, untroubled
from flowctl.records.flight.whatif.sets import SetRun
from flowctl.records.flight.whatif.types import (
    EXTEND_S,
    GRID_S,
    HELD,
    MOST_CHOICES,
    MOST_EVENTS,
    REFUSED,
    RESTART_BYTES,
    TAKEN,
    Choice,
    ChoiceOutcome,
    Event,
    RecordedViewer,
    Work,
    on_grid,
)

_LEAST_REPEAT_S: Final = 0.1
"""Least time between two repeats: what lasted for a microsecond is not repeated for minutes without a pause."""
LEAST_STALL_S: Final = 1.0
"""Least pause that is a stall: slow links carry in steps of up to half a second."""
WINDOW_S: Final = 30.0
"""How much of stream and line is repeated after a close: several stalls of a line that has them often."""
_STILL_BYTES: Final = 3000
"""Most bytes that are not progress, two packets: probes of a closed window."""
_SETTLE_S: Final = 1024 * GRID_S
"""About a millisecond between what was recorded and what is assumed after it: the limit that closed the viewer was
crossed at the very end of the recording, and has to be crossed again before the link is assumed to take anything."""


def evaluate(
    viewer: RecordedViewer,
    choices: Sequence[Choice],
    *,
    work: Work | None = None,
) -> list[ChoiceOutcome]:
    if not 1 <= len(choices) <= MOST_CHOICES:
        raise ConfigError(f"there are {len(choices)} choices to evaluate, it must be 1 to {MOST_CHOICES}")
    work = work if work is not None else Work()
    by_set: dict[tuple[int, ...], list[int]] = {}
    for number, choice in enumerate(choices):
        by_set.setdefault(choice.renditions, []).append(number)
    found: dict[int, ChoiceOutcome] = {}
    for renditions, numbers in by_set.items():
        found |= zip(
            numbers, _evaluated(viewer, [choices[number] for number in numbers], work, renditions), strict=True
        )
    return [found[number] for number in range(len(choices))]


def _evaluated(
    viewer: RecordedViewer, choices: Sequence[Choice], work: Work, renditions: tuple[int, ...]
) -> list[ChoiceOutcome]:
    if not (renditions or viewer.refused):
        return [untroubled(viewer, work, len(choices))] * len(choices)
    collects = gc.isenabled()
    gc.disable()  # else a third of the time goes into looking through the log for garbage
    try:
        return (SetRun if renditions else WhatifRun)(viewer, choices, work).run()
    finally:
        if collects:
            gc.enable()


def recorded_viewer(
    events: Sequence[Event],
    *,
    given: int,
    restart_bytes: int,
    ended_s: float,
    close_reason: str | None,
    switched: Sequence[float] = (),
    extend_s: float = EXTEND_S,
    rest_s: float | None = None,
    later_s: float = 0.0,
) -> RecordedViewer:
    """Return the viewer of what was recorded as it came: times of any kind, and as many events as there were.

    `rest_s`: how long the stall goes on that a close for slowness cut short (`extended`). `later_s`: by how much the
    line is later than the stream; two real runs never meet at the same moment.
    """
    viewer = RecordedViewer(
        events=[(on_grid(at), what, size) for at, what, size in events[:MOST_EVENTS]],
        given=given,
        restart_bytes=restart_bytes or RESTART_BYTES,
        ended_at=on_grid(ended_s),
        close_reason=close_reason,
        switched=[*map(on_grid, switched)],
    )
    if close_reason in SLOW_ENDS:
        viewer = extended(viewer, extend_s, rest_s)
    return _later(viewer, later_s) if later_s else viewer


def not_known(viewer: RecordedViewer, choice: Choice) -> str | None:
    """Return, in plain words, what the recording does not tell of a choice, and how it was tried all the same."""
    if not choice.renditions:
        if not viewer.switched:
            return None
        return "which renditions would have been chosen: it was tried in those that were; renditions ask the rule again"
    said = "what other renditions looked like: the pictures that were recorded, larger or smaller"
    if not (viewer.refused or _tells(viewer)):
        said += "; what its line carries beyond that, which was never seen full: it was tried with one that carries all"
    return said


def _later(viewer: RecordedViewer, seconds: float) -> RecordedViewer:
    last = viewer.ended_at
    events = [(at if what >= 0 else min(on_grid(at + seconds), last), what, size) for at, what, size in viewer.events]
    return replace(viewer, events=sorted(events, key=itemgetter(0)))


def extended(viewer: RecordedViewer, seconds: float, rest_s: float | None = None) -> RecordedViewer:
    """Return `viewer` with `seconds` more, in which its stream goes on, and its line as it was before its last stall.

    That stall, which the close cut short, lasts for `rest_s` more; None: for as long again; inf: for good. Then the
    line repeats itself from `WINDOW_S` before the stall on, with the stall.
    """
    if seconds <= 0 or not viewer.events:
        return viewer
    events, end = viewer.events, viewer.ended_at
    stopped = stalls(events, end)[1]
    first = max(events[0][0], end - WINDOW_S)
    resumes = end + (end - stopped if rest_s is None else rest_s)
    coming = [event for event in itertools.islice(events, viewer.given, None) if event[1] >= 0 and event[0] >= first]
    until, most = end + seconds, (MOST_EVENTS - len(events)) // 2
    more = [*itertools.islice(_again(coming, first, end - first, end, until), most)]
    held = next((size for _, what, size in reversed(events) if what == HELD), None)
    if held is not None:  # until then, nothing is carried
        more.append((min(resumes, until), HELD, held))
    line_first = max(events[0][0], stopped - WINDOW_S)
    line = [event for event in events if event[1] < 0 and line_first <= event[0] <= stopped]
    if resumes < until:
        length = stopped - line_first + (resumes - stopped if resumes - stopped >= LEAST_STALL_S else 0.0)
        more += itertools.islice(_again(line, line_first, length, resumes, until), most)
    more = sorted(more, key=itemgetter(0))
    return replace(viewer, events=[*events, *more][:MOST_EVENTS], ended_at=until, assumed_from=end)


def _again(window: Sequence[Event], begin: float, length: float, start: float, until: float) -> Iterator[Event]:
    """Yield what came from `begin` on again and again, each time `length` later, from `start` until `until`."""
    start += _SETTLE_S
    while window and start < until:
        yield from (
            (on_grid(start + at - begin), what, size) for at, what, size in window if start + at - begin <= until
        )
        start += max(length, _LEAST_REPEAT_S)


def stalls(events: Sequence[Event], ended: float) -> tuple[list[float], float]:
    """Return how long the line stood still each time that it went on after it, and when it last carried something.

    Looks at the kernel tell: while it holds all that it was given, nothing is carried. Writes alone do not: a line goes
    on with what its kernel has when there are none. Where nothing is known of the kernel, there are only writes.
    """
    found: list[float] = []
    since = ended
    known = any(what == HELD and size for _, what, size in events)
    given, times = [0], [events[0][0] if events else ended]  # bytes written up to a time
    blocked, level = False, -1  # bytes that were carried at the last look; -1: nobody has looked yet
    for at, what, size in events:
        if what in (TAKEN, REFUSED):
            moved = blocked and (what == TAKEN or (size > 0 and not known))
        elif what == HELD and blocked:
            moved = 0 <= level < given[-1] - size - _STILL_BYTES
            if level < 0:  # it stands still since it has been given more than it had carried by then
                since = times[min(bisect.bisect_right(given, given[-1] - size + _STILL_BYTES), len(times) - 1)]
        else:
            continue
        if moved and at - since >= LEAST_STALL_S:
            found.append(at - since)
        if what == HELD:
            level, since = given[-1] - size, at if moved else since
        else:
            if moved or not blocked:
                level, since = -1, at if size or known else times[-1]
            blocked = what == REFUSED
            given.append(given[-1] + size)
            times.append(at)
    return found, since if blocked else ended


def _tells(viewer: RecordedViewer) -> bool:
    """Return whether it is known what the kernel held."""
    return any(what == HELD and size for _, what, size in viewer.events)
