"""Relays over TLS: keys from files, authorities, and nginx that terminates TLS for nginx-rtmp."""

from __future__ import annotations

import pytest
from certificate_kit import Pair
from e2e_kit import wait_until
from relay_kit import nginx, relaying, same_frames, source
from structlog.testing import capture_logs

from flowctl.live.access.keys import hash_key, make_key, read_keys
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.wire.client.source import FlvFile


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    return Pair(tmp_path)


@pytest.fixture
def secured(live, pair, tmp_path):
    """Return a server of TLS that asks for a key, the address of its streams, and the key."""
    key = make_key()
    (tmp_path / "keys").write_text(hash_key(key))
    access = StreamAccess(play_auth=(Proof.KEY,), publish_auth=(Proof.KEY,), keys=read_keys(tmp_path / "keys"))
    server = live(rtmps="127.0.0.1:0", tls_certificate=pair.certificate, tls_key=pair.key, access=access)
    return server, f"rtmps://localhost:{server.listeners[-1].address[1]}", key


def test_push_over_tls_when_the_key_in_its_file_is_renewed_goes_on_and_shows_no_key(secured, pair, clients, tmp_path):
    target, address, key = secured
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("WRONG-KEY")
    rule = f"live/*={address}/copy/{{stream}}?key=@{file}"
    with capture_logs() as lines, relaying(push=rule, ca_file=pair.authority) as (server, relays):
        publisher = clients.publish(server, source())
        wait_until(lambda: any("key is wrong" in row["why"] for row in relays.figures()["push"]), "the refusal")
        file.write_text(key)
        wait_until(lambda: target.hub.is_published("copy/stream"), "the stream at the other server")
        pull = f"back/*={address}/copy/{{stream}}?key=@{file}"
        with relaying(pull=pull, ca_file=pair.authority) as (second, others):
            player = clients.play(second, name="back/stream")
            wait_until(lambda: same_frames(player, publisher), "frames that went there and back")
            told = f"{lines} {relays.figures()} {others.figures()} {server.config} {second.config}"
    assert key not in told
    assert "WRONG-KEY" not in told
    assert f"rtmps://localhost:{address.rpartition(':')[2]}/copy/***" in told


def test_relay_when_it_does_not_trust_the_other_server_says_why_and_what_to_do(secured, pair, clients):
    target, address, key = secured
    rules = {"push": f"live/*={address}/copy/{{stream}}?key={key}", "pull": f"x/y={address}/live/y?key={key} always"}
    with relaying(**rules) as (server, relays):
        clients.publish(server, source())

        def why():
            rows = [*relays.figures()["push"], *relays.figures()["pull"]]
            return len(rows) == 2 and [row["why"] for row in rows if "not trust" in row["why"]]

        told = wait_until(lambda: len(why() or ()) == 2 and why(), "why both wait")
    assert all("unable to get local issuer certificate; name the authority" in item for item in told)
    assert not target.hub.is_published("copy/stream")


def test_nginx_when_it_terminates_tls_is_pushed_to_and_pulled_from(pair, clients, tmp_path, sample):
    with nginx(tmp_path, pair) as url, relaying(push=f"live/*={url}", ca_file=pair.authority) as (server, _):
        publisher = clients.publish(server, FlvFile(sample("plain")), loop=True)
        with relaying(pull=f"back/*={url.replace('127.0.0.1', 'localhost')}", ca_file=pair.authority) as (second, _):
            player = clients.play(second, name="back/stream")
            wait_until(lambda: same_frames(player, publisher), "frames that went through nginx and back")
