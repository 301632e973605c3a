"""What other limits would have done for a recorded viewer: the server's own Sender, run over what was recorded (pure).

A *recorded viewer* is a list of what happened to it in order: messages that were published for it, and writes, each
with what the kernel took and whether it met EAGAIN. A *choice* is a set of limits with a target delay, a drop policy,
and times. `evaluate` runs all choices over one viewer at once and returns an `Outcome` for each. Every choice has a
real `Sender` with a real `LogCursor`, policy and ledger; only the socket, the clock and the fan-out are stood in for
(`flowctl.flight.whatif.run`), so the answer is what the server would do, not a model of it.

The link is known only from what the kernel took, so this is what is assumed (`LinkModel` does the arithmetic):

- While the recorded viewer was blocked, what the kernel took is what the link allowed. A choice that asks for less
  leaves room in the kernel's buffer, and may take so much more at its next write, but never more than a buffer: a link
  that has nothing to carry does not make up for it later.
- While the recorded viewer was not blocked, the kernel took everything, so the rate is unknown: at least that. A choice
  that has more queued then gets as much again as the rate last measured while blocked allows for the time since the
  last write; where nothing was measured yet, there is no bound.
- What the kernel held and what the peer acknowledged is not part of it: what would be late is judged by what was taken
  alone, so a picture may be left out at another moment than the recorded one was.
- Writes come when the recorded viewer wrote. Where that one was blocked for longer than a flush interval, a choice that
  was not is offered a write when a message comes.

The choice that was recorded therefore meets the answers that were recorded, and does what was done, but for
pictures that were late by what the kernel held. Limits that were changed while the viewer was connected, and an age
taken from the delay and not from the queue are no part of a choice. After a viewer had been closed nothing was
recorded: `extended` goes on with the last seconds of stream and link, and says from when on. That tells whether
another choice would have closed the viewer, and the memory for it; delay, key frames and all else are of the recorded
time, and `Outcome.assumed_s` says how much was assumed beside it.

Delay is the age of the oldest queued message when a write comes, weighted by the time since the write before: what a
viewer sees who plays at once. It is a *stall* while that is above the player's buffer.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from flowctl.errors import ConfigError
from flowctl.flight.whatif.run import Run, untroubled
from flowctl.flight.whatif.types import (
    EXTEND_S,
    GRID_S,
    MOST_CHOICES,
    MOST_EVENTS,
    PLAYER_BUFFER_S,
    RESTART_BYTES,
    Choice,
    Event,
    Outcome,
    RecordedViewer,
    Work,
    on_grid,
)
from flowctl.reasons import SLOW_ENDS

_SETTLE_S: Final = 1024 * GRID_S
"""About a millisecond between what was recorded and what is assumed after it: the limit that closed the viewer was
crossed at the very end of the recording, and has to be crossed again before the link is assumed to take anything."""


def evaluate(
    viewer: RecordedViewer,
    choices: Sequence[Choice],
    *,
    player_buffer_s: float = PLAYER_BUFFER_S,
    work: Work | None = None,
    together: bool = True,
) -> list[Outcome]:
    """Run all `choices` over one recorded viewer.

    Args:
        viewer: what was recorded.
        choices: what to try; 1 to 4096.
        player_buffer_s: what the viewer's player has buffered, in seconds.
        work: counts are added to this. None: nobody counts.
        together: whether choices that are at the same place are served as one, and Senders are called only where a
            limit can be crossed. Without, every Sender is shown every input by itself: the same outcomes, slowly; but
            for a viewer that was given a cache and lags from the first moment, whose Sender judges whether it is still
            joining when it looks.

    Returns:
        One outcome per choice, in their order.

    Raises:
        ConfigError: no choices, or too many.
    """
    if not 1 <= len(choices) <= MOST_CHOICES:
        raise ConfigError(f"there are {len(choices)} choices to evaluate, it must be 1 to {MOST_CHOICES}")
    work = work if work is not None else Work()
    work.viewers += 1
    if not viewer.refused and together:
        return [untroubled(viewer, player_buffer_s, work, len(choices))] * len(choices)
    work.refused_viewers += viewer.refused
    collects = gc.isenabled()
    gc.disable()  # else a third of the time goes into looking through the log for garbage
    try:
        return Run(viewer, choices, player_buffer_s=player_buffer_s, work=work, together=together).run()
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
    strained: Sequence[tuple[float, float]] = (),
    extend_s: float = EXTEND_S,
) -> RecordedViewer:
    """Return the viewer of what was recorded as it came: times of any kind, and as many events as there were.

    Args:
        events: see `RecordedViewer`; what is beyond `MOST_EVENTS` is left out.
        given: see `RecordedViewer`.
        restart_bytes: likewise. 0: not known.
        ended_s: when the recording ended, seconds.
        close_reason: why the connection ended then. None: it did not, or it is not known.
        strained: see `RecordedViewer`.
        extend_s: how much to add where the server closed it for being slow, seconds.
    """
    viewer = RecordedViewer(
        events=[(on_grid(at), what, size) for at, what, size in events[:MOST_EVENTS]],
        given=given,
        restart_bytes=restart_bytes or RESTART_BYTES,
        ended_at=on_grid(ended_s),
        close_reason=close_reason,
        strained=[(on_grid(begin_s), on_grid(end_s)) for begin_s, end_s in strained],
    )
    return extended(viewer, extend_s) if close_reason in SLOW_ENDS else viewer


def extended(viewer: RecordedViewer, seconds: float, *, window_s: float = 10.0) -> RecordedViewer:
    """Return `viewer` with `seconds` more, in which the last `window_s` of stream and link come again and again.

    For a viewer that the server closed: what would have become of it under another choice is not recorded. A stall that
    the close cut short goes on for as long again as it had lasted, and only then does the window come; a window of
    which nothing was taken stays so: a dead link stays dead.

    Args:
        viewer: what was recorded.
        seconds: how much to add; 0: nothing.
        window_s: what is repeated, in seconds.
    """
    if seconds <= 0 or not viewer.events:
        return viewer
    end = viewer.ended_at
    first = max(viewer.events[0][0], end - window_s)
    window = [event for event in itertools.islice(viewer.events, viewer.given, None) if event[0] >= first]
    length = end - first
    if not window or length <= 0:
        return viewer
    took = (at for at, what, size in reversed(viewer.events) if what < 0 and size)
    resumes = end + (end - next(took, viewer.events[0][0]))
    more: list[Event] = []
    shift = length + _SETTLE_S
    while shift < seconds + length and len(viewer.events) + len(more) + len(window) <= MOST_EVENTS:
        more.extend(
            (at + shift, what, size)
            for at, what, size in window
            if at + shift <= end + seconds and (what >= 0 or at + shift >= resumes)
        )
        shift += length
    return replace(viewer, events=[*viewer.events, *more], ended_at=end + seconds, assumed_from=end)
