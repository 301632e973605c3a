"""A shadow policy: what other limits, or another drop policy, would have done for a viewer; it acts on nothing (pure).

What a shadow cannot know is what the real queue would have been under it: had it dropped more, the link would have had
less to carry. So it keeps a queue of its own, a virtual one, which is offered what the stream published, refuses what
the candidate refuses, and is drained by what the kernel really took. Three things remain estimates, and are counted
or stated:

- While the real queue was empty, the kernel could have taken more than it was given. The rate that was last measured
  while it had enough to do is assumed then (`ShadowReport.assumed_s` says for how long).
- What the kernel took is taken off the virtual queue whatever it was; the candidate would have sent other messages,
  but over the same link at the same rate.
- Time passes in samples, a fraction of a second each. What was published within one counts as published at its
  end, so a change of state is late by a sample at most, and key frames are known by the sample.

Only viewers that lag have a shadow. It begins with a copy of the real queue, and ends when both queues have drained, or
the viewer has gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from flowctl.core.flow.counts import NO_COUNTS, Counts
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.meters import STALL_S
from flowctl.core.flow.policy import BROKEN_MASK, DROPPABLE_MASK, DropPolicy, Thin, patience_of, refused_mask
from flowctl.core.flow.state import CLASS_COUNT, FlowCore, Load, MessageClass, SendState, StateChange
from flowctl.core.flow.timing import Timing, crowded, most_wait_s, target_s
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason

_RATE_S: Final = 2.0
"""Time constant of the measured rate."""
_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER
_DISPOSABLE: Final = MessageClass.DISPOSABLE
_AUDIO: Final = MessageClass.AUDIO


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What a shadow judges by.

    Args:
        limits: soft and hard limits.
        policy: what to drop.
        name: for statistics and logs.
        stuck_s: it would close a peer whose kernel took nothing for so long. 0: it would not.
        soft_too_long_s: it would close after so long at or above SOFT_LIMIT. 0: it would not.
        marks_only: whether of all this only the marks of `limits` count. Target delay, hard policy and overhead, the
            policy and the times are those in force for each viewer.
    """

    limits: Limits
    policy: DropPolicy
    name: str = "candidate"
    stuck_s: float = 15.0
    soft_too_long_s: float = 60.0
    marks_only: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("stuck_s", "soft_too_long_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} of the shadow is {getattr(self, name)}, it must be 0 (off) or more seconds")

    def limits_beside(self, real: Limits) -> Limits:
        """Return what a viewer is judged by whose limits are `real`."""
        if not self.marks_only:
            return self.limits
        return replace(
            self.limits,
            target_delay_ms=real.target_delay_ms,
            hard_policy=real.hard_policy,
            overhead_bytes=real.overhead_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowReport:
    """What the candidate and the real policy did, compared; two add up with ``+``.

    Args:
        viewers: times a viewer was shadowed.
        compared_s: for how long.
        agreed_s: of that, with both in the same state.
        assumed_s: of that, with the link's rate assumed and not measured.
        changes: changes of state of the candidate.
        live_changes: of the real policy, in the same time.
        dropped: what the candidate would have dropped, by class.
        live_dropped: what was dropped, by class.
        would_have_closed: viewers that the candidate would have closed and that were not, or not yet.
        would_have_kept: viewers that were closed for being slow and that the candidate would have kept.
        closed_by_both: viewers that both closed.
        earlier_s: by how much the candidate would have closed those earlier, summed up; less than 0: later.
        close_reasons: why the candidate would have closed, by reason.
    """

    viewers: int = 0
    compared_s: float = 0.0
    agreed_s: float = 0.0
    assumed_s: float = 0.0
    changes: int = 0
    live_changes: int = 0
    dropped: Counts = NO_COUNTS
    live_dropped: Counts = NO_COUNTS
    would_have_closed: int = 0
    would_have_kept: int = 0
    closed_by_both: int = 0
    earlier_s: float = 0.0
    close_reasons: dict[CloseReason, int] = field(default_factory=dict)

    @property
    def agreement(self) -> float:
        """Share of the time in which both were in the same state, 0..1; 1 where nothing was compared."""
        return self.agreed_s / self.compared_s if self.compared_s else 1.0

    def __add__(self, other: ShadowReport) -> ShadowReport:
        reasons = dict(self.close_reasons)
        for reason, count in other.close_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return ShadowReport(
            viewers=self.viewers + other.viewers,
            compared_s=self.compared_s + other.compared_s,
            agreed_s=self.agreed_s + other.agreed_s,
            assumed_s=self.assumed_s + other.assumed_s,
            changes=self.changes + other.changes,
            live_changes=self.live_changes + other.live_changes,
            dropped=self.dropped + other.dropped,
            live_dropped=self.live_dropped + other.live_dropped,
            would_have_closed=self.would_have_closed + other.would_have_closed,
            would_have_kept=self.would_have_kept + other.would_have_kept,
            closed_by_both=self.closed_by_both + other.closed_by_both,
            earlier_s=self.earlier_s + other.earlier_s,
            close_reasons=reasons,
        )


@dataclass(slots=True)
class _Chunk:
    """What the candidate took in during one sample, less what has drained since."""

    at: float
    messages: list[float]
    sizes: list[float]

    @property
    def size_bytes(self) -> float:
        return sum(self.sizes)


class Shadow:
    """One viewer as a candidate would have treated it.

    Attributes:
        candidate: as given; of its limits, those that are in force are `limits`.
    """

    __slots__ = (
        "_agreed_s",
        "_assumed_s",
        "_began",
        "_broken",
        "_close",
        "_core",
        "_dropped",
        "_dropped_sizes",
        "_judges",
        "_last",
        "_limits",
        "_live_base",
        "_mask",
        "_offered",
        "_patience",
        "_progress_at",
        "_queue",
        "_rate",
        "_taken",
        "candidate",
    )

    def __init__(
        self,
        candidate: Candidate,
        now: float,
        *,
        queued: Counts,
        age_s: float,
        offered: tuple[Sequence[int], Sequence[int]],
        taken_bytes: int,
        live_changes: int,
        live_dropped: Counts,
    ) -> None:
        self.candidate = candidate
        self._limits = candidate.limits
        self._core = FlowCore(candidate.limits, now)
        self._patience = patience_of(candidate.policy)
        self._mask = refused_mask(candidate.policy, SendState.READY)
        self._judges = False  # what is late is left out
        self._broken = False  # frames were lost: none that needs others gets in before the next key frame
        self._queue: deque[_Chunk] = deque()
        if queued.total_messages:
            self._queue.append(_Chunk(now - age_s, [*map(float, queued.messages)], [*map(float, queued.sizes_bytes)]))
        self._offered = (tuple(offered[0]), tuple(offered[1]))
        self._taken = taken_bytes
        self._rate = 0.0
        self._began = self._last = self._progress_at = now
        self._agreed_s = self._assumed_s = 0.0
        self._dropped = [0.0] * CLASS_COUNT
        self._dropped_sizes = [0.0] * CLASS_COUNT
        self._live_base = (live_changes, live_dropped)
        self._close: tuple[float, CloseReason] | None = None

    @property
    def state(self) -> SendState:
        """The state in which the viewer would be."""
        return self._core.state

    @property
    def limits(self) -> Limits:
        """The limits by which it judges."""
        return self._limits

    @property
    def closed(self) -> tuple[float, CloseReason] | None:
        """When and why the candidate would have closed the viewer. None: it would not."""
        return self._close

    @property
    def drained(self) -> bool:
        """Whether nothing would be queued, and nothing is refused any more: there is nothing left to compare."""
        return not (self._queue or self._broken or self._mask & BROKEN_MASK) and self._core.state is SendState.READY

    def set_limits(self, limits: Limits, now: float) -> None:
        if limits != self._limits and self._close is None:
            self._limits = limits
            self._settle(self._core.limits_set(limits, self._load(now), now), now)

    def sample(
        self,
        now: float,
        *,
        offered: tuple[Sequence[int], Sequence[int]],
        taken_bytes: int,
        busy: bool,
        live: SendState,
        gop_s: float = 0.0,
        per_second: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Take what has happened since the last sample."""
        passed_s = max(now - self._last, 0.0)
        if self._close is not None:
            self._agreed_s += passed_s if live is SendState.HARD_LIMIT else 0.0
            self._last = now
            return
        room = self._room(taken_bytes - self._taken, passed_s, now, busy=busy)
        self._agreed_s += passed_s if live is self._core.state else 0.0
        self._last, self._taken = now, taken_bytes
        self._offer(offered, now)
        limits = self._limits
        target = target_s(limits.target_delay_ms, gop_s)
        self._judges = target > 0 and self._patience[_INTER] < math.inf
        self._uncrowd(now)
        self._settle(self._core.queued(self._load(now), now), now)
        if self._rate and self._judges_pictures(self._mask):
            self._leave_out(Timing(now, self._rate, 0, target, self._patience, most_wait_s(limits, *per_second)))
        took = self._drain(room)
        # What thinning has emptied is not drained: the kernel still holds what it was given, and refuses.
        drained = not self._queue and (room > 0 or not busy or not self._core.would_block)
        if took or drained:
            self._progress_at = now
        if drained:
            self._settle(self._core.drained(now), now)
        elif not self._core.would_block:
            self._settle(self._core.blocked(self._load(now), now), now)
        else:
            self._settle(self._core.sent(self._load(now), now), now)
        self._check_times(now)

    def _room(self, taken: int, passed_s: float, now: float, *, busy: bool) -> float:
        """Return what the link carries in this sample: as measured, or as assumed where it had nothing to do."""
        if busy and passed_s > 0:
            weight = 1.0 if not self._rate else 1 - math.exp(-passed_s / _RATE_S)
            self._rate += weight * (taken / passed_s - self._rate)
            return float(taken)
        if self._queue and self._rate * passed_s > taken:
            self._assumed_s += passed_s
            return self._rate * passed_s
        return float(taken)

    # -- the virtual queue

    def _load(self, now: float) -> Load:
        if not self._queue:
            return Load()
        size = sum(chunk.size_bytes for chunk in self._queue)
        messages = math.ceil(sum(sum(chunk.messages) for chunk in self._queue))
        overhead = self._limits.overhead_bytes
        return Load(round(size) + messages * overhead, messages, (now - self._queue[0].at) * 1000)

    def _offer(self, offered: tuple[Sequence[int], Sequence[int]], now: float) -> None:
        before, self._offered = self._offered, (tuple(offered[0]), tuple(offered[1]))
        chunk = _Chunk(now, [0.0] * CLASS_COUNT, [0.0] * CLASS_COUNT)
        messages = [max(new - old, 0) for new, old in zip(offered[0], before[0], strict=True)]
        if self._broken and messages[_KEY] and not self._mask >> _KEY & 1:
            self._broken = bool(self._mask >> _INTER & 1)
        mask = self._mask | (BROKEN_MASK if self._broken else 0)
        for item in range(CLASS_COUNT):
            size = max(offered[1][item] - before[1][item], 0)
            if mask >> item & 1:
                self._lose(item, messages[item], size)
            else:
                chunk.messages[item], chunk.sizes[item] = float(messages[item]), float(size)
        if messages[_INTER] and mask >> _INTER & 1:
            self._broken = True
        if sum(chunk.messages):
            self._queue.append(chunk)

    def _lose(self, item: int, messages: float, size: float) -> None:
        self._dropped[item] += messages
        self._dropped_sizes[item] += size

    def _drain(self, room: float) -> bool:
        """Take `room` bytes off the front; return whether anything was taken."""
        took = False
        while room > 0 and self._queue:
            chunk = self._queue[0]
            size = chunk.size_bytes
            if size <= room:
                self._queue.popleft()
            else:
                left = 1 - room / size
                chunk.messages = [count * left for count in chunk.messages]
                chunk.sizes = [count * left for count in chunk.sizes]
            room -= size
            took = True
        return took

    # -- the candidate's rules

    def _settle(self, change: StateChange | None, now: float) -> None:
        """Apply the candidate's policy to an edge, and go on until none follows."""
        core, policy = self._core, self.candidate.policy
        following = change
        while following is not None:
            edge, following = following, None
            if core.final:
                self._close = (now, CloseReason.HARD_LIMIT)
                return
            refused = refused_mask(policy, edge.new)
            stalled = now - self._progress_at >= STALL_S
            judged = edge.new < SendState.HARD_LIMIT and not stalled and self._judges_pictures(refused)
            mode = policy.thin(edge.new) if edge.new > edge.old and not judged else Thin.NOTHING
            if mode is not Thin.NOTHING:
                self._thin(mode, now)
                following = core.dropped(self._load(now), now)
        self._mask = refused_mask(policy, core.state)
        if core.state < SendState.HARD_LIMIT and self._judges_pictures(self._mask):
            self._mask &= ~BROKEN_MASK | refused_mask(policy, SendState.READY)

    def _judges_pictures(self, refused: int) -> bool:
        """Whether what is late is left out, so that the state neither thins nor refuses pictures: as a Sender does."""
        return self._judges and self._core.would_block and not refused >> _KEY & 1

    def _uncrowd(self, now: float) -> None:
        """Thin a virtual queue that nears its hard marks though what is late is left out, as a Sender does."""
        core, policy = self._core, self.candidate.policy
        if (
            crowded(self._limits, self._load(now))
            and core.state < SendState.HARD_LIMIT
            and now - self._progress_at < STALL_S
            and self._judges_pictures(refused_mask(policy, SendState.SOFT_LIMIT))
        ):
            mode = policy.thin(SendState.SOFT_LIMIT)
            if mode is not Thin.NOTHING:
                self._thin(mode, now)
                self._settle(core.dropped(self._load(now), now), now)

    def _leave_out(self, timing: Timing) -> None:
        """Leave out what would be late of the virtual queue, by the sample, as a cursor does by the picture."""
        ahead, cutting = 0, False
        newest = max((index for index, chunk in enumerate(self._queue) if chunk.messages[_KEY] >= 1), default=-1)
        sound = timing.sound_last and any(chunk.messages[_AUDIO] for chunk in self._queue)
        for index, chunk in enumerate(self._queue):
            size = math.ceil(chunk.size_bytes)
            if chunk.messages[_KEY] >= 1:
                firm = not (timing.key_firm or index < newest or (sound and timing.late(_AUDIO, size, chunk.at, ahead)))
                cutting = not firm and timing.late(_KEY, size, chunk.at, ahead)
                if cutting:
                    self._drop_of(chunk, _KEY)
            elif chunk.messages[_INTER]:
                cutting = cutting or timing.late(_INTER, size, chunk.at, ahead)
            if cutting:
                self._drop_of(chunk, _INTER)
            if cutting or timing.late(_DISPOSABLE, size, chunk.at, ahead):
                self._drop_of(chunk, _DISPOSABLE)
            if not (timing.sound_last and chunk.messages[_INTER]):
                size = math.ceil(chunk.size_bytes)
                if timing.late(_AUDIO, size, chunk.at, ahead):
                    self._drop_of(chunk, _AUDIO)
            ahead += math.ceil(chunk.size_bytes)
        self._broken = self._broken or cutting
        self._queue = deque(chunk for chunk in self._queue if sum(chunk.messages))

    def _drop_of(self, chunk: _Chunk, item: int) -> None:
        self._lose(item, chunk.messages[item], chunk.sizes[item])
        chunk.messages[item] = chunk.sizes[item] = 0.0

    def _thin(self, mode: Thin, now: float) -> None:
        """Drop what is queued, by the sample: up to the first key frame from which on it fits, or all of it."""
        queue = self._queue
        if mode is Thin.TO_KEY_FRAME and any(chunk.messages[_KEY] >= 1 for chunk in queue):
            newest = max(index for index, chunk in enumerate(queue) if chunk.messages[_KEY] >= 1)
            for _ in range(newest):
                if queue[0].messages[_KEY] >= 1 and self._core.low_reached(self._load(now)):
                    break
                self._drop_chunk(queue.popleft())
            if self._core.low_reached(self._load(now)):
                return
        elif mode is Thin.TO_KEY_FRAME and not any(chunk.messages[_INTER] for chunk in queue):
            while queue and not self._core.low_reached(self._load(now)):  # sound alone: the oldest goes
                self._drop_chunk(queue.popleft())
            return
        kept = (1 << _KEY | 1 << _AUDIO) if mode is Thin.TO_KEY_FRAME else 0
        self._drop_queued(DROPPABLE_MASK & ~kept)

    def _drop_queued(self, mask: int) -> None:
        for chunk in self._queue:
            for item in range(CLASS_COUNT):
                if mask >> item & 1:
                    self._broken = self._broken or (item == _INTER and chunk.messages[item] > 0)
                    self._drop_of(chunk, item)
        self._queue = deque(chunk for chunk in self._queue if sum(chunk.messages))

    def _drop_chunk(self, chunk: _Chunk) -> None:
        for item in range(CLASS_COUNT):
            self._lose(item, chunk.messages[item], chunk.sizes[item])

    def _check_times(self, now: float) -> None:
        candidate, core = self.candidate, self._core
        if self._close is not None:
            return
        if core.would_block and 0 < candidate.stuck_s <= now - self._progress_at:
            self._close = (now, CloseReason.STUCK)
        elif core.slow_since is not None and 0 < candidate.soft_too_long_s <= now - core.slow_since:
            self._close = (now, CloseReason.SOFT_TOO_LONG)

    # -- the comparison

    def report(self, *, live_changes: int, live_dropped: Counts, live_closed_at: float | None = None) -> ShadowReport:
        """Return the comparison so far."""
        close = self._close
        report = ShadowReport(
            viewers=1,
            compared_s=self._last - self._began,
            agreed_s=self._agreed_s,
            assumed_s=self._assumed_s,
            changes=self._core.transitions,
            live_changes=live_changes - self._live_base[0],
            dropped=Counts(tuple(map(round, self._dropped)), tuple(map(round, self._dropped_sizes))),
            live_dropped=live_dropped - self._live_base[1],
            close_reasons={} if close is None else {close[1]: 1},
        )
        if close is not None and live_closed_at is not None:
            return replace(report, closed_by_both=1, earlier_s=live_closed_at - close[0])
        return replace(
            report, would_have_closed=int(close is not None), would_have_kept=int(live_closed_at is not None)
        )


NO_SHADOW: Final = ShadowReport()
