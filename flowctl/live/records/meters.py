"""Sums for monitoring: by stream, role, state and reason, never by connection, and never going down.

It observes from the first call of `figures` on. What a connection was sent and spared is counted for the stream that it
played or published first, so that nothing that was counted moves; the first `MOST_NAMED` streams have a name of their
own, and the rest are one. A connection that always kept up costs 3 us to ask, others ten times that.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from flowctl.connection import Connection
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.state import SendState
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.sending.figures import Account
from flowctl.core.text.printable import foreign
from flowctl.live.observer import Observer
from flowctl.live.oversight.pace import RestingPace
from flowctl.live.rows import rendition_of
from flowctl.reasons import CloseReason

MOST_NAMED: Final = 50
"""Most streams with a name of their own: each makes some 30 time series in a database."""
OTHERS: Final = "other"
"""Name of all other streams together; real names have an application in front."""
NO_STREAM: Final = ""
DELAY_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_MOST_STREAM_CHARS: Final = 100


class SumKey(NamedTuple):
    """Key of connections that are summed up together."""

    stream: str  # its name, `OTHERS`, or empty: neither played nor published one
    role: str  # ``viewer``, ``publisher``, ``node`` for another server, which does either, or ``none``


class Sums:
    """Sums over connections, either ended or open ones."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0
        self.states_s = [0.0] * len(SendState)
        self.dropped: Counter[str] = Counter()  # messages by reason
        self.closed: Counter[str] = Counter()  # connections by reason
        self.states: Counter[str] = Counter()  # connections that are there, by state
        self.delays = [0] * (len(DELAY_BOUNDS_S) + 1)  # viewers that are there, by how far behind they are
        self.delay_s = 0.0
        self.renditions: Counter[str] = Counter()  # viewers of a set that are there, by rendition
        self.switches: Counter[str] = Counter()  # of renditions: up, down, and up without success

    def add_connection(self, connection: Connection, account: Account) -> None:
        if (book := connection.renditions) is not None:
            self.switches.update(up=book.ups, down=book.downs, failed=book.failed)
        self.received_bytes += connection.receiver.bytes_in
        if not account.noted:  # nothing was ever done to it
            self.sent_bytes += account.bytes_sent
            self.states_s[SendState.READY] += max(0.0, connection.now() - connection.opened_at)
            return
        statistics = connection.sender.statistics()
        self.sent_bytes += statistics.bytes_sent
        self.states_s = [known + more for known, more in zip(self.states_s, statistics.time_in_states_s, strict=True)]
        for reason, counts in statistics.dropped.items():
            self.dropped[reason.value] += counts.total_messages

    def count_standing(self, connection: Connection, account: Account, *, viewer: bool) -> None:
        self.states[account.state.name] += 1
        if name := rendition_of(connection):
            self.renditions[name] += 1
        if viewer:
            delay_s = account.delay_ms / 1000
            self.delays[bisect_left(DELAY_BOUNDS_S, delay_s)] += 1
            self.delay_s += delay_s

    def add_sums(self, other: Sums, sign: int = 1) -> None:
        self.sent_bytes += sign * other.sent_bytes
        self.received_bytes += sign * other.received_bytes
        self.states_s = [known + sign * more for known, more in zip(self.states_s, other.states_s, strict=True)]
        pairs = (self.dropped, other.dropped), (self.closed, other.closed), (self.switches, other.switches)
        for mine, others in pairs:
            for word, count in others.items():
                mine[word] += sign * count

    def as_dict(self) -> dict[str, Any]:
        return {
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "state_s": {state.name: round(self.states_s[state], 3) for state in SendState},
            "dropped": dict(self.dropped),
            "closed": dict(self.closed),
            "states": {state.name: self.states[state.name] for state in SendState},
            "delays": self.delays,
            "delay_s": round(self.delay_s, 3),
            "renditions": dict(self.renditions),
            "switches": dict(self.switches),
        }


