"""A fan-out's turns on its thread, and where a viewer stands in them."""

from __future__ import annotations

import gc
import itertools
from math import inf

import pytest
from fanout_kit import Stage
from flow_kit import HEAD_BYTES, Peer, Published, Viewer, move
from sender_kit import OVERLOADED, SOFT_LIMIT, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.policy import KeepAll
from flowctl.core.flow.state import FlowCore, MessageClass
from flowctl.core.outgoing.outbox import Outbox
from flowctl.core.outgoing.streamlog import Entry
from flowctl.core.sending.contract import STEPS, Standing
from flowctl.core.sending.judgement import Judgement
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import InternalError
from flowctl.sender import Sender
from flowctl.testing import ManualGroup

EACH = {"squad_size": 2, "turn_s": 0}
"""A turn is one squad of two, or one viewer."""


class SteppedGroup(ManualGroup):
    """A group whose calls can be done one at a time."""

    def step(self):
        """Do the next call that is due."""
        calls, self._calls = self._calls, []
        calls.sort()
        (_, _, callback, args), *rest = calls
        self._calls = rest
        callback(*args)


class SteppedStage(Stage):
    """A stage that can stop in the middle of a round."""

    def __init__(self, count=0, **settings):
        super().__init__(count, **{**EACH, **settings})

    def begin_round(self, text, size=HEAD_BYTES):
        """Publish and do the first turn of the round only."""
        self.published.script(text, size)
        self.fanout.flush()

    def newest(self):
        """Return the number of the newest message of each viewer."""
        return [viewer.numbers()[-1] for viewer in self.viewers]


def test_round_when_it_takes_longer_than_a_turn_goes_on_in_the_next():
    stage = SteppedStage(6)
    before = stage.fanout.statistics()
    stage.begin_round("I")
    assert stage.newest() == [1, 1, 0, 0, 0, 0]
    stage.group.run()
    assert stage.newest() == [1] * 6
    after = stage.fanout.statistics()
    assert (after.rounds - before.rounds, after.squads) == (1, 3)
    assert after.turns - before.turns >= 3
    assert sum(after.rounds_by_duration) == after.rounds
    stage.check()


def test_round_when_more_is_published_meanwhile_ends_where_it_began_to_lead():
    stage = SteppedStage(6)
    stage.begin_round("I")
    stage.published.script("A")
    stage.fanout.flush()  # too early, and harmless: a round is in progress
    assert stage.newest() == [1, 1, 0, 0, 0, 0]
    stage.group.run()
    assert [viewer.numbers() for viewer in stage.viewers] == [[0, 1, 2]] * 6
    assert stage.fanout.statistics().squads == 3
    stage.check()


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("room", [0, 5, HEAD_BYTES, None])
def test_member_when_something_happens_to_it_in_the_middle_of_a_round_goes_on_at_its_byte(index, room):
    stage = SteppedStage(6)
    viewer = stage.viewers[index]
    viewer.peer.room = room
    stage.begin_round("IA")
    stage.check()
    viewer.sender.suspend_following()
    stage.published.script("I")
    stage.group.run()
    viewer.sender.resume_following(stage.fanout)
    viewer.drain()
    stage.group.run(0.1)
    assert viewer.numbers() == [0, 1, 2, 3]
    assert stage.fanout.statistics().members == 6
    stage.check()


@pytest.mark.parametrize("index", range(4))
def test_member_when_it_ends_in_the_middle_of_a_round_is_accounted_for(index):
    stage = SteppedStage(4)
    stage.begin_round("IA", 50)
    stage.viewers[index].sender.unfollow()
    stage.check()
    assert len(stage.viewers[index].numbers()) == (3 if index < 2 else 1)
    stage.group.run()
    assert [viewer.numbers() for number, viewer in enumerate(stage.viewers) if number != index] == [[0, 1, 2]] * 3
    stage.check()


def test_round_when_all_members_take_a_part_only_makes_all_leave_and_come_back():
    stage = SteppedStage(10)
    for viewer in stage.viewers:
        viewer.peer.room = 700
    stage.publish("K", 5000)
    assert stage.fanout.statistics().members == 0
    assert {viewer.sender.state for viewer in stage.viewers} == {OVERLOADED}
    stage.publish("IA")
    for viewer in stage.viewers:
        viewer.give(None)
    stage.group.run(0.1)
    assert [viewer.numbers() for viewer in stage.viewers] == [[0, 1, 2, 3]] * 10
    assert stage.fanout.statistics().members == 10
    stage.check()


