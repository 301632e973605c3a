"""Streams that are followed while they have viewers here, from wherever they are published.

A stream that gets its first viewer is looked for: `find` is asked, and says, soon or later and again with each change,
from where it is to be followed (`found`). Some seconds after its last viewer has left, it is followed no more: viewers
come back, and players connect twice. Everything runs on the thread of one poll group.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.live.cluster.follow import FollowStatistics, Inflow, Source, StreamFollower
from flowctl.live.hub import Hub
from flowctl.live.observer import Observer
from flowctl.live.publishing import HubSink
from flowctl.pollgroup import PollGroup

_log: Final = structlog.get_logger("flowctl.cluster")
LINGER_S: Final = 3.0
"""Time for which a stream is followed after its last viewer has left."""


@dataclass(slots=True)
class _WantedStream:
    """A stream with viewers."""

    follow: StreamFollower | None = None
    linger: asyncio.TimerHandle | None = None  #: ends it, unless viewers come back. None: it has viewers.


class Following:
    """Follows from other workers what is viewed here and published there."""

    def __init__(
        self,
        hub: Hub,
        group: PollGroup,
        find: Callable[[str, bool], None],
        *,
        hold_s: float = 3.0,
        linger_s: float = LINGER_S,
        observer: Observer | None = None,
    ) -> None:
        self._observer: Final = observer
        self._hub: Final = hub
        self._group: Final = group
        self._find: Final = find
        self._hold_s: Final = hold_s
        self._linger_s: Final = linger_s
        self._wanted: Final[dict[str, _WantedStream]] = {}  # the group's thread

    # -- any thread

    def demand(self, name: str) -> None:
        self._post(self._look, name)

    def found(self, name: str, source: Source | None, *, keep: bool = False) -> None:
        self._post(self._follow, name, source, keep)

    def here(self, name: str) -> None:
        self._post(self._stop_following, name, "it is published here")

    def stop(self, why: str = "the server stops") -> None:
        self._post(self._stop_all, why)

    def statistics(self) -> dict[str, FollowStatistics]:
        follows = {name: wanted.follow for name, wanted in list(self._wanted.items())}
        return {name: follow.statistics() for name, follow in follows.items() if follow is not None}

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(ClosedError, LocalProtocolError):  # the group has ended, and everything on it
            self._group.call_soon(callback, *args)

    # -- the group's thread

    def _look(self, name: str) -> None:
        """Begin or end a follow, as the stream has viewers or not: events about that may come in any order."""
        entry, viewed = self._wanted.get(name), self._hub.is_viewed(name)
        if entry is None and viewed:
            self._wanted[name] = _WantedStream()
            self._find(name, True)
        elif entry is not None and viewed and entry.linger is not None:
            entry.linger.cancel()
            entry.linger = None
        elif entry is not None and not viewed and entry.linger is None:
            entry.linger = self._group.call_later(self._linger_s, self._give_up, name)

    def _give_up(self, name: str) -> None:
        entry = self._wanted.get(name)
        if entry is None:
            return
        entry.linger = None
        if self._hub.is_viewed(name):
            return
        self._stop_following(name, "nobody views it any more")
        del self._wanted[name]
        self._find(name, False)

    def _follow(self, name: str, source: Source | None, keep: bool) -> None:  # noqa: FBT001 - called by the group
        entry = self._wanted.get(name)
        if entry is None:
            return
        if source is None:
            if entry.follow is not None:
                entry.follow.park("nobody publishes it", keep=keep)
        elif entry.follow is not None:
            entry.follow.move(source)
        else:
            sink = HubSink(self._hub, name, source, alone=True)
            inflow = None if self._observer is None else Inflow(self._observer, name)
            entry.follow = StreamFollower(source, sink, self._group, hold_s=self._hold_s, inflow=inflow)
            _log.info("stream is followed", stream=name, source=str(source))
            entry.follow.start()

    def _stop_following(self, name: str, why: str) -> None:
        entry = self._wanted.get(name)
        if entry is not None and entry.follow is not None:
            follow, entry.follow = entry.follow, None
            follow.stop(why)
            _log.info("stream is followed no more", stream=name, why=why)

    def _stop_all(self, why: str) -> None:
        for name in tuple(self._wanted):
            self._stop_following(name, why)
