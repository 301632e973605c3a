"""What a Sender does about a slow peer beyond its states: return to live, delay as age, samples, forecast."""

from __future__ import annotations

import gc

import pytest
from fanout_kit import TIMELESS, Stage, kept_of
from flow_kit import (
    CONTROL,
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
    check_stream,
    frame,
)
from sender_kit import READY, SOFT_LIMIT, Talker, by_messages
from slow_kit import RATE, Scene, Steady, stream

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, Axis, AxisLimits, Limits
from flowctl.core.flow.meters import STALL_S
from flowctl.core.flow.policy import LivePolicy, Thin
from flowctl.core.outgoing.streamlog import CacheLimits, Entry
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.core.sending.slowpeer import SlowPeer
from flowctl.errors import ConfigError
from flowctl.reasons import DropReason
from flowctl.sender import Sender
from flowctl.testing import ManualGroup

RETURNING = SenderSettings(stuck_s=0, soft_too_long_s=0, return_after_s=2.0)
BY_DELAY = SenderSettings(stuck_s=0, soft_too_long_s=0, age_from=AgeSource.DELAY)


def staged(settings, limits=NO_LIMITS):
    """Return a stage with one viewer that has taken the cache."""
    stage = Stage()
    viewer = stage.viewer(Peer(), limits=limits, settings=settings)
    stage.viewers.append(viewer)
    viewer.follow(stage.fanout)
    stage.group.run(1.0)
    assert stage.fanout.statistics().members == 1
    return stage, viewer


def entries(viewer, kind):
    return [entry for entry in viewer.sender.ledger() if entry.kind is kind]


# -- return to live


def test_return_when_a_stall_ends_skips_to_the_newest_key_frame_and_says_what_it_removed():
    stage, viewer = staged(RETURNING)
    viewer.peer.room = 0
    stage.publish("IA")
    stage.group.run(3.0)
    stage.publish("KAI")
    stage.group.run(1.0)
    stage.publish("KAI")
    viewer.drain()
    sent = [(origin, item, number) for origin, item, number, _ in viewer.frames[-5:]]
    assert [(origin, number) for origin, _, number in sent] == [
        (RESTART, 6),
        (RESTART, 6),
        (LOG, 6),
        (LOG, 7),
        (LOG, 8),
    ]
    statistics = viewer.sender.statistics()
    assert statistics.returns == 1
    assert statistics.delay_removed_ms == pytest.approx(4000)
    assert statistics.dropped[DropReason.RETURNED].total_messages == 5
    (entry,) = entries(viewer, LedgerKind.RETURN)
    assert entry.delay_removed_ms == pytest.approx(4000)
    assert entry.why == "returned to live: 4.0 s of delay removed; it had taken nothing for 4.0 s"
    (drops,) = entries(viewer, LedgerKind.DROPS)
    assert drops.delay_removed_ms == pytest.approx(4000)
    assert "4.0 s of delay removed" in drops.why
    stage.publish("IA")
    assert viewer.numbers()[-2:] == [9, 10]
    stage.check()


@pytest.mark.parametrize(
    ("seconds", "settings", "script"),
    [(1.5, RETURNING, "KAI"), (4.0, TIMELESS, "KAI"), (4.0, RETURNING, "IAI")],
    ids=["short stall", "off", "no key frame ahead"],
)
def test_return_when_there_is_no_reason_sends_everything(seconds, settings, script):
    stage, viewer = staged(settings)
    viewer.peer.room = 0
    stage.publish("IA")
    stage.group.run(seconds)
    stage.publish(script)
    viewer.drain()
    assert viewer.numbers() == list(range(6))
    assert viewer.sender.statistics().returns == 0
    assert viewer.sender.statistics().dropped == {}


def test_return_when_a_slow_viewer_is_too_far_behind_comes_without_a_stall():
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0, return_delay_s=3.0)
    scene = Steady(0.4, settings=settings, limits=Limits(target_delay_ms=0))
    worst = 0.0
    for _ in range(60):
        scene.go(1)
        worst = max(worst, scene.sender.load().age_ms)
    statistics = scene.sender.statistics()
    assert statistics.returns >= 3
    assert statistics.delay_removed_ms > 3000
    assert worst < 6000, "the mark, two samples, and the group before the newest key frame"
    check_stream(scene.viewer, scene.published)
    check_accounts(scene.viewer)


