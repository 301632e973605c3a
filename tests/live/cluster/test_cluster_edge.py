"""Edges that serve streams of origins, in one process: what a viewer gets is what was published."""

from __future__ import annotations

import asyncio
import json

import pyarrow.parquet
import pytest
from edge_kit import Encoder, House, cut_off, frames, until, whole
from structlog.testing import capture_logs

from flowctl.control.listings import stats
from flowctl.errors import ConfigError
from flowctl.live.cluster.edge import edge as edge_module
from flowctl.live.cluster.edge.upstream import OriginAddress
from flowctl.live.cluster.segments.segment import object_of
from flowctl.live.cluster.segments.window import WindowLimits
from flowctl.live.settings.media import MediaOptions, StreamPatterns
from flowctl.records.telemetry.options import EventsOptions, RecordedStreams


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


def begin(house, *origins, **settings):
    edge = house.edge(*origins, **settings)
    until(lambda: edge.states() == ["fetching"] * len(origins), "the connections to the origins")
    encoder = Encoder(*origins)
    encoder.pictures(60)
    until(lambda: edge.stream() and edge.stream().published, "the first segment")
    return edge, encoder, edge.play()


def test_stream_when_viewed_at_an_edge_comes_from_segments(house):
    first, second = house.origin(), house.origin()
    edge, encoder, viewer = begin(house, first, second)
    encoder.pictures(100)
    assert len(whole(viewer, encoder, cut_off(encoder))) >= 200
    until(lambda: first.segments() == second.segments(), "the same segments at both origins")
    until(lambda: edge.stream().fetched == len(edge.edge.pool), "the last of them at the edge")


def test_origin_when_killed_in_the_middle_costs_no_segment(house):
    first, second = house.origin(), house.origin()
    edge, encoder, viewer = begin(house, first, second)
    encoder.pictures(40)
    first.kill()
    until(lambda: edge.states()[0] != "fetching", "the loss of the first origin")
    encoder.pictures(60)
    whole(viewer, encoder, cut_off(encoder))
    assert edge.stream().gaps == 0
    assert edge.states()[1] == "fetching"


def test_origin_when_it_lies_is_banned_and_its_segments_come_from_others(house):
    first, second = house.origin(), house.origin()
    lies, tells = first.origin.pool, second.origin.pool
    put, tell = lies.put, tells.put
    lies.put = lambda name, data: put(name, object_of(name, bytes(name.size_bytes)))
    held = []  # the other origin offers nothing until the liar has been asked
    tells.put = lambda *segment: held.append(segment)
    edge = house.edge(first, second)
    until(lambda: edge.states() == ["fetching", "fetching"], "the connections to the origins")
    encoder = Encoder(first, second)
    encoder.pictures(60)
    until(lambda: edge.states()[0] == "banned", "the ban")

    def release():
        tells.put = tell
        for segment in held:
            tell(*segment)

    second.origin._group.call_soon(release)
    until(lambda: edge.stream() and edge.stream().published, "the first segment")
    viewer = edge.play()
    encoder.pictures(100)
    whole(viewer, encoder, cut_off(encoder))
    liar = edge.edge.statistics().origins[0]
    assert (liar.state, liar.faults, liar.connections) == ("banned", 1, 1)
    assert "not the one it names" in liar.why
    assert edge.stream().gaps == 0


@pytest.mark.parametrize("redundancy", [1, 2, 3])
def test_segments_when_fetched_with_redundancy_are_asked_of_no_more_origins(house, redundancy):
    origins = [house.origin() for _ in range(3)]
    edge, encoder, viewer = begin(house, *origins, redundancy=redundancy)
    encoder.pictures(100)
    whole(viewer, encoder, cut_off(encoder))
    stream, found = edge.stream(), edge.edge.statistics()
    assert sum(item.requested_bytes for item in found.origins) <= redundancy * found.kept_bytes
    assert stream.gaps == 0


