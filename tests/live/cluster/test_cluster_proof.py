"""Edges that prove what they may have: keys, TLS, and limits per address at origins."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest
from certificate_kit import Pair
from edge_kit import Encoder, House, frames, until
from structlog.testing import capture_logs

from flowctl.core.server.admission import AdmissionLimits
from flowctl.live.access.keys import hash_key, make_key, read_keys
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.cluster.edge.upstream import OriginAddress


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


class Keys:
    """A file with keys: one for publishers, one for players of some streams, one for edges."""

    def __init__(self, folder: Path):
        self.publish, self.play, self.edge = (make_key() for _ in range(3))
        lines = (
            f"{hash_key(self.publish)} publish",
            f"{hash_key(self.play)} play live/open*",
            f"{hash_key(self.edge)} edge live/*",
        )
        path = folder / "keys"
        path.write_text("\n".join(lines))
        self.access = StreamAccess(play_auth=(Proof.KEY,), keys=read_keys(path))


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


def with_proof(origin, proof, **more):
    return dataclasses.replace(origin.where, proof=proof, **more)


@pytest.mark.parametrize(
    ("proof", "streams"), [("", []), ("play", ["live/open"]), ("edge", ["live/open", "live/room"]), ("publish", [])]
)
def test_edge_when_streams_need_a_key_is_told_of_those_that_its_key_is_for(house, keys, proof, streams):
    origin = house.origin(access=keys.access)
    encoders = [Encoder(origin, name=name) for name in ("live/open", "live/room")]
    for encoder in encoders:
        encoder.pictures(60)
    until(lambda: len(origin.origin.pool.streams) == 2, "the segments")
    with capture_logs() as lines:
        edge = house.edge(with_proof(origin, f"key={getattr(keys, proof)}" if proof else ""))
        (outbound,) = until(lambda: origin.origin._offering and origin.origin._offering._diffusion._outbound)
        until(
            lambda: [item.stream for item in edge.edge.statistics().copies] == streams and outbound._ticket >= 4,
            "what it may have",
        )
    told = [line for line in lines if line["event"] == "edge may not have a stream"]
    assert len(told) == (proof != "edge")
    assert all("flowctl key make" in line["hint"] for line in told)
    assert ("127.0.0.1" in origin.server.nodes) == (proof == "edge")


def test_edge_when_its_key_is_none_is_sent_away_and_both_ends_say_so_once(house, keys):
    origin = house.origin(access=keys.access)
    with capture_logs() as lines:
        edge = house.edge(with_proof(origin, f"key={make_key()}"))
        until(lambda: edge.states() == ["resting"], "the end of the connection")
        until(lambda: edge.edge.statistics().origins[0].connections >= 4, "more tries")
        until(lambda: edge.states() == ["resting"], "the end of the last one")
    assert "hung up" in edge.edge.statistics().origins[0].why
    told = [line for line in lines if line["log_level"] == "warning"]
    assert {"edge refused", "origin not reached"} == {line["event"] for line in told}
    assert len(told) == 2
    refused = next(line for line in told if line["event"] == "edge refused")
    assert "the key of an edge is none" in refused["why"]
    assert "flowctl key make" in refused["hint"]
    assert not [line for line in lines if line["event"] in {"edge connected", "edge gone"}]


def test_edge_when_it_has_proven_that_it_is_one_is_counted_as_no_viewer(house, keys, tmp_path, monkeypatch):
    """It follows more streams than an address may have connections, over TLS, and nothing of it is punished."""
    pair = Pair(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.authority))
    origin = house.origin(
        offer="tls://127.0.0.1:0",
        access=keys.access,
        admission=AdmissionLimits(connections_per_address=4, new_per_address_and_s=0.0),
        tls_certificate=pair.certificate,
        tls_key=pair.key,
        rtmps="127.0.0.1:0",
    )
    encoder = Encoder(origin)
    encoder.pictures(30)
    rtmps = origin.server.listeners[-1].address[1]
    edge = house.edge(with_proof(origin, f"key={keys.edge}", tls=True, rtmp_port=rtmps), follow=True, streams=())
    until(lambda: "127.0.0.1" in origin.server.nodes, "the proof")
    viewers = [edge.play(f"live/none{number}") for number in range(6)]
    viewers.append(edge.play())
    until(lambda: frames(viewers[-1].media)[-1:] == encoder.sent[-1:], "the newest frame")
    until(lambda: len(origin.server.connections()) > 6, "more connections than an address may have")
    assert origin.server.admission.refused == {}
    penalties = origin.server.penalties
    assert "127.0.0.1" in penalties._spared
    edge.server.stop(1.0)
    until(lambda: "127.0.0.1" not in origin.server.nodes, "its end")
    assert "127.0.0.1" not in penalties._spared


def test_edge_when_it_does_not_trust_its_origin_says_so_and_what_to_do(house, tmp_path, monkeypatch):
    pair = Pair(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    origin = house.origin(offer="tls://127.0.0.1:0", tls_certificate=pair.certificate, tls_key=pair.key)
    with capture_logs() as lines:
        edge = house.edge(dataclasses.replace(origin.where, tls=True))
        until(lambda: ["not trust" in item.why for item in edge.edge.statistics().origins] == [True], "the reason")
    (told,) = [line for line in lines if line["event"] == "origin not reached"]
    assert "unable to get local issuer certificate" in told["why"]
    assert "ca_file" in told["hint"]
    assert not [line for line in lines if line["event"] == "origin connected"]
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.authority))  # as if the file had been renewed
    until(lambda: edge.states() == ["fetching"], "trust")


def test_edge_when_the_key_in_its_file_is_renewed_is_let_in(house, keys, tmp_path):
    file = tmp_path / "edge.key"
    file.touch(mode=0o600)
    file.write_text(make_key())
    origin = house.origin(access=keys.access)
    encoder = Encoder(origin)
    encoder.pictures(60)
    edge = house.edge(OriginAddress.parse(f"{origin.where}?key=@{file}"))
    until(lambda: "hung up" in "".join(item.why for item in edge.edge.statistics().origins), "the refusal")
    file.write_text(keys.edge)
    until(lambda: "127.0.0.1" in origin.server.nodes, "the proof")
    assert keys.edge not in repr(edge.edge.statistics())


def test_edges_when_they_are_too_many_of_one_address_are_told_why(house):
    origin = house.origin(admission=AdmissionLimits(connections_per_address=1))
    with capture_logs() as lines:
        first = house.edge(origin)
        until(lambda: first.states() == ["fetching"], "the first edge")
        second = house.edge(origin)
        until(lambda: second.states() == ["resting"], "the refusal")
        for _ in range(20):
            socket.create_connection(("127.0.0.1", origin.where.port)).close()
        until(lambda: sum(origin.origin._listener.admission.refused.values()) > 20, "the refusals")
    (refused,) = [line for line in lines if line["event"] == "edge refused"]  # and one for all in the next 10 s
    assert (refused["limit"], "--per-address" in refused["hint"]) == ("connections_per_address", True)
    lost = [line for line in lines if line["event"] == "origin not reached"]
    assert "--per-address" in lost[0]["hint"]


def test_origin_address_when_it_has_a_key_shows_it_nowhere():
    found = OriginAddress.parse("rtmps://10.0.0.5:7/8?key=secret")
    assert found == OriginAddress("10.0.0.5", 7, 8, tls=True, proof="key=secret")
    assert "secret" not in f"{found}{found!r}"
    url = found.url("live/room")
    assert (url.scheme, url.port, url.query["key"], url.path) == ("rtmps", 8, "secret", "live/room")
    assert "secret" not in str(url)


def test_key_when_it_is_for_edges_is_one_to_play_and_not_to_publish(keys):
    for use, answers in (("edge", (True, True, False)), ("play", (False, False, False))):
        key = getattr(keys, use)
        found = [keys.access.keys.allows([key], kind, "live/room") for kind in ("edge", "play", "publish")]
        assert tuple(found) == answers
    everything = f"{hash_key('k' * 20)}"
    Path(keys.access.keys.path).write_text(everything)
    assert not read_keys(Path(keys.access.keys.path)).allows(["k" * 20], "edge", "live/room")


def test_origin_when_its_port_is_probed_has_one_line(house):
    """A connection that says nothing is no edge's: a balancer looks whether the port is open."""
    origin = house.origin()
    host, port = origin.origin.offers.rsplit(":", 1)
    with capture_logs() as lines:
        for _ in range(10):
            socket.create_connection((host, int(port)), 10).close()
        listener = origin.origin._listener
        until(lambda: sum(listener.closed_by_reason.values()) == 10 and not origin.origin._offering.edges, "their end")
    assert [line["event"] for line in lines if line["event"].startswith("edge ")] == ["edge gone"]
