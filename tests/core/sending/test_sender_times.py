"""A Sender over time: stuck peers, closing, the ledger, `why()`, statistics."""

from __future__ import annotations

import pytest
from flow_kit import (
    DATA,
    HEAD_BYTES,
    Peer,
    Published,
    Viewer,
    check_accounts,
    check_edges,
)
from sender_kit import HARD_LIMIT, OVERLOADED, READY, SOFT_LIMIT, TIMELESS, Talker, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import AxisLimits, Limits
from flowctl.core.flow.policy import DropDroppable, KeepAll, LivePolicy, Thin
from flowctl.core.flow.state import Axis, Cause
from flowctl.core.sending.contract import FlushResult, SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import CloseReason, DropReason
from flowctl.testing import ManualGroup

HASTY = SenderSettings(stuck_s=10, soft_too_long_s=20, close_deadline_s=5)

# -- times


def stopped(settings, soft):
    """Return group, log, fan-out and a viewer whose queue is thinned at the soft limit, and whose kernel is full."""
    group = ManualGroup()
    published = Published(group)
    fanout = Fanout(published.log, group, flush_interval_s=0)
    viewer = Viewer(group, policy=LivePolicy(), limits=Limits.parse(soft, "0,1000"), settings=settings)
    viewer.follow(fanout)
    published.script("KI")
    group.run(1.0)
    viewer.peer.room = 0
    published.script("I")
    group.run(0.1)
    return group, published, fanout, viewer


def test_stuck_when_thinning_has_emptied_the_queue_closes_too():
    """The kernel still holds what it was given and takes nothing: dropping what waits behind that is no progress."""
    group, published, _, viewer = stopped(SenderSettings(stuck_s=15, soft_too_long_s=0), "0,10,2s")
    least = 1000
    for number in range(29):
        published.script("IA" if number % 4 else "KA")
        group.run(0.5)
        least = min(least, viewer.sender.load().messages)
    assert least == 0, "thinning has emptied the queue, or this shows nothing"
    assert viewer.host.closed == []
    assert viewer.sender.statistics().longest_stall_s == pytest.approx(14.6)
    assert "it has taken nothing for 1" in viewer.sender.why()
    published.script("IA")
    group.run(1.0)
    ((reason, details),) = viewer.host.closed
    assert reason is CloseReason.STUCK
    assert "15" in details


def test_stuck_when_nothing_is_published_either_closes_by_its_own_timer():
    group, _, _, viewer = stopped(SenderSettings(stuck_s=15, soft_too_long_s=0), "0,10")
    viewer.sender.thin(Thin.DROPPABLE)
    assert viewer.sender.load().messages == 0
    group.run(14.8)
    assert viewer.host.closed == []
    group.run(0.3)
    assert [reason for reason, _ in viewer.host.closed] == [CloseReason.STUCK]


def test_stuck_when_a_blocked_viewer_leaves_and_comes_back_counts_from_its_return():
    group, published, fanout, viewer = stopped(SenderSettings(stuck_s=15, soft_too_long_s=0), "0,10")
    viewer.sender.unfollow()
    group.run(60.0)
    assert viewer.host.closed == []
    viewer.follow(fanout)
    published.script("KI")
    group.run(14.0)
    assert viewer.host.closed == []
    published.script("I")
    group.run(2.0)
    assert [reason for reason, _ in viewer.host.closed] == [CloseReason.STUCK]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("limits", [Limits(), by_messages(2, 100)], ids=["stuck", "soft"])
def test_times_when_our_thread_was_held_ask_the_kernel_before_they_close(limits, deferred):
    viewer = Talker(Peer(room=HEAD_BYTES - 1), limits=limits, settings=HASTY, deferred=deferred)
    viewer.say("XXXX")
    viewer.group.run()
    viewer.peer.room = None
    viewer.group.clock.advance(100.0)
    viewer.sender.tick()
    assert viewer.host.closed == []
    assert viewer.sender.state is READY
    assert viewer.heard() == [0, 1, 2, 3]


@pytest.mark.parametrize("follows", [True, False])
def test_close_deadline_when_our_thread_was_held_sends_what_is_taken_before_it_gives_up(follows):
    for room, reason in ((None, CloseReason.FINISHED), (HEAD_BYTES, CloseReason.STUCK)):
        viewer = Talker(Peer(room=room), settings=HASTY)
        published = Published(viewer.group)
        if follows:
            viewer.follow(Fanout(published.log, viewer.group))
            published.script("KI")
        viewer.say("XX")
        viewer.sender.close_after_flush()
        viewer.group.clock.advance(100.0)
        viewer.sender.tick()
        viewer.group.run()
        assert [why for why, _ in viewer.host.closed] == [reason]
        assert viewer.heard() == ([0, 1] if room is None else [0])
        check_accounts(viewer)


