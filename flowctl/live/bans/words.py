"""Words on networks and limits, with their server and time (pure): a map that any two servers merge.

Theory of operation. A word is a ban or a limit of a network, the lifting of all bans of a network, or the limits of the
servers. Each has a stamp, and for each place the word with the greatest stamp stays: a server has a place of its own
for each network and action that it bans, while liftings and limits have one place for all servers. A ban counts while
no lifting of its network has a greater stamp. That is all of merging, so it does not matter who hears what from whom,
in which order, or how often: servers that have heard the same words hold the same.

A stamp is the wall clock's time, a counter, and the name of the server (a hybrid logical clock: Kulkarni et al.,
"Logical Physical Clocks", 2014). A server's next stamp is greater than all that it gave or saw, whatever its clock did
meanwhile, so who lifts a ban that he has heard of always lifts it. Bans of one network by two servers that had not
heard of each other both count: the one that ends later keeps the network out.

Bans end at a time of day. A lifting is remembered for `MEMORY_S`, so that a server that was away does not bring the
ban back. Two maps are compared by `BUCKETS` sums over their words, so that only what differs is sent.
"""

from __future__ import annotations

import enum
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, isfinite
from typing import Any, Final, NamedTuple

from flowctl.core.server.bans import MOST_BANS, Ban, parse_ban
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError

MEMORY_S: Final = 366 * 86_400.0
"""How long a lifting is remembered: longer than a server is away for repair, or between two yearly events."""
MOST_WORDS: Final = 2 * MOST_BANS
"""Words of a map: the bans of a full list, and as many liftings. The oldest words are dropped first."""
MOST_WORD_BYTES: Final = 4096
"""Longest word: a ban with 64 kinds of evidence fits."""
LIMITS: Final = frozenset({"soft", "hard", "low", "target_delay"})
"""Keys of the limits, whose values are texts as ``flowctl limits`` takes them."""
BUCKETS: Final = 512
"""Parts in which maps are compared: sums of 4 KiB, and 200 words of a full list in each."""
ROOM: Final = 1024
"""Stamps left free after each, for the same ban, whose end moves when its server's clock is set. A later word has a
stamp behind all of them, even at a server that has not got them."""
_MOST_NAME: Final = 64
"""Longest name of a member of a fleet, characters."""
_MOST_SOURCE: Final = 200
"""Longest source of a ban or a lifting, characters."""
_MOST_MS: Final = 2**53
"""Latest time of a stamp: each reader of JSON has it exactly; it is 285,000 years."""


class WordKind(enum.Enum):
    """Kinds of words."""

    BAN = "ban"
    LIMIT = "limit"
    LIFT = "lift"
    LIMITS = "limits"


class Stamp(NamedTuple):
    """Time and server of a word; later stamps are greater."""

    ms: int  #: since the epoch, by the latest wall clock that its giver knew of
    counter: int  #: tells those of the same `ms` apart
    node: str  #: name of the server in its fleet; "": it is in none


