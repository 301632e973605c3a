"""Sizes, durations and rates as people write them: ``2MiB``, ``800ms``, ``2.5Mbit/s``, and back.

Binary prefixes (KiB, MiB, GiB) are powers of 1024, decimal ones (kB, MB, GB; k, M, G for rates) powers of 1000.
Every parser names the field, the text and an example in its error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

# At most 15 digits on each side: beyond, a float is no longer exact, and with hundreds it becomes infinite.
_NUMBER = re.compile(r"\s*+(\d{1,15}(?:\.\d{1,15})?)\s*+([A-Za-z/]*)\s*", re.ASCII)

SIZE_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "k": 1024,
    "m": 1024**2,
    "g": 1024**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}
"""Bytes of each unit of size, in lower case."""

TIME_UNITS: Final[Mapping[str, float]] = {
    "us": 1e-6,
    "ms": 1e-3,
    "": 1.0,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
}
"""Seconds of each unit of time."""

_MOST_DIGITS: Final = 15
"""Most digits of a whole number: more cannot be meant, and int() refuses some thousands."""

_EXACT_UNITS: Final = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
_RATE_PREFIXES: Final[dict[str, int]] = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}


def _split(text: str, field: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{field}: {short(text)} is not a number with a unit", hint=f"write it like {example}")
    return float(match[1]), match[2].lower()


def parse_size(text: str, field: str = "size") -> int:
    """Return the bytes that `text` (``512``, ``64k``, ``2MiB``, ``1.5MB``) stands for."""
    number, unit = _split(text, field, "2MiB")
    if unit not in SIZE_UNITS:
        raise ConfigError(
            f"{field}: unknown unit {short(unit)} in {short(text)}", hint="use B, KiB, MiB, GiB, kB, MB or GB"
        )
    return round(number * SIZE_UNITS[unit])


def parse_duration(text: str, field: str = "duration") -> float:
    """Return the seconds that `text` (``8``, ``8s``, ``800ms``, ``2min``, ``1h``, ``7d``) stands for."""
    number, unit = _split(text, field, "8s")
    if unit not in TIME_UNITS:
        raise ConfigError(f"{field}: unknown unit {short(unit)} in {short(text)}", hint="use us, ms, s, min, h or d")
    return number * TIME_UNITS[unit]


def parse_bit_rate(text: str, field: str = "rate") -> int:
    """Return the bits per second that `text` (``200k``, ``2.5M``, ``2.5Mbit/s``, ``800000``) stands for."""
    number, unit = _split(text, field, "2.5M")
    prefix = unit
    for suffix in ("bit/s", "bps", "bit"):
        if unit.endswith(suffix):
            prefix = unit.removesuffix(suffix)
            break
    if prefix not in _RATE_PREFIXES:
        raise ConfigError(
            f"{field}: unknown unit {short(unit)} in {short(text)}", hint="use k, M or G, meaning kbit/s and so on"
        )
    return round(number * _RATE_PREFIXES[prefix])


def parse_share(text: str, field: str = "share") -> float:
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        share = float(number) / percent
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{field} is {short(text)}, it must be a share, 0 to 1", hint="for example 1% or 0.01")
    return share


def parse_count(text: str, field: str = "count") -> int:
    """Return the whole number, 0 or more, that `text` stands for."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise ConfigError(f"{field} is {text!r:.60}, it must be a whole number, 0 or more")
    return int(text)


def write_size(value_bytes: int) -> str:
    """Return `value_bytes` as `parse_size` reads it, exactly: a unit is used only where nothing is lost by it."""
    for unit, factor in _EXACT_UNITS:
        if value_bytes and value_bytes % factor == 0:
            return f"{value_bytes // factor}{unit}"
    return str(value_bytes)


def write_duration(value_s: float) -> str:
    """Return `value_s` as `parse_duration` reads it, exactly to the millisecond."""
    if value_s == int(value_s):
        return f"{int(value_s)}s" if value_s else "0"
    return f"{value_s * 1000:.15g}ms"


def format_size(value_bytes: float) -> str:
    """Return `value_bytes` for people, for example ``1.5 MiB``."""
    size = float(value_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1023.5:  # from there on it would be shown as 1024
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_duration(value_s: float) -> str:
    """Return `value_s` seconds for people, for example ``850 ms``, ``8.0 s`` or ``2 min 5 s``."""
    if abs(value_s) < 0.9995:
        return f"{value_s * 1000:.0f} ms"
    if abs(value_s) < 119.95:
        return f"{value_s:.1f} s"
    minutes, seconds = divmod(round(abs(value_s)), 60)
    return f"{'-' if value_s < 0 else ''}{minutes} min {seconds} s"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, for example ``1 message`` or ``43 messages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bit_rate(value_bits_per_s: float) -> str:
    """Return a bit rate for people, for example ``2.50 Mbit/s``."""
    if abs(value_bits_per_s) < 999.5:
        return f"{value_bits_per_s:.0f} bit/s"
    if abs(value_bits_per_s) < 999_500:
        return f"{value_bits_per_s / 1000:.0f} kbit/s"
    return f"{value_bits_per_s / 1e6:.2f} Mbit/s"
