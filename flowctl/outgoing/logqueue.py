"""The queue that a viewer of a stream log has without owning one: a place in the log, gates, and a lane (pure).

What lies between the place and the log's tail is queued, less what the *gates* refuse (see
`flowctl.outgoing.gates`). What goes
out before the entry at the place (restart messages, control messages of a part that was skipped) stands in the *lane*.
Lengths and accounts by class are subtractions of totals, one per gate. What is decided about the queue, and when, is
in `flowctl.outgoing.cursor`.
"""

from __future__ import annotations

from operator import add, sub
from typing import Final

from flowctl.flow.counts import NO_FIGURES, Counts, Figures, Tally
from flowctl.flow.state import CLASS_COUNT, MessageClass
from flowctl.outgoing.gates import Gates
from flowctl.outgoing.lane import Lane
from flowctl.outgoing.streamlog import Entry, Place, StreamLog, subtract
from flowctl.reasons import DropReason

CONTROL: Final = MessageClass.CONTROL
HEADER: Final = MessageClass.HEADER


class LogQueue:
    """Place, gates, lane and accounts of one viewer. Not thread-safe: its Sender's lock guards it.

    The log may grow meanwhile, on the publisher's thread: each method reads the tail once, after the place.

    Args:
        log: the log.
        start: the first entry that is for this viewer.
        now: time in seconds; a message is at most as old for this viewer as its joining.
    """

    __slots__ = (
        "_base_counts",
        "_base_sizes",
        "_dropped",
        "_extra",
        "_gates",
        "_lane",
        "_stop",
        "joined_at",
        "log",
        "place",
    )

    def __init__(self, log: StreamLog, start: Entry, now: float) -> None:
        self.log = log
        self.place = Place(start)  # shared with the cohort while in one
        self.joined_at = now
        self._stop: Entry | None = None  # where to end: nothing published after is for this viewer
        self._base_counts = start.counts
        self._base_sizes = start.sizes
        # The rest is made when first needed: most viewers never lag.
        self._gates: Gates | None = None
        self._lane: Lane | None = None
        self._extra: Tally | None = None  # messages that are not entries: the restart messages
        self._dropped: dict[DropReason, Tally] | None = None

    @property
    def entry(self) -> Entry:
        """The entry to be handed over next, after the lane."""
        return self.place.entry

    @property
    def copied(self) -> tuple[int, int]:
        """(wire bytes, messages) that wait in the lane: what is queued but not read from the log."""
        lane = self._lane
        return (0, 0) if lane is None else (lane.size_bytes, len(lane))

    @property
    def late(self) -> int:
        """Messages that were left out for being late so far."""
        tally = self._dropped.get(DropReason.LATE) if self._dropped is not None else None
        return 0 if tally is None else sum(tally.messages)

    def load(self) -> tuple[int, int]:
        """Return (wire bytes, messages) that are queued and not refused."""
        return self._load_between(self.place.entry, self._tail())

    def _load_between(self, entry: Entry, end: Entry) -> tuple[int, int]:
        size, messages = end.offset - entry.offset, end.sequence - entry.sequence
        gates, lane = self._gates, self._lane
        if gates is not None:
            for counts, sizes, _ in gates.refused(entry, end):
                size -= sum(sizes)
                messages -= sum(counts)
            restarts = gates.restarts()
            size += sum(map(len, restarts))
            messages += len(restarts)
        if lane is not None:
            size += lane.size_bytes
            messages += len(lane)
        return size, messages

    def accounts(self) -> tuple[Counts, dict[DropReason, Counts], Counts]:
        """Return (accepted, dropped by reason, queued) of one instant, however fast the log grows.

        accepted is everything this viewer was offered: entries since it joined, and restart messages. dropped includes
        what is refused ahead of the cursor. What is neither dropped nor queued was handed over.
        """
        entry, tail = self.place.entry, self._tail()
        gates, lane = self._gates, self._lane
        accepted = Tally()
        accepted.add_all(subtract(tail.counts, self._base_counts), subtract(tail.sizes, self._base_sizes))
        if self._extra is not None:
            accepted.add_all(self._extra.messages, self._extra.sizes)
        queued = Tally()
        queued.add_all(subtract(tail.counts, entry.counts), subtract(tail.sizes, entry.sizes))
        dropped = {reason: tally.frozen() for reason, tally in (self._dropped or {}).items()}
        for counts, sizes, reason in gates.refused(entry, tail) if gates is not None else ():
            queued.add_all([-item for item in counts], [-item for item in sizes])
            refused = Counts(tuple(counts), tuple(sizes))
            dropped[reason] = dropped[reason] + refused if reason in dropped else refused
        for wire in gates.restarts() if gates is not None else ():
            queued.add(HEADER, len(wire))
        if lane is not None:
            queued.add_all(lane.tally.messages, lane.tally.sizes)
        return accepted.frozen(), dropped, queued.frozen()

    def figures(self) -> tuple[Figures, Figures, Figures]:
        """Return the same as one row of figures each, dropped summed up over its reasons: a third of the work."""
        entry, tail = self.place.entry, self._tail()
        gates, lane = self._gates, self._lane
        end = (*tail.counts, *tail.sizes)
        accepted = tuple(map(sub, end, (*self._base_counts, *self._base_sizes)))
        queued = tuple(map(sub, end, (*entry.counts, *entry.sizes)))
        dropped = NO_FIGURES
        if self._extra is not None:
            accepted = tuple(map(add, accepted, self._extra))
        for tally in (self._dropped or {}).values():
            dropped = tuple(map(add, dropped, tally))
        for counts, sizes, _ in gates.refused(entry, tail) if gates is not None else ():
            refused = (*counts, *sizes)
            queued = tuple(map(sub, queued, refused))
            dropped = tuple(map(add, dropped, refused))
        ahead = [*lane.tally] if lane is not None else [*NO_FIGURES]
        for wire in gates.restarts() if gates is not None else ():
            ahead[HEADER] += 1
            ahead[HEADER + CLASS_COUNT] += len(wire)
        return accepted, dropped, tuple(map(add, queued, ahead))

    # -- inside: moving

    def _tail(self) -> Entry:
        return self._stop or self.log.tail

    def _arrive(self) -> None:
        """Put in force the gates that the cursor has reached, and hand over their restart messages."""
        gates = self._gates
        if gates is not None and gates.ahead:
            for gate in gates.arrive(self.place.entry.sequence):
                for wire in gate.restart:
                    self._push(HEADER, wire, gate.since)

    def _drop_up_to(self, end: Entry, reason: DropReason, *, kept: tuple[MessageClass, ...] = (CONTROL,)) -> None:
        """Move the cursor to `end`, counting what lies between, and the lane, as dropped.

        Classes in `kept` go into the lane, in order: control messages always, headers where no restart will bring
        newer ones; otherwise those count as dropped, being superseded.
        """
        if self._lane is not None:
            self._lane.drop_all_but(kept, self._tally(reason))
            self._tidy_lane()
        start = self.place.entry
        if end.sequence > start.sequence:
            counts, sizes = subtract(end.counts, start.counts), subtract(end.sizes, start.sizes)
            for refused_counts, refused_sizes, why in self._gates.refused(start, end) if self._gates else ():
                self._tally(why).add_all(refused_counts, refused_sizes)
                counts = [a - b for a, b in zip(counts, refused_counts, strict=True)]
                sizes = [a - b for a, b in zip(sizes, refused_sizes, strict=True)]
            self._walk(end, reason, kept, keep_any=any(counts[item] for item in kept))
            for item in kept:
                counts[item] = sizes[item] = 0
            self._tally(reason).add_all(counts, sizes)
        self._arrive()

    def _walk(self, end: Entry, reason: DropReason, kept: tuple[MessageClass, ...], *, keep_any: bool) -> None:
        """Move the cursor to `end`; entries of classes in `kept`, if there are any, go into the lane."""
        gates, place = self._gates, self.place
        steps = keep_any or (gates is not None and any(gate.restart for gate in gates.ahead))
        while steps and place.entry is not end:
            entry = place.entry
            for gate in gates.arrive(entry.sequence) if gates is not None else ():
                if HEADER in kept:
                    for wire in gate.restart:
                        self._push(HEADER, wire, gate.since)
                else:
                    self._lose(gate.restart, reason)
            if entry.message_class in kept:
                self._push(entry.message_class, entry.wire, entry.enqueued_at)
            if entry.next is None:
                raise AssertionError("walked past the log's end")
            place.entry = entry.next
        place.entry = end

    # -- inside: refusing and counting

    def _open(
        self,
        start: Entry,
        mask: int,
        reason: DropReason,
        restart: tuple[bytes, ...],
        now: float,
        *,
        offered: bool = False,
    ) -> None:
        """From `start` on, where no gate lies behind, refuse just `mask`; hand `restart` over before it."""
        if not offered:
            self._offer_restart(restart)
        if self._gates is None:
            if not mask and not restart:
                return
            self._gates = Gates()
        self._gates.add(start, mask, reason, restart, now)
        self._arrive()

    def _refuse_from(self, start: Entry, mask: int, reason: DropReason, now: float) -> None:
        """From `start` on, refuse `mask` as well as what is refused already."""
        if self._gates is None:
            self._gates = Gates()
        self._gates.tighten(start, self.place.entry, mask, reason, now)

    def _offer_restart(self, wires: tuple[bytes, ...]) -> None:
        """Count restart messages as offered; they are not entries of the log."""
        if wires and self._extra is None:
            self._extra = Tally()
        for wire in wires:
            if self._extra is not None:
                self._extra.add(HEADER, len(wire))

    def _lose(self, wires: tuple[bytes, ...], reason: DropReason) -> None:
        """Count restart messages that will not be handed over."""
        for wire in wires:
            self._tally(reason).add(HEADER, len(wire))

    def _push(self, message_class: MessageClass, wire: bytes, since: float) -> None:
        """Hand `wire` over before the entry at the cursor."""
        if self._lane is None:
            self._lane = Lane()
        self._lane.push(message_class, wire, max(since, self.joined_at))

    def _tidy_lane(self) -> None:
        if self._lane is not None and not len(self._lane):
            self._lane = None

    def _tally(self, reason: DropReason) -> Tally:
        if self._dropped is None:
            self._dropped = {}
        return self._dropped.setdefault(reason, Tally())
