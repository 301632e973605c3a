"""What the tests of the fan-out share: a log, its fan-out, and viewers under the live policy."""

from __future__ import annotations

import gc

import pytest
from flow_kit import (
    DISPOSABLE,
    HEAD_BYTES,
    INTER,
    Published,
    Viewer,
    check_accounts,
    check_edges,
    check_stream,
)

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.policy import LivePolicy, Verdict
from flowctl.core.outgoing.streamlog import Entry
from flowctl.core.sending.settings import SenderSettings
from flowctl.testing import ManualGroup

TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0)


class KeyFramesOnly(LivePolicy):
    """A viewer that has asked for less: no inter frames in whatever state."""

    def decide(self, state, message_class):
        return Verdict.DROP if message_class in (INTER, DISPOSABLE) else super().decide(state, message_class)


class Stage:
    """A log, its fan-out, and viewers under the live policy that have taken the cache and are members."""

    def __init__(self, count=0, *, interval_s=0.0, limits=NO_LIMITS, script="K", cache=None, **settings):
        self.group = ManualGroup()
        self.published = Published(self.group, cache=cache)
        self.fanout = Fanout(self.published.log, self.group, flush_interval_s=interval_s, **settings)
        self.published.script(script)
        self.viewers = [self.viewer(limits=limits) for _ in range(count)]
        for viewer in self.viewers:
            viewer.follow(self.fanout)
        self.group.run(1.0)
        assert self.fanout.statistics().members == count

    def viewer(self, peer=None, *, limits=NO_LIMITS, settings=TIMELESS):
        return Viewer(self.group, peer, policy=LivePolicy(), limits=limits, settings=settings)

    def publish(self, text, size=HEAD_BYTES):
        self.published.script(text, size)
        self.group.run()

    def check(self, **known):
        for viewer in self.viewers:
            check_accounts(viewer)
            check_edges(viewer)
            check_stream(viewer, self.published, **known)


def kept_of(kind):
    """Return how many objects of a class are alive."""
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


@pytest.fixture
def kept():
    """Return a function that counts the entries alive since the test began, with the garbage collector off."""
    gc.collect()
    gc.disable()
    before = {id(item) for item in gc.get_objects() if isinstance(item, Entry)}
    yield lambda: sum(isinstance(item, Entry) and id(item) not in before for item in gc.get_objects())
    gc.enable()
