"""Every hostile profile against the live server: contained or cut with the right reason, and nobody else notices.

One server and one crowd of 50 healthy viewers serve all of them, one after the other; what a profile must do is in
`hostile_defences`, which docs/security.md shows as well.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
from types import SimpleNamespace

import pytest
from hostile_defences import DEFENCES
from hostile_kit import APP, Arena, Program, opened_arena

from flowctl.load.hostile.attacks import HOSTILE, NOT_POSSIBLE
from flowctl.load.hostile.attacks.session import CANARY
from flowctl.load.hostile.base import AttackContext, AttackOutcome

MIB = 1 << 20
MOST_GROWTH_BYTES = 32 * MIB
"""Far above what any of them needs, far below what any of them asks for."""
MOST_DELAY_MS = 500.0
"""Of 99 in 100 frames of the healthy viewers; usually it is below 20 on an idle machine."""
LEAVES = {"PEER_CLOSED", "PEER_RESET"}
"""Ends that are the attacker's own doing."""


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    with opened_arena(tmp_path_factory.mktemp("arena")) as arena:
        yield arena


def check_crowd(bout):
    """Fail unless every healthy viewer is there, has every frame in order and in time, and goes on getting more."""
    assert bout.crowd["ended"] == []
    assert bout.crowd["missing"] == 0
    assert bout.crowd["disorder"] == 0
    assert bout.crowd["delays"] > 0
    assert bout.crowd["p99_ms"] < MOST_DELAY_MS


LISTED = [HOSTILE[name] for name in DEFENCES]


@pytest.mark.parametrize("profile", LISTED, ids=lambda item: f"{item.name}-{item.alias}")
def test_server_when_attacked_contains_it_and_nobody_loses_anything(profile, arena):
    defence = DEFENCES[profile.name]
    bout = arena.attack(profile.name)
    verdict = bout.verdict
    assert {item.form: item.outcome for item in verdict.forms} == defence.forms, verdict
    assert verdict.met, verdict
    assert verdict.newcomer
    assert {reason.name: count for reason, count in defence.closed.items()} == {
        name: count for name, count in bout.closed.items() if name not in LEAVES
    }
    assert bout.limits == defence.limits
    assert bout.refused.keys() == set(defence.refused)
    for words in (*defence.log, *defence.limits):
        assert words in bout.log
    check_crowd(bout)
    assert bout.rss_growth_bytes < MOST_GROWTH_BYTES
    assert bout.cpu_s < 1.0 + 0.3 * bout.took_s
    assert bout.failures == []
    assert CANARY not in arena.log_text()


def test_memory_when_given_back_at_once_is_seen_in_the_peak():
    """What an attack makes the server take for a moment counts, although it is gone when the attack is over."""
    us = SimpleNamespace(pid=os.getpid())
    Program.forget_peak(us)
    before = Program.rss_bytes.fget(us)
    mapping = mmap.mmap(-1, 2 * MOST_GROWTH_BYTES)
    mapping.write(b"\1" * (2 * MOST_GROWTH_BYTES))
    mapping.close()
    assert Program.peak_rss_bytes.fget(us) - before > MOST_GROWTH_BYTES
    gc.collect()
    Program.forget_peak(us)
    assert Program.peak_rss_bytes.fget(us) - before < MOST_GROWTH_BYTES


def test_profiles_when_counted_are_all_of_the_list():
    ids = {name for name in HOSTILE if name.startswith("B")}
    assert ids.isdisjoint(NOT_POSSIBLE)
    assert ids | NOT_POSSIBLE.keys() == {f"B{number:02}" for number in range(1, 35)}
    assert ids == DEFENCES.keys()


@pytest.mark.parametrize(
    ("policy", "outcome"), [("replace", AttackOutcome.CONTAINED), ("standby", AttackOutcome.CONTAINED)]
)
def test_second_publisher_when_let_in_never_mixes_frames(policy, outcome, tmp_path):
    arena = Arena(tmp_path, policy, viewers=3)
    try:
        duplicate = arena.attack("B31", duration_s=4.0)
        assert duplicate.verdict.outcome is outcome
        assert duplicate.verdict.met, duplicate.verdict
        # Only where the first one was closed in favour of the second.
        assert duplicate.closed.get("KICKED", 0) == (policy == "replace")
        check_crowd(duplicate)
        replaced = arena.attack("B21", duration_s=6.0)
        assert replaced.verdict.met, replaced.verdict
        assert "0 of 4 takeovers were refused" in replaced.verdict.details
        check_crowd(replaced)
        assert arena.server.ask()["failures"] == []
    finally:
        arena.close()


def test_shipped_credentials_when_tried_let_nobody_in(live):
    server = live(rtmp={"credentials": {"somebody": "a password of ours", "admin": "another one"}})
    context = AttackContext(host="127.0.0.1", port=server.address[1], app=APP, duration_s=5.0, watch_s=0.1)
    verdict = asyncio.run(HOSTILE["B29"].attack(context))
    assert verdict.met, verdict
    assert "6 shipped pairs were refused" in verdict.details
    weak = live(rtmp={"credentials": {"admin": "admin"}})
    context = AttackContext(host="127.0.0.1", port=weak.address[1], app=APP, duration_s=5.0, watch_s=0.1)
    found = asyncio.run(HOSTILE["B29"].attack(context))
    assert found.met is False
    assert "lets in user admin with password admin" in found.details
