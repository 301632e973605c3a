"""Sessions are what a plain reading of the closes in Python says, column by column."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from flowctl.analyze.engine import SPARK, using
from flowctl.analyze.models import run_text
from flowctl.reasons import SLOW_ENDS
from flowctl.records.telemetry.schema import CLASS_NAMES
from tests.analyze.viewers.viewer_kit import Held, at, close, random_close

RENAMED = {
    "close_reason": "reason", "closed_at": "ts",
}  # fmt: skip


def quotient(part, whole, most=math.inf):
    """Return part / whole, at most `most`; None where either is unknown or there is nothing to divide by."""
    return None if part is None or not whole else min(most, part / whole)


def modelled(row: dict) -> dict:
    zero = {name: value or 0 for name, value in row.items()}
    peer = row["reason"] in {"peer closed", "peer reset"}
    asked, startup = row["asked_ms"], row["startup_ms"]
    play_s = None if startup is None else max(0.0, row["duration_s"] - startup / 1e3)
    rated_s = play_s if play_s is not None and play_s >= 1 else None
    never = asked is not None and startup is None
    ended = row["reason"] is not None
    failed = never and (row["refusal"] is not None or (ended and not peer))
    carried, pictures = (
        ("ingest_bytes", "ingest_pictures") if row["role"] == "publish" else ("sent_bytes", "pictures_sent")
    )
    carried_bits = None if row[carried] is None else row[carried] * 8
    dropped = sum(zero[f"dropped_messages_{name}"] for name in CLASS_NAMES)
    trouble_ms = max(zero["trouble_ms"], zero["time_overloaded_ms"] + zero["time_soft_ms"] + zero["time_hard_ms"])
    worst = [name for name in ("hard", "soft", "overloaded") if zero[f"episodes_{name}"] > 0]
    words = {"hard": "HARD_LIMIT", "soft": "SOFT_LIMIT", "overloaded": "OVERLOADED"}
    stalls = row["stall_ms"]
    stays = None if row["renditions"] in {None, "no JSON"} else json.loads(row["renditions"]).values()
    set_s = None if stays is None else min(max(sum(stays), 0.0), row["duration_s"])
    return {
        "closed_by": "peer" if peer else "server",
        "play_s": play_s,
        "first_frame_ms": None if asked is None or startup is None else max(0.0, startup - asked),
        "start_failure": (row["refusal"] or row["code"] or row["reason"]) if failed else None,
        "exit_before_start": never and not failed and ended,
        "recover_mean_ms": quotient(row["recover_ms"], row["recoveries"]),
        "accepted_messages": sum(zero[f"accepted_messages_{name}"] for name in CLASS_NAMES),
        "dropped_messages": dropped,
        "picture_share": quotient(row["pictures_sent"], row["pictures_wanted"], 1.0),
        "line_of_stream": quotient(row["line_bytes"], row["line_stream_bytes"]),
        "late_share": None if row["target_delay_ms"] is None else quotient(row["late_ms"], row["sampled_ms"], 1.0),
        "bit_rate": quotient(carried_bits, rated_s),
        "frames_per_s": quotient(row[pictures], rated_s),
        "stall_ratio": None if play_s is None or stalls is None else quotient(stalls, play_s * 1e3, 1.0),
        "set_s": set_s,
        "smaller_rendition_share": None if set_s is None else quotient(row["smaller_ms"], set_s * 1e3, 1.0),
        "trouble_ms": trouble_ms,
        "worst_state": words[worst[0]] if worst else "READY",
        **blamed(row, zero, dropped, trouble_ms, worst),
    }


def blamed(row: dict, zero: dict, dropped: int, trouble_ms: float, worst: list[str]) -> dict:
    troubled = (
        set(worst) & {"hard", "soft"}
        or max(trouble_ms, zero["stall_ms"]) > max(1000.0, 10 * row["duration_s"])
        or (worst and zero["lost_messages"] > 0)
        or row["reason"] in SLOW_ENDS
    )
    unwanted = zero["dropped_by_closed"] + zero["dropped_by_unfollowed"] + zero["dropped_by_requested"]
    server, burst = (min(1.0, quotient(row[f"lag_{name}_ms"], row["lag_ms"]) or 0.0) for name in ("server", "burst"))
    unforced = quotient(zero["unforced_drops"], max(0, dropped - unwanted), 1.0) or 0.0
    policy = 1.0 if zero["hard_at_once"] else unforced
    there = 1.0 if troubled else 0.0
    rest = there * max(0.0, 1 - server - burst)
    shares = {
        "viewer_link": rest * (1 - policy),
        "server_loop": there * server,
        "publisher_burst": there * burst,
        "policy": rest * policy,
    }
    largest = max(shares, key=lambda name: shares[name])
    return {"blame": largest if troubled else "none"} | {f"blame_share_{name}": share for name, share in shares.items()}


@pytest.fixture(scope="module")
def many(either):
    from flowctl.analyze.viewers.sessions import MADE_COLUMNS, seen_sessions

    rng = random.Random(7)
    rows = [random_close(rng, number) for number in range(1, 601)]
    server = close(5, 0)
    found = seen_sessions(Held(either, {"flow_closes": [*rows, server]}))
    assert [*MADE_COLUMNS, "date", "hour"] == found.columns
    # Times as microseconds: `collect` would give the zone of this machine.
    text = "SELECT *, unix_micros(opened_at) AS opened_us, unix_micros(closed_at) AS closed_us FROM found"
    table = run_text(text, {"found": found}).collect()
    return rows, {row["conn_id"]: row.asDict() for row in table}


def test_sessions_of_random_closes_are_those_of_plain_python(many):
    rows, found = many
    assert len(found) == len(rows)
    for row in rows:
        got = found[row["conn_id"]]
        for name, expected in modelled(row).items():
            assert got[name] == (pytest.approx(expected) if isinstance(expected, float) else expected), (
                name,
                expected,
                got[name],
                {k: v for k, v in row.items() if v is not None},
                got,
            )


def test_sessions_of_random_closes_carry_what_the_close_says(many):
    rows, found = many
    derived = set(modelled(rows[0]))
    for row in rows:
        got = found[row["conn_id"]]
        assert got["opened_us"] == round(row["opened_at"].timestamp() * 1e6)
        assert got["closed_us"] == round(row["ts"].timestamp() * 1e6)
        for name, value in got.items():
            if name not in derived | {"date", "hour", "opened_at", "closed_at", "seen_at", "opened_us", "closed_us"}:
                assert value == row[RENAMED.get(name, name)], name


def test_sessions_of_random_closes_have_no_figure_that_is_none(many):
    for row in many[1].values():
        for name, value in row.items():
            if isinstance(value, float):
                assert math.isfinite(value), name
                assert value >= 0, name
                assert value <= 1 or "share" not in name, name


@pytest.mark.parametrize("most", [0, 1_000])
def test_open_sessions_are_the_latest_of_the_hour_that_did_not_close_in_it(either, monkeypatch, most):
    from flowctl.analyze.viewers import sessions
    from flowctl.analyze.viewers.sessions import open_sessions

    monkeypatch.setattr(sessions, "MOST_BROADCAST", most)

    def row(seconds: float, conn_id: int) -> dict:
        return close(seconds, conn_id, reason=None, duration_s=seconds + 60.0, sent_bytes=int(seconds))

    opens = [row(10, 1), row(310, 1), row(610, 1), row(10, 2), row(20, 3), row(3610, 3), row(3600 * 24 + 10, 1)]
    closes = [close(700, 2), close(7300, 3)]
    held = Held(either, {"flow_opens": opens, "flow_closes": closes})
    text = "SELECT *, unix_micros(seen_at) AS seen_us FROM found"
    found = run_text(text, {"found": open_sessions(held)}).collect()
    expected = {(1, 610), (3, 20), (3, 3610), (1, 3600 * 24 + 10)}
    assert {(item["conn_id"], item["sent_bytes"]) for item in found} == expected
    assert {item["closed_by"] for item in found} == {"open"}
    assert {item["closed_at"] for item in found} == {item["close_reason"] for item in found} == {None}
    assert min(item["seen_us"] for item in found) == round(at(20).timestamp() * 1e6)


def test_open_sessions_when_they_are_few_send_no_row_of_records_to_another_task(spark, capsys):
    from flowctl.analyze.viewers.sessions import open_sessions

    held = Held(spark, {"flow_opens": [close(10, 1, reason=None)], "flow_closes": [close(20, 2)]})
    spark.conf.set("spark.sql.autoBroadcastJoinThreshold", -1)  # as if all tables were large
    try:
        with using(SPARK):
            open_sessions(held).explain()
    finally:
        spark.conf.unset("spark.sql.autoBroadcastJoinThreshold")
    plan = capsys.readouterr().out
    assert "BroadcastHashJoin" in plan
    assert "SortMergeJoin" not in plan


def test_ended_when_it_is_asked_of_arrays_is_what_the_query_says(either):
    from flowctl.analyze.models import query
    from flowctl.analyze.viewers.sessions import ended_us

    rng, second = random.Random(3), 1_000_000
    life = int(at(0).timestamp())
    seen, heard, lives = ([rng.randrange(1, 4000) for _ in range(60)] for _ in range(3))
    rows = [(f"n{n}", life << 30, at(one), "", "") for n, one in enumerate(seen)]
    ddl = "node string, conn_id bigint, seen_at timestamp, date string, hour string"
    later = [(f"n{n}", life + one << 30, "", "") for n, one in enumerate(lives)]
    inputs = {
        "open_sessions": either.createDataFrame(rows, ddl),
        "sessions": either.createDataFrame(later, "node string, conn_id bigint, date string, hour string"),
        "heard": either.createDataFrame(
            [(f"n{n}", at(one)) for n, one in enumerate(heard)], "node string, heard_at timestamp"
        ),
    }
    found = query("viewers/still_open", inputs, number_bits=30, every_s=300, newest_us=0)
    told = run_text("SELECT node, unix_micros(until) AS us FROM found", {"found": found}).collect()
    us = (np.array(some) * second for some in (seen, heard, [one - 1 for one in lives]))
    assert dict(map(tuple, told)) == {f"n{n}": life * second + one for n, one in enumerate(ended_us(*us))}
