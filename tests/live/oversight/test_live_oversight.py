"""Looks at slow viewers: the memory budget acts on who is to blame, the shadow acts on nothing, shares are counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import structlog
from live_kit import World, audio, config, inter, key

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import KeepAll, LivePolicy
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.live.config import SecondPublisher
from flowctl.live.judging.shadow import Candidate
from flowctl.live.oversight.oversight import Oversight
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import Sender
from flowctl.wire.rtmp.messages import Acknowledgement, encode_control

FRAME = 4000


def slow(viewer, room=0):
    """Let the kernel take `room` more bytes of the viewer's output, and no more."""
    viewer.reads = False
    viewer.wire.room = len(viewer.wire.down) + room


def broadcast(world, publisher, frames, *, first=True, start=0):
    """Publish a group of pictures."""
    for index in range(frames):
        body = key(b"k", FRAME) if first and not index else inter(b"i", FRAME)
        publisher.send(publisher.session.send_video(start + index * 40, body), run=False)
        publisher.send(publisher.session.send_audio(start + index * 40, audio(b"a")), run=False)
    world.run()


def look(world):
    world.hub.oversight.look()
    world.run()


def test_budget_when_a_stalled_viewer_holds_too_much_thins_it_then_closes_it():
    """The viewer that holds the log is brought to the newest key frame, with a line that says who and why."""
    world = World(config(memory_budget_bytes=600_000))
    publisher = world.publisher()
    stalled, healthy, near = world.player(), world.player(), world.player()
    slow(stalled)
    broadcast(world, publisher, 100)
    slow(near)
    broadcast(world, publisher, 60, start=4000)
    broadcast(world, publisher, 2, start=7000)
    with structlog.testing.capture_logs() as logs:
        look(world)
    (line,) = [item for item in logs if item["event"] == "memory budget: viewer thinned"]
    assert (line["stream"], line["peer"]) == ("live/room", f"192.0.2.1:{stalled.connection.peer[1]}")
    assert "the limit is" in line["why"]
    figures = stalled.connection.sender.statistics()
    assert figures.dropped[DropReason.RETURNED].of(MessageClass.INTER) > 100
    assert not healthy.connection.sender.statistics().dropped
    assert DropReason.RETURNED not in near.connection.sender.statistics().dropped
    look(world)
    snapshot = world.hub.snapshot()
    assert (snapshot.budget.thinned, snapshot.budget.closed, snapshot.budget.active) == (1, 0, False)
    assert snapshot.budget.held.total_bytes < 600_000
    assert world.group.failures == []


@pytest.mark.parametrize("lags", [False, True])
def test_budget_when_a_stream_keeps_headers_counts_them_once(lags):
    """Those of its publisher and of one on standby, however many viewers start with them."""
    world = World(config(second_publisher=SecondPublisher.STANDBY))
    publisher = world.publisher()
    look(world)
    before = world.hub.snapshot().budget.held.total_bytes
    viewers = [world.player(), world.player()]
    if lags:
        slow(viewers[0])
        broadcast(world, publisher, 5)
        look(world)
        before = world.hub.snapshot().budget.held.total_bytes
    for sender in (publisher, world.publisher()):
        for track in range(8):
            sender.video(0, bytes([0x96, 0x00]) + b"avc1" + bytes([track]) + b"." * 60_000)
    look(world)
    grown = world.hub.snapshot().budget.held.total_bytes - before
    # What a viewer that lags was offered of them stands in the log as well.
    assert 2 * 8 * 60_000 < grown < (3 if lags else 2) * 8 * 61_000
    assert world.group.failures == []


def test_budget_when_publishers_fill_it_with_their_caches_costs_no_viewer_of_others_anything():
    """The caches that are too large give way, not a slow viewer of another stream, whose own cache stays."""
    world = World(config(memory_budget_bytes=2_000_000))
    honest = world.publisher()
    slow_viewer = world.player()
    slow(slow_viewer)
    broadcast(world, honest, 50)
    hostile = [world.publisher(f"live/hostile{number}", address="192.0.2.66") for number in range(3)]
    for publisher in hostile:
        broadcast(world, publisher, 200)
    look(world)
    snapshot = world.hub.snapshot()
    assert (snapshot.budget.emptied, snapshot.budget.thinned, snapshot.budget.closed) == (3, 0, 0)
    assert snapshot.budget.held.total_bytes < 2_000_000
    cached = {stream.name: any(wire.log.cached for wire in stream.wires) for stream in world.hub.streams()}
    assert cached.pop("live/room")
    assert not any(cached.values())
    assert slow_viewer.ended is None
    assert world.group.failures == []


