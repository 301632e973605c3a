"""Minutes of streams: what samples tell of them, and sessions where there are none."""

from __future__ import annotations

import pytest

from tests.analyze.record_kit import sample
from tests.analyze.viewers.viewer_kit import NOON, Held, HeldParts, at, close


@pytest.fixture(scope="module")
def told(either):
    from flowctl.analyze.viewers import experience, fleet, sessions

    def one(second: float, conn_id: int, **columns) -> dict:
        blank = dict.fromkeys(_samples())
        return blank | sample(0, conn_id, **columns) | {"ts": at(second), "accepted_messages_key": 10}

    samples = [
        *(one(second, 1, viewer_delay_ms=100.0) for second in range(1, 61)),
        *(one(second, 2, viewer_delay_ms=900.0, picture_share=0.5, state="SOFT_LIMIT") for second in range(1, 31)),
        *(one(second, 3, role="publish") for second in range(1, 31)),
    ]
    media = {"startup_ms": 0.0, "asked_ms": 0.0}
    closes = [
        close(90, 1, duration_s=90.0, samples_count=60, **media),
        close(31, 2, duration_s=31.0, samples_count=30, peer_ip="198.51.100.1", **media),
        close(
            150, 4, duration_s=120.0, stream="alone", time_ready_ms=90_000.0, time_soft_ms=30_000.0, delay_p50_ms=40.0,
            accepted_messages_key=1200, dropped_messages_key=120, pictures_wanted=10, pictures_sent=9, **media,
        ),
        close(3, 5, duration_s=3.0, asked_ms=0.0, start_failure="x"),
    ]  # fmt: skip
    opens = [close(3600, 6, duration_s=30.0, reason=None, stream="open", time_ready_ms=30_000.0, **media)]
    for row in closes:
        row.pop("start_failure", None)
    held = Held(either, {"flow_closes": closes, "flow_opens": opens, "flow_samples": samples})
    parts = HeldParts(held, sessions.JOB, experience.JOB, fleet.JOB)
    summary = fleet.JOB.answer(parts, None).summary
    rows = {(row["stream"], round(row["minute"] / 60)): row for row in parts.rows("fleet_streams")}
    return rows, {row["subnet"]: row for row in parts.rows("fleet_subnets")}, summary


def _samples() -> tuple[str, ...]:
    from flowctl.records.telemetry.schema import FLOW_SAMPLES

    return FLOW_SAMPLES.names


def test_minutes_of_samples_count_each_viewer_once(told):
    row = told[0]["s", 0]
    assert (row["viewers"], row["viewers_seen"], row["source"]) == (1.5, 2, "samples")
    assert (row["delay_p50_ms"], row["delay_p95_ms"]) == (100.0, 900.0)
    assert row["share_soft"] == pytest.approx(30 / 90)
    assert row["picture_share"] == pytest.approx((60 + 15) / 90)
    assert (row["accepted_messages"], row["joins"], row["leaves"]) == (900, 2, 1)
    later = told[0]["s", 1]
    assert (later["viewers_seen"], later["leaves"], later["joins"]) == (0, 1, 0)


def test_minutes_of_a_viewer_without_samples_are_its_session_spread(told):
    rows = [told[0]["alone", minute] for minute in range(3)]
    assert [row["viewers"] for row in rows] == [0.5, 1.0, 0.5]
    assert [row["accepted_messages"] for row in rows] == [300, 600, 300]
    assert [row["dropped_messages"] for row in rows] == [30, 60, 30]
    assert [row["drop_ratio"] for row in rows] == [0.1, 0.1, 0.1]
    assert [row["share_soft"] for row in rows] == [0.25, 0.25, 0.25]
    assert [(row["joins"], row["leaves"]) for row in rows] == [(1, 0), (0, 0), (0, 1)]
    assert {(row["source"], row["delay_p50_ms"], row["picture_share"]) for row in rows} == {("sessions", 40.0, 0.9)}


def test_minutes_of_a_viewer_that_is_open_have_its_coming_alone(told):
    assert [(row["joins"], row["leaves"]) for (name, _), row in sorted(told[0].items()) if name == "open"] == [
        (1, 0),
        (0, 0),
    ]
    assert told[0]["open", 59]["viewers"] == 0.5


def test_subnets_are_all_networks_with_the_figures_of_viewers(told):
    networks, summary = told[1:]
    assert {name: row["plays"] for name, row in networks.items()} == {"192.0.2.0/24": 3, "198.51.100.0/24": 1}
    assert networks["192.0.2.0/24"]["start_failures"] + networks["192.0.2.0/24"]["exits_before_start"] == 1
    assert summary == {"minutes": len(told[0]), "networks": len(networks)}
    assert NOON.minute == 0


