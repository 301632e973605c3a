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
from flowctl.live.cluster.follow import Follow, FollowStatistics, Inflow, Source
from flowctl.live.hub import Hub
from flowctl.live.observer import Observer
from flowctl.live.publishing import HubSink
from flowctl.pollgroup import PollGroup

_log: Final = structlog.get_logger("flowctl.cluster")
LINGER_S: Final = 3.0
"""How long a stream is followed without viewers."""


@dataclass(slots=True)
class _WantedStream:
    """A stream with viewers."""

    follow: Follow | None = None
    linger: asyncio.TimerHandle | None = None  #: ends it, unless viewers come back. None: it has viewers.


class Following:
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
        """Begin or end, as it has viewers or not: words about that may come in any order."""
        wanted, viewed = self._wanted.get(name), self._hub.is_viewed(name)
        if wanted is None and viewed:
            self._wanted[name] = _WantedStream()
            self._find(name, True)
        elif wanted is not None and viewed and wanted.linger is not None:
            wanted.linger.cancel()
            wanted.linger = None
        elif wanted is not None and not viewed and wanted.linger is None:
            wanted.linger = self._group.call_later(self._linger_s, self._give_up, name)

    def _give_up(self, name: str) -> None:
        wanted = self._wanted.get(name)
        if wanted is None:
            return
        wanted.linger = None
        if self._hub.is_viewed(name):
            return
        self._stop_following(name, "nobody views it any more")
        del self._wanted[name]
        self._find(name, False)

    def _follow(self, name: str, source: Source | None, keep: bool) -> None:  # noqa: FBT001 - called by the group
        wanted = self._wanted.get(name)
        if wanted is None:
            return
        if source is None:
            if wanted.follow is not None:
                wanted.follow.park("nobody publishes it", keep=keep)
        elif wanted.follow is not None:
            wanted.follow.move(source)
        else:
            sink = HubSink(self._hub, name, source)
            inflow = None if self._observer is None else Inflow(self._observer, name)
            wanted.follow = Follow(source, sink, self._group, hold_s=self._hold_s, inflow=inflow)
            _log.info("stream is followed", stream=name, source=str(source))
            wanted.follow.start()

    def _stop_following(self, name: str, why: str) -> None:
        wanted = self._wanted.get(name)
        if wanted is not None and wanted.follow is not None:
            follow, wanted.follow = wanted.follow, None
            follow.stop(why)
            _log.info("stream is followed no more", stream=name, why=why)

    def _stop_all(self, why: str) -> None:
        for name in tuple(self._wanted):
            self._stop_following(name, why)
