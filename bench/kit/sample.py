"""Short real recordings (test picture and tone) for benches and tests, made by FFmpeg on demand.

FFmpeg is looked for in ``FLOWCTL_FFMPEG``, on the PATH, and in the package ``imageio-ffmpeg``. The recipe is written
into the file as its metadata field ``comment``, so a file with the wanted recipe is used again. A new file appears
under its name only when it is complete.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from flowctl.errors import FlowctlError
from flowctl.flv import FlvReader

FFMPEG_VARIABLE: Final = "FLOWCTL_FFMPEG"
_TIMEOUT_S: Final = 300.0
"""Longest run of FFmpeg. A sample of 10 s takes about 1 s on one core."""
_HEAD_BYTES: Final = 16 * 1024
"""The metadata is the first tag and has a few hundred octets."""
_ENCODERS: Final = {"h264": "libx264", "hevc": "libx265"}


RENDITIONS: Final = {"720": (1280, 720, 2_500_000), "480": (854, 480, 1_200_000), "360": (640, 360, 500_000)}
"""A set of one content: width, height and bit rate with sound and FLV's own octets, by name, the largest first."""
_FLV_BIT_RATE: Final = 12_000
"""What FLV adds to 30 pictures and 47 pieces of sound a second."""


@dataclass(frozen=True, kw_only=True)
class SampleRecipe:
    """How a sample is made; equal recipes give interchangeable files.

    Attributes:
        gop_s: seconds from key frame to key frame, at least one frame; no others are put in at scene changes.
        audio_bit_rate: 0 for no audio.
        b_frames: most B-frames in a row; they are disposable and have composition times. Not with baseline.
        profile: of H.264; ignored for HEVC, which is always Main.
        drawn: size in which the content is drawn before it is scaled. None: the sample's own.
        codec: ``hevc`` is Enhanced RTMP, FourCC ``hvc1``; FFmpeg 6.1 or newer with libx265.
    """

    seconds: float = 10.0
    width: int = 640
    height: int = 360
    fps: int = 30
    gop_s: float = 2.0
    video_bit_rate: int = 800_000
    audio_bit_rate: int = 96_000
    b_frames: int = 0
    profile: Literal["baseline", "main", "high"] = "high"
    codec: Literal["h264", "hevc"] = "h264"
    drawn: tuple[int, int] | None = None

    @property
    def gop_frames(self) -> int:
        """Frames from key frame to key frame."""
        return max(1, round(self.fps * self.gop_s))

    @property
    def label(self) -> str:
        """The recipe in one word, part of file names and stored in the file."""
        profile = f"-{self.profile}" if self.codec == "h264" else ""
        return (
            f"flowctl-sample-{self.codec}{profile}-{self.width}x{self.height}-{self.fps}fps-{self.seconds:g}s"
            f"-gop{self.gop_frames}-b{self.b_frames}-v{self.video_bit_rate}-a{self.audio_bit_rate}"
            f"{'-scaled' if self.drawn else ''}"
        )

    def arguments(self, target: Path) -> list[str]:
        """Return FFmpeg's arguments, without the program, to make this sample at `target`."""
        gop, rate, sound = self.gop_frames, self.video_bit_rate, self.audio_bit_rate
        text = "-hide_banner -loglevel error -nostdin -y"
        width, height = self.drawn or (self.width, self.height)
        text += f" -f lavfi -i testsrc2=size={width}x{height}:rate={self.fps},scale={self.width}:{self.height}"
        text += " -f lavfi -i sine=frequency=440:sample_rate=48000" if sound else ""
        # One thread: reproducible output, and a machine that runs a server beside it is not taken over.
        text += f" -c:v {_ENCODERS[self.codec]} -preset veryfast -pix_fmt yuv420p -threads 1"
        text += f" -b:v {rate} -maxrate {rate} -bufsize {rate} -g {gop} -bf {self.b_frames}"
        if self.codec == "h264":
            text += f" -profile:v {self.profile} -keyint_min {gop} -sc_threshold 0"
        else:
            # x265 reads its own list only. Open GOPs would start with pictures that cannot be decoded after a join.
            text += f" -x265-params keyint={gop}:min-keyint={gop}:scenecut=0:open-gop=0"
            text += f":bframes={self.b_frames}:pools=1:log-level=error"
        text += f" -c:a aac -b:a {sound} -ac 2" if sound else ""
        return [*f"{text} -t {self.seconds:g} -metadata comment={self.label} -f flv".split(), str(target)]


