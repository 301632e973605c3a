"""What 350 edges and a million viewers ask of origins: real diffusion over simulated lines, in virtual time.

Run ``python bench edge_simulation``. Two origins publish the same streams. Regional edges fetch from both, the other
edges from the two regional edges of their region; each is the real inside of an edge: `ObjectDiffusion`, `EdgePlanner`,
`SchedulerGate`, `Upstream` and `SegmentPool`. Lines have a delay by distance, and each node sends over one port of
10 Gbit/s, of which its viewers take theirs first. Segments have a hundredth of their bytes, and take the time of all.

Viewers are counted, not simulated one by one. They choose streams by a Zipf law, so which edge wants which stream is as
a crowd has it. One origin dies, then a regional edge, then ten edges at once, whose viewers the real rule of redirects
sends elsewhere. Seeded dice and virtual time: the same figures on any machine, but for the time that it took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import selectors
import time
from collections import Counter, deque
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import structlog

from flowctl.errors import BrokenError, ClosedError
from flowctl.live.cluster.edge.gate import SchedulerGate
from flowctl.live.cluster.edge.planner import EdgePlanner
from flowctl.live.cluster.edge.upstream import OriginAddress, Upstream
from flowctl.live.cluster.origin import POLICY
from flowctl.live.cluster.redirect import TELL_S, EdgeBook, EdgeReport
from flowctl.live.cluster.segments.cutter import CutSegment
from flowctl.live.cluster.segments.segment import Frame, Position, Segment, SegmentId, Sequel
from flowctl.live.cluster.segments.window import SegmentPool, WindowLimits
from flowctl.nodes.diffusion.diffusion import ObjectDiffusion
from kit.tables import table

SEED: Final = 28
RATE: Final = 2.5e6
"""Bits a second of a stream."""
SEGMENT_S: Final = 2.0
"""Time between key frames, which is where segments end."""
SHRINK: Final = 100
"""Real bytes of a segment for each that is simulated."""
LARGE_BYTES: Final = 2048
"""Least length of a message that holds a segment, and so counts `SHRINK` times on the line."""
PORT_RATE: Final = 10e9
LATENCY_S: Final = {"origin": 0.04, "region": 0.008}
"""One way to an origin, and within a region."""
TICK_S: Final = 0.1
ZIPF: Final = 1.0
MOST_VIEWERS: Final = int(0.9 * PORT_RATE / RATE)
"""Connections that an edge may have: what its port carries, and a tenth left for segments and for what is lost."""
LOST_EDGES: Final = 10
RETURN_S: Final = 2.0
"""Time in which viewers notice that their edge has gone, and ask the origin again."""
_END_S: Final = 5.0
"""Time for what is under way at the end."""
QUICK: Final[dict[str, Any]] = {"edges": 44, "regions": 2, "streams": 4, "seconds": 16.0, "viewers": 4000}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for nothing: where there is nothing to do, its clock goes to what is due next."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selectors.SelectSelector())
        waiting = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            if timeout:
                self.now += timeout
            return waiting(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Port:
    """The port of a node, which all of its lines share."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.viewers = 0  # who are sent a stream each, before anything else
        self.sent_bytes = 0
        self.small_bytes = 0  # of which were announcements, requests, keep-alives


class Line:
    """One end of a connection; a stream for diffusion."""

    def __init__(self, port: Port, latency_s: float) -> None:
        self._port, self._latency_s = port, latency_s
        self._pieces: deque[bytes] = deque()
        self._came = asyncio.Event()
        self.peer: Line
        self.closed = self.ended = False

    async def read(self) -> bytes:
        while not self._pieces:
            if self.closed:
                raise ClosedError("the stream was closed by us")
            if self.ended:
                return b""
            self._came.clear()
            await self._came.wait()
        return self._pieces.popleft()

    async def write(self, data: bytes) -> None:
        if self.closed:
            raise ClosedError("the stream was closed by us")
        if self.ended:
            raise BrokenError("the peer has closed the stream")
        loop, port = asyncio.get_running_loop(), self._port
        large = len(data) >= LARGE_BYTES
        size_bytes = len(data) * (SHRINK if large else 1)
        port.sent_bytes += size_bytes
        port.small_bytes += 0 if large else size_bytes
        left = PORT_RATE - port.viewers * RATE
        port.free_at = max(port.free_at, loop.time()) + size_bytes * 8 / left
        loop.call_at(port.free_at + self._latency_s, self.peer.arrive, data)
        if port.free_at - loop.time() > TICK_S:
            await asyncio.sleep(port.free_at - loop.time() - TICK_S)

    def arrive(self, data: bytes) -> None:
        self._pieces.append(data)
        self._came.set()

    def close(self, details: str = "") -> None:
        del details
        self.closed = True
        self._came.set()
        asyncio.get_running_loop().call_later(self._latency_s, self.peer.end)

    def end(self) -> None:
        self.ended = True
        self._came.set()


