"""Penalties: what addresses and networks may do in a time, and what follows when they do more (pure).

Each kind of thing that costs a server has an allowance, a token bucket: so many in so long. Each address (IPv4, or
the /64 of IPv6) has a bucket per kind, and so has each network (/24, /48), eight times as large, against peers that
spread over many addresses. What an address does while it serves a penalty does not count for its network: that has been
dealt with.

One rule says what is put into them: *a connection is judged by what it does, and an address by what its connections do
beyond what well-behaved ones of their kind do* (`USUAL`, and what tells of an offence). So a crowd behind one address,
however many it are, sums up to nothing; and what a page can have its visitors' browsers do is never put in.

The first bucket that overflows leads to a *limit* (few new connections at a time), the next to a *ban*, and each
further one to one of twice the length. Repeats decay: half of each is forgotten in `HALF_LIFE_S`. Three rules stand
above that:

- Connections that came to nothing, and all that comes over HTTP, lead to a limit that ends with its cause (`MILD`,
  `MILD_PENALTY_S`): it grows not, and makes nothing else a repeat.
- Where others behave, there is no ban: the address or network is limited, for as long as the ban would have been.
- Memory is bounded: of the addresses seen longest ago the least guilty is forgotten.

Time is an argument, and nothing here is asked for per frame.
"""

from __future__ import annotations

import enum
import ipaddress
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from flowctl.core.outcomes.bucket import TokenBucket
from flowctl.core.text.addresses import NETWORK_BITS, UNIT_BITS, meanings
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.units import format_duration

FIRST_PENALTY_S: Final = 600.0
"""Length of the first penalty, and of the first ban."""
LONGEST_PENALTY_S: Final = 86_400.0
"""Length of the longest penalty, and longest period of an allowance."""
MILD_PENALTY_S: Final = 60.0
"""Length of the penalty of a mild offence, however often it is repeated."""
HALF_LIFE_S: Final = 6 * 3600.0
"""Time in which half of a repeat is forgotten: an offence of the morning counts for little in the evening."""
NETWORK_TIMES: Final = 8
"""Allowance of a network as a multiple of that of an address. It is the number of abusive addresses from which the
analysis may ban a /24 or /48 whole (`subnet_addresses` of `flowctl.analyze.abuse.weights`)."""
MOST_RECORDS: Final = 16_384
"""Addresses, and networks, that are remembered: some 10 MB if all of them offend in every way."""
_COMPARED_RECORDS: Final = 8
"""Records that are compared when the book is full; the least guilty of them makes room for a new one."""
_MOST_NAMES: Final = 16
"""Kinds of evidence that one record keeps."""
_FORGOTTEN_REST: Final = 0.05
"""Rest of a repeat below which it counts as forgotten."""


class Offence(enum.Enum):
    """Kinds of offences that are counted.

    CONNECTIONS: those that end without having been let in, those of the same address that come too fast, and guesses
    over HTTP.
    REFUSED: guesses: logins, and tries to connect, to publish or to play, each thing that is tried once. COMMANDS and
    CONTROL: messages of the protocol beyond `USUAL`. LIMITS: points of limits that were broken
    (`flowctl.core.server.guilt`).
    """

    CONNECTIONS = "connections"
    REFUSED = "refused tries"
    COMMANDS = "commands"
    CONTROL = "control messages"
    LIMITS = "limit hits"


MILD: Final = frozenset({Offence.CONNECTIONS})
"""Offences that cost little and may be other people's: they lead to a limit of `MILD_PENALTY_S`, however often."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A rate as a token bucket of `count`, which is full again after `period_s`."""

    count: float
    period_s: float

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.count <= 1e9:
            raise ConfigError(f"an allowance is {self.count} in {self.period_s} s, the number must be 0 to 1e9")
        if not 1 <= self.period_s <= LONGEST_PENALTY_S:
            raise ConfigError(f"an allowance is {self.count} in {self.period_s} s, the time must be 1s to 24h")

    def __str__(self) -> str:
        return f"{self.count:g}/{self.period_s:g}s"

    def full_bucket(self, now: float) -> TokenBucket:
        return TokenBucket(self.count, now)

    def fill(self, bucket: TokenBucket, now: float) -> float:
        return bucket.fill(self.count / self.period_s, self.count, now)


