"""The step-down ladder: what leads down and up, and how long each step is kept."""

from __future__ import annotations

import itertools

import pytest

from flowctl.errors import ConfigError
from flowctl.flow import MessageClass
from flowctl.ladder import STEP_MASKS, Ladder, LadderSettings, LadderStep, Reading, step_rates, useful_steps

FULL, NO_DISPOSABLE, KEY_FRAMES, AUDIO_ONLY, CLOSE = LadderStep
NEEDED = (100.0, 75.0, 20.0, 5.0)
CALM = Reading(needed=NEEDED)
PRESSED = Reading(refused=True, above_low=True, soft=True, needed=NEEDED)


class Climber:
    """A ladder that is read every half second; its moves are kept as (seconds, step)."""

    def __init__(self, **settings):
        self.ladder = Ladder(LadderSettings(**settings), 0.0)
        self.now = 0.0
        self.moves = []

    def read(self, seconds, reading):
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            move = self.ladder.read(self.now, reading._replace(rate_at=self.now if reading.refused else 0.0))
            if move is not None:
                assert move.new is self.ladder.step
                assert move.old is not move.new
                self.moves.append((self.now, move.new))
        return self.ladder.step


def test_step_rates_when_classes_are_known_are_what_is_not_refused():
    """Each step needs the sum of the classes it lets through."""
    rates = [0.0] * len(MessageClass)
    for item, rate in zip(["HEADER", "KEY", "INTER", "DISPOSABLE", "AUDIO"], (1, 20, 50, 25, 4), strict=True):
        rates[MessageClass[item]] = rate
    assert step_rates(rates) == (100, 75, 25, 5)
    assert STEP_MASKS[CLOSE] == 0


@pytest.mark.parametrize(
    ("needed", "lowest", "expected"),
    [
        ((), CLOSE, [FULL, NO_DISPOSABLE, KEY_FRAMES, AUDIO_ONLY]),
        (NEEDED, CLOSE, [FULL, NO_DISPOSABLE, KEY_FRAMES, AUDIO_ONLY]),
        (NEEDED, KEY_FRAMES, [FULL, NO_DISPOSABLE, KEY_FRAMES]),
        ((100.0, 100.0, 20.0, 5.0), CLOSE, [FULL, KEY_FRAMES, AUDIO_ONLY]),
        ((100.0, 75.0, 20.0, 0.0), CLOSE, [FULL, NO_DISPOSABLE, KEY_FRAMES]),
        ((5.0, 5.0, 5.0, 5.0), CLOSE, [FULL]),
        ((100.0, 100.0, 99.0, 5.0), CLOSE, [FULL, AUDIO_ONLY]),
    ],
    ids=["unknown", "all", "lowest", "no disposable", "no sound", "sound only", "all key frames"],
)
def test_useful_steps_when_a_stream_lacks_a_class_leave_its_step_out(needed, lowest, expected):
    """A step that brings nothing, or would leave nothing, is passed over."""
    assert expected == useful_steps(needed, lowest)


def test_pressure_when_no_rate_is_known_leads_down_one_step_per_dwell_and_ends_in_close():
    """Each step is kept for its dwell time; the lowest one closes when pressure has lasted for its own."""
    climber = Climber()
    climber.read(60, PRESSED)
    assert climber.moves == [(1.0, NO_DISPOSABLE), (4.0, KEY_FRAMES), (9.0, AUDIO_ONLY), (39.0, CLOSE)]
    assert climber.ladder.changes == 4


def test_pressure_when_the_lowest_step_is_limited_never_closes():
    """With another lowest step, or no dwell time for CLOSE, the ladder never ends a connection."""
    assert Climber(lowest=KEY_FRAMES).read(600, PRESSED) is KEY_FRAMES
    assert Climber(dwell_audio_only_s=0).read(600, PRESSED) is AUDIO_ONLY


def test_pressure_when_the_rate_is_known_leads_to_the_best_step_that_fits_at_once():
    """A link of 30 % goes to key frames in one move, without waiting for dwell times, and stays."""
    climber = Climber(dwell_full_s=30)
    climber.read(1, PRESSED._replace(rate=30.0))
    assert climber.moves == [(0.5, KEY_FRAMES)]
    climber.read(4, PRESSED._replace(rate=30.0, soft=False, above_low=False))
    assert climber.ladder.step is KEY_FRAMES


def test_pressure_when_the_load_stays_above_low_begins_before_the_soft_limit():
    """A load above its low mark for `pressure_s` is pressure; one that falls in between is none."""
    above = Reading(refused=True, above_low=True, needed=NEEDED)
    assert Climber(pressure_s=2).read(2.0, above) is FULL
    assert Climber(pressure_s=2).read(2.5, above) is NO_DISPOSABLE
    climber = Climber(pressure_s=2)
    for _ in range(10):
        climber.read(1.5, above)
        climber.read(0.5, CALM)
    assert climber.moves == []


def test_strain_when_a_kernel_refuses_now_and_then_is_no_pressure():
    """A viewer that meets EAGAIN with each key frame keeps everything, even where its rate looks too low."""
    climber = Climber()
    for _ in range(40):
        climber.read(0.5, Reading(refused=True, drained=True, rate=50.0, needed=NEEDED))
        climber.read(1.5, CALM._replace(rate=50.0))
    assert climber.moves == []
    busy = Climber()
    busy.read(10, Reading(refused=True, drained=True, rate=80.0, needed=NEEDED))
    assert busy.ladder.step is NO_DISPOSABLE


