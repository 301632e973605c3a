"""Simulated viewers behind links of a given speed: each settles on the best step it can hold, without flapping."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from flow_kit import AUDIO, DISPOSABLE, INTER, KEY, check_accounts, check_edges, check_stream
from hypothesis import given, settings
from ladder_kit import LIVE_LIMITS, Scene, Stream

from flowctl.ladder import HELD_STEPS, LadderSettings, LadderStep, useful_steps
from flowctl.ledger import LedgerKind
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender_types import SenderSettings

FULL, NO_DISPOSABLE, KEY_FRAMES, AUDIO_ONLY, CLOSE = LadderStep
STREAMS = {
    "disposable": Stream(),
    "no disposable": Stream(disposable_bytes=0),
    "large key frames": Stream(key_bytes=90_000),
    "no sound": Stream(audio_bytes=0),
}


def check(scene):
    """Check what holds for every viewer: accounts, edges, order, decodability, and control untouched."""
    check_accounts(scene.viewer)
    check_edges(scene.viewer)
    expired = scene.sender.statistics().key_waits_expired > 0
    check_stream(scene.viewer, scene.published, key_wait_expired=expired)
    assert not expired
    assert not scene.viewer.host.failures


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.8, 0.95, 1.2])
def test_step_when_the_link_is_constant_settles_on_the_best_that_fits(name, share):
    """Within three minutes a viewer stands within one step of the best it can hold, and hardly moves any more."""
    stream = STREAMS[name]
    scene = Scene(stream, share=share)
    scene.follow()
    scene.run(180)
    statistics = scene.sender.statistics()
    if statistics.close_reason is not None:
        assert share * stream.needed[0] < 1.2 * stream.needed[useful_steps(stream.needed)[-1]]
        return
    steps = useful_steps(stream.needed)
    best = stream.best_step(share)
    assert abs(steps.index(statistics.step) - steps.index(best)) <= 1
    assert len(scene.moves_since(120)) <= 3
    assert len(scene.moves) <= 12
    check(scene)


@pytest.mark.parametrize(
    ("share", "step", "key", "inter", "disposable"),
    [(0.2, KEY_FRAMES, 0.9, 0.0, 0.0), (0.5, KEY_FRAMES, 1.0, 0.0, 0.0), (0.8, NO_DISPOSABLE, 1.0, 1.0, 0.0)],
)
def test_viewers_at_20_50_and_80_percent_get_what_their_step_promises(share, step, key, inter, disposable):
    """In the last of three minutes a slow viewer gets nearly all sound, its step's frames, and nothing in between."""
    scene = Scene(share=share)
    scene.follow()
    scene.run(120)
    first = len(scene.published.classes)
    scene.run(60)
    shares = scene.shares(first)
    assert scene.step is step
    assert len(scene.moves_since(120)) <= 1
    assert shares[KEY] >= key - 0.04
    assert shares[AUDIO] >= 0.93
    assert shares[INTER] == pytest.approx(inter, abs=0.05)
    assert shares[DISPOSABLE] == pytest.approx(disposable, abs=0.05)
    check(scene)


def test_viewer_when_its_link_recovers_climbs_to_full_again():
    """After half a minute at 30 % and then a fast link, everything comes again, every second frame of it in order."""
    scene = Scene(share=0.3)
    scene.follow()
    scene.run(30)
    assert scene.step is KEY_FRAMES
    scene.run(60, share=3.0)
    statistics = scene.sender.statistics()
    assert statistics.step is FULL
    first = len(scene.published.classes)
    scene.run(10)
    assert set(scene.shares(first).values()) == {1.0}
    assert sum(statistics.time_in_steps_s) == pytest.approx(90, abs=5)
    assert statistics.step_changes == len(scene.moves) >= 2
    check(scene)


