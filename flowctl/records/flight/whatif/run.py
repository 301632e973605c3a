"""Inside of the what-if engine: one recorded viewer, many choices, one stream log (pure).

Each message is appended to one `StreamLog`, once; each choice has a `Sender` that follows it. Senders are called only
where something can happen. Choices that have taken everything are *members*: they stand at one `Place`, and a write
that is taken whole moves all of them with one assignment, as in a cohort of the fan-out. The first refusal makes all
leave; from then on a choice has turns as in a fan-out: one that lags when its next turn is due, another when its link
has room. That one is looked at where the log has grown to where its next limit can be crossed, at key frames, and when
its timer is due. A property test shows each choice everything, and compares.
"""

from __future__ import annotations

import errno
import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Final, NoReturn

from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import POLICIES
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.flow.timing import LEAST_AHEAD_BYTES, LONGEST_PACE_S, MOST_AHEAD_BYTES
from flowctl.core.outgoing.streamlog import Entry, Place, StreamLog
from flowctl.core.sending.contract import Standing
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import DamagedFlightError
from flowctl.reasons import CloseReason, DropReason
from flowctl.records.flight.whatif.line import RecordedLine
from flowctl.records.flight.whatif.types import (
    GRID_S,
    HELD,
    NO_MESSAGES,
    PLAYER_BUFFER_S,
    REFUSED,
    TAKEN,
    Choice,
    ChoiceOutcome,
    Event,
    RecordedViewer,
    Work,
    delay_bucket,
)
from flowctl.sender import Sender

_FLUSH_S: Final = 0.04
"""Flush interval of the live server: how often a choice that is not blocked is offered a write in between."""
_IN_ROUNDS: Final = frozenset({Standing.QUEUED, Standing.SERVED})
"""Places of a choice that is offered a write with each round of the fan-out."""
_CLASSES: Final = tuple(MessageClass)
_KEY: Final = int(MessageClass.KEY)
_UNBOUNDED_BYTES: Final = 1 << 60
"""Room of a kernel whose bound is not known."""
_UNDER_WAY_BYTES: Final = LEAST_AHEAD_BYTES
"""Bytes held by the kernel that do not count as unsent: some packets are sent and not acknowledged yet."""

_TICKS: Final = 50_000
_TICKS_PER_EVENT: Final = 8
"""Most ticks of a choice by the events of its viewer, and beside them, 7 hours of trouble: in a flight that says that
years pass without anything, there is nothing to try."""

octets = functools.lru_cache(maxsize=16)(bytes)
"""Make a message of that size. Those of a made-up interval have two sizes of each class, and share their memory: a
false row may speak of thousands of the largest."""


@dataclass(slots=True)
class Gauge:
    """Delay by buckets and stalls, of the choices that were at one place. Times are on the grid, so sums are exact."""

    delay: dict[int, float] = field(default_factory=dict)
    stall_s: float = 0.0

    def note(self, age_s: float, seconds: float) -> None:
        """Count that a delay of `age_s` was there for `seconds`."""
        if not seconds:
            return
        bucket = delay_bucket(age_s * 1000)
        self.delay[bucket] = self.delay.get(bucket, 0.0) + seconds
        if age_s > PLAYER_BUFFER_S:
            self.stall_s += seconds

    def copy(self) -> Gauge:
        return Gauge(dict(self.delay), self.stall_s)

    def add(self, after: Gauge, before: Gauge) -> None:
        """Add what was noted in `after` since it was as `before`."""
        for bucket, seconds in after.delay.items():
            more = seconds - before.delay.get(bucket, 0.0)
            if more:
                self.delay[bucket] = self.delay.get(bucket, 0.0) + more
        self.stall_s += after.stall_s - before.stall_s


