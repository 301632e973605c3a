"""What a Sender judges its peer by, its clocks, episodes of drops, and why() in one line: plain calls, no clock."""

from __future__ import annotations

import ast
from dataclasses import fields
from math import inf
from pathlib import Path

import pytest
from flow_kit import AUDIO, INTER, KEY
from source_kit import module_files, text_of

from flowctl.core.flow.counts import Counts
from flowctl.core.flow.limits import NO_LIMITS, AxisLimits, HardPolicy, Limits
from flowctl.core.flow.policy import BROKEN_MASK, LivePolicy, patience_of
from flowctl.core.flow.state import EMPTY_LOAD, FlowCore, Load
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.outbox import Outbox
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending import judgement as judgement_module
from flowctl.core.sending.blame import Blame, blame, explain
from flowctl.core.sending.contract import SenderHost, Standing
from flowctl.core.sending.judgement import Clocks, Judgement
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.sending.slowpeer import DropEpisode, SlowPeer
from flowctl.reasons import CloseReason, DropReason

LIMITS = Limits.parse("1000,10,2s", "2000,20,4s", overhead_bytes=0)
SETTINGS = SenderSettings(stuck_s=15, soft_too_long_s=60, control_messages=2)


def judgement_of(*, limits=LIMITS, blocked=True, published="", cached=False, now=100.0):
    """Return a judgement of a viewer of a log; `cached`: what was published is the GOP cache that it is given."""
    core, outbox, log = FlowCore(limits, now), Outbox(), StreamLog()
    judgement = Judgement(core, outbox, SETTINGS, now)
    judgement.policy_set(patience_of(LivePolicy()))
    for letter in published if cached else "":
        log.append(b"x" * 100, {"K": KEY, "I": INTER, "A": AUDIO}[letter], now)
    outbox.follow(LogCursor(log, now=now, start=log.cached if cached else None))
    judgement.stand_at(Standing.QUEUED)
    if not cached:
        outbox.cursor.end_joining(DropReason.REFUSED, now)
        for letter in published:
            log.append(b"x" * 100, {"K": KEY, "I": INTER, "A": AUDIO}[letter], now)
    if blocked:
        judgement.refused(now, written=0)
        core.blocked(EMPTY_LOAD, now)
        judgement.note_waiting(judgement.known_slow(now), now, 0, strained=False)
    return judgement


@pytest.mark.parametrize(
    ("change", "lags"),
    [
        (lambda judgement: None, True),
        (lambda judgement: judgement.closes(), False),
        (lambda judgement: judgement.policy_set((inf,) * 7), False),
        (lambda judgement: judgement.core.drained(100.0), False),
        (lambda judgement: judgement.core.limits_set(Limits(target_delay_ms=0), EMPTY_LOAD, 100.0), False),
        (lambda judgement: judgement.outbox.unfollow(DropReason.UNFOLLOWED), False),
    ],
    ids=["lags", "closing", "patient", "drained", "no target", "no log"],
)
def test_viewer_that_lags_is_one_whose_pictures_are_judged(change, lags):
    judgement = judgement_of(published="KI")
    change(judgement)
    assert judgement.lags() is judgement.judges_pictures(BROKEN_MASK) is lags
    assert not judgement.judges_pictures(1 << KEY)


@pytest.mark.parametrize(("stalled", "is_judged"), [(0, True), (1, False)])
def test_queue_of_a_viewer_is_cut_only_while_it_takes_something(stalled, is_judged):
    judgement = judgement_of(published="KI")
    for step in range(100):  # 10 s
        now = 100.0 + step / 10
        judgement.slow.drain.sample(now, 0 if stalled else step * 1000, waited=True)
    assert (judgement.lagging_peer(now) is not None) is is_judged


def test_timing_when_the_rate_is_known_settles_what_the_kernel_takes_ahead():
    judgement = judgement_of()
    for step in range(30):
        now = 100.0 + step / 10
        judgement.outbox.bytes_sent = step * 2000
        timing = judgement.timing(judgement.slow, now, 0, strained=False)
        assert step > 1 or timing is None
    assert judgement.slow.ahead_bytes == pytest.approx(6000, rel=0.3)
    assert timing.late(INTER, 20_000, now - 3.0, 0)
    assert not timing.late(INTER, 1000, now, 0)


def test_joiner_when_its_load_falls_no_more_is_a_joiner_no_longer():
    judgement = judgement_of(published="KIIII", cached=True)
    told = [judgement.ends_joining(100.0 + step / 4) for step in range(8)]
    assert told == [False] * 6 + [True, False]
    judgement.outbox.consume_followed(200)
    assert not judgement.ends_joining(103.0)


def test_crossing_when_a_viewer_lags_is_where_its_next_limit_can_be_reached():
    judgement = judgement_of(published="KI")
    tail = judgement.outbox.cursor.log.tail
    crossing = judgement.crossing_from(judgement.reach, judgement.counted(100.0))
    assert crossing == (tail.offset + 400, tail.sequence + 8)
    judgement.keeps_up()
    assert judgement.reach is None


