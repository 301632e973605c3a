"""What a Sender judges its peer by, in plain calls: no lock, no thread, no clock."""

from __future__ import annotations

from math import inf

import pytest
from flow_kit import AUDIO, CONTROL, HEADER, INTER, KEY

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import BROKEN_MASK, LivePolicy, patience_of
from flowctl.core.flow.state import EMPTY_LOAD, FlowCore, Load
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.outbox import Outbox
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.judgement import Judgement
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.sending.standing import Standing
from flowctl.reasons import CloseReason, DropReason

LIMITS = Limits.parse("1000,10,2s", "2000,20,4s", overhead_bytes=0)
SETTINGS = SenderSettings(stuck_s=15, soft_too_long_s=60, control_messages=2)


class Line:
    """A line that holds what it is told to hold."""

    held_bytes = 0
    is_strained = False

    def kernel_bytes(self):
        return self.held_bytes

    def strained(self):
        return self.is_strained


def judgement_of(*, limits=LIMITS, blocked=True, published="", cached=False, now=100.0):
    """Return a judgement of a viewer of a log; `cached`: what was published is the GOP cache that it is given."""
    core, outbox, log = FlowCore(limits, now), Outbox(), StreamLog()
    judgement = Judgement(core, outbox, Line(), SETTINGS, now)
    judgement.patience = patience_of(LivePolicy())
    for letter in published if cached else "":
        log.append(b"x" * 100, {"K": KEY, "I": INTER, "A": AUDIO}[letter], now)
    outbox.follow(LogCursor(log, now=now, start=log.cached if cached else None))
    judgement.stands = Standing.QUEUED
    if not cached:
        outbox.cursor.end_joining(DropReason.REFUSED, now)
        for letter in published:
            log.append(b"x" * 100, {"K": KEY, "I": INTER, "A": AUDIO}[letter], now)
    if blocked:
        judgement.blocked = judgement.lagging = True
        core.blocked(EMPTY_LOAD, now)
        judgement.known_slow(now).waited = True
    return judgement


def test_load_when_it_was_never_offered_does_not_count():
    judgement = judgement_of(blocked=False, published="KIA")
    assert judgement.load(100.0) == Load(300, 3)
    assert judgement.counted(100.0) == EMPTY_LOAD
    assert judgement.counted(100.0, refused=True) == Load(300, 3)


def test_load_when_it_is_the_cache_of_a_joiner_does_not_count():
    judgement = judgement_of(published="KII", cached=True)
    assert judgement.joining
    assert judgement.counted(101.0).messages == 0
    assert not judgement.lags()


@pytest.mark.parametrize(
    ("change", "lags"),
    [
        (lambda judgement: None, True),
        (lambda judgement: setattr(judgement, "closing", True), False),
        (lambda judgement: setattr(judgement, "stands", Standing.COHORT), False),
        (lambda judgement: setattr(judgement, "patience", (inf,) * 7), False),
        (lambda judgement: judgement.core.drained(100.0), False),
        (lambda judgement: judgement.core.limits_set(Limits(target_delay_ms=0), EMPTY_LOAD, 100.0), False),
        (lambda judgement: judgement.outbox.unfollow(DropReason.UNFOLLOWED), False),
    ],
    ids=["lags", "closing", "member", "patient", "drained", "no target", "no log"],
)
def test_viewer_that_lags_is_one_whose_pictures_are_judged(change, lags):
    judgement = judgement_of(published="KI")
    change(judgement)
    assert judgement.lags() is judgement.judges_pictures(BROKEN_MASK) is lags
    assert not judgement.judges_pictures(1 << KEY)


@pytest.mark.parametrize(("strained", "stalled", "is_judged"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_queue_of_a_viewer_is_cut_only_while_it_takes_something_and_our_thread_has_room(strained, stalled, is_judged):
    judgement = judgement_of(published="KI")
    judgement.line.is_strained = bool(strained)
    for step in range(100):  # 10 s
        now = 100.0 + step / 10
        judgement.slow.drain.sample(now, 0 if stalled else step * 1000, waited=True)
    assert (judgement.lagging_peer(now) is not None) is is_judged


def test_timing_when_the_rate_is_known_settles_what_the_kernel_takes_ahead():
    judgement = judgement_of()
    for step in range(30):
        now = 100.0 + step / 10
        judgement.outbox.bytes_sent = step * 2000
        timing = judgement.timing(judgement.slow, now)
        assert step > 1 or timing is None
    assert judgement.slow.ahead_bytes == pytest.approx(4000, rel=0.3)
    assert timing.late(INTER, 20_000, now - 3.0, 0)
    assert not timing.late(INTER, 1000, now, 0)


def test_stall_when_the_kernel_takes_something_ends():
    judgement = judgement_of(published="KI")
    assert judgement.stalled_s(107.0) == 7.0
    judgement.progress(107.0)
    assert (judgement.stalled_s(108.0), judgement.longest_stall_s(108.0)) == (1.0, 7.0)
    judgement.core.drained(108.0)
    assert judgement.stalled_s(110.0) == 0.0


def test_clocks_when_a_peer_takes_nothing_say_when_it_is_stuck_or_too_old():
    judgement = judgement_of(published="KI")
    clocks = judgement.clocks(101.0, inf)
    assert (clocks.stuck_at, clocks.rises_at) == (115.0, pytest.approx(102.0))
    assert judgement.overdue(clocks, 114.0) is None
    reason, details = judgement.overdue(judgement.clocks(115.5, inf), 115.5)
    assert (reason, details) == (CloseReason.STUCK, "the kernel took nothing for 15.5 s, the limit is 15 s")
    judgement.settings = SenderSettings(stuck_s=0, soft_too_long_s=0)
    assert judgement.clocks(115.5, inf).stuck_at == inf
    assert judgement.clocks(115.5, 103.0).next_at == 103.0


def test_lanes_when_over_their_limits_are_told_in_words():
    judgement = judgement_of()
    backlog = judgement.outbox.backlog
    judgement.held = judgement.undroppable
    for number in range(3):
        assert judgement.held_over() is None
        backlog.offer(b"h" * 10, HEADER, 100.0 + number, mask=0, droppable=None)
    assert "30 bytes in 3 headers" in judgement.held_over()
    assert judgement.control_over() is None
    for number in range(3):
        backlog.offer(b"c", CONTROL, 100.0 + number, mask=0, droppable=None)
    assert "3 bytes in 3 messages, the limit is 262144 bytes, 2 messages" in judgement.control_over()


def test_joiner_when_its_load_falls_no_more_is_a_joiner_no_longer():
    judgement = judgement_of(published="KIIII", cached=True)
    told = [judgement.ends_joining(100.0 + step / 4) for step in range(8)]
    assert told == [False] * 6 + [True, False]
    judgement.outbox.consume_followed(200)
    assert not judgement.ends_joining(103.0)


def test_crossing_when_a_viewer_lags_is_where_its_next_limit_can_be_reached():
    judgement = judgement_of(published="KI")
    tail = judgement.outbox.cursor.log.tail
    assert judgement.next_crossing(100.0) == (tail.offset + 400, tail.sequence + 8)
    judgement.lagging = False
    assert min(judgement.next_crossing(100.0)) > 1 << 60
