"""The live server: a `Server` of live sessions and the hub that they share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import structlog

from flowctl.connection import Connection
from flowctl.core.flow.limits import Limits, parse_target_delay, target_marks, write_marks
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.core.loop.trust import trust
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import open_files
from flowctl.core.server.bans import Ban, BanAction, BanList, utc_text
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.handover import Heir, Loan
from flowctl.core.server.heap import TRIM_S, trim_heap
from flowctl.core.server.listener import shown
from flowctl.core.server.program import ServeOptions
from flowctl.core.server.server import Server
from flowctl.core.text.addresses import address_key, is_loopback, listen_addresses
from flowctl.errors import ClosedError, ConfigError, LimitExceededError, LocalProtocolError
from flowctl.live.access.request import RequestKind
from flowctl.live.bans.book import PENALTY, BanBook
from flowctl.live.bans.penalties import PenaltyWatch, SparedNetworks, bans_of
from flowctl.live.bans.words import Word, WordKind
from flowctl.live.changes import Change, Changes
from flowctl.live.config import Difference, LiveConfig, SettingSource, worker_count
from flowctl.live.hooks import HookRunner, LiveHooks, load_hooks
from flowctl.live.hub import Hub
from flowctl.live.judging.penalties import Overflow, Penalties
from flowctl.live.playing import ViewerSession
from flowctl.live.records.meters import Meters
from flowctl.live.records.recent import RecentEvents
from flowctl.live.records.recording import Recording, in_force, make_flights, usual_node
from flowctl.live.reload.reload import Reload
from flowctl.live.session import LiveSession
from flowctl.live.settings.levels import Level, Takes, differing, placed, split
from flowctl.log import redact_text
from flowctl.reasons import CloseReason
from flowctl.records.flight.flights import Flights
from flowctl.records.flight.words import limits_as_dict

_log: Final = structlog.get_logger("flowctl.live")
_REFUSAL_LOG_S: Final = 10.0
"""Refused connections of one address are logged at most once in this time; the next line says how many there were."""
_MOST_REFUSED: Final = 1024
_FLOOD_BURSTS: Final = 50
"""Bursts of new connections that may come to nothing before an address is punished for them."""
_RECONNECT_HEAD_START_S: Final = 0.2
"""Time between asking clients to reconnect and closing their connections: the request arrives first."""
_NAME_SETTINGS: Final = {
    "second_publisher": "second_publisher",
    "return_grace_s": "return_grace",
    "publishers_per_address": "publishers_per_address",
}
"""Settings that decide about names of streams, by place."""
_DRAIN_LOOK_S: Final = 0.05
"""Time between two looks whether all clients have left a server that drains."""


class BanOutcome(NamedTuple):
    """The outcome of a ban."""

    ban: Ban  # the ban in force: joined with an earlier one of the network
    ended: int  # connections that were ended when it came into force
    in_store: bool  # whether it outlives the server
    warning: str = ""  # what was not done; empty: all was


class Fleet(Protocol):
    """The part that a server has in a fleet: `flowctl.live.fleet.member.Member`."""

    def status(self) -> dict[str, Any]:
        """Return how the fleet stands, as this server sees it, as JSON has it."""


class Companion(Protocol):
    """A part that runs beside a server: it begins when the server has started, and ends after the connections."""

    bound: list[str]  # addresses that it listens on, once it has begun

    def start(self) -> None:
        """Begin; what it raises ends the start of the server."""

    def stop(self, deadline_s: float) -> None:
        """End within the time; called also where it has not begun."""


class RefusalLog:
    """Logs connections that were refused, but not each one of a flood; on a listener's thread."""

    def __init__(self, event: str, clock: Callable[[], float], **more: str) -> None:
        self._event = event
        self._clock = clock
        self._more = more
        self._seen: dict[str, tuple[float, int]] = {}  # by address: last line, refused since

    def tell(self, peer: tuple[str, int], error: LimitExceededError) -> None:
        # The limit on all is no matter of an address: one line, from however many they come.
        now, key = self._clock(), "" if error.limit == "connections" else address_key(peer[0])
        last, count = self._seen.get(key, (-_REFUSAL_LOG_S, 0))
        if now - last >= _REFUSAL_LOG_S:
            found = {"limit": error.limit, "value": error.value, "refused": count + 1, "why": str(error)}
            _log.warning(self._event, peer=peer[0], **found, **self._more)
            last, count = now, -1
        if len(self._seen) >= _MOST_REFUSED:
            self._seen.clear()
        self._seen[key] = (last, count + 1)


