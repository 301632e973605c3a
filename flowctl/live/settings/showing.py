"""The settings in force and the source of each: for the server, or for a role in a stream.

Secrets are masked: passwords and secret parameters of addresses, and settings of one program alone whose name says that
they are secret. Files of keys are shown by their paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from flowctl.core.flow.limits import Limits, write_marks
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.server.program import ServeOptions, ServerProgram
from flowctl.live.config import LiveConfig
from flowctl.live.settings.levels import MARKS, Level, Levels, Role
from flowctl.live.settings.model import (
    OF_CONNECTIONS,
    LiveSettings,
    kind_of,
    rule_of,
    settings_of,
    value_at,
)
from flowctl.live.settings.sources import SERVER, Settings, settings_of_all, validated
from flowctl.wire.rtmp.url import redact_url

_SECRET: Final = re.compile(r"key|secret|token|passw", re.IGNORECASE)
_MASK: Final = "***"
_DEFAULT: Final = "default"


class Effective(NamedTuple):
    """A setting, and where it came from."""

    name: str
    value: str  # as it is written, secrets masked; empty: it has none
    # where it stands: ``--stuck``, ``FLOWCTL_STUCK``, ``flowctl.toml, line 3: stuck``; or ``default``, or what it
    # follows
    source: str


def effective(
    program: ServerProgram,
    given: Settings,
    *,
    stream: str = "",
    role: Role | None = None,
    limits_file: LimitsFile | None = None,
) -> list[Effective]:
    """Return every setting of a server, or those that can differ for a stream or role, in the order of the model."""
    options = settings_of_all(program, given)
    found: ServeOptions = options
    server = {name: item.source for name, item in given[SERVER].items()}
    sources: list[Mapping[str, str]] = [server]
    if isinstance(options, LiveConfig):
        if limits_file is not None:
            found = options = options.with_limits(limits_file)
            named = given[SERVER]["limits"]
            said = ["soft", "hard", "target_delay", *(name.removesuffix("_s") for name in limits_file.times)]
            server |= dict.fromkeys(said, f"{named.value} ({named.source})")
        if stream or role:
            found = options.at(stream, role)
            sources = [*_levels_that_fit(given, stream, role), server]
    values = validated({name: item for name, item in given[SERVER].items() if name not in program.extra})
    shown = []
    for name in LiveSettings.model_fields:
        roles = rule_of(name).roles
        of_level = not (stream or role) or (roles is not None and (role is None or not roles or role in roles))
        if not of_level or (rule_of(name).streams and not program.has_streams):
            continue
        source = next((item[name] for item in sources if name in item), _DEFAULT)
        if name in MARKS.values():
            shown.append(_mark(name, found.limits, source, sources))
        else:
            path = rule_of(name).path
            value = value_at(found, path) if path is not None else getattr(values, name)
            shown.append(Effective(name, _written(name, value), source))
    return shown if stream or role else [*shown, *_extra(program, given)]


def _extra(program: ServerProgram, given: Settings) -> list[Effective]:
    found = []
    for name in program.extra:
        item = given[SERVER].get(name)
        text = "" if item is None else str(item.value)
        value = _MASK if text and _SECRET.search(name) else _masked(text)
        found.append(Effective(name, value, _DEFAULT if item is None else item.source))
    return found


def _levels_that_fit(given: Settings, stream: str, role: Role | None) -> list[Mapping[str, str]]:
    """Return where the settings of the levels that fit come from, by name, the nearest first."""
    levels: list[tuple[Level, dict[str, str]]] = []
    for where, values in given.items():
        if where != SERVER and values:
            level = Level(application=where.application, stream=where.stream, role=where.role)
            levels.append((level, {name: item.source for name, item in values.items()}))
    sources = {id(level): names for level, names in levels}
    ordered: Levels[Any] = Levels(level for level, _ in levels)
    return [sources[id(level)] for level in reversed(ordered.that_fit(stream, role))]


def _mark(name: str, limits: Limits, source: str, sources: list[Mapping[str, str]]) -> Effective:
    which: Any = name
    value = write_marks(limits, which)
    usual = write_marks(Limits.parse(write_marks(limits, "soft")), which)
    nearest_soft = next((number for number, item in enumerate(sources) if "soft" in item), len(sources))
    nearest = next((number for number, item in enumerate(sources) if name in item), len(sources))
    if name != "soft" and value == usual and nearest_soft < nearest:
        return Effective(name, value, "follows soft")
    return Effective(name, value, source)


def _written(name: str, value: Any) -> str:
    if value is None and name != "target_delay":
        return ""
    return _masked(kind_of(name).write(value))


def _masked(text: str) -> str:
    return ",".join(redact_url(part) for part in text.split(",")) if "://" in text else text


def sample() -> str:
    """Return a file of all settings, each with its description and default, all of them commented out."""
    lines = [
        "# All settings of a live server. A line that begins with # and a name shows the default, or in <> how a value",
        "# is written; take the # away to change it. Sizes are like 2MiB, durations like 8s, shares like 10%.",
        "# `flowctl config check FILE` checks a file, `flowctl config show FILE` shows what it comes to.",
    ]
    for item in filter(lambda item: item.is_text, settings_of()):
        roles = rule_of(item.name).roles
        value = json.dumps(item.default or f"<{item.kind}>")
        levels = (
            ""
            if roles is None
            else " May differ for an application"
            + ("" if item.name in OF_CONNECTIONS else " or stream")
            + ("." if not roles else f", or for a {' or '.join(sorted(role.value for role in roles))}.")
        )
        lines += ["", f"# {item.what}{levels}", f"#{item.name} = {value}"]
    return "\n".join([*lines, "", *_SAMPLE_LEVELS.splitlines(), ""])


_SAMPLE_LEVELS: Final = """\
# What differs for an application, a stream or a role. Of each setting the nearest level that says it counts: a role is
# nearer than a stream, that nearer than an application, and that nearer than the server; a role within a stream or an
# application is nearer than a role alone. Of patterns a name without * and ? is nearest, then one with more letters.

#[application.talk]
#target_delay = "800ms"

#[application.talk.viewer]
#policy = "audio-first"

#[stream."live/cam*"]
#gop_cache = "4MiB"

#[stream."live/cam*".publisher]
#media_silence = "30s"

#[role.viewer]
#stuck = "20s"

# A command that is run for each stream that is published: see docs/how-to/run-commands.md. Several tables are allowed.

#[[run]]
#on = "live/*"
#command = ["ffmpeg", "-i", "{url}", "-c", "copy", "-f", "flv", "{publish_1}"]
#publish = ["{app}/{stream}_copy"]\
"""
