"""How a load run is shown while it runs: a live table on a terminal, a line each second elsewhere.

Both go to standard error; standard output is for the summary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign
from flowctl.load.results.result import Sample
from flowctl.log import use_colours
from flowctl.units import format_bit_rate, format_duration, format_size

_MOST_ROWS: Final = 30
"""Profiles shown in a table; a terminal has no room for more, and the hostile ones alone are more."""


_SILENT_S: Final = 5.0
"""A stream that comes at all has come by then, however long its key interval: two seconds to four are usual."""


class Display(Protocol):
    """Shows a run."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show no more."""

    def show(self, sample: Sample) -> None:
        """Show the run as it is now."""


def choose_display(title: str, profiles: Mapping[str, int], total_s: float, *, table: bool) -> Display:
    """Return the live table if that is wanted and standard error is a terminal, else lines."""
    if table and sys.stderr.isatty():
        return TableDisplay(title, profiles, total_s)
    return LineDisplay(profiles, total_s)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def delays(sample: Sample) -> str:
    """Return the delay of the healthy viewers now, in words."""
    return f"delay p50 {_milliseconds(sample.delay_p50_ms)}, p99 {_milliseconds(sample.delay_p99_ms)}"


def loads(sample: Sample) -> list[str]:
    """Return what server and load tester use now, in words, as far as it is known."""
    found = []
    if sample.server_cpu_percent is not None:
        size = "" if sample.server_rss_bytes is None else f", {format_size(sample.server_rss_bytes)}"
        fds = "" if sample.server_fds is None else f", {sample.server_fds} descriptors"
        found.append(f"server {sample.server_cpu_percent:.0f} % of a core{size}{fds}")
    if sample.load_cpu_percent is not None:
        found.append(f"load tester {sample.load_cpu_percent:.0f} % of a core")
    return found


def trouble(sample: Sample) -> list[str]:
    """Return what one should know before the run is over, in words."""
    healthy = "healthy"
    if sample.at_s >= _SILENT_S and sample.connected.get(healthy) and not sample.playing.get(healthy):
        return ["no healthy viewer gets frames: is there a publisher on that stream?"]
    return []


def _left(sample: Sample, total_s: float) -> str:
    left = total_s - sample.at_s
    return f"{format_duration(math.ceil(left))} left" if left >= 0.5 else "ending"


class TableDisplay:
    """A table that is drawn anew with each sample."""

    def __init__(self, title: str, profiles: Mapping[str, int], total_s: float) -> None:
        self._title = foreign(title)
        self._profiles = profiles
        self._total_s = total_s
        self._console = Console(stderr=True, no_color=not use_colours(sys.stderr))
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def show(self, sample: Sample) -> None:
        """Draw the table."""
        table = Table(
            title=escape(f"{self._title}: {sample.at_s:.0f} s, {_left(sample, self._total_s)}"),
            caption=escape("\n".join(self._caption(sample))),
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("profile")
        for name in ("asked for", "connected", "playing", "cut", "failed", "missing"):
            table.add_column(name, justify="right")
        # The healthy ones first, since they are what it is about; the others in the order in which they were given.
        for profile in sorted(self._profiles, key=lambda name: name != "healthy")[:_MOST_ROWS]:
            counts = [
                counts.get(profile, 0)
                for counts in (
                    self._profiles,
                    sample.connected,
                    sample.playing,
                    sample.cut,
                    sample.failed,
                    sample.missing,
                )
            ]
            bad = profile == "healthy" and any(counts[3:])
            table.add_row(escape(foreign(profile, 40)), *(f"{count:,}" for count in counts), style="red" if bad else "")
        hidden = len(self._profiles) - _MOST_ROWS
        if hidden > 0:
            table.add_row(f"and {hidden} more")
        self._live.update(table, refresh=True)

    def _caption(self, sample: Sample) -> list[str]:
        received = f"{format_bit_rate(sample.received_bytes_per_s * 8)}, {sample.frames_per_s:,.0f} frames/s"
        return [f"{delays(sample)} (healthy viewers); received {received}", "; ".join(loads(sample)), *trouble(sample)]


class LineDisplay:
    """One line per sample."""

    def __init__(self, profiles: Mapping[str, int], total_s: float) -> None:
        self._asked = sum(profiles.values())
        self._total_s = total_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def show(self, sample: Sample) -> None:
        """Write the line."""
        healthy = f" (healthy {sample.missing['healthy']})" if "healthy" in sample.missing else ""
        parts = [
            f"{sum(sample.connected.values())} of {self._asked} connected",
            f"{sum(sample.playing.values())} playing",
            f"{sum(sample.cut.values())} cut",
            f"{sum(sample.failed.values())} failed",
            f"{sum(sample.missing.values())} frames missing{healthy}",
            delays(sample),
            *loads(sample),
            _left(sample, self._total_s),
            *trouble(sample),
        ]
        say(f"{sample.at_s:6.1f} s  {'; '.join(parts)}", to_stderr=True)
