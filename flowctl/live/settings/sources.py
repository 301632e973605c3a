"""Where settings come from: a TOML file, the environment and the command line, and which of them counts.

Option (or ``--set``) over environment over file over default, within each level. An error names where the value stands,
what it is and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict, Unpack

import structlog
from pydantic import ValidationError

from flowctl.core.flow.limits import Limits, write_marks
from flowctl.core.flow.limitsfile import LimitsFile, parse_limits_file
from flowctl.core.server.bans import BanList
from flowctl.core.server.listener import check_host
from flowctl.core.server.program import ServeOptions, ServerProgram
from flowctl.core.text.keyfiles import files_beside
from flowctl.core.text.printable import short
from flowctl.core.text.tomltext import TomlText, dotted
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError, InternalError
from flowctl.live.access.rules import PROOF_SETTINGS
from flowctl.live.access.webtokens import is_address
from flowctl.live.config import Difference, LiveConfig
from flowctl.live.settings.levels import MARKS, Level, Role, Takes, differing
from flowctl.live.settings.model import (
    OF_CONNECTIONS,
    PART,
    LiveSettings,
    kind_of,
    rule_of,
    settings_of,
    value_at,
)
from flowctl.wire.rtmp.url import NAMES_HINT, fits_names

_log: Final = structlog.get_logger("flowctl.settings")
_ROLES: Final = {item.value: item for item in Role}
ENVIRONMENT: Final = "FLOWCTL_"
_NOT_SETTINGS: Final = frozenset(
    {"CACHE", "CONFIG", "DNS", "FFMPEG", "KEY", "LOG_LEVEL", "MASTER", "SERVER", "TLS_INSECURE"}
)
"""Variables of other parts of flowctl, without their prefix; those of a command (``STREAM_NAME``) are none either."""
_SERVICE_LINK: Final = re.compile(
    r"\w*(?:SERVICE_HOST|PORT_\d+_(?:TCP|UDP|SCTP)_ADDR)=[\da-f.:]+"
    r"|\w*(?:SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)_PORT)=\d+"
    r"|\w*PORT_\d+_(?:TCP|UDP|SCTP)_PROTO=(?:tcp|udp|sctp)"
    r"|\w*PORT(?:_\d+_(?:TCP|UDP|SCTP))?=(?:tcp|udp|sctp)://\S+:\d+"
)
"""What Kubernetes, unless a pod has ``enableServiceLinks: false``, puts into its environment for each Service: of one
that is named flowctl-publish they begin with ``FLOWCTL_PUBLISH_``. No value of this shape is one of a setting."""


_BLANK: Final = " \t\r\n,;"
"""What a setting that says nothing may have in it."""


class Given(NamedTuple):
    """A setting that was given."""

    value: object
    source: str  # where, for errors: ``--stuck``, ``FLOWCTL_STUCK``, ``flowctl.toml, line 3: stuck``


class SettingPlace(NamedTuple):
    """A level: the server where all is empty, an application, streams, a role, or a role of one of these."""

    application: str = ""
    stream: str = ""
    role: Role | None = None

    def __str__(self) -> str:
        return str(Level(application=self.application, stream=self.stream, role=self.role)) if any(self) else "server"


SERVER: Final = SettingPlace()
Settings: TypeAlias = dict[SettingPlace, dict[str, Given]]
"""What was given, by level and name."""
_KINDS: Final = ("application", "stream", "role")


class Sources(TypedDict, total=False):
    """Where settings may stand; `text`: what `file` says, where that was read already."""

    options: Mapping[str, str]
    pairs: Iterable[str]
    environment: Mapping[str, str]
    file: Path | None
    text: str


def read_settings(program: ServerProgram, **sources: Unpack[Sources]) -> ServeOptions:
    file = sources.get("file")
    sources["pairs"] = tuple(sources.get("pairs", ()))
    if file is not None and "text" not in sources:
        sources["text"] = read_file(file)
    given = gather(program, **sources)
    found = settings_of_all(program, given)
    check_proofs(given)
    if program.check is not None:
        program.check(found)
    environment = {key: value for key, value in sources.get("environment", {}).items() if key.startswith(ENVIRONMENT)}
    ours = {key: value for key, value in environment.items() if not _SERVICE_LINK.fullmatch(f"{key}={value}")}
    if links := environment.keys() - ours.keys():
        _log.info("variables that Kubernetes makes of Services are no settings", variables=", ".join(sorted(links)))
    if file is None or not isinstance(found, LiveConfig):
        return found
    source = FileSource(program, sources | {"environment": ours}, file, sources["text"], found)
    return dataclasses.replace(found, source=source)


@dataclasses.dataclass(frozen=True, slots=True)
class FileSource:
    """A file of settings, with what goes before it: see `flowctl.live.config.SettingSource`, and `read_settings`."""

    program: ServerProgram
    sources: Sources
    file: Path
    text: str
    settings: LiveConfig

    def read(self, text: str) -> LiveConfig:
        """Return the settings with other contents of the file, which come after these."""
        self._check_whole(text)
        found = read_settings(self.program, **(self.sources | {"text": text}))
        if not isinstance(found, LiveConfig):  # it was one before, and that is the program's choice
            raise InternalError("the settings of a live server are none any more")
        read_named_files(found, self.settings)
        check_hosts(found, self.settings)
        return found

    def _check_whole(self, text: str) -> None:
        said, says = _of_file(self.file, self.text), _of_file(self.file, text)
        if any(said.values()) and not any(says.values()):
            raise ConfigError(
                f"{self.file} is empty, it set {sum(map(len, said.values()))} settings before",
                hint="write it again; a server that is started anew takes an empty file",
            )
        if self.text.startswith(text) and not text.endswith("\n") and self.text[len(text) :].strip("\r")[:1].strip():
            raise ConfigError(
                f"{self.file} ends in the middle of line {text.count(chr(10)) + 1} of what it said before",
                hint="write it again, whole",
            )
        stronger = gather(self.program, **(self.sources | {"file": None}))
        gone = [
            item.source.partition(": ")[2] or name
            for level, values in said.items()
            for name, item in values.items()
            if name in _ADMISSION_SETTINGS and name not in says.get(level, {}) and name not in stronger.get(level, {})
        ]
        if gone:
            raise ConfigError(
                f"{self.file} no longer sets {', '.join(gone)}, which keeps people out",
                hint="write what it is to be now, [] for everybody, or start the server anew",
            )

    def differences(self, before: LiveConfig, now: LiveConfig) -> list[Difference]:
        return differences(before, now)


def read_named_files(now: ServeOptions, before: LiveConfig | None = None) -> LimitsFile | None:
    """Read the files of limits and bans that settings name, but for those of `before`: a server watches these.

    Returns:
        What the limits file says.
    """
    limits = None
    for name in ("limits", "bans"):
        path = getattr(now, f"{name}_file", None)
        if path in {None, getattr(before, f"{name}_file", None)} or (name == "bans" and not path.exists()):
            continue  # bans may come later
        try:
            text = text_of(path.read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the {name} in {path}: {error}", hint=f"see {name} in the settings"
            ) from error
        if name == "bans":
            BanList.parse(text, str(path))
        elif isinstance(now, LiveConfig):
            limits = parse_limits_file(text, str(path))
            now.with_limits(limits)
    return limits


def check_hosts(now: ServeOptions, before: LiveConfig | None = None) -> None:
    """See that what settings listen on is of this machine, but for what `before` listens on already."""
    if isinstance(now, LiveConfig):
        known = {host for _, addresses in (before.listening_all if before else ()) for host, _ in addresses}
        for name, addresses in now.listening_all:
            for host, port in addresses:
                if host not in known:
                    check_host(host, port, name)


_ADMISSION_SETTINGS: Final = frozenset(
    {"credentials_file"}
    | {f"{proof}_auth" for proof in ("publish", "play")}
    | {f"{rule}_{what}" for rule in ("allow", "deny", "on") for what in ("publish", "play")}
    | {"on_connect"}
)
"""Settings that decide who may come in: a file that leaves one out would let in every client that it kept out."""
_SEARCH_PLACES: Final = {
    "soft": "limits",
    "hard": "limits",
    "target_delay": "limits",
    "credentials_file": "rtmp.credentials",
    "events_key_file": "events.key",
}
"""Places of settings that have none of their own, or that go together."""


def differences(before: LiveConfig, now: LiveConfig) -> list[Difference]:
    names: dict[str, list[str]] = {}
    for name in LiveSettings.model_fields:
        path = _SEARCH_PLACES.get(name) or rule_of(name).path
        if path is not None and path != "port":
            names.setdefault(path, []).append(name)
    changes = []
    for path, of in names.items():
        if value_at(before, path) != (value := value_at(now, path)):
            told = _changed_marks(before.limits, now.limits) or [path] if path == "limits" else of
            changes.append(Difference(", ".join(told), path, value, rule_of(of[0]).takes))
    if now.port not in {0, before.port}:  # a server that asked for any port has one
        changes.append(Difference("port", "port", now.port, Takes.RESTART))
    if before.levels != now.levels:
        changes.append(Difference(differing(before.levels, now.levels), "levels", now.levels, Takes.NOW))
    told_of = {item.path.partition(".")[0] for item in changes} | {"levels", "port"}
    changes += [
        Difference(field.name, field.name, getattr(now, field.name), Takes.RESTART)
        for field in dataclasses.fields(LiveConfig)
        if field.compare and field.name not in told_of and getattr(before, field.name) != getattr(now, field.name)
    ]
    return changes


def _changed_marks(before: Limits, now: Limits) -> list[str]:
    marks: list[str] = [which for which in MARKS.values() if write_marks(before, which) != write_marks(now, which)]
    return marks + (["target_delay"] if before.target_delay_ms != now.target_delay_ms else [])


def gather(program: ServerProgram, **sources: Unpack[Sources]) -> Settings:
    """Return the settings of all sources, as for `read_settings`, by level; of each setting the strongest source."""
    found: Settings = {SERVER: {}}
    for source in (
        _of_file(sources.get("file"), sources.get("text")),
        _of_environment(sources.get("environment", {})),
        _of_options(sources.get("options", {}), sources.get("pairs", ())),
    ):
        for level, given in source.items():
            _check_known(program, given, level)
            found[level] = found.get(level, {}) | given
    return found


def settings_of_all(program: ServerProgram, given: Settings) -> ServeOptions:
    server = given[SERVER]
    if marks := server.keys() & {"soft", "hard", "target_delay"} if "limits" in server else ():
        raise ConfigError(
            f"{server[min(marks)].source} and {server['limits'].source} both set the limits",
            hint="leave one of the two out",
        )
    asked = [name for name in server if name.startswith(("events_", "flights"))]
    if asked and "events" not in server:
        raise ConfigError(
            f"{server[asked[0]].source} is set, but nothing is recorded", hint="give events (--events FOLDER) as well"
        )
    extra = {name: str(item.value) for name, item in server.items() if name in program.extra}
    settings = validated({name: item for name, item in server.items() if name not in extra})
    options = settings.options(program, extra)
    if not isinstance(options, LiveConfig):
        return options
    levels = []
    for where, values in given.items():
        if where != SERVER and values:
            level = validated(values, part=True).level(*where)
            try:
                options.with_level(level)
            except ConfigError as error:
                name = min(values.keys() & {"soft", "hard"}, default=min(values))
                raise ConfigError(f"{values[name].source}: {error}", hint=error.hint) from error
            levels.append(level)
    return dataclasses.replace(options, levels=tuple(levels)) if levels else options


def check_proofs(given: Settings) -> None:
    there = {name for values in given.values() for name in values}
    for values in given.values():
        for name in ("publish_auth", "play_auth"):
            asked = re.findall("[a-z]+", str(values[name].value).lower()) if name in values else ()
            for proof, needed in PROOF_SETTINGS.items():
                if proof.value in asked and needed not in there:
                    raise ConfigError(
                        f"{values[name].source} asks for {proof.value}, but there is no {needed}",
                        hint=f"give {needed}, see docs/access.md",
                    )


def read_file(file: Path) -> str:
    try:
        return text_of(file.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        hint = "is the path right (--config, FLOWCTL_CONFIG)?"
        if isinstance(error, UnicodeDecodeError):
            hint = "it must be text in UTF-8"
        elif isinstance(error, PermissionError):
            hint = "let the user that the server runs as read it, and open its folders"
        elif isinstance(error, IsADirectoryError):
            hint = "it is a folder: name the file in it"
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the settings in {file}: {why}", hint=hint) from error


def _of_file(file: Path | None, text: str | None) -> Settings:
    if file is None:
        return {}
    toml = TomlText(read_file(file) if text is None else text, str(file), "docs/flowctl.toml")
    found: Settings = {}
    if "run" in toml.table and file.exists():
        for place in (file, file.absolute().parent, file.resolve().parent):
            mode = place.stat().st_mode
            kept = stat.S_ISDIR(mode) and mode & stat.S_ISVTX  # in a folder such as /tmp others replace no file
            if mode & stat.S_IWOTH and not kept:
                raise ConfigError(
                    f"{file} has commands to run, and everybody may write to {place}", hint=f"chmod o-w {place}"
                )

    def note(path: tuple[str, ...], value: object) -> None:
        source = f"{toml.place(*path)}: {dotted(path)}"
        level, name = _level_of(path, source)
        if name:
            found.setdefault(level, {})[name] = Given(_beside(file, name, value), source)
        elif isinstance(value, dict):
            for key, inner in value.items():
                note((*path, key), inner)
        else:
            raise ConfigError(f"{source} is {short(value)}, it must be a table of settings", hint=_LEVELS_HINT)

    for key, value in toml.table.items():
        note((key,), value)
    return found


def _beside(file: Path, name: str, value: object) -> object:
    """Return the value of a setting of a file; a path there is relative to the file's folder, wherever one stands."""
    word = kind_of(name).word if name in LiveSettings.model_fields else ""
    if name.startswith("relay_") and isinstance(value, str):
        return re.sub(r"=([^\s;]+)", lambda found: f"={files_beside(found[1], file.parent)}", value)
    if not word.endswith("path") or not isinstance(value, str):
        return value
    algorithm, colon, path = value.partition(":") if ":" in word else ("", "", value)
    return f"{algorithm}{colon}{file.parent / path}" if path.strip(_BLANK) and not is_address(path) else value


