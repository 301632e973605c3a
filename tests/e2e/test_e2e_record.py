"""Recording end to end: FFmpeg publishes, ``flowctl record`` writes, and what is in the files is what was published."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from e2e_kit import address_of, frames_of, read_flv, wait_for_viewers, wait_until
from process_kit import small_disk

from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.wire.client.source import FlvFile

COMMAND = [sys.executable, "-c", "import sys; from flowctl.cli import main; sys.exit(main())"]


@contextlib.contextmanager
def recording(server, folder, *arguments, names=("live/stream",)):
    """``flowctl record`` that plays already; killed at the end if it still runs."""
    urls = [address_of(server, name) for name in names]
    process = subprocess.Popen(
        [*COMMAND, "record", *urls, "--out", str(folder), "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    try:
        for name in names:
            wait_for_viewers(server, 1, name)
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(process, number=None):
    if number is not None:
        process.send_signal(number)
    output, log = process.communicate(timeout=20)
    *files, summary = [json.loads(line) for line in output.splitlines()]
    return process.returncode, files, summary, log


@pytest.mark.parametrize("recipe", ["b_frames", "hevc"])
def test_record_when_ffmpeg_publishes_writes_every_frame(tmp_path, live, programs, sample, recipe):
    server = live()
    path = sample(recipe)
    with recording(server, tmp_path, "--once", "--name", "{stream}") as process:
        programs.publish(server, path, rate=16.0)
        status, files, summary, log = finished(process)
    assert status == 0, log
    assert [item["file"] for item in files] == [str(tmp_path / "stream.flv")]
    assert sorted(tmp_path.glob("*.flv*")) == [tmp_path / "stream.flv"]
    assert summary["streams"][0]["lost_messages"] == 0
    written, published = read_flv(tmp_path / "stream.flv"), read_flv(path)
    for track in (TAG_VIDEO, TAG_AUDIO):
        assert frames_of(written, track) == frames_of(published, track)


def test_record_when_told_to_end_finishes_its_files(tmp_path, live, clients, sample):
    server = live()
    names = ("live/one", "live/two")
    with recording(server, tmp_path, names=names) as process:
        for name in names:
            clients.publish(server, FlvFile(sample("plain")), name=name, loop=True)
        wait_until(lambda: len(list(tmp_path.glob("*.flv.part"))) == 2, "two files")
        wait_until(lambda: all(p.stat().st_size > 50_000 for p in tmp_path.glob("*.part")), "something in them")
        status, files, _, log = finished(process, signal.SIGTERM)
    assert status == 0, log
    assert len(files) == 2
    assert all(frames_of(read_flv(item["file"]), TAG_VIDEO) for item in files)
    assert list(tmp_path.glob("*.part")) == []


def test_record_when_killed_leaves_a_file_that_the_next_start_finishes(tmp_path, live, clients, sample):
    server = live()
    clients.publish(server, FlvFile(sample("plain")), loop=True)
    with recording(server, tmp_path, "--name", "first") as process:
        part = tmp_path / "first.flv.part"
        wait_until(lambda: part.exists() and part.stat().st_size > 50_000, "something in the file")
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert frames_of(read_flv(part), TAG_VIDEO)
    with recording(server, tmp_path, "--name", "second") as process:
        wait_until((tmp_path / "first.flv").exists, "the file of the first run")
        assert finished(process, signal.SIGINT)[0] == 0
    assert frames_of(read_flv(tmp_path / "first.flv"), TAG_VIDEO)
    assert not part.exists()


def test_record_when_the_disk_is_full_disturbs_nobody_and_goes_on(tmp_path, live, clients, sample):
    with small_disk(tmp_path / "disk") as folder:
        server = live()
        player = clients.play(server)
        with recording(server, folder, "--keep-free", "0", "--name", "a") as process:
            publisher = clients.publish(server, FlvFile(sample("plain")), loop=True, pace=8.0)
            wait_until((folder / "a.flv").exists, "the file that filled the disk")
            assert frames_of(read_flv(folder / "a.flv"), TAG_VIDEO)
            (folder / "a.flv").unlink()
            wait_until(lambda: len(list(folder.iterdir())) > 0, "another file")
            status, files, summary, log = finished(process, signal.SIGTERM)
        assert status == 1
        assert len(files) >= 2
        assert "make room" in log
        assert log.index("recording is interrupted") < log.index("recording goes on")
        assert summary["streams"][0]["lost_messages"] > 0
        got = frames_of(list(player.messages), TAG_VIDEO)
        assert got == frames_of(publisher.messages, TAG_VIDEO)[: len(got)]
        assert publisher.end is None


@pytest.mark.parametrize("options", [("--format", "ts"), ("--format", "fmp4"), ("--part", "0.2s")], ids="/".join)
def test_hls_when_ffmpeg_reads_it_decodes_every_picture(tmp_path, live, programs, sample, ffmpeg_path, options):
    server = live()
    path = sample("b_frames")
    command = [*COMMAND, "hls", address_of(server), "--out", str(tmp_path), *options, "--segment-time", "1s"]
    with subprocess.Popen([*command, "--once", "--segments", "8"], stderr=subprocess.PIPE, text=True) as process:
        wait_for_viewers(server, 1)
        programs.publish(server, path, rate=16.0)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0, log
    playlist = tmp_path / "live" / "stream.m3u8"
    assert playlist.read_text().count("#EXTINF") == 4
    assert pictures_by(ffmpeg_path, playlist) == pictures_by(ffmpeg_path, path)


def pictures_by(ffmpeg, source):
    """Return the checksum of each picture that FFmpeg decodes."""
    command = [str(ffmpeg), "-v", "error", "-i", str(source), "-map", "0:v", "-fps_mode", "passthrough"]
    done = subprocess.run([*command, "-f", "framemd5", "-"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stderr == ""
    return [line.split(",")[-1].strip() for line in done.stdout.splitlines() if not line.startswith("#")]
