"""Who may play over HTTP: the same keys, tokens, networks and passwords as over RTMP, told in statuses."""

from __future__ import annotations

import base64
import time
from ipaddress import ip_network

import jwt
import pytest
import structlog
from hook_kit import HookServer
from http_kit import Socket, wait_for
from live_kit import perform
from loopback_kit import LOOPBACK, NETWORK

from flowctl.live.access.keys import KeyFile, StoredKey, hash_key
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.access.webtokens import WebTokenKey
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.session_config import ServerSessionConfig

KEY = "a-key-that-nobody-guesses"
_, _SALT, _DIGEST = hash_key(KEY).split(":")
SECRET = b"a secret of thirty-two or more bytes, for tests"
ACCESS = StreamAccess(
    play_auth=tuple(Proof),
    keys=KeyFile("keys", (StoredKey(bytes.fromhex(_SALT), bytes.fromhex(_DIGEST)),)),
    token_secrets=SecretFile("secrets", (SECRET,)),
    jwt_key=WebTokenKey("HS256", "jwt", {None: SECRET}),
)
LEFT_S = 600


def signed(seconds, stream="live/room", address=""):
    return signed_query(SECRET, "play", stream, int(time.time()) + seconds, address)


def web_token(**changed):
    return jwt.encode({"exp": time.time() + LEFT_S, "actions": "play", "streams": "live/*"} | changed, SECRET, "HS256")


def basic(text):
    return f"Authorization: Basic {base64.b64encode(text.encode()).decode()}\r\n"


def test_viewer_with_any_proof_gets_the_picture_and_without_is_told_so_in_the_status(web):
    made = web(access=ACCESS, players_may_wait=False)
    made.publisher().group()
    good = [
        (f"?key={KEY}", ""),
        (f"?{signed(LEFT_S)}", ""),
        (f"?{signed(LEFT_S, address=NETWORK)}", ""),
        (f"?jwt={web_token()}", ""),
        ("", f"Authorization: Bearer {web_token()}\r\n"),
        ("", f"Authorization: bearer {KEY}\r\n"),
    ]
    bad = [
        ("", ""),
        ("?key=guessed", ""),
        (f"?{signed(-LEFT_S)}", ""),
        (f"?{signed(LEFT_S, stream='live/other')}", ""),
        (f"?{signed(LEFT_S, address='192.0.2.7')}", ""),
        (f"?jwt={web_token(actions='publish')}", ""),
        ("", f"Authorization: Bearer {web_token(exp=1)}\r\n"),
        ("", basic(f"user:{KEY}")),
    ]
    with structlog.testing.capture_logs() as lines:
        for expected, tries in ((200, good), (401, bad)):
            for query, header in tries:
                status, headers, _ = made.get(f"/live/room.flv{query}", header, "HEAD")
                assert (status, "www-authenticate" in headers) == (expected, expected == 401)
    shown = repr(lines)
    assert KEY not in shown
    assert "token=" not in shown
    assert web_token()[:20] not in shown


def test_viewer_from_a_network_that_is_denied_is_forbidden(web):
    made = web(access=StreamAccess(deny_play=(ip_network(NETWORK),)))
    assert made.get()[0] == 403


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (basic("ann:pw"), 200),
        (basic("ann:wrong"), 401),
        (basic("bob:pw"), 401),
        (basic("ann"), 401),
        ("Authorization: Basic %%%\r\n", 401),
        ("Authorization: Basic\r\n", 401),
        ("", 401),
    ],
)
def test_viewer_is_asked_for_the_password_that_rtmp_asks_for(web, header, status):
    """The file of users holds for HTTP as well, or it would hold for nobody."""
    made = web(rtmp=ServerSessionConfig(credentials={"ann": "pw"}))
    made.publisher().group()
    found, headers, _ = made.get("/live/room.flv", header, "HEAD")
    assert found == status
    assert headers.get("www-authenticate", "").startswith("Basic") is (status == 401)


def test_viewer_behind_a_trusted_proxy_is_known_by_the_address_that_the_proxy_says(web):
    web = web(trusted_proxies=(LOOPBACK,))
    web.publisher().group()
    client = web.client()
    client.send("PROXY TCP4 203.0.113.9 127.0.0.1 4000 80\r\n")
    assert client.get()[0] == 200
    assert [viewer.peer for viewer in web.viewers()] == [("203.0.113.9", 4000)]
    perform(web.server, "ban", {"network": "203.0.113.9"})
    client.to_end()
    assert [viewer.reason for viewer in wait_for(web.ended)] == [CloseReason.BANNED]


@pytest.mark.parametrize("websocket", [False, True])
def test_viewer_when_it_has_left_is_told_of_with_the_bytes_of_its_connection(web, websocket):
    """As `on_close` over RTMP: bills are made of it; a request without a play is told of to nobody."""
    hook = HookServer()
    made = web(access=StreamAccess(on_play=(hook.url(),), on_end=(hook.url(),)))
    publisher = made.publisher()
    publisher.group(size=50_000)
    assert made.get("/live/room.flv", method="HEAD")[0] == 200
    client = Socket(made).client if websocket else made.client()
    if not websocket:
        client.send("GET /live/room.flv HTTP/1.1\r\nHost: example.test\r\n\r\n")
    wait_for(made.viewers)
    publisher.group(size=50_000)
    publisher.end()
    got = len(client.to_end())
    assert got > 100_000
    wait_for(lambda: "on_close" in hook.actions())
    made.server.hub.gate.stop(20.0)
    assert hook.actions() == ["on_play", "on_play", "on_stop", "on_close"]  # the first is that of HEAD
    assert len({body["client_id"] for body in hook.bodies[1:]}) == 1
    closed = hook.bodies[-1]
    assert closed["send_bytes"] == got
    assert 50 < closed["recv_bytes"] < 1000
    assert (closed["app"], closed["ip"]) == ("live", LOOPBACK)
    hook.close()


@pytest.mark.parametrize("spelled", ["mp4:room", "room.mp4", "%72oom", "flv:room.flv", "_definst_/room"])
def test_name_when_it_is_spelled_otherwise_is_the_streams_and_needs_its_proof(web, spelled):
    made = web(access=ACCESS, players_may_wait=False)
    made.publisher().group()
    proof = signed(LEFT_S)
    assert [made.get(f"/live/{spelled}.flv{query}")[0] for query in ("", f"?{proof}")] == [401, 200]
    assert made.viewers()[0].streams() == ["live/room"]


def test_name_when_it_is_encoded_twice_is_refused_in_words(web):
    status, _, body = web().get("/live/a%2520b.flv")
    assert (status, body) == (400, b"stream name is percent-encoded twice\n")