_LEVELS_HINT: Final = (
    'levels are [application.NAME], [stream."app/stream"] with * and ?, [role.viewer] and [role.publisher], and '
    "[application.NAME.viewer] and so on"
)


def _level_of(path: tuple[str, ...], source: str) -> tuple[SettingPlace, str]:
    """Return the level of a key of the file, and its name there; empty: it is a table around settings."""
    kind, *rest = path
    if kind not in _KINDS:
        return SERVER, ".".join(path)
    if kind == "role":
        if rest and rest[0] not in _ROLES:
            raise ConfigError(f"{source}: there is no role {short(rest[0])}", hint="viewer or publisher")
        role, inner = (_ROLES[rest[0]], rest[1:]) if rest else (None, [])
        return SettingPlace(role=role), ".".join(inner)
    name, inner = (rest[0], rest[1:]) if rest else ("", [])
    role = None
    if inner and inner[0] in _ROLES:
        role, inner = _ROLES[inner[0]], inner[1:]
    if rest and not name:
        raise ConfigError(f"{source}: the name is empty", hint=_LEVELS_HINT)
    if kind == "application" and "/" in name:
        raise ConfigError(f"{source}: {short(name)} is no application, it has a /", hint=f'[stream."{name:.60}"]')
    if kind == "stream" and name and not set(name) & set("/*?["):
        hint = f'a stream is app/stream, as in [stream."live/{name:.60}"]; of all applications: [stream."*/{name:.60}"]'
        raise ConfigError(f"{source}: {short(name)} fits no stream", hint=hint)
    if not fits_names(f"{name or '*'}/*" if kind == "application" else name):
        raise ConfigError(f"{source}: {short(name)} fits no stream", hint=NAMES_HINT)
    found = SettingPlace(application=name, role=role) if kind == "application" else SettingPlace(stream=name, role=role)
    return found, ".".join(inner)


