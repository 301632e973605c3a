"""The ban list: networks that are kept out, or slowed down, each until its time; and the file that it comes in.

The file has one JSON object per line::

    {"cidr": "203.0.113.7/32", "action": "ban", "reason": "amf_depth", "score": 12.5, "evidence": {"amf_depth": 1},
     "expires": "2026-11-21T17:00:00Z"}

`cidr` and `expires` must be there (`null` for one that stays until it is taken out), the others may be; other keys are
errors. `source` says who made it, where that was a command.

`action` is ``ban`` where it is missing: no new connection comes in. With ``limit`` the network as a whole may open
few connections (`LIMITED_NEW_PER_S`): for addresses that an abuser shares with others. A ban is stronger than a limit,
whatever the widths of their networks. Of two lines for one network and action the one that expires later counts, so
the order of lines says nothing.

A look-up asks once per prefix length that occurs in the list, longest first, so its cost does not depend on how many
networks are banned; a single address, by far the most common ban, is found by its text, without being parsed. IPv4
addresses that are written as IPv6 (``::ffff:203.0.113.7``, as a listener of both kinds reports them) are IPv4 here, and
one that comes through a translator or a tunnel (`flowctl.core.text.addresses.EMBEDDED`) is found as that one too.

No file is opened and no clock is read here: the time is an argument.
"""

from __future__ import annotations

import enum
import ipaddress
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, TypeVar

from flowctl.core.text.addresses import Address, Network, meanings
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