def test_shadow_when_its_stream_has_gone_is_kept_without_a_name():
    """Anybody can make names without end; the sum over all streams stays what it was."""
    world, publisher = shadowed(Candidate(limits=Limits.parse("1MiB,2048,4s"), policy=LivePolicy()))
    viewer = world.player()
    slow(viewer)
    broadcast(world, publisher, 30)
    look(world)
    viewer.vanish()
    publisher.leave()
    world.run(4)
    look(world)
    look(world)
    assert list(world.hub.oversight.statistics().shadow) == [""]
    assert world.hub.snapshot().shadow.viewers == 1


def test_budget_when_thinning_is_not_enough_closes_with_its_own_reason():
    """A viewer of a stream whose newest key frame is far back cannot be thinned enough and is closed."""
    world = World(config(memory_budget_bytes=100_000))
    publisher = world.publisher()
    stalled = world.player()
    slow(stalled, room=10)
    world.hub.streams()
    broadcast(world, publisher, 1)
    (stream,) = world.hub.streams()
    for wire in stream.wires:
        wire.log.drop_cache()  # as a publisher does that sends no key frame for long
    broadcast(world, publisher, 60, first=False, start=40)
    look(world)
    world.run(1.0)
    broadcast(world, publisher, 60, start=4000)
    for wire in stream.wires:
        wire.log.drop_cache()
    look(world)
    assert stalled.ended is not None
    assert stalled.ended[0] is CloseReason.MEMORY_BUDGET
    assert world.hub.snapshot().budget.closed == 1


def test_held_bytes_when_two_streams_are_lagged_behind_are_told_by_stream():
    """What each stream holds is in its own figures, and the sum in those of the server."""
    world = World()
    one, two = world.publisher("live/one"), world.publisher("live/two")
    slow(world.player("live/one"))
    world.player("live/two")
    broadcast(world, one, 50)
    broadcast(world, two, 10)
    look(world)
    snapshot = world.hub.snapshot()
    held = {name: stream.held_bytes for name, stream in snapshot.streams.items()}
    assert held["live/one"] > 50 * FRAME > held["live/two"] > 10 * FRAME
    assert sum(held.values()) == snapshot.budget.held.shared_bytes


def test_shares_when_a_viewer_lags_count_its_state_and_everybody_else_as_ready():
    """Who keeps up, waits or pauses is READY and gets all; who lags is asked."""
    world = World()
    publisher = world.publisher()
    slow(world.player())
    world.player(), world.player(), world.player("live/absent")
    broadcast(world, publisher, 20)
    look(world)
    shares = world.hub.oversight.statistics().shares
    assert shares["live/room"].states == (2, 1, 0, 0)
    assert (shares["live/room"].missing_pictures, shares["live/room"].picture_share) == (0, 1.0)
    assert shares["live/absent"].in_state(SendState.READY) == 1.0


def shadowed(candidate, **limits):
    world = World(config(shadow=candidate), **limits)
    return world, world.publisher()


def test_shadow_when_its_limits_are_tighter_would_have_closed_and_changes_nothing():
    """A candidate that would close the slow viewer is compared, and the viewer stays and loses nothing."""
    world, publisher = shadowed(Candidate(limits=Limits.parse("0,0", "100kB,0"), policy=KeepAll()))
    viewer = world.player()
    slow(viewer)
    broadcast(world, publisher, 5)
    look(world)
    for turn in range(10):
        broadcast(world, publisher, 20, start=1000 * turn + 1000)
        look(world)
    report = world.hub.snapshot().streams["live/room"].shadow
    assert (report.viewers, report.would_have_closed) == (1, 1)
    assert report.live_dropped.total_messages == 0 or viewer.ended is None
    viewer.reads, viewer.wire.room = True, None
    world.run(1.0)
    assert viewer.ended is None


def test_shadow_when_the_live_limits_close_would_have_kept():
    """A viewer closed at its hard limit is one that a candidate without limits would have kept."""
    world, publisher = shadowed(
        Candidate(limits=Limits.parse("0,0"), policy=LivePolicy(), stuck_s=0), limits=Limits.parse("0,0", "200kB,0")
    )
    viewer = world.player()
    slow(viewer)
    broadcast(world, publisher, 5)
    look(world)
    broadcast(world, publisher, 100, start=1000)
    look(world)
    assert viewer.ended[0] is CloseReason.HARD_LIMIT
    report = world.hub.snapshot().shadow
    assert (report.viewers, report.would_have_kept, report.would_have_closed) == (1, 1, 0)
    look(world)
    assert world.hub.snapshot().shadow.would_have_kept == 1  # counted once


