"""The settings of a server that an operator may change, one line each.

`LiveSettings` has a field for each of them; the options of ``flowctl serve``, the table of docs/reference.md and the
listing are made of it. A field names its place in `LiveConfig` (``settings.stuck_s``). Its default is what stands
there, and its range is what the dataclass there takes: neither is written twice. What has no field is for code alone.
Pydantic is loaded with this room and by nothing else of flowctl.

Levels (application, stream, role) are tables of the file, whose keys are those fields that are of a role or a stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flowctl.core.flow.limits import Limits, write_marks
from flowctl.core.server.program import ServeOptions, ServerProgram
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.settings.kinds import (
    Admin,
    Count,
    Duration,
    Failure,
    File,
    Flag,
    Folder,
    FolderPath,
    Format,
    Hooks,
    HowAddresses,
    HowStreams,
    Keys,
    Listening,
    Marks,
    Networks,
    Patterns,
    Place,
    Places,
    Policy,
    Proofs,
    Proxies,
    Rate,
    Redirects,
    Relays,
    Renditions,
    Runs,
    Second,
    Secrets,
    SettingKind,
    Share,
    Size,
    Steps,
    Target,
    Text,
    TextOrOff,
    WebTokens,
    Words,
    Workers,
    read_credentials,
)
from flowctl.live.settings.levels import Level, Role, Takes, put, replaced
from flowctl.live.settings.runs import ONLY_IN_FILE
from flowctl.records.telemetry.privacy import read_key

_DEFAULTS: Final = LiveConfig()
_COMMON_FIELDS: Final = frozenset(item.name for item in dataclasses.fields(ServeOptions))
"""Fields of `LiveConfig` that every server has."""


_VIEWER: Final = frozenset({Role.VIEWER})
_PUBLISHER: Final = frozenset({Role.PUBLISHER})
_BOTH: Final = frozenset(Role)
_NO_ROLE: Final[frozenset[Role]] = frozenset()
"""Roles of a setting of the stream itself: applications and streams may say it, roles may not."""
OF_CONNECTIONS: Final = frozenset({"on_connect"})
"""Settings that applications may say, streams not: over RTMP a connection names no stream, what follows it does."""


_Roles: TypeAlias = frozenset[Role] | None


class SettingRule(NamedTuple):
    """Properties of a setting beside its type."""

    path: str | None  # its place in `LiveConfig`. None: it takes more than putting somewhere.
    streams: bool  # whether it means nothing to a server without streams
    takes: Takes  # when a server that runs takes another value
    roles: frozenset[Role] | None  # that may differ in it; empty: the stream's itself. None: the server's alone.


def _at(path: str, what: str, *, streams: bool | None = None, takes: Takes | None = None, of: _Roles = None) -> Any:
    streams = path.partition(".")[0] not in _COMMON_FIELDS if streams is None else streams
    return _own(what, path=path, streams=streams, takes=takes, of=of, default=value_at(_DEFAULTS, path))


def _own(
    what: str,
    *,
    path: str | None = None,
    streams: bool = True,
    takes: Takes | None = None,
    of: _Roles = None,
    default: Any = None,
) -> Any:
    """Return the field of a setting that is not there unless it is given, or that takes more than putting somewhere."""
    # What may differ by stream or role is looked up each time, and so in force at once.
    takes = takes or (Takes.RESTART if of is None else Takes.NOW)
    extra: dict[str, Any] = {"rule": SettingRule(path, streams, takes, of)}
    return Field(default=default, description=what, json_schema_extra=extra)


def value_at(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


PART: Final = "part of"
"""Key in the context of a validation: the settings are of a level, and only a part of those in force."""


class LiveSettings(BaseModel):
    """The settings of a server that an operator may change."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    host: Text = _at("host", "Address to listen on, or several; 0.0.0.0 and [::] for all.")
    port: Annotated[Count | None, SettingKind("number")] = _own(
        "Port; 0 for any free one. Default: the server's own.", path="port", streams=False
    )
    groups: Count = _at("group_count", "Poll groups, that is threads.")
    workers: Workers = _at("workers", "Processes that serve the port together; auto or 0: one per core.")
    trusted_proxies: Proxies = _at(
        "trusted_proxies", "Proxies that say first whom they speak for (PROXY protocol v1, v2)."
    )
    log_file: File = _at("log.path", "Write the log to this file and not to standard error.")
    log_max_size: Size = _at("log.max_bytes", "Begin a new log file at this size, and each day; 0: others move it.")
    log_keep: Count = _at("log.keep", "Older log files to keep; 0: all.")

    soft: Marks = _own("Soft limit of what waits for one peer.", streams=False, of=_BOTH)
    hard: Marks = _own(
        "Hard limit; without it twice the soft one. The low mark is half the soft one.", streams=False, of=_BOTH
    )
    limits: File = _at("limits_file", "Read the limits from this TOML file, now and when it changes.")
    stuck: Duration = _at(
        "settings.stuck_s", "Cut a peer whose connection takes nothing for so long; 0: off.", of=_BOTH
    )
    target_delay: Target = _at(
        "limits.target_delay_ms",
        "How late pictures may reach a slow viewer; later ones are left out.",
        streams=True,
        of=_BOTH,
    )
    policy: Policy = _at("policy", "What is left out for slow viewers.", of=_VIEWER)
    memory_budget: Size = _at(
        "memory_budget_bytes",
        "What may wait for all slow viewers together; 0: no limit. As much is for recordings and HLS; 0: 512MiB.",
        takes=Takes.NOW,
    )

    max_connections: Count = _at(
        "admission.connections", "Connections in all; 0: what the limit of open files allows.", takes=Takes.NOW
    )
    per_address: Count = _at(
        "admission.connections_per_address", "Connections of one address; 0: any number.", takes=Takes.NOW
    )
    new_per_address: Rate = _at(
        "admission.new_per_address_and_s", "New connections of one address per second; 0: any number.", takes=Takes.NOW
    )
    publishers_per_address: Count = _at(
        "publishers_per_address", "Streams that one address may publish at a time; 0: any number.", of=_PUBLISHER
    )
    bans: File = _at("bans_file", "Keep out whom this file of JSON lines names, now and when it changes.")
    ban_store: File = _at("ban_store", "Keep the bans of commands and penalties in this SQLite file across restarts.")
    fleet: File = _at("fleet_file", "Have the same bans and limits as the other servers that this TOML file names.")
    penalties_spare: Networks = _at(
        "penalties_spare", "Addresses that are never limited or banned for what they do: monitors."
    )
    credentials_file: File = _own(
        "File of user:password lines for Adobe authentication; without it there is none.", takes=Takes.NEW
    )
    hooks: TextOrOff = _at("hooks", "package.module:Name of a LiveHooks class of yours: who may publish and play.")

    publish_auth: Proofs = _at(
        "access.publish_auth", "What publishers must bring, one of it: a key, a token; none.", of=_PUBLISHER
    )
    play_auth: Proofs = _at("access.play_auth", "The same for viewers.", of=_VIEWER)
    keys_file: Keys = _at(
        "access.keys", "Hashes of stream keys, one per line, as flowctl key make writes them.", of=_BOTH
    )
    token_secret_file: Secrets = _at("access.token_secrets", "Secrets of signed tokens, of flowctl key sign.", of=_BOTH)
    jwt_key: WebTokens = _at(
        "access.jwt_key", "Algorithm of JSON web tokens, and file of the key or address of a set (JWKS).", of=_BOTH
    )
    jwt_audience: Words = _at("access.jwt_audience", "Whom web tokens must be for (aud), one of these.", of=_BOTH)
    jwt_issuer: TextOrOff = _at("access.jwt_issuer", "Who must have made web tokens (iss).", of=_BOTH)
    allow_publish: Networks = _at(
        "access.allow_publish", "Networks that may publish, no others; off: all.", of=_PUBLISHER
    )
    deny_publish: Networks = _at("access.deny_publish", "Networks that may not publish.", of=_PUBLISHER)
    allow_play: Networks = _at("access.allow_play", "Networks that may play, no others; off: all.", of=_VIEWER)
    deny_play: Networks = _at("access.deny_play", "Networks that may not play.", of=_VIEWER)
    on_connect: Hooks = _at("access.on_connect", "HTTP hooks (SRS) that are asked who may connect.", of=_NO_ROLE)
    on_publish: Hooks = _at("access.on_publish", "HTTP hooks that are asked who may publish.", of=_PUBLISHER)
    on_play: Hooks = _at("access.on_play", "HTTP hooks that are asked who may play.", of=_VIEWER)
    on_end: Hooks = _at(
        "access.on_end", "HTTP hooks that are told of the end of a connection, a publication or a play.", of=_BOTH
    )
    hook_failure: Failure = _at(
        "access.hook_failure", "Who asks while HTTP hooks are dead or slow is refused or let in.", of=_BOTH
    )

    flush: Duration = _at("flush_interval_s", "Longest time between two flushes of a stream.", of=_NO_ROLE)
    gop_cache: Size = _at("cache.size_bytes", "GOP cache of a stream; 0: none.", of=_NO_ROLE)
    second_publisher: Second = _at("second_publisher", "What happens when a name is published twice.", of=_PUBLISHER)
    return_grace: Duration = _at(
        "return_grace_s",
        "How long a publisher whose connection broke may stay away unnoticed; 0: not at all.",
        of=_PUBLISHER,
    )
    media_silence: Duration = _at(
        "media_silence_s", "Cut a publisher without sound and picture; 0: never.", of=_PUBLISHER
    )
    players_may_wait: Flag = _at("players_may_wait", "Whether players may wait for a publisher.", of=_VIEWER)

    renditions: Renditions = _at(
        "renditions",
        "Renditions of one content, from which each viewer gets the largest that its line carries: tracks, or streams "
        "by the end of their names (_1080,_720,_360).",
        takes=Takes.NEW,
        of=_NO_ROLE,
    )

    events: Folder = _at("events.folder", "Record what happens to each connection as Parquet files there.")
    events_rotate: Duration = _at(
        "events.rotate_s", "A file is finished after so long; a crash loses no more than that."
    )
    events_max: Size = _at(
        "events.max_bytes", "What this server's files may take on the disk, then the oldest go; 0: any."
    )
    events_addresses: HowAddresses = _at("events.addresses", "Addresses of peers in records (truncated: /24, /48).")
    events_streams: HowStreams = _at("events.streams", "Names of streams in records; they may be keys.")
    events_key_file: File = _own("File with the key of the hashes; without it they differ after each restart.")
    flights: Share = _at("flights.share", "Share of the connections to record in full, for replay and what-if.")
    flights_at_once: Count = _at("flights.most_at_once", "Connections recorded at a time.")

    http: Places = _at("http", "Play streams over HTTP and WebSocket as FLV at host:port[,host:port].")
    http_origins: TextOrOff = _at("http_origins", "Origins of pages that may play over HTTP, with commas; *: all.")
    record: Patterns = _at("media.record", "Record these streams: live/*, or several with commas.", of=_NO_ROLE)
    record_folder: FolderPath = _at("media.record_folder", "Folder of recordings; each stream has one in it.")
    record_format: Format = _at("media.record_format", "flv: as it came; mp4: fragmented, needs PyAV.", of=_NO_ROLE)
    record_length: Duration = _at(
        "media.record_length_s", "A file ends at the key frame behind so much time; 0: with its stream.", of=_NO_ROLE
    )
    record_keep: Duration = _at("media.record_keep_s", "Age at which a recording is removed; 0: never.")
    record_play: Patterns = _at(
        "media.record_play",
        "Let those who may play these streams list and play their recordings, where http listens.",
        of=_NO_ROLE,
    )
    keep_free: Size = _at("media.keep_free_bytes", "Room on the disk that recordings and HLS leave to others; 0: none.")
    hls: Patterns = _at("media.hls", "Write these streams as HLS, for players where http listens.", of=_NO_ROLE)
    hls_segment: Duration = _at(
        "media.hls_segment_s", "A segment of HLS ends at the key frame behind so much time, 1 to 30 s.", of=_NO_ROLE
    )
    hls_part: Duration = _at(
        "media.hls_part_s", "Longest part of a segment, for HLS with low latency; 0: no parts.", of=_NO_ROLE
    )
    hls_folder: File = _at(
        "hls_folder",
        "Folder of HLS, of this server or flowctl hls, served where http listens. Default with hls: hls.",
    )
    relay_push: Relays = _at(
        "relay_push", "Publish streams at other servers too: live/*=rtmp[s]://host/{app}/{stream} [target-delay=T]; ..."
    )
    relay_pull: Relays = _at(
        "relay_pull", "Fetch streams from other servers for viewers here; with always, without any."
    )
    ladder: Steps = _at(
        "ladder",
        "Smaller sizes of streams that FFmpeg makes while a viewer's line does not carry more: 720:1100k,360:400k.",
        takes=Takes.NEW,
    )
    run: Runs = _at("run", "Commands that are run for streams: tables [[run]] of the file.", takes=Takes.NOW)
    run_at_once: Count = _at("run_at_once", "Commands that are run at a time.", takes=Takes.NOW)
    origin: Place = _at("origin", "Offer streams in segments to edges at host:port, or tls://host:port.")
    redirect: Redirects = _at("redirect", "Send viewers to the edges that say where: those of http, or all.")
    rtmps: Places = _at("rtmps", "Addresses for RTMP with TLS: host:port, several with commas between.")
    https: Places = _at("https", "The same for HTTP with TLS.")
    tls_certificate: File = _at(
        "tls_certificate", "Certificate with those of its authorities; read again when it changes."
    )
    tls_key: File = _at("tls_key", "Its private key in a file of this user alone.")
    ca_file: File = _at("ca_file", "As a client (relays, origins, hooks) trust these authorities, not the system's.")
    control: Listening = _at("control", "Where operators reach it: ipc for this user; tcp takes keys and clients.")
    control_keys: File = _at("control_keys", "File with the server's key pair, of flowctl rpc keygen.")
    control_clients: File = _at("control_clients", "File of KEY LEVEL lines: who may connect, as basic or admin.")
    admin: Admin = _at(
        "admin", "Where the HTTP API, metrics and dashboard are, tls:// with TLS; beyond this machine with tokens only."
    )
    admin_token_file: File = _at("admin_token_file", "File of TOKEN [basic|admin] lines that callers have to show.")

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        """See that the dataclass that has the setting takes the value."""
        path = rule_of(info.field_name or "").path
        if path is not None and value != value_at(_DEFAULTS, path):
            owner, _, name = path.rpartition(".")
            dataclasses.replace(value_at(_DEFAULTS, owner) if owner else _DEFAULTS, **{name: value})
        return value

    @model_validator(mode="after")
    def _in_order(self, info: ValidationInfo) -> Self:
        """See that the limits go together; those of a level with the server's, see `LiveConfig.with_level`."""
        if not (info.context or {}).get(PART):
            self._limits()
        return self

    def level(self, application: str, stream: str, role: Role | None) -> Level:
        values: dict[str, Any] = {}
        for name in self.model_fields_set:
            path = rule_of(name).path
            values[path or f"limits.{name}"] = getattr(self, name)
        return Level(application=application, stream=stream, role=role, values=values)

    def options(self, program: ServerProgram, extra: Mapping[str, str]) -> ServeOptions:
        """Return what these settings make of the usual ones: a `LiveConfig` for a program with streams."""
        tree: dict[str, Any] = {"port": program.default_port, "extra": dict(extra)}
        for name in self.model_fields_set:
            if (path := rule_of(name).path) is not None:
                put(tree, path, getattr(self, name))
        if self.model_fields_set & {"soft", "hard", "target_delay"}:
            tree["limits"] = self._limits()
        if self.credentials_file is not None:
            put(tree, "rtmp.credentials", read_credentials(self.credentials_file))
        if self.events_key_file is not None:
            put(tree, "events.key", read_key(self.events_key_file))
        options: ServeOptions = replaced(LiveConfig() if program.has_streams else ServeOptions(), tree)
        return options

    def _limits(self) -> Limits:
        """Return the limits; the soft marks are the default where only others are given."""
        usual = write_marks(_DEFAULTS.limits, "soft")
        try:
            return Limits.parse(self.soft or usual, self.hard, target_delay_ms=self.target_delay)
        except ConfigError as error:
            if self.soft is not None:
                raise
            raise ConfigError(f"{error}, which is the default", hint="give soft as well") from error


