"""What is kept of a peer in trouble: who samples it, when the kernel counts as full, when it is given back."""

from __future__ import annotations

import gc

import pytest
from fanout_kit import Stage
from flow_kit import Peer, Published, check_accounts
from sender_kit import READY
from slow_kit import Steady

from flowctl.fanout.fanout import Fanout
from flowctl.flow.drain import STALL_S
from flowctl.flow.limits import NO_LIMITS, HardPolicy, Limits
from flowctl.flow.policy import Thin
from flowctl.flow.state import SendState
from flowctl.flow.trouble import Trouble
from flowctl.reasons import CloseReason
from flowctl.sending.types import AgeSource, SenderSettings

STEERED = SenderSettings(stuck_s=0, soft_too_long_s=0)


def sampled_from_elsewhere(scene, seconds, share, *, every_s):
    """Run the scene while another thread asks for the delay every `every_s` seconds."""
    for _ in range(round(seconds / every_s)):
        scene.go(every_s, share)
        scene.viewer.host.foreign = True
        scene.sender.sample_delay()
        scene.viewer.host.foreign = False


@pytest.mark.parametrize("every_s", [0.04, 0.2, 0.48])
def test_share_when_another_thread_asks_all_the_time_is_that_of_its_own_rhythm(every_s):
    """Statistics of another thread, however often, change nothing in what a viewer is given."""
    scene = Steady(0.5)
    sampled_from_elsewhere(scene, 20, 0.5, every_s=every_s)
    assert 0.1 < scene.sender.statistics().picture_share < 0.6
    sampled_from_elsewhere(scene, 20, 3.0, every_s=every_s)
    assert scene.sender.state is READY
    check_accounts(scene.viewer)


def told_shares(sender):
    return sender.statistics().picture_share, sender.account().picture_share, sender.glance().picture_share


def test_share_when_a_viewer_was_served_whole_for_20_s_is_one_again():
    """What was lost before that is not told any more, and once it is slow again it got all until then."""
    scene = Steady(0.5, flush_s=0.04).go(30)
    assert all(share < 0.6 for share in told_shares(scene.sender))
    scene.go(10, 2.0)
    assert scene.sender.state is READY
    scene.go(20)
    assert told_shares(scene.sender) == (1.0, 1.0, 1.0)
    scene.go(100)
    assert told_shares(scene.sender) == (1.0, 1.0, 1.0)
    assert "of the pictures" not in scene.sender.why()
    scene.go(10, 0.5)
    assert all(0.6 < share < 0.9 for share in told_shares(scene.sender))
    scene.go(15, 0.5)
    assert all(share < 0.6 for share in told_shares(scene.sender))


@pytest.mark.parametrize(("share", "least", "most"), [(3.0, 1.0, 1.0), (0.5, 0.1, 0.6)])
def test_share_when_another_log_is_followed_is_of_that_one(share, least, most):
    """Pictures of the log from before count neither as published nor as lost."""
    scene = Steady(0.3, flush_s=0.04).go(60).go(4, 3.0)
    scene.sender.unfollow()
    scene.group.run(0.1)
    scene.published, scene.published_at = Published(scene.group), []
    scene.fanout = Fanout(scene.published.log, scene.group, flush_interval_s=0.04)
    for _ in range(30):
        scene.go(1, share)
        assert all(0 <= found <= 1 for found in told_shares(scene.sender))
    assert all(least <= found <= most for found in told_shares(scene.sender))


def test_share_when_the_viewer_has_gone_is_that_of_its_end():
    """Statistics of who was closed tell what it got, not that it got everything."""
    scene = Steady(0.5, flush_s=0.04).go(30)
    before = told_shares(scene.sender)
    scene.sender.close(CloseReason.KICKED, "enough")
    assert told_shares(scene.sender) == before
    assert before[0] < 0.6


def test_share_when_a_hard_limit_is_held_is_of_what_was_published():
    """Nothing more is taken for such a viewer, and that is not all of the pictures."""
    limits = Limits.parse("0,0", "100kB,0", hard_policy=HardPolicy.HOLD)
    scene = Steady(0.3, limits=limits, settings=STEERED).go(10)
    scene.go(15, 0.0)
    assert scene.sender.state is SendState.HARD_LIMIT
    scene.go(2, 0.3)
    assert all(share < 0.6 for share in told_shares(scene.sender))


def test_share_when_the_viewer_wanted_no_pictures_is_of_those_since():
    """Pictures that a viewer did not want are not lost to it."""
    trouble = Trouble()
    trouble.note_pictures(0.0, 100, 0, -5.0)
    trouble.note_pictures(2.0, 0, 0, -5.0)
    trouble.note_pictures(4.0, 220, 120, -5.0)
    assert trouble.picture_share(6.0, 280, 150) == 0.5


