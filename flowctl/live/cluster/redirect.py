"""Which edge a viewer is sent to: what edges tell of themselves, and the choice.

How it works. An edge that viewers may be sent to tells its origins every `TELL_S` where viewers reach it, how many
connections it has and may have, and whether it drains, on the connection by which it fetches segments (`EdgeReport`).
It passes on what its own edges have told it, so that an origin knows all of them. A report has a number, so one that
comes by two ways counts once; it counts for `KNOWN_S` from when its edge made it, whichever way it took.

Of two edges that chance names the one with more room is chosen, and who was sent there counts before the edge tells of
it: so a crowd that comes at once is spread. A player that fetches files asks again and again, and is sent to the same
edge each time, which a hash chooses.

Only a server with the setting `redirect` sends viewers away, and an edge has none: so a viewer is sent once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Final

from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import RemoteProtocolError

TELL_S: Final = 2.0
"""Time between two reports of an edge: a few hundred bytes, and as old as the choice may be."""
KNOWN_S: Final = 3 * TELL_S
"""Time for which a report counts: an edge whose machine is gone is named no longer than that."""
MOST_EDGES: Final = 512
"""Edges that are known at a time."""
_TRIED: Final = 8
"""Edges that are looked at first: two that fit are among them nearly always, and to look at all 512 takes 0.3 ms."""
_MOST_SENT: Final = 64
"""Viewers of one address that count in `TELL_S` before edges tell of them: as many connections as an edge lets it have
by default. One that asks again and again, and goes nowhere, would have all edges look full: 9,000 times in a second."""
MOST_PASSED_ON: Final = 64
"""Reports of other edges that an edge passes on: with its own ones as many as a node may say without a pause."""
_MOST_COUNT: Final = 1 << 32
"""Largest number of connections that an edge may tell of; there is no load in floating point of a much larger one."""
_MOST_NUMBER: Final = 1 << 53
SCHEMES: Final = frozenset({"rtmp", "rtmps", "http", "https"})
_BASE: Final = re.compile(r"(rtmps?|https?)://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,128})(:[0-9]{1,5})?")
_NAME: Final = re.compile(r"[0-9a-f]{16}")


def bases_of(texts: list[str]) -> dict[str, str]:
    """Return addresses such as ``rtmp://host:port`` by their schemes.

    Raises:
        ValueError: one of them is none.
    """
    found: dict[str, str] = {}
    for text in texts:
        match = _BASE.fullmatch(text)
        if match is None or (match[3] and not 0 < int(match[3][1:]) < 65_536):
            raise ValueError(f"{text!r:.100} is no address like rtmp://host:port")
        found[match[1]] = text
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeReport:
    """An edge at one moment, as it tells its origins."""

    name: str  #: of the edge's process, 16 hexadecimal digits
    number: int  #: of the report, of that process: a later one has a larger one
    bases: Mapping[str, str]  #: where viewers reach it, by scheme
    hls: bool  #: whether it serves HLS too
    connections: int
    most: int  #: connections that it may have
    drains: bool
    made_at: float  #: on the clock of this node

    @classmethod
    def read(cls, words: bytes, now: float) -> EdgeReport:
        try:
            said = json.loads(words)
            connections, most, age_s = int(said["connections"]), int(said["most"]), float(said["age_s"])
            found = cls(
                name=said["edge"],
                number=int(said.get("number", max(now - age_s, 0.0) * 1000)),  # an edge of before has none
                bases=bases_of(said["at"]),
                hls=bool(said["hls"]),
                connections=connections,
                most=most,
                drains=bool(said["drains"]),
                made_at=now - age_s,
            )
            sound = 0 <= connections <= _MOST_COUNT and 0 < most <= _MOST_COUNT and age_s >= 0
            sound = sound and 0 <= found.number < _MOST_NUMBER and _NAME.fullmatch(found.name) is not None
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RemoteProtocolError(f"what an edge tells of itself cannot be read: {error}", code="report") from error
        if not sound:
            raise RemoteProtocolError("what an edge tells of itself makes no sense", code="report")
        return found

    def words(self, now: float) -> bytes:
        said = {
            "edge": self.name,
            "number": self.number,
            "at": list(self.bases.values()),
            "hls": self.hls,
            "connections": self.connections,
            "most": self.most,
            "drains": self.drains,
            "age_s": round(max(now - self.made_at, 0.0), 3),
        }
        return json.dumps(said, separators=(",", ":")).encode()


@dataclass(slots=True)
class _KnownEdge:
    report: EdgeReport
    by: int  # the connection that told of it last
    sent: int = 0  # viewers sent there since its last report
    sent_before: int = 0  # and between the two before: they may be on their way still

    def load(self, more: int = 0) -> float:
        """Return which part of its connections is taken, with those that were sent there."""
        return (self.report.connections + self.sent + self.sent_before + more) / self.report.most

    def fits(self, scheme: str, now: float) -> bool:
        report = self.report
        known = scheme in report.bases and now - report.made_at < KNOWN_S
        return known and not report.drains and self.load(1) <= 1


class EdgeBook:
    """The edges that a node knows of. Any thread."""

    def __init__(self, clock: Callable[[], float], rng: Random | None = None) -> None:
        self._clock: Final = clock
        self._rng: Final = rng or Random()
        self._lock: Final = OwnedLock()
        self._edges: dict[str, _KnownEdge] = {}  # by name; guarded by _lock
        self._redirected = 0  # guarded by _lock
        self._sent_of: Counter[str] = Counter()  # viewers sent away by address, of `TELL_S`; guarded by _lock
        self._sent_since = 0.0  # guarded by _lock
        self._lost = False  # guarded by _lock

    def take_report(self, words: bytes, by: int) -> None:
        """Enter what came by a connection; one that cannot be read raises RemoteProtocolError."""
        now = self._clock()
        report = EdgeReport.read(words, now)
        with self._lock:
            known = self._edges.get(report.name)
            if known is not None and report.number > known.report.number:
                self._edges[report.name] = _KnownEdge(report, by, 0, known.sent)
            elif known is not None and report.number == known.report.number and report.drains:
                known.report = report  # somebody on its way has lost it
            elif known is None and now - report.made_at < KNOWN_S:
                if len(self._edges) >= MOST_EDGES:
                    self._forget_old_locked(now)
                if len(self._edges) < MOST_EDGES:
                    self._edges[report.name] = _KnownEdge(report, by)

    def forget_connection(self, by: int) -> None:
        """Name no edges any more that were told of by a connection that has ended, and have that passed on.

        They count as draining from now on, until they tell more themselves, be it by another connection.
        """
        now = self._clock()
        with self._lock:
            for edge in self._edges.values():
                if edge.by == by and not edge.report.drains:
                    edge.report = replace(edge.report, drains=True, made_at=now)
                    self._lost = True

    def take_lost(self) -> bool:
        """Return whether edges were lost since the last call: that is to be passed on at once."""
        with self._lock:
            lost, self._lost = self._lost, False
            return lost

    def _forget_old_locked(self, now: float) -> None:
        self._lock.assert_owned()
        self._edges = {name: edge for name, edge in self._edges.items() if now - edge.report.made_at < KNOWN_S}

    def reports(self) -> list[EdgeReport]:
        """Return what is known, without what is too old."""
        with self._lock:
            self._forget_old_locked(self._clock())
            return [edge.report for edge in self._edges.values()]

    def choose(self, scheme: str, viewer: bytes | None = None, address: str = "") -> str | None:
        """Return where a viewer is to go, such as ``rtmp://host:port``. None: no edge has room.

        Args:
            scheme: of the address that the viewer came by; that of the edge is the same.
            viewer: what tells the viewer from others, where it fetches HLS: it is sent to the same edge each time.
            address: of the viewer's network; of each not more than `_MOST_SENT` count. Empty: it counts.
        """
        # Once here, and not for each edge: a query may be long.
        viewer = None if viewer is None else blake2b(viewer, digest_size=16).digest()
        with self._lock:
            now, everyone = self._clock(), list(self._edges.values())
            found: list[_KnownEdge] = []
            if viewer is None:
                found = [
                    item for item in self._rng.sample(everyone, min(_TRIED, len(everyone))) if item.fits(scheme, now)
                ]
            if len(found) < 2:
                found = [item for item in everyone if item.fits(scheme, now) and (viewer is None or item.report.hls)]
            if not found:
                return None
            if viewer is None:
                chosen = min(self._rng.sample(found, min(2, len(found))), key=_KnownEdge.load)
                chosen.sent += self._counts_locked(address, now)
            else:
                chosen = max(found, key=lambda edge: blake2b(viewer, key=edge.report.name.encode()).digest())
            self._redirected += 1
            return chosen.report.bases[scheme]

    def _counts_locked(self, address: str, now: float) -> bool:
        """Return whether one more viewer who is sent away counts, until the edge tells of it."""
        self._lock.assert_owned()
        if now - self._sent_since >= TELL_S:
            self._sent_of, self._sent_since = Counter(), now
        self._sent_of[address] += bool(address)
        return self._sent_of[address] <= _MOST_SENT

    def words_of_all(self, own: EdgeReport | None) -> list[bytes]:
        """Return what an edge tells its origins: of itself, and of the edges behind it that have the most room."""
        others = [item for item in self.reports() if own is None or item.name != own.name]
        others.sort(key=lambda item: item.connections / item.most)
        told = [*([] if own is None else [own]), *others[:MOST_PASSED_ON]]
        return [item.words(self._clock()) for item in told]

    def figures(self) -> dict[str, object]:
        """Return figures for operators, as JSON."""
        edges = [
            {
                "at": list(report.bases.values()),
                "connections": report.connections,
                "most": report.most,
                "drains": report.drains,
            }
            for report in self.reports()
        ]
        with self._lock:
            return {"redirected": self._redirected, "edges": edges}
