"""How much work the peers may cause: accounts of processor time, per connection and per address (pure).

Theory of operation. Limits on sizes, counts and rates each bound one thing that a peer can do; what they have in common
is that it takes the thread's time. So that time itself is the limit that needs no list of attacks: the thread that runs
a session's code on a peer's behalf charges that peer's account with how long it took.

An account is one decaying sum: what was charged fades with `MEMORY_S`, so the sum over `MEMORY_S` is the smoothed share
of the thread, like a load average. While the sum is at most ``share * MEMORY_S``, no stretch of t seconds can have held
more than ``share * t + share * MEMORY_S`` of work: a leaky bucket whose burst follows from its rate, with one number to
choose. (Work is charged when it is done, so the sum may pass that by one step, which the share then does as well.)
Where it is more, the peer is *slowed*: nothing more of it is read until the sum has faded; what is not read
waits in the kernel, so TCP slows the peer down. One that stays over its share for `WorkLimits.cut_after_s` is *cut*.

The connections of one address also share an account. Where that is over, those are slowed that did more than the mean
of its connections (those that did next to nothing left out), so a viewer behind the same router as an attacker is
not held for it. What those did that have left is weighed as one more of them, and newcomers stand in for it: otherwise
one that works and leaves, again and again, would leave the blame to those that stay. And one that took little itself is
slowed for its neighbours, but never cut for them. Whatever the sums are, in one turn of the loop an address gets
`ADDRESS_TURN_S` and then waits for the next turn (`WorkAccount.turn_over`): that costs a lone peer nothing, and its
neighbours wait no longer than that.

Work is processor time, handed in: on a machine that is busy with something else everybody waits, and by the wall clock
honest crowds were slowed for it. Accounts belong to one thread, so a share is one of a thread, and nothing is locked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log
from typing import Final, NamedTuple

from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError, LimitExceededError

MEMORY_S: Final = 6.0
"""Time in which what was charged fades to 1/e. With the default shares a connection may do 1.5 s of work at once and an
address 3 s: a thousand viewers who join at once take about one, an encoder that was away for 10 s and sends what
50 Mbit/s have left less than one."""

TURN_S: Final = 0.004
"""How long one connection's input may hold the thread before others are served: as the turns of a fan-out."""

ADDRESS_TURN_S: Final = 0.016
"""Time that the input of one address may hold the thread in one turn of the loop: short beside the 40 ms of a flush,
and half of it is for connections that have hardly done anything yet."""

HANDSHAKES_TURN_S: Final = 0.004
"""Time that handshakes of all peers together get in one turn of the loop: that of one turn of a fan-out."""

_NEVER: Final = float("-inf")
_RESUME_SHARE: Final = 0.98
"""Share of what is allowed to which the sum of a slowed peer must fade before it goes on: 30 ms of work, so that it is
not held and let go for each message."""
_EPISODE_S: Final = 3.0
"""Time without being slowed after which a peer has kept to its share again: what comes after that is a new episode."""
_LEAST_BLAMED_SHARE: Final = 0.01
"""Share of an address's work below which a connection is not counted when blame is shared out."""
_LIGHT_S: Final = 0.002
"""Work that a connection may have done and still not wait for its address's next turn: more than joining takes."""
_NOTED_S: Final = 0.001
"""Work of an address in one turn of the loop from which the end of that turn matters: honest peers stay below it."""
_NEVER_CUT_SHARE: Final = 0.05
"""Share of what its address may do up to which a connection is not cut for it: with the default share, a publisher of
20 Mbit/s. Twenty neighbours, or more, that all do so little are slowed to the share and stay."""
_MOST_DEPARTED: Final = 4096
"""Addresses without connections whose sums are kept, so that coming back does not empty an account."""

