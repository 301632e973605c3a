"""A live server with an HTTP listener that plays the recordings of a folder."""

from __future__ import annotations

import pytest
from http_kit import Web

from flowctl.live.playback.serving import recording_handlers


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recordings"


@pytest.fixture
def playback(loop_factory, folder):
    """Make servers whose recordings of ``live/*`` may be played; arguments as of `Web`."""
    made = []

    def make(**options):
        made.append(
            Web(loop_factory, handlers=recording_handlers(folder, lambda name: name.startswith("live/")), **options)
        )
        return made[-1]

    yield make
    for item in made:
        item.stop()
