"""Looks at all viewers that lag, a few times a second: memory budget, shares of viewers, shadow policy, delay.

Theory of operation. One timer on the server's first poll group. A *look* asks the fan-outs who is served from its own
cursor, and each of those Senders for a `Account`; who keeps up costs nothing here. A look is done in slices of a few
milliseconds: in between the thread serves its viewers. The next one begins after it has ended. What is held goes to the
`MemoryBudget`, whose victims are relieved or closed through their Senders, which do it on their own threads. States and
pictures are counted per stream for the `Signals`. Each lagging viewer has a `Shadow`, where a candidate is set. Where
the delay is the age axis, all viewers are sampled in turn, each once in two seconds, on their own threads.

Threads: looks run on the first poll group; `statistics` may be called from any.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from flowctl.connection import Connection
from flowctl.core.flow.counts import Counts, total
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.state import SendState
from flowctl.core.loop.faults import as_exception
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.figures import SenderStatistics
from flowctl.core.sending.settings import AgeSource
from flowctl.core.text.addresses import address_key
from flowctl.live.config import LiveConfig
from flowctl.live.judging.budget import BudgetAction, BudgetStatistics, Holding, MemoryBudget, Victim, span_bytes
from flowctl.live.judging.shadow import NO_SHADOW, Candidate, Shadow, ShadowReport
from flowctl.live.judging.shares import STATE_COUNT, ViewerShares
from flowctl.live.oversight.pace import Pace
from flowctl.live.oversight.signals import Signals
from flowctl.live.stream import Stream
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import Sender

_log: Final = structlog.get_logger("flowctl.live")

LOOK_S: Final = 0.25
"""Time between two looks: at 100 Mbit/s published, a budget is passed by 3 MB at most before it is noticed."""
_LOOK_SHARE: Final = 0.02
"""Looks take no more than this share of their thread's time: with thousands that lag they come less often."""
_SLICE_S: Final = 0.003
"""Time after which a look lets its thread do something else: less than a turn of the fan-outs."""
_SWEEP_S: Final = 2.0
"""Time in which each viewer's delay is sampled once, where it is the age axis."""
_LINES: Final = 20
"""Victims that are logged one by one in one look; the rest is summed up in one more line."""
_OWN_FAULT: Final = frozenset(
    {
        CloseReason.HARD_LIMIT,
        CloseReason.STUCK,
        CloseReason.SOFT_TOO_LONG,
        CloseReason.MEMORY_BUDGET,
    }
)
"""Reasons for which a viewer was closed because it was slow."""
_GONE: Final = ""
"""Name under which the comparisons of streams are kept that are not there any more."""
_NOT_DROPS: Final = (DropReason.UNFOLLOWED, DropReason.CLOSED)


@dataclass(frozen=True, kw_only=True, slots=True)
class OversightStatistics:
    """A snapshot of what the looks have found.

    Args:
        budget: memory held for slow viewers, and who gave way.
        shares: states of the viewers, and the pictures they get, of each stream, at the last look.
        shadow: comparison with the candidate, by stream, viewers that have gone included; under "" that of streams
            that have gone.
        longest_look_s: time the longest of them took, all of its slices together.
    """

    budget: BudgetStatistics
    held_by_stream: dict[str, int] = field(default_factory=dict)
    shares: dict[str, ViewerShares] = field(default_factory=dict)
    shadow: dict[str, ShadowReport] = field(default_factory=dict)
    looks: int = 0
    longest_look_s: float = 0.0
    longest_slice_s: float = 0.0

    @property
    def shadow_total(self) -> ShadowReport:
        """The comparison over all streams."""
        return sum(self.shadow.values(), NO_SHADOW)


class _Seen(NamedTuple):
    """A viewer that lags. It names no place in the log, which it would hold until the look has ended.

    Attributes:
        delay_ms: how far behind it was at its last sample.
        comparable: whether a shadow may begin: the kernel has enough to do, and it is not joining.
        behind_bytes: of the log, from its place on, overhead and the log's headers included.
        own_bytes: queued for it alone, overhead included.
    """

    stream: Stream
    log: StreamLog
    sender: Sender
    state: SendState
    picture_share: float
    delay_ms: float
    comparable: bool
    behind_bytes: int
    own_bytes: int