def _of_environment(environment: Mapping[str, str]) -> Settings:
    names = {key.removeprefix(ENVIRONMENT): key for key in environment if key.startswith(ENVIRONMENT)}
    found: Settings = {}
    for name, key in names.items():
        if _SERVICE_LINK.fullmatch(f"{key}={environment[key]}"):
            continue
        if name != name.lower().upper():  # FLOWCTL_stuck would be a second FLOWCTL_STUCK
            raise ConfigError(
                f"{short(key)}: variables of settings are in capitals", hint=f"{ENVIRONMENT}{name.lower().upper():.60}"
            )
        if name in _NOT_SETTINGS or (name.startswith("STREAM_") and not name.startswith("STREAM__")):
            if name == "CONFIG":  # without its file a server would be open to everybody
                _check_not_empty(environment[key], key)
            continue
        path = tuple(name.lower().split("__"))
        level, setting = _level_of(path, key)
        if not setting:
            raise ConfigError(f"{key} names no setting", hint=f"for example {key}__POLICY")
        found.setdefault(level, {})[setting] = Given(environment[key], key)
    return found


def _of_options(options: Mapping[str, str], pairs: Iterable[str]) -> Settings:
    found: Settings = {SERVER: {name: Given(value, "--" + name.replace("_", "-")) for name, value in options.items()}}
    for pair in pairs:
        name, equals, value = _pair(pair)
        if not equals or not name:
            raise ConfigError(f"--set {short(pair)} is not name=value", hint="for example --set stuck=20s")
        level, setting = _level_of(_key(name, pair) if name.split(".")[0] in _KINDS else (name,), f"--set {name}")
        if not setting:
            raise ConfigError(f"--set {short(name)} names no setting", hint=_LEVELS_HINT)
        there = found.setdefault(level, {})
        if setting in there:
            raise ConfigError(f"{there[setting].source} and --set {name} set the same", hint="leave one of the two out")
        there[setting] = Given(value, f"--set {name}")
    return found


