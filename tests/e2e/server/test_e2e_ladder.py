"""A ladder with FFmpeg: a viewer whose line is too short gets a smaller size, and every picture of it.

Nothing is asserted of when: the test waits for what is to come, and looks at what there was until then.
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from e2e_kit import Clients, connection_to, frames_of, wait_until
from e2e_programs import write_flv
from live_kit import perform

from flowctl.flv import TAG_VIDEO
from flowctl.live.config import LiveConfig
from flowctl.live.settings.ladder import parse_ladder
from flowctl.wire.client.player import HEALTHY, PlayProfile
from flowctl.wire.client.source import FlvFile
from flowctl_servers.live import SERVER

SLOW = PlayProfile(rate=300_000)
"""Three fifths of what the publication takes, and twice what the step does."""
PATIENCE_S = 100.0
FRAME_MS = 34
"""Time of a picture at 30 a second, rounded up."""


def row_of(server):
    rows = perform(server, "streams", {})["streams"]
    return next((row for row in rows if row["stream"] == "live/bob"), None)


def joined_for(messages, pictures):
    """Return whether the last `pictures` that a player got came without a gap."""
    times = [timestamp for timestamp, _ in frames_of(list(messages), TAG_VIDEO)][-pictures:]
    return len(times) == pictures and all(0 < later - time <= FRAME_MS for time, later in pairwise(times))


@pytest.mark.timeout(150)
def test_step_when_a_line_is_too_short_is_made_for_its_viewer_who_gets_every_picture(
    tmp_path, monkeypatch, ffmpeg_path, sample, programs
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ffmpeg").symlink_to(ffmpeg_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    config = LiveConfig(port=0, control="off", ladder=parse_ladder("live/*=120:60k", "ladder"))
    with SERVER.build(config) as server, Clients() as clients:
        clients.publish(server, Again(sample("b_frames")), name="live/bob")
        good = clients.play(server, HEALTHY, name="live/bob")
        wait_until(lambda: joined_for(good.messages, 90), "three seconds of pictures", PATIENCE_S)
        slow = clients.play(server, SLOW, name="live/bob")
        connection = connection_to(server, slow)
        wait_until(lambda: connection.renditions and connection.renditions.name == "120p", "the step", PATIENCE_S)
        wait_until(lambda: joined_for(slow.messages, 90), "three seconds of all pictures of it", PATIENCE_S)
        row = row_of(server)
        assert [(item["rendition"], item["size"]) for item in row["renditions"]] == [
            ("source", "320x180"),
            ("120p", "214x120"),
        ]
        assert [item["state"] for item in row["commands"]] == ["runs"]
        got = list(slow.messages)
    file = tmp_path / "got.flv"
    write_flv(file, got)
    status, said = programs.decode(file)
    assert status == 0, said


class Again(FlvFile):
    """A file that begins again at its end, on one timeline."""

    def __iter__(self):
        shift = last = 0
        while True:
            for tag in super().__iter__():
                last = tag.timestamp + shift
                yield tag._replace(timestamp=last)
            shift = last + FRAME_MS
