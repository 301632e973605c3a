"""The shadow policy: its virtual queue, its decisions, and the comparison with the real ones."""

from __future__ import annotations

import pytest

from flowctl.core.flow.counts import NO_COUNTS, Counts
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import KeepAll, LivePolicy, PicturesFirst, Thin
from flowctl.core.flow.state import CLASS_COUNT, MessageClass, SendState
from flowctl.errors import ConfigError
from flowctl.live.judging.shadow import NO_SHADOW, Candidate, Shadow
from flowctl.reasons import CloseReason

SAMPLE_S = 0.25
SIZES = {MessageClass.KEY: 20_000, MessageClass.INTER: 4_000, MessageClass.DISPOSABLE: 2_000, MessageClass.AUDIO: 200}
PER_S = {MessageClass.KEY: 1, MessageClass.INTER: 20, MessageClass.DISPOSABLE: 8, MessageClass.AUDIO: 40}
RATE = sum(SIZES[item] * count for item, count in PER_S.items())


class Run:
    """A stream of `RATE` bytes per second over a link, shadowed; the real policy keeps everything."""

    def __init__(self, limits, policy=None, **settings) -> None:
        self.candidate = Candidate(limits=limits, policy=policy or LivePolicy(), **settings)
        self.now = 100.0
        self.taken = 0.0
        self.counts, self.sizes = [0] * CLASS_COUNT, [0] * CLASS_COUNT
        self.shadow = Shadow(
            self.candidate,
            self.now,
            queued=NO_COUNTS,
            age_s=0.0,
            offered=(tuple(self.counts), tuple(self.sizes)),
            taken_bytes=0,
            live_changes=0,
            live_dropped=NO_COUNTS,
        )

    def go(self, seconds, share, *, busy=True, live=SendState.OVERLOADED, published=True):
        """Let time pass while the link takes `share` of the stream's rate."""
        for _ in range(round(seconds / SAMPLE_S)):
            self.now += SAMPLE_S
            for item, per_s in PER_S.items() if published else ():
                before = int((self.now - SAMPLE_S) * per_s + 1e-9)
                count = int(self.now * per_s + 1e-9) - before
                self.counts[item] += count
                self.sizes[item] += count * SIZES[item]
            self.taken += share * RATE * SAMPLE_S
            self.shadow.sample(
                self.now,
                offered=(tuple(self.counts), tuple(self.sizes)),
                taken_bytes=int(self.taken),
                busy=busy,
                live=live,
                gop_s=1.0 / PER_S[MessageClass.KEY],
                per_second=(RATE, sum(PER_S.values())),
            )
        return self

    def report(self, **values):
        return self.shadow.report(**{"live_changes": 0, "live_dropped": NO_COUNTS, **values})


def test_shadow_when_the_link_takes_everything_drops_nothing_and_drains():
    """A link that takes all of the stream leaves the candidate nothing to do."""
    run = Run(Limits.parse("1MiB,2048,4s")).go(10, 2.5, busy=False, live=SendState.READY)
    assert run.shadow.drained
    assert run.report().dropped == NO_COUNTS
    assert run.report().agreement > 0.9


def test_shadow_when_the_candidate_keeps_everything_and_has_no_limits_queues_what_is_not_taken():
    """With nothing refused the virtual queue is what was offered less what was taken."""
    run = Run(NO_LIMITS, KeepAll()).go(20, 0.5)
    assert run.report().dropped == NO_COUNTS
    run.go(21, 1.0, published=False)
    assert run.shadow.drained


def test_shadow_when_the_link_is_half_as_fast_drops_what_does_not_fit():
    """What the candidate drops, what was taken and what is left add up to what was offered."""
    run = Run(Limits.parse("1MiB,2048,4s")).go(60, 0.5)
    report = run.report()
    offered = sum(run.sizes)
    assert run.shadow.closed is None
    assert report.dropped.of(MessageClass.INTER) > 0
    queued = offered - report.dropped.total_bytes - run.taken
    assert -RATE <= queued <= 2 * 1024 * 1024 + RATE  # less than nothing where the thinned stream left the link idle
    assert report.dropped.of(MessageClass.AUDIO) < 0.7 * run.counts[MessageClass.AUDIO]


