"""Which tracks players of FLV are told of, and that they get all that came before: no sockets, no time that passes."""

from __future__ import annotations

import gc

import pytest
from http_kit import METADATA, UPGRADE, MemoryPlayer, Publisher, send_frames
from live_kit import AAC_HEADER, AVC_HEADER, World, audio, key

from flowctl.core.outgoing.streamlog import CacheLimits, Entry
from flowctl.live.config import LiveConfig
from flowctl.live.httpd.formats import CHUNKS, settled_tracks
from flowctl.live.settings.renditions import RenditionNames
from flowctl.live.stream import Stream
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_DATA_AMF0, TYPE_VIDEO

NAMES_BOTH = encode("onMetaData", {"videocodecid": 7.0, "audiocodecid": 10.0})
BOTH = {"audio", "video"}


SOUND = (TYPE_AUDIO, AAC_HEADER, audio)
PICTURES = (TYPE_VIDEO, AVC_HEADER, key)


@pytest.fixture(params=["", UPGRADE], ids=["chunks", "frames"])
def headers(request):
    return request.param


@pytest.fixture
def world():
    return World(LiveConfig(renditions=RenditionNames(suffixes=("_1080", "_720"))))


@pytest.mark.parametrize(
    ("track", "told", "asked", "published"),
    [
        (SOUND, {"audio"}, "live/room", "live/room"),
        (PICTURES, {"video"}, "live/room", "live/room"),
        (PICTURES, {"video"}, "live/show", "live/show_720"),
        (SOUND, {"audio"}, "live/show", "live/show_720"),
    ],
)
@pytest.mark.parametrize("count", [4, 40])
def test_player_that_waited_when_one_track_comes_is_told_of_it_alone_and_gets_all(
    world, headers, track, told, asked, published, count
):
    """Also of one that ends before it is known that no other track comes, and of several renditions."""
    type_id, header, make = track
    player = MemoryPlayer(world, headers, asked)
    publisher = Publisher(world, published, headers=False)
    publisher.send(TYPE_DATA_AMF0, METADATA)
    publisher.send(type_id, header)
    sent = send_frames(world, publisher, count, make, type_id)
    assert (player.flags is None) == (count == 4)
    publisher.end()
    world.run(3.0)
    assert player.flags == told
    assert player.payloads == [header, *sent]
    assert player.connection.ended is not None


@pytest.mark.parametrize(("asked", "published"), [("live/room", "live/room"), ("live/show", "live/show_720")])
def test_player_that_waited_when_its_thread_is_late_gets_what_was_over_before_it_ran(world, headers, asked, published):
    player = MemoryPlayer(world, headers, asked)
    publisher = Publisher(world, published, headers=False)
    publisher.send(TYPE_VIDEO, AVC_HEADER)
    publisher.send(TYPE_VIDEO, key(b"one"))
    publisher.end()
    Publisher(world, published).send(TYPE_VIDEO, key(b"two"))
    world.run()
    assert (player.flags, player.payloads) == ({"video"}, [AVC_HEADER, key(b"one")])
    assert player.connection.ended is not None


def test_player_that_waited_when_it_leaves_before_its_tracks_are_known_leaves_nothing_in_a_set(world, headers):
    player = MemoryPlayer(world, headers, "live/show")
    send_frames(world, Publisher(world, "live/show_720", headers=False), 4)
    renditions = world.hub.renditions.find(world.stream("live/show"))
    assert list(renditions._formats) == [player.form.name]
    player.wire.ended = True
    world.run()
    assert renditions._formats == {}


def test_player_that_waited_when_its_publisher_begins_anew_gets_what_came_before_too(world, headers):
    player = MemoryPlayer(world, headers)
    publisher = Publisher(world, headers=False)
    sent = send_frames(world, publisher, 4)
    world.hub.restart(publisher.stream, publisher)
    publisher.send(TYPE_AUDIO, AAC_HEADER)
    sent += [AAC_HEADER, *send_frames(world, publisher, 4)]
    assert (player.flags, player.payloads) == (BOTH, sent)


