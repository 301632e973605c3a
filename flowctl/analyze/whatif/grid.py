"""The choices that a what-if tries: around the limits in force, or as a file of TOML says (pure).

A grid file names values, and every combination is a choice::

    soft = ["1MiB,1024,2s", "2MiB,2048,4s"]   # bytes, messages, age, as everywhere
    hard = ["2x", "4MiB,4096,8s"]             # marks, or how many times the soft ones; default "2x"
    policy = ["all-or-cut"]                   # all-or-cut, audio-first, pictures-first, keep, drop
    target_delay = ["auto", "2s", "off"]
    hard_policy = ["close"]                   # close, hold
    soft_too_long_s = [60]
    stuck_s = [15]
    return_after_s = [5]
    renditions = ["", "500k,1.2M,2.5M"]       # rates of a set to choose from; of one: no set; "": as it was recorded

What is left out is as it is in force. The choice in force is always tried, and always is number 0.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flowctl.core.flow.limits import DEFAULT_LIMITS, AxisLimits, HardPolicy, Limits, parse_target_delay, target_marks
from flowctl.core.flow.policy import LIVE_POLICIES, DropPolicy, LivePolicy
from flowctl.errors import ConfigError
from flowctl.records.flight.whatif.types import MOST_CHOICES, Choice, marks_text, parse_renditions, policy_name
from flowctl.records.flight.words import TablePolicy, limits_from, settings_from

DEFAULT_IN_FORCE: Final = Choice(limits=DEFAULT_LIMITS)
"""Limits of ``flowctl serve live`` without options, for records that do not say what was in force."""

_TIMES: Final = ("soft_too_long_s", "stuck_s", "return_after_s")
_KEYS: Final = ("soft", "hard", "policy", "target_delay", "hard_policy", "renditions", *_TIMES)
_SCALES: Final = ((0.5, 0.5), (1.0, 0.5), (1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (4.0, 2.0), (4.0, 4.0))
"""Factors for the marks of load and for the mark of age: what people would set, each twice of another."""
_TARGETS_MS: Final = (None, 1500, 3000)
"""Target delays to try; None: the one that follows from the stream."""
_STUCK_S: Final = (5.0, 15.0, 30.0)


def scaled(limits: Limits, *, load: float = 1.0, age: float = 1.0, hard_times: float | None = None) -> Limits:
    """Return `limits` with the marks of bytes and messages `load` times, those of age `age` times as large."""

    def axis(old: AxisLimits, factor: float) -> AxisLimits:
        soft = round(old.soft * factor)
        hard = round((old.hard or 0) * factor) if hard_times is None or not old.soft else round(soft * hard_times)
        low = min(round((old.low or 0) * factor), max((soft or hard) - 1, 0))
        return AxisLimits(soft=soft, hard=max(hard, soft) if hard else 0, low=low, name=old.name)

    return Limits(
        size=axis(limits.size, load),
        messages=axis(limits.messages, load),
        age_ms=axis(limits.age_ms, age),
        overhead_bytes=limits.overhead_bytes,
        hard_policy=limits.hard_policy,
        target_delay_ms=limits.target_delay_ms,
    )


def default_grid(present: Choice) -> list[Choice]:
    """Return some twenty choices around the one in force, which comes first, and around the defaults.

    A stall that wide limits of age let go on is not to be ended by `stuck_s` instead.
    """
    choices = [present, replace(DEFAULT_IN_FORCE, policy=present.policy)]
    for load, age in _SCALES:
        wider = replace(present, limits=scaled(present.limits, load=load, age=age))
        choices.append(replace(wider, stuck_s=max(present.stuck_s * age, present.stuck_s) if present.stuck_s else 0.0))
    limits = present.limits
    choices += [replace(present, limits=replace(limits, target_delay_ms=target_ms)) for target_ms in _TARGETS_MS]
    choices += [replace(present, stuck_s=stuck_s) for stuck_s in _STUCK_S]
    choices += [replace(present, limits=scaled(limits, hard_times=4)), replace(present, soft_too_long_s=0.0)]
    return list(dict.fromkeys(choices))


def parse_grid(text: str, where: str, present: Choice) -> list[Choice]:
    """Return the choices that a grid file asks for, with the one in force first."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}", hint=f"there are {', '.join(_KEYS)}")
    axes = {key: _values(table, key, where, present) for key in _KEYS}
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST_CHOICES:
        raise ConfigError(f"{where}: {count} combinations, at most {MOST_CHOICES} can be tried")
    choices = [present]
    for combination in itertools.product(*axes.values()):
        given = dict(zip(_KEYS, combination, strict=True))
        try:
            limits = _limits(given.pop("soft"), given.pop("hard"), HardPolicy(given.pop("hard_policy")))
            limits = replace(limits, target_delay_ms=parse_target_delay(given.pop("target_delay"), "target_delay"))
            renditions = given.pop("renditions")
            rates = parse_renditions(renditions) if renditions else ()
            choices.append(Choice(limits=limits, renditions=rates, **given))
        except (ConfigError, ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}", hint=getattr(error, "hint", None)) from error
    return list(dict.fromkeys(choices))


def _values(table: Mapping[str, Any], key: str, where: str, present: Choice) -> Sequence[Any]:
    defaults: dict[str, Any] = {
        "soft": marks_text(present.limits, 1).replace(" ", ""),
        "hard": "2x",
        "hard_policy": present.limits.hard_policy.value,
        "target_delay": target_marks(present.limits),
        "renditions": "",
    }
    if key not in table:
        return [defaults[key] if key in defaults else getattr(present, key)]
    values = table[key] if isinstance(table[key], list) else [table[key]]
    kind = (int, float) if key.endswith("_s") else str
    for value in values:
        if not isinstance(value, kind) or (key.endswith("_s") and isinstance(value, bool)):
            raise ConfigError(f"{where}: {key} has the value {value!r}, which is of the wrong type")
    if not values:
        raise ConfigError(f"{where}: {key} has no value")
    return values


def _limits(soft: str, hard: str, hard_policy: HardPolicy) -> Limits:
    if not hard.endswith("x"):
        return Limits.parse(soft, hard, hard_policy=hard_policy)
    try:
        times = float(hard[:-1])
    except ValueError:
        raise ConfigError(f"hard is {hard!r}, it must be marks, or like 2x") from None
    if not 1 <= times <= 1000:
        raise ConfigError(f"hard is {hard!r}, the hard marks must be 1 to 1000 times the soft ones")
    return scaled(Limits.parse(soft, hard_policy=hard_policy), hard_times=times)


def levels_of(detail: str | None) -> str:
    """Return what levels of viewers the detail of a `server_started` event tells, as they were set; "": none."""
    try:
        found = json.loads(detail or "{}").get("levels", "")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def in_force(detail: str | None) -> Choice | None:
    """Return the choice that the detail of a BEGIN row or of an event of a server tells; None: it tells none."""
    try:
        values = json.loads(detail or "{}")
        limits = limits_from(values.get("marks") or values["limits"])
        policy: DropPolicy | None
        if "settings" in values:
            settings = settings_from(values["settings"])
            times = {name: getattr(settings, name) for name in _TIMES}
            policy = TablePolicy.from_dict(values["policy"])
        else:
            times = {name: float(values.get(name, getattr(DEFAULT_IN_FORCE, name))) for name in _TIMES}
            policy = LIVE_POLICIES.get(values.get("policy"))
        return Choice(limits=limits, policy=policy_name(policy or LivePolicy()), **times)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ConfigError):
        return None
