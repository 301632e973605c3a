"""What a viewer of a log is refused: from which message on which classes, and the wait for a key frame (pure).

What is refused changes at a *gate* of the log: from that entry on, it is a bit mask of classes for each reason. That
makes the queue of a slow viewer a subtraction: between two gates, the refused messages of a class are the difference of
the entries' totals. Only a viewer that lags has any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from flowctl.core.flow.policy import BROKEN_MASK, KEY_WAIT_S
from flowctl.core.flow.state import CLASS_COUNT, MessageClass
from flowctl.core.outgoing.streamlog import Entry
from flowctl.reasons import DropReason

_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER
_ITEMS: Final = tuple(
    tuple(item for item in range(CLASS_COUNT) if mask >> item & 1) for mask in range(1 << CLASS_COUNT)
)
"""The classes of each mask."""

Refused = tuple[list[int], DropReason]
"""(figures, reason)."""


class DropRefusal(NamedTuple):
    """Classes that are refused, each for the reason that came first: what was reported must not change its name.

    Attributes:
        mask: the classes, as bits by `MessageClass`.
        parts: (bits, reason); no class is in two of them.
    """

    mask: int = 0
    parts: tuple[tuple[int, DropReason], ...] = ()

    def and_also(self, mask: int, reason: DropReason) -> DropRefusal:
        """Return these, and the classes in `mask`; those that are refused already keep their reason."""
        new = mask & ~self.mask
        return DropRefusal(self.mask | new, (*self.parts, (new, reason))) if new else self


_NOTHING: Final = DropRefusal()


@dataclass(eq=False, slots=True)
class RefusalGate:
    """From `start` on, messages are refused as `refusal` says.

    `restart` holds messages to hand over right before `start`, waiting since `since`.
    """

    start: Entry
    refusal: DropRefusal
    restart: tuple[bytes, ...]
    since: float


class Refusals:
    """What is refused at one cursor's place and ahead of it.

    A gate that the cursor has reached is kept as a mask alone: it must not hold the log from its start on, for a
    viewer may stay behind one for hours.

    Attributes:
        ahead: gates that the cursor has not reached, in order.
    """

    __slots__ = ("ahead", "here")

    def __init__(self) -> None:
        self.here = _NOTHING
        self.ahead: tuple[RefusalGate, ...] = ()  # most have one or two, and a list takes twice as much

    def add(self, start: Entry, mask: int, reason: DropReason, restart: tuple[bytes, ...], since: float) -> None:
        """From `start` on, where no gate lies behind, refuse just `mask`."""
        ahead = self.ahead
        if ahead and ahead[-1].start is start:
            restart, ahead = ahead[-1].restart + restart, ahead[:-1]
        if restart or mask != (ahead[-1].refusal if ahead else self.here).mask:
            ahead = (*ahead, RefusalGate(start, _NOTHING.and_also(mask, reason), restart, since))
        self.ahead = ahead

    def tighten(self, start: Entry, at: Entry, extra: int, reason: DropReason, now: float) -> None:
        """From `start` on, which is not behind the cursor's place `at`, refuse `extra` as well."""
        index = 0
        while index < len(self.ahead) and self.ahead[index].start.sequence < start.sequence:
            index += 1
        if start.sequence <= at.sequence:
            self.here = self.here.and_also(extra, reason)
        elif index == len(self.ahead) or self.ahead[index].start is not start:
            before = self.ahead[index - 1].refusal if index else self.here
            self.ahead = (*self.ahead[:index], RefusalGate(start, before, (), now), *self.ahead[index:])
        for gate in self.ahead[index:]:
            gate.refusal = gate.refusal.and_also(extra, reason)

    def arrive(self, sequence: int) -> list[RefusalGate]:
        """Put in force the gates up to `sequence`, where the cursor is now; return those with messages to hand over."""
        passed = []
        while self.ahead and self.ahead[0].start.sequence <= sequence:
            gate, self.ahead = self.ahead[0], self.ahead[1:]
            self.here = gate.refusal
            if gate.restart:
                passed.append(gate)
        return passed

    def cut(self, sequence: int) -> list[RefusalGate]:
        """Forget the gates from `sequence` on, and return them: their messages will not be handed over."""
        lost = []
        while self.ahead and self.ahead[-1].start.sequence >= sequence:
            lost.append(self.ahead[-1])
            self.ahead = self.ahead[:-1]
        return lost

    def _stretches(self, first: Entry, last: Entry) -> list[tuple[DropRefusal, Entry, Entry]]:
        """Return (what is refused, from where, up to where) from `first`, the cursor's place, up to `last`."""
        refusal, start, stretches = self.here, first, []
        for gate in self.ahead:
            if gate.start.sequence >= last.sequence:
                break
            stretches.append((refusal, start, gate.start))
            refusal, start = gate.refusal, gate.start
        if last.sequence > start.sequence:
            stretches.append((refusal, start, last))
        return stretches

    def between(self, first: Entry, last: Entry) -> list[Refused]:
        """Return what is refused from `first` up to `last`, as figures by reason."""
        refused: list[Refused] = []
        for refusal, start, end in self._stretches(first, last):
            for mask, reason in refusal.parts:
                figures = None
                for item in _ITEMS[mask]:
                    if count := end.counts[item] - start.counts[item]:
                        figures = figures or [0] * (2 * CLASS_COUNT)
                        figures[item] = count
                        figures[item + CLASS_COUNT] = end.sizes[item] - start.sizes[item]
                if figures is not None:
                    refused.append((figures, reason))
        return refused

    def load_between(self, first: Entry, last: Entry) -> tuple[int, int]:
        """Return (wire bytes, messages) of what `between` returns, which is asked for with every write."""
        size = messages = 0
        for refusal, start, end in self._stretches(first, last):
            for item in _ITEMS[refusal.mask]:
                messages += end.counts[item] - start.counts[item]
                size += end.sizes[item] - start.sizes[item]
        return size, messages

    def restarts(self) -> list[bytes]:
        return [wire for gate in self.ahead for wire in gate.restart]

    def restarts_at(self, key: Entry) -> bool:
        """Return whether restart messages are to be handed over before `key`."""
        return any(gate.start is key and gate.restart for gate in self.ahead)


