"""What viewers felt is what a plain reading of their sessions in Python says, by each value of each dimension."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import random

import pytest

from flowctl.reasons import SLOW_ENDS
from flowctl.records.telemetry.schema import CLASS_NAMES, FLOW_EVENTS, STATE_NAMES
from tests.analyze.viewers.test_viewer_sessions import modelled
from tests.analyze.viewers.viewer_kit import Held, HeldParts, at, close, random_close

CAPTIONS = {None: "", "192.0.2.1": "192.0.2.0/24", "2001:db8::7": "2001:db8::/48", "not an address": ""}


@dataclasses.dataclass
class World:
    """Random closes of four hours, rows that are open, and what the jobs made of them."""

    closes: list[dict]
    opens: list[dict]
    parts: HeldParts
    summary: dict

    def viewers(self) -> list[dict]:
        """Return the sessions of viewers, by the model: of closes and of those that are open, until they end."""
        rows = [row | modelled(row) for row in (*self.closes, *self.opens)]
        for row in rows:
            after_s = (newest(self)[row["node"]] - row["ts"]).total_seconds()
            row["lasts_s"] = 0.0 if row["reason"] is not None else min(300.0, after_s)
            row["play_s"] = None if row["play_s"] is None else row["play_s"] + row["lasts_s"]
        unknown = [row for row in rows if row["role"] in {None, "unknown"} and row["asked_ms"] is not None]
        return [row for row in rows if row["role"] in {"play", "http_flv"}] + unknown


@pytest.fixture(scope="module", params=[False, True], ids=["large", "small"])
def world(request, either):
    """Give a world of 500 connections of four hours, forty of them open; who is, is found by Spark or here."""
    from flowctl.analyze.viewers import experience, sessions

    rng = random.Random(11)
    closes = [random_close(rng, number) for number in range(1, 461)]
    for row in closes:
        row["ts"] = at(rng.randrange(4 * 3600))
        row["duration_s"] = round(rng.choice((0.5, 3.0, rng.random() * 4000)), 3)
    opens = [random_close(rng, number) | {"reason": None} for number in range(1001, 1041)]
    held = Held(either, {"flow_closes": closes, "flow_opens": opens})
    parts = HeldParts(held, sessions.JOB, experience.JOB, small=request.param)
    return World(closes, opens, parts, experience.JOB.answer(parts, None).summary)


def newest(world: World) -> dict[str, dt.datetime]:
    rows = sorted((*world.closes, *world.opens), key=lambda row: row["ts"])
    return {row["node"]: row["ts"] for row in rows}


def total(rows: list[dict], name: str, known: str = "") -> float:
    return sum(row[name] or 0 for row in rows if not known or row[known] is not None)


def quotient(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def rank(values: list[float | None], share: float) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[max(0, math.ceil(share * len(known)) - 1)] if known else None


def expected(rows: list[dict]) -> dict:
    stayed = [row for row in rows if row["duration_s"] >= 2]
    accepted = sum(total(rows, f"accepted_messages_{name}") for name in CLASS_NAMES)
    pictures = [row for row in rows if row["picture_share"] is not None]
    states = {name: total(rows, f"time_{name}_ms") for name in STATE_NAMES}
    return {
        "viewers": sum(row["play_s"] is not None for row in stayed),
        "attempts": sum(row["asked_ms"] is not None or row["startup_ms"] is not None for row in rows),
        "plays": sum(row["startup_ms"] is not None for row in rows),
        "start_failures": sum(row["start_failure"] is not None for row in rows),
        "exits_before_start": sum(row["exit_before_start"] for row in rows),
        "troubled": sum(row["blame"] != "none" for row in rows),
        "cut_slow": sum(row["reason"] in SLOW_ENDS for row in rows),
        "first_frame_p50_ms": rank([row["first_frame_ms"] for row in stayed], 0.5),
        "first_frame_p95_ms": rank([row["first_frame_ms"] for row in stayed], 0.95),
        "delay_p50_ms": rank([row["delay_p50_ms"] for row in stayed], 0.5),
        "delay_p99_ms": rank([row["delay_p50_ms"] for row in stayed], 0.99),
        "picture_share": quotient(
            sum(row["picture_share"] * row["pictures_wanted"] for row in pictures), total(pictures, "pictures_wanted")
        ),
        "stall_ratio": quotient(
            sum(row["stall_ratio"] * row["play_s"] for row in rows if row["stall_ratio"] is not None),
            total(rows, "play_s", "stall_ratio"),
        ),
        "late_share": quotient(
            sum(row["late_share"] * row["sampled_ms"] for row in rows if row["late_share"] is not None),
            total(rows, "sampled_ms", "late_share"),
        ),
        "smaller_rendition_share": quotient(
            sum(row["smaller_rendition_share"] * row["set_s"] for row in rows if row["smaller_rendition_share"]),
            total(rows, "set_s", "smaller_rendition_share"),
        ),
        "switches": total(rows, "switches"),
        "stall_count": total(rows, "stall_count"),
        **{
            name: quotient(
                sum(row[name] * row["play_s"] for row in rows if row[name] is not None), total(rows, "play_s", name)
            )
            for name in ("bit_rate", "frames_per_s")
        },
        "play_hours": total(rows, "play_s") / 3600,
        **{f"share_{name}": quotient(value, sum(states.values())) for name, value in states.items()},
        "accepted_messages": accepted,
        "dropped_messages": total(rows, "dropped_messages"),
        "sent_bytes": total(rows, "sent_bytes"),
        "rank_error": 0.0,
    }


def test_experience_of_random_sessions_is_that_of_plain_python(world):
    found = {(row["by"], row["key"]): row for row in world.parts.rows("experience")}
    of = {
        "all": lambda row: "all",
        "stream": lambda row: "/".join(part for part in (row["app"], row["stream"]) if part is not None),
        "application": lambda row: row["app"] or "",
        "network": lambda row: CAPTIONS[row["peer_ip"]],
        "agent": lambda row: "",
        "node": lambda row: row["node"],
        "role": lambda row: row["role"] or "",
    }
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in world.viewers():
        for by, key in of.items():
            groups.setdefault((by, key(row)), []).append(row)
    assert found.keys() == groups.keys()
    for where, rows in groups.items():
        for name, value in expected(rows).items():
            # Of each viewer whole milliseconds are added up, and sketches hold floats of 24 bits.
            near = value if value is None else pytest.approx(value, rel=2e-3, abs=2e-3)
            assert found[where][name] == near, (where, name)
        assert found[where]["few"] == (expected(rows)["viewers"] < 20)
        assert found[where]["keys"] == 1


def test_peaks_of_random_sessions_are_those_of_counting_each_second(world):
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in world.viewers():
        if row["play_s"] is None:
            continue
        seen = row["ts"].timestamp()
        until = seen + row["lasts_s"]
        stream = "/".join(part for part in (row["app"], row["stream"]) if part is not None)
        for where in (("all", "all"), ("stream", stream), ("node", row["node"])):
            spans.setdefault(where, []).append((math.floor(until - row["play_s"]), math.floor(until)))
    rows = {(row["by"], row["key"]): row for row in world.parts.rows("experience")}
    for where, each in spans.items():
        most = max(sum(first <= second <= last for first, last in each) for second, _ in each)
        assert rows[where]["peak_viewers"] == most, where
    assert {row["peak_viewers"] for where, row in rows.items() if where[0] in {"network", "agent", "role"}} == {None}


def test_summary_of_experience_is_the_row_of_all(world):
    (row,) = (row for row in world.parts.rows("experience") if row["by"] == "all")
    for name in ("viewers", "attempts", "peak_viewers"):
        assert world.summary[name] == row[name] > 0
    told = [row for row in world.parts.rows("ingest") if row["health"]]
    assert sum(world.summary["publishers"].values()) == len(told) > 0


def test_experience_of_many_values_keeps_those_with_most_viewers(either, monkeypatch):
    from flowctl.analyze.viewers import experience, sessions

    monkeypatch.setattr(experience, "MOST_VALUES_PER_DIMENSION", 2)
    agents = (
        "OBS 30",
        "Mozilla/5.0 Chrome/120 Safari/537",
        "Mozilla/5.0 Chrome/120 Safari/5 Edg/1",
        "<script>",
        "Lavf/61",
    )
    rows = [
        close(60, 10 * stream + number + 1, stream=f"s{stream}", startup_ms=100.0, asked_ms=50.0, agent=agents[stream])
        for stream in range(5)
        for number in range(5 - stream)
    ]
    held = Held(either, {"flow_closes": [*rows, close(60, 90, duration_s=1.9, startup_ms=1.0, stream="s4")]})
    parts = HeldParts(held, sessions.JOB, experience.JOB)
    experience.JOB.answer(parts, None)
    found = parts.rows("experience")
    streams = {row["key"]: (row["keys"], row["plays"], row["viewers"]) for row in found if row["by"] == "stream"}
    assert streams == {"live/s0": (1, 5, 5), "live/s1": (1, 4, 4), None: (3, 7, 6)}
    assert {row["key"]: row["first_frame_p50_ms"] for row in found if row["by"] == "agent"}["OBS"] == 50.0
    assert {"OBS", "Chrome"} <= {row["key"] for row in found if row["by"] == "agent"}


def test_peaks_in_a_window_count_who_was_there_at_its_begin(either):
    from flowctl.analyze.viewers import experience, sessions

    early = [close(4000 + number, number, duration_s=2500.0, startup_ms=0.0) for number in range(1, 4)]
    crowd = [close(1000, number, duration_s=30.0, startup_ms=0.0) for number in range(10, 20)]
    parts = HeldParts(Held(either, {"flow_closes": early + crowd}), sessions.JOB, experience.JOB, since=at(3600))
    experience.JOB.answer(parts, None)
    (row,) = (row for row in parts.rows("experience") if row["by"] == "all")
    assert (row["peak_viewers"], row["peak_at"]) == (3, 3600.0)


@pytest.mark.parametrize("small", [False, True])
def test_sessions_when_a_window_ends_before_their_close_are_open(either, small):
    from flowctl.analyze.viewers import experience, sessions

    media = {"startup_ms": 0.0, "asked_ms": 0.0}
    rows = {
        "flow_opens": [close(second, 1, duration_s=float(second), reason=None, **media) for second in (1800, 3590)],
        "flow_closes": [close(5000, 1, duration_s=5000.0, **media)],
    }
    for until, state, play_s in ((at(3600), (0, 1), 3590.0), (None, (1, 0), 5000.0)):
        parts = HeldParts(Held(either, rows), sessions.JOB, experience.JOB, until=until, small=small)
        summary = sessions.JOB.answer(parts, None).summary
        assert (summary["sessions"] - summary["open"], summary["open"]) == state
        assert experience.JOB.answer(parts, None).summary["play_hours"] == pytest.approx(play_s / 3600, rel=1e-3)


def test_ingest_tells_in_a_word_what_is_worst(either):
    from flowctl.analyze.viewers import experience, sessions

    def publisher(seconds: float, conn_id: int, stream: str, **columns) -> dict:
        media = {"ingest_bytes": 10**6, "ingest_pictures": 1500, "startup_ms": 10_000.0, "gap_ms": 0.0}
        row = {"role": "publish", "stream": stream, "gap_max_ms": 0.0, "jitter_ms": 3.0, "key_interval_max_ms": 2000.0}
        return close(seconds, conn_id, **(row | media | columns))

    closes = [
        publisher(100, 1, "none", ingest_bytes=0),
        publisher(100, 2, "gappy", gap_ms=700.0),
        publisher(100, 3, "broken"),
        publisher(190, 4, "broken"),
        publisher(400, 5, "broken"),
        publisher(100, 6, "rare", key_interval_max_ms=12_000.0),
        publisher(100, 7, "shaky", jitter_ms=150.0),
        close(100, 9),
        *(publisher(130, 10 + n, "none", ingest_bytes=None, startup_ms=None, refusal="name taken") for n in range(3)),
        publisher(100, 20, "old", ingest_bytes=None, ingest_pictures=None, gap_ms=None, jitter_ms=None),
    ]
    opens = [publisher(100, 8, "fine", reason=None)]
    parts = HeldParts(Held(either, {"flow_closes": closes, "flow_opens": opens}), sessions.JOB, experience.JOB)
    summary = experience.JOB.answer(parts, None).summary
    rows = {row["conn_id"]: row for row in parts.rows("ingest")}
    words = ["no media", "gaps", "steady", "came back", "steady", "key frames far apart", "jitter", "steady"]
    assert [rows.pop(20)["health"], *(row["health"] for _, row in sorted(rows.items()))] == [None, *words]
    assert [rows[number]["away_s"] for number in (3, 4, 5)] == [None, 30.0, None]
    assert [rows[number]["reconnects"] for number in (3, 4, 5)] == [0, 1, 1]
    assert (rows[2]["gap_share"], rows[2]["bit_rate"], rows[8]["frames_per_s"]) == (
        pytest.approx(0.7 / 60),
        160e3,
        30.0,
    )
    assert summary["publishers"]["came back"] == 1
    assert "viewers" in summary


def test_ingest_when_a_clock_was_set_does_not_say_who_came_back(either):
    from flowctl.analyze.viewers import experience, sessions

    media = {"role": "publish", "ingest_bytes": 10**6, "gap_ms": 0.0, "jitter_ms": 3.0}
    closes = [
        close(1800, 1, stream="set", startup_ms=500.0, duration_s=1700.0, **media),
        close(1500, 2, stream="set", startup_ms=500.0, duration_s=1200.0, **media),
        close(100, 3, stream="taken", startup_ms=500.0, **media),
        close(200, 4, stream="taken", startup_ms=3000.0, duration_s=102.0, **media),
    ]
    parts = HeldParts(Held(either, {"flow_closes": closes}), sessions.JOB, experience.JOB)
    experience.JOB.answer(parts, None)
    rows = {row["conn_id"]: (row["away_s"], row["reconnects"], row["health"]) for row in parts.rows("ingest")}
    steady = (None, 0, "steady")
    assert rows == {1: steady, 2: steady, 3: steady, 4: (0.0, 1, "came back")}


def test_experience_when_nobody_got_a_picture_has_no_share_of_them(either):
    from flowctl.analyze.viewers import experience, sessions

    nothing = {"asked_ms": 30.0, "pictures_wanted": 0, "pictures_sent": 0}
    closes = [close(60, number, duration_s=53.0, **nothing) for number in range(1, 4)]
    parts = HeldParts(Held(either, {"flow_closes": closes}), sessions.JOB, experience.JOB)
    said = experience.JOB.answer(parts, None).summary
    names = ("attempts", "plays", "viewers", "start_failures", "exits_before_start", "picture_share")
    assert [said[name] for name in names] == [3, 0, 0, 0, 3, None]


def test_sums_when_they_are_beyond_64_bits_end_there(either):
    from flowctl.analyze.viewers import experience, sessions

    closes = [close(60, number, startup_ms=0.0, sent_bytes=1 << 59, switches=1) for number in range(1, 18)]
    parts = HeldParts(Held(either, {"flow_closes": closes}), sessions.JOB, experience.JOB)
    said = experience.JOB.answer(parts, None).summary
    assert (said["sent_bytes"], said["switches"], said["stall_count"]) == ((1 << 63) - 1, 17, 0)


@pytest.mark.parametrize("small", [False, True])
def test_peaks_after_a_restart_leave_out_whom_the_killed_server_had(either, small):
    from flowctl.analyze.viewers import experience, sessions

    def there(node, seconds, conn_id):
        return close(seconds, conn_id, node=node, reason=None, startup_ms=0.0)

    first, second = (int(at(seconds).timestamp()) << 30 for seconds in (0, 200))
    killed = [there("n1", 100, first + number) for number in range(50)]
    back = [there("n1", 260, second + number) for number in range(50)]
    beside = [there("n2", 150, first + number) for number in range(7)]
    held = Held(either, {"flow_opens": killed + back + beside})
    parts = HeldParts(held, sessions.JOB, experience.JOB, small=small)
    experience.JOB.answer(parts, None)
    peaks = {row["key"]: row["peak_viewers"] for row in parts.rows("experience") if row["by"] in {"all", "node"}}
    assert peaks == {"all": 57, "n1": 50, "n2": 7}


@pytest.mark.parametrize("small", [False, True])
def test_time_of_a_viewer_that_is_open_goes_on_until_its_server_was_last_heard_of(either, small):
    """Rates are those of its last row, by the whole time; what it was sent ends with the row."""
    from flowctl.analyze.viewers import experience, sessions

    counts = {"sent_bytes": 4_000_000, "pictures_sent": 250, "pictures_wanted": 250, "stall_ms": 1000.0}
    opens = [close(10, 1, duration_s=10.0, reason=None, startup_ms=0.0, **counts)]
    closes = [close(40, 2, duration_s=10.0, startup_ms=0.0, sent_bytes=8_000_000, pictures_sent=500)]
    held = Held(either, {"flow_opens": opens, "flow_closes": closes})
    said = experience.JOB.answer(HeldParts(held, sessions.JOB, experience.JOB, small=small), None).summary
    assert said["play_hours"] * 3600 == pytest.approx(40.0 + 10.0, abs=0.2)
    assert (said["bit_rate"], said["frames_per_s"]) == (pytest.approx((4 * 3.2e6 + 6.4e6) / 5), pytest.approx(30.0))
    assert (said["sent_bytes"], said["stall_ratio"]) == (12_000_000, 0.1)


@pytest.mark.parametrize("other", [0, 300])
def test_peaks_when_a_node_dies_count_each_viewer_once(either, other):
    """Those of a dead node were there until it was last heard of, in any table, and are elsewhere from then on."""
    from flowctl.analyze.viewers import experience, fleet, sessions

    def viewer(seconds, conn_id, node, since, **columns):
        return close(seconds, conn_id, node=node, duration_s=float(seconds - since), startup_ms=0.0, **columns)

    last = [viewer(701 + number, number + 1, "n1", 100, reason=None) for number in range(200)]
    moved = [viewer(1500, number + 1, "n2", 1003) for number in range(200)]
    beside = [viewer(1500, number + 501, "n2", 50) for number in range(other)]
    heard = dict.fromkeys(FLOW_EVENTS.names) | {"ts": at(1000), "node": "n1", "seq": 1, "conn_id": 0}
    held = Held(either, {"flow_opens": last, "flow_closes": moved + beside, "flow_events": [heard]})
    parts = HeldParts(held, sessions.JOB, experience.JOB, fleet.JOB)
    experience.JOB.answer(parts, None)
    peaks = {row["key"]: row["peak_viewers"] for row in parts.rows("experience") if row["by"] in {"all", "node"}}
    assert peaks == {"all": 200 + other, "n1": 200, "n2": 200 + other}
    fleet.JOB.answer(parts, None)
    minutes = {(row["node"], row["minute"]): row["viewers"] for row in parts.rows("fleet_streams")}
    assert minutes["n1", 900.0] == pytest.approx(200), "up to when their node was last heard of"
    assert ("n1", 1020.0) not in minutes


def test_minutes_when_500_are_there_as_their_node_dies_count_500_before_it(either):
    """Rows of those who stay come each five minutes, in turn: the oldest is as old as that."""
    from flowctl.analyze.viewers import experience, fleet, sessions

    stayed = [
        close(700 + number * 0.6, number + 1, duration_s=600.0 + number * 0.6, startup_ms=0.0, reason=None)
        for number in range(500)
    ]
    heard = dict.fromkeys(FLOW_EVENTS.names) | {"ts": at(1000), "node": "n1", "seq": 1, "conn_id": 0}
    parts = HeldParts(
        Held(either, {"flow_opens": stayed, "flow_events": [heard]}), sessions.JOB, experience.JOB, fleet.JOB
    )
    experience.JOB.answer(parts, None)
    fleet.JOB.answer(parts, None)
    assert {row["peak_viewers"] for row in parts.rows("experience") if row["by"] in {"all", "node"}} == {500}
    minutes = {row["minute"]: row["viewers"] for row in parts.rows("fleet_streams")}
    assert [minutes[60.0 * number] for number in range(2, 16)] == pytest.approx([500] * 14)
    assert max(minutes) < 1000
