"""What observers of live sessions are told, and that a server counts the same without any."""

from __future__ import annotations

from live_kit import World, audio, config, inter, key

from flowctl.core.flow.state import MessageClass
from flowctl.live.playing import CONTROL_LANE


class Listener:
    """An observer that writes down the name of each call and what it says beside the connection."""

    def __init__(self) -> None:
        self.heard = []

    def __getattr__(self, name):
        def hear(connection, *said, **more):
            self.heard.append((name, connection.number, *said, *more.values()))

        return hear

    def names(self, *wanted):
        """Return the names of the calls, or the calls with the wanted names."""
        return [item for item in self.heard if item[0] in wanted] if wanted else [item[0] for item in self.heard]


def observed(settings=None, count=1, **more):
    world = World(settings, **more)
    world.hub.observers = tuple(Listener() for _ in range(count))
    return world, *world.hub.observers


def test_observers_when_a_player_waits_and_plays_hear_of_its_life_in_order():
    world, first, second = observed(count=2)
    player = world.player()
    assert first.names("play_started") == []
    publisher = world.publisher()
    assert [item[1:3] for item in first.names("play_started")] == [(player.connection.number, "live/room")]
    assert [item[1:3] for item in first.names("publish_started")] == [(publisher.connection.number, "live/room")]
    publisher.video(0, key())
    publisher.video(40, inter())
    publisher.audio(40, audio())
    before = len(first.heard)
    player.leave()
    assert first.names()[before - 1 :][-1] == "closed"
    mine = [item for item in first.heard if item[1] == player.connection.number]
    assert (mine[0][0], mine[-1][0]) == ("opened", "closed")
    assert first.heard == second.heard


def test_observers_when_a_limit_is_hit_hear_of_it_once(monkeypatch):
    monkeypatch.setattr("flowctl.live.hub.MOST_STREAMS", 1)
    world, ears = observed(config(wire={"player_wait_s": 5.0}))
    player = world.player()
    world.player("live/other")
    assert [item[2:5] for item in ears.names("limit_hit")] == [("streams", 2, 1)]
    world.run(6.0)
    assert player.ended is not None
    assert [item[2:5] for item in ears.names("limit_hit")][1:] == [("player_wait_s", 5.0, 5.0)]


def test_flood_of_the_control_lane_when_nothing_observes_is_counted_all_the_same():
    world = World()
    player = world.player()
    player.wire.room = 0
    for _ in range(1100):
        player.live.connection.sender.send(b"y" * 300, MessageClass.CONTROL)
    world.run(1.0)
    assert world.hub.limits_hit == {CONTROL_LANE: 1}