def frames_before(entry: Entry) -> int:
    return entry.counts[_KEY] + entry.counts[_INTER]


class KeyWait:
    """Inter frames are refused until the first key frame from some place in the log on."""

    __slots__ = ("_frames", "_gop", "_key", "least_s", "lost", "mask", "reason", "since", "start")

    def __init__(self, start: Entry, since: float, mask: int = BROKEN_MASK, *, lost: bool) -> None:
        self.since = since
        self.least_s = KEY_WAIT_S
        self.reason = DropReason.KEY_WAIT
        self.mask = mask
        self.lost = lost
        self._move(start)

    def _move(self, start: Entry) -> None:
        # Where `start` is the log's tail, another thread may just be making a key frame of it: its group tells.
        gop = start.gop
        self._key = start if gop.key_sequence == start.sequence else None
        self._gop = gop
        self._frames = frames_before(start)
        self.start = start.sequence

    @classmethod
    def after(cls, key: Entry) -> KeyWait:
        """Return a wait for the key frame after `key`, with nothing lost yet."""
        wait = cls(key, key.enqueued_at, lost=False)
        wait._key = None
        wait._frames += 1
        wait.start += 1
        return wait

    @property
    def key(self) -> Entry | None:
        return self._key or self._gop.next_key

    def broken_at(self, end: Entry) -> bool:
        """Return whether a frame that others may refer to was lost before `end`."""
        return self.lost or frames_before(end) > self._frames

    def rebase(self, start: Entry) -> None:
        """Wait from `start` on instead: key frames before it were lost too, or do not count. Holds no older entry."""
        self.lost = self.broken_at(start)
        self._move(start)
