"""Object diffusion: a node that has objects for its peers, and fetches what they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any, Final, Self

from flowctl.core.loop.faults import ErrorHook, log_error
from flowctl.errors import ClosedError
from flowctl.nodes.diffusion.decision import CentralPlanner, Planner
from flowctl.nodes.diffusion.gate import OpenGate, RequestGate
from flowctl.nodes.diffusion.inbound import Inbound
from flowctl.nodes.diffusion.inbox import PeerStream
from flowctl.nodes.diffusion.objects import ObjectId, PeerId
from flowctl.nodes.diffusion.outbound import Outbound, ServerChecks
from flowctl.nodes.diffusion.policy import Policy
from flowctl.nodes.diffusion.pool.pool import ObjectPool
from flowctl.nodes.diffusion.registry import DiffusionStatistics, Registry
from flowctl.nodes.diffusion.wire.protocol import Init, Message, Prove, Subscribe


class ObjectDiffusion:
    """One node: any number of peers to fetch from, and to serve. All of it lives on one loop.

    Args:
        pool: what this node has; what is fetched is added to it.
        policy: limits of the inbound side; `max_num_objects_outstanding` is that of the outbound side too.
        planner: decides who is asked for what. None: `CentralPlanner`.
        gate: what requests for objects pass through. None: nothing stops them.
        clock: monotonic seconds.
        rng: makes the choice between equal peers. None: one of its own.
        on_error: told of what a planner raises. None: it is logged.
        on_announced: told of the ids that a peer has announced, in their order. None: nobody.

    Attributes:
        pool: as given.
        policy: as given.
        last: peers that are asked only for what nobody else can give; may be changed at any time.
        served_bytes: octets of all replies to peers so far.
    """

    def __init__(
        self,
        pool: ObjectPool,
        *,
        policy: Policy | None = None,
        planner: Planner | None = None,
        gate: RequestGate | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        on_error: ErrorHook | None = None,
        on_announced: Callable[[PeerId, Sequence[ObjectId]], object] | None = None,
    ) -> None:
        self._topics: dict[str, None] | None = None  # that peers are to tell of. None: all
        self.pool: Final = pool
        self.policy: Final = policy or Policy()
        self._gate: Final[RequestGate] = gate or OpenGate()
        self._registry: Final = Registry(
            pool,
            policy=self.policy,
            planner=planner or CentralPlanner(),
            clock=clock,
            rng=rng or Random(),
            on_error=log_error if on_error is None else on_error,
            on_announced=on_announced,
        )
        self.last: Final = self._registry.last
        self._inbound: dict[PeerId, Inbound] = {}
        self._outbound: set[Outbound] = set()
        self._walking: Final = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # those that serve or fetch
        self._closed = False
        self.served_bytes = 0

    async def serve(self, stream: PeerStream, guard: ServerChecks | None = None) -> None:
        """Serve a peer until it has finished; the stream is closed then, however it ends.

        Args:
            stream: to a peer that fetches.
            guard: says what it may have. None: everything.

        Raises:
            RemoteProtocolError: the peer broke a rule.
            BrokenError: the connection is lost.
            StoreError: the pool could not read what it had announced.
            ClosedError: diffusion is closed.
        """
        self._begin(stream)
        await self._own(stream, self._serve(stream, guard))

    async def fetch_from(self, stream: PeerStream, peer: PeerId, proof: bytes = b"") -> None:
        """Fetch from a peer until it has nothing more and ends, or `leave`; the stream is closed then, however it ends.

        Args:
            stream: to a peer that serves.
            peer: names this connection; no other may have the name.
            proof: says to the peer who we are. Empty: nothing is said.

        Raises:
            RemoteProtocolError: the peer broke a rule, or sent what the pool found invalid: do not connect again.
            BrokenError: the connection is lost, or ended with objects that were announced and not fetched, or a reply
                took longer than 10 s (`NoReplyError`).
            LocalProtocolError: there is a peer of that name.
            ClosedError: diffusion is closed.
        """
        self._begin(stream)
        await self._own(stream, self._fetch(stream, peer, proof))

    def subscribe(self, *topics: str, wanted: bool = True) -> None:
        """Have all peers tell of topics from now on, or no more. From the first call on they tell of nothing else.

        Args:
            topics: patterns of what pools call the topics of their objects, as of `fnmatch`.
            wanted: whether they are wanted.
        """
        self._topics = {} if self._topics is None else self._topics
        for topic in topics:
            if (topic in self._topics) is wanted:
                continue
            if wanted:
                self._topics[topic] = None
            else:
                del self._topics[topic]
            for inbound in self._inbound.values():
                self._begin_task(inbound.subscribe(topic, wanted=wanted))

    def tell(self, *words: bytes) -> None:
        """Tell all peers that are fetched from of this node, in words that their guards understand."""
        for inbound in self._inbound.values():
            self._begin_task(inbound.tell(*words))

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def leave(self, peer: PeerId) -> None:
        """Stop fetching from a peer, in order: what is under way is waited for. One that is gone: no effect."""
        inbound = self._inbound.get(peer)
        if inbound is not None:
            inbound.leave()

    def gate_opened(self, peer: PeerId) -> None:
        """Decide for a peer again whose request the gate has not let through."""
        self._registry.release(peer)

    async def close(self, grace_s: float = 5.0) -> None:
        """Leave all peers, in order where that takes no longer than `grace_s` seconds. A second call has no effect."""
        self._closed = True
        for peer in list(self._inbound):
            self.leave(peer)
        for outbound in self._outbound:
            outbound.stop()
        tasks = list(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self._registry.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _begin(self, stream: PeerStream) -> None:
        if self._closed:
            stream.close()
            raise ClosedError("this diffusion is closed")

    async def _serve(self, stream: PeerStream, guard: ServerChecks | None) -> None:
        most = self.policy.max_num_objects_outstanding
        outbound = Outbound(
            stream,
            self.pool,
            max_outstanding=most,
            guard=guard,
            walking=self._walking,
            on_reply=self._count_reply,
        )
        self._outbound.add(outbound)
        try:
            await outbound.run()
        finally:
            self._outbound.discard(outbound)

    def _count_reply(self, size_bytes: int) -> None:
        self.served_bytes += size_bytes

    async def _fetch(self, stream: PeerStream, peer: PeerId, proof: bytes) -> None:
        with self._registry.peer(peer) as api:
            begins = partial(self._begins, proof)
            inbound = self._inbound[peer] = Inbound(stream, api, self._registry, self._gate, begins)
            try:
                await inbound.run()
            finally:
                del self._inbound[peer]

    def _begins(self, proof: bytes) -> list[Message]:
        """Return what a peer is told first: who we are, and what it is to tell of."""
        messages: list[Message] = [Init(), Prove(proof)] if proof else [Init()]
        if self._topics is not None:
            messages.append(Subscribe(wanted=False, topic=b"*"))  # which ends being told of everything
            messages += [Subscribe(wanted=True, topic=topic.encode()) for topic in self._topics]
        return messages

    async def _own(self, stream: PeerStream, conversation: Coroutine[Any, Any, None]) -> None:
        """Run a conversation as a task of ours, so that `close` can end it."""
        task = self._begin_task(conversation)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ClosedError("this diffusion was closed before the peer had finished") from None
        finally:
            stream.close()

    def statistics(self) -> DiffusionStatistics:
        """Return what is going on with those that are fetched from."""
        return self._registry.statistics()
