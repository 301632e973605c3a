"""GStreamer, librtmp and rtmpdump against the live server; each test is skipped where its program is not there."""

from __future__ import annotations

import shutil
import time

import pytest
from e2e_kit import NAME, address_of, keys_in, wait_for_end, wait_for_keys, wait_for_viewers
from e2e_players import has_element
from e2e_programs import Program, watch
from loopback_kit import loopback

from flowctl.wire.rtmp.limits import WireLimits

USER = {"bob": "hunter2"}


@pytest.fixture
def run_program(tmp_path):
    def run(*command):
        program = Program([str(part) for part in command], tmp_path / f"{command[0]}.log")
        try:
            return program.wait(), program.log
        finally:
            program.kill()

    return run


def pipeline(source, element, location):
    tracks = "d.video ! queue ! h264parse ! m.video d.audio ! queue ! aacparse ! m.audio"
    text = f"filesrc location={source} ! flvdemux name=d {tracks} flvmux name=m streamable=true ! {element}"
    return ["gst-launch-1.0", "-q", *text.split(" "), f'location="{location}"']


@pytest.mark.parametrize("password", ["hunter2", "wrong"])
def test_gstreamer_logs_in_with_the_right_password_only(password, live, sample, run_program):
    """Adobe authentication by GStreamer's own parser, rtmp2sink.

    Not by rtmpsink: librtmp built with GnuTLS ends its answer with whatever is on the stack, and overruns the heap with
    that: it logs in, is refused, hangs or crashes.
    """
    if not has_element("rtmp2sink"):
        pytest.skip("GStreamer has no rtmp2sink here")
    server = live(rtmp={"credentials": USER})
    location = f"rtmp://bob:{password}@{loopback(server.address[1])}/{NAME}"
    status, said = run_program(*pipeline(sample("plain"), "rtmp2sink", location))
    assert ("ERROR" in said) == (password == "wrong")
    assert (status == 0) == (password == "hunter2")


@pytest.mark.parametrize("element", ["rtmp2sink", "rtmpsink"])
def test_gstreamer_and_librtmp_when_their_name_is_taken_end_with_an_error(element, live, programs, sample, run_program):
    """Librtmp reads on until the server closes: it does not know the status that says why."""
    if not has_element(element):
        pytest.skip(f"GStreamer has no {element} here")
    server = live()
    programs.publish(server, sample("plain"))
    wait_for_keys(server, 1)
    before = time.monotonic()
    status, said = run_program(*pipeline(sample("plain"), element, address_of(server)))
    assert "ERROR" in said
    assert status == 1
    # The general limit on connections that are there for nothing, which is what it waited for.
    assert time.monotonic() - before < WireLimits().first_media_s


@pytest.mark.parametrize("program", ["gst-launch-1.0", "rtmpdump"])
def test_player_that_waited_gets_what_ffmpeg_publishes(program, live, programs, sample, tmp_path):
    server = live()
    target = tmp_path / "played.flv"
    if program == "rtmpdump" and shutil.which(program):
        command = [program, "-q", "-v", "-r", address_of(server), "-o", str(target)]
    elif program != "rtmpdump" and has_element("rtmp2src"):
        location = f"location={address_of(server)}"
        command = [program, "-q", "-e", "rtmp2src", location, "!", "filesink", f"location={target}"]
    else:
        pytest.skip(f"{program} is not here, or has no rtmp2src")
    player = Program(command, tmp_path / "player.log")
    try:
        wait_for_viewers(server, 1)
        published = programs.publish(server, sample("plain"), rate=4.0)
        wait_for_keys(server, 3)
        assert published.wait() == 0
        if program != "rtmpdump":
            server.stop()  # it ends when the server does: a stream that ends may begin again
        player.wait()
    finally:
        player.kill()
    seen, sent = watch(target), watch(sample("plain"))
    count = len(seen.of("video"))
    assert count > 0
    assert sent.of("video")[:count] == seen.of("video")


@pytest.mark.parametrize(
    ("address", "stream"),
    [
        ("room", "__defaultApp__/room"),
        ("room?token=x", "__defaultApp__/room"),
        ("live/\U0001f468\u200d\U0001f469\u200d\U0001f467", "live/\U0001f468\u200d\U0001f469\u200d\U0001f467"),
        ("live/a\u3000b\u00a0c", "live/a\u3000b\u00a0c"),
        ("live?secret=x/room", "live/room"),
    ],
)
def test_ffmpeg_and_players_of_ours_mean_the_same_by_an_address(
    address, stream, live, clients, programs, sample, tmp_path
):
    server = live()
    ours = clients.play(server, name=address)
    theirs = programs.play(server, tmp_path / "played.flv", name=address)
    wait_for_viewers(server, 2, name=stream)
    assert programs.publish(server, sample("plain"), rate=8.0, name=address).wait() == 0
    assert theirs.wait() == 0
    wait_for_end(ours)
    assert keys_in(ours.classes)
    assert watch(tmp_path / "played.flv").of("video") == watch(sample("plain")).of("video")
