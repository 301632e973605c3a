"""The live server: a `Server` of live sessions and the hub that they share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from flowctl.addresses import address_key
from flowctl.connection import Connection
from flowctl.errors import ClosedError, ConfigError, LimitExceededError
from flowctl.flight.flights import Flights
from flowctl.flow.limits import Limits
from flowctl.flow.limitsfile import LimitsFile
from flowctl.flow.policy import LIVE_POLICIES
from flowctl.judging.shadow import Candidate
from flowctl.live.config import LiveConfig, SecondPublisher, parse_audiences
from flowctl.live.hooks import HookRunner, LiveHooks, load_hooks
from flowctl.live.hub import Hub
from flowctl.live.records.flights import FLIGHTS_SETTINGS, flight_options, make_flights
from flowctl.live.records.telemetry import EVENTS_SETTINGS, Recording, events_options
from flowctl.live.reload.reload import Reload
from flowctl.live.session import LiveSession
from flowctl.loop.work import WorkLimits
from flowctl.outgoing.streamlog import CacheLimits
from flowctl.rtmp.limits import WireLimits
from flowctl.rtmp.session_config import ServerSessionConfig
from flowctl.sending.settings import SenderSettings
from flowctl.server.bans import Ban, BanList, utc_text
from flowctl.server.program import ServeOptions, settings_hint
from flowctl.server.server import Server
from flowctl.telemetry.privacy import check_private
from flowctl.units import format_duration, format_size, parse_duration, parse_size

_log: Final = structlog.get_logger("flowctl.live")
_REFUSAL_LOG_S: Final = 10.0
"""Refused connections of one address are logged at most once in this time; the next line says how many there were."""
_MOST_REFUSED: Final = 1024
_RECONNECT_HEAD_START_S: Final = 0.2
"""Between asking clients to reconnect and closing their connections: time for the request to arrive first."""

_WIRE_SETTINGS: Final[dict[str, int | float]] = {
    field.name: getattr(WireLimits(), field.name)
    for field in dataclasses.fields(WireLimits)
    if type(field.default) in {int, float}  # the type itself, because True is an int
}
"""Numeric fields of `WireLimits` with their defaults; settings of the command line under the same names."""
_CACHE_FIELDS: Final = {"cache_bytes": "size_bytes", "cache_messages": "messages", "cache_s": "duration_s"}
_CACHE_SETTINGS: Final[dict[str, int | float]] = {
    name: getattr(CacheLimits(), field) for name, field in _CACHE_FIELDS.items()
}
_WORK_PREFIX: Final = "work_"
_WORK_SETTINGS: Final[dict[str, int | float]] = {
    f"{_WORK_PREFIX}{field.name}": getattr(WorkLimits(), field.name) for field in dataclasses.fields(WorkLimits)
}
_MOST_DIGITS: Final = 15
"""As for numbers with units: more are a typing error, and Python refuses to read thousands of them."""


def _described(what: str, settings: dict[str, int | float]) -> dict[str, str]:
    """Return what each of `settings` is: its kind, which its name tells, and its default."""
    texts = {}
    for name, default in settings.items():
        kind, shown = "a number", f"{default:g}"
        if name.endswith("_bytes"):
            kind, shown = "a size", format_size(default)
        elif name.endswith("_s"):
            kind, shown = "a duration", format_duration(default)
        texts[name] = f"{what}, {kind} ({shown.replace('.0 ', ' ')})"
    return texts


EXTRA_SETTINGS: Final = {
    "second_publisher": "refuse (default), replace or standby: when a name is published twice",
    "return_grace": "seconds that a publisher whose connection broke may stay away unnoticed (3)",
    "media_silence": "seconds without sound and picture after which a publisher is cut (10); 0: never",
    "players_may_wait": "yes (default) or no: whether players may wait for a publisher",
    "hooks": "package.module:Name of a LiveHooks class of yours, which decides who may publish and play",
    "credentials_file": "file of user:password lines for Adobe authentication; without it there is none",
    "publishers_per_address": "streams that one address may publish at a time (8); 0: any number",
    "flush_adaptive": "yes (default) or no: whether streams with few viewers are flushed sooner than --flush says",
    "memory_budget_per_address": "yes or no (default): whether the viewers of one address count as one for the budget",
    **EVENTS_SETTINGS,
    **FLIGHTS_SETTINGS,
    **_described("GOP cache of a stream", _CACHE_SETTINGS),
    "audiences": "app/stream=target delay and policy, for some streams: talk/*=800ms audio-first; cams/*=4s",
    **_described("limit of each RTMP connection", _WIRE_SETTINGS),
    **_described("limit on the work that a peer causes", _WORK_SETTINGS),
}


class LiveServer(Server):
    """RTMP live server; see `build_live_server`.

    Attributes:
        hub: the streams.
        config: the settings.
        reload: watches the files of limits and bans, if there are any.
        recording: records what happens. None: it was not asked for.
        flights: records connections so that they can be replayed. None: nothing is recorded.
    """

    def __init__(
        self,
        options: ServeOptions,
        config: LiveConfig,
        hooks: LiveHooks | None = None,
        *,
        hooks_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config = config
        policy, settings = LIVE_POLICIES[options.policy], settings_from(options)
        super().__init__(
            lambda: LiveSession(self.hub, policy, self.clock()),
            options.host,
            options.port,
            limits=options.limits,
            policy=policy,
            settings=settings,
            options=options.socket_options,
            admission=options.admission,
            trusted_proxies=options.trusted_proxies,
            group_count=options.group_count,
            loop_factory=options.loop_factory,
            on_error=options.on_error,
            on_refused=self._log_refusal,
            work_limits=config.work,
        )
        self.hub = Hub(config, self.clock, self._call_later, settings.age_from)
        self.hub.oversight.report = self.groups.groups[0].report
        self._hooks: HookRunner | None = None
        if hooks is not None:
            self._hooks = self.hub.hooks = HookRunner(hooks, self.groups.groups[0].report, hooks_loop)
        self._served = options
        self.recording: Recording | None = None
        self.flights: Flights | None = None
        self.reload = Reload(
            self._apply_limits,
            self._apply_bans,
            limits=options.limits_file,
            bans=options.bans_file,
            on_error=options.on_error or self.hub.oversight.report,
        )
        try:
            self.reload.read_first()
            events, recorded = events_options(options, self.address[1]), flight_options(options)
            if events is not None:
                self.recording = Recording(events, self.hub, self.connections, self.clock)
                self.hub.observers = (self.recording.sessions,)
                self.flights = make_flights(recorded, self.recording.events)
                self._make_sender = self.flights.make_sender
        except BaseException:
            self._listener.close()
            raise
        self._refusals: dict[str, tuple[float, int]] = {}  # by address: last line, refused since; listener's thread

    def _call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        group = self.groups.groups[0]
        with contextlib.suppress(ClosedError):  # the server stops: nobody is left to be told
            group.call_soon(lambda: group.call_later(delay_s, callback, *args))

    def _log_refusal(self, peer: tuple[str, int], error: LimitExceededError) -> None:
        """Log and record a refused connection, but not each one of a flood."""
        if self.recording is not None:
            self.recording.refused(peer, error)
        now = self.clock()
        key = address_key(peer[0])
        last, count = self._refusals.get(key, (-_REFUSAL_LOG_S, 0))
        if now - last >= _REFUSAL_LOG_S:
            _log.warning(
                "connection refused",
                peer=peer[0],
                limit=error.limit,
                value=error.value,
                refused=count + 1,
                why=str(error),
            )
            last, count = now, -1
        if len(self._refusals) >= _MOST_REFUSED:
            self._refusals.clear()
        self._refusals[key] = (last, count + 1)

    def _put_limits(self, connection: Connection, limits: Limits) -> None:
        session = connection.session
        if self.config.audiences and isinstance(session, LiveSession):
            session.on_thread(session.set_audience, limits)  # with the target delay of the stream that it plays
        else:
            super()._put_limits(connection, limits)

    def _apply_limits(self, file: LimitsFile) -> None:
        """Take the limits of a file: for new connections and open ones; times for new ones only.

        Raises:
            ConfigError: they do not go with the other settings of the server.
        """
        options = with_limits(self._served, file)
        settings, was = settings_from(options), self.limits
        self.set_limits(file.limits, settings)
        now = {
            "limits": str(file.limits),
            "stuck_s": settings.stuck_s,
            "soft_too_long_s": settings.soft_too_long_s,
            "return_after_s": settings.return_after_s,
            "objective": file.objective,
        }
        _log.info("limits changed", was=str(was), connections=len(self.connections()), **now)
        self._note_change("limits file", now)

    def _apply_bans(self, bans: BanList) -> None:
        """Take a ban list: refuse whom it names, and end their connections that take no part."""
        before = {ban.cidr for ban in self.admission.bans.bans}
        now = {ban.cidr for ban in bans.still(time.time()).bans}
        ended = self.set_bans(bans)
        figures = {"bans": len(now), "added": len(now - before), "lifted": len(before - now)}
        figures |= {"expired": len(bans) - len(now), "ended": ended}
        _log.info("bans changed", **figures)
        self._note_change("bans file", figures)

    def _note_change(self, what: str, detail: Mapping[str, Any]) -> None:
        if self.recording is not None:  # what was read before the start is in the record of the start
            self.recording.events.config_changed(self.clock(), what, detail)

    def _banned(self, connection: Connection, ban: Ban) -> None:
        if self.recording is not None:
            detail = {"cidr": ban.cidr, "score": ban.score, "expires": utc_text(ban.expires)}
            self.recording.events.banned(self.clock(), connection.number, connection.peer, detail)

    def start(self) -> None:
        """Start, and say where."""
        if self.recording is not None:  # before anybody can connect
            self.recording.start(
                dataclasses.replace(self._served, limits=self.limits),
                self._settings or SenderSettings(),
                self.config.audiences,
            )
        if self._hooks is not None:
            self._hooks.start()
        super().start()
        self.reload.start()
        self.hub.oversight.start()
        _log.info(
            "live server started", url=f"rtmp://{self.address[0]}:{self.address[1]}/", groups=len(self.groups.groups)
        )

    def _before_stop(self, deadline_s: float) -> None:
        """Ask clients that understand it to reconnect."""
        self.reload.stop()
        asked = [connection.session for connection in self.connections()]
        for session in asked:
            if isinstance(session, LiveSession):
                session.on_thread(session.ask_to_reconnect)
        if asked:
            time.sleep(min(_RECONNECT_HEAD_START_S, deadline_s / 4))

    def _after_stop(self, deadline_s: float) -> None:
        """End what runs beside the connections."""
        if self._hooks is not None:
            self._hooks.stop(deadline_s)
        if self.recording is not None:
            self.recording.stop(self.accepted_count, deadline_s)
        _log.info("live server stopped", connections=self.accepted_count)


def build_live_server(
    options: ServeOptions,
    hooks: LiveHooks | None = None,
    *,
    hooks_loop: asyncio.AbstractEventLoop | None = None,
) -> LiveServer:
    """Return a live server, not started.

    Args:
        options: what is wanted of it.
        hooks: decide who may publish and play, and hear of it. None: those that `options.extra` names, or none.
        hooks_loop: where the hooks' coroutine functions run. None: on a loop of their own.

    Raises:
        ConfigError: a setting of `options.extra` is unknown or has a wrong value, the address cannot be used, or a file
            of limits or bans is not valid.
    """
    config = config_from(options)
    if hooks is None and "hooks" in options.extra:
        hooks = load_hooks(options.extra["hooks"])
    return LiveServer(options, config, hooks, hooks_loop=hooks_loop)


def config_from(options: ServeOptions) -> LiveConfig:
    """Return the settings in `options`.

    Raises:
        ConfigError: a setting of `options.extra` is unknown or has a wrong value.
    """
    extra = dict(options.extra)
    unknown = sorted(set(extra) - set(EXTRA_SETTINGS))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown[0]!r} of the live server", hint=settings_hint(unknown[0], EXTRA_SETTINGS)
        )
    values: dict[str, Any] = {"flush_interval_s": options.flush_interval_s}
    if "second_publisher" in extra:
        choices = [item.value for item in SecondPublisher]
        values["second_publisher"] = SecondPublisher(_choice("second_publisher", extra["second_publisher"], choices))
    rtmp: dict[str, Any] = {"limits": WireLimits(**_given(extra, _WIRE_SETTINGS))}
    if "credentials_file" in extra:
        rtmp["credentials"] = read_credentials(Path(extra["credentials_file"]))
    values["rtmp"] = ServerSessionConfig(**rtmp)
    work = _given(extra, _WORK_SETTINGS)
    values["work"] = WorkLimits(**{name.removeprefix(_WORK_PREFIX): value for name, value in work.items()})
    cache = _given(extra, _CACHE_SETTINGS)
    values["cache"] = CacheLimits(**{_CACHE_FIELDS[name]: value for name, value in cache.items()})
    for name in ("return_grace", "media_silence"):
        if name in extra:
            values[f"{name}_s"] = _number(name, extra[name])
    if "publishers_per_address" in extra:
        values["publishers_per_address"] = _whole("publishers_per_address", extra["publishers_per_address"])
    for name in ("players_may_wait", "memory_budget_per_address", "flush_adaptive"):
        if name in extra:
            values[name] = _yes(name, extra[name])
    if "audiences" in extra:
        values["audiences"] = parse_audiences(extra["audiences"])
    _choice("policy", options.policy, list(LIVE_POLICIES))
    values["memory_budget_bytes"] = options.memory_budget_bytes
    if options.shadow_limits is not None:
        settings = settings_from(options)
        values["shadow"] = Candidate(
            limits=options.shadow_limits,
            policy=LIVE_POLICIES[options.policy],
            name="shadow limits",
            stuck_s=settings.stuck_s,
            soft_too_long_s=settings.soft_too_long_s,
            marks_only=True,
        )
    return LiveConfig(**values)


def settings_from(options: ServeOptions) -> SenderSettings:
    """Return the settings of each viewer's Sender: those in `options`, with the return to live."""
    return dataclasses.replace(options.settings, return_after_s=options.return_after_s)


