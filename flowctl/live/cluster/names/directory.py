"""The directory of published names over all workers (pure): holders and viewers of names, and notices for workers.

The rules are those of one hub (`flowctl.live.namebook`): a name is claimed before it is published, and what changes is
told to the workers that it concerns. A worker that has gone has left all it had; its publishers may be back within the
grace time, in another worker too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from flowctl.errors import LimitExceededError
from flowctl.live.namebook import ClaimVerdict, NameBook, NameRules, Owner, ReleaseOutcome

MOST_NAMES: Final = 100_000
"""Names that may be published or kept, and names that may be viewed: as many as ten workers have streams."""


class NoticeKind(enum.Enum):
    WHERE = "where"  #: which worker has the stream; 0: none
    TURN = "turn"  #: the publisher on standby is the one that counts now
    REVOKED = "revoked"  #: another publisher has taken the name


class Holder(NamedTuple):
    """A publisher: its worker, and the number of its connection."""

    worker: int
    number: int


class Notice(NamedTuple):
    """A message for a worker."""

    worker: int
    told: NoticeKind
    name: str
    value: int  #: the worker that has the stream, or the number of the connection
    keep: bool = False  #: of WHERE without a worker: the name is kept for its owner, so the stream has not ended yet


class Decision(NamedTuple):
    """The outcome of a claim, with the notices that it causes; `holder` is the worker to ask first."""

    verdict: ClaimVerdict
    notices: tuple[Notice, ...] = ()
    holder: Holder | None = None


class Directory:
    """The names of one server.

    Not locked: its owner has one thread.
    """

    def __init__(self, rules: Callable[[str], NameRules]) -> None:
        self._book: Final[NameBook[Holder]] = NameBook(rules)
        self._viewers: Final[dict[str, dict[int, None]]] = {}  # workers that view a name
        self._shown: Final[dict[str, int]] = {}  # the worker that those who view a name were told

    def __len__(self) -> int:
        return len(self._book.entries.keys() | self._viewers.keys())

    def published(self) -> dict[str, int]:
        return {name: entry.holder.worker for name, entry in self._book.entries.items() if entry.holder is not None}

    def holder_of(self, name: str) -> Holder | None:
        return self._book.holder_of(name)

    # -- publishers

    def claim(self, name: str, holder: Holder, owner: Owner, *, silent: bool | None = None) -> Decision:
        """Decide who has `name`; a claim is refused with BusyError or LimitExceededError."""
        if name not in self._book.entries and len(self._book.entries) >= MOST_NAMES:
            raise LimitExceededError("streams", MOST_NAMES + 1, MOST_NAMES)
        verdict, rival = self._book.claim(name, holder, owner, silent=silent)
        if verdict is ClaimVerdict.ASK:
            return Decision(verdict, holder=rival)
        if verdict is ClaimVerdict.STANDS_BY:
            return Decision(verdict)
        revoked = [] if rival is None else [Notice(rival.worker, NoticeKind.REVOKED, name, rival.number)]
        return Decision(verdict, (*revoked, *self._show(name, holder.worker)))

    def release(self, name: str, holder: Holder, now: float, *, grace: bool) -> list[Notice]:
        return self._follow_up(name, self._book.release(name, holder, now, grace=grace))

    def _follow_up(self, name: str, freed: ReleaseOutcome[Holder] | None) -> list[Notice]:
        if freed is None or freed.kept_s:
            return []
        following = freed.following
        if following is None:
            return self._show(name, 0)
        return [Notice(following.worker, NoticeKind.TURN, name, following.number), *self._show(name, following.worker)]

    def _show(self, name: str, worker: int, *, keep: bool = False) -> list[Notice]:
        if worker:
            self._shown[name] = worker
        else:
            self._shown.pop(name, None)
        return [Notice(viewer, NoticeKind.WHERE, name, worker, keep) for viewer in self._viewers.get(name, ())]

    # -- viewers

    def view(self, name: str, worker: int) -> list[Notice]:
        """A worker has viewers of `name`: it is told where that is, now and whenever it changes."""
        if name not in self._viewers and len(self._viewers) >= MOST_NAMES:
            return []
        self._viewers.setdefault(name, {})[worker] = None
        shown = self._shown.get(name, 0)
        return [Notice(worker, NoticeKind.WHERE, name, shown, self._book.is_kept(name) and not shown)]

    def unview(self, name: str, worker: int) -> None:
        viewers = self._viewers.get(name, {})
        viewers.pop(worker, None)
        if not viewers:
            self._viewers.pop(name, None)

    # -- ends

    def worker_gone(self, worker: int, now: float) -> list[Notice]:
        """A worker has ended, with all that it had; its publishers may be back within the grace time."""
        notices: list[Notice] = []
        for name in [name for name, viewers in self._viewers.items() if worker in viewers]:
            self.unview(name, worker)
        for name, entry in tuple(self._book.entries.items()):
            for holder in [item for item in entry.standby if item.worker == worker]:
                self._book.release(name, holder, now, grace=False)
            if entry.holder is not None and entry.holder.worker == worker:
                notices += self._follow_up(name, self._book.release(name, entry.holder, now, grace=True))
        for name in [name for name, shown in self._shown.items() if shown == worker]:
            notices += self._show(name, 0, keep=self._book.is_kept(name))  # its place has gone
        return notices

    def expire(self, now: float) -> list[Notice]:
        notices: list[Notice] = []
        for name in self._book.names_due(now):
            self._book.free_name(name)
            notices += self._show(name, 0)
        return notices
