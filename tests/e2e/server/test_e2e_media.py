"""Recording and HLS from the settings of a server: its own process writes what clients publish, whole and unasked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import urllib.error
import urllib.request
from functools import partial

import av
import pytest
from cli_kit import served
from e2e_kit import address_of, frames_of, put, read_flv, wait_until
from loopback_kit import LOOPBACK, loopback

from flowctl.control.client import call_operation
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.access.keys import hash_key, make_key
from flowctl.wire.client.source import FlvFile
from flowctl.wire.media.synthetic import SyntheticSource

PATIENCE_S = 40.0
FOLDERS = 'record_folder = "recordings"\nhls_folder = "hls"\n'
"""Beside the file; the defaults are in the current folder of the server."""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


@contextlib.contextmanager
def writing(folder, text, *arguments):
    """A server with these settings; yields it, with its address as `address_of` wants it."""
    path = folder / "flowctl.toml"
    path.write_text(FOLDERS + text, "utf-8")
    with served("live", "--config", str(path), *arguments) as server:
        server.address = (LOOPBACK, server.ready["port"])
        yield server


def media_of(server):
    return call_operation(server.ready["control"][0], "stats", {})["media"]


def ended_totals(server):
    """Return what was written in all, once nothing of any stream is left to write."""
    media = media_of(server)
    return media["totals"] if {row["state"] for row in media["streams"]} == {"waiting"} else None


def until(true, what):
    return wait_until(true, what, PATIENCE_S)


def recordings(folder, suffix=".flv"):
    return sorted((folder / "recordings").rglob(f"*{suffix}"))


def fetched(server, path):
    try:
        with urllib.request.urlopen(f"http://{server.ready['http'][0]}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def pictures(path):
    with av.open(path if isinstance(path, io.BytesIO) else str(path)) as file:
        return sum(1 for packet in file.demux(video=0) if packet.size)


def test_media_when_settings_name_streams_is_written_as_it_came_for_nobody_but_who_may(
    tmp_path, live, clients, programs, sample
):
    """FFmpeg publishes; the server records, writes HLS and pushes on; to play, recordings too, takes a key."""
    key = make_key()
    put(tmp_path / "keys", hash_key(key) + "\n")
    (tmp_path / "keys").chmod(0o600)
    target = live()
    pushed = f"rtmp://{loopback(target.address[1])}/{{app}}/{{stream}}"
    text = (
        f'record = "*"\nrecord_play = "*"\nhls = "live/*"\nrelay_push = "live/*={pushed}"\n'
        'play_auth = "key"\nkeys_file = "keys"\n'
        '[application.odd]\nrecord_format = "mp4"\n'
    )
    odd = ("odd/a b+c", "odd/\u00fc%25..", "odd/.hidden;x")
    path = sample("b_frames")
    with writing(tmp_path, text, "--http", loopback()) as server:
        player = clients.play(target)
        for name in odd:
            clients.publish(server, FlvFile(path), name=name)
        programs.publish(server, path, name="live/stream?secret=hush")
        until(lambda: fetched(server, f"/live/stream.m3u8?key={key}")[0] == 200, "a playlist")
        assert fetched(server, "/live/stream.m3u8")[0] in {401, 403}
        assert "#EXT-X-PART:" in fetched(server, f"/live/stream.m3u8?key={key}")[1]
        streams = partial(call_operation, server.ready["control"][0], "streams", {})
        until(lambda: sum(row["viewers"] for row in streams()["streams"]) == 1, "no viewer but the push")
        until(lambda: len(recordings(tmp_path)) == 1 and len(recordings(tmp_path, ".mp4")) == 3, "files")
        totals = until(lambda: ended_totals(server), "the end of all in the figures")
        listed = fetched(server, f"/live/stream.m3u8?key={key}")[1]
        assert fetched(server, "/recordings/live/stream")[0] in {401, 403}
        [row] = json.loads(fetched(server, f"/recordings/live/stream?key={key}")[1])["recordings"]
        [odd_row] = json.loads(fetched(server, f"/recordings/odd/a%20b%2Bc?key={key}")[1])["recordings"]
        part = f"http://{server.ready['http'][0]}/recordings/live/stream.flv?from={row['start']}&key={key}"
        with urllib.request.urlopen(part, timeout=20) as answer:
            played = answer.read()
    assert server.status == 0
    published = read_flv(path)
    [flv] = recordings(tmp_path)
    for track in (TAG_VIDEO, TAG_AUDIO):
        assert frames_of(read_flv(flv), track) == frames_of(published, track)
    count = len(frames_of(published, TAG_VIDEO))
    assert (row["bytes"], row["being_written"], odd_row["format"]) == (flv.stat().st_size, False, "mp4")
    assert pictures(io.BytesIO(played)) == count
    assert [pictures(item) for item in recordings(tmp_path, ".mp4")] == [count] * 3
    names = re.findall(r'^#EXT-X-MAP:URI="([^"?]+)|^([^#?]+)', listed, re.MULTILINE)
    whole = b"".join((tmp_path / "hls" / "live" / (init or segment)).read_bytes() for init, segment in names)
    assert pictures(io.BytesIO(whole)) == count
    got = frames_of(player.messages, TAG_VIDEO)
    at = frames_of(published, TAG_VIDEO).index(got[0])
    assert got == frames_of(published, TAG_VIDEO)[at : at + len(got)]
    assert len(got) > count / 2
    assert (totals["record"]["files"], totals["record"].get("lost_messages", 0)) == (4, 0)
    names = [str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*")]
    assert not [name for name in names if "hush" in name or key in name]
    folders = {item.parent.name for item in recordings(tmp_path, ".mp4")}
    assert folders == {"a%20b%2Bc", "%C3%BC%25..", "%2Ehidden%3Bx"}


@pytest.mark.timeout(300)
def test_hls_of_a_set_when_a_rendition_goes_and_is_back_names_those_that_there_are(tmp_path, programs, sample):
    """Files of the set alone are written, and FFmpeg plays them."""
    text = 'hls = "live/show"\nrenditions = "_large,_small"\nhls_segment = "1s"\nreturn_grace = "1s"\n'
    with writing(tmp_path, text, "--http", loopback()) as server:

        def sizes():
            return re.findall(r"RESOLUTION=(\S+),FRAME-RATE=\d", fetched(server, "/live/show.m3u8")[1])

        def listed(name):
            return fetched(server, f"/live/show%252b{name}.m3u8")[1]

        def publish(name):
            address = address_of(server, f"live/show_{name}")
            return programs.start("-stream_loop", -1, "-re", "-i", sample(name), "-c", "copy", "-f", "flv", address)

        large, small = publish("large"), publish("small")
        until(lambda: sizes() == ["480x270", "640x360"], "a playlist of both")
        until(lambda: min(listed(name).count("#EXTINF") for name in ("large", "small")) > 2, "segments of both")
        assert "#EXT-X-PART:" in listed("large")
        player = programs.start("-i", f"http://{server.ready['http'][0]}/live/show.m3u8", "-t", 2, "-f", "null", "-")
        assert player.wait() == 0
        small.kill()
        until(lambda: sizes() == ["640x360"], "the other one alone")
        until(lambda: "#EXT-X-ENDLIST" in listed("small"), "the end of the one that has gone")
        small = publish("small")
        until(lambda: sizes() == ["480x270", "640x360"], "both again")
        assert "#EXT-X-ENDLIST" not in listed("large")
        for program in (large, small):
            program.kill()
        until(lambda: all("#EXT-X-ENDLIST" in listed(name) for name in ("large", "small")), "the end of both")
        assert sizes() == ["480x270", "640x360"]
    assert {path.name.partition("%2b")[0] for path in (tmp_path / "hls" / "live").glob("show*")} == {
        "show",
        "show.m3u8",
    }


def test_media_when_its_process_is_killed_loses_little_and_goes_on(tmp_path, clients):
    with writing(tmp_path, 'record = "live/*"\n', "--workers", "2") as server:
        publisher = clients.publish(server, SyntheticSource(key_interval_s=0.5, video_bit_rate=300_000))
        until(lambda: (rows := media_of(server)["streams"]) and rows[0]["media_s"] > 1, "something recorded")
        first = media_of(server)
        sent_before = len(publisher.messages)
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: (now := media_of(server))["streams"] and now["pid"] != first["pid"], "the next one")
        until(lambda: media_of(server)["streams"][0]["media_s"] > 1, "something recorded by it")
        until(lambda: len(recordings(tmp_path)) == 1, "the file of the one that was killed, finished")
        assert media_of(server)["totals"]["record"]["written_bytes"] > first["totals"]["record"]["written_bytes"]
        assert publisher.end is None
    assert server.status == 0
    assert "media process has ended, it is started again" in server.log
    assert list((tmp_path / "recordings").rglob("*.part")) == []
    sent = [payload for _, payload in frames_of(publisher.messages, TAG_VIDEO)]
    before, after = ([payload for _, payload in frames_of(read_flv(item), TAG_VIDEO)] for item in recordings(tmp_path))
    assert before == sent[: len(before)]
    assert after == sent[sent.index(after[0]) : sent.index(after[0]) + len(after)]
    kept = [payload for _, payload in frames_of(publisher.messages[:sent_before], TAG_VIDEO)]
    assert len(kept) - len(before) < 30  # a second of pictures: it writes what has come each time that it looks


@pytest.mark.parametrize("workers", ["1", "2"])
def test_media_when_there_is_no_room_is_told_with_the_stream(tmp_path, clients, workers):
    with writing(tmp_path, 'record = "live/*"\nkeep_free = "900000GiB"\n', "--workers", workers) as server:
        clients.publish(server, SyntheticSource(key_interval_s=0.5, video_bit_rate=300_000), name="live/room")
        streams = partial(call_operation, server.ready["control"][0], "streams", {})
        rows = until(lambda: [row for row in streams()["streams"] if row["unwritten"]], "its owner is told")
    assert [row["stream"] for row in rows] == ["live/room"]
    assert "less than" in rows[0]["unwritten"]["record"]


def test_media_when_twenty_streams_are_published_has_every_frame_of_each(tmp_path, clients):
    names = [f"live/cam{number}" for number in range(20)]
    source = SyntheticSource(key_interval_s=60.0, video_bit_rate=200_000)  # what came before the process did is kept
    text = 'record = "live/*"\nper_address = 0\npublishers_per_address = 0\nnew_per_address = 0\n'
    with writing(tmp_path, text) as server:
        publishers = {name: clients.publish(server, source, name=name, duration_s=1.5) for name in names}
        until(lambda: all(item.end is not None for item in publishers.values()), "the publishers' end")
        until(lambda: len(recordings(tmp_path)) == 20, "20 files")
        assert media_of(server)["totals"]["record"].get("lost_messages", 0) == 0
    for name, publisher in publishers.items():
        [path] = (tmp_path / "recordings" / name).glob("*.flv")
        for track in (TAG_VIDEO, TAG_AUDIO):
            # A file begins at time 0.
            written, sent = (frames_of(item, track) for item in (read_flv(path), publisher.messages))
            assert [payload for _, payload in written] == [payload for _, payload in sent]


def test_media_when_settings_are_read_again_follows_them(tmp_path, clients):
    path = tmp_path / "flowctl.toml"
    with writing(tmp_path, 'control = "ipc"\n') as server:
        publisher = clients.publish(server, SyntheticSource(key_interval_s=0.5, video_bit_rate=200_000))
        until(lambda: publisher.messages, "a stream")
        assert media_of(server)["state"] == "none"
        put(path, FOLDERS + 'control = "ipc"\nrecord = "live/*"\n')
        until(lambda: (rows := media_of(server)["streams"]) and rows[0]["media_s"] > 0.5, "something recorded")
        put(path, FOLDERS + 'control = "ipc"\nrecord = "off"\n')
        until(lambda: recordings(tmp_path), "the file, finished")
        assert publisher.end is None
    assert frames_of(read_flv(recordings(tmp_path)[0]), TAG_VIDEO)


def test_media_when_the_disk_has_no_room_says_so_and_disturbs_nobody(tmp_path, clients):
    with writing(tmp_path, 'record = "live/*"\nkeep_free = "100000GiB"\n') as server:
        publisher = clients.publish(server, SyntheticSource(key_interval_s=0.5, video_bit_rate=200_000))
        player = clients.play(server)
        until(lambda: (rows := media_of(server)["streams"]) and rows[0]["state"] == "no room", "that is told")
        until(lambda: len(player.messages) > 100, "a viewer served")
        assert media_of(server)["totals"]["record"]["lost_messages"] > 0
        assert publisher.end is None
    assert recordings(tmp_path) == []
    assert "make room on its disk" in server.log
