"""A process of a load run, started by `WorkerProcess`: orders in, lines of JSON out.

Theory of operation. The first line of standard input is what to do (see `Orders`). The worker answers ``ready``, waits
for ``begin``, and from then on writes a line of figures each second and a line for each peer that has ended. At
``stop`` it ends all its peers in order, writes the rest and ``done``, and ends. When its input is closed, the
process that started it is gone, and it stops likewise. Ctrl-C is left to its parent.

One process either publishes or views: a publisher that waits for its turn among a thousand viewers would be late, and
all delays with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flowctl.core.loop.trust import client_context
from flowctl.errors import FlowctlError
from flowctl.load.crowd import PeerCrowd
from flowctl.load.peers.link import Target
from flowctl.load.peers.publisher import LoadPublisher
from flowctl.load.peers.reactor import Reactor
from flowctl.load.plan import LoadPlan, PeerOrder
from flowctl.load.results.result import PUBLISHER, PeerEnd, PeerKind, PeerResult
from flowctl.wire.client.measure import StreamClock
from flowctl.wire.client.pace import TagFeed, Timeline
from flowctl.wire.client.source import FlvFile
from flowctl.wire.media.stamp import Stamper
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import parse_url

SAMPLE_S: Final = 1.0
ATTACK_PATIENCE_S: Final = 7.0
"""Longest time that attackers get at the end: the try of a newcomer takes up to 5 s."""

_PUBLISHER_CONFIG: Final = ClientSessionConfig(flash_version="FMLE/3.0 (compatible; flowctl load)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a worker has to do."""

    role: str
    family: int
    address: list[Any]
    urls: list[str]  # addresses of the streams; they may hold secrets, which is why orders come by a pipe
    queries: list[str]  # what viewers bring behind the name, in turn
    peers: list[Any]  # viewers: the fields of a `PeerOrder`. Publishers: indices of streams.
    plan: LoadPlan


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values, separators=(",", ":")) + "\n")
    sys.stdout.flush()


