"""Work that peers of the live server cause: done in turns, slowed, cut, told; and what is much and need not be done."""

from __future__ import annotations

import pytest
import structlog
from live_kit import World, audio, config, key

from flowctl.core.loop.work import PER_CONNECTION, WorkLimits
from flowctl.live.stream import Stream
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.messages import split_aggregate
from flowctl.wire.rtmp.wire import TYPE_AGGREGATE, TYPE_AUDIO, Message


def aggregate(bodies, stream_id=1):
    """Return an aggregate of audio messages."""
    parts = b"".join(
        b"\x08" + len(body).to_bytes(3, "big") + index.to_bytes(3, "big") + bytes(4) + body + bytes(4)
        for index, body in enumerate(bodies)
    )
    return Message(4, 0, TYPE_AGGREGATE, stream_id, parts)


@pytest.fixture
def costly(monkeypatch):
    """Return a function that makes each published message of a world take some time of the thread."""

    def make(world, seconds):
        publish = Stream.publish

        def slow(self, *arguments):
            world.clock.advance(seconds)
            return publish(self, *arguments)

        monkeypatch.setattr(Stream, "publish", slow)

    return make


def test_aggregate_when_it_holds_thousands_is_taken_in_turns_and_in_order(costly):
    world = World(config(work=WorkLimits(share_per_connection=0, share_per_address=0)))
    publisher, viewer = world.publisher(), world.player()
    costly(world, 0.00005)
    bodies = [audio(b"%d" % number) for number in range(4096)]
    publisher.send(publisher.session.send_message(aggregate(bodies)), run=False)
    delete = commands.command("deleteStream", 0, None, float(publisher.session.stream_id))
    publisher.send(publisher.session.send_message(delete), run=False)
    began = world.clock()
    turns = []
    for _ in range(3000):
        before = world.clock()
        publisher.carry()
        world.group.turn()
        viewer.carry()
        turns.append(world.clock() - before)
    assert max(turns) < 0.02
    assert sum(turn > 0 for turn in turns) > 10
    assert world.clock() - began > 0.2
    world.run(1)
    assert viewer.payloads[-4096:] == bodies
    assert world.stream().publisher is None


@pytest.mark.parametrize(("size", "hits"), [(300, {}), (1, {"messages_per_second": 1})])
def test_aggregate_when_its_parts_are_counted_is_counted_by_its_whole_length(size, hits):
    world = World(config())
    publisher, viewer = world.publisher(), world.player()
    publisher.send(publisher.session.send_message(aggregate([audio(bytes(size))] * 4000)))
    world.run(5)
    assert len(viewer.payloads) == 4002
    assert world.hub.limits_hit == hits


def test_aggregate_when_split_by_the_session_is_what_it_was_at_once(world):
    publisher, viewer = world.publisher(), world.player()
    message = aggregate([audio(b"%d" % number) for number in range(200)])
    publisher.message(message)
    expected = [(part.payload, part.timestamp) for part in split_aggregate(message)]
    assert viewer.times[-200:] == expected


def test_publisher_when_its_messages_are_much_work_is_slowed_told_and_cut(world, costly):
    """Slowed is logged and counted once, the end once more; both name the limit, and the work that was done."""
    publisher, viewer = world.publisher(), world.player()
    costly(world, 0.003)
    number = 0
    with structlog.testing.capture_logs() as lines:
        for _ in range(2000):
            if publisher.ended is not None:
                break
            if not publisher.wire.up:
                octets = [publisher.session.send_tag(8, number + index, audio()) for index in range(8)]
                publisher.send(b"".join(octets), run=False)
                number += 8
            world.run(0.01)
            slowed = publisher.connection.work.slowed_count
            assert ("input slowed" in publisher.connection.why()) is bool(slowed)
    assert publisher.ended[0] is CloseReason.LIMIT_HIT
    assert PER_CONNECTION in publisher.ended[1]
    slowed = [line for line in lines if line["event"] == "input slowed"]
    assert [line["limit"] for line in slowed] == [PER_CONNECTION]
    closed = next(line for line in lines if line["event"] == "connection closed")
    assert closed["limit"] == PER_CONNECTION
    assert closed["work_s"] == pytest.approx(publisher.connection.work.work_s, abs=0.01)
    assert world.hub.limits_hit == {PER_CONNECTION: 2}
    assert viewer.ended is None
    assert viewer.connection.work.slowed_count == 0


def test_viewers_when_their_publisher_is_slowed_are_not(world, costly):
    """What is queued for viewers is no work of theirs, and sending it to them is none of the publisher's."""
    publisher = world.publisher()
    viewers = [world.player(address="192.0.2.9") for _ in range(20)]
    costly(world, 0.0001)
    for index in range(100):
        publisher.video(index * 40, key(b"%d" % index, 2000))
    assert publisher.connection.work.work_s < 100 * 0.0001 + 0.01
    assert all(len(viewer.payloads) >= 100 for viewer in viewers)
    assert viewers[0].connection.work.work_s == 0


@pytest.mark.parametrize("count", [1, 64, 65, 1000])
def test_aggregates_when_several_come_with_media_between_keep_the_order(world, count):
    publisher, viewer = world.publisher(), world.player()
    bodies = [audio(b"%d" % number) for number in range(3 * count + 2)]
    sent = [aggregate(bodies[:count]), Message(4, 5, TYPE_AUDIO, 1, bodies[count])]
    sent += [aggregate(bodies[count + 1 : 2 * count + 1]), aggregate(bodies[2 * count + 1 : 3 * count + 1])]
    sent += [Message(4, 9, TYPE_AUDIO, 1, bodies[3 * count + 1])]
    publisher.send(b"".join(publisher.session.send_message(message) for message in sent))
    assert viewer.payloads[-len(bodies) :] == bodies
