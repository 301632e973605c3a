"""A server that drains and the one that takes its place share their streams, so that nobody has to move.

Each follows from the other, over a unix socket, what has viewers here and its publisher there. While the publisher
stays with the old server, viewers of the new one see its stream; once it has come to the new one, those who are still
with the old one do. What a server follows itself it does not offer, so nothing goes in circles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flowctl.core.server.handover import Successor
from flowctl.live.cluster.follow import FollowStatistics, Source
from flowctl.live.cluster.links import Links
from flowctl.live.cluster.names.following import Following
from flowctl.live.server import LiveServer
from flowctl.wire.rtmp.url import url_of

_PREDECESSOR: Final = "predecessor"
_SUCCESSOR: Final = "successor"
OF_THE_OTHER: Final = frozenset({f"follows {_PREDECESSOR}", f"follows {_SUCCESSOR}"})
"""Hosts of those who publish here what the other of two such servers has."""
_OLD: Final = ".old"
_NEW: Final = ".new"
"""Ends of the paths of their sockets, which begin with that of the hand-over."""


class Succession:
    """The part of one of the two servers; a companion of it."""

    def __init__(self, server: LiveServer, mine: Path, other: Path, whose: str) -> None:
        self.bound: list[str] = []  # what operators may reach: nothing
        self._hub: Final = server.hub
        self._other: Final = other
        self._whose: Final = whose
        self._links: Final = Links(server, mine, own_streams=True)
        hold_s = server.config.return_grace_s
        self._following: Final = Following(server.hub, server.groups.groups[0], self._find, hold_s=hold_s)
        if server.hub.demand is None:  # else it has places of its own where it finds streams, as has its successor
            server.hub.demand = self._following.demand
        server.companions.append(self)

    def start(self) -> None:
        self._links.start()
        if self._hub.demand != self._following.demand:
            return
        for name in {name for name, _ in self._hub.viewing() if not self._hub.has_publisher(name)}:
            self._following.demand(name)

    def stop(self, deadline_s: float = 1.0) -> None:
        """Follow nothing any more, as the other server has ended, or this one does."""
        if self._hub.demand == self._following.demand:
            self._hub.demand = None
        self._following.stop(f"the {self._whose} has ended")
        self._links.stop(deadline_s)

    def statistics(self) -> dict[str, FollowStatistics]:
        return self._following.statistics()

    def _find(self, name: str, wanted: bool) -> None:  # noqa: FBT001 - as `Following` calls it
        if wanted:
            self._following.found(name, Source(url_of(name, self._whose), str(self._other), self._whose))


def precede(server: LiveServer, path: Path) -> Callable[[], object]:
    """Share the streams of a server with the one that waits at `path` to take its place; return what ends that."""
    old, new = path.with_suffix(_OLD), path.with_suffix(_NEW)
    succession = Succession(server, old, new, _SUCCESSOR)
    succession.start()

    def part() -> None:
        succession.stop()
        server.companions.remove(succession)
        new.unlink(missing_ok=True)  # it may have been killed

    return part


def share_streams(server: LiveServer, successor: Successor) -> None:
    """Share the streams of a server that is to start with the one that is to drain then, until that has ended."""
    old, new = successor.path.with_suffix(_OLD), successor.path.with_suffix(_NEW)
    succession = Succession(server, new, old, _PREDECESSOR)

    def wait() -> None:
        successor.wait_for_end()
        time.sleep(server.config.return_grace_s)  # its publishers were cut, and come here
        succession.stop()

    threading.Thread(target=wait, name="flowctl-succession", daemon=True).start()
