"""The Sender of one peer: modes, EAGAIN, order, budgets, contained application code, the ledger, `why()`, threads."""

from __future__ import annotations

import errno
import threading
from collections import Counter

import pytest
from flow_kit import (
    AUDIO,
    CLASS_OF,
    CONTROL,
    DATA,
    DISPOSABLE,
    HEAD_BYTES,
    INTER,
    KEY,
    OWN,
    Peer,
    Published,
    Viewer,
    check_accounts,
    check_edges,
    frame,
)

from flowctl.errors import LocalProtocolError, ReentryError
from flowctl.fanout import Fanout
from flowctl.flow import Axis, Cause, SendState
from flowctl.ledger import LedgerKind
from flowctl.limits import NO_LIMITS, AxisLimits, HardPolicy, Limits
from flowctl.policy import DropDroppable, KeepAll, LivePolicy, Thin, Verdict
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import FlushResult, Sender
from flowctl.sender_types import SenderSettings, SendOutcome
from flowctl.testing import ManualGroup, ManualHost, ScriptedTransport, ThrottledPeer, would_block

READY, OVERLOADED, SOFT_LIMIT, HARD_LIMIT = SendState
TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0, close_deadline_s=0)


class Talker(Viewer):
    """A viewer that is sent messages of its own, numbered from 0."""

    def __init__(self, peer=None, **settings):
        super().__init__(ManualGroup(), peer, **settings)
        self.offered = Counter()
        self.number = 0

    def say(self, text, size=HEAD_BYTES, **options):
        """Send one message per letter of `text` (C H K I D A X); return the results."""
        results = []
        for letter in text:
            item = CLASS_OF[letter]
            results.append(self.sender.send(frame(OWN, item, self.number, size), item, **options))
            self.number += 1
            self.offered[item] += results[-1].outcome is not SendOutcome.CLOSED
        return results

    def heard(self):
        """Numbers of the complete messages that the peer has received."""
        return self.numbers(OWN)

    def states(self):
        """All states announced so far."""
        return [change.new for change in self.edges.changes]


def by_messages(soft, hard=None, low=None, policy=HardPolicy.CLOSE):
    return Limits(messages=AxisLimits(soft=soft, hard=hard, low=low), hard_policy=policy)


