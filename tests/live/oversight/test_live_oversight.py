"""Looks at slow viewers: the memory budget acts on who is to blame, shares are counted."""

from __future__ import annotations

import pytest
import structlog
from live_kit import World, audio, config, inter, key

from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.sending.judgement import Judgement
from flowctl.core.sending.settings import AgeSource, SenderSettings
from flowctl.live.config import SecondPublisher
from flowctl.live.judging.budget import MESSAGE_OVERHEAD_BYTES
from flowctl.live.oversight.oversight import LOOK_S, Oversight
from flowctl.live.settings.renditions import RenditionNames
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
        publisher.send(publisher.session.send_tag(9, start + index * 40, body), run=False)
        publisher.send(publisher.session.send_tag(8, start + index * 40, audio(b"a")), run=False)
    world.run()


def look(world):
    world.hub.oversight.look()
    world.run()


def test_budget_when_a_stalled_viewer_holds_too_much_thins_it_then_closes_it():
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
    budget = world.hub.oversight.statistics().budget
    assert (budget.thinned, budget.closed, budget.active) == (1, 0, False)
    assert budget.held.total_bytes < 600_000
    assert world.group.failures == []


@pytest.mark.parametrize("lags", [False, True])
def test_budget_when_a_stream_keeps_headers_counts_them_once(lags):
    # Without renditions of tracks, which have logs with headers of their own.
    world = World(config(second_publisher=SecondPublisher.STANDBY, renditions=RenditionNames(tracks=False)))
    publisher = world.publisher()
    look(world)
    before = world.hub.oversight.statistics().budget.held.total_bytes
    viewers = [world.player(), world.player()]
    if lags:
        slow(viewers[0])
        broadcast(world, publisher, 5)
        look(world)
        before = world.hub.oversight.statistics().budget.held.total_bytes
    for sender in (publisher, world.publisher()):
        for track in range(8):
            sender.video(0, bytes([0x96, 0x00]) + b"avc1" + bytes([track]) + b"." * 60_000)
    look(world)
    grown = world.hub.oversight.statistics().budget.held.total_bytes - before
    # What a viewer that lags was offered of them stands in the log as well.
    assert 2 * 8 * 60_000 < grown < (3 if lags else 2) * 8 * 61_000
    assert world.group.failures == []


def test_budget_when_publishers_fill_it_with_their_caches_costs_no_viewer_of_others_anything():
    world = World(config(memory_budget_bytes=2_000_000))
    honest = world.publisher()
    slow_viewer = world.player()
    slow(slow_viewer)
    broadcast(world, honest, 50)
    hostile = [world.publisher(f"live/hostile{number}", address="192.0.2.66") for number in range(3)]
    for publisher in hostile:
        broadcast(world, publisher, 200)
    look(world)
    budget = world.hub.oversight.statistics().budget
    assert (budget.emptied, budget.thinned, budget.closed) == (3, 0, 0)
    assert budget.held.total_bytes < 2_000_000
    cached = {stream.name: any(wire.log.cached for wire in stream.wires) for stream in world.hub.streams()}
    assert cached.pop("live/room")
    assert not any(cached.values())
    assert slow_viewer.ended is None
    assert world.group.failures == []


def test_budget_when_thinning_is_not_enough_closes_with_its_own_reason():
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
    assert world.hub.oversight.statistics().budget.closed == 1


def test_held_bytes_when_two_streams_are_lagged_behind_are_told_by_stream(world):
    one, two = world.publisher("live/one"), world.publisher("live/two")
    slow(world.player("live/one"))
    world.player("live/two")
    broadcast(world, one, 50)
    broadcast(world, two, 10)
    look(world)
    found = world.hub.oversight.statistics()
    held = found.held_by_stream
    assert held["live/one"] > 50 * FRAME > held["live/two"] > 10 * FRAME
    assert sum(held.values()) == found.budget.held.shared_bytes


def test_held_bytes_when_messages_are_for_one_viewer_alone_are_charged_with_their_own_overhead(world):
    publisher, viewer = world.publisher(), world.player()
    slow(viewer)
    broadcast(world, publisher, 5)
    look(world)
    before = world.hub.oversight.statistics().budget.held.own_bytes
    for _ in range(10):
        viewer.connection.sender.send(bytes(1000), MessageClass.DATA)
    look(world)
    assert world.hub.oversight.statistics().budget.held.own_bytes - before == 10 * (1000 + MESSAGE_OVERHEAD_BYTES)


