"""Fan-out: what slow viewers are spared, when their limits are noticed, what they keep of the log, and threads."""

from __future__ import annotations

import errno
import sys
import threading
from collections import deque

import pytest
from fanout_kit import TIMELESS, KeyFramesOnly, Stage, kept
from flow_kit import (
    AUDIO,
    DATA,
    DISPOSABLE,
    INTER,
    KEY,
    LOG,
    OWN,
    RESTART,
    Peer,
    Published,
    Viewer,
    check_accounts,
    check_edges,
    check_stream,
    frame,
)
from sender_kit import HARD_LIMIT, OVERLOADED, READY, SOFT_LIMIT, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.policy import LivePolicy, Thin
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.reasons import DropReason
from flowctl.testing import ManualGroup

__all__ = ["kept"]  # a fixture

# -- slow viewers


@pytest.mark.parametrize("room", [4, None])
def test_round_when_the_end_of_one_viewer_takes_another_away_has_counted_what_both_were_sent(room):
    stage = Stage(2)
    ending, other = stage.viewers
    ending.sender.send(frame(OWN, DATA, 1), DATA)
    ending.sender.when_drained(lambda _: other.sender.unfollow())
    ending.peer.failure = ConnectionResetError(errno.ECONNRESET, "gone")
    other.peer.room = room
    stage.published.script("I")
    stage.fanout.flush()
    other.drain()
    other.sender.send(frame(OWN, DATA, 2), DATA)
    other.drain()
    assert (other.numbers(), other.numbers(OWN)) == ([0, 1], [2])
    check_accounts(other)


def test_crossing_when_a_lagging_viewer_reaches_its_mark_is_noticed_at_publish():
    stage = Stage(2, limits=by_messages(10, 1000))
    slow, fast = stage.viewers
    slow.peer.room = 0
    stage.publish("A")
    stage.published.script("A" * 8)
    assert slow.sender.state is OVERLOADED
    stage.published.script("A")
    assert SOFT_LIMIT in [change.new for change in slow.edges.changes]
    edge = next(change for change in slow.edges.changes if change.new is SOFT_LIMIT)
    assert (edge.value, edge.limit) == (10.0, 10)
    stage.published.script("A" * 100)
    assert fast.edges.changes == [], "what the kernel was not offered yet is no sign of a slow viewer"


def test_crossing_when_bytes_grow_is_noticed_at_publish_too():
    limits = Limits(size=AxisLimits(soft=5000, hard=100_000))
    stage = Stage(1, limits=limits)
    (viewer,) = stage.viewers
    viewer.peer.room = 0
    stage.publish("A", 100)
    while viewer.sender.state is OVERLOADED and len(viewer.edges.changes) == 1:
        stage.published.script("A", 100)
        assert len(stage.published.classes) < 60
    edge = viewer.edges.changes[1]
    assert (edge.new, edge.limit) == (SOFT_LIMIT, 5000)
    assert 5000 <= edge.value < 5000 + 196


def test_limits_when_set_tighter_for_a_lagging_viewer_act_at_the_next_message():
    stage = Stage(1, limits=by_messages(1000))
    (viewer,) = stage.viewers
    viewer.peer.room = 0
    stage.publish("AA")
    viewer.sender.set_limits(by_messages(3, 1000))
    assert viewer.sender.state is OVERLOADED
    stage.published.script("A")
    assert SOFT_LIMIT in [change.new for change in viewer.edges.changes]


def test_thinning_when_soft_is_reached_skips_to_a_key_frame_with_headers_and_no_older_sound():
    stage = Stage(1, limits=by_messages(8, 1000, 4))
    (viewer,) = stage.viewers
    viewer.peer.room = 5
    stage.publish("IAIA")
    stage.publish("KAI")
    stage.publish("A")
    assert [change.new for change in viewer.edges.changes[:2]] == [OVERLOADED, SOFT_LIMIT]
    viewer.drain()
    sent = [(origin, number) for origin, _, number, _ in viewer.frames[-6:]]
    assert sent == [(LOG, 1), (RESTART, 5), (RESTART, 5), (LOG, 5), (LOG, 6), (LOG, 8)]
    dropped = viewer.sender.statistics().dropped
    assert dropped[DropReason.THINNED].of(AUDIO) == 2
    stage.publish("IKI")
    assert viewer.numbers()[-2:] == [10, 11]
    assert viewer.sender.statistics().restarts == 2
    stage.check()


def test_recovery_when_key_frame_comes_makes_one_ledger_entry():
    stage = Stage(1, limits=by_messages(6, 1000))
    (viewer,) = stage.viewers
    viewer.peer.room = 0
    stage.publish("IDIDIAIAI")
    viewer.drain()
    stage.publish("II")
    assert "waiting for a key frame" in viewer.sender.why()
    stage.publish("KI")
    entries = [entry for entry in viewer.sender.ledger() if entry.kind is LedgerKind.DROPS]
    (entry,) = entries
    assert sum(counts.total_messages for counts in entry.dropped.values()) == (
        viewer.sender.statistics().dropped_messages
    )
    assert viewer.numbers()[-2:] == [12, 13]
    stage.check()


