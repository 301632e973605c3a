"""The newest value of each key of a log: what a newcomer gets, and all that a viewer that is behind has to get (pure).

Values are kept in the order of their messages, each in a slot; a newer value of a key empties the slot of the one
before it, and once most slots are empty the rest is copied together. So what a viewer that has everything before some
message still has to get is what the slots from there on hold: counted by a slice, whatever was published meanwhile.
Values hold no entry of the log, which would keep all that came after it.

Written by the publisher's thread, read by any without a lock: see `StreamLog.waiting`.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import Final, NamedTuple

from flowctl.errors import LocalProtocolError

_LEAST_EMPTY: Final = 64
"""Empty slots that are left alone: copying less together is not worth it."""


class Value(NamedTuple):
    """The newest message of a key.

    Attributes:
        sequence: number of messages of the log before it.
        after: number of those that have no key: it is handed over behind them.
        wire: the message.
        since: when it was published, in seconds.
        key: its key.
    """

    sequence: int
    after: int
    wire: bytes
    since: float
    key: str


class _Slots(NamedTuple):
    sequences: list[int]
    sizes: list[int]  # wire bytes; 0: empty
    values: list[Value | None]


class LatestValues:
    """The newest value of each key. The publisher's thread, but for what only looks.

    Args:
        name: of the log.
        max_keys: most keys.
        max_bytes: most wire bytes of all values together.

    Attributes:
        begun: number of messages of the log, the one that is being appended included.
        size_bytes: wire bytes of all values.
    """

    __slots__ = ("_places", "_slots", "begun", "max_bytes", "max_keys", "name", "size_bytes")

    def __init__(self, name: str, max_keys: int, max_bytes: int) -> None:
        self.name = name
        self.max_keys = max_keys
        self.max_bytes = max_bytes
        self.begun = 0
        self.size_bytes = 0
        self._places: dict[str, int] = {}  # slot by key
        self._slots = _Slots([], [], [])

    def __len__(self) -> int:
        return len(self._places)

    def check(self, key: str, size_bytes: int) -> None:
        """Raise LocalProtocolError where a value of `size_bytes` for `key` is not within the limits."""
        place = self._places.get(key)
        if place is None and len(self._places) >= self.max_keys:
            raise LocalProtocolError(
                f"log {self.name!r} has {self.max_keys} keys, its limit (max_keys): {key!r:.60} is one too many",
                hint="forget() keys that are over, or make the log with a higher limit",
            )
        size = self.size_bytes + size_bytes - (0 if place is None else self._slots.sizes[place])
        if size > self.max_bytes:
            raise LocalProtocolError(
                f"the values of log {self.name!r} would be {size} bytes with the new one of {key!r:.60}, "
                f"the limit (max_value_bytes) is {self.max_bytes}",
                hint="forget() keys that are over, or make the log with a higher limit",
            )

    def put(self, value: Value) -> None:
        """Take `value`, which is within the limits, in place of the one before it."""
        self._empty(value.key)
        sequences, sizes, values = self._slots
        if len(values) > 2 * len(self._places) + _LEAST_EMPTY:
            kept = [item for item in values if item is not None]
            self._slots = _Slots([item.sequence for item in kept], [len(item.wire) for item in kept], [*kept])
            self._places = {item.key: place for place, item in enumerate(kept)}
            sequences, sizes, values = self._slots
        self._places[value.key] = len(values)
        self.size_bytes += len(value.wire)
        sequences.append(value.sequence)
        sizes.append(len(value.wire))
        values.append(value)

    def forget(self, key: str) -> None:
        """Forget the value of `key`, if there is one."""
        self._empty(key)

    def _empty(self, key: str) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            _, sizes, values = self._slots
            self.size_bytes -= sizes[place]
            sizes[place], values[place] = 0, None

    def figures(self, start: int) -> tuple[int, int]:
        """Return (messages, wire bytes) of the values from message number `start` on. Any thread."""
        slots = self._slots
        sizes = slots.sizes[bisect_left(slots.sequences, start) :]
        return len(sizes) - sizes.count(0), sum(sizes)

    def first(self, start: int) -> Value | None:
        """Return the first value from message number `start` on. Any thread."""
        slots = self._slots
        waiting = islice(slots.values, bisect_left(slots.sequences, start), None)
        return next((value for value in waiting if value is not None), None)

    def values(self, start: int = 0) -> list[Value]:
        """Return the values from message number `start` on, in the order of their messages. Any thread."""
        slots = self._slots
        return [value for value in slots.values[bisect_left(slots.sequences, start) :] if value is not None]
