"""Sets of renditions over HTTP and WebSocket: players of the set, of a member, those that wait, and the end."""

from __future__ import annotations

import pytest
from http_kit import HOST, UPGRADE, MemoryPlayer, Publisher, Socket, send_frames, wait_for
from live_kit import World, audio, inter, key
from wsproto.events import CloseConnection

from flowctl.flv import FlvReader
from flowctl.live.config import LiveConfig
from flowctl.live.settings.renditions import RenditionNames

SUFFIXES = ("_1080", "_720")
SET = {"renditions": RenditionNames(suffixes=SUFFIXES)}


class Show:
    """Publishes the renditions of one content."""

    def __init__(self, web) -> None:
        self.members = {suffix: web.publisher("live/show" + suffix) for suffix in SUFFIXES}

    def group(self, tag) -> None:
        for suffix, member in self.members.items():
            member.group(tag + suffix.encode())

    def end(self) -> None:
        for member in self.members.values():
            member.end()


def follow(web, count):
    """Wait until so many players follow a log."""
    wait_for(lambda: [viewer.connection.place is not None for viewer in web.viewers()] == [True] * count)


def members_of(tags):
    """Return which members pictures are of, and the times of all tags of sound and picture."""
    pictures = [tag.payload for tag in tags if tag.type_id == 9 and tag.payload[1] == 1]
    return {payload[11:].partition(b"_")[2] for payload in pictures}, [
        tag.timestamp for tag in tags if tag.type_id != 18
    ]


def test_player_of_a_set_gets_one_rendition_with_the_sound_of_the_largest(web):
    web = web(**SET)
    show = Show(web)
    show.group(b"one")
    client, socket, member = web.client(), Socket(web, "/live/show.flv"), web.client()
    assert client.get("/live/show.flv")[0] == 200
    assert member.get("/live/show_720.flv")[0] == 200
    follow(web, 3)
    show.group(b"two")
    for tags in (client.tags(8)[1], socket.tags(8)[1]):
        members, times = members_of(tags)
        assert len(members) == 1
        assert audio(b"two_1080") in [tag.payload for tag in tags]
        assert times == sorted(times)
    assert members_of(member.tags(6)[1])[0] == {b"720"}
    assert {viewer.streams()[0] for viewer in web.viewers()} == {"live/show", "live/show_720"}


def test_player_when_it_waits_for_a_set_is_served_when_its_first_member_is_published(web):
    web = web(**SET)
    client, socket = web.client(), Socket(web, "/live/show.flv")
    client.send(f"GET /live/show.flv HTTP/1.1\r\n{HOST}\r\n")
    wait_for(lambda: len(web.viewers()) == 2)
    web.publisher("live/show_720").group(b"one")
    assert client.answer()[0] == 200
    for tags in (client.tags(4)[1], socket.tags(4)[1]):
        assert tags[3].payload == key(b"one")


def test_response_when_all_members_end_at_once_ends_behind_the_last_tag(web):
    web = web(**SET)
    show = Show(web)
    show.group(b"one")
    client, socket = web.client(), Socket(web, "/live/show.flv")
    client.get("/live/show.flv")
    follow(web, 2)
    show.group(b"two")
    show.end()
    reader = FlvReader(check_back_pointers=True)
    body, ended = client.body_to_end()
    assert ended
    tags = reader.feed(body)
    reader.finish()
    assert [tag.payload for tag in tags if tag.type_id == 9][-1] in {inter(b"two_1080"), inter(b"two_720")}
    closed = socket.until(CloseConnection)
    assert (closed.code, closed.reason) == (1000, "the publisher has gone")
    assert {end.details for end in wait_for(lambda: len(web.ended()) == 2 and web.ended())} == {
        "the publisher has gone"
    }


def test_player_when_it_comes_and_goes_leaves_nothing_behind(web):
    web = web(**SET)
    show = Show(web)
    show.group(b"one")
    client = web.client()
    client.get("/live/show.flv")
    client.tags(4)
    face = web.server.hub.find_stream("live/show")
    renditions = web.server.hub.renditions.find(face)
    assert list(renditions._formats) == ["http-flv"]
    client.close()
    wait_for(lambda: not web.viewers())
    assert renditions._formats == {}
    show.group(b"two")
    assert {wire.wire_format.name for wire in face.wires} == {"1"}


@pytest.mark.parametrize("headers", ["", UPGRADE], ids=["chunks", "frames"])
def test_slow_player_of_a_set_when_its_members_are_back_gets_the_rest_of_what_ended(headers):
    world = World(LiveConfig(**SET))
    publisher = Publisher(world, "live/show_720", headers=False)
    send_frames(world, publisher, 13)
    player = MemoryPlayer(world, headers, "live/show")
    player.wire.room = len(player.wire.down)
    sent = send_frames(world, publisher, 5)
    publisher.end()
    world.run()
    send_frames(world, Publisher(world, "live/show_720", headers=False), 5)
    player.wire.room = None
    world.run()
    assert player.payloads[-5:] == sent
    assert bytes(player.wire.down).endswith(b"the publisher has gone" if headers else b"\r\n0\r\n\r\n")
