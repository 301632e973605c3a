"""The opening handshake with a server: every refusal has a status and says why, and nothing that came is lost."""

from __future__ import annotations

import asyncio
import threading

import pytest
from connection_kit import WAIT_S, wait_until
from loopback_kit import loopback
from websocket_kit import CLOSE, TEXT, RawClient, Served, Talk, close_payload, handshake, masked
from websockets.sync.client import connect

from flowctl import AdmissionLimits, CloseReason, HttpAnswer, LocalProtocolError


def refused(served, request=None, **headers):
    """Return (status, text of the answer, reason of the end) of a request that is refused."""
    before = len(served.sessions)
    with RawClient(served.address, request, **headers) as client:
        status = client.read_head()
        text = client.read_to_end().decode()
        reason, _ = wait_until(lambda: served.sessions[before:], "a session")[0].wait_end()
    assert "connection: close" in client.head.lower()
    assert f"content-length: {len(text)}" in client.head.lower()
    return status, text, reason


@pytest.mark.parametrize(
    ("request_head", "status", "word"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n", 400, ""),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 40_000, 431, ""),
        (b"POST / HTTP/1.1\r\nHost: h\r\n\r\n", 405, "GET"),
        (handshake(Content_Length="5"), 400, "body"),
        (handshake(Transfer_Encoding="chunked"), 400, "body"),
        (handshake(Upgrade=None), 426, "WebSocket"),
        (handshake().replace(b"HTTP/1.1", b"HTTP/1.0"), 426, "WebSocket"),
        (handshake(Connection="keep-alive"), 400, "Connection"),
        (handshake(Sec_WebSocket_Version="8"), 426, "13 is served"),
        (handshake(Sec_WebSocket_Version=None), 400, "Sec-WebSocket-Version"),
        (handshake(Sec_WebSocket_Key=None), 400, "Sec-WebSocket-Key"),
        (handshake(Sec_WebSocket_Key="c2hvcnQ="), 400, "16 bytes"),
    ],
)
def test_requests_when_they_are_no_handshake_get_a_status_and_words(request_head, status, word):
    with Served() as served:
        found, text, _ = refused(served, request_head)
        assert found == status
        assert word in text
        assert not served.errors


def test_versions_when_another_one_is_asked_for_are_told():
    with Served() as served, RawClient(served.address, Sec_WebSocket_Version="7") as client:
        assert client.read_head() == 426
        assert "Sec-WebSocket-Version: 13" in client.head


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_frames_when_they_come_with_the_request_are_kept_for_the_session(size):
    """A client may not wait for the answer; and what comes in single octets is the same."""
    wire = handshake() + masked(TEXT, "first") + masked(TEXT, "second")
    with Served() as served, RawClient(served.address, b"") as client:
        for at in range(0, len(wire), size):
            client.sock.sendall(wire[at : at + size])
        assert client.read_head() == 101
        assert [client.read_text(), client.read_text()] == ["first", "second"]


def test_request_when_asked_about_has_what_the_client_said():
    with Served() as served:
        path = "/a%20b/%C3%BC?token=s%26t&empty=&token=last"
        with RawClient(served.address, handshake(path, Cookie="c=1", User_Agent="test\x7f 1")) as client:
            assert client.read_head() == 101
            session = served.sessions[0]
            request = session.request
            assert (request.path, request.query) == ("/a b/ü", {"token": "last", "empty": ""})
            assert (request.header("Cookie"), request.header("missing"), request.origin) == ("c=1", "", "")
            assert request.peer == client.sock.getsockname()[:2]
            assert request.websocket
            assert not request.secure
            assert session.user_agent.startswith("test")
            assert session.user_agent.isprintable()


