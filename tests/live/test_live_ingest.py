"""Figures of a publisher: each on messages whose gaps, key frames and jitter are known beforehand."""

from __future__ import annotations

import pytest

from flowctl.core.flow.state import MessageClass
from flowctl.live.records.ingest import Ingest

KEY, INTER, AUDIO, HEADER = MessageClass.KEY, MessageClass.INTER, MessageClass.AUDIO, MessageClass.HEADER


def taken(*messages, at=None):
    """Return the columns of messages, (class, time stamp in ms, arrival in s), of 100 bytes each."""
    made = Ingest()
    for message_class, timestamp_ms, now in messages:
        made.count_message(message_class, timestamp_ms % 2**32, 100, now)
    return made.columns(messages[-1][2] if at is None else at)


def test_publisher_when_even_has_no_gap_and_no_jitter():
    pictures = [(INTER if number % 25 else KEY, number * 40, number * 0.04) for number in range(100)]
    sound = [(AUDIO, number * 20, number * 0.02) for number in range(200)]
    found = taken((HEADER, 0, 0.0), *sorted([*pictures, *sound], key=lambda item: item[2]))
    assert (found["ingest_pictures"], found["ingest_key_frames"], found["ingest_audio"]) == (100, 4, 200)
    assert found["ingest_bytes"] == 30_100
    assert (found["key_interval_ms"], found["key_interval_max_ms"]) == (1000.0, 1000.0)
    assert (found["gap_count"], found["gap_ms"], found["gap_max_ms"]) == (0, 0.0, 0.0)
    assert found["jitter_ms"] == pytest.approx(0.0, abs=1e-6)


def test_gaps_when_nothing_comes_for_more_than_a_second_are_counted():
    messages = [(KEY, 0, 10.0), (INTER, 40, 11.0), (INTER, 80, 12.5), (INTER, 120, 14.5)]
    assert [taken(*messages)[name] for name in ("gap_count", "gap_ms", "gap_max_ms")] == [2, 3500.0, 2000.0]
    assert [taken(*messages, at=18.5)[name] for name in ("gap_count", "gap_ms", "gap_max_ms")] == [3, 7500.0, 4000.0]
    made = Ingest()
    made.count_message(KEY, 0, 1, 1.0)
    made.pause(1.5)
    assert made.columns(60.0)["gap_count"] == 0
    made.count_message(KEY, 0, 1, 100.0)
    made.pause(102.0)
    assert [made.columns(200.0)[name] for name in ("gap_count", "gap_ms")] == [1, 2000.0]


def test_key_interval_when_time_stamps_wrap_or_begin_anew_is_right():
    found = taken((KEY, -1000, 0.0), (KEY, -1000, 0.0), (KEY, 1000, 2.0), (KEY, 5000, 6.0), (KEY, 0, 7.0))
    assert (found["key_interval_ms"], found["key_interval_max_ms"]) == (3000.0, 4000.0)
    assert taken((KEY, 0, 0.0))["key_interval_ms"] is None


def test_jitter_when_arrival_alternates_is_that_of_the_rfc():
    """Every second picture 10 ms late: each difference is 10 ms, so the estimate of RFC 3550 nears 10 from below."""
    messages = [(INTER, number * 40, number * 0.04 + number % 2 * 0.01) for number in range(2000)]
    assert taken(*messages)["jitter_ms"] == pytest.approx(10.0, abs=0.2)
    estimate, sum_ms_s, sum_s = 0.0, 0.0, 0.0
    for number in range(1, 50):
        took_s = 0.04 + (0.01 if number % 2 else -0.01)
        estimate += (10.0 - estimate) / 16
        sum_ms_s, sum_s = sum_ms_s + estimate * took_s, sum_s + took_s
    assert taken(*messages[:50])["jitter_ms"] == pytest.approx(sum_ms_s / sum_s)


def test_jitter_when_the_timeline_jumps_is_not_measured_over_the_jump():
    pictures = [(INTER, number * 40 + (3_600_000 if number > 50 else 0), number * 0.04) for number in range(100)]
    assert taken(*pictures)["jitter_ms"] == pytest.approx(0.0, abs=1e-6)
    sound = [(AUDIO, number * 20, number * 0.02 + number % 2 * 0.005) for number in range(2000)]
    assert taken(*sound)["jitter_ms"] == pytest.approx(5.0, abs=0.1)