def test_share_when_a_viewer_begins_to_lag_counts_what_it_was_sent_before():
    """The first group that is cut is not all that the viewer got in 20 s."""
    trouble = Trouble()
    trouble.note_pictures(10.0, 300, 0, 0.0)
    assert trouble.picture_share(11.0, 330, 30) == 1 - 30 / 330
    for second in (15, 20, 25, 30):
        trouble.note_pictures(float(second), 30 * second, 15 * (second - 10), 0.0)
    assert trouble.picture_share(20.0, 600, 150) == 0.75
    assert trouble.picture_share(30.0, 900, 300) == 0.5
    assert trouble.picture_share(31.0, 930, 315) == 0.5


def test_age_when_samples_are_of_one_moment_is_that_of_the_one_before():
    """Two samples close together are one for the age: a big frame under way is in both of them."""
    trouble = Trouble()
    for second in range(10):
        trouble.sample(float(second), 0, 1000 * second, 0)
    trouble.sample(10.0, 0, 15_000, 5000)
    trouble.sample(10.01, 0, 15_000, 5000)
    assert trouble.delay_ms > 1000
    assert trouble.age_ms == 0.0


def test_drain_when_everything_was_taken_for_a_moment_is_measured_again():
    """Once drained is not drained for ever: a later stall is seen, and a later rate is measured."""
    trouble = Trouble()
    written = 0
    for sample in range(1, 11):  # 1000 bytes a second of a full kernel
        written += 500
        trouble.sample(sample / 2, 5000, written + 4000, 4000)
        trouble.waited = True
    assert trouble.drain.rate == pytest.approx(1000)
    assert not trouble.drain.stalled(5.0)
    for sample in range(11, 11 + round(2 * STALL_S)):
        trouble.sample(sample / 2, 5000, written + 4000, 4000)
    assert trouble.drain.stalled(5 + STALL_S)


def test_drain_when_there_is_no_target_delay_knows_that_a_viewer_stalls_again():
    """A viewer that was thinned, recovered and stalls again is stalled by its meter too, with no rule that asks it."""
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0, return_delay_s=60.0)
    stage = Stage()
    viewer = stage.viewer(Peer(), limits=NO_LIMITS, settings=settings)
    stage.viewers.append(viewer)
    viewer.follow(stage.fanout)
    stage.group.run(1.0)
    viewer.host.unacknowledged = lambda: 500
    viewer.peer.room = 0
    stage.publish("IA")
    stage.group.run(2.0)
    stage.publish("KA")
    viewer.sender.thin(Thin.TO_KEY_FRAME)
    viewer.drain()
    assert viewer.sender.state is READY
    viewer.peer.room = 0
    stage.publish("IA")
    stage.group.run(2 * STALL_S)
    assert viewer.sender._trouble.drain.stalled(stage.group.now())
    stage.check()


# -- joiners


def kept():
    gc.collect()
    return sum(type(item) is Trouble for item in gc.get_objects())


def joined(settings, *, room):
    """Return a stage with a viewer that is refused something while it takes the cache."""
    stage = Stage(script="KIIAIIA")
    viewer = stage.viewer(Peer(room), settings=settings)
    stage.viewers.append(viewer)
    viewer.follow(stage.fanout)
    stage.group.run(0.1)
    assert viewer.peer.eagains == 1
    return stage, viewer


@pytest.mark.parametrize("age_from", AgeSource)
def test_joiner_when_it_takes_the_cache_in_parts_leaves_nothing_behind(age_from):
    """One EAGAIN of a healthy joiner costs it no meters and no timer once all is taken."""
    before = kept()
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0, age_from=age_from)
    stage, viewer = joined(settings, room=40)
    stage.publish("IA")
    viewer.drain()
    assert viewer.sender.state is READY
    assert stage.fanout.statistics().members == 1
    assert kept() == before
    stage.group.run(1.0)  # a tick that was asked for while the kernel refused may still come
    deadlines = []
    viewer.host.set_deadline = deadlines.append
    for _ in range(10):
        stage.publish("IA")
        stage.group.run(0.5)
    assert deadlines == []
    assert viewer.sender.sample_delay() == 0.0
    stage.check()


def test_joiner_when_it_is_slow_is_measured_like_any_other():
    """A refusal makes the meters; without a loss they are given back, of a joiner and of any other."""
    before = kept()
    stage, viewer = joined(STEERED, room=40)
    viewer.drain()
    assert kept() == before
    viewer.peer.room = 0
    stage.publish("IA")
    assert kept() == before + 1
    viewer.drain()
    assert kept() == before


def test_joiner_when_something_was_done_to_it_keeps_its_record():
    """Messages thinned while it joined are in its statistics for good."""
    stage, viewer = joined(STEERED, room=40)
    stage.group.run(3.0)
    viewer.sender.thin(Thin.DROPPABLE)
    removed_ms = viewer.sender.statistics().delay_removed_ms
    assert removed_ms > 2000
    viewer.drain()
    assert viewer.sender.statistics().delay_removed_ms == removed_ms
    check_accounts(viewer)
