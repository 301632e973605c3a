"""Streams by minute and subnets, from samples and from sessions: what each figure is, written out."""

from __future__ import annotations

import pytest
from record_kit import NOON, event, sample, write, write_samples

from flowctl.pipeline.jobs.fleet import STREAM_COLUMNS, SUBNET_COLUMNS, run
from flowctl.pipeline.tables import delays

WATCHES = {"role": "play", "app": "live", "stream": "s"}


def at_minute(rows, minute, stream="s"):
    (row,) = [
        row for row in rows if row["stream"] == stream and row["minute"] == NOON.replace(tzinfo=None, minute=minute)
    ]
    return row


def tables(spark, root):
    result = run(spark, str(root), str(root / "out"))
    frames = [spark.read.parquet(result.outputs[name]) for name in ("fleet_streams", "fleet_subnets")]
    for frame, columns in zip(frames, (STREAM_COLUMNS, SUBNET_COLUMNS), strict=True):
        assert frame.dtypes == list(columns.items())
    result.check()
    return result, *(frame.collect() for frame in frames)


def test_fleet_when_sampled_weighs_states_by_time_and_viewers_by_heads(spark, tmp_path):
    """Two viewers in one minute: states by their seconds, delays one per viewer, joins and leaves by minute."""
    one = {"peer_ip": "192.0.2.1", **WATCHES}
    two = {"peer_ip": "192.0.2.77", **WATCHES}
    six = {"peer_ip": "2001:db8:1::5", **WATCHES}
    write(
        tmp_path,
        [
            event(0.5, 1, "play_started", **one),
            event(1, 2, "play_started", **two),
            event(50, 2, "conn_closed", reason="peer closed", **two),
            event(61, 3, "play_started", **six),
            # Nobody was sampled in the third minute, but somebody left.
            event(121, 1, "conn_closed", reason="peer closed", **one),
            event(2, 9, "publish_started", role="publish", app="live", stream="s"),
        ],
    )
    busy = {
        "state": "SOFT_LIMIT",
        "accepted_messages_inter": 40,
        "dropped_messages_inter": 10,
        "viewer_delay_ms": 3_000.0,
        "picture_share": 0.77,
    }
    rows = [
        sample(10 + n, 1, viewer_delay_ms=10.0, accepted_messages_inter=60, sent_bytes=100, **one) for n in range(30)
    ]
    rows += [sample(10 + n, 2, **busy, **two) for n in range(10)]
    rows += [sample(65, 3, viewer_delay_ms=20.0, accepted_messages_audio=10, picture_share=None, **six)]
    rows += [sample(10, 9, role="publish", peer_ip="192.0.2.9")]
    write_samples(tmp_path, rows)
    result, streams, subnets = tables(spark, tmp_path)
    first = at_minute(streams, 0)
    assert (first["viewers_seen"], first["joins"], first["leaves"], first["source"]) == (2, 2, 1, "samples")
    assert first["viewers"] == pytest.approx(40 / 60)
    assert (first["share_ready"], first["share_soft"], first["share_hard"]) == (0.75, 0.25, 0.0)
    assert first["delay_p50_ms"] == pytest.approx(10.0, rel=delays.LARGEST_RATIO_ERROR)
    assert (first["delay_p99_ms"], first["delay_max_ms"]) == (pytest.approx(3_000.0, rel=0.13), 3_000.0)
    assert (first["accepted_messages"], first["dropped_messages"], first["sent_bytes"]) == (2_200, 100, 3_000)
    assert first["picture_share"] == pytest.approx((30 + 10 * 0.77) / 40)
    assert [first[f"pictures_{name}"] for name in ("known", "below_95", "below_80", "below_50")] == [2, 1, 1, 0]
    unknown = at_minute(streams, 1)
    assert (unknown["picture_share"], unknown["pictures_known"], unknown["pictures_below_95"]) == (None, 0, 0)
    assert first["drop_ratio"] == pytest.approx(100 / 2_200)
    third = at_minute(streams, 2)
    assert (third["viewers"], third["viewers_seen"], third["leaves"], third["share_ready"]) == (0.0, 0, 1, None)
    found = {row["subnet"]: row for row in subnets}
    assert sorted(found) == ["192.0.2.0/24", "2001:db8:1::/48"]
    assert (found["192.0.2.0/24"]["viewers_seen"], found["192.0.2.0/24"]["joins"]) == (2, 2)
    assert (found["192.0.2.0/24"]["leaves"], found["192.0.2.0/24"]["share_soft"]) == (2, 0.25)
    assert result.summary == {"streams": 1, "subnets": 2, "most_viewers": pytest.approx(0.7), "source": "samples"}


def test_fleet_when_there_are_no_samples_spreads_sessions_evenly(spark, tmp_path):
    """A session of 90 s, 30 of them in SOFT_LIMIT, is two thirds in its first minute and one third in its second."""
    peer = {"peer_ip": "192.0.2.1", **WATCHES}
    edge = {"event": "state_changed", **peer}
    write(
        tmp_path,
        [
            event(0, 1, "conn_opened", peer_ip="192.0.2.1", role="unknown"),
            event(0, 1, "play_started", **peer),
            event(40, 1, "x", state_from="READY", state_to="SOFT_LIMIT", state_ms=40e3) | edge,
            event(70, 1, "x", state_from="SOFT_LIMIT", state_to="READY", state_ms=30e3) | edge,
            event(
                90,
                1,
                "conn_closed",
                reason="peer closed",
                state_from="READY",
                state_ms=20e3,
                dropped_messages=30,
                **peer,
            ),
        ],
    )
    _, streams, subnets = tables(spark, tmp_path)
    first, second = at_minute(streams, 0), at_minute(streams, 1)
    assert (first["viewers"], second["viewers"]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert first["share_soft"] == second["share_soft"] == pytest.approx(1 / 3)
    assert (first["dropped_messages"], second["dropped_messages"]) == (20, 10)
    assert (first["joins"], second["leaves"], first["source"]) == (1, 1, "sessions")
    assert [(row["subnet"], row["viewers"]) for row in subnets] == [("192.0.2.0/24", pytest.approx(0.75))]
