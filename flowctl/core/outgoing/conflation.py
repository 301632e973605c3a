"""A viewer's place in a log with keys: one that is behind gets the newest value of each key, and no other (pure).

How it works. In the cohort a viewer stands at an entry of the log as any other, and gets every message. Out of it, it
stands at two places: at an entry of the log's list of messages without a key, which are queued, refused and thinned as
in any log; and at the number of a message, from which on the values of the log wait for it (`core.outgoing.waiting`). A
value that is superseded is in the log no more, and so in no queue. So what a stalled viewer holds is what has no key,
and a number, and nothing is done for it while values come.

Both parts are handed over in the order in which they were published: of a key, that is when its newest value was. A
viewer whose line carries less than is published would so get the same keys each time, those that come first in every
round of its publisher. Therefore what waited when it stopped comes before what was published since, and of that, the
keys behind the one at which it stopped come first: all have their turn. Such a viewer has up to three *spans* of
numbers in place of one.

Where control messages or a long queue of which little is left are copied out of the log, those come first.

The newest value of a key is as good as the state of what it stands for: no policy refuses it and none thins it. It is
dropped where the application asks for that (`Sender.thin`), or the viewer leaves.

Values that wait are memory of the log, which all viewers share, and no queue of this one's: no limit of bytes or
messages is for them, or a log with more keys than a queue may have messages would lose each viewer that falls behind
for a moment, again and again. Nor are they too old because a key changes rarely: what counts is the time in which the
viewer got nothing though something waits.
"""

from __future__ import annotations

from operator import add
from typing import Final, cast

from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.streamlog import Entry, KeyedEntry, Place, StreamLog
from flowctl.core.outgoing.waiting import WaitingValues
from flowctl.reasons import DropReason

_DATA: Final = MessageClass.DATA


class ConflatingCursor(LogCursor):
    """One viewer's position in one log with keys. Not thread-safe: its Sender's lock guards it.

    Args:
        latest: whether it gets the newest value of each key first; `start` is the log's end then.
    """

    __slots__ = ("served_at", "values")

    def __init__(
        self,
        log: StreamLog,
        *,
        now: float,
        start: Entry | None = None,
        prefix: tuple[bytes, ...] = (),
        latest: bool = False,
    ) -> None:
        given = None
        if latest and log.latest is not None:
            start, given = log.look(log.latest.amount)
        self.served_at, self.values = now, None
        super().__init__(log, now=now, start=start, prefix=prefix)
        self.stand_alone(given)
        if given is not None:
            self.cached_bytes += given[1]

    def stands_at(self, entry: Entry) -> bool:
        values = self.values
        if values is None or not isinstance(entry, KeyedEntry):
            return super().stands_at(entry)
        self.settle()
        return self.entry is entry.loose and not self.copies and values.stand_at(entry, enters=self.plain)

    def enter(self, place: Place) -> None:
        self._settle_values(cast("KeyedEntry", place.entry), (0, 0))
        self._stand_in(self.log, place)

    def stand_alone(self, given: tuple[int, int] | None = None) -> None:
        entry = cast("KeyedEntry", self.entry)
        self._stand_in(cast("StreamLog", self.log.loose), Place(entry.loose))
        self.values = WaitingValues(self.log, entry, given)
        if isinstance(self.joining_to, KeyedEntry):
            self.joining_to = self.joining_to.loose

    def _stand_in(self, chain: StreamLog, place: Place) -> None:
        """Go on at `place` of `chain`: as much was accepted as up to the present one."""
        self.account.count_from(place.entry, self.account.passed(self.entry))
        self.chain, self.place = chain, place

    def _settle_values(self, end: KeyedEntry, kept: tuple[int, int]) -> None:
        """Count the values up to `end` as those of any message, but for `kept`, which wait on; the rest is gone."""
        values, self.values = self.values, None
        if values is not None:
            accepted, superseded = values.settled(end, kept)
            passed = map(add, self.account.passed(self.entry), accepted)
            self.account.count_from(self.entry, tuple(passed))
            if any(superseded):
                self.account.lost(DropReason.SUPERSEDED).add_figures(superseded)

    def finish(self, now: float) -> None:
        if self.values is not None:
            tail, values = self.values.rest()
            for value in values:
                self.copy_out(value.after)
                self.push_copy(_DATA, value.wire, max(value.since, self.served_at))
            self._settle_values(tail, (len(values), sum(len(value.wire) for value in values)))
        super().finish(now)

    def drop_everything(self, reason: DropReason) -> None:
        if self.values is not None:
            tail, lost = self.values.drop()
            self.account.lost(reason).add_figures(lost)
            self._settle_values(tail, (0, 0))
        super().drop_everything(reason)
