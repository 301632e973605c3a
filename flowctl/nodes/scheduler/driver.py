"""Time for a scheduler: one timer on the loop of a poll group, or on any loop of asyncio."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

from flowctl.errors import ConfigError
from flowctl.pollgroup import PollGroup


class Driver:
    """Calls a scheduler when it is time."""

    __slots__ = ("_clock", "_disarmed", "_due", "_handle", "_runner")

    def __init__(
        self, runner: PollGroup | asyncio.AbstractEventLoop, clock: Callable[[], float], due: Callable[[], None]
    ) -> None:
        if not (isinstance(runner, PollGroup) or hasattr(runner, "call_soon_threadsafe")):
            raise ConfigError(
                f"a {type(runner).__name__} cannot drive a scheduler",
                hint="give a PollGroup that was started, or a loop of asyncio",
            )
        self._runner: Final = runner
        self._clock: Final = clock
        self._due: Final = due
        self._disarmed = False
        self._handle: asyncio.TimerHandle | None = None  # only on the loop's thread

    @property
    def ended(self) -> bool:
        runner = self._runner
        return (runner.loop if isinstance(runner, PollGroup) else runner).is_closed()

    def arm(self, when: float) -> None:
        """Have `due` called at `when`, seconds on the clock, instead of at the time asked for before; any thread."""
        self._post(self._set, when)

    def disarm(self) -> None:
        self._disarmed = True
        self._post(self._cancel)

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        if isinstance(self._runner, PollGroup):
            self._runner.call_soon(callback, *args)
        else:
            self._runner.call_soon_threadsafe(callback, *args)

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set(self, when: float) -> None:
        self._cancel()
        if not self._disarmed:
            # Rounded up to the resolution of loops, or it would come too early and be set again.
            delay_s = math.ceil(max(0.0, when - self._clock()) * 1000) / 1000
            self._handle = self._runner.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if not self._disarmed:
            self._due()