class Guard:
    """Lets everybody have everything, and hears what edges tell of themselves; `ServerChecks` of diffusion."""

    def __init__(self, book: EdgeBook, number: int) -> None:
        self._book, self._number = book, number

    def prove(self, proof: bytes) -> None:
        """Edges of this cluster have no keys."""

    def allows(self, topic: str) -> bool:
        del topic
        return True

    def tell(self, words: bytes) -> None:
        self._book.take_report(words, self._number)


class Node:
    """An origin, a regional edge or an edge: what it has, whom it fetches from, when each segment came."""

    def __init__(self, name: str, world: World, sources: list[Node], wanted: set[str], latency_s: float) -> None:
        self.name, self.world, self.wanted, self.latency_s = name, world, wanted, latency_s
        self.loop, self.rng, self.port = world.loop, world.rng, Port()
        self.alive = True
        self._numbers = count()  # of its reports
        self.book = EdgeBook(self.loop.time, self.rng)
        self.delays: list[tuple[float, float]] = []  # when a segment came, and how late
        self.came_bytes = 0
        wants = None if not sources else self._wants
        self.pool = SegmentPool(WindowLimits(), self.loop.time, wants=wants, on_segment=self._came)
        self.gate = SchedulerGate(self.loop.time, self.rng)
        planner = EdgePlanner(lambda _peer, _item: True, lambda: bool(self.wanted), self._best_s)
        self._note_arrival = planner.note_arrival
        self.diffusion = ObjectDiffusion(
            self.pool, policy=POLICY, planner=planner, gate=self.gate, clock=self.loop.time, rng=self.rng
        )
        self.diffusion.subscribe(*sorted(wanted))
        self.gate.opened = self.diffusion.gate_opened
        self._lines: list[Line] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._by_address = {OriginAddress(source.name): source for source in sources}
        self.upstreams = [
            Upstream(address, self._connect, self.diffusion, self.gate, self.loop.time, self.rng, lambda _peer: None)
            for address in self._by_address
        ]
        self.tasks += [self.loop.create_task(upstream.run()) for upstream in self.upstreams]
        if sources:
            self.tasks.append(self.loop.create_task(self._tick()))

    async def _tick(self) -> None:
        ticks = self.rng.randrange(int(TELL_S / TICK_S))
        while True:
            self.gate.tick()
            ticks += 1
            if ticks % int(TELL_S / TICK_S) == 0 or self.book.take_lost():
                self.diffusion.tell(*self.book.words_of_all(self._report()))
            await asyncio.sleep(TICK_S)

    def _report(self) -> EdgeReport | None:
        """Return what an edge tells of itself; regional edges serve no viewers."""
        if not self.port.viewers:
            return None
        return EdgeReport(
            name=blake2b(self.name.encode(), digest_size=8).hexdigest(),
            number=next(self._numbers),
            bases={"rtmp": f"rtmp://{self.name}"},
            hls=False,
            connections=self.port.viewers,
            most=MOST_VIEWERS,
            drains=False,
            made_at=self.loop.time(),
        )

    def _wants(self, segment: SegmentId) -> bool:
        return segment.stream in self.wanted

    def _best_s(self) -> float | None:
        measured = [item.meter.latency_s for item in self.upstreams if item.meter.latency_s is not None]
        return min(measured, default=None)

    def _came(self, segment: Segment) -> None:
        self._note_arrival()
        now = self.loop.time()
        self.delays.append((now, now - self.world.cut_at[segment.id.encode()]))

    async def _connect(self, address: OriginAddress) -> Any:
        source = self._by_address[address]
        await asyncio.sleep(2 * self.latency_s)
        if not source.alive:
            raise ConnectionRefusedError("connection refused")
        ours, theirs = Line(self.port, self.latency_s), Line(source.port, self.latency_s)
        ours.peer, theirs.peer = theirs, ours
        self._lines.append(ours)
        source.serve(theirs)
        return ours

    def serve(self, line: Line) -> None:
        self._lines.append(line)
        self.tasks.append(self.loop.create_task(self._serve(line, len(self._lines))))

    async def _serve(self, line: Line, number: int) -> None:
        with contextlib.suppress(BrokenError, ClosedError):  # an edge that has died
            try:
                await self.diffusion.serve(line, Guard(self.book, number))
            finally:
                self.book.forget_connection(number)

    def die(self) -> None:
        """Die as a killed process does: its lines end, nobody is told anything."""
        self.alive = False
        for task in self.tasks:
            task.cancel()
        for line in self._lines:
            line.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    edges: int
    regions: int
    streams: int
    seconds: float
    viewers: int


