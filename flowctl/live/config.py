"""Settings of the live server."""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from flowctl.core.fanout.pacing import DEFAULT_FLUSH_INTERVAL_S, MOST_FLUSH_INTERVAL_S
from flowctl.core.flow.limits import Limits, write_marks
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.core.loop.work import WorkLimits
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.core.sending.settings import LIVE_RETURN_AFTER_S, SenderSettings
from flowctl.core.server.program import ServeOptions
from flowctl.core.server.proxyheader import TrustedProxies
from flowctl.core.text.addresses import Network, join_host_port, listen_addresses, listen_hosts
from flowctl.core.text.fieldtypes import check_type
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.live.access.rules import StreamAccess
from flowctl.live.judging.penalties import PenaltyLimits
from flowctl.live.settings.ladder import Ladder, LadderStep
from flowctl.live.settings.levels import MARKS, MOST_LEVELS, Level, Levels, Role, Takes, merged, placed, with_marks
from flowctl.live.settings.media import MediaOptions, StreamPatterns
from flowctl.live.settings.relays import RelayRule
from flowctl.live.settings.renditions import RenditionNames
from flowctl.live.settings.runs import RunRule, made_from
from flowctl.records.flight.options import FlightOptions
from flowctl.records.telemetry.options import EventsOptions
from flowctl.wire.rtmp.session_config import ServerSessionConfig

MOST_WORKERS: Final = 64
"""Worker processes: each costs some 50 MB, and a stream with viewers in all of them is sent to all of them."""
HLS_FOLDER: Final = Path("hls")
_POLICY_NAMES: Final = " or ".join(", ".join(LIVE_POLICIES).rsplit(", ", 1))


class Redirect(enum.Enum):
    """Whether viewers are sent to edges.

    HTTP: those that play over plain HTTP, whose players all follow. ALL: over RTMP and WebSocket too, where few do.
    """

    OFF = "off"
    HTTP = "http"
    ALL = "all"


class SecondPublisher(enum.Enum):
    """Policies for a second publisher of a name.

    REFUSE turns the newcomer away (SRS: "busy"), unless it is the owner of the name, see `return_grace_s`. REPLACE ends
    the first one (MediaMTX ``overridePublisher``). STANDBY takes the newcomer in but passes its media on only once the
    first one has gone (fail-over).
    """

    REFUSE = "refuse"
    REPLACE = "replace"
    STANDBY = "standby"


class Difference(NamedTuple):
    """A setting that has another value than before."""

    name: str  # name of the setting, or of the levels that differ
    path: str  # its place in `LiveConfig`
    value: Any
    takes: Takes


class SettingSource(Protocol):
    """The file that settings were read from, and how; see `flowctl.live.settings.sources`."""

    @property
    def file(self) -> Path:
        """The file."""

    @property
    def text(self) -> str:
        """The text of the file."""

    @property
    def settings(self) -> LiveConfig:
        """The settings that were read."""

    def read(self, text: str) -> LiveConfig:
        """Return the settings with later contents of the file; raises ConfigError where they are not valid, or cut."""

    def differences(self, before: LiveConfig, now: LiveConfig) -> list[Difference]:
        """Return what differs, by the names that settings have for operators."""


