"""Origins of an edge from DNS, asked of a real server of it on loopback."""

from __future__ import annotations

from random import Random

import dns.rcode
import pytest
from certificate_kit import Pair
from dns_kit import DnsServer
from edge_kit import Encoder, House, cut_off, frames, until, whole
from structlog.testing import capture_logs

from flowctl.errors import ConfigError
from flowctl.live.cluster import origin
from flowctl.live.cluster.edge import discovery
from flowctl.live.cluster.edge.discovery import (
    LEAST_S,
    MOST_ORIGINS,
    MOST_S,
    Lookup,
    OriginName,
    OriginWatch,
    parse_origin,
    parse_server,
)
from flowctl.live.cluster.edge.edge import MOST_UPSTREAMS
from flowctl.live.cluster.edge.upstream import OriginAddress
from flowctl.log import redact_text

NAME = "origins.test"


@pytest.fixture
def server():
    server = DnsServer()
    yield server
    server.close()


@pytest.fixture
def house():
    house = House()
    yield house
    house.close()


def found(server, text, seed=0):
    """Look a name up once."""
    lookup = Lookup(("127.0.0.1", server.port), seed)
    return lookup.find(parse_origin(text))


def hosts(server, text, seed=0):
    return sorted(item.host for item in found(server, text, seed)[0])


def test_name_when_it_has_addresses_is_so_many_origins_for_the_time_of_its_records(server):
    """What else the text says holds for each: ports, TLS, the key; the certificate is for the name."""
    server.ttl_s = 17
    server.put(NAME, "A", "10.0.0.1", "10.0.0.2")
    origins, for_s = found(server, f"dns+rtmps://{NAME}:2936/2935?key=k")
    assert for_s == 17
    assert sorted(map(str, origins)) == ["10.0.0.1:2936", "10.0.0.2:2936"]
    url = origins[0].url("live/room")
    assert (url.scheme, url.host, url.port, url.raw_query) == ("rtmps", NAME, 2935, "key=k")
    assert {item.name for item in origins} == {NAME}


def test_name_when_it_has_addresses_of_both_kinds_counts_each_origin_once(server):
    """An origin of a dual-stack cluster has both; one that has IPv6 alone is found too."""
    server.put(NAME, "A", "10.0.0.1")
    server.put(NAME, "AAAA", "fd00::1")
    server.put("six.test", "AAAA", "fd00::6")
    assert hosts(server, f"dns+{NAME}") == ["10.0.0.1"]
    assert hosts(server, "dns+six.test") == ["fd00::6"]


def test_services_when_listed_tell_host_and_port_and_one_that_has_gone_does_not_hide_the_others(server):
    """SRV: the port is that of the record, the certificate is for the name without the service."""
    service = "_segments._tcp.origins.test"
    server.put(service, "SRV", "0 1 2936 a.origins.test.", "0 1 2937 b.origins.test.", "0 1 2938 gone.origins.test.")
    server.put("a.origins.test", "A", "10.0.0.1")
    server.put("b.origins.test", "A", "10.0.0.2")
    origins, _ = found(server, f"dnssrv+{service}/2935")
    assert sorted(map(str, origins)) == ["10.0.0.1:2936", "10.0.0.2:2937"]
    assert {(item.name, item.rtmp_port) for item in origins} == {(NAME, 2935)}


def test_answer_when_truncated_is_asked_for_over_tcp(server):
    """A service with many members does not fit into a packet of UDP."""
    server.put(NAME, "A", *(f"10.0.1.{number}" for number in range(60)))
    assert len(hosts(server, f"dns+{NAME}")) == 60
    assert (server.asked["udp", "A"], server.asked["tcp", "A"]) == (1, 1)


def test_answer_when_it_has_a_thousand_records_is_used_in_part_and_nearly_the_same_part_each_time(server):
    """One edge does not connect to a thousand; edges choose differently, and an edge the same in any order."""
    everything = [f"10.1.{number // 250}.{number % 250}" for number in range(1000)]
    server.put(NAME, "A", *everything)
    first = hosts(server, f"dns+{NAME}", 1)
    assert len(first) == MOST_ORIGINS
    assert hosts(server, f"dns+{NAME}", 2) != first
    server.put(NAME, "A", *reversed([item for item in everything if item != first[0]]))
    again = hosts(server, f"dns+{NAME}", 1)
    assert set(first[1:]) <= set(again)
    assert len(again) == MOST_ORIGINS


