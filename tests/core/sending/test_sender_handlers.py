"""The application's code under a Sender's lock: calling back is refused, raising is contained, hooks come later."""

from __future__ import annotations

import asyncio
import threading

import pytest
from flow_kit import (
    DATA,
    Peer,
    Published,
    check_accounts,
    check_edges,
)
from sender_kit import OVERLOADED, READY, SOFT_LIMIT, Talker, by_messages
from slow_kit import Scene, stream

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import NO_LIMITS, Limits
from flowctl.core.flow.policy import DropDroppable, KeepAll, LivePolicy, Thin, Verdict
from flowctl.core.loop.locks import OwnedLock, PostponedCalls
from flowctl.core.sending.contract import Hop, SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import ConfigError, ReentryError
from flowctl.reasons import CloseReason, DropReason
from flowctl.records.flight.recorded import RecordedSender
from flowctl.records.flight.tape import Identity, Tape
from flowctl.records.flight.words import TablePolicy
from flowctl.sender import Sender
from flowctl.testing import ManualGroup, ManualHost


def new_tape():
    """Return a tape whose rows nobody keeps."""
    return Tape(lambda _row: True, Identity(conn_id=1, began_at_us=0))


# -- application code under the lock

CALLS = {
    "send": lambda sender, _: sender.send(b"x"),
    "follow": lambda sender, fanout: sender.follow(fanout),
    "unfollow": lambda sender, _: sender.unfollow(),
    "suspend_following": lambda sender, _: sender.suspend_following(),
    "resume_following": lambda sender, fanout: sender.resume_following(fanout),
    "set_limits": lambda sender, _: sender.set_limits(NO_LIMITS),
    "set_settings": lambda sender, _: sender.set_settings(SenderSettings()),
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
    "set_guide": lambda sender, _: sender.set_guide(None),
    "switch": lambda sender, fanout: sender.switch(Hop(fanout, fanout.log.tail)),
    "behind_ms": lambda sender, _: sender.behind_ms(),
    "line_look": lambda sender, _: sender.line_look(),
    "sample_delay": lambda sender, _: sender.sample_delay(),
    "peer_acknowledged": lambda sender, _: sender.peer_acknowledged(1),
    "forecast": lambda sender, _: sender.forecast(),
    "account": lambda sender, _: sender.account(),
    "relieve": lambda sender, _: sender.relieve("memory"),
    "close_after_flush": lambda sender, _: sender.close_after_flush(),
    "close": lambda sender, _: sender.close(CloseReason.KICKED),
    "when_drained": lambda sender, _: sender.when_drained(print),
    "forget_drained": lambda sender, _: sender.forget_drained(print),
}
FOR_THE_FANOUT = {
    *{
        "log_grew",
        "next_crossing",
        "take_turn",
        "joins_cohort_at",
        "enter_cohort",
        "leave_cohort",
        "skip_in_cohort",
        "move_in_cohort",
        "change_standing",
        "broken",
        "let_go",
        "fill_as_log",
    }
}


def test_reentry_calls_are_all_public_methods():
    public = {name for name in dir(Sender) if callable(getattr(Sender, name)) and not name.startswith("_")}
    assert set(CALLS) == public - FOR_THE_FANOUT - {"note"}


@pytest.mark.parametrize("method", CALLS)
def test_method_when_called_from_the_handler_raises_and_changes_nothing(method):
    viewer = Talker(Peer(room=0), limits=by_messages(5, 100))
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
    assert viewer.states() == [SOFT_LIMIT, READY]
    assert len(errors) == len(viewer.edges.changes)
    assert all(f"Sender.{method}()" in text for text in errors)
    assert viewer.heard() == list(range(6))
    assert (viewer.sender.closed, viewer.sender.following, viewer.host.failures) == (False, None, [])
    check_accounts(viewer, viewer.offered)
    check_edges(viewer)


def test_handler_when_it_reads_properties_and_notes_is_allowed():
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

    def patience(self, _message_class):
        if self.method == "patience":
            raise self.error
        return 1.0


