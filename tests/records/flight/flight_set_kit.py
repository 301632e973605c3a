"""What the tests of flights of sets share: a set of renditions, and a recorded viewer of it behind a line."""

from __future__ import annotations

import bisect
from math import inf

from flight_kit import RecordedViewer
from flow_kit import AUDIO, HEAD_BYTES, HEADER, KEY, frame
from slow_kit import LIVE_LIMITS, RATE, STEP_S, Kernel, stream

from flowctl.core.flow.policy import LivePolicy
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.streamset import StreamSet
from flowctl.testing import ManualGroup

SMALL, MIDDLE, LARGE = 500_000, 1_200_000, 2_500_000
SET = (SMALL, MIDDLE, LARGE)
LINES = {
    "30%": lambda _: 750_000,
    "50%": lambda _: 1_250_000,
    "85%": lambda _: 2_125_000,
    "120%": lambda _: 3_000_000,
    "drop": lambda now: 3_000_000 if now < 36 else 900_000,
}
STAY_S = 60.0


class SetScene:
    """A set of renditions that has been published for a while, and a recorded viewer of it behind a line.

    Attributes:
        group, place, renditions, sender: what a set needs of a connection.
    """

    def __init__(self, line, rates=SET, *, round_trip_s=0.0) -> None:
        self.group = ManualGroup()
        self.began = self.group.now()
        self.kernel = Kernel(self.group.clock, lambda now: line(now) / 8 / RATE)
        self.viewer = RecordedViewer(self.group, self.kernel, policy=LivePolicy(), limits=LIVE_LIMITS)
        self.kernel.host = self.viewer.host
        self.viewer.host.unacknowledged = self.unacknowledged_bytes
        self.round_trip_s = round_trip_s
        self.sender = self.viewer.sender
        self.place = self.renditions = None
        self.set = StreamSet()
        self.logs = {rate: StreamLog(str(rate)) for rate in rates}
        for rate, log in self.logs.items():
            self.set.put(str(rate), log)
        self.messages = stream(STAY_S + 6, 2.0)
        self.number = 0
        self.run(6.0)
        self.set.view(self)
        self.run(STAY_S)

    def window_bytes(self):
        return None

    def run(self, seconds: float) -> None:
        end = self.group.now() + seconds
        while self.group.now() < end - 1e-9:
            while self.number < len(self.messages) and self.messages[self.number][0] <= self.group.now() - self.began:
                self.publish(*self.messages[self.number])
                self.number += 1
            self.group.run(STEP_S)
            if self.kernel.carry() and self.place is not None:
                self.viewer.host.poll_writable()
                self.group.run()

    def unacknowledged_bytes(self) -> int:
        """Return what the peer has not acknowledged, which takes a round trip from when the line has carried it."""
        kernel = self.kernel
        heard = (kernel.clock() - kernel._began - self.round_trip_s, inf)
        place = bisect.bisect_right(kernel.arrivals, heard)
        return len(kernel.received) - (kernel.arrivals[place - 1][1] if place else 0)

    def publish(self, _, item, size) -> None:
        restart = (frame(b"R", HEADER, 1),) if item is KEY else ()
        for rate, log in self.logs.items():
            scaled = size if item is AUDIO else int(size * (rate / 8 - 16000) / (RATE - 16000))
            wire = frame(b"L", item, self.number, max(scaled, HEAD_BYTES))
            log.append(wire, item, self.group.now(), restart=restart)