def test_viewer_when_its_link_gets_worse_steps_down_again():
    """Each further loss of speed finds its step."""
    scene = Scene(share=0.85)
    scene.follow()
    scene.run(40)
    assert scene.step is NO_DISPOSABLE
    scene.run(40, share=0.4)
    assert scene.step is KEY_FRAMES
    scene.run(60, share=0.12)
    assert scene.step is AUDIO_ONLY
    check(scene)


def test_viewer_when_it_cannot_even_hold_sound_is_closed_with_its_reason():
    """Pressure for the dwell time of the lowest step ends the connection, and says what it took and needed."""
    ladder = LadderSettings(dwell_audio_only_s=8)
    scene = Scene(
        Stream(audio_bytes=4000),
        share=0.2,
        settings=SenderSettings(ladder=ladder, soft_too_long_s=0),
        limits=LIVE_LIMITS.parse("2MiB,2048,2s", "4MiB,4096,60s"),
        kernel_bytes=16 * 1024,
    )
    scene.follow()
    scene.run(60)
    ((reason, details),) = scene.viewer.host.closed
    assert reason is CloseReason.LADDER
    assert "on the lowest step for 8 s" in details
    assert "takes" in details
    assert scene.moves[-1][1].new is CLOSE
    check_accounts(scene.viewer)


def test_viewer_when_its_ladder_is_off_has_no_step():
    """Without a ladder the policy alone decides, and statistics say FULL."""
    scene = Scene(share=0.3, settings=SenderSettings(soft_too_long_s=0))
    scene.follow()
    scene.run(30)
    statistics = scene.sender.statistics()
    assert (statistics.step, statistics.step_changes, scene.moves) == (FULL, 0, [])
    assert DropReason.STEPPED_DOWN not in statistics.dropped
    check(scene)


def test_viewer_when_it_keeps_up_never_has_a_step_or_loses_a_frame():
    """A healthy viewer that meets EAGAIN at each key frame stays on FULL."""
    scene = Scene(Stream(key_bytes=90_000), share=1.5, kernel_bytes=64 * 1024)
    scene.follow()
    scene.run(60)
    statistics = scene.sender.statistics()
    assert scene.moves == []
    assert set(statistics.dropped) <= {DropReason.REFUSED}
    assert statistics.transitions > 0, "the bursts must meet EAGAIN for this to say anything"


def test_drops_on_a_step_are_counted_as_such_and_explained():
    """What a step refuses has its own reason, the ledger has the move, and why() names the step."""
    scene = Scene(share=0.4)
    scene.follow()
    scene.run(25)
    statistics = scene.sender.statistics()
    assert statistics.step is KEY_FRAMES
    assert statistics.dropped[DropReason.STEPPED_DOWN].of(INTER) > 200
    moves = [entry for entry in scene.sender.ledger() if entry.kind is LedgerKind.STEP]
    assert [entry.move for entry in moves] == [move for _, move in scene.moves]
    assert "KEY_FRAMES needs" in moves[-1].why
    assert "on step KEY_FRAMES of the ladder" in scene.sender.why()


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.tuples(st.sampled_from([0.0, 0.03, 0.2, 0.5, 0.8, 1.0, 2.0]), st.floats(0.2, 15)), max_size=8),
    name=st.sampled_from(sorted(STREAMS)),
    kernel=st.sampled_from([4096, 65536, 300_000]),
    returns=st.booleans(),
)
def test_any_link_when_it_changes_at_will_leaves_every_stream_decodable(shares, name, kernel, returns):
    """Whatever the link does: accounts hold, no inter frame follows a loss before a key frame, steps add up."""
    sender = SenderSettings(ladder=LadderSettings(), stuck_s=0, return_after_s=1.0 if returns else 0.0)
    scene = Scene(STREAMS[name], share=1.0, settings=sender, kernel_bytes=kernel)
    scene.follow()
    for share, seconds in shares:
        scene.run(seconds, share=share)
        check_accounts(scene.viewer)
    scene.run(2, share=3.0)
    check(scene)
    statistics = scene.sender.statistics()
    assert statistics.step in (*HELD_STEPS, CLOSE)
    if not returns:
        assert statistics.returns == 0
