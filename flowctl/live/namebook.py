"""Whose the names of streams are (pure): rules between publishers, turns of those on standby, names kept for owners.

A hub has such a book of its publishers, and so has the directory of several workers, of theirs. A publisher whose
connection broke has its name kept for a while, for its owner alone, and as many are kept for an address as it may
publish: otherwise one that publishes, breaks off and comes with another name held hundreds of them.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Self, TypeVar

from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.config import SecondPublisher
from flowctl.wire.rtmp.url import is_secret

_H = TypeVar("_H")
MOST_STANDBY: Final = 8
"""Publishers that may stand by for one name."""
_TAKEN_HINT: Final = "choose another name, or start the server with --second-publisher replace"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a published name is, as far as a server can tell."""

    address: str  # from which it is published; of IPv6 the /64, whose hosts change theirs as they like
    user: str | None = None
    key: bytes = b""  # digest of the secrets in the stream's query; empty without any

    @classmethod
    def of(cls, address: str, user: str | None, query: Mapping[str, str]) -> Self:
        secrets = sorted((name, value) for name, value in query.items() if value and is_secret(name))
        return cls(address, user, hashlib.sha256(repr(secrets).encode()).digest() if secrets else b"")

    def is_same(self, other: Owner) -> bool:
        """Return whether `other` is this one: the same user where they log in, else the same key or the same address.

        Who gave a key is known by it alone: an address is shared with everybody behind the same router.
        """
        if self.user is not None or other.user is not None:
            return self.user == other.user
        return self.key == other.key if self.key else self.address == other.address


class ClaimVerdict(enum.Enum):
    """Verdicts on a claim that is not refused."""

    GRANTED = "granted"
    STANDS_BY = "stands by"
    ASK = "ask"  #: its owner has it already: whether that publisher has fallen silent decides


class NameRules(NamedTuple):
    """Rules for the publishers of a name: how long it is kept, and how many an address may have; 0: any number."""

    policy: SecondPublisher
    grace_s: float
    per_address: int


class ClaimOutcome(NamedTuple, Generic[_H]):
    """The outcome of a claim; `rival` had the name, and has lost it or is to be asked about. None: it was free."""

    verdict: ClaimVerdict
    rival: _H | None = None


class ReleaseOutcome(NamedTuple, Generic[_H]):
    """The outcome of the end of a publication: the next publisher, or a time in which the name is kept."""

    following: _H | None = None
    kept_s: float = 0.0


@dataclass(slots=True)
class NameEntry(Generic[_H]):
    """One name."""

    holder: _H | None = None  # the publisher. None: there is none.
    owner: Owner | None = None  # owner of `holder`, or the owner for whom the name is kept
    kept_until: float | None = None
    kept_for: str = ""  # address that this is counted for; empty: none
    # publishers that wait for a turn, and whose they are, in order
    standby: dict[_H, Owner] = field(default_factory=dict)


