"""serve, publish and play as real processes that talk to each other."""

from __future__ import annotations

import json
import signal
import socket
import subprocess

import pytest
from cli_kit import PATIENCE_S, finish, run, served, start

from flowctl.flv import FlvReader, FlvWriter
from flowctl.wire.media.synthetic import SyntheticSource

SMALL = ["--bit-rate", "300k", "--key-interval", "500ms"]


def test_serve_publish_play_when_all_goes_well(tmp_path):
    """A stream that is published and played arrives whole; all three end with status 0 and JSON that says so."""
    target = tmp_path / "out.flv"
    with served("live", "--log-json", "--stats", "200ms", "--soft", "1MiB,1000", "--groups", "2") as server:
        player = start("play", server.url(), "--json", "--output", str(target))
        publisher = start("publish", "synthetic", server.url(), "--duration", "3s", "--pace", "2", "--json", *SMALL)
        published = finish(publisher)
        played = finish(player)
        server.stop()
    assert (published[0], played[0], server.status) == (0, 0, 0)
    sent, received = json.loads(published[1]), json.loads(played[1])
    assert sent["sent"] == {"header": 3, "key": 6, "inter": 84, "audio": 141}
    assert sent["end"]["reason"] == "finished"
    # The player may join a moment after the publisher, but nothing is missing from its first frame on.
    assert received["missing"] == {"video": 0, "audio": 0, "exact": True}
    assert received["started_on_key"] is True
    # Media at twice its pace takes half its time; the player may have joined late.
    assert received["media_s"] > received["elapsed_s"] > 0
    assert received["end"]["code"] == "NetStream.Play.UnpublishNotify"
    tags = FlvReader(check_back_pointers=True).feed(target.read_bytes())
    assert len(tags) == received["written_tags"]
    logged = [json.loads(line) for line in server.log.splitlines()]
    assert {"serving", "stopped", "figures"} <= {line["event"] for line in logged}
    assert server.ready["url"].startswith("rtmp://127.0.0.1:")
    assert server.ready["limits"].startswith("soft 1.0 MiB, 1000 messages, any age")


def test_publish_when_a_file_loops_without_pace(tmp_path):
    """A file is published several times over, and the summary for people says what was sent."""
    path = tmp_path / "in.flv"
    with path.open("wb") as file:
        writer = FlvWriter(file)
        for tag in SyntheticSource(video_bit_rate=300_000, width=64, height=64).tags(1.0):
            writer.write_tag(tag)
    with served() as server:
        status, output, errors = run(
            "publish", str(path), server.url(), "--loop", "--duration", "4s", "--pace", "0", "--no-audio"
        )
    assert status == 0, errors
    assert "4 key, 116 inter" in output
    assert "ended: finished" in output


def test_play_when_output_is_standard_output():
    """With --output - the media goes to standard output and the summary to standard error."""
    with served() as server:
        player = start("play", server.url(), "--output", "-", text=False)
        publisher = start("publish", "synthetic", server.url(), "--duration", "2s", "--pace", "2", *SMALL)
        assert finish(publisher)[0] == 0
        status, output, errors = finish(player)
    assert status == 0
    assert len(FlvReader().feed(output)) > 10
    assert b"missing 0 pictures, 0 audio frames (counted by stamps)" in errors


