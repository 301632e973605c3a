"""Which fan-out serves a connection: one per stream log and poll group, made when first needed.

A `FollowPlace` ties a connection to a log. It enters the fan-out of the group on which the connection lives, leaves
it when the connection moves, and enters the one of the next group; between the two nothing is written.
"""

from __future__ import annotations

from typing import Protocol

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.fanout.pacing import DEFAULT_FLUSH_INTERVAL_S
from flowctl.core.flow.renditionbook import RenditionBook
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outgoing.streamlog import Entry, StreamLog
from flowctl.pollgroup import PollGroup
from flowctl.sender import Sender


class Fanouts:
    """The fan-outs of one log, by poll group; each is used on its group's thread only.

    Args:
        log: what is fanned out.
        flush_interval_s: of each fan-out, in seconds.
        adaptive: of each fan-out.
        beside: fan-outs whose rounds those of this log need not be more frequent than. None: there are none.
        gather_s: of each fan-out.
    """

    __slots__ = ("_by_group", "_lock", "adaptive", "beside", "flush_interval_s", "gather_s", "log")

    def __init__(
        self,
        log: StreamLog,
        *,
        flush_interval_s: float = DEFAULT_FLUSH_INTERVAL_S,
        adaptive: bool = True,
        beside: Fanouts | None = None,
        gather_s: float = 0.0,
    ) -> None:
        self.log = log
        self.adaptive = adaptive
        self.beside = beside
        self.gather_s = gather_s
        self.flush_interval_s = flush_interval_s
        # The lock is also what makes listening to the log, a read and a write of its list, safe between groups.
        self._lock = OwnedLock()
        self._by_group: dict[PollGroup, Fanout] = {}  # guarded by _lock

    def on(self, group: PollGroup) -> Fanout:
        """Return the fan-out on `group`, made if needed. The group's thread."""
        with self._lock:
            fanout = self._by_group.get(group)
            if fanout is None:
                fanout = self._by_group[group] = Fanout(
                    self.log,
                    group,
                    flush_interval_s=self.flush_interval_s,
                    adaptive=self.adaptive,
                    least_s=None if self.beside is None else self.beside.interval_s,
                    gather_s=self.gather_s,
                )
            return fanout

    def set_interval(self, flush_interval_s: float) -> None:
        """Let the fan-outs flush at least that often from now on, in seconds. Any thread."""
        self.flush_interval_s = flush_interval_s
        for fanout in self.active:
            fanout.pacing.set_ceiling(flush_interval_s)

    def interval_s(self) -> float:
        """Return the longest flush interval of all groups at present, in seconds; 0: there is none. Any thread."""
        return max((fanout.pacing.interval_s for fanout in self.active), default=0.0)

    def release(self, group: PollGroup) -> None:
        """Give up the fan-out on `group` if it serves no viewer any more. The group's thread."""
        with self._lock:
            fanout = self._by_group.get(group)
            if fanout is not None and fanout.empty:
                fanout.close()
                del self._by_group[group]

    def lagging(self, group: PollGroup) -> list[Sender]:
        """Return the viewers on `group` that are served from their own cursor. The group's thread."""
        with self._lock:
            fanout = self._by_group.get(group)
        return [] if fanout is None else fanout.lagging()

    @property
    def active(self) -> list[Fanout]:
        """The fan-outs of all groups, for statistics. Any thread."""
        with self._lock:
            return list(self._by_group.values())


class Follower(Protocol):
    """A `Connection`, as an object that follows a log."""

    place: FollowPlace | None  #: where it follows a log
    renditions: RenditionBook | None  #: what it followed of sets

    @property
    def group(self) -> PollGroup | None:
        """Where it lives; None on the way between two groups."""

    @property
    def sender(self) -> Sender:
        """What writes to its peer."""

    def window_bytes(self) -> int | None:
        """Return the peer's receive window. None: not known."""


class FollowPlace:
    """A connection's place among the viewers of a log. The connection's thread.

    Args:
        connection: who follows.
        fanouts: of the log.
        start: see `Sender.follow`.
        prefix: see `Sender.follow`.
        wait_for_key: see `Sender.follow`.
        latest: see `Sender.follow`.

    Raises:
        LocalProtocolError: the connection follows a log already, and goes on with that.
    """

    __slots__ = ("connection", "fanouts")

    def __init__(
        self,
        connection: Follower,
        fanouts: Fanouts,
        *,
        start: Entry | None = None,
        prefix: tuple[bytes, ...] = (),
        wait_for_key: bool = False,
        latest: bool = False,
    ) -> None:
        group = connection.group
        self.connection = connection
        self.fanouts = fanouts
        if group is not None:
            try:
                connection.sender.follow(
                    fanouts.on(group), start=start, prefix=prefix, wait_for_key=wait_for_key, latest=latest
                )
            except BaseException:
                fanouts.release(group)  # it may have been made for this viewer alone
                raise
            connection.place = self  # not before: refused, it must not take the place of the one that is followed

    def leave(self) -> None:
        """Leave the group's fan-out, keeping the place in the log."""
        self.connection.sender.suspend_following()
        self._release()

    def enter(self, group: PollGroup) -> None:
        """Go on from the place in the log on `group`."""
        self.connection.sender.resume_following(self.fanouts.on(group))

    def end(self) -> None:
        """Stop following; what is queued of the log is dropped and counted."""
        if self.connection.place is self:
            self.connection.place = None
            self.connection.sender.unfollow()
            self._release()

    def _release(self) -> None:
        group = self.connection.group
        if group is not None:
            self.fanouts.release(group)