def _pair(text: str) -> tuple[str, str, str]:
    found = re.match(r"((?:[^\"'=]|\"[^\"]*\"|'[^']*')*)(=)(.*)", text, re.DOTALL)
    return (found[1], found[2], found[3]) if found else (text, "", "")


def _key(name: str, pair: str) -> tuple[str, ...]:
    """Return the place that a key in the words of TOML names."""
    try:
        value: object = tomllib.loads(f"{name} = 0")
    except ValueError as error:
        raise ConfigError(
            f"--set {short(pair)}: {short(name)} is no key", hint="write it like --set 'stream.\"live/*\".policy=...'"
        ) from error
    path = []
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        path.append(key)
    return tuple(path)


def _check_known(program: ServerProgram, given: Mapping[str, Given], level: SettingPlace) -> None:
    """Refuse settings that the program does not have, or not at this level, or that are empty."""
    for name, (value, source) in given.items():
        _check_not_empty(value, source)
        if level != SERVER and not program.has_streams:
            raise ConfigError(f"server {program.name!r} has no streams, it would ignore {source}", hint="leave it out")
        if name in program.extra and level == SERVER:
            continue
        if name not in LiveSettings.model_fields:
            hint = _hint(name, program)
            raise ConfigError(f"{source}: server {program.name!r} has no setting {short(name)}", hint=hint)
        if rule_of(name).streams and not program.has_streams:
            raise ConfigError(f"server {program.name!r} has no streams, it would ignore {source}", hint="leave it out")
        if level == SERVER:
            continue
        roles = rule_of(name).roles
        if roles is None:
            raise ConfigError(
                f"{source}: {name} is a setting of the whole server",
                hint="levels may have "
                + ", ".join(item for item in LiveSettings.model_fields if rule_of(item).roles is not None),
            )
        if level.stream and name in OF_CONNECTIONS:
            raise ConfigError(
                f"{source}: {name} is of connections, and over RTMP a connection names an application, no stream",
                hint="set on_publish and on_play for the stream, or on_connect for the application",
            )
        if level.role is not None and level.role not in roles:
            whose = f"of a {next(iter(roles)).value}" if roles else "of the stream itself, whatever the role"
            raise ConfigError(f"{source}: {name} is {whose}", hint="set it for the application or the stream")