def test_requests_when_the_application_refuses_get_its_answer():
    answers = {
        "/missing": 404,
        "/private": HttpAnswer(401, "Who are you?", [("WWW-Authenticate", "Bearer")]),
        "/page": HttpAnswer(200, b"<p>page</p>", [("Content-Type", "text/html")]),
    }

    def requested(self, request):
        self.is_websocket = request.websocket
        return answers.get(request.path)

    with Served(requested=requested) as served:
        assert refused(served, handshake("/missing")) == (404, "Not Found\n", CloseReason.FINISHED)
        assert refused(served, handshake("/private")) == (401, "Who are you?", CloseReason.AUTH_REFUSED)
        page = b"GET /page HTTP/1.1\r\nHost: h\r\n\r\n"
        assert refused(served, page) == (200, "<p>page</p>", CloseReason.FINISHED)
        assert not served.sessions[-1].is_websocket
        assert refused(served, page.replace(b"page", b"other"))[0] == 426
        served.open()[0].sock.close()
        assert not served.errors


def test_requests_when_a_coroutine_decides_wait_for_it_and_keep_what_comes():
    go = threading.Event()

    async def requested(self, request):
        self.request = request
        await asyncio.to_thread(go.wait, WAIT_S)
        return 403 if request.path == "/no" else None

    with (
        Served(requested=requested) as served,
        RawClient(served.address, then=masked(TEXT, "early")) as client,
        RawClient(served.address, handshake("/no")) as other,
    ):
        wait_until(lambda: len(served.sessions) == 2 and all(one.request for one in served.sessions))
        with pytest.raises(LocalProtocolError):
            served.sessions[0].send_message("too early")
        assert served.sessions[0].protocol == "http"
        go.set()
        assert client.read_head() == 101
        assert client.read_text() == "early"
        assert other.read_head() == 403


@pytest.mark.parametrize("later", [False, True])
def test_requests_when_the_hook_fails_are_answered_with_500(later):
    def requested(self, request):
        raise ValueError("secret")

    async def requested_later(self, request):
        raise ValueError("secret")

    with Served(requested=requested_later if later else requested) as served:
        status, text, reason = refused(served)
        assert (status, text, reason) == (500, "Internal Server Error\n", CloseReason.INTERNAL)
        assert len(served.errors) == 1


def test_handshakes_when_they_take_too_long_get_408():
    with Served(handshake_s=0.05) as served:
        for begun in (b"", b"GET / HTTP/1.1\r\nHo"):
            with RawClient(served.address, begun) as client:
                assert client.read_head() == 408
            assert served.sessions[-1].wait_end()[0] is CloseReason.HANDSHAKE_TIMEOUT
        assert not served.errors


@pytest.mark.parametrize(
    ("origins", "origin", "lets_in"),
    [
        (None, None, True),
        (None, "http://example.test", True),
        (None, "https://EXAMPLE.test", True),
        (None, "http://example.test:80", True),
        (None, "http://example.test:8080", False),
        (None, "https://evil.test", False),
        (None, "https://example.test.evil.test", False),
        (None, "null", False),
        ({"https://app.test"}, "https://app.test", True),
        ({"https://App.test:443"}, "https://app.test", True),
        ({"https://app.test"}, "http://example.test", False),
        ({"https://app.test"}, None, True),
        ({"*"}, "https://evil.test", True),
        (frozenset(), "http://example.test", False),
    ],
)
def test_pages_when_of_another_origin_are_let_in_only_if_it_is_named(origins, origin, lets_in):
    """By default a page of the same host and port; what is no browser says no origin."""
    with Served(origins=origins) as served, RawClient(served.address, Origin=origin) as client:
        assert client.read_head() == (101 if lets_in else 403)
        if not lets_in:
            assert served.sessions[0].wait_end()[0] is CloseReason.AUTH_REFUSED
            assert served.sessions[0].request is None


