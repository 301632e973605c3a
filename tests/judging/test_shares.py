"""Shares of viewers per state: what they are, and when they are worth telling."""

from __future__ import annotations

import pytest

from flowctl.core.flow.state import SendState
from flowctl.errors import ConfigError
from flowctl.live.judging.shares import ShareSettings, ShareWatch, ViewerShares


def shares(at, ready, slow=0):
    viewers = ready + slow
    return ViewerShares(
        stream="live/room",
        at=at,
        viewers=viewers,
        states=(ready, 0, slow, 0),
        missing_pictures=slow,
        picture_share=1 - slow / max(viewers, 1) / 2,
    )


def test_share_when_there_are_no_viewers_is_zero():
    assert shares(0, 0).in_state(SendState.READY) == 0.0
    assert shares(0, 3, 1).in_state(SendState.SOFT_LIMIT) == 0.25
    assert shares(0, 3, 1).missing_share == 0.25
    assert shares(0, 0).missing_share == 0.0


def test_watch_when_a_share_goes_back_and_forth_within_the_band_says_nothing():
    """A viewer of a hundred that changes sides every second is not told before the settling time, and once then."""
    watch = ShareWatch(ShareSettings(interval_s=1, change=0.05, settle_s=10))
    told = [second for second in range(30) if watch.take(shares(second, 100 - second % 2, second % 2))]
    assert told == [0, 11, 22]


def test_watch_when_a_share_changes_much_says_so_not_more_often_than_the_interval():
    """A change beyond the band is told at once, but the next one only after the interval."""
    watch = ShareWatch(ShareSettings(interval_s=2, change=0.05))
    assert watch.take(shares(0.0, 100))
    assert not watch.take(shares(1.9, 90, 10))
    assert watch.take(shares(2.0, 90, 10))
    assert not watch.take(shares(3.0, 50, 50))
    assert watch.take(shares(4.0, 50, 50))
    assert watch.count == 3


def test_watch_when_the_viewers_go_says_that_too():
    """The first viewers and the last one's leaving are told; an empty stream is not told at the start."""
    watch = ShareWatch(ShareSettings())
    assert not watch.take(shares(0.0, 0))
    assert watch.take(shares(1.0, 1))
    assert watch.take(shares(2.0, 0))


def test_watch_when_asked_to_repeat_does_so_without_any_change():
    """Where nothing changes, it is told again after the time asked for, and never where that is off."""
    repeating, quiet = ShareWatch(ShareSettings(repeat_s=60)), ShareWatch(ShareSettings())
    assert [second for second in range(0, 200, 10) if repeating.take(shares(second, 5))] == [0, 60, 120, 180]
    assert [second for second in range(0, 200, 10) if quiet.take(shares(second, 5))] == [0]


@pytest.mark.parametrize("values", [{"interval_s": -1}, {"change": 0}, {"change": 1.1}, {"settle_s": float("nan")}])
def test_settings_when_out_of_range_are_refused(values):
    """An error names the field."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        ShareSettings(**values)