PER_CONNECTION: Final = "work_share_per_connection"
PER_ADDRESS: Final = "work_share_per_address"
"""Names of the two limits, in logs, counts and errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkLimits:
    """How much of its thread a peer may take; 0 turns one off.

    Args:
        share_per_connection: of the thread's time, 0 to 1, that the input of one connection may take; six seconds'
            worth at once. A publisher of 10 Mbit/s takes 0.012, one of 50 Mbit/s 0.06.
        share_per_address: share of all connections of one IPv4 address or IPv6 /64 together.
        cut_after_s: how long one may go on asking for more than its share before its connection is ended; until then
            it is slowed.

    Raises:
        ConfigError: a value is out of range.
    """

    share_per_connection: float = 0.25
    share_per_address: float = 0.5
    cut_after_s: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, most in (("share_per_connection", 1.0), ("share_per_address", 1.0), ("cut_after_s", 86_400.0)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigError(f"{name} is {value!r}, allowed is 0 (off) to {most:g}")


NO_WORK_LIMITS: Final = WorkLimits(share_per_connection=0.0, share_per_address=0.0)
"""Work is measured and done in turns, and no peer is slowed."""


class Overrun(NamedTuple):
    """A peer has taken more than its share."""

    error: LimitExceededError  # names the limit, the share that was measured and the one allowed
    resumes_at: float
    begins: bool  # it was within its share before, so this is to be counted and told
    ends: bool  # it has been over its share for so long that its connection is to be ended


class _Overruns(NamedTuple):
    """How often a connection was over a share, since when it last was, and when it may go on."""

    times: int
    since: float
    resumes_at: float


_NO_EPISODES: Final = _Overruns(0, _NEVER, _NEVER)


@dataclass(eq=False, slots=True)
class AddressWork:
    limits: WorkLimits
    _call_next_turn: Callable[[Callable[[], None]], None]
    _at: float
    _recent_s: float = 0.0
    _left_s: float = 0.0  # the part of `_recent_s` done by connections that have left
    _left_at: float = 0.0
    _armed: bool = False
    turn_s: float = 0.0
    accounts: set[WorkAccount] = field(default_factory=set)

    def charge(self, took_s: float, now: float) -> bool:
        """Add `took_s` of work done now; return whether the address is over its share."""
        self.turn_s += took_s
        if self.turn_s >= _NOTED_S and not self._armed:
            self._armed = True
            self._call_next_turn(self._next_turn)
        recent_s = self._recent_s * exp((self._at - now) / MEMORY_S) + took_s  # as `recent_s`, without the call
        self._recent_s, self._at = recent_s, now
        share = self.limits.share_per_address
        return bool(share) and recent_s > share * MEMORY_S

    def recent_s(self, now: float) -> float:
        return self._recent_s * exp((self._at - now) / MEMORY_S)

    def enter(self, account: WorkAccount, now: float) -> None:
        account.inherit(self.left_s(now), now)
        self.accounts.add(account)

    def leave(self, account: WorkAccount, now: float) -> None:
        """Let a connection go, and remember what it did. Harmless for one that is not there."""
        if account in self.accounts:
            self.accounts.discard(account)
            self._left_s, self._left_at = self.left_s(now) + account.recent_s(now), now

    def left_s(self, now: float) -> float:
        return self._left_s * exp((self._left_at - now) / MEMORY_S)

    def slows(self, account: WorkAccount, now: float) -> bool:
        if account.recent_s(now) <= _LIGHT_S:
            return False
        sums = [other.recent_s(now) for other in self.accounts]
        sums.append(self.left_s(now))
        least_s = _LEAST_BLAMED_SHARE * sum(sums)
        worth = [value for value in sums if value >= least_s]
        return account.weight_s(now) * len(worth) >= sum(worth) * (1 - _LEAST_BLAMED_SHARE)

    def _next_turn(self) -> None:
        self._armed = False
        self.turn_s = 0.0


@dataclass(eq=False, slots=True)
class WorkAccount:
    limits: WorkLimits
    _at: float
    address: AddressWork | None = None  # account of its address on its thread; None: it is on no thread
    _recent_s: float = 0.0
    _overruns: _Overruns = _NO_EPISODES  # nearly all connections have none
    _inherited: tuple[float, float] | None = None  # work of those that left before it came, and when it did
    work_s: float = 0.0

    def charge(self, took_s: float, now: float) -> Overrun | None:
        """Add `took_s` of work that ended now; return what follows if that is too much. None: nothing does."""
        self.work_s += took_s
        recent_s = self._recent_s * exp((self._at - now) / MEMORY_S) + took_s
        self._recent_s, self._at = recent_s, now
        address, most_s = self.address, self.limits.share_per_connection * MEMORY_S
        shared = address is not None and address.charge(took_s, now)
        if most_s and recent_s > most_s:
            return self._over(PER_CONNECTION, recent_s, most_s, now)
        if shared and address is not None and address.slows(self, now):
            most_s = address.limits.share_per_address * MEMORY_S
            return self._over(
                PER_ADDRESS, address.recent_s(now), most_s, now, spared=recent_s < _NEVER_CUT_SHARE * most_s
            )
        return None

    def recent_s(self, now: float) -> float:
        return self._recent_s * exp((self._at - now) / MEMORY_S)

    def inherit(self, work_s: float, now: float) -> None:
        """Stand in for `work_s`, done at its address by those that have left."""
        self._inherited = (work_s, now) if work_s >= _NOTED_S else None

    def weight_s(self, now: float) -> float:
        """Return the sum and what it stands in for, in seconds of work: its part in what its address does."""
        inherited_s, since = self._inherited or (0.0, now)
        return self.recent_s(now) + inherited_s * exp((since - now) / MEMORY_S)

    @property
    def turn_over(self) -> bool:
        """Whether its address has had its part of this turn of the loop; what else it wants is for the next one.

        Half of that part is kept for those that have hardly done anything yet, so that a viewer who joins does not wait
        behind neighbours who keep the server busy.
        """
        address = self.address
        if address is None or address.turn_s < ADDRESS_TURN_S / 2:
            return False
        return self._recent_s > _LIGHT_S or address.turn_s >= ADDRESS_TURN_S

    def slowed(self, now: float) -> bool:
        """Return whether it is over a share, or was until a moment ago."""
        return now < self._overruns.resumes_at + _EPISODE_S

    @property
    def slowed_count(self) -> int:
        return self._overruns.times

    def _over(self, limit: str, recent_s: float, most_s: float, now: float, *, spared: bool = False) -> Overrun:
        count, since, _ = self._overruns
        begins = not self.slowed(now)
        if begins:
            count, since = count + 1, now
        resumes_at = now + MEMORY_S * log(recent_s / (_RESUME_SHARE * most_s))
        self._overruns = _Overruns(count, since, resumes_at)
        share, maximum, cut_after_s = recent_s / MEMORY_S, most_s / MEMORY_S, self.limits.cut_after_s
        ends = bool(cut_after_s) and now - since >= cut_after_s and not spared
        message = f"{limit}: {share:.3g} of a thread's time, allowed is {maximum:g}"
        if ends:
            message += f"; slowed for {now - since:.1f} s, {self.work_s:.3g} s of work in all"
        error = LimitExceededError(limit, share, maximum, message)
        return Overrun(error, resumes_at, begins, ends)


class ThreadWork:
    """The accounts of one thread; and what the handshakes of TLS, of all peers together, take of one of its turns.

    A handshake is a millisecond of arithmetic that anybody may ask for without having said who he is, from any number
    of addresses. Those for which there is no time left in a turn wait in the kernel for the next.
    """

    __slots__ = ("_addresses", "_call_next_turn", "_handshakes_s", "_left", "turn_ends_at")

    def __init__(self, call_next_turn: Callable[[Callable[[], None]], None]) -> None:
        self._call_next_turn: Final = call_next_turn
        self.turn_ends_at = 0.0  # when the input that is being treated has had the thread for `TURN_S`
        self._handshakes_s = 0.0  # of this turn of the loop
        self._addresses: dict[str, AddressWork] = {}
        self._left: OrderedDict[str, None] = OrderedDict()  # addresses without connections, first to leave first

    def enter(self, account: WorkAccount, key: str, now: float) -> None:
        """Let `account` count for the address `key` (see `address_key`) from now on."""
        address = self._addresses.get(key)
        if address is None:
            address = self._addresses[key] = AddressWork(account.limits, self._call_next_turn, now)
        self._left.pop(key, None)
        address.enter(account, now)
        account.address = address

    def leave(self, account: WorkAccount, key: str, now: float) -> None:
        """Stop that; what it did stays on the address until it has faded. Harmless for one that is not there."""
        address, account.address = account.address, None
        if address is None:
            return
        address.leave(account, now)
        if not address.accounts:
            self._left[key] = None
        while self._left:
            oldest = next(iter(self._left))
            if len(self._left) <= _MOST_DEPARTED and self._addresses[oldest].recent_s(now) >= _NOTED_S:
                return
            del self._left[oldest], self._addresses[oldest]

    @property
    def handshakes_wait(self) -> bool:
        return self._handshakes_s >= HANDSHAKES_TURN_S

    def handshake(self, took_s: float) -> None:
        if not self._handshakes_s:
            self._call_next_turn(self._next_turn)
        self._handshakes_s += took_s

    def _next_turn(self) -> None:
        self._handshakes_s = 0.0
