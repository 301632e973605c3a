"""Random histories: whatever happens, nothing is lost unaccounted, reordered, repeated or undecodable."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
from fanout_kit import KeyFramesOnly
from flow_kit import (
    AUDIO,
    CONTROL,
    DATA,
    DISPOSABLE,
    HEADER,
    INTER,
    KEY,
    OWN,
    Published,
    Viewer,
    check_accounts,
    check_edges,
    check_stream,
    frame,
    move,
)
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.policy import DropDroppable, KeepAll, LivePolicy, Thin
from flowctl.core.flow.state import SendState
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.reasons import CloseReason, DropReason
from flowctl.testing import ManualGroup

POLICIES = (
    LivePolicy(),
    KeepAll(),
    DropDroppable(),
    DropDroppable(SendState.SOFT_LIMIT, SendState.SOFT_LIMIT),
    KeyFramesOnly(),
)
TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0, turn_bytes=2000, turn_messages=7, control_bytes=1 << 20)

STEERED = (
    TIMELESS,
    replace(TIMELESS, sample_s=0.1),
    replace(TIMELESS, sample_s=0.1, return_after_s=0.2, return_delay_s=1.0),
    replace(TIMELESS, sample_s=0.1, age_from=AgeSource.DELAY),
    replace(TIMELESS, return_after_s=0.01),
)

media = st.sampled_from([KEY, KEY, INTER, INTER, INTER, DISPOSABLE, DISPOSABLE, AUDIO, AUDIO, HEADER, DATA, CONTROL])
sizes = st.sampled_from([11, 11, 50, 100, 400, 2500])
rooms = st.sampled_from([0, 1, 5, 11, 60, 300, 1000])


@st.composite
def limits(draw):
    """Limits from far too small to far too large, each axis on or off."""

    def axis(low, high, name):
        soft = draw(st.one_of(st.just(0), st.integers(low, high)))
        return AxisLimits(soft=soft, hard=draw(st.sampled_from([0, soft, 2 * soft, 8 * soft])), name=name)

    return Limits(
        size=axis(1, 4000, "bytes"),
        messages=axis(1, 30, "messages"),
        age_ms=axis(1, 3000, "age"),
        overhead_bytes=draw(st.sampled_from([0, 96])),
        hard_policy=draw(st.sampled_from(HardPolicy)),
        target_delay_ms=draw(st.sampled_from([0, 0, None, 100, 1000])),
    )


class FanoutHistory(RuleBasedStateMachine):
    """Several viewers of one log: some slow in any way, one whose peer takes everything."""

    viewer_class = Viewer
    alone_at_the_end = 0

    def __init__(self):
        super().__init__()
        self.group = ManualGroup()
        self.published = Published(self.group)
        # The second one looks at the clock after each viewer, so that anything may happen in the middle of its rounds.
        self.fanouts = [
            Fanout(self.published.log, self.group, adaptive=False),
            Fanout(self.published.log, self.group, squad_size=2, turn_s=0),
        ]
        self.viewers = []
        self.own = Counter()
        self.offered = {}
        self.expired = set()
        self.fast = self.new_viewer(LivePolicy(), Limits.parse("500,5,100ms", "500,5,100ms"), SenderSettings())
        self.follow(self.fast)

    def new_viewer(self, policy, limit, settings=TIMELESS):
        viewer = self.viewer_class(self.group, policy=policy, limits=limit, settings=settings)
        viewer.kernel = 0
        viewer.host.unacknowledged = lambda: viewer.kernel
        self.viewers.append(viewer)
        self.offered[viewer] = Counter()
        return viewer

    def follow(self, viewer):
        viewer.follow(self.fanouts[len(self.viewers) % 2])
        self.offered[viewer].update(self.published.classes[viewer.joined :])

    @initialize(
        policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3),
        limit=limits(),
        settings=st.sampled_from(STEERED),
    )
    def start(self, policies, limit, settings):
        for policy in policies:
            self.follow(self.new_viewer(policy, limit, settings))

    slow = st.integers(1, 6)

    def pick(self, index):
        return self.viewers[1 + index % (len(self.viewers) - 1)]

    @rule(message_class=media, size=sizes)
    def publish(self, message_class, size):
        self.published.publish(message_class, size)
        for viewer in self.viewers:
            if viewer.sender.following is not None:
                self.offered[viewer][message_class] += 1

    @rule(text=st.text("KIDA", min_size=1, max_size=12), size=sizes)
    def publish_many(self, text, size):
        for letter in text:
            self.publish({"K": KEY, "I": INTER, "D": DISPOSABLE, "A": AUDIO}[letter], size)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.04, 0.04, 0.3, 1.0, 11.0]))
    def wait(self, seconds):
        self.group.run(seconds)

    @rule(index=slow, room=rooms, most=st.sampled_from([None, None, 1, 7, 100]))
    def kernel_takes(self, index, room, most):
        viewer = self.pick(index)
        viewer.peer.most = most
        viewer.give(room)

    @rule(index=slow)
    def kernel_takes_everything(self, index):
        viewer = self.pick(index)
        viewer.peer.most = None
        viewer.give(None)

    @rule(index=slow, limit=limits(), foreign=st.booleans())
    def set_limits(self, index, limit, foreign):
        self.call(self.pick(index), lambda sender: sender.set_limits(limit), foreign)

    @rule(index=slow, policy=st.sampled_from(POLICIES), foreign=st.booleans())
    def set_policy(self, index, policy, foreign):
        self.call(self.pick(index), lambda sender: sender.set_policy(policy), foreign)

    @rule(index=slow, mode=st.sampled_from(Thin), foreign=st.booleans())
    def thin(self, index, mode, foreign):
        self.call(self.pick(index), lambda sender: sender.thin(mode), foreign)

    def call(self, viewer, action, foreign):
        viewer.host.foreign = foreign
        action(viewer.sender)
        viewer.host.foreign = False

    @rule(index=slow, message_class=st.sampled_from([CONTROL, DATA]), size=sizes, foreign=st.booleans())
    def send(self, index, message_class, size, foreign):
        self.say(self.pick(index), message_class, size, foreign)

    def say(self, viewer, message_class, size, foreign):
        number = self.own[viewer] = self.own[viewer] + 1

        def send(sender):
            result = sender.send(frame(OWN, message_class, number, size), message_class)
            if result.outcome is not SendOutcome.CLOSED or sender.statistics().sends_after_close == before:
                self.offered[viewer][message_class] += 1

        before = viewer.sender.statistics().sends_after_close
        self.call(viewer, send, foreign)

    @rule(index=st.integers(0, 6), to=st.integers(0, 1))
    def move(self, index, to):
        sender = self.viewers[index % len(self.viewers)].sender
        if sender.following is not None:
            move(sender, self.fanouts[to])

    @rule(index=st.integers(0, 6), to=st.integers(0, 1), text=st.text("KIDAX", max_size=6))
    def move_slowly(self, index, to, text):
        """Publish, and send from other threads, while the viewer is on its way between two fan-outs."""
        viewer = self.viewers[index % len(self.viewers)]
        if viewer.sender.following is None:
            return
        viewer.sender.suspend_following()
        edges = len(viewer.edges.changes)
        for letter in text:
            if letter == "X":
                self.say(viewer, DATA, 11, foreign=True)
                continue
            item = {"K": KEY, "I": INTER, "D": DISPOSABLE, "A": AUDIO}[letter]
            self.publish(item, 11)
            self.offered[viewer][item] += 1
        assert len(viewer.edges.changes) == edges
        self.group.run(0.04)
        viewer.sender.resume_following(self.fanouts[to])

    @rule(index=slow)
    def unfollow(self, index):
        viewer = self.pick(index)
        viewer.sender.unfollow()

    @precondition(lambda self: len(self.viewers) < 6)
    @rule(policy=st.sampled_from(POLICIES), limit=limits(), settings=st.sampled_from(STEERED))
    def join(self, policy, limit, settings):
        self.follow(self.new_viewer(policy, limit, settings))

    @rule(index=slow, kernel=st.sampled_from([0, 10, 1000, 100_000]), foreign=st.booleans())
    def sample(self, index, kernel, foreign):
        viewer = self.pick(index)
        viewer.kernel = min(kernel, viewer.sender.statistics().bytes_sent)
        self.call(viewer, lambda sender: sender.sample_delay(), foreign)

    @rule(index=slow, share=st.sampled_from([0.2, 0.9, 1.0]))
    def acknowledge(self, index, share):
        sender = self.pick(index).sender
        sender.peer_acknowledged(int(sender.statistics().bytes_sent * share))

    @rule(index=slow)
    def close_after_flush(self, index):
        self.pick(index).sender.close_after_flush()

    @rule(index=slow, turns=st.integers(1, 3))
    def close_in_turns(self, index, turns):
        """Write some turns of what is queued, so that what comes next finds a closing viewer between two of them."""
        sender = self.pick(index).sender
        sender.close_after_flush()
        for _ in range(turns):
            sender.flush()

    @invariant()
    def accounts_hold(self):
        for viewer in self.viewers:
            if viewer.sender.closed:
                check_accounts(viewer)
            else:
                check_accounts(viewer, self.offered[viewer])
            check_edges(viewer)
            if viewer.sender.statistics().key_waits_expired:
                self.expired.add(viewer)
            check_stream(viewer, self.published, key_wait_expired=viewer in self.expired)
            own = [(kind, number) for origin, kind, number, _ in viewer.frames if origin == OWN]
            for lane in (CONTROL, DATA):
                numbers = [number for kind, number in own if kind is lane]
                assert numbers == sorted(set(numbers))
            assert not viewer.host.failures
            assert len(viewer.host.closed) <= 1

    @invariant()
    def the_fast_viewer_loses_nothing(self):
        assert not self.fast.host.closed
        assert self.fast.numbers() == list(range(len(self.fast.numbers())))
        assert not self.fast.sender.statistics().dropped
        assert not self.fast.edges.changes

    def teardown(self):
        for viewer in self.viewers:
            viewer.peer.most = None
            viewer.kernel = 0
            viewer.drain()
        self.group.run(10.0)
        for viewer in self.viewers:
            statistics = viewer.sender.statistics()
            check_accounts(viewer)
            assert statistics.queued.total_messages == 0
            if statistics.close_reason is None:
                assert viewer.sender.state is SendState.READY, viewer.sender.why()
            else:
                assert statistics.close_reason in {
                    CloseReason.HARD_LIMIT,
                    CloseReason.FINISHED,
                    CloseReason.STUCK,
                    CloseReason.LIMIT_HIT,
                }
                hard = statistics.close_reason is CloseReason.HARD_LIMIT
                assert not hard or statistics.state is SendState.HARD_LIMIT
        assert self.fast.numbers() == list(range(len(self.published.classes)))
        # Whoever still follows and wants all is served again like everybody, once a key frame has come.
        for viewer in self.viewers:
            viewer.sender.set_policy(KeepAll())
        self.group.run(0.1)
        number = self.published.publish(KEY)
        self.group.run(0.1)
        last = self.published.publish(INTER)
        self.group.run(0.1)
        for viewer in self.viewers:
            if viewer.sender.following is not None:
                assert viewer.numbers()[-2:] == [number, last]
                assert viewer.sender.ledger() is not None
        alone = sum(fanout.statistics().alone for fanout in self.fanouts)
        assert alone == self.alone_at_the_end, "who takes everything again is a member of the cohort again"


TestFanoutHistory = FanoutHistory.TestCase
TestFanoutHistory.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


class OwnQueueHistory(RuleBasedStateMachine):
    """One Sender without a stream log: what the application sends it, and whatever its peer does."""

    viewer_class = Viewer

    def __init__(self):
        super().__init__()
        self.group = ManualGroup()
        self.offered = Counter()
        self.number = 0

    @initialize(
        policy=st.sampled_from(POLICIES), limit=limits(), deferred=st.booleans(), settings=st.sampled_from(STEERED)
    )
    def start(self, policy, limit, deferred, settings):
        self.viewer = self.viewer_class(self.group, policy=policy, limits=limit, settings=settings, deferred=deferred)
        self.sender = self.viewer.sender

    @rule(message_class=media, size=sizes)
    def send(self, message_class, size):
        refused = self.sender.statistics().sends_after_close
        droppable = False if message_class in (KEY, INTER) else None
        result = self.sender.send(frame(OWN, message_class, self.number, size), message_class, droppable=droppable)
        assert result.state is self.sender.state
        if self.sender.statistics().sends_after_close > refused:
            assert result.outcome is SendOutcome.CLOSED
            return
        self.number += 1
        self.offered[message_class] += 1

    @rule(text=st.text("KIIDA", min_size=1, max_size=12), size=sizes)
    def send_many(self, text, size):
        for letter in text:
            self.send({"K": KEY, "I": INTER, "D": DISPOSABLE, "A": AUDIO}[letter], size)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.3, 1.0, 11.0]))
    def wait(self, seconds):
        self.group.run(seconds)

    @rule(room=rooms, most=st.sampled_from([None, None, 1, 7, 100]))
    def kernel_takes(self, room, most):
        self.viewer.peer.most = most
        self.viewer.give(room)

    @rule()
    def kernel_takes_everything(self):
        self.viewer.peer.most = None
        self.viewer.give(None)

    @rule(limit=limits())
    def set_limits(self, limit):
        self.sender.set_limits(limit)

    @rule(policy=st.sampled_from(POLICIES))
    def set_policy(self, policy):
        self.sender.set_policy(policy)

    @rule(mode=st.sampled_from(Thin))
    def thin(self, mode):
        self.sender.thin(mode)

    @precondition(lambda self: self.number > 30)
    @rule()
    def close_after_flush(self):
        self.sender.close_after_flush()

    @invariant()
    def everything_holds(self):
        if not hasattr(self, "viewer"):
            return
        viewer = self.viewer
        check_accounts(viewer, self.offered)
        check_edges(viewer)
        for lane in (True, False):
            numbers = [number for _, item, number, _ in viewer.frames if (item is CONTROL) is lane]
            assert numbers == sorted(set(numbers)), "reordered or twice"
        for reason, lost in self.sender.statistics().dropped.items():
            kept = sum(lost.of(item) for item in (CONTROL, HEADER, KEY, INTER))
            assert not kept or reason in {DropReason.HELD, DropReason.CLOSED}, "what may not be dropped was"
        assert not viewer.host.failures

    def teardown(self):
        if not hasattr(self, "viewer"):
            return
        self.viewer.peer.most = None
        self.viewer.drain()
        self.group.run(1.0)
        statistics = self.sender.statistics()
        assert statistics.queued.total_messages == 0
        if statistics.close_reason is None:
            assert self.sender.state is SendState.READY, self.sender.why()
            assert statistics.recoveries == sum(change.new is SendState.READY for change in self.viewer.edges.changes)


TestOwnQueueHistory = OwnQueueHistory.TestCase
TestOwnQueueHistory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