def test_play_when_what_comes_cannot_be_written():
    """A full disk and a reader that has gone end a play in plain words: no traceback, no fault of the program's."""
    with served() as server:
        publisher = start("publish", "synthetic", server.url(), "--duration", "60s", *SMALL)
        full = run("play", server.url(), "--output", "/dev/full")
        player = start("play", server.url(), "--output", "-", text=False)
        assert player.stdout.read(100)
        player.stdout.close()
        player.stdout = None
        gone = finish(player)
        publisher.terminate()
        finish(publisher)
    assert (full[0], gone[0]) == (1, 141)
    assert "error: cannot write /dev/full: No space left on device\nhint: " in full[2]
    assert "ended: finished (what came could not be written)" in full[1]
    for errors in (full[2], gone[2].decode()):
        assert "Traceback" not in errors
        assert "internal" not in errors


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_play_when_ended_by_a_signal(number, expected):
    """Ctrl-C and SIGTERM end player and publisher in order: with their summaries and statuses of their own."""
    with served() as server:
        publisher = start("publish", "synthetic", server.url(), "--json", *SMALL)
        player = start("play", server.url(), "--json", "--stay", stderr=subprocess.PIPE, bufsize=1)
        # The lines say that the connections are made; from then on an interruption has something to end.
        assert "playing" in player.stderr.readline()
        assert "publishing" in publisher.stderr.readline()
        server.wait_logged("play started")
        player.send_signal(number)
        status, output, errors = finish(player)
        publisher.send_signal(number)
        published = finish(publisher)
    assert (status, published[0]) == (expected, expected)
    ends = [json.loads(text)["end"] for text in (output, published[1])]
    assert [end["details"] for end in ends] == ["interrupted"] * 2
    assert ends[0]["code"] is None  # the last thing that the server said to the player does not explain its end
    assert "Traceback" not in errors + published[2]


def test_play_when_the_server_cuts_it():
    """A player that floods is cut: status 1, and the error says by which limit."""
    with served() as server:
        publisher = start("publish", "synthetic", server.url(), *SMALL)
        status, output, errors = run("play", server.url(), "--pings", "2000", "--json")
        publisher.send_signal(signal.SIGINT)
        finish(publisher)
    assert status == 1
    assert json.loads(output)["pings_sent"] >= 200
    assert "control_messages_per_second" in errors.splitlines()[-1]


def test_play_when_it_is_refused():
    """A player of an absent stream is refused where waiting is not allowed."""
    with served("--set", "players_may_wait=no") as server:
        status, output, errors = run("play", server.url())
    assert status == 1
    assert "received nothing" in output
    assert "NetStream.Play.StreamNotFound" in errors


def test_serve_when_it_is_the_echo_server():
    """The echo server runs like any other, and SIGINT ends it in order."""
    with served("echo") as server:
        with socket.create_connection(("127.0.0.1", server.ready["port"]), timeout=PATIENCE_S) as peer:
            peer.sendall(b"hello\n")
            assert peer.recv(100) == b"hello\n"
        server.stop(signal.SIGINT)
    assert server.status == 0
    assert server.ready["server"] == "echo"
    assert "url" not in server.ready


@pytest.mark.parametrize("moment", ["live server started", "serving", "figures"])
def test_serve_when_terminated_as_soon_as_it_runs(moment):
    """SIGTERM ends the server in order while it starts, when it is ready, and amidst lines of figures."""
    server = start("serve", "--port", "0", "--shadow-limits", "1MiB,1024,2s", "--stats", "1ms", stderr=subprocess.PIPE)
    for line in server.stderr:
        if moment in line:
            break
    server.terminate()
    status, _, errors = finish(server)
    assert status == 0
    assert "live server stopped" in errors


def test_serve_when_the_port_is_taken():
    """A port in use is named, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, errors = run("serve", "--port", str(taken.getsockname()[1]))
    assert status == 2
    assert "Address already in use" in errors
    assert "hint: choose another port" in errors


def test_serve_when_a_package_adds_a_server(tmp_path):
    """A server program of another package is found by its entry point, and so are its settings."""
    (tmp_path / "other.py").write_text(
        "import dataclasses\n"
        "from flowctl_servers.echo import SERVER as ECHO\n"
        "SERVER = dataclasses.replace(ECHO, name='other', extra={'colour': 'of the lines'})\n"
    )
    (tmp_path / "wrong.py").write_text("SERVER = 7\n")
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[flowctl.servers]\nother = other:SERVER\nwrong = wrong:SERVER\nabsent = absent:SERVER\n"
    )
    path = {"env": {"PYTHONPATH": str(tmp_path)}}
    process = start("serve", "other", "--set", "colour=red", "--port", "0", "--json", **path)
    ready = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert ready["server"] == "other"
    for name, said in (("wrong", "not a flowctl.core.server.program.ServerProgram"), ("absent", "cannot be loaded")):
        status, _, errors = run("serve", name, **path)
        assert (status, said in errors) == (2, True)
