"""Requests on real sockets: whole, split and pipelined, right, wrong, too long, too late, and from the half-closed."""

from __future__ import annotations

import socket
from itertools import pairwise

import httpx
import pytest
from http_kit import HOST, UPGRADE, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_kit import LOOPBACK, NETWORK, loopback
from structlog.testing import capture_logs

from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.bans import BanAction
from flowctl.core.text.addresses import network_of
from flowctl.errors import ConfigError
from flowctl.live.access.request import Refusal, Why
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import LiveHooks
from flowctl.live.httpd.exchange import HttpLimits
from flowctl.live.judging.penalties import Allowance, PenaltyLimits

PIPELINED = (
    f"GET /a.txt HTTP/1.1\r\n{HOST}\r\n"
    f"POST /b.flv HTTP/1.1\r\n{HOST}Content-Length: 5\r\n\r\nhello"
    f"POST /c HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\n\r\n"
    f"OPTIONS /live/room.flv HTTP/1.1\r\n{HOST}Origin: https://a.example\r\n\r\n"
    f"HEAD /live/room.flv HTTP/1.1\r\n{HOST}\r\n"
    f"GET /last HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n"
).encode()
STATUSES = [404, 405, 405, 204, 404, 404]


class Refusing(LiveHooks):
    """Refuses plays for a reason of each kind, and tells what it was asked."""

    def __init__(self) -> None:
        self.asked = []

    def may_play(self, request):
        self.asked.append(request)
        name = request.url.stream
        return "Not today." if name == "text" else Refusal("No.", Why[name.upper()])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(1, len(PIPELINED) - 1), max_size=6, unique=True))
def test_requests_when_pipelined_and_split_anywhere_are_answered_in_order(request, cuts):
    web = request.getfixturevalue("web_of_module")
    client = web.client()
    at = [0, *sorted(cuts), len(PIPELINED)]
    for begin, end in pairwise(at):
        client.send(PIPELINED[begin:end])
    found = [client.answer(body=number != 4)[0] for number in range(6)]
    assert found == STATUSES
    assert client.to_end() == b""
    client.close()


def test_requests_when_split_at_every_octet_are_answered_in_order(web):
    web = web()
    for cut in range(1, len(PIPELINED), 7):
        client = web.client()
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.send(PIPELINED[:cut])
        client.send(PIPELINED[cut:])
        assert [client.answer(body=number != 4)[0] for number in range(6)] == STATUSES
        client.close()


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (f"GET / HTTP/1.1\r\n{HOST}\r\n", 404),
        (f"GET /live/room.mkv HTTP/1.1\r\n{HOST}\r\n", 404),
        (f"DELETE /live/room.flv HTTP/1.1\r\n{HOST}\r\n", 405),
        (f"GET /live/%ff.flv HTTP/1.1\r\n{HOST}\r\n", 400),
        (f"GET /live/..%2f..%2fetc.flv HTTP/1.1\r\n{HOST}\r\n", 400),
        (f"GET /live/a%00b.flv HTTP/1.1\r\n{HOST}\r\n", 400),
        (f"GET /live/a%3fb.flv HTTP/1.1\r\n{HOST}\r\n", 404),
        ("GET /live/room.flv HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (f"GET /.flv HTTP/1.1\r\n{HOST}\r\n", 404),
    ],
)
def test_request_when_it_names_nothing_is_answered_and_the_connection_goes_on(web, octets, status):
    client = web(players_may_wait=False).client()
    client.send(octets)
    assert client.answer()[0] == status
    assert client.get("/again")[0] == 404


@pytest.mark.parametrize(
    ("octets", "status", "limit"),
    [
        ("GET /live/room.flv HTTP/1.1\r\n\r\n", 400, None),
        ("nonsense\r\n\r\n", 400, None),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, None),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, None),
        (f"GET / HTTP/1.1\r\n{HOST}Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, None),
        (f"GET / HTTP/1.1\r\n{HOST}Content-Length: -1\r\n\r\n", 400, None),
        (f"GET / HTTP/1.1\r\n{HOST}Transfer-Encoding: gzip\r\n\r\n", 501, None),
        (f"GET /{'a' * 9000} HTTP/1.1\r\n{HOST}\r\n", 414, "target_bytes"),
        (f"GET /{'a' * 40000} HTTP/1.1\r\n{HOST}\r\n", 414, "header_bytes"),
        (f"GET / HTTP/1.1\r\n{HOST}X: {'a' * 40000}\r\n\r\n", 431, "header_bytes"),
        (f"GET / HTTP/1.1\r\n{HOST}X: {'a' * 16500}\r\n\r\n", 431, "header_bytes"),
        (f"GET / HTTP/1.1\r\n{HOST}" + "X: y\r\n" * 100 + "\r\n", 431, "header_count"),
        (f"POST / HTTP/1.1\r\n{HOST}Content-Length: 100000\r\n\r\n", 413, "body_bytes"),
        (
            f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n" + ("4000\r\n" + "b" * 16384 + "\r\n") * 5,
            413,
            "body_bytes",
        ),
    ],
)
def test_request_when_it_is_wrong_or_too_long_is_answered_and_ends_the_connection(web, octets, status, limit):
    web = web()
    client = web.client()
    client.send(octets.encode("latin-1"))
    found, headers, _ = client.answer()
    assert (found, headers["connection"]) == (status, "close")
    assert client.to_end() == b""
    wait_for(lambda: web.server.closed_by_reason)
    assert web.server.hub.limits_hit == ({} if limit is None else {limit: 1})