class _Shadowed(NamedTuple):
    """A viewer with a shadow: who, which stream and log, and the shadow."""

    stream: str
    log: StreamLog
    shadow: Shadow


class Oversight:
    """The looks of one server.

    Attributes:
        signals: who is told about the shares of viewers.
        report: told of exceptions of subscribers and of the candidate: (where, error). Replaced before `start`.
    """

    def __init__(
        self,
        config: LiveConfig,
        clock: Callable[[], float],
        call_later: Callable[..., Any],
        streams: Callable[[], dict[Stream, int]],
        age_from: AgeSource = AgeSource.QUEUE,
    ) -> None:
        self.report: Callable[[str, Exception], None] = _log_error
        self.signals: Final = Signals(self._report)
        self.age_from = age_from
        self._config = config
        self._clock = clock
        self._call_later = call_later
        self._streams = streams
        self._budget = MemoryBudget(config.memory_budget_bytes, per_address=config.memory_budget_per_address)
        self._lock = OwnedLock()
        self._shadows: dict[Sender, _Shadowed] = {}  # guarded by _lock
        self._past_shadow: dict[str, ShadowReport] = {}  # of shadows that have ended; guarded by _lock
        self._candidate = config.shadow  # None: none, or it has failed
        self._shares: dict[str, ViewerShares] = {}  # replaced as a whole; guarded by _lock
        self._held_by_stream: dict[str, int] = {}  # replaced as a whole; guarded by _lock
        self._to_sample: deque[Sender] = deque()  # the first poll group's thread
        self._filled_at = float("-inf")
        self._slice = 0
        self._looks = 0
        self._steps: Iterator[None] = iter(())  # what is left of the look in progress
        self._look_s = 0.0  # time that its slices took so far
        self._longest_look_s = self._longest_slice_s = 0.0

    def _report(self, where: str, error: Exception) -> None:
        self.report(where, error)

    def configure(self, config: LiveConfig) -> None:
        """Take another memory budget, from the next look on. Any thread."""
        self._budget.set_limit(config.memory_budget_bytes, per_address=config.memory_budget_per_address)

    def start(self) -> None:
        """Look from now on, until the server stops."""
        self._call_later(LOOK_S, self._tick)

    def _tick(self) -> None:
        """Begin a look."""
        self._steps, self._look_s = self._look(), 0.0
        self._go_on()

    def _go_on(self) -> None:
        """Do a slice of the look in progress, and see that the next one comes, or the next look."""
        began = now = self._clock()
        ended = True
        try:
            for _ in self._steps:
                now = self._clock()
                if now - began >= _SLICE_S:
                    ended = False
                    break
        except BaseException as error:  # noqa: BLE001 - the next look may succeed, and the server lives without it
            self.report("look at slow viewers", as_exception(error))
        slice_s = self._clock() - began
        self._longest_slice_s = max(self._longest_slice_s, slice_s)
        self._look_s += slice_s
        if not ended:
            self._call_later(0.0, self._go_on)
            return
        self._steps = iter(())
        self._longest_look_s = max(self._longest_look_s, self._look_s)
        self._call_later(max(LOOK_S, self._look_s / _LOOK_SHARE), self._tick)

    def look(self) -> None:
        """Look once, in one piece. The first poll group's thread."""
        for _ in self._look():
            pass

    def _look(self) -> Generator[None, None, None]:
        """Look once; each step is short."""
        now = self._clock()
        streams = self._streams()
        logs, caches, seen = yield from self._see(streams)
        yield from self._judge_memory(logs, caches, seen, now)
        yield from self._count_shares(streams, seen, now)
        if self._candidate is not None:
            yield from self._run_shadows(seen)
            self._fold_shadows({stream.name for stream in streams})
        if self.age_from is AgeSource.DELAY:
            self._sweep(streams, now)
        self._looks += 1

    @staticmethod
    def _see(
        streams: Iterable[Stream],
    ) -> Generator[None, None, tuple[dict[Hashable, int], dict[Stream, dict[Hashable, int]], list[_Seen]]]:
        """Return what the GOP cache and the headers of each log hold, the caches alone by stream, and who lags.

        Headers are there for any number of viewers, so all who follow a log hold them on top of what is between
        them and its tail.
        """
        logs: dict[Hashable, int] = {}
        caches: dict[Stream, dict[Hashable, int]] = {}
        seen = []
        for stream in streams:
            standby_bytes = stream.standby_bytes
            for wire in stream.wires:
                headers_bytes, standby_bytes = wire.headers.size_bytes + standby_bytes, 0
                cached_bytes = _cached_bytes(wire.log)
                if cached_bytes:
                    caches.setdefault(stream, {})[wire.log] = cached_bytes
                logs[wire.log] = cached_bytes + headers_bytes
                for fanout in wire.fanouts.active if not wire.for_links else ():  # those have limits of their own
                    for sender in fanout.lagging():
                        seen.append(_seen(stream, wire.log, sender, headers_bytes))
                        yield
                yield
        return logs, caches, seen

    # -- memory

    def _judge_memory(
        self, logs: dict[Hashable, int], caches: dict[Stream, dict[Hashable, int]], seen: list[_Seen], now: float
    ) -> Generator[None, None, None]:
        # Who is closed after a flush is shown too: until then it holds what it held. Who is closed holds nothing.
        holdings = [
            Holding(item.sender, item.log, address_key(_peer(item.sender)[0]), item.behind_bytes, item.own_bytes)
            for item in seen
        ]
        yield
        sizes = {stream: sum(found.values()) for stream, found in caches.items()}
        for number, stream in enumerate(self._budget.caches_to_empty(sizes, logs, holdings)):
            stream.drop_caches()
            for log, size in caches[stream].items():
                logs[log] -= size
            if number < _LINES:
                _log.warning("memory budget: GOP cache emptied", stream=stream.name, bytes=sizes[stream])
            yield
        victims = self._budget.judge(logs, holdings, now)
        held = self._budget.statistics().held.by_log
        by_stream: dict[str, int] = {}
        for log, size in held.items():
            name = _stream_name(log)
            by_stream[name] = by_stream.get(name, 0) + size
        with self._lock:
            self._held_by_stream = by_stream
        yield
        for number, victim in enumerate(victims):
            self._relieve(victim, logged=number < _LINES)
            yield
        if len(victims) > _LINES:
            _log.warning("memory budget: further viewers gave way", viewers=len(victims) - _LINES)

    @staticmethod
    def _relieve(victim: Victim, *, logged: bool) -> None:
        sender = victim.holding.key
        if not isinstance(sender, Sender):
            raise TypeError("the memory budget was shown something that is no viewer")
        if logged:
            peer = _peer(sender)
            _log.warning(
                "memory budget: viewer thinned"
                if victim.action is BudgetAction.THIN
                else "memory budget: viewer closed",
                stream=_stream_name(victim.holding.log),
                peer=f"{peer[0]}:{peer[1]}",
                why=victim.why,
            )
        if victim.action is BudgetAction.THIN:
            sender.relieve(victim.why)
        else:
            sender.close(CloseReason.MEMORY_BUDGET, victim.why)

    # -- shares

    def _count_shares(self, streams: dict[Stream, int], seen: list[_Seen], now: float) -> Generator[None, None, None]:
        """Count states and shares of the pictures by stream: who does not lag is READY and gets all."""
        states = {stream.name: [0] * STATE_COUNT for stream in streams}
        missing = {stream.name: [0, 0.0] for stream in streams}  # viewers, and the pictures they miss
        delays: dict[str, float] = {}
        for item in seen:
            name = item.stream.name
            states[name][item.state] += 1
            missing[name][0] += item.picture_share < 1
            missing[name][1] += 1 - item.picture_share
            delays[name] = max(delays.get(name, 0.0), item.delay_ms)
            yield
        shares = {}
        for stream, viewers in streams.items():
            name = stream.name
            states[name][SendState.READY] += max(viewers - sum(states[name]), 0)
            count = sum(states[name])
            shares[name] = ViewerShares(
                stream=name,
                at=now,
                viewers=count,
                states=tuple(states[name]),
                missing_pictures=int(missing[name][0]),
                picture_share=1 - missing[name][1] / count if count else 1.0,
                worst_delay_ms=delays.get(name, 0.0),
            )
        with self._lock:
            self._shares = shares
        if self.signals.wanted:
            self.signals.tell(shares)
        yield

    # -- the shadow

    def _run_shadows(self, seen: list[_Seen]) -> Generator[None, None, None]:
        """Show the shadows what has happened; begin those of viewers that lag, end those with nothing to compare."""
        with self._lock:
            shadows = dict(self._shadows)
        for sender, shadowed in shadows.items():
            if not self._sample(sender, shadowed):
                self._end_shadows([sender])
            if self._candidate is None:
                break
            yield
        for item in seen:
            if self._candidate is None:
                break
            if item.comparable and item.sender not in shadows:
                shadow = self._begin(item, self._candidate)
                if shadow is not None:
                    with self._lock:
                        self._shadows[item.sender] = shadow
            yield
        if self._candidate is None:
            with self._lock:
                left = list(self._shadows)
            self._end_shadows(left)  # nobody shows them anything any more, and they would hold their Senders

    def _end_shadows(self, senders: list[Sender]) -> None:
        """Keep the figures of these shadows and nothing else of them."""
        with self._lock:
            shadows = [(sender, self._shadows[sender]) for sender in senders]
        finished = [(sender, shadowed.stream, _compare(sender, shadowed.shadow)) for sender, shadowed in shadows]
        with self._lock:  # in one step, so that nobody sees them twice or not at all
            for sender, name, report in finished:
                del self._shadows[sender]
                self._past_shadow[name] = self._past_shadow.get(name, NO_SHADOW) + report

    def _fold_shadows(self, present: set[str]) -> None:
        """Keep the figures of streams that are not there any more as one: anybody can make names without end."""
        with self._lock:
            for name in [name for name in self._past_shadow if name not in present and name != _GONE]:
                gone = self._past_shadow.pop(name)
                self._past_shadow[_GONE] = self._past_shadow.get(_GONE, NO_SHADOW) + gone

    def _begin(self, item: _Seen, candidate: Candidate) -> _Shadowed | None:
        sender = item.sender
        if sender.closed or sender.following is not item.log:
            return None  # it has gone since it was looked at
        tail, statistics = item.log.tail, sender.statistics()
        try:
            shadow = Shadow(
                _judged_by(candidate, sender),
                self._clock(),
                queued=statistics.queued,
                age_s=statistics.load.age_ms / 1000,
                offered=(tail.counts, tail.sizes),
                taken_bytes=statistics.bytes_sent,
                live_changes=statistics.transitions,
                live_dropped=_dropped(statistics),
            )
        except BaseException as error:  # noqa: BLE001 - the candidate's policy is the application's
            self._candidate_failed(error)
            return None
        return _Shadowed(item.stream.name, item.log, shadow)

    def _sample(self, sender: Sender, shadowed: _Shadowed) -> bool:
        """Show one shadow what has happened; return whether it goes on."""
        if sender.closed or sender.following is not shadowed.log:
            return False
        now, account = self._clock(), sender.account(rows=False)
        tail, rates = shadowed.log.tail, shadowed.log.rates
        candidate = self._candidate
        try:
            if candidate is not None and candidate.marks_only:
                shadowed.shadow.set_limits(candidate.limits_beside(sender.limits), now)
            shadowed.shadow.sample(
                now,
                offered=(tail.counts, tail.sizes),
                taken_bytes=account.bytes_sent,
                busy=account.lagging,
                live=account.state,
                gop_s=shadowed.log.gop_duration_s,
                per_second=(rates.bytes_per_s, rates.messages_per_s),
            )
        except BaseException as error:  # noqa: BLE001 - as above
            self._candidate_failed(error)
            return False
        return account.lagging or not (shadowed.shadow.drained or shadowed.shadow.closed)

    def _candidate_failed(self, error: BaseException) -> None:
        """Judge by it no longer: it would fail for every viewer, four times a second."""
        self._candidate = None
        self.report("shadow policy, which is not asked any more", as_exception(error))

    # -- the delay as age

    def _sweep(self, streams: Iterable[Stream], now: float) -> None:
        """Have the delay of the next few viewers sampled, each on its own thread."""
        if not self._to_sample and now - self._filled_at >= _SWEEP_S:
            self._filled_at = now
            for stream in streams:
                for wire in stream.wires:
                    for fanout in wire.fanouts.active:
                        self._to_sample.extend(fanout.keeping_up())
            self._slice = math.ceil(len(self._to_sample) * LOOK_S / _SWEEP_S)
        by_group: dict[Any, list[Sender]] = {}
        for _ in range(min(self._slice, len(self._to_sample))):
            sender = self._to_sample.popleft()
            host = sender.host
            group = host.group if isinstance(host, Connection) else None
            if group is not None and not sender.closed:
                by_group.setdefault(group, []).append(sender)
        for group, senders in by_group.items():
            group.call_soon(_sample_all, senders)

    # -- what was found

    def statistics(self) -> OversightStatistics:
        """Return a snapshot. Any thread; O(viewers with a shadow)."""
        with self._lock:
            shadows, reports = dict(self._shadows), dict(self._past_shadow)
            shares, held_by_stream = self._shares, self._held_by_stream
        for sender, shadowed in Pace().over(shadows.items()):
            name = shadowed.stream
            reports[name] = reports.get(name, NO_SHADOW) + _compare(sender, shadowed.shadow)
        return OversightStatistics(
            budget=self._budget.statistics(),
            held_by_stream=dict(held_by_stream),
            shares=dict(shares),
            shadow=reports,
            looks=self._looks,
            longest_look_s=self._longest_look_s,
            longest_slice_s=self._longest_slice_s,
        )


