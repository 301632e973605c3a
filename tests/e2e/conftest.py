"""Fixtures of the end-to-end tests: live servers, a thread for clients of ours, FFmpeg, and short recordings.

Everything listens on the loopback interface on a port of the system's choice, and everything that was started is ended
when its test is over, whatever happened in it. Marker ``e2e``: ``pytest -m e2e`` runs these tests alone.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_kit import Clients, open_live_server
from e2e_players import LARGE, SMALL
from e2e_programs import Programs

from flowctl.errors import FlowctlError
from kit.sample import SampleRecipe, ensure_sample, find_ffmpeg

SECONDS = 4.0
RECIPES = {
    "plain": SampleRecipe(seconds=SECONDS, gop_s=0.5, width=320, height=180, video_bit_rate=400_000),
    "b_frames": SampleRecipe(
        seconds=SECONDS, gop_s=1.0, width=320, height=180, video_bit_rate=400_000, b_frames=3, profile="main"
    ),
    "hevc": SampleRecipe(seconds=SECONDS, gop_s=1.0, width=320, height=180, video_bit_rate=400_000, codec="hevc"),
    # Another picture size than "plain": whoever mixes up their headers cannot decode one of them.
    "other": SampleRecipe(seconds=SECONDS, gop_s=0.5, width=480, height=270, video_bit_rate=500_000),
    **{
        name: SampleRecipe(
            seconds=45.0, gop_s=1.0, width=width, height=height, video_bit_rate=rate, b_frames=2, drawn=LARGE
        )
        for name, (width, height), rate in (("large", LARGE, 1_600_000), ("small", SMALL, 800_000))
    },
}


def pytest_configure(config):
    config.addinivalue_line("markers", "e2e: real clients over real sockets")


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker("e2e")
            # Far above what any of them needs, far below the general limit: a client that hangs is a finding.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(60))


@pytest.fixture(scope="session")
def ffmpeg_path():
    try:
        return find_ffmpeg()
    except FlowctlError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sample(tmp_path_factory, ffmpeg_path):
    """Return a function: name of a recipe -> FLV file. Workers of one run share the folder; a file is made once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "samples"

    def make(name):
        try:
            return ensure_sample(folder, RECIPES[name], ffmpeg=ffmpeg_path)
        except FlowctlError as error:
            pytest.skip(f"this FFmpeg cannot make the sample: {error}")

    return make


@pytest.fixture
def live():
    """Return a function that starts a live server; see `open_live_server`. An exception in a handler fails the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(open_live_server(**settings))


@pytest.fixture
def clients():
    with Clients() as clients:
        yield clients


@pytest.fixture
def background():
    """Return an executor for PyAV, whose calls block. Ask for it first: it can end only after the server has."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def programs(ffmpeg_path, tmp_path):
    with Programs(ffmpeg_path, tmp_path) as programs:
        yield programs
