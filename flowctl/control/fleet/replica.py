"""One member's copy of a fleet's table, and what it tells the others (pure): messages and time in, messages out.

Theory of operation. What is changed at a member goes to all others at once (`wire.Changes`); the Messenger keeps it for
those that are away. That alone would do, if nothing were ever lost. So that it need not be believed, members compare
their tables: each says every `COMPARE_S` what stands for its own (`wire.Compare`). One that has another answers with
its sums; the first then sends its part of the buckets that differ, and gets the other's. While more buckets differ than
were sent, it compares again at once. So a new member gets the whole table, a little at a time.

A member that has heard of nobody for longer than lifted entries are remembered is *stale*: what it holds may have been
lifted and forgotten meanwhile. It takes the tables of the others in place of its own: what it has and they have not
goes, but for what was changed here since it last heard of them. Where all are stale they merge as always: a ban too
many is lifted by hand, one too few is not noticed.

Of two bans of one network made by members that did not know of each other, the later one counts, as for all entries.
Where that one ends sooner, the maker of the other makes it again, for nobody may end another's ban without knowing of
it. Only its maker does, so it happens once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from flowctl.control.fleet.stamp import Clock, Stamp
from flowctl.control.fleet.table import MEMORY_S, Entry, Table, version
from flowctl.control.fleet.values import ends_s
from flowctl.control.fleet.wire import (
    PAGE_BYTES,
    Changes,
    Compare,
    Message,
    Part,
    Sums,
    decode,
    encode,
    size_of,
)
from flowctl.errors import RemoteProtocolError

COMPARE_S: Final = 5.0
"""Between two comparisons with a member: what was lost is found that soon, for 150 octets per member."""
PART_BUCKETS: Final = 16
"""Buckets asked for at a time: 1600 entries of a full table."""
_SLACK_S: Final = 3600.0
"""How much less than `MEMORY_S` a change may say that it remembers: its wall clock may be behind its stamp."""


class Letter(NamedTuple):
    """A message to another member.

    Attributes:
        lasting: whether it is to be kept for a member that is away; others are of use only now.
    """

    to: str
    octets: bytes
    lasting: bool


@dataclass(slots=True)
class Member:
    """What is known of another member.

    Attributes:
        heard_s: when it was heard of last, seconds since the epoch. None: not in this life.
        count: entries in its table, as it said last. None: it did not.
        equal: whether its table was ours when it last said what stands for it. None: it did not.
        differing: buckets that differed when its sums were seen last.
        next_bucket: where its parts are gone on with; those that no exchange makes equal must not stop the others.
        stale: whether it said last that its table counts for little.
        dropped: its messages that were dropped, by kind of fault.
    """

    heard_s: float | None = None
    count: int | None = None
    equal: bool | None = None
    differing: int = 0
    next_bucket: int = 0
    stale: bool = False
    dropped: Counter[str] = field(default_factory=Counter)


class Outcome(NamedTuple):
    """What came of a message, or of a change.

    Attributes:
        letters: to be sent, after the changes were stored.
    """

    changed: Sequence[str] = ()
    letters: Sequence[Letter] = ()


class Replica:
    """The table of one member, kept the same as those of the others. One thread.

    Attributes:
        foreign_count: messages of senders that are no members.
        heard: see above; to be stored.
    """

    def __init__(
        self, name: str, others: Iterable[str], table: Table, clock: Clock, heard: tuple[float, Stamp] | None = None
    ) -> None:
        self.name: Final = name
        self.table: Final = table
        self.clock = clock
        self.members: Final = {other: Member() for other in others}
        self.foreign_count = 0
        self.heard = heard
        self._stale = False

    def change(self, key: str, value: str | None, now_s: float) -> Outcome:
        """Enter a change that was made here."""
        entry = version(self.clock.next(now_s), value, ends_s(key, value), self.table.get(key), now_s)
        changed = self.table.merge([(key, entry)], now_s)
        return Outcome(changed, self._to_all(Changes([(key, entry)]), lasting=True))

    def tick(self, now_s: float) -> Outcome:
        """Do what is due every `COMPARE_S`: forget what has ended, and compare with all."""
        self._look_stale(now_s)
        gone = [*self.table.forget(now_s), *self._come_back(now_s)]
        return Outcome(gone, self._to_all(self._compare(), lasting=False))

    def compare_with(self, name: str) -> Letter:
        """Return the comparison for one member: it has just been reached."""
        return Letter(name, encode(self._compare()), lasting=False)

    @property
    def stale(self) -> bool:
        """Whether it was away for so long that the tables of others count in place of its own."""
        return self._stale

    def received(self, sender: str, octets: bytes, now_s: float) -> Outcome:
        """Take a message of another member; what is wrong with one is counted, and it changes nothing."""
        member = self.members.get(sender)
        if member is None:
            self.foreign_count += 1
            return Outcome()
        try:
            message = decode(octets)
        except RemoteProtocolError as error:
            member.dropped[error.code] += 1
            return Outcome()
        self._look_stale(now_s)
        member.heard_s = now_s
        outcome = self._take(sender, member, message, now_s)
        if not self._stale:
            self.heard = now_s, self.clock.last
        return outcome

    def _take(self, sender: str, member: Member, message: Message, now_s: float) -> Outcome:
        if isinstance(message, Changes):
            changed, again = self._merge(member, message.entries, now_s)
            return Outcome(changed, again)
        if isinstance(message, Compare):
            member.count, member.stale = message.count, message.stale
            member.equal = message.root == self.table.root()
            if member.equal:
                self._stale, member.differing = False, 0
                return Outcome()
            return Outcome((), [Letter(sender, encode(Sums(self.table.sums)), lasting=False)])
        if isinstance(message, Sums):
            numbers = self.table.differing(message.sums)
            member.differing = len(numbers)
            left = [number for number in numbers if number >= member.next_bucket]
            if not left:  # all were gone through; the next comparison begins anew
                member.next_bucket = 0
                return Outcome()
            return Outcome((), [Letter(sender, encode(self._part(member, left[:PART_BUCKETS])), lasting=False)])
        return self._take_part(sender, member, message, now_s)

    def _take_part(self, sender: str, member: Member, part: Part, now_s: float) -> Outcome:
        member.stale = part.stale
        changed, letters = self._merge(member, part.entries, now_s)
        if self._stale and not part.stale and self.heard is not None:
            stay = {key for key, _ in part.entries}
            changed = [*changed, *self.table.take_over(part.numbers, stay, self.heard[1])]
        if not part.answer:
            answer = self._part(member, part.numbers, answer=True)
            return Outcome(changed, [*letters, Letter(sender, encode(answer), lasting=False)])
        member.differing = max(0, member.differing - len(part.numbers))
        member.next_bucket = part.numbers[-1] + 1 if part.numbers and member.differing else 0
        if member.next_bucket:  # there may be more
            letters = [*letters, self.compare_with(sender)]
        return Outcome(changed, letters)

    def _merge(
        self, member: Member, entries: Sequence[tuple[str, Entry]], now_s: float
    ) -> tuple[list[str], list[Letter]]:
        """Merge entries; return the keys that changed, and what is made again because of them."""
        sound = [item for item in entries if not item[1].stamp.ahead(now_s)]
        if len(sound) < len(entries):
            member.dropped["future"] += len(entries) - len(sound)
        for _, entry in sound:
            self.clock.saw(entry.stamp)
        overtaken = [(key, own, entry) for key, entry in sound if (own := self.table.get(key)) is not None]
        changed = self.table.merge(sound, now_s)
        letters: list[Letter] = []
        for key, own, entry in overtaken:
            if self.table.get(key) == entry and self._unknowing(own, entry, now_s):
                letters += self.change(key, own.value, now_s).letters
        return changed, letters

    def _unknowing(self, own: Entry, entry: Entry, now_s: float) -> bool:
        """Return whether a ban of ours was cut short by one whose maker did not know of it."""
        if own.stamp.node != self.name or not own.counts(now_s) or entry.value is None or own == entry:
            return False
        remembered_s = min(own.ends_s, entry.stamp.ms / 1000 + MEMORY_S - _SLACK_S)
        return entry.ends_s < own.ends_s and entry.kept_until_s < remembered_s

    def _part(self, member: Member, numbers: Sequence[int], *, answer: bool = False) -> Part:
        """Return our part of the first of some buckets, as many as go into one message, at least one.

        While we are stale, one that is not gets only what was changed here since.
        """
        since = self.heard[1] if self._stale and not member.stale and self.heard is not None else None
        taken: list[int] = []
        entries: list[tuple[str, Entry]] = []
        room = PAGE_BYTES
        for number in numbers:
            items = [item for item in self.table.bucket(number) if since is None or item[1].stamp > since]
            room -= sum(size_of(entry) for _, entry in items)
            if taken and room < 0:
                break
            taken.append(number)
            entries += items
        return Part(taken, entries, answer, self._stale)

    def _come_back(self, now_s: float) -> list[str]:
        """Stamp anew what was changed while our clock was far ahead: all others refuse it; return its keys."""
        if not self.clock.last.ahead(now_s):
            return []
        entries = list(self.table.items())
        wrong = [item for item in entries if item[1].stamp.ahead(now_s)]
        sound = (entry.stamp for _, entry in entries if not entry.stamp.ahead(now_s))
        self.clock = Clock(self.name, max(sound, default=None))
        for key, entry in sorted(wrong, key=lambda item: item[1].stamp):
            self.table.replace(key, replace(entry, stamp=self.clock.next(now_s)))
        if self.heard is not None:
            self.heard = min(self.heard[0], now_s), self.clock.last
        return [key for key, _ in wrong]

    def _compare(self) -> Compare:
        return Compare(self.table.root(), len(self.table), self._stale)

    def _look_stale(self, now_s: float) -> None:
        if self.heard is not None and now_s - self.heard[0] > MEMORY_S and len(self.table):
            self._stale = True

    def _to_all(self, message: Message, *, lasting: bool) -> list[Letter]:
        octets = encode(message)
        return [Letter(name, octets, lasting) for name in self.members]
