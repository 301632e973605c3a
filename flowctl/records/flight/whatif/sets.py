"""What sets of renditions would have done for a recorded viewer: the server's own rule over what was recorded (pure).

A viewer was sent one rendition at a time, so of the others nothing is known but what a choice says: their rates. Each
has a log of its own here. It gets the messages as they were published, pictures made larger or smaller so that the
stream has that rate, and sound as it was: key frames meet, and a message has one number in all logs. Which rendition a
viewer is in is decided as in a server (`flowctl.core.sending.looks`), on its own line, and its Sender goes from log to
log. A viewer does not know the line of another choice beyond what was seen of it: a line that was never seen to be full
carries everything here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Final

from flowctl.core.flow.renditions import RenditionRule
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import MOST_AHEAD_BYTES
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.contract import Hop
from flowctl.core.sending.looks import RenditionLooks
from flowctl.records.flight.whatif.run import Seat, WhatifRun, octets
from flowctl.records.flight.whatif.types import Choice, ChoiceOutcome, Event, RecordedViewer, Work
from flowctl.sender import Sender

_CLASSES: Final = tuple(MessageClass)
_KEY: Final = int(MessageClass.KEY)
_PICTURES: Final = frozenset({_KEY, int(MessageClass.INTER), int(MessageClass.DISPOSABLE)})
_MOST_KEYS: Final = 64
"""Key frames that are kept, for viewers to go on at: one that is further behind stays where it is."""
_LEAST_STRETCH_S: Final = 1.0
"""Shortest time for a rate where there is no whole group of pictures."""
_LEAST_SCALE: Final = 0.01
"""Least share of their size that pictures are given: of a rendition that is hardly more than the sound."""


def stretches(viewer: RecordedViewer) -> Iterator[tuple[float, float, float]]:
    """Yield (from when on, bytes of pictures per second, of the rest) of each rendition that was recorded.

    Rates are of whole groups of pictures, where there are any; what joining gave came at once, and says nothing.
    """
    events = viewer.events[viewer.given :]
    for since, until in pairwise((-inf, *viewer.switched, inf)):
        part = [event for event in events if since <= event[0] < until and event[1] >= 0]
        keys = [at for at, what, _ in part if what == _KEY]
        if len(keys) > 1 and keys[-1] > keys[0]:
            part, seconds = [event for event in part if keys[0] <= event[0] < keys[-1]], keys[-1] - keys[0]
        else:
            seconds = max(part[-1][0] - part[0][0], _LEAST_STRETCH_S) if part else _LEAST_STRETCH_S
        pictures = sum(size for _, what, size in part if what in _PICTURES)
        yield since, pictures / seconds, (sum(size for _, _, size in part) - pictures) / seconds


@dataclass(slots=True, eq=False)
class SetSeat(Seat):
    """One choice with a set: also the guide of its Sender."""

    run: SetRun
    looks: RenditionLooks = field(init=False)
    present: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    since: float = 0.0  # when the present rendition began
    switches: int = 0

    @property
    def level(self) -> float:
        """As much as kernels are told to take, where no end was seen: of a larger rendition more would wait."""
        return min(self.run.line.level, MOST_AHEAD_BYTES)

    def settle_time(self, now: float) -> None:
        self.seconds[self.present] = self.seconds.get(self.present, 0.0) + now - self.since
        self.since = now

    def choose_log(self, key: Entry) -> Hop | None:
        """Go on in the chosen rendition at the key frame that has the same number there; see `Guide`."""
        run, choice = self.run, self.looks.choice
        twins = run.keys_at(key.sequence)
        if choice is None or twins is None:
            return None
        twin, now = twins[choice.name], run.now
        self.looks.rule.switched(now, choice.name, run.rates)
        self.settle_time(now)
        self.present, self.switches, self.looks.choice = choice.name, self.switches + 1, None
        headers = ((MessageClass.HEADER, wire, twin.enqueued_at) for wire in twin.gop.restart)
        return Hop(run.renditions[self.present], twin, tuple(headers))


class Rendition:
    """The log of one rendition; the fan-out of the Senders that follow it (`CohortLike`)."""

    def __init__(self, run: SetRun, log: StreamLog) -> None:
        self._run = run
        self.log = log
        self.serve_alone = run.serve_alone
        self.serve_in_turn = run.serve_in_turn
        self.remove = run.remove
        self.limits_changed = run.limits_changed
        self.guide_changed = run.guide_changed
        self.brings_on = run.brings_on

    def add(self, sender: Sender) -> None:
        self._run.come(sender)


class SetRun(WhatifRun):
    """All choices with one set over one viewer. Everybody is served alone: renditions have no place in common."""

    def __init__(self, viewer: RecordedViewer, choices: Sequence[Choice], work: Work) -> None:
        self.rates = {str(number): rate / 8 for number, rate in enumerate(choices[0].renditions)}
        self.renditions = {name: Rendition(self, StreamLog(name)) for name in self.rates}
        self._stretches = deque(stretches(viewer))
        self._scales: dict[str, float] = {}
        self._keys: deque[tuple[int, dict[str, Entry]]] = deque(maxlen=_MOST_KEYS)
        self._first: dict[str, Entry] = {}  # heads of the logs, while choices join: they would hold all of them
        super().__init__(viewer, choices, work)
        self.log = self.renditions[[*self.rates][-1]].log

    def _make_seats(self, choices: Sequence[Choice]) -> Sequence[Seat]:
        seats = [SetSeat(self, index, choice) for index, choice in enumerate(choices)]
        for seat in seats:
            seat.looks = RenditionLooks(RenditionRule(self.now))
        return seats

    def keys_at(self, sequence: int) -> dict[str, Entry] | None:
        """Return the key frame of that number in each rendition; None: it is too old."""
        return next((twins for number, twins in self._keys if number == sequence), None)

    def come(self, sender: Sender) -> None:
        """Serve one that has changed over, or that joins."""
        seat = sender.host
        if isinstance(seat, SetSeat):
            self._alone[seat.index] = seat

    def _join(self, events: Sequence[Event]) -> int:
        self._first = {name: rendition.log.tail for name, rendition in self.renditions.items()}
        taken = super()._join(events)
        self._first = {}
        return taken

    def _publish(self, at: float, what: int, size: int) -> Entry:
        while self._stretches and self._stretches[0][0] <= at:
            _, pictures, others = self._stretches.popleft()
            self._scales = {
                name: max((rate - others) / pictures, _LEAST_SCALE) if pictures else 1.0
                for name, rate in self.rates.items()
            }
        twins = {}
        for name, rendition in self.renditions.items():
            scaled = max(round(size * self._scales[name]), 1) if what in _PICTURES else size
            restart = self._restart if what == _KEY else ()
            twins[name] = rendition.log.append(octets(scaled), _CLASSES[what], at, restart=restart)
        if self.log.cached is None:  # no key frame for long: as in a live set, nobody goes on at an old one
            self._keys.clear()
        entry = twins[self.log.name]
        if what == _KEY:
            self._keys.append((entry.sequence, twins))
        for seat in list(self._alone.values()):
            if isinstance(seat, SetSeat):
                self._look_at(seat)
        return entry

    def _look_at(self, seat: SetSeat) -> None:
        """Look at one that is not in the largest rendition, or lags, as the watch of a set does."""
        looks, sender = seat.looks, seat.sender
        if self.now < looks.next_at or not (seat.present != self.log.name or sender.blocked or sender.guided):
            return
        looks.look(self.now, sender.line_look(), self.rates, seat.present, self.renditions[seat.present].log)
        if (looks.choice is not None) != sender.guided:
            sender.set_guide(None if looks.choice is None else seat)

    def _follow(self, seat: Seat, start: Entry | None) -> None:
        if isinstance(seat, SetSeat):
            seat.present, seat.since = seat.looks.rule.first(self.rates).name, self.now
            first = None if start is None else self._first[seat.present]
            seat.sender.follow(self.renditions[seat.present], start=first)
            seat.looks.look(
                self.now, seat.sender.line_look(), {}, seat.present, self.log
            )  # where the first burst begins

    def _grew(self) -> None:
        key = self.log.gop.key_sequence != self._key_sequence
        self._key_sequence = self.log.gop.key_sequence
        reached = []
        for seat in self._alone.values():
            log = seat.sender.following
            if log is not None and (
                key or log.tail.offset >= seat.watch_offset or log.tail.sequence >= seat.watch_sequence
            ):
                reached.append(seat)
        self._look(reached)

    def _drained(self, seat: Seat) -> None:
        """Stay alone: its kernel was given something else than the recorded one."""

    def _outcome(self, seat: Seat) -> ChoiceOutcome:
        found = super()._outcome(seat)
        if isinstance(seat, SetSeat):
            seat.settle_time(self.now if seat.closed_at is None else seat.closed_at)
            seconds = tuple(seat.seconds.get(name, 0.0) for name in self.rates)
            found = found._replace(rendition_s=seconds, switches=seat.switches)
        return found
