"""What a viewer of a log is refused: from which message on which classes, and the wait for a key frame (pure).

A refusal is a *gate* in the log: from an entry on, a bit mask of classes and the reason. Gates are what makes the
queue of a slow viewer a subtraction: between two gates the refused messages of a class are the difference of the
entries' totals. Only a viewer that lags has any.
"""

from __future__ import annotations

from typing import Final

from flowctl.flow import CLASS_COUNT, MessageClass
from flowctl.policy import BROKEN_MASK, KEY_WAIT_S
from flowctl.reasons import DropReason
from flowctl.streamlog import Entry, subtract

_KEY: Final = MessageClass.KEY
_INTER: Final = MessageClass.INTER

Refused = tuple[list[int], list[int], DropReason]
"""(messages by class, bytes by class, reason)."""


class Gate:
    """From `start` on, messages of the classes in `mask` are refused for `reason`.

    `restart` holds messages to hand over right before `start`, waiting since `since`.
    """

    __slots__ = ("mask", "reason", "restart", "since", "start")

    def __init__(self, start: Entry, mask: int, reason: DropReason, restart: tuple[bytes, ...], since: float) -> None:
        self.start = start
        self.mask = mask
        self.reason = reason
        self.restart = restart
        self.since = since


class Gates:
    """What is refused at one cursor's place and ahead of it.

    A gate that the cursor has reached is kept as a mask alone: it must not hold the log from its start on, for a
    viewer may stay behind one for hours.

    Attributes:
        mask: classes refused at the cursor, as bits by `MessageClass`.
        reason: why.
        ahead: gates that the cursor has not reached, in order.
    """

    __slots__ = ("ahead", "mask", "reason")

    def __init__(self) -> None:
        self.mask = 0
        self.reason = DropReason.REFUSED
        self.ahead: list[Gate] = []

    @property
    def open_wide(self) -> bool:
        """Whether nothing is refused, here or ahead, and nothing is handed over ahead."""
        return not self.mask and not self.ahead

    @property
    def last_mask(self) -> int:
        """What is refused at the log's end."""
        return self.ahead[-1].mask if self.ahead else self.mask

    def add(self, start: Entry, mask: int, reason: DropReason, restart: tuple[bytes, ...], since: float) -> None:
        """From `start` on, where no gate lies behind, refuse just `mask`."""
        ahead = self.ahead
        if ahead and ahead[-1].start is start:
            restart = ahead.pop().restart + restart
        if restart or self.last_mask != mask:
            ahead.append(Gate(start, mask, reason, restart, since))

    def tighten(self, start: Entry, at: Entry, extra: int, reason: DropReason, now: float) -> None:
        """From `start` on, which is not behind the cursor's place `at`, refuse `extra` as well."""
        index = 0
        while index < len(self.ahead) and self.ahead[index].start.sequence < start.sequence:
            index += 1
        if start.sequence <= at.sequence:
            self.reason = self.reason if self.mask else reason
            self.mask |= extra
        elif index == len(self.ahead) or self.ahead[index].start is not start:
            mask = self.ahead[index - 1].mask if index else self.mask
            self.ahead.insert(index, Gate(start, mask, reason, (), now))
        # What was refused before keeps its reason: what has been reported must not change its name.
        for gate in self.ahead[index:]:
            gate.mask |= extra

    def arrive(self, sequence: int) -> list[Gate]:
        """Put in force the gates up to `sequence`, where the cursor is now; return those with messages to hand over."""
        passed = []
        while self.ahead and self.ahead[0].start.sequence <= sequence:
            gate = self.ahead.pop(0)
            self.mask, self.reason = gate.mask, gate.reason
            if gate.restart:
                passed.append(gate)
        return passed

    def cut(self, sequence: int) -> list[Gate]:
        """Forget the gates from `sequence` on, and return them: their messages will not be handed over."""
        lost = []
        while self.ahead and self.ahead[-1].start.sequence >= sequence:
            lost.append(self.ahead.pop())
        return lost

    def refused(self, first: Entry, last: Entry) -> list[Refused]:
        """Return what is refused from `first`, the cursor's place, up to, not including, `last`."""
        result: list[Refused] = []
        mask, reason, start = self.mask, self.reason, first
        for gate in self.ahead:
            if gate.start.sequence >= last.sequence:
                break
            _add_refused(result, mask, reason, start, gate.start)
            mask, reason, start = gate.mask, gate.reason, gate.start
        _add_refused(result, mask, reason, start, last)
        return result

    def restarts(self) -> list[bytes]:
        """Return all messages to hand over ahead."""
        return [wire for gate in self.ahead for wire in gate.restart]


def _add_refused(result: list[Refused], mask: int, reason: DropReason, first: Entry, last: Entry) -> None:
    if not mask or last.sequence <= first.sequence:
        return
    counts, sizes = subtract(last.counts, first.counts), subtract(last.sizes, first.sizes)
    for item in range(CLASS_COUNT):
        if not mask >> item & 1:
            counts[item] = sizes[item] = 0
    result.append((counts, sizes, reason))


def frames_before(entry: Entry) -> int:
    """Return the number of frames before `entry` that others may refer to."""
    return entry.counts[_KEY] + entry.counts[_INTER]


class KeyWait:
    """Inter frames are refused until the first key frame from some place in the log on.

    Args:
        start: the place.
        since: when the wait began, in seconds.
        mask: classes refused meanwhile, whatever the policy says.
        lost: whether a frame is lost already. Without, the wait is for nothing as long as none is published.
        least_s: it is not given up before that, in seconds.
    """

    __slots__ = ("_frames", "_gop", "_key", "least_s", "lost", "mask", "since", "start")

    def __init__(
        self, start: Entry, since: float, mask: int = BROKEN_MASK, *, lost: bool, least_s: float = KEY_WAIT_S
    ) -> None:
        self.since = since
        self.least_s = least_s
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
        """The key frame that was waited for. None: it has not come."""
        return self._key or self._gop.next_key

    def broken_at(self, end: Entry) -> bool:
        """Return whether a frame that others may refer to was lost before `end`."""
        return self.lost or frames_before(end) > self._frames

    def rebase(self, start: Entry) -> None:
        """Wait from `start` on instead: key frames before it were lost too, or do not count. Holds no older entry."""
        self.lost = self.broken_at(start)
        self._move(start)