def on_other_thread(action):
    """Run `action` on a thread of its own and wait for it."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


# -- modes and writing


def test_send_when_deferred_leaves_writing_to_the_owning_thread():
    """In deferred mode nothing is written before the owning thread flushes, and then all in one call."""
    viewer = Talker()
    outcomes = [result.outcome for result in viewer.say("XXX")]
    assert outcomes == [SendOutcome.ACCEPTED] * 3
    assert viewer.peer.writes == 0
    viewer.group.run()
    assert viewer.heard() == [0, 1, 2]
    assert viewer.peer.writes == 1


def test_send_when_immediate_and_nothing_is_queued_writes_at_once():
    """In immediate mode a message is with the kernel when `send` returns, and no flush is asked for."""
    viewer = Talker(deferred=False)
    assert viewer.say("XX") == [(SendOutcome.ACCEPTED, READY)] * 2
    assert viewer.heard() == [0, 1]
    assert viewer.sender.statistics().sent.of(DATA) == 2
    viewer.group.run()
    assert viewer.peer.writes == 2
    check_accounts(viewer, viewer.offered)


def test_send_when_immediate_meets_eagain_queues_behind_the_rest():
    """What EAGAIN left is finished first; what is sent meanwhile waits its turn; the owner watches the socket."""
    viewer = Talker(Peer(room=5), deferred=False)
    assert viewer.say("X") == [(SendOutcome.ACCEPTED, OVERLOADED)]
    assert viewer.sender.load().messages == 1
    assert viewer.say("XX") == [(SendOutcome.ACCEPTED, OVERLOADED)] * 2
    assert len(viewer.peer.received) == 5
    viewer.group.run()
    assert viewer.host.wants_writable is True
    viewer.give(None)
    assert viewer.heard() == [0, 1, 2]
    assert viewer.host.wants_writable is False
    assert viewer.states() == [OVERLOADED, READY]
    check_accounts(viewer, viewer.offered)


@pytest.mark.parametrize("deferred", [True, False])
def test_eagain_at_every_byte_resumes_exactly(deferred):
    """Wherever the kernel stops, the rest follows from the next byte on: nothing twice, nothing left out."""
    wires = [frame(OWN, DATA, number, size) for number, size in enumerate((11, 20, 13))]
    expected = b"".join(wires)
    for cut in range(1, len(expected)):
        transport = ScriptedTransport([cut, would_block, would_block])
        host = ManualHost()
        host.sender = sender = Sender(host, transport, deferred=deferred)
        for wire in wires:
            sender.send(wire)
        host.group.run()
        while host.poll_writable() is FlushResult.BLOCKED:
            pass
        host.group.run()
        assert bytes(transport.received) == expected
        assert sender.statistics().bytes_sent == len(expected)


def test_partial_write_when_no_eagain_follows_is_no_sign_of_a_slow_peer():
    """A kernel that takes one byte a call takes everything in one flush, without an edge."""
    viewer = Talker(Peer(most=1))
    viewer.say("XXX")
    viewer.group.run()
    assert viewer.heard() == [0, 1, 2]
    assert viewer.states() == []


def test_eagain_when_everything_is_taken_later_clears_only_then():
    """OVERLOADED lasts until the last byte is taken; each wake-up that leaves something makes no edge."""
    viewer = Talker(Peer(room=0))
    viewer.say("XXX")
    viewer.group.run()
    for _ in range(2):
        viewer.give(HEAD_BYTES)
        assert viewer.states() == [OVERLOADED]
    viewer.give(HEAD_BYTES)
    assert viewer.states() == [OVERLOADED, READY]


def test_throttled_peer_when_link_is_slower_than_we_gets_everything_in_order():
    """Behind a link of a given rate and a small buffer the Sender alternates between waiting and writing."""
    group = ManualGroup()
    peer = ThrottledPeer(group.clock, 1000, buffer_bytes=50)
    host = ManualHost(group)
    host.sender = sender = Sender(host, peer)
    wires = [frame(OWN, DATA, number, 40) for number in range(20)]
    for wire in wires:
        sender.send(wire)
    for _ in range(40):
        group.run(0.05)
        if peer.run():
            host.poll_writable()
    peer.run()
    assert bytes(peer.received) == b"".join(wires)
    assert sender.state is READY


def test_control_when_others_wait_goes_first_at_a_message_boundary():
    """The control lane overtakes queued messages, but never the one whose first byte is out."""
    viewer = Talker(Peer(room=4))
    viewer.say("XX")
    viewer.group.run()
    viewer.say("CXC")
    viewer.give(None)
    assert viewer.heard() == [0, 2, 4, 1, 3]


def test_message_in_flight_when_all_is_dropped_is_finished():
    """A message whose first byte has been written is completed whatever is done to the queue."""
    viewer = Talker(Peer(room=30), policy=LivePolicy())
    viewer.say("K", 100)
    viewer.group.run()
    viewer.say("IAX")
    viewer.sender.thin(Thin.DROPPABLE)
    viewer.say("C")
    viewer.give(None)
    assert viewer.classes() == "KC"
    check_accounts(viewer, viewer.offered)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        pytest.param(SenderSettings(turn_messages=3), 3, id="messages"),
        pytest.param(SenderSettings(turn_bytes=100), 2, id="bytes"),  # the one that uses up the budget is the last
    ],
)
def test_flush_when_budget_of_turn_is_used_asks_for_another(settings, first):
    """One turn writes no more than its budget; what is left is written in the following rounds without EAGAIN."""
    viewer = Talker(settings=settings)
    viewer.say("X" * 10, 60)
    assert viewer.sender.flush() is FlushResult.MORE
    assert viewer.heard() == list(range(first))
    viewer.group.run()
    assert viewer.heard() == list(range(10))
    assert viewer.states() == []


def test_flush_when_message_is_in_flight_hands_over_no_more_parts_than_a_call_takes():
    """The message in flight is one of the 1024 parts of a system call (the peer checks their number)."""
    viewer = Talker(Peer(room=5), settings=SenderSettings(turn_messages=1024))
    viewer.say("X" * 2000)
    viewer.group.run()
    viewer.drain()
    assert viewer.heard() == list(range(2000))


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ECONNRESET, CloseReason.PEER_RESET), (errno.EBADF, CloseReason.INTERNAL)]
)
@pytest.mark.parametrize("deferred", [True, False])
def test_write_when_connection_is_gone_ends_the_sender_once(number, reason, deferred):
    """An error of the socket ends the Sender with its reason; what was queued is counted as dropped at close."""
    viewer = Talker(deferred=deferred)
    viewer.peer.failure = OSError(number, "scripted")
    viewer.say("X")
    viewer.group.run()
    assert [item for item, _ in viewer.host.closed] == [reason]
    assert viewer.sender.flush() is FlushResult.CLOSED
    assert viewer.sender.statistics().dropped[DropReason.CLOSED].of(DATA) == 1
    check_accounts(viewer)


def test_send_when_empty_is_refused():
    """An empty message would never be taken by the kernel: it is the caller's mistake."""
    viewer = Talker()
    with pytest.raises(LocalProtocolError, match="empty"):
        viewer.sender.send(b"")
    assert viewer.sender.statistics().accepted.total_messages == 0


