"""Which measurements are made, in which order, and where they are kept: an interrupted run goes on where it stopped.

Contenders take turns at each point, forwards and backwards by repetition, so that whatever the machine does meanwhile
hurts all of them. Each measurement is appended to a file of JSON lines as soon as it is made. When the plan is done the
file becomes the record of the run, and the next run begins anew.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PATIENT: Final = "flowctl, 120 ms"
"""flowctl at about the delay of Node-Media-Server: cost is to be compared at equal delay."""
VIEWERS: Final = (100, 1000, 4000)
BIT_RATES: Final = (600_000, 2_500_000)
LAZY_S: Final = 0.04
"""Pause of a lazy crowd. A crowd that reads at once has to be woken for each write that finds it asleep, and on
loopback the server's processor time pays for that: with viewers elsewhere it would not. The truth for many small writes
lies between the two, so one point is measured with both. The measured viewers always read at once."""
_RAMP_PER_S: Final = 900.0
"""Viewers that connect per second, for the estimate of what a measurement takes."""
_PATIENT_VIEWERS: Final = 1000
"""The crowd at which flowctl is measured at Node-Media-Server's delay as well."""
_FIXED_S: Final = 8.5
"""Start, publisher's cache, settling and end of a measurement, for the estimate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison.

    Args:
        lazy_viewers: those of them that are measured once more with a crowd that reads in rounds, see `LAZY_S`.
        settle_s: head start of the publisher, and pause before the window.
        flush_s: flush interval of flowctl, or its ceiling, in seconds.
        everywhere: whether the patient flowctl is measured with every crowd, not only with a thousand viewers.
    """

    contenders: tuple[str, ...]
    viewers: tuple[int, ...] = VIEWERS
    lazy_viewers: tuple[int, ...] = (1000,)
    bit_rates: tuple[int, ...] = BIT_RATES
    repeat: int = 3
    window_s: float = 6.0
    settle_s: float = 2.5
    flush_s: float = 0.04
    measured: int = 20
    everywhere: bool = False

    def items(self) -> Iterator[Item]:
        """Yield all measurements in order: whole repetitions one after the other, so that each part is a whole."""
        for repetition in range(self.repeat):
            for bit_rate in self.bit_rates:
                crowds = [(viewers, 0.0) for viewers in self.viewers]
                crowds += [(viewers, LAZY_S) for viewers in self.viewers if viewers in self.lazy_viewers]
                for viewers, nap_s in crowds:
                    turn = self.contenders if repetition % 2 == 0 else self.contenders[::-1]
                    for name in turn:
                        if name == PATIENT and not self.everywhere and (viewers != _PATIENT_VIEWERS or nap_s):
                            continue
                        yield Item(name=name, viewers=viewers, bit_rate=bit_rate, repetition=repetition, nap_s=nap_s)

    def identity(self, commit: str) -> dict[str, Any]:
        """Return what two runs must have in common for one to go on with the other's measurements."""
        return {
            "window_s": self.window_s,
            "settle_s": self.settle_s,
            "flush_s": self.flush_s,
            "measured": self.measured,
            "commit": commit,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One measurement of a plan.

    Args:
        nap_s: pause of the crowd between two rounds of reading, in seconds.
    """

    name: str
    viewers: int
    bit_rate: int
    repetition: int
    nap_s: float = 0.0

    def estimate_s(self, window_s: float) -> float:
        """Return about how long it takes, before anything is known of this machine."""
        return _FIXED_S + window_s + self.viewers / _RAMP_PER_S

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.viewers:,} viewers, {self.bit_rate / 1e6:g} Mbit/s, repetition {self.repetition + 1}"
        )


class Store:
    """The measurements made so far, in a file of JSON lines."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = identity
        self.found: dict[Item, dict[str, Any]] = {}
        for line in path.read_text("utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the run was interrupted while it wrote this one: it is made again
            if record["identity"] == identity:
                self.found[Item(**record["item"])] = record["figures"]

    def add(self, item: Item, figures: dict[str, Any]) -> None:
        """Keep a measurement, on the disk before anything else is done."""
        self.found[item] = figures
        self.path.parent.mkdir(parents=True, exist_ok=True)
        broken = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            record = {"item": dataclasses.asdict(item), "identity": self.identity, "figures": figures}
            # A line that was cut short must not swallow this one.
            file.write(("\n" if broken and file.tell() else "") + json.dumps(record) + "\n")

    def finish(self) -> None:
        """Give up what has been kept: the run is complete."""
        self.path.unlink(missing_ok=True)


class Progress:
    """Says how far a plan is, and how long it still takes."""

    def __init__(self, items: list[Item], window_s: float, clock: Any = time.monotonic) -> None:
        self._left = dict.fromkeys(items)
        self._window_s = window_s
        self._clock = clock
        self._began = clock()
        self._done_estimate_s = 0.0

    def done(self, item: Item) -> None:
        """Note that `item` has been measured."""
        del self._left[item]
        self._done_estimate_s += item.estimate_s(self._window_s)

    @property
    def left_s(self) -> float:
        """Seconds that what is left will take: the estimate, corrected by how it was wrong so far."""
        estimate = sum(item.estimate_s(self._window_s) for item in self._left)
        factor = (self._clock() - self._began) / self._done_estimate_s if self._done_estimate_s else 1.0
        return estimate * factor

    def __str__(self) -> str:
        minutes = self.left_s / 60
        return f"{len(self._left)} left, about " + (f"{minutes:.0f} min" if minutes >= 1 else f"{self.left_s:.0f} s")