class World:
    """The whole cluster."""

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.plan, self.loop, self.rng = plan, loop, Random(SEED)
        self.cut_at: dict[bytes, float] = {}
        self.streams = [f"live/{number:02}" for number in range(plan.streams)]
        weights = [1 / (number + 1) ** ZIPF for number in range(plan.streams)]
        regional = 2 * plan.regions
        leaves = plan.edges - regional
        self.origins = [Node(f"origin-{letter}", self, [], set(), 0.0) for letter in "ab"]
        everything = set(self.streams)
        self.regional = [
            Node(f"region-{number // 2}-{number % 2}", self, self.origins, everything, LATENCY_S["origin"])
            for number in range(regional)
        ]
        self.edges = []
        each = plan.viewers // leaves
        for number in range(leaves):
            region = number % plan.regions
            sources = self.regional[2 * region : 2 * region + 2]
            # Of so many viewers each stream has one somewhere; what one edge wants, its own viewers say.
            chosen = Counter(self.rng.choices(self.streams, weights, k=min(each, 2000)))
            self.edges.append(Node(f"edge-{number:03}", self, sources, set(chosen), LATENCY_S["region"]))
            self.edges[-1].port.viewers = each

    async def publish(self) -> None:
        """Give both origins each segment of each stream when it ends; streams have their key frames at other times."""
        payload_bytes = int(RATE / 8 * SEGMENT_S / SHRINK)
        starts = {stream: self.rng.uniform(0.0, SEGMENT_S) for stream in self.streams}
        due = sorted((start, stream, 0) for stream, start in starts.items())
        while due[0][0] < self.plan.seconds:
            at, stream, number = due.pop(0)
            await asyncio.sleep(max(at - self.loop.time(), 0.0))
            start_ms = int(number * SEGMENT_S * 1000)
            frames = [Frame(9, start_ms, b"\x17\x01\0\0\0" + self.rng.randbytes(payload_bytes - 5))]
            next_ms = int((number + 1) * SEGMENT_S * 1000)
            name, data = CutSegment(stream, Position(1, start_ms, 0), (), frames, Sequel.KEY, next_ms).write()
            self.cut_at[name.encode()] = self.loop.time()
            for origin in self.origins:
                if origin.alive:
                    origin.pool.put(name, data)
            due.append((at + SEGMENT_S, stream, number + 1))
            due.sort()


PERIODS: Final = ("all is well", "an origin was killed", "a regional edge was killed")


