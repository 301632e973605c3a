"""Two peers that come under one identity, told apart by their lives (pure).

Theory of operation. Whoever came last under an identity has it. A connection whose identity another one has taken is
ended by the owner of the listener: its peer notices, connects again, and can be told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

MOST_OUSTED: Final = 4
"""Lives whose identity was taken over that are remembered, for each identity."""
DUPLICATE_HINT: Final = "give each an identity of its own; the one that started last keeps this one"
_TOLD_EVERY_S: Final = 60.0
"""Time between two lines in the log on one identity: those who share it may not heed what they are told."""
_MOST_TOLD: Final = 20
"""Lines in that time on all identities: where there are no keys, anybody may take one after the other."""


class Line(Protocol):
    """One connection of a peer."""

    @property
    def address(self) -> str:
        """Of the peer, for the log."""

    def cut(self) -> None:
        """End the connection, if it is still there."""


@dataclass(slots=True, eq=False)
class IdentityHolder:
    """Who has an identity at a listener: the life (a process, from its start to its end) that came last.

    A life that was taken over and comes again is alive, so there are two of that identity. It is refused: the two do
    not take over from each other.
    """

    count: int = 0  #: times that a life was found that had been taken over
    _life: object = None  #: None, "" and 0: it has not said which
    _line: Line | None = None
    _returned: Line | None = None
    _ousted: dict[object, None] = field(default_factory=dict)
    _told_at: float = -_TOLD_EVERY_S

    @property
    def is_contested(self) -> bool:
        """Whether a life was taken over, which may come again."""
        return bool(self._ousted)

    def came(self, life: object, line: Line | None) -> bool:
        """Note a connection under the identity. False: its life was taken over before."""
        if life in self._ousted:
            return False
        if life != self._life and life and self._life and line != self._line:
            self.bring_back()
        self.accept(life, line)
        return True

    def accept(self, life: object, line: Line | None) -> None:
        if life != self._life and life and self._life:
            self._ousted[self._life] = None
            self._ousted.pop(life, None)
            if len(self._ousted) > MOST_OUSTED:
                del self._ousted[next(iter(self._ousted))]
        self._life, self._line = life, line

    def note_return(self, line: Line | None) -> bool:
        """Note a connection of a life that was taken over; False: it was noted before."""
        if line is not None and line == self._returned:
            return False
        self._returned = line
        self.count += 1
        return True

    def bring_back(self) -> None:
        """Have the one that has the identity connect again: another connection has its route."""
        if self._line is not None:
            self._line.cut()

    def told(self, now: float) -> str:
        """Return what the log has to say of it, at most once a minute; else nothing."""
        if now - self._told_at < _TOLD_EVERY_S:
            return ""
        self._told_at = now
        first, second = (line.address if line else "this process" for line in (self._returned, self._line))
        return f"{first} and {second} ({self.count} so far)"


@dataclass(slots=True, eq=False)
class DuplicateLog:
    """How often two were found under one identity, of all identities, and what is logged of it."""

    count: int = 0
    _since: float = -_TOLD_EVERY_S
    _line_count: int = 0

    def note(self, holder: IdentityHolder, now: float) -> str:
        """Count it; return what the log has to say, or nothing."""
        self.count += 1
        if now - self._since >= _TOLD_EVERY_S:
            self._since, self._line_count = now, 0
        told = holder.told(now) if self._line_count < _MOST_TOLD else ""
        self._line_count += bool(told)
        return told
