"""Where text becomes settings: from a TOML file, the environment and the command line to one `LiveConfig`.

`LiveSettings` has a field for each setting that an operator may change, and nothing else does: the options of
``flowctl serve``, the table of docs/reference.md and the listing are made of it. A field names its place in
`LiveConfig` (``settings.stuck_s``). Its default is what stands there, and its range is what the dataclass there takes:
neither is written twice. What has no field is not for operators; who writes code sets it in the dataclasses.

Precedence: option (or ``--set``) over environment over file over default. An error names where the value came from.

Pydantic is loaded with this module and by nothing else of flowctl. Levels (application, stream, role) are one more
table of the file each, whose names are fields of this model.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flowctl.addresses import Network
from flowctl.errors import ConfigError
from flowctl.flight.flights import parse_networks
from flowctl.flow.limits import Limits, parse_marks, parse_target_delay, target_marks, write_marks
from flowctl.flow.limitsfile import place_of, read_toml
from flowctl.flow.policy import LIVE_POLICIES
from flowctl.judging.shadow import Candidate
from flowctl.live.config import Audience, LiveConfig, SecondPublisher, parse_audiences
from flowctl.rtmp.limits import WireLimits
from flowctl.sending.settings import AgeSource
from flowctl.server.program import ServeOptions, ServerProgram
from flowctl.telemetry.options import Addresses, Streams
from flowctl.telemetry.privacy import check_private, read_key
from flowctl.units import parse_count, parse_duration, parse_share, parse_size, write_duration, write_size

ENVIRONMENT: Final = "FLOWCTL_"
_NOT_SETTINGS: Final = frozenset({"CACHE", "CONFIG", "FFMPEG", "LOG_LEVEL", "MASTER"})
"""Variables of other parts of flowctl, without their prefix."""
_DEFAULTS: Final = LiveConfig()
_OF_ALL: Final = frozenset(item.name for item in dataclasses.fields(ServeOptions))
"""Fields of `LiveConfig` that every server has."""

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


# -- how values are written


class Kind(NamedTuple):
    """How values of one kind are written.

    Attributes:
        word: for it, in tables.
        write: returns the text of a value.
    """

    word: str
    write: Callable[[Any], str] = str


def _text(parse: Callable[[str, str], Any]) -> BeforeValidator:
    """Return what reads a text with `parse(text, name for errors)` and leaves what is no text as it is."""

    def read(value: Any, info: ValidationInfo) -> Any:
        return parse(value, _source(info)) if isinstance(value, str) else value

    return BeforeValidator(read)


def _only_text(parse: Callable[[str, str], Any]) -> BeforeValidator:
    """Return the same, for what can only be written as a text."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            raise ValueError("no text")  # noqa: TRY004 - pydantic takes it; what is said of it is in `_validated`
        return parse(value, _source(info))

    return BeforeValidator(read)


def _source(info: ValidationInfo) -> str:
    name = info.field_name or ""
    return str((info.context or {}).get(name, name))


def _number(text: str, source: str) -> float:
    try:
        return float(text)  # what is not finite is in no range
    except ValueError:
        raise ConfigError(f"{source} is {_short(text)}, it must be a number") from None


def _yes(text: str, source: str) -> bool:
    if text not in {"yes", "no"}:
        raise ConfigError(f"{source} is {_short(text)}, it must be yes or no")
    return text == "yes"


def _path(text: str, source: str) -> Path:
    if not text:
        raise ConfigError(f"{source} is empty, it must be a path")
    return Path(text)


def _marks(text: str, source: str) -> str:
    parse_marks(text, source)  # by themselves; whether they go together is seen when all are there
    return text


def _shadow(text: str) -> Limits:
    soft, slash, hard = text.partition("/")
    return Limits.parse(soft, hard if slash else None)


def _proxies(text: str, source: str) -> tuple[str, ...]:
    return tuple(map(str, parse_networks(text, source)))


def _items(value: Any) -> Any:
    """Let a list of the file be written as such."""
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return ",".join(value) if texts else value


def _seconds(value: Any) -> Any:
    """Let a number of the file be one of seconds, as for any duration."""
    return f"{value:f}" if type(value) in {int, float} else value


