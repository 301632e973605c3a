"""What is recorded of players over HTTP: the same row at the end as of those over RTMP."""

from __future__ import annotations

import pytest
from http_kit import wait_for
from loopback_kit import LOOPBACK
from pyarrow import parquet

from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile
from flowctl.records.telemetry.options import EventsOptions, RecordedStreams
from flowctl.records.telemetry.schema import CLASS_NAMES


@pytest.fixture
def recorded(web, tmp_path):
    def make(streams=RecordedStreams.PLAIN, **options):
        events = EventsOptions(folder=str(tmp_path / "events"), node="n1", streams=streams)
        return web(events=events, players_may_wait=False, **options)

    return make


def closes(web, folder):
    """End the server, and return what it wrote of connections that asked for a stream, by stream."""
    web.server.stop(2.0)
    paths = sorted((folder / "events").glob("flow_closes/date=*/hour=*/[!._]*.parquet"))
    rows = [row for path in paths for row in parquet.read_table(path, partitioning=None).to_pylist()]
    return {row["stream"]: row for row in rows if row["stream"] is not None}


def test_player_over_http_when_it_leaves_has_a_row_as_over_rtmp(recorded, tmp_path):
    web = recorded()
    publisher = web.publisher()
    publisher.group()
    client = web.client()
    assert client.get(headers="User-Agent: tv/1\r\n")[0] == 200
    for _ in range(20):
        publisher.group(size=2000)
    client.tags(40)
    client.close()
    wait_for(web.ended)
    assert web.get("/live/nothing.flv")[0] == 404
    found = closes(web, tmp_path)
    row = found["room"]
    assert (row["role"], row["app"], row["peer_ip"], row["agent"]) == ("http_flv", "live", LOOPBACK, "tv/1")
    assert 0 <= row["asked_ms"] <= row["startup_ms"] <= row["duration_s"] * 1000
    assert row["reason"] in {"peer closed", "peer reset"}
    assert row["sent_messages_key"] >= 10
    assert (row["refusal"], row["code"], row["limit_name"], row["handshake_ms"]) == (None, None, None, None)
    assert row["samples_count"] >= 1
    for name in CLASS_NAMES:
        assert row[f"accepted_messages_{name}"] == row[f"sent_messages_{name}"] + row[f"dropped_messages_{name}"]
    other = found["nothing"]
    assert (other["refusal"], other["role"], other["startup_ms"]) == ("no stream", "http_flv", None)
    assert other["asked_ms"] is not None


def test_player_over_http_when_names_are_secret_shows_no_part_of_a_path_that_is_not_there(recorded, tmp_path):
    """The first part of a path comes with the name, and may be a key: it is an application when its stream is there."""
    web = recorded(streams=RecordedStreams.HASH)
    publisher = web.publisher()
    publisher.group()
    client = web.client()
    assert client.get()[0] == 200
    publisher.group()
    client.tags(2)
    client.close()
    assert web.get("/s3cret/room.flv")[0] == 404
    wait_for(web.ended)
    rows = closes(web, tmp_path).values()
    assert sorted((row["role"], row["app"]) for row in rows) == [("http_flv", ""), ("http_flv", "live")]
    assert "s3cret" not in str(rows)


def test_player_over_http_when_it_has_no_key_is_an_attempt_that_was_refused(recorded, tmp_path):
    """Who may not play asked for it all the same: the row names the stream and says why."""
    secrets = SecretFile("secrets", (b"a secret of thirty-two or more bytes, for tests",))
    web = recorded(access=StreamAccess(play_auth=(Proof.TOKEN,), token_secrets=secrets))
    web.publisher().group()
    assert web.get()[0] == 401
    row = closes(web, tmp_path)["room"]
    assert (row["refusal"], row["role"], row["startup_ms"]) == ("auth", "http_flv", None)
