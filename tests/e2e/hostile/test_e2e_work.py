"""Attacks on the thread's time that no list names: within every limit, and as much work as that allows.

One rule has to hold them all: who makes the server work is slowed down, and 50 healthy viewers lose nothing meanwhile.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hostile_kit import opened_arena

from flowctl.core.loop.work import MEMORY_S, WorkLimits
from flowctl.load.hostile.attacks.work import PROFILES

MIB = 1 << 20
MOST_DELAY_MS = 250.0
"""Of 99 in 100 frames of the healthy viewers."""
DURATION_S = 5.0
FLOODS = {"W01": 10.0, "W04": 10.0}
"""Those that never stop asking for more work than an address may have, and how long they last, in seconds: until what
an address may do at once is used up, where the machine has the time for it."""


MOST_WAITING = 0.1
"""Part of the time for which the server may wait for a processor that others have, where delays are judged."""


def waiting_s(pid):
    """Return how long the threads of a process have waited for a processor, in seconds (proc_pid_schedstat)."""
    return sum(int(path.read_text().split()[1]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    with opened_arena(tmp_path_factory.mktemp("work")) as arena:
        yield arena


@pytest.mark.parametrize("profile", PROFILES, ids=lambda item: f"{item.name}-{item.alias}")
def test_server_when_made_to_work_keeps_its_time_for_the_others(profile, arena):
    waited_s, began = waiting_s(arena.server.pid), time.monotonic()
    bout = arena.attack(profile.name, duration_s=FLOODS.get(profile.name, DURATION_S))
    starved = waiting_s(arena.server.pid) - waited_s > MOST_WAITING * (time.monotonic() - began)
    assert bout.verdict.met, bout.verdict
    assert bout.crowd["ended"] == []
    assert bout.crowd["missing"] == 0
    assert bout.crowd["disorder"] == 0
    if not starved:  # what the machine makes the server wait for is no matter of the server's
        assert bout.crowd["p99_ms"] < MOST_DELAY_MS
    share = WorkLimits().share_per_address
    # What the address may have, the crowd and the sending of what the attackers play, and a second for the rest.
    assert bout.cpu_s < share * (MEMORY_S + bout.took_s) + 0.3 * bout.took_s + 1.0
    assert bout.rss_growth_bytes < 32 * MIB
    assert bout.failures == []
    assert bout.log.count("\n") < 1000
    if profile.name in FLOODS:
        slowed = any(name.startswith("work_share_per_") for name in bout.limits) and "input slowed" in bout.log
        assert slowed or bout.cpu_s < share * (MEMORY_S + bout.took_s)  # others left it no more than it may have
