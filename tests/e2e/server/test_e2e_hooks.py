"""Hooks with real clients: FFmpeg is told the words of a refusal, and what it publishes is recorded whole."""

from __future__ import annotations

import asyncio

import pytest
from e2e_kit import MEDIA, NAME, PATIENCE_S, read_flv, wait_until
from e2e_programs import watch, write_flv

from flowctl.live.config import LiveConfig
from flowctl.live.hooks import LiveHooks
from flowctl.live.server import LiveServer

WORDS = "The stream key is wrong."


class Hooks(LiveHooks):
    """Lets in who has the key, after a while; records."""

    def __init__(self):
        self.frames, self.news = [], []

    async def may_publish(self, request):
        await asyncio.sleep(0.2)
        return None if request.query.get("key") == "right" else WORDS

    def may_play(self, request):
        return "Not before tomorrow."

    def published(self, request):
        self.news.append(request.stream)

    def ended(self, request, why):
        self.news.append(why)

    def frame(self, frame):
        self.frames.append((frame.type_id, frame.timestamp_ms, frame.payload))


@pytest.fixture
def server():
    failures = []
    hooks = Hooks()
    with LiveServer(LiveConfig(on_error=lambda *failure: failures.append(failure)), hooks) as server:
        server.told = hooks
        yield server
    assert failures == []


def test_ffmpeg_is_told_why_it_may_not_publish_or_play(server, programs, sample, tmp_path):
    refused = programs.publish(server, sample("plain"), name=f"{NAME}?key=wrong")
    assert refused.wait() != 0
    assert WORDS in refused.log
    viewer = programs.play(server, tmp_path / "nothing.flv")
    assert viewer.wait() != 0
    assert "Not before tomorrow." in viewer.log
    assert (server.told.news, server.told.frames) == ([], [])


def test_what_ffmpeg_publishes_is_recorded_whole(server, programs, sample, tmp_path):
    source = sample("plain")
    assert programs.publish(server, source, rate=8.0, name=f"{NAME}?key=right").wait() == 0
    wait_until(lambda: len(server.told.news) == 2, "the end is told", PATIENCE_S)
    assert server.told.news[0] == NAME
    recorded = [frame for frame in server.told.frames if frame[0] in MEDIA]
    sent = [tag for tag in read_flv(source) if tag[0] in MEDIA]
    assert [frame[2] for frame in recorded] == [tag[2] for tag in sent][: len(recorded)]
    assert len(recorded) >= len(sent) - 2  # FFmpeg may leave out what marks the end of a track
    copy = write_flv(tmp_path / "copy.flv", server.told.frames)
    assert watch(copy).pictures == watch(source).pictures