def test_joiners_when_they_come_together_are_served_in_turn():
    group = SteppedGroup()
    published = Published(group)
    fanout = Fanout(published.log, group, **EACH)
    published.script("K" + "I" * 40, 500)
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0, turn_bytes=2000)
    stage = Stage()
    viewers = [stage.viewer(Peer(), settings=settings) for _ in range(5)]
    for viewer in viewers:
        viewer.group = viewer.host.group = group
        viewer.follow(fanout)
    most = 0
    while fanout.statistics().members < 5:
        group.step()
        sizes = [len(viewer.peer.received) for viewer in viewers]
        most = max(most, max(sizes) - min(sizes))
    assert 0 < most <= 2500
    assert [len(viewer.numbers()) for viewer in viewers] == [41] * 5


def test_joiner_when_rounds_never_pause_is_not_starved():
    group = SteppedGroup()
    published = Published(group)
    fanout = Fanout(published.log, group, flush_interval_s=0, **EACH)
    published.script("K")
    stage = Stage()
    viewers = [stage.viewer() for _ in range(41)]
    for viewer in viewers[1:]:
        viewer.group = viewer.host.group = group
        viewer.follow(fanout)
    group.run()
    joiner = viewers[0]
    joiner.group = joiner.host.group = group
    joiner.follow(fanout)
    for _ in range(3):
        published.script("I")
        group.step()
    assert joiner.numbers()[:1] == [0]
    group.run()
    assert [viewer.numbers() for viewer in viewers] == [[0, 1, 2, 3]] * 41


def test_streams_when_on_one_thread_take_turns():
    group = SteppedGroup()
    stages = []
    for count in (20, 2):
        stage = Stage()
        stage.group = group
        stage.published = Published(group)
        stage.fanout = Fanout(stage.published.log, group, flush_interval_s=0, **EACH)
        stage.published.script("K")
        stage.viewers = [stage.viewer() for _ in range(count)]
        for viewer in stage.viewers:
            viewer.follow(stage.fanout)
        stages.append(stage)
    group.run()
    for stage in stages:
        stage.published.script("I")
    for _ in range(6):
        group.step()
    large, small = stages
    assert [viewer.numbers() for viewer in small.viewers] == [[0, 1]] * 2
    assert large.viewers[-1].numbers() == [0]
    group.run()
    for stage in stages:
        assert {tuple(viewer.numbers()) for viewer in stage.viewers} == {(0, 1)}
        stage.check()


def test_viewers_when_writable_together_are_served_in_turn():
    stage = SteppedStage(8)
    for viewer in stage.viewers:
        viewer.peer.room = 0
    stage.publish("IAI")
    writes = [viewer.peer.writes for viewer in stage.viewers]
    for viewer in stage.viewers:
        viewer.give(None)
    assert [viewer.peer.writes for viewer in stage.viewers] == writes
    stage.group.run(0.1)
    assert [viewer.numbers() for viewer in stage.viewers] == [[0, 1, 2, 3]] * 8
    assert all(viewer.sender.state == 0 for viewer in stage.viewers)
    stage.check()


def test_viewer_when_it_stops_following_before_its_turn_is_written_to_all_the_same():
    stage = SteppedStage(1)
    (viewer,) = stage.viewers
    viewer.peer.room = 0
    stage.publish("I")
    viewer.sender.send(b"".join([b"O", bytes([6]), (7).to_bytes(4, "big"), HEAD_BYTES.to_bytes(5, "big")]))
    viewer.give(None)
    viewer.sender.unfollow()
    stage.group.run()
    assert viewer.numbers(b"O") == [7]
    assert viewer.sender.state == 0
    stage.check()


def test_lagging_viewers_when_many_reach_a_limit_are_all_looked_at():
    stage = Stage(limits=NO_LIMITS)
    stage.viewers = [stage.viewer(limits=by_messages(4, 100)) for _ in range(100)]
    for viewer in stage.viewers:
        viewer.sender.set_policy(KeepAll())
        viewer.follow(stage.fanout)
    stage.group.run()
    for viewer in stage.viewers:
        viewer.peer.room = 0
    stage.publish("I")
    assert {viewer.sender.state for viewer in stage.viewers} == {OVERLOADED}
    stage.published.script("III")
    crossed = sum(viewer.sender.state is SOFT_LIMIT for viewer in stage.viewers)
    assert 0 < crossed < 100
    stage.group.run()
    assert {viewer.sender.state for viewer in stage.viewers} == {SOFT_LIMIT}
    stage.check()


