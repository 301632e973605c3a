"""Access with real clients: FFmpeg is refused in words, or let in, and HTTP hooks hear of it all."""

from __future__ import annotations

import time

import pytest
from e2e_kit import NAME, PATIENCE_S, wait_until
from hook_kit import HookServer, http
from loopback_kit import LOOPBACK

from flowctl.live.access.keys import KeyFile, StoredKey, hash_key
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer

KEY = "a-key-that-nobody-guesses"
_, _SALT, _DIGEST = hash_key(KEY).split(":")
SECRET = b"a secret of sixteen or more bytes"


@pytest.fixture
def hook():
    server = HookServer()
    yield server
    server.close()


@pytest.fixture
def server(hook):
    names = ("on_connect", "on_publish", "on_play", "on_end")
    access = StreamAccess(
        publish_auth=(Proof.KEY,),
        play_auth=(Proof.TOKEN,),
        keys=KeyFile("keys", (StoredKey(bytes.fromhex(_SALT), bytes.fromhex(_DIGEST)),)),
        token_secrets=SecretFile("secrets", (SECRET,)),
        **{name: (hook.url(),) for name in names},
    )
    failures = []
    with LiveServer(
        LiveConfig(host=LOOPBACK, access=access, on_error=lambda *failure: failures.append(failure))
    ) as server:
        yield server
    assert failures == []


def test_ffmpeg_without_what_is_asked_for_is_refused_in_words(server, hook, programs, sample, tmp_path):
    refused = programs.publish(server, sample("plain"), name=f"{NAME}?key=guessed-by-somebody")
    assert refused.wait() != 0
    assert "The stream key is wrong." in refused.log
    old = signed_query(SECRET, "play", NAME, int(time.time()) - 60)
    for name, said in ((NAME, "A signed token is needed."), (f"{NAME}?{old}", "The token has expired.")):
        viewer = programs.play(server, tmp_path / "nothing.flv", name=name)
        assert viewer.wait() != 0
        assert said in viewer.log
    assert set(hook.actions()) <= {"on_connect", "on_close"}


def test_ffmpeg_with_what_is_asked_for_is_let_in_and_the_web_server_hears_of_all(server, hook, programs, sample):
    assert programs.publish(server, sample("plain"), rate=8.0, name=f"{NAME}?key={KEY}").wait() == 0
    wait_until(lambda: len(hook.bodies) == 4, "the web server is told", PATIENCE_S)
    assert hook.actions() == ["on_connect", "on_publish", "on_unpublish", "on_close"]
    assert len({body["client_id"] for body in hook.bodies}) == 1
    assert hook.bodies[1]["param"] == f"?key={KEY}"
    assert hook.bodies[3]["recv_bytes"] > 10_000


def test_ffmpeg_is_refused_when_the_web_server_says_no(server, hook, programs, sample):
    hook.answer = lambda _: http("1")
    refused = programs.publish(server, sample("plain"), name=f"{NAME}?key={KEY}")
    assert refused.wait() != 0
    assert "hook does not allow" in refused.log
    assert hook.actions() == ["on_connect"]
