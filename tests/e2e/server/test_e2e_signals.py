"""Signals about viewers over real sockets: FFmpeg publishes as before, whether it asks for them or not."""

from __future__ import annotations

import pytest
from e2e_kit import NAME, wait_for_end, wait_for_viewers, wait_until

from flowctl.live import publishing
from flowctl.live.oversight.signals import message_values


@pytest.mark.parametrize(("query", "least"), [("", 0), ("?viewer_states=2", 2)])
def test_ffmpeg_when_it_publishes_is_unharmed_by_messages_about_viewers(
    live, clients, programs, sample, monkeypatch, query, least
):
    told = []
    monkeypatch.setattr(publishing, "message_values", lambda shares: told.append(shares) or message_values(shares))
    server = live()
    ours = clients.play(server)
    brief = clients.play(server, duration_s=0.5)
    wait_for_viewers(server, 2)
    published = programs.publish(server, sample("plain"), rate=1.0, name=NAME + query)
    wait_for_end(brief)
    if least:
        wait_until(lambda: told, "a message to the publisher")
        clients.group.call_soon(ours.player.finish, "seen enough")
        wait_until(lambda: len(told) >= least, "a message that nobody views any more")
    assert (published.wait(), published.log) == (0, "")
    wait_for_end(ours)
    assert ours.player.statistics().missing_video == 0
    assert bool(told) is bool(least)
    assert server.hub.oversight.signals._subscriptions == ()  # it ended with the publication