def test_squads_when_viewers_come_and_go_are_few():
    stage = Stage(interval_s=0.04, adaptive=False, squad_size=8)
    stage.viewers = []
    for number in range(150):
        viewer = stage.viewer()
        viewer.follow(stage.fanout)
        stage.viewers.append(viewer)
        stage.published.script("I")
        stage.group.run(0.013)
        if number % 3 == 2:
            stage.viewers.pop(number % len(stage.viewers)).sender.unfollow()
    stage.publish("I")
    stage.group.run(0.1)
    statistics = stage.fanout.statistics()
    assert statistics.members == len(stage.viewers) == 100
    assert statistics.squads <= 4 + 2 * 100 / 8
    stage.check()
    for viewer in list(stage.viewers):  # each is found where it stands, wherever that was
        viewer.sender.unfollow()
    assert stage.fanout.empty is True
    assert stage.fanout.statistics().squads == 0


def test_log_when_rounds_are_over_or_cut_short_is_not_held():
    def entries():
        gc.collect()
        return sum(type(item) is Entry for item in gc.get_objects())

    stage = SteppedStage(6)
    stage.published.log.drop_cache()
    before = entries()
    for _ in range(20):
        stage.publish("IIIII")
        stage.published.script("K")
        stage.published.log.drop_cache()
        stage.group.run()
    assert entries() - before <= 2
    stage.begin_round("II")
    for viewer in stage.viewers:
        viewer.sender.unfollow()
    stage.fanout.close()
    stage.group.run()
    for _ in range(20):
        stage.published.script("IIIII")
    stage.published.script("K")
    stage.published.log.drop_cache()
    assert entries() - before <= 2


def test_interval_when_viewers_are_cheap_is_shorter_than_the_ceiling():
    for adaptive, writes in ((True, 5), (False, 1)):
        stage = Stage(1, interval_s=1.0, adaptive=adaptive)
        (viewer,) = stage.viewers
        stage.group.run(2.0)
        before = viewer.peer.writes
        for _ in range(5):
            stage.publish("I")
            stage.group.run(0.01)
        assert viewer.peer.writes - before == writes
        assert stage.fanout.statistics().interval_s == (0.0 if adaptive else 1.0)
        stage.group.run(1.0)
        assert viewer.numbers() == list(range(6))


def test_interval_when_the_thread_is_busy_is_the_ceiling():
    stage = Stage(1, interval_s=0.04)
    stage.group.busy = 1.0
    stage.publish("I")
    before = stage.viewers[0].peer.writes
    for _ in range(4):
        stage.publish("I")
        stage.group.run(0.005)
    assert stage.viewers[0].peer.writes == before
    stage.group.run(0.04)
    assert stage.viewers[0].peer.writes == before + 1


def test_interval_when_input_has_waited_is_shorter_by_that():
    stage = Stage(1, interval_s=0.04, adaptive=False)
    (viewer,) = stage.viewers
    stage.group.gather_s = 0.03
    stage.group.run(1.0)
    for pause_s, at_once in ((0.03, True), (0.005, False), (0.02, True)):
        stage.publish("I")
        stage.group.run(pause_s)
        before = viewer.peer.writes
        stage.publish("I")
        assert (viewer.peer.writes > before) is at_once
        stage.group.run(1.0)


def test_round_when_there_is_one_squad_counts_as_one_turn():
    stage = Stage(3)
    before = stage.fanout.statistics()
    for _ in range(5):
        stage.publish("I")
    after = stage.fanout.statistics()
    assert (after.rounds - before.rounds, after.turns - before.turns, after.squads) == (5, 5, 1)
    assert sum(after.rounds_by_duration) == after.rounds
    stage.check()


GONE, QUEUED, SERVED, PACED, REFUSED, COHORT, SUSPENDED = Standing


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Standing, Standing)))
def test_step_when_it_is_not_in_the_table_is_refused(old, new):
    judgement = Judgement(FlowCore(NO_LIMITS, 0.0), Outbox(), SenderSettings(), 0.0, stands=old)
    if (old, new) in STEPS:
        judgement.stand_at(new)
        assert judgement.stands is new
    else:
        with pytest.raises(InternalError, match=f"{old.name} cannot become {new.name}"):
            judgement.stand_at(new)


def test_table_when_followed_leads_everywhere_and_out_again():
    assert {new for old, new in STEPS if old is GONE} == {QUEUED}
    assert {old for old, new in STEPS if new is SUSPENDED} == {QUEUED, SERVED, PACED, REFUSED}
    assert {old for old, new in STEPS if new is GONE} == {SUSPENDED}
    assert {new for _, new in STEPS} == set(Standing)
    assert all(old is not new for old, new in STEPS)


