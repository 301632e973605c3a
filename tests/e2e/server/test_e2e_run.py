"""A command on publish, as operators would write it: FFmpeg views the stream, and publishes it under a name of its own.

The server is one of a settings file, where viewers and publishers need tokens that the command does not have.
"""

from __future__ import annotations

import time

from e2e_kit import frames_of, wait_until
from live_kit import perform

from flowctl.flv import TAG_VIDEO
from flowctl.live.access.tokens import signed_query
from flowctl.live.settings.sources import read_settings
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl_servers.live import SERVER

SECRET = b"0123456789abcdef0123456789abcdef"
SETTINGS = """
port = 0
control = "off"
publish_auth = "token"
play_auth = "token"
token_secret_file = "secret"

[[run]]
on = "live/*"
command = ["{ffmpeg}", "-loglevel", "warning", "-i", "{{url}}", "-c", "copy", "-f", "flv", "{{publish_1}}"]
publish = ["{{app}}/{{stream}}_copy"]
"""


def signed(kind, name):
    return f"{name}?{signed_query(SECRET, kind, name, int(time.time()) + 600)}"


def rows(server):
    return perform(server, "streams", {})["streams"]


def test_command_when_a_stream_is_published_makes_another_of_it_until_it_ends(tmp_path, ffmpeg_path, clients):
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_bytes(SECRET)
    file = tmp_path / "flowctl.toml"
    file.write_text(SETTINGS.format(ffmpeg=ffmpeg_path))
    with SERVER.build(read_settings(SERVER, file=file)) as server:
        source = SyntheticSource(video_bit_rate=300_000, fps=25, key_interval_s=0.4)
        publisher = clients.publish(server, source, name=signed("publish", "live/bob"))
        stranger = clients.publish(server, source, name=signed("publish", "live/bob_copy"))
        wait_until(lambda: stranger.end is not None, "the refusal of a stranger")
        wait_until(lambda: server.hub.is_published("live/bob_copy"), "what the command publishes")
        player = clients.play(server, name=signed("play", "live/bob_copy"))
        wait_until(lambda: len(frames_of(list(player.messages), TAG_VIDEO)) > 25, "pictures of the command")
        sent = {payload for _, payload in frames_of(list(publisher.messages), TAG_VIDEO)}
        assert {payload for _, payload in frames_of(list(player.messages), TAG_VIDEO)[5:]} <= sent
        shown = {row["stream"]: row["commands"] for row in rows(server)}
        assert [(item["state"], item["publishes"]) for item in shown["live/bob"]] == [("runs", ["live/bob_copy"])]
        assert shown["live/bob_copy"] == []
        clients.group.call_soon(publisher.publisher.finish, "enough")
        wait_until(lambda: not server.hub.is_published("live/bob_copy"), "the end of the command")
