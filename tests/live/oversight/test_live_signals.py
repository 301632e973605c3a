"""Signals about viewers: to the application's callbacks, and to publishers that ask for them."""

from __future__ import annotations

import pytest
from live_kit import inter, key

from flowctl.live.judging.shares import ShareSettings
from flowctl.live.oversight.signals import EVENT_NAME, publisher_settings
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.wire import TYPE_DATA_AMF0


def look(world, seconds=1.0):
    world.run(seconds)
    world.hub.oversight.look()
    world.run()


def told(peer):
    """Return the properties of the messages about viewers that a publisher got."""
    values = [amf0.decode(message.payload) for message in peer.media if message.type_id == TYPE_DATA_AMF0]
    return [value[1] for value in values if value[0] == EVENT_NAME]


def stall(world, publisher, viewer):
    viewer.reads = False
    viewer.wire.room = len(viewer.wire.down)
    for index in range(5):
        publisher.video(index * 40, inter(b"i", 500) if index else key(b"k", 500))


def test_subscriber_when_a_viewer_becomes_slow_is_told_the_shares(world):
    calls = []
    subscription = world.hub.oversight.signals.subscribe(calls.append, stream="live/room")
    publisher = world.publisher()
    look(world)
    assert calls == []
    viewer = world.player()
    world.player()
    look(world)
    stall(world, publisher, viewer)
    look(world)
    assert [(item.viewers, item.states) for item in calls] == [(2, (2, 0, 0, 0)), (2, (1, 1, 0, 0))]
    subscription.cancel()
    viewer.leave()
    look(world)
    assert len(calls) == 2


def test_subscriber_when_of_all_streams_is_told_of_each_on_its_own(world):
    calls = []
    world.hub.oversight.signals.subscribe(calls.append, settings=ShareSettings(interval_s=0))
    first = world.player("live/one")
    world.player("live/two")
    look(world)
    assert sorted(item.stream for item in calls) == ["live/one", "live/two"]
    first.leave()
    look(world)
    look(world)
    world.player("live/one")
    look(world)
    assert [item.stream for item in calls[2:]] == ["live/one"]


def test_subscriber_when_it_raises_is_reported_and_others_are_told(world):
    reports, calls = [], []

    def broken(shares):
        raise ValueError("no")

    world.hub.oversight.report = lambda where, error: reports.append((where, str(error)))
    world.hub.oversight.signals.subscribe(broken)
    world.hub.oversight.signals.subscribe(calls.append)
    world.player()
    look(world)
    assert reports == [("subscriber of viewer shares", "no")]
    assert len(calls) == 1


def test_publisher_when_it_asks_is_told_and_others_are_not(world):
    asking = world.publisher("live/room?viewer_states=2")
    silent = world.publisher("live/other")
    viewer = world.player()
    world.player("live/other")
    look(world, 3.0)
    stall(world, asking, viewer)
    look(world, 0.5)
    assert len(told(asking)) == 1  # not sooner than asked for
    look(world, 3.0)
    assert [(item["viewers"], item["ready"], item["overloaded"]) for item in told(asking)] == [
        (1.0, 1.0, 0.0),
        (1.0, 0.0, 1.0),
    ]
    assert {item["missingPictures"] for item in told(asking)} == {0.0}
    assert told(silent) == []


def test_publisher_when_it_has_gone_is_not_told_any_more(world):
    publisher = world.publisher("live/room?viewer_states=2")
    assert world.hub.oversight.signals.wanted
    publisher.leave()
    assert not world.hub.oversight.signals.wanted


@pytest.mark.parametrize(
    ("text", "interval_s"), [("", 5), ("soon", 5), ("nan", 5), ("-1", 5), ("0.1", 2), ("10", 10), ("1e9", 3600)]
)
def test_interval_when_a_publisher_asks_for_it_is_kept_within_bounds(text, interval_s):
    assert publisher_settings(text).interval_s == interval_s
