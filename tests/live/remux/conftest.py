"""Short real recordings, made by FFmpeg once for a run."""

from __future__ import annotations

import pytest
from remux_kit import tags_of

from flowctl.errors import FlowctlError
from kit.sample import SampleRecipe, ensure_sample

SMALL = {"seconds": 3.0, "gop_s": 0.5, "width": 160, "height": 96, "video_bit_rate": 100_000}
RECIPES = {
    "plain": SampleRecipe(**SMALL),
    "b_frames": SampleRecipe(**SMALL, b_frames=3, profile="main"),
    "hevc": SampleRecipe(**SMALL, codec="hevc", b_frames=2),
    "larger": SampleRecipe(**SMALL | {"width": 192}),
    "silent": SampleRecipe(**SMALL, audio_bit_rate=0),
}


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Return a function: name of a recipe -> path and tags of an FLV file by FFmpeg."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "remux-samples"

    def make(name):
        try:
            path = ensure_sample(folder, RECIPES[name])
        except FlowctlError as error:
            pytest.skip(f"this FFmpeg cannot make the sample: {error}")
        return path, tags_of(path)

    return make
