"""Where settings come from: a TOML file, the environment and the command line, and which of them counts.

Option (or ``--set``) over environment over file over default. An error names where the value stands, what it is and
what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from flowctl.errors import ConfigError
from flowctl.flow.limitsfile import place_of, read_toml
from flowctl.live.settings.model import LiveSettings, kind_of, of_streams, settings_of
from flowctl.printable import short
from flowctl.rtmp.limits import WireLimits
from flowctl.server.program import ServeOptions, ServerProgram

ENVIRONMENT: Final = "FLOWCTL_"
_NOT_SETTINGS: Final = frozenset({"CACHE", "CONFIG", "FFMPEG", "KEY", "LOG_LEVEL", "MASTER", "SERVER"})
"""Variables of other parts of flowctl, without their prefix."""
RENAMED: Final = {
    "cache_bytes": "gop_cache",
    "first_media_s": "first_media",
    "media_message_bytes": "media_message",
    "ping_after_s": "ping_after",
    "player_wait_s": "player_wait",
}
GONE: Final = {
    "cache_messages": "CacheLimits in docs/reference.md",
    "cache_s": "CacheLimits in docs/reference.md",
    "events_queue": "EventsOptions in docs/telemetry.md",
    "events_samples": "EventsOptions in docs/telemetry.md",
    "flights_rows": "docs/flight.md",
    "flights_time": "docs/flight.md",
    "flush_adaptive": "LiveConfig in docs/reference.md",
    "work_cut_after_s": "WorkLimits in docs/reference.md",
    **{
        item.name: "WireLimits in docs/rtmp.md"
        for item in dataclasses.fields(WireLimits)
        if type(item.default) in {int, float}
    },
}
"""Settings of former versions, and where the figure stands now."""


class Given(NamedTuple):
    """A setting that was given.

    Attributes:
        value: as it was written.
        source: where, for errors: ``--stuck``, ``FLOWCTL_STUCK``, ``flowctl.toml, line 3: stuck``.
    """

    value: object
    source: str


def read_settings(
    program: ServerProgram,
    *,
    options: Mapping[str, str] | None = None,
    pairs: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ServeOptions:
    """Return what a server is to be built with.

    Args:
        program: the server.
        options: values of options, by the name of the setting.
        pairs: those of ``--set``: ``name=value``; as strong as options.
        environment: variables, of which those that begin with ``FLOWCTL_`` count. None: there are none.
        file: TOML file of settings. None: there is none.

    Raises:
        ConfigError: a setting is unknown, given twice or has a wrong value; names where it stands, the value, and what
            is allowed. Or settings do not go together, or a file cannot be read.
    """
    given: dict[str, Given] = {}
    for source in (_of_file(file), _of_environment(environment or {}), _of_options(options or {}, pairs)):
        _check_known(program, source)
        given |= source
    if marks := given.keys() & {"soft", "hard", "low", "target_delay"} if "limits" in given else ():
        raise ConfigError(
            f"{given[min(marks)].source} and {given['limits'].source} both set the limits",
            hint="leave one of the two out",
        )
    asked = [name for name in given if name.startswith(("events_", "flights"))]
    if asked and "events" not in given:
        raise ConfigError(
            f"{given[asked[0]].source} is set, but nothing is recorded", hint="give events (--events FOLDER) as well"
        )
    extra = {name: str(item.value) for name, item in given.items() if name in program.extra}
    return _validated({name: item for name, item in given.items() if name not in extra}).options(program, extra)


def _of_file(file: Path | None) -> dict[str, Given]:
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the settings in {file}: {error}", hint="is the path right (--config, FLOWCTL_CONFIG)?"
        ) from error
    lines = text.splitlines()
    table = read_toml(text, str(file))
    return {name: Given(value, f"{place_of(lines, str(file), '', name)}: {name}") for name, value in table.items()}


def _of_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    names = {key.removeprefix(ENVIRONMENT): key for key in environment if key.startswith(ENVIRONMENT)}
    for name, key in names.items():
        if name != name.lower().upper():  # FLOWCTL_stuck would be a second FLOWCTL_STUCK
            raise ConfigError(
                f"{short(key)}: variables of settings are in capitals", hint=f"{ENVIRONMENT}{name.lower().upper():.60}"
            )
    return {name.lower(): Given(environment[key], key) for name, key in names.items() if name not in _NOT_SETTINGS}


def _of_options(options: Mapping[str, str], pairs: Iterable[str]) -> dict[str, Given]:
    found = {name: Given(value, "--" + name.replace("_", "-")) for name, value in options.items()}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {short(pair)} is not name=value", hint="for example --set stuck=20s")
        if name in found:
            raise ConfigError(f"{found[name].source} and --set {name} set the same", hint="leave one of the two out")
        found[name] = Given(value, f"--set {name}")
    return found


def _check_known(program: ServerProgram, given: Mapping[str, Given]) -> None:
    """Refuse settings that the program does not have."""
    for name, (_, source) in given.items():
        if name in program.extra:
            continue
        if name not in LiveSettings.model_fields:
            hint = hint_for_former(name) or _hint(name, program)
            raise ConfigError(f"{source}: server {program.name!r} has no setting {short(name)}", hint=hint)
        if of_streams(name) and not program.has_streams:
            raise ConfigError(f"server {program.name!r} has no streams, it would ignore {source}", hint="leave it out")


def hint_for_former(name: str) -> str | None:
    """Return what became of a setting of former versions. None: there was none of that name."""
    if name in RENAMED:
        return f"it is called {RENAMED[name]} now"
    return f"it is a fixed figure now, see {GONE[name]}; leave it out" if name in GONE else None


def _hint(name: str, program: ServerProgram) -> str:
    near = difflib.get_close_matches(name, [item.name for item in settings_of(program)], 1)
    listed = f"flowctl serve {program.name} --list-settings lists what there is"
    return f"did you mean {near[0]}? {listed}" if near else listed


def _validated(given: Mapping[str, Given]) -> LiveSettings:
    context = {name: item.source for name, item in given.items()}
    try:
        return LiveSettings.model_validate({name: item.value for name, item in given.items()}, context=context)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        # What does not go together begins with the name of one of the two.
        name = str(first["loc"][0] if first["loc"] else cause).split(maxsplit=1)[0]
        source = context.get(name, "")
        if not isinstance(cause, ConfigError):
            cause = ConfigError(f"{source} is {short(given[name].value)}, allowed: {kind_of(name).word}")
        said = str(cause)
        if said.startswith((f"{name} is ", f"{name}: ", f"{name}, ")):
            said = source + said.removeprefix(name)
        elif not said.startswith(source):
            said = f"{source}: {said}"
        raise ConfigError(said, hint=cause.hint or "flowctl serve --list-settings says what it takes") from error