def test_hard_limit_when_held_refuses_until_low_and_then_restarts_at_a_key_frame():
    stage = Stage(1, limits=by_messages(6, 6, 2, HardPolicy.HOLD))
    (viewer,) = stage.viewers
    viewer.peer.room = 0
    stage.publish("IIIIII")
    assert viewer.sender.state is HARD_LIMIT
    stage.publish("IAKIHC")
    held = viewer.sender.statistics().dropped[DropReason.HELD]
    assert held.by_name() == {"key": 1, "inter": 2, "audio": 1}
    viewer.drain()
    assert viewer.sender.state is READY
    assert viewer.classes().endswith("IIIIIIHC")
    stage.publish("IA")
    assert viewer.classes().endswith("HCA")
    stage.publish("KI")
    assert viewer.classes().endswith("HCAHHKI")
    assert viewer.host.closed == []
    stage.check()


# -- retention


@pytest.mark.parametrize(("script", "end"), [("KIIIA", "HHKI"), ("AAAAA", "KI")])
def test_entries_when_a_viewer_is_held_for_long_are_bounded(kept, script, end):
    stage = Stage(1, limits=by_messages(4, 4, policy=HardPolicy.HOLD), cache=CacheLimits(size_bytes=0), script="A")
    viewer = stage.viewers[0]
    viewer.give(0)
    for _ in range(300):
        stage.publish(script, 2000)
    assert viewer.sender.state is HARD_LIMIT
    assert kept() < 800, "1 MiB of log at most, a fourth of what was published"
    viewer.drain()
    stage.publish("KI")
    assert viewer.classes().endswith(end)
    assert kept() == 1
    stage.check()


# -- threads


class LiveGroup(ManualGroup):
    """A group whose owner is the thread that made it; others may ask it for calls, which all come at once."""

    def __init__(self):
        super().__init__()
        self.owner = threading.get_ident()
        self.asked = deque()

    def in_thread(self):
        return threading.get_ident() == self.owner

    def call_later(self, _delay_s, callback, *args):
        self.asked.append((callback, args))

    def run(self, seconds=0.0):
        self.clock.advance(seconds)
        for _ in range(len(self.asked)):
            callback, args = self.asked.popleft()
            callback(*args)


class Stutter(Peer):
    """Takes a few bytes, then meets EAGAIN, over and over."""

    def send(self, data, /):
        self.writes += 1
        if self.writes % 2:
            self.eagains += 1
            raise BlockingIOError(errno.EAGAIN, "scripted")
        self.received += data[:90]
        return min(90, len(data))


@pytest.fixture
def fine_switches():
    """Let threads take turns so often that they meet in the middle of things."""
    before = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(before)


def test_publishing_and_flushing_on_two_threads_keeps_every_stream_whole(fine_switches):
    group = LiveGroup()
    published = Published(group)
    fanout = Fanout(published.log, group, flush_interval_s=0)
    fast = Viewer(group, policy=LivePolicy(), limits=by_messages(1, 1))
    tight = Viewer(group, Stutter(), policy=LivePolicy(), limits=by_messages(12, 100_000), settings=TIMELESS)
    patient = Viewer(group, Stutter(), settings=TIMELESS)
    viewers = [fast, tight, patient]
    for viewer in viewers:
        viewer.follow(fanout)
    group.run()
    assert fanout.statistics().members == 3

    def publish():
        for number in range(2000):
            item = KEY if number % 40 == 0 else (INTER, AUDIO, DISPOSABLE)[number % 3]
            published.publish(item, 30)

    publisher = threading.Thread(target=publish)
    fine_switches(0.00001)
    publisher.start()
    while publisher.is_alive() or group.asked or any(viewer.sender.load().messages for viewer in viewers):
        group.run()
        for viewer in viewers:
            viewer.host.poll_writable()
    publisher.join()
    everything = list(range(2000))
    assert fast.numbers() == everything
    assert fast.edges.changes == []
    assert patient.numbers() == everything
    for viewer in viewers:
        check_accounts(viewer)
        check_edges(viewer)
        check_stream(viewer, published)


def test_episode_when_a_key_frame_ends_a_refusal_that_nobody_has_noticed_has_no_negative_counts():
    group = ManualGroup()
    published = Published(group)
    viewer = Viewer(group, policy=KeyFramesOnly(), limits=Limits(target_delay_ms=0), settings=TIMELESS)
    viewer.follow(Fanout(published.log, group, adaptive=False))
    group.run(0.01)
    published.script("I")
    viewer.sender.set_policy(LivePolicy())
    published.script("AIKIAK")
    viewer.sender.thin(Thin.NOTHING)
    group.run(0.1)
    assert not viewer.host.closed
    assert viewer.sender.statistics().dropped[DropReason.REFUSED].of(INTER) == 2
    assert viewer.numbers()[-2:] == [5, 6]
