"""The directory of published names over all workers (pure): rules between publishers, who keeps a name, who follows.

They are those of one hub (`flowctl.live.hub`), with workers in the place of threads: a name is claimed before it is
published, and what changes is told to the workers that it concerns. A worker that has gone has left all it had; its
publishers may be back within the grace time, in another worker too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowctl.live.config import SecondPublisher
from flowctl.live.owner import Owner

MOST_NAMES: Final = 100_000
"""Names that are published, kept or viewed at a time: as many as ten workers have streams."""
_MOST_STANDBY: Final = 8
"""Publishers that may stand by for one name, as in one hub."""


class Verdict(enum.Enum):
    """What becomes of a claim."""

    GRANTED = "granted"
    STANDS_BY = "stands by"
    REFUSED = "refused"
    ASK = "ask"  #: its owner has it already: whether that publisher has fallen silent decides


class Told(enum.Enum):
    """What a worker is told."""

    WHERE = "where"  #: which worker has the stream; 0: none
    TURN = "turn"  #: the publisher on standby is the one that counts now
    REVOKED = "revoked"  #: another publisher has taken the name


class Holder(NamedTuple):
    """A publisher."""

    worker: int
    number: int


class Notice(NamedTuple):
    """Something a worker is to be told.

    Attributes:
        value: the worker that has the stream, or the number of the connection.
        keep: of WHERE without a worker: the name is kept for its owner, so the stream has not ended yet.
    """

    worker: int
    told: Told
    name: str
    value: int
    keep: bool = False


class Decision(NamedTuple):
    """What becomes of a claim, and who is told.

    Attributes:
        why: it was refused, in words for the client.
        limit: that it would have gone over. Empty: none.
    """

    verdict: Verdict
    why: str = ""
    limit: str = ""
    notices: tuple[Notice, ...] = ()
    holder: Holder | None = None


@dataclass(slots=True)
class _Entry:
    """One name.

    Attributes:
        holder: who publishes. None: nobody.
        owner: of `holder`, or of the one for whom the name is kept.
        shown: the worker that those who view it were told; 0: none.
        standby: who waits for a turn, and whose they are, in order.
    """

    holder: Holder | None = None
    owner: Owner | None = None
    kept_until: float | None = None
    kept_for: str = ""
    shown: int = 0
    standby: dict[Holder, Owner] = field(default_factory=dict)
    viewed_by: dict[int, None] = field(default_factory=dict)


class Rules(NamedTuple):
    """What holds between the publishers of a name; see `Directory`."""

    policy: SecondPublisher
    grace_s: float
    per_address: int


class Directory:
    """The names of one server.

    Not locked: its owner has one thread.
    """

    def __init__(
        self,
        policy: SecondPublisher = SecondPublisher.REFUSE,
        grace_s: float = 3.0,
        per_address: int = 8,
        rules: Callable[[str], Rules] | None = None,
    ) -> None:
        same = Rules(policy, grace_s, per_address)
        self._rules: Final = rules or (lambda _: same)
        self._names: Final[dict[str, _Entry]] = {}
        self._held: Final[dict[int, set[str]]] = {}  # names in which a worker takes any part
        self._published_from: Final[dict[str, int]] = {}  # by address, those on standby included
        self._kept_for: Final[dict[str, int]] = {}  # names kept, by address
        self._kept: Final[dict[str, float]] = {}  # until when, soonest first

    def __len__(self) -> int:
        return len(self._names)

    def published(self) -> dict[str, int]:
        """Return the worker of each name that is published."""
        return {name: entry.holder.worker for name, entry in self._names.items() if entry.holder is not None}

    def holder_of(self, name: str) -> Holder | None:
        """Return who publishes `name`. None: nobody."""
        entry = self._names.get(name)
        return None if entry is None else entry.holder

    # -- publishers

    def claim(self, name: str, holder: Holder, owner: Owner, now: float, *, silent: bool | None = None) -> Decision:
        """Decide who has `name`."""
        self.expire(now)
        entry = self._names.get(name)
        if entry is None and len(self._names) >= MOST_NAMES:
            return Decision(Verdict.REFUSED, f"too many streams, the limit is {MOST_NAMES}", limit="streams")
        entry = entry or _Entry()
        decision = self._judge(name, entry, holder, owner, silent=silent)
        if decision.verdict in (Verdict.REFUSED, Verdict.ASK):
            return decision
        over = self._over(name, entry, owner, replaces=decision.verdict is Verdict.GRANTED)
        if over is not None:
            return over
        self._names[name] = entry
        self._part(holder.worker, name)
        self._published_from[owner.address] = self._published_from.get(owner.address, 0) + 1
        if decision.verdict is Verdict.STANDS_BY:
            entry.standby[holder] = owner
            return decision
        notices = []
        if entry.holder is not None and entry.owner is not None:
            before = entry.holder
            self._count_down(entry.owner)
            notices.append(Notice(before.worker, Told.REVOKED, name, before.number))
        notices += self._begin(name, entry, holder, owner)
        return decision._replace(notices=tuple(notices))

    def _judge(self, name: str, entry: _Entry, holder: Holder, owner: Owner, *, silent: bool | None) -> Decision:
        """Decide by the rules between publishers."""
        known, policy = entry.owner is not None and entry.owner.same(owner), self._rules(name).policy
        if entry.holder is None:
            if entry.kept_until is not None and policy is SecondPublisher.REFUSE and not known:
                return _refused(f"stream {name} is kept for its publisher, which may be back")
            return Decision(Verdict.GRANTED)
        if holder == entry.holder or holder in entry.standby:
            return Decision(Verdict.REFUSED, f"this connection publishes stream {name} already")
        if policy is SecondPublisher.REPLACE or (known and silent):
            return Decision(Verdict.GRANTED)
        if known and silent is None:
            return Decision(Verdict.ASK, holder=entry.holder)
        if policy is SecondPublisher.REFUSE:
            return _refused(f"stream {name} is being published already")
        if len(entry.standby) >= _MOST_STANDBY:
            return _over_limit("standby_publishers", len(entry.standby) + 1, _MOST_STANDBY)
        return Decision(Verdict.STANDS_BY)

    def _over(self, name: str, entry: _Entry, owner: Owner, *, replaces: bool) -> Decision | None:
        """Return the refusal of one address that publishes too much. None: it does not."""
        count, was = self._published_from.get(owner.address, 0), entry.owner
        # The one that is replaced gives its place up: its owner may have no other.
        freed = replaces and entry.holder is not None and was is not None and was.address == owner.address
        most = self._rules(name).per_address
        if most and count - freed >= most:
            return _over_limit("publishers_per_address", count - freed + 1, most)
        return None

    def release(self, name: str, holder: Holder, now: float, *, grace: bool) -> list[Notice]:
        """Take a publication out; who stands by has its turn, or the name is kept, or free."""
        notices = self.expire(now)
        entry = self._names.get(name)
        if entry is None:
            return notices
        waiting = entry.standby.pop(holder, None)
        if waiting is not None:
            self._count_down(waiting)
        elif entry.holder == holder and entry.owner is not None:
            self._count_down(entry.owner)
            entry.holder = None
            notices += self._follow_up(name, entry, now, grace=grace)
        self._forget(name, entry, holder.worker)
        return notices

    def _follow_up(self, name: str, entry: _Entry, now: float, *, grace: bool) -> list[Notice]:
        """Let the next publisher have its turn, or keep the name, or let it go."""
        if entry.standby:
            following = next(iter(entry.standby))
            owner = entry.standby.pop(following)
            return [
                Notice(following.worker, Told.TURN, name, following.number),
                *self._begin(name, entry, following, owner),
            ]
        last, rules = entry.owner, self._rules(name)
        if grace and rules.grace_s and last is not None and self._may_keep(last.address, rules):
            entry.kept_until, entry.kept_for = now + rules.grace_s, last.address
            self._keep(name, entry.kept_until)
            self._kept_for[last.address] = self._kept_for.get(last.address, 0) + 1
            return []
        entry.owner = None
        return self._show(name, entry, 0)

    def _may_keep(self, address: str, rules: Rules) -> bool:
        """As many names are kept for an address as it may publish."""
        return not rules.per_address or self._kept_for.get(address, 0) < rules.per_address

    def _keep(self, name: str, until: float) -> None:
        """Keep a name; those that are kept less long than others have their place before them."""
        last = next(reversed(self._kept.values()), until)
        self._kept[name] = until
        if until < last:
            ordered = sorted(self._kept.items(), key=lambda item: item[1])
            self._kept.clear()
            self._kept.update(ordered)

    def _begin(self, name: str, entry: _Entry, holder: Holder, owner: Owner) -> list[Notice]:
        self._keep_no_longer(name, entry)
        entry.holder, entry.owner = holder, owner
        return self._show(name, entry, holder.worker)

    def _keep_no_longer(self, name: str, entry: _Entry) -> None:
        if entry.kept_until is not None:
            entry.kept_until = None
            self._kept.pop(name, None)
            _decrease(self._kept_for, entry.kept_for)
            entry.kept_for = ""

    def _show(self, name: str, entry: _Entry, worker: int, *, keep: bool = False) -> list[Notice]:
        """Tell those who view it where it is."""
        entry.shown = worker
        return [Notice(viewer, Told.WHERE, name, worker, keep) for viewer in entry.viewed_by]

    def _count_down(self, owner: Owner) -> None:
        _decrease(self._published_from, owner.address)

    # -- viewers

    def view(self, name: str, worker: int, now: float) -> list[Notice]:
        """A worker has viewers of `name`: it is told where that is, now and whenever it changes."""
        notices = self.expire(now)
        entry = self._names.get(name)
        if entry is None:
            if len(self._names) >= MOST_NAMES:
                return notices
            entry = self._names[name] = _Entry()
        entry.viewed_by[worker] = None
        self._part(worker, name)
        keep = entry.kept_until is not None and not entry.shown
        return [*notices, Notice(worker, Told.WHERE, name, entry.shown, keep)]

    def unview(self, name: str, worker: int) -> None:
        """A worker has no viewers of `name` any more."""
        entry = self._names.get(name)
        if entry is not None:
            entry.viewed_by.pop(worker, None)
            self._forget(name, entry, worker)

    # -- ends

    def worker_gone(self, worker: int, now: float) -> list[Notice]:
        """A worker has ended, with all that it had; its publishers may be back within the grace time."""
        notices = self.expire(now)
        for name in self._held.pop(worker, ()):
            entry = self._names[name]
            entry.viewed_by.pop(worker, None)
            for holder in [item for item in entry.standby if item.worker == worker]:
                self._count_down(entry.standby.pop(holder))
            if entry.holder is not None and entry.holder.worker == worker and entry.owner is not None:
                self._count_down(entry.owner)
                entry.holder = None
                notices += self._follow_up(name, entry, now, grace=True)
            if entry.shown == worker:  # kept for an owner that was there: its place has gone
                notices += self._show(name, entry, 0, keep=entry.kept_until is not None)
            self._forget(name, entry, worker)
        return notices

    def expire(self, now: float) -> list[Notice]:
        """Let go of the names whose owners have not come back in time."""
        notices: list[Notice] = []
        for name, until in list(_due(self._kept, now)):
            del until
            entry = self._names[name]
            worker = entry.shown
            self._keep_no_longer(name, entry)
            entry.owner = None
            notices += self._show(name, entry, 0)
            self._forget(name, entry, worker)
        return notices

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do, in seconds on the caller's clock. None: never."""
        return next(iter(self._kept.values()), None)

    def _part(self, worker: int, name: str) -> None:
        self._held.setdefault(worker, set()).add(name)

    def _forget(self, name: str, entry: _Entry, worker: int) -> None:
        """Drop what is not needed any more: the part of `worker` in the name, and the name."""
        parts = {*entry.viewed_by, *(holder.worker for holder in entry.standby), entry.shown}
        if entry.holder is not None:
            parts.add(entry.holder.worker)
        if worker not in parts and worker in self._held:
            self._held[worker].discard(name)
        if entry.holder is None and entry.kept_until is None and not (entry.standby or entry.viewed_by):
            self._names.pop(name, None)
            for names in self._held.values():  # of workers too whose part had ended before
                names.discard(name)


def _due(kept: dict[str, float], now: float) -> Iterator[tuple[str, float]]:
    for name, until in kept.items():
        if until > now:
            return
        yield name, until


def _decrease(counts: dict[str, int], key: str) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


def _refused(why: str) -> Decision:
    return Decision(Verdict.REFUSED, why)


def _over_limit(limit: str, value: int, most: int) -> Decision:
    return Decision(Verdict.REFUSED, f"{limit} is {value}, the limit is {most}", limit)