class NameBook(Generic[_H]):
    """The names of one server. Not locked."""

    def __init__(self, rules: Callable[[str], NameRules]) -> None:
        self._rules: Final = rules
        self.entries: Final[dict[str, NameEntry[_H]]] = {}
        self._published_from: Final[dict[str, int]] = {}  # by address, those on standby included
        self._kept_for: Final[dict[str, int]] = {}  # names kept, by address
        self._kept: Final[dict[str, float]] = {}  # until when, soonest first

    def holder_of(self, name: str) -> _H | None:
        entry = self.entries.get(name)
        return None if entry is None else entry.holder

    def is_kept(self, name: str) -> bool:
        return name in self._kept

    def is_kept_for_owner(self, name: str) -> bool:
        """Return whether its publisher may be back; not where a name is kept so that viewers are not told too often."""
        return name in self._kept and bool(self.entries[name].kept_for)

    def owner_of(self, name: str) -> Owner | None:
        """Return whose a name is, or for whom it is kept."""
        entry = self.entries.get(name)
        return None if entry is None else entry.owner

    def claim(
        self,
        name: str,
        holder: _H,
        owner: Owner,
        *,
        silent: bool | None = None,
        decided: ClaimVerdict | None = None,
        yields: bool = False,
    ) -> ClaimOutcome[_H]:
        """Enter a publisher, or refuse it with BusyError or LimitExceededError.

        `silent`: whether the publisher that there is has fallen silent; None: that would have to be asked. `decided`:
        what was decided elsewhere; None: the rules decide. `yields`: the present publisher gives way to this one.
        """
        entry = self.entries.get(name) or NameEntry()
        if holder == entry.holder or holder in entry.standby:
            raise BusyError(f"this connection publishes stream {name} already", hint="close the other publication")
        verdict = decided or (ClaimVerdict.GRANTED if yields else self._judge(name, entry, owner, silent=silent))
        if verdict is ClaimVerdict.ASK:
            return ClaimOutcome(verdict, entry.holder)
        rival = entry.holder if verdict is ClaimVerdict.GRANTED else None
        count, most = self._published_from.get(owner.address, 0), self._rules(name).per_address
        # The one that is replaced gives its place up: its owner may have no other.
        freed = rival is not None and entry.owner is not None and entry.owner.address == owner.address
        if decided is None and most and count - freed >= most:
            raise LimitExceededError("publishers_per_address", count - freed + 1, most)
        if verdict is ClaimVerdict.STANDS_BY and len(entry.standby) >= MOST_STANDBY:
            raise LimitExceededError("standby_publishers", len(entry.standby) + 1, MOST_STANDBY)
        self.entries[name] = entry
        self._published_from[owner.address] = count + 1
        if verdict is ClaimVerdict.STANDS_BY:
            entry.standby[holder] = owner
        else:
            self._enter_holder(name, entry, holder, owner)
        return ClaimOutcome(verdict, rival)

    def _judge(self, name: str, entry: NameEntry[_H], owner: Owner, *, silent: bool | None) -> ClaimVerdict:
        known, policy = entry.owner is not None and entry.owner.is_same(owner), self._rules(name).policy
        if entry.holder is None:
            if entry.kept_until is not None and policy is SecondPublisher.REFUSE and not known:
                raise BusyError(f"stream {name} is kept for its publisher, which may be back", hint=_TAKEN_HINT)
            return ClaimVerdict.GRANTED
        if policy is SecondPublisher.REPLACE or (known and silent):
            return ClaimVerdict.GRANTED
        if known and silent is None:
            return ClaimVerdict.ASK
        if policy is SecondPublisher.REFUSE:
            raise BusyError(f"stream {name} is being published already", hint=_TAKEN_HINT)
        return ClaimVerdict.STANDS_BY

    def promote(self, name: str, holder: _H) -> _H | None:
        entry = self.entries[name]
        rival = entry.holder
        self._enter_holder(name, entry, holder, entry.standby.pop(holder))
        return rival

    def release(
        self, name: str, holder: _H, now: float, *, grace: bool, least_s: float = 0.0, turns: bool = True
    ) -> ReleaseOutcome[_H] | None:
        """Take a publication out; the next one has its turn, or the name is kept, or free. None: it did not count.

        `grace`: its owner may be back. `least_s`: how long the name is kept in any case, unless somebody has a turn.
        `turns`: those on standby have theirs by themselves.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        if (waiting := entry.standby.pop(holder, None)) is not None:
            _decrease(self._published_from, waiting.address)
            self._forget(name, entry)
            return None
        last = entry.owner
        if entry.holder != holder or last is None:
            return None
        _decrease(self._published_from, last.address)
        entry.holder = None
        if entry.standby and turns:
            following = next(iter(entry.standby))
            self._enter_holder(name, entry, following, entry.standby.pop(following))
            return ReleaseOutcome(following)
        rules = self._rules(name)
        graced = grace and (not rules.per_address or self._kept_for.get(last.address, 0) < rules.per_address)
        kept_s = max(rules.grace_s if graced else 0.0, least_s)
        if kept_s > 0:
            self._keep_name(name, entry, now + kept_s, last.address if graced else "")
        else:
            entry.owner = None
            self._forget(name, entry)
        return ReleaseOutcome(kept_s=kept_s)

    def _keep_name(self, name: str, entry: NameEntry[_H], until: float, address: str) -> None:
        """Keep a name; those that are kept less long than others have their place before them."""
        entry.kept_until, entry.kept_for = until, address
        if address:
            self._kept_for[address] = self._kept_for.get(address, 0) + 1
        last = next(reversed(self._kept.values()), until)
        self._kept[name] = until
        if until < last:
            ordered = sorted(self._kept.items(), key=lambda item: item[1])
            self._kept.clear()
            self._kept.update(ordered)

    def _enter_holder(self, name: str, entry: NameEntry[_H], holder: _H, owner: Owner) -> None:
        if entry.holder is not None and entry.owner is not None:
            _decrease(self._published_from, entry.owner.address)
        self._end_keeping(name, entry)
        entry.holder, entry.owner = holder, owner

    def _end_keeping(self, name: str, entry: NameEntry[_H]) -> None:
        if entry.kept_until is not None:
            self._kept.pop(name, None)
            if entry.kept_for:
                _decrease(self._kept_for, entry.kept_for)
            entry.kept_until, entry.kept_for = None, ""

    def free_name(self, name: str) -> None:
        entry = self.entries.get(name)
        if entry is not None and entry.holder is None:
            self._end_keeping(name, entry)
            entry.owner = None
            self._forget(name, entry)

    def names_due(self, now: float) -> list[str]:
        return [name for name, until in self._kept.items() if until <= now]

    def next_deadline(self) -> float | None:
        return next(iter(self._kept.values()), None)

    def _forget(self, name: str, entry: NameEntry[_H]) -> None:
        if entry.holder is None and entry.kept_until is None and not entry.standby:
            self.entries.pop(name, None)


def _decrease(counts: dict[str, int], key: str) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