def test_thinning_at_the_soft_limit_reports_the_delay_removed():
    stage, viewer = staged(TIMELESS, by_messages(8, 1000, 4))
    viewer.peer.room = 0
    stage.publish("IAIA")
    stage.group.run(2.0)
    stage.publish("KAIA")
    assert viewer.sender.statistics().delay_removed_ms == pytest.approx(2000)
    viewer.drain()
    (drops,) = entries(viewer, LedgerKind.DROPS)
    assert "2.0 s of delay removed" in drops.why


# -- the delay as the age axis

AGE = Limits(age_ms=AxisLimits(soft=1000, hard=60_000, low=500))


def test_age_from_delay_when_the_kernel_hides_a_slow_viewer_reaches_the_soft_limit():
    stage, viewer = staged(BY_DELAY, AGE)
    kernel = 0
    viewer.host.unacknowledged = lambda: kernel
    for _ in range(8):
        stage.publish("IIAA", 500)
        stage.group.run(0.5)
        viewer.sender.sample_delay()
    assert viewer.edges.changes == []
    kernel = 14_000
    for _ in range(6):
        stage.publish("IIAA", 500)
        stage.group.run(0.5)
        viewer.sender.sample_delay()
    (edge,) = viewer.edges.changes
    assert (edge.new, edge.axis, edge.limit) == (SOFT_LIMIT, Axis.AGE, 1000)
    assert viewer.sender.statistics().delay_ms > 1000
    assert "for what waits" in viewer.sender.why()
    stage.publish("I")
    assert viewer.sender.statistics().dropped[DropReason.REFUSED].total_messages >= 1
    kernel = 0
    stage.group.run(1.5)
    stage.publish("K")
    assert viewer.sender.state is READY
    stage.publish("I")
    assert viewer.numbers()[-1] == len(stage.published.classes) - 1
    stage.check()


def test_age_from_queue_when_the_kernel_hides_a_slow_viewer_sees_nothing():
    stage, viewer = staged(TIMELESS, AGE)
    viewer.host.unacknowledged = lambda: 14_000
    for _ in range(14):
        stage.publish("IIAA", 500)
        stage.group.run(0.5)
        viewer.sender.sample_delay()
    assert viewer.edges.changes == []
    assert viewer.sender.statistics().delay_ms > 1000


def test_sample_when_a_member_is_healthy_keeps_nothing_about_it():
    stage, viewer = staged(BY_DELAY, AGE)
    for _ in range(40):
        stage.publish("IIAA", 500)
        stage.group.run(0.5)
    assert viewer.sender.sample_delay(0) == 0.0
    assert viewer.sender.sample_delay(400) == pytest.approx(100, rel=0.3)
    assert viewer.sender.statistics().delay_ms == 0.0
    viewer.sender.sample_delay(40_000)
    stage.group.run(0.3)
    stage.publish("I", 500)
    assert viewer.sender.sample_delay(40_000) > 1000


def test_sample_when_taken_by_another_thread_only_measures():
    stage, viewer = staged(BY_DELAY, AGE)
    for _ in range(8):
        stage.publish("IIAA", 500)
        stage.group.run(0.5)
        viewer.host.foreign = True
        viewer.sender.sample_delay(14_000)
        viewer.host.foreign = False
    assert viewer.edges.changes == []
    viewer.sender.sample_delay(14_000)
    assert viewer.sender.state is SOFT_LIMIT


def test_acknowledgement_when_the_application_lags_counts_for_the_delay():
    stage, viewer = staged(BY_DELAY, AGE)
    sent = 0
    for _ in range(30):
        stage.publish("IIAA", 500)
        stage.group.run(0.5)
        sent = viewer.sender.statistics().bytes_sent
        viewer.sender.peer_acknowledged(max(sent - 20_000, 1) if sent > 21_000 else sent)
        viewer.sender.sample_delay()
    assert viewer.sender.state is SOFT_LIMIT
    assert viewer.sender.statistics().delay_ms > 1000


@pytest.mark.parametrize("claimed", ["50 kB more", "nothing", "less and less", "never", "twice as much"])
def test_acknowledgement_when_it_is_untrue_makes_no_delay(claimed):
    stage, viewer = staged(BY_DELAY, AGE)
    for step in range(200):
        stage.publish("KIIIAA" if step % 20 == 0 else "IIIIAA", 2500)
        stage.group.run(0.5)
        sent = viewer.sender.statistics().bytes_sent
        if claimed == "less and less":
            viewer.sender.peer_acknowledged(max(2000 - 10 * step, 0))
        elif claimed == "nothing":
            viewer.sender.peer_acknowledged(0)
        elif claimed == "twice as much":
            viewer.sender.peer_acknowledged(2 * sent)
        elif claimed == "50 kB more" and step % 10 == 0:
            viewer.sender.peer_acknowledged(sent + 50_000)
        viewer.sender.sample_delay()
    assert viewer.sender.state is READY
    assert viewer.sender.statistics().delay_ms < 100


