"""Streams of several workers as one: two live servers and the desk of their supervisor, in one process."""

import threading
from pathlib import Path

import pytest
from follow_kit import (
    HEADERS,
    LIMIT_S,
    Client,
    close_clients,
    numbers,
    pictures,
    player,
    playing,
    publisher,
    server,
    until,
)

from flowctl.control.summary import figures_of
from flowctl.core.flow.limits import AxisLimits, Limits
from flowctl.live.cluster.names.desk import NamesDesk
from flowctl.live.cluster.names.directory import NoticeKind
from flowctl.live.cluster.workers.streams import WorkerStreams
from flowctl.live.config import SecondPublisher
from flowctl.pollgroup import PollGroup
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.events import StreamEnded


class Workers:
    """Workers 1 and 2, and a desk on a thread of its own."""

    def __init__(self, folder: Path, **fields):
        self.group = PollGroup("desk")
        self.group.start()
        self.servers, self.streams = {}, {}
        self.fields, self.folder = fields, folder
        self.desk = NamesDesk(server_config(**fields), self.send)
        self.ticks = threading.Event()
        self.group.call_soon(self.tick)
        for serial in (1, 2):
            self.add(serial)

    def add(self, serial):
        made = server(**self.fields)
        self.streams[serial] = WorkerStreams(
            made, serial, self.folder, lambda values: self.group.call_soon(self.desk.asked, serial, values)
        )
        self.servers[serial] = made
        made.start()

    def send(self, serial, values):
        if serial in self.streams:
            self.streams[serial].handle_notice(values)

    def tick(self):
        self.desk.tick()
        self.group.call_later(0.02, self.tick)

    def address(self, serial):
        return self.servers[serial].address

    def kill(self, serial):
        """End a worker as if it had been killed: its desk learns of it, and nothing else is said."""
        links = self.streams.pop(serial)._links
        victim = self.servers.pop(serial)
        victim.hub.names = victim.hub.demand = None
        links.stop()
        for link in tuple(links._connections):
            link.close(CloseReason.KICKED, "killed")  # before its publishers end, which nobody is to be told
        until(lambda: links.count == 0)
        victim.stop(0.2)
        self.group.call_soon(self.desk.gone, serial)

    def follows(self, serial):
        return self.streams[serial].statistics()

    def close(self):
        close_clients()
        for item in self.servers.values():
            item.stop(1.0)
        self.group.stop()


def server_config(**fields):
    made = server(**fields)
    made.close_listeners()
    return made.config