# -- application code under the lock

CALLS = {
    "send": lambda sender, _: sender.send(b"x"),
    "follow": lambda sender, fanout: sender.follow(fanout),
    "unfollow": lambda sender, _: sender.unfollow(),
    "suspend_following": lambda sender, _: sender.suspend_following(),
    "resume_following": lambda sender, fanout: sender.resume_following(fanout),
    "move_to": lambda sender, fanout: sender.move_to(fanout),
    "set_limits": lambda sender, _: sender.set_limits(NO_LIMITS),
    "set_policy": lambda sender, _: sender.set_policy(KeepAll()),
    "thin": lambda sender, _: sender.thin(),
    "why": lambda sender, _: sender.why(),
    "statistics": lambda sender, _: sender.statistics(),
    "load": lambda sender, _: sender.load(),
    "ledger": lambda sender, _: sender.ledger(),
    "unread_ledger": lambda sender, _: sender.unread_ledger(),
    "flush": lambda sender, _: sender.flush(),
    "writable": lambda sender, _: sender.writable(),
    "tick": lambda sender, _: sender.tick(),
    "close_after_flush": lambda sender, _: sender.close_after_flush(),
    "close": lambda sender, _: sender.close(CloseReason.KICKED),
}
FOR_THE_FANOUT = {"log_grew", "ready_for_cohort", "enter_cohort", "leave_cohort", "broken"}


def test_reentry_calls_are_all_public_methods():
    """No public method is left out of the test below but `note`, which is allowed, and those for the fan-out."""
    public = {name for name, item in vars(Sender).items() if callable(item) and not name.startswith("_")}
    assert set(CALLS) == public - FOR_THE_FANOUT - {"note"}


@pytest.mark.parametrize("method", CALLS)
def test_method_when_called_from_the_handler_raises_and_changes_nothing(method):
    """Calling the Sender from send_state_changed raises at once, names the method, and half-applies nothing."""
    viewer = Talker(Peer(room=30), limits=by_messages(5, 100))
    fanout = Fanout(Published(viewer.group).log, viewer.group)
    errors = []

    def call(_state, _change):
        with pytest.raises(ReentryError) as caught:
            CALLS[method](viewer.sender, fanout)
        errors.append(str(caught.value))

    viewer.edges.hook = call
    viewer.say("X" * 6)
    viewer.group.run()
    viewer.drain()
    assert viewer.states() == [SOFT_LIMIT, OVERLOADED, READY] or viewer.states() == [SOFT_LIMIT, READY]
    assert len(errors) == len(viewer.edges.changes)
    assert all(f"Sender.{method}()" in text for text in errors)
    assert viewer.heard() == list(range(6))
    assert (viewer.sender.closed, viewer.sender.following, viewer.host.failures) == (False, None, [])
    check_accounts(viewer, viewer.offered)
    check_edges(viewer)


