"""How a run is shown while it goes on: a table that is drawn anew on a terminal, lines elsewhere.

All of it goes to standard error; standard output is for the summary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign, printable
from flowctl.load.results.result import RunSample
from flowctl.log import use_colours
from flowctl.units import format_bit_rate, format_duration, format_size

_MOST_ROWS: Final = 30
"""Profiles shown in a table; a terminal has no room for more, and the hostile ones alone are more."""


_SILENT_S: Final = 5.0
"""Time after which a stream without frames is silent: usual key intervals are two to four seconds."""


class Display:
    """Shows something as it changes; a context."""

    def __init__(self, *, table: bool) -> None:
        shown = table and sys.stderr.isatty()
        # the terminal. None: standard error is none, or no table is wanted.
        self.console = Console(stderr=True, no_color=not use_colours(sys.stderr)) if shown else None
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if shown else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Write a line, above the table where there is one."""
        if self.console is None:
            say(printable(text), to_stderr=True)
        else:
            self.console.print(printable(text), markup=False, highlight=False)

    def show(self, table: Callable[[], Table], lines: Callable[[], Iterable[str]]) -> None:
        if self._live is not None:
            self._live.update(table(), refresh=True)
        else:
            for line in lines():
                self.say(line)


class RunDisplay(Display):
    """Shows a load run."""

    def __init__(self, title: str, profiles: Mapping[str, int], total_s: float, *, table: bool) -> None:
        super().__init__(table=table)
        self._title = title
        self._asked = profiles
        self._total_s = total_s

    def show_sample(self, sample: RunSample) -> None:
        self.show(lambda: self._table(sample), lambda: [self._line(sample)])

    def _left(self, sample: RunSample) -> str:
        left = self._total_s - sample.at_s
        return f"{format_duration(math.ceil(left))} left" if left >= 0.5 else "ending"

    def _table(self, sample: RunSample) -> Table:
        received = f"{format_bit_rate(sample.received_bytes_per_s * 8)}, {sample.frames_per_s:,.0f} frames/s"
        caption = [f"{_delays(sample)} (healthy viewers); received {received}", "; ".join(_loads(sample))]
        table = Table(
            title=escape(f"{foreign(self._title)}: {sample.at_s:.0f} s, {self._left(sample)}"),
            caption=escape("\n".join([*caption, *_trouble(sample)])),
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("profile")
        for name in ("asked for", "connected", "playing", "cut", "failed", "missing"):
            table.add_column(name, justify="right")
        columns = (self._asked, sample.connected, sample.playing, sample.cut, sample.failed, sample.missing)
        # The healthy ones first, since they are what it is about; the others in the order in which they were given.
        for profile in sorted(self._asked, key=lambda name: name != "healthy")[:_MOST_ROWS]:
            counts = [column.get(profile, 0) for column in columns]
            bad = profile == "healthy" and any(counts[3:])
            table.add_row(escape(foreign(profile, 40)), *(f"{count:,}" for count in counts), style="red" if bad else "")
        hidden = len(self._asked) - _MOST_ROWS
        if hidden > 0:
            table.add_row(f"and {hidden} more")
        return table

    def _line(self, sample: RunSample) -> str:
        healthy = f" (healthy {sample.missing['healthy']})" if "healthy" in sample.missing else ""
        parts = [
            f"{sum(sample.connected.values())} of {sum(self._asked.values())} connected",
            f"{sum(sample.playing.values())} playing",
            f"{sum(sample.cut.values())} cut",
            f"{sum(sample.failed.values())} failed",
            f"{sum(sample.missing.values())} frames missing{healthy}",
            _delays(sample),
            *_loads(sample),
            self._left(sample),
            *_trouble(sample),
        ]
        return f"{sample.at_s:6.1f} s  {'; '.join(parts)}"


def _delays(sample: RunSample) -> str:
    delays = (sample.delay_p50_ms, sample.delay_p99_ms)
    p50, p99 = ("-" if value is None else f"{value:.0f} ms" for value in delays)
    return f"delay p50 {p50}, p99 {p99}"


def _loads(sample: RunSample) -> list[str]:
    """Return what server and load tester use now, in words, as far as it is known."""
    loads = []
    if sample.server_cpu_percent is not None:
        size = "" if sample.server_rss_bytes is None else f", {format_size(sample.server_rss_bytes)}"
        fds = "" if sample.server_fds is None else f", {sample.server_fds} descriptors"
        loads.append(f"server {sample.server_cpu_percent:.0f} % of a core{size}{fds}")
    if sample.load_cpu_percent is not None:
        loads.append(f"load tester {sample.load_cpu_percent:.0f} % of a core")
    return loads


def _trouble(sample: RunSample) -> list[str]:
    """Return what one should know before the run is over, in words."""
    if sample.at_s >= _SILENT_S and sample.connected.get("healthy") and not sample.playing.get("healthy"):
        return ["no healthy viewer gets frames: is there a publisher on that stream?"]
    return []