def _log_error(where: str, error: Exception) -> None:
    _log.error("handler failed", where=where, error=f"{type(error).__name__}: {error}")


def _cached_bytes(log: StreamLog) -> int:
    """Return what the GOP cache of a log holds, overhead included."""
    cached, tail = log.cached, log.tail
    return 0 if cached is None else span_bytes(tail.offset - cached.offset, tail.sequence - cached.sequence)


def _seen(stream: Stream, log: StreamLog, sender: Sender, headers_bytes: int) -> _Seen:
    account = sender.account(rows=False)
    entry, tail = account.entry, log.tail
    return _Seen(
        stream,
        log,
        sender,
        account.state,
        account.picture_share,
        account.delay_ms,
        account.lagging and not account.joining,
        headers_bytes
        + (0 if entry is None else span_bytes(tail.offset - entry.offset, tail.sequence - entry.sequence)),
        span_bytes(account.own_bytes, account.own_messages),
    )


def _sample_all(senders: list[Sender]) -> None:
    for sender in senders:
        sender.sample_delay()


def _peer(sender: Sender) -> tuple[str, int]:
    host = sender.host
    return host.peer if isinstance(host, Connection) else ("", 0)


def _stream_name(log: object) -> str:
    """Return the name of the stream that a log belongs to: logs are called ``app/stream#msid``."""
    return log.name.rpartition("#")[0] or log.name if isinstance(log, StreamLog) else ""


def _dropped(statistics: SenderStatistics) -> Counts:
    """Return what was dropped for being slow: not what the viewer left itself, or had queued when it was closed."""
    return total(counts for reason, counts in statistics.dropped.items() if reason not in _NOT_DROPS)


def _judged_by(candidate: Candidate, sender: Sender) -> Candidate:
    """Return the candidate for one viewer."""
    if not candidate.marks_only:
        return candidate
    settings = sender.settings
    return dataclasses.replace(
        candidate,
        limits=candidate.limits_beside(sender.limits),
        policy=sender.policy,
        stuck_s=settings.stuck_s,
        soft_too_long_s=settings.soft_too_long_s,
    )


def _compare(sender: Sender, shadow: Shadow) -> ShadowReport:
    """Return the comparison for one viewer as it stands."""
    statistics = sender.statistics()
    closed_at = None
    if statistics.close_reason in _OWN_FAULT:
        closed_at = next((entry.at for entry in reversed(sender.ledger()) if entry.kind is LedgerKind.CLOSE), None)
    return shadow.report(
        live_changes=statistics.transitions, live_dropped=_dropped(statistics), live_closed_at=closed_at
    )