async def _run(plan: Plan, loop: VirtualLoop) -> list[dict[str, Any]]:
    """Let the cluster warm up, then run each period, before which something dies; return a row for each."""
    world = World(plan, loop)
    publishing = loop.create_task(world.publish())
    deaths = {PERIODS[1]: world.origins[0], PERIODS[2]: world.regional[0]}
    part_s = plan.seconds / (len(PERIODS) + 1)
    await asyncio.sleep(part_s)
    rows, begins = [], []
    for period in PERIODS:
        if period in deaths:
            deaths[period].die()
        ports = [node.port for node in (*world.origins, *world.regional)]
        before = [(port.sent_bytes, port.small_bytes) for port in ports]
        begins.append(loop.time())
        await asyncio.sleep(part_s)
        sent = [(port.sent_bytes - first) * 8 / part_s for port, (first, _) in zip(ports, before, strict=True)]
        told = [(port.small_bytes - first) * 8 / part_s for port, (_, first) in zip(ports, before, strict=True)]
        rows.append(
            {
                "period": period,
                "origins_mbit_per_s": " and ".join(f"{rate / 1e6:.0f}" for rate in sent[:2]),
                "of_which_told_mbit_per_s": round(max(told[:2]) / 1e6, 2),
                "regional_mbit_per_s": round(max(sent[2:]) / 1e6),
            }
        )
    moved = await _lose_edges(world)
    await publishing
    await asyncio.sleep(_END_S)
    for row, begin in zip(rows, begins, strict=True):
        delays = sorted(delay for node in world.edges for at, delay in node.delays if begin <= at < begin + part_s)
        row |= {
            "segments": len(delays),
            "delay_p50_ms": round(delays[len(delays) // 2] * 1000),
            "delay_p99_ms": round(delays[int(len(delays) * 0.99)] * 1000),
            "delay_max_ms": round(delays[-1] * 1000),
        }
    cut = Counter(SegmentId.decode(name).stream for name in world.cut_at)
    living = [node for node in world.edges if node.alive]
    rows[-1]["missing"] = sum(sum(cut[stream] for stream in node.wanted) - len(node.delays) for node in living)
    for task in asyncio.all_tasks(loop) - {asyncio.current_task()}:
        task.cancel()
    return [*rows, moved]


async def _lose_edges(world: World) -> dict[str, Any]:
    """Kill edges, whose viewers come back to the origin and go where it sends them; return how they fared."""
    loop, origin = world.loop, world.origins[1]
    nodes = {f"rtmp://{node.name}": node for node in world.edges}
    dead = world.edges[:: len(world.edges) // LOST_EDGES][:LOST_EDGES]
    for node in dead:
        node.die()
    begin, homeless = loop.time(), sum(node.port.viewers for node in dead)
    due = [begin + world.rng.uniform(0.0, RETURN_S) for _ in range(homeless)]
    heapify(due)
    placed, misled, refused, choosing_s = 0, 0, 0, 0.0
    waits = []
    while due:
        at = heappop(due)
        await asyncio.sleep(max(at - loop.time(), 0.0))
        began = time.perf_counter()
        base = origin.book.choose("rtmp")
        choosing_s += time.perf_counter() - began
        if base is not None and nodes[base].alive:
            nodes[base].port.viewers += 1
            placed += 1
            waits.append(at - begin)
            continue
        misled += base is not None
        refused += base is None
        if at - begin < 30.0:
            heappush(due, at + 1.0)  # as players do that are refused
    counts = [node.port.viewers for node in world.edges if node.alive]
    return {
        "lost_edges": len(dead),
        "viewers_who_came_back": homeless,
        "placed": placed,
        "within_s": round(max(waits), 1),
        "sent_to_a_dead_edge_first": misled,
        "found_no_edge": refused,
        "fullest_port_percent": round(100 * max(counts) * RATE / PORT_RATE, 1),
        "fullest_edge_percent": round(100 * max(counts) / MOST_VIEWERS, 1),
        "emptiest_edge_percent": round(100 * min(counts) / MOST_VIEWERS, 1),
        "choice_us": round(choosing_s / (placed + misled + refused) * 1e6),
    }


def run(
    edges: int = 350, regions: int = 5, streams: int = 20, seconds: float = 24.0, viewers: int = 1_000_000
) -> list[dict[str, Any]]:
    """Return a row for each period, and one for what became of the viewers of edges that died."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    loop = VirtualLoop()
    plan = Plan(edges=edges, regions=regions, streams=streams, seconds=seconds, viewers=viewers)
    try:
        return loop.run_until_complete(_run(plan, loop))
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        structlog.reset_defaults()


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"what": f"{row.get('period', 'then')}: {key}", "": row[key]} for row in rows for key in row if key != "period"
    ]


def document(rows: list[dict[str, Any]], images: Path) -> str:
    del images
    *periods, moved = rows
    heads = list(periods[-1])
    told = [{key.replace("_", " "): row.get(key, "") for key in heads} for row in periods]
    return f"{table(told)}\n\n{table([{key.replace('_', ' '): value for key, value in moved.items()}])}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench edge_simulation", description=__doc__)
    parser.add_argument("--edges", type=int, default=350)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=24.0)
    options = parser.parse_args()
    print(table(shown(run(edges=options.edges, streams=options.streams, seconds=options.seconds))))


if __name__ == "__main__":
    main()
