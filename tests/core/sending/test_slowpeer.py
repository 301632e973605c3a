"""What is kept of a peer in trouble: who samples it, when the kernel counts as full, when it is given back."""

from __future__ import annotations

import pytest
from fanout_kit import Stage, kept_of
from flow_kit import Peer, Published, check_accounts
from sender_kit import READY
from slow_kit import Steady

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, HardPolicy, Limits
from flowctl.core.flow.meters import STALL_S
from flowctl.core.flow.policy import Thin
from flowctl.core.flow.state import Load, SendState
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.core.sending.slowpeer import SlowPeer, healthy_delay_ms
from flowctl.reasons import CloseReason

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
    scene = Steady(0.5)
    sampled_from_elsewhere(scene, 20, 0.5, every_s=every_s)
    assert 0.1 < scene.sender.statistics().picture_share < 0.6
    sampled_from_elsewhere(scene, 20, 3.0, every_s=every_s)
    assert scene.sender.state is READY
    check_accounts(scene.viewer)


def told_shares(sender):
    return tuple(item.picture_share for item in (sender.statistics(), sender.account(), sender.account(rows=False)))


def test_share_when_a_viewer_was_served_whole_for_20_s_is_one_again():
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
    scene = Steady(0.5, flush_s=0.04).go(30)
    before = told_shares(scene.sender)
    scene.sender.close(CloseReason.KICKED, "enough")
    assert told_shares(scene.sender) == before
    assert before[0] < 0.6


def test_share_when_a_hard_limit_is_held_is_of_what_was_published():
    limits = Limits.parse("0,0", "100kB,0", hard_policy=HardPolicy.HOLD)
    scene = Steady(0.3, limits=limits, settings=STEERED).go(10)
    scene.go(15, 0.0)
    assert scene.sender.state is SendState.HARD_LIMIT
    scene.go(2, 0.3)
    assert all(share < 0.6 for share in told_shares(scene.sender))


def test_age_when_one_sample_is_high_is_that_of_the_other():
    slow = SlowPeer(SenderSettings())
    for second in range(10):
        slow.sample(float(second), 0, 1000 * second, 0)
    slow.sample(10.0, 0, 15_000, 5000)
    assert slow.delay_ms > 1000
    assert slow.age_ms == 0.0
    slow.sample(11.0, 0, 16_000, 5000)
    assert slow.age_ms > 1000
    assert slow.harmless


def test_age_when_samples_are_of_one_moment_is_that_of_the_one_before():
    slow = SlowPeer(SenderSettings())
    for second in range(10):
        slow.sample(float(second), 0, 1000 * second, 0)
    slow.sample(10.0, 0, 15_000, 5000)
    slow.sample(10.01, 0, 15_000, 5000)
    assert slow.delay_ms > 1000
    assert slow.age_ms == 0.0


def test_sample_when_asked_for_has_a_rhythm_of_its_own():
    slow = SlowPeer(STEERED)
    assert slow.due(0.0)
    assert slow.next_sample_at(5.0) == 5.0
    slow.sample(1.0, 0, 1000, 0)
    assert slow.due(1.0)
    assert slow.asked_too_soon(1.4)
    assert not slow.asked_too_soon(1.5)
    assert slow.why_return(1.5, 0.0) is None
    assert not slow.due(1.9)
    assert slow.next_sample_at(1.9) == 2.0


@pytest.mark.parametrize(
    ("limit_s", "age_ms", "why"), [(3.0, 2999.0, None), (3.0, 3500.0, "3.5 s behind"), (0, 1e9, None)]
)
def test_return_when_the_queue_is_too_old_has_its_cause(limit_s, age_ms, why):
    slow = SlowPeer(SenderSettings(return_delay_s=limit_s))
    slow.sample(1.0, 0, 1000, 0)
    assert slow.why_return(1.0, age_ms) == why


def test_pace_when_the_rate_changes_a_little_stays_and_else_follows():
    slow = SlowPeer(STEERED)
    assert slow.budget_bytes(10_000) == 10_000
    assert not slow.note_given(10_000, full=False)
    slow.pace_anew(100_000, 0.0)
    assert slow.ahead_bytes == slow.budget_bytes(1 << 20) == 30_000
    slow.pace_anew(110_000, 0.0)
    assert slow.ahead_bytes == 30_000
    assert not slow.note_given(15_000, full=False)
    slow.pace_anew(200_000, 0.0)
    assert slow.budget_bytes(1 << 20) == 45_000
    assert slow.note_given(45_000, full=False)
    assert slow.budget_bytes(1 << 20) == 0
    slow.measure(1.0, 60_000, 40_000)  # it has taken 20,000 of what it was given
    assert slow.budget_bytes(1 << 20) == 20_000
    assert slow.note_given(5000, full=True), "the kernel has refused the rest, whatever was reckoned"
    slow.kernel_asked(0.0)
    assert slow.budget_bytes(1 << 20) == 60_000
    assert slow.note_keeping_up()
    assert not slow.note_keeping_up()


def test_late_pictures_when_first_seen_are_noted_once_until_the_peer_keeps_up():
    slow = SlowPeer(STEERED)
    assert slow.note_late(1.0, 0) is None
    assert slow.harmless
    slow.drain.rate = 2048.0
    noted = slow.note_late(2.0, 3)
    assert (noted.kind, noted.why) == (LedgerKind.LATE, "pictures would be late; it takes 2.0 KiB/s")
    assert slow.note_late(3.0, 5) is None
    assert not slow.harmless
    assert slow.held_until(gop_s=2.0) == 7.0
    slow.note_keeping_up()
    assert slow.note_late(9.0, 5) is None
    assert slow.note_late(10.0, 6) is not None
    assert slow.note_late(11.0, 1) is None, "another log"


