"""What the tests of the ladder share: a stream of known rates, and a viewer behind a link of a given speed."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass

from flow_kit import AUDIO, DISPOSABLE, INTER, KEY, LOG, Published, Viewer

from flowctl.fanout import Fanout
from flowctl.flow import CLASS_COUNT
from flowctl.ladder import LadderSettings, LadderStep, step_rates, useful_steps
from flowctl.ledger import LedgerKind
from flowctl.limits import Limits
from flowctl.policy import LivePolicy
from flowctl.sender_types import SenderSettings
from flowctl.testing import ManualGroup

STEP_S = 0.04
LIVE_LIMITS = Limits.parse("2MiB,2048,4s", "4MiB,4096,10s")
KERNEL_BYTES = 128 * 1024


@dataclass(frozen=True)
class Stream:
    """25 frames a second in groups of two seconds, every third frame disposable, and 25 audio messages a second."""

    key_bytes: int = 30_000
    inter_bytes: int = 4000
    disposable_bytes: int = 4000
    audio_bytes: int = 400
    group_frames: int = 50

    def messages(self, number: int):
        """Yield (class, size) of the messages of frame `number`."""
        if self.key_bytes:
            if number % self.group_frames == 0:
                yield KEY, self.key_bytes
            elif number % 3 == 2 and self.disposable_bytes:
                yield DISPOSABLE, self.disposable_bytes
            else:
                yield INTER, self.inter_bytes
        if self.audio_bytes:
            yield AUDIO, self.audio_bytes

    @property
    def needed(self) -> tuple[float, float, float, float]:
        """Bytes per second that the steps of the ladder need."""
        rates = [0.0] * CLASS_COUNT
        frames = self.group_frames * 3  # the pattern of disposable frames repeats with these
        for number in range(frames):
            for item, size in self.messages(number):
                rates[item] += size / (frames * STEP_S)
        return step_rates(rates)

    def best_step(self, share: float) -> LadderStep:
        """Return the best step that a link of `share` of the whole rate can hold, the lowest where none."""
        needed = self.needed
        steps = useful_steps(needed)
        return next((step for step in steps if needed[step] <= share * needed[0]), steps[-1])


class Link:
    """A kernel's buffer and a link behind it, that carries `rate` bytes a second, in lumps if it is told to.

    Attributes:
        received: all that the kernel has taken.
        buffered_bytes: what of it the link has not carried yet.
    """

    def __init__(self, clock, rate, kernel_bytes, lump_bytes=1):
        self.clock = clock
        self.rate = rate
        self.kernel_bytes = kernel_bytes
        self.lump_bytes = lump_bytes
        self.received = bytearray()
        self.buffered_bytes = 0
        self.credit = 0.0
        self.last = clock()

    def sendmsg(self, buffers, /):
        return self.send(b"".join(buffers))

    def send(self, data, /):
        self.carry()
        count = min(len(data), self.kernel_bytes - self.buffered_bytes)
        if count <= 0:
            raise BlockingIOError(errno.EAGAIN, "the kernel is full")
        self.received += data[:count]
        self.buffered_bytes += count
        return count

    def carry(self):
        """Let the link carry what it could since the last call; return whether the kernel has room."""
        now = self.clock()
        self.credit += (now - self.last) * self.rate
        self.last = now
        if self.credit >= min(self.lump_bytes, self.buffered_bytes):
            carried = min(int(self.credit), self.buffered_bytes)
            self.buffered_bytes -= carried
            self.credit = self.credit - carried if self.buffered_bytes else 0.0
        return self.buffered_bytes < self.kernel_bytes


class Scene:
    """A stream, a viewer behind a link, and time."""

    def __init__(
        self, stream=None, *, share=1.0, settings=None, limits=LIVE_LIMITS, kernel_bytes=KERNEL_BYTES, lump_bytes=1
    ):
        self.stream = stream or Stream()
        self.group = ManualGroup()
        self.published = Published(self.group)
        self.fanout = Fanout(self.published.log, self.group, flush_interval_s=0.0)
        self.rate = self.stream.needed[0]
        self.peer = Link(self.group.clock, share * self.rate, kernel_bytes, lump_bytes)
        settings = settings or SenderSettings(ladder=LadderSettings(), soft_too_long_s=0)
        self.viewer = Viewer(self.group, self.peer, policy=LivePolicy(), limits=limits, settings=settings)
        self.sender = self.viewer.sender
        self.viewer.host.unacknowledged = lambda: self.peer.buffered_bytes
        self.number = 0
        self.moves = []  # (time, move)
        self.began = self.group.now()

    def follow(self):
        self.viewer.follow(self.fanout)

    @property
    def now(self):
        return self.group.now() - self.began

    def run(self, seconds, share=None):
        """Let `seconds` pass, at another speed of the link from now on if `share` says so."""
        if share is not None:
            self.peer.carry()
            self.peer.rate = share * self.rate
        for _ in range(round(seconds / STEP_S)):
            for item, size in self.stream.messages(self.number):
                self.published.publish(item, size)
            self.number += 1
            self.group.run(STEP_S)
            if self.peer.carry():
                self.viewer.host.poll_writable()
                self.group.run()
            for entry in self.sender.unread_ledger():
                if entry.kind is LedgerKind.STEP:
                    self.moves.append((self.now, entry.move))
        return self

    @property
    def step(self):
        return self.sender.statistics().step

    def moves_since(self, when):
        return [move for at, move in self.moves if at >= when]

    def shares(self, first):
        """Share of the published messages from number `first` on that the viewer received, by class."""
        offered = Counter(self.published.classes[first:])
        got = Counter(item for origin, item, number, _ in self.viewer.frames if origin == LOG and number >= first)
        return {item: got[item] / offered[item] for item in (KEY, INTER, DISPOSABLE, AUDIO) if offered[item]}