@pytest.fixture
def workers(tmp_path, request):
    """Two workers; a test may name settings of theirs."""
    made = Workers(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


def with_settings(**fields):
    return pytest.mark.parametrize("workers", [fields], indirect=True, ids=[""])


def shown(workers, *serials, count=5, last=0):
    """Publish in worker 1; return the publisher, and viewers in workers that have seen the pictures."""
    source = publisher(workers.address(1))
    source.put(*HEADERS, *pictures(last, count))
    viewers = [playing(workers.address(serial)) for serial in serials]
    until(lambda: all(numbers(item.media)[-1:] == [count - 1] for item in viewers))
    return source, *viewers


def ends(source):
    source.session.close_stream()
    source.flush()


def refused(client):
    return [item for item in client.events if type(item).__name__ == "Rejected"]


def test_viewer_when_the_stream_is_in_another_worker_gets_it_byte_for_byte(workers):
    source = publisher(workers.address(1))
    source.put(*HEADERS, *pictures(0, 15))
    viewer = playing(workers.address(2))
    until(lambda: numbers(viewer.media)[-1:] == [14])
    source.put(*pictures(15, 20))
    until(lambda: numbers(viewer.media)[-1:] == [19])
    assert viewer.media == HEADERS + pictures(numbers(viewer.media)[0], 20)


def test_viewer_when_it_waits_gets_a_stream_that_starts_later_elsewhere(workers):
    viewer = player(workers.address(2))
    until(lambda: workers.servers[2].hub.is_viewed("live/room"))
    shown(workers)
    until(lambda: numbers(viewer.media) == [0, 1, 2, 3, 4])
    assert viewer.media == HEADERS + pictures(0, 5)


def test_link_when_the_last_viewer_has_left_ends(workers):
    workers.streams[2]._following._linger_s = 0.05
    shown(workers)
    viewer = playing(workers.address(2))
    until(lambda: workers.streams[1]._links.count == 1)
    viewer.close()
    until(lambda: workers.streams[1]._links.count == 0)
    assert workers.follows(2) == {}
    until(lambda: workers.servers[2].hub.find_stream("live/room") is None)


def test_link_when_looked_at_is_no_viewer_and_no_connection(workers):
    shown(workers, 2)
    first, second = (workers.servers[serial].hub.find_stream("live/room") for serial in (1, 2))
    assert (first.viewers, len(workers.servers[1].connections())) == ({}, 1)
    assert (second.publisher.peer, len(second.viewers)) == (("follows worker 1", 0), 1)
    assert [figures_of(workers.servers[serial])["streams"] for serial in (1, 2)] == [1, 0]


def test_second_publisher_when_in_another_worker_is_refused(workers):
    shown(workers)
    second = Client(workers.address(2), ask="publish")
    until(lambda: refused(second))
    assert "published already" in refused(second)[0].description


@with_settings(second_publisher=SecondPublisher.REPLACE)
def test_second_publisher_when_replacing_ends_the_one_in_the_other_worker(workers, tmp_path):
    first, *viewers = shown(workers, 1, 2)
    second = publisher(workers.address(2))
    second.put(*HEADERS, *pictures(50, 55))
    until(lambda: first.over and all(numbers(item.media)[5:] == [50, 51, 52, 53, 54] for item in viewers))
    assert not any(item.has(StreamEnded) for item in viewers)


@with_settings(second_publisher=SecondPublisher.STANDBY)
def test_standby_when_in_another_worker_takes_over(workers, tmp_path):
    first = publisher(workers.address(1))
    first.put(*HEADERS, *pictures(0, 5))
    viewers = [playing(workers.address(serial)) for serial in (1, 2)]
    second = publisher(workers.address(2))
    second.put(*HEADERS)
    until(lambda: all(len(numbers(item.media)) == 5 for item in viewers))
    first.close()
    until(lambda: workers.desk.directory.published() == {"live/room": 2})
    second.put(*pictures(50, 55))
    until(lambda: all(numbers(item.media)[5:] == [50, 51, 52, 53, 54] for item in viewers))
    assert not any(item.has(StreamEnded) for item in viewers)


def test_publisher_when_back_in_another_worker_goes_on_for_all_viewers(workers):
    first, *viewers = shown(workers, 1, 2)
    first.close()
    until(lambda: workers.desk.directory._book.is_kept("live/room"))
    again = publisher(workers.address(2))
    again.put(*HEADERS, *pictures(0, 5))
    until(lambda: all(len(numbers(item.media)) == 10 for item in viewers))
    assert not any(item.has(StreamEnded) for item in viewers)
    for viewer in viewers:
        times = [timestamp for type_id, timestamp, payload in viewer.media if type_id == 9 and payload[1] == 1]
        assert times == sorted(times)


def test_viewers_when_the_worker_of_their_publisher_is_killed_wait_and_go_on(workers):
    _, viewer = shown(workers, 2)
    workers.kill(1)
    until(lambda: "nobody publishes" in workers.follows(2)["live/room"].why)
    workers.add(3)
    again = publisher(workers.address(3))
    again.put(*HEADERS, *pictures(50, 55))
    until(lambda: numbers(viewer.media)[5:] == [50, 51, 52, 53, 54])
    assert not viewer.has(StreamEnded)


def test_viewers_when_the_publisher_leaves_for_good_are_told_in_all_workers(workers):
    source, *viewers = shown(workers, 1, 2)
    ends(source)
    until(lambda: all(item.has(StreamEnded) for item in viewers))
    assert workers.desk.directory.published() == {}


def test_viewers_when_the_desk_tells_of_the_end_before_the_link_get_the_last_pictures(workers):
    """That nobody publishes any more is heard by another way than the pictures: those still under way are shown."""
    source, viewer = shown(workers, 2)
    workers.streams[2].handle_notice({"tell": NoticeKind.WHERE.value, "name": "live/room", "value": 0, "keep": False})
    until(lambda: workers.streams[2]._following._wanted["live/room"].follow._parked)
    source.put(*pictures(5, 30))
    ends(source)
    until(lambda: viewer.has(StreamEnded))
    assert numbers(viewer.media) == list(range(30))


@pytest.mark.parametrize("told", [[3], [0, 3]])
def test_viewers_when_a_publisher_begins_elsewhere_get_the_last_pictures_of_the_one_before(workers, told):
    workers.streams[2]._following._hold_s = LIMIT_S
    source, viewer = shown(workers, 2)
    streams = workers.streams.pop(2)  # the desk tells it no more
    for value in told:
        streams.handle_notice({"tell": NoticeKind.WHERE.value, "name": "live/room", "value": value, "keep": False})
    until(lambda: streams.statistics()["live/room"].source == "worker 3")
    source.put(*pictures(5, 30))
    until(lambda: numbers(viewer.media) == list(range(30)))
    ends(source)
    until(lambda: workers.desk.directory.published() == {})
    workers.add(3)
    again = publisher(workers.address(3))
    again.put(*HEADERS, *pictures(50, 55))
    until(lambda: numbers(viewer.media)[30:] == [50, 51, 52, 53, 54])
    until(lambda: workers.streams[1]._links.count == 0)
    assert not viewer.has(StreamEnded)


def test_publish_when_the_desk_does_not_answer_is_refused_in_time(workers, monkeypatch):
    monkeypatch.setattr("flowctl.live.session._NAME_WAIT_S", 0.05)
    workers.servers[1].hub.names._send = lambda values: None
    client = Client(workers.address(1), ask="publish")
    until(lambda: refused(client))
    assert "in time" in refused(client)[0].description
    assert workers.servers[1].hub.names._claims == {}


def test_owner_when_its_old_connection_is_silent_takes_its_name_back_elsewhere(workers):
    (first,) = shown(workers)
    until(lambda: workers.servers[1].hub.is_published("live/room"))
    until(lambda: workers.servers[1].hub.silent("live/room"))
    publisher(workers.address(2))
    until(lambda: workers.desk.directory.published() == {"live/room": 2})
    until(lambda: first.over)
    assert first.over


@with_settings(rtmp={"credentials": {"ann": "secret"}})
def test_links_when_the_login_is_needed_for_clients_need_none(workers, tmp_path):
    link = Client(None, ask="play", path=str(tmp_path / "link-1.sock"))
    until(lambda: any(type(item).__name__ == "PlayStarted" for item in link.events))
    publishing = Client(None, ask="publish", path=str(tmp_path / "link-1.sock"))
    until(lambda: refused(publishing))
    assert workers.streams[1]._links.count == 2


def test_link_when_viewers_are_flushed_seldom_is_written_as_seldom(workers):
    """A link is no busier than the viewers beside it: theirs elsewhere wait as long, and begin when it is written."""
    shown(workers, 1, 2)
    stream = next(iter(workers.servers[1].hub.streams()))
    usual, link = stream._wires[1], stream._wires[-1]
    assert (link.for_links, link.wire_format.name, link.fanouts.beside) == (True, "1", usual.fanouts)
    usual.fanouts.active[0].pacing.interval_s = 0.04
    assert link.fanouts.active[0]._least_s() == 0.04


def test_link_when_its_reader_stands_still_is_cut_and_goes_on_with_the_cache(workers, monkeypatch):
    monkeypatch.setattr(
        "flowctl.live.cluster.links.LINK_LIMITS",
        Limits(size=AxisLimits(hard=20_000, low=1, name="bytes"), target_delay_ms=0),
    )
    source, witness, viewer = shown(workers, 1, 2)
    follow = workers.streams[2]._following._wanted["live/room"].follow
    link = follow._link.connection
    link.call_soon(link.receiver.pause, "test", "stands still")
    cut, number = workers.streams[1]._links, 5
    while cut.count and number < 100_000:
        # Not tiny: of those a publisher may send few in a second.
        large = [(kind, at, data[:-8] + bytes(400) + data[-8:]) for kind, at, data in pictures(number, number + 50)]
        source.put(*large)
        number += 50
        # What is still under way from the publisher when the link is made again would cut the next one as well.
        until(lambda number=number: numbers(witness.media)[-1:] == [number - 1])
    link.call_soon(link.receiver.resume, "test")
    until(lambda: follow.statistics().connections == 2)
    source.put(*pictures(number, number + 20))
    until(lambda: numbers(viewer.media)[-1:] == [number + 19])
    statistics = follow.statistics()
    # Faster than any clock: it looks like another timeline.
    assert (statistics.connections, statistics.gaps + statistics.restarts) == (2, 1)
    found = numbers(viewer.media)
    assert found == sorted(set(found))