# -- the forecast


def test_forecast_when_a_viewer_takes_a_part_is_when_its_queue_reaches_the_hard_mark():
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0)
    limits = Limits.parse("0,0", "64MiB,0,60s", target_delay_ms=0)
    scene = Steady(0.6, settings=settings, limits=limits)
    scene.go(20)
    first = scene.sender.forecast()
    assert first is not None
    assert first.axis is Axis.AGE
    scene.go(20)
    second = scene.sender.statistics().forecast
    assert second is not None
    assert first.seconds - second.seconds == pytest.approx(20, rel=0.25)
    assert "the hard limit (age) is" in scene.sender.why()
    scene.go(second.seconds + 12)
    assert scene.viewer.host.closed, "what was forecast came about"


def test_forecast_when_pictures_are_left_out_is_never_until_the_viewer_stalls():
    scene = Steady(0.5, flush_s=0.04).go(5)
    for _ in range(20):
        scene.go(2)
        assert scene.sender.forecast() is None
        assert "the hard limit" not in scene.sender.why()
    assert not scene.viewer.host.closed
    scene.go(2 * STALL_S, 0.0)
    assert scene.sender.forecast() is not None
    assert "the hard limit" in scene.sender.why()


def test_forecast_when_no_log_is_followed_rests_on_what_is_queued():
    talker = Talker(settings=SenderSettings(stuck_s=0), limits=Limits(size=AxisLimits(hard=100_000), overhead_bytes=0))
    talker.peer.room = 0
    for _ in range(20):
        talker.say("X", 500)
        talker.group.run(0.5)
        talker.give(250)
    found = talker.sender.forecast()
    assert found is not None
    assert found.axis is Axis.BYTES
    left = 100_000 - talker.sender.load().size_bytes
    assert found.seconds == pytest.approx(left / 500, rel=0.4)


# -- settings, and what is kept of the log


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"return_after_s": -1.0}, "return_after_s"),
        ({"return_delay_s": -1.0}, "return_delay_s"),
        ({"sample_s": 0}, "sample_s"),
        ({"turn_messages": 1025}, "IOV_MAX"),
    ],
)
def test_settings_when_out_of_range_are_refused_by_name(settings, name):
    with pytest.raises(ConfigError, match=name):
        SenderSettings(**settings)


@pytest.mark.parametrize("age_from", AgeSource)
def test_memory_when_a_viewer_recovered_without_a_loss_is_given_back(age_from):
    gc.collect()
    before = kept_of(SlowPeer)
    settings = SenderSettings(stuck_s=0, soft_too_long_s=0, age_from=age_from)
    stage, viewer = staged(settings, AGE)
    viewer.peer.room = 0
    stage.publish("A", 500)
    assert kept_of(SlowPeer) == before + 1
    viewer.drain()
    for _ in range(60):
        stage.publish("A", 500)
        stage.group.run(0.5)
    assert kept_of(SlowPeer) == before
    assert viewer.sender.state is READY


def test_lateness_when_a_viewer_is_closing_is_no_matter():
    scene = Steady(0.2, limits=NO_LIMITS).go(3)
    late = scene.sender.statistics().dropped.get(DropReason.LATE)
    scene.sender.close_after_flush()
    scene.go(30)
    assert scene.sender.statistics().dropped.get(DropReason.LATE) == late
    check_accounts(scene.viewer)


def test_why_when_pictures_were_left_out_tells_the_delay_of_what_is_left():
    scene = Steady(0.5).go(20)
    said = float(scene.sender.why().partition("of the pictures, ")[2].partition(" s behind")[0])
    waiting_bytes = scene.sender.load().size_bytes + scene.kernel.held_bytes
    assert said == pytest.approx(waiting_bytes / (0.5 * RATE), rel=0.5, abs=0.3)