@pytest.mark.parametrize(
    "octets", ["G", f"GET / HTTP/1.1\r\n{HOST}", f"POST / HTTP/1.1\r\n{HOST}Content-Length: 5\r\n\r\nab"]
)
def test_request_when_it_does_not_come_whole_in_time_gets_408(web, octets):
    web = web(limits=HttpLimits(request_time_s=0.1))
    client = web.client()
    client.send(octets)
    assert client.answer()[0] == 408
    assert client.to_end() == b""
    assert wait_for(lambda: web.server.hub.limits_hit) == {"request_time_s": 1}


def test_connection_when_nothing_comes_or_it_idles_too_long_is_closed_without_a_word(web):
    """A browser that connects ahead is told nothing."""
    web = web(limits=HttpLimits(request_time_s=0.1, idle_s=0.1))
    assert web.client().to_end() == b""
    client = web.client()
    assert client.get("/a")[0] == 404
    assert client.to_end() == b""


def test_connection_when_it_has_made_all_its_requests_is_told_with_the_last_answer(web):
    client = web(limits=HttpLimits(requests=3)).client()
    answers = [client.get("/a")[1].get("connection") for _ in range(3)]
    assert answers == [None, None, "close"]
    assert client.to_end() == b""


def test_answer_when_the_client_has_half_closed_comes_all_the_same(web):
    web = web()
    client = web.client()
    client.send(f"GET /a HTTP/1.1\r\n{HOST}\r\n")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.answer()[0] == 404
    assert client.to_end() == b""
    web.publisher().group()
    player = web.client()
    player.get()
    player.sock.shutdown(socket.SHUT_WR)
    assert player.to_end() != b"x"
    wait_for(lambda: not web.server.connections())


def test_expectation_when_a_body_is_announced_is_met(web):
    client = web().client()
    client.send(f"POST / HTTP/1.1\r\n{HOST}Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert client.answer()[0] == 100
    client.send("abc")
    assert client.answer()[0] == 405


def test_httpx_when_it_asks_several_times_keeps_its_connection(web):
    web = web()
    with httpx.Client(base_url=f"http://{loopback(web.address[1])}", trust_env=False) as client:
        assert [client.get("/a").status_code, client.head("/b.flv").status_code] == [404, 404]
        assert client.options("/live/room.flv").headers["allow"] == "GET, HEAD, OPTIONS"
    assert web.server.accepted_count == 1


def test_guesser_when_it_guesses_on_one_connection_is_ended_and_limited(web):
    penalties = PenaltyLimits(connections=Allowance(20, 600))
    web = web(hooks=Refusing(), penalties=penalties, admission=AdmissionLimits(burst_per_address=0))
    client = web.client()
    for number in range(21):
        assert client.get(f"/live/forbidden.flv?key={number}")[0] == 403
    assert client.to_end() == b""
    wait_for(lambda: web.server.admission.bans.bans)  # its connections end first
    (limit,) = web.server.admission.bans.bans
    assert (limit.cidr, limit.action, limit.source) == (
        NETWORK,
        BanAction.LIMIT,
        "penalty",
    )
    assert limit.evidence == {"play over HTTP": 21.0}


def test_page_when_it_has_browsers_ask_for_anything_has_nobody_punished(web):
    """Too long, too much, not there, not HTTP but TLS, and too many frames: any page can have its visitors do that."""
    one = Allowance(1, 1000)
    penalties = PenaltyLimits(connections=one, refused=one, commands=one, control=one, limits=one)
    fast = AdmissionLimits(burst_per_address=4, new_per_address_and_s=10_000.0, connections_per_address=0)
    web = web(penalties=penalties, admission=fast)
    web.publisher().group()
    long, many = "/" + 9000 * "a", "".join(f"X-{number}: 1\r\n" for number in range(80))
    for _ in range(40):  # 50 times the burst may come to nothing
        assert web.get(long)[0] == 414
        assert web.get("/live/none.txt")[0] == 404
        assert web.get("/live/room.flv", many)[0] == 431
        assert web.get("/live/room.flv", "Content-Length: 99999\r\n", method="POST")[0] == 413
        client = web.client()
        client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))
        client.to_end()
        web.client().close()
    wait_for(lambda: sum(web.server.closed_by_reason.values()) == 200)  # after the 404 they may ask again
    web.server.reload.run_job(lambda: None)
    assert web.server.admission.bans.bans == []