def test_shadow_when_limits_are_tight_would_have_closed_at_the_hard_one():
    """Limits without a soft mark close when the hard one is reached; the live viewer was kept."""
    limits = Limits.parse("0,0", "400kB,0")
    run = Run(limits, KeepAll()).go(30, 0.0)
    at, reason = run.shadow.closed
    assert reason is CloseReason.HARD_LIMIT
    assert at - 100.0 == pytest.approx(400_000 / RATE, abs=2 * SAMPLE_S)
    report = run.report()
    assert (report.would_have_closed, report.would_have_kept, report.closed_by_both) == (1, 0, 0)
    assert report.close_reasons == {CloseReason.HARD_LIMIT: 1}


def test_shadow_when_both_close_says_by_how_much_earlier():
    """A viewer that both would close is counted so, with the time between the two."""
    run = Run(Limits.parse("0,0", "400kB,0"), KeepAll()).go(30, 0.0)
    report = run.report(live_closed_at=run.shadow.closed[0] + 7.5)
    assert (report.would_have_closed, report.closed_by_both, report.earlier_s) == (0, 1, 7.5)


def test_shadow_when_only_the_real_one_closes_would_have_kept():
    """A viewer that was closed in reality and not by the candidate is one that it would have kept."""
    run = Run(NO_LIMITS, stuck_s=0).go(30, 0.1)
    assert run.report(live_closed_at=130.0).would_have_kept == 1


def test_shadow_when_nothing_is_taken_is_stuck_after_its_time():
    """A candidate with a shorter time for stuck peers closes at that time."""
    run = Run(NO_LIMITS, KeepAll(), stuck_s=5).go(4.5, 0.0)
    assert run.shadow.closed is None
    run.go(1, 0.0)
    assert run.shadow.closed[1] is CloseReason.STUCK


class Sweeper(LivePolicy):
    """Throws away all that is queued at the soft limit, so that nothing waits for a peer that takes nothing."""

    def thin(self, state):
        return Thin.DROPPABLE if state is SendState.SOFT_LIMIT else Thin.NOTHING


def test_shadow_when_thinning_has_emptied_its_queue_is_stuck_all_the_same():
    """The kernel still holds what it was given and refuses: the time runs from the last octet taken, as in reality."""
    run = Run(Limits.parse("20kB,0", "10MB,0"), Sweeper(), stuck_s=5, soft_too_long_s=0).go(2, 1.0)
    for _ in range(18):
        run.go(SAMPLE_S, 0.0)
    assert run.report().dropped.total_messages > 0
    assert run.shadow.closed is None
    run.go(1, 0.0)
    assert run.shadow.closed[1] is CloseReason.STUCK


def test_shadow_when_its_queue_is_empty_and_the_kernel_takes_again_is_not_stuck():
    """A peer that reads again before the time is over, or whose real queue is empty, is not refused anything."""
    for again in ({"share": 0.1}, {"share": 0.0, "busy": False}):
        run = Run(Limits.parse("20kB,0", "10MB,0"), Sweeper(), stuck_s=5, soft_too_long_s=0).go(2, 1.0).go(4, 0.0)
        run.go(0.5, **again, published=False).go(4, 0.0)
        assert run.shadow.closed is None


def test_shadow_when_it_has_a_target_delay_leaves_out_what_would_be_late():
    """On a line of 40 % the candidate gives up pictures and keeps the sound, and never closes the viewer for it."""
    limits = Limits.parse("1MiB,2048,4s", target_delay_ms=1500)
    run = Run(limits).go(60, 0.4)
    before = run.report()
    run.go(60, 0.4)
    after = run.report()
    assert run.shadow.closed is None
    assert after.dropped.of(MessageClass.INTER) - before.dropped.of(MessageClass.INTER) == pytest.approx(800, abs=250)
    assert after.dropped.of(MessageClass.AUDIO) == before.dropped.of(MessageClass.AUDIO)


def test_shadow_when_what_is_late_is_left_out_is_not_thinned_and_holds_within_its_limits():
    """As in a Sender: the soft limit throws no sound away, and nothing is waited for longer than the limits hold."""
    tight = Limits.parse("40kB,2048,1s", f"{RATE + 70 * 96},4096,9s", target_delay_ms=4000)
    for limits, share in ((tight, 0.5), (Limits.parse("1MiB,2048,1s", "4MiB,4096,9s", target_delay_ms=1500), 0.2)):
        run = Run(limits).go(60, share)
        assert run.shadow.closed is None
        assert run.report().dropped.of(MessageClass.AUDIO) == 0
        assert run.report().dropped.of(MessageClass.INTER) > 100