def _commas(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


_STRICT: Final = Field(strict=True)
"""A number is no text and no truth value."""
_FINITE: Final = Field(strict=True, allow_inf_nan=False)
Duration = Annotated[float, _text(parse_duration), _FINITE, Kind("duration", write_duration)]
Size = Annotated[int, _text(parse_size), _STRICT, Kind("size", write_size)]
Count = Annotated[int, _text(parse_count), _STRICT, Kind("number")]
Rate = Annotated[float, _text(_number), _FINITE, Kind("rate", "{:g}".format)]
Share = Annotated[float, _text(parse_share), _FINITE, Kind("share", "{:.15g}".format)]
Flag = Annotated[bool, _text(_yes), _STRICT, Kind("yes|no", lambda value: "yes" if value else "no")]
Text = Annotated[str, Kind("text")]
File = Annotated[Path | None, _only_text(_path), Kind("path")]
Marks = Annotated[str | None, _only_text(_marks), Kind("bytes,messages,age")]
Target = Annotated[
    int | None,
    _only_text(parse_target_delay),
    BeforeValidator(_seconds),
    Kind("auto|off|duration", lambda value: target_marks(Limits(target_delay_ms=value))),
]
Policy = Annotated[str, Kind("|".join(LIVE_POLICIES))]
Audiences = Annotated[
    tuple[Audience, ...],
    _only_text(lambda text, _: parse_audiences(text)),
    Kind("app/stream=delay policy;...", lambda items: "; ".join(map(str, items))),
]
Proxies = Annotated[tuple[str, ...], _only_text(_proxies), BeforeValidator(_items), Kind("addresses", _commas)]
Networks = Annotated[
    tuple[Network, ...], _only_text(parse_networks), BeforeValidator(_items), Kind("addresses", _commas)
]
Age = Annotated[AgeSource, Kind("queue|delay", lambda item: item.value)]
Second = Annotated[SecondPublisher, Kind("refuse|replace|standby", lambda item: item.value)]
HowAddresses = Annotated[Addresses, Kind("plain|truncated|hashed", lambda item: item.value)]
HowStreams = Annotated[Streams, Kind("hash|plain", lambda item: item.value)]


# -- the settings


def _at(path: str, what: str, *, streams: bool | None = None) -> Any:
    """Return the field of a setting that has a place in `LiveConfig`, with the default that stands there.

    Args:
        path: of the place.
        what: it does, in a line.
        streams: whether it means nothing to a server without streams. None: as its place says.
    """
    streams = path.partition(".")[0] not in _OF_ALL if streams is None else streams
    return Field(
        default=_value(_DEFAULTS, path), description=what, json_schema_extra={"path": path, "streams": streams}
    )


def _own(what: str, *, path: str | None = None, streams: bool = True) -> Any:
    """Return the field of a setting that is not there unless it is given, or that takes more than putting somewhere."""
    return Field(default=None, description=what, json_schema_extra={"path": path, "streams": streams})


def _value(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


class LiveSettings(BaseModel):
    """The settings of a server that an operator may change."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    host: Text = _at("host", "Address to listen on; 0.0.0.0 for all.")
    port: Annotated[Count | None, Kind("number")] = _own(
        "Port; 0 for any free one. Default: the server's own.", path="port", streams=False
    )
    groups: Count = _at("group_count", "Poll groups, that is threads.")
    trusted_proxies: Proxies = _at(
        "trusted_proxies", "Proxies that say first whom they speak for (PROXY protocol v1, v2)."
    )
    notsent_lowat: Size = _at(
        "socket_options.notsent_lowat_bytes", "Unsent bytes the kernel takes before it says stop; 0: its own choice."
    )

    soft: Marks = _own("Soft limit of what waits for one peer.", streams=False)
    hard: Marks = _own("Hard limit; without it twice the soft one.", streams=False)
    low: Marks = _own("Low mark; without it half the soft one.", streams=False)
    limits: File = _at("limits_file", "Read the limits from this TOML file, now and when it changes.")
    stuck: Duration = _at("settings.stuck_s", "Cut a peer whose connection takes nothing for so long; 0: off.")
    soft_too_long: Duration = _at("settings.soft_too_long_s", "Cut a peer above its soft limit for so long; 0: off.")
    target_delay: Target = _at(
        "limits.target_delay_ms", "How late pictures may reach a slow viewer; later ones are left out.", streams=True
    )
    policy: Policy = _at("policy", "What is left out for slow viewers.")
    audiences: Audiences = _at("audiences", "Target delay and policy of some streams; the first that fits counts.")
    age_axis: Age = _at("settings.age_from", "Age limit: of what is queued, or the viewer's whole delay.", streams=True)
    return_after: Duration = _at(
        "return_after_s", "Bring a viewer back to live that took nothing for so long; 0: send all that is old."
    )
    memory_budget: Size = _at("memory_budget_bytes", "What may wait for all slow viewers together; 0: no limit.")
    memory_budget_per_address: Flag = _at(
        "memory_budget_per_address", "Count the viewers of one address as one for the budget."
    )
    shadow_limits: Annotated[Limits | None, _only_text(lambda text, _: _shadow(text)), Kind("soft[/hard]")] = _own(
        "Compare with these limits, which do nothing; each as bytes,messages,age."
    )

    max_connections: Count = _at("admission.connections", "Connections in all; 0: what the limit of open files allows.")
    per_address: Count = _at("admission.connections_per_address", "Connections of one address; 0: any number.")
    new_per_address: Rate = _at(
        "admission.new_per_address_and_s", "New connections of one address per second; 0: any number."
    )
    publishers_per_address: Count = _at(
        "publishers_per_address", "Streams that one address may publish at a time; 0: any number."
    )
    work_share_per_connection: Share = _at(
        "work.share_per_connection", "Of a thread's time, what the input of one connection may take; 0: any."
    )
    work_share_per_address: Share = _at("work.share_per_address", "The same of all connections of one address; 0: any.")
    bans: File = _at("bans_file", "Keep out whom this file of JSON lines names, now and when it changes.")
    credentials_file: File = _own("File of user:password lines for Adobe authentication; without it there is none.")
    hooks: Text = _at("hooks", "package.module:Name of a LiveHooks class of yours: who may publish and play.")

    flush: Duration = _at("flush_interval_s", "Longest time between two flushes of a stream.")
    gop_cache: Size = _at("cache.size_bytes", "GOP cache of a stream; 0: none.")
    media_message: Size = _at("rtmp.limits.media_message_bytes", "Largest audio or video message that is taken.")
    second_publisher: Second = _at("second_publisher", "What happens when a name is published twice.")
    return_grace: Duration = _at(
        "return_grace_s", "How long a publisher whose connection broke may stay away unnoticed; 0: not at all."
    )
    first_media: Duration = _at("rtmp.limits.first_media_s", "Cut a publisher that sends nothing at first; 0: never.")
    media_silence: Duration = _at("media_silence_s", "Cut a publisher without sound and picture; 0: never.")
    players_may_wait: Flag = _at("players_may_wait", "Whether players may wait for a publisher.")
    player_wait: Duration = _at("rtmp.limits.player_wait_s", "How long they may wait; 0: for ever.")
    ping_after: Duration = _at("rtmp.limits.ping_after_s", "Ask a peer that is silent whether it is there; 0: never.")

    events: Annotated[str, _only_text(lambda text, source: str(_path(text, source))), Kind("path")] = _at(
        "events.folder", "Record what happens to each connection as Parquet files there."
    )
    events_node: Text = _at("events.node", "Name of this server in records. Default: host name and port.")
    events_interval: Duration = _at("events.interval_s", "Time between two samples of a connection.")
    events_rotate: Duration = _at(
        "events.rotate_s", "A file is finished after so long; a crash loses no more than that."
    )
    events_max: Size = _at(
        "events.max_bytes", "What this server's files may take on the disk, then the oldest go; 0: any."
    )
    events_addresses: HowAddresses = _at("events.addresses", "Addresses of peers in records (truncated: /24, /48).")
    events_streams: HowStreams = _at("events.streams", "Names of streams in records; they may be keys.")
    events_key_file: File = _own("File with the key of the hashes; without it they differ after each restart.")
    flights: Share = _at("flights.share", "Share of the connections to record for flowctl replay, such as 1%.")
    flights_addresses: Networks = _at("flights.addresses", "Addresses whose connections are all recorded.")
    flights_at_once: Count = _at("flights.most_at_once", "Connections recorded at a time.")

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        """See that the dataclass that has the setting takes the value."""
        path = place(info.field_name or "")
        if path is not None and value != _value(_DEFAULTS, path):
            owner, _, name = path.rpartition(".")
            dataclasses.replace(_value(_DEFAULTS, owner) if owner else _DEFAULTS, **{name: value})
        return value

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        """See that the limits go together."""
        self._limits()
        return self

    def options(self, program: ServerProgram, extra: Mapping[str, str]) -> ServeOptions:
        """Return what these settings make of the usual ones: a `LiveConfig` for a program with streams.

        Args:
            program: the server.
            extra: settings that only it has.

        Raises:
            ConfigError: settings do not go together, or a file that one names cannot be used.
        """
        tree: dict[str, Any] = {"port": program.default_port, "extra": dict(extra)}
        for name in self.model_fields_set:
            if (path := place(name)) is not None:
                _put(tree, path, getattr(self, name))
        if self.model_fields_set & {"soft", "hard", "low", "target_delay"}:
            tree["limits"] = self._limits()
        if self.credentials_file is not None:
            _put(tree, "rtmp.credentials", read_credentials(self.credentials_file))
        if self.events_key_file is not None:
            _put(tree, "events.key", read_key(self.events_key_file))
        options: Any = _replaced(LiveConfig() if program.has_streams else ServeOptions(), tree)
        return options if self.shadow_limits is None else _with_shadow(options, self.shadow_limits)

    def _limits(self) -> Limits:
        """Return the limits; the soft marks are the default where only others are given."""
        usual = write_marks(_DEFAULTS.limits, "soft")
        try:
            return Limits.parse(self.soft or usual, self.hard, self.low, target_delay_ms=self.target_delay)
        except ConfigError as error:
            if self.soft is not None:
                raise
            raise ConfigError(f"{error}, which is the default", hint="give soft as well") from error


def _with_shadow(options: LiveConfig, limits: Limits) -> LiveConfig:
    """Return `options` with a shadow that differs from the real settings in the marks of its limits alone."""
    shadow = Candidate(
        limits=limits,
        policy=LIVE_POLICIES[options.policy],
        name="shadow limits",
        stuck_s=options.settings.stuck_s,
        soft_too_long_s=options.settings.soft_too_long_s,
        marks_only=True,
    )
    return dataclasses.replace(options, shadow=shadow)


def place(name: str) -> str | None:
    """Return the place of a setting in `LiveConfig`. None: it has none of its own."""
    found: str | None = _extra(name)["path"]
    return found


def _extra(name: str) -> Any:
    return LiveSettings.model_fields[name].json_schema_extra


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _replaced(settings: Any, tree: Mapping[str, Any]) -> Any:
    """Return the dataclass `settings` with the values of `tree`, whose tables are dataclasses within it."""
    changes = {}
    for name, value in tree.items():
        now = getattr(settings, name)
        within = isinstance(value, dict) and dataclasses.is_dataclass(now)
        changes[name] = _replaced(now, value) if within else value
    return dataclasses.replace(settings, **changes)


_USERS: Final = "one user:password per line; chmod 600"


def read_credentials(path: Path) -> dict[str, str]:
    """Return the passwords by user of a file with one ``user:password`` per line; ``#`` begins a comment line.

    Raises:
        ConfigError: the file cannot be read, others than its owner may use it, or a line has no user or no password. No
            message shows a password.
    """
    try:
        check_private(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the credentials file {path}: {error}", hint=_USERS) from error
    credentials = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        user, colon, password = line.partition(":")
        if not (user and colon and password):
            raise ConfigError(f"{path}, line {number}: it must be user:password", hint=_USERS)
        credentials[user] = password
    if not credentials:
        raise ConfigError(f"{path} holds no user", hint="without credentials_file there is no authentication")
    return credentials


# -- what there is, in words


class Setting(NamedTuple):
    """A setting, in words.

    Attributes:
        name: of it; ``--name`` with hyphens, ``FLOWCTL_NAME``, a key of the file.
        kind: how its value is written.
        default: written so; empty: there is none.
        what: it does.
    """

    name: str
    kind: str
    default: str
    what: str

    @property
    def option(self) -> str:
        """Its option."""
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """Its kind as it stands in a help: in capitals, but for words to choose from."""
        return self.kind if "|" in self.kind else self.kind.upper()


def kind_of(name: str) -> Kind:
    """Return how the value of a setting is written."""
    return next(item for item in reversed(LiveSettings.model_fields[name].metadata) if isinstance(item, Kind))


def settings_of(program: ServerProgram | None = None) -> list[Setting]:
    """Return the settings of a server. None: all but those that only one program has."""
    usual = {name: write_marks(_DEFAULTS.limits, name) for name in ("soft", "hard", "low")}
    found = []
    for name, field in LiveSettings.model_fields.items():
        if program is not None and _extra(name)["streams"] and not program.has_streams:
            continue
        kind = kind_of(name)
        known = field.default is not None or name == "target_delay"
        default = kind.write(field.default) if known else usual.get(name, "")
        found.append(Setting(name, kind.word, default, field.description or ""))
    return found + [Setting(name, "text", "", what) for name, what in (program.extra if program else {}).items()]


# -- where they come from


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
    return {name.lower(): Given(environment[key], key) for name, key in names.items() if name not in _NOT_SETTINGS}


def _of_options(options: Mapping[str, str], pairs: Iterable[str]) -> dict[str, Given]:
    found = {name: Given(value, "--" + name.replace("_", "-")) for name, value in options.items()}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {_short(pair)} is not name=value", hint="for example --set stuck=20s")
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
            raise ConfigError(f"{source}: server {program.name!r} has no setting {_short(name)}", hint=hint)
        if _extra(name)["streams"] and not program.has_streams:
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
            cause = ConfigError(f"{source} is {_short(given[name].value)}, allowed: {kind_of(name).word}")
        said = str(cause)
        if said.startswith(f"{name} is "):
            said = source + said.removeprefix(name)
        elif not said.startswith(source):
            said = f"{source}: {said}"
        raise ConfigError(said, hint=cause.hint or "flowctl serve --list-settings says what it takes") from error


def _short(value: object) -> str:
    """Return `value` for an error: what is long is cut, since an error is one line of a log."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
