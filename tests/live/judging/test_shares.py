"""Shares of viewers per state: what they are, and when they are worth telling."""

from __future__ import annotations

import pytest

from flowctl.core.flow.state import SendState
from flowctl.errors import ConfigError
from flowctl.live.judging.shares import ShareSettings, ViewerShares, is_worth_telling


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


def told(counts, **settings):
    """Return the seconds of those counts, (second, number in each state), that one subscriber is told."""
    last, found = None, []
    for second, *states in counts:
        if is_worth_telling(now := shares(second, *states), last, ShareSettings(**settings)):
            last = now
            found.append(second)
    return found


@pytest.mark.parametrize(
    ("counts", "settings", "seconds"),
    [
        pytest.param([(at, 100 - at % 2, at % 2) for at in range(30)], {}, [0, 11, 22], id="within the band"),
        pytest.param(
            [(0, 100), (1.9, 90, 10), (2, 90, 10), (3, 50, 50), (4, 50, 50)],
            {"interval_s": 2},
            [0, 2, 4],
            id="beyond the band, after the interval",
        ),
        pytest.param([(0, 0), (1, 1), (2, 0)], {}, [1, 2], id="the first viewer, and the last one's leaving"),
        pytest.param([(at, 5) for at in range(0, 200, 10)], {"repeat_s": 60}, [0, 60, 120, 180], id="again"),
        pytest.param([(at, 5) for at in range(0, 200, 10)], {}, [0], id="never again"),
    ],
)
def test_counts_when_seen_one_after_the_other_are_told_where_they_say_something(counts, settings, seconds):
    assert told(counts, **settings) == seconds


@pytest.mark.parametrize("values", [{"interval_s": -1}, {"change": 0}, {"change": 1.1}, {"settle_s": float("nan")}])
def test_settings_when_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        ShareSettings(**values)