def test_age_when_only_time_passes_reaches_the_limit_by_a_tick():
    limits = Limits(age_ms=AxisLimits(soft=2000, hard=5000))
    viewer = Talker(Peer(room=0), limits=limits, settings=TIMELESS)
    viewer.say("X")
    viewer.group.run(1.9)
    assert viewer.states() == [OVERLOADED]
    viewer.group.run(10.0)
    assert [(change.new, change.cause, change.axis) for change in viewer.edges.changes[1:]] == [
        (SOFT_LIMIT, Cause.TICK, Axis.AGE),
        (HARD_LIMIT, Cause.TICK, Axis.AGE),
    ]
    assert [change.at - viewer.edges.changes[0].at for change in viewer.edges.changes] == pytest.approx(
        [0, 2, 5], abs=0.01
    )


def emptied(limits):
    """Return group, log and a blocked viewer whose queue thinning has emptied, with nothing lost that others need."""
    group = ManualGroup()
    published = Published(group)
    fanout = Fanout(published.log, group, flush_interval_s=0)
    viewer = Viewer(group, policy=KeepAll(), limits=limits, settings=TIMELESS)
    viewer.follow(fanout)
    published.script("KI")
    group.run(1.0)
    viewer.peer.room = 0
    for _ in "DD":  # after the second one all looks are done that the key frame before was a reason for
        published.script("D")
        group.run(0.1)
    viewer.sender.thin(Thin.DROPPABLE)
    assert viewer.sender.blocked
    assert viewer.sender.load().messages == 0
    return group, published, viewer


@pytest.mark.parametrize("wait_s", [0.0, 0.7, 1.0, 30.0])
def test_age_when_thinning_had_emptied_the_queue_counts_for_the_next_message(wait_s):
    """The first message after that is nobody's reason to look at the viewer; its age reaches the marks by ticks."""
    group, published, viewer = emptied(Limits.parse("0,0,1s", "0,0,2s"))
    group.run(wait_s)
    published.script("A")
    assert viewer.host.closed == []
    group.run(1.9)
    assert viewer.sender.state is SOFT_LIMIT
    assert viewer.host.closed == []
    group.run(0.2)
    assert [reason for reason, _ in viewer.host.closed] == [CloseReason.HARD_LIMIT]


def deadlines_of(viewer):
    """Return a list that grows with each deadline that a viewer's Sender asks for."""
    asked: list[float] = []
    inner = viewer.host.set_deadline

    def noted(when):
        asked.append(when)
        inner(when)

    viewer.host.set_deadline = noted
    return asked


def test_age_when_a_viewer_keeps_up_asks_for_no_tick():
    group = ManualGroup()
    published = Published(group)
    viewer = Viewer(group, limits=Limits.parse("0,0,1s", "0,0,2s"), settings=TIMELESS)
    viewer.follow(Fanout(published.log, group, flush_interval_s=0))
    published.script("KI")
    group.run(1.0)
    asked = deadlines_of(viewer)
    for _ in range(50):
        published.script("IA")
        group.run(0.04)
    assert asked == []
    assert viewer.numbers()[-1] == 101


@pytest.mark.parametrize("follows", [True, False])
def test_target_delay_when_nothing_can_be_late_asks_for_no_tick(follows):
    viewer = Talker(Peer(room=100), policy=KeepAll() if follows else LivePolicy(), settings=TIMELESS)
    published = Published(viewer.group)
    published.script("K")
    if follows:
        viewer.follow(Fanout(published.log, viewer.group, flush_interval_s=0))
        viewer.group.run(1.0)  # past the looks at a joiner
    asked = deadlines_of(viewer)
    for _ in range(50):
        if follows:
            published.script("IIIA")
        else:
            viewer.say("XXXA")
        viewer.group.run(0.2)
        viewer.give(30)
    assert viewer.sender.state is OVERLOADED
    assert viewer.sender.limits.target_delay_ms is None
    assert (asked, viewer.host.unsent_limit_bytes) == ([], 0)


def test_age_when_the_queue_stays_empty_asks_for_one_tick_per_mark():
    group, _, viewer = emptied(Limits.parse("0,0,1s", "0,0,2s"))
    asked = deadlines_of(viewer)
    group.run(20.0)
    assert 15 <= len(asked) <= 25


# -- closing


