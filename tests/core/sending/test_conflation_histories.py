"""Random histories of viewers of a log with keys: nothing is unaccounted, stale, twice or out of its order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
from flow_kit import AUDIO, CONTROL, DATA, LOG, OWN, Viewer, check_accounts, check_edges, frame
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import DropDroppable, KeepAll, LivePolicy, Thin
from flowctl.core.flow.state import SendState
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.reasons import DropReason
from flowctl.testing import ManualGroup

POLICIES = (KeepAll(), DropDroppable(), DropDroppable(SendState.SOFT_LIMIT, SendState.SOFT_LIMIT), LivePolicy())
TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0, turn_bytes=2000, turn_messages=7, control_bytes=1 << 20)
STEERED = (
    TIMELESS,
    replace(TIMELESS, sample_s=0.1, return_after_s=0.2, return_delay_s=1.0),
    replace(TIMELESS, sample_s=0.1, age_from=AgeSource.DELAY),
)
LIMITS = tuple(
    Limits.parse(text, hard)
    for text, hard in [
        ("0,0", None),
        ("300,5", "0,0"),
        ("1000,9,300ms", "0,0,0"),
        ("400,6", "4000,60"),
        ("100,2", "900,20"),
    ]
)
KEYS = 6


class ConflationHistories(RuleBasedStateMachine):
    """Several viewers of one log with keys: some slow in any way, one whose peer takes everything."""

    def __init__(self):
        super().__init__()
        self.group = ManualGroup()
        self.log = StreamLog(max_keys=KEYS)
        self.keys = []  # by message number; None: without a key
        self.newest = {}
        self.fanouts = [
            Fanout(self.log, self.group, adaptive=False),
            Fanout(self.log, self.group, squad_size=2, turn_s=0),
        ]
        self.viewers, self.offered, self.own = [], {}, Counter()
        self.told = {}  # by viewer, what was dropped by reason
        self.thinned = set()  # viewers that lost values because the application asked for it
        self.publish([0, 1, 2, 0])
        self.join(KeepAll(), Limits.parse("500,5,100ms", "500,5,100ms"), SenderSettings())
        self.fast = self.viewers[0]

    @initialize(
        policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3),
        limit=st.sampled_from(LIMITS),
        settings=st.sampled_from(STEERED),
    )
    def start(self, policies, limit, settings):
        for policy in policies:
            self.join(policy, limit, settings)

    @precondition(lambda self: len(self.viewers) < 6)
    @rule(policy=st.sampled_from(POLICIES), limit=st.sampled_from(LIMITS), settings=st.sampled_from(STEERED))
    def join(self, policy, limit, settings):
        viewer = Viewer(self.group, policy=policy, limits=limit, settings=settings)
        self.viewers.append(viewer)
        viewer.joined = len(self.keys)
        self.offered[viewer] = Counter({DATA: len(self.newest)})
        viewer.sender.follow(self.fanouts[len(self.viewers) % 2], latest=True)

    def pick(self, index):
        return self.viewers[1 + index % (len(self.viewers) - 1)]

    slow = st.integers(1, 6)

    @rule(
        keys=st.lists(st.sampled_from([*range(KEYS), 0, 1, None]), min_size=1, max_size=8),
        size=st.sampled_from([11, 40, 300]),
        sound=st.booleans(),
    )
    def publish(self, keys, size=11, sound=False):
        for key in keys:
            number, item = len(self.keys), AUDIO if sound and key is None else DATA
            self.keys.append(key)
            self.log.append(
                frame(LOG, item, number, size), item, self.group.now(), key=None if key is None else str(key)
            )
            if key is not None:
                self.newest[key] = number
            for viewer in self.viewers:
                if viewer.sender.following is not None:
                    self.offered[viewer][item] += 1

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.04, 0.04, 0.3, 1.5]))
    def wait(self, seconds):
        self.group.run(seconds)

    @rule(index=slow, room=st.sampled_from([0, 1, 11, 30, 60, 300, None]), most=st.sampled_from([None, None, 7, 100]))
    def kernel_takes(self, index, room, most):
        viewer = self.pick(index)
        viewer.peer.most = most
        viewer.give(room)

    @rule(index=slow, limit=st.sampled_from(LIMITS), policy=st.sampled_from(POLICIES), foreign=st.booleans())
    def set_limits_and_policy(self, index, limit, policy, foreign):
        viewer = self.pick(index)
        viewer.host.foreign = foreign
        viewer.sender.set_limits(limit)
        viewer.sender.set_policy(policy)
        viewer.host.foreign = False

    @rule(index=slow, mode=st.sampled_from([Thin.DROPPABLE, Thin.TO_KEY_FRAME]))
    def thin(self, index, mode):
        self.pick(index).sender.thin(mode)

    @rule(index=slow, message_class=st.sampled_from([CONTROL, DATA]))
    def send(self, index, message_class):
        viewer = self.pick(index)
        if not viewer.sender.closed:
            self.own[viewer] += 1
            self.offered[viewer][message_class] += 1
            viewer.sender.send(frame(OWN, message_class, self.own[viewer]), message_class)

    @rule(index=st.integers(0, 6), to=st.integers(0, 1), keys=st.lists(st.integers(0, KEYS - 1), max_size=3))
    def move(self, index, to, keys):
        viewer = self.viewers[index % len(self.viewers)]
        if viewer.sender.following is not None:
            viewer.sender.suspend_following()
            self.publish(keys)
            self.offered[viewer][DATA] += len(keys)
            viewer.sender.resume_following(self.fanouts[to])

    @rule(index=slow)
    def unfollow(self, index):
        self.pick(index).sender.unfollow()

    @rule(index=slow)
    def close_after_flush(self, index):
        self.pick(index).sender.close_after_flush()

    @invariant()
    def accounts_hold_and_nothing_is_stale_or_twice(self):
        for viewer in self.viewers:
            check_accounts(viewer, None if viewer.sender.closed else self.offered[viewer])
            check_edges(viewer)
            assert not viewer.host.failures
            numbers = viewer.numbers()
            loose = [number for number in numbers if self.keys[number] is None]
            assert loose == sorted(set(loose))
            for key in range(KEYS):
                values = [number for number in numbers if self.keys[number] == key]
                assert values == sorted(set(values)), f"an older value of {key} came after a newer one"
            dropped = viewer.sender.statistics().dropped
            for reason, counts in self.told.get(viewer, {}).items():
                assert min((dropped[reason] - counts).messages) >= 0, f"fewer {reason.name} than before"
            self.told[viewer] = dropped
            if DropReason.REQUESTED in dropped:
                self.thinned.add(viewer)
            superseded = dropped.get(DropReason.SUPERSEDED)
            assert superseded is None or superseded.total_messages == superseded.of(DATA) > 0
            cursor = viewer.sender._outbox.cursor
            if cursor is not None and viewer.sender.following is not None and cursor.chain is self.log.loose:
                assert (
                    cursor.load()[1] <= KEYS + cursor.copied[1] + self.log.loose.tail.sequence - cursor.entry.sequence
                )

    @invariant()
    def the_fast_viewer_gets_every_message_from_its_round_on(self):
        numbers = self.fast.numbers()
        assert not self.fast.host.closed
        assert not self.fast.edges.changes
        lost = set(range(4, len(self.keys))) - set(numbers)
        assert len(lost) - (len(self.keys) - 1 - max(numbers, default=3)) <= self.lost_by_moving()

    def lost_by_moving(self):
        """Return how many values were superseded while the fast viewer was not in the cohort."""
        counts = self.fast.sender.statistics().dropped.get(DropReason.SUPERSEDED)
        return counts.total_messages if counts else 0

    def teardown(self):
        for viewer in self.viewers:
            viewer.peer.most = None
            viewer.drain()
        self.group.run(10.0)
        for viewer in self.viewers:
            statistics = viewer.sender.statistics()
            check_accounts(viewer)
            assert statistics.queued.total_messages == 0
            if viewer.sender.following is not None and viewer not in self.thinned:
                received = {self.keys[number]: number for number in viewer.numbers() if self.keys[number] is not None}
                assert received == self.newest, "the newest value of each key arrives, whatever the policy"
        for viewer in self.viewers:
            viewer.sender.set_policy(KeepAll())
        self.group.run(10.0)
        assert all(fanout.statistics().alone == 0 for fanout in self.fanouts), "all are members of a cohort again"


TestConflationHistories = ConflationHistories.TestCase
TestConflationHistories.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
