"""An episode of drops: what was lost in it, and what the peer got all the same."""

from __future__ import annotations

import pytest

from flowctl.core.flow.counts import Counts
from flowctl.core.sending.episode import DropEpisode
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.sending.slowpeer import SlowPeer
from flowctl.reasons import DropReason

NOTHING = {}
TWO = {DropReason.LATE: Counts((0, 0, 0, 2, 0, 0, 0), (0, 0, 0, 900, 0, 0, 0))}


def test_episode_when_nothing_was_dropped_is_not_worth_an_entry():
    assert DropEpisode(1.0, TWO, (10, 2), None).end(3.0, TWO, (20, 2), None) is None


@pytest.mark.parametrize(("published", "lost", "share"), [(20, 4, 0.8), (10, 2, 1.0)])
def test_episode_when_it_ends_tells_the_loss_and_the_share_of_its_own_pictures(published, lost, share):
    entry = DropEpisode(1.0, NOTHING, (10, 2), None).end(3.0, TWO, (published, lost), None)
    assert (entry.dropped, entry.duration_s, entry.picture_share, entry.line_share) == (TWO, 2.0, share, 0.0)


def test_episode_when_another_log_is_followed_meanwhile_counts_the_pictures_of_both():
    episode = DropEpisode(0.0, NOTHING, (100, 10), None)
    episode.leave_log((110, 15))
    assert episode.end(1.0, TWO, (10, 5), None).picture_share == 0.5


def test_episode_when_the_viewer_wants_no_pictures_for_a_while_leaves_the_step_out():
    episode = DropEpisode(0.0, NOTHING, (0, 0), None)
    episode.skip((10, 5), (0, 0))
    episode.skip((0, 0), (60, 55))
    assert episode.end(1.0, TWO, (60, 55), None).picture_share == 0.5


def test_episode_of_a_slow_peer_tells_its_delay_and_how_long_its_line_was_in_use():
    slow = SlowPeer(SenderSettings())
    slow.behind_ms, slow.behind_max_ms, slow.delay_removed_ms, slow.drain.waited_s = 300.0, 9000.0, 50.0, 7.0
    episode = DropEpisode(10.0, NOTHING, (0, 0), slow)
    assert slow.behind_max_ms == 300.0
    slow.behind_max_ms, slow.delay_removed_ms, slow.drain.waited_s = 700.0, 150.0, 8.0
    entry = episode.end(14.0, TWO, (0, 0), slow)
    assert (entry.delay_removed_ms, entry.delay_max_ms, entry.line_share) == (100.0, 700.0, 0.25)
