"""Sees what the peers of a live server do that costs it, and has those banned or limited who do too much of it.

Nothing is done per frame or message. Tries that are not allowed and limits that are broken are told by the sessions,
as to any observer; commands and control messages, which each session counts anyway, are read every two seconds. The
rules are `flowctl.live.judging.penalties`; what comes of them is decided on the thread of
`flowctl.live.reload.reload.Reload`, several at a time where several offend.

What is no offence of a connection is not counted for its address: what is usual of it, trying the same again, having
been let in and finding nothing to play, and what a page can have a browser do. Connections that are refused because
too many come at once are judged as that one of their address of which the end was known last.

Who is punished is who did it: of an address that others share, the connections whose own part was large are ended, and
those that behave go on.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from flowctl.connection import Connection
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.server.bans import Ban, BanAction
from flowctl.core.server.guilt import LIMIT_POINTS, MILD_LIMITS
from flowctl.core.text.addresses import Network, address_key, meanings
from flowctl.errors import LimitExceededError
from flowctl.live.access.request import LiveRequest
from flowctl.live.bans.book import PENALTY
from flowctl.live.judging.penalties import FIRST_PENALTY_S, USUAL, Offence, Overflow, Penalties, networks_of, sentence
from flowctl.live.observer import Observer
from flowctl.reasons import CloseReason

POLL_S: Final = 2.0
"""Time between two reads of the counts of all connections: a microsecond each, a thousandth of a thread for 2000."""
_GUILTY_SHARE: Final = 0.02
"""Share of an allowance that makes a connection guilty of an overflow: one with a smaller part is not."""
_TOO_FAST: Final = "new_per_address_and_s"
_MOST_WAITING: Final = 1024
"""Overflows that wait to be carried out; an address whose overflow finds no place offends again."""
_DEFAULT_POINTS: Final = 1.0
"""Points of a limit that is not in `LIMIT_POINTS`."""
_MOST_OFFENDERS: Final = 4096
"""Addresses that are remembered because their last connection offended."""
_MOST_TRIED: Final = 65_536
"""Tries that are remembered, of all addresses, some 6 MB; beyond it the address that began to try longest ago is
forgotten: what it tries again counts once more."""


class SparedNetworks:
    """Addresses and networks that are never punished."""

    def __init__(self, networks: Iterable[Network], *others: Container[str]) -> None:
        self._networks: Final = tuple(networks)
        self._others: Final = others

    def __contains__(self, address: object) -> bool:
        if any(address in item for item in self._others):
            return True
        if not (self._networks and isinstance(address, str)):
            return False
        return any(item in network for item in meanings(address) for network in self._networks)


class _ConnectionPart:
    """The part of one connection: its own buckets, which show which connections of an address are guilty."""

    __slots__ = ("buckets", "commands", "control", "usual")

    def __init__(self) -> None:
        self.commands = self.control = 0  # counted so far
        self.buckets: dict[Offence, TokenBucket] = {}  # allowances of the address, as if for this connection alone
        self.usual: dict[Offence, TokenBucket] = {}  # rates that are never charged

    def beyond_usual(self, offence: Offence, amount: float, now: float) -> float:
        usual = USUAL[offence]
        bucket = self.usual.setdefault(offence, usual.full_bucket(now))
        left = usual.fill(bucket, now) - amount
        bucket.tokens = max(0.0, left)
        return max(0.0, -left)


class _RefusedTries:
    """Tries of each address that were refused, each different one once: to try the same again is not guessing."""

    def __init__(self, period_s: float) -> None:
        self._period_s: Final = period_s
        self._tried: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()  # by address: since when, and what
        self._count = 0

    def is_new(self, address: str, request: LiveRequest, now: float) -> bool:
        since, tried = self._tried.get(address, (now, set[int]()))
        if now - since >= self._period_s:
            self.forget(address)
            since, tried = now, set()
        url = request.url
        what = hash((request.kind, request.stream, url.raw_query, url.user, url.password, request.bearer))
        if what in tried:
            return False
        tried.add(what)
        self._tried[address] = since, tried
        self._count += 1
        while self._count > _MOST_TRIED:
            self.forget(next(iter(self._tried)))
        return True

    def forget(self, address: str) -> None:
        self._count -= len(self._tried.pop(address, (0.0, ()))[1])


class PenaltyWatch(Observer):
    """Charges the buckets of a server's peers; being slow is no offence. Any thread."""

    def __init__(
        self,
        penalties: Penalties,
        connections: Callable[[], list[Connection]],
        spared: Container[str],
        soon: Callable[[Callable[[], None]], None],
        decide: Callable[[list[Overflow]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._penalties: Final = penalties
        self._connections: Final = connections
        self._spared: Final = spared
        self._soon: Final = soon
        self.decide = decide
        self._clock: Final = clock
        self._polled_at = clock()
        self._lock: Final = OwnedLock()
        self._parts: dict[int, _ConnectionPart] = {}  # by number of the connection; guarded by _lock
        refused = penalties.allowances.get(Offence.REFUSED)
        self._tried: Final = _RefusedTries(FIRST_PENALTY_S if refused is None else refused.period_s)  # guarded by _lock
        self._offenders: OrderedDict[str, None] = OrderedDict()  # the last connection offended; guarded by _lock
        self._overflows: deque[Overflow] = deque()  # guarded by _lock

    # -- what is told

    def login_failed(self, connection: Connection, now: float) -> None:
        self._charge(connection, Offence.REFUSED, 1.0, now, "login")

    def publish_started(self, connection: Connection, stream: str, now: float, *, standby: bool) -> None:
        self._let_in(connection)

    def play_started(self, connection: Connection, stream: str, now: float) -> None:
        self._let_in(connection)

    def denied(self, connection: Connection, request: LiveRequest, now: float, *, guess: bool) -> None:
        """Count a guess: over HTTP a page can have its visitors make some, so that it is a mild offence."""
        with self._lock:
            if not (guess and self._tried.is_new(address_key(connection.peer[0]), request, now)):
                return
        if _over_http(connection):
            self._charge(connection, Offence.CONNECTIONS, 1.0, now, f"{request.kind} over HTTP")
        else:
            self._charge(connection, Offence.REFUSED, 1.0, now, request.kind)

    def limit_hit(
        self, connection: Connection, limit: str, value: float | None, maximum: float | None, now: float
    ) -> None:
        """Count a limit that was broken, but for those that others can have it break, as all of HTTP."""
        del value, maximum
        points = 0.0 if limit in MILD_LIMITS or _over_http(connection) else LIMIT_POINTS.get(limit, _DEFAULT_POINTS)
        if points:
            self._charge(connection, Offence.LIMITS, points, now, limit)

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None) -> None:
        """Count the connection's actions since the last look, and whether it ended without having been let in."""
        del details, limit
        now = self._clock()
        self._count(connection, now, last=True)
        with self._lock:
            self._parts.pop(connection.number, None)
        if connection.session.harmless:
            self._let_in(connection)
        elif reason not in _OWN_REASONS:
            with self._lock:
                self._offenders[address_key(connection.peer[0])] = None
                if len(self._offenders) > _MOST_OFFENDERS:
                    self._offenders.popitem(last=False)
            self._charge(connection, Offence.CONNECTIONS, 1.0, now, "fruitless", keep=False)

    def refused(self, peer: tuple[str, int], error: LimitExceededError) -> None:
        """Count a connection that was not admitted because too many came, of an address whose others offend."""
        if error.limit != _TOO_FAST:
            return
        with self._lock:
            counts = address_key(peer[0]) in self._offenders
        if counts:
            self._charge_address(peer[0], Offence.CONNECTIONS, 1.0, self._clock(), "refused")

    # -- what is read

    def look(self) -> None:
        now = self._clock()
        if now - self._polled_at >= POLL_S:
            self._polled_at = now
            for connection in self._connections():
                self._count(connection, now)

    def _count(self, connection: Connection, now: float, *, last: bool = False) -> None:
        totals = connection.session.asked_count
        if totals is None:  # another protocol
            return
        with self._lock:
            if connection.ended is not None and not last:
                return
            part = self._part_locked(connection.number)
            commands = part.beyond_usual(Offence.COMMANDS, max(0, totals[0] - part.commands), now)
            control = part.beyond_usual(Offence.CONTROL, max(0, totals[1] - part.control), now)
            part.commands, part.control = totals
        if commands:
            self._charge(connection, Offence.COMMANDS, commands, now)
        if control:
            self._charge(connection, Offence.CONTROL, control, now)

    def _let_in(self, connection: Connection) -> None:
        with self._lock:
            self._offenders.pop(address_key(connection.peer[0]), None)

    def _part_locked(self, number: int) -> _ConnectionPart:
        self._lock.assert_owned()
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = _ConnectionPart()
        return part

    def _charge(
        self, connection: Connection, offence: Offence, amount: float, now: float, name: str = "", *, keep: bool = True
    ) -> None:
        allowance = self._penalties.allowances.get(offence)
        if allowance is None:
            return
        if keep:
            with self._lock:
                # None for one that has ended meanwhile, which nobody would forget again.
                made = _ConnectionPart() if connection.ended is not None else self._part_locked(connection.number)
                part = self._parts.get(connection.number, made)
                bucket = part.buckets.setdefault(offence, allowance.full_bucket(now))
                allowance.fill(bucket, now)
                bucket.tokens -= amount
        self._charge_address(connection.peer[0], offence, amount, now, name)

    def _charge_address(self, address: str, offence: Offence, amount: float, now: float, name: str) -> None:
        if address in self._spared:
            return
        with self._lock:
            overflows = self._penalties.charge(address, offence, amount, now, name)
            first = not self._overflows
            room = _MOST_WAITING - len(self._overflows)
            self._overflows.extend(overflows[:room])
            if overflows:
                self._tried.forget(address_key(address))
        if overflows and first:
            self._soon(self._carry_out)

    def _carry_out(self) -> None:
        with self._lock:
            overflows = list(self._overflows)
            self._overflows.clear()
        if overflows:
            self.decide(overflows)

    # -- who is guilty, and who is not

    def behaving_and_guilty(self, overflow: Overflow) -> tuple[int, list[Connection]]:
        """Return how many connections of its address or network behave, and which are guilty.

        Guilty are those with a part that is more than a trifle and at least half of the largest: neither the neighbour
        whose single wrong key was the one too many, nor only one of sixteen that shared the work.
        """
        within = [item for item in self._connections() if item.ended is None and _is_of(item.peer[0], overflow)]
        now, allowance = self._clock(), self._penalties.allowances[overflow.offence]
        with self._lock:
            done = {
                item.number: allowance.count - allowance.fill(bucket, now)  # what is long ago counts no more
                for item in within
                if (part := self._parts.get(item.number)) and (bucket := part.buckets.get(overflow.offence))
            }
        least = max(allowance.count * _GUILTY_SHARE, max(done.values(), default=0.0) / 2)
        guilty = [item for item in within if done.get(item.number, 0.0) >= least]
        numbers = {item.number for item in guilty}
        return sum(item.session.behaves() for item in within if item.number not in numbers), guilty


_OWN_REASONS: Final = frozenset(
    {CloseReason.SHUTDOWN, CloseReason.KICKED, CloseReason.BANNED, CloseReason.INTERNAL, CloseReason.MEMORY_BUDGET}
)
"""Ends that the server decides: a connection that came to nothing because of one is not counted."""


def _over_http(connection: Connection) -> bool:
    return connection.session.asked_count is None


def _is_of(address: str, overflow: Overflow) -> bool:
    found = networks_of(address)
    return found is not None and found[overflow.wide] == overflow.cidr


def overflow_line(overflow: Overflow) -> list[object]:
    return [*overflow[:1], overflow.offence.value, *overflow[2:]]


def overflow_of(line: Sequence[Any]) -> Overflow:
    """Return the overflow of a line that a process of the same server has written."""
    cidr, offence, repeats, evidence, allowance, wide = line
    return Overflow(cidr, Offence(offence), repeats, evidence, allowance, wide)


def bans_of(overflows: Iterable[Overflow], behaving: Sequence[int], now: datetime) -> list[Ban]:
    made = []
    for overflow, count in zip(overflows, behaving, strict=True):
        found = sentence(overflow, count)
        made.append(
            Ban(
                cidr=overflow.cidr,
                expires=now.astimezone(UTC) + timedelta(seconds=found.length_s),
                action=BanAction.BAN if found.ban else BanAction.LIMIT,
                reason=found.reason,
                score=float(overflow.repeats),
                evidence=overflow.evidence,
                source=PENALTY,
            )
        )
    return made