def test_age_when_the_delay_counts_is_that_of_the_load():
    load = Load(500, 3, 100.0)
    for age_from, age_ms in ((AgeSource.QUEUE, 100.0), (AgeSource.DELAY, 2000.0)):
        slow = SlowPeer(SenderSettings(age_from=age_from))
        for second in range(10):
            slow.sample(float(second), 2000, 1000 * second, 0)
        assert slow.load_with_delay(load) == Load(500, 3, pytest.approx(age_ms))
        assert slow.load_with_delay(Load(500, 3, 1e6)) == Load(500, 3, 1e6)


@pytest.mark.parametrize(
    ("kernel_bytes", "rate", "delay_ms"), [(0, 0.0, 0.0), (1000, 10_000, 100.0), (5000, 10_000, None), (10, 0.0, None)]
)
def test_delay_of_a_peer_that_keeps_up_is_told_without_measuring(kernel_bytes, rate, delay_ms):
    assert healthy_delay_ms(kernel_bytes, rate) == delay_ms


def test_drain_when_everything_was_taken_for_a_moment_is_measured_again():
    slow = SlowPeer(SenderSettings())
    written = 0
    for sample in range(1, 11):  # 1000 bytes a second of a full kernel
        written += 500
        slow.sample(sample / 2, 5000, written + 4000, 4000)
        slow.waited = True
    assert slow.drain.rate == pytest.approx(1000)
    assert not slow.drain.stalled(5.0)
    for sample in range(11, 11 + round(2 * STALL_S)):
        slow.sample(sample / 2, 5000, written + 4000, 4000)
    assert slow.drain.stalled(5 + STALL_S)


def test_drain_when_there_is_no_target_delay_knows_that_a_viewer_stalls_again():
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
    assert viewer.sender._judgement.slow.drain.stalled(stage.group.now())
    stage.check()


# -- joiners


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
    before = kept_of(SlowPeer)
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0, age_from=age_from)
    stage, viewer = joined(settings, room=40)
    stage.publish("IA")
    viewer.drain()
    assert viewer.sender.state is READY
    assert stage.fanout.statistics().members == 1
    assert kept_of(SlowPeer) == before
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
    before = kept_of(SlowPeer)
    stage, viewer = joined(STEERED, room=40)
    viewer.drain()
    assert kept_of(SlowPeer) == before
    viewer.peer.room = 0
    stage.publish("IA")
    assert kept_of(SlowPeer) == before + 1
    viewer.drain()
    assert kept_of(SlowPeer) == before


def test_joiner_when_something_was_done_to_it_keeps_its_record():
    stage, viewer = joined(STEERED, room=40)
    stage.group.run(3.0)
    viewer.sender.thin(Thin.DROPPABLE)
    removed_ms = viewer.sender.statistics().delay_removed_ms
    assert removed_ms > 2000
    viewer.drain()
    assert viewer.sender.statistics().delay_removed_ms == removed_ms
    check_accounts(viewer)


def oldest_not_taken_ms(scene):
    """Return the age of the oldest that the link has not carried, in ms: the published times of what was sent."""
    at, carried = 0, scene.kernel.carried_bytes
    for _, _, number, size in scene.viewer.frames:
        at += size
        if at > carried:
            return (scene.now - scene.published_at[number]) * 1000
    return scene.sender.load().age_ms


@pytest.mark.parametrize("limits", [None, NO_LIMITS])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_delay_of_a_slow_viewer_is_the_age_of_the_oldest_that_it_has_not_taken(share, limits):
    scene = Steady(share, flush_s=0.04, **({} if limits is None else {"limits": limits}))
    reckoned, noted, worst, refused_at = [], [], 0.0, 0
    for tenth in range(300):
        scene.go(0.1, share if tenth < 200 else 3.0)
        account, age_ms = scene.sender.account(), oldest_not_taken_ms(scene)
        if account.pulse is None:
            refused_at = refused_at or len(scene.kernel.received)
            errors = reckoned if scene.kernel.carried_bytes < refused_at else noted
            errors.append(abs(account.delay_ms - age_ms))
            worst = max(worst, age_ms)
            assert account.delay_ms == scene.sender.account(rows=False).delay_ms
            assert account.delay_ms <= scene.now * 1000
    assert len(noted) >= 80
    assert worst > 1000 or share > 0.9
    assert max(reckoned) <= 300, "what was written before the first refusal came at the rate of the log, about"
    assert max(noted) <= 60


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_viewer_when_its_kernel_tells_nothing_of_what_it_holds_gets_what_its_line_carries(share):
    scene = Steady(share)
    scene.viewer.host.unacknowledged = None
    scene.go(20)
    assert scene.figures(8, 18)["line"] > 0.9
    scene.check()


def test_delay_when_the_first_refusal_comes_is_no_more_than_the_time_since_joining():
    """A viewer that joins and is given more than its line carries: bytes over its rate would say many seconds."""
    scene = Steady(0.05, gop_s=1.0)
    for tenth in range(1, 11):
        scene.go(0.1)
        assert scene.sender.account().delay_ms <= tenth * 100 + 1
        assert scene.sender.sample_delay() <= tenth * 100 + 1
    assert scene.sender.account().delay_ms > 500