def test_close_after_flush_when_following_sends_what_was_published_before():
    group = ManualGroup()
    viewer, other = Viewer(group, Peer(room=20)), Viewer(group)
    published = Published(group)
    fanout = Fanout(published.log, group, flush_interval_s=0)
    for item in (viewer, other):
        item.follow(fanout)
    published.script("KIA")
    group.run()
    viewer.sender.close_after_flush()
    group.run()
    published.script("IKI")
    viewer.drain()
    assert viewer.numbers() == [0, 1, 2]
    assert other.numbers() == [0, 1, 2, 3, 4, 5]
    assert viewer.host.closed == [(CloseReason.FINISHED, "everything was sent")]
    assert viewer.sender.following is None
    check_accounts(viewer)


def test_close_after_flush_when_a_member_of_the_cohort_finishes_too():
    group = ManualGroup()
    viewer = Viewer(group)
    published = Published(group)
    fanout = Fanout(published.log, group)
    viewer.follow(fanout)
    published.script("KI")
    group.run(1.0)
    assert fanout.statistics().members == 1
    published.script("II")
    viewer.sender.close_after_flush()
    published.script("I")
    group.run(1.0)
    assert viewer.numbers()[:4] == [0, 1, 2, 3]
    assert viewer.host.closed == [(CloseReason.FINISHED, "everything was sent")]
    assert fanout.empty is True
    check_accounts(viewer)


@pytest.mark.parametrize("room", [None, 2 * HEAD_BYTES])
@pytest.mark.parametrize("emptied_by", ["unfollow", "thin"])
def test_close_after_flush_when_something_else_empties_the_queue_is_the_end_at_once(emptied_by, room):
    """Between two of its turns, or while its kernel is full: there is nothing left to write, and no turn comes."""
    group = ManualGroup()
    published = Published(group)
    viewer = Viewer(group, Peer(room=room), settings=SenderSettings(turn_messages=2, stuck_s=0))
    viewer.follow(Fanout(published.log, group, flush_interval_s=0))
    published.script("AAAA")
    viewer.sender.close_after_flush()
    assert viewer.sender.flush() is FlushResult.MORE
    if room is not None:
        assert viewer.sender.flush() is FlushResult.BLOCKED
    assert viewer.host.closed == []
    getattr(viewer.sender, emptied_by)()
    assert viewer.host.closed == [(CloseReason.FINISHED, "everything was sent")]
    group.run(60.0)
    assert viewer.numbers() == [0, 1]
    check_accounts(viewer)
    check_edges(viewer)


def test_close_after_flush_when_something_waits_before_it_does_that_first():
    """What another thread asked for and empties the queue is not the end while the reason of an end waits behind it."""
    group = ManualGroup()
    published = Published(group)
    viewer = Viewer(group)
    viewer.follow(Fanout(published.log, group, flush_interval_s=0))
    published.script("AA")
    viewer.host.foreign = True
    viewer.sender.thin()
    viewer.sender.close(CloseReason.KICKED, "by an operator")
    group.run()
    assert viewer.host.closed == [(CloseReason.KICKED, "by an operator")]


def test_close_deadline_when_it_has_passed_is_not_set_again():
    """A peer takes all it is given, but not in one turn: the flush goes on, and no tick asks for the next at once."""
    group = ManualGroup()
    published = Published(group)
    viewer = Viewer(group, settings=SenderSettings(turn_messages=2, stuck_s=0, close_deadline_s=5))
    viewer.follow(Fanout(published.log, group, flush_interval_s=0))
    published.script("A" * 50)
    viewer.sender.close_after_flush()
    viewer.sender.flush()
    group.clock.advance(6.0)
    wishes = []
    viewer.host.set_deadline = wishes.append
    for _ in range(3):
        viewer.sender.tick()
    assert wishes == []
    group.run()
    assert viewer.numbers() == [*range(50)]
    assert viewer.host.closed == [(CloseReason.FINISHED, "everything was sent")]


def test_send_after_close_is_counted_and_not_accepted():
    viewer = Talker()
    viewer.say("X")
    viewer.sender.close(CloseReason.KICKED, "first")
    viewer.sender.close(CloseReason.BANNED, "second")
    assert [result.outcome for result in viewer.say("XC")] == [SendOutcome.CLOSED] * 2
    statistics = viewer.sender.statistics()
    assert statistics.sends_after_close == 2
    assert statistics.close_reason is CloseReason.KICKED
    assert viewer.host.closed == [(CloseReason.KICKED, "first")]
    viewer.group.run(100.0)
    assert viewer.peer.writes == 0
    check_accounts(viewer, viewer.offered)


