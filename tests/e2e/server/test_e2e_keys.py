"""Keys that commands make and take away are in force at the next request, in every process of a server."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time

import jwt
import pytest
from cli_kit import served
from cryptography.hazmat.primitives.asymmetric import ec
from e2e_kit import open_live_server
from hook_kit import HookServer
from hook_kit import http as answer
from jwt.algorithms import ECAlgorithm
from loopback_kit import loopback
from typer.testing import CliRunner

from flowctl.cli.app import app
from flowctl.live.access.keys import hash_key, read_keys
from flowctl.live.access.request import LiveRequest, Question
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.settings.levels import Level
from flowctl.wire.rtmp.url import parse_url

KEY = "a-key-that-nobody-guesses"


def command(*args, text=None):
    result = CliRunner().invoke(app, ["key", *map(str, args)], input=text)
    assert result.exit_code == 0
    return result.stdout.strip()


def let_in(server, key, stream="live/room"):
    """Return whether a server lets a publisher in, however it comes to the answer."""
    url = parse_url(f"rtmp://h/{stream}?key={key}")
    request = LiveRequest(kind="publish", connection=1, peer=("192.0.2.1", 1), url=url)
    found, done = [], threading.Event()
    answer = server.hub.gate.ask(request, lambda _, refusal: (found.append(refusal), done.set()))
    if isinstance(answer, Question):
        assert done.wait(20)
        answer = found[0]
    return answer is None


def test_keys_when_a_command_makes_or_revokes_them_are_in_force_at_the_next_request(tmp_path):
    """Not within a second, but at once: the file is made after the start, and nothing but the request has it read."""
    path, other = tmp_path / "keys", tmp_path / "others"
    level = Level(application="vip", values={"access.keys": read_keys(other)})
    access = StreamAccess(publish_auth=(Proof.KEY,), keys=read_keys(path))
    with open_live_server(access=access, levels=(level,)) as server:
        assert {name: file.there for name, file in server.reload.status.items()} == {"keys": False, "keys_1": False}
        server.reload._poll_s = 3600.0
        server.reload.run_job(lambda: None)  # the look that was due
        assert not let_in(server, KEY)
        keys = []
        for _ in range(5):
            keys.append(command("make", path, "--for", "publish"))
            assert all(let_in(server, key) for key in keys)
        for key in keys:
            command("revoke", path, text=f"{key}\n")
            assert not let_in(server, key)
        vip = command("make", other)
        assert let_in(server, vip, "vip/room")
        assert not let_in(server, vip)
        path.write_text("nonsense\n")
        assert let_in(server, vip, "vip/room")
        path.write_text(f"{hash_key(KEY)} publish live/*\n")
        assert let_in(server, KEY)
        changes = [change.what for change in server.changes.since(0)[0]]
    assert (changes.count("keys file"), changes.count("keys_1 file")) == (11, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_keys_when_there_are_workers_are_in_force_in_each_of_them(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    path = tmp_path / "keys"
    proof = ("--set", "play_auth=key", "--set", f"keys_file={path}", "--set", "players_may_wait=no")
    with served("live", "--workers", "2", "--http", loopback(), "--control", "off", *proof) as server:
        assert statuses(server, f"key={KEY}") == {401}
        key = command("make", path)
        assert statuses(server, f"key={key}") == {404}  # allowed, and there is no such stream
        command("revoke", path, text=f"{key}\n")
        assert statuses(server, f"key={key}") == {401}
    assert server.log.count("keys changed") >= 2


def statuses(server, query):
    """Return the answers to requests of a stream: of two processes that share a port, each gets some."""
    host, _, port = server.ready["http"][0].rpartition(":")
    found = set()
    for _ in range(10):
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=20)
        connection.request("HEAD", f"/live/room.flv?{query}")
        found.add(connection.getresponse().status)
        connection.close()
    return found


def test_web_tokens_when_their_keys_are_fetched_are_checked_with_audience_and_issuer(tmp_path):
    private = ec.generate_private_key(ec.SECP256R1())
    published = json.loads(ECAlgorithm.to_jwk(private.public_key())) | {"kid": "one", "use": "sig"}
    issuer = HookServer(lambda _: answer(json.dumps({"keys": [published]})))
    file = tmp_path / "flowctl.toml"
    file.write_text(
        f"""play_auth = "jwt"\njwt_key = "ES256:{issuer.url("/jwks.json")}"\njwt_audience = ["other", "live.example"]
jwt_issuer = "https://id.example/"\nplayers_may_wait = false\nhttp = "{loopback()}"\n"""
    )

    def token(**changed):
        claims = {"exp": time.time() + 60, "actions": "play", "streams": "live/*", "aud": "live.example"}
        claims |= {"iss": "https://id.example/"} | changed
        return jwt.encode(claims, private, "ES256", headers={"kid": "one"})

    with served("live", "--control", "off", "--config", str(file)) as server:
        assert statuses(server, f"jwt={token()}") == {404}
        assert statuses(server, f"jwt={token(aud='another.example')}") == {401}
        assert statuses(server, f"jwt={token(iss='https://other.example/')}") == {401}
    assert issuer.paths == ["/jwks.json"]
    issuer.close()
