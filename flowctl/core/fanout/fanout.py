"""Fan-out: writes a stream log to the viewers of one poll group, one system call per viewer and flush.

Theory of operation. Viewers that keep up form the *cohort* (see `core.fanout.cohort`): squads of viewers who share a
place of the log. A *round* brings all squads to the log's tail: the bytes from their place to there are joined once,
and written to one member after the other. Nothing else is done per viewer: no lock, no queue, no counter (what a member
was sent is the distance its place moved, see `Sender.statistics`).

A member for which the kernel takes less leaves the cohort with its cursor where it stands, and is served alone, from
its own cursor, in turn with others like it, whenever its socket is writable and with each round. Once it has taken
everything and nothing is refused for it, it enters the cohort again. New viewers start alone, with the GOP cache. Where
a viewer stands is one field, `Sender.stands` (see `core.sending.contract`); those that are QUEUED are in one queue.

None of this keeps the thread for long. Rounds, viewers served alone, and looks at limits are done in *turns* of a few
milliseconds, between which the loop sees to everything else: input, other streams, and viewers that have been waiting.

A round begins at most every flush interval, and at once after a pause: the first message after a quiet interval does
not wait. The interval follows what rounds cost, up to a ceiling (see `flowctl.core.fanout.pacing`). What has not been
offered to the kernel yet does not count against a viewer's limits, so members have none to cross. Viewers that lag are
looked at when the log has grown to where their next limit can be crossed, and after each key frame: one that is far
from any limit costs nothing there either.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from operator import sub
from typing import Any, Final, Protocol

import structlog

from flowctl.core.fanout.calendar import Crossings, TurnCalendar
from flowctl.core.fanout.cohort import FILE_VIEWERS, SQUAD_SIZE, Cohort, Piece, ShortWrites, Squad, gather
from flowctl.core.fanout.pacing import DEFAULT_FLUSH_INTERVAL_S, MOST_FLUSH_INTERVAL_S, Pacing, RoundMeter, RoundSpan
from flowctl.core.flow.counts import Tally
from flowctl.core.flow.sharedstall import SURE_S, SharedStall
from flowctl.core.flow.timing import LEAST_TARGET_S, MOST_TARGET_S
from flowctl.core.loop.faults import as_exception
from flowctl.core.outgoing.streamlog import Entry, Place, StreamLog
from flowctl.core.outgoing.thinning import newest_key_alike
from flowctl.core.sending.contract import Standing
from flowctl.errors import ClosedError, ConfigError
from flowctl.sender import Sender

DEFAULT_TURN_S: Final = 0.004
"""Time that a fan-out keeps its thread in one turn. A tenth of the flush interval: a round of a thousand viewers takes
three turns, and what comes in between sees it a few milliseconds later, not a round."""

_QUEUED: Final = Standing.QUEUED
_SERVED: Final = Standing.SERVED
_PACED: Final = Standing.PACED
_REFUSED: Final = Standing.REFUSED

_MOST_LOOKS: Final = 32
"""Viewers whose limits are looked at on the spot when a message comes, at 20 us each; the others in turns."""
_GIVEN_UP_S: Final = 2 * MOST_TARGET_S
"""Time behind from which viewers of a thread without room are served alone, and judged: no key frame came, or they want
what is late."""
_NO_ROOM_S: Final = 1.0
"""Time for which rounds must have been too long: after one pause of the thread, it catches up with all there is."""
_SAY_S: Final = 60.0
"""Least time between two lines about viewers that went on at a key frame."""
_log: Final = structlog.get_logger("flowctl.live")
_KEY_LOOKS_S: Final = 0.25
"""Least time between looks at all viewers that are refused, for a key frame: a stream may have one in each picture."""
_KEY_TURNS_S: Final = 0.08
"""Least time between turns that viewers have for a key frame, for the same reason."""


class FanoutHost(Protocol):
    """What a fan-out needs of its poll group."""

    bytes_out: int

    @property
    def stall(self) -> SharedStall:
        """What is told of viewers that stop, and go on."""

    def now(self) -> float:
        """Return the time in seconds."""

    def in_thread(self) -> bool:
        """Return whether the caller is on the group's thread."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Call on the group's thread. Any thread."""

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> Any:
        """Call on the group's thread after a while. The group's thread."""

    def processor_share(self) -> float:
        """Return the processor time of the thread over the time its handlers took, 0 to 1, of late."""

    def gather_pause_s(self) -> float:
        """Return for how long the input of publishers has waited already, in seconds, where the thread is busy."""

    def busy_fraction(self) -> float:
        """Return the share of time, 0 to 1, that the thread was busy in the last seconds."""

    def strained(self) -> bool:
        """Return whether the thread had no room a moment ago."""


@dataclass(frozen=True, slots=True)
class FanoutStatistics:
    """A snapshot of one fan-out.

    Args:
        members: viewers in the cohort.
        alone: viewers served from their own cursor.
        rounds: rounds so far.
        left: times a member left the cohort.
        longest_round_s: longest round so far, from its beginning to the last write to a member.
        cohort_bytes: bytes written to members.
        turns: turns so far: each round has one or more.
        longest_turn_s: longest turn so far, that is how long the fan-out has kept its thread from everything else.
        interval_s: the flush interval now.
        rounds_by_duration: rounds that took up to 1, 2, 5, 10, 20, 50, 100 ms, and longer (`ROUND_BOUNDS_MS`).
        squads: parts of the cohort.
    """

    members: int
    alone: int
    rounds: int
    left: int
    longest_round_s: float
    cohort_bytes: int
    turns: int = 0
    longest_turn_s: float = 0.0
    interval_s: float = 0.0
    rounds_by_duration: tuple[int, ...] = ()
    squads: int = 0


class Fanout:
    """The viewers of one log on one poll group. All methods but `appended` belong to the group's thread.

    Args:
        log: what is fanned out.
        host: the poll group.
        flush_interval_s: longest time between two rounds while there is something to send; 0 writes each message at
            once.
        adaptive: whether rounds may follow each other sooner while they cost little. If not, they are
            `flush_interval_s` apart at least.
        turn_s: how long the thread is kept at a time, in seconds; a turn is at least one squad or one viewer.
        squad_size: members that are written to without looking at the clock.
        least_s: returns the least time between two rounds at present, in seconds. None: only what they cost counts.
        gather_s: least time from the first message of a round to its flush, in seconds: what is published together by
            another thread is written together, and not its first message by itself.

    Raises:
        ConfigError: the interval is not between 0 and 10 s.
    """

    def __init__(
        self,
        log: StreamLog,
        host: FanoutHost,
        *,
        flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S,
        adaptive: bool = True,
        turn_s: float = DEFAULT_TURN_S,
        squad_size: int = SQUAD_SIZE,
        least_s: Callable[[], float] | None = None,
        gather_s: float = 0.0,
    ) -> None:
        if not 0 <= flush_interval_s <= MOST_FLUSH_INTERVAL_S:
            raise ConfigError(
                f"flush_interval_s is {flush_interval_s}, it must be between 0 and {MOST_FLUSH_INTERVAL_S:g} s"
            )
        self.log = log
        self.pacing: Final = Pacing(flush_interval_s, adaptive=adaptive)
        self._span: Final = RoundSpan()
        self._turn_s = turn_s
        self._least_s = least_s
        self._gather_s = gather_s
        self._host = host
        self._cohort = Cohort(squad_size)
        self._alone: dict[Sender, None] = {}  # everybody else, in the order in which they came
        self._queue: OrderedDict[Sender, None] = OrderedDict()  # those of them that are QUEUED, next one first
        self._served: dict[Sender, None] = {}  # those whose next turn comes with the next round; some may have had it
        self._calendar: TurnCalendar[Sender] = TurnCalendar()  # those that are PACED
        self._timed_at = inf  # when it is looked at next
        self._key_waiters: dict[Sender, None] = {}  # PACED ones that have taken all up to the next key frame
        self._guided: set[Sender] = set()  # members that have a guide: each leaves the cohort at its next crossroads
        self._looks: OrderedDict[Sender, None] = OrderedDict()  # REFUSED ones to be looked at; some may be so no more
        self._armed = False  # a round is on its way or in progress
        self._going = False  # a turn is on its way or in progress
        self._looking = False  # a look at the crossings is on its way
        self._last_flush = host.now() - flush_interval_s
        self._fill_bytes = log.fill_bytes  # what kernels were told to take ahead of viewers that keep up
        self._due_at = 0.0  # of batches, when the next round would be due if none of them came early
        self._target: Entry | None = None  # where the round in progress leads. None: there is none
        self._cut = False  # whether some squads were not brought there, so that the next one is due
        self._wrote_bytes = 0  # most that it wrote to a viewer
        self._skipped = 0  # times that a viewer went on at a key frame with the cohort since it was said
        self._said_at = -inf  # when that was
        self._behind: deque[Squad] = deque()  # squads that it has not come to yet
        self._piece: Piece | None = None  # what it writes; kept for those who stand at the same place
        self._took_s = 0.0  # time spent in turns since the last round ended, but for the turn in progress
        self._turn_from = 0.0  # when the turn in progress began, or the round that ended in it
        self._crossings: Crossings[Sender] = Crossings()  # the lagging viewers, by where to look at them next
        # Number of the key frame that was newest at the last look. The group itself would hold all that came after it.
        self._key_sequence = log.gop.key_sequence
        self._key_looked_at = -inf  # when all that are REFUSED were last looked at for one
        self._key_waits_ended_at = -inf  # when key waiters last had a turn for one
        self._closed = False
        self._left = self._cohort_bytes = 0
        self._meter = RoundMeter()
        host.stall.crowds[self] = None
        log.listen(self)

    # -- viewers come and go

    def add(self, sender: Sender) -> None:
        """Serve `sender`, which is QUEUED, from its own cursor until it has caught up."""
        self._serve_from_cursor(sender)

    def _serve_from_cursor(self, sender: Sender) -> None:
        self._alone[sender] = None
        self._queue[sender] = None
        self._request_turn()

    def serve_alone(self, sender: Sender) -> None:
        """Serve a member, which is QUEUED by now, from its own cursor."""
        self._cohort.forget(sender)
        self._guided.discard(sender)
        self._left += 1
        self._serve_from_cursor(sender)

    def serve_in_turn(self, sender: Sender) -> None:
        """Serve `sender` in its turn: the kernel takes more again, or it has more to write."""
        if sender in self._alone and sender.stands is not _QUEUED:
            if sender.stands is _REFUSED:
                self._host.stall.went_on(sender, self._host.now())
            self._calendar.remove(sender)
            self._key_waiters.pop(sender, None)
            self._enqueue(sender)
            self._request_turn()

    def remove(self, sender: Sender) -> None:
        """Serve `sender`, which has left the cohort, no longer; harmless when it is not served."""
        if sender in self._alone:
            del self._alone[sender]
            self._host.stall.went_on(sender, self._host.now(), gone=True)
        self._queue.pop(sender, None)
        self._served.pop(sender, None)
        self._calendar.remove(sender)
        self._key_waiters.pop(sender, None)
        self._crossings.forget(sender)

    def limits_changed(self, sender: Sender) -> None:
        """Note that the limits of `sender` are new, or that more counts against them."""
        if sender in self._alone:
            self._crossings.watch(sender, 0, 0)  # with the next message

    def guide_changed(self, sender: Sender) -> None:
        """Have a member with a guide leave the cohort at its next crossroads; one without stays."""
        if sender.guided:
            self._guided.add(sender)
        else:
            self._guided.discard(sender)

    def brings_on(self, start: Entry) -> bool:
        """Return whether a viewer joins at `start`, not at the tail: on a thread without room rounds cost less."""
        host = self._host
        return host.strained() and self.log.has_video and host.now() - start.enqueued_at < _GIVEN_UP_S

    def close(self) -> None:
        """Listen to the log no longer; the viewers must have been removed."""
        self._closed = True
        self._behind.clear()
        self._queue.clear()
        self._served.clear()
        self._looks.clear()
        self._calendar.clear()
        self._key_waiters.clear()
        self._drop_piece()
        self._target = None
        self._host.stall.crowds.pop(self, None)
        self.log.unlisten(self)

    @property
    def empty(self) -> bool:
        """Whether it serves no viewer."""
        return not self._cohort.count and not self._alone

    def served(self, now: float) -> int:
        """Return how many viewers it serves; 0 where nothing was published lately, which none of them could take."""
        return self._cohort.count + len(self._alone) if now - self._last_flush <= SURE_S + self.pacing.interval_s else 0

    def lagging(self) -> list[Sender]:
        """Return the viewers that are served from their own cursor, joining ones included. Any thread."""
        return list(self._alone)  # one step for the interpreter: no viewer comes or goes in between

    def keeping_up(self) -> list[Sender]:
        """Return the viewers of the cohort. Any thread; one that comes or goes meanwhile may be in it or not."""
        return [sender for squad in self._cohort.squads() for sender in list(squad.members)]

    @property
    def host(self) -> FanoutHost:
        """The poll group whose thread it is on."""
        return self._host

    @property
    def squads(self) -> list[Squad]:
        """The squads of the cohort. Any thread, to look at; they move on with each round."""
        return self._cohort.squads()

    def _enqueue(self, sender: Sender) -> None:
        sender.change_standing(_QUEUED)
        self._queue[sender] = None

    def _admit(self, sender: Sender, entry: Entry) -> None:
        self._alone.pop(sender, None)
        self._crossings.forget(sender)
        sender.enter_cohort(self._cohort.admit(sender, entry))
        if entry is not self.log.tail:
            self._cut = True  # a round in progress does not come to it
            self._arm()
        if sender.guided:
            self._guided.add(sender)

    # -- flushing

    def appended(self, log: StreamLog) -> None:
        """The log has grown: see that a flush comes, and look at limits. The publisher's thread."""
        if self._closed or (self._armed and not self._alone):
            return  # a flush is on its way, and members of the cohort have no limits to cross
        try:
            self._note_growth(log)
        except ClosedError:
            # The group is gone: the publisher and its other listeners go on. It stays on the log's list, for this is
            # not the thread to change that list; the code that releases the fan-out does it.
            self._closed = True

    def _note_growth(self, log: StreamLog) -> None:
        if not self._armed:
            self._armed = True
            if self._host.in_thread():
                self._schedule()
            else:
                self._host.call_soon(self._schedule)
        tail, crossings = log.tail, self._crossings
        offset, sequence = (tail.offset, tail.sequence) if log.latest is None else log.reach
        if (
            sequence >= crossings.next_sequence
            or offset >= crossings.next_offset
            or (log.gop.key_sequence != self._key_sequence and (self._key_waiters or len(crossings)))
        ):
            if self._host.in_thread():
                self._look_at_crossings()
            elif not self._looking:
                self._looking = True
                self._host.call_soon(self._look_at_crossings)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._schedule()

    def _schedule(self) -> None:
        host, delay_s = self._host, self.pacing.interval_s
        if self._least_s is not None:
            delay_s = max(delay_s, self._least_s())
        if delay_s:
            # What input was gathered for counts: both pauses together must not pass the ceiling.
            delay_s += self._paced_from(delay_s) - host.gather_pause_s() - host.now()
        delay_s = max(delay_s, self._gather_s)
        if delay_s <= 0:
            self._host.call_soon(self.flush)
        else:
            self._host.call_later(delay_s, self.flush)

    def _paced_from(self, interval_s: float) -> float:
        """Return from when on the interval counts.

        That is the last flush. Of batches it is up to an interval before, as long as there are no more rounds than
        intervals: what was gathered elsewhere for an interval need not wait for most of another, batch by batch,
        because the first one came at a bad moment.
        """
        return self._due_at - 2 * interval_s if self.log.batched else self._last_flush

    def flush(self) -> None:
        """Begin a round: write what was published before this call to all viewers that can take something."""
        if self._closed or self._target is not None:
            return  # the round in progress looks at the log when it is done
        self._armed = True
        self._last_flush = now = self._host.now()
        if self.log.batched:
            self._due_at = max(self._due_at, now) + self.pacing.interval_s
        if self.log.fill_bytes != self._fill_bytes:
            self._fill_anew()
        tail = self.log.tail
        squad = self._cohort.only()
        self._wrote_bytes = 0
        few = self._cohort.count < FILE_VIEWERS and self._span.size_bytes == inf
        if squad is not None and few and not (self._alone or self._going):
            self._short_round(squad, tail, now)
            return
        self._target = tail
        self._behind.extend(squad for squad in self._cohort.squads() if squad.entry is not tail)
        served, self._served = self._served, {}
        for sender in served:
            if sender.stands is _SERVED:
                self._enqueue(sender)
        if not self._going:  # otherwise a turn is on its way
            self._run_turn()

    def _fill_anew(self) -> None:
        """Set anew what kernels take ahead: the rate of the log has become known, or has changed by far."""
        self._fill_bytes = self.log.fill_bytes
        for sender in (*self.keeping_up(), *self._alone):
            sender.fill_as_log()

    def _short_round(self, squad: Squad, tail: Entry, began: float) -> None:
        """Do a round of few viewers, all in one squad, in one go: no lists, no turns."""
        try:
            if self._guided:
                self._stop_at_crossroads(squad, tail)
            if squad.entry is not tail:
                data = gather(squad.entry, tail)
                self._settle_write(squad, tail, len(data), squad.write_bytes(data))
                self._wrote_bytes = len(data)
        finally:
            now = self._host.now()
            self._span.round_ended(self._wrote_bytes, now - began, self.log.rates.bytes_per_s, now)
            self._meter.count_short_round(now - began)
            took_s, self._took_s = self._took_s + now - began, 0.0
            self._round_over(tail, took_s, now)

    def _end_round(self, now: float) -> None:
        """End a round that all squads have finished; see whether the next one is due."""
        tail, self._target = self._target, None
        self._span.round_ended(self._wrote_bytes, now - self._last_flush, self.log.rates.bytes_per_s, now)
        if self._skipped and now - self._said_at >= _SAY_S:
            self._say_skipped(now)
        self._drop_piece()
        self._cohort.tidy()
        self._meter.count_round(now - self._last_flush)
        took_s, self._took_s = self._took_s + now - self._turn_from, 0.0
        self._turn_from = now  # what is left of this turn counts for the next round
        self._round_over(tail, took_s, now)

    def _say_skipped(self, now: float) -> None:
        _log.warning(
            "viewers go on at key frames: their thread has no room for all of the stream",
            viewers=self._cohort.count,
            times=self._skipped,
            hint="fewer viewers, or more threads: serve --workers",
        )
        self._skipped, self._said_at = 0, now

    def _round_over(self, tail: Entry | None, took_s: float, now: float) -> None:
        """Settle the interval after a round to `tail` whose turns took `took_s` seconds; begin the next if due."""
        host = self._host
        # What others take of the core meanwhile is in the length of a turn, and no cost of ours.
        self.pacing.round_ended(took_s * host.processor_share(), host.busy_fraction(), now)
        # Cleared before the tail is read: an append that comes later finds it cleared and arms the next round.
        self._armed, cut, self._cut = False, self._cut, False
        if cut:
            self._armed = True
            host.call_soon(self.flush)  # there is more already
        elif self.log.tail is not tail:
            self._arm()

    # -- turns

    def _request_turn(self) -> None:
        if not self._going:
            self._going = True
            self._host.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        """Work for a few milliseconds: write to squads, serve viewers from their own cursor, look at limits."""
        if self._closed:
            return
        host = self._host
        self._going = True  # no other turn needs to be asked for during this one
        began = self._turn_from = host.now()
        try:
            # Half a turn where others wait too: rounds that follow each other without a pause must not starve them.
            crowded = self._queue or self._looks
            self._write_squads(began + (self._turn_s / 2 if crowded else self._turn_s))
            now = host.now()
            self._serve_queue(max(began + self._turn_s, 2 * now - began))  # as long as the squads had, at least
        finally:
            ended = host.now()
            self._took_s += ended - self._turn_from
            self._meter.count_turn(ended - began)
            self._going = False
            if self._target is not None or self._queue or self._looks:  # `close` leaves nothing of these
                self._request_turn()

    def _write_squads(self, until: float) -> None:
        """Bring squads to where the round leads, one at least."""
        target, behind, host = self._target, self._behind, self._host
        if target is None:
            return
        now = host.now()
        while behind:
            squad = behind.popleft()
            if squad.members:
                self._write_squad(squad, target)
                now = host.now()
                if now >= until and behind:
                    return
        self._end_round(now)

    def _stop_at_crossroads(self, squad: Squad, target: Entry) -> None:
        """Serve members with a guide from their own cursor, if a key frame comes up to `target`: there it is asked."""
        entry = squad.entry
        key = entry if entry.gop.key_sequence == entry.sequence else entry.gop.next_key
        if key is not None and key.sequence < target.sequence:
            for sender in self._guided.intersection(squad.members):
                sender.leave_cohort(0)
                self.serve_alone(sender)

    def _write_squad(self, squad: Squad, target: Entry) -> None:
        if self._guided:
            self._stop_at_crossroads(squad, target)
        bounded = self._span.size_bytes < inf and self.log.has_video
        if bounded:
            self._skip_to_key(squad, target)
        piece = self._piece
        if piece is None or piece.start is not squad.entry:
            self._drop_piece()
            end = self._end_of(squad.entry, target) if bounded else target
            piece = self._piece = Piece(squad.entry, end)
        slow = squad.write(piece, as_file=self._cohort.count >= FILE_VIEWERS)
        self._wrote_bytes = max(self._wrote_bytes, len(piece.data))
        self._cut = self._cut or piece.end is not target
        self._settle_write(squad, piece.end, len(piece.data), slow)

    def _end_of(self, start: Entry, target: Entry) -> Entry:
        """Return where a round leads that is to be short, for squads at `start`."""
        until = start.offset + self._span.size_bytes
        end = target if target.offset <= until else start.next or target
        while end.next is not None and end.offset < until:
            end = end.next
        return end

    def _skip_to_key(self, squad: Squad, target: Entry) -> None:
        """Have a squad that is late for want of room on the thread go on at a key frame, if there is one.

        In one step for all members; who wants what is late all the same stays where it is, for a while.
        """
        now, start = self._host.now(), squad.entry
        late_s = now - start.enqueued_at - self.pacing.interval_s
        if late_s < LEAST_TARGET_S or now - self._span.since < _NO_ROOM_S:
            return
        if (key := newest_key_alike(start, target)) is not None:
            skipped = Tally(map(sub, (*key.counts, *key.sizes), (*start.counts, *start.sizes)))
            place = Place(key)  # each is moved together with its account, which other threads may ask for
            gone = [sender for sender in squad.members if sender.skip_in_cohort(place, skipped, now, late_s)]
            self._skipped += len(gone)
            if len(gone) == len(squad.members):
                squad.entry = key
                for sender in gone:
                    sender.move_in_cohort(squad)
                return
            for sender in gone:
                self._cohort.forget(sender)
                sender.move_in_cohort(self._cohort.admit(sender, key))
                self._cut = True  # they come with the next round
        if late_s > _GIVEN_UP_S:
            for sender in list(squad.members):
                sender.leave_cohort(0)
                self.serve_alone(sender)

    def _settle_write(self, squad: Squad, target: Entry, size_bytes: int, slow: ShortWrites) -> None:
        """Count what was written to a squad, bring it to `target`, and deal with the members that took less."""
        written = size_bytes * (len(squad.members) - len(slow))
        if slow:
            written += sum([count for _, count, _ in slow])
        self._cohort_bytes += written
        self._host.bytes_out += written
        for sender, count, _ in slow:
            sender.leave_cohort(count)
            self.serve_alone(sender)
        squad.entry = target
        # Code of the application, which may act on other viewers: it runs when all counts are up to date.
        for sender, _, failure in slow:
            if failure is not None:
                sender.broken(failure)

    def _drop_piece(self) -> None:
        piece, self._piece = self._piece, None
        if piece is not None:
            piece.close()

    def _serve_queue(self, until: float) -> None:
        """Give viewers their turns, one at least, and look at the limits of some."""
        queue, looks, now = self._queue, self._looks, self._host.now
        while queue:
            sender, _ = queue.popitem(last=False)
            self._serve_viewer(sender)
            if now() >= until:
                break
        while looks:
            if self._watch_limits(looks.popitem(last=False)[0]) and now() >= until:
                break

    def _serve_viewer(self, sender: Sender) -> None:
        sender.change_standing(_SERVED)
        try:
            next_at = sender.take_turn()
        except BaseException as error:  # noqa: BLE001 - a fault in one viewer must not cost the others their stream
            self.remove(sender)
            sender.broken(as_exception(error))
            return
        # Not where it went on in another log meanwhile: it is queued by the fan-out of that then.
        if sender in self._queue and self._host.strained() and (entry := sender.joins_cohort_at(self.log.tail)):
            self._queue.pop(sender)
            sender.change_standing(_SERVED)
            self._admit(sender, entry)
            return
        if sender.stands is not _SERVED:
            return  # it asked for another turn; or it has ended, or its handler has ended the following
        if not sender.blocked and (entry := sender.joins_cohort_at(self.log.tail)):
            self._admit(sender, entry)
        elif next_at == inf:
            sender.change_standing(_REFUSED)
            self._note_stop(sender)
            if sender not in self._crossings:
                self._crossings.watch(sender, *sender.next_crossing())
        elif next_at:
            sender.change_standing(_PACED)
            self._calendar.put(sender, next_at)
            if not sender.blocked:
                self._key_waiters[sender] = None
            self._time_turns()
        else:
            self._served[sender] = None

    def _note_stop(self, sender: Sender) -> None:
        host = self._host
        now = host.now()
        if (sure_at := host.stall.stopped(sender, now)) is not None:
            host.call_later(sure_at - now, lambda: host.stall.confirm(sure_at, host.now()))

    def _time_turns(self) -> None:
        """See that the calendar is looked at when its next slot is due."""
        if (next_at := self._calendar.next_at) < self._timed_at:
            self._timed_at = next_at
            self._host.call_later(max(next_at - self._host.now(), 0.0), self._begin_turns, next_at)

    def _begin_turns(self, timed_at: float) -> None:
        if self._closed or timed_at != self._timed_at:
            return  # an earlier time was asked for since
        self._timed_at = inf
        for sender in self._calendar.take_due(self._host.now()):
            self._key_waiters.pop(sender, None)
            self._enqueue(sender)
        if self._queue:
            self._request_turn()
        self._time_turns()

    def _end_key_waits(self) -> None:
        """Give a turn to viewers that have taken all up to the key frame that has come."""
        waiters, self._key_waiters = self._key_waiters, {}
        for sender in waiters:
            self.serve_in_turn(sender)

    # -- limits

    def _watch_limits(self, sender: Sender) -> bool:
        """Look at a viewer, and again when the log has grown to where its next limit can be crossed."""
        if sender.stands is not _REFUSED or sender not in self._alone:
            return False
        try:
            offset, sequence = sender.log_grew()
        except BaseException as error:  # noqa: BLE001 - as for a flush
            self.remove(sender)
            sender.broken(as_exception(error))
        else:
            if sender in self._alone:  # looking at it may have ended it
                self._crossings.watch(sender, offset, sequence)
        return True

    def _look_at_crossings(self) -> None:
        """Have the viewers whose next limit may be reached looked at; after a key frame, all that lag.

        Not after each one of a stream that has many: what waits for one has turns or ticks of its own as well.
        """
        if self._closed:
            return
        log, self._looking = self.log, False
        due = self._crossings.due(*log.reach)
        if log.gop.key_sequence != self._key_sequence:
            self._key_sequence = log.gop.key_sequence
            now = self._host.now()
            if now - self._key_waits_ended_at >= _KEY_TURNS_S:
                self._key_waits_ended_at = now
                self._end_key_waits()
            if now - self._key_looked_at >= _KEY_LOOKS_S:
                self._key_looked_at = now
                due = [sender for sender in self._alone if sender.stands is _REFUSED]
        for sender in due[:_MOST_LOOKS]:
            self._watch_limits(sender)
        if len(due) > _MOST_LOOKS:
            self._looks.update(dict.fromkeys(due[_MOST_LOOKS:]))
            self._request_turn()

    def statistics(self) -> FanoutStatistics:
        meter = self._meter
        return FanoutStatistics(
            members=self._cohort.count,
            alone=len(self._alone),
            rounds=meter.rounds,
            left=self._left,
            longest_round_s=meter.longest_round_s,
            cohort_bytes=self._cohort_bytes,
            turns=meter.turns,
            longest_turn_s=meter.longest_turn_s,
            interval_s=self.pacing.interval_s,
            rounds_by_duration=tuple(meter.by_duration),
            squads=len(self._cohort.squads()),
        )