def with_limits(options: ServeOptions, file: LimitsFile) -> ServeOptions:
    """Return `options` with what a limits file says; what it does not say stays as it is in `options`."""
    times: dict[str, Any] = file.times
    return dataclasses.replace(
        options,
        limits=file.limits,
        return_after_s=times.pop("return_after_s", options.return_after_s),
        settings=dataclasses.replace(options.settings, **times),
    )


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
        raise ConfigError(f"cannot read the credentials file {path}: {error}") from error
    credentials = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        user, colon, password = line.partition(":")
        if not (user and colon and password):
            raise ConfigError(f"{path}, line {number}: it must be user:password")
        credentials[user] = password
    if not credentials:
        raise ConfigError(f"{path} holds no user", hint="without credentials_file there is no authentication")
    return credentials


def _choice(name: str, text: str, choices: list[str]) -> str:
    if text not in choices:
        raise ConfigError(f"{name} is {text!r}, it must be {', '.join(choices[:-1])} or {choices[-1]}")
    return text


def _yes(name: str, text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ConfigError(f"{name} is {text!r}, it must be yes or no")
    return text == "yes"


def _given(extra: Mapping[str, str], settings: dict[str, int | float]) -> dict[str, Any]:
    """Return those of `settings` that `extra` has, read as their names and the types of their defaults tell."""
    values: dict[str, Any] = {}
    for name, default in settings.items():
        if name not in extra:
            continue
        if name.endswith("_bytes"):
            values[name] = parse_size(extra[name], name)
        elif name.endswith("_s"):
            values[name] = parse_duration(extra[name], name)
        else:
            values[name] = (_whole if isinstance(default, int) else _number)(name, extra[name])
    return values


def _number(name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if math.isfinite(value):
            return value
    raise ConfigError(f"{name} is {text!r}, it must be a number")


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{name} is {text!r}, it must be a whole number, 0 or more")
    return int(text)