def test_addresses_when_they_can_be_no_origin_are_left_out(server):
    """Private ones are an origin's as a rule; that of a cloud's secrets, of everybody or of nobody never is."""
    server.put(NAME, "A", "169.254.169.254", "0.0.0.0", "224.0.0.1", "255.255.255.255", "192.168.3.4")
    assert hosts(server, f"dns+{NAME}") == ["192.168.3.4"]
    server.put(NAME, "A")
    server.put(NAME, "AAAA", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "::", "fd00::7")
    assert hosts(server, f"dns+{NAME}") == ["fd00::7"]
    server.put(NAME, "A", "169.254.169.254")
    with pytest.raises(OSError, match="no address that can be"):
        found(server, f"dns+{NAME}")


@pytest.mark.parametrize("code", [dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN, dns.rcode.REFUSED, "empty", b"\xc0\x0c" * 30])
def test_origins_when_dns_fails_stay_as_they_were(server, code, monkeypatch):
    """A look that fails tells nothing; the next one comes soon, and later after each failure."""
    monkeypatch.setattr(discovery, "_LIFETIME_S", 0.3)
    told = []
    server.put(NAME, "A", "10.0.0.1")
    lookup = Lookup(("127.0.0.1", server.port))

    watch = OriginWatch(OriginName(OriginAddress(NAME)), lookup.find, lambda _, item: told.append(item), Random(1))
    first = watch.look()
    if code == "empty":
        server.put(NAME, "A")
    else:
        server.failing[NAME] = code
    retries = [watch.look() for _ in range(3)]
    server.failing.clear()
    server.put(NAME, "A", "10.0.0.2")
    last = watch.look()
    assert [[item.host for item in items] for items in told] == [["10.0.0.1"], ["10.0.0.2"]]
    assert first == last == LEAST_S  # the records say 0 s
    assert all(0.5 * 2**number <= wait_s <= 2**number for number, wait_s in enumerate(retries)), retries


def test_look_when_records_last_for_days_is_repeated_within_a_minute(server):
    """An origin that is new is found within it, whatever the record of yesterday says."""
    server.ttl_s = 3 * 86_400
    server.put(NAME, "A", "10.0.0.1")
    watch = OriginWatch(parse_origin(f"dns+{NAME}"), Lookup(("127.0.0.1", server.port)).find, print, Random(1))
    assert watch.look() == MOST_S


def test_server_of_dns_when_silent_costs_the_other_origins_nothing(house, server, monkeypatch):
    """Nothing but the look waits for it."""
    monkeypatch.setattr(discovery, "_LIFETIME_S", 0.5)
    server.failing[NAME] = None
    origin = house.origin()
    with capture_logs() as lines:
        edge = house.edge(parse_origin(f"dns+{NAME}"), origin, dns=server.where)
        until(lambda: server.asked["udp", "A"], "the question")
        encoder = Encoder(origin)
        encoder.pictures(60)
        viewer = edge.play()
        encoder.pictures(60)
        whole(viewer, encoder, cut_off(encoder))
        until(lambda: [line for line in lines if line["event"] == "origins not looked up"], "the end of the look")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("dns+", "no origin"),
        ("dns+10.0.0.1:1936", "an address and no name"),
        ("dns+[fd00::1]", "an address and no name"),
        ("dnssrv+_segments._tcp.origins:1936", "has a port"),
        ("dns+dns+origins", "no origin"),
    ],
)
def test_name_when_it_is_not_clear_is_refused(text, hint):
    """The error says what is wrong with it."""
    with pytest.raises(ConfigError, match=hint) as raised:
        parse_origin(f"{text}?key=secret")
    assert "secret" not in str(raised.value)


def test_hints_when_they_say_where_a_key_goes_are_shown_whole():
    """What looks like a key is masked in all that is written, in a hint too."""
    with pytest.raises(ConfigError) as raised:
        OriginAddress.parse("foo://bar")
    for hint in (raised.value.hint, origin._KEY_HINT):
        assert "?key=" in hint
        assert redact_text(hint) == hint


