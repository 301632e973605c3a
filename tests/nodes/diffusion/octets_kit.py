"""A loop in virtual time, links with delay and rate, and a peer that speaks the protocol by its octets alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import selectors

from flowctl.errors import BrokenError, ClosedError
from flowctl.nodes.diffusion.pool.memory import MemoryPool
from flowctl.nodes.diffusion.pool.pool import sha256_of
from flowctl.nodes.diffusion.streams.memory import memory_pair
from flowctl.pollgroup import PollGroup


class _NoWaiting(selectors.DefaultSelector):
    """Where the loop would sleep, its clock moves instead."""

    loop: VirtualLoop

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout != 0:
            assert timeout is not None, "nothing will ever happen any more"
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves when there is nothing to do: seconds pass in no time, and always in the same way."""

    def __init__(self):
        selector = _NoWaiting()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0

    def time(self):
        return self.now


def in_virtual_time(coroutine, limit_s=600.0):
    """Run a coroutine; it fails when it takes more than so many seconds of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(coroutine, limit_s))


def virtual(test):
    @functools.wraps(test)
    def run(*args, **named):
        in_virtual_time(test(*args, **named), 5000.0)

    return run


def clock():
    return asyncio.get_running_loop().time()


def by_name(data):
    """Let an object begin with its id and a slash."""
    found, slash, _ = data.partition(b"/")
    if not slash or not found:
        raise ValueError("no name in front")
    return found


def named(*names, size=10):
    return {item: item + b"/" + bytes(size - len(item) - 1) for item in names}


def hashed(count, size=100, salt=b""):
    return {sha256_of(data): data for number in range(count) for data in [(b"%d%s/" % (number, salt)).ljust(size)]}


def pool_of(objects, **arguments):
    pool = MemoryPool(**arguments)
    assert pool.add(objects) == {}
    return pool


async def until(pool, count):
    grown = asyncio.Event()
    unwatch = pool.watch(grown.set)
    while len(pool) < count:
        grown.clear()
        await grown.wait()
    unwatch()


def text(octets):
    return octets.hex(" ").upper()


class RawPeer:
    """One end of a stream that says and hears octets, written from the specification."""

    def __init__(self, stream):
        self.stream = stream
        self.heard = b""

    async def says(self, octets):
        await self.stream.write(bytes.fromhex(octets_of(octets)))

    async def hears(self, octets):
        wanted = bytes.fromhex(octets_of(octets))
        while len(self.heard) < len(wanted):
            piece = await self.stream.read()
            assert piece, f"the end came after {text(self.heard)}"
            self.heard += piece
        assert text(self.heard[: len(wanted)]) == text(wanted), f"{text(self.heard)} instead of {text(wanted)}"
        self.heard = self.heard[len(wanted) :]

    async def hears_the_end(self):
        while piece := await self.stream.read():
            self.heard += piece
        assert not self.heard, text(self.heard)

    async def hears_nothing(self):
        """See that nothing comes for a while (of virtual time)."""
        reading = asyncio.ensure_future(self.stream.read())
        done, _ = await asyncio.wait([reading], timeout=5.0)
        if done:
            self.heard += reading.result()
        else:
            reading.cancel()
        assert not self.heard, text(self.heard)


def octets_of(text):
    """Return octets as text, where ``'a`` is an id, ``#a`` its announcement with its size, ``=a`` its object of 3."""

    def spelled(match):
        sign, letter = match.group()
        return {"'": "41 %02X", "#": "82 41 %02X 03", "=": "43 %02X 2F 00"}[sign] % ord(letter)

    return re.sub(r"['#=][a-z]", spelled, text).replace("|", " ")


async def check_conversation(peer, script, **steps):
    """Play a conversation: of each line, octets behind > are said to our side, those behind < are heard from it.

    A dot is a time that passes, a dash that nothing is heard, ``end`` the end of the stream; else it is one of `steps`.
    """
    for line in filter(None, map(str.strip, script.splitlines())):
        sign, _, rest = line.partition(" ")
        if sign in "<>":
            await (peer.says if sign == ">" else peer.hears)(rest)
        elif sign in "-.":
            await (peer.hears_nothing() if sign == "-" else asyncio.sleep(float(rest)))
        elif sign == "end":
            await peer.hears_the_end()
        else:
            done = steps[sign](*rest.split())
            if inspect.isawaitable(done):
                await done


class DelayedStream:
    """A stream over a link that takes its time, in virtual time."""

    def __init__(self, inner, delay_s=0.0, bytes_per_s=0.0):
        self._inner, self._delay_s, self._bytes_per_s = inner, delay_s, bytes_per_s
        self._free_at = 0.0
        self._queue = asyncio.Queue()
        self._carrier = asyncio.ensure_future(self._carry())

    async def _carry(self):
        while True:
            due, data = await self._queue.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if data is None:
                self._inner.close()
                return
            await self._pass_on(data)

    async def _pass_on(self, data):
        with contextlib.suppress(BrokenError, ClosedError):  # the next write is told
            await self._inner.write(data)

    async def read(self):
        return await self._inner.read()

    async def write(self, data):
        if self._carrier.done() or self._inner._outgoing.deaf:
            await self._inner.write(data)
            return
        now = clock()
        self._free_at = max(now, self._free_at) + (len(data) / self._bytes_per_s if self._bytes_per_s else 0.0)
        self._queue.put_nowait((self._free_at + self._delay_s, data))
        await asyncio.sleep(self._free_at - now)

    def close(self, details=""):
        self._queue.put_nowait((clock(), None))


def link(delay_s=0.0, bytes_per_s=0.0):
    """Return two ends of a link: the second one's output has the rate."""
    one, other = memory_pair()
    return DelayedStream(one, delay_s), DelayedStream(other, delay_s, bytes_per_s)


def on_each_loop(test):
    """Run a test ``(group, ...)`` on each kind of loop, with a poll group whose connections are closed in the end."""

    @functools.wraps(test)
    def played(loop_factory, **named):
        async def run():
            group = PollGroup.on_running_loop("test")
            try:
                await asyncio.wait_for(test(group, **named), 20.0)
            finally:
                group.stop()

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run())

    _, *others = inspect.signature(test).parameters.values()
    also = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    played.__signature__ = inspect.Signature([*others, also])
    return played