class Meters(Observer):
    """The sums of a server."""

    def __init__(self, add_observer: Callable[[Observer], None]) -> None:
        self._add_observer: Final = add_observer
        self._lock: Final = OwnedLock()
        self._observes = False  # guarded by _lock
        self._named: set[str] = set()  # guarded by _lock
        self._keys: dict[int, SumKey] = {}  # of open connections, by number; guarded by _lock
        self._past: dict[SumKey, Sums] = {}  # of those that have gone; guarded by _lock
        # What ends while sums are made, for each that makes them; guarded by _lock
        self._passes: list[list[tuple[int, SumKey, Sums]]] = []
        self._limits: Counter[str] = Counter()  # hits; guarded by _lock
        self._rounds = 0  # of all fan-outs so far; guarded by _lock
        self._round_of: weakref.WeakKeyDictionary[Fanout, int] = weakref.WeakKeyDictionary()  # guarded by _lock

    def figures(self, connections: Callable[[], Iterable[Connection]], fanouts: Iterable[Fanout]) -> dict[str, Any]:
        """Return all sums, and observe from now on. A thread of the surface that asks."""
        with self._lock:
            first, self._observes = not self._observes, True
        if first:
            self._add_observer(self)
        ended: list[tuple[int, SumKey, Sums]] = []
        with self._lock:
            self._passes.append(ended)
        try:
            return self._figures(connections(), fanouts, ended)
        finally:
            with self._lock:
                self._passes.remove(ended)

    def _figures(
        self, connections: Iterable[Connection], fanouts: Iterable[Fanout], ended: list[tuple[int, SumKey, Sums]]
    ) -> dict[str, Any]:
        """Return all sums; `ended` is told of those that end meanwhile."""
        total: dict[SumKey, Sums] = defaultdict(Sums)
        counted: set[int] = set()
        for item in RestingPace().over(connections):
            whose = self._sum_key(item)
            if whose is None:
                continue
            account = item.sender.account(rows=False)
            if whose.role != "none":  # else it is counted when it has found one, or has gone
                total[whose].add_connection(item, account)
                counted.add(item.number)
            total[whose].count_standing(item, account, viewer=whose.role == "viewer")
        with self._lock:
            for whose, past in self._past.items():
                total[whose].add_sums(past)
            for number, whose, sums in ended:
                if number in counted:  # once as one that is there: of the past it is the next time
                    total[whose].add_sums(sums, -1)
            for fanout in fanouts:
                rounds = fanout.statistics().rounds
                self._rounds += rounds - self._round_of.get(fanout, 0)
                self._round_of[fanout] = rounds
            limits, rounds_total = dict(self._limits), self._rounds
        rows = [{"stream": whose.stream, "role": whose.role} | sums.as_dict() for whose, sums in total.items()]
        return {"rows": rows, "limit_hits": limits, "flush_rounds": rounds_total}

    def _sum_key(self, connection: Connection) -> SumKey | None:
        """Return where a connection is counted. None: it has ended, and is counted, or will be, as of the past."""
        session = connection.session
        role, streams = session.role, session.streams()
        if role and session.is_node:
            role = "node"  # its own viewers are counted there
        with self._lock:
            known = self._keys.get(connection.number)
            if known is not None and known.role != "none":
                return known
            if known is None and connection.ended is not None:
                return None
            whose = SumKey(self._label_locked(streams[0]), role) if role and streams else SumKey(NO_STREAM, "none")
            self._keys[connection.number] = whose
            return whose

    def _label_locked(self, stream: str) -> str:
        self._lock.assert_owned()
        name = foreign(stream, _MOST_STREAM_CHARS)
        if name not in self._named:
            if len(self._named) >= MOST_NAMED:
                return OTHERS
            self._named.add(name)
        return name

    # -- as an observer

    def opened(self, connection: Connection) -> None:
        self._sum_key(connection)

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        self._sum_key(connection)

    def play_started(self, connection: Connection, stream: str, now: float) -> None:
        self._sum_key(connection)

    def limit_hit(
        self, connection: Connection, limit: str, value: float | None, maximum: float | None, now: float
    ) -> None:
        with self._lock:
            self._limits[limit] += 1

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None) -> None:
        sums = Sums()
        sums.add_connection(connection, connection.sender.account(rows=False))
        sums.closed[reason.value] += 1
        with self._lock:
            whose = self._keys.pop(connection.number, None) or SumKey(NO_STREAM, "none")
            self._past.setdefault(whose, Sums()).add_sums(sums)
            for ended in self._passes:
                ended.append((connection.number, whose, sums))
