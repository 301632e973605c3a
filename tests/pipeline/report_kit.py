"""Figures of a report as the jobs could have left them, with peers who say bad things; for tests of the page."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from flowctl.pipeline.report.data import Cut, JobNote, JobState, ReportData
from flowctl.telemetry.schema import CLASS_NAMES

NASTY = (
    "</title></style></svg><script>alert('x')</script>\x1b[31m\u202eevil\x00 & \"quoted\" 'single' "
    "<img src=http://127.0.0.1:9/pixel onerror=alert(1)>"
)
"""What a peer may call itself or its stream: markup, an address to load, escape sequences, a change of direction."""

BEGAN = datetime(2026, 11, 21, 16, 0, tzinfo=UTC)


def accounts(table="flow_events", rows_in=1000, aside=7):
    return {
        "table": table,
        "files_in": 12,
        "files_quarantined": 1,
        "files_by_reason": {"truncated": 1},
        "files_unknown_rows": 1,
        "rows_in": rows_in,
        "rows_out": rows_in - aside,
        "rows_quarantined": aside,
        "by_reason": {"clock skew": aside} if aside else {},
    }


def worst_viewer(number=0, text=NASTY, **values):
    row = {
        "node": f"edge-1{text}",
        "conn_id": number,
        "peer_ip": f"127.0.3.{number % 250}",
        "app": "live",
        "stream": f"test{text}",
        "user_agent": text,
        "opened_at": BEGAN,
        "duration_s": 12.5,
        "close_reason": f"hard limit{text}",
        "closed_by": "server",
        "worst_state": "HARD_LIMIT",
        "blame": "viewer_link",
        "trouble_ms": 9000.0 - number,
        "dropped_messages": 120,
        "dropped_bytes": 120_000,
        "delay_p99_ms": 8100.0,
        "picture_share": 0.77,
        "line_of_stream": 0.85,
        "returns_to_live": 2,
        "input_pauses": 1,
    }
    return row | values


def some_whole(**values):
    row = {
        "connections": 400,
        "open": 3,
        "sent_bytes": 5e9,
        "limit_hitters": 4,
        "viewers": 390,
        "troubled": 39,
        "worst_overloaded": 20,
        "worst_soft": 9,
        "worst_hard": 10,
        "cut_slow": 8,
        "play_ms": 3.9e7,
        "trouble_ms": 1e6,
        "recoveries": 50,
        "recover_mean_ms": 4000.0,
        "returns_to_live": 12,
        "paused": 5,
        "accepted_messages": 1_000_000,
        "dropped_messages": 4321,
        "dropped_bytes": 5e6,
        "stall_count": 44,
        "stall_ratio": 0.0123,
        "startup_p50_ms": 35.0,
        "startup_p95_ms": 180.0,
        "exits_before_start": 2,
        "delay_p50_of_p50_ms": 21.0,
        "delay_p95_of_p95_ms": 950.0,
    }
    return row | values


def a_choice(number=0, **values):
    row = {
        "choice": f"soft=2MiB,2048,4s hard=4MiB,4096,8s policy=live target=auto number={number}",
        "viewers": 390,
        "disconnected_share": 0.02 + number / 1000,
        "delay_p50_ms": 20.0,
        "delay_p95_ms": 900.0 - 10 * number,
        "delay_p99_ms": 2000.0,
        "memory_peak_bytes": 1_000_000 * (number + 1),
        "dropped_messages": 1000,
        "on_front": number % 3 == 0,
        "in_force": number == 1,
        "recommended": number == 3,
    }
    return row | values


def a_moment(place=0, **values):
    row = {
        "at_s": place * 60.0,
        "ready": 0.9,
        "overloaded": 0.05,
        "soft": 0.03,
        "hard": 0.02,
        "viewers": 390,
        "delay_p50_ms": 20.0 + place,
        "delay_p95_ms": 200.0,
        "delay_p99_ms": 900.0,
    }
    return row | values


def fleet_row(**values):
    row = {
        "viewers": 300,
        "viewer_ms": 3e7,
        "trouble_share": 0.1,
        "delay_p50_ms": 20.0,
        "delay_p95_ms": 300.0,
        "delay_p99_ms": 900.0,
        "drop_share": 0.004,
        "picture_share": 0.91,
        "below_80_share": 0.13,
    }
    return row | values


def some_data(text=NASTY, **values):
    """Everything that a page may show, with `text` wherever a peer had a say."""
    done = {name: JobNote(name, JobState.DONE, accounts=[accounts()], took_s=3.0) for name in ("sessions", "fleet")}
    done |= {name: JobNote(name, JobState.DONE, took_s=1.0) for name in ("abuse", "whatif")}
    done["capacity"] = JobNote("capacity", JobState.DONE, summary={"viewers_per_node": 2400, "error_share": 0.04})
    done["capacity"].summary["fleet"] = {"answer": f"900 viewers need 6 edges and 2 origins{text}"}
    data = ReportData(
        events=f"/data/events{text}",
        made_at=BEGAN,
        jobs=done,
        whole=some_whole(),
        began_at=BEGAN,
        ended_at=BEGAN.replace(minute=10),
        nodes=[{"node": f"edge-1{text}", "connections": 400, "viewers": 390}],
        node_count=3,
        closes=[
            {"reason": f"peer closed{text}", "closed_by": "peer", "connections": 300},
            {"reason": "hard limit", "closed_by": "server", "connections": 97},
            {"reason": "still open", "closed_by": "open", "connections": 3},
        ],
        blames=[
            {"blame": "viewer_link", "viewers": 30, "trouble_ms": 9e5},
            {"blame": text, "viewers": 9, "trouble_ms": 1e5},
        ],
        drops=[{"class": name, "accepted_messages": 1000, "dropped_messages": 100} for name in CLASS_NAMES],
        picture_shares=[
            {"least": 1.0, "viewers": 300},
            {"least": 0.5, "viewers": 60},
            {"least": None, "viewers": 30},
        ],
        worst=Cut([worst_viewer(number, text) for number in range(20)], 39),
        delay_curves={name: [float(place) for place in range(101)] for name in ("delay_p50_ms", "delay_p95_ms")},
        moments=[a_moment(place) for place in range(10)],
        streams=Cut([fleet_row(app="live", stream=f"s{text}")], 5),
        subnets=Cut([fleet_row(subnet=f"127.0.3.0/24{text}")], 1),
        choices=Cut([a_choice(number) for number in range(12)], 50),
        limits_toml=f'# because {text}\nversion = 1\n\n[limits]\nsoft = "2MiB,2048,4s"\n',
        scores=Cut(
            [
                {
                    "cidr": f"127.0.9.1/32{text}",
                    "score": 12.5,
                    "connections": 40,
                    "banned": True,
                    "verdict": "ban",
                    "evidence": {text: 3.0},
                }
            ],
            9,
        ),
        bans=Cut([{"cidr": f"127.0.9.1/32{text}", "score": 12.5, "evidence": {text: 3}, "expires": text}], 1),
        capacity=Cut([{"viewers": 1000 * n, "busy_p95": n / 10, "memory_bytes": 1e9 * n} for n in range(1, 8)], 7),
        capacity_nodes=Cut([{"node": f"n{text}", "carries_viewers": 200, "viewers_peak": 150.5, "load_peak": 0.75}], 3),
        capacity_streams=Cut(
            [{"stream": text, "node": "n", "viewers_mean": 7.5, "follower_viewers": 2.0, "worth_following": True}], 1
        ),
        capacity_places=Cut([{"place": text, "place_from": "region", "viewers_peak": 9.0, "edges_filled": 1.5}], 1),
    )
    return replace(data, **values)


def empty_data(**values):
    """A report of nothing."""
    return replace(ReportData(events="/data/events", made_at=BEGAN), **values)