def test_shares_when_a_viewer_lags_count_its_state_and_everybody_else_as_ready(world):
    publisher = world.publisher()
    slow(world.player())
    world.player(), world.player(), world.player("live/absent")
    broadcast(world, publisher, 20)
    look(world)
    shares = world.hub.oversight.statistics().shares
    assert shares["live/room"].states == (2, 1, 0, 0)
    assert (shares["live/room"].missing_pictures, shares["live/room"].picture_share) == (0, 1.0)
    assert shares["live/absent"].in_state(SendState.READY) == 1.0


def test_look_when_many_lag_is_done_in_slices_and_the_next_one_waits_for_its_end():
    world = World(config(memory_budget_bytes=1 << 30))
    publisher = world.publisher()
    for _ in range(40):
        slow(world.player())
    broadcast(world, publisher, 30)
    timers, passed = [], [100.0]

    def clock():  # each time that it is asked, a millisecond has passed
        passed[0] += 0.001
        return passed[0]

    oversight = Oversight(world.config, clock, lambda delay, back: timers.append((delay, back)), world.hub.streams)
    oversight.start()
    slices = []  # how long each took
    delay, back = timers.pop()
    while oversight.statistics().looks == 0:
        began = passed[0]
        back()
        slices.append(passed[0] - began)
        assert len(timers) == 1  # either the next slice or the next look, never both
        delay, back = timers.pop()
        assert (delay == 0.0) == (oversight.statistics().looks == 0)
    found = oversight.statistics()
    assert len(slices) > 20  # for 40 viewers that are seen and counted
    assert max(slices) < 0.0301
    assert delay >= (sum(slices) - 0.001 * len(slices)) / 0.02 - 1e-9 > 1.0
    assert found.shares["live/room"].viewers == 40
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
    assert world.hub.oversight.statistics().budget.held.total_bytes > 150 * FRAME
    for _ in range(6):
        world.run(0.5)
        look(world)
    assert leaving.ended is not None
    assert world.hub.oversight.statistics().budget.held.total_bytes < 400_000


def test_look_when_it_fails_is_reported_and_the_next_one_comes():
    reports, timers = [], []

    def streams():
        raise ValueError("gone")

    oversight = Oversight(config(), lambda: 0.0, lambda delay, callback: timers.append(callback), streams)
    oversight.report = lambda where, error: reports.append(str(error))
    oversight.start()
    timers.pop()()
    assert (reports, len(timers)) == (["gone"], 1)


def test_sweep_when_the_delay_is_the_age_samples_each_viewer_once_in_two_seconds(world, monkeypatch):
    """Viewers that keep up are sampled in turn; those that lag look after themselves; without it nobody is."""
    publisher = world.publisher()
    viewers = [world.player() for _ in range(20)]
    broadcast(world, publisher, 10)
    asked = []
    monkeypatch.setattr(Sender, "sample_delay", lambda sender, kernel_bytes=None: asked.append(sender))
    look(world)
    assert asked == []
    world.hub.oversight.age_from = AgeSource.DELAY
    most = 0
    for _ in range(round(2.0 / LOOK_S)):
        before = len(asked)
        world.hub.oversight.look()
        world.run(LOOK_S)
        most = max(most, len(asked) - before)
    assert {viewer.connection.sender for viewer in viewers} == set(asked)
    assert len(asked) == len(viewers)
    assert most <= len(viewers) * LOOK_S / 2.0 + 1


def test_acknowledgement_when_a_player_sends_it_reaches_its_sender():
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
    world = World(sender=SenderSettings(age_from=AgeSource.DELAY))
    publisher, viewer = world.publisher(), world.player()
    sender = viewer.connection.sender
    # As if so much had been sent before: nobody sends 4 GB in a test.
    known = Judgement.bytes_sent.fget
    monkeypatch.setattr(Judgement, "bytes_sent", property(lambda self: known(self) + start))
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
