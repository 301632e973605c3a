"""Soft and hard limits on a Sender's load: three axes (bytes, messages, age), each with a low, a soft and a hard mark.

A mark of 0 is off. Text form, as operators write it: ``bytes,messages`` or ``bytes,messages,age``, for example
``2MiB,2048`` or ``2MiB,2048,4s``; ``0,0`` is no limit. Pure: no clock and no I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final, Literal

from flowctl.core.text.fieldtypes import check_fields
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.units import (
    format_count,
    format_duration,
    format_size,
    parse_count,
    parse_duration,
    parse_size,
    write_duration,
    write_size,
)

MOST_TARGET_MS: Final = 3_600_000
"""Longest target delay: a longer one means off."""
OFF_MARK: Final = 1 << 62
"""What an axis that is off compares against: no load reaches it, so the hot path needs no branch for "off"."""

DEFAULT_OVERHEAD_BYTES: Final = 96
"""Bytes charged per queued message on top of its payload (precedent: Netty's ChannelOutboundBuffer entry)."""


class Axis(enum.Enum):
    """A dimension in which a load is measured."""

    BYTES = "bytes"
    MESSAGES = "messages"
    AGE = "age_ms"


class HardPolicy(enum.Enum):
    """What HARD_LIMIT means: CLOSE is final (the connection ends), HOLD keeps it and refuses new messages."""

    CLOSE = "close"
    HOLD = "hold"


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisLimits:
    """The marks of one axis; 0 turns a mark off.

    A level is entered when the load is >= its mark and left when it is <= `low` (hysteresis).

    Args:
        soft: mark at which SOFT_LIMIT is entered; bytes, messages or ms.
        hard: mark at which HARD_LIMIT is entered. None: 2 x soft.
        low: mark at which a level is left. None: half of soft, or of hard where soft is off.

    Raises:
        ConfigError: not 0 <= low < soft <= hard for the marks that are on.
    """

    soft: int = 0
    hard: int | None = None
    low: int | None = None
    name: str = field(default="axis", compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        hard = self.soft * 2 if self.hard is None else self.hard
        low = (self.soft or hard) // 2 if self.low is None else self.low
        for mark, value in (("soft", self.soft), ("hard", hard), ("low", low)):
            if value < 0:
                raise ConfigError(f"{mark} limit of {self.name} is {value}, it must be 0 (off) or more")
        if self.soft and hard and hard < self.soft:
            raise ConfigError(f"hard limit of {self.name} is {hard}, it must be at least the soft limit {self.soft}")
        first = self.soft or hard
        if first and low >= first:
            raise ConfigError(f"low mark of {self.name} is {low}, it must be below the first limit {first}")
        object.__setattr__(self, "hard", hard)
        object.__setattr__(self, "low", low)

    @property
    def on(self) -> bool:
        """Whether any mark of this axis is on."""
        return bool(self.soft or self.hard)

    @property
    def marks(self) -> tuple[int, int, int]:
        """(low, soft, hard) for comparisons: a mark that is off is `OFF_MARK`."""
        low = self.low if self.on and self.low is not None else OFF_MARK
        return low, self.soft or OFF_MARK, self.hard or OFF_MARK


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one Sender; immutable, replaced as a whole by `Sender.set_limits`.

    Args:
        size: bytes axis, payload plus `overhead_bytes` per message.
        messages: count axis.
        age_ms: wall-clock age of the oldest queued message in ms; never media time, since odd timestamps would
            switch such a limit off.
        overhead_bytes: bytes charged per message, 0 or more.
        hard_policy: see `HardPolicy`.
        target_delay_ms: how late a followed log's pictures may reach a peer that lags before they are left out, in ms;
            see `flowctl.core.flow.timing`. None: by the stream, 1.5 s or three quarters of the time between key frames,
            whichever is more, at most 4 s. 0: nothing is left out for that. At most an hour.

    Raises:
        ConfigError: a number is out of range.
    """

    size: AxisLimits = field(default_factory=AxisLimits)
    messages: AxisLimits = field(default_factory=AxisLimits)
    age_ms: AxisLimits = field(default_factory=AxisLimits)
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    hard_policy: HardPolicy = HardPolicy.CLOSE
    target_delay_ms: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in (("overhead_bytes", self.overhead_bytes), ("target_delay_ms", self.target_delay_ms)):
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}, it must be 0 or more")
        if self.target_delay_ms is not None and self.target_delay_ms > MOST_TARGET_MS:
            raise ConfigError(
                f"target_delay_ms is more than {MOST_TARGET_MS} (1 h)", hint="0 is off, None is by the stream"
            )

    @classmethod
    def parse(
        cls,
        soft: str,
        hard: str | None = None,
        low: str | None = None,
        *,
        overhead_bytes: int = DEFAULT_OVERHEAD_BYTES,
        hard_policy: HardPolicy = HardPolicy.CLOSE,
        target_delay_ms: int | None = None,
    ) -> Limits:
        """Return the limits written as ``bytes,messages[,age]`` triples.

        Args:
            soft: the soft marks.
            hard: the hard marks. None: twice the soft ones; a missing age is twice the soft age.
            low: the low marks. None: half of the soft ones.
            overhead_bytes: see the class.
            hard_policy: see the class.
            target_delay_ms: see the class.

        Raises:
            ConfigError: a text does not parse or breaks the order of marks; names the field.
        """
        softs = parse_marks(soft, "soft")
        hards: list[int | None] = [None, None, None] if hard is None else parse_marks(hard, "hard")
        lows: list[int | None] = [None, None, None] if low is None else parse_marks(low, "low")
        axes = [
            AxisLimits(soft=softs[i] or 0, hard=hards[i], low=lows[i], name=name)
            for i, name in enumerate(("bytes", "messages", "age (ms)"))
        ]
        return cls(
            size=axes[0],
            messages=axes[1],
            age_ms=axes[2],
            overhead_bytes=overhead_bytes,
            hard_policy=hard_policy,
            target_delay_ms=target_delay_ms,
        )

    def __str__(self) -> str:
        soft = _marks_text(self.size.soft, self.messages.soft, self.age_ms.soft)
        hard = _marks_text(self.size.hard or 0, self.messages.hard or 0, self.age_ms.hard or 0)
        return f"soft {soft}; hard {hard}" + (f"; {target_text(self)}" if self.target_delay_ms is not None else "")


def target_text(limits: Limits) -> str:
    target_ms = limits.target_delay_ms
    if not target_ms:
        return "target delay by the stream" if target_ms is None else "no target delay"
    return f"target delay {format_duration(target_ms / 1000)}"


def target_marks(limits: Limits) -> str:
    """Return the target delay of `limits` as `parse_target_delay` reads it."""
    target_ms = limits.target_delay_ms
    return f"{target_ms}ms" if target_ms else "auto" if target_ms is None else "off"


def write_marks(limits: Limits, which: Literal["soft", "hard", "low"]) -> str:
    """Return the ``soft``, ``hard`` or ``low`` marks of `limits` as `Limits.parse` reads them, exactly."""
    size, count, age_ms = (getattr(axis, which) or 0 for axis in (limits.size, limits.messages, limits.age_ms))
    return f"{write_size(size)},{count},{write_duration(age_ms / 1000)}"


def parse_target_delay(text: str, field_name: str) -> int | None:
    """Return the target delay in ms of a text: a duration, ``off`` or ``auto``; None is by the stream."""
    words: dict[str, int | None] = {"auto": None, "off": 0}
    if text.strip() in words:
        return words[text.strip()]
    hint = "write it like 1500ms or 2s; auto is by the stream, off leaves it out"
    try:
        seconds = parse_duration(text, field_name)
    except ConfigError as error:
        raise ConfigError(str(error), hint=hint) from error
    if seconds and not 1 <= seconds * 1000 <= MOST_TARGET_MS:
        longest = f"{MOST_TARGET_MS // 3_600_000}h"
        raise ConfigError(f"{field_name} is {text.strip()!r}, it must be 1ms to {longest}, or 0 (off)", hint=hint)
    return round(seconds * 1000)


NO_LIMITS: Final = Limits()
"""Every axis off; the target delay is by the stream."""


def _marks_text(size_bytes: int, messages: int, age_ms: int) -> str:
    """Return one mark of each axis; those that are off are called so, because a limit of 0 would let nothing pass."""
    if not (size_bytes or messages or age_ms):
        return "off"
    size = format_size(size_bytes) if size_bytes else "any size"
    count = format_count(messages, "message") if messages else "any number of messages"
    return f"{size}, {count}, {format_duration(age_ms / 1000) if age_ms else 'any age'}"


def parse_marks(text: str, field_name: str) -> list[int | None]:
    """Return [bytes, messages, age in ms or None where the text has no third part]."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (2, 3) or not all(parts):
        raise ConfigError(
            f"{field_name}: {short(text)} is not bytes,messages or bytes,messages,age",
            hint="write it like 2MiB,2048 or 2MiB,2048,4s; 0 turns an axis off",
        )
    size = parse_size(parts[0], f"{field_name} bytes")
    count = parse_count(parts[1], f"{field_name} messages")
    age = None
    if len(parts) == 3:
        seconds = parse_duration(parts[2], f"{field_name} age")
        age = round(seconds * 1000)
        if seconds and not age:
            raise ConfigError(f"{field_name} age: {parts[2]!r} is less than 1 ms", hint="0 turns the axis off")
    return [size, count, age]


DEFAULT_LIMITS: Final = Limits.parse("2MiB,2048,4s", "4MiB,4096,8s")
"""Limits of a server that is given none: at 2.5 Mbit/s about 6 s and 13 s of media, or 4 s and 8 s of age; what
of a log would reach a slow viewer too late by its policy is left out, by the stream's target delay."""