def test_viewer_when_it_keeps_up_lags_and_comes_back_stands_where_it_is_served():
    stage = Stage(0)
    viewer = stage.viewer(Peer())
    assert viewer.sender.stands is GONE
    viewer.follow(stage.fanout)
    assert viewer.sender.stands is QUEUED
    stage.group.run()
    assert viewer.sender.stands is COHORT
    viewer.peer.room = 5
    stage.publish("I")
    assert viewer.sender.stands is REFUSED
    viewer.peer.room = 2 * HEAD_BYTES
    viewer.sender.writable()
    assert viewer.sender.stands is QUEUED
    stage.group.run()
    assert viewer.sender.stands is COHORT
    viewer.sender.suspend_following()
    assert viewer.sender.stands is SUSPENDED
    viewer.sender.resume_following(stage.fanout)
    viewer.sender.unfollow()
    assert viewer.sender.stands is GONE
    assert stage.fanout.empty


def test_viewer_when_it_waits_for_a_key_frame_has_a_turn_with_each_round():
    stage = Stage(0)
    viewer = stage.viewer(Peer())
    viewer.sender.follow(stage.fanout, wait_for_key=True)
    stage.publish("I")
    assert viewer.sender.stands is SERVED
    turns = stage.fanout.statistics().turns
    stage.group.run()
    assert (viewer.sender.stands, stage.fanout.statistics().turns) == (SERVED, turns)
    stage.publish("KI")
    assert viewer.sender.stands is COHORT


def test_viewer_when_moved_in_its_turn_is_left_to_its_new_fanout():
    stage = Stage(1)
    (viewer,) = stage.viewers
    other = Fanout(stage.published.log, stage.group, flush_interval_s=0)
    viewer.peer.room = 5
    stage.publish("I")
    viewer.sender.send(b"own", MessageClass.CONTROL)
    viewer.sender.when_drained(lambda _: move(viewer.sender, other))
    viewer.peer.room = None
    viewer.sender.writable()
    stage.group.run()
    assert (viewer.sender.stands, stage.fanout.empty, other.statistics().members) == (COHORT, True, 1)


def test_messages_when_published_one_by_one_from_elsewhere_are_gathered_into_one_write():
    for gather_s, writes in ((0.0, 5), (0.002, 1)):
        stage = Stage(1, interval_s=0.04, gather_s=gather_s)
        (viewer,) = stage.viewers
        stage.group.run(1.0)
        before, began = viewer.peer.writes, stage.group.now()
        for _ in range(5):
            stage.publish("I")  # each is a job of the loop of its own
        stage.group.run(0.002)
        assert viewer.peer.writes - before == writes
        assert stage.group.now() - began <= 0.003
        assert viewer.numbers() == list(range(6))


class Timed(Sender):
    """A viewer that says when its next turn is to come, and waits for that."""

    __slots__ = ("turns", "wait_s")

    def take_turn(self):
        now = self.host.now()
        self.turns.append(now)
        return now + self.wait_s

    @property
    def blocked(self):
        return True


class TimedViewer(Viewer):
    make_sender = Timed


def test_turn_when_that_of_another_comes_later_is_not_put_off_for_it():
    group = ManualGroup()
    published = Published(group)
    published.script("K")
    fanout = Fanout(published.log, group, flush_interval_s=0.0)
    turns = {}
    for wait_s in (0.25, 0.05):
        viewer = TimedViewer(group)
        viewer.sender.turns, viewer.sender.wait_s = turns.setdefault(wait_s, []), wait_s
        viewer.follow(fanout)
        group.run()
    group.run(5.0)
    assert 18 <= len(turns[0.25]) <= 21
    assert 70 <= len(turns[0.05]) <= 101
    assert len(group._calls) <= 30, "timers do not pile up"


def test_viewer_that_waited_for_a_key_frame_has_no_turn_for_it_once_it_waits_for_its_kernel():
    """A kernel that takes nothing has not gone on because a key frame came: a stall of all would end with it."""
    group = ManualGroup()
    published = Published(group)
    published.script("K")
    fanout = Fanout(published.log, group, flush_interval_s=0.0)
    sender = TimedViewer(group).sender
    sender.turns, sender.wait_s = [], 5.0
    sender.follow(fanout)
    group.run()
    fanout._key_waiters[sender] = None  # it had taken everything
    sender.wait_s = inf
    fanout.serve_in_turn(sender)
    group.run()
    assert sender.stands is Standing.REFUSED
    had = len(sender.turns)
    published.script("K")
    group.run()
    assert (len(sender.turns), sender.stands) == (had, Standing.REFUSED)