@dataclass(slots=True, eq=False)
class Seat:
    """One choice: the host and the transport of its Sender."""

    run: WhatifRun
    index: int
    choice: Choice
    # what its kernel holds; where nothing is known of kernels, a measure of what it may take
    held: float = field(init=False)
    ahead: int = 0  # how much of it may be unsent, as the Sender has told. 0: as usual.
    wakes_at: float = inf  # what the line has to have carried before the kernel asks for more
    due: float = inf  # when its tick is due; inf for never
    turn_at: float = inf  # when it has its next turn, while it is PACED
    closed_at: float | None = None
    reason: CloseReason | None = None
    gauge: Gauge = field(default_factory=Gauge)
    entered: Gauge | None = None  # the members' figures when it became one
    noted_at: float = field(init=False)  # when delay and memory were last noted for it alone
    memory_peak: int = 0
    memory_byte_s: float = 0.0
    watch_offset: int = OFF_MARK
    watch_sequence: int = OFF_MARK
    taken_bytes: int = 0
    shown_at: float | None = None  # when its kernel had taken as much as joining gave up to the end of a key frame
    sender: Sender = field(init=False)
    _carried: float = field(init=False)

    def __post_init__(self) -> None:
        self.held, self._carried, self.noted_at = self.run.line.held, self.run.line.carried, self.run.now
        choice = self.choice
        self.sender = Sender(
            self,
            self,
            limits=choice.limits,
            policy=POLICIES[choice.policy],
            settings=SenderSettings(
                stuck_s=choice.stuck_s,
                soft_too_long_s=choice.soft_too_long_s,
                return_after_s=choice.return_after_s,
            ),
        )

    # -- the transport

    def send(self, data: bytes, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        room = self.room
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "the link has no room")  # each anew: it holds frames, and they the log
        count = min(sum(map(len, buffers)), room)
        self.held += count
        self.taken_bytes += count
        if self.shown_at is None and self.taken_bytes >= self.run.first_bytes:
            self.shown_at = self.run.now
        return count

    # -- its kernel

    def settle(self) -> None:
        """Let the line carry what it could since the last time."""
        carried = self.run.line.carried
        self.held = max(self.held - (carried - self._carried), 0.0)
        self._carried = carried

    def fill(self, held: float) -> None:
        """Hold what the kernel of the recorded viewer holds: both were given the same."""
        self.held, self._carried = held, self.run.line.carried

    @property
    def level(self) -> float:
        """How much its kernel takes before it refuses."""
        return self.run.line.level

    @property
    def room(self) -> int:
        """Bytes that the kernel takes before it refuses."""
        level = self.level
        if self.ahead:
            level = min(level, _UNDER_WAY_BYTES + 2 * self.ahead)
        return _UNBOUNDED_BYTES if level == inf else round(level - self.held)

    @property
    def asks(self) -> bool:
        """Whether the kernel asks for more: half of what may be unsent is sent, or the recorded one was given some."""
        line = self.run.line
        return self.room > 0 and (not line.known or self.held <= max(self._low, line.held if line.writes else 0.0))

    @property
    def _low(self) -> float:
        if self.ahead:
            return _UNDER_WAY_BYTES + self.ahead / 2
        return min(self.level, MOST_AHEAD_BYTES) / 2

    def sleep(self) -> None:
        """Note when the kernel asks again."""
        self.wakes_at = self._carried + self.held - self._low

    # -- the host

    def now(self) -> float:
        return self.run.now

    def wrote(self, size_bytes: int) -> None:
        """Do nothing: total bytes are not counted here."""

    def request_flush(self) -> None:
        """A round of the fan-out offers it a write: what was late was left out, say, and nothing is queued."""
        if not self.sender.blocked:
            self.run.serve_in_turn(self.sender)

    def want_writable(self, wanted: bool) -> None:  # noqa: FBT001 - the signature of the protocol
        """The link tells by itself."""

    def set_deadline(self, when: float) -> None:
        """Tick at `when`, on the grid, unless a tick is due before."""
        if when < self.due:
            when = ceil(when / GRID_S) * GRID_S
            if when < self.due:
                self.due = when
                heapq.heappush(self.run.timers, (when, self.index))

    def terminate(self, reason: CloseReason, details: str) -> None:
        del details
        self.reason = reason
        self.closed_at = self.run.now

    def in_thread(self) -> bool:
        return True

    def handler_failed(self, where: str, error: BaseException) -> NoReturn:
        raise AssertionError(f"{where} failed") from error

    def ledger_grew(self) -> None:
        """Do nothing: the ledger is not read here."""

    def kernel_bytes(self) -> int:
        """Return what the kernel holds for this choice; 0 where nothing is known of it."""
        if not self.run.line.known:
            return 0
        self.settle()
        return int(self.held)

    def limit_unsent(self, size_bytes: int) -> None:
        self.ahead = size_bytes if self.run.line.known else 0

    def strained(self) -> bool:
        return False  # turns come when they are due

    def shared_stall(self) -> None:
        """Nothing: of the others there is no recording."""


