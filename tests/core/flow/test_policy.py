"""Drop policies: tables of the built-in ones, masks, room, and what the conformance check lets through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.core.flow.policy import (
    AudioFirst,
    DropDroppable,
    Headroom,
    KeepAll,
    LivePolicy,
    PicturesFirst,
    Thin,
    Verdict,
    refused_mask,
)
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.testing import check_drop_policy

CONTROL, HEADER, KEY, INTER, DISPOSABLE, AUDIO, DATA = MessageClass
READY, OVERLOADED, SOFT_LIMIT, HARD_LIMIT = SendState
MEDIA = frozenset({KEY, INTER, DISPOSABLE, AUDIO, DATA})
BUILT_IN = [
    KeepAll(),
    LivePolicy(),
    AudioFirst(),
    PicturesFirst(),
    *(DropDroppable(refuse, thin) for refuse, thin in itertools.product(list(SendState)[1:], repeat=2)),
]


def refused(policy, state):
    """Return the classes whose bit is set in the mask."""
    mask = refused_mask(policy, state)
    assert mask < 1 << len(MessageClass)
    return {item for item in MessageClass if mask >> item & 1}


@pytest.mark.parametrize(
    ("state", "classes", "thin"),
    [
        (READY, set(), Thin.NOTHING),
        (OVERLOADED, {DISPOSABLE}, Thin.NOTHING),
        (SOFT_LIMIT, {DISPOSABLE, INTER}, Thin.TO_KEY_FRAME),
        (HARD_LIMIT, MEDIA, Thin.NOTHING),
    ],
)
def test_live_policy_when_it_gets_worse_loses_pictures_before_sound(state, classes, thin):
    assert refused(LivePolicy(), state) == classes
    assert LivePolicy().thin(state) is thin


@pytest.mark.parametrize("state", SendState)
def test_keep_all_when_asked_drops_and_thins_nothing(state):
    assert refused(KeepAll(), state) == set()
    assert KeepAll().thin(state) is Thin.NOTHING


@pytest.mark.parametrize("from_state", list(SendState)[1:])
def test_drop_droppable_when_its_states_are_reached_drops_all_that_may_be(from_state):
    other = HARD_LIMIT if from_state is not HARD_LIMIT else OVERLOADED
    for state in SendState:
        assert refused(DropDroppable(from_state, other), state) == (MEDIA if state >= from_state else set())
        thin = Thin.DROPPABLE if state >= from_state else Thin.NOTHING
        assert DropDroppable(other, from_state).thin(state) is thin


def test_refused_mask_when_policy_drops_everything_spares_control_and_headers():
    asked = []

    class Greedy(KeepAll):
        def decide(self, state, message_class):
            asked.append(message_class)
            return Verdict.DROP

    assert refused(Greedy(), OVERLOADED) == MEDIA
    assert CONTROL not in asked


@given(
    st.builds(Headroom, st.integers(-50, 500), st.integers(-2, 9), st.floats(0, 9), st.integers(0, 96)),
    st.integers(0, 600),
    st.integers(0, 10),
    st.floats(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_room_for_any_queue_fits_when_all_three_axes_do(room, wire_bytes, messages, since):
    fits = room.fits(wire_bytes, messages, since)
    assert fits is not (
        wire_bytes + messages * room.overhead_bytes > room.size_bytes
        or messages > room.messages
        or since < room.oldest_from
    )
    assert Headroom(wire_bytes + messages * room.overhead_bytes, messages, since, room.overhead_bytes).fits(
        wire_bytes, messages, since
    )


@pytest.mark.parametrize("policy", BUILT_IN, ids=lambda policy: type(policy).__name__)
def test_check_when_policy_is_built_in_is_content(policy):
    assert check_drop_policy(policy) is None


class Table(LivePolicy):
    """LivePolicy with some answers replaced."""

    def __init__(self, answers=(), thin=()):
        self.answers, self.thins = dict(answers), dict(thin)

    def decide(self, state, message_class):
        return self.answers.get((state, message_class)) or super().decide(state, message_class)

    def thin(self, state):
        return self.thins.get(state) or super().thin(state)


class Counting(KeepAll):
    """Answers by how often it was asked: keeps the first `most` messages of a state."""

    def __init__(self, most):
        self.most, self.asked = most, 0

    def decide(self, state, message_class):
        self.asked += 1
        drop = state >= OVERLOADED and self.asked > self.most and message_class is not HEADER
        return Verdict.DROP if drop else Verdict.KEEP


class Remembering(KeepAll):
    """Answers by what it was asked last: keeps audio only after data."""

    last = None

    def decide(self, state, message_class):
        previous, self.last = self.last, message_class
        drop = state is HARD_LIMIT and message_class is AUDIO and previous is not DATA
        return Verdict.DROP if drop else Verdict.KEEP


class RestlessThin(KeepAll):
    """Thins every other time it is asked."""

    calls = 0

    def thin(self, state):
        self.calls += 1
        return Thin.DROPPABLE if state is HARD_LIMIT and self.calls % 2 else Thin.NOTHING


class Waiting(LivePolicy):
    """Waits for some classes as it is told."""

    def __init__(self, **waits):
        self.waits = {MessageClass[name]: wait for name, wait in waits.items()}

    def patience(self, message_class):
        wait = self.waits.get(message_class)
        return next(wait) if isinstance(wait, itertools.count) else wait or super().patience(message_class)


BAD = {
    "restless patience": (Waiting(AUDIO=itertools.count(1)), "patience.. must be a pure function"),
    "no time for sound": (Waiting(AUDIO=-1), "patience for AUDIO is -1"),
    "patience that is no number": (Waiting(DATA=float("nan")), "patience for DATA is nan"),
    "waits for what nobody can decode": (Waiting(DISPOSABLE=2.0), "DISPOSABLE is waited for longer than INTER"),
    "gives up the key frame first": (Waiting(KEY=0.5), "INTER is waited for longer than KEY"),
    "counts": (Counting(30), "pure"),
    "remembers": (Remembering(), "pure"),
    "restless thin": (RestlessThin(), "pure"),
    "drops when ready": (Table({(READY, DISPOSABLE): Verdict.DROP}), "READY drops DISPOSABLE"),
    "drops data when ready": (Table({(state, DATA): Verdict.DROP for state in SendState}), "READY drops DATA"),
    "thins when ready": (Table(thin={READY: Thin.DROPPABLE}), "READY must not thin"),
    "drops headers": (Table({(HARD_LIMIT, HEADER): Verdict.DROP}), "HARD_LIMIT drops HEADER"),
    "kinder when worse": (
        Table({(SOFT_LIMIT, AUDIO): Verdict.DROP, (HARD_LIMIT, AUDIO): Verdict.KEEP}),
        "AUDIO is dropped in SOFT_LIMIT but kept in HARD_LIMIT",
    ),
    "inter without key": (
        Table({(SOFT_LIMIT, KEY): Verdict.DROP, (SOFT_LIMIT, INTER): Verdict.KEEP}),
        "SOFT_LIMIT drops KEY but keeps INTER",
    ),
    "disposable without key": (
        Table(
            {
                (SOFT_LIMIT, KEY): Verdict.DROP,
                (OVERLOADED, DISPOSABLE): Verdict.KEEP,
                (SOFT_LIMIT, DISPOSABLE): Verdict.KEEP,
            }
        ),
        "SOFT_LIMIT drops KEY but keeps DISPOSABLE",
    ),
    "disposable without inter": (
        Table({(OVERLOADED, DISPOSABLE): Verdict.KEEP, (SOFT_LIMIT, DISPOSABLE): Verdict.KEEP}),
        "SOFT_LIMIT drops INTER but keeps DISPOSABLE",
    ),
    "answers yes": (Table({(SOFT_LIMIT, AUDIO): "yes"}), "SOFT_LIMIT: the answer 'yes' is not a Verdict"),
    "answers true": (Table({(SOFT_LIMIT, AUDIO): True}), "SOFT_LIMIT: the answer True is not a Verdict"),
    "thins to a verdict": (Table(thin={SOFT_LIMIT: Verdict.DROP}), "is not a Thin"),
}


@pytest.mark.parametrize("name", BAD)
def test_check_when_policy_is_bad_says_what_is_wrong(name):
    policy, words = BAD[name]
    with pytest.raises(AssertionError, match=words):
        check_drop_policy(policy)


def test_check_when_policy_forgets_to_answer_says_so():
    class Forgetful(KeepAll):
        def decide(self, state, message_class):
            return Verdict.KEEP if state is not HARD_LIMIT else None

    with pytest.raises(AssertionError, match="HARD_LIMIT: the answer None is not a Verdict"):
        check_drop_policy(Forgetful())


def test_check_when_a_policy_has_no_patience_says_so():
    class Old:
        def decide(self, state, message_class):
            return Verdict.KEEP

        def thin(self, state):
            return Thin.NOTHING

    with pytest.raises(AssertionError, match="Old has no patience"):
        check_drop_policy(Old())
