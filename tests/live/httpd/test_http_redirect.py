"""Players over HTTP that are sent to edges."""

from __future__ import annotations

import pytest
from http_kit import UPGRADE
from loopback_kit import LOOPBACK, loopback

from flowctl.core.text.addresses import address_key
from flowctl.live.config import Redirect
from flowctl.live.remux.serving import hls_handlers

EDGE = "http://edge.test:8080"


@pytest.fixture
def sent(web, tmp_path):
    """Return a function that makes a server, with a publisher, whose viewers are sent to an edge."""

    def make(redirect, edge=EDGE, *, hls=True):
        handlers = hls_handlers(tmp_path) if hls else None
        server = web(redirect=redirect, origin=loopback(), handlers=handlers)
        asked = []

        def choose(scheme, viewer, address):
            assert address == address_key(LOOPBACK)
            asked.append((scheme, viewer))
            return edge

        server.server.hub.edge_for = choose
        server.publisher().group()
        return server, asked

    return make


def test_player_when_there_is_an_edge_is_sent_there_with_its_query(sent):
    """The key is the viewer's own; nothing of the answer may be kept by caches."""
    server, asked = sent(Redirect.HTTP)
    status, headers, _ = server.get("/live/room.flv?key=k&track=1")
    assert (status, headers["location"]) == (302, f"{EDGE}/live/room.flv?key=k&track=1")
    assert headers["cache-control"] == "no-store"
    assert server.get("/live/room.flv", "X-Forwarded-Proto: https\r\n")[0] == 302
    assert asked == [("http", None), ("https", None)]


def test_playlist_when_asked_for_is_the_edges_and_segments_are_served(sent):
    """Behind the playlist of an edge its segments are found there; who has one from here goes on here."""
    server, asked = sent(Redirect.HTTP)
    assert server.get("/live/room.m3u8?key=k")[1]["location"] == f"{EDGE}/live/room.m3u8?key=k"
    assert server.get("/live/room/1.ts")[0] != 302
    assert server.get("/live/room.m3u8?key=k&_HLS_msn=7&_HLS_part=1")[0] == 302
    assert len(set(asked)) == 1  # the same player, which is sent to the same edge
    assert asked[0][0] == "http"
    assert f"{LOOPBACK}\nlive/room\n".encode() in asked[0][1]


@pytest.mark.parametrize(("edge", "status"), [(EDGE, 302), (None, 404)])
def test_playlist_when_only_edges_write_hls_is_theirs(sent, edge, status):
    """The origin has none, and says so where no edge has room."""
    server, _ = sent(Redirect.HTTP, edge, hls=False)
    assert server.get("/live/room.m3u8")[0] == status


@pytest.mark.parametrize(("redirect", "status"), [(Redirect.HTTP, 101), (Redirect.ALL, 302)])
def test_websocket_when_browsers_are_among_the_players_is_not_sent_away(sent, redirect, status):
    """No browser follows a redirect of a handshake."""
    server, _ = sent(redirect)
    found, headers, _ = server.get("/live/room.flv", UPGRADE)
    assert found == status
    if status == 302:
        assert headers["location"] == "ws://edge.test:8080/live/room.flv"


@pytest.mark.parametrize(("redirect", "edge"), [(Redirect.OFF, EDGE), (Redirect.HTTP, None)])
def test_player_when_it_is_off_or_no_edge_has_room_is_served_here(sent, redirect, edge):
    server, _ = sent(redirect, edge)
    assert server.get()[0] == 200


def test_name_when_it_has_odd_letters_is_written_as_addresses_are(sent):
    """What a client asks for stands in a header of the answer."""
    server, _ = sent(Redirect.HTTP)
    for path in ("/live/r%C3%B6om.flv", "/live/a%20b.flv"):
        assert server.get(path)[1]["location"] == f"{EDGE}{path}"
