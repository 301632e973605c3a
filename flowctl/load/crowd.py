"""The peers of one worker process: made from orders, started on time, counted each second, ended in order.

A crowd lives on one reactor. It makes viewers, publishers and attackers from `PeerOrder`s, starts them when their time
has come, keeps the figures of each profile, and hands on the row of each peer when it has ended. A viewer of a profile
that churns is made anew when it has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from flowctl.core.flow.histogram import DelayHistogram
from flowctl.errors import FlowctlError
from flowctl.load.peers.link import Target
from flowctl.load.peers.reactor import Reactor
from flowctl.load.peers.skim import FrameBook
from flowctl.load.peers.slow import Manner
from flowctl.load.peers.viewer import LoadViewer
from flowctl.load.plan import LoadPlan, PeerOrder
from flowctl.load.profiles import parse_profile
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult
from flowctl.wire.client.measure import StreamClock, ViewerMeasure
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import RtmpUrl, parse_query

VISITS_MAX: Final = 100_000
"""Most connections that one worker makes: viewers that churn do not come back after it."""

_COME_BACK_S: Final = 1.0
"""Pause of a viewer that churns and was turned away; one that left by itself comes back at once."""

_END_WAIT_S: Final = 2.0
"""Longest wait for the last links to end: they have bounds of their own, this is a bound in case they fail."""

_LEAST_ATTACK_S: Final = 0.5
_ATTACK_MARGIN_S: Final = 1.0
"""Time from the end of an attack to the end of the run, in which it is judged."""

_VIEWER_CONFIG: Final = ClientSessionConfig(flash_version="LNX 9,0,124,2 (compatible; flowctl load)")
_FAILED: Final = frozenset({PeerEnd.NOT_CONNECTED, PeerEnd.REFUSED})


@dataclass(slots=True)
class ProfileTally:
    """One profile: its peers of this moment, and figures that outlive them."""

    kind: PeerKind
    manner: Manner
    attacking: int = 0  # attacks in progress
    ended: Counter[str] = field(default_factory=Counter)  # sums over ended peers: `_COUNTS`, and how they ended
    delays: DelayHistogram = field(default_factory=DelayHistogram)
    alive: dict[LoadViewer, None] = field(default_factory=dict)  # in the order of their coming

    def figures(self) -> Counter[str]:
        """Return the figures of this moment by the names that samples have, with bytes and frames."""
        figures = Counter(self.ended)
        for name, count in _COUNTS.items():
            figures[name] += sum(map(count, self.alive))
        figures["connected"] = sum(viewer.connected for viewer in self.alive) + self.attacking
        figures["playing"] = sum(viewer.playing for viewer in self.alive)
        return figures


_COUNTS: Final[dict[str, Callable[[LoadViewer], int]]] = {
    "missing": lambda viewer: viewer.measure.missing,
    "pictures": lambda viewer: viewer.measure.video,
    "missing_pictures": lambda viewer: viewer.measure.missing_video + viewer.measure.missed_at_end,
    "bytes": lambda viewer: viewer.result.wire_bytes,
    "frames": lambda viewer: viewer.measure.frames,
}
"""Figures that each viewer adds to those of its profile, while it is there and after its end."""


def source_address(number: int) -> str:
    """Return an address of 127.0.0.0/8 for a peer, another one for each up to 60,000."""
    return f"127.{1 + number // 62_500}.{1 + number // 250 % 250}.{1 + number % 250}"


@dataclass(slots=True, eq=False)
class PeerCrowd:
    """The viewers and attackers of one process."""

    reactor: Reactor
    plan: LoadPlan
    target: Target
    urls: list[RtmpUrl]
    began: float  # start of the run on `time.monotonic`
    clocks: list[StreamClock]  # one for each stream
    on_row: Callable[[PeerResult], None]  # called with the row of each peer that has ended
    queries: list[str] = field(default_factory=list)  # what viewers bring behind the name, in turn
    context: ssl.SSLContext | None = None  # what their TLS goes by. None: they speak none.
    recent: DelayHistogram = field(default_factory=DelayHistogram)  # delays of healthy viewers in this second
    _book: FrameBook = field(default_factory=FrameBook)
    _tallies: dict[str, ProfileTally] = field(default_factory=dict)
    _waiting: int = 0  # peers whose time has not come
    _returning: int = 0  # peers that have left and are about to come back
    _visits: int = 0
    _stopping: bool = False
    _empty: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last one has gone after `stop`
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _last: Counter[str] = field(default_factory=Counter)  # bytes and frames by the last sample

    # -- coming

    def order(self, orders: Iterable[PeerOrder]) -> None:
        for order in orders:
            self._waiting += 1
            self._tally(order.profile)
            self.reactor.call_at(self.began + order.join_s, partial(self._start_peer, order, first=True))

    def _tally(self, name: str) -> ProfileTally:
        tally = self._tallies.get(name)
        if tally is None:
            choice = parse_profile(name)
            tally = self._tallies[name] = ProfileTally(choice.profile.kind, choice.manner)
        return tally

    def _start_peer(self, order: PeerOrder, _now: float, *, first: bool) -> None:
        self._waiting -= first
        self._returning -= not first
        if self._stopping:
            return
        tally = self._tally(order.profile)
        url = self._url_of(order)
        result = PeerResult(number=order.number, profile=order.profile, kind=tally.kind, url=str(url))
        source = source_address(order.number) if self.plan.spread_addresses else ""
        if tally.kind is PeerKind.HOSTILE:
            task = asyncio.get_running_loop().create_task(self._attack(order, result, tally, source))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        self._visits += 1
        recent = self.recent if tally.kind is PeerKind.HEALTHY and order.parsed else None
        viewer = LoadViewer(
            reactor=self.reactor,
            target=self.target,
            url=url,
            result=result,
            config=_VIEWER_CONFIG,
            context=self.context,
            began=self.began,
            on_end=lambda viewer: self._viewer_ended(viewer, order, tally),
            manner=tally.manner,
            measure=ViewerMeasure(self.clocks[order.stream], recent),
            book=self._book,
            parsed=order.parsed,
        )
        tally.alive[viewer] = None
        viewer.start(source, self.plan.connect_timeout_s)

    def _url_of(self, order: PeerOrder) -> RtmpUrl:
        url = self.urls[order.stream]
        if not self.queries:
            return url
        raw = "&".join(filter(None, [url.raw_query, self.queries[order.number % len(self.queries)]]))
        return replace(url, raw_query=raw, query=parse_query(raw))

    # -- going

    def _viewer_ended(self, viewer: LoadViewer, order: PeerOrder, tally: ProfileTally) -> None:
        tally.alive.pop(viewer, None)
        result = viewer.result
        tally.ended.update({name: count(viewer) for name, count in _COUNTS.items()})
        tally.delays.merge(viewer.measure.delays)
        self._count_end(result, tally)
        if tally.manner.stay_s is not None and not self._stopping and self._visits < VISITS_MAX:
            pause_s = 0.0 if result.end is PeerEnd.LEFT else _COME_BACK_S
            self._returning += 1
            self.reactor.call_at(time.monotonic() + pause_s, partial(self._start_peer, order, first=False))

    def _count_end(self, result: PeerResult, tally: ProfileTally) -> None:
        tally.ended["cut"] += result.cut is True
        tally.ended["failed"] += result.end in _FAILED
        self.on_row(result)
        if self._stopping and not any(item.alive or item.attacking for item in self._tallies.values()):
            self._empty.set()

    async def _attack(self, order: PeerOrder, result: PeerResult, tally: ProfileTally, source: str) -> None:
        from flowctl.load.hostile.attacks import HOSTILE  # noqa: PLC0415 - loaded only by crowds that attack
        from flowctl.load.hostile.base import AttackContext  # noqa: PLC0415 - the same

        now_s = time.monotonic() - self.began
        result.started_s = now_s
        tally.attacking += 1
        host, port = self.target.address[:2]
        url = self._url_of(order)
        context = AttackContext(
            host=host,
            port=port,
            app=url.app,
            stream=url.stream,
            query=url.raw_query,
            tls=None if self.context is None else (self.context, url.host),
            source=source or None,
            number=order.number,
            duration_s=max(self.plan.length_s - now_s - _ATTACK_MARGIN_S, _LEAST_ATTACK_S),
            rng=random.Random(f"{self.plan.seed}-{order.number}"),
        )
        try:
            verdict = await HOSTILE[order.profile].attack(context)
        except asyncio.CancelledError:
            result.end_details = "the run was ended before the attack"
            result.notes = "; ".join(context.notes)
        except Exception as error:  # noqa: BLE001 - one attack that fails is one row, not the end of the run
            result.end = PeerEnd.TESTER_FAILED
            result.end_details = f"the attack failed: {type(error).__name__}: {error}"[:200]
        else:
            result.end, result.end_code, result.cut = verdict.end, verdict.code, verdict.cut
            result.end_details = verdict.details[:200]
            result.connect_s, result.handshake_s = verdict.connect_s, verdict.handshake_s
            result.wire_bytes = verdict.received_bytes
            result.expectation_met = verdict.met
            result.notes = verdict.notes
            result.forms = verdict.form_words
        result.ended_s = time.monotonic() - self.began
        tally.attacking -= 1
        self._count_end(result, tally)

    # -- figures

    @property
    def alive(self) -> int:
        return (
            self._waiting
            + self._returning
            + len(self._tasks)
            + sum(len(tally.alive) for tally in self._tallies.values())
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures of this moment, and begin a new second."""
        profiles = {name: tally.figures() for name, tally in self._tallies.items()}
        recent = self.recent.as_list()
        self.recent.buckets.clear()  # the same object: viewers hold it
        self.recent.max_us = 0
        total = sum(profiles.values(), Counter[str]())
        before, self._last = self._last, total
        return {
            "profiles": profiles,
            "bytes": total["bytes"] - before["bytes"],
            "frames": total["frames"] - before["frames"],
            "recent": recent,
            "alive": self.alive,
        }

    def delays(self) -> dict[str, list[int]]:
        return {name: tally.delays.as_list() for name, tally in self._tallies.items() if tally.delays.buckets}

    # -- ending

    async def stop(self, *, patience_s: float) -> None:
        """End all peers in order; attackers may take `patience_s` to come to their verdict."""
        self._stopping = True
        now = time.monotonic()
        for tally in self._tallies.values():
            for viewer in list(tally.alive):
                try:
                    viewer.depart(PeerEnd.RUN_ENDED, "the run was over", now)
                except FlowctlError as error:
                    viewer.end(PeerEnd.RUN_ENDED, str(error), now)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        for task in list(self._tasks):
            task.cancel()
        if self.alive - self._waiting - self._returning:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), _END_WAIT_S)
        for tally in self._tallies.values():
            for viewer in list(tally.alive):
                viewer.end(PeerEnd.RUN_ENDED, "the run was over", time.monotonic())
