"""Who holds the input of a connection, what they allow, and how long it has been going on.

A set of owners, not a counter: the same owner may say "hold" twice and "let go" once, and nobody can let go of what
another holds. Nothing here locks; `flowctl.receiver.Receiver` guards it with its own lock, and makes it only when
input is held for the first time, which for most viewers is never.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from flowctl.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Hashable

#: Holders at a time. They are parts of the program (sender, policy, publication), so more is a leak of owners.
MAX_HOLDERS: Final = 64

#: Reasons counted by name, and the name under which further ones are counted: a reason with a number in it must not
#: grow the table for ever.
MAX_REASONS: Final = 16
OTHER_REASONS: Final = "other"


class InputMode(IntEnum):
    """What the holders, taken together, allow to be read."""

    BULK = 0  #: everything: nobody holds
    CONTROL = 1  #: control bytes: all holders grant some
    STOPPED = 2  #: nothing: a holder grants none


class _Holder(NamedTuple):
    reason: str
    control_bytes: int


class InputHolds:
    """The holders of one connection's input, with counts by reason and times."""

    __slots__ = ("_holders", "_longest_s", "_paused_s", "_since", "pauses")

    def __init__(self) -> None:
        self._holders: dict[Hashable, _Holder] = {}
        self._since: float | None = None  # when the first of the present holders came
        self._paused_s = 0.0  # time of the pauses that are over
        self._longest_s = 0.0  # the longest of them
        self.pauses: Final[dict[str, int]] = {}  #: how often input was held, by reason

    def add(self, owner: Hashable, reason: str, control_bytes: int, now: float) -> bool:
        """Enter `owner`, or replace its reason and grant; True if it is new.

        Raises:
            LocalProtocolError: there are `MAX_HOLDERS` others.
        """
        before = self._holders.get(owner)
        if before is None and len(self._holders) >= MAX_HOLDERS:
            raise LocalProtocolError(f"input is held by {MAX_HOLDERS} owners already")
        self._holders[owner] = _Holder(reason, control_bytes)
        if before is None or before.reason != reason:
            key = reason if reason in self.pauses or len(self.pauses) < MAX_REASONS else OTHER_REASONS
            self.pauses[key] = self.pauses.get(key, 0) + 1
        if self._since is None:
            self._since = now
        return before is None

    def discard(self, owner: Hashable, now: float) -> bool:
        """Strike out `owner`; True if it held."""
        if self._holders.pop(owner, None) is None:
            return False
        if not self._holders:
            self._close_pause(now)
        return True

    def clear(self, now: float) -> None:
        """Strike out everybody: the connection is at its end."""
        self._holders.clear()
        self._close_pause(now)

    def verdict(self) -> tuple[InputMode, int]:
        """Return what is allowed, and how many control bytes per interval: the smallest grant."""
        if not self._holders:
            return InputMode.BULK, 0
        cap = min(holder.control_bytes for holder in self._holders.values())
        return (InputMode.CONTROL, cap) if cap else (InputMode.STOPPED, 0)

    def held_by(self) -> dict[str, int]:
        """Return the reasons of the present holders and how many give each."""
        counts: dict[str, int] = {}
        for holder in self._holders.values():
            counts[holder.reason] = counts.get(holder.reason, 0) + 1
        return counts

    def times(self, now: float) -> tuple[float, float]:
        """Return seconds held in total and at the longest, the present pause included."""
        lasting_s = 0.0 if self._since is None else max(0.0, now - self._since)
        return self._paused_s + lasting_s, max(self._longest_s, lasting_s)

    def _close_pause(self, now: float) -> None:
        self._paused_s, self._longest_s = self.times(now)
        self._since = None
