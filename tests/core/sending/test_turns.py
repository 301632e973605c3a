"""Turns of viewers that lag: how often they come, and what they tell when our own thread was late."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from math import inf

import pytest
from flow_kit import FRAMES, INTER, KEY, LOG, OWN, Published, Viewer, frame
from slow_kit import LINES, Kernel, Scene, Steady, stream

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.sending.contract import Standing
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.sending.slowpeer import SlowPeer
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import Sender
from flowctl.testing.host import ManualGroup

SECONDS = 40
CLOCKLESS = SenderSettings(stuck_s=0, soft_too_long_s=0, close_deadline_s=0)
"""No clock that sees in time what nothing else has seen."""


class Counted(Scene):
    """A scene that counts turns, ticks and questions to the kernel of the loop."""

    def __init__(self, line, **given):
        super().__init__(line, **given)
        self.calls = {"turns": 0, "ticks": 0, "asked": 0}
        self._count(self.sender.__class__, {"take_turn": "turns", "tick": "ticks"})

    def _count(self, kind, names):
        scene = self

        class Counting(kind):
            __slots__ = ()

        for name, what in names.items():

            def call(sender, name=name, what=what):
                scene.calls[what] += 1
                return getattr(super(Counting, sender), name)()

            setattr(Counting, name, call)
        self.sender.__class__ = Counting
        want_writable = self.viewer.host.want_writable

        def counted(wanted):
            scene.calls["asked"] += wanted
            want_writable(wanted)

        self.viewer.host.want_writable = counted


@pytest.mark.parametrize("name", ["50%", "85%"])
def test_viewer_when_its_line_is_even_has_five_turns_a_second_and_nothing_else(name):
    scene = Counted(LINES[name], flush_s=0.04).run(stream(10, 2.0), 10)
    scene.calls.update(dict.fromkeys(scene.calls, 0))
    scene.run([(at, item, size) for at, item, size in stream(SECONDS, 2.0) if at >= 10], SECONDS)
    scene.check()
    seconds = SECONDS - 10
    assert scene.sender.state is SendState.OVERLOADED
    assert scene.calls["turns"] <= 7 * seconds
    assert scene.calls["ticks"] <= seconds
    assert scene.calls["asked"] <= seconds
    assert scene.figures(10, SECONDS - 5)["line"] >= 0.95


def test_viewer_when_its_transport_takes_a_part_at_a_time_has_its_turns_all_the_same():
    """So does TLS, whose kernel is not full for that."""
    scene = Counted(LINES["50%"], flush_s=0.04)
    send = scene.kernel.send
    scene.kernel.send = lambda data: send(data[:4096])
    scene.run(stream(10, 2.0), 10)
    scene.calls.update(dict.fromkeys(scene.calls, 0))
    scene.run([(at, item, size) for at, item, size in stream(SECONDS, 2.0) if at >= 10], SECONDS)
    scene.check()
    assert scene.calls["turns"] <= 7 * (SECONDS - 10)
    assert scene.figures(10, SECONDS - 5)["line"] >= 0.95


def test_viewer_when_its_line_takes_lumps_is_served_when_its_kernel_asks():
    scene = Counted(LINES["50%"], flush_s=0.04, lump_bytes=64_000).run(stream(SECONDS, 2.0), SECONDS)
    scene.check()
    assert scene.calls["asked"] >= SECONDS / 2
    assert scene.figures(10, SECONDS - 5)["line"] >= 0.95


def test_rate_when_the_kernel_had_run_dry_is_that_of_our_turns_and_no_evidence():
    slow = SlowPeer(SenderSettings())
    slow.waited = True
    for step in range(50):  # each second all that it was given is gone when our turn comes
        slow.measure(float(step), 100_000 * step, 10 if step == 0 else 0)
        assert slow.drain.known(float(step)) is None
    assert slow.dry
    slow.pace_anew(None, 300_000)
    assert slow.ahead_bytes > 75_000, "it may carry more than the log: it is given as much as usual"


def test_pace_when_a_rate_stays_gives_the_kernel_more_at_a_time_and_as_before_when_it_changes():
    slow = SlowPeer(SenderSettings())
    paces = []
    for step in range(100):
        slow.drain.sampled_at = now = 0.2 * step
        slow.pace_anew(100_000 * (1.1 if step % 2 else 1.0) if now < 15 else 50_000, 300_000)
        paces.append((now, slow.ahead_bytes, slow.pace_s))
    assert {ahead for now, ahead, _ in paces if now < 6} == {30_000}
    assert {ahead for now, ahead, _ in paces if 6.3 < now < 15} <= {45_000, 49_500}
    assert (
        max(pace for now, _, pace in paces if now < 6) <= 0.25 < min(pace for now, _, pace in paces if 6.3 < now < 15)
    )
    assert paces[-1][1:] == (15_000, pytest.approx(0.2))


def test_budget_when_the_kernel_asks_at_once_is_as_at_a_rate_that_is_not_known():
    slow = SlowPeer(SenderSettings())
    slow.waited = True
    for now, given in ((0.0, 5_000), (0.3, 10_000)):
        slow.kernel_asked(now)
        slow.measure(now, given, 1, 300_000)
        slow.pace_anew(10_000, 300_000)
        assert slow.budget_bytes(1 << 20) == 3_000
        slow.note_given(3_000, full=False)
    slow.kernel_asked(0.301)
    slow.measure(0.301, 13_000, 1, 300_000)
    assert slow.budget_bytes(1 << 20) == 90_000
    slow.note_given(3_000, full=True)
    slow.kernel_asked(0.6)
    slow.measure(0.6, 16_000, 1, 300_000)
    assert slow.budget_bytes(1 << 20) == 3_000


def test_rate_when_the_kernel_asked_just_now_is_that_of_the_line_unless_our_thread_had_no_room():
    for strained, known in ((False, True), (True, False)):
        slow = SlowPeer(SenderSettings())
        slow.waited = True
        slow.measure(0.0, 50_000, 50_000)
        for step in range(1, 20):
            now = 0.4 * step
            slow.kernel_asked(now)
            rate = slow.measure(now, 50_000 * step, 0, strained=strained)
        assert (rate is not None) is known
        if known:
            assert rate == pytest.approx(125_000, rel=0.2)


def test_rate_when_a_stall_has_ended_is_not_that_of_the_stall():
    slow = SlowPeer(SenderSettings())
    slow.waited = True
    taken = 0
    for step in range(20):
        taken += 10_000
        slow.measure(step / 10, taken + 50_000, 50_000)
    assert slow.measure(7.0, taken + 60_000, 50_000) is None
    assert slow.ahead_bytes == 0


class Late(Steady):
    """A scene whose thread comes to nothing for a while: no turn, no round, no readiness."""

    def stand_still(self, seconds):
        until = self.now + seconds
        while self._messages[self._next][0] < until:
            at, item, size = self._messages[self._next]
            self.group.clock.advance(max(at - self.now, 0.0))
            self.kernel.carry()
            self.published.publish(item, size)
            self.published_at.append(self.now)
            self._next += 1
        self.group.clock.advance(until - self.now)
        self.kernel.carry()


def test_viewer_whose_turns_come_late_loses_nothing_for_it():
    """Its line is idle when a turn comes: what waited did so for us, and nothing of it is left out as late."""
    scene = Late(3.0, flush_s=0.04).go(10)
    for _ in range(20):
        scene.stand_still(1.0)
        scene.go(0.3)
    scene.go(5)
    scene.check()
    assert DropReason.LATE not in scene.sender.statistics().dropped
    assert scene.sender.stands is Standing.COHORT


def crowd(count, line):
    """Return (group, published, fan-out, kernels, viewers) of viewers on lines of their own."""
    group = ManualGroup()
    published = Published(group)
    fanout = Fanout(published.log, group, flush_interval_s=0.04)
    kernels = [Kernel(group.clock, line, 1) for _ in range(count)]
    settings = SenderSettings(return_after_s=3.0)
    viewers = [Viewer(group, kernel, policy=LivePolicy(), settings=settings) for kernel in kernels]
    for viewer, kernel in zip(viewers, kernels, strict=True):
        kernel.host = viewer.host
        viewer.host.unacknowledged = lambda kernel=kernel: kernel.held_bytes
        viewer.follow(fanout)
    return group, published, fanout, kernels, viewers


def test_crowd_when_our_thread_has_no_room_goes_on_at_the_newest_key_frame(monkeypatch):
    """In turns of their own they are given what is in flight, and headers: rounds bring them on from there."""
    own_bytes = Counter()
    take_turn = Sender.take_turn

    def counted(sender):
        before = sender.statistics().bytes_sent
        try:
            return take_turn(sender)
        finally:
            if group.is_strained:
                own_bytes[sender] += sender.statistics().bytes_sent - before

    monkeypatch.setattr(Sender, "take_turn", counted)
    group, published, fanout, kernels, viewers = crowd(10, lambda now: 0.0 if 10 < now < 15 else 40.0)
    began = group.now()
    for at, item, size in stream(24, 2.0):
        while group.now() - began < at - 1e-9:
            group.run(0.005)
            now = group.now() - began
            if 14.9 <= now < 15.1:  # some come when the kernel is full, and wait
                viewers[3].sender.send(frame(OWN, MessageClass.CONTROL, round(now * 1000)), MessageClass.CONTROL)
            group.is_strained = 15 <= now < 18
            for viewer, kernel in zip(viewers, kernels, strict=True):
                if kernel.carry():
                    viewer.host.poll_writable()
            group.run()
        published.publish(item, size)
    group.run(0.1)
    assert fanout.statistics().members == 10
    for viewer in viewers:
        assert not viewer.host.closed
        assert viewer.sender.state is SendState.READY
        assert [entry.kind for entry in viewer.sender.ledger()].count(LedgerKind.RETURN) == 1
    assert max(own_bytes.values()) < 200_000


@pytest.mark.parametrize("settings", [CLOCKLESS, SenderSettings()])
def test_viewer_when_rounds_have_brought_it_on_is_ready_soon_and_its_stall_is_that_of_its_line(settings):
    scene = Steady(100.0, gop_s=4.0, flush_s=0.04, limits=NO_LIMITS, settings=settings).go(10)
    scene.go(1.6, 0.0)
    scene.group.is_strained = True
    scene.go(0.1)
    scene.go(0.3, 100.0)
    assert (scene.sender.state, scene.sender.stands) == (SendState.OVERLOADED, Standing.COHORT)
    scene.go(1.3)
    assert (scene.sender.state, scene.sender.stands) == (SendState.READY, Standing.COHORT)
    assert 0.8 < scene.sender.statistics().longest_stall_s < 1.1
    scene.check()


class Staying:
    """A guide that leads nowhere."""

    def choose_log(self, key):
        del key


@pytest.mark.parametrize("seconds", [1.2, 2.5])
def test_viewer_with_a_guide_when_our_thread_has_no_room_goes_on_past_key_frames(seconds):
    """It leaves the cohort at each, and is served alone there: rounds would bring it back to the same one for ever."""
    scene = Steady(40.0, flush_s=0.04).go(10.9)
    scene.sender.set_guide(Staying())
    scene.go(seconds, 0.0)
    scene.group.is_strained = True
    for _ in range(40):
        scene.go(0.2, 40.0)
        assert len(scene.published.classes) - scene.viewer.numbers(LOG)[-1] < 75 * 2.5
    scene.check()


def test_turn_of_a_viewer_that_stalls_comes_when_its_kernel_asks():
    scene = Steady(0.5, flush_s=0.04).go(10)
    assert scene.sender.stands is Standing.PACED
    scene.go(2, 0.0)
    assert scene.sender.stands is Standing.REFUSED
    assert scene.viewer.host.wants_writable
    assert scene.sender.take_turn() == inf
    scene.go(5, 0.5)
    assert scene.sender.state is SendState.OVERLOADED
    assert not scene.viewer.host.closed


@pytest.mark.parametrize("then", [0.5, 1.5])
def test_viewer_when_no_key_frame_comes_after_a_cut_sees_pictures_again_after_a_minute(then):
    """So it is with streams that are refreshed picture by picture, whatever its turns are."""
    scene = Scene(lambda now: 0.5 if now < 20 else then, flush_s=0.04)
    messages = [(at, INTER if at and item is KEY else item, size) for at, item, size in stream(80, 2.0)]
    scene.run(messages, 80)
    assert scene.sender.statistics().key_waits_expired == 1
    assert any(item is INTER and at > 60 for _, item, at in scene.arrived())


def paced(**given):
    """Return a scene in which a turn of the viewer is to come, and the kernel was not asked to tell."""
    scene = Steady(0.5, flush_s=0.04, **given).go(10)
    while scene.sender.stands is not Standing.PACED or not scene.sender.blocked:
        scene.go(0.005)
        assert scene.now < 30
    assert not scene.viewer.host.wants_writable
    return scene


def pass_time(scene, until):
    """Let time pass without the publisher until `until` returns true, for half a minute at most."""
    end = scene.now + 30
    while not until() and scene.now < end:
        scene.step()
    assert until()


@pytest.mark.parametrize("ends", [False, True])
def test_own_message_when_its_viewer_leaves_the_log_between_two_turns_goes_out(ends):
    scene = paced(limits=NO_LIMITS, settings=CLOCKLESS)
    scene.sender.send(frame(OWN, MessageClass.DATA, 0), droppable=False)
    scene.sender.unfollow()
    if ends:
        scene.sender.close_after_flush()
    pass_time(scene, lambda: scene.viewer.numbers(OWN) == [0] and scene.sender.closed is ends)
    assert [reason for reason, _ in scene.viewer.host.closed] == [CloseReason.FINISHED] * ends


def test_viewer_whose_connection_ends_at_a_turn_is_closed_by_what_ended_it():
    """A socket tells it once, and from then on that the pipe is broken."""
    scene = paced()
    errors = itertools.chain([TimeoutError(errno.ETIMEDOUT, "it took too long")], itertools.repeat(BrokenPipeError()))

    def send(data):
        raise next(errors)

    scene.kernel.send = send
    scene.go(1)
    ((reason, details),) = scene.viewer.host.closed
    assert (reason, details) == (CloseReason.PEER_RESET, f"write failed: [Errno {errno.ETIMEDOUT}] it took too long")


def test_own_message_in_flight_when_a_plain_turn_sends_the_rest_is_told_of():
    scene = paced()
    scene.sender.send(frame(OWN, MessageClass.DATA, 0, 60_000), MessageClass.DATA, droppable=False)
    told = []
    scene.sender.when_drained(told.append)
    while not scene.sender.drained:
        assert not told
        scene.go(0.005)
    assert told == [True]
    scene.check()


class Undecided:
    """A guide that waits at the first key frame it is asked of, for two seconds."""

    def __init__(self, clock):
        self.clock, self.until = clock, None

    def choose_log(self, key):
        self.until = self.until or self.clock() + 2.0
        return self.until if self.clock() < self.until else None


def test_viewer_when_its_guide_waits_with_the_last_that_the_kernel_is_to_have_goes_on_without_its_publisher():
    met = 0
    for seed in range(24):
        scene = Scene(lambda _, share=(0.4, 0.6, 0.8)[seed % 3]: share, limits=NO_LIMITS, settings=CLOCKLESS).follow()
        guide = Undecided(scene.group.clock)
        for at, item, size in stream(14, 1.0, seed=seed):
            while scene.now < at and not (scene.sender.blocked and scene.sender._outbox.waits_at_crossroads):
                scene.step()
            if scene.now < at:  # the kernel has all that it is to have, and what is left waits for the guide
                met += 1
                pass_time(scene, lambda scene=scene: scene.sender.state is SendState.READY)
                break
            scene.published.publish(item, size)
            if scene.now > 6 and guide.until is None:
                scene.sender.set_guide(guide)
    assert met


def test_share_of_pictures_is_that_of_the_last_20_s_whatever_turns_it_takes():
    scene = Scene(lambda _: 0.85, flush_s=0.04)
    messages = iter(stream(70, 10.0))
    for second in range(25, 70):
        scene.run(list(itertools.takewhile(lambda message, second=second: message[0] < second, messages)), second)
        sent_ones = {number for origin, item, number, _ in scene.viewer.frames if origin == LOG and item in FRAMES}
        place = scene.sender._outbox.cursor.entry.sequence
        lately = [
            number
            for number, at in enumerate(scene.published_at)
            if scene.now - 20 < at and number < place and scene.published.classes[number] in FRAMES
        ]
        truth = sum(number in sent_ones for number in lately) / len(lately)
        assert abs(scene.sender.statistics().picture_share - truth) < 0.25


def test_viewer_when_its_line_recovers_is_ready_soon_after_the_last_picture_was_left_out():
    scene = Scene(lambda now: 0.6 if now < 20 else 1.5, flush_s=0.04).run(stream(40, 2.0), 40)
    ready_at = [change.at - scene.began for change in scene.viewer.edges.changes if change.new is SendState.READY][-1]
    taken = set(scene.viewer.numbers(LOG))
    left_out = [n for n, item in enumerate(scene.published.classes) if item in FRAMES and n not in taken]
    assert ready_at - scene.published_at[left_out[-1]] < 2 * 2.0 + 1.5 + 1.0
