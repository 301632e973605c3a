"""The setting of a ladder: smaller sizes that the server has FFmpeg make of a stream while a viewer needs one.

``720:1100k,360:400k`` is of all streams, ``live/*=720:1100k,360:400k`` of some. Each step is a command, as `run` has
them (`flowctl.live.settings.runs`), whose words are ours: so it may be an option.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.live.settings.renditions import MOST_RENDITIONS
from flowctl.live.settings.runs import RunRule, RunWhen
from flowctl.units import parse_bit_rate

_HINT: Final = "write it like 720:1100k,360:400k, or live/*=720:1100k,360:400k"
_OFF: Final = "off"
_ALL: Final = "*/*"
_HEIGHTS: Final = range(64, 2161)
_LEAST_BIT_RATE: Final = 50_000
_MEMORY_BYTES: Final = 4 << 30
"""Address space of one encoder, several times what 1080 lines take: what a stream can make FFmpeg take has an end."""
_NICE: Final = 10
_SOUND_BIT_RATE: Final = 128_000
"""That of usual sound, which is copied; a step needs room for it too."""
_SMALLER: Final = 0.8
"""Share of a stream's own rate that a step may take at most: less is gained by it than it costs."""
_ROOM: Final = 0.8
"""Share of a line that a step may fill: an encoder is not exact, and a step that nobody can stay in is for nothing."""
_ENCODER: Final = (
    *("ffmpeg", "-hide_banner", "-nostats", "-loglevel", "warning", "-nostdin"),
    # Timestamps as they are, and what is cached for viewers is enough to know the tracks by.
    *("-copyts", "-threads", "1", "-analyzeduration", "500000", "-probesize", "500000", "-i", "{url}"),
    *("-map", "0:v:0", "-map", "0:a:0?", "-c:a", "copy", "-fps_mode", "passthrough", "-enc_time_base", "1:1000"),
    *("-c:v", "libx264", "-threads", "1", "-preset", "veryfast", "-tune", "zerolatency", "-pix_fmt", "yuv420p"),
    # Key frames where the publisher has his, and nowhere else.
    *("-force_key_frames", "source", "-g", "100000", "-sc_threshold", "0"),
)
"""First words of a step. One thread: a step takes one core at most, and as many run at a time as there are."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One step: lines of its pictures, and bits per second that they take."""

    height: int
    bit_rate: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.height not in _HEIGHTS or self.height % 2:
            raise ConfigError(
                f"ladder has a step of {self.height} lines, allowed are even numbers, "
                f"{_HEIGHTS.start} to {_HEIGHTS.stop - 1}",
                hint=_HINT,
            )
        if self.bit_rate < _LEAST_BIT_RATE:
            raise ConfigError(f"ladder has a step of {self.bit_rate} bit/s, {_LEAST_BIT_RATE} is the least", hint=_HINT)

    @property
    def name(self) -> str:
        return f"{self.height}p"

    @property
    def bytes_per_s(self) -> float:
        """What a line has to carry for it, with usual sound."""
        return (self.bit_rate + _SOUND_BIT_RATE) / 8

    def rule(self, streams: str) -> RunRule:
        rate = f"{self.bit_rate // 1000}k"
        size = ("-vf", f"scale=-2:'min({self.height},ih)'", "-b:v", rate, "-maxrate", rate, "-bufsize", rate)
        return RunRule(
            on=streams,
            command=(*_ENCODER, *size, "-f", "flv", "{publish_1}"),
            publish=(f"{{app}}/{{stream}}_{self.name}",),
            when=RunWhen.NEEDED,
            nice=_NICE,
            memory=_MEMORY_BYTES,
            step=self.name,
        )


@dataclass(frozen=True, slots=True)
class Ladder:
    """The steps, the largest first, and the streams that have them."""

    steps: tuple[LadderStep, ...] = ()
    streams: str = _ALL

    def __post_init__(self) -> None:
        heights = [step.height for step in self.steps]
        if len(self.steps) >= MOST_RENDITIONS:
            raise ConfigError(f"ladder has {len(heights)} steps, {MOST_RENDITIONS - 1} are allowed", hint=_HINT)
        rates = [step.bit_rate for step in self.steps]
        if heights != sorted(set(heights), reverse=True) or rates != sorted(set(rates), reverse=True):
            raise ConfigError(f"ladder is {self}, each step must be smaller than the one before it", hint=_HINT)

    def __str__(self) -> str:
        steps = ",".join(f"{step.height}:{step.bit_rate // 1000}k" for step in self.steps)
        return (steps if self.streams == _ALL else f"{self.streams}={steps}") or _OFF

    def rules(self) -> tuple[RunRule, ...]:
        return _rules_of(self)

    def fitting(self, line: float | None, own: float) -> LadderStep | None:
        """Return the largest step that a line carries, else the smallest. None: none is smaller than the stream.

        Args:
            line: bytes per second that it carries. None: not known.
            own: those of the stream itself; 0: not known yet.
        """
        smaller = [step for step in self.steps if step.bytes_per_s <= _SMALLER * own]
        carried = (step for step in smaller if line is not None and step.bytes_per_s <= _ROOM * line)
        return next(carried, smaller[-1] if smaller else None)


@lru_cache(maxsize=16)
def _rules_of(ladder: Ladder) -> tuple[RunRule, ...]:
    """Return the commands of a ladder; FFmpeg is looked for once, not whenever another setting changes."""
    return tuple(step.rule(ladder.streams) for step in ladder.steps)


def parse_ladder(text: str, source: str) -> Ladder:
    streams, steps = text.split("=", 1) if "=" in text else (_ALL, text)
    if steps.strip().lower() == _OFF:
        return Ladder()
    found = []
    for word in map(str.strip, steps.split(",")):
        match = re.fullmatch(r"([0-9]{2,4}):([^:]{1,20})", word)
        if match is None:
            raise ConfigError(f"{source} is {short(text)}: {short(word)} is no step", hint=_HINT)
        found.append(LadderStep(int(match[1]), parse_bit_rate(match[2], source)))
    return Ladder(tuple(found), streams.strip())