class LiveServer(Server):
    """RTMP live server; see `build_live_server`.

    Attributes:
        config: the settings that it was started with; `hub.config` are those in force.
        reload: watches the files of limits and bans, if there are any.
        recording: records what happens. None: it was not asked for.
        flights: records connections so that they can be replayed. None: nothing is recorded.
        penalties: has those banned or limited who do too much of what costs.
        book: its bans, but for the ban file's those of the fleet too; the thread of the files.
        fleet: what it is part of. None: of none.
        recent: what happened to its connections lately; observes them once somebody has asked.
        meters: sums for monitoring; the same.
        certificate: of what speaks TLS. None: nothing does.
        on_drain: called when it begins to drain; lets go of what a server needs that is to take its place.
        loans: the same for a successor that is to start, with what takes it back where that does not come to serve.
        on_handover: called before `on_drain` once a successor serves.
        limits_from: where the limits in force come from: ``start``, ``config file``, ``limits file`` or
            ``command``.
        waiting: settings that were changed in their file and wait for a restart.
    """

    _heir: Heir | None = None  # the server that takes its place; told when this one ends
    _trim_at = 0.0  # when its heap is trimmed next; the thread of the files

    def __init__(
        self,
        config: LiveConfig,
        hooks: LiveHooks | None = None,
        *,
        hooks_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config = config
        super().__init__(
            lambda: LiveSession(self.hub, self.clock()),
            config.host,
            config.port,
            limits=config.limits,
            policy=LIVE_POLICIES[config.policy],
            settings=config.sender,
            options=config.socket_options,
            admission=config.admission,
            trusted_proxies=config.trusted_proxies,
            group_count=config.group_count,
            loop_factory=config.loop_factory,
            on_error=config.on_error,
            on_refused=self._log_refusal,
            work_limits=config.work,
            listen_fd=config.listen_fd,
            listen_fds=config.listen_fds,
            name="rtmp",
        )
        self.hub = Hub(config, self.clock, self._call_later, config.settings.age_from)
        self.hub.oversight.report = self.hub.gate.on_error = self.groups.groups[0].report
        self._hooks: HookRunner | None = None
        if hooks is not None:
            self._hooks = self.hub.gate.hooks = HookRunner(hooks, self.groups.groups[0].report, hooks_loop)
        # What its file of settings said then, and says now.
        self._at_start = self._read = config if config.source is None else config.source.settings
        self._base = config  # what it says, of settings that wait for a restart as at the start
        self._limits_said: LimitsFile | None = None
        self.waiting: tuple[str, ...] = ()
        self.recording: Recording | None = None
        self.flights: Flights | None = None
        on_error = config.on_error or self.hub.oversight.report
        self.changes: Final = Changes(on_error)
        self.recent: Final = RecentEvents()
        self.hub.observers, self.hub.strays.tell = (*self.hub.observers, self.recent), self.recent.strays_closed
        self.meters: Final = Meters(self.hub.add_observer)
        self.companions: Final[list[Companion]] = []
        self.fleet: Fleet | None = None
        self.on_drain: Final[list[Callable[[], None]]] = [lambda: self.reload.run_job(self.book.close)]
        self.loans: Final[list[Loan]] = [self._lend_book]
        self.limits_from, self.started_at = "start", 0.0
        self.on_handover: Final[list[Callable[[], None]]] = []
        self._leaves_by: float | None = None  # when a server that drains ends, monotonic seconds; guarded by _lock
        self.reload = Reload(
            self._apply_limits,
            self._apply_bans,
            config=None if (source := config.source) is None else (source.file, source.text, self._apply_config),
            limits=config.limits_file,
            bans=config.bans_file,
            proofs=lambda: self.hub.gate.files,
            also=self._look_beside,
            on_error=on_error,
        )
        self.penalties = self._penalty_watch()
        try:
            trust(authorities=config.ca_file)
            self.certificate: Final = _certificate_of(config)
            self.listen_all("rtmps", listen_addresses(config.rtmps, "rtmps"), tls=self.certificate)
            self.book: Final = book_of(config)
            self.set_bans(self.book.in_force())
            self.hub.observers += (self.penalties,)
            self.reload.read_first()
            if config.events.folder:
                events = dataclasses.replace(config.events, node=config.events.node or usual_node(self.address[1]))
                self.recording = Recording(events, self.hub.fanouts, self.connections, self.clock)
                self.hub.observers += (self.recording.sessions,)
                self.flights = make_flights(config.flights, self.recording.events)
                self._make_sender = self.flights.make_sender
        except BaseException:
            self.close_listeners()
            raise
        self._refusals: Final = RefusalLog("connection refused", self.clock)

    def _call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        group = self.groups.groups[0]
        with contextlib.suppress(ClosedError):  # the server stops: no client is left
            group.call_soon(lambda: group.call_later(delay_s, callback, *args))

    def _log_refusal(self, peer: tuple[str, int], error: LimitExceededError) -> None:
        self.penalties.refused(peer, error)
        if self.recording is not None:
            self.recording.refused(peer, error)
        self._refusals.tell(peer, error)

    def set_limits(self, limits: Limits, settings: SenderSettings | None = None) -> None:
        """Give all connections other limits, except those set for their application, stream and role."""
        config = self.hub.config
        if settings is not None:
            config = dataclasses.replace(config, settings=settings, return_after_s=settings.return_after_s)
        self.hub.config = dataclasses.replace(config, limits=limits)
        super().set_limits(limits, settings)

    def _put_limits(self, connection: Connection, limits: Limits, settings: SenderSettings | None) -> None:
        session = connection.session
        if (self.hub.config.has_levels or settings is not None) and isinstance(session, ViewerSession):
            # With what is set for its stream.
            session.on_thread(partial(session.put_settings, limits, changed=settings is not None))
        else:
            super()._put_limits(connection, limits, settings)

    def _apply_config(self, text: str, where: str) -> None:
        """Take other contents of the file of settings: what can change while the server runs is in force at once."""
        del where  # it is in the errors of the source
        source = self._read.source or self.config.source  # source of the last text, at first of the first
        if source is None:
            return
        new = source.read(text)
        differ = [item for item in self._differences(source, self._read, new) if item.takes is not Takes.RESTART]
        config = self._of_files(placed(self._base, {item.path: self._part_of(item) for item in differ}))
        if self.limits_from == "command" and not any(item.path == "limits" for item in differ):
            config = dataclasses.replace(config, limits=self.limits)
        elif self.limits_from == "command":
            self.limits_from = "config file"
        self._read = new
        self._base = placed(self._base, {item.path: self._part_of(item) for item in differ})
        waited, self.waiting = (
            self.waiting,
            tuple(item.name for item in self._differences(source, self._at_start, new) if item.takes is Takes.RESTART),
        )
        if differ:
            self._put_in_force(config)
        now = {"changed": [item.name for item in differ if item.takes is Takes.NOW]}
        now["new_connections"] = [item.name for item in differ if item.takes is Takes.NEW]
        detail = {key: names for key, names in now.items() if names}
        if self.waiting != waited:
            detail["waits_for_restart"] = list(self.waiting)
        if self.waiting and self.waiting != waited:
            _log.warning("settings that wait for a restart have changed", settings=list(self.waiting))
        if not detail:
            return
        _log.info("settings changed", file=str(source.file), connections=len(self.connections()), **detail)
        self._note_change("config file", detail, recorded=_without_names(detail) | in_force(self.hub.config))

    def _differences(self, source: SettingSource, before: LiveConfig, now: LiveConfig) -> list[Difference]:
        """Return what differs between two readings of the file.

        Names are given by the supervisor of several workers, which keeps the rules that it began with: what the server
        and its levels say of them waits for a restart, and is apart from what else the levels say.
        """
        found = source.differences(before, now)
        if self.hub.names is None:
            return found
        rest = [
            item._replace(takes=Takes.RESTART) if item.path in _NAME_SETTINGS else item
            for item in found
            if item.path != "levels"
        ]
        levels_before, names_before = split(before.levels, _NAME_SETTINGS)
        levels_now, names_now = split(now.levels, _NAME_SETTINGS)
        if levels_before != levels_now:
            value = (*levels_now, *split(self._at_start.levels, _NAME_SETTINGS)[1])
            rest.append(Difference(differing(levels_before, levels_now), "levels", value, Takes.NOW))
        said_before, said_now = _said_of_names(names_before), _said_of_names(names_now)
        return rest + [
            Difference(name, "levels", said_now.get(name), Takes.RESTART)
            for name in said_before | said_now
            if said_before.get(name) != said_now.get(name)
        ]

    def _part_of(self, item: Difference) -> Any:
        """Return the value of a setting here: a worker has its part of what all share."""
        whole = self._at_start.workers
        if item.path != "memory_budget_bytes" or whole == self.config.workers:
            return item.value
        return -(-item.value // worker_count(whole))

    def _of_files(self, config: LiveConfig) -> LiveConfig:
        return config if self._limits_said is None else config.with_limits(self._limits_said)

    def _put_in_force(self, config: LiveConfig) -> None:
        was = self.hub.config
        self.hub.configure(config)
        self.admission.set_limits(config.admission)
        self._policy, self._work_limits = LIVE_POLICIES[config.policy], config.work
        # Another object, though it may say the same: by that a connection that is being made learns of the change.
        self._limits, self._settings = dataclasses.replace(config.limits), config.sender
        limits = None if config.limits == was.limits else config.limits
        for connection in self.connections():
            session = connection.session
            if isinstance(session, ViewerSession):
                session.on_thread(partial(session.put_settings, limits, changed=True))

    def _apply_limits(self, file: LimitsFile) -> None:
        """Take the limits of a file: for new connections and open ones; times too."""
        config, was = self._base.with_limits(file), self.limits
        settings = config.sender
        self._limits_said = file
        self.set_limits(file.limits, settings)
        now = {
            "limits": str(file.limits),
            "stuck_s": settings.stuck_s,
            "soft_too_long_s": settings.soft_too_long_s,
            "return_after_s": settings.return_after_s,
            "objective": file.objective,
        }
        self.limits_from = "limits file"
        _log.info("limits changed", was=str(was), connections=len(self.connections()), **now)
        self._note_change("limits file", now, recorded=now | in_force(self.hub.config))

    def _penalty_watch(self) -> PenaltyWatch:
        limits, admission = self.config.penalties, self.config.admission
        # Who lets an address open connections as fast as it likes is not to be protected from that, and who lets it
        # open more at once may have more of them come to nothing.
        most = max(limits.connections.count, _FLOOD_BURSTS * admission.burst_per_address)
        count = most if admission.new_per_address_and_s and limits.connections.count else 0.0
        limits = dataclasses.replace(limits, connections=dataclasses.replace(limits.connections, count=count))
        return PenaltyWatch(
            Penalties(limits),
            self.connections,
            SparedNetworks(self.config.penalties_spare, self.trusted_proxies, self.nodes),
            self.reload.run_later,
            self._punish,
            self.clock,
        )

    def _punish(self, verdicts: list[Overflow]) -> None:
        """Decide about addresses that have done too much, and carry that out; the thread of the files."""
        behaving = self.end_guilty(verdicts)
        words = self.book.ban(bans_of(verdicts, behaving, datetime.now(UTC)))
        self._put_words_in_force(words, PENALTY)

    def end_guilty(self, verdicts: Iterable[Overflow]) -> list[int]:
        """End the connections that are guilty, and return of each verdict how many others behave. Any thread."""
        behaving = []
        for verdict in verdicts:
            count, guilty = self.penalties.behaving_and_guilty(verdict)
            behaving.append(count)
            details = f"penalty, {verdict.offence.value}: more than {verdict.allowance}"
            for connection in guilty:
                connection.close(CloseReason.BANNED, details)
            if guilty:
                numbers = [item.number for item in guilty]
                _log.warning("penalty: connections ended", cidr=verdict.cidr, why=details, connections=numbers)
        return behaving

    def take_words(self, words: Iterable[Word], origin: str | None = None, *, told: bool = True) -> int:
        """Take what another server of the fleet, or the supervisor, has said; the thread of the files.

        Returns how many connections that ended.
        """
        return self._put_words_in_force(self.book.merge(words), origin, told=told)

    def _put_words_in_force(self, words: Sequence[Word], origin: str | None, *, told: bool = True) -> int:
        """Put words in force and tell of them; `origin` None: the fleet."""
        ended = self.set_bans(self.book.in_force()) if words else 0
        for word in words if told else ():
            by = f"fleet {word.stamp.node}" if origin is None else origin
            if word.kind is WordKind.LIMITS:
                self._put_limits_of_fleet(word, by)
            elif word.ban is None:
                _log.info("ban lifted", **word.detail(), origin=by)
                self._note_change("unban", word.detail(), by)
            else:
                ended += self._end_new(word.ban)
                log = _log.warning if word.ban.source == PENALTY else _log.info
                log("penalty" if word.ban.source == PENALTY else "banned", **word.detail(), ended=ended, origin=by)
                self._note_change("ban", word.detail(), by)
        return ended

    def _end_new(self, ban: Ban) -> int:
        """End all connections that a ban of a command names; a ban of a penalty leaves those that behave."""
        if ban.action is not BanAction.BAN or ban.source == PENALTY:
            return 0
        return sum(self._end_if_banned(item, new=True) for item in self.connections() if ban.covers(item.peer[0]))

    def _look_beside(self) -> None:
        """Look at what else may have changed: bans that others keep, sets of keys, the certificate, and the heap."""
        if self.clock() >= self._trim_at:  # at times, since nobody knows how much of it is free
            self._trim_at = self.clock() + TRIM_S
            trim_heap()
        self.hub.gate.fetch_due()
        if self.book.follow_clock():  # the list in force has bans that have ended, and knows one clock
            self.set_bans(self.book.in_force())
        self.penalties.look()
        if self.certificate is None:
            return
        file = str(self.certificate.certificate)
        try:
            if self.certificate.reload_if_changed():
                _log.info("certificate changed", file=file)
                self._note_change("certificate", {"file": file})
        except ConfigError as error:
            _log.error(
                "the new certificate is not valid, that of before stays in force", fault=str(error), hint=error.hint
            )

    def _note_proofs(self, name: str, path: Path) -> None:
        _log.info(f"{name} changed", file=str(path))
        self._note_change(f"{name} file", {"file": str(path)})

    def _apply_bans(self, bans: BanList) -> None:
        """Put a ban list in force: refuse its networks, and end their connections that take no part."""
        before = {ban.cidr for ban in self.admission.bans.bans}
        now = {ban.cidr for ban in bans.still(time.time()).bans}
        let_in = self.book.replace_file_bans(bans)
        ended = self.set_bans(self.book.in_force())
        figures = {"bans": len(now), "added": len(now - before), "lifted": len(before - now)}
        figures |= {"expired": len(bans) - len(now), "ended": ended}
        if let_in:
            figures["let_in_by_command"] = let_in
        _log.info("bans changed", **figures)
        self._note_change("bans file", figures)

    def _note_change(
        self,
        what: str,
        detail: Mapping[str, Any],
        origin: str = "",
        *,
        recorded: Mapping[str, Any] | None = None,
    ) -> Change:
        if self.recording is not None:  # what was read before the start is in the record of the start
            told = detail if recorded is None else recorded
            self.recording.events.config_changed(self.clock(), what, {**told, "origin": origin} if origin else told)
        return self.changes.note(what, detail, origin)

    # -- what operators change; never on a thread of a poll group

    def change_limits(self, limits: Limits, *, origin: str = "") -> int:
        """Give open connections and new ones other limits, until a limits file or a command says otherwise."""

        def change() -> int:
            if self.fleet is not None:
                marks = {name: write_marks(limits, name) for name in ("soft", "hard", "low")}
                self.book.say_limits(marks | {"target_delay": target_marks(limits)})
            return self._put_limits_in_force(limits, origin)

        return self.reload.run_job(change)

    def _put_limits_in_force(self, limits: Limits, origin: str) -> int:
        was = self.limits
        self.set_limits(limits)
        self.limits_from = "command"
        count = len(self.connections())
        _log.info("limits changed", was=str(was), connections=count, limits=str(limits), origin=origin)
        self._note_change("limits", limits_as_dict(limits), origin, recorded=in_force(self.hub.config))
        return count

    def _put_limits_of_fleet(self, word: Word, origin: str) -> None:
        """Put the limits of the fleet in force; those that are not valid beside the settings of this server are not."""
        said, now = word.value, self.limits
        try:
            limits = Limits.parse(
                said["soft"],
                said["hard"],
                said["low"],
                overhead_bytes=now.overhead_bytes,
                hard_policy=now.hard_policy,
                target_delay_ms=parse_target_delay(said["target_delay"], "target_delay"),
            )
            self._put_limits_in_force(limits, origin)
        except ConfigError as error:
            _log.error("the limits of the fleet are not valid here", fault=str(error), origin=origin)

    def ban(self, ban: Ban, *, origin: str = "") -> BanOutcome:
        """Keep out, or limit, a network, now and, where there is a store, after a restart too.

        Open connections of a banned network end, those that play or publish too; a limit ends none.
        """
        ban = dataclasses.replace(ban, reason=redact_text(ban.reason))  # it may quote what somebody sent

        def change() -> BanOutcome:
            words = self.book.ban([ban])
            ended = self._put_words_in_force(words, origin)
            return BanOutcome(words[0].ban or ban, ended, self.book.stored, not_stored(self.book))

        return self.reload.run_job(change)

    def unban(self, cidr: str, *, origin: str = "") -> list[Ban]:
        def change() -> list[Ban]:
            lifted, word = self.book.lift(cidr, self.admission.bans.bans, origin)
            self._put_words_in_force([word], origin)
            return lifted

        return self.reload.run_job(change)

    def drain(self, within_s: float, *, origin: str = "", successor: Path | None = None) -> float:
        """Take no new connections, ask clients to reconnect, and end when all have left, or when the time is over.

        Told once more, it ends at the earlier of the two times. A successor that waits at a path is handed the
        sockets, and all this begins once that one serves; if it never does, the server goes on.
        """
        if successor is not None:
            self._hand_over(successor, within_s, origin)
            return within_s
        now = time.monotonic()
        with self._lock:
            first, by = self._leaves_by is None, now + within_s
            self._leaves_by = by if self._leaves_by is None else min(self._leaves_by, by)
            left_s = max(0.0, self._leaves_by - now)
        if first and not self.stopping:
            self.stop_accepting()
            for let_go in self.on_drain:
                let_go()
            asked = self._ask_to_reconnect()
            _log.info("draining", connections=asked, within_s=round(left_s, 1), origin=origin)
            self._note_change("drain", {"within_s": left_s, "connections": asked}, origin)
            threading.Thread(target=self._leave, name="flowctl-drain", daemon=True).start()
        return left_s

    def _hand_over(self, path: Path, within_s: float, origin: str) -> None:
        if self.stopping or self.drains_for_s is not None:
            raise LocalProtocolError("the server drains already, or stops", hint="start the other one without it")
        if self._heir is not None and self._heir.waited_for:
            raise LocalProtocolError("another server is taking its place already", hint="wait until that one serves")
        sockets = [(item.name, item.sock) for item in self.listeners]
        for companion in self.companions:
            sockets += getattr(companion, "sockets", ())
        self._heir = Heir(path, sockets, self.loans, partial(self._give_way, within_s, origin), self._go_on)
        _log.info("another server is to take the place of this one", origin=origin)

    def _give_way(self, within_s: float, origin: str) -> None:
        """Drain: another server serves in the place of this one."""
        self.hub.leaving = True
        for hand_over in self.on_handover:
            hand_over()
        self.drain(within_s, origin=origin)

    def _go_on(self) -> None:
        if self.drains_for_s is not None:  # an operator wants it meanwhile
            for let_go in self.on_drain:
                let_go()

    def _lend_book(self, _: Path) -> Callable[[], object]:
        self.reload.run_job(self.book.close)
        return lambda: self.reload.run_job(self._take_book_back)

    def _take_book_back(self) -> None:
        self.book.take_back()
        self.set_bans(self.book.in_force())

    @property
    def drains_for_s(self) -> float | None:
        """How long it will be there at most, seconds. None: it does not drain."""
        with self._lock:
            return None if self._leaves_by is None else max(0.0, self._leaves_by - time.monotonic())

    def _leave(self) -> None:
        time.sleep(_RECONNECT_HEAD_START_S)  # for the requests to reconnect, and for the answer to who asked for it
        while self.connections() and self.drains_for_s:
            time.sleep(_DRAIN_LOOK_S)
        self.stop()

    def _ask_to_reconnect(self) -> int:
        """Ask all clients to connect anew, elsewhere, in the words of each; return how many connections there are."""
        asked = self.connections()
        for connection in asked:
            session = connection.session
            if isinstance(session, ViewerSession):
                session.on_thread(session.ask_to_reconnect)
        return len(asked)

    def _tell_that_it_stops(self) -> int:
        """Let sessions say that the server stops; return how many there are."""
        sessions = [connection.session for connection in self.connections()]
        told = [session for session in sessions if isinstance(session, ViewerSession)]
        for session in told:
            session.on_thread(session.server_stops)
        return len(told)

    def kick(self, wanted: Callable[[Connection], bool], reason: str = "") -> list[Connection]:
        """End the open connections for which `wanted` is true, with reason KICKED; they may come again."""
        details = f"by an operator: {reason}" if reason else "by an operator"
        kicked = []
        for connection in self.connections():
            if connection.ended is None and wanted(connection):
                connection.close(CloseReason.KICKED, details)
                kicked.append(connection)
        return kicked

    def _banned(self, connection: Connection, ban: Ban) -> None:
        if self.recording is not None:
            detail = {"cidr": ban.cidr, "score": ban.score, "expires": utc_text(ban.expires)}
            self.recording.events.banned(self.clock(), connection.number, connection.peer, detail)

    def start(self) -> None:
        """Start with all that may fail; only then are clients accepted, which would be cut."""
        if self.recording is not None:
            self.recording.start(self.hub.config)
        if self._hooks is not None:
            self._hooks.start()
        self.hub.gate.read_files, self.reload.on_proofs = self.reload.read_proofs, self._note_proofs
        self._start_groups()
        self.started_at = self.clock()
        self.reload.start()
        self.hub.oversight.start()
        for companion in self.companions:
            companion.start()
        limits = self.book.words.get("", WordKind.LIMITS)
        if self.fleet is not None and limits is not None:
            self.reload.run_job(lambda: self._put_limits_of_fleet(limits, f"fleet {limits.stamp.node}"))
        self._start_accepting()
        self._tell_what_is_open()
        others = [shown(*listener.address, listener.name) for listener in self.listeners[1:]]
        _log.info(
            "live server started",
            url=f"rtmp://{shown(*self.address)}/",
            groups=len(self.groups.groups),
            most_viewers=self.admission.most,
            open_files=open_files(),
            **({"also": ", ".join(others)} if others else {}),
        )

    def _tell_what_is_open(self) -> None:
        """Warn of what cannot be done at all, and of what everybody may do where other machines reach the server."""
        config = self.hub.config
        missing = None if config.has_levels else config.access.missing()
        if missing is not None:
            _log.error("nobody will be let in", why=missing, hint="see docs/access.md")
        public = [item for item in self.listeners if not is_loopback(item.address[0])]
        if not public:
            return
        protocols = {"http" if item.name in ("http", "https") else "rtmp" for item in public}
        kinds: list[RequestKind] = ["publish", "play"]
        free: list[str] = [kind for kind in kinds if "rtmp" in protocols and self._is_open(kind, "rtmp")]
        if "http" in protocols and "play" not in free and self._is_open("play", "http"):
            free.append("play over HTTP")
        if free:
            hint = "see docs/access.md: publish_auth, play_auth, allow_publish, on_publish and others"
            hosts = ",".join(dict.fromkeys(item.address[0] for item in public))
            _log.warning("open to everybody", may=" and ".join(free), host=hosts, hint=hint)

    def _is_open(self, kind: RequestKind, protocol: str) -> bool:
        """Return whether nothing keeps anybody from `kind`; of HTTP nobody is asked about connecting, as with SRS."""
        config = self.hub.config
        hooks = self._hooks.decides if self._hooks is not None else {}
        asked = config.rtmp.credentials is not None or hooks.get(kind) or (protocol == "rtmp" and hooks.get("connect"))
        return not asked and config.access.open_to_all(kind, protocol)

    def _before_stop(self, deadline_s: float) -> None:
        """Tell clients that understand it: those of RTMP to reconnect, WebSocket players that the server goes away."""
        self.reload.stop()
        told = self._tell_that_it_stops()
        if self.drains_for_s is None:  # who drains has asked
            told += self._ask_to_reconnect()
        if told:
            time.sleep(min(_RECONNECT_HEAD_START_S, deadline_s / 4))

    def _after_stop(self, deadline_s: float) -> None:
        for companion in self.companions:
            companion.stop(deadline_s)
        self.hub.visits.stop()
        self.hub.strays.stop()
        if self._hooks is not None:
            self._hooks.stop(deadline_s)
        self.hub.gate.stop(deadline_s)
        self.book.close()
        if self._heir is not None:
            self._heir.close()
        if self.recording is not None:
            self.recording.stop(self.accepted_count, deadline_s)
        _log.info("live server stopped", connections=self.accepted_count)


def _certificate_of(config: LiveConfig) -> Certificate | None:
    config.check_start()
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return Certificate(config.tls_certificate, config.tls_key)


def book_of(config: LiveConfig) -> BanBook:
    if config.ban_store is None:
        return BanBook()
    from flowctl.live.bans.store import BanStore  # noqa: PLC0415 - only servers with a store load SQLite

    return BanBook(BanStore(config.ban_store))


def not_stored(book: BanBook) -> str:
    """Return what to tell who bans while the store cannot be written to; empty: it can."""
    return f"the ban store was not written: {book.fault}; it is tried again by itself" if book.fault else ""


def _said_of_names(levels: Iterable[Level]) -> dict[str, Any]:
    """Return what levels say about names of streams, by level and setting."""
    return {f"{level}.{_NAME_SETTINGS[path]}": value for level in levels for path, value in level.values.items()}


def _without_names(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changed without names of streams, which may be keys: settings, and that levels did."""
    return {
        key: list(dict.fromkeys("levels" if name.startswith("[") else name for name in names))
        for key, names in detail.items()
    }


def build_live_server(
    options: ServeOptions,
    hooks: LiveHooks | None = None,
    *,
    hooks_loop: asyncio.AbstractEventLoop | None = None,
) -> LiveServer:
    if not isinstance(options, LiveConfig):
        options = LiveConfig(**{item.name: getattr(options, item.name) for item in dataclasses.fields(options)})
    if hooks is None and options.hooks:
        hooks = load_hooks(options.hooks)
    return LiveServer(options, hooks, hooks_loop=hooks_loop)
