"""Changes of a running server in order: limits and bans, by files and by commands, with who asked for them.

Others follow these changes: the records, and operators who ask what happened.
Each change has a version, one more than that of the one before. The last `KEPT` are kept; a reader that asks for the
changes since a version of which some are no longer there is told so, and has to compare everything.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flowctl.core.loop.locks import OwnedLock

KEPT: Final = 1024
"""Changes kept: hours of what people do, and a few hundred kilobytes."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a running server."""

    version: int
    at: float  # when it came into force, in seconds since the epoch
    what: str  # ``limits file``, ``bans file``, ``limits``, ``ban``, ``unban`` or ``drain``
    origin: str  # who asked for it, as the caller put it; empty: a file, or an operator who gave no name
    detail: Mapping[str, Any]  # what is in force now, as JSON has it; of a ban all that is known of it


class Changes:
    """The changes of one server. Any thread."""

    def __init__(self, on_error: Callable[[str, Exception], None], wall: Callable[[], float] = time.time) -> None:
        # differs from one start of a server to the next: versions begin anew then
        self.run: Final = secrets.token_hex(8)
        # called with each change, on the thread that made it, one change after the other
        self.listeners: Final[list[Callable[[Change], None]]] = []
        self._on_error: Final = on_error
        self._wall: Final = wall
        self._lock: Final = OwnedLock()
        self._kept: deque[Change] = deque(maxlen=KEPT)  # guarded by _lock
        self._version = 0  # guarded by _lock

    def note(self, what: str, detail: Mapping[str, Any], origin: str = "") -> Change:
        with self._lock:
            self._version += 1
            change = Change(self._version, self._wall(), what, origin, dict(detail))
            self._kept.append(change)
        for listener in tuple(self.listeners):
            try:
                listener(change)
            except Exception as error:  # noqa: BLE001 - the change is made, and others are to hear of it
                self._on_error("a listener of changes", error)
        return change

    @property
    def version(self) -> int:
        with self._lock:
            return self._version

    def since(self, version: int) -> tuple[list[Change], bool]:
        """Return the changes after `version`, oldest first, and whether all of them are there."""
        with self._lock:
            changes = [change for change in self._kept if change.version > version]
            return changes, version <= self._version and len(changes) == self._version - version
