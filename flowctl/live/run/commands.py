"""The commands of a live server: one process for each stream and each table that fits it; a companion of the server.

How it works. One thread has all of them. It is told which streams begin, end or have other settings, and then looks
what is to run. A command begins once its stream has shown its codecs, and ends with it: not with a connection that
breaks, whose publisher may be back. One that fails is started again, later each time, and so is one that is to publish;
another one that ends with status 0 has done what it was for. What a command makes starts no commands, else ``live/*``
would go on for ever.

There are places for so many at a time. Where they are short, a stream of an address that has fewer takes one of the
address that has most, as with recordings, and who publishes and breaks off again and again has his for some seconds.

A server that gives way to another one starts nothing any more, since that has the port: what runs goes on until its
stream has moved, and the other one begins its own then.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import urlencode

import structlog

from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.text.addresses import join_host_port
from flowctl.core.text.printable import foreign
from flowctl.errors import LimitExceededError
from flowctl.live.access.passes import PASS_PARAMETER
from flowctl.live.cluster.workers.child import end_in_words
from flowctl.live.remux.shares import Places
from flowctl.live.renditions.renditionset import SOURCE
from flowctl.live.run.process import STOP_S, CommandProcess, Guard
from flowctl.live.server import LiveServer
from flowctl.live.settings.runs import RunRule, RunWhen, plain_name, rules_for
from flowctl.live.stream import Stream
from flowctl.wire.rtmp.url import is_secret

_log: Final = structlog.get_logger("flowctl.run")
_BACKOFF: Final = Backoff(first_s=1.0, factor=2.0, most_s=60.0, jitter=0.2)
_CODECS_S: Final = 3.0
"""Longest wait for the first codec of a stream: encoders show them with their first messages."""
_OTHER_CODEC_S: Final = 0.5
_LINGER_S: Final = {RunWhen.VIEWED: 10.0, RunWhen.NEEDED: 60.0}
"""Time for which a command goes on after the last viewer of what it makes: as MediaMTX's ``runOnDemandCloseAfter``; of
a step of a ladder, whose viewers may soon need it again."""
_STEPS_CODEC: Final = "avc1"
"""Pictures of steps: a viewer changes over within one codec."""
_PLACE_S: Final = 5.0
"""Least time for which a place is taken: starting a program costs more than publishing."""
_NO_ROOM_S: Final = 2.0
_GIVEN_WAY_S: Final = 10.0
_REMEMBERED_S: Final = 120.0
"""Time for which it is known how a command of a stream that has gone fared: it may be back at once."""
_IDLE_S: Final = 0.5
_BUSY_S: Final = 0.1
"""Time between two looks; while something is about to begin or to end."""
_REST_S: Final = 0.05
"""Between two looks in any case: what is written without end, or published and left at once, must not take a core."""
_LINES_PER_S: Final = 5.0
_LINES_AT_ONCE: Final = 50.0
_LINE_CHARS: Final = 500
_QUERY_CHARS: Final = 1024


class CommandState(enum.Enum):
    """States of a command."""

    WAITS = "waits"  #: for codecs, viewers, a place, or its next try
    RUNS = "runs"
    ENDS = "ends"  #: it was asked to
    DONE = "done"  #: with status 0


_Key: TypeAlias = tuple[str, RunRule]


@dataclass(eq=False, slots=True)
class Command:
    """A command of one stream."""

    name: str
    rule: RunRule
    address: str  # of the publisher; empty: the stream comes from another server
    wanted_at: float  # since when the stream is there
    start_at: float = 0.0
    wanted: bool = True
    state: CommandState = CommandState.WAITS
    why: str = ""
    process: CommandProcess | None = None
    token: str = ""  # of the process
    started_at: float = 0.0
    kill_at: float | None = None  # when what is left of it is killed. None: it was not asked to end.
    ended_by_itself: bool = False
    starts: int = 0
    codec_at: float | None = None  # when the first codec was seen
    viewed_at: float = float("-inf")
    forget_at: float | None = None
    redial: Redial = field(default_factory=lambda: Redial(_BACKOFF))
    lines: TokenBucket = field(default_factory=lambda: TokenBucket(_LINES_AT_ONCE, 0.0))
    left_out: int = 0  # lines that are not in the log

    @property
    def key(self) -> _Key:
        return self.name, self.rule

    def row(self) -> dict[str, Any]:
        return {
            "command": self.rule.program,
            "state": self.state.value,
            "pid": None if self.process is None else self.process.pid,
            "starts": self.starts,
            "publishes": list(self.rule.names(self.name)),
            "why": foreign(self.why),
        }


class Commands:
    """All commands of a server; made before it starts. The commands' thread, unless something else is said."""

    def __init__(self, server: LiveServer, make_process: Callable[..., CommandProcess] = CommandProcess) -> None:
        self.title: Final = "run"
        self.bound: list[str] = []  # nothing: it listens nowhere
        self._server: Final = server
        self._hub: Final = server.hub
        self._make_process: Final = make_process
        self._news: Final[queue.SimpleQueue[str]] = queue.SimpleQueue()  # streams to look at
        self._commands: dict[str, dict[RunRule, Command]] = {}  # by stream
        self._places: Final[Places[_Key]] = Places("commands are run")
        self._places_of: Final[dict[RunRule | None, Places[_Key]]] = {}  # None: all steps of the ladder
        self._cores: Final = len(os.sched_getaffinity(0))
        self._held: Final[dict[_Key, float]] = {}  # places of commands that have ended, and until when
        self._guard: Final = Guard()
        self._selector: Final = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._starts = self._failures = 0
        self._stopping = False  # set once, by any thread
        self._thread: threading.Thread | None = None
        server.hub.published += (self._note,)

    # -- any thread

    def start(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="flowctl-run", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """End all commands; what has not ended some seconds later is killed."""
        del deadline_s  # they have their own
        self._stopping = True
        self._ring()
        if self._thread is not None:
            self._thread.join(2 * STOP_S)

    def figures(self) -> dict[str, Any]:
        """Return figures, as JSON; nothing where there are no commands."""
        states = [command.state for command in self._all() if command.wanted]
        if not (self._hub.config.runs or states):
            return {}
        counts = {state.value: states.count(state) for state in CommandState}
        return counts | {"starts": self._starts, "failures": self._failures}

    def _all(self) -> list[Command]:
        return [command for of_stream in list(self._commands.values()) for command in list(of_stream.values())]

    def _note(self, name: str) -> None:
        if self._hub.config.runs or self._commands:
            self._news.put(name)
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and rings; or all is over
            os.write(self._woken, b"!")

    # -- the commands' thread

    def _run(self) -> None:
        while not self._stopping or any(command.process for command in self._all()):
            try:
                self.look(self._server.clock())
            except Exception as error:  # noqa: BLE001 - nor does one stream
                self._server.groups.groups[0].report("commands", error)
            self._selector.select(self._pause_s())
            time.sleep(_REST_S)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        self._guard.close()

    def _pause_s(self) -> float | None:
        if not (self._commands or self._held or self._stopping):
            return None
        now = self._server.clock()
        hurry = any(
            item.kill_at is not None
            or (item.wanted and item.state is CommandState.WAITS and now - item.wanted_at < 2 * _CODECS_S)
            for item in self._all()
        )
        return _BUSY_S if hurry or self._stopping else _IDLE_S

    def look(self, now: float) -> None:
        """Take the news, and bring each command on."""
        names = set()
        with contextlib.suppress(queue.Empty):
            while True:
                names.add(self._news.get_nowait())
        for name in names:
            self._decide(name, now)
        for key, until in list(self._held.items()):
            if now >= until:
                self._free(key)
        for command in self._all():
            before = command.state, command.why, command.starts
            try:
                self._bring_on(command, now)
            except Exception as error:  # noqa: BLE001 - one command costs the others nothing
                self._server.groups.groups[0].report("commands", error)
            if (command.state, command.why, command.starts) != before:
                names.add(command.name)
        for name in names:
            self._show(name)

    def _decide(self, name: str, now: float) -> None:
        """See which commands a stream is to have."""
        stream = self._hub.find_stream(name)
        rules = () if stream is None or stream.ended else self._hub.config.runs
        fits = [rule for rule in rules if rule.fits(name)]
        if fits and self._hub.config.made_from(name) is not None:
            fits = []
        if fits and not plain_name(name):
            _log.warning("no command is run for a name that may mean something else to it", stream=name)
            fits = []
        fitting = rules_for(rules, name) if fits else []
        if others := [made for rule in fits if rule not in fitting for made in rule.names(name)]:
            _log.warning("a command is not run: another one has a name that it publishes", stream=name, names=others)
        publisher = None if stream is None else stream.publisher
        address = "" if publisher is None or not publisher.peer[1] else publisher.peer[0]
        commands = self._commands.setdefault(name, {}) if fitting else self._commands.get(name, {})
        for rule in fitting:
            command = commands.setdefault(rule, Command(name, rule, address, now))
            if not command.wanted:
                command.wanted_at, command.codec_at = now, None
            if publisher is not None:
                command.address = address
        for rule, command in commands.items():
            command.wanted = rule in fitting

    def _bring_on(self, command: Command, now: float) -> None:
        if command.process is not None:
            self._attend(command, command.process, now)
            return
        if not command.wanted or self._stopping:
            command.forget_at = command.forget_at or now + (_REMEMBERED_S if command.starts else 0.0)
            if now >= command.forget_at:
                self._forget(command)
            elif command.state is CommandState.DONE:
                command.state = CommandState.WAITS  # of the next publication
            return
        command.forget_at = None
        stream = self._hub.find_stream(command.name)
        if command.state is CommandState.WAITS and now >= command.start_at and stream is not None:
            if (why := self._waits_for(command, stream, now)) is None:
                self._start(command, stream, now)
            else:
                command.why = why

    def _forget(self, command: Command) -> None:
        commands = self._commands[command.name]
        del commands[command.rule]
        if not commands:
            del self._commands[command.name]

    def _waits_for(self, command: Command, stream: Stream, now: float) -> str | None:
        """Return what a command has to wait for. None: it can begin."""
        if self._gives_way:
            return "the server takes no new connections"
        if command.codec_at is None and stream.codecs:
            command.codec_at = now
        seen = command.codec_at is not None and (len(stream.codecs) > 1 or now - command.codec_at >= _OTHER_CODEC_S)
        if not seen and now - command.wanted_at < _CODECS_S:
            return "its codecs"
        if command.rule.step and (codec := stream.codecs.get("video", "")) != _STEPS_CODEC:
            return f"pictures of H.264, of which steps are; these are {foreign(codec, 40) or 'none'}"
        if not self._is_viewed(command, now):
            return "a viewer who needs it" if command.rule.step else "a viewer of what it publishes"
        if any(item.process is not None and not item.wanted for item in self._commands[command.name].values()):
            return "one of before to end"
        return self._no_place(command, now)

    def _no_place(self, command: Command, now: float) -> str | None:
        """Give a command its places, or say why it has none."""
        most = self._hub.config.run_at_once
        rule = command.rule
        own = self._places_of.setdefault(_group(rule), Places("such commands are run"))
        at_once = self._cores if rule.step else rule.at_once  # a step takes a core
        for place, limit in ((own, min(most, at_once) if at_once else most), (self._places, most)):
            if not limit:
                return "none is to run: run_at_once is 0"
            try:
                victim = place.take(command.key, command.address, limit)
            except LimitExceededError as error:
                self._free(command.key)
                command.start_at = now + _NO_ROOM_S
                return str(error)
            if victim is not None:
                self._give_way(victim, now)
        self._held.pop(command.key, None)
        return None

    def _give_way(self, key: _Key, now: float) -> None:
        self._free(key)
        command = self._commands.get(key[0], {}).get(key[1])
        if command is not None and command.process is not None:
            self._end(command, command.process, now, "its place went to an address that has fewer")
            command.start_at = now + _GIVEN_WAY_S

    def _free(self, key: _Key) -> None:
        self._held.pop(key, None)
        self._places.free(key)
        if (places := self._places_of.get(_group(key[1]))) is not None:
            places.free(key)
            if not len(places):
                del self._places_of[_group(key[1])]

    @property
    def _gives_way(self) -> bool:
        server = self._server
        return self._stopping or server.stopping or self._hub.leaving or server.drains_for_s is not None

    def _is_viewed(self, command: Command, now: float) -> bool:
        when = command.rule.when
        if when is RunWhen.PUBLISHED:
            return True
        # A step that is played by its name is kept, not begun: else that would take a core, and it from who needs one.
        counts = when is RunWhen.VIEWED or command.process is not None
        if (counts and any(map(self._hub.is_viewed, command.rule.names(command.name)))) or (
            when is RunWhen.NEEDED and self._needs_step(command, now)
        ):
            command.viewed_at = now
        return now - command.viewed_at < _LINGER_S[when]

    def _needs_step(self, command: Command, now: float) -> bool:
        """Return whether a viewer of the stream is in this step of it, or has a line that carries it and no more."""
        stream = self._hub.find_stream(command.name)
        renditions = None if stream is None else self._hub.renditions.find(stream)
        if stream is None or renditions is None or not renditions.ladder or stream.codecs.get("video") != _STEPS_CODEC:
            return False
        ladder, own = self._hub.config.ladder, renditions.rate_of(SOURCE)
        steps = (ladder.fitting(carried, own) for carried in renditions.carried(now))
        if any(step is not None and step.name == command.rule.step for step in steps):
            return True
        return command.process is not None and command.rule.step in self._hub.renditions_viewed(command.name)

    def _start(self, command: Command, stream: Stream, now: float) -> None:
        publishes = command.rule.names(command.name)
        command.token = self._hub.gate.passes.give(command.name, publishes)
        values = self._values(command, stream, publishes)
        command.redial.begin()
        command.starts += 1
        command.started_at, command.kill_at, command.ended_by_itself = now, None, False
        self._starts += 1
        rule = command.rule
        try:
            command.process = self._make_process(
                rule.words(values), values, nice=rule.nice, memory_bytes=rule.memory, guard=self._guard
            )
        except (OSError, ValueError) as error:  # no memory, or a locale that does not have the letters of the name
            self._over(command, now, f"it cannot be started: {error}")
            _log.error("command failed", **_about(command), why=command.why)
            return
        command.state, command.why = CommandState.RUNS, ""
        self._selector.register(command.process.output, selectors.EVENT_READ)
        _log.info("command started", **_about(command), pid=command.process.pid)

    def _values(self, command: Command, stream: Stream, publishes: tuple[str, ...]) -> dict[str, str]:
        """Return what is told of a stream, by name."""
        host, port = self._server.address
        place = join_host_port({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)  # noqa: S104 - compared with

        def url(name: str) -> str:
            return f"rtmp://{place}/{name}?{PASS_PARAMETER}={command.token}"

        app, _, name = command.name.rpartition("/")
        publisher = stream.publisher
        query_of: Callable[[Stream], Mapping[str, str]] = getattr(publisher, "query_of", lambda _: {})
        query = urlencode(
            [(key, value) for key, value in query_of(stream).items() if not is_secret(key)], errors="replace"
        )
        made = {f"publish_{number}": url(item) for number, item in enumerate(publishes, 1)}
        return made | {
            "name": command.name,
            "app": app,
            "stream": name,
            "base": name.removesuffix(command.rule.ending),
            "url": url(command.name),
            "address": command.address,
            "query": query if len(query) <= _QUERY_CHARS else "",
            **{kind: foreign(stream.codecs.get(kind, ""), 40) for kind in ("video", "audio")},
        }

    def _attend(self, command: Command, process: CommandProcess, now: float) -> None:
        """See to a process: what it says, whether it has ended, and whether it is to."""
        self._tell_lines(command, process, now)
        ended = process.ended
        if ended and command.kill_at is None:
            # Else it saw the end of its stream, or of the server, before we told it.
            command.ended_by_itself = command.wanted and not self._server.stopping
            ends = "the server ends" if command.wanted else "its stream has ended"
            self._end(command, process, now, "" if command.ended_by_itself else ends)
        elif command.kill_at is None and not (command.wanted and not self._stopping and self._is_viewed(command, now)):
            self._end(command, process, now, "its stream has ended" if not command.wanted else "nobody views it")
        if command.kill_at is None or not (now >= command.kill_at or (ended and process.silent)):
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.output)
        status = process.finish()
        if status is None:
            command.kill_at = now + STOP_S
            return
        self._tell_lines(command, None, now)
        command.process = None
        told = {"ended": end_in_words(status), "after_s": round(now - command.started_at, 1)}
        if not command.ended_by_itself:
            _log.info("command ended", **_about(command), **told, why=command.why)
            self._over(command, now, command.why, failed=False)
        elif status or command.rule.publish:  # FFmpeg says 0 as well where its input breaks off
            self._over(command, now, end_in_words(status))
            _log.warning("command failed", **_about(command), **told, again_in_s=round(command.start_at - now, 1))
        else:
            _log.info("command ended", **_about(command), **told)
            self._over(command, now, "", failed=False)
            command.state = CommandState.DONE

    def _end(self, command: Command, process: CommandProcess, now: float, why: str) -> None:
        """Ask a command, and what it has started, to end."""
        process.ask_to_end()
        command.kill_at = now + STOP_S
        command.state, command.why = CommandState.ENDS, why

    def _over(self, command: Command, now: float, why: str, *, failed: bool = True) -> None:
        self._hub.gate.passes.revoke(command.token)
        self._failures += failed
        command.kill_at = None
        command.state, command.why = CommandState.WAITS, why
        command.start_at = max(command.start_at, now + command.redial.delay_s(now - command.started_at))
        self._held[command.key] = command.started_at + _PLACE_S

    def _tell_lines(self, command: Command, process: CommandProcess | None, now: float) -> None:
        """Put what a command has written into the log, as much of it as the log may be asked to take."""
        lines = [] if process is None else process.lines()
        command.left_out += 0 if process is None else process.take_unread()
        for line in lines:
            if not command.lines.take_tokens(_LINES_PER_S, _LINES_AT_ONCE, now):
                command.left_out += 1
                continue
            said = foreign(line.replace(command.token, "***"), _LINE_CHARS)
            _log.info("command says", **_about(command), line=said)
        if command.left_out and (process is None or command.lines.fill(_LINES_PER_S, _LINES_AT_ONCE, now) >= 1):
            _log.info("command says more", **_about(command), lines_left_out=command.left_out)
            command.left_out = 0
        if process is not None and process.silent:
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.output)

    def _show(self, name: str) -> None:
        """Put the commands of a stream where its rows find them."""
        stream = self._hub.find_stream(name)
        if stream is not None:
            stream.commands = tuple(item.row() for item in self._commands.get(name, {}).values() if item.wanted)


def _group(rule: RunRule) -> RunRule | None:
    """Return what commands of a rule share their places by."""
    return None if rule.step else rule


def _about(command: Command) -> dict[str, Any]:
    return {"stream": command.name, "command": command.rule.program}