TIMES = SenderSettings(stuck_s=15, soft_too_long_s=60, close_deadline_s=5)


@pytest.mark.parametrize(
    ("clocks", "reason", "words"),
    [
        (Clocks(stuck_at=100.0), CloseReason.STUCK, "it took nothing for 15.5 s, the limit is 15 s"),
        (
            Clocks(soft_at=100.0),
            CloseReason.SOFT_TOO_LONG,
            "at or above SOFT_LIMIT for 60.5 s, the limit is 60 s",
        ),
        (Clocks(closes_at=100.0), CloseReason.STUCK, "not everything was taken within 5 s after closing began"),
    ],
)
def test_overdue_when_a_clock_has_run_down_says_which_and_for_how_long(clocks, reason, words):
    assert clocks.next_at == 100.0
    assert clocks.overdue(99.999, TIMES, waits=True) is None
    assert clocks.overdue(100.0, TIMES, waits=True)[0] is reason
    assert clocks.overdue(100.5, TIMES, waits=True) == (reason, words)


def test_overdue_when_several_are_tells_the_close_before_the_stall_before_the_level():
    clocks = Clocks(closes_at=100.0, stuck_at=90.0, soft_at=80.0)
    assert "closing" in clocks.overdue(110.0, TIMES, waits=True)[1]
    assert "took nothing" in clocks.overdue(110.0, TIMES, waits=False)[1]
    assert "SOFT_LIMIT" in clocks._replace(stuck_at=inf).overdue(110.0, TIMES, waits=False)[1]
    assert Clocks(closes_at=100.0).overdue(110.0, TIMES, waits=False) is None


def test_overdue_when_only_looks_are_due_ends_nothing():
    clocks = Clocks(rises_at=5.0, looks_at=4.0, held_until=3.0, samples_at=2.0)
    assert clocks.overdue(1e6, TIMES, waits=True) is None
    assert clocks.next_at == 2.0


def test_next_at_when_nothing_runs_is_never():
    assert Clocks().next_at == inf


NOTHING = {}
TWO = {DropReason.LATE: Counts((0, 0, 0, 2, 0, 0, 0), (0, 0, 0, 900, 0, 0, 0))}


def test_episode_when_nothing_was_dropped_is_not_worth_an_entry():
    assert DropEpisode(1.0, TWO, (10, 2), None).end(3.0, TWO, (20, 2), None) is None


@pytest.mark.parametrize(("published", "lost", "share"), [(20, 4, 0.8), (10, 2, 1.0)])
def test_episode_when_it_ends_tells_the_loss_and_the_share_of_its_own_pictures(published, lost, share):
    entry = DropEpisode(1.0, NOTHING, (10, 2), None).end(3.0, TWO, (published, lost), None)
    assert (entry.dropped, entry.duration_s, entry.picture_share, entry.line_share) == (TWO, 2.0, share, 0.0)


def test_episode_when_another_log_is_followed_meanwhile_counts_the_pictures_of_both():
    episode = DropEpisode(0.0, NOTHING, (100, 10), None)
    episode.leave_log((110, 15))
    assert episode.end(1.0, TWO, (10, 5), None).picture_share == 0.5


def test_episode_when_the_viewer_wants_no_pictures_for_a_while_leaves_the_step_out():
    episode = DropEpisode(0.0, NOTHING, (0, 0), None)
    episode.skip((10, 5), (0, 0))
    episode.skip((0, 0), (60, 55))
    assert episode.end(1.0, TWO, (60, 55), None).picture_share == 0.5


def test_episode_of_a_slow_peer_tells_its_delay_and_how_long_its_line_was_in_use():
    slow = SlowPeer(SenderSettings())
    slow.behind_ms, slow.behind_max_ms, slow.delay_removed_ms, slow.drain.waited_s = 300.0, 9000.0, 50.0, 7.0
    episode = DropEpisode(10.0, NOTHING, (0, 0), slow)
    assert slow.behind_max_ms == 300.0
    slow.behind_max_ms, slow.delay_removed_ms, slow.drain.waited_s = 700.0, 150.0, 8.0
    entry = episode.end(14.0, TWO, (0, 0), slow)
    assert (entry.delay_removed_ms, entry.delay_max_ms, entry.line_share) == (100.0, 700.0, 0.25)


BY_SIZE = Limits(size=AxisLimits(soft=1000), messages=AxisLimits(soft=10), hard_policy=HardPolicy.HOLD)


def blocked(load, limits=BY_SIZE):
    """Return a core whose last write met EAGAIN."""
    core = FlowCore(limits, 0.0)
    core.blocked(load, 1.0)
    return core


