"""A drop policy for a player that has switched audio or video off (receiveAudio, receiveVideo)."""

from __future__ import annotations

from flowctl.flow.policy import DropPolicy, Thin, Verdict
from flowctl.flow.state import MessageClass, SendState

_VIDEO = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})


class Muted:
    """Another policy, with audio or video refused in every state.

    Args:
        policy: what decides about the rest.
        audio: whether audio is wanted.
        video: whether video is wanted.
    """

    def __init__(self, policy: DropPolicy, *, audio: bool, video: bool) -> None:
        self.policy = policy
        self.audio = audio
        self.video = video

    def decide(self, state: SendState, message_class: MessageClass) -> Verdict:
        """Drop what is switched off; leave the rest to the policy."""
        if (message_class is MessageClass.AUDIO and not self.audio) or (message_class in _VIDEO and not self.video):
            return Verdict.DROP
        return self.policy.decide(state, message_class)

    def thin(self, state: SendState) -> Thin:
        """Leave it to the policy."""
        return self.policy.thin(state)

    def patience(self, message_class: MessageClass) -> float:
        """Leave it to the policy."""
        return self.policy.patience(message_class)
