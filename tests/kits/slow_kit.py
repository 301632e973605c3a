"""What the tests of slow viewers share: a stream, a viewer behind a link whose rate changes, and what it saw."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable

from flow_kit import AUDIO, DISPOSABLE, FRAMES, INTER, KEY, Published, Viewer, check_accounts, check_edges, check_stream

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.sending.settings import SenderSettings
from flowctl.testing import ManualGroup

STEP_S = 0.005
FPS = 30
RATE = 1_500_000 / 8
LIVE_LIMITS = Limits.parse("2MiB,2048,4s", "4MiB,4096,8s")
KERNEL_BYTES = 128 * 1024
SEGMENT_BYTES = 16 * 1024
Line = Callable[[float], float]


def jump(now: float) -> float:
    """Return a share of the stream's rate: more than enough and too little by turns of 5 s."""
    return 1.2 if now % 10 < 5 else 0.3


def wifi(now: float) -> float:
    """Return a share that is enough, but for pauses of 400 ms in each 2 s."""
    return 0.0 if now % 2 < 0.4 else 1.1


LINES: dict[str, Line] = {
    **{f"{share:.0%}": lambda _, share=share: share for share in (0.2, 0.5, 0.8, 0.85, 0.95)},
    "jump": jump,
    "wifi": wifi,
}


def stream(seconds: float, gop_s: float, *, seed: int = 1, disposable: bool = False, sound: bool = True):
    """Return (time, class, size) of a stream of 1.5 Mbit/s: 30 pictures and 43 pieces of sound a second."""
    rng, count = random.Random(seed), int(gop_s * FPS)
    video = (RATE - 16000) * gop_s
    key = video * (0.35 if count <= 30 else 0.2)
    inter = (video - key) / (count - 1)
    found = []
    for number in range(int(seconds * FPS)):
        place = number % count
        item = INTER if place else KEY
        if disposable and place % 3 == 2:
            item = DISPOSABLE
        found.append((number / FPS, item, max(200, int((inter if place else key) * rng.uniform(0.7, 1.3)))))
    found += [(number / 43, AUDIO, 372) for number in range(int(seconds * 43) if sound else 0)]
    return sorted(found)


class Kernel:
    """What lies between a Sender and its peer: a buffer with a low-water mark, and a link behind it.

    It takes up to `SEGMENT_BYTES` beyond the mark, as a kernel that fills a segment does.

    Attributes:
        told_at: share of the mark below which it tells that it takes more.
    """

    def __init__(self, clock, line: Line, lump_bytes: int = 1) -> None:
        self.clock = clock
        self.line = line
        self.lump_bytes = lump_bytes
        self.host = None
        self.told_at = 0.5
        self.received = bytearray()
        self.carried_bytes = 0
        self.able_bytes = 0.0
        self.arrivals: list[tuple[float, int]] = []  # (time, bytes carried by then)
        self._credit = 0.0
        self._began = self._last = clock()

    @property
    def held_bytes(self) -> int:
        return len(self.received) - self.carried_bytes

    @property
    def mark_bytes(self) -> int:
        return (self.host and self.host.unsent_limit_bytes) or KERNEL_BYTES

    def sendmsg(self, buffers, /) -> int:
        return self.send(b"".join(buffers))

    def send(self, data, /) -> int:
        room = self.mark_bytes - self.held_bytes
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "enough is unsent")
        count = min(len(data), room + SEGMENT_BYTES)
        self.received += data[:count]
        return count

    def carry(self) -> bool:
        """Let the link carry what it can since the last call; return whether the kernel tells that it takes more."""
        now = self.clock()
        able = self.line(now - self._began) * RATE * (now - self._last)
        self._last = now
        self.able_bytes += able
        self._credit += able
        if self._credit >= min(self.lump_bytes, self.held_bytes):
            count = min(int(self._credit), self.held_bytes)
            self._credit = min(self._credit - count, 1.0)
            if count:
                self.carried_bytes += count
                self.arrivals.append((now - self._began, self.carried_bytes))
        return self.held_bytes < self.mark_bytes * self.told_at


