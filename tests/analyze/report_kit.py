"""Results as the jobs could have left them, with peers who say bad things; for tests of the report and of compare."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pandas as pd

from flowctl.analyze.records.place import RecordPlace
from flowctl.analyze.report import gather, job
from flowctl.analyze.report.found import ReportFindings
from flowctl.records.telemetry.schema import CLASS_NAMES

NASTY = (
    "</title></style></svg><script>alert('x')</script>\x1b[31m\u202eevil & \"quoted\" 'single' "
    "<img src=http://127.0.0.1:9/pixel onerror=alert(1)>"
)
"""What a peer may call itself or its stream: markup, an address to load, escape sequences, a change of direction."""
BEGAN = datetime(2026, 11, 21, 16, 0, tzinfo=UTC)
JOBS = ("sessions", "experience", "fleet", "abuse", "whatif", "capacity")


def session(number=0, text="", **values):
    troubled, cut = number % 10 == 0, number % 20 == 0
    row = {
        "node": f"edge-{number % 2}{text}",
        "conn_id": number,
        "peer_ip": f"127.0.{0 if troubled else number % 3}.{number % 250}",
        "role": "play",
        "app": "live",
        "stream": f"s{number % 4}{text}",
        "agent": f"player{text}",
        "opened_at": BEGAN + timedelta(seconds=number % 60),
        "closed_at": BEGAN + timedelta(seconds=600 + number % 60),
        "duration_s": 600.0,
        "play_s": 599.0,
        "close_reason": "hard limit" if cut else "peer closed",
        "closed_by": "server" if cut else "peer",
        "asked_ms": 20.0,
        "first_frame_ms": 40.0 + number % 50,
        "start_failure": None,
        "exit_before_start": False,
        "pictures_wanted": 15_000,
        "sampled_ms": 600e3,
        "picture_share": 0.7 if troubled else 1.0,
        "line_of_stream": 0.8 if troubled else None,
        "bit_rate": 2.5e6,
        "frames_per_s": 25.0,
        "delay_p50_ms": 3000.0 if troubled else 20.0,
        "delay_p95_ms": 8000.0 if troubled else 50.0,
        "delay_p99_ms": 9000.0 if troubled else 80.0,
        "late_share": 0.3 if troubled else 0.0,
        "stall_ratio": 0.1 if troubled else 0.0,
        "trouble_ms": 9000.0 - number if troubled else 0.0,
        "worst_state": "HARD_LIMIT" if troubled else "READY",
        "blame": "viewer_link" if troubled else "none",
        **{f"accepted_messages_{name}": 1000 for name in CLASS_NAMES},
        **{f"dropped_messages_{name}": 100 if troubled else 0 for name in CLASS_NAMES},
    }
    return row | values


def felt(by, key, viewers, troubled=0, **values):
    row = {"by": by, "key": key, "keys": 1, "viewers": viewers, "plays": viewers, "attempts": viewers}
    row |= {"start_failures": 0, "exits_before_start": 0, "troubled": troubled, "peak_viewers": viewers}
    row |= {"first_frame_p50_ms": 64.0, "first_frame_p95_ms": 87.0, "delay_p50_ms": 20.0, "delay_p95_ms": 90.0}
    row |= {"picture_share": 0.97, "stall_ratio": 0.01, "late_share": 0.03, "frames_per_s": 25.0, "cut_slow": 0}
    return row | {"bit_rate": 2.5e6, "play_hours": 12.5, "sent_bytes": 10**7} | values


def choice(number, **values):
    row = {
        "choice_id": number,
        "choice": f"soft=2MiB,2048,4s hard=4MiB,4096,8s number={number}",
        "viewers": 390,
        "disconnected": 40 - 3 * number,
        "disconnected_share": (40 - 3 * number) / 390,
        "delay_p50_ms": 20.0,
        "delay_p95_ms": 900.0 - 10 * number,
        "delay_p99_ms": 2000.0,
        "dropped_share": 0.01,
        "assumed_share": 0.04,
        "sampled_share": 0.5,
        "memory_peak_bytes": 1_000_000 * (number + 1),
        "on_front": number % 3 == 0,
        "in_force": number == 1,
        "recommended": number == 7,
    }
    return row | values


def publication(**values):
    row = {"node": "edge-0", "conn_id": 7, "app": "live", "stream": "s0", "duration_s": 600.0, "health": "steady"}
    row |= {"bit_rate": 2.5e6, "frames_per_s": 25.0, "key_interval_ms": 2000.0, "key_interval_max_ms": 2100.0}
    row |= {"gap_count": 0, "gap_ms": 0.0, "gap_max_ms": 0.0, "gap_share": 0.0, "jitter_ms": 4.0, "away_s": None}
    return row | {"reconnects": 0} | values


def node(**values):
    row = {"node": "edge-0", "carries_viewers": 200, "carries_from": "records", "carries_at_least": False}
    return row | {"viewers_peak": 100.0, "load_peak": 0.5, "viewers_mean": 80.0, "recorded_s": 600.0} | values


def minute(number, **values):
    row = {
        "minute": BEGAN + timedelta(minutes=number),
        "app": "live",
        "stream": "s0",
        "node": "edge-0",
        "viewers": 200.0,
    }
    row |= {"share_ready": 0.9, "share_overloaded": 0.05, "share_soft": 0.03, "share_hard": 0.02}
    return row | {f"delay_{name}_ms": 20.0 for name in ("p50", "p95", "p99")} | values


def tables_of(text="", viewers=400):
    troubled = len(range(0, viewers, 10))
    bad = {"health": "gaps", "gap_count": 3, "gap_ms": 9000.0, "gap_max_ms": 5000.0, "gap_share": 0.015}
    bad |= {"stream": f"s1{text}"}
    score = {"cidr": f"127.0.9.1/32{text}", "score": 12.5, "points": 12.5, "connections": 40, "banned": True}
    return {
        "sessions": [session(number, text) for number in range(viewers)],
        "experience": [
            felt("all", "all", viewers, troubled),
            felt("stream", f"live/s0{text}", viewers // 4, troubled // 4),
            felt("network", f"127.0.0.0/24{text}", viewers // 3, troubled),
            felt("network", None, viewers - viewers // 3, 0, keys=2),
            felt("agent", f"player{text}", viewers, troubled),
        ],
        "ingest": [publication(), publication(**bad)],
        "fleet_streams": [minute(number, stream=f"s0{text}") for number in range(10)],
        "whatif_choices": [choice(number) for number in range(12)],
        "abuse_scores": [score | {"verdict": "ban", "standing_hours": 0.5, "evidence": json.dumps({f"x{text}": 3.0})}],
        "capacity_nodes": [node(node=f"edge-0{text}"), node(node="edge-1", viewers_peak=50.0, load_peak=0.25)],
    }


def texts_of(text=""):
    ban = {"cidr": f"127.0.9.1/32{text}", "score": 12.5, "evidence": {f"x{text}": 3}, "expires": f"later{text}"}
    return {
        "bans.jsonl": json.dumps(ban) + "\n",
        "limits.toml": f'# because {text}\nversion = 1\n\n[limits]\nsoft = "2MiB,2048,4s"\n'.replace("\x00", ""),
    }


def notes(text="", **more):
    found = {name: {"state": "done", "took_s": 1.5, "summary": {}, "warnings": [f"odd{text}"]} for name in JOBS}
    found["whatif"]["summary"] = {"source": "samples", "objective": "balanced"}
    found["capacity"]["summary"] = {"fitted_to": "records", "measured_crowds": 4, "largest_measured_viewers": 180}
    return found | more


def accounts(aside=7, text=""):
    return {
        "table": "flow_closes",
        "files_in": 12,
        "files_quarantined": 1,
        "files_by_reason": {f"truncated{text}": 1},
        "rows_in": 1000,
        "rows_out": 1000 - aside,
        "rows_quarantined": aside,
        "by_reason": {f"clock skew{text}": aside} if aside else {},
    }


def lay(folder, tables, texts=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        (folder / name).mkdir()
        pd.DataFrame(rows).to_parquet(folder / name / "part-0.parquet", coerce_timestamps="us")
    for name, text in (texts or {}).items():
        (folder / name).write_text(text, "utf-8")
    return folder


def found_of(folder, tables=None, texts=None, jobs=None, text=""):
    lay(folder, tables_of(text) if tables is None else tables, texts_of(text) if texts is None else texts)
    shown = notes(text) if jobs is None else jobs
    return gather.gather(gather.Tables(RecordPlace(str(folder))), f"/data/events{text}", shown, [accounts(text=text)])


def empty():
    return ReportFindings(events="/data/events", made_at=BEGAN)


def run_in(folder, viewers=400, text="", *, tables=None, texts=None, choose=1, failed=None):
    laid = tables_of(text, viewers) if tables is None else tables
    for row in laid.get("whatif_choices", ()):
        row["in_force"] = row["choice_id"] == choose
    found = found_of(folder, laid, texts_of(text) if texts is None else texts, notes() | (failed or {}))
    report = {"state": "done", "summary": {"figures": job.figures(found)}, "outputs": {}}
    summary = {"format": 2, "jobs": notes() | (failed or {}) | {"report": report}, "outputs": {}}
    (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    return str(folder)
