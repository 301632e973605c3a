"""Viewers that are sent to edges: what edges tell, which one is chosen, and who goes there."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from edge_kit import Encoder, House, frames, until
from follow_kit import player
from structlog.testing import capture_logs

from flowctl.core.server.admission import AdmissionLimits
from flowctl.errors import ConfigError, RemoteProtocolError
from flowctl.live.access.keys import hash_key, make_key, read_keys
from flowctl.live.access.rules import StreamAccess
from flowctl.live.cluster.edge import edge as edge_module
from flowctl.live.cluster.edge.edge import EdgeConfig
from flowctl.live.cluster.edge.upstream import OriginAddress
from flowctl.live.cluster.redirect import KNOWN_S, MOST_EDGES, MOST_PASSED_ON, EdgeBook, EdgeReport
from flowctl.live.config import LiveConfig, Redirect
from flowctl.wire.client.address import MOST_REDIRECTS, parse_address, redirected
from flowctl.wire.client.connect import ClientRun
from flowctl.wire.client.player import PlayProfile, RtmpPlayer
from flowctl.wire.rtmp.events import PlayStarted, Rejected
from flowctl.wire.rtmp.url import parse_url


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def report(number, *, connections=0, most=100, drains=False, hls=True, scheme="rtmp", made_at=1000.0):
    return EdgeReport(
        name=f"{number:016x}",
        number=int(made_at * 1000),
        bases={scheme: f"{scheme}://edge{number}.test"},
        hls=hls,
        connections=connections,
        most=most,
        drains=drains,
        made_at=made_at,
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(clock):
    return EdgeBook(clock, Random(1))


def told(book, *reports, by=1):
    for item in reports:
        book.take_report(item.words(book._clock()), by)


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


# -- the choice


def test_crowd_when_it_comes_at_once_is_spread_before_any_edge_tells_of_it(book):
    """A thousand viewers between two reports: no edge gets more than its share and a few."""
    told(book, *(report(number, most=1000) for number in range(10)))
    counts = Counter(book.choose("rtmp") for _ in range(1000))
    assert len(counts) == 10
    assert max(counts.values()) - min(counts.values()) <= 10, counts


def test_crowd_when_edges_differ_in_size_fills_them_alike(book):
    """An edge that may have three times the connections gets three times the viewers; beyond all, none is named."""
    told(book, report(1, most=100), report(2, most=300))
    counts = Counter(book.choose("rtmp") for _ in range(200))
    assert 45 <= counts["rtmp://edge1.test"] <= 55
    counts += Counter(book.choose("rtmp") for _ in range(300))
    assert counts == {"rtmp://edge1.test": 100, "rtmp://edge2.test": 300, None: 100}


def test_client_when_it_asks_again_and_again_does_not_have_edges_look_full(book):
    """It goes nowhere; the others, whom the origin could not carry, are still sent away."""
    told(book, *(report(number, most=100) for number in range(4)))
    assert all(book.choose("rtmp", None, "192.0.2.1") for _ in range(2000))
    assert [book.choose("rtmp", None, f"192.0.2.{number % 100 + 2}") for number in range(400)].count(None) == 64


def test_viewers_when_their_edge_has_told_of_them_do_not_count_twice_for_long(book, clock):
    """Those that were sent there before the last report but one are among its connections, or never came."""
    told(book, report(1, most=10))
    assert [book.choose("rtmp") for _ in range(11)].count(None) == 1
    for step in (1, 2):
        clock.now += 1.0
        told(book, report(1, most=10, connections=5, made_at=clock.now))
        assert (book.choose("rtmp") is None) == (step == 1)


def test_viewers_when_a_report_comes_by_two_ways_count_until_the_next_one(book, clock):
    """Two regional edges pass it on, the slower one later: it says no more than it did, nor do those sent since."""
    told(book, report(1, most=10))
    assert [book.choose("rtmp") for _ in range(11)].count(None) == 1
    for by, late_s in ((1, 0.01), (2, 0.03), (3, 0.2)):
        clock.now = 1002.0 + late_s
        told(book, dataclasses.replace(report(1, most=10, made_at=1002.0), made_at=clock.now), by=by)
        assert book.choose("rtmp") is None


def test_report_when_it_has_no_number_is_told_from_the_one_before_by_its_time(book, clock):
    """Of an edge of the version before, which is still let in."""
    for made_at, connections in ((1000.0, 0), (1002.0, 10)):
        clock.now = made_at
        words = json.loads(report(1, most=10, connections=connections, made_at=made_at).words(clock.now))
        del words["number"]
        book.take_report(json.dumps(words).encode(), 1)
    assert book.choose("rtmp") is None


@pytest.mark.parametrize(
    "changed", [{"connections": 100}, {"drains": True}, {"scheme": "rtmps"}, {"made_at": 1000.0 - KNOWN_S}]
)
def test_edge_when_full_draining_old_or_of_another_scheme_is_not_named(book, changed):
    told(book, report(1, **changed))
    assert book.choose("rtmp") is None
    told(book, report(2))
    assert {book.choose("rtmp") for _ in range(20)} == {"rtmp://edge2.test"}


def test_edge_when_its_connection_ends_or_it_falls_silent_is_not_named_any_more(book, clock):
    told(book, report(1), by=1)
    told(book, report(2), by=2)
    book.forget_connection(1)
    assert {book.choose("rtmp") for _ in range(20)} == {"rtmp://edge2.test"}
    clock.now += KNOWN_S
    assert book.choose("rtmp") is None
    assert book.figures() == {"redirected": 20, "edges": []}


def test_edge_when_its_connection_to_another_edge_ends_is_not_named_by_the_origin_either(clock):
    """The edge in between passes that on at once; one that is only connected elsewhere now is named again."""
    origin, between = EdgeBook(clock, Random(1)), EdgeBook(clock, Random(2))
    told(between, report(1), report(2), by=7)
    told(between, report(3), by=8)
    for words in between.words_of_all(None):
        origin.take_report(words, 1)
    assert not between.take_lost()
    clock.now += 0.5
    between.forget_connection(8)
    assert between.take_lost()
    assert not between.take_lost()
    for words in between.words_of_all(None):
        origin.take_report(words, 1)
    assert {origin.choose("rtmp") for _ in range(50)} == {"rtmp://edge1.test", "rtmp://edge2.test"}
    clock.now += 0.5
    told(origin, report(3, made_at=clock.now), by=2)
    assert "rtmp://edge3.test" in {origin.choose("rtmp") for _ in range(50)}


def test_player_of_files_when_it_asks_again_is_sent_to_the_same_edge(book, clock):
    """It asks for the playlist every few seconds; when its edge goes, the others keep theirs."""
    told(book, *(report(number, scheme="http") for number in range(5)), report(9, scheme="http", hls=False))
    viewers = [f"10.0.0.{number}".encode() for number in range(100)]
    first = {viewer: book.choose("http", viewer) for viewer in viewers}
    assert first == {viewer: book.choose("http", viewer) for viewer in viewers}
    assert set(first.values()) == {f"http://edge{number}.test" for number in range(5)}
    clock.now += 1.0
    told(book, report(3, scheme="http", drains=True, made_at=clock.now))
    after = {viewer: book.choose("http", viewer) for viewer in viewers}
    assert {viewer for viewer in viewers if after[viewer] != first[viewer]} == {
        viewer for viewer in viewers if first[viewer] == "http://edge3.test"
    }


# -- what edges tell


@pytest.mark.parametrize(
    "changed",
    [
        {"at": ["rtmp://edge.test/live"]},
        {"at": ["rtmp://edge.test:99999"]},
        {"at": ["javascript://edge.test"]},
        {"at": ["http://a@edge.test"]},
        {"at": ["http://edge.test\r\nSet-Cookie: a=b"]},
        {"at": 7},
        {"edge": "x"},
        {"connections": -1},
        {"most": 0},
        {"age_s": -1},
        {"age_s": "NaN"},
        {"connections": 1e400},
        {"connections": 10**310},  # no number in floating point: to choose an edge would fail for all viewers
        {"most": 10**310},
    ],
)
def test_report_when_it_makes_no_sense_breaks_a_rule(changed):
    """It would be sent to viewers as it stands."""
    said = json.loads(report(1).words(1000.0)) | changed
    with pytest.raises(RemoteProtocolError, match="an edge tells of itself"):
        EdgeReport.read(json.dumps(said).encode(), 1000.0)
    with pytest.raises(RemoteProtocolError, match="an edge tells of itself"):
        EdgeReport.read(b"\xff[", 1000.0)


def test_reports_when_they_go_round_get_old_and_are_bounded(book, clock):
    """Two edges that are edges of each other pass a report on and on; a third one invents a thousand."""
    other = EdgeBook(clock)
    told(book, report(1))
    for _ in range(10):
        clock.now += 1.0
        for sender, receiver in ((book, other), (other, book)):
            for words in sender.words_of_all(None):
                receiver.take_report(words, 1)
    assert book.reports() == other.reports() == []
    own = report(0, made_at=clock.now)
    told(book, *(report(number, connections=number % 100, made_at=clock.now) for number in range(1, MOST_EDGES + 50)))
    assert len(book.reports()) == MOST_EDGES
    words = book.words_of_all(own)
    assert len(words) == 1 + MOST_PASSED_ON
    assert all(len(item) <= 1024 for item in words)
    assert EdgeReport.read(words[0], clock.now).name == own.name


@pytest.mark.parametrize("host", ["2001:db8::1", "[2001:db8::1]"])
def test_public_address_when_it_is_of_ipv6_may_stand_in_brackets(host):
    assert EdgeConfig(origins=(OriginAddress("a"),), public=(host,)).public == (host,)


@pytest.mark.parametrize("public", ["edge test", "rtmp://edge.test/live", "ftp://edge.test", ""])
def test_public_address_when_it_is_none_is_refused(public):
    with pytest.raises(ConfigError, match=r"public: .* is no address"):
        EdgeConfig(origins=(OriginAddress("a"),), public=(public,))


def test_redirect_when_a_server_is_no_origin_is_refused():
    with pytest.raises(ConfigError, match="redirect is http, but this is no origin"):
        LiveConfig(redirect=Redirect.HTTP).check_start()


# -- over sockets


class Cluster:
    """An origin that sends all viewers on, and edges that bring a key."""

    def __init__(self, house, folder: Path):
        self.house, self.key = house, make_key()
        path = folder / "keys"
        path.write_text(f"{hash_key(self.key)} edge")
        self.origin = house.origin(
            access=StreamAccess(keys=read_keys(path)), redirect=Redirect.ALL, origin="127.0.0.1:0"
        )
        self.encoder = Encoder(self.origin)
        self.encoder.pictures(30)

    def edge(self, origin=None, key=None, **settings):
        where = dataclasses.replace((origin or self.origin).where, proof=f"key={key or self.key}")
        return self.house.edge(where, **{"public": ("127.0.0.1",), **settings})

    @property
    def known(self):
        return sorted(item.bases["rtmp"] for item in self.origin.origin.book.reports())

    def play(self, query=""):
        """Play at the origin until something has come; return the address that it came from."""
        url = parse_address(f"rtmp://127.0.0.1:{self.origin.server.address[1]}/live/room{query}")
        profile = PlayProfile()

        def make(parameters, on_end):
            return RtmpPlayer(url, profile, duration_s=0.0, parameters=parameters, on_end=on_end)

        with ClientRun(make) as run:
            run.start()
            run.wait()
        assert run.client.statistics().received.total_messages > 0, run.client.end
        return run.client.url


@pytest.fixture
def cluster(house, tmp_path, monkeypatch):
    monkeypatch.setattr(edge_module, "TELL_S", 0.2)
    return Cluster(house, tmp_path)


def address_of(edge):
    return f"rtmp://127.0.0.1:{edge.server.address[1]}"


def test_viewer_when_edges_are_there_is_sent_to_one_and_plays_with_its_key(cluster):
    """Its query goes with it; followers and publishers stay, and without edges so does everybody."""
    assert cluster.play().port == cluster.origin.server.address[1]
    edges = [cluster.edge(follow=True), cluster.edge(follow=True)]
    until(lambda: cluster.known == sorted(map(address_of, edges)), "what the edges tell")
    for edge in edges:
        viewer = edge.play()
        until(lambda viewer=viewer: frames(viewer.media), "frames that an edge follows")
    found = [cluster.play("?token=abc") for _ in range(20)]
    assert {item.port for item in found} == {edge.server.address[1] for edge in edges}
    assert {item.raw_query for item in found} == {"token=abc"}
    assert cluster.origin.origin.figures()["redirects"]["redirected"] == 20
    edges[0].server.drain(20.0)
    until(lambda: {item.drains for item in cluster.origin.origin.book.reports()} == {True, False}, "its drain")
    assert {cluster.play().port for _ in range(5)} == {edges[1].server.address[1]}
    for edge in edges:
        edge.server.stop(1.0)
    until(lambda: not cluster.known, "their end")
    assert cluster.play().port == cluster.origin.server.address[1]


def test_viewer_when_it_does_not_follow_is_told_where_to_go_as_srs_does(cluster):
    """The reply to play: a rejection with ex.code 302, the address with the stream, and that without."""
    edge = cluster.edge()
    until(lambda: cluster.known, "what the edge tells")
    asked = player(cluster.origin.server.address)
    (rejected,) = until(lambda: asked.has(Rejected), "the refusal")
    assert (rejected.code, rejected.what) == ("NetConnection.Connect.Rejected", "play")
    assert rejected.redirect == f"{address_of(edge)}/live/room"
    until(lambda: asked.over, "the end of the connection")
    assert not asked.has(PlayStarted)


def test_edge_when_it_brings_no_key_for_edges_is_named_to_no_viewer(house, tmp_path):
    """Else anybody who reaches the port of an origin could send its viewers anywhere."""
    cluster = Cluster(house, tmp_path)
    with capture_logs() as lines:
        edge = house.edge(cluster.origin, public=("127.0.0.1",))
        (line,) = until(lambda: [line for line in lines if line["event"] == "edge is named to no viewer"])
    assert "flowctl key make" in line["hint"]
    assert edge.states() == ["fetching"]
    assert cluster.known == []


def test_edge_of_an_edge_is_named_by_the_origin_and_no_edge_sends_viewers_on(cluster, tmp_path):
    """An origin knows all edges behind its own ones, so that a viewer is sent once."""
    middle = cluster.house.edge(
        dataclasses.replace(cluster.origin.where, proof=f"key={cluster.key}"), offer="127.0.0.1:0"
    )
    path = tmp_path / "middle"
    path.write_text(f"{hash_key(cluster.key)} edge")
    middle.server.hub.config = dataclasses.replace(
        middle.server.hub.config, access=StreamAccess(keys=read_keys(path)), redirect=Redirect.ALL
    )
    middle.server.config = middle.server.hub.config
    leaf = cluster.edge(middle)
    until(lambda: cluster.known == [address_of(leaf)], "what the edge of the edge tells")
    assert cluster.play().port == leaf.server.address[1]
    assert middle.play()


def test_edge_when_full_is_not_named(cluster):
    """It tells how many connections it may have; one that it has more of is not worth a name."""
    edge = cluster.edge()
    until(lambda: cluster.known, "what the edge tells")
    edge.server.admission.set_limits(AdmissionLimits(connections=2))
    viewers = [edge.play(), edge.play()]
    until(lambda: cluster.origin.origin.book.choose("rtmp") is None, "that it tells of them")
    assert cluster.play().port == cluster.origin.server.address[1]
    assert len(viewers) == 2


# -- the client


@pytest.mark.parametrize(
    ("where", "goes"),
    [
        ("rtmp://other.test/live/room?key=k", True),
        ("rtmp://other.test/live/room?key=@/etc/passwd", True),
        ("rtmps://other.test/live/room", False),
        ("http://other.test/live/room.flv", False),
        ("rtmp://other.test", False),
        ("nonsense", False),
    ],
)
def test_client_when_sent_elsewhere_goes_only_by_the_same_scheme(where, goes):
    url = parse_url("rtmp://ann:secret@origin.test/live/room")
    found = redirected(url, Rejected(what="play", code="", description="", redirect=where))
    assert (found is not None) == goes
    if found is not None:
        assert (found.host, found.raw_query, found.user, found.password) == (
            *("other.test", where.partition("?")[2], None, None),
        )  # a server names no file of ours


def test_client_when_sent_round_in_a_circle_ends(house):
    """An origin that names itself: the client gives up after some turns and says what the server said."""
    origin = house.origin(redirect=Redirect.ALL, origin="127.0.0.1:0")
    encoder = Encoder(origin)
    encoder.pictures(30)
    base = f"rtmp://127.0.0.1:{origin.server.address[1]}"
    origin.server.hub.edge_for = lambda scheme, viewer, address: base
    url = parse_address(f"{base}/live/room")
    with (
        capture_logs() as lines,
        ClientRun(lambda parameters, on_end: RtmpPlayer(url, parameters=parameters, on_end=on_end)) as run,
    ):
        run.start()
        run.wait()
    assert sum(line["event"] == "viewer redirected" for line in lines) == 1 + MOST_REDIRECTS
    assert run.client.end.status.code == "NetConnection.Connect.Rejected"
