"""What other limits would have done for a recorded viewer: the server's own Sender, run over what was recorded (pure).

`evaluate` runs all choices over one viewer at once. Every choice has a real `Sender` with a real `LogCursor`, policy
and ledger; only socket, clock and fan-out are stood in for (`flowctl.records.flight.whatif.run`). The link is known
only from what the kernel took (`RecordedLine`): what the line carried is what the kernel was given less what it still
holds; each choice has a kernel of its own, and what passes an empty kernel is lost. Where nothing is known of the
kernel, what was taken while the viewer was blocked is what the line carried. So the choice that was recorded meets the
answers that were recorded: with limits alone to the byte, with a target delay within some per cent.

After a viewer had been closed nothing was recorded: `extended` goes on with the last seconds of stream and link. Delay
is the age of the oldest message that the viewer has not taken when a write comes, weighted by the time since the write
before; it is a *stall* while that is above the player's buffer. Of a viewer that switched between renditions, a choice
without a set has the switches as they were made; with one, see `flowctl.records.flight.whatif.sets`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf
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

_DEAD_S: Final = 2.5
"""Time without progress at the close from which a link is dead, as is one that carried nothing for longer than it ever
carried anything: half of the stall after which a viewer is brought back to live, from which nearly all recover."""
_REPEAT_SHIFT_S: Final = 0.3
"""Time by which the line of each repeat is later than that before it: a part of any group of pictures."""
_LEAST_REPEAT_S: Final = 0.1
"""Least time between two repeats: what lasted for a microsecond is not repeated for minutes without a pause."""
_LEAST_STALL_S: Final = 1.0
"""Least pause that is a stall: slow links carry in steps of up to half a second."""
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
    repeat: int = 0,
) -> RecordedViewer:
    """Return the viewer of what was recorded as it came: times of any kind, and as many events as there were."""
    viewer = RecordedViewer(
        events=[(on_grid(at), what, size) for at, what, size in events[:MOST_EVENTS]],
        given=given,
        restart_bytes=restart_bytes or RESTART_BYTES,
        ended_at=on_grid(ended_s),
        close_reason=close_reason,
        switched=[*map(on_grid, switched)],
    )
    if close_reason in SLOW_ENDS:
        viewer = extended(viewer, extend_s, for_good=repeat % 2 == 1)
    return _later(viewer, repeat * _REPEAT_SHIFT_S) if repeat else viewer


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
    """Return `viewer` with its line later than its stream: two real runs never meet at the same moment."""
    last = viewer.ended_at
    events = [(at if what >= 0 else min(on_grid(at + seconds), last), what, size) for at, what, size in viewer.events]
    return replace(viewer, events=sorted(events, key=itemgetter(0)))


def extended(
    viewer: RecordedViewer, seconds: float, *, window_s: float = 10.0, for_good: bool = False
) -> RecordedViewer:
    """Return `viewer` with `seconds` more, in which the last `window_s` of stream and link come again and again.

    What would have become of a viewer that the server closed is not recorded. A stall that the close cut short goes on
    for as long again; a line of which the kernel tells that it carried nothing for 2.5 s, or for longer than it ever
    carried anything, stays dead.
    """
    if seconds <= 0 or not viewer.events:
        return viewer
    end, stopped = viewer.ended_at, _stopped_at(viewer)
    first = max(viewer.events[0][0], end - window_s)
    window = [event for event in itertools.islice(viewer.events, viewer.given, None) if event[0] >= first]
    length = end - first
    if not window or length <= 0:
        return viewer
    dead = for_good and end - stopped >= _LEAST_STALL_S
    dead |= _tells(viewer) and end - stopped >= min(_DEAD_S, max(stopped - viewer.events[0][0], _LEAST_STALL_S))
    resumes = inf if dead else end + (end - stopped)
    more: list[Event] = []
    held = next((size for _, what, size in reversed(viewer.events) if what == HELD), None)
    if held is not None:  # until then, nothing is carried
        more.append((min(max(resumes, end), end + seconds), HELD, held))
    shift, looked = length + _SETTLE_S, len(viewer.events)
    while shift < seconds + length and looked + len(window) <= MOST_EVENTS:
        looked += len(window)  # also those that are left out
        more.extend(
            (at + shift, what, size)
            for at, what, size in window
            if at + shift <= end + seconds and (what >= 0 or at + shift >= resumes)
        )
        shift += max(length, _LEAST_REPEAT_S)
    return replace(
        viewer, events=[*viewer.events, *sorted(more, key=itemgetter(0))], ended_at=end + seconds, assumed_from=end
    )


def _tells(viewer: RecordedViewer) -> bool:
    """Return whether it is known what the kernel held."""
    return any(what == HELD and size for _, what, size in viewer.events)


def _stopped_at(viewer: RecordedViewer) -> float:
    """Return when the line last carried something: since then the kernel has held all that it was given.

    Writes do not tell: one that is told to take less asks for more much later than its line carries, and one that takes
    goes on taking for a while when its line has stopped.
    """
    events = viewer.events
    known = _tells(viewer)
    held: int | None = None
    stopped = viewer.ended_at
    for at, what, size in reversed(events):
        if not known:
            if what in (TAKEN, REFUSED) and size:
                return at
        elif what == HELD:
            if held is not None and size > held + _STILL_BYTES:
                return stopped
            held, stopped = size if held is None else held, at
        elif what in (TAKEN, REFUSED) and held is not None:
            held -= size  # before it, the kernel held so much less
            if held < -_STILL_BYTES:
                return at
    return events[0][0]
