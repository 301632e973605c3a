"""The policy of a player that has switched a track off."""

from __future__ import annotations

import pytest

from flowctl.core.flow.policy import KeepAll, LivePolicy, Thin, Verdict
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.live.playing import Muted

VIDEO = {MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE}
CLASSES = [item for item in MessageClass if item is not MessageClass.CONTROL]


@pytest.mark.parametrize("state", SendState)
@pytest.mark.parametrize("audio", [True, False])
@pytest.mark.parametrize("video", [True, False])
def test_decide_when_muted_drops_the_track_and_leaves_the_rest_to_the_policy(state, audio, video):
    for inner in (KeepAll(), LivePolicy()):
        muted = Muted(inner, audio=audio, video=video)
        for item in CLASSES:
            off = (item in VIDEO and not video) or (item is MessageClass.AUDIO and not audio)
            expected = Verdict.DROP if off else inner.decide(state, item)
            assert muted.decide(state, item) is expected


def test_thin_when_muted_is_the_inner_policys():
    muted = Muted(LivePolicy(), audio=False, video=True)
    assert [muted.thin(state) for state in SendState] == [
        Thin.NOTHING,
        Thin.NOTHING,
        Thin.TO_KEY_FRAME,
        Thin.NOTHING,
    ]