def test_shadow_when_only_its_marks_count_is_judged_with_what_is_in_force_for_the_viewer():
    """Target delay, policy and times are the viewer's own, of its audience too, and follow a change of its limits."""
    candidate = Candidate(limits=Limits.parse("1MiB,2048,4s"), policy=KeepAll(), marks_only=True)
    world, publisher = shadowed(
        candidate, limits=Limits.parse("0,0", target_delay_ms=700), sender=SenderSettings(stuck_s=3, soft_too_long_s=0)
    )
    viewer = world.player()
    slow(viewer)
    broadcast(world, publisher, 30)
    look(world)
    (shadowed_viewer,) = world.hub.oversight._shadows.values()
    shadow, judged = shadowed_viewer.shadow, shadowed_viewer.shadow.candidate
    assert (judged.policy, judged.stuck_s, judged.soft_too_long_s) == (world.policy, 3, 0)
    assert shadow.limits == replace(candidate.limits, target_delay_ms=700)
    for target_ms in (0, None, 2500):
        viewer.connection.sender.set_limits(Limits.parse("4MiB,0", target_delay_ms=target_ms))
        world.run()
        look(world)
        assert shadow.limits == replace(candidate.limits, target_delay_ms=target_ms)


def test_shadow_when_the_viewer_has_caught_up_ends():
    """A viewer that keeps up again has no shadow any more; what was compared stays in the figures."""
    world, publisher = shadowed(Candidate(limits=Limits.parse("1MiB,2048,4s"), policy=LivePolicy()))
    viewer = world.player()
    slow(viewer)
    broadcast(world, publisher, 10)
    look(world)
    assert len(world.hub.oversight._shadows) == 1
    viewer.reads, viewer.wire.room = True, None
    for turn in range(4):
        broadcast(world, publisher, 2, start=1000 + turn * 100)
        look(world)
    assert world.hub.oversight._shadows == {}
    assert world.hub.snapshot().shadow.viewers == 1


@pytest.mark.parametrize("failure", [ValueError, SystemExit, asyncio.CancelledError])
def test_shadow_when_its_policy_raises_is_reported_once_and_ends(failure):
    """A candidate that fails costs nobody anything, whatever it raises: it is reported and asked no more."""

    class Broken(KeepAll):
        def decide(self, state, message_class):
            raise failure("no idea")

    world, publisher = shadowed(Candidate(limits=Limits.parse("1MiB,2048,4s"), policy=Broken()))
    reports = []
    world.hub.oversight.report = lambda where, error: reports.append((where, str(error)))
    slow(world.player())
    broadcast(world, publisher, 10)
    look(world)
    look(world)
    assert len(reports) == 1
    assert "no idea" in reports[0][1]
    assert world.hub.snapshot().shadow.viewers == 0


def test_shadow_when_its_policy_raises_later_ends_for_all_viewers_and_keeps_their_figures():
    """No shadow is left that nobody shows anything to; what was compared counts, and the failure is told once."""
    asked = []

    class Failing(KeepAll):
        def decide(self, state, message_class):
            asked.append(state)
            if fails:
                raise ValueError("no idea")
            return super().decide(state, message_class)

    fails = False
    world, publisher = shadowed(Candidate(limits=Limits.parse("150kB,0"), policy=Failing()))
    reports = []
    world.hub.oversight.report = lambda where, error: reports.append(str(error))
    for _ in range(3):
        slow(world.player())
    broadcast(world, publisher, 10)
    look(world)
    assert len(world.hub.oversight._shadows) == 3
    world.run(1.0)
    broadcast(world, publisher, 10, start=1000)
    look(world)
    fails = True
    broadcast(world, publisher, 60, first=False, start=2000)
    look(world)
    assert reports == ["no idea"]
    assert world.hub.oversight._shadows == {}
    report = world.hub.snapshot().shadow
    assert report.viewers == 3
    assert report.compared_s > 2.0
    count = len(asked)
    look(world)
    assert (len(asked), reports) == (count, ["no idea"])
    assert world.hub.snapshot().shadow == report


