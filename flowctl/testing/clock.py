"""A clock that moves only when told."""

from __future__ import annotations

from flowctl.errors import LocalProtocolError


class ManualClock:
    """Time for tests, in seconds; call it to read it.

    Args:
        start: first reading.
    """

    __slots__ = ("_now",)

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time.

        Raises:
            LocalProtocolError: `seconds` is negative; time never runs backwards.
        """
        if seconds < 0:
            raise LocalProtocolError(f"a clock cannot be advanced by {seconds} s")
        self._now += seconds
        return self._now