def test_frames_when_followed_reach_viewers_before_their_segment_is_complete(house):
    first, second = house.origin(), house.origin()
    edge = house.edge(first, second, follow=True)
    encoder = Encoder(first, second)
    encoder.pictures(30)
    viewer = edge.play()
    until(lambda: frames(viewer.media)[-1:] == encoder.sent[-1:], "the newest frame")
    encoder.pictures(70)
    whole(viewer, encoder)
    until(lambda: edge.stream().adopted >= 2, "segments that are known by their hash")
    assert edge.stream().fetched == 0


def test_followed_origin_when_recorded_is_told_of_as_a_publisher(house, tmp_path):
    """The connection that goes out has its row, with what came in by it; one that brings nothing has none."""
    first = house.origin()
    edge = house.edge(first, follow=True, records=EventsOptions(folder=str(tmp_path), streams=RecordedStreams.PLAIN))
    encoder = Encoder(first)
    encoder.pictures(30)
    viewer = edge.play()
    edge.play("live/nothing")
    until(lambda: frames(viewer.media)[-1:] == encoder.sent[-1:], "the newest frame")
    encoder.pictures(70)
    whole(viewer, encoder)
    edge.server.stop(1.0)
    rows = pyarrow.parquet.read_table(tmp_path / "flow_closes").to_pylist()
    (row,) = [item for item in rows if item["role"] == "publish"]
    assert (row["app"], row["stream"], row["peer_port"]) == ("live", "room", first.where.rtmp_port)
    pictures = len(frames(viewer.media)) // 2
    assert (row["ingest_pictures"], row["ingest_audio"]) == (pictures, pictures)
    assert row["ingest_key_frames"] == pictures // 25
    assert row["key_interval_ms"] == 1000.0
    assert (row["startup_ms"] > 0, row["reason"]) == (True, "finished")
    assert {item["role"] for item in rows} == {"publish", "play"}


def test_followed_origin_when_killed_costs_no_frame(house):
    first, second = house.origin(), house.origin()
    edge = house.edge(first, second, follow=True)
    encoder = Encoder(first, second)
    encoder.pictures(60)
    viewer = edge.play()
    until(lambda: frames(viewer.media)[-1:] == encoder.sent[-1:], "the newest frame")
    kill_followed(edge, first, second)
    encoder.pictures(120)
    whole(viewer, encoder)
    encoder.pictures(30)
    whole(viewer, encoder)
    assert edge.stream().gaps == 0


def test_stream_when_nobody_views_it_is_not_announced(house):
    first = house.origin()
    edge = house.edge(first, streams=())
    encoder = Encoder(first)
    encoder.pictures(80)
    until(lambda: len(first.segments()) == 3, "the segments")
    (outbound,) = first.origin._offering._diffusion._outbound
    assert (outbound.announced_count, edge.edge.statistics().kept_bytes, edge.stream()) == (0, 0, None)
    viewer = edge.play()
    until(lambda: frames(viewer.media)[-1:] == [cut_off(encoder)], "the newest segment")
    assert (outbound.announced_count, edge.edge.statistics().origins[0].requests) == (3, 1)
    assert frames(viewer.media) == encoder.sent[100:150]


@pytest.mark.parametrize("what", ["record", "hls"])
def test_stream_when_settings_want_it_written_is_fetched_without_viewers(house, tmp_path, what):
    first = house.origin()
    media = MediaOptions(**{what: StreamPatterns(("live/*",))}, record_folder=tmp_path / "recordings")
    edge = house.edge(first, streams=(), media=media)
    encoders = [Encoder(first, name=name) for name in ("live/room", "other/room")]
    for encoder in encoders:
        encoder.pictures(80)
    until(lambda: edge.stream() and edge.edge.statistics().kept_bytes > 0, "segments of what is written")
    assert edge.stream("other/room") is None


def test_viewer_when_it_asks_for_any_name_keeps_no_stream_from_others(house):
    """A name as long as names may be is one that an edge looks for, as for any other."""
    first = house.origin()
    edge = house.edge(first, streams=())
    long = "b" * 256 + "/" + "x" * 256
    for name in (long, "live/room"):
        edge.play(name)
        until(lambda name=name: edge.stream(name), "the stream to be wanted")
    assert {item.stream for item in edge.edge.statistics().copies} == {long, "live/room"}