MOST_BYTES: Final = 16 * 1024 * 1024
"""Longest ban file: `MOST_BANS` lines with some evidence each."""
MOST_BANS: Final = 100_000
"""Networks in one list: more single addresses than that are a network, or an attack that addresses do not stop."""
MOST_EVIDENCE: Final = 64
"""Kinds of evidence of one ban: three times the limits that there are."""
WIDEST_IPV4: Final = 8
"""Shortest prefix of IPv4: the largest network that was ever given to one holder. 0.0.0.0/1 was meant otherwise."""
WIDEST_IPV6: Final = 16
"""Shortest prefix of IPv6: wider than what any one provider holds."""
_MOST_TEXT: Final = 100
"""Longest name of a kind of evidence, characters."""
_MAPPED_BITS: Final = 96
_MOST_REASON: Final = 200
"""Longest reason, characters: it stands in a line of the log."""
_KEYS: Final = frozenset({"cidr", "action", "reason", "score", "evidence", "expires", "source"})
_TYPES: Final[tuple[tuple[str, tuple[type, ...], str], ...]] = (
    ("cidr", (str,), "a text"),
    ("expires", (str, type(None)), "a text or null"),
    ("evidence", (dict,), "an object"),
    ("reason", (str,), "a text"),
    ("source", (str,), "a text"),
)
LIMITED_NEW_PER_S: Final = 2.0
"""New connections per second of a limited network: a school's viewers come in within minutes, a flood is a trickle."""
LIMITED_BURST: Final = 20
"""Connections that a limited network may open at once before that rate counts: a household, or a page's players."""
_REST_EVERY: Final = 64
"""Lines of `BanList.parse` between two rests: a millisecond of work, after which a thread that comes back from a system
call finds the interpreter free."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_Key = TypeVar("_Key", str, int)


class BanAction(enum.Enum):
    """The treatment of a network of the ban list."""

    BAN = "ban"
    LIMIT = "limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ban:
    """One network that is kept out, or limited.

    Args:
        cidr: the network, ``203.0.113.7/32`` or ``2001:db8:0:1::/64``; kept in its canonical form.
        expires: until when; kept in UTC, a fraction of a second counts as one. None: until it is taken out of the list.
        action: whether no new connections come in, or few at a time.
        reason: why, in a few words without line breaks; "": it is not told.
        score: why, as a number; 0 or more. 0: by hand.
        evidence: why, by kind: counts or other numbers.
        source: who made it: ``command``, with who asked behind it, or ``penalty``; "": who wrote the ban file.

    Raises:
        ConfigError: `cidr` is no network or wider than /8 (IPv4) or /16 (IPv6), or another value is not allowed.
    """

    cidr: str
    expires: datetime | None
    action: BanAction = BanAction.BAN
    reason: str = ""
    score: float = 0.0
    evidence: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cidr", str(_network_of(self.cidr)))
        object.__setattr__(self, "expires", _whole_second(self.expires))
        if not isinstance(self.action, BanAction):
            raise ConfigError(f"action is {short(self.action)}, it must be a BanAction")
        if len(self.reason) > _MOST_REASON or not self.reason.isprintable():
            raise ConfigError(
                f"reason is {short(self.reason)}, it must be up to {_MOST_REASON} characters that can be printed"
            )
        if len(self.source) > _MOST_REASON or not self.source.isprintable():
            raise ConfigError(f"source is {short(self.source)}, it must be a short text that can be printed")
        if not _is_number(self.score) or self.score < 0:
            raise ConfigError(f"score is {short(self.score)}, it must be a number, 0 or more")
        if len(self.evidence) > MOST_EVIDENCE:
            raise ConfigError(f"evidence has {len(self.evidence)} kinds, {MOST_EVIDENCE} are allowed")
        for name, value in self.evidence.items():
            if len(name) > _MOST_TEXT or not name.isprintable() or not _is_number(value):
                raise ConfigError(f"evidence {short(name)} is {short(value)}, it must be a number with a short name")

    @property
    def network(self) -> Network:
        """The network."""
        return _network_of(self.cidr)

    def lasts(self, now_utc: float) -> bool:
        """Return whether it still counts at `now_utc`, seconds since the epoch."""
        return self.expires is None or now_utc < self.expires.timestamp()

    def line(self) -> str:
        """Return it as a line of the file, without the end of line; what has its default value is left out."""
        return json.dumps(self.as_dict(), ensure_ascii=True)

    def as_dict(self) -> dict[str, Any]:
        """Return it as the object of a line; what has its default value is left out."""
        value: dict[str, Any] = {"cidr": self.cidr}
        if self.action is not BanAction.BAN:
            value["action"] = self.action.value
        if self.reason:
            value["reason"] = self.reason
        if self.source:
            value["source"] = self.source
        return value | {"score": self.score, "evidence": dict(self.evidence), "expires": utc_text(self.expires)}

    @property
    def by_hand(self) -> bool:
        """Whether a person made it: jobs and penalties give a score, or the evidence of one that was rounded to 0."""
        return self.expires is None or not (self.score or self.evidence)

    def covers(self, address: str) -> bool:
        """Return whether `address` lies in the network; IPv4 written as IPv6 is IPv4, what is no address does not."""
        return bool(BanList([replace(self, expires=None)]).match(address, 0.0))


class _Networks:
    """The networks of one action: which of them an address lies in."""

    __slots__ = ("_by_text", "_lengths", "_networks")

    def __init__(self) -> None:
        self._by_text: dict[str, Ban] = {}  # single addresses, as the system writes them
        self._networks: dict[tuple[int, int], dict[int, Ban]] = {}  # by (version, prefix length), first address
        self._lengths: dict[int, list[int]] = {4: [], 6: []}  # by version: the narrowest network is the one told of

    def __len__(self) -> int:
        return len(self._by_text) + sum(map(len, self._networks.values()))

    def __iter__(self) -> Iterator[Ban]:
        yield from list(self._by_text.values())  # lists, for another thread may change what there is (`put`)
        for group in self._networks.values():
            yield from list(group.values())

    def add(self, ban: Ban) -> None:
        """Take `ban`, unless there is one for the same network that lasts longer."""
        address, _, length = ban.cidr.partition("/")
        if length == ("128" if ":" in address else "32"):
            _keep_longest(self._by_text, address, ban)  # not parsed once more: a list of 100,000 is nearly all of these
        else:
            network = ban.network
            key = network.version, network.prefixlen
            if key not in self._networks:  # in this order, and a new dict: another thread may be looking for an address
                self._networks = {**self._networks, key: {}}
                self._lengths[network.version] = sorted([*self._lengths[network.version], network.prefixlen])[::-1]
            _keep_longest(self._networks[key], int(network.network_address), ban)

    def _find(self, cidr: str) -> tuple[dict[Any, Ban], str | int]:
        """Return where the ban of a network would be, and under which key."""
        address, _, length = cidr.partition("/")
        if length == ("128" if ":" in address else "32"):
            return self._by_text, address
        network = _network_of(cidr)
        return self._networks.get((network.version, network.prefixlen), {}), int(network.network_address)

    def get(self, cidr: str) -> Ban | None:
        kept, key = self._find(cidr)
        return kept.get(key)

    def put(self, cidr: str, ban: Ban | None) -> None:
        """Have `ban`, of the network, in place of what is there; None: nothing. One thread, while others ask."""
        kept, key = self._find(cidr)
        if ban is None:
            kept.pop(key, None)
        elif key in kept:  # at no moment is there none
            kept[key] = ban
        else:
            self.add(ban)

    def match(self, address: str, now_utc: float) -> Ban | None:
        """Return the narrowest that `address` lies in and that counts at `now_utc`."""
        ban = self._by_text.get(address)
        if ban is not None and ban.lasts(now_utc):
            return ban
        if not self._networks and ":" not in address:
            return None  # nothing but single addresses, and the text of an IPv4 address is unambiguous
        for parsed in meanings(address):
            if ":" in address:  # one address has several texts
                ban = self._by_text.get(str(parsed))
                if ban is not None and ban.lasts(now_utc):
                    return ban
            if (ban := self._match_network(parsed, now_utc)) is not None:
                return ban
        return None

    def _match_network(self, address: Address, now_utc: float) -> Ban | None:
        value, version, bits = int(address), address.version, address.max_prefixlen
        for length in self._lengths[version]:
            host_bits = bits - length
            ban = self._networks[version, length].get(value >> host_bits << host_bits)
            if ban is not None and ban.lasts(now_utc):
                return ban
        return None


class BanList:
    """Networks that are kept out or limited; any thread may ask it, and only `replaced` changes one.

    Args:
        bans: of several for one network and action, the one that expires last counts.

    Raises:
        ConfigError: there are more than `MOST_BANS`.
    """

    __slots__ = ("_by_action",)

    def __init__(self, bans: Iterable[Ban] = ()) -> None:
        self._by_action = {action: _Networks() for action in BanAction}  # the strongest first
        for ban in bans:
            self._add(ban)

    def _add(self, ban: Ban) -> None:
        self._by_action[ban.action].add(ban)
        if len(self) > MOST_BANS:
            raise ConfigError(f"there are more than {MOST_BANS} bans", hint="ban networks instead of addresses")

    def __len__(self) -> int:
        return sum(map(len, self._by_action.values()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BanList):
            return NotImplemented
        return {(ban.cidr, ban.action): ban for ban in self.bans} == {(ban.cidr, ban.action): ban for ban in other.bans}

    __hash__ = None  # type: ignore[assignment] # compared by what it holds, in tests

    @property
    def bans(self) -> list[Ban]:
        """All of them: bans before limits, single addresses before networks."""
        return [ban for networks in self._by_action.values() for ban in networks]

    def get(self, cidr: str, action: BanAction) -> Ban | None:
        """Return what the list has for exactly this network, in its canonical form."""
        return self._by_action[action].get(cidr)

    def replaced(self, cidr: str, bans: Iterable[Ban]) -> BanList:
        """Return the list with `bans`, all of them of one network, in place of what this one has for it.

        All else is not copied but shared: it costs the same however long the list is, and this list has them too from
        then on. A new object all the same, by which is seen that the list has changed.
        """
        new = BanList()
        new._by_action = self._by_action
        kept: dict[str, Ban] = {}
        for ban in bans:
            _keep_longest(kept, ban.action.value, ban)
        for action, networks in self._by_action.items():
            networks.put(cidr, kept.get(action.value))
        return new

    @classmethod
    def parse(cls, text: str, where: str = "the ban list", rest: Callable[[], None] | None = None) -> BanList:
        """Return the bans of a file.

        Args:
            text: its contents; empty lines are passed over.
            where: its name, for errors.
            rest: called every few hundred lines, so that who reads a long list beside a server can let others run.
                None: nothing.

        Raises:
            ConfigError: a line is wrong, the whole is too long, or there are too many; names file, line and value.
        """
        if len(text) > MOST_BYTES:
            raise ConfigError(f"{where}: it has more than {MOST_BYTES} characters")
        new = cls()
        for _ in parse_lines(text, where, new._add, rest):
            pass
        return new

    def match(self, address: str, now_utc: float) -> Ban | None:
        """Return what the list says of `address` at `now_utc`: a ban, else a limit, the narrowest one; else None.

        Args:
            address: IPv4 or IPv6, as the system writes it; a zone (``%eth0``) counts for nothing.
            now_utc: seconds since the epoch (`time.time()`).

        An `address` that is none, a name for instance, is not banned.
        """
        for networks in self._by_action.values():
            if networks and (ban := networks.match(address, now_utc)) is not None:
                return ban
        return None

    def still(self, now_utc: float) -> BanList:
        """Return those that count at `now_utc`."""
        return BanList(ban for ban in self.bans if ban.lasts(now_utc))


NO_BANS: Final = BanList()
"""A list without bans and limits."""


def parse_lines(
    text: str,
    where: str = "the ban list",
    take: Callable[[Ban], None] = lambda _: None,
    rest: Callable[[], None] | None = None,
) -> Iterator[Ban]:
    """Yield the bans of a file of any length, one per line; see `BanList.parse`."""
    for number, line in enumerate(text.split("\n"), 1):
        if rest is not None and number % _REST_EVERY == 0:
            rest()
        if not line.strip():
            continue
        try:
            ban = _ban_of(line)
            take(ban)
        except ConfigError as error:
            raise ConfigError(f"{where}, line {number}: {error}", hint=error.hint) from error
        yield ban


def render(bans: Iterable[Ban]) -> str:
    """Return the text of a ban file, in the order of networks; `BanList.parse` makes the same list of it again."""
    ordered = sorted(bans, key=lambda ban: (ban.network.version, int(ban.network.network_address), ban.cidr))
    return "".join(f"{ban.line()}\n" for ban in ordered)


def lasts_longer(one: Ban, other: Ban) -> bool:
    """Return whether `one` ends later than `other`; one that stays ends later than any that does not."""
    if one.expires is None or other.expires is None:
        return one.expires is None and other.expires is not None
    return one.expires > other.expires


def merge_bans(there: Iterable[Ban], own: Iterable[Ban], now_utc: float, allow: Sequence[Network] = ()) -> list[Ban]:
    """Return what a list holds after one of several writers has written to it.

    Several may write one list: a job once a day, a watch all the time, a person by hand. Nobody may end a ban of
    another, so the list is the union; of two bans of one network the later end counts, with the evidence of the
    higher score, whichever came first. Where the one that ends later was made by hand, it stays as it was written.
    """
    merged: dict[tuple[str, BanAction], Ban] = {}
    kept = (ban for ban in there if not allow or not _touches(ban.network, allow))
    for ban in (item for group in (kept, own) for item in group if item.lasts(now_utc)):
        key = ban.cidr, ban.action
        old = merged.get(key)
        merged[key] = ban if old is None else _join_two(old, ban)
    return sorted(merged.values(), key=_worth)


def _worth(ban: Ban) -> tuple[Any, ...]:
    """Return the key by which bans are sorted, the most valuable first."""
    lasts_s = math.inf if ban.expires is None else ban.expires.timestamp()
    return not ban.by_hand, ban.expires is not None, -ban.score, -lasts_s, ban.cidr, ban.action.value


def fitting(bans: Sequence[Ban]) -> list[Ban]:
    """Return the first of these that one list holds, `MOST_BANS` and `MOST_BYTES`: what is left out is least."""
    sizes = accumulate(len(ban.line()) + 1 for ban in bans[:MOST_BANS])
    count = sum(size <= MOST_BYTES for size in sizes)
    if any(ban.by_hand for ban in bans[count:]):
        fault = f"there are more bans made by hand than the {MOST_BANS} or {MOST_BYTES} bytes that a list holds"
        raise ConfigError(fault, hint="ban networks instead of addresses")
    return list(bans[:count])


def _join_two(one: Ban, other: Ban) -> Ban:
    worst = one if one.score >= other.score else other
    last = other if lasts_longer(other, one) else one
    return last if last.by_hand else replace(worst, expires=last.expires)


def _touches(network: Network, others: Sequence[Network]) -> bool:
    return any(network.version == other.version and network.overlaps(other) for other in others)


def utc_text(moment: datetime | None) -> str | None:
    """Return a time as ISO 8601 in UTC, ``2026-11-21T17:00:00Z``; None stays None."""
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@lru_cache(maxsize=4096)
def parse_utc(text: str) -> datetime:
    """Return an ISO 8601 time with its zone, in UTC; a fraction of a second counts as one."""
    try:
        moment = _whole_second(datetime.fromisoformat(text))
    except (ValueError, OverflowError, ConfigError):
        moment = None
    if moment is None:
        raise ConfigError(
            f"expires is {short(text)}, it must be a time with its zone", hint="write it like 2026-11-21T17:00:00Z"
        )
    return moment


def _whole_second(moment: Any) -> datetime | None:
    if moment is None:
        return None
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ConfigError(f"expires is {short(moment)}, it must be a datetime with its zone, or None")
    try:
        second: datetime = moment.astimezone(UTC)
        if second.microsecond:
            second = second.replace(microsecond=0) + timedelta(seconds=1)
    except OverflowError:
        second = _EPOCH - timedelta(1)
    if second < _EPOCH:
        raise ConfigError(f"expires is {short(str(moment))}, it must be from 1970 to 9999")
    return second


def _keep_longest(kept: dict[_Key, Ban], key: _Key, ban: Ban) -> None:
    other = kept.get(key)
    if other is None or lasts_longer(ban, other):
        kept[key] = ban


def _ban_of(line: str) -> Ban:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        said = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ConfigError(f"not valid JSON: {said}", hint="each line is one JSON object") from error
    return parse_ban(value)


def parse_ban(value: object) -> Ban:
    if not isinstance(value, dict):
        raise ConfigError(f"it is {short(value)}, it must be a JSON object")
    for name in value:
        if name not in _KEYS:
            raise ConfigError(f"unknown key {short(name)}", hint=f"there are {', '.join(sorted(_KEYS))}")
    for name in ("cidr", "expires"):
        if name not in value:
            raise ConfigError(f"{name} is missing", hint='"expires": null is a ban that stays')
    for name, kinds, what in _TYPES:
        if name in value and not isinstance(value[name], kinds):
            raise ConfigError(f"{name} is {short(value[name])}, it must be {what}")
    action, actions = value.get("action", BanAction.BAN.value), [item.value for item in BanAction]
    if action not in actions:
        raise ConfigError(f"action is {short(action)}, it must be {' or '.join(actions)}")
    expires = None if value["expires"] is None else parse_utc(value["expires"])
    return Ban(**{**value, "expires": expires, "action": BanAction(action)})


@lru_cache(maxsize=1024)
def _network_of(cidr: str) -> Network:
    """Return the network that `cidr` names; IPv4 written as IPv6 is IPv4."""
    try:
        network: Network = ipaddress.ip_network(cidr)
    except ValueError as error:
        raise ConfigError(f"cidr is {short(cidr)}: {error}", hint="write it like 203.0.113.7/32") from error
    if isinstance(network, ipaddress.IPv6Network) and network.prefixlen >= _MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            network = ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    widest = WIDEST_IPV4 if network.version == 4 else WIDEST_IPV6
    if network.prefixlen < widest:
        raise ConfigError(f"cidr is {short(cidr)}, the widest network that may be banned is /{widest}")
    return network


def _is_number(value: Any) -> bool:
    """Whether `value` is a number that a float can hold: no flag (True is an int), no NaN, no infinity."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is float and math.isfinite(value)