class WhatifRun:
    """All choices over one viewer; the fan-out of their Senders (`CohortLike`)."""

    def __init__(self, viewer: RecordedViewer, choices: Sequence[Choice], work: Work) -> None:
        self.log = StreamLog("what-if")
        self.now = viewer.events[0][0] if viewer.events else 0.0
        self.timers: list[tuple[float, int]] = []
        self._viewer = viewer
        self._restart = (bytes(viewer.restart_bytes),) if viewer.restart_bytes else ()
        self._work = work
        self.line = RecordedLine(viewer)
        self._turns: list[tuple[float, int]] = []  # (time, index) of turns, those that came earlier too; a heap
        self._members: dict[int, Seat] = {}
        self._place = Place(self.log.tail)
        self._common = Gauge()
        self._alone: dict[int, Seat] = {}
        self._hungry = False  # somebody alone is served in rounds: it may write between recorded writes
        self._offset = self._sequence = OFF_MARK  # of the log, before which nobody is to be looked at
        self._key_sequence = -1
        self._wrote_at = self.now
        key = next((place for place, (_, what, _) in enumerate(viewer.events) if what == _KEY), -1)
        self.first_bytes = sum(size for _, what, size in viewer.events[: key + 1] if what >= 0)
        self._seats = self._make_seats(choices)
        self._most_ticks = self._ticks_left = len(choices) * (_TICKS + _TICKS_PER_EVENT * len(viewer.events))

    def _make_seats(self, choices: Sequence[Choice]) -> Sequence[Seat]:
        return [Seat(self, index, choice) for index, choice in enumerate(choices)]

    # -- what a Sender needs of its fan-out

    def add(self, sender: Sender) -> None:
        """All seats begin alone."""

    def serve_alone(self, sender: Sender) -> None:
        """Serve a member by itself from now on."""
        seat = sender.host
        if isinstance(seat, Seat):
            self._part(seat)

    def serve_in_turn(self, sender: Sender) -> None:
        """Serve it in the next round: the kernel takes more again, or it has more to write."""
        seat = sender.host
        if isinstance(seat, Seat) and seat.index in self._alone and sender.stands is not Standing.QUEUED:
            sender.change_standing(Standing.QUEUED)
            self._hungry = True

    def remove(self, sender: Sender) -> None:
        seat = sender.host
        if isinstance(seat, Seat):
            self._settle_gauge(seat)
            self._members.pop(seat.index, None)
            self._alone.pop(seat.index, None)

    def limits_changed(self, sender: Sender) -> None:
        """Look at it with the next message: more counts against its limits now. They do not change themselves."""
        seat = sender.host
        if isinstance(seat, Seat):
            seat.watch_offset = seat.watch_sequence = self._offset = self._sequence = 0

    def guide_changed(self, sender: Sender) -> None:
        """Do nothing: here viewers stay in their log."""

    def brings_on(self, start: Entry) -> bool:
        """Return False: here the thread has room."""
        del start
        return False

    # -- the run

    def run(self) -> list[ChoiceOutcome]:
        events = self._viewer.events
        first = self._join(events)
        work, line, lagged = self._work, self.line, False
        for number in range(first, len(events)):
            at, what, size = events[number]
            if self.timers and self.timers[0][0] <= at:
                self._fire(at)
            self.now = at
            line.step(number)
            if what >= 0:
                work.inputs += len(self._members) + len(self._alone)
                self._publish(at, what, size)
                if self._alone:
                    self._grew()
                    if self._hungry and line.lagging:
                        self._feed()
            elif what == TAKEN and not self._alone and not lagged:
                self._move_members()
            elif what != HELD:
                self._write(blocked=what == REFUSED)
            if self._alone:
                self._wake()
            lagged = line.lagging
        if self.timers:
            self._fire(self._viewer.ended_at)
        self.now = max(self.now, self._viewer.ended_at)
        for seat in self._seats:
            self._settle_gauge(seat)
        return [self._outcome(seat) for seat in self._seats]

    def _join(self, events: Sequence[Event]) -> int:
        """Let all follow the log, with what joining gave; return the number of the first event that is left."""
        given, taken = self._viewer.given, 0
        start: Entry | None = None
        while taken < len(events) and given and events[taken][1] >= 0:
            entry = self._publish(*events[taken])
            start = start or entry
            taken, given = taken + 1, given - 1
        for seat in self._seats:
            self._alone[seat.index] = seat
            self._follow(seat, start)
        self._work.inputs += taken * len(self._seats)
        self._key_sequence = self.log.gop.key_sequence
        return taken

    def _publish(self, at: float, what: int, size: int) -> Entry:
        restart = self._restart if what == _KEY else ()
        return self.log.append(octets(size), _CLASSES[what], at, restart=restart)

    def _follow(self, seat: Seat, start: Entry | None) -> None:
        seat.sender.follow(self, start=start)

    def _fire(self, until: float) -> None:
        timers = self.timers
        while timers and timers[0][0] <= until:
            due, index = heapq.heappop(timers)
            seat = self._seats[index]
            if seat.due == due and seat.closed_at is None:
                self._ticks_left -= 1
                if self._ticks_left < 0:
                    raise DamagedFlightError(
                        f"nothing comes for a viewer in trouble up to {until:.1f} s: at {due:.1f} s it had been looked "
                        f"at {self._most_ticks} times, the most for its {len(self._viewer.events)} events"
                    )
                self.now = due
                seat.due = inf
                seat.sender.tick()

    def _grew(self) -> None:
        """Look at choices whose next limit may be reached; after a key frame, at all that are blocked."""
        log = self.log
        tail = log.tail
        if log.gop.key_sequence != self._key_sequence:
            self._key_sequence = log.gop.key_sequence
            self._look(list(self._alone.values()))
        elif tail.offset >= self._offset or tail.sequence >= self._sequence:
            self._look(
                [
                    seat
                    for seat in self._alone.values()
                    if tail.offset >= seat.watch_offset or tail.sequence >= seat.watch_sequence
                ]
            )

    def _look(self, seats: list[Seat]) -> None:
        self._work.shown += len(seats)
        for seat in seats:
            sender = seat.sender
            if sender.stands is Standing.REFUSED:
                seat.watch_offset, seat.watch_sequence = sender.log_grew()
            elif sender.stands is Standing.PACED and not sender.blocked:
                self.serve_in_turn(sender)  # it has taken all up to the key frame that has come
        self._find_next()

    def _find_next(self) -> None:
        alone = self._alone.values()
        self._offset = min((seat.watch_offset for seat in alone), default=OFF_MARK)
        self._sequence = min((seat.watch_sequence for seat in alone), default=OFF_MARK)

    # -- writes

    def _move_members(self) -> None:
        """A write that was taken whole, with everybody at the same place: one step for all of them."""
        now, tail, entry = self.now, self.log.tail, self._place.entry
        age_s = 0.0 if entry is tail else now - entry.enqueued_at
        self._common.note(age_s, now - self._wrote_at)
        self._place.entry = tail
        self._wrote_at = now
        self._work.inputs += len(self._members)

    def _write(self, *, blocked: bool) -> None:
        """A write at which choices may fare differently."""
        if self._members and blocked:
            self._refuse_members()
        elif self._members:
            self._move_members()
        else:
            self._place.entry = self.log.tail  # where nobody stands, it would hold the log
        for seat in list(self._alone.values()):
            if not (self.line.known and seat.sender.stands is Standing.PACED):  # that one has turns of its own
                self._measure(seat)
                self._serve(seat)
        self._wrote_at = self.now
        self._served()

    def _refuse_members(self) -> None:
        """The recorded viewer was refused something: all members leave, with what the kernel took of this write."""
        if not self._alone:
            self._key_sequence = self.log.gop.key_sequence  # key frames before this one found nobody to be looked at
        for seat in list(self._members.values()):
            seat.fill(self.line.held)
            seat.sender.leave_cohort(0)
            self._part(seat)

    def _part(self, seat: Seat) -> None:
        self._settle_gauge(seat)
        if self._members.pop(seat.index, None) is not None:
            seat.noted_at = self._wrote_at
        if seat.closed_at is None:
            self._alone[seat.index] = seat

    def _settle_gauge(self, seat: Seat) -> None:
        """Give a seat that is no longer a member its share of the members' figures."""
        if seat.entered is not None:
            seat.gauge.add(self._common, seat.entered)
            seat.entered = None

    def _feed(self) -> None:
        """Offer a write to choices that are not blocked while the recorded viewer is, as rounds of the fan-out do."""
        for seat in list(self._alone.values()):
            if seat.sender.stands in _IN_ROUNDS and self.now - seat.noted_at >= _FLUSH_S:
                self._measure(seat)
                self._serve(seat)
        self._served()

    def _wake(self) -> None:
        """Serve choices whose turn has come, and whose kernel asks for more: the line tells, and no recorded write."""
        woken, line = [], self.line
        while self._turns and self._turns[0][0] <= self.now:
            at, index = heapq.heappop(self._turns)
            seat = self._seats[index]
            if seat.turn_at == at and seat.sender.stands is Standing.PACED:
                woken.append(seat)
        if line.known:
            refused = (seat for seat in self._alone.values() if seat.sender.stands is Standing.REFUSED)
            woken += [seat for seat in refused if line.carried >= seat.wakes_at]
        for seat in woken:
            self._measure(seat)
            self._serve(seat)
        if woken:
            self._served()

    def _served(self) -> None:
        self._hungry = any(seat.sender.stands in _IN_ROUNDS for seat in self._alone.values())
        self._find_next()

    def _measure(self, seat: Seat) -> None:
        """Note delay and memory as they are right before a write."""
        load, passed_s = seat.sender.load(), self.now - seat.noted_at
        seat.noted_at = self.now
        age_ms = max(load.age_ms, seat.sender.behind_ms()) if self.line.known else load.age_ms
        seat.gauge.note(age_ms / 1000, passed_s)
        if seat.sender.blocked:
            seat.memory_peak = max(seat.memory_peak, load.size_bytes)
            seat.memory_byte_s += load.size_bytes * passed_s

    def _serve(self, seat: Seat) -> None:
        """Give a choice its turn, and more as long as its kernel takes more; see `Fanout`."""
        sender = seat.sender
        seat.settle()
        if sender.stands is Standing.REFUSED:
            if not seat.asks:
                seat.sleep()
                return
            sender.writable()
        self.serve_in_turn(sender)
        self._work.inputs += 1
        self._work.shown += 1
        next_at = 0.0
        while sender.stands is Standing.QUEUED:
            sender.change_standing(Standing.SERVED)
            next_at = sender.take_turn()
            if next_at == inf and seat.asks:
                sender.writable()  # it was given enough ahead, and the link has room for more
        seat.watch_offset = seat.watch_sequence = OFF_MARK
        if not sender.blocked:
            self._drained(seat)
        if sender.stands is not Standing.SERVED:
            return  # it has ended, or is a member
        if next_at == inf:
            sender.change_standing(Standing.REFUSED)
            seat.sleep()
            seat.watch_offset, seat.watch_sequence = sender.next_crossing()
        elif next_at:
            sender.change_standing(Standing.PACED)
            # Where nothing is known of its kernel, that has room with recorded writes, at which it is served too.
            seat.turn_at = next_at if self.line.known else next_at + LONGEST_PACE_S
            heapq.heappush(self._turns, (seat.turn_at, seat.index))

    def _drained(self, seat: Seat) -> None:
        if not self.line.lagging:
            seat.fill(self.line.after)  # both have drained, so the kernel holds the same for both
            if seat.sender.joins_cohort_at(self.log.tail) is not None:
                self._admit(seat)

    def _admit(self, seat: Seat) -> None:
        """Make a seat that has taken everything a member."""
        self._alone.pop(seat.index)
        self._place.entry = self.log.tail
        self._members[seat.index] = seat
        seat.entered = self._common.copy()
        seat.watch_offset = seat.watch_sequence = OFF_MARK
        seat.sender.enter_cohort(self._place)

    # -- the end

    def _outcome(self, seat: Seat) -> ChoiceOutcome:
        figures = seat.sender.statistics()
        dropped = [0] * CLASS_COUNT
        for reason, counts in figures.dropped.items():
            if reason is not DropReason.CLOSED:
                dropped = [a + b for a, b in zip(dropped, counts.messages, strict=True)]
        began = self._viewer.events[0][0] if self._viewer.events else 0.0
        return ChoiceOutcome(
            closed=seat.reason,
            watched_s=(self.now if seat.closed_at is None else seat.closed_at) - began,
            offered_messages=figures.accepted.messages,
            sent_messages=figures.sent.messages,
            dropped_messages=tuple(dropped),
            dropped_by_reason=tuple(
                sorted((reason.value, counts.total_messages) for reason, counts in figures.dropped.items())
            ),
            sent_bytes=figures.bytes_sent,
            edges=figures.transitions,
            time_in_states_s=figures.time_in_states_s,
            stall_s=seat.gauge.stall_s,
            memory_peak_bytes=seat.memory_peak,
            memory_byte_s=seat.memory_byte_s,
            delay=tuple(sorted(seat.gauge.delay.items())),
            returns=figures.returns,
            joined_s=(self.now if seat.shown_at is None else seat.shown_at) - began if self._viewer.refused else 0.0,
        )