def test_subprotocols_when_offered_are_the_first_that_the_server_prefers():
    with Served(subprotocols=("v2", "v1")) as served:
        for offer, chosen in (("v1, v2", "v2"), ("v1", "v1"), ("v3", None), (None, None)):
            with RawClient(served.address, Sec_WebSocket_Protocol=offer) as client:
                assert client.read_head() == 101
                assert (f"Sec-WebSocket-Protocol: {chosen}" in client.head) == (chosen is not None)
                assert ("Sec-WebSocket-Protocol" in client.head) == (chosen is not None)
            assert served.sessions[-1].subprotocol == chosen


def test_answers_when_the_application_chooses_have_its_subprotocol_and_headers():
    def requested(self, request):
        self.subprotocol = request.subprotocols[-1]
        self.accept_headers = [(b"Set-Cookie", b"a=b")]

    with (
        Served(requested=requested) as served,
        connect(f"ws://{loopback(served.address[1])}/", subprotocols=["x", "y"]) as client,
    ):
        assert client.subprotocol == "y"
        assert client.response.headers["Set-Cookie"] == "a=b"


@pytest.mark.parametrize(("name", "value"), [("subprotocol", "not offered"), ("accept_headers", [(b"X", b"a\r\nb")])])
def test_answers_when_they_cannot_be_made_are_500(name, value):
    with Served(requested=lambda self, _: setattr(self, name, value)) as served:
        assert refused(served)[0] == 500
        assert len(served.errors) == 1


def test_server_when_it_stops_tells_who_waits_for_an_answer():
    async def requested(self, request):
        self.request = request
        await asyncio.sleep(3600)

    with Served(requested=requested) as served, RawClient(served.address) as client:
        wait_until(lambda: served.sessions and served.sessions[0].request)
        served.server.stop(WAIT_S)
        assert client.read_head() == 503
        assert served.sessions[0].wait_end()[0] is CloseReason.SHUTDOWN


def test_clients_when_they_leave_within_the_handshake_are_over():
    with Served(Talk) as served, RawClient(served.address, b"GET / HT") as client:
        wait_until(lambda: served.sessions)
        client.sock.close()
        assert served.sessions[0].wait_end()[0] in {CloseReason.PEER_CLOSED, CloseReason.PEER_RESET}
        with RawClient(served.address, then=masked(CLOSE, close_payload(1000))) as polite:
            assert polite.read_head() == 101
            assert polite.read_close() == (1000, "")


def test_clients_when_they_come_over_ipv6_are_served(six):
    with Served(server={"host": six}) as served:
        host = f"[::1]:{served.address[1]}"
        with RawClient(served.address, Host=host, Origin=f"http://{host}") as client:
            client.opened().send(TEXT, "six")
            assert client.read_text() == "six"


@pytest.mark.parametrize(
    ("origins", "name", "status"), [(None, "evil.test", 403), (None, "LOCALHOST", 101), ({"*"}, "evil.test", 101)]
)
def test_pages_when_their_name_suddenly_means_this_machine_are_refused(origins, name, status):
    """DNS rebinding: page and server are of one origin, and the server is for this machine alone."""
    with Served(origins=origins) as served:
        host = f"{name}:{served.address[1]}"
        with RawClient(served.address, Host=host, Origin=f"http://{host}") as client:
            assert client.read_head() == status


def test_clients_when_too_many_come_are_told_so_and_how_long_to_wait():
    """A reset would tell a browser nothing; the answer comes behind its request, and is a page's to read."""
    admission = AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0)
    with Served(server={"admission": admission}) as served:
        first, _ = served.open()
        with RawClient(served.address) as second:
            assert second.read_head() == 429
            assert {"Retry-After: 5", "Access-Control-Allow-Origin: *"} <= set(second.head.split("\r\n"))
            assert second.read_to_end() == b"Too many connections. Try again later.\n"
        (turned_away,) = [listener.turned_away for listener in served.server.listeners]
        wait_until(lambda: not len(turned_away), "the end of its socket")
        first.sock.close()
        wait_until(lambda: not served.server.connections(), "room")
        served.open()[0].sock.close()