@pytest.mark.parametrize(("metadata", "told"), [(NAMES_BOTH, BOTH), (METADATA, {"video"})], ids=["named", "unnamed"])
def test_player_of_a_running_stream_when_its_tracks_are_known_is_told_at_once(world, headers, metadata, told):
    """Sound that is named is believed to come."""
    publisher = Publisher(world, headers=False)
    publisher.send(TYPE_DATA_AMF0, metadata)
    publisher.send(TYPE_VIDEO, AVC_HEADER)
    sent = send_frames(world, publisher, 12)
    player = MemoryPlayer(world, headers)
    assert (player.flags, player.payloads) == (told, [AVC_HEADER, sent[-1]])


def test_player_when_more_comes_than_is_held_for_it_is_told_of_what_there_is(world, headers):
    player = MemoryPlayer(world, headers)
    publisher = Publisher(world, headers=False)
    send_frames(world, publisher, 4, size=CacheLimits().size_bytes // 5)
    assert player.flags is None
    send_frames(world, publisher, 2, size=CacheLimits().size_bytes // 5)
    assert player.flags == {"video"}


@pytest.mark.parametrize("leaves", [False, True])
def test_log_when_players_that_waited_have_begun_or_left_is_held_for_them_no_longer(world, headers, leaves):
    player = MemoryPlayer(world, headers)
    publisher = Publisher(world, headers=False)
    send_frames(world, publisher, 4)
    if leaves:
        player.wire.ended = True
    sent = send_frames(world, publisher, 100)
    assert (player.connection.ended is not None) == leaves
    assert player.flags == (None if leaves else {"video"})
    gc.collect()
    held = [item for item in gc.get_objects() if isinstance(item, Entry) and any(map(item.wire.__contains__, sent))]
    assert len(held) < 20


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([(3.0, TYPE_VIDEO, AVC_HEADER), (3.5, TYPE_AUDIO, AAC_HEADER)], {2.9: set(), 3.4: set(), 3.5: BOTH}),
        ([(3.0, TYPE_VIDEO, AVC_HEADER), (9.0, TYPE_VIDEO, key())], {8.0: set(), 9.9: set(), 10.1: {"video"}}),
        ([(0.0, TYPE_AUDIO, audio()), (2.5, TYPE_VIDEO, AVC_HEADER)], {0.9: set(), 1.5: {"audio"}, 2.5: BOTH}),
        ([(0.0, TYPE_DATA_AMF0, NAMES_BOTH), (1.0, TYPE_VIDEO, key())], {0.0: BOTH, 10.9: BOTH, 11.1: {"video"}}),
        ([(0.0, TYPE_AUDIO, AAC_HEADER), (1.0, TYPE_VIDEO, key())], {0.0: set(), 10.9: BOTH, 11.1: {"video"}}),
        ([(0.0, TYPE_AUDIO, b""), (0.0, TYPE_VIDEO, key())], {0.9: set(), 1.1: {"video"}}),
        ([(0.0, TYPE_DATA_AMF0, METADATA)], {19.9: set(), 20.1: BOTH}),
    ],
)
def test_tracks_when_players_are_told_of_them_are_sent_or_told_of(told, expected):
    stream, publisher, found = Stream("live/a", LiveConfig(), 0.0), object(), {}
    log = stream.join_format(CHUNKS).log
    first = log.tail
    stream.take_over(publisher, 0.0)
    for at in sorted({*expected, *(when for when, _, _ in told)}):
        for when, type_id, payload in told:
            if when == at:
                stream.publish(publisher, type_id, 0, payload, at)
        found[at] = set(settled_tracks(stream, at, log, first))
    assert {at: found[at] for at in expected} == expected


def test_tracks_when_another_publisher_takes_over_are_its_own():
    stream = Stream("live/a", LiveConfig(), 0.0)
    log = stream.join_format(CHUNKS).log
    stream.take_over(first := object(), 0.0)
    stream.publish(first, TYPE_DATA_AMF0, 0, NAMES_BOTH, 0.0)
    stream.stand_by(second := object())
    stream.publish(second, TYPE_AUDIO, 0, AAC_HEADER, 1.0)
    stream.take_over(second, 2.0)
    stream.publish(second, TYPE_AUDIO, 0, audio(), 2.0)
    assert [set(settled_tracks(stream, at, log, log.tail)) for at in (2.5, 3.1)] == [set(), {"audio"}]