def test_log_when_a_closing_viewer_reads_slowly_is_not_held_by_it():
    gc.collect()
    group = ManualGroup()
    published = Published(group, cache=CacheLimits(size_bytes=0))
    fanout = Fanout(published.log, group, flush_interval_s=0)
    viewer = Viewer(group, policy=LivePolicy(), settings=SenderSettings(stuck_s=0, close_deadline_s=60))
    viewer.follow(fanout)
    group.run(1.0)
    viewer.peer.room = 0
    published.script("AAKIA")
    group.run()
    before = kept_of(Entry)
    viewer.sender.close_after_flush()
    group.run(0.1)
    published.script("KIIIA" * 50)
    group.run(1.0)
    gc.collect()
    assert kept_of(Entry) <= before
    viewer.give(None)
    group.run(1.0)
    assert viewer.numbers() == [0, 1, 2, 3, 4]
    assert viewer.host.closed[0][1] == "everything was sent"
    check_accounts(viewer)


def test_viewer_when_it_is_removed_from_a_fanout_is_watched_by_it_no_longer():
    stage, viewer = staged(TIMELESS, by_messages(1000))
    stage.viewers.clear()
    gc.collect()
    before = kept_of(Sender)
    viewer.peer.room = 0
    stage.publish("AA")
    viewer.sender.unfollow()
    viewer.host.sender = None
    del viewer
    stage.group.run(1.0)
    gc.collect()
    assert kept_of(Sender) == before - 1


def test_key_wait_when_a_viewer_is_blocked_and_the_log_stands_still_expires_by_its_own_timer():
    stage, viewer = staged(TIMELESS)
    viewer.peer.room = 0
    stage.publish("IAI")
    viewer.sender.thin(Thin.DROPPABLE)
    assert "waiting for a key frame" in viewer.sender.why()
    stage.group.run(9.5)
    assert viewer.sender.statistics().key_waits_expired == 0
    stage.group.run(1.5)
    assert viewer.sender.statistics().key_waits_expired == 1


def test_thinning_when_control_messages_are_queued_makes_room_for_their_bytes_too():
    kept = []
    for control in (0, 100):
        size = AxisLimits(soft=400 + control, hard=100_000, low=250)
        limits = Limits(size=size, overhead_bytes=0, target_delay_ms=0)
        stage, viewer = staged(TIMELESS, limits)
        viewer.peer.room = 0
        stage.publish("A")
        if control:
            viewer.sender.send(frame(OWN, CONTROL, 0, control), CONTROL)
        stage.publish("KI", 100)
        stage.publish("KI", 100)
        queued = viewer.sender.statistics().queued
        kept.append((queued.of(KEY), queued.of(INTER)))
    assert kept == [(1, 1), (1, 0)]


def test_joiner_when_it_is_brought_to_live_is_judged_by_the_picture_from_then_on():
    messages = stream(12, 2.0, disposable=True)
    scene = Scene(lambda _: 0.3, settings=SenderSettings(return_delay_s=1.0))
    for _, item, size in messages[:130]:
        scene.published.publish(item, size)
    scene.published_at = [0.0] * 130
    first = messages[130][0]
    scene.follow().run([(at - first, item, size) for at, item, size in messages[130:]], 9)
    statistics = scene.sender.statistics()
    assert statistics.returns > 0
    assert DropReason.LATE in statistics.dropped
    assert DropReason.REFUSED not in statistics.dropped
    scene.check()


def test_joiner_when_there_is_no_newer_key_frame_to_be_brought_to_is_judged_by_the_picture_all_the_same():
    scene = Scene(lambda _: 0.3)
    for _, item, size in stream(4, 30.0, disposable=True)[:140]:
        scene.published.publish(item, size)
    scene.published_at = [0.0] * 140
    scene.follow().run([], 0.3)
    scene.sender.relieve("memory is short")
    scene.run([(0.3 + at, item, size) for at, item, size in stream(4, 1.0, disposable=True)], 5)
    dropped = scene.sender.statistics().dropped
    assert DropReason.LATE in dropped
    assert DropReason.REFUSED not in dropped
    scene.check()


def test_own_pictures_when_the_log_is_left_at_the_soft_limit_are_refused_by_the_state():
    scene = Steady(0.3, limits=Limits.parse("100KiB,2048,0", "4MiB,4096,0"), settings=TIMELESS).go(5)
    scene.go(1, 0.0)
    for number in range(60):
        scene.sender.send(frame(OWN, DATA, number, 3000), DATA)
    scene.sender.unfollow()
    assert scene.sender.state is SOFT_LIMIT
    assert scene.sender.send(frame(OWN, DISPOSABLE, 60, 100), DISPOSABLE).outcome is SendOutcome.DROPPED
