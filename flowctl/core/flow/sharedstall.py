"""Stalls that most viewers of a poll group have at once: a shared line, and no fault of each (pure).

Theory of operation. The fan-outs of a group tell which viewer waits for its kernel with nothing taken, and when that
asks for more. Where most of those that are served stopped within five seconds, and most of these have taken nothing for
two seconds more, it is one *shared stall*: from the first of them up to the moment when fewer than that make one are
left, for a part of a crowd may be on a line that recovers later. Who stops meanwhile has it too; who had stopped before
has not. The last one is remembered, for what it has left behind in queues and clocks. Viewers on slow lines stop and
go on all the time, each by itself, and make none. After one, all must be well for as long as it has lasted before there
is another: those who stop and go on by turns, to be excused, are judged by half of the time.

Each event takes a step or two, and none is told of viewers that keep up. All but `span` belongs to the group's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

TOGETHER_S: Final = 5.0
"""Time within which most must have stopped: a line that stops for all at once is noticed when a kernel's buffers are
full, which take from one to some seconds of a stream."""
SURE_S: Final = 2.0
"""Time after which a stall of most is one: longer than pauses of radio links, shorter than any limit."""
MOST_S: Final = 60.0
"""Longest time for which a shared stall excuses anybody: half of a crowd may be of one peer that never reads again."""
LEAST_VIEWERS: Final = 8
"""Fewer may well have their own troubles at the same time."""
_SAY_S: Final = 60.0
"""Time between two that are told of."""
_COUNT_S: Final = 0.25
"""Time between two counts of the viewers: viewers on slow lines stop hundreds of times a second, and there may be a
thousand streams."""


class Crowd(Protocol):
    """The viewers of one stream: a fan-out."""

    def served(self, now: float) -> int:
        """Return how many there are that something was published for lately."""


class StallSpan(NamedTuple):
    """From when to when most had stopped, in seconds; what goes on lasts up to now."""

    began: float
    ended: float


class SharedStall:
    """The stops of one group's viewers.

    Args:
        say: told of a shared stall, and when it is over, but no more than once a minute: whether it is over, how many
            viewers have it, or, over, have had it and are still here, all that are served, and for how long it has
            lasted, in seconds.
    """

    def __init__(self, say: Callable[[bool, int, int, float], object]) -> None:
        self.crowds: dict[Crowd, None] = {}  # all fan-outs of the group, which enter themselves
        self._say: Final = say
        self._recent: OrderedDict[object, float] = OrderedDict()  # who stopped lately, and when: oldest first
        # Of a stall of most: who stopped with the first of them, less those that have gone; who of these has taken
        # nothing since; and when the first one stopped.
        self._had: set[object] = set()
        self._stopped: set[object] = set()
        self._began = self._sure_at = 0.0
        # The last that was one; replaced as a whole, for other threads read it.
        self._span: StallSpan | None = None
        self._goes_on = False
        self._said_at = -_SAY_S
        self._counted_at, self._count = -_COUNT_S, 0  # when viewers were last counted, and how many there were

    def _served(self, now: float) -> int:
        if now - self._counted_at >= _COUNT_S:
            self._counted_at, self._count = now, sum(crowd.served(now) for crowd in self.crowds)
        return self._count

    def stopped(self, viewer: object, now: float) -> float | None:
        """Note that `viewer` waits for its kernel; return when to call `confirm`, in seconds. None: not for this."""
        recent = self._recent
        recent[viewer] = now
        while now - next(iter(recent.values())) > TOGETHER_S:
            recent.popitem(last=False)
        if self._goes_on and now - self._began >= MOST_S:
            self._end(now)  # those that are left excuse nobody any more, and must not hide the next one
        if self._stopped:
            if now - self._began <= TOGETHER_S and viewer not in self._had:
                self._had.add(viewer)
                self._stopped.add(viewer)
            return None
        if len(recent) < LEAST_VIEWERS or 2 * len(recent) < self._served(now):
            return None
        if (last := self._span) is not None and now - last.ended < last.ended - last.began:
            return None
        self._had, self._stopped = set(recent), set(recent)
        self._began, self._sure_at = next(iter(recent.values())), now + SURE_S
        return self._sure_at

    def went_on(self, viewer: object, now: float, *, gone: bool = False) -> None:
        """Note that the kernel of `viewer` takes more, or that it is `gone`; harmless where it had not stopped."""
        self._recent.pop(viewer, None)
        if gone:
            self._had.discard(viewer)
        if viewer not in self._stopped:
            return
        self._stopped.remove(viewer)
        if len(self._stopped) < min(LEAST_VIEWERS, len(self._had) / 2) or not self._stopped:
            self._end(now)

    def _end(self, now: float) -> None:
        self._stopped.clear()
        if self._goes_on and self._span is not None:
            self._span, self._goes_on = self.span(now), False
            if self._said_at >= self._began:
                self._say(True, len(self._had), self._served(now), now - self._began)

    def confirm(self, sure_at: float, now: float) -> None:
        """See whether most have taken nothing since; when `stopped` said, or a little early, as timers are."""
        if self._stopped and not self._goes_on and sure_at == self._sure_at:
            self._span, self._goes_on = StallSpan(self._began, now), True
            if now - self._said_at >= _SAY_S:
                self._said_at = now
                self._say(False, len(self._stopped), self._served(now), now - self._began)

    def span(self, now: float) -> StallSpan | None:
        """Return the last shared stall, up to `now` where it goes on; None: there was none. Any thread."""
        span = self._span
        if span is None or not self._goes_on:
            return span
        return StallSpan(span.began, min(now, span.began + MOST_S))
