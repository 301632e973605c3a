"""The relays of one live server: streams pushed to others, and streams pulled from them; a companion of the server.

How it works. An observer tells when a client begins to publish; each rule of `relay_push` that fits gets a `Push`. It
connects, publishes there, and tries again, later each time, for as long as the stream is published here. What is pulled
is not pushed, and a push that came through too many relays is not pushed on (`MOST_HOPS`), so that servers that name
each other do not send one stream round for ever. A name that is taken is refused, as to any publisher.

`relay_pull` names are followed while they have viewers here (`flowctl.live.cluster.names.following`), or always.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import structlog

from flowctl.connection import Connection
from flowctl.core.outcomes.backoff import Backoff, Redial
from flowctl.core.text.addresses import join_host_port
from flowctl.errors import ClosedError, FlowctlError, LocalProtocolError, RemoteProtocolError
from flowctl.live.cluster.follow import FollowStatistics, Inflow, Source, StreamFollower
from flowctl.live.cluster.names.following import Following
from flowctl.live.observer import Observer
from flowctl.live.publishing import HubSink
from flowctl.live.relay.pushing import PushSession
from flowctl.live.server import LiveServer
from flowctl.live.settings.relays import RelayRule, place_of
from flowctl.reasons import CloseReason
from flowctl.wire.client.connect import connect_socket

_log: Final = structlog.get_logger("flowctl.relay")
MOST_HOPS: Final = 3
"""Relays by which a stream may have come through pushes."""
MOST_PUSHES: Final = 1000
_BACKOFF: Final = Backoff(first_s=0.5, factor=2.0, most_s=30.0)
_LOOK_S: Final = 2.0
"""Time between two searches for names that have viewers, and are neither published here nor followed."""
_AGENT: Final = "FMLE/3.0 (compatible; flowctl relay; hops={})"
_HOPS: Final = re.compile(r"flowctl relay; hops=(\d{1,2})\)")


def hops_of(agent: str) -> int:
    """Return how many relays a publisher that calls itself so has come through."""
    match = _HOPS.search(agent)
    return int(match[1]) if match else 0


class Push:
    """One stream that is published at one other server. On the thread of its server's first group."""

    def __init__(
        self, server: LiveServer, stream: str, rule: RelayRule, hops: int, on_over: Callable[[Push], None]
    ) -> None:
        self.stream: Final = stream
        self.rule: Final = rule
        self._server: Final = server
        self._group: Final = server.groups.groups[0]
        self._place: Final = place_of(rule.address(stream))
        self._agent: Final = _AGENT.format(hops + 1)
        self._on_over: Final = on_over
        self._redial: Final = Redial(_BACKOFF)
        self._session: PushSession | None = None
        self._connections = 0
        self._began_at = 0.0
        self._ended = False
        self.state = "connecting"
        self.why = ""

    def begin(self, parameters: str = "") -> None:
        """Connect; looking up and connecting have a thread of their own."""
        if self._ended:
            return
        if not self._server.hub.is_published(self.stream):
            self.end("nobody publishes it")
            return
        self._redial.begin()
        self.state = "connecting"
        threading.Thread(target=self._connect, args=(parameters,), name="flowctl-push", daemon=True).start()

    def end(self, why: str) -> None:
        if not self._ended:
            self._ended, self.state, self.why = True, "ended", why
            session = self._session
            if session is not None:
                session.connection.close(CloseReason.FINISHED, why)
            self._on_over(self)

    def figures(self) -> dict[str, Any]:
        """Return figures, as JSON, without secrets. Any thread."""
        session = self._session
        row: dict[str, Any] = {"stream": self.stream, "to": self._place, "state": self.state, "why": self.why}
        row |= {"connections": self._connections, "tries": self._redial.tries, "connection": None}
        if session is not None and session.accepted:
            figures = session.connection.sender.statistics()
            row |= {"connection": session.number, "flow": session.connection.why()}
            row |= {"line": figures.state.name, "since_s": round(session.connection.now() - figures.since, 1)}
            row |= {"pictures": round(figures.picture_share, 3), "delay_ms": round(session.connection.delay_ms())}
            row |= {"sent_bytes": figures.sent.total_bytes}
            row |= {"dropped": {reason.value: counts.by_name() for reason, counts in figures.dropped.items()}}
        return row

    def _connect(self, parameters: str) -> None:
        try:
            url = self.rule.target(self.stream)
            sock = connect_socket(url)
        except (FlowctlError, OSError) as error:
            why = error.with_hint if isinstance(error, FlowctlError) else str(error)
            self._call_on_group(self._retry_later, why)
            return
        session = PushSession(
            self._server.hub,
            self.stream,
            url,
            agent=self._agent,
            parameters=parameters,
            limits_of=self.rule.limits_of,
            on_end=lambda session, why: self._call_on_group(self._note_session_end, session, why),
        )
        self._session = session
        self._connections += 1
        self._began_at = self._server.clock()
        self.state, self.why = "publishing", ""
        try:
            self._server.add_socket(sock, session)
        except (ClosedError, OSError) as error:  # the server stops, or the other one has gone again
            self._session = None
            self._call_on_group(self._retry_later, str(error))

    def _note_session_end(self, session: PushSession, why: str) -> None:
        if session is not self._session or self._ended:
            return
        self._session = None
        rejected = session.rejected
        if rejected is not None and rejected.retry_parameters is not None:
            self.begin(rejected.retry_parameters)
            return
        self._retry_later(why, self._server.clock() - self._began_at if session.accepted else 0.0)

    def _retry_later(self, why: str, lasted_s: float = 0.0) -> None:
        """Try again later, if there is something to push."""
        if self._ended:
            return
        if not self._server.hub.is_published(self.stream):
            self.end("nobody publishes it")
            return
        if why != self.why:
            _log.warning("push interrupted", stream=self.stream, to=self._place, why=why)
        self.state, self.why = "waits", why
        self._group.call_later(self._redial.delay_s(lasted_s), self.begin)

    def _call_on_group(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(ClosedError, LocalProtocolError):
            self._group.call_soon(callback, *args)


class Relays:
    """All relays of a server; a companion of it, made before it starts."""

    def __init__(self, server: LiveServer) -> None:
        self.title: Final = "relays"
        self.bound: list[str] = []  # nothing: it listens nowhere
        self._server: Final = server
        self._push: Final = server.config.relay_push
        self._pull: Final = server.config.relay_pull
        self._group: Final = server.groups.groups[0]
        self._pushes: dict[tuple[str, RelayRule], Push] = {}  # the group's thread
        self._observer: Final = None if server.recording is None else server.recording.sessions
        self._following: Final = Following(server.hub, self._group, self._note_demand, observer=self._observer)
        self._wanted: set[str] = set()  # the group's thread
        self._always: dict[str, StreamFollower] = {}
        self._refused_loops = 0
        self._stopped = False
        if self._pull:
            server.hub.demand = self._following.demand
        server.hub.observers = (*server.hub.observers, _PublisherWatch(self))

    def start(self) -> None:
        for rule in self._pull:
            if rule.always and rule.streams not in self._always:
                source = _source(rule, rule.streams)
                inflow = None if self._observer is None else Inflow(self._observer, rule.streams)
                sink = HubSink(self._server.hub, rule.streams, source)
                follow = StreamFollower(source, sink, self._group, inflow=inflow)
                self._always[rule.streams] = follow
                follow.start()
        if self._pull:
            self._group.call_soon(self._pull_missing)

    def stop(self, deadline_s: float) -> None:
        del deadline_s
        self._stopped = True
        self._following.stop()
        for follow in self._always.values():
            follow.stop()

    def figures(self) -> dict[str, Any]:
        """Return figures, as JSON, without secrets. Any thread."""
        follows: dict[str, FollowStatistics] = self._following.statistics()
        follows |= {name: follow.statistics() for name, follow in self._always.items()}
        return {
            "push": [push.figures() for push in list(self._pushes.values())],
            "pull": [
                {
                    "stream": name,
                    "from": found.source,
                    "state": found.state.value,
                    "why": found.why,
                    "messages": found.messages,
                    "connections": found.connections,
                    "tries": found.tries,
                }
                for name, found in follows.items()
            ],
            "loops_refused": self._refused_loops,
        }

    # -- pushes

    def published(self, stream: str, agent: str) -> None:
        """A client publishes a stream. Any thread."""
        if self._push or self._pull:
            with contextlib.suppress(ClosedError, LocalProtocolError):
                self._group.call_soon(self._push_published, stream, hops_of(agent))

    def _push_published(self, stream: str, hops: int) -> None:
        if stream in self._wanted:
            self._following.here(stream)
        if self._server.hub.config.step_of(stream) is not None:  # its stream is pushed
            return
        for rule in self._push:
            if not rule.fits(stream) or (stream, rule) in self._pushes:
                continue
            if hops >= MOST_HOPS or len(self._pushes) >= MOST_PUSHES:
                self._refused_loops += hops >= MOST_HOPS
                why = f"it came through {hops} relays" if hops >= MOST_HOPS else "there are too many pushes"
                _log.warning("stream is not pushed", stream=stream, to=rule.place, why=why)
                continue
            with contextlib.suppress(RemoteProtocolError):  # a name that cannot be part of that address
                push = self._pushes[stream, rule] = Push(self._server, stream, rule, hops, self._forget_push)
                push.begin()

    def _forget_push(self, push: Push) -> None:
        self._pushes.pop((push.stream, push.rule), None)

    # -- pulls

    def _note_demand(self, name: str, wanted: bool) -> None:  # noqa: FBT001 - as `Following` calls it
        """A stream has viewers, or has none any more. The group's thread."""
        if wanted:
            self._wanted.add(name)
            self._pull_if_absent(name)
        else:
            self._wanted.discard(name)

    def _pull_if_absent(self, name: str) -> None:
        if name in self._always or self._server.hub.is_published(name):
            return
        rule = next((rule for rule in self._pull if rule.fits(name)), None)
        if rule is not None:
            with contextlib.suppress(RemoteProtocolError):  # a name that cannot be part of that address
                self._following.found(name, _source(rule, name))

    def _pull_missing(self) -> None:
        """Follow streams that have viewers and have lost their publisher here."""
        if self._stopped:
            return
        followed = self._following.statistics()
        for name in self._wanted:
            if name not in followed:
                self._pull_if_absent(name)
        with contextlib.suppress(ClosedError):
            self._group.call_later(_LOOK_S, self._pull_missing)


def _source(rule: RelayRule, name: str) -> Source:
    url = rule.address(name)
    return Source(url, node=join_host_port(url.host, url.port), read=partial(rule.target, name))


class _PublisherWatch(Observer):
    """Tells relays of new publishers."""

    def __init__(self, relays: Relays) -> None:
        self._relays = relays

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        self._relays.published(stream, connection.session.user_agent)

    def set_published(self, connection: Connection, stream: str) -> None:
        self._relays.published(stream, connection.session.user_agent)