def test_minutes_when_samples_are_gone_are_those_of_sessions(either):
    from flowctl.analyze.viewers import experience, fleet, sessions

    media = {"startup_ms": 0.0, "asked_ms": 0.0, "samples_count": 60}
    rows = {
        "flow_closes": [close(60, 1, duration_s=60.0, **media), close(3660, 2, duration_s=60.0, **media)],
        "flow_opens": [close(7260, 3, duration_s=60.0, reason=None, **media)],
    }
    parts = HeldParts(Held(either, rows), sessions.JOB, experience.JOB, fleet.JOB)
    (line,) = fleet.JOB.answer(parts, None).warnings
    assert "samples of 3 viewers are not there" in line
    found = {row["minute"]: row["viewers"] for row in parts.rows("fleet_streams") if row["viewers"]}
    assert found == {0: 1.0, 3600: 1.0, 7200: 1.0}

    samples = [dict.fromkeys(_samples()) | sample(0, 1) | {"ts": at(second)} for second in range(1, 31)]
    parts = HeldParts(Held(either, rows | {"flow_samples": samples}), sessions.JOB, experience.JOB, fleet.JOB)
    (line,) = fleet.JOB.answer(parts, None).warnings
    assert "samples of 1 viewers" in line
    found = {row["minute"]: row["viewers"] for row in parts.rows("fleet_streams") if row["viewers"]}
    assert found == {0: 0.5, 3600: 1.0}


@pytest.mark.parametrize("hour", [0, 1])
def test_minutes_when_samples_of_one_hour_are_gone_count_once(either, hour):
    from flowctl.analyze.viewers import experience, fleet, sessions

    closes = [close(3720, 1, duration_s=240.0, startup_ms=0.0, asked_ms=0.0, samples_count=8)]
    rows = [sample(0, 1) | {"ts": at(3510 + 120 * hour + 30 * number), "interval_ms": 30_000.0} for number in range(3)]
    samples = [dict.fromkeys(_samples()) | row for row in rows]
    held = Held(either, {"flow_closes": closes, "flow_samples": samples})
    parts = HeldParts(held, sessions.JOB, experience.JOB, fleet.JOB)
    (line,) = fleet.JOB.answer(parts, None).warnings
    assert "samples of 1 viewers" in line
    told = {row["minute"]: (row["viewers"], row["source"]) for row in parts.rows("fleet_streams") if row["viewers"]}
    sampled = {3480 + 120 * hour: (1.0, "samples"), 3540 + 120 * hour: (0.5, "samples")}
    spread = dict.fromkeys([3600, 3660] if hour == 0 else [3480, 3540], (1.0, "sessions"))
    assert told == sampled | spread


def test_minutes_of_long_samples_have_each_viewer_for_as_long_as_it_was_there(either):
    """A calm server takes samples of 6 to 12 s; what they counted is in the minute in which they end."""
    from flowctl.analyze.viewers import experience, fleet, sessions

    rounds = {3555: 5, 3567: 12, 3579: 12, 3591: 12, 3603: 12, 3615: 12, 3627: 12, 3630: 3}
    samples = [
        dict.fromkeys(_samples()) | sample(end, number, interval_ms=length * 1e3, sent_bytes=length)
        for end, length in rounds.items()
        for number in range(10)
    ]
    parts = HeldParts(Held(either, {"flow_samples": samples}), sessions.JOB, experience.JOB, fleet.JOB)
    fleet.JOB.answer(parts, None)
    names = ("viewers", "first_s", "last_s", "viewers_seen", "sent_bytes")
    found = {row["minute"]: tuple(row[name] for name in names) for row in parts.rows("fleet_streams")}
    fifty, thirty = pytest.approx(10 * 50 / 60), pytest.approx(10 * 30 / 60)
    assert found == {3540.0: (fifty, 10.0, 60.0, 10, 410), 3600.0: (thirty, 0.0, 30.0, 10, 390)}


def test_minutes_of_long_sessions_are_kept_by_hours_and_told_one_by_one(either):
    from flowctl.analyze.viewers import experience, fleet, sessions

    media = {"startup_ms": 0.0, "asked_ms": 0.0, "pictures_wanted": 10, "pictures_sent": 9}
    spans = {1: (-40 * 86_400 + 30, 90), 2: (-7_230, 10_000), 3: (-3_600, 3_600), 4: (-3_590, 0), 5: (0, 59)}
    closes = [
        close(until, conn_id, duration_s=float(until - began), delay_p50_ms=10.0 * conn_id,
              accepted_messages_key=(until - began) * 2, **media)
        for conn_id, (began, until) in spans.items()
    ]  # fmt: skip
    parts = HeldParts(Held(either, {"flow_closes": closes}), sessions.JOB, experience.JOB, fleet.JOB)
    fleet.JOB.answer(parts, None)
    assert len(parts.table("minutes").collect()) < 40 * 24 + 6 * 120
    rows = {round(row["minute"] / 60): row for row in parts.rows("fleet_streams")}
    assert sorted(rows) == list(range(-40 * 1440, 10_000 // 60 + 1))
    assert {row["leaves"] for minute, row in rows.items() if minute < 0} == {0}
    for minute in (-40 * 1440, -40 * 1440 + 1, -30 * 1440, -121, -120, -119, -61, -60, -59, -1, 0, 1, 59, 60, 61, 166):
        there = {
            conn_id: min(until, minute * 60 + 60) - max(began, minute * 60)
            for conn_id, (began, until) in spans.items()
            if began // 60 <= minute <= until // 60
        }
        row, delays = rows[minute], sorted(10.0 * conn_id for conn_id in there)
        assert row["viewers"] == pytest.approx(sum(there.values()) / 60)
        assert row["viewers_seen"] == len(there)
        assert row["accepted_messages"] == sum(there.values()) * 2
        assert row["joins"] == sum(began // 60 == minute for began, _ in spans.values())
        assert row["leaves"] == sum(until // 60 == minute for _, until in spans.values())
        assert row["picture_share"] == pytest.approx(0.9)
        assert row["delay_p99_ms"] == delays[-1]