@dataclasses.dataclass(eq=False)
class LoadWorker:
    """One process of a run."""

    orders: Orders
    reactor: Reactor
    unread: bytes = b""  # input after the last whole line
    _crowd: PeerCrowd | None = None
    _publishers: list[LoadPublisher] = dataclasses.field(default_factory=list)
    _began: float = 0.0
    _samples: int = 0
    _max_lag_s: float = 0.0
    _over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _all_ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # set when all publishers have gone
    _patience_s: float = 0.0

    def __post_init__(self) -> None:
        self._target = Target(self.orders.family, tuple(self.orders.address))
        self._urls = [parse_url(url) for url in self.orders.urls]
        self._clocks = [self._clock() for _ in self._urls]
        self._context = client_context() if self._urls[0].tls else None  # one for all: to read authorities takes 10 ms

    def _clock(self) -> StreamClock:
        plan = self.orders.plan
        if not plan.publishers or plan.source is not None:
            return StreamClock()
        return StreamClock(key_interval=plan.synthetic(0).key_interval_frames, disposable_every=plan.disposable_every)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        os.set_blocking(0, False)
        loop.add_reader(0, self._read_input)
        say(ready=True, cpu_s=time.process_time())
        self._read_lines(b"")  # a run that was interrupted at once has said so before we could listen
        await self._over.wait()
        loop.remove_reader(0)
        if self._crowd is not None:
            await self._crowd.stop(patience_s=self._patience_s)
        await self._stop_publishers()
        say(
            done=True,
            delays={} if self._crowd is None else self._crowd.delays(),
            sources=sorted({clock.source for clock in self._clocks if clock.source}),
            lags=self.reactor.lags,
            max_lag_s=max(self._max_lag_s, self.reactor.max_lag_s),
            cpu_s=time.process_time(),
        )

    # -- orders

    def _read_input(self) -> None:
        try:
            octets = os.read(0, 65536)
        except BlockingIOError:
            return
        if not octets:
            self._over.set()  # our parent is gone
            return
        self._read_lines(octets)

    def _read_lines(self, octets: bytes) -> None:
        *lines, self.unread = (self.unread + octets).split(b"\n")
        for line in lines:
            self._carry_out_order(json.loads(line))

    def _carry_out_order(self, order: dict[str, Any]) -> None:
        if "begin" in order:
            self._begin(float(order["begin"]))
        elif "origin" in order:
            index, origin_us = order["origin"]
            self._clocks[index].origin_us = origin_us
        elif "stop" in order:
            self._patience_s = float(order["stop"])
            self._over.set()

    def _begin(self, began: float) -> None:
        orders, plan = self.orders, self.orders.plan
        self._began = began
        gc.collect()
        gc.freeze()
        self.reactor.start_ticks()
        if orders.role == "publishers":
            for index in orders.peers:
                # Spread over a key interval: streams whose key frames come all at once do not exist.
                delay_s = plan.key_interval_s * index / max(len(orders.peers), 1)
                self.reactor.call_at(began + delay_s, partial(self._publish, index))
        else:
            self._crowd = PeerCrowd(
                reactor=self.reactor,
                plan=plan,
                target=self._target,
                urls=self._urls,
                queries=orders.queries,
                began=began,
                clocks=self._clocks,
                on_row=self._row,
                context=self._context,
            )
            self._crowd.order(PeerOrder(*peer) for peer in orders.peers)
        self.reactor.call_at(began + SAMPLE_S, self._sample)

    # -- publishing

    def _publish(self, index: int, _now: float) -> None:
        plan, url = self.orders.plan, self._urls[index]
        source = plan.synthetic(index) if plan.source is None else FlvFile(plan.source)
        publisher = LoadPublisher(
            reactor=self.reactor,
            target=self._target,
            url=url,
            result=PeerResult(number=index, profile=PUBLISHER, kind=PeerKind.PUBLISHER, url=str(url)),
            config=_PUBLISHER_CONFIG,
            context=self._context,
            began=self._began,
            on_end=self._publisher_ended,
            feed=TagFeed(tags=iter(Timeline(source, loop=plan.source is not None)), stamper=Stamper()),
            on_start=lambda origin_us: say(published=index, origin_us=origin_us),
        )
        self._publishers.append(publisher)
        publisher.start("", plan.connect_timeout_s)

    def _publisher_ended(self, publisher: LoadPublisher) -> None:
        if not publisher.publishing:
            say(unpublished=publisher.result.number, why=publisher.result.end_details)
        say(publisher_lag_s=publisher.feed.max_lag_s)
        self._row(publisher.result)
        if self._over.is_set() and all(item.ended for item in self._publishers):
            self._all_ended.set()

    async def _stop_publishers(self) -> None:
        now = time.monotonic()
        for publisher in self._publishers:
            if not publisher.ended:
                publisher.depart(PeerEnd.RUN_ENDED, "the run was over", now)
        if not all(publisher.ended for publisher in self._publishers):
            await self._all_ended.wait()  # which is bounded: links linger for a moment only

    # -- reports

    def _row(self, result: PeerResult) -> None:
        say(row=result.as_dict())

    def _sample(self, now: float) -> None:
        if self._over.is_set():
            return
        self._samples += 1
        lag_s = self.reactor.max_lag_s
        self._max_lag_s = max(self._max_lag_s, lag_s)
        self.reactor.max_lag_s = 0.0
        crowd = self._crowd
        say(
            sample=self._samples,
            cpu_s=time.process_time(),
            lag_s=round(lag_s, 4),
            **({} if crowd is None else crowd.figures()),
        )
        behind = int((now - self._began) / SAMPLE_S)
        self._samples = max(self._samples, behind)  # a second that was slept through has no figures
        self.reactor.call_at(self._began + (self._samples + 1) * SAMPLE_S, self._sample)


async def _work(orders: Orders, unread: bytes) -> None:
    reactor = Reactor(asyncio.get_running_loop())
    try:
        await LoadWorker(orders, reactor, unread).run()
    finally:
        reactor.close()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # In the way of thousands of objects that live for the whole run, a full collection takes as long as a flush.
    gc.set_threshold(50_000, 20, 100)
    buffer = b""
    while b"\n" not in buffer:
        octets = os.read(0, 1 << 20)
        if not octets:
            return 1
        buffer += octets
    line, _, unread = buffer.partition(b"\n")  # a run that is interrupted says stop right behind its orders
    values = json.loads(line)
    orders = Orders(**{**values, "plan": LoadPlan(**values["plan"])})
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - there is no build of it everywhere

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_work(orders, unread))
    except FlowctlError as error:
        say(failed=str(error), hint=error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