def test_names_when_no_origin_has_them_take_no_place_of_those_that_are_there(house, monkeypatch):
    monkeypatch.setattr(edge_module, "MOST_STREAMS", 12)
    monkeypatch.setattr(edge_module, "_LOOKED_FOR_S", 0.5)
    first = house.origin()
    encoder = Encoder(first)
    encoder.pictures(60)
    edge = house.edge(first, streams=(), follow=True)
    for number in range(12):
        edge.play(f"live/none{number}")
    until(lambda: len(edge.edge.statistics().copies) == 12, "the streams to be wanted")
    assert edge.edge.statistics().known_streams == 0
    viewer = edge.play()
    until(lambda: edge.stream() and edge.stream().following, "the stream to be followed")
    encoder.pictures(20)
    whole(viewer, encoder)
    assert sum("none" in stream.name for stream in first.server.hub.streams()) <= 8


def test_followed_stream_when_its_name_looks_like_an_address_is_no_other_stream(house):
    """What stands behind a number sign is of the name: the viewer of one stream never gets another one."""
    first = house.origin()
    other, own = Encoder(first, name="live/room"), Encoder(first, name="live/room#2")
    other.count = 1000
    edge = house.edge(first, streams=("live/room#2",), follow=True)
    other.pictures(5)
    own.pictures(20)
    viewer = edge.play("live/room#2")
    own.pictures(20)
    whole(viewer, own)
    other.pictures(20)
    own.pictures(20)
    assert len(whole(viewer, own)) >= 40


def test_edge_when_it_is_an_origin_serves_another_edge(house):
    first = house.origin()
    middle = house.edge(first, offer="127.0.0.1:0")
    _, encoder, viewer = begin(house, first)
    last = house.edge(middle)
    until(lambda: last.states() == ["fetching"], "the connection to the edge")
    encoder.pictures(50)
    until(lambda: last.stream() and last.stream().published, "the first segment")
    behind = last.play()
    encoder.pictures(80)
    for item in (viewer, behind):
        whole(item, encoder, cut_off(encoder))


def test_figures_when_operators_ask_say_how_origins_and_streams_do(house):
    first = house.origin()
    edge, _, _ = begin(house, first)
    asked = {"connection": None, "offset": 0, "limit": 10, "stream": "*", "viewers": "none"}
    found = stats(edge.server, asked)["edge"]
    assert (found["origins"][0]["state"], found["copies"][0]["stream"]) == ("fetching", "live/room")
    until(lambda: found["origins"][0]["latency_ms"] is not None)
    assert stats(first.server, asked)["origin"]["segments"] == 2
    assert found["received_bytes"] >= found["kept_bytes"] > 0
    assert found["followed"] == {}
    json.dumps(found)


def payloads(media):
    return [payload for _, _, payload in frames(media)]


@pytest.mark.parametrize("follow", [False, True])
def test_stream_when_published_again_goes_on(house, follow):
    first, second = house.origin(), house.origin()
    edge, encoder, viewer = begin(house, first, second, follow=follow)
    encoder.pictures(15)
    whole(viewer, encoder, None if follow else cut_off(encoder))
    for link in encoder.links:
        link.close()
    until(lambda: not any(item.server.hub.publisher_of("live/room") for item in (first, second)))
    again = Encoder(first, second)
    again.count = 10_000  # other pictures, at other times
    again.pictures(80)
    until(lambda: payloads(viewer.media)[-1:] == [cut_off_payload(again) if not follow else again.sent[-1][2]])
    if follow:
        kill_followed(edge, first, second)
        again.pictures(90)
        until(lambda: payloads(viewer.media)[-1:] == [again.sent[-1][2]], "the last message")
    got = payloads(viewer.media)
    start = got.index(again.sent[0][2])
    assert got[start:] == [payload for _, _, payload in again.sent][: len(got) - start]
    times = [timestamp for type_id, timestamp, _ in frames(viewer.media) if type_id == 9]
    assert times == sorted(times)
    assert edge.stream().gaps == 0