def test_shadow_when_a_burst_of_sound_nears_the_hard_mark_thins_and_closes_nobody():
    """As a Sender does: the burst is the publisher's."""
    run = Run(Limits.parse("2MiB,2048,4s", "4MiB,4096,8s")).go(10, 0.8)
    for _ in range(8):
        run.counts[MessageClass.AUDIO] += 1000
        run.sizes[MessageClass.AUDIO] += 20_000
        run.go(SAMPLE_S, 0.8)
    run.go(5, 0.8)
    assert run.shadow.closed is None


def test_shadow_when_a_key_frame_would_delay_the_sound_leaves_it_out():
    """On a line that carries little more than sound it is kept, but few key frames; with pictures first they go."""
    limits = Limits.parse("0,0", target_delay_ms=1500)
    run = Run(limits).go(60, 0.1).report().dropped
    assert run.of(MessageClass.AUDIO) == 0
    assert run.of(MessageClass.KEY) > 40
    patient = Run(limits, PicturesFirst()).go(60, 0.1).report().dropped
    assert patient.of(MessageClass.KEY) < run.of(MessageClass.KEY)


def test_shadow_when_the_real_queue_is_empty_assumes_the_last_rate_and_says_so():
    """While the real viewer has nothing to take, the link counts as fast as it was, and that time is stated."""
    run = Run(NO_LIMITS, KeepAll()).go(10, 0.5)
    assert run.report().assumed_s == 0.0
    run.go(5, 0.1, busy=False, live=SendState.READY)
    assert run.report().assumed_s == pytest.approx(5.0)


def test_shadow_when_it_begins_takes_over_the_real_queue():
    """What was queued in reality when it begins is queued for the candidate too, with its age."""
    messages, sizes = [0] * CLASS_COUNT, [0] * CLASS_COUNT
    messages[MessageClass.INTER], sizes[MessageClass.INTER] = 100, 400_000
    shadow = Shadow(
        Candidate(limits=Limits.parse("0,0,2s"), policy=LivePolicy()),
        10.0,
        queued=Counts(tuple(messages), tuple(sizes)),
        age_s=3.0,
        offered=((0,) * CLASS_COUNT, (0,) * CLASS_COUNT),
        taken_bytes=0,
        live_changes=0,
        live_dropped=NO_COUNTS,
    )
    zeros = (0,) * CLASS_COUNT
    shadow.sample(10.25, offered=(zeros, zeros), taken_bytes=0, busy=True, live=SendState.SOFT_LIMIT)
    assert shadow.report(live_changes=0, live_dropped=NO_COUNTS).changes >= 1
    assert shadow.report(live_changes=0, live_dropped=NO_COUNTS).dropped.of(MessageClass.INTER) == 100


def test_reports_when_added_sum_up():
    """The comparison of a stream is the sum of its viewers'."""
    one = Run(Limits.parse("0,0", "400kB,0"), KeepAll()).go(30, 0.0).report()
    both = one + one + NO_SHADOW
    assert (both.viewers, both.would_have_closed, both.close_reasons) == (2, 2, {CloseReason.HARD_LIMIT: 2})
    assert both.compared_s == 2 * one.compared_s
    assert NO_SHADOW.agreement == 1.0


def test_candidate_when_a_time_is_negative_is_refused():
    """An error names the field."""
    with pytest.raises(ConfigError, match="stuck_s of the shadow"):
        Candidate(limits=NO_LIMITS, policy=KeepAll(), stuck_s=-1)


def test_shadow_when_it_has_a_target_delay_is_not_refused_frames_that_would_come_in_time():
    """Like a real viewer, it loses nothing for its state while what it is sent arrives in time."""
    run = Run(Limits.parse("1MiB,2048,4s", target_delay_ms=4000)).go(10, 0.97)
    assert run.shadow.state is SendState.OVERLOADED
    assert run.report().dropped == NO_COUNTS
