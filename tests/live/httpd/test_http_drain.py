"""A server that drains: what becomes of those who are there over HTTP."""

from __future__ import annotations

import pytest
from http_kit import wait_for

from flowctl.live.httpd.session import Phase
from flowctl.reasons import CloseReason


def drain(server, within_s):
    """Drain a server; return a list that gets an item when it has ended."""
    ended = []
    server.on_stopped = lambda: ended.append(True)
    server.drain(within_s)
    return ended


def test_connections_when_idle_are_ended_and_hold_nothing_up(web):
    """Who asks for nothing, before his first request or after it, is ended at once: the drain waits for nobody."""
    web = web()
    first, second = web.client(), web.client()
    assert first.get("/nothing.txt")[0] == 404
    wait_for(lambda: len(web.server.connections()) == 2)
    ended = drain(web.server, 3600.0)
    assert first.to_end() == second.to_end() == b""
    wait_for(lambda: ended)
    assert web.server.closed_by_reason[CloseReason.SHUTDOWN] == 2


def test_request_when_it_comes_during_a_drain_is_the_last_of_its_connection(web):
    web = web()
    client = web.client()
    client.send("GET /nothing.txt HTTP/1.1\r\n")
    wait_for(lambda: web.server.connections() and web.server.connections()[0].session._phase is not Phase.IDLE)
    ended = drain(web.server, 3600.0)
    with pytest.raises(OSError, match="refused"):
        wait_for(lambda: web.client() is None)
    (session,) = [item.session for item in web.server.connections()]
    wait_for(lambda: session._requests == session._limits.requests)  # it has heard of the drain
    client.send("Host: example.test\r\n\r\n")
    status, headers, _ = client.answer()
    assert (status, headers["connection"]) == (404, "close")
    assert client.to_end() == b""
    wait_for(lambda: ended)


@pytest.mark.parametrize("path", ["live/room", "live/absent"])
def test_viewer_when_the_server_drains_plays_on_and_is_ended_at_its_deadline(web, path):
    web = web()
    publisher = web.publisher()
    client = web.client()
    client.send(f"GET /{path}.flv HTTP/1.1\r\nHost: example.test\r\n\r\n")
    wait_for(lambda: len(web.viewers()) == 1)
    publisher.group(b"before")
    ended = drain(web.server, 3600.0)
    publisher.group(b"after")
    if path == "live/room":
        client.answer()
        assert any(b"after" in tag.payload for tag in client.tags(7)[1])
    assert not ended
    assert web.server.connections()[0].ended is None
    web.server.drain(0.0)
    client.to_end()
    wait_for(lambda: ended)
    assert web.server.closed_by_reason == {CloseReason.SHUTDOWN: 1}


def test_viewer_when_the_stream_ends_during_a_drain_ends_it(web):
    web = web()
    publisher = web.publisher()
    client = web.client()
    publisher.group()
    assert client.get()[0] == 200
    ended = drain(web.server, 3600.0)
    publisher.end()
    assert client.body_to_end()[1]
    wait_for(lambda: ended)


def test_answer_when_it_has_begun_before_a_drain_is_sent_whole_and_is_the_last(web):
    handler = Slow()
    web = web(handlers={".slow": handler})
    web.publisher()
    client = web.client()
    status, headers, _ = client.get("/live/room.slow", method="HEAD")
    assert (status, headers.get("connection")) == (200, None)
    ended = drain(web.server, 3600.0)
    connection = web.server.connections()[0]
    connection.session.on_thread(handler.exchange.end)
    assert client.to_end() == b""
    wait_for(lambda: ended)


class Slow:
    """Begins an answer, and ends it when told."""

    in_files = False
    own_parameters = ()

    def stream_of(self, path):
        return path.rpartition(".")[0].strip("/")

    def handle(self, exchange):
        self.exchange = exchange
        exchange.begin(200, [("Content-Length", "0")])