WordPlace = tuple[str, WordKind, str]
"""Network ("" for the limits), kind, and for a ban its server: a map keeps one word for each."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word; `of_ban`, `lifting` and `of_limits` make them."""

    kind: WordKind
    key: str  # network, in its canonical form; "" of the limits
    stamp: Stamp
    # the JSON object: the ban, who lifted it and until when it would have lasted, or the limits
    value: Mapping[str, Any]
    ban: Ban | None = field(init=False, compare=False)  # that it is. None: it is none.
    # when the ban ends, or the longest ban that was lifted would have, seconds since the epoch
    ends_s: float = field(init=False, compare=False)

    def __post_init__(self) -> None:
        ban: Ban | None = None
        ends: Any = None
        if self.kind in (WordKind.BAN, WordKind.LIMIT):
            ban = parse_ban(self.value)
            if (ban.action.value, ban.cidr) != (self.kind.value, self.key):
                raise ConfigError(f"a word of {short(self.key)} has the ban of {ban.cidr}")
            ends = None if ban.expires is None else ban.expires.timestamp()
        elif self.kind is WordKind.LIFT:
            ends = self.value.get("ends")
            timed = type(ends) in (int, float) and isfinite(ends)
            source = self.value.get("source", "")
            known = self.value.keys() <= {"ends", "source"} and isinstance(source, str)
            known = known and len(source) <= _MOST_SOURCE and source.isprintable()
            if Ban(cidr=self.key, expires=None).cidr != self.key or not (ends is None or timed) or not known:
                raise ConfigError(f"{short(self.key)}: no lifting of a ban")
        elif self.key or self.value.keys() != LIMITS or not all(isinstance(item, str) for item in self.value.values()):
            raise ConfigError(f"{short(str(self.value))} are no limits")
        object.__setattr__(self, "ban", ban)
        object.__setattr__(self, "ends_s", inf if ends is None else float(ends))

    @classmethod
    def of_ban(cls, ban: Ban, stamp: Stamp) -> Word:
        kind, value = WordKind(ban.action.value), ban.as_dict()
        word = cls(kind, ban.cidr, stamp, value)
        return word if len(word.line()) <= MOST_WORD_BYTES else cls(kind, ban.cidr, stamp, value | {"evidence": {}})

    @classmethod
    def lifting(cls, cidr: str, ends_s: float, source: str, stamp: Stamp) -> Word:
        return cls(WordKind.LIFT, cidr, stamp, {"ends": ends_s if isfinite(ends_s) else None, "source": source})

    @classmethod
    def of_limits(cls, limits: Mapping[str, str], stamp: Stamp) -> Word:
        return cls(WordKind.LIMITS, "", stamp, dict(limits))

    @classmethod
    def read(cls, line: str) -> Word:
        try:
            kind, key, ms, counter, node, value = json.loads(line)
            stamp = Stamp(ms, counter, node)
            if len(line) > MOST_WORD_BYTES or not (isinstance(key, str) and isinstance(value, dict)):
                raise ConfigError(f"{short(line)} is no word")
            named = isinstance(node, str) and len(node) <= _MOST_NAME and node.isprintable()
            if not named or not all(type(item) is int and 0 <= item <= _MOST_MS for item in stamp[:2]):
                raise ConfigError(f"the stamp is {short(str(stamp))}, it must be two whole numbers and a name")
            return cls(WordKind(kind), key, stamp, value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{short(line)} is no word") from error

    def line(self) -> str:
        return json.dumps([self.kind.value, self.key, *self.stamp, self.value], sort_keys=True, separators=(",", ":"))

    def detail(self) -> dict[str, Any]:
        """Return the word in the form of the API: the ban, or the network that was lifted and by whom."""
        return {"cidr": self.key, "source": self.value.get("source", "")} if self.ban is None else self.ban.as_dict()

    @property
    def place(self) -> WordPlace:
        return self.key, self.kind, self.stamp.node if self.ban is not None else ""

    @property
    def kept_until_s(self) -> float:
        """Until when it is kept; the same at each server."""
        return self.stamp.ms / 1000 + MEMORY_S if self.kind is WordKind.LIFT else self.ends_s

    def is_after(self, other: Word) -> bool:
        """Return whether this word replaces another one of the same place.

        Two of one stamp are the work of a server that lost its memory; then any order does that is the same everywhere.
        """
        return (self.stamp, self.line()) > (other.stamp, other.line())


class Words:
    """The words that one server holds. One thread."""

    def __init__(self, node: str = "", most: int = MOST_WORDS) -> None:
        self.node = node  # name of the server
        self.sums: Final = [0] * BUCKETS  # one number per bucket; servers whose sums are equal hold the same words
        # what was entered, and taken out (None), since it was stored last; the store's owner clears it
        self.touched: Final[dict[WordPlace, Word | None]] = {}
        # networks of which words were entered or taken out, for its owner to clear; None: not known, too many
        self.changed: set[str] | None = None
        self._most: Final = most
        self._words: Final[dict[WordPlace, Word]] = {}
        self._of_network: Final[dict[str, set[WordPlace]]] = {}
        self._buckets: Final[list[set[WordPlace]]] = [set() for _ in range(BUCKETS)]
        self._last = (0, -1)
        self._next_end_s = inf  # no word is over before that; looked at each second

    def __len__(self) -> int:
        return len(self._words)

    def __iter__(self) -> Iterator[Word]:
        return iter(list(self._words.values()))

    def of(self, key: str) -> list[Word]:
        return [self._words[place] for place in self._of_network.get(key, ())]

    def get(self, key: str, kind: WordKind) -> Word | None:
        """Return the lifting of a network, or the limits."""
        return self._words.get((key, kind, ""))

    def next_stamp(self, now_s: float) -> Stamp:
        """Return the stamp of a word that is said here at `now_s`, seconds since the epoch."""
        ms, counter = self._last
        now_ms = min(int(now_s * 1000), _MOST_MS)
        self._last = (now_ms, 0) if now_ms > ms else (ms, counter + ROOM)
        return Stamp(*self._last, self.node)

    def merge(self, words: Iterable[Word], now_s: float) -> list[Word]:
        """Enter the words that are later than those here; return them."""
        entered = []
        for word in words:
            self._last = max(self._last, word.stamp[:2])
            own, lift = self._words.get(word.place), self.get(word.key, WordKind.LIFT)
            if now_s >= word.kept_until_s or (own is not None and not word.is_after(own)):
                continue
            if word.ban is not None and lift is not None and word.stamp < lift.stamp:
                continue
            self._put(word)
            if word.kind is WordKind.LIFT:
                for other in self.of(word.key):
                    if other.ban is not None and other.stamp < word.stamp:
                        self._drop(other.place)
            entered.append(word)
        for place in heapq.nsmallest(len(self) - self._most, self._words, key=lambda place: self._words[place].stamp):
            self._drop(place)
        return entered

    def forget(self, now_s: float) -> int:
        """Take out what need not be kept any more; return how many bans that were."""
        if now_s < self._next_end_s:
            return 0
        over = [word for word in self._words.values() if now_s >= word.kept_until_s]
        for word in over:
            self._drop(word.place)
        self._next_end_s = min((word.kept_until_s for word in self._words.values()), default=inf)
        return sum(word.ban is not None for word in over)

    def renamed(self, node: str) -> None:
        self.node = node
        for word in self:
            if not word.stamp.node:
                self._drop(word.place)
                self._put(Word(word.kind, word.key, word.stamp._replace(node=node), word.value))

    def replace(self, old: Word, new: Word) -> None:
        """Put a word in place of another, which may be elsewhere."""
        self._last = max(self._last, new.stamp[:2])
        self._drop(old.place)
        self._put(new)

    def differing(self, sums: Sequence[int]) -> list[int]:
        return [number for number, (own, other) in enumerate(zip(self.sums, sums, strict=True)) if own != other]

    @staticmethod
    def number_of(place: WordPlace) -> int:
        return int.from_bytes(blake2b(place_text(place).encode(), digest_size=2).digest(), "little") % BUCKETS

    def bucket(self, number: int) -> list[Word]:
        return [self._words[place] for place in self._buckets[number]]

    def _put(self, word: Word) -> None:
        place = word.place
        if place in self._words:
            self._drop(place)
        self._words[place] = self.touched[place] = word
        self._note_change(word.key)
        self._next_end_s = min(self._next_end_s, word.kept_until_s)
        self._of_network.setdefault(word.key, set()).add(place)
        self._count(place, word)

    def _drop(self, place: WordPlace) -> None:
        word = self._words.pop(place)
        self.touched[place] = None
        self._note_change(word.key)
        self._of_network[word.key].discard(place)
        if not self._of_network[word.key]:
            del self._of_network[word.key]
        self._count(place, word)

    def _note_change(self, key: str) -> None:
        if self.changed is not None:
            self.changed.add(key)
            if len(self.changed) > self._most:
                self.changed = None

    def _count(self, place: WordPlace, word: Word) -> None:
        number = self.number_of(place)
        self.sums[number] ^= int.from_bytes(blake2b(word.line().encode(), digest_size=8).digest(), "little")
        self._buckets[number].symmetric_difference_update({place})


def place_text(place: WordPlace) -> str:
    return f"{place[1].value} {place[0]} {place[2]}"
