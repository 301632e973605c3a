"""Real samples: made by FFmpeg once per recipe, classified as encoders meant them, and clear words when it fails."""

from __future__ import annotations

import io
import subprocess

import av
import pytest

from flowctl.core.flow.state import MessageClass
from flowctl.errors import FlowctlError
from flowctl.flv import FlvReader, FlvWriter
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.media.size import read_size
from kit.sample import RENDITIONS, SampleRecipe, ensure_sample, find_ffmpeg, read_label, rendition_recipes

SMALL = {"seconds": 1.0, "width": 160, "height": 90, "gop_s": 0.5}
RECIPES = {
    "baseline": SampleRecipe(**SMALL, profile="baseline"),
    "b-frames": SampleRecipe(**SMALL, b_frames=3),
    "silent": SampleRecipe(**SMALL, audio_bit_rate=0),
    "hevc": SampleRecipe(**SMALL, codec="hevc", b_frames=2),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    directory = tmp_path_factory.mktemp("samples")
    return {name: ensure_sample(directory, recipe) for name, recipe in RECIPES.items()}


def read(path):
    return FlvReader(check_back_pointers=True).feed(path.read_bytes())


def infos(path, type_id):
    return [inspect(tag.type_id, tag.payload) for tag in read(path) if tag.type_id == type_id]


def pictures(tags) -> dict[int, bytes]:
    """Return the decoded pictures by presentation time; any decoding error fails."""
    target = io.BytesIO()
    writer = FlvWriter(target, audio=False)
    for tag in tags:
        if tag.type_id == 9:
            writer.write(*tag)
    target.seek(0)
    found = {}
    with av.open(target, format="flv") as container:
        container.streams.video[0].codec_context.options = {"err_detect": "explode"}
        for frame in container.decode(video=0):
            found[frame.pts] = frame.to_ndarray().tobytes()
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_sample_has_the_recipe_in_its_name_and_inside(samples, name):
    path = samples[name]
    assert path.name == f"{RECIPES[name].label}.flv"
    assert read_label(path) == RECIPES[name].label


@pytest.mark.parametrize("name", RECIPES)
def test_sample_has_the_frames_and_key_frames_of_its_recipe(samples, name):
    video = infos(samples[name], 9)
    coded = [info for info in video if info.packet == "coded"]
    assert len(coded) == 30
    assert [index for index, info in enumerate(coded) if info.message_class is MessageClass.KEY] == [0, 15]
    assert [info.packet for info in video].count("sequence_header") == 1
    assert {info.codec for info in coded} == {"hvc1" if name == "hevc" else "avc1"}
    audio = infos(samples[name], 8)
    if name == "silent":
        assert audio == []
    else:
        assert [info.packet for info in audio].count("sequence_header") == 1
        assert len(audio) > 40


@pytest.mark.parametrize(("name", "least"), [("b-frames", 8), ("hevc", 6)])
def test_dropping_what_is_classed_disposable_changes_no_other_picture(samples, name, least):
    tags = read(samples[name])
    kept = [tag for tag in tags if inspect(tag.type_id, tag.payload).message_class is not MessageClass.DISPOSABLE]
    assert len(tags) - len(kept) >= least
    everything, rest = pictures(tags), pictures(kept)
    assert len(everything) - len(rest) == len(tags) - len(kept)
    assert rest == {time: everything[time] for time in rest}


def test_sample_without_b_frames_has_no_disposable_frame(samples):
    assert MessageClass.DISPOSABLE not in {info.message_class for info in infos(samples["baseline"], 9)}


def test_b_frames_have_composition_times(samples):
    assert len({info.composition_ms for info in infos(samples["b-frames"], 9)} - {None, 0}) > 1


@pytest.mark.parametrize(("encoder", "fourcc"), [("libvpx-vp9", b"vp09"), ("libsvtav1", b"av01"), ("libx265", b"hvc1")])
def test_unmarked_frames_of_real_encoders_are_recognised(tmp_path, encoder, fourcc):
    recipe = SampleRecipe(seconds=1, width=160, height=90, gop_s=0.5, audio_bit_rate=0)
    arguments = recipe.arguments(tmp_path / "x.flv")
    start, end = arguments.index("-c:v"), arguments.index("-b:v")
    speed = {"libvpx-vp9": ["-deadline", "realtime", "-cpu-used", "8"], "libsvtav1": ["-preset", "12"]}
    codec = ["-c:v", encoder, "-pix_fmt", "yuv420p", "-g", "15", "-b:v", "100k", *speed.get(encoder, ())]
    if encoder == "libx265":
        codec += ["-x265-params", "keyint=15:min-keyint=15:scenecut=0:log-level=error"]
    arguments = [*arguments[:start], *codec, "-t", "1", "-f", "flv", str(tmp_path / "x.flv")]
    assert end > start
    done = subprocess.run([find_ffmpeg(), *arguments], capture_output=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"this FFmpeg cannot put {encoder} into FLV: {done.stderr[:200]!r}")
    marked = [tag.payload for tag in read(tmp_path / "x.flv") if tag.type_id == 9 and tag.payload[0] & 15 in (1, 3)]
    assert len(marked) >= 28
    assert {payload[1:5] for payload in marked} == {fourcc}
    unmarked = [bytes((payload[0] & 0x8F,)) + payload[1:] for payload in marked]
    expected = [payload[0] >> 4 & 7 == 1 for payload in marked]
    assert sum(expected) >= 2
    assert [inspect(9, payload).message_class is MessageClass.KEY for payload in unmarked] == expected


def test_sample_when_its_recipe_is_there_is_not_made_again(samples, monkeypatch):
    """A file with the wanted recipe is used as it is; FFmpeg is not even looked for."""
    path = samples["baseline"]
    before = path.stat()
    monkeypatch.setenv("FLOWCTL_FFMPEG", "/nonexistent/ffmpeg")
    again = ensure_sample(path.parent, RECIPES["baseline"])
    assert (again, again.stat().st_ino, again.stat().st_mtime_ns) == (path, before.st_ino, before.st_mtime_ns)
    with pytest.raises(FlowctlError, match="FFmpeg was not found"):
        ensure_sample(path.parent, SampleRecipe(**SMALL, b_frames=1))


def test_renditions_when_made_have_their_sizes_equal_key_frames_and_equal_sound(tmp_path):
    tags = {name: read(ensure_sample(tmp_path, recipe)) for name, recipe in rendition_recipes(2.5).items()}
    video = {name: [tag for tag in found if tag.type_id == 9] for name, found in tags.items()}
    assert {name: (width, height) for name, (width, height, _) in RENDITIONS.items()} == {
        name: read_size(found[0].payload) for name, found in video.items()
    }
    keys = {
        tuple(tag.timestamp for tag in found if inspect(9, tag.payload).message_class is MessageClass.KEY)
        for found in video.values()
    }
    assert [len(times) for times in keys] == [2]
    sound = [[tag for tag in found if tag.type_id == 8] for found in tags.values()]
    assert sound[0] == sound[1] == sound[2] != []