def queued(load, limits=BY_SIZE):
    """Return a core whose queue the kernel has not refused."""
    core = FlowCore(limits, 0.0)
    core.queued(load, 1.0)
    return core


@pytest.mark.parametrize(
    ("core", "load", "largest_bytes", "stalled_s", "who"),
    [
        pytest.param(FlowCore(BY_SIZE, 0.0), EMPTY_LOAD, 0, 0.0, Blame.NOBODY, id="ready"),
        pytest.param(queued(Load(999, 9)), Load(999, 9, 9000.0), 0, 9.0, Blame.NOBODY, id="ready-and-late"),
        pytest.param(blocked(Load(10, 1)), Load(10, 1), 10, 0.1, Blame.PEER_LINE, id="eagain"),
        pytest.param(blocked(Load(1000, 9)), Load(1000, 9, 5000.0), 100, 5.0, Blame.PEER_LINE, id="stall-at-soft"),
        pytest.param(blocked(Load(1000, 1)), Load(1000, 1), 501, 0.9, Blame.PUBLISHER_BURST, id="one-huge-message"),
        pytest.param(blocked(Load(1000, 1)), Load(1000, 1), 500, 0.9, Blame.PEER_LINE, id="huge-but-half-of-soft"),
        pytest.param(blocked(Load(1000, 1)), Load(1000, 1), 501, 1.0, Blame.PEER_LINE, id="huge-but-stalled"),
        pytest.param(queued(Load(1000, 9)), Load(1000, 9, 250.0), 10, 0.0, Blame.PUBLISHER_BURST, id="not-offered-yet"),
        pytest.param(queued(Load(1000, 9)), Load(1000, 9, 251.0), 10, 0.0, Blame.SERVER_LOOP, id="not-offered-late"),
    ],
)
def test_blame_when_state_is_known_falls_on_who_caused_it(core, load, largest_bytes, stalled_s, who):
    assert blame(core, load, largest_bytes=largest_bytes, stalled_s=stalled_s) is who


def test_blame_when_axis_of_bytes_is_off_knows_no_oversized_message():
    assert blame(blocked(Load(10, 1), NO_LIMITS), Load(10, 1), largest_bytes=1 << 40, stalled_s=0.0) is Blame.PEER_LINE


def test_blame_when_new_limits_made_the_state_falls_on_policy():
    core = queued(Load(500, 5), NO_LIMITS)
    core.limits_set(Limits(messages=AxisLimits(soft=5)), Load(500, 5), 2.0)
    assert blame(core, Load(500, 5, 9000.0), largest_bytes=0, stalled_s=0.0) is Blame.POLICY
    core.sent(Load(100, 1), 3.0)
    assert blame(core, Load(100, 1), largest_bytes=0, stalled_s=0.0) is Blame.NOBODY


def test_explain_when_slow_has_axis_value_limit_since_when_and_blame():
    load = Load(2048, 9, 4500.0)
    line = explain(blocked(load), load, 3.5, largest_bytes=100, stalled_s=2.5)
    assert line == (
        "HARD_LIMIT for 2.5 s; blocked: 2.0 KiB, limit 2.0 KiB; queued 2.0 KiB in 9 messages, oldest 4.5 s; "
        "it has taken nothing for 2.5 s; to blame: peer's line"
    )


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"joining": True}, "still taking the GOP cache"),
        ({"waiting_for_key": True}, "waiting for a key frame"),
        ({"largest_bytes": 501}, "the soft limit is below twice the largest message, 501 B"),
    ],
)
def test_explain_when_a_fact_holds_says_it_and_otherwise_not(facts, part):
    core = blocked(Load(10, 1))
    assert part in explain(core, Load(10, 1), 2.0, **facts).split("; ")
    assert part not in explain(core, Load(10, 1), 2.0, largest_bytes=500)


FIELDS = {field.name for field in fields(Judgement)} - {"settings"}
"""`settings` is a field of others too."""


def set_from_outside(tree):
    """Yield each field of a judgement that is set by other code than its own, as (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in FIELDS:
            whose = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if whose.lstrip("_") == "judgement":
                yield node.lineno, node.attr


def test_judgement_when_its_sender_acts_is_told_what_happened_and_never_set():
    assert list(set_from_outside(ast.parse("self._judgement.mask = x; judgement.held = 1; slow.mask = y"))) == [
        (1, "mask"),
        (1, "held"),
    ]
    found = {path.name: [*set_from_outside(ast.parse(text_of(path)))] for path in module_files().values()}
    assert {name: places for name, places in found.items() if places} == {}


def test_judgement_asks_no_host():
    """What it needs of thread, kernel and other viewers is handed to it."""
    source = ast.parse(Path(judgement_module.__file__).read_text("utf-8"))
    called = {node.func.attr for node in ast.walk(source) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    of_hosts = {name for name in vars(SenderHost) if not name.startswith("_")}
    assert len(of_hosts) > 8
    assert called & of_hosts == set()
