"""The limits file: limits of every viewer's Sender as TOML, written by an analysis, read by a server that runs.

::

    version = 1
    objective = "fewest cuts within 512 MiB"   # optional: what was asked for
    made_at = "2026-11-21T16:00:00Z"           # optional: when

    [limits]
    soft = "2MiB,2048,4s"                      # bytes, messages, age; 0 turns an axis off
    hard = "4MiB,4096,8s"                      # optional: twice soft
    low = "1MiB,1024,2s"                       # optional: half of soft
    hard_policy = "close"                      # optional: close or hold
    overhead_bytes = 96                        # optional: charged per queued message
    target_delay = "auto"                      # optional: auto (by the stream), off, or a duration

    [times]                                    # optional, as is each of them: seconds, 0 is off
    stuck_s = 15
    soft_too_long_s = 60
    return_after_s = 2

A key that is not in this list is an error, so that a slip of the pen is not a limit that silently stays as it was. A
time that is left out stays as the server was started with; of the limits, ``hard`` and ``low`` follow ``soft`` as said
above, and the others are as shown. Text in, values out: no file is opened here and no clock is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flowctl.core.flow.limits import (
    DEFAULT_OVERHEAD_BYTES,
    HardPolicy,
    Limits,
    parse_target_delay,
    target_marks,
    write_marks,
)
from flowctl.core.text.printable import short
from flowctl.core.text.tomltext import TomlText
from flowctl.errors import ConfigError

VERSION: Final = 1
"""Version of the format, raised when a key changes its meaning; a server refuses one that it does not know."""
MOST_TIME_S: Final = 86_400.0
"""Longest time: whatever waits a day for a viewer of a live stream was meant to be off, which is 0."""
MOST_TEXT: Final = 1000
"""Longest objective or date, characters: they are logged."""
_MOST_OVERHEAD: Final = 1024 * 1024

_TOP: Final = frozenset({"version", "objective", "made_at", "limits", "times"})
_LIMITS: Final = frozenset({"soft", "hard", "low", "hard_policy", "overhead_bytes", "target_delay"})
_TIMES: Final = ("stuck_s", "soft_too_long_s", "return_after_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsFile:
    """What a limits file says.

    Args:
        objective: what the limits were chosen for, in words; empty: not said.
        made_at: when they were made, as its writer put it; empty: not said.
        stuck_s: see `core.sending.settings.SenderSettings`; seconds, 0 is off. None: as the server was started with.
    """

    limits: Limits
    objective: str = ""
    made_at: str = ""
    stuck_s: float | None = None
    soft_too_long_s: float | None = None
    return_after_s: float | None = None

    @property
    def times(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in _TIMES}
        return {name: value for name, value in given.items() if value is not None}


def parse_limits_file(text: str, where: str) -> LimitsFile:
    return _LimitsReader(TomlText(text, where)).read()


def render(file: LimitsFile) -> str:
    """Return the text of a limits file; `parse_limits_file` reads the same values from it."""
    limits = file.limits
    lines = [f"version = {VERSION}"]
    lines += [f"{name} = {_quoted(getattr(file, name))}" for name in ("objective", "made_at") if getattr(file, name)]
    lines += ["", "[limits]", "# bytes, messages, age; 0 turns an axis off"]
    lines += [f'{name} = "{write_marks(limits, name)}"' for name in ("soft", "hard", "low")]
    lines.append(f'hard_policy = "{limits.hard_policy.value}"')
    lines.append(f'target_delay = "{target_marks(limits)}"')
    if limits.overhead_bytes != DEFAULT_OVERHEAD_BYTES:
        lines.append(f"overhead_bytes = {limits.overhead_bytes}")
    if file.times:
        lines += ["", "[times]", "# seconds; 0 is off"]
        lines += [f"{name} = {value!r}" for name, value in file.times.items()]
    text = "\n".join(lines) + "\n"
    parse_limits_file(text, "the limits file to be written")  # what cannot be read is not written
    return text


def _quoted(text: str) -> str:
    """Return `text` as a basic string of TOML: that of JSON, with the one character that TOML escapes beside."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