@pytest.mark.parametrize(
    ("name", "status"),
    [("text", 403), ("unauthorized", 401), ("forbidden", 403), ("not_found", 404), ("unavailable", 503)],
)
def test_gate_when_it_refuses_a_play_says_so_in_the_status(web, name, status):
    hooks = Refusing()
    web = web(hooks=hooks)
    found, headers, body = web.get(f"/live/{name}.flv?key=a%2Bb", "Authorization: Bearer tok\r\nReferer: http://p/\r\n")
    assert found == status
    assert body in {b"No.\n", b"Not today.\n"}
    assert ("www-authenticate" in headers) is (status == 401)
    (asked,) = hooks.asked
    assert (asked.stream, asked.query["key"], asked.bearer, asked.page_url) == (
        f"live/{name}",
        "a+b",
        "tok",
        "http://p/",
    )


def test_origins_when_some_are_named_are_told_to_those_alone(web):
    web = web(http_origins="https://a.example, https://b.example/")
    web.publisher().group()
    for origin, allowed in (("https://b.example", True), ("https://c.example", False)):
        _, headers, _ = web.get("/x", f"Origin: {origin}\r\n")
        assert (headers.get("access-control-allow-origin"), headers["vary"]) == (origin if allowed else None, "Origin")
        assert web.get(headers=f"{UPGRADE}Origin: {origin}\r\n")[0] == (101 if allowed else 403)


def test_preflight_when_headers_are_asked_for_allows_them(web):
    _, headers, _ = web().get(
        method="OPTIONS", headers="Origin: https://a.example\r\nAccess-Control-Request-Headers: range\r\n"
    )
    assert headers["access-control-allow-headers"] == "range"
    assert headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("text", ["8080", "host:", "a:70000", "::1:80", "http://a:1"])
def test_http_when_it_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="no address to listen on"):
        LiveConfig(http=text)


@pytest.mark.parametrize("count", [1, 17, 100, 900])
def test_requests_when_pipelined_before_a_half_close_are_all_answered(web, count):
    client = web(limits=HttpLimits(requests=1_000_000)).client()
    asked = f"GET /a HTTP/1.1\r\n{HOST}\r\n"
    client.send(asked * count + asked[:-3])
    client.sock.shutdown(socket.SHUT_WR)
    assert client.to_end().count(b"HTTP/1.1 404") == count


@pytest.mark.parametrize(
    ("origins", "name", "status"),
    [
        ("", "evil.example", 421),
        ("", "localhost", 200),
        ("*", "evil.example", 200),
        ("http://tv.lan", "tv.lan", 200),
    ],
)
def test_request_when_its_host_is_a_name_that_suddenly_means_this_machine_is_refused(web, origins, name, status):
    """DNS rebinding: for the browser, what the page reads is of its own origin, and CORS is not asked."""
    server = web(http_origins=origins)
    server.publisher().group()
    client = server.client()
    client.host = f"Host: {name}:{server.address[1]}\r\n"
    assert client.get(method="HEAD")[0] == status


def test_pages_when_their_origin_is_written_in_another_way_may_play(web):
    server = web(http_origins="https://App.example:443")
    server.publisher().group()
    headers = server.get(headers="Origin: https://app.example\r\n", method="HEAD")[1]
    assert headers["access-control-allow-origin"] == "https://app.example"
    assert server.get(headers=f"{UPGRADE}Origin: https://app.example\r\n")[0] == 101
    assert server.get(headers=f"{UPGRADE}Origin: http://example.test:80\r\n")[0] == 101  # its own
    assert server.get(headers=f"{UPGRADE}Origin: http://app.example\r\n")[0] == 403


def test_pages_when_scanned_for_have_one_line_together_and_players_one_each(web):
    """Log and events tell of the first connection that nothing was there for; how many more came, when it is over."""
    server = web()
    server.publisher().group()
    with capture_logs() as logs:
        for number in range(8):
            client = server.client()
            assert client.get(f"/wp-{number}.php")[0] == 404
            client.close()
        for _ in range(2):
            player = server.client()
            assert player.get()[0] == 200
            player.close()
        wait_for(lambda: len(ends := server.server.closed_by_reason) and sum(ends.values()) == 10)
        wait_for(lambda: not server.server.connections())
        server.stop()
    lines = [line for line in logs if line["event"] == "connection closed"]
    (counted,) = [line for line in logs if line["event"] == "stray connections closed"]
    assert len(lines) == 3
    assert (counted["count"], counted["peer"], counted["protocol"]) == (7, network_of(LOOPBACK), "http")
    events = [item for item in server.server.recent.since(None, 100)[0] if item["what"] == "close"]
    assert sorted(item["connection"] is None for item in events) == [False, False, False, True]
    assert events[-1]["reason"] == "7 stray connections"


def test_client_when_its_address_has_too_many_connections_is_told_so(web):
    server = web(admission=AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0))
    first = server.client()
    assert first.get("/a.txt")[0] == 404
    status, headers, body = server.get("/a.txt")
    assert (status, headers["retry-after"], body) == (429, "5", b"Too many connections. Try again later.\n")
    assert first.get("/a.txt")[0] == 404