def test_handler_when_it_reads_properties_and_notes_is_allowed():
    """State, limits and blocked can be read, and a pause of input noted, from the handler."""
    viewer = Talker(Peer(room=0))
    seen = []

    def look(state, _change):
        seen.append((viewer.sender.state is state, viewer.sender.limits, viewer.sender.closed))
        viewer.sender.note(LedgerKind.PAUSE, "input paused")

    viewer.edges.hook = look
    viewer.say("X")
    viewer.group.run()
    assert seen == [(True, NO_LIMITS, False)]
    assert [entry.kind for entry in viewer.sender.ledger()] == [LedgerKind.STATE, LedgerKind.PAUSE]


def test_handler_when_it_raises_is_contained():
    """A handler that raises is reported, and costs neither a message nor an edge, nor the lock."""
    viewer = Talker(Peer(room=5))
    error = RuntimeError("the application's")

    def fail(_state, _change):
        raise error

    viewer.edges.hook = fail
    viewer.say("XX")
    viewer.group.run()
    viewer.drain()
    assert viewer.host.failures == [("send_state_changed", error)] * 2
    assert viewer.heard() == [0, 1]
    check_edges(viewer)


class FailingPolicy:
    """Raises in one of its methods in every state but READY; refuses data and thins otherwise."""

    def __init__(self, method):
        self.method = method
        self.error = RuntimeError(method)

    def decide(self, state, message_class):
        if self.method == "decide" and state is not READY:
            raise self.error
        return Verdict.DROP if state is not READY and message_class is DATA else Verdict.KEEP

    def thin(self, _state):
        if self.method == "thin":
            raise self.error
        return Thin.NOTHING


@pytest.mark.parametrize(("method", "outcome"), [("decide", SendOutcome.ACCEPTED), ("thin", SendOutcome.DROPPED)])
def test_policy_when_it_raises_is_contained(method, outcome):
    """A policy that fails to decide refuses nothing; one that fails to thin leaves the queue alone."""
    policy = FailingPolicy(method)
    viewer = Talker(Peer(room=0), policy=policy)
    viewer.say("X")
    viewer.group.run()
    assert viewer.say("X") == [(outcome, OVERLOADED)]
    assert set(viewer.host.failures) == {(method, policy.error)}
    viewer.drain()
    assert viewer.sender.state is READY
    check_accounts(viewer, viewer.offered)


def test_policy_when_it_calls_the_sender_is_refused_like_a_handler():
    """A policy runs under the lock as well: its call raises, is reported, and counts as a failed decision."""

    class Caller(KeepAll):
        def decide(self, state, message_class):
            if state is not READY:
                viewer.sender.close(CloseReason.KICKED)
            return super().decide(state, message_class)

    viewer = Talker(Peer(room=0), policy=Caller())
    viewer.say("X")
    viewer.group.run()
    ((where, error),) = viewer.host.failures
    assert where == "decide"
    assert isinstance(error, ReentryError)
    assert viewer.sender.closed is False


# -- limits and policy


def test_send_when_policy_refuses_says_so_and_keeps_the_rest():
    """OVERLOADED refuses disposable frames alone; each refusal is in the result and in the statistics."""
    viewer = Talker(Peer(room=0), policy=LivePolicy())
    viewer.say("K")
    viewer.group.run()
    outcomes = [result.outcome for result in viewer.say("IDA")]
    assert outcomes == [SendOutcome.ACCEPTED, SendOutcome.DROPPED, SendOutcome.ACCEPTED]
    viewer.say("D", droppable=False)
    viewer.drain()
    assert viewer.classes() == "KIAD"
    assert viewer.sender.statistics().dropped[DropReason.REFUSED].by_name() == {"disposable": 1}
    check_accounts(viewer, viewer.offered)


