"""The application's code under a Sender's lock: calling back is refused, raising is contained."""

from __future__ import annotations

import pytest
from flow_kit import (
    DATA,
    Peer,
    Published,
    check_accounts,
    check_edges,
)
from sender_kit import OVERLOADED, READY, SOFT_LIMIT, Talker, by_messages

from flowctl.errors import ReentryError
from flowctl.fanout import Fanout
from flowctl.ledger import LedgerKind
from flowctl.limits import NO_LIMITS
from flowctl.policy import KeepAll, Thin, Verdict
from flowctl.reasons import CloseReason
from flowctl.sender import Sender
from flowctl.sender_types import SendOutcome

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
    "sample_delay": lambda sender, _: sender.sample_delay(),
    "peer_acknowledged": lambda sender, _: sender.peer_acknowledged(1),
    "forecast": lambda sender, _: sender.forecast(),
    "glance": lambda sender, _: sender.glance(),
    "relieve": lambda sender, _: sender.relieve("memory"),
    "close_after_flush": lambda sender, _: sender.close_after_flush(),
    "close": lambda sender, _: sender.close(CloseReason.KICKED),
}
FOR_THE_FANOUT = {"log_grew", "ready_for_cohort", "enter_cohort", "leave_cohort", "move_in_cohort", "broken"}


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