@dataclass(frozen=True, kw_only=True)
class ScreenRecipe(SampleRecipe):
    """A shared screen: key frames of some 670 kB each 10 s, small pictures between them, 0.7 Mbit/s in the mean."""

    width: int = 1280
    height: int = 720
    fps: int = 15
    gop_s: float = 10.0

    @property
    def label(self) -> str:
        return f"flowctl-sample-screen-{self.seconds:g}s-a{self.audio_bit_rate}"

    def arguments(self, target: Path) -> list[str]:
        text = "-hide_banner -loglevel error -nostdin -y -f lavfi -i"
        text += f" color=gray:size={self.width}x{self.height}:rate={self.fps},noise=alls=55:all_seed=1[still]"
        text += f";testsrc2=size=48x28:rate={self.fps}[moves];[still][moves]overlay=x='mod(40*t\\,1000)':y=300"
        text += " -f lavfi -i sine=frequency=440:sample_rate=48000 -c:v libx264 -preset veryfast -pix_fmt yuv420p"
        text += f" -threads 1 -qp 26 -g {self.gop_frames} -keyint_min {self.gop_frames} -sc_threshold 0 -bf 0"
        text += f" -c:a aac -b:a {self.audio_bit_rate} -ac 2"
        return [*f"{text} -t {self.seconds:g} -metadata comment={self.label} -f flv".split(), str(target)]


def rendition_recipes(seconds: float) -> dict[str, SampleRecipe]:
    """Return the recipes of `RENDITIONS`: key frames at the same times, and the same sound."""
    others = SampleRecipe.audio_bit_rate + _FLV_BIT_RATE
    return {
        name: SampleRecipe(
            seconds=seconds, width=width, height=height, video_bit_rate=rate - others, drawn=RENDITIONS["720"][:2]
        )
        for name, (width, height, rate) in RENDITIONS.items()
    }


def find_ffmpeg() -> Path:
    """Return the FFmpeg program to use."""
    named = os.environ.get(FFMPEG_VARIABLE)
    found = shutil.which(named or "ffmpeg")
    if found is None and not named:
        try:
            import imageio_ffmpeg  # noqa: PLC0415 - only looked for when nothing else was found

            found = imageio_ffmpeg.get_ffmpeg_exe()
        except (ImportError, RuntimeError):  # RuntimeError: its wheel for this platform carries no program
            found = None
    if found is None:
        raise FlowctlError("FFmpeg was not found", hint=f"install FFmpeg, or name it by {FFMPEG_VARIABLE}")
    return Path(found)


def ensure_sample(path: Path, recipe: SampleRecipe, *, ffmpeg: Path | None = None) -> Path:
    """Make sure that there is a sample, a file or in a folder, and return where; runs FFmpeg unless it is there."""
    target = path if path.suffix.lower() == ".flv" else path / f"{recipe.label}.flv"
    if read_label(target) == recipe.label:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{secrets.token_hex(8)}.part")
    # The arguments are numbers, names from fixed lists and our own file name; no shell is involved.
    command = [str(ffmpeg or find_ffmpeg()), *recipe.arguments(made)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise FlowctlError(f"FFmpeg failed with {done.returncode}: {done.stderr.decode('utf-8', 'replace')[:500]}")
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    return target


def read_label(path: Path) -> str | None:
    """Return the label of the recipe that a sample was made by; None when it is no sample of ours or no file."""
    try:
        with path.open("rb") as file:
            tags = FlvReader().feed(file.read(_HEAD_BYTES))
    except (OSError, FlowctlError):
        return None
    found = tags and re.search(rb"\x00\x07comment\x02..(flowctl-sample-[\x21-\x7e]*)", tags[0].payload, re.DOTALL)
    return found[1].decode("ascii") if found else None
