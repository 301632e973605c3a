"""Publishers of sets that stay within every limit, and try what costs a server more than it costs them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
import structlog
from live_kit import audio, config, inter, key
from rendition_kit import NAMES, SetWorld, avc_header, choose, pictures
from test_rendition_tracks import DATA, SOUND, TrackWorld

from flowctl.core.flow.state import MessageClass
from flowctl.live.access.rules import StreamAccess
from flowctl.live.config import SecondPublisher
from flowctl.live.renditions import feeds
from flowctl.live.renditions.feeds import metadata_of_track
from flowctl.live.settings.renditions import MOST_RENDITIONS
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.media.tracks import wrap_track


def renditions_of(world):
    return world.hub.renditions.find(world.stream("live/show"))


def headers_of_one_message(count):
    """Return a message with a sequence header of H.264 for each of so many tracks."""
    parts = (
        bytes((number % 8,)) + b"\0\0\x09\x01\x64\0" + bytes((number,)) + b"\xff\xe1\0\0\x01" for number in range(count)
    )
    return b"\x96\x10avc1" + b"".join(parts)


def join_set(world, suffix, address, query=""):
    publisher = world.members[suffix] = world.connect(address).publish(f"live/show{suffix}{query}")
    publisher.video(0, avc_header(0))
    publisher.sound = False
    return publisher


def test_set_shows_no_pictures_of_another_publisher_until_its_own_have_ended():
    """Somebody else published the largest, which was free, and was seen under the name of the set."""
    world = SetWorld()
    own = world.member("_720")
    world.send(10)
    join_set(world, "_1080", "203.0.113.66")
    viewer = world.player("live/show")
    world.send(30)
    assert [item.name for item in renditions_of(world).renditions()] == ["720"]
    assert {suffix for suffix, *_ in pictures(viewer)} == {"_720"}
    assert world.hub.publisher_of("live/show_1080")[0] == "203.0.113.66"
    world.members.pop("_720")
    own.command("deleteStream", None, 1.0)
    world.run(5.0)
    world.send(30)
    assert [item.name for item in renditions_of(world).renditions()] == ["1080"]


def test_name_of_a_set_is_kept_for_its_publisher():
    world = SetWorld()
    world.member("_720")
    world.send(10)
    stranger = world.connect("203.0.113.66").publish("live/show")
    assert stranger.codes == ["NetStream.Publish.BadName"]
    assert renditions_of(world) is not None
    assert world.connect().publish("live/show").codes == []
    assert renditions_of(world) is None
    assert world.hub.publisher_of("live/show")[0] == "192.0.2.1"


def test_name_of_a_set_goes_to_whoever_has_proved_the_right_to_it():
    """Else who may publish live/show_720 alone could keep live/show from its publisher."""
    networks = (ip_network("192.0.2.0/24"), ip_network("203.0.113.0/24"))
    world = SetWorld(config(renditions=NAMES, access=StreamAccess(allow_publish=networks)))
    world.member("_720")
    world.send(10)
    assert world.connect("203.0.113.66").publish("live/show").codes == []
    assert renditions_of(world) is None


@pytest.mark.parametrize(
    ("policy", "queries"),
    [(SecondPublisher.REPLACE, ("", "")), (SecondPublisher.REFUSE, ("?key=secret-of-both", "?key=secret-of-both"))],
)
def test_set_of_encoders_with_several_addresses_has_all_with_one_key_or_where_names_are_anybodys(policy, queries):
    world = SetWorld(config(renditions=NAMES, second_publisher=policy))
    join_set(world, "_1080", "192.0.2.1", queries[0])
    join_set(world, "_720", "192.0.2.2", queries[1])
    world.send(10)
    assert [item.name for item in renditions_of(world).renditions()] == ["1080", "720"]


def test_metadata_when_headers_are_repeated_is_written_once_for_each_track(monkeypatch):
    """454 bytes of sequence headers had 60 KB of metadata decoded and written 32 times: half a second."""
    written = []
    monkeypatch.setattr(feeds, "metadata_of_track", lambda *given: written.append(given) or metadata_of_track(*given))
    world = TrackWorld()
    world.headers_of(range(3))
    world.pictures(5)
    written.clear()
    for _ in range(20):
        world.sender.video(world.at, headers_of_one_message(32))
    assert len(written) <= MOST_RENDITIONS


def test_metadata_when_long_is_passed_on_as_it_is():
    payload = encode("onMetaData", {f"k{number}": float(number) for number in range(1000)})
    assert metadata_of_track(payload, 1, (640, 360)) is payload


def test_metadata_when_it_has_values_that_amf0_has_not_is_passed_on_as_it_is():
    array_of_bytes = b"\0\x01x\x11\x0c\x05ab"
    payload = encode("onMetaData") + b"\x03" + array_of_bytes + b"\0\0\x09"
    assert metadata_of_track(payload, 1, (640, 360)) is payload
    world = TrackWorld()
    world.headers_of(range(2))
    world.pictures(5)
    world.sender.send(world.sender.session.send_tag(DATA, 0, payload))
    world.pictures(5)
    assert world.group.failures == []
    assert world.stream("live/show").publisher is not None


def test_caches_when_only_sound_comes_hold_together_what_one_stream_may():
    world = TrackWorld()
    world.tracks = range(8)
    world.headers_of(world.tracks)
    world.pictures(5)
    most = world.hub.config.cache.size_bytes
    sound = audio(bytes(100_000))
    held = []
    for _ in range(40):
        world.sender.audio(world.at, sound)
        logs = [wire.log for item in world.stream("live/show").renditions for wire in item.wires]
        held.append(sum(log.tail.offset - log.cached.offset for log in logs if log.cached is not None))
    assert max(held) <= most + 8 * len(sound) + most // 8
    assert max(held) > most // 2


def test_key_frames_that_logs_of_a_set_keep_count_for_the_memory_budget():
    world = TrackWorld(config(memory_budget_bytes=4_000_000))
    world.headers_of(range(2))
    world.pictures(5)
    viewer = world.player("live/show")
    for _ in range(40):
        world.video(world.at, 0, key(b"0 1", 200_000))
        world.at += 40
        viewer.forget()
    world.hub.oversight.look()
    world.run()
    assert world.hub.oversight.statistics().budget.emptied
    assert not any(wire.log.keys for item in world.stream("live/show").renditions for wire in item.wires)


def test_sound_of_many_tracks_is_kept_of_few():
    world = TrackWorld()
    world.headers_of(range(2))
    world.pictures(5)
    for track in range(1, 256):
        world.sender.audio(world.at, wrap_track(SOUND, track, audio(b"x")))
    assert len(renditions_of(world)._sound._members) == MOST_RENDITIONS


def test_track_that_is_many_times_in_a_message_is_there_once():
    """A message of 262 bytes with 32 parts of one track of sound cost as much as 29 messages."""
    world = TrackWorld()
    world.headers_of(range(2))
    world.pictures(5)
    rendition = world.stream("live/show").renditions[1]
    (wire,) = rendition.wires
    before = wire.log.tail.counts[MessageClass.AUDIO]
    part = b"\0\0\0\x04abcd"
    world.sender.audio(world.at, b"\x95\x11mp4a" + 32 * part)
    assert wire.log.tail.counts[MessageClass.AUDIO] == before + 1


def test_clock_that_jumps_with_each_message_is_logged_each_second():
    world = SetWorld()
    bad = world.member("_720")
    world.send(20)
    began = world.clock()
    with structlog.testing.capture_logs() as lines:
        for number in range(300):
            world.put(bad, 9, number % 2 * 1_000_000 + number * 7, inter(b"_720 1"))
            world.run(0.001)
    told = [line for line in lines if line["event"] == "rendition's clock"]
    assert 1 <= len(told) <= world.clock() - began + 1


def test_viewers_that_change_over_again_and_again_are_logged_each_20_seconds(monkeypatch):
    world = SetWorld()
    world.all_members()
    world.send(10)
    viewer = world.player("live/show")
    world.send(10)
    began = world.clock()
    with structlog.testing.capture_logs() as lines:
        for number in range(30):
            choose(monkeypatch, ("720", "360")[number % 2])
            world.send(10)
    book = viewer.connection.renditions
    told = [line for line in lines if line["event"] == "rendition switched"]
    assert book.ups + book.downs >= 20
    assert 10 <= len(told) <= 11 + (world.clock() - began) / 20