def _check_not_empty(value: object, source: str) -> None:
    """Refuse an empty text: an unset variable of a script or of compose would open a server to everybody."""
    texts = value if isinstance(value, list) and value else [value]
    if all(isinstance(text, str) and not text.strip(_BLANK) for text in texts):
        raise ConfigError(f"{source} is empty", hint="leave it out for the default; off is none, where that is allowed")


def _hint(name: str, program: ServerProgram) -> str:
    if name in _ROLES:
        return f"a role is [role.{name}]"
    if name.endswith("_connect"):
        return "networks are chosen by allow_publish, deny_publish, allow_play and deny_play; flowctl ban keeps one out"
    if name.startswith("log"):
        return "log_file names its file; --log-level stands before the command, and --log-json behind it"
    near = difflib.get_close_matches(name, [item.name for item in settings_of(program)], 1)
    listed = f"flowctl serve {program.name} --list-settings lists what there is"
    return f"did you mean {near[0]}? {listed}" if near else listed


def validated(given: Mapping[str, Given], *, part: bool = False) -> LiveSettings:
    """Return the settings of one level, each of which is valid by itself."""
    context: dict[str, Any] = {name: item.source for name, item in given.items()} | ({PART: True} if part else {})
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
        path = rule_of(name).path if name in LiveSettings.model_fields else None
        field = (path or name).rpartition(".")[2]  # hls_part_s of hls_part
        word = field if said.startswith(field) else name
        if said.startswith((f"{word} is ", f"{word}: ", f"{word}, ")):
            said = source + said.removeprefix(word)
        elif not said.startswith(source):
            said = f"{source}: {said}"
        raise ConfigError(said, hint=cause.hint or "flowctl serve --list-settings says what it takes") from error
