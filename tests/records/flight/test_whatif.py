"""What-if: real Senders over recorded viewers; many choices at once give what each of them alone gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from flight_kit import Rows, recorded_scene
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from slow_kit import LIVE_LIMITS, Steady

from flowctl.core.flow.counts import NO_COUNTS
from flowctl.core.flow.limits import HardPolicy, Limits
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.contract import Standing
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import ConfigError
from flowctl.reasons import CloseReason
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.whatif.engine import evaluate, extended, recorded_viewer, stalls
from flowctl.records.flight.whatif.run import WhatifRun
from flowctl.records.flight.whatif.types import (
    GRID_S,
    HELD,
    REFUSED,
    TAKEN,
    Choice,
    RecordedViewer,
    Work,
    bucket_ms,
    delay_bucket,
    on_grid,
    quantile_ms,
)
from flowctl.records.flight.whatif.viewing import stream_and_link

KEY, INTER, DISPOSABLE, AUDIO = (int(item) for item in list(MessageClass)[2:6])
SMALL = [
    Choice(
        limits=Limits.parse(soft, hard, hard_policy=hold, target_delay_ms=target_ms),
        policy=policy,
        soft_too_long_s=slow,
    )
    for soft, hard in (("3000,8", None), ("9000,20,2s", None), ("40000,90", "50000,100"), ("0,0,1s", "0,0,1500ms"))
    for policy, target_ms, slow, hold in (
        ("all-or-cut", 500, 4, HardPolicy.CLOSE),
        ("all-or-cut", 0, 60, HardPolicy.HOLD),
        ("keep", 0, 60, HardPolicy.CLOSE),
        ("drop", 0, 3, HardPolicy.CLOSE),
    )
]


class ShowingRun(WhatifRun):
    """A run of one choice that is shown each message and each limit that it may cross, whether it can matter or not."""

    def _grew(self):
        super()._grew()
        for seat in list(self._alone.values()):
            sender, now = seat.sender, self.now
            if sender.stands is not Standing.REFUSED:
                continue  # it is looked at in its turn, and what it has not been offered yet says nothing about it
            # Not `log_grew`: a look also arms timers and polls for key frames, and comes when the fan-out says so.
            with sender._lock:
                load = sender._judgement.counted(now)
                sender._settle_locked(sender._core.queued(load, now), now)


def shown_everything(viewer, choice):
    (outcome,) = ShowingRun(viewer, [choice], Work()).run()
    return outcome


LETTERS = {"K": KEY, "I": INTER, "D": DISPOSABLE, "A": AUDIO}


@st.composite
def recordings(draw):
    events, at, queued = [], 0.0, 0
    for number in range(draw(st.integers(1, 60))):
        what = draw(st.sampled_from("KIDAAWWWWP")) if number else "K"
        at = on_grid(at + draw(st.sampled_from([0.0, 0.005, 0.02, 0.04])))
        if what == "P":
            at = on_grid(at + draw(st.sampled_from([0.3, 0.9, 2.0, 6.0, 16.0])))
        elif what == "W":
            taken = round(queued * draw(st.sampled_from([0.0, 0.3, 1.0, 1.0])))
            queued -= taken
            events.append((at, REFUSED if queued else TAKEN, taken))
        else:
            size = draw(st.integers(1, 900)) * (8 if what == "K" else 1)
            queued += size
            events.append((at, LETTERS[what], size))
    rest = draw(st.sampled_from([0.0, 20.0]))
    return RecordedViewer(events=events, given=draw(st.integers(0, 4)), ended_at=on_grid(at + rest))


EMPTIED_BY_ITS_CLOCK = RecordedViewer(
    events=[
        *((on_grid(0.01), KEY, 1000), (on_grid(0.07), KEY, 100), (on_grid(1.01), REFUSED, 0)),
        *((on_grid(1.01), REFUSED, 1000), (on_grid(1.01), KEY, 100), (on_grid(1.43), TAKEN, 0)),
        *((on_grid(1.43), DISPOSABLE, 100), (on_grid(1.45), REFUSED, 0), (on_grid(3.49), AUDIO, 100)),
    ],
    ended_at=4.0,
)
"""A tick leaves out what is late, so nothing waits any more: the sound that comes next finds room to ask for."""


@given(viewer=recordings())
@example(viewer=EMPTIED_BY_ITS_CLOCK)
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_evaluate_when_choices_are_served_together_gives_what_each_input_shown_one_by_one_gives(viewer):
    # A joiner that is refused from the first write stops being one when its Sender looks, which is seldom together.
    assume(not (viewer.given and next((what for _, what, _ in viewer.events if what < 0), TAKEN) == REFUSED))
    together = evaluate(viewer, SMALL)
    alone = [shown_everything(viewer, choice) for choice in SMALL]
    for choice, left, right in zip(SMALL, together, alone, strict=True):
        assert right == left, str(choice)


CACHE_COUNTS_AFTER_ALL = RecordedViewer(
    events=[
        (0.0, KEY, 3112),
        (on_grid(0.005), REFUSED, 934),
        (on_grid(2.045), INTER, 854),
        (on_grid(2.045), TAKEN, 3032),
    ],
    given=1,
    ended_at=36.0,
)
"""A tick ends the joining: what is left of the cache counts from then on, and the next message meets the mark."""


@given(viewer=recordings())
@example(viewer=CACHE_COUNTS_AFTER_ALL)
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_evaluate_when_a_cache_was_given_is_offered_the_same_together_and_alone(viewer):
    for choice, left in zip(SMALL, evaluate(viewer, SMALL), strict=True):
        right = shown_everything(viewer, choice)
        assert right.closed is left.closed
        if left.closed is None:
            assert (right.offered_messages, right.edges) == (left.offered_messages, left.edges)


@given(viewer=recordings())
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_evaluate_when_done_keeps_every_message(viewer):
    for outcome in evaluate(viewer, SMALL):
        for offered, sent, dropped in zip(
            outcome.offered_messages, outcome.sent_messages, outcome.dropped_messages, strict=True
        ):
            assert sent + dropped <= offered


# -- fidelity: a scripted run of a real Sender, recorded, and tried again


def recorded_run(share, seconds, target_ms, *, kernel_told=False):
    limits, rows = replace(LIVE_LIMITS, target_delay_ms=target_ms), Rows()
    scene = recorded_scene(Steady, rows, share, settings=SenderSettings(soft_too_long_s=0), limits=limits)
    scene.kernel.told_at = 1.0  # writes come when the recorded viewer wrote: no choice finds room before it
    if not kernel_told:
        scene.viewer.host.unacknowledged = None
    scene.go(seconds)
    scene.sender.end_flight()
    return scene, recorded_viewer(**stream_and_link(read_flights(rows.stored()))._asdict())


def tried_again(share, *, target_ms, kernel_told=False):
    scene, viewer = recorded_run(share, 20.0, target_ms, kernel_told=kernel_told)
    choice = Choice(limits=replace(LIVE_LIMITS, target_delay_ms=target_ms), soft_too_long_s=0, return_after_s=0)
    return scene.sender.statistics(), evaluate(viewer, [choice])[0]


def dropped_of(statistics):
    return sum(statistics.dropped.values(), NO_COUNTS).messages


@pytest.mark.parametrize("share", [1.5, 0.9, 0.6, 0.3])
def test_evaluate_when_the_choice_is_the_recorded_one_gives_the_recorded_run(share):
    real, outcome = tried_again(share, target_ms=0)
    assert real.transitions == outcome.edges
    for mine, theirs in ((dropped_of(real), outcome.dropped_messages), (real.sent.messages, outcome.sent_messages)):
        assert mine[KEY:] == pytest.approx(theirs[KEY:], rel=0.01)
    assert abs(real.bytes_sent - outcome.sent_bytes) <= 64 * sum(outcome.offered_messages[:KEY])


@pytest.mark.parametrize("share", [1.5, 0.9, 0.6, 0.3])
@pytest.mark.parametrize(("kernel_told", "off"), [(True, 0.15), (False, 0.25)])
def test_evaluate_when_the_recorded_viewer_lost_late_pictures_is_close(share, kernel_told, off):
    real, outcome = tried_again(share, target_ms=None, kernel_told=kernel_told)
    assert abs(sum(dropped_of(real)) - sum(outcome.dropped_messages)) <= off * sum(dropped_of(real)) + 1
    assert abs(real.bytes_sent - outcome.sent_bytes) <= off / 2 * real.bytes_sent


def test_evaluate_when_the_viewer_is_slow_tells_choices_apart():
    viewer = recorded_run(0.3, 20.0, 0)[1]
    keep = Choice(limits=Limits.parse("64KiB,0", "128KiB,0"), policy="keep")
    live = Choice(limits=Limits.parse("256KiB,0", "2MiB,0"))
    cut, kept = evaluate(viewer, [keep, live])
    assert CloseReason.HARD_LIMIT is cut.closed
    assert kept.closed is None
    assert cut.watched_s < kept.watched_s
    assert 0 < kept.sent_messages[KEY] <= kept.offered_messages[KEY]


def test_evaluate_when_nothing_was_refused_is_the_same_for_all_and_quick():
    viewer = recorded_run(3.0, 10.0, None)[1]
    assert not viewer.refused
    work = Work()
    outcomes = evaluate(viewer, SMALL, work=work)
    assert len(set(outcomes)) == 1
    assert (0, len(viewer.events) * len(SMALL)) == (work.shown, work.inputs)


def test_extended_when_the_link_was_dead_stays_dead():
    events = [(0.0, KEY, 1000), (0.5, REFUSED, 0), (1.0, INTER, 100)]
    viewer = extended(RecordedViewer(events=events, ended_at=1.0), 3.0)
    assert viewer.ended_at == 4.0
    assert viewer.assumed_from == 1.0
    assert sum(size for _, what, size in viewer.events if what < 0) == 0
    later = [at for at, what, _ in viewer.events if what == INTER]
    assert later == pytest.approx([1.0, 2.0, 3.0], abs=0.01)  # the fourth would come a moment after the end


@pytest.mark.parametrize(("rest_s", "resumes"), [(None, 13.0), (0.0, 7.0), (4.0, 11.0), (math.inf, None)])
def test_extended_when_a_stall_was_cut_short_goes_on_for_as_long_as_is_said(rest_s, resumes):
    events = [(0.0, KEY, 900), (0.0, TAKEN, 900), (1.0, INTER, 900), (1.0, TAKEN, 900), (1.5, INTER, 900)]
    events += [(2.0, REFUSED, 0), (4.0, INTER, 900)]
    viewer = extended(RecordedViewer(events=events, ended_at=7.0, close_reason="hard limit"), 30.0, rest_s)
    more = [event for event in viewer.events if event[0] > 7.0]
    assert min(at for at, what, _ in more if what >= 0) < 8
    writes = [at for at, what, _ in more if what < 0]
    assert (min(writes, default=None)) == (resumes and pytest.approx(resumes, abs=0.1))


@pytest.mark.parametrize("known", [False, True])
def test_stalls_when_the_line_stands_still_twice_are_found_with_the_last_that_did_not_end(known):
    """A kernel that tells takes two more writes after the line has stopped: it has stood since, and not since these."""
    events, held = [(0.0, KEY, 900), (0.0, TAKEN, 900)], 13_000
    for at in (3.0, 13.0):
        events += [(at, INTER, 9000), (at, TAKEN, 9000), (at + 0.2, INTER, 9000), (at + 0.2, TAKEN, 9000)]
        events += [(at + 0.5, INTER, 9000), (at + 0.5, REFUSED, 4000)]
        if known:
            events += [(at + 0.6 + number / 2, HELD, held) for number in range(6)] + [(at + 4.0, HELD, 0)] * (at == 3.0)
        if at == 3.0:
            events += [(at + 4.0, TAKEN, 5000)]
    ended, last = stalls(events, 16.2)
    assert ended == pytest.approx([3.8 if known else 3.5])
    assert last == pytest.approx(13.2 if known else 13.5)


def test_extended_when_a_limit_closed_the_viewer_lets_it_close_again_first():
    choice = Choice(limits=Limits.parse("0,0,1s", "0,0,1s"))
    events = [(0.0, KEY, 1000), (0.0, TAKEN, 1000), (0.5, INTER, 900), (0.5, REFUSED, 0)]
    viewer = RecordedViewer(events=events, ended_at=on_grid(1.4996), close_reason="hard limit")
    (outcome,) = evaluate(extended(viewer, 30.0), [choice])
    lasted_s = outcome.watched_s
    assert (outcome.closed, lasted_s) == (CloseReason.HARD_LIMIT, pytest.approx(1.5, abs=0.001))


@given(ms=st.floats(0, 60_000))
def test_bucket_when_a_delay_is_counted_holds_it_to_an_eighth(ms):
    upper = bucket_ms(delay_bucket(ms))
    assert ms < upper <= max(ms * 1.125 + 1, 1.0) + 1


def test_quantile_when_half_of_the_time_was_quick_is_that_of_the_rest():
    delay = [(delay_bucket(10), 9.0), (delay_bucket(1000), 1.0)]
    assert quantile_ms(delay, 0.5) == bucket_ms(delay_bucket(10))
    assert quantile_ms(delay, 0.95) == bucket_ms(delay_bucket(1000))
    assert quantile_ms([], 0.5) == 0.0


def test_values_when_wrong_are_refused_by_name():
    with pytest.raises(ConfigError, match="policy is 'fast'"):
        Choice(limits=Limits(), policy="fast")
    with pytest.raises(ConfigError, match="stuck_s is -1"):
        Choice(limits=Limits(), stuck_s=-1)
    with pytest.raises(ConfigError, match="falls from"):
        RecordedViewer(events=[(1.0, KEY, 1), (0.5, KEY, 1)])
    with pytest.raises(ConfigError, match="restart_bytes of a recorded viewer is -1"):
        RecordedViewer(events=[], restart_bytes=-1)
    nothing = RecordedViewer(events=[(0.0, KEY, 9), (0.1, REFUSED, 0), (0.2, KEY, 9)], restart_bytes=0, ended_at=1.0)
    assert evaluate(nothing, SMALL[:1])[0].closed is None
    with pytest.raises(ConfigError, match="0 choices"):
        evaluate(RecordedViewer(events=[]), [])
    assert on_grid(1.0) == 1.0
    assert GRID_S == 2**-20
