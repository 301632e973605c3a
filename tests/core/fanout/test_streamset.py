"""Sets of renditions: viewers change over at key frames, with every sound message once, and nothing lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from flow_kit import KEY, check_accounts, check_edges
from set_kit import RESTART, SOUND, Connection, Show, choose

from flowctl.core.flow.ledger import LedgerKind
from flowctl.errors import LocalProtocolError
from flowctl.streamset import StreamSet
from flowctl.testing import ManualGroup


def pieces(connection):
    """Return what a viewer received as (origin, class, time), and check that each hop begins with headers and a key."""
    check_accounts(connection.viewer)
    check_edges(connection.viewer)
    frames = connection.viewer.frames
    pictures = [(origin, item) for origin, item, _, _ in frames if origin != SOUND]
    for before, (origin, item) in pairwise(pictures):
        if origin not in (before[0], RESTART):
            assert (before[0], item) == (RESTART, KEY)
    return frames


def sound_times(connection):
    return [number for origin, _, number, _ in pieces(connection) if origin == SOUND]


def picture_times(connection):
    return [number for origin, _, number, _ in pieces(connection) if origin not in (SOUND, RESTART)]


def gapless(times, step):
    return times == list(range(times[0], times[-1] + step, step))


@pytest.fixture
def show():
    show = Show()
    show.run(5.0)
    return show


def test_viewer_when_it_joins_begins_in_the_smallest_and_is_sent_its_cache(show):
    one = show.join()
    show.run(1.0)
    assert one.place.rendition == "360"
    assert {origin for origin, *_ in pieces(one)} == {RESTART, SOUND, b"a"}
    assert gapless(picture_times(one), 40)
    assert gapless(sound_times(one), 20)


def test_viewer_when_another_is_chosen_changes_over_at_the_next_key_frame(show):
    one = show.join()
    show.run(0.5)
    choose(one, "720")
    show.run(0.4)
    assert one.sender.guided
    assert one.place.rendition == "360"
    show.run(2.0)
    assert one.place.rendition == "720"
    assert not one.sender.guided
    assert one.sender.following is show.logs["720"]
    frames = pieces(one)
    assert [origin for origin, item, *_ in frames if item is KEY] == [b"a", b"b"]
    assert gapless(picture_times(one), 40)
    assert gapless(sound_times(one), 20)
    assert [entry.why for entry in one.sender.ledger() if entry.kind is LedgerKind.SWITCH] == [
        "rendition 360 to 720: the test wants it"
    ]
    assert show.set.find("720").fanouts.on(show.group).statistics().members == 1
    assert not show.set.find("360").fanouts.active


def test_order_when_rates_are_not_known_yet_is_by_what_has_come():
    """So a viewer of the first seconds is told of how many renditions its own is one."""
    show = Show()
    one = show.join()
    show.run(0.1)
    assert list(show.set.rates()) == []
    assert show.set.order() == ["360", "720"]
    assert one.renditions.describe(one.sender.host.now()).startswith("rendition 360 of 2 for ")
    show.run(10.0)
    assert show.set.order() == list(show.set.rates()) == ["360", "720"]


def test_view_when_the_set_is_empty_is_refused():
    connection = Connection(ManualGroup())
    with pytest.raises(LocalProtocolError):
        StreamSet().view(connection)
    assert connection.place is None