class _LimitsReader:
    """Turns the tables of one file into values, and knows the lines for its errors."""

    def __init__(self, toml: TomlText) -> None:
        self._toml: Final = toml

    def read(self) -> LimitsFile:
        table = self._toml.table
        self._known("", table, _TOP)
        version = table.get("version")
        if type(version) is not int or version != VERSION:
            raise self._error("", "version", version, f"the number {VERSION}")
        limits = self._section(table, "limits", required=True)
        times = self._section(table, "times")
        self._known("limits", limits, _LIMITS)
        self._known("times", times, frozenset(_TIMES))
        return LimitsFile(
            limits=self._limits(limits),
            objective=self._text("", table, "objective"),
            made_at=self._text("", table, "made_at"),
            **{name: self._seconds(times, name) for name in _TIMES},
        )

    def _limits(self, table: Mapping[str, Any]) -> Limits:
        marks = {name: self._text("limits", table, name) or None for name in ("soft", "hard", "low")}
        if marks["soft"] is None:
            raise self._error("limits", "soft", None, 'bytes,messages,age, like "2MiB,2048,4s"')
        policies = [item.value for item in HardPolicy]
        policy = table.get("hard_policy", HardPolicy.CLOSE.value)
        if policy not in policies:
            raise self._error("limits", "hard_policy", policy, " or ".join(policies))
        overhead = table.get("overhead_bytes", DEFAULT_OVERHEAD_BYTES)
        if type(overhead) is not int or not 0 <= overhead <= _MOST_OVERHEAD:
            raise self._error("limits", "overhead_bytes", overhead, f"a whole number, 0 to {_MOST_OVERHEAD}")
        target = self._text("limits", table, "target_delay") or "auto"
        try:
            return Limits.parse(
                marks["soft"],
                marks["hard"],
                marks["low"],
                overhead_bytes=overhead,
                hard_policy=HardPolicy(policy),
                target_delay_ms=parse_target_delay(target, "target_delay"),
            )
        except ConfigError as error:
            # It names the mark; of several lines, that of the mark it begins with.
            key = str(error).split(maxsplit=1)[0].rstrip(":")
            raise ConfigError(f"{self._place('limits', key)}: {error}", hint=error.hint) from error

    def _seconds(self, table: Mapping[str, Any], name: str) -> float | None:
        value = table.get(name)
        if value is None:
            return None
        # The type itself, because True is an int; the comparison is false for NaN.
        if type(value) not in (int, float) or not 0 <= value <= MOST_TIME_S:
            raise self._error("times", name, value, f"seconds, 0 (off) to {MOST_TIME_S:.0f}")
        return float(value)

    def _text(self, section: str, table: Mapping[str, Any], name: str) -> str:
        value = table.get(name, "")
        if not isinstance(value, str) or len(value) > MOST_TEXT:
            raise self._error(section, name, value, f"a text in quotes, {MOST_TEXT} characters at most")
        return value

    def _section(self, table: Mapping[str, Any], name: str, *, required: bool = False) -> Mapping[str, Any]:
        value = table.get(name)
        if value is None and not required:
            return {}
        if not isinstance(value, dict):
            raise self._error("", name, value, f"a table, which begins with [{name}]")
        return value

    def _known(self, section: str, table: Mapping[str, Any], names: frozenset[str]) -> None:
        for name in table:
            if name not in names:
                which = f"[{section}] has " if section else "there are "
                hint = f"{which}{', '.join(sorted(names))}"
                raise ConfigError(f"{self._place(section, name)}: unknown key {name!r}", hint=hint)

    def _error(self, section: str, key: str, value: Any, allowed: str) -> ConfigError:
        shown = "is missing" if value is None else f"is {short(value)}"
        return ConfigError(f"{self._place(section, key)}: {key} {shown}, it must be {allowed}")

    def _place(self, section: str, key: str) -> str:
        return self._toml.place(*filter(None, (section, key)))