class Scene:
    """A stream, a viewer behind a link, and time; see `run`."""

    def __init__(
        self,
        line: Line,
        *,
        limits=LIVE_LIMITS,
        policy=None,
        settings=None,
        flush_s=0.0,
        lump_bytes=1,
        make_sender=None,
        leads=0,
    ) -> None:
        self.group = ManualGroup()
        self.published = Published(self.group, leads=leads)
        self.published_at: list[float] = []
        self.fanout = Fanout(self.published.log, self.group, flush_interval_s=flush_s)
        self.kernel = Kernel(self.group.clock, line, lump_bytes)
        settings = settings or SenderSettings()
        kind = Viewer if make_sender is None else type("Made", (Viewer,), {"make_sender": make_sender})
        self.viewer = kind(self.group, self.kernel, policy=policy or LivePolicy(), limits=limits, settings=settings)
        self.sender = self.viewer.sender
        self.kernel.host = self.viewer.host
        self.viewer.host.unacknowledged = lambda: self.kernel.held_bytes
        self.began = self.group.now()
        self.watch = None

    @property
    def now(self) -> float:
        return self.group.now() - self.began

    def follow(self) -> Scene:
        self.viewer.follow(self.fanout)
        return self

    def step(self) -> None:
        self.group.run(STEP_S)
        if self.kernel.carry():
            self.viewer.host.poll_writable()
            self.group.run()

    def run(self, messages, until: float) -> Scene:
        """Publish `messages` at their times and let time pass until `until`."""
        if not self.sender.following:
            self.follow()
        for at, item, size in messages:
            while self.now < at - 1e-9:
                self.step()
            self.published.publish(item, size)
            self.published_at.append(self.now)
        while self.now < until - 1e-9:
            self.step()
        return self

    # -- what it saw

    def arrived(self) -> list[tuple[int, object, float]]:
        """Return (number, class, time) of the messages of the log that arrived, in order."""
        found, at, index = [], 0, 0
        arrivals = self.kernel.arrivals
        for origin, item, number, size in self.viewer.frames:
            at += size
            while index < len(arrivals) and arrivals[index][1] < at:
                index += 1
            if index == len(arrivals):
                break
            if origin == b"L":
                found.append((number, item, arrivals[index][0]))
        return found

    def figures(self, since: float, until: float) -> dict[str, float]:
        """Return shares of line, pictures and sound, delays and the longest freeze of what was published in between."""
        numbers = [number for number, at in enumerate(self.published_at) if since < at <= until]
        classes = self.published.classes
        pictures = sum(classes[number] in FRAMES for number in numbers)
        sound = sum(classes[number] is AUDIO for number in numbers)
        seen = [entry for entry in self.arrived() if entry[0] >= numbers[0] and entry[0] <= numbers[-1]]
        video = [(number, at) for number, item, at in seen if item in FRAMES]
        delays = sorted(at - self.published_at[number] for number, at in video)
        came = [at for _, at in video]
        return {
            "line": self.kernel.carried_bytes / min(self.kernel.able_bytes, RATE * self.now),
            "pictures": len(video) / pictures,
            "sound": sum(item is AUDIO for _, item, _ in seen) / sound if sound else 1.0,
            "p50": delays[len(delays) // 2],
            "p95": delays[int(len(delays) * 0.95)],
            "freeze": max((b - a for a, b in itertools.pairwise(came)), default=0.0),
        }

    def check(self) -> None:
        """Check what holds for every viewer: accounts, edges, order and decodability."""
        check_accounts(self.viewer)
        check_edges(self.viewer)
        check_stream(self.viewer, self.published)
        assert not self.viewer.host.failures


class Steady(Scene):
    """A scene that goes on: the stream repeats, and the line is what it was told last."""

    def __init__(self, share: float, *, gop_s: float = 2.0, **given) -> None:
        self.share = share
        super().__init__(lambda _: self.share, **given)
        self._messages = stream(600, gop_s)
        self._next = 0

    def go(self, seconds: float, share: float | None = None) -> Steady:
        """Let `seconds` pass, at another share of the stream's rate from now on if `share` says so."""
        if share is not None:
            self.kernel.carry()
            self.share = share
        until, first = self.now + seconds, self._next
        while self._messages[self._next][0] < until:
            self._next += 1
        self.run(self._messages[first : self._next], until)
        return self