def cut_off_payload(encoder):
    return cut_off(encoder)[2]


def kill_followed(edge, *origins):
    source = next(iter(edge.edge._wanted.values())).following.source
    next(item for item in origins if str(item.where) == source).kill()


def test_origin_when_slow_is_asked_for_less(house):
    slow, quick = house.origin(), house.origin()
    delay(slow, 0.3)
    edge, encoder, viewer = begin(house, slow, quick)
    for number in range(100):  # a machine that stalls makes both slow for some of them
        seen = len(edge.edge.pool)
        encoder.pictures(25)
        until(lambda before=seen: len(edge.edge.pool) > before, "a segment")
        first, second = (item.requested_bytes for item in edge.edge.statistics().origins)
        if number >= 16 and 3 * first < second:
            break
    whole(viewer, encoder, cut_off(encoder))
    assert 3 * first < second
    assert edge.stream().gaps == 0


def delay(origin, by_s):
    read = origin.origin.pool.read_objects

    async def read_late(entries):
        await asyncio.sleep(by_s)
        return await read(entries)

    origin.origin.pool.read_objects = read_late


def test_origin_when_its_port_is_that_of_rtmp_is_told_once_with_a_hint(house):
    real = house.origin()
    with capture_logs() as lines:
        edge = house.edge(OriginAddress("127.0.0.1", real.server.address[1], real.server.address[1]))
        until(lambda: [item for item in edge.edge.statistics().origins if item.connections >= 3], "some tries")
    told = [line for line in lines if line["event"].startswith("origin ") and "origin" in line]
    assert [line["event"] for line in told if line["event"] == "origin not reached"] == ["origin not reached"]
    assert len(told) <= 2
    assert "hung up at once" in told[-1]["why"]
    assert "--origin" in told[-1]["hint"]


def test_followed_origin_when_its_rtmp_port_is_wrong_is_named_with_that_port_and_once(house):
    """The log says where RTMP was tried; segments serve the viewers meanwhile."""
    real = house.origin()
    with capture_logs() as lines:
        edge, encoder, viewer = begin(house, Wrong(real), follow=True)
        until(lambda: edge.edge._wanted["live/room"].following._tries >= 3, "some tries")
        whole(viewer, encoder, cut_off(encoder))
    lost = [line for line in lines if line["event"] in {"follow lost", "follow interrupted"}]
    assert [line["source"] for line in lost] == [f"127.0.0.1:{real.where.port}"]


class Wrong:
    """An origin with the port of segments in the place of that of RTMP."""

    def __init__(self, real):
        self.where = OriginAddress("127.0.0.1", real.where.port, real.where.port)
        self.publish = real.publish


@pytest.mark.parametrize(
    "text", ["::1", "::1:1936", "fe80::1:2", "host:", ":1936", "a:1/x", "a:0", "[::1", "::1]:3", "a..b", "x" * 70]
)
def test_origin_address_when_it_is_not_clear_is_refused(text):
    """An address of IPv6 needs brackets: a port could be part of it."""
    with pytest.raises(ConfigError, match="is no origin"):
        OriginAddress.parse(text)


def test_origin_address_when_it_has_a_password_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match="is no origin") as caught:
        OriginAddress.parse("rtmps://ann:SECRET@host:1936?key=SECRET")
    assert "SECRET" not in str(caught.value)


def test_origin_address_when_it_is_complete_is_read():
    assert OriginAddress.parse("[::1]:7/8") == OriginAddress("::1", 7, 8)
    assert OriginAddress.parse("[::1]") == OriginAddress("::1")
    assert OriginAddress.parse("a/8") == OriginAddress("a", rtmp_port=8)


def test_segments_when_nothing_is_published_any_more_are_kept_no_longer(house):
    """An edge that comes an hour later is not offered the end of a stream that is over."""
    first = house.origin(window=WindowLimits(stream_s=0.2))
    encoder = Encoder(first)
    encoder.pictures(60)
    until(first.segments, "a segment")
    until(lambda: not first.segments(), "the end of the last segment")
    assert first.origin.pool.size_bytes == 0
