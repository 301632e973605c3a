"""The admin surface over real sockets: what it answers, to whom, and how it begins and ends."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from types import SimpleNamespace

import httpx
import pytest
from e2e_kit import NAME, Clients, open_live_server, wait_for_viewers, wait_until
from loopback_kit import FAMILY, LOOPBACK, loopback
from prometheus_client.parser import text_string_to_metric_families

from flowctl.control.operations import Permission, answer
from flowctl.errors import ConfigError
from flowctl.live.admin import streaming
from flowctl.live.admin.listener import admin_of
from flowctl.wire.media.synthetic import SyntheticSource

ADMIN = "administrators-token"
BASIC = "token-of-those-who-look"


@pytest.fixture
def admin(tmp_path):
    """Return a function that starts a live server with an admin surface, and a client of it."""
    with contextlib.ExitStack() as stack:

        def start(tokens=None, **settings):
            if tokens is not None:
                path = tmp_path / "tokens"
                path.write_text(tokens)
                settings["admin_token_file"] = path
            server = stack.enter_context(open_live_server(**{"admin": loopback(), **settings}))
            listener = admin_of(server)
            stack.callback(listener.stop, 5.0)
            listener.start()
            http = stack.enter_context(httpx.Client(base_url=listener.bound[0], timeout=20.0))
            return SimpleNamespace(server=server, listener=listener, http=http)

        yield start


@pytest.fixture
def clients():
    """Return a thread for players and publishers."""
    with Clients() as clients:
        yield clients


def events_of(response):
    """Iterate over the events of a stream: what each is, and what it says."""
    what = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            what = value
        elif name == "data":
            yield what, json.loads(value)


def test_streams_and_connections_when_asked_for_are_told_with_their_figures(admin, clients):
    found = admin()
    clients.publish(found.server, SyntheticSource())
    clients.play(found.server)
    wait_for_viewers(found.server, 1)
    stream = wait_until(lambda: found.http.get("/api/v1/streams").json()["streams"], "a stream")[0]
    assert (stream["stream"], stream["viewers"], stream["states"]["READY"]) == (NAME, 1, 1)
    rows = found.http.get("/api/v1/connections", params={"sort": "number"}).json()["connections"]
    assert [(row["role"], row["stream"], row["protocol"]) for row in rows] == [
        ("publisher", NAME, "rtmp"),
        ("viewer", NAME, "rtmp"),
    ]
    assert stream["connection"] == rows[0]["connection"]
    assert [row["role"] for row in found.http.get("/api/v1/connections?role=viewer").json()["connections"]] == [
        "viewer"
    ]
    one = found.http.get(f"/api/v1/connections/{rows[1]['connection']}").json()["connection"]
    assert one["axes"]["bytes"]["soft"] == found.server.limits.size.soft
    assert one["ledger"] == []
    assert found.http.get("/api/v1/connections/999999999").status_code == 404


def test_kick_when_asked_for_ends_the_connection_and_is_told_as_an_event(admin, clients):
    found = admin()
    clients.publish(found.server, SyntheticSource())
    player = clients.play(found.server)
    wait_for_viewers(found.server, 1)
    [viewer] = found.http.get("/api/v1/connections?role=viewer").json()["connections"]
    with found.http.stream("GET", "/api/v1/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        wait_until(lambda: found.server.hub.observers, "somebody who observes")
        said = found.http.post("/api/v1/kick", json={"connection": viewer["connection"], "reason": "a test"})
        assert said.json()["kicked"] == 1
        what, event = next(item for item in events_of(response) if item[0] == "close")
    assert (what, event["connection"], event["reason"]) == ("close", viewer["connection"], "kicked")
    assert "a test" in event["why"]
    wait_until(lambda: player.end, "the player's end")


def test_ban_and_limits_when_changed_are_told_as_changes(admin):
    found = admin()
    with found.http.stream("GET", "/api/v1/events") as response:
        wait_until(lambda: found.server.hub.observers, "somebody who observes")
        wait_until(lambda: found.listener._app.streams._version, "the changes so far")
        assert found.http.post("/api/v1/ban", json={"network": "192.0.2.7", "reason": "rude"}).status_code == 200
        what, change = next(events_of(response))
    assert (what, change["what"], change["detail"]["cidr"]) == ("change", "ban", "192.0.2.7/32")
    assert [item["cidr"] for item in found.http.get("/api/v1/bans").json()["bans"]] == ["192.0.2.7/32"]
    assert found.http.post("/api/v1/unban", json={"network": "192.0.2.7"}).json()["lifted"]
    said = found.http.post("/api/v1/limits", json={"soft": "1MiB,100,2s"}).json()
    assert said["soft"] == "1MiB,100,2s" == found.http.get("/api/v1/limits").json()["soft"]


def test_listener_when_it_could_be_reached_by_others_without_a_token_refuses_to_start():
    with (
        open_live_server(admin="0.0.0.0:0") as server,
        pytest.raises(ConfigError, match="anybody could operate the server") as caught,
    ):
        admin_of(server)
    assert "admin_token_file" in caught.value.hint


def test_listener_when_its_port_is_taken_says_so():
    with socket.create_server((LOOPBACK, 0), family=FAMILY) as taken:
        address = loopback(taken.getsockname()[1])
        with open_live_server(admin=address) as server:
            listener = admin_of(server)
            with pytest.raises(ConfigError, match=re.escape(address)):
                listener.start()
            listener.stop(1.0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "rebound.example.com"}, 421),
        ({"host": "127.0.0.1.example.com:80"}, 421),
        ({"origin": "http://example.com"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_change_when_a_page_of_another_site_sends_it_is_refused(admin, headers, status):
    found = admin()
    usual = {"content-type": "application/json"}
    said = found.http.post("/api/v1/ban", content=b'{"network": "192.0.2.7"}', headers=usual | headers)
    assert said.status_code == status
    assert set(said.json()) == {"code", "message", "hint"}
    assert len(found.server.admission.bans) == 0


def test_body_when_it_is_too_long_is_refused_however_it_comes(admin):
    found = admin()
    body, kind = b" " * 70_000, {"content-type": "application/json"}
    for content in (body, iter([body])):
        said = found.http.post("/api/v1/ban", content=content, headers=kind)
        assert (said.status_code, said.json()["code"]) == (413, "TOO_LONG")


def test_tokens_when_there_are_some_decide_who_may_do_what(admin):
    """Without a token there is only the page; with one for looking no change; a query is no place for it."""
    found = admin(tokens=f"# who\n{ADMIN}\n{BASIC} basic\n")
    get, post = found.http.get, found.http.post
    assert get("/healthz").status_code == 200
    for path in ("/api/v1/streams", "/openapi.json", "/api/v1/events", f"/api/v1/streams?token={ADMIN}"):
        said = get(path)
        assert (said.status_code, said.headers["www-authenticate"]) == (401, "Bearer")
    basic, full = ({"authorization": f"Bearer {token}"} for token in (BASIC, ADMIN))
    assert get("/api/v1/streams", headers=basic).status_code == 200
    assert post("/api/v1/ban", json={"network": "192.0.2.7"}, headers=basic).status_code == 403
    assert post("/api/v1/ban", json={"network": "192.0.2.7"}, headers=full).status_code == 200
    assert get("/api/v1/streams", headers={"authorization": f"Bearer {ADMIN}x"}).status_code == 401
    assert get("/api/v1/streams", headers=full | {"host": "admin.example.com"}).status_code == 200


def test_listeners_of_one_token_leave_room_for_others(admin, monkeypatch):
    monkeypatch.setattr(streaming, "MOST_LISTENERS", 4)
    found = admin(tokens=f"{ADMIN}\n{BASIC} basic\n")
    basic, full = ({"authorization": f"Bearer {token}"} for token in (BASIC, ADMIN))
    with contextlib.ExitStack() as stack:

        def listen(headers):
            return stack.enter_context(found.http.stream("GET", "/api/v1/events", headers=headers)).status_code

        assert [listen(who) for who in (basic, basic, basic)] == [200, 200, 503]
        assert [listen(who) for who in (full, full)] == [200, 503]

    def listens_again():
        with found.http.stream("GET", "/api/v1/events", headers=basic) as response:
            return response.status_code == 200

    wait_until(listens_again, "room for a listener")


def test_ready_when_the_server_drains_says_so(admin):
    """A balancer sends nobody to a server that drains."""
    found = admin()
    assert found.http.get("/readyz").json() == {"status": "ready"}
    with socket.create_connection(found.server.address, timeout=20):
        wait_until(lambda: len(found.server.connections()) == 1, "a connection that keeps it")
        assert found.http.post("/api/v1/drain", json={"within": 60}).json()["draining"]
        said = found.http.get("/readyz")
        assert (said.status_code, said.json()) == (503, {"status": "draining"})
        assert found.http.get("/healthz").status_code == 200


def test_paths_when_there_is_nothing_are_told_as_problems(admin):
    found = admin()
    for method, path, status in (
        ("GET", "/api/v1/nothing", 404),
        ("DELETE", "/api/v1/kick", 405),
        ("GET", "/api/v1/connections?state=HAPPY", 422),
        ("GET", "/api/v1/connections?sort=worst&sort=sent", 422),
        ("GET", "/api/v1/connections/zero", 422),
    ):
        said = found.http.request(method, path)
        assert (said.status_code, set(said.json())) == (status, {"code", "message", "hint"}), path
        assert said.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in said.headers["content-security-policy"]
        assert "server" not in said.headers


def sample(text, name, **labels):
    """Return the value of one sample of metrics. None: it is not there."""
    for family in text_string_to_metric_families(text):
        for item in family.samples:
            if item.name == name and item.labels == labels:
                return item.value
    return None


def test_metrics_when_a_viewer_comes_and_goes_are_by_stream_and_never_go_down(admin, clients):
    found = admin()
    assert found.http.get("/metrics").status_code == 200
    clients.publish(found.server, SyntheticSource())
    player = clients.play(found.server)
    wait_for_viewers(found.server, 1)
    viewer = {"stream": NAME, "role": "viewer"}

    def metrics():
        said = found.http.get("/metrics")
        assert said.headers["content-type"].startswith("text/plain; version=0.0.4")
        return said.text

    def value(name, **labels):
        return sample(metrics(), name, **labels)

    wait_until(lambda: value("flowctl_sent_bytes_total", **viewer), "bytes of the viewer")
    wait_until(lambda: value("flowctl_flush_rounds_total"), "rounds of the fan-out")
    first = metrics()
    assert sample(first, "flowctl_connections", **viewer, state="READY") == 1
    assert sample(first, "flowctl_viewer_delay_seconds_bucket", stream=NAME, le="+Inf") == 1
    assert sample(first, "flowctl_streams") == 1
    assert str(player.local_port) not in first
    sent = sample(first, "flowctl_sent_bytes_total", **viewer)
    player.connection.close()
    gone = {**viewer, "reason": "peer closed"}
    wait_until(lambda: value("flowctl_closed_connections_total", **gone) == 1, "the end of the viewer")
    last = metrics()
    assert sample(last, "flowctl_sent_bytes_total", **viewer) >= sent
    assert sample(last, "flowctl_connections", **viewer, state="READY") in {None, 0}
    assert sample(last, "flowctl_state_seconds_total", **viewer, state="READY") > 0
    assert sample(last, "flowctl_flush_rounds_total") > 0


def test_surface_when_it_listens_on_ipv6_answers_there(admin, six):
    """Its own pages, which browsers are told may connect to no other host, and its addresses in brackets."""
    found = admin(admin=f"[{six}]:0", host=six)
    assert found.listener.bound[0].startswith("http://[::1]:")
    for path in ("/healthz", "/metrics", "/", "/api/v1/streams"):
        found_there = found.http.get(path)
        assert found_there.status_code == 200
        assert found_there.headers["content-security-policy"].endswith("connect-src 'self'; media-src 'self' blob:")
    url = json.loads(answer(found.server, "stats", b"{}", Permission.BASIC))["result"]["server"]["url"]
    assert url == f"rtmp://[::1]:{found.server.address[1]}/"


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("https://example.com", "example.com:443", 200),
        ("https://example.com", "EXAMPLE.com.", 200),
        ("https://example.com", "example.com:8443", 403),
        ("https://example.com", "example.com;script-src:1", 421),
    ],
)
def test_change_when_a_proxy_writes_the_host_in_another_way_is_of_its_own_origin(admin, origin, host, status):
    headers = {"authorization": f"Bearer {ADMIN}", "origin": origin, "host": host}
    said = admin(f"{ADMIN} admin").http.post("/api/v1/ban", json={"network": "192.0.2.7"}, headers=headers)
    assert said.status_code == status


@pytest.mark.parametrize("host", ["LOCALHOST", "localhost.", "[::1]:80", "tv.localhost:8080"])
def test_request_when_its_host_is_this_machine_by_any_name_is_answered(admin, host):
    assert admin().http.get("/healthz", headers={"host": host}).status_code == 200