USUAL: Final[Mapping[Offence, Allowance]] = MappingProxyType(
    {Offence.COMMANDS: Allowance(20, 40), Offence.CONTROL: Allowance(30, 3)}
)
"""Rates of a well-behaved connection, which are never charged: six commands to publish, three to play, then pauses;
librtmp acknowledges each 250 kB, ten times a second at 20 Mbit/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyLimits:
    """The allowances of one address.

    No honest client comes near them: not an encoder with a wrong key that tries again each second, not two hundred
    viewers behind one router who all come back at once.
    """

    connections: Allowance = field(default=Allowance(2000, 100))
    refused: Allowance = field(default=Allowance(600, 300))
    # messages of RTMP, of all connections together, beyond the usual rate of each
    commands: Allowance = field(default=Allowance(6000, 120))
    control: Allowance = field(default=Allowance(24_000, 120))
    limits: Allowance = field(default=Allowance(600, 600))

    def allowances_in_force(self) -> dict[Offence, Allowance]:
        every: dict[Offence, Allowance] = {offence: getattr(self, offence.name.lower()) for offence in Offence}
        return {offence: allowance for offence, allowance in every.items() if allowance.count}


class Overflow(NamedTuple):
    """A bucket has overflowed."""

    cidr: str  # the address or network that the bucket is of
    offence: Offence  # the kind that the bucket counts
    repeats: int  # overflows so far, those that are forgotten left out; 1 for the first
    evidence: Mapping[str, float]  # what the address has done since the overflow before, by name
    allowance: str  # the bucket's allowance, in words
    wide: bool  # whether it is a network of several addresses


class Sentence(NamedTuple):
    """The penalty that follows from an overflow."""

    ban: bool  # whether no new connection comes in; if not, few do
    length_s: float
    reason: str


def sentence(overflow: Overflow, behaving_count: int) -> Sentence:
    length_s = MILD_PENALTY_S if overflow.offence in MILD else length_of(overflow.repeats)
    reason = f"{overflow.offence.value}: more than {overflow.allowance}"
    if overflow.repeats > 1:
        reason += f", repeat {overflow.repeats - 1}"
    if behaving_count:
        s, its = ("", "behaves") if behaving_count == 1 else ("s", "behave")
        reason += f"; shared: {behaving_count} other connection{s} of it {its}"
    ban = overflow.repeats > 1 and overflow.offence not in MILD and not behaving_count
    return Sentence(ban, length_s, reason)


def length_of(repeats: int) -> float:
    """Return the length of a penalty, seconds: the first two are as long, each further one twice as long."""
    return min(LONGEST_PENALTY_S, FIRST_PENALTY_S * 2.0 ** min(max(repeats - 2, 0), 32))


@dataclass(slots=True)
class _Record:
    """The offences of one address or network."""

    at: float  # when repeats were true
    serves_until: float  # a penalty
    buckets: dict[Offence, TokenBucket] = field(default_factory=dict)  # those that are not full
    repeats: float = 0.0
    evidence: dict[str, float] = field(default_factory=dict)

    def decay(self, now: float, allowances: Mapping[Offence, Allowance]) -> None:
        passed_s, self.at = max(0.0, now - self.at), max(self.at, now)
        for offence, bucket in tuple(self.buckets.items()):
            if allowances[offence].fill(bucket, now) >= allowances[offence].count:
                del self.buckets[offence]
        self.repeats *= 0.5 ** (passed_s / HALF_LIFE_S)
        if self.repeats < _FORGOTTEN_REST:
            self.repeats = 0.0
        if not self.buckets:
            self.evidence.clear()

    def guilt(self, allowances: Mapping[Offence, Allowance]) -> float:
        fullest = min(
            (bucket.tokens / allowances[offence].count for offence, bucket in self.buckets.items()), default=1.0
        )
        return self.repeats + 1.0 - fullest


class _RecordBook:
    """The records of addresses, or of networks."""

    def __init__(self, allowances: Mapping[Offence, Allowance], most: int, *, wide: bool) -> None:
        self._allowances: Final = allowances
        self._most: Final = most
        self._wide: Final = wide
        self._records: Final[OrderedDict[str, _Record]] = OrderedDict()  # charged longest ago first

    def is_serving(self, cidr: str, now: float) -> bool:
        record = self._records.get(cidr)
        return record is not None and now < record.serves_until

    def charge(self, cidr: str, offence: Offence, amount: float, name: str, now: float) -> Overflow | None:
        record, allowance = self._record(cidr, now), self._allowances[offence]
        record.decay(now, self._allowances)
        bucket = record.buckets.setdefault(offence, allowance.full_bucket(now))
        bucket.tokens -= amount
        if name in record.evidence or len(record.evidence) < _MOST_NAMES:
            record.evidence[name] = record.evidence.get(name, 0.0) + amount
        if bucket.tokens >= 0:
            return None
        del record.buckets[offence]
        evidence, record.evidence = record.evidence, {}
        if offence in MILD:
            repeats, length_s = 1, MILD_PENALTY_S
        else:
            record.repeats += 1
            repeats = round(record.repeats)
            length_s = length_of(repeats)
        record.serves_until = max(record.serves_until, now + length_s)
        said = f"{allowance.count:g} in {format_duration(allowance.period_s)}"
        return Overflow(cidr, offence, repeats, evidence, said, self._wide)

    def _record(self, cidr: str, now: float) -> _Record:
        records = self._records
        record = records.get(cidr)
        if record is not None:
            records.move_to_end(cidr)
            return record
        if len(records) >= self._most:
            oldest = list(itertools.islice(records, _COMPARED_RECORDS))
            for item in oldest:
                records[item].decay(now, self._allowances)
            del records[min(oldest, key=lambda item: records[item].guilt(self._allowances))]
        record = records[cidr] = _Record(now, now)
        return record


class Penalties:
    """The buckets of all addresses and networks. One thread, or a lock around it."""

    def __init__(self, limits: PenaltyLimits, most: int = MOST_RECORDS) -> None:
        self.allowances: Final = limits.allowances_in_force()
        wide = {
            offence: Allowance(min(1e9, item.count * NETWORK_TIMES), item.period_s)
            for offence, item in self.allowances.items()
        }
        self._addresses: Final = _RecordBook(self.allowances, most, wide=False)
        self._networks: Final = _RecordBook(wide, most, wide=True)

    def charge(self, address: str, offence: Offence, amount: float, now: float, name: str = "") -> list[Overflow]:
        if offence not in self.allowances:
            return []
        networks = networks_of(address)
        if networks is None:
            return []
        own, network = networks
        served = self._addresses.is_serving(own, now)
        name = name or offence.value
        overflows = [self._addresses.charge(own, offence, amount, name, now)]
        if not served:
            most = self.allowances[offence].count  # one alone, at one moment, is no network
            overflows.append(self._networks.charge(network, offence, min(amount, most), name, now))
        return [item for item in overflows if item is not None]


def networks_of(address: str) -> tuple[str, str] | None:
    """Return the unit that counts as one address, and its network, as ban lists write them. None: it is no address."""
    addresses = meanings(address)
    if not addresses:
        return None
    parsed, lengths = addresses[-1], (UNIT_BITS, NETWORK_BITS)
    own, wide = (str(ipaddress.ip_network((parsed, bits[parsed.version]), strict=False)) for bits in lengths)
    return own, wide
