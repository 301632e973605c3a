"""The outbound side: the server of one peer, which is told what the pool has and sent what it asks for.

Theory of operation. The *FIFO* has what was announced and is not acknowledged, in order. It keeps its entries of the
pool, so that what was announced can be sent although the pool has evicted it; an object is let go when it was sent, for
it may be asked for once. How many there are is the client's wish within `max_outstanding`; how many bytes they keep is
bounded by `MOST_KEPT_BYTES`: beyond it fewer ids are announced than were asked for. And a peer that does not ask for
what it was told of ends when the pool has let that go (`KEPT_FOR_S`), so that all peers together cannot keep much.

A client that has subscribed is told of the *topics* that it wants, and that it may have (`ServerChecks`). Where it
wants one more, what the pool has of it comes first: for each topic it is known up to where it was told.

A request that blocks waits for the first new object of the pool, for the end of the peer, or for `stop`. Nothing is
lost by an end then: the client has acknowledged all.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from fnmatch import translate
from glob import escape
from itertools import islice
from typing import Final, Protocol

from flowctl.errors import BrokenError, LimitExceededError, RemoteProtocolError
from flowctl.nodes.diffusion.errors import (
    AckedTooManyObjectIdsError,
    NoReplyError,
    RequestBlockingError,
    RequestedDuplicateObjectError,
    RequestedNothingError,
    RequestedTooManyBytesError,
    RequestedTooManyObjectIdsError,
    RequestedUnavailableObjectError,
    RequestNonBlockingError,
)
from flowctl.nodes.diffusion.inbox import Inbox, PeerStream
from flowctl.nodes.diffusion.objects import ObjectId, short_id
from flowctl.nodes.diffusion.pool.pool import ZERO_TICKET, ObjectPool, PoolEntry
from flowctl.nodes.diffusion.wire.codec import MAX_ITEMS, MAX_OBJECT_BYTES, encode, reply_bytes
from flowctl.nodes.diffusion.wire.protocol import (
    SIZE_LIMIT_BYTES,
    TIME_LIMIT_S,
    Announced,
    Message,
    Prove,
    ReplyIds,
    ReplyObjects,
    RequestIds,
    RequestObjects,
    State,
    Subscribe,
    Tell,
    after,
)

MOST_KEPT_BYTES: Final = 64 << 20
"""Octets of objects announced to one peer and not sent yet that are kept for it, beside the last of them."""
KEPT_FOR_S: Final = 30.0
"""Time for which announced objects are kept for a peer after the pool has let them go: an honest peer asks within
seconds. Each connection may keep other objects, so many idle ones would hold many times the limit of the pool."""
_LOOK_S: Final = 5.0
MOST_INPUT_BYTES: Final = 2 * SIZE_LIMIT_BYTES[State.IDLE]
"""Octets of pipelined requests that are read ahead from a client; then it has to wait."""
MOST_TOPICS: Final = 4096
"""Topics that a client may want at a time: four times as many as a node has streams."""
MOST_PATTERNS: Final = 64
"""Topics of a client that may have wildcards (``*``, ``?`` or ``[``): each is tried with each topic of the pool."""
MOST_WILD: Final = 8
"""Wildcards in one pattern: a pattern of 500 takes 50 ms to read, and a useful one has only a few."""
_TOPICS_KNOWN: Final = 16_384
_WALK_REST_S: Final = 0.02
"""Least pause after a walk through the pool for topics that are new to a client: 7000 objects take 2 ms, and the client
can cause the next walk with 30 octets."""
_WALK_REST_FACTOR: Final = 3.0
"""Pause of all clients of a node after a walk of one, as a multiple of its duration: walks get a quarter of the thread,
however many clients there are."""
_WORDS_PER_LOOK: Final = 512
"""Choices of topics and proofs that a client may send without a pause in each `_LOOK_S`; `MOST_TOPICS` at once."""
_WORD_REST_S: Final = 0.01
"""Pause after each further one: it costs this node 10 us, and the client 4 octets."""
_ESCAPED: Final = re.compile(r"\[([*?[])\]")


def check_pattern(topic: str) -> None:
    wild = sum(map(topic.count, "*?["))
    if wild > MOST_WILD:
        raise LimitExceededError(
            "wildcards", wild, MOST_WILD, f"a pattern of topics has {wild} of * ? and [, the limit is {MOST_WILD}"
        )


class ServerChecks(Protocol):
    """Says what one client may have."""

    def prove(self, proof: bytes) -> None:
        """The client says who it is."""

    def tell(self, words: bytes) -> None:
        """The client tells of itself."""

    def allows(self, topic: str) -> bool:
        """Return whether the client may be told of a topic, and have its objects; asked again every few seconds."""


class Outbound:
    def __init__(
        self,
        stream: PeerStream,
        pool: ObjectPool,
        *,
        max_outstanding: int,
        guard: ServerChecks | None = None,
        walking: asyncio.Lock | None = None,
        on_reply: Callable[[int], object] = id,
    ) -> None:
        self._on_reply = on_reply  # told of the size of each reply
        self._guard = guard
        self._walking = walking or asyncio.Lock()
        self._topics: set[str] | None = None  # that are wanted, by their names. None: all
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._wanted: dict[str, bool] = {}  # what was found out of topics
        self._told: dict[str, int] = {}  # by topic, the ticket up to which it was announced
        self._told_all = ZERO_TICKET  # likewise, of every topic
        self._walks = False  # older objects of topics are to be looked for
        self._older: deque[PoolEntry] = deque()  # of topics that were not wanted when they were passed
        self._stream = stream
        self._pool = pool
        self._max_outstanding = max_outstanding
        self._wake = asyncio.Event()
        self._inbox = Inbox(stream, MOST_INPUT_BYTES, self._wake.set)
        self._fifo: dict[ObjectId, PoolEntry | None] = {}  # in order of announcement; None: was sent
        self._kept_bytes = 0
        self._announced_at: dict[ObjectId, float] = {}  # when each kept object was announced
        self._main: asyncio.Task[None] | None = None
        self._too_old: ObjectId | None = None  # why the peer is being ended
        self._ticket = ZERO_TICKET
        self._stopping = False
        self._words_left = MOST_TOPICS
        self.announced_count = 0
        self.sent_count = 0
        self.sent_bytes = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        reading, looking = loop.create_task(self._inbox.run()), loop.create_task(self._look())
        unwatch = self._pool.watch(self._wake.set)
        try:
            await self._converse()
        except asyncio.CancelledError:
            if self._too_old is None or (self._main is not None and self._main.uncancel() > 0):
                raise
            raise LimitExceededError(
                "kept_for_s",
                KEPT_FOR_S,
                KEPT_FOR_S,
                f"object {short_id(self._too_old)} was announced {KEPT_FOR_S:g} s ago, and neither asked for nor "
                f"acknowledged until it was gone",
            ) from None
        finally:
            self._main = None
            reading.cancel()
            looking.cancel()
            unwatch()
            self._fifo.clear()
            self._announced_at.clear()
            self._stream.close()

    def stop(self) -> None:
        """Announce nothing more; end as soon as the client waits for more, which is when it has all it wanted."""
        self._stopping = True
        self._wake.set()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._words_left = min(self._words_left + _WORDS_PER_LOOK, MOST_TOPICS)
            if self._guard is not None:
                self._wanted.clear()  # proofs may have expired
            self._too_old = self._too_long_kept(asyncio.get_running_loop().time())
            if self._too_old is not None and self._main is not None:
                self._main.cancel()
                return

    def _too_long_kept(self, now: float) -> ObjectId | None:
        for object_id, at in self._announced_at.items():
            entry = self._fifo[object_id]
            if now - at <= KEPT_FOR_S or entry is None:
                break
            there = self._pool.objects_after(entry.ticket - 1, 1)
            if not there or there[0].ticket != entry.ticket:
                return object_id
        return None

    async def _converse(self) -> None:
        state = State.INIT
        while state is not State.DONE:
            try:
                async with asyncio.timeout(TIME_LIMIT_S[State.INIT] if state is State.INIT else None):
                    message = await self._receive(state)
            except TimeoutError:
                raise NoReplyError(f"nothing within {TIME_LIMIT_S[State.INIT]:g} s in state {state.value}") from None
            if message is None:
                return
            state = after(state, message)
            reply: Message | None = None
            if isinstance(message, (Subscribe, Prove, Tell)):
                await self._take_word(message)
            elif isinstance(message, RequestIds):
                reply = await self._ids(message)
                if reply is None:
                    return
            elif isinstance(message, RequestObjects):
                reply = await self._objects(message)
            if reply is not None:
                octets = encode(reply)
                self._on_reply(len(octets))
                try:
                    await self._stream.write(octets)
                except BrokenError:
                    if state is State.IDS_BLOCKING:
                        return  # it left while it waited, and did not know of this
                    raise
                state = after(state, reply)
        if left := self._inbox.decoder.buffered_bytes:
            raise RemoteProtocolError(
                f"{left} bytes came in state {State.DONE.value}, where the peer may not send", code="UnexpectedMessage"
            )

    async def _receive(self, state: State) -> Message | None:
        inbox = self._inbox
        while True:
            self._wake.clear()
            message = inbox.decoder.next(state)
            if message is not None:
                inbox.used()
                return message
            if self._peer_left():
                if inbox.decoder.buffered_bytes:
                    raise BrokenError(f"the peer ended its stream within a message, in state {state.value}")
                return None
            await self._wake.wait()

    def _peer_left(self) -> bool:
        if self._inbox.failure is not None:
            raise self._inbox.failure
        return self._inbox.ended

    # -- ids

    async def _ids(self, request: RequestIds) -> ReplyIds | None:
        """Acknowledge, and return what is announced; None: nothing ever, for one side has ended."""
        self._check(request)
        for object_id in list(islice(self._fifo, request.ack_count)):
            self._let_go(object_id)
            del self._fifo[object_id]
        while True:
            self._wake.clear()
            if self._walks:
                async with self._walking:
                    began = time.perf_counter()
                    self._walk()
                    await asyncio.sleep(_WALK_REST_FACTOR * (time.perf_counter() - began))
                await asyncio.sleep(_WALK_REST_S)
            announced = [] if self._stopping else self._announce(request.req_count)
            if announced or not request.blocking:
                return ReplyIds(tuple(announced))
            if self._stopping or self._peer_left():
                return None
            message = self._inbox.decoder.next(State.IDS_BLOCKING, SIZE_LIMIT_BYTES[State.IDLE])
            if isinstance(message, (Subscribe, Tell)):
                self._inbox.used()
                await self._take_word(message)
                continue
            if message is not None:
                raise RemoteProtocolError("a reply came from the side that asks", code="UnexpectedMessage")
            await self._wake.wait()  # what came may be gone already, when this runs: then it waits again

    def _check(self, request: RequestIds) -> None:
        ack, req, open_ = request.ack_count, request.req_count, len(self._fifo)
        if ack > open_:
            raise AckedTooManyObjectIdsError(ack, open_)
        if open_ - ack + req > self._max_outstanding:
            raise RequestedTooManyObjectIdsError(req, self._max_outstanding)
        if not req and (request.blocking or not ack):
            raise RequestedNothingError
        if request.blocking and open_ > ack:
            raise RequestBlockingError(open_ - ack)
        if not request.blocking and open_ == ack:
            raise RequestNonBlockingError

    def _announce(self, most: int) -> list[Announced]:
        found: list[Announced] = []
        now = asyncio.get_running_loop().time()
        most = min(most, MAX_ITEMS)
        while len(found) < most and self._kept_bytes < MOST_KEPT_BYTES:
            entries: list[PoolEntry] = [self._older.popleft()] if self._older else []
            newer = not entries
            if newer:
                entries += self._pool.objects_after(self._ticket, most - len(found))
            if not entries:
                break
            for entry in entries:
                if self._kept_bytes >= MOST_KEPT_BYTES:
                    break
                if newer:
                    self._ticket = entry.ticket
                if not self._is_wanted(entry.topic):
                    continue
                if newer and len(self._told) >= _TOPICS_KNOWN:
                    self._forget_told()
                self._told[entry.topic] = entry.ticket
                if entry.object_id in self._fifo or entry.size_bytes > MAX_OBJECT_BYTES:
                    continue  # it was evicted and came again; or no reply has room for it
                self._fifo[entry.object_id] = entry
                self._announced_at[entry.object_id] = now
                self._kept_bytes += entry.size_bytes
                found.append(Announced(entry.object_id, entry.size_bytes))
        self.announced_count += len(found)
        return found

    # -- topics

    def _subscribe(self, message: Subscribe) -> None:
        try:
            topic = message.topic.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"a topic is no UTF-8: {error.reason}", code="MalformedMessage") from error
        if self._topics is None:
            self._topics, self._told_all = set(), self._ticket
        name = _ESCAPED.sub(r"\1", topic)
        if escape(name) == topic:
            if not message.wanted:
                self._topics.discard(name)
            elif len(self._topics) >= MOST_TOPICS and name not in self._topics:
                raise LimitExceededError("topics", len(self._topics) + 1, MOST_TOPICS)
            else:
                self._topics.add(name)
        elif not message.wanted:
            self._patterns.pop(topic, None)
        elif topic not in self._patterns:
            if len(self._patterns) >= MOST_PATTERNS:
                raise LimitExceededError("topics", len(self._patterns) + 1, MOST_PATTERNS)
            check_pattern(topic)
            self._patterns[topic] = re.compile(translate(topic))
        self._changed_topics()

    async def _take_word(self, message: Subscribe | Prove | Tell) -> None:
        """Take a word that needs no answer, and let other tasks run; there may be 40,000 of them in the inbox."""
        if isinstance(message, Subscribe):
            self._subscribe(message)
        elif self._guard is not None and isinstance(message, Prove):
            self._guard.prove(message.proof)
            self._changed_topics()
        elif self._guard is not None and isinstance(message, Tell):
            self._guard.tell(message.words)
        self._words_left = max(self._words_left - 1, 0)
        await asyncio.sleep(0 if self._words_left else _WORD_REST_S)

    def _changed_topics(self) -> None:
        self._wanted.clear()
        self._walks = self._ticket > ZERO_TICKET

    def _is_wanted(self, topic: str) -> bool:
        is_wanted = self._wanted.get(topic)
        if is_wanted is None:
            topics = self._topics
            asked = topics is None or topic in topics or any(item.match(topic) for item in self._patterns.values())
            if len(self._wanted) >= _TOPICS_KNOWN:
                self._wanted.clear()
            is_wanted = self._wanted[topic] = asked and (self._guard is None or self._guard.allows(topic))
        return is_wanted

    def _walk(self) -> None:
        self._walks = False
        self._older.clear()
        for entry in self._pool.objects_after(ZERO_TICKET, MOST_TOPICS**2):
            if entry.ticket > self._ticket:
                break
            if entry.ticket > self._told.get(entry.topic, self._told_all) and self._is_wanted(entry.topic):
                self._older.append(entry)

    def _forget_told(self) -> None:
        """Forget what was told of more streams than any server has: the newest are what counts."""
        self._told.clear()
        self._told_all = self._ticket

    def _let_go(self, object_id: ObjectId) -> None:
        entry = self._fifo[object_id]
        if entry is not None:
            self._kept_bytes -= entry.size_bytes
            self._fifo[object_id] = None
            del self._announced_at[object_id]

    # -- objects

    async def _objects(self, request: RequestObjects) -> ReplyObjects:
        wanted: dict[ObjectId, PoolEntry] = {}
        size_bytes = 0
        for object_id in request.object_ids:
            if object_id not in self._fifo:
                raise RequestedUnavailableObjectError(object_id)
            entry = self._fifo[object_id]
            if object_id in wanted or entry is None:  # at most once, be it in one request or in two
                raise RequestedDuplicateObjectError(object_id)
            wanted[object_id] = entry
            size_bytes += entry.size_bytes
        if not wanted:
            raise RequestedNothingError
        size = reply_bytes(len(wanted), size_bytes)
        if size > SIZE_LIMIT_BYTES[State.OBJECTS]:
            raise RequestedTooManyBytesError(size, SIZE_LIMIT_BYTES[State.OBJECTS])
        objects = await self._pool.read_objects([wanted[item] for item in self._fifo if item in wanted])
        for object_id in wanted:
            self._let_go(object_id)
        self.sent_count += len(objects)
        self.sent_bytes += size_bytes
        return ReplyObjects(tuple(objects))
