"""Random histories of sets: whatever order the logs grow in, a viewer gets each sound once and only whole groups."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from flow_kit import AUDIO, HEADER, INTER, KEY, Peer, check_accounts, check_edges, frame
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from set_kit import RESTART, SOUND, Connection, choose, media_time, retime

from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import KeepAll, LivePolicy
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.settings import SenderSettings
from flowctl.streamset import StreamSet
from flowctl.testing import ManualClock, ManualGroup

NAMES = ("360", "720", "1080")
GROUP = 4
"""Pictures of a group."""
TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0, turn_bytes=2000, turn_messages=7)
SETTINGS = settings(max_examples=50, stateful_step_count=40, deadline=None, report_multiple_bugs=False)


class SetHistory(RuleBasedStateMachine):
    """Viewers that want now this rendition, now that, on two poll groups; no one loses anything."""

    policy = KeepAll()
    limits = NO_LIMITS
    loses = False
    lengths = (GROUP, GROUP, GROUP)
    retime = None
    connection_class = Connection

    def __init__(self):
        super().__init__()
        clock = ManualClock()
        self.groups = [ManualGroup(clock), ManualGroup(clock)]
        self.clock = clock
        self.set = StreamSet(time_of=media_time, retime=self.retime, flush_interval_s=0.04)
        self.logs = {}
        self.numbers = {}
        self.pictures = {}
        self.sound = 0
        self.viewers, self.ended = [], Counter()
        for name in NAMES[:2]:
            self.put(name)

    def put(self, name, log=None):
        self.logs[name] = log or StreamLog(name)
        self.numbers[name] = sum(self.numbers.values()) + 1
        length = self.lengths[NAMES.index(name)]
        self.pictures[name] = max(self.pictures.values(), default=0) // length * length
        self.set.put(name, self.logs[name])
        if log is not None:  # its viewers may still be in it
            self.pictures[name] += length
            log.append(frame(RESTART, HEADER, self.numbers[name]), HEADER, self.clock())

    history = st.text("012", min_size=12, max_size=50)

    @initialize(text=history)
    def start(self, text):
        for letter in (text * 8)[:50]:  # rates are known after three seconds
            self.publish(int(letter), 100)
            self.wait(0.08)
        self.join(0, None)

    def publish(self, what, size):
        if what == 0:
            for log in self.logs.values():
                log.append(frame(SOUND, AUDIO, self.sound, 40), AUDIO, self.clock())
            self.sound += 1
            return
        name = [*self.logs][what % len(self.logs)]
        number = self.pictures[name]
        # A rendition runs ahead of another by a group and a half at most.
        if number > min(self.pictures.values()) + GROUP + GROUP // 2:
            return
        self.pictures[name] += 1
        key = number % self.lengths[NAMES.index(name)] == 0
        origin = b"%d" % NAMES.index(name)
        restart = (frame(RESTART, HEADER, self.numbers[name]),) if key else ()  # of each log its own
        item = KEY if key else INTER
        self.logs[name].append(frame(origin, item, number * 40, size), item, self.clock(), restart=restart)

    @rule(what=st.integers(0, 2), size=st.sampled_from([11, 100, 2500]))
    def publish_one(self, what, size):
        self.publish(what, size)

    @rule(text=st.text("012", min_size=4, max_size=40), size=st.sampled_from([11, 400]))
    def publish_many(self, text, size):
        for letter in text:
            self.publish(int(letter), size)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.04, 0.3]))
    def wait(self, seconds):
        self.groups[1].run()
        self.groups[0].run(seconds)
        self.groups[1].run()

    @rule(seconds=st.sampled_from([0.1, 0.6]))
    def wait_while_a_group_stands_still(self, seconds):
        self.groups[0].run(seconds)

    @rule(
        index=st.integers(0, 1),
        seconds=st.sampled_from([0.0, 0.01, 0.1, 0.3]),
        again=st.booleans(),
        text=st.text("0012", max_size=20),
    )
    def restart_a_rendition(self, index, seconds, again, text):
        """Remove one while the other has key frames, and put it again, perhaps with a new log; no one is far behind."""
        name = NAMES[index]
        for connection in self.viewers:
            connection.viewer.drain()
        if self.logs[NAMES[1 - index]].keys:
            self.set.remove(name)
            log = self.logs.pop(name)
            self.wait(seconds)
            for letter in text:
                self.publish(int(letter), 11)
                self.wait(0.01)
            self.put(name, log if again else None)
            self.wait(0.3)

    @rule(index=st.integers(0, 3), text=st.sampled_from(("500,5,100ms", "4000,40,1s", "2MiB,2048,4s")))
    def set_limits(self, index, text):
        if self.loses:
            self.pick(index).sender.set_limits(Limits.parse(text, text))

    @rule(group=st.integers(0, 1), room=st.sampled_from([None, 0, 100, 3000]))
    def join(self, group, room):
        if len(self.viewers) < 4:
            connection = self.connection_class(
                self.groups[group], Peer(room=room), policy=self.policy, limits=self.limits, settings=TIMELESS
            )
            self.set.view(connection)
            choose(connection, "")
            self.viewers.append(connection)

    def pick(self, index):
        return self.viewers[index % len(self.viewers)]

    @rule(index=st.integers(0, 3), name=st.sampled_from(NAMES[:2]), text=history, size=st.sampled_from([11, 400]))
    def want(self, index, name, text, size):
        if self.pick(index).place is not None and self.pick(index).group is not None:
            choose(self.pick(index), name)
        self.wait(0.3)
        for letter in text:
            self.publish(int(letter), size)
            self.wait(0.01)

    @rule(index=st.integers(0, 3), room=st.sampled_from([0, 1, 60, 1000, None]))
    def kernel_takes(self, index, room):
        self.pick(index).viewer.give(room)

    @rule(index=st.integers(0, 3), text=st.text("012", max_size=12))
    def move(self, index, text):
        """Publish while a viewer is on its way between two poll groups."""
        connection = self.pick(index)
        if connection.place is None or connection.sender.following is None:
            return
        old = connection.group
        connection.place.leave()
        connection.group = None
        for letter in text:
            self.publish(int(letter), 11)
        new = self.groups[0 if old is self.groups[1] else 1]
        connection.viewer.host.group = connection.group = new
        connection.place.enter(new)

    @rule(index=st.integers(0, 3))
    def leave(self, index):
        connection = self.pick(index)
        if connection.place is not None:
            connection.place.end()
            connection.viewer.drain()
            self.check(connection)
            self.viewers.remove(connection)
            if not self.viewers:
                self.join(0, None)

    @rule(index=st.integers(0, 3))
    def close_after_flush(self, index):
        self.pick(index).sender.close_after_flush()

    @invariant()
    def all_is_well(self):
        for connection in self.viewers:
            self.check(connection)

    def check(self, connection):
        viewer = connection.viewer
        check_accounts(viewer)
        check_edges(viewer)
        assert not viewer.host.failures, viewer.host.failures
        frames = viewer.frames
        sound = [number for origin, _, number, _ in frames if origin == SOUND]
        assert sound == sorted(set(sound))
        if not self.loses and sound:
            assert sound == list(range(sound[0], sound[-1] + 1))
        present, last, headers, rewinds = None, None, False, 0
        expired = viewer.sender.statistics().key_waits_expired > 0  # then a picture that is no key frame may come next
        for origin, item, number, _ in frames:
            if origin == RESTART:
                headers = True
            elif origin != SOUND:
                if origin != present:
                    assert headers or present is None
                    assert item is KEY or (expired and headers)
                elif self.retime is None:
                    assert number == last + 40 or (headers and (expired or item is KEY))
                rewinds += last is not None and number <= last
                present, last, headers = origin, number, False
        # One that was behind a rendition that has ended is gone on in all the same. The ledger forgets.
        self.ended[viewer] += sum("ended" in entry.why for entry in viewer.sender.unread_ledger())
        assert rewinds <= self.ended[viewer]

    def teardown(self):
        for connection in self.viewers:
            connection.viewer.drain()
        for _ in range(GROUP * 3):
            self.wait(0.1)
            for what in (0, 1, 2):
                self.publish(what, 11)
        self.wait(1.0)
        for connection in self.viewers:
            connection.viewer.drain()
            self.check(connection)
            if not self.loses and not connection.sender.closed:
                sound = [number for origin, _, number, _ in connection.viewer.frames if origin == SOUND]
                assert sound[-1] == self.sound - 1


TestSetHistory = SetHistory.TestCase
TestSetHistory.settings = SETTINGS


class LossyHistory(SetHistory):
    """The same with limits that some reach, so that messages are left out."""

    policy = LivePolicy()
    limits = Limits.parse("2000,20,400ms", "8000,200,4s")
    loses = True


TestLossyHistory = LossyHistory.TestCase
TestLossyHistory.settings = SETTINGS


class UnevenHistory(SetHistory):
    """The same where key frames hardly meet, so that viewers change over at any picture."""

    lengths = (4, 5, 7)
    retime = staticmethod(retime)


TestUnevenHistory = UnevenHistory.TestCase
TestUnevenHistory.settings = SETTINGS
