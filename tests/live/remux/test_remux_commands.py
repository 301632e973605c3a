"""What the commands refuse before anything is written, and what they say of a server that is not there."""

from __future__ import annotations

import io
import os
import socket
import sys
from types import SimpleNamespace

import pytest
from remux_kit import source, tags_of

from flowctl.cli.remux import hls, record
from flowctl.errors import ConfigError, FlowctlError
from flowctl.live.cluster.follow import FollowState
from flowctl.live.remux.files import lock_file


@pytest.mark.parametrize("command", [hls, record])
def test_command_when_pyav_is_not_installed_says_how_to_get_it(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "av", None)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="the extra 'media': av is not installed") as caught:
        command(["rtmp://localhost/live/room"], out=out, form="mp4" if command is record else "auto")
    assert "[media]" in caught.value.hint
    assert not out.exists()


@pytest.mark.parametrize(
    "urls",
    [
        ["rtmp://one.invalid/live/room", "rtmp://other.invalid/live/room"],
        ["rtmp://one.invalid/live/live", "rtmp://other.invalid:1936/live/live"],
        ["rtmp://one.invalid/live/my%20show", "rtmp://one.invalid/live/mp4:my show.mp4"],
    ],
)
def test_hls_when_two_streams_would_have_one_playlist_is_refused(tmp_path, urls):
    """Each would remove and replace the files of the other."""
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="two streams would be written to"):
        hls(urls, out=out)
    assert not out.exists()


def test_hls_when_another_process_writes_the_stream_touches_nothing(tmp_path):
    number = lock_file(tmp_path / "live" / ".room.lock")
    kept = tmp_path / "live" / "room-7.ts"
    kept.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is being written by another process") as caught:
        hls(["rtmp://127.0.0.1:1/live/room"], out=tmp_path, duration="100ms")
    assert "--out" in caught.value.hint
    assert kept.exists()
    os.close(number)


@pytest.mark.parametrize("scheme", ["rtmp", "rtmps"])
@pytest.mark.parametrize("command", [hls, record])
def test_command_when_the_server_has_ended_says_why_once_and_tries_again(tmp_path, capsys, command, scheme):
    """It looked as if it hung: a refused connection was tried again and again without a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    if command is hls:
        pytest.importorskip("av")
    url = f"{scheme}://127.0.0.1:{port}/live/room"
    command([url], out=tmp_path, once=True, duration="1200ms")
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "nothing to record, trying again" in line]
    assert "warning" in told
    assert url in told
    assert "Connection refused" in told


class Feed:
    """A stream that is there at once, in the place of a follower."""

    def __init__(self, sink):
        self._sink = sink

    def start(self):
        self._sink.begin(0.0)
        for tag in source(6):
            self._sink.take(tag.type_id, tag.timestamp, tag.payload, 0.0)

    def statistics(self):
        return SimpleNamespace(state=FollowState.RUNNING, why="", connections=1)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(BrokenPipeError(32, "Broken pipe"), BrokenPipeError), (OSError(28, "No space"), FlowctlError)],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_record_when_nobody_reads_the_names_ends_quietly_with_whole_files(
    tmp_path, monkeypatch, capsys, error, raised, as_json
):
    """``flowctl record ... | head -1``: the names of files are written by the recorders' threads."""

    class Gone(io.StringIO):
        def flush(self):
            raise error

    monkeypatch.setattr("flowctl.live.remux.intake.pull", lambda url, sink, group: Feed(sink))
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(raised):
        record(["rtmp://127.0.0.1/live/room"], out=tmp_path, max_time="1s", duration="5s", as_json=as_json)
    told = capsys.readouterr().err
    assert "writing failed" not in told
    assert "Traceback" not in told
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1
    assert {path.suffix for path in files} == {".flv"}
    assert all(tags_of(path) for path in files)
