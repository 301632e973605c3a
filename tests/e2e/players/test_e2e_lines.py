"""Viewers behind the lines of a router that really drops packets: of a single stream, and of a set of renditions.

What they get is what `make bench ARGS=lines` measures, of which only that is judged which no slow machine changes.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kit import bottleneck
from kit.bottleneck import Bottleneck, Line, Shape
from kit.sample import rendition_recipes
from viewers.lines import FLOWCTL
from viewers.renditions import length_s, lines_of, play, published

WINDOW_S = 12.0
LINE = "85%"
BITS = 400_000
READER = """
import socket, sys, time
host, port, source = sys.argv[1:]
sock, got = socket.create_connection((host, int(port)), 5, (source, 0)), 0
sock.recv(1)
began = time.monotonic()
while got < 100_000:
    got += len(sock.recv(65536))
print(time.monotonic() - began)
"""


@functools.cache
def why_not():
    return bottleneck.absent()


@pytest.fixture(scope="module")
def played(ffmpeg_path):
    """Return what a viewer of the largest rendition and one of the set got on equal lines, by what they play."""
    if why_not():
        pytest.skip(why_not())
    sent = published(rendition_recipes(length_s(WINDOW_S)))
    lines = lines_of([float(LINE.rstrip("%")) / 100], (), WINDOW_S)
    rows = play(FLOWCTL, {"single": "show_720", "set": "show"}, sent, lines, WINDOW_S, Shape())
    return {row["viewer"]: row for row in rows}


@pytest.mark.timeout(180)
def test_viewer_of_a_single_stream_when_its_line_is_too_short_is_left_out_pictures_and_nothing_else(played):
    row = played["single"]
    assert (row["closed"], row["broken"], row["decode_errors"], row["repeated"]) == ("", 0, 0, 0)
    assert 0 < row["pictures_percent"] < 90
    assert row["sound_percent"] > row["pictures_percent"]


@pytest.mark.timeout(180)
def test_viewer_of_a_set_when_its_line_is_too_short_for_the_largest_is_given_smaller_ones_and_more_pictures(played):
    row = played["set"]
    assert (row["closed"], row["broken"], row["decode_errors"], row["repeated"]) == ("", 0, 0, 0)
    assert row["in_480_percent"] + row["in_360_percent"] > row["in_720_percent"]
    assert row["pictures_percent"] > played["single"]["pictures_percent"]


def test_line_of_a_router_brings_what_it_carries_after_a_full_queue_by_the_congestion_control_that_is_asked_for():
    if why_not():
        pytest.skip(why_not())
    shape = Shape(queue_ms=100, congestion="cubic")
    with Bottleneck([Line([(0.0, BITS)], 60.0)], shape) as router, socket.create_server(("", 0)) as listening:
        listening.settimeout(20)
        where = [bottleneck.SERVER, str(listening.getsockname()[1]), router.source(0)]
        command = [*router.viewers, sys.executable, "-c", READER, *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            peer, address = listening.accept()
            with peer, contextlib.suppress(ConnectionError):  # it goes when it has enough
                assert address[0] == router.source(0)
                assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"cubic"
                peer.sendall(bytes(200_000))
            took_s = float(child.communicate(timeout=20)[0])
    assert took_s > 0.9 * (100_000 - shape.bucket_bytes) * 8 / BITS


def test_router_removes_what_a_killed_bench_has_left_and_no_namespace_of_others():
    if why_not():
        pytest.skip(why_not())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, others = f"flowctl-bench-{ended.pid}-router", f"flowctl-{ended.pid}-edge"
    try:
        for name in (left, others):
            subprocess.run(["ip", "netns", "add", name], check=True)
        assert not bottleneck.absent()
        there = {path.name for path in Path("/run/netns").iterdir()}
        assert (left in there, others in there) == (False, True)
    finally:
        for name in (left, others):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
