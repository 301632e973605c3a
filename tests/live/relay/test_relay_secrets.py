"""What targets of pushes say is shown without the keys that they were given."""

from __future__ import annotations

import pytest

from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.relay.pushing import PushSession
from flowctl.testing import ManualClock
from flowctl.wire.rtmp.url import parse_url


@pytest.mark.parametrize(
    "words",
    [
        "bad key NAME-1",
        "no publish?user=VALUE-1&token=VALUE-2",
        "token VALUE-2 has expired",
        "unknown user VALUE-1",
        "no such application app/INSTANCE",
        "wrong password PASS-1",
    ],
)
def test_words_of_a_target_when_they_repeat_a_key_are_masked(words):
    url = parse_url("rtmp://ann:PASS-1@host/app/INSTANCE/NAME-1?user=VALUE-1&token=VALUE-2")
    assert "VALUE" not in url.masked(words)
    hub = Hub(LiveConfig(), ManualClock(), lambda *_: None)
    session = PushSession(hub, "live/room", url, agent="a", on_end=lambda session, why: None)
    shown = session.masked(words)
    assert "***" in shown
    assert not any(secret in shown for secret in ("VALUE", "NAME", "INSTANCE", "PASS"))
