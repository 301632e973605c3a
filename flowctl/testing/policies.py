"""Conformance suite for drop policies."""

from __future__ import annotations

import itertools
from typing import Final

from flowctl.core.flow.policy import DropPolicy, Thin, Verdict
from flowctl.core.flow.state import MessageClass, SendState

_CLASSES: Final[list[MessageClass]] = [item for item in MessageClass if item is not MessageClass.CONTROL]
_NEEDS: Final = (
    (MessageClass.KEY, MessageClass.INTER),
    (MessageClass.KEY, MessageClass.DISPOSABLE),
    (MessageClass.INTER, MessageClass.DISPOSABLE),
)


def check_drop_policy(policy: DropPolicy) -> None:
    """Check what every drop policy must hold to.

    - Decisions are pure: the same arguments give the same answer, whatever was asked in between.
    - Answers are a `Verdict` and a `Thin`.
    - READY keeps everything and thins nothing: a peer that keeps up never loses a message.
    - HEADER is never refused: without it nothing that follows can be decoded.
    - A worse state never keeps what a better one drops.
    - Patience is pure, a number above 0 or inf; frames are not waited for longer than those that they need.
    - Where frames are refused, so are the frames that need them: INTER and DISPOSABLE need KEY, DISPOSABLE needs INTER.

    Raises:
        AssertionError: one of them does not hold; says which, with state and class.
    """
    decisions = _decisions(policy, list(SendState), _CLASSES)
    for states, classes in (
        (list(reversed(SendState)), _CLASSES),
        (list(SendState), list(reversed(_CLASSES))),
        ([SendState.HARD_LIMIT, *SendState], [MessageClass.AUDIO, *_CLASSES]),
    ):
        again = _decisions(policy, states, classes)
        _check(decisions == again, "decide() and thin() must be pure functions of their arguments")
    for (state, item), answer in decisions.items():
        kind = Verdict if item is not None else Thin
        _check(isinstance(answer, kind), f"{state.name}: the answer {answer!r} is not a {kind.__name__}")
    for item in _CLASSES:
        _check(
            decisions[SendState.READY, item] is Verdict.KEEP,
            f"READY drops {item.name}: a peer that keeps up must not lose anything",
        )
        kept = [decisions[state, item] is Verdict.KEEP for state in SendState]
        for better, worse in itertools.pairwise(SendState):
            _check(kept[better] or not kept[worse], f"{item.name} is dropped in {better.name} but kept in {worse.name}")
    for state in SendState:
        _check(
            decisions[state, MessageClass.HEADER] is Verdict.KEEP,
            f"{state.name} drops HEADER: nothing after it could be decoded",
        )
        for needed, needing in _NEEDS:
            _check(
                decisions[state, needed] is Verdict.KEEP or decisions[state, needing] is Verdict.DROP,
                f"{state.name} drops {needed.name} but keeps {needing.name}, which cannot be decoded without it",
            )
    _check(decisions[SendState.READY, None] is Thin.NOTHING, "READY must not thin the queue")
    _check_patience(policy)


def _check_patience(policy: DropPolicy) -> None:
    _check(callable(getattr(policy, "patience", None)), f"{type(policy).__name__} has no patience(message_class)")
    waits = {item: policy.patience(item) for item in _CLASSES}
    again = {item: policy.patience(item) for item in reversed(_CLASSES)}
    _check(waits == again, "patience() must be a pure function of its argument")
    for item in _CLASSES:
        wait: object = policy.patience(item)
        number = isinstance(wait, int | float) and not isinstance(wait, bool) and wait > 0
        _check(number, f"the patience for {item.name} is {wait!r}, it must be above 0")
    for needed, needing in _NEEDS:
        kept = policy.patience(needed) >= policy.patience(needing)
        _check(kept, f"{needing.name} is waited for longer than {needed.name}, which it needs")


def _decisions(
    policy: DropPolicy, states: list[SendState], classes: list[MessageClass]
) -> dict[tuple[SendState, MessageClass | None], Verdict | Thin]:
    answers: dict[tuple[SendState, MessageClass | None], Verdict | Thin] = {}
    for state in states:
        answers[state, None] = policy.thin(state)
        for item in classes:
            answers[state, item] = policy.decide(state, item)
    return answers


def _check(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition
    if not holds:
        raise AssertionError(message)
