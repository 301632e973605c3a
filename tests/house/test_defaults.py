"""The defaults of each public thing beside those of the others: with none changed, no one who can keep up is ended.

Each case fills something as full as its defaults allow, and has viewers with every default of limits and policies fall
behind it for half of the time that these allow. All of them must get through, and none may be ended.
"""

from __future__ import annotations

import errno
import inspect
from itertools import product

import pytest

import flowctl
import flowctl.asgi
from flowctl import DEFAULT_LIMITS, CacheLimits, Fanout, KeepAll, MessageClass, Sender, SenderSettings, StreamLog, Topic
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.live.config import LiveConfig
from flowctl.streamset import _KEPT_S
from flowctl.testing import ManualGroup, ManualHost

DATA, KEY, INTER = MessageClass.DATA, MessageClass.KEY, MessageClass.INTER
HALF_S = DEFAULT_LIMITS.age_ms.hard / 2000
"""Half of the time for which a peer may take nothing, by the defaults."""

MOST_LOOKS = 1000


def default_limits() -> set[Limits]:
    """Return all limits that something public has where it is given none; None stands for `DEFAULT_LIMITS`."""
    things = [getattr(module, name) for module in (flowctl, flowctl.asgi) for name in module.__all__]
    found = {LiveConfig().limits}
    for thing in filter(inspect.isclass, things):
        parameter = inspect.signature(thing.__init__).parameters.get("limits")
        if parameter is not None and parameter.default is not parameter.empty:
            found.add(parameter.default or DEFAULT_LIMITS)
    return found


class CountingPeer:
    """Takes `room` bytes, None for all, and keeps none of them."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.received = 0

    def send(self, data) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers) -> int:
        size = sum(map(len, buffers))
        count = size if self.room is None else min(size, self.room)
        if not count:
            raise BlockingIOError(errno.EAGAIN, "no room")
        self.room = None if self.room is None else self.room - count
        self.received += count
        return count


class Crowd:
    """Viewers of one log, with each default of limits beside each of policies."""

    def __init__(self, log: StreamLog, room: int | None = None) -> None:
        self.group = ManualGroup()
        self.log, self.fanout = log, Fanout(log, self.group)
        self.hosts, self.peers = [], []
        for limits, policy in product(default_limits(), [KeepAll(), *LIVE_POLICIES.values()]):
            host, peer = ManualHost(self.group), CountingPeer()
            host.sender = Sender(host, peer, limits=limits, policy=policy)
            self.hosts.append(host)
            self.peers.append(peer)
        self.take(room, 0)

    def join(self) -> None:
        cached = self.log.cached
        for host in self.hosts:
            host.sender.follow(self.fanout, start=cached, latest=self.log.latest is not None)

    def take(self, room: int | None, seconds: float) -> None:
        """Have all peers take `room` bytes, and let time pass."""
        for host, peer in zip(self.hosts, self.peers, strict=True):
            peer.room = room
            if room != 0:
                host.poll_writable()
        self.group.run(seconds)

    def check(self) -> None:
        """Check that all catch up, with none ended; what they were not sent was superseded."""
        self.take(None, 1.0)
        for _ in range(MOST_LOOKS):  # one that is given only so much ahead asks, or has a turn, again and again
            if not any(host.wants_writable or host.sender.load().messages for host in self.hosts):
                break
            self.take(None, 0.1)
        for host, peer in zip(self.hosts, self.peers, strict=True):
            statistics = host.sender.statistics()
            assert statistics.close_reason is None, (str(host.sender.limits), host.sender.why())
            assert {reason.name for reason in statistics.dropped} <= {"SUPERSEDED"}
            assert not statistics.queued.total_messages
            assert peer.received == statistics.sent.total_bytes


def fill(log: StreamLog, keys: int, size: int, now: float = 0.0) -> None:
    for key in range(keys):
        log.append(bytes(size), DATA, now, key=f"{key:06}")


@pytest.mark.parametrize("many", [True, False], ids=["many keys", "large values"])
def test_topic_when_full_loses_no_client_that_falls_behind(many):
    topic = Topic()
    keys = topic.max_keys if many else 64
    size = 20 if many else topic.max_value_bytes // keys - 6
    log = StreamLog(max_keys=topic.max_keys, max_value_bytes=topic.max_value_bytes)
    fill(log, keys, size)
    crowd = Crowd(log, room=1000)
    crowd.join()
    crowd.take(0, HALF_S)
    crowd.check()
    crowd.take(0, 0.1)
    fill(log, keys, size, crowd.group.now())
    crowd.take(0, HALF_S)
    assert {host.sender.load().messages for host in crowd.hosts} == {keys}
    crowd.check()
    assert {peer.received for peer in crowd.peers} == {2 * keys * size}


def test_topic_when_keys_change_rarely_loses_no_client_that_takes_a_little_at_a_time():
    log = StreamLog(max_keys=Topic().max_keys)
    crowd = Crowd(log, room=0)
    crowd.join()
    fill(log, 1000, 1000)
    for _ in range(30):
        crowd.take(1500, HALF_S)
    assert {host.sender.load().messages for host in crowd.hosts} != {0}
    crowd.check()


def test_cache_when_full_loses_no_viewer_that_takes_it_in_time():
    cache, log = CacheLimits(), StreamLog()
    size = cache.size_bytes // cache.messages - 1
    for number in range(cache.messages - 1):
        log.append(bytes(size), INTER if number else KEY, 0.0)
    crowd = Crowd(log, room=0)
    crowd.join()
    assert log.cached is not None
    while any(peer.received < log.tail.offset for peer in crowd.peers):
        crowd.take(cache.size_bytes // 16, HALF_S / 16)
    crowd.check()


def test_session_when_it_answers_with_its_longest_message_is_not_ended_for_that():
    """Also where its peer takes as little as a tenth of it in half of the time that a message may be old."""
    crowd = Crowd(StreamLog(), room=0)
    for host in crowd.hosts:
        host.sender.send(bytes(flowctl.WebSocketSession.max_message_bytes))
    for _ in range(10):
        crowd.take(flowctl.WebSocketSession.max_message_bytes // 10, HALF_S / 10)
    crowd.check()


def test_times_when_compared_let_the_milder_measure_come_first():
    hard_s, soft_s = DEFAULT_LIMITS.age_ms.hard / 1000, DEFAULT_LIMITS.age_ms.soft / 1000
    live = LiveConfig()
    assert live.return_after_s < soft_s < hard_s < SenderSettings().stuck_s
    assert hard_s <= _KEPT_S <= CacheLimits().duration_s, "a viewer that lags may still change over"
