"""Scores of random evidence against a model in plain Python, which keeps every record and adds nothing up early."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
from abuse_records import closed, event, hits, there, write
from pyarrow.dataset import dataset
from test_abuse import CLOSED, DEAF, NEVER_READ, NOW_S, SLOW, UNKNOWN

from flowctl.analyze.abuse.job import JOB
from flowctl.analyze.abuse.scores import attackers
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.job import JobState
from flowctl.analyze.options import AbuseOptions
from flowctl.analyze.run import run
from flowctl.core.server.guilt import PROOF

pytestmark = pytest.mark.timeout(900)
WEIGHTS = Weights(half_life_s=7200.0)
ENDS = {
    "deaf_close": {"reason": "hard limit", "duration_s": 35.0, **DEAF},
    "lost_line": {"reason": "stuck", "duration_s": 400.0, **DEAF},
    "paused": {"reason": "stuck", "duration_s": 400.0, **DEAF, **CLOSED},
    "maybe_paused": {"reason": "stuck", "duration_s": 35.0, "acked_bytes": 200_000, **DEAF, **CLOSED},
    "cut_at_once": {"reason": "hard limit", "duration_s": 3.0, "unrecovered_ms": 0.2, "unrecovered_bytes": 0},
    "deaf_http": {"reason": "stuck", "role": "http_flv", **NEVER_READ},
    "never_read": {"reason": "stuck", **NEVER_READ},
    "slow_close": {"reason": "hard limit", **SLOW},
    "auth_refused": {"reason": "auth refused", **UNKNOWN},
    "handshake_timeout": {"reason": "handshake timeout", **UNKNOWN},
    "not_rtmp": {"reason": "protocol error", **UNKNOWN},
    "protocol_error": {"reason": "protocol error", "duration_s": 3.0},
    "fruitless_connection": {"reason": "peer closed", **UNKNOWN},
    "short_connection": {"reason": "peer reset", "duration_s": 2.0},
    None: {"reason": "peer closed"},
}
"""Kind of evidence -> how such a connection ends."""
LIMITS = ("amf_depth", "chunk_size_max_bytes", "unpublished_bytes", "streams", "of_the_future", "connections")


class Model:
    """What each address did, record by record."""

    def __init__(self) -> None:
        self.rows: list = []
        self.evidence: dict[str, list] = defaultdict(list)  # (time, kind, amount)
        self.plays: dict[str, list] = defaultdict(list)  # (connection, ended well, begin, end, whether its end is told)
        self.harmful: set[int] = set()

    def add(self, random_: random.Random, address: str, conn_id: int) -> None:
        at_s = NOW_S - random_.choice((100, 3000, 9000, 20_000)) - random_.random() * 900
        kind = random_.choice([*ENDS, None, None, "open", "open", "refused"])
        if kind == "refused":
            self.rows.append(event(address, "conn_refused", at_s, reason="connections", count=7))
            self.evidence[address].append((at_s, "refused.connections", 7))
            return
        if random_.random() < 0.3:
            axis, count = random_.choice(LIMITS), random_.randint(1, 3)
            self.rows += hits(address, axis, count, at_s, 0.0, conn_id=conn_id)
            self.evidence[address].append((at_s, f"limit_hit.{axis}", count))
            if WEIGHTS.bans(f"limit_hit.{axis}"):
                self.harmful.add(conn_id)
        if kind == "open":
            self.rows += there(address, at_s, NOW_S, conn_id=conn_id)
            if at_s + 10 <= NOW_S:
                self.plays[address].append((conn_id, at_s, NOW_S, False))
            return
        columns = {"duration_s": random_.choice((20.0, 400.0, 5000.0))} | ENDS[kind]
        hit = int(any(row["conn_id"] == conn_id and table == "flow_events" for table, row in self.rows))
        self.rows.append(closed(address, at_s=at_s, conn_id=conn_id, limit_hits=hit, **columns))
        begin_s = at_s - columns["duration_s"]
        if columns.get("role") != "unknown":
            # what it wrote while it was open
            told = there(address, begin_s, at_s - 1, conn_id=conn_id)
            self.rows += told
        if kind is not None:
            self.evidence[address].append((at_s, kind, 1))
        if kind is not None and WEIGHTS.bans(kind):
            self.harmful.add(conn_id)
        if kind in (None, "slow_close", "lost_line", "paused"):
            self.plays[address].append((conn_id, begin_s, at_s, True))

    def verdict(self, address: str) -> tuple[str, float, int, float]:
        def left(age_s: float) -> float:
            return 0.5 ** (max(0.0, age_s) / WEIGHTS.half_life_s)

        good = [item for item in self.plays[address] if item[0] not in self.harmful]
        people = sum(not ended and end - begin >= WEIGHTS.settled_s for _, begin, end, ended in good)
        seconds = [(end - begin if ended else max(end - begin, WEIGHTS.play_s), end) for _, begin, end, ended in good]
        hours = sum(length * left(NOW_S - end) for length, end in seconds) / 3600
        shared = people > 0 or hours >= WEIGHTS.shared_hours
        kinds: dict[str, float] = defaultdict(float)
        minutes = Counter((kind, when // 60) for when, kind, _ in self.evidence[address] if kind == "deaf_close")
        for when, kind, amount in self.evidence[address]:
            count = amount / (minutes[kind, when // 60] or 1)  # what is cut at once is one line
            kinds[kind] += count * left(NOW_S - when) * WEIGHTS.of(kind)
        if shared:
            kinds = defaultdict(float, {kind: min(value, WEIGHTS.threshold) for kind, value in kinds.items()})
        points = sum(kinds.values())
        harm = sum(value for kind, value in kinds.items() if WEIGHTS.bans(kind))
        proof = sum(value for kind, value in kinds.items() if WEIGHTS.bans(kind) and WEIGHTS.of(kind) >= PROOF)
        score = points / (1 + hours)
        if shared and (score >= WEIGHTS.threshold or proof >= WEIGHTS.threshold):
            said = "shared"
        elif not shared and harm / (1 + hours) >= WEIGHTS.threshold:
            said = "ban"
        elif not shared and score >= WEIGHTS.threshold:
            said = "limit"
        else:
            said = "watch" if score >= WEIGHTS.threshold / 2 else "ok"
        return said, points, people, hours


@pytest.fixture(scope="module")
def judged(either, tmp_path_factory):
    """Judge the records of some random addresses, which lie in several hours; -> model, scores, folder."""
    folder, model, random_ = tmp_path_factory.mktemp("model"), Model(), random.Random(20260321)
    conn_id = 0
    for number in range(1, 201):
        for _ in range(random_.choice((1, 2, 4, 9))):
            conn_id += 1
            model.add(random_, f"192.0.{number}.1", conn_id)
    write(folder / "events", [*model.rows, event(None, "overflow", NOW_S)])
    return model, judge(either, folder), folder


def judge(either, folder):
    options = AbuseOptions(now_s=NOW_S, weights=WEIGHTS)
    note = run(either, str(folder / "events"), str(folder / "out"), [JOB], {"abuse": options}).jobs["abuse"]
    assert note.state is JobState.DONE, note.message
    return {row["address"]: row for row in either.read.parquet(str(folder / "out" / "abuse_scores")).collect()}


def test_scores_when_evidence_is_random_are_those_of_the_model(judged):
    model, scores, _ = judged
    said = {address: model.verdict(address) for address in model.evidence | model.plays}
    assert len({item[0] for item in said.values()}) == 5, "every verdict occurs"
    for address, (verdict, points, people, hours) in said.items():
        row = scores[address]
        assert row["points"] == pytest.approx(points, rel=0.01, abs=0.002), address  # evidence ages by minutes
        assert row["people"] == people, address
        assert row["standing_hours"] == pytest.approx(hours, rel=0.01, abs=0.002), address
        assert row["verdict"] == verdict, (address, json.loads(row["evidence"]))


def test_scores_when_a_connection_spans_hours_count_it_once(judged):
    model, scores, _ = judged
    for address in model.plays:
        ids = {row["conn_id"] for table, row in model.rows if row["peer_ip"] == address and table != "flow_events"}
        assert scores[address]["connections"] == len(ids), address


def test_attackers_when_asked_for_are_the_harmful_connections_and_banned_addresses(judged):
    model, scores, folder = judged
    part = dataset(str(folder / "out" / "parts" / "evidence")).to_table().to_pandas()
    parts = SimpleNamespace(small=True, since=None, heard={}, pandas=lambda _: part)
    connections, banned = attackers(parts, set(scores), int(NOW_S * 1e6), WEIGHTS)
    direct = {
        row["conn_id"]
        for table, row in model.rows
        if (table == "flow_events" and WEIGHTS.bans(f"limit_hit.{row.get('axis')}"))
    }
    assert {conn_id for _, conn_id in connections} == direct
    assert banned == {address for address, row in scores.items() if row["verdict"] == "ban"}


def test_scores_when_parts_are_large_are_the_same(either, judged, monkeypatch):
    _, scores, folder = judged
    bans = (folder / "out" / "bans.jsonl").read_text()
    monkeypatch.setattr("flowctl.analyze.run.SMALL_BYTES", -1)
    assert judge(either, folder) == scores
    assert (folder / "out" / "bans.jsonl").read_text() == bans