def test_sender_that_is_let_go_answers_as_at_its_end():
    viewer = Talker(Peer(room=0))
    viewer.say("X")
    viewer.sender.let_go()
    assert viewer.sender.host is viewer.host, "not before its end"
    viewer.sender.close(CloseReason.KICKED)
    before = viewer.sender.statistics()
    viewer.sender.let_go()
    viewer.group.run(10.0)
    assert viewer.sender.host is not viewer.host
    assert (viewer.sender.statistics(), viewer.sender.load().messages) == (before, 0)
    assert viewer.sender.sample_delay() == 0.0
    assert [result.outcome for result in viewer.say("X")] == [SendOutcome.CLOSED]


# -- ledger, why, statistics


def test_ledger_over_two_episodes_has_one_entry_each_and_one_per_edge():
    viewer = Talker(Peer(room=0), policy=DropDroppable())
    for count in (2, 3):
        viewer.give(0)
        viewer.say("X")
        viewer.group.run(1.0)
        viewer.say("X" * count)
        viewer.group.run(1.0)
        viewer.drain()
    ledger = viewer.sender.ledger()
    drops = [entry for entry in ledger if entry.kind is LedgerKind.DROPS]
    assert [entry.dropped[DropReason.REFUSED].of(DATA) for entry in drops] == [2, 3]
    assert [entry.duration_s for entry in drops] == pytest.approx([2.0, 2.0])
    assert drops[1].why == "refused by policy: 3 data"
    assert [entry.change for entry in ledger if entry.kind is LedgerKind.STATE] == viewer.edges.changes
    assert viewer.host.ledger_notes == len(ledger)
    assert viewer.sender.unread_ledger() == ledger
    assert viewer.sender.unread_ledger() == ()
    viewer.sender.close(CloseReason.KICKED, "enough")
    (entry,) = viewer.sender.unread_ledger()
    assert (entry.kind, entry.reason, entry.why) == (LedgerKind.CLOSE, CloseReason.KICKED, "enough")


def test_why_in_each_state_names_axis_value_limit_time_and_blame():
    viewer = Talker(Peer(room=0), limits=by_messages(3, 9), settings=TIMELESS)
    assert "READY" in viewer.sender.why()
    assert "nothing queued" in viewer.sender.why()
    viewer.say("X")
    viewer.group.run(2.0)
    assert viewer.sender.why().startswith("OVERLOADED for 2.0 s; blocked; queued 107 B in 1 message")
    assert "oldest 2.0 s; it has taken nothing for 2.0 s; to blame: peer's line" in viewer.sender.why()
    viewer.say("XX")
    assert "queued: 3 messages, limit 3 messages" in viewer.sender.why()
    assert viewer.sender.why().startswith("SOFT_LIMIT for 0")
    viewer.sender.set_limits(by_messages(2, 9))
    viewer.sender.close(CloseReason.KICKED, "by hand")
    assert viewer.sender.why() == "closed: kicked (by hand)"


def test_statistics_over_a_stall_account_for_time_and_messages():
    viewer = Talker(Peer(room=0), policy=LivePolicy(), settings=TIMELESS)
    began = viewer.group.now()
    viewer.group.run(1.0)
    viewer.say("KI", droppable=False)
    viewer.say("D")
    viewer.group.run(3.0)
    viewer.say("DAX")
    viewer.give(HEAD_BYTES + 3)
    statistics = viewer.sender.statistics()
    assert statistics.accepted.by_name() == {"key": 1, "inter": 1, "disposable": 2, "audio": 1, "data": 1}
    assert statistics.sent.by_name() == {"key": 1}
    assert statistics.queued.by_name() == {"inter": 1, "disposable": 1, "audio": 1, "data": 1}
    assert statistics.dropped_messages == 1
    assert statistics.time_in_states_s == pytest.approx((1.0, 3.0, 0.0, 0.0))
    assert statistics.longest_stall_s == pytest.approx(3.0)
    viewer.drain()
    statistics = viewer.sender.statistics()
    assert (statistics.transitions, statistics.recoveries, statistics.state) == (2, 1, READY)
    assert sum(statistics.time_in_states_s) == pytest.approx(viewer.group.now() - began)
    check_accounts(viewer, viewer.offered)


def test_unfollow_when_at_the_soft_limit_leaves_it():
    group = ManualGroup()
    published = Published(group)
    fanout = Fanout(published.log, group)
    viewer = Viewer(group, limits=Limits.parse("0,10", "0,100"))
    viewer.follow(fanout)
    published.script("K")
    group.run(0.1)
    viewer.peer.room = 0
    published.script("A" * 20)
    group.run(0.1)
    published.script("A")
    group.run(0.1)
    assert viewer.sender.state is SOFT_LIMIT
    viewer.sender.unfollow()
    assert viewer.sender.state is OVERLOADED
    group.run(30)
    assert viewer.host.closed == []