def test_server_of_dns_when_given_is_an_address_with_or_without_a_port():
    """A name of it could not be looked up."""
    assert parse_server("10.0.0.2") == ("10.0.0.2", 53)
    assert parse_server("127.0.0.1:8600") == ("127.0.0.1", 8600)
    assert parse_server("[fd00::1]:8600") == ("fd00::1", 8600)
    assert parse_server("fd00::1") == ("fd00::1", 53)
    for text in ("dns.test", "10.0.0.2:0", "10.0.0.2:x"):
        with pytest.raises(ConfigError, match="no server of DNS"):
            parse_server(text)


@pytest.mark.parametrize("follow", [False, True])
def test_origins_when_they_come_and_go_in_dns_cost_viewers_nothing(house, server, monkeypatch, follow):
    """A rollout: a second origin comes, the first leaves DNS, serves for a while, and ends; DNS fails in between."""
    monkeypatch.setattr(discovery, "LEAST_S", 0.05)
    old, new = house.origin(), house.origin()
    service = "_segments._tcp.origins.test"

    def name(*origins):
        records = [f"0 1 {item.where.port} {chr(97 + index)}.test." for index, item in enumerate(origins)]
        server.put(service, "SRV", *records)

    for index, _ in enumerate((old, new)):
        server.put(f"{chr(97 + index)}.test", "A", "127.0.0.1")
    name(old)
    rtmp_ports = {old.where.port: old.where.rtmp_port, new.where.port: new.where.rtmp_port}
    at = OriginName.at
    monkeypatch.setattr(  # on one machine each has a port of RTMP of its own
        OriginName, "at", lambda self, host, port: discovery.replace(at(self, host, port), rtmp_port=rtmp_ports[port])
    )
    edge = house.edge(parse_origin(f"dnssrv+{service}"), follow=follow, dns=server.where)
    encoder = Encoder(old, new)
    encoder.pictures(60)
    viewer = edge.play()
    until(lambda: frames(viewer.media), "the first pictures")
    name(old, new)
    until(lambda: edge.states() == ["fetching"] * 2, "the new origin is found")
    encoder.pictures(50)
    name(new)
    until(lambda: [item.named for item in edge.edge._upstreams] == [False, True], "the old one is not named any more")
    encoder.pictures(50)
    assert edge.states() == ["fetching"] * 2  # it still serves
    server.failing[service] = dns.rcode.SERVFAIL
    old.kill()
    encoder.pictures(50)
    until(lambda: edge.states() == ["fetching"], "the old one is left when it has ended")
    encoder.pictures(60)
    assert len(whole(viewer, encoder, None if follow else cut_off(encoder))) > 400
    assert edge.stream().gaps == 0
    assert [item.origin for item in edge.origins()] == [str(new.where)]


@pytest.mark.parametrize("name", ["localhost", "other.test"])
def test_origin_when_it_speaks_tls_needs_a_certificate_for_the_name_that_was_given(
    house, server, tmp_path, monkeypatch, name
):
    """Its address comes from DNS, which anybody on the way may have made up."""
    pair = Pair(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.authority))
    files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
    origin = house.origin(offer="tls://127.0.0.1:0", rtmps="127.0.0.1:0", **files)
    server.put(name, "A", "127.0.0.1")
    rtmps = origin.server.listeners[-1].address[1]
    where = parse_origin(f"dns+rtmps://{name}:{origin.where.port}/{rtmps}")
    edge = house.edge(where, dns=server.where, follow=True)
    encoder = Encoder(origin)
    encoder.pictures(30)
    if name == "localhost":
        viewer = edge.play()
        until(lambda: frames(viewer.media)[-1:] == encoder.sent[-1:], "the newest frame, by RTMPS")
        assert edge.states() == ["fetching"]
    else:
        until(lambda: edge.states() == ["resting"], "the refusal")
        assert "certificate" in edge.origins()[0].why


def test_answer_when_it_flaps_between_many_costs_a_bounded_number_of_connections(house, server, monkeypatch):
    """Each look has other addresses: those that no name stands for make room."""
    monkeypatch.setattr(discovery, "LEAST_S", 0.01)
    edge = house.edge(parse_origin(f"dns+{NAME}:9"), dns=server.where)
    most = 0
    for step in range(8):
        server.put(NAME, "A", *(f"127.{step + 1}.0.{number}" for number in range(1, 60)))
        until(
            lambda known=f"127.{step + 1}.": any(item.origin.startswith(known) for item in edge.origins()), "they come"
        )
        most = max(most, len(edge.edge._upstreams))
    assert 59 <= most <= MOST_UPSTREAMS