def untroubled(viewer: RecordedViewer, work: Work, choices: int) -> ChoiceOutcome:
    """Return the outcome of a viewer that was never refused anything: the same whatever the choice."""
    offered = [0] * CLASS_COUNT
    gauge = Gauge()
    began = wrote_at = viewer.events[0][0] if viewer.events else 0.0
    oldest: float | None = None
    sent_bytes = written_bytes = 0
    sent = NO_MESSAGES
    for at, what, size in viewer.events:
        if what >= 0:
            offered[what] += 1
            sent_bytes += size
            oldest = at if oldest is None else oldest
        elif what != HELD:
            gauge.note(0.0 if oldest is None else at - oldest, at - wrote_at)
            wrote_at, oldest, written_bytes = at, None, sent_bytes
            sent = tuple(offered)
    work.inputs += len(viewer.events) * choices
    watched_s = max(viewer.ended_at, wrote_at) - began
    return ChoiceOutcome(
        closed=None,
        watched_s=watched_s,
        offered_messages=tuple(offered),
        sent_messages=sent,
        dropped_messages=NO_MESSAGES,
        dropped_by_reason=(),
        sent_bytes=written_bytes,
        edges=0,
        time_in_states_s=(watched_s, 0.0, 0.0, 0.0),
        stall_s=gauge.stall_s,
        memory_peak_bytes=0,
        memory_byte_s=0.0,
        delay=tuple(sorted(gauge.delay.items())),
        returns=0,
    )