def test_look_when_many_lag_is_done_in_slices_and_the_next_one_waits_for_its_end():
    """The thread is let go every few milliseconds; all slices together find what a look in one piece finds."""
    world = World(
        config(memory_budget_bytes=1 << 30, shadow=Candidate(limits=Limits.parse("1MiB,0"), policy=KeepAll()))
    )
    publisher = world.publisher()
    for _ in range(20):
        slow(world.player())
    broadcast(world, publisher, 30)
    timers, passed = [], [100.0]

    def clock():  # each time that it is asked, a millisecond has passed
        passed[0] += 0.001
        return passed[0]

    oversight = Oversight(world.config, clock, lambda delay, back: timers.append((delay, back)), world.hub.streams)
    oversight.start()
    slices = 0
    delay, back = timers.pop()
    while oversight.statistics().looks == 0:
        back()
        slices += 1
        assert len(timers) == 1  # either the next slice or the next look, never both
        delay, back = timers.pop()
        assert (delay == 0.0) == (oversight.statistics().looks == 0)
    found = oversight.statistics()
    assert slices > 20  # for 20 viewers that are seen, counted and given a shadow, 3 at a time
    assert found.longest_slice_s < 0.0301
    assert found.longest_look_s > 0.1
    assert delay >= found.longest_look_s / 0.02
    assert found.shares["live/room"].viewers == 20
    assert len(oversight._shadows) == 20
    world.hub.oversight.look()
    assert found.held_by_stream == world.hub.oversight.statistics().held_by_stream


def test_budget_when_a_viewer_is_closed_after_a_flush_counts_what_it_still_holds():
    """Until it has sent what is queued, or given up, it holds the log as before, and may have to give way for it."""
    world = World(config(memory_budget_bytes=400_000))
    publisher = world.publisher()
    leaving = world.player()
    slow(leaving)
    broadcast(world, publisher, 50)
    leaving.connection.close_after_flush()
    world.run()
    broadcast(world, publisher, 100, start=2000)
    broadcast(world, publisher, 2, start=6000)
    look(world)
    assert world.hub.snapshot().budget.held.total_bytes > 150 * FRAME
    for _ in range(6):
        world.run(0.5)
        look(world)
    assert leaving.ended is not None
    assert world.hub.snapshot().budget.held.total_bytes < 400_000


def test_look_when_it_fails_is_reported_and_the_next_one_comes():
    """The timer goes on after a look that raised."""
    reports, timers = [], []

    def streams():
        raise ValueError("gone")

    oversight = Oversight(config(), lambda: 0.0, lambda delay, callback: timers.append(callback), streams)
    oversight.report = lambda where, error: reports.append(str(error))
    oversight.start()
    timers.pop()()
    assert (reports, len(timers)) == (["gone"], 1)


def test_sweep_when_the_delay_is_the_age_samples_each_viewer_once_in_two_seconds(monkeypatch):
    """Viewers that keep up are sampled in turn; those that lag look after themselves; without it nobody is."""
    world = World()
    publisher = world.publisher()
    viewers = [world.player() for _ in range(20)]
    broadcast(world, publisher, 10)
    asked = []
    monkeypatch.setattr(Sender, "sample_delay", lambda sender, kernel_bytes=None: asked.append(sender))
    look(world)
    assert asked == []
    world.hub.oversight.age_from = AgeSource.DELAY
    most = 0
    for _ in range(8):
        before = len(asked)
        world.hub.oversight.look()
        world.run(0.25)
        most = max(most, len(asked) - before)
    assert {viewer.connection.sender for viewer in viewers} == set(asked)
    assert len(asked) == len(viewers)
    assert most <= 3


def test_acknowledgement_when_a_player_sends_it_reaches_its_sender():
    """What a player says it has read counts for its delay; more than it was sent means all."""
    world = World(sender=SenderSettings(age_from=AgeSource.DELAY))
    viewer = world.player()
    told = []
    sender = viewer.connection.sender
    known = Sender.peer_acknowledged

    def note(self, total):
        told.append(total)
        known(self, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sender, "peer_acknowledged", note)
        sent = sender.statistics().bytes_sent
        for count in (sent - 100, sent + 1_000_000, sent):
            viewer.message(encode_control(Acknowledgement(count)))
    assert told == [sent - 100, sent, sent]
    assert world.group.failures == []


@pytest.mark.parametrize("start", [0, 0xF0000000, 1 << 32])
def test_acknowledgement_when_it_has_become_too_high_makes_no_delay(monkeypatch, start):
    """A player that once told the truth and counts too much from then on has read everything, and is not late."""
    world = World(sender=SenderSettings(age_from=AgeSource.DELAY))
    publisher, viewer = world.publisher(), world.player()
    sender = viewer.connection.sender
    # As if so much had been sent before: nobody sends 4 GB in a test.
    known = sender._bytes_sent_locked
    monkeypatch.setattr(type(sender), "_bytes_sent_locked", lambda self: known() + start)
    delays = []
    for step in range(40):
        broadcast(world, publisher, 30, start=1000 * step)
        world.run(1.0)
        count = sender.account(rows=False).bytes_sent + (45_000 if step > 5 else 0)
        viewer.message(encode_control(Acknowledgement(count % (1 << 32))))
        sender.sample_delay()
        delays.append(sender.statistics().delay_ms)
    assert max(delays) < 100
    assert sender.state is SendState.READY
