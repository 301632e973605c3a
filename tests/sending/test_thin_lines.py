"""Viewers on thin lines, and streams with large key frames: who takes all that its line carries stays, and sees."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from flow_kit import AUDIO, DATA, INTER, KEY, OWN, frame
from hypothesis import given, settings
from slow_kit import RATE, Scene

from flowctl.core.flow.limits import Limits


def thin_stream(seconds, gop_s, key_share, *, sound=True, fps=30, seed=1):
    """Return (time, class, size) of 1.5 Mbit/s of which key frames have a share, as those of a shared screen do."""
    rng, count = random.Random(seed), int(gop_s * fps)
    video = (RATE - (16_000 if sound else 0)) * gop_s
    sizes = {KEY: video * key_share, INTER: video * (1 - key_share) / (count - 1)}
    found = []
    for number in range(int(seconds * fps)):
        item = INTER if number % count else KEY
        found.append((number / fps, item, int(sizes[item] * rng.uniform(0.8, 1.2))))
    return sorted(found + [(number / 43, AUDIO, 372) for number in range(int(seconds * 43) if sound else 0)])


def limits_of(hard_s):
    return Limits.parse(f"2MiB,2048,{hard_s / 2:g}s", f"4MiB,4096,{hard_s:g}s")


def joins(scene, messages, at, until):
    for when, item, size in messages:
        if when >= at:
            break
        scene.group.run(max(when - scene.now, 0.0))
        scene.published.publish(item, size)
        scene.published_at.append(scene.now)
    scene.kernel.carry()  # what the line carried before is nobody's
    return scene.run([message for message in messages if message[0] >= at], until)


@pytest.mark.parametrize(
    ("share", "hard_s"), [(0.05, 8), (0.06, 8), (0.08, 8), (0.08, 4), (0.15, 4), (0.05, 2), (0.3, 2)]
)
@pytest.mark.parametrize("joined_s", [0.0, 7.5])
def test_viewer_that_takes_all_its_line_carries_when_it_has_just_joined_is_not_closed(share, hard_s, joined_s):
    """What the kernel was given before it lagged takes 14 s on such a line, and sound waits behind it."""
    scene = Scene(lambda _: share, limits=limits_of(hard_s), flush_s=0.04)
    joins(scene, thin_stream(30, 4.0, 0.5), joined_s, 30)
    scene.check()
    assert not scene.viewer.host.closed
    assert scene.kernel.carried_bytes > 0.9 * scene.kernel.able_bytes - RATE * share * joined_s


@settings(max_examples=20, deadline=None)
@given(
    share=st.sampled_from([0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 0.95, 1.05, 1.2, 1.5, 2.0]),
    hard_s=st.sampled_from([2, 4, 8]),
    gop_s=st.sampled_from([1.0, 2.0, 4.0, 10.0, 20.0]),
    key_share=st.sampled_from([0.05, 0.2, 0.5, 0.8]),
    sound=st.booleans(),
    joined=st.sampled_from([0.0, 0.5, 0.95]),
    lump_bytes=st.sampled_from([1, 12_000]),
    seed=st.integers(0, 1000),
)
def test_viewer_when_it_takes_all_its_line_carries_stays_and_a_faster_one_loses_nothing(
    share, hard_s, gop_s, key_share, sound, joined, lump_bytes, seed
):
    seconds = max(20.0, 2.5 * gop_s)
    scene = Scene(lambda _: share, limits=limits_of(hard_s), flush_s=0.04, lump_bytes=lump_bytes)
    joins(scene, thin_stream(seconds, gop_s, key_share, sound=sound, seed=seed), joined * gop_s, seconds)
    scene.check()
    assert not scene.viewer.host.closed
    if share >= 1.2 and joined and gop_s <= 10:  # what of 20 s waits is more than the hard limit of bytes
        assert not scene.sender.statistics().dropped


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize(("gop_s", "key_share", "share"), [(10.0, 0.6, 1.5), (10.0, 0.8, 1.05), (20.0, 0.8, 1.2)])
def test_line_that_carries_the_stream_when_a_key_frame_takes_longer_than_the_target_shows_all(
    gop_s, key_share, share, sound
):
    """A screen that is shared: what comes behind the key frame is late for that alone, and soon in time again."""
    scene = Scene(lambda _: share, flush_s=0.04).run(thin_stream(5 * gop_s, gop_s, key_share, sound=sound), 5 * gop_s)
    scene.check()
    figures = scene.figures(gop_s, 4 * gop_s)
    assert figures["pictures"] == figures["sound"] == 1.0
    assert figures["freeze"] < 1.3 * gop_s * key_share / share + 0.5


@pytest.mark.parametrize("hard_s", [2, 4, 8])
@pytest.mark.parametrize("before", [0.06, 1.2])
def test_viewer_that_takes_nothing_any_more_is_closed_by_its_limits(before, hard_s):
    scene = Scene(lambda now: before if now < 20 else 0.0, limits=limits_of(hard_s), flush_s=0.04)
    scene.run(thin_stream(45, 2.0, 0.2), 45)
    assert [reason.value for reason, _ in scene.viewer.host.closed] in (["hard limit"], ["stuck"])


@pytest.mark.parametrize(
    ("radio_bytes", "cover_bytes", "share", "most_s"),
    [
        (12_000, 0, 0.42, 5.0),
        (12_000, 0, 1.3, 5.0),
        (4_000, 30_000, 0.51, 18.0),
        (4_000, 30_000, 1.3, 8.0),
    ],
)
def test_radio_when_a_line_carries_less_fills_the_kernel_with_a_second_of_it(radio_bytes, cover_bytes, share, most_s):
    """128 KiB would be 26 s of a line of 40 kbit/s, in which it is READY. A cover of 15 s adds hardly more."""
    scene = Scene(lambda _: share * radio_bytes / RATE, flush_s=0.04)
    cover = [(0.0, KEY, cover_bytes)] if cover_bytes else []
    scene.run(cover + [(number / 43, AUDIO, radio_bytes // 43) for number in range(43 * 60)], 60)
    scene.check()
    late = [at - scene.published_at[number] for number, _, at in scene.arrived()]
    assert not scene.viewer.host.closed
    assert max(late) < most_s
    assert bool(scene.sender.statistics().dropped) is (share < 1)


def small_stream(seconds, rate, gop_s, key_share, fps):
    """Return (time, class, size) of a small stream with sound in pieces of 261 bytes."""
    count, video = int(gop_s * fps), (rate - 11_250) * gop_s
    sizes = {KEY: int(video * key_share), INTER: int(video * (1 - key_share) / (count - 1))}
    pictures = [(number / fps, INTER if number % count else KEY) for number in range(int(seconds * fps))]
    sound = [(number / 43, AUDIO, 261) for number in range(int(seconds * 43))]
    return sorted([(at, item, sizes[item]) for at, item in pictures] + sound)


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_viewer_that_takes_nothing_any_more_is_closed_although_its_kernel_takes_a_little_now_and_then(share):
    """Headers of a few bytes, one each time it is asked, fit below its mark for minutes: that is no progress."""
    scene = Scene(lambda now: share if now < 15 else 0.0, limits=limits_of(8))
    joins(scene, small_stream(45, 37_500, 2.0 if share < 0.1 else 4.0, 0.5, 5), 1.0, 45)
    assert [reason.value for reason, _ in scene.viewer.host.closed] in (["hard limit"], ["stuck"])


def test_viewer_with_messages_of_its_own_when_its_line_pauses_is_not_closed_as_it_goes_on():
    """They wait behind a key frame; the rate right after a pause says that they would take minutes by themselves."""
    scene = Scene(lambda now: 0.0 if 12 <= now < 14.4 else 0.2, limits=limits_of(4))
    messages, at, sent = thin_stream(18, 10.0, 0.8), 9.5, 0
    scene.run([message for message in messages if message[0] < at], at)
    while scene.now < 18:
        sent += 1
        scene.sender.send(frame(OWN, DATA, sent, 200), DATA)
        scene.run([message for message in messages if at <= message[0] < at + 0.05], at + 0.05)
        at += 0.05
    scene.check()
    assert not scene.viewer.host.closed