@pytest.mark.parametrize("wait", [None, float("nan"), -1.0])
def test_policy_when_its_patience_is_no_number_costs_the_viewer_nothing(wait):
    class Odd(LivePolicy):
        def patience(self, message_class):
            return wait

    scene = Scene(lambda _: 0.5, policy=Odd(), limits=Limits(target_delay_ms=None)).run(stream(10, 1.0), 10)
    assert not scene.viewer.host.closed
    ((where, error),) = scene.viewer.host.failures
    assert where == "patience"
    assert isinstance(error, ConfigError)
    assert DropReason.LATE not in scene.sender.statistics().dropped


def test_policy_when_it_calls_the_sender_is_refused_like_a_handler():
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


ENDS = [RuntimeError, asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("deferred", [True, False])
def test_handler_when_it_raises_is_contained(error, deferred):
    viewer = Talker(Peer(room=0), limits=by_messages(2, 9), policy=DropDroppable(SOFT_LIMIT), deferred=deferred)

    def fail(_state, _change):
        raise error

    viewer.edges.hook = fail
    viewer.say("X" * 3)
    viewer.group.run()
    viewer.drain()
    assert {(where, type(raised)) for where, raised in viewer.host.failures} == {("send_state_changed", error)}
    assert len(viewer.host.failures) == len(viewer.edges.changes)
    assert viewer.sender.state is READY
    check_accounts(viewer, viewer.offered)
    check_edges(viewer)


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize(("method", "outcome"), [("decide", SendOutcome.ACCEPTED), ("thin", SendOutcome.DROPPED)])
def test_policy_when_it_raises_is_contained(method, outcome, error):
    policy = FailingPolicy(method)
    policy.error = error()
    viewer = Talker(Peer(room=0), policy=policy)
    viewer.say("X")
    viewer.group.run()
    assert viewer.say("X") == [(outcome, OVERLOADED)]
    assert set(viewer.host.failures) == {(method, policy.error)}
    viewer.drain()
    assert viewer.sender.state is READY
    check_accounts(viewer, viewer.offered)
    told = []
    TablePolicy.of(policy, lambda where, _error: told.append(where))
    assert set(told) == {method}


def test_report_when_a_handler_failed_is_made_without_the_lock():
    viewer = Talker(Peer(room=0), limits=by_messages(3, 9), policy=FailingPolicy("thin"))
    seen = []

    def report(where, _error):
        other = threading.Thread(target=lambda: seen.append((where, viewer.sender.statistics().state)))
        other.start()
        other.join(10)
        assert not other.is_alive(), "the lock is held"
        viewer.sender.why()

    viewer.host.handler_failed = report
    viewer.edges.hook = lambda *_: 1 / 0
    viewer.say("X" * 3)
    assert [where for where, _ in seen] == ["send_state_changed", "thin"]
    viewer.sender.set_limits(by_messages(2, 4))
    viewer.drain()
    assert [where for where, _ in seen][-1] == "send_state_changed"
    assert viewer.sender.state is READY


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_report_when_the_error_hook_raises_itself_costs_nobody_anything(error, caplog):
    viewer = Talker(Peer(room=0))
    calls = []

    def report(where, _error):
        calls.append(where)
        raise error

    viewer.host.handler_failed = report
    viewer.edges.hook = lambda *_: 1 / 0
    viewer.say("X")
    viewer.group.run()
    viewer.drain()
    assert calls == ["send_state_changed"] * 2
    assert viewer.states() == [OVERLOADED, READY]
    assert "a hook of the application failed" in caplog.text


def test_recorded_sender_when_a_handler_fails_reports_without_the_lock_as_well():
    owned = []

    class Recorded(Talker):
        def make_sender(self, host, transport, **settings):
            host.handler_failed = lambda *_: owned.append(self.sender._lock.owned())
            return RecordedSender(host, transport, tape=new_tape(), **settings)

    viewer = Recorded(Peer(room=0))
    viewer.edges.hook = lambda *_: 1 / 0
    viewer.say("X")
    viewer.sender.flush()
    viewer.give(None)
    assert owned == [False, False]


# -- another connection's Sender

LOOKS = {
    "note": lambda sender, _: sender.note(LedgerKind.PAUSE, "input paused"),
}


@pytest.mark.parametrize("method", [*CALLS, *LOOKS])
@pytest.mark.parametrize("recorded", [False, True])
def test_method_of_another_sender_when_called_from_a_handler_or_policy_is_refused(method, recorded):
    """Its lock may be held by a thread that waits for ours: the call is refused at once, naming method and caller."""
    group = ManualGroup()
    host = ManualHost(group)
    peer = Peer()
    host.sender = other = RecordedSender(host, peer, tape=new_tape()) if recorded else Sender(host, peer)
    fanout = Fanout(Published(group).log, group)
    errors = []

    def call():
        with pytest.raises(ReentryError) as caught:
            {**CALLS, **LOOKS}[method](other, fanout)
        errors.append(str(caught.value))

    class Asking(KeepAll):
        def decide(self, state, message_class):
            if state is not READY:
                call()
            return super().decide(state, message_class)

        def thin(self, state):
            call()
            return super().thin(state)

    viewer = Talker(Peer(room=0), policy=Asking())
    viewer.edges.hook = lambda *_: call()
    viewer.say("X")
    viewer.group.run()
    assert viewer.host.failures == []
    callers = [text.partition("was called from ")[2].partition("()")[0] for text in errors]
    assert set(callers) == {"send_state_changed", "decide", "thin"}
    assert all(text.startswith(f"Sender.{method}()") for text in errors)
    assert (other.closed, other.following, len(peer.received)) == (False, None, 0)
    if method not in {"follow", "resume_following"}:
        {**CALLS, **LOOKS}[method](other, fanout)  # outside of a handler it is what it always was


def test_handlers_when_two_threads_call_each_others_sender_do_not_deadlock():
    talkers = [Talker(Peer(room=0)) for _ in range(2)]
    meet = threading.Barrier(2, timeout=20)

    def hook(other):
        def send(_state, _change):
            meet.wait()  # each holds its own lock now
            other.sender.send(b"x")

        return send

    for talker, other in zip(talkers, reversed(talkers), strict=True):
        talker.edges.hook = hook(other)
        talker.say("X")
    threads = [threading.Thread(target=talker.group.run, daemon=True) for talker in talkers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "deadlock"
    for talker in talkers:
        ((where, error),) = talker.host.failures
        assert (where, type(error)) == ("send_state_changed", ReentryError)
        assert talker.states() == [OVERLOADED]


def test_calls_when_the_lock_is_held_wait_for_its_outermost_holder():
    lock, calls, owned = OwnedLock(), PostponedCalls(), []
    with lock:
        calls.append(lambda: owned.append(lock.owned()))
        calls.run(lock)
        assert owned == []
    calls.run(lock)
    assert owned == [False]
    assert not calls


def test_calls_when_one_puts_off_another_are_made_one_after_the_other():
    lock, calls, done = OwnedLock(), PostponedCalls(), []

    def first():
        calls.append(lambda: done.append("second"))
        calls.run(lock)
        done.append("first")

    calls.append(first)
    calls.run(lock)
    assert done == ["first", "second"]


def test_calls_when_one_raises_are_made_all_the_same(caplog):
    lock, calls, done = OwnedLock(), PostponedCalls(), []
    calls.extend([lambda: 1 / 0, lambda: done.append("other")])
    calls.run(lock)
    assert done == ["other"]
    assert "a hook of the application failed" in caplog.text


def test_calls_when_another_thread_makes_some_meanwhile_are_still_one_after_the_other():
    lock, calls, done = OwnedLock(), PostponedCalls(), []

    def first():
        other = threading.Thread(target=calls.run, args=(lock,))
        other.start()
        other.join(10)
        calls.append(lambda: done.append("second"))
        calls.run(lock)
        done.append("first")

    calls.append(first)
    calls.run(lock)
    assert done == ["first", "second"]
