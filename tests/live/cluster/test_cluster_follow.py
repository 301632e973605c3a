"""Following a stream of another server, over TCP between two servers in one process."""

import pytest
from follow_kit import HEADERS, Client, close_clients, numbers, pictures, player, playing, publisher, server, until

from flowctl.core.outcomes.backoff import Backoff
from flowctl.live.cluster.follow import FollowState, Source, StreamFollower
from flowctl.live.publishing import HubSink
from flowctl.wire.rtmp.events import StreamEnded
from flowctl.wire.rtmp.url import parse_url

FAST = Backoff(first_s=0.01, most_s=0.05)


class Pair:
    """A server that has a stream, and another one that follows it."""

    def __init__(self, **fields):
        self.origin, self.local = server(), server(**fields)
        for item in (self.origin, self.local):
            item.start()
        self.follow = self.make(self.origin.address)

    def make(self, address, **more):
        source = Source(parse_url(f"rtmp://{address[0]}:{address[1]}/live/room"))
        sink = HubSink(self.local.hub, "live/room", source)
        return StreamFollower(source, sink, self.local.groups.groups[0], **{"backoff": FAST, **more})

    def state(self):
        return self.follow.statistics().state

    def close(self):
        self.follow.stop()
        close_clients()
        for item in (self.local, self.origin):
            item.stop(1.0)

    def begin(self, first=0, last=5, **more):
        """Publish at the origin and follow; return the publisher, and a viewer that has seen the pictures."""
        source = publisher(self.origin.address)
        source.put(*HEADERS, *pictures(first, last))
        if more:
            self.follow = self.make(self.origin.address, **more)
        self.follow.start()
        until(lambda: self.state() is FollowState.RUNNING)
        viewer = playing(self.local.address)
        until(lambda: len(numbers(viewer.media)) == last - first)
        return source, viewer


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def in_order(viewer):
    times = [timestamp for type_id, timestamp, payload in viewer.media if type_id == 9 and payload[1] == 1]
    return times == sorted(times)


def test_stream_when_followed_reaches_viewers_byte_for_byte(pair):
    source = publisher(pair.origin.address)
    source.put(*HEADERS, *pictures(0, 15))
    pair.follow.start()
    until(lambda: pair.follow.statistics().messages >= 13)
    viewer = playing(pair.local.address)
    source.put(*pictures(15, 20))
    until(lambda: len(viewer.media) >= 23)
    assert viewer.media == HEADERS + pictures(10, 20)


def test_follow_when_the_connection_breaks_loses_and_doubles_nothing(pair):
    source = publisher(pair.origin.address)
    source.put(*HEADERS, *pictures(0, 12))
    viewer = playing(pair.local.address)
    pair.follow.start()
    until(lambda: len(numbers(viewer.media)) >= 2)
    pair.origin.kick(lambda connection: "follow" in getattr(connection.session, "user_agent", ""))
    source.put(*pictures(12, 18))
    until(lambda: numbers(viewer.media)[-1:] == [17])
    assert viewer.media == HEADERS + pictures(numbers(viewer.media)[0], 18)
    statistics = pair.follow.statistics()
    assert (statistics.connections, statistics.gaps, statistics.restarts) == (2, 0, 0)


def test_follow_when_the_source_lets_go_again_and_again_waits_longer_each_time(pair):
    """A connection that brought something and ended at once counts as a try: the wait before the next one grows."""
    waits = []

    class Noted(Backoff):
        def delay_s(self, tries, rng):
            waits.append(tries)
            return 0.01

    pair.follow = pair.make(pair.origin.address, backoff=Noted())
    source = publisher(pair.origin.address)
    source.put(*HEADERS, *pictures(0, 12))
    pair.follow.start()
    for count in range(1, 4):
        until(lambda count=count: pair.follow.statistics().connections == count)
        until(lambda: pair.state() is FollowState.RUNNING)
        pair.origin.kick(lambda connection: "follow" in getattr(connection.session, "user_agent", ""))
        until(lambda count=count: len(waits) >= count)
    assert waits == [2, 3, 4]


def test_follow_when_the_source_is_late_waits_for_it(pair):
    address = pair.origin.address
    pair.origin.stop(1.0)
    pair.follow.start()
    until(lambda: pair.follow.statistics().tries >= 3)
    assert "cannot connect" in pair.follow.statistics().why or pair.state() is FollowState.CONNECTING
    again = pair.origin = server(port=address[1])
    again.start()
    source = publisher(again.address)
    viewer = player(pair.local.address)
    source.put(*HEADERS, *pictures(0, 5))
    until(lambda: numbers(viewer.media) == [0, 1, 2, 3, 4])


def test_viewers_when_the_source_ends_the_stream_are_told_and_then_go_on(pair):
    source, viewer = pair.begin()
    source.session.close_stream()
    source.flush()
    until(lambda: viewer.has(StreamEnded))
    again = publisher(pair.origin.address)
    again.put(*HEADERS, *pictures(0, 5))
    until(lambda: len(numbers(viewer.media)) == 10)
    assert in_order(viewer)


def test_viewers_when_the_source_stays_away_are_told_after_the_hold(pair):
    _, viewer = pair.begin(hold_s=0.3)
    pair.origin.stop(0.5)
    until(lambda: pair.state() is FollowState.RESTING)
    assert pair.local.hub.is_published("live/room")
    until(lambda: viewer.has(StreamEnded))


def test_timeline_when_the_source_comes_back_as_another_goes_on(pair):
    _, viewer = pair.begin(100, 105)
    address = pair.origin.address
    pair.origin.stop(0.5)
    pair.origin = server(port=address[1])
    pair.origin.start()
    again = publisher(pair.origin.address)
    again.put(*HEADERS, *pictures(0, 5))
    until(lambda: len(numbers(viewer.media)) == 10)
    assert in_order(viewer)
    assert not viewer.has(StreamEnded)
    assert pair.follow.statistics().restarts == 1


def test_follow_when_the_name_is_published_here_gives_way(pair):
    own = publisher(pair.local.address)
    own.put(*HEADERS, *pictures(0, 3))
    source = publisher(pair.origin.address)
    source.put(*HEADERS, *pictures(50, 55))
    pair.follow.start()
    until(lambda: "published here" in pair.follow.statistics().why)
    viewer = playing(pair.local.address)
    until(lambda: len(numbers(viewer.media)) == 3)
    assert numbers(viewer.media) == [0, 1, 2]


def test_publisher_when_the_name_is_followed_here_is_refused(pair):
    pair.begin()
    stranger = Client(pair.local.address, ask="publish")
    until(lambda: any(type(item).__name__ == "Rejected" for item in stranger.events))
    assert pair.local.hub.publisher_of("live/room")[0].startswith("follows ")


def test_follow_when_stopped_ends_the_stream_and_the_connection(pair):
    pair.begin()
    pair.follow.stop("not wanted any more")
    until(lambda: not pair.local.hub.is_published("live/room"))
    until(lambda: len(pair.origin.connections()) == 1)
    assert pair.follow.statistics().why == "not wanted any more"
