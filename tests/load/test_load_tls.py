"""Load runs over TLS, in which each viewer brings a key of its own."""

from __future__ import annotations

import json

import pytest
from certificate_kit import Pair

from flowctl.core.server.admission import AdmissionLimits
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.live.access.keys import hash_key, make_key, read_keys
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.config import LiveConfig
from flowctl.live.httpd.serving import serve_http
from flowctl.live.server import LiveServer
from flowctl.load.plan import LoadPlan
from flowctl.load.results.result import PeerEnd, PeerKind
from flowctl.load.results.summary import whole
from flowctl.load.run import read_queries, run_load
from flowctl.load.target import resolve


@pytest.fixture
def pair(tmp_path, monkeypatch):
    made = Pair(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
    return made


@pytest.fixture
def keys(tmp_path):
    """A key for publishers, then keys for players, and a file of their hashes."""
    made = [make_key() for _ in range(4)]
    kinds = ["publish", "play", "play", "play"]
    (tmp_path / "keys").write_text("\n".join(f"{hash_key(key)} {kind}" for key, kind in zip(made, kinds, strict=True)))
    return made


@pytest.fixture
def server(pair, keys, tmp_path):
    config = LiveConfig(
        port=0,
        rtmps="127.0.0.1:0",
        https="127.0.0.1:0",
        tls_certificate=pair.certificate,
        tls_key=pair.key,
        access=StreamAccess(publish_auth=(Proof.KEY,), play_auth=(Proof.KEY,), keys=read_keys(tmp_path / "keys")),
        admission=AdmissionLimits(connections_per_address=2000, burst_per_address=2000),
    )
    live = LiveServer(config)
    serve_http(live)
    with live:
        yield live


def address_of(server, scheme):
    name = "rtmps" if scheme == "rtmps" else "https"
    port = next(item.address[1] for item in server.listeners if item.name == name)
    return f"{scheme}://localhost:{port}/live/room"


@pytest.mark.realtime
def test_run_over_tls_when_each_viewer_brings_its_own_key_lets_in_those_whose_key_is_good(server, keys, tmp_path):
    """Viewers whose keys are good get every frame, over WebSocket too; an attacker behind TLS is judged as ever."""
    publish, *play = keys
    lines = tmp_path / "queries"
    lines.write_text("\n".join([f"key={play[0]}", f"live/room?key={play[1]}", "", "key=WRONG", f"key={play[2]}"]))
    url = f"{address_of(server, 'rtmps')}?key={publish}"
    profiles = {"healthy": 8, "slow@100k": 1, "half-close": 1, "B03": 1}
    more = {"bit_rate": 800_000, "key_interval_s": 0.5, "duration_s": 3.0, "measure_every": 2}
    seen = []

    def watch_over_websocket(_sample):
        if not seen:
            other = f"{address_of(server, 'wss')}.flv?key={play[0]}"
            seen.append(run_load(LoadPlan(url=other, profiles={"healthy": 2}, duration_s=1.0)))

    result = run_load(
        LoadPlan(url=url, publishers=1, profiles=profiles, query_file=str(lines), **more), watch_over_websocket
    )
    healthy = [row for row in result.peers if row.kind is PeerKind.HEALTHY]
    refused = [row for row in healthy if row.end is PeerEnd.REFUSED]
    assert (len(healthy), len(refused)) == (8, 2)
    assert {"NetStream.Play.Failed"} == {row.end_code for row in refused}
    let_in = [row for row in healthy if row not in refused]
    assert {0} == {row.missing_video for row in let_in}
    assert all(row.first_frame_s and row.wire_bytes > 100_000 for row in let_in)
    assert {True, False} == {row.parsed for row in let_in}
    (attacker,) = [row for row in result.peers if row.kind is PeerKind.HOSTILE]
    assert (attacker.expectation_met, attacker.handshake_s is not None) == (True, True), attacker
    text = json.dumps(whole(result, []))
    assert not any(key in text for key in (*keys, "WRONG"))
    assert {PeerEnd.RUN_ENDED} == {row.end for row in seen[0].peers}
    assert all(row.video > 10 and not row.missing_video for row in seen[0].peers)


def test_server_when_it_is_not_trusted_is_refused_before_anything_starts(server, pair, monkeypatch):
    url, target = resolve(address_of(server, "rtmps"), allow_remote=False)
    assert (url.host, target.address[0]) == ("localhost", "127.0.0.1")
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(RemoteProtocolError, match="we do not trust"):
        resolve(address_of(server, "https"), allow_remote=False)


@pytest.mark.parametrize("text", ["", "just-a-token", "key=a\nroom", "&".join(["a=b"] * 100)])
def test_queries_when_they_are_none_are_refused_without_showing_one(tmp_path, text):
    path = tmp_path / "queries"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_queries(str(path))
    assert "just-a-token" not in f"{caught.value} {caught.value.hint}"
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_queries(str(path))
