"""A short real recording (test picture and tone) for demonstrations and end-to-end tests, made by FFmpeg on demand.

How it works: FFmpeg is looked for in the environment variable ``FLOWCTL_FFMPEG``, on the PATH, and in the package
``imageio-ffmpeg``, in this order. It encodes its own test picture and tone into FLV. The recipe is written into the
file as the metadata field ``comment``, so a file says itself how it was made, and one with the wanted recipe is used
again. A new file appears under its name only when it is complete (written beside it, then renamed), so two processes
may ask for the same file at once, and an interrupted run leaves none.

Everything here blocks for as long as FFmpeg runs; not for use on the thread of a poll group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from flowctl.errors import ConfigError, FlowctlError
from flowctl.flv import FlvReader, FlvTag

FFMPEG_VARIABLE: Final = "FLOWCTL_FFMPEG"

MAX_SECONDS: Final = 600.0
"""Longest sample. Servers are tested with loops; ten minutes at the default rates are 70 MB."""

DEFAULT_TIMEOUT_S: Final = 300.0
"""Longest run of FFmpeg. A sample of 10 s takes about 1 s on one core."""

_HEAD_BYTES: Final = 16 * 1024  # the metadata is the first tag and has a few hundred octets
_ERROR_LINES: Final = 3  # of FFmpeg's messages shown in an error: the first ones, the rest are consequences
_PROBE_TIMEOUT_S: Final = 20.0

Codec = Literal["h264", "hevc"]
Profile = Literal["baseline", "main", "high"]
_ENCODERS: Final[dict[Codec, str]] = {"h264": "libx264", "hevc": "libx265"}


@dataclass(frozen=True, kw_only=True)
class SampleRecipe:
    """How a sample is made; equal recipes give interchangeable files.

    Attributes:
        seconds: length, above 0, at most 600.
        width: pixels, even, 16 to 4096.
        height: pixels, even, 16 to 4096.
        fps: frames per second, 1 to 120.
        gop_s: seconds from key frame to key frame, at least one frame; no others are put in at scene changes.
        video_bit_rate: bits per second, 10 kbit/s to 100 Mbit/s.
        audio_bit_rate: bits per second, 0 for no audio, else 16 to 512 kbit/s.
        b_frames: most B-frames in a row, 0 to 8; they are disposable and have composition times. Not with baseline.
        profile: of H.264; ignored for HEVC, which is always Main.
        codec: ``h264`` (classic FLV) or ``hevc`` (Enhanced RTMP, FourCC ``hvc1``; FFmpeg 6.1 or newer with libx265).
    """

    seconds: float = 10.0
    width: int = 640
    height: int = 360
    fps: int = 30
    gop_s: float = 2.0
    video_bit_rate: int = 800_000
    audio_bit_rate: int = 96_000
    b_frames: int = 0
    profile: Profile = "high"
    codec: Codec = "h264"

    def __post_init__(self) -> None:
        """Check every field."""
        _check("seconds", self.seconds, 0.1, MAX_SECONDS)
        _check("fps", self.fps, 1, 120)
        _check("gop_s", self.gop_s, 0, MAX_SECONDS)
        _check("video_bit_rate", self.video_bit_rate, 10_000, 100_000_000)
        _check("b_frames", self.b_frames, 0, 8)
        if self.audio_bit_rate:
            _check("audio_bit_rate", self.audio_bit_rate, 16_000, 512_000)
        for name, pixels in (("width", self.width), ("height", self.height)):
            _check(name, pixels, 16, 4096)
            if pixels % 2:
                raise ConfigError(f"{name} {pixels} is odd: 4:2:0 pictures need even sizes")
        if self.codec not in _ENCODERS:
            raise ConfigError(f"codec {self.codec!r} is not one of {', '.join(_ENCODERS)}")
        if self.profile not in ("baseline", "main", "high"):
            raise ConfigError(f"profile {self.profile!r} is not one of baseline, main, high")
        if self.b_frames and self.profile == "baseline" and self.codec == "h264":
            raise ConfigError(f"b_frames is {self.b_frames}, but profile baseline has none", hint="use profile main")

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
        )

    def arguments(self, target: Path) -> list[str]:
        """Return FFmpeg's arguments, without the program, to make this sample at `target`."""
        arguments = ["-hide_banner", "-loglevel", "error", "-nostdin", "-y"]
        arguments += ["-f", "lavfi", "-i", f"testsrc2=size={self.width}x{self.height}:rate={self.fps}"]
        if self.audio_bit_rate:
            arguments += ["-f", "lavfi", "-i", "sine=frequency=440:sample_rate=48000"]
        gop, bit_rate = str(self.gop_frames), str(self.video_bit_rate)
        # One thread: reproducible output, and a machine that runs a server beside it is not taken over.
        arguments += ["-c:v", _ENCODERS[self.codec], "-preset", "veryfast", "-pix_fmt", "yuv420p", "-threads", "1"]
        arguments += [
            "-b:v",
            bit_rate,
            "-maxrate",
            bit_rate,
            "-bufsize",
            bit_rate,
            "-g",
            gop,
            "-bf",
            str(self.b_frames),
        ]
        if self.codec == "h264":
            arguments += ["-profile:v", self.profile, "-keyint_min", gop, "-sc_threshold", "0"]
        else:
            # x265 reads its own list only. Open GOPs would start with pictures that cannot be decoded after a join.
            x265 = (
                f"keyint={gop}:min-keyint={gop}:scenecut=0:open-gop=0:bframes={self.b_frames}:pools=1:log-level=error"
            )
            arguments += ["-x265-params", x265]
        if self.audio_bit_rate:
            arguments += ["-c:a", "aac", "-b:a", str(self.audio_bit_rate), "-ac", "2"]
        arguments += ["-t", f"{self.seconds:g}", "-metadata", f"comment={self.label}", "-f", "flv", str(target)]
        return arguments


