"""What the commands refuse before anything is written."""

from __future__ import annotations

import os
import sys

import pytest

from flowctl.cli.remux import hls, record
from flowctl.errors import ConfigError
from flowctl.remux.files import lock_file


@pytest.mark.parametrize("command", [hls, record])
def test_command_when_pyav_is_not_installed_says_how_to_get_it(tmp_path, monkeypatch, command):
    """Whoever has installed flowctl without the extra is told of it, and nothing is made."""
    monkeypatch.setitem(sys.modules, "av", None)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="PyAV is not installed") as caught:
        command(["rtmp://localhost/live/room"], out=out, form="mp4" if command is record else "auto")
    assert "[media]" in caught.value.hint
    assert not out.exists()


@pytest.mark.parametrize(
    "urls",
    [
        ["rtmp://one.invalid/live/room", "rtmp://other.invalid/live/room"],
        ["rtmp://one.invalid/live/live", "rtmp://other.invalid:1936/live/live"],
    ],
)
def test_hls_when_two_streams_would_have_one_playlist_is_refused(tmp_path, urls):
    """Each would remove and replace the files of the other."""
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="two streams would be written to"):
        hls(urls, out=out)
    assert not out.exists()


def test_hls_when_another_process_writes_the_stream_touches_nothing(tmp_path):
    """The files that are there stay, and what to do is said."""
    number = lock_file(tmp_path / "live" / ".room.lock")
    kept = tmp_path / "live" / "room-7.ts"
    kept.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is being written by another process") as caught:
        hls(["rtmp://127.0.0.1:1/live/room"], out=tmp_path, duration="100ms")
    assert "--out" in caught.value.hint
    assert kept.exists()
    os.close(number)