def test_calm_when_the_rate_promises_the_steps_leads_up_one_at_a_time():
    """After `up_s` of calm the next step is taken, and so on to FULL."""
    climber = Climber()
    climber.read(0.5, PRESSED._replace(rate=3.0))
    assert climber.ladder.step is AUDIO_ONLY
    climber.read(20, CALM._replace(rate=500.0))
    assert [step for _, step in climber.moves] == [AUDIO_ONLY, KEY_FRAMES, NO_DISPOSABLE, FULL]
    times = [at for at, _ in climber.moves]
    assert all(after - before >= 5.0 for before, after in itertools.pairwise(times))
    assert climber.ladder.idle


def test_calm_when_the_rate_does_not_promise_a_step_is_probed_ever_more_rarely():
    """Each failure of a probe doubles the wait for the next, up to its bound."""
    climber = Climber(probe_s=10, probe_max_s=60)
    short = PRESSED._replace(rate=30.0)
    climber.read(0.5, short)
    waits = []
    for _ in range(5):
        began = climber.now
        while climber.ladder.step is KEY_FRAMES:
            climber.read(0.5, CALM._replace(rate=30.0, refused=False))
            assert climber.now < 1000
        waits.append(climber.now - began)
        assert climber.ladder.step is NO_DISPOSABLE
        climber.read(0.5, short)
        assert climber.ladder.step is KEY_FRAMES
    assert pytest.approx(waits, abs=1.0) == [10, 20, 40, 60, 60]


def test_calm_when_a_step_holds_that_the_rate_denied_forgets_the_rate():
    """A viewer whose link has become better climbs without a probe for every step."""
    climber = Climber()
    climber.read(0.5, PRESSED._replace(rate=10.0))
    climber.read(31, CALM._replace(rate=10.0))
    assert climber.ladder.step is KEY_FRAMES
    climber.read(20, CALM._replace(rate=10.0))
    assert climber.ladder.step is FULL


def test_calm_when_the_viewer_is_far_behind_is_none():
    """What a kernel's buffer hides for seconds is not taken for calm."""
    climber = Climber()
    climber.read(0.5, PRESSED._replace(rate=3.0))
    assert climber.read(300, CALM._replace(rate=3.0, delay_ms=1500.0)) is AUDIO_ONLY


def test_stall_when_nothing_is_taken_stands_still():
    """No step helps a peer that takes nothing: the ladder waits, and does not close."""
    climber = Climber()
    assert climber.read(300, PRESSED._replace(stalled=True)) is FULL
    climber.read(0.5, PRESSED._replace(rate=30.0))
    assert climber.read(300, PRESSED._replace(stalled=True)) is KEY_FRAMES


def test_time_in_steps_when_summed_up_is_the_whole_time():
    """The seconds on the steps add up to the time since the ladder was made."""
    climber = Climber()
    climber.read(0.5, PRESSED._replace(rate=30.0))
    climber.read(9.5, CALM._replace(rate=30.0))
    assert climber.ladder.time_in_steps(12.0) == (0.5, 0.0, 11.5, 0.0)


def test_why_of_a_move_when_read_names_cause_and_rates():
    """A move says what pressed, what the viewer takes and what the new step needs."""
    ladder = Ladder(LadderSettings(), 0.0)
    move = ladder.read(1.0, Reading(soft=True, rate=2048.0, rate_at=1.0, needed=(4096.0, 4096.0, 1024.0, 10.0)))
    assert move is not None
    assert move.why == "FULL -> KEY_FRAMES: soft limit; takes 2.0 KiB/s, KEY_FRAMES needs 1.0 KiB/s"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"dwell_full_s": -1.0}, "dwell_full_s"),
        ({"up_s": -0.1}, "up_s"),
        ({"probe_s": 10.0, "probe_max_s": 5.0}, "probe_max_s"),
        ({"headroom": 0.9}, "headroom"),
        ({"pressure_s": float("nan")}, "pressure_s"),
    ],
)
def test_settings_when_out_of_range_are_refused_by_name(settings, name):
    """An error names the field that is wrong."""
    with pytest.raises(ConfigError, match=name):
        LadderSettings(**settings)


def test_pressure_when_the_measured_rate_can_hold_the_step_is_given_more_time():
    """A queue that is above its marks but falls is no reason for the next step; one that stays is, later."""
    climber = Climber(dwell_full_s=2)
    assert climber.read(7.5, PRESSED._replace(rate=120.0)) is FULL
    assert climber.read(1.0, PRESSED._replace(rate=120.0)) is NO_DISPOSABLE


def test_pressure_when_the_rate_was_measured_long_ago_keeps_to_the_dwell_times():
    """A rate of another time leads nobody down several steps at once, and is no strain."""
    ladder = Ladder(LadderSettings(dwell_full_s=2), 0.0)
    moves = [
        ladder.read(100.0 + tick / 2, Reading(refused=True, rate=10.0, rate_at=50.0, needed=NEEDED))
        for tick in range(40)
    ]
    assert moves == [None] * 40
    move = ladder.read(121.0, PRESSED._replace(rate=10.0, rate_at=50.0))
    assert move is not None
    assert (move.old, move.new) == (FULL, NO_DISPOSABLE)


def test_strain_when_a_reading_comes_after_a_long_pause_counts_for_a_second():
    """One refusal after minutes without a reading is one refusal, not minutes of them."""
    ladder = Ladder(LadderSettings(), 0.0)
    assert ladder.read(500.0, Reading(refused=True, rate=50.0, rate_at=500.0, needed=NEEDED)) is None
    assert not ladder.idle