def find_ffmpeg(ffmpeg: str | os.PathLike[str] | None = None) -> Path:
    """Return the FFmpeg program to use."""
    for source, named in (("ffmpeg", ffmpeg), (FFMPEG_VARIABLE, os.environ.get(FFMPEG_VARIABLE))):
        if named:
            found = shutil.which(os.fspath(named))
            if found is None:
                raise FlowctlError(f"{source} names {os.fspath(named)!r}, which is no program that can be run")
            return Path(found)
    found = shutil.which("ffmpeg") or _bundled_ffmpeg()
    if found is None:
        raise FlowctlError(
            "FFmpeg was not found, and a sample recording is made by it",
            hint=f"install FFmpeg, or set {FFMPEG_VARIABLE}; or in flowctl's source folder: pip install '.[media]'",
        )
    return Path(found)


def _bundled_ffmpeg() -> str | None:
    """Return the program in the package imageio-ffmpeg, an optional dependency, or None."""
    try:
        import imageio_ffmpeg  # noqa: PLC0415 - optional, and only looked for when nothing else was found
    except ImportError:
        return None
    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:
        # The package is there but its wheel for this platform carries no program.
        return None


def ensure_sample(
    path: str | os.PathLike[str],
    recipe: SampleRecipe | None = None,
    *,
    seconds: float | None = None,
    ffmpeg: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Path:
    """Make sure that there is a sample and return where; runs FFmpeg unless a file with this recipe is there."""
    wanted = recipe or SampleRecipe()
    if seconds is not None:
        wanted = dataclasses.replace(wanted, seconds=seconds)
    target = Path(path)
    if target.suffix.lower() != ".flv":
        target /= f"{wanted.label}.flv"
    if read_label(target) == wanted.label:
        return target
    program = find_ffmpeg(ffmpeg)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlowctlError(f"cannot make the directory {target.parent}: {error}") from error
    # A name nobody else has. Not tempfile: its files are for the owner alone, and a rename would keep that.
    made = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        _run(program, wanted, made, timeout_s)
        made.replace(target)
    except OSError as error:
        raise FlowctlError(f"cannot write {target}: {error}") from error
    finally:
        # Gone already when it was renamed; whatever else happened, nothing half made stays.
        with contextlib.suppress(FileNotFoundError):
            made.unlink()
    return target


def read_label(path: str | os.PathLike[str]) -> str | None:
    """Return the label of the recipe that a sample was made by; None when it is no sample of ours or no file."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    reader = FlvReader()
    try:
        tags: list[FlvTag] = reader.feed(head)
    except FlowctlError:
        return None
    if not tags:
        return None
    found = re.search(rb"\x00\x07comment\x02..(flowctl-sample-[\x21-\x7e]*)", tags[0].payload, re.DOTALL)
    return found[1].decode("ascii") if found else None


def _run(program: Path, recipe: SampleRecipe, target: Path, timeout_s: float) -> None:
    """Run FFmpeg and turn whatever goes wrong into one error that says what."""
    command = [str(program), *recipe.arguments(target)]
    try:
        # The arguments are numbers, names from fixed lists and our own file name; no shell is involved.
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)  # noqa: S603 - see above
    except subprocess.TimeoutExpired as error:
        raise FlowctlError(f"FFmpeg took longer than {timeout_s:g} s for {recipe.label}") from error
    except OSError as error:
        raise FlowctlError(f"cannot run {program}: {error}") from error
    if done.returncode == 0:
        return
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[:_ERROR_LINES]
    encoder = _ENCODERS[recipe.codec]
    hint = None
    if not _has_encoder(program, encoder):
        hint = f"this FFmpeg has no {encoder}; set {FFMPEG_VARIABLE} to one that has"
    elif recipe.codec == "hevc":
        hint = "HEVC in FLV needs FFmpeg 6.1 or newer"
    raise FlowctlError(f"FFmpeg failed with {done.returncode}: {' | '.join(lines)}", hint=hint)


def _has_encoder(program: Path, encoder: str) -> bool:
    """Return whether `program` knows `encoder`; True when it does not answer, so that no wrong hint is given."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            [str(program), "-hide_banner", "-encoders"], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 0 or re.search(rb"\s%s\s" % encoder.encode(), done.stdout) is not None


def _check(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(f"{name} {value:g} is not in {lowest:g}..{highest:g}")
