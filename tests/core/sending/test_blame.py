"""Blame in planted worlds: lines that are too short, a thread that comes late, a publisher that bursts."""

from __future__ import annotations

import pytest
from sender_kit import READY
from slow_kit import STEP_S, Scene, stream

from flowctl.core.sending.blame import Blame

SHARES = (0.27, 0.33, 0.4, 0.46, 0.53, 0.6, 0.66, 0.72, 0.79, 0.85)


class World(Scene):
    """A viewer, a thread that may sleep, and who is to blame each tenth of a second while the viewer is not READY."""

    def __init__(self, share, *, asleep=lambda _: False, **given) -> None:
        super().__init__(lambda now: share if isinstance(share, float) else share(now), flush_s=0.04, **given)
        self.asleep = asleep
        self.blames = []
        self._looked = 0

    def step(self) -> None:
        if self.asleep(self.now):
            self.group.clock.advance(STEP_S)
            self.kernel.carry()
        else:
            super().step()
            if self.kernel.carry():
                self.viewer.host.poll_writable()
        if int(self.now * 10) > self._looked:
            self._looked = int(self.now * 10)
            if self.sender.state is not READY:
                self.blames.append(self.sender.account().blamed)

    def share_of(self, who):
        return self.blames.count(who) / len(self.blames)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("joining", [False, True])
def test_line_when_it_is_too_short_is_to_blame_whatever_the_thread_did_at_first(share, joining):
    world = World(share, asleep=lambda now: now < 0.2)
    world.group.is_strained = True
    if joining:
        for at, item, size in stream(2, 2.0):
            world.published.publish(item, size)
            world.published_at.append(at)
    world.run(stream(30, 2.0), 3.0)
    world.group.is_strained = False
    world.blames.clear()
    world.run([entry for entry in stream(30, 2.0) if entry[0] > 3.0], 30.0)
    assert "to blame: peer's line" in world.sender.why()
    assert world.share_of(Blame.PEER_LINE) > 0.98


@pytest.mark.parametrize("line", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("seconds", [1.0, 1.5, 2.0])
def test_thread_when_its_turns_come_late_is_to_blame_for_all(line, seconds):
    world = World(line, asleep=lambda now: now > 5 and now % 3 < seconds)
    world.run(stream(30, 2.0), 30.0)
    assert world.blames, "it lags"
    assert world.share_of(Blame.SERVER_LOOP) > 0.9


def bursting(seconds):
    """Return a stream that comes to a stop for 2 s in each 10, and then sends what it has held back at once."""
    return sorted((at if at % 10 < 8 else at - at % 10 + 9.99, item, size) for at, item, size in stream(seconds, 2.0))


@pytest.mark.parametrize("line", [1.1, 1.3, 2.0])
def test_publisher_when_it_bursts_is_to_blame(line):
    world = World(line)
    world.run(bursting(40), 40.0)
    assert world.blames, "it lags"
    assert world.share_of(Blame.PUBLISHER_BURST) > 0.6


def test_line_when_it_stands_still_now_and_then_is_to_blame():
    world = World(lambda now: 0.0 if now % 8 < 3 else 1.5)
    world.run(stream(40, 2.0), 40.0)
    assert world.share_of(Blame.PEER_LINE) > 0.95
