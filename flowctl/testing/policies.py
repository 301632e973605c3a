"""Conformance suite for drop policies."""

from __future__ import annotations

from flowctl.flow import MessageClass, SendState
from flowctl.policy import DropPolicy, Thin, Verdict


def check_drop_policy(policy: DropPolicy) -> None:
    """Check what every drop policy must hold to.

    - Decisions are pure: the same arguments give the same answer, whatever was asked in between.
    - READY keeps everything: a peer that keeps up never loses a message.
    - HEADER is never refused: without it nothing that follows can be decoded.
    - A worse state never keeps what a better one drops.
    - Where key frames are refused, so are the frames that need them.
    - READY thins nothing.

    Raises:
        AssertionError: one of them does not hold; says which, with state and class.
    """
    first = _decisions(policy)
    second = _decisions(policy)
    _check(first == second, "decide() and thin() must be pure functions of their arguments")
    classes = [item for item in MessageClass if item is not MessageClass.CONTROL]
    for item in classes:
        name = item.name
        _check(
            policy.decide(SendState.READY, item) is Verdict.KEEP,
            f"READY drops {name}: a peer that keeps up must not lose anything",
        )
        kept = [policy.decide(state, item) is Verdict.KEEP for state in SendState]
        for better, worse in zip(SendState, list(SendState)[1:], strict=False):
            _check(kept[better] or not kept[worse], f"{name} is dropped in {better.name} but kept in {worse.name}")
    for state in SendState:
        _check(
            policy.decide(state, MessageClass.HEADER) is Verdict.KEEP,
            f"{state.name} drops HEADER: nothing after it could be decoded",
        )
        if policy.decide(state, MessageClass.KEY) is Verdict.DROP:
            for item in (MessageClass.INTER, MessageClass.DISPOSABLE):
                _check(
                    policy.decide(state, item) is Verdict.DROP,
                    f"{state.name} drops KEY but keeps {item.name}, which cannot be decoded without it",
                )
    _check(policy.thin(SendState.READY) is Thin.NOTHING, "READY must not thin the queue")


def _decisions(policy: DropPolicy) -> list[object]:
    answers: list[object] = [policy.thin(state) for state in SendState]
    for state in reversed(SendState):
        answers += [policy.decide(state, item) for item in MessageClass if item is not MessageClass.CONTROL]
    return answers


def _check(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition
    if not holds:
        raise AssertionError(message)