def worker_count(workers: int) -> int:
    """Return how many processes `LiveConfig.workers` stands for: where it is 0, one per core that this one may use."""
    return workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def _one_address(text: str, field: str) -> tuple[str, int]:
    found = listen_addresses(text, field)
    if len(found) != 1:
        raise ConfigError(f"{field} is {short(text)}, it must be one address", hint="write host:port")
    return found[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveConfig(ServeOptions):
    """All settings of a live server; immutable, one object from the command line to each stream and session.

    What listens at `control`, `admin`, `origin`, `http` and `https`, and what relays, is put beside the server by
    ``flowctl serve live``; a server by itself does none of it.

    Args:
        rtmp: of each RTMP session, limits included.
        policy: what is left out for a slow viewer, a key of `flowctl.core.flow.policy.LIVE_POLICIES`.
        return_after_s: when a viewer's kernel takes something again after so long, what became old meanwhile is
            skipped. 0: everything is sent. (It stands in for that of `settings`, which is 0 for any other server.)
        flush_interval_s: longest time between two flushes of a stream to its viewers, in seconds.
        flush_adaptive: whether a stream whose viewers cost little is flushed sooner; if not, the interval is fixed.
        cache: bounds of the GOP cache of each stream.
        second_publisher: see `SecondPublisher`.
        return_grace_s: how long a publisher whose connection broke may stay away before its viewers are told; the
            stream goes on without a break in its timestamps when it is back in time. Meanwhile the name is its own:
            the same user, or without authentication the same key in the query, or where it gave none the same address.
            0: the viewers are told at once, and the name is free.
        media_silence_s: how long a publisher may send no audio and no video before it is cut (SRS
            ``publish_normal_timeout``: 7 s). 0: for ever.
        players_may_wait: whether a player of an absent stream waits for it; if not, it is refused.
        renditions: which streams and tracks are renditions of one content, among which the server chooses for each
            viewer; suffixes of names with one worker alone.
        publishers_per_address: streams that one address may publish at a time, and names that are kept for it (see
            `return_grace_s`). 0: any number.
        memory_budget_bytes: what may wait for slow viewers of this server, bytes that several wait for counted once,
            before those who hold most give way; another server in the process has its own. 0: there is no limit.
        work: how much of its thread one connection and one address may take with what they send; who goes over is
            slowed down, and cut if it goes on.
        levels: what differs for an application, a stream or a role, see `at`.
        access: who may connect, publish and play; everybody, unless it says otherwise.
        hooks: ``package.module:Name`` of a `LiveHooks` class, where no object is given; empty: none.
        limits_file: limits that are read at the start, instead of `limits`, and again whenever the file changes; see
            `flowctl.core.flow.limitsfile`. None: there is no file.
        bans_file: the same of a ban list, which need not be there yet; see `core.server.bans`. None: there is none.
        ban_store: SQLite file in which bans of commands and penalties are kept across restarts; made if it is not
            there, and one server's alone. None: they are not kept.
        fleet_file: names the servers that have the same bans and limits, this one too; see `flowctl.live.fleet.config`.
            None: there are no others.
        penalties: what one address may do before it is limited, and then banned for a time.
        penalties_spare: addresses and networks that are never punished: monitors, the own office.
        events: what is recorded, and where to; without a folder, nothing.
        flights: which connections are recorded so that they can be replayed; needs the folder of `events`; by
            default all, 20 at a time.
        control: where operators reach the server; ``off``, or addresses with commas between them: ``ipc`` (a socket
            in the usual place), ``ipc:///path``, ``tcp://host:port``.
        control_keys: file with the key pair of the server, for ``tcp://``.
        control_clients: file of the public keys that may connect there, with what each may do.
        admin: ``host:port`` where the admin surface (HTTP API, metrics, dashboard) listens, ``tls://host:port`` with
            TLS, or ``off``. Without tokens it must be an address of this machine's own (loopback).
        admin_token_file: file of ``TOKEN [basic|admin]`` lines; callers then have to show one of them.
        workers: processes that serve the one port together, 0 for one per core; ``flowctl serve`` starts them. A server
            that is built from these settings is one process, whatever they say.
        origin: ``host:port`` where streams are offered to edges in segments, as the settings for players allow it;
            ``tls://host:port`` with TLS; empty: nowhere.
        redirect: see `Redirect`; of an origin.
        http: ``host:port[,host:port]`` where streams are played over HTTP and WebSocket as FLV; empty: nowhere.
        http_origins: origins of pages that may play over HTTP, with commas between them; ``*``: all; empty: none but
            those of this server itself.
        media: which streams are recorded and written as HLS, and how.
        media_here: whether this server starts the process that writes them. False: it tells another one of its streams,
            as a worker its supervisor.
        hls_folder: folder of HLS, of `media` or of ``flowctl hls``; it is served where `http` listens. None: ``hls``
            where streams are written as HLS, else there is none.
        rtmps: ``host:port[,host:port]`` where RTMP is spoken with TLS; empty: nowhere.
        https: the same of what `http` names.
        tls_certificate: file in PEM with the certificate of all that speaks TLS, then those of its authorities; read
            again when it changes.
        tls_key: file of its private key, which only the user of the server may use.
        ca_file: file in PEM with the authorities that this process trusts as a client of relays, origins and hooks, in
            place of the system's. None: the system's.
        relay_push: streams that are published at other servers as well.
        relay_pull: streams that are fetched from other servers, for viewers here or always; with one worker alone.
        run: commands that are run for streams; with one worker alone.
        ladder: smaller sizes that are made of streams while a viewer needs one.
        run_at_once: how many are run at a time, 0: none.
        source: the file that these settings were read from, which is watched. None: there is none, or they were not
            read.

    Attributes:
        sender: settings of each connection's Sender: `settings`, with the return to live.
        runs: all commands, those of `run` and those of `ladder`.

    Raises:
        ConfigError: a value is out of range.
    """

    rtmp: ServerSessionConfig = field(default_factory=ServerSessionConfig)
    policy: str = "all-or-cut"
    return_after_s: float = LIVE_RETURN_AFTER_S
    flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S
    flush_adaptive: bool = True
    cache: CacheLimits = field(default_factory=CacheLimits)
    second_publisher: SecondPublisher = SecondPublisher.REFUSE
    return_grace_s: float = 3.0
    media_silence_s: float = 10.0
    players_may_wait: bool = True
    renditions: RenditionNames = field(default_factory=RenditionNames)
    publishers_per_address: int = 8
    memory_budget_bytes: int = 0
    work: WorkLimits = field(default_factory=WorkLimits)
    levels: tuple[Level, ...] = ()
    access: StreamAccess = field(default_factory=StreamAccess)
    hooks: str = ""
    limits_file: Path | None = None
    bans_file: Path | None = None
    ban_store: Path | None = None
    fleet_file: Path | None = None
    penalties: PenaltyLimits = field(default_factory=PenaltyLimits)
    penalties_spare: tuple[Network, ...] = ()
    events: EventsOptions = field(default_factory=EventsOptions)
    flights: FlightOptions = field(default_factory=FlightOptions)
    control: str = "ipc"
    control_keys: Path | None = None
    control_clients: Path | None = None
    admin: str = "off"
    admin_token_file: Path | None = None
    workers: int = 1
    origin: str = ""
    redirect: Redirect = Redirect.OFF
    http: str = ""
    http_origins: str = "*"
    media: MediaOptions = field(default_factory=MediaOptions)
    media_here: bool = True
    hls_folder: Path | None = None
    rtmps: str = ""
    https: str = ""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    ca_file: Path | None = None
    relay_push: tuple[RelayRule, ...] = ()
    relay_pull: tuple[RelayRule, ...] = ()
    run: tuple[RunRule, ...] = ()
    ladder: Ladder = field(default_factory=Ladder)
    run_at_once: int = 16
    source: SettingSource | None = field(default=None, repr=False, compare=False)
    sender: SenderSettings = field(init=False, repr=False, compare=False)
    runs: tuple[RunRule, ...] = field(init=False, repr=False, compare=False)
    _levels: Levels[LiveConfig] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Two arguments: with slots the class is made twice, and the short form would look in the first one.
        super(LiveConfig, self).__post_init__()
        if self.policy not in LIVE_POLICIES:
            raise ConfigError(f"policy is {short(self.policy)}, it must be {_POLICY_NAMES}")
        by_default = FlightOptions(most_at_once=self.flights.most_at_once)  # which workers share
        if self.flights != by_default and not self.events.folder:
            raise ConfigError("flights are asked for, but nothing is recorded", hint="give events a folder as well")
        if not 0 <= self.flush_interval_s <= MOST_FLUSH_INTERVAL_S:  # or each viewer would learn of it
            raise ConfigError(
                f"flush_interval_s is {self.flush_interval_s}, it must be between 0 and {MOST_FLUSH_INTERVAL_S:g} s"
            )
        for name in (
            "return_after_s",
            "return_grace_s",
            "media_silence_s",
            "publishers_per_address",
            "memory_budget_bytes",
            "run_at_once",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 or more")
        for level in self.levels:
            check_type("LiveConfig.levels", level, Level)
        if not 0 <= self.workers <= MOST_WORKERS:
            raise ConfigError(
                f"workers is {self.workers}, it must be 1 to {MOST_WORKERS}, or 0 for one per core",
                hint="more than there are cores only cost memory",
            )
        self._check_control()
        _ = self.listening_all
        for rule in (*self.relay_push, *self.relay_pull):
            check_type("LiveConfig.relay", rule, RelayRule)
        self._check_run()
        if any(rule.target_delay for rule in self.relay_pull):
            raise ConfigError(
                "relay_pull has a target delay, which is for what is sent", hint="set it at the server that it is of"
            )
        if self.relay_pull and self.workers != 1:
            raise ConfigError(
                "relay_pull goes with one worker alone: several follow each other",
                hint="leave out workers, or pull with a server of its own",
            )
        if self.renditions.suffixes and self.workers != 1:
            raise ConfigError(
                "renditions by suffix go with one worker alone: workers do not share the streams of a set",
                hint="leave out workers, or send the renditions as tracks of one publication",
            )
        object.__setattr__(self, "sender", replace(self.settings, return_after_s=self.return_after_s))
        self._check_levels()

    def _check_run(self) -> None:
        for rule in self.run:
            check_type("LiveConfig.run", rule, RunRule)
        object.__setattr__(self, "runs", (*self.run, *self.ladder.rules()))
        if not self.runs:
            return
        if self.workers != 1:
            raise ConfigError(
                "run and ladder go with one worker alone: others do not know its commands", hint="leave out workers"
            )
        if self.rtmp.credentials is not None:
            raise ConfigError(
                "run and ladder do not go with credentials_file: commands cannot log in", hint="use keys or tokens"
            )
        proxies = TrustedProxies(self.trusted_proxies)
        if any(host in proxies for host in ("127.0.0.1", "::1")):
            raise ConfigError(
                "run and ladder do not go with trusted_proxies of this machine: its commands connect from there",
                hint="name the proxy by another address",
            )

    def made_from(self, name: str) -> str | None:
        """Return the stream of which a command makes the stream `name`. None: the name may be anybody's."""
        return made_from(self.runs, name) if self.runs else None

    def step_of(self, name: str) -> tuple[str, LadderStep, int] | None:
        """Return of which stream `name` is a step of the ladder, which one, and its place. None: of none."""
        rules = zip(self.ladder.steps, self.runs[len(self.run) :], strict=True)
        for place, (step, rule) in enumerate(rules, 1):
            if (source := rule.source(name)) is not None:
                return source, step, place
        return None

    def has_ladder(self, name: str) -> bool:
        """Return whether steps may be made of a stream."""
        return any(rule.step and rule.fits(name) for rule in self.runs) and self.made_from(name) is None

    def _check_levels(self) -> None:
        """See that each level goes with the server's settings; whatever comes of several then does, see `at`."""
        if len(self.levels) > MOST_LEVELS:
            raise ConfigError(f"there are {len(self.levels)} levels, {MOST_LEVELS} are allowed")
        object.__setattr__(self, "_levels", Levels(()))
        for level in self.levels:
            try:
                self.with_level(level)
            except (ConfigError, AttributeError, TypeError) as error:
                raise ConfigError(f"{level}: {error}") from error
        object.__setattr__(self, "_levels", Levels(self.levels))

    def with_level(self, level: Level) -> LiveConfig:
        soft, hard = (level.values.get(path) for path in MARKS)
        if soft is not None or hard is not None:
            Limits.parse(soft or write_marks(self.limits, "soft"), hard)
        return self._of([level])

    def _of(self, levels: list[Level]) -> LiveConfig:
        if not levels:
            return self
        bare = replace(self, levels=(), limits=with_marks(self.limits, levels))
        found: LiveConfig = placed(bare, merged(levels))
        return found

    @property
    def has_levels(self) -> bool:
        return bool(self._levels)

    def at(self, stream: str, role: Role | None = None) -> LiveConfig:
        """Return the settings that hold for a role in a stream: of each the nearest level that says it.

        Levels are, from the farthest to the nearest: server, application, stream, role; see
        `flowctl.live.settings.levels`. Remembered: a look-up costs less than a microsecond. Any thread.
        """
        return self._levels.find(stream, role, self._of) if self._levels else self

    @property
    def admin_address(self) -> tuple[str, int]:
        return _one_address(self.admin.removeprefix("tls://"), "admin")

    @property
    def admin_secure(self) -> bool:
        return self.admin.startswith("tls://")

    def check_start(self) -> None:
        """See what would keep a server of these settings from starting: a certificate that lacks, ports that meet."""
        count = worker_count(self.workers)
        if count > 1 and self.origin:
            raise ConfigError(
                f"a server with {count} workers cannot be an origin",
                hint="leave out workers; edges take viewers off it, each one process with a port of its own",
            )
        if self.redirect is not Redirect.OFF and not self.origin:
            hint = "name where edges fetch from it: origin; an edge redirects nobody"
            raise ConfigError(f"redirect is {self.redirect.value}, but this is no origin", hint=hint)
        used: dict[int, list[tuple[str, str]]] = {}
        for name, addresses in self.listening_all:
            for host, port in addresses:
                every = "::" if ":" in host else "0.0.0.0"  # noqa: S104 - compared with, not bound
                for other, its in used.get(port, ()):
                    if its == host or (every in {its, host} and (":" in its) is (":" in host)):
                        meet = f"{name} listens twice" if name == other else f"{name} and {other} both listen"
                        raise ConfigError(f"{meet} on {join_host_port(host, port)}")
                if port:
                    used.setdefault(port, []).append((name, host))
        if (self.tls_certificate is None) is not (self.tls_key is None):
            has, lacks = ("tls_certificate", "tls_key") if self.tls_key is None else ("tls_key", "tls_certificate")
            raise ConfigError(f"there is a {has} but no {lacks}", hint=f"name the file of the {lacks} as well")
        needing = [name for name in ("rtmps", "https") if getattr(self, name) or self.listen_fds.get(name)]
        needing += [name for name in ("origin", "admin") if getattr(self, name).startswith("tls://")]
        if needing and self.tls_certificate is None:
            raise ConfigError(
                f"{' and '.join(needing)}: TLS needs a certificate",
                hint="name its files: tls_certificate and tls_key",
            )

    def _check_control(self) -> None:
        for address in self.control_addresses:
            if address != "ipc" and not re.fullmatch(r"ipc:///[^,]+|tcp://[^/,]+:([0-9]{1,5}|\*)", address):
                raise ConfigError(
                    f"control is {short(self.control)}: {short(address)} is no address to listen on",
                    hint="off, or some of ipc, ipc:///path and tcp://host:port with commas between them",
                )

    def asked_for(self, what: str) -> StreamPatterns:
        """Return the patterns of all levels of a setting: ``record`` or ``hls``."""
        said = (getattr(self.media, what), *(level.values.get(f"media.{what}") for level in self.levels))
        return StreamPatterns(tuple(pattern for item in said if item is not None for pattern in item.patterns))

    @property
    def writes_media(self) -> bool:
        """Whether any stream is to be recorded or written as HLS."""
        return bool(self.asked_for("record").patterns or self.asked_for("hls").patterns)

    @property
    def hls_place(self) -> Path | None:
        """The folder of HLS. None: there is none."""
        return self.hls_folder or (HLS_FOLDER if self.asked_for("hls").patterns else None)

    @property
    def serves_http(self) -> bool:
        handed = "http" in self.listen_fds or "https" in self.listen_fds
        return handed or any(addresses for name, addresses in self.listening if name in {"http", "https"})

    @property
    def http_origin_set(self) -> frozenset[str]:
        return frozenset(item.strip().rstrip("/").lower() for item in self.http_origins.split(",") if item.strip())

    @property
    def listening(self) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
        """The addresses on which the server listens, by protocol: ``rtmp``, ``rtmps``, ``http``, ``https``."""
        rtmp = tuple((host, self.port) for host in listen_hosts(self.host))
        others = ("rtmps", "http", "https")
        return (("rtmp", rtmp), *((name, listen_addresses(getattr(self, name), name)) for name in others))

    @property
    def listening_all(self) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
        """The addresses of `listening`, and those to which operators and edges connect."""
        addresses = [*self.listening]
        if self.admin != "off":
            addresses.append(("admin", (self.admin_address,)))
        if self.origin:
            addresses.append(("origin", (_one_address(self.origin.removeprefix("tls://"), "origin"),)))
        # ZeroMQ takes names of interfaces as well
        pattern = re.compile(r"tcp://([0-9.]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
        tcp = map(pattern.fullmatch, self.control_addresses)
        addresses.append(("control", tuple((item[1].strip("[]"), int(item[2])) for item in tcp if item)))
        return tuple(addresses)

    @property
    def control_addresses(self) -> tuple[str, ...]:
        return () if self.control == "off" else tuple(dict.fromkeys(item.strip() for item in self.control.split(",")))

    def with_limits(self, file: LimitsFile) -> LiveConfig:
        """Return these settings with those of a limits file; settings that it leaves out stay."""
        times: dict[str, Any] = file.times
        return_after_s = times.pop("return_after_s", self.return_after_s)
        return replace(
            self, limits=file.limits, return_after_s=return_after_s, settings=replace(self.settings, **times)
        )