def test_hard_limit_when_final_closes_with_that_reason():
    """The message that reaches the hard mark ends the connection: its sender learns it, everything is counted."""
    viewer = Talker(Peer(room=0), limits=by_messages(2, 4))
    results = viewer.say("XXXX")
    assert [result.outcome for result in results] == [SendOutcome.ACCEPTED] * 3 + [SendOutcome.CLOSED]
    assert viewer.states() == [SOFT_LIMIT, HARD_LIMIT]
    assert viewer.host.closed == [(CloseReason.HARD_LIMIT, "queued: messages 4, limit 4")]
    assert viewer.sender.statistics().dropped[DropReason.CLOSED].of(DATA) == 4


def test_hard_limit_when_held_refuses_all_but_control_and_headers_until_low():
    """A held HARD_LIMIT takes control and headers only, droppable or not, and is left at the low mark."""
    viewer = Talker(Peer(room=0), limits=by_messages(4, 4, 2, HardPolicy.HOLD), settings=TIMELESS)
    viewer.say("XXXX")
    viewer.group.run()
    assert viewer.sender.state is HARD_LIMIT
    assert [result.outcome for result in viewer.say("X", droppable=False)] == [SendOutcome.DROPPED]
    assert [result.outcome for result in viewer.say("CH")] == [SendOutcome.ACCEPTED] * 2
    viewer.give(4 * HEAD_BYTES)
    assert viewer.sender.state is OVERLOADED
    assert [result.outcome for result in viewer.say("X")] == [SendOutcome.ACCEPTED]
    viewer.drain()
    assert viewer.sender.statistics().dropped[DropReason.HELD].by_name() == {"data": 1}
    check_accounts(viewer, viewer.offered)


def test_set_limits_when_load_is_above_acts_at_once():
    """Tighter limits change the state before `set_limits` returns, and the ledger says who set them."""
    viewer = Talker(Peer(room=0))
    viewer.say("XXX")
    viewer.sender.set_limits(by_messages(3, 9))
    assert viewer.sender.state is SOFT_LIMIT
    (change,) = viewer.edges.changes
    assert (change.cause, change.axis, change.value, change.limit) == (Cause.LIMITS_SET, Axis.MESSAGES, 3.0, 3)
    assert [entry.kind for entry in viewer.sender.ledger()] == [LedgerKind.LIMITS, LedgerKind.STATE]
    viewer.sender.set_limits(NO_LIMITS)
    assert viewer.sender.state is READY


def test_hold_when_made_final_while_reached_closes():
    """Turning hold into close while the hard mark is reached closes, though no edge is announced for it."""
    viewer = Talker(Peer(room=0), limits=by_messages(2, 2, policy=HardPolicy.HOLD))
    viewer.say("XX")
    viewer.sender.set_limits(by_messages(2, 2))
    assert [reason for reason, _ in viewer.host.closed] == [CloseReason.HARD_LIMIT]
    check_edges(viewer)


@pytest.mark.parametrize(
    "settings", [SenderSettings(control_messages=3), SenderSettings(control_bytes=3 * HEAD_BYTES)], ids=str
)
def test_control_lane_when_over_its_limit_closes(settings):
    """A peer that makes us queue replies without end is closed by the lane's own limit, whatever the other limits."""
    viewer = Talker(Peer(room=0), settings=settings)
    outcomes = [result.outcome for result in viewer.say("CCCC")]
    assert outcomes == [SendOutcome.ACCEPTED] * 3 + [SendOutcome.CLOSED]
    ((reason, details),) = viewer.host.closed
    assert reason is CloseReason.LIMIT_HIT
    assert "control lane" in details


@pytest.mark.parametrize("foreign", [False, True])
def test_requests_when_following_from_another_thread_are_done_by_the_owner_in_order(foreign):
    """While a log is followed, what other threads ask for waits for the owning thread, which is asked to flush."""
    viewer = Talker(Peer(room=0), limits=by_messages(100), settings=TIMELESS)
    published = Published(viewer.group)
    fanout = Fanout(published.log, viewer.group, flush_interval_s=0)
    viewer.follow(fanout)
    published.script("KIIAD")
    viewer.group.run()
    on = threading.get_ident()
    threads = set()
    viewer.edges.hook = lambda *_: threads.add(threading.get_ident())
    viewer.host.foreign = foreign

    def ask():
        viewer.sender.set_limits(by_messages(5, 50))  # reached: SOFT_LIMIT
        viewer.sender.set_policy(DropDroppable())
        viewer.sender.thin(Thin.DROPPABLE)
        viewer.sender.close(CloseReason.KICKED, "asked for")

    if not foreign:
        ask()
    else:
        on_other_thread(ask)
        assert viewer.states() == [OVERLOADED]
        assert viewer.sender.closed is True
        assert viewer.host.closed == []
        viewer.group.run()
    assert viewer.states() == [OVERLOADED, SOFT_LIMIT, OVERLOADED]
    assert threads == {on}
    assert viewer.host.closed == [(CloseReason.KICKED, "asked for")]
    assert viewer.sender.statistics().dropped[DropReason.REQUESTED].total_messages == 5
    check_accounts(viewer)
    check_edges(viewer)


