"""A set as docs/renditions.md says it: FFmpeg publishes it, and a viewer of the set sees every picture."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess

import pytest
from e2e_kit import address_of, frames_of, wait_for_end, wait_for_keys, wait_until
from source_kit import ROOT

from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.settings.renditions import parse_renditions
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.size import read_size
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from kit.sample import SampleRecipe, ensure_sample

SIZES = [(640, 360), (854, 480), (1280, 720)]
PICTURE_MS = 1000 / 30
SOUND_MS = 1024 / 48
SETTING = "_720,_480,_360"
USUAL = ClientSessionConfig()
"""What usual players say: one that takes all tracks gets what the set shows to recorders and relays."""


def in_the_page():
    """Return the arguments of FFmpeg's command in the page."""
    (block,) = re.findall(r"```console\n\$ (ffmpeg .*?)\n```", (ROOT / "docs/renditions.md").read_text(), re.DOTALL)
    return shlex.split(block.replace("\\\n", " "))[1:]


@pytest.fixture
def talk(tmp_path, ffmpeg_path):
    return ensure_sample(tmp_path, SampleRecipe(seconds=40.0, width=1280, height=720), ffmpeg=ffmpeg_path)


def publish(programs, server, arguments, talk):
    base = address_of(server, "live")
    given = [item.replace("talk.mp4", str(talk)).replace("rtmp://127.0.0.1/live", base) for item in arguments]
    return programs.start(*given)


def sizes_of(messages):
    """Return the sizes of the pictures in their order, by the sequence headers."""
    headers = [
        payload
        for kind, _, payload in messages
        if kind == TAG_VIDEO and inspect(kind, payload).packet == "sequence_header"
    ]
    found = [read_size(payload) for payload in headers]
    return [size for place, size in enumerate(found) if found[place - 1 : place] != [size]]


def steps_of(messages, track):
    times = [time for time, _ in frames_of(messages, track)]
    return [after - before for before, after in itertools.pairwise(times)]


def on_one_connection(arguments, ffmpeg):
    """Return the arguments for one publication with several tracks, as the page says they change."""
    said = subprocess.run([ffmpeg, "-version"], capture_output=True, text=True, check=True).stdout
    if int(re.search(r"version n?(\d+)", said)[1]) < 8:
        pytest.skip("this FFmpeg sends one video track only")
    return [*arguments[: arguments.index("-f")], "-f", "flv", "rtmp://127.0.0.1/live/show"]


@pytest.mark.realtime
def test_tracks_when_ffmpeg_publishes_them_as_the_page_says_are_a_set(live, clients, programs, talk, ffmpeg_path):
    arguments = on_one_connection(in_the_page(), ffmpeg_path)
    server = live()
    published = publish(programs, server, arguments, talk)
    wait_for_keys(server, 2, name="live/show")
    of_set = clients.play(server, name="live/show", config=USUAL)
    wait_until(lambda: SIZES[-1] in sizes_of(list(of_set.messages)), "the viewer in the largest rendition", 30.0)
    published.kill()
    wait_for_end(of_set)
    assert sizes_of(of_set.messages)[0] == SIZES[0]
    assert max(steps_of(of_set.messages, TAG_VIDEO)) <= PICTURE_MS + 1


@pytest.mark.realtime
def test_set_when_ffmpeg_publishes_it_as_the_page_says_shows_every_picture(live, clients, programs, talk):
    server = live(renditions=parse_renditions(SETTING, "renditions"))
    published = publish(programs, server, in_the_page(), talk)
    wait_for_keys(server, 1, name="live/show_360")
    of_set = clients.play(server, name="live/show", config=USUAL)
    member = clients.play(server, name="live/show_480")
    wait_until(
        lambda: SIZES[-1] in sizes_of(list(of_set.messages)), "the viewer of the set in the largest rendition", 38.0
    )
    count = len(of_set.messages)
    wait_until(lambda: len(of_set.messages) > count + 100, "a second of it")
    published.kill()
    wait_for_end(of_set, member)
    assert sizes_of(member.messages) == [(854, 480)]
    sizes = sizes_of(of_set.messages)
    assert (sizes[0], sizes[-1]) == (SIZES[0], SIZES[-1])
    assert set(sizes) <= set(SIZES)
    assert max(steps_of(of_set.messages, TAG_VIDEO)) <= PICTURE_MS + 1
    assert max(steps_of(of_set.messages, TAG_AUDIO)) <= SOUND_MS + 1
    assert min(steps_of(of_set.messages, TAG_VIDEO)) > 0
