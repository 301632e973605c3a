"""Looks at all viewers that lag, a few times a second: memory budget, shares of viewers, delay.

Theory of operation. One timer on the server's first poll group. A *look* asks the fan-outs who is served from its own
cursor, and each of those Senders for an `Account`; a viewer that keeps up costs nothing here. A look is done in slices
of a few milliseconds: in between the thread serves its viewers. The next one begins after it has ended. What is held
goes to the `MemoryBudget`, whose victims are relieved or closed through their Senders, which do it on their own
threads. States and pictures are counted per stream for the `Signals`. Where the delay is the age axis, all viewers are
sampled in turn, each once in two seconds, on their own threads.

Threads: looks run on the first poll group; `statistics` may be called from any.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from flowctl.connection import connection_of
from flowctl.core.flow.state import SendState
from flowctl.core.loop.faults import as_exception, log_error
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.core.sending.settings import AgeSource
from flowctl.core.text.addresses import address_of
from flowctl.live.config import LiveConfig
from flowctl.live.judging.budget import (
    MESSAGE_OVERHEAD_BYTES,
    BudgetAction,
    BudgetStatistics,
    Holding,
    MemoryBudget,
    Victim,
    span_bytes,
)
from flowctl.live.judging.shares import STATE_COUNT, ViewerShares
from flowctl.live.oversight.signals import Signals
from flowctl.live.stream import Stream
from flowctl.reasons import CloseReason
from flowctl.sender import Sender

_log: Final = structlog.get_logger("flowctl.live")

LOOK_S: Final = 0.5
"""Time between two looks: at 100 Mbit/s published, a budget is passed by 6 MB at most before it is noticed."""
_LOOK_SHARE: Final = 0.01
"""Share of its thread's time that looks may take: with thousands of slow viewers they come less often."""
_SLICE_S: Final = 0.003
"""Time after which a look lets its thread do something else: less than a turn of the fan-outs."""
_SWEEP_S: Final = 2.0
"""Time in which each viewer's delay is sampled once, where it is the age axis."""
_LINES_PER_LOOK: Final = 20
"""Victims that are logged one by one in one look; the rest is summed up in one more line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OversightStatistics:
    """A snapshot of the results of the looks."""

    budget: BudgetStatistics  # memory held for slow viewers, and who gave way
    held_by_stream: dict[str, int] = field(default_factory=dict)
    # states of the viewers, and the pictures they get, of each stream, at the last look
    shares: dict[str, ViewerShares] = field(default_factory=dict)
    looks: int = 0


class _Laggard(NamedTuple):
    """A slow viewer. It has no entry of the log, which it would keep from being freed until the look has ended."""

    stream: Stream
    log: StreamLog
    sender: Sender
    state: SendState
    picture_share: float
    delay_ms: float  # how far behind it was at its last sample
    behind_bytes: int  # bytes of the log from its place on, overhead and the log's headers included
    own_bytes: int  # queued for it alone, overhead included


class Oversight:
    """The looks of one server."""

    def __init__(
        self,
        config: LiveConfig,
        clock: Callable[[], float],
        call_later: Callable[..., Any],
        streams: Callable[[], dict[Stream, int]],
        age_from: AgeSource = AgeSource.QUEUE,
    ) -> None:
        # told of exceptions of subscribers: (where, error). Replaced before `start`.
        self.report: Callable[[str, Exception], None] = log_error
        self.signals: Final = Signals(self._report)  # subscriptions to the shares of viewers
        self.age_from = age_from
        self._clock = clock
        self._call_later = call_later
        self._streams = streams
        self._budget = MemoryBudget(config.memory_budget_bytes)
        self._lock = OwnedLock()
        self._shares: dict[str, ViewerShares] = {}  # replaced as a whole; guarded by _lock
        self._held_by_stream: dict[str, int] = {}  # replaced as a whole; guarded by _lock
        self._to_sample: deque[Sender] = deque()  # the first poll group's thread
        self._filled_at = float("-inf")
        self._slice = 0
        self._looks = 0
        self._steps: Iterator[None] = iter(())  # what is left of the look in progress
        self._look_s = 0.0  # time that its slices took so far

    def _report(self, where: str, error: Exception) -> None:
        self.report(where, error)

    def configure(self, config: LiveConfig) -> None:
        """Take another memory budget, from the next look on. Any thread."""
        self._budget.set_limit(config.memory_budget_bytes)

    def start(self) -> None:
        self._call_later(LOOK_S, self._begin_look)

    def _begin_look(self) -> None:
        self._steps, self._look_s = self._look_in_steps(), 0.0
        self._do_slice()

    def _do_slice(self) -> None:
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
        self._look_s += self._clock() - began
        if not ended:
            self._call_later(0.0, self._do_slice)
            return
        self._steps = iter(())
        self._call_later(max(LOOK_S, self._look_s / _LOOK_SHARE), self._begin_look)

    def look(self) -> None:
        for _ in self._look_in_steps():
            pass

    def _look_in_steps(self) -> Generator[None, None, None]:
        now = self._clock()
        streams = self._streams()
        logs, caches, lagging = yield from self._measure_lagging(streams)
        yield from self._judge_memory(logs, caches, lagging, now)
        yield from self._count_shares(streams, lagging, now)
        if self.age_from is AgeSource.DELAY:
            self._sample_delays(streams, now)
        self._looks += 1

    @staticmethod
    def _measure_lagging(
        streams: Iterable[Stream],
    ) -> Generator[None, None, tuple[dict[Hashable, int], dict[Stream, dict[Hashable, int]], list[_Laggard]]]:
        """Return what caches, kept key frames and headers of each log hold, all but headers by stream, and who lags.

        Headers are there for any number of viewers, so all who follow a log hold them on top of what is between
        them and its tail.
        """
        logs: dict[Hashable, int] = {}
        caches: dict[Stream, dict[Hashable, int]] = {}
        lagging = []
        for stream in streams:
            standby_bytes = stream.standby_bytes
            for wire in stream.wires:
                headers_bytes, standby_bytes = wire.headers.size_bytes + standby_bytes, 0
                cached_bytes = _bytes_from(wire.log.oldest, wire.log)
                if cached_bytes:
                    caches.setdefault(stream, {})[wire.log] = cached_bytes
                logs[wire.log] = cached_bytes + headers_bytes
                for fanout in wire.fanouts.active if not wire.for_links else ():  # those have limits of their own
                    for sender in fanout.lagging():
                        lagging.append(_measure_viewer(stream, wire.log, sender, headers_bytes))
                        yield
                yield
        return logs, caches, lagging

    # -- memory

    def _judge_memory(
        self, logs: dict[Hashable, int], caches: dict[Stream, dict[Hashable, int]], lagging: list[_Laggard], now: float
    ) -> Generator[None, None, None]:
        # One that is closed after a flush is shown too: until then it holds what it held. A closed one holds nothing.
        holdings = [Holding(item.sender, item.log, item.behind_bytes, item.own_bytes) for item in lagging]
        yield
        sizes = {stream: sum(found.values()) for stream, found in caches.items()}
        for number, stream in enumerate(self._budget.caches_to_empty(sizes, logs, holdings)):
            stream.drop_caches()
            for log, size in caches[stream].items():
                logs[log] -= size
            if number < _LINES_PER_LOOK:
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
            self._relieve(victim, logged=number < _LINES_PER_LOOK)
            yield
        if len(victims) > _LINES_PER_LOOK:
            _log.warning("memory budget: further viewers gave way", viewers=len(victims) - _LINES_PER_LOOK)

    @staticmethod
    def _relieve(victim: Victim, *, logged: bool) -> None:
        sender = victim.holding.key
        if not isinstance(sender, Sender):
            raise TypeError("the memory budget was shown something that is no viewer")
        if logged:
            done = "thinned" if victim.action is BudgetAction.THIN else "closed"
            connection = connection_of(sender)
            peer = ("", 0) if connection is None else connection.peer
            stream = _stream_name(victim.holding.log)
            _log.warning(f"memory budget: viewer {done}", stream=stream, peer=address_of(peer), why=victim.why)
        if victim.action is BudgetAction.THIN:
            sender.relieve(victim.why)
        else:
            sender.close(CloseReason.MEMORY_BUDGET, victim.why)

    # -- shares

    def _count_shares(
        self, streams: dict[Stream, int], lagging: list[_Laggard], now: float
    ) -> Generator[None, None, None]:
        """Count states and shares of the pictures by stream: a viewer that does not lag is READY and gets all."""
        states = {stream.name: [0] * STATE_COUNT for stream in streams}
        missing = {stream.name: [0, 0.0] for stream in streams}  # viewers, and the pictures they miss
        delays: dict[str, float] = {}
        for item in lagging:
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

    # -- the delay as age

    def _sample_delays(self, streams: Iterable[Stream], now: float) -> None:
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
            connection = connection_of(sender)
            group = None if connection is None else connection.group
            if group is not None and not sender.closed:
                by_group.setdefault(group, []).append(sender)
        for group, senders in by_group.items():
            group.call_soon(_sample_all, senders)

    # -- what was found

    def statistics(self) -> OversightStatistics:
        with self._lock:
            shares, held_by_stream = self._shares, self._held_by_stream
        return OversightStatistics(
            budget=self._budget.statistics(),
            held_by_stream=dict(held_by_stream),
            shares=dict(shares),
            looks=self._looks,
        )


def _bytes_from(entry: Entry | None, log: StreamLog) -> int:
    """Return what a log holds from `entry` on, overhead included. None: nothing."""
    tail = log.tail
    return 0 if entry is None else span_bytes(tail.offset - entry.offset, tail.sequence - entry.sequence)


def _measure_viewer(stream: Stream, log: StreamLog, sender: Sender, headers_bytes: int) -> _Laggard:
    account = sender.account(rows=False)
    return _Laggard(
        stream,
        log,
        sender,
        account.state,
        account.picture_share,
        account.delay_ms,
        headers_bytes + _bytes_from(account.entry, log),
        account.own_bytes + account.own_messages * MESSAGE_OVERHEAD_BYTES,
    )


def _sample_all(senders: list[Sender]) -> None:
    for sender in senders:
        sender.sample_delay()


def _stream_name(log: object) -> str:
    """Return the name of the stream that a log belongs to: logs are called ``app/stream#msid``."""
    return log.name.rpartition("#")[0] or log.name if isinstance(log, StreamLog) else ""