# -- ledger, why, statistics


def test_ledger_over_two_episodes_has_one_entry_each_and_one_per_edge():
    """All drops from the first refusal to recovery make one entry, with what and how long; each edge makes one."""
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
    """One line tells what the state is, since when, by which mark, and whose fault it is."""
    viewer = Talker(Peer(room=0), limits=by_messages(3, 9), settings=TIMELESS)
    assert "READY" in viewer.sender.why()
    assert "nothing queued" in viewer.sender.why()
    viewer.say("X")
    viewer.group.run(2.0)
    assert viewer.sender.why().startswith("OVERLOADED for 2s; would block; queued 107")
    assert "in 1 messages, oldest 2s; the kernel has taken nothing for 2s; to blame: viewer link" in viewer.sender.why()
    viewer.say("XX")
    assert "SOFT_LIMIT for 0s; queued: messages 3, limit 3" in viewer.sender.why()
    viewer.sender.set_limits(by_messages(2, 9))
    viewer.sender.close(CloseReason.KICKED, "by hand")
    assert viewer.sender.why() == "closed: kicked (by hand)"


def test_statistics_over_a_stall_account_for_time_and_messages():
    """Time in states adds up to the clock, the stall is measured, and each message is in exactly one place."""
    viewer = Talker(Peer(room=0), policy=LivePolicy(), settings=TIMELESS)
    began = viewer.group.now()
    viewer.group.run(1.0)
    viewer.say("KID")
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


# -- threads


class RefusingPeer(Peer):
    """Takes 50 bytes a call and meets EAGAIN at every third."""

    def send(self, data, /):
        if self.writes % 3 == 2:
            self.writes += 1
            raise BlockingIOError(errno.EAGAIN, "scripted")
        self.most = 50
        return super().send(data)


class LooseHost(ManualHost):
    """A host whose owner flushes all the time: it need not be asked."""

    def request_flush(self):
        """Nothing to do."""


@pytest.mark.parametrize("deferred", [True, False])
def test_send_when_several_threads_call_keeps_the_order_of_each(deferred):
    """Messages of one thread arrive whole, once, and in its order, however threads and flushes interleave."""
    count, threads = 150, 4
    viewer = Viewer(ManualGroup(), RefusingPeer())
    host = LooseHost(viewer.group)
    host.sender = viewer.sender = sender = Sender(host, viewer.peer, frontend=viewer.edges, deferred=deferred)
    start = threading.Barrier(threads)

    def talk(first):
        start.wait()
        for number in range(first, first + count):
            assert sender.send(frame(OWN, AUDIO, number, 30), AUDIO).outcome is SendOutcome.ACCEPTED

    workers = [threading.Thread(target=talk, args=(index * count,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or sender.load().messages:
        sender.flush()
        host.poll_writable()
    numbers = viewer.numbers(OWN)
    for index in range(threads):
        mine = range(index * count, (index + 1) * count)
        assert [number for number in numbers if number in mine] == list(mine)
    assert len(numbers) == count * threads
    assert not host.failures
    check_accounts(viewer, Counter({AUDIO: count * threads}))
    check_edges(viewer)


def test_names_of_classes_are_those_of_the_kit():
    """The letters that the tests above use stand for all classes."""
    assert [CLASS_OF[letter] for letter in "CKID"] == [CONTROL, KEY, INTER, DISPOSABLE]