def rule_of(name: str) -> SettingRule:
    extra: Any = LiveSettings.model_fields[name].json_schema_extra
    rule: SettingRule = extra["rule"]
    return rule


class Setting(NamedTuple):
    """A setting, in words."""

    name: str  # name of the setting; ``--name`` with hyphens, ``FLOWCTL_NAME``, a key of the file
    kind: str
    default: str  # written so; empty: there is none
    what: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_text(self) -> bool:
        """Whether it may be an option or a variable, too."""
        return self.kind != ONLY_IN_FILE

    @property
    def metavar(self) -> str:
        """Its kind as it stands in a help: in capitals, but for words to choose from."""
        return self.kind if "|" in self.kind else self.kind.upper()


def kind_of(name: str) -> SettingKind:
    return next(item for item in reversed(LiveSettings.model_fields[name].metadata) if isinstance(item, SettingKind))


def settings_of(program: ServerProgram | None = None) -> list[Setting]:
    usual = {name: write_marks(_DEFAULTS.limits, name) for name in ("soft", "hard")}
    found = []
    for name, field in LiveSettings.model_fields.items():
        if program is not None and rule_of(name).streams and not program.has_streams:
            continue
        kind = kind_of(name)
        known = field.default is not None or name == "target_delay"
        default = kind.write(field.default) if known else usual.get(name, "")
        found.append(Setting(name, kind.word, default, field.description or ""))
    return found + [Setting(name, "text", "", what) for name, what in (program.extra if program else {}).items()]
