"""How the demonstration is shown while it runs: a live table on a terminal, lines of text elsewhere.

Both go to standard error; standard output is for the report.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from flowctl.core.flow.state import SendState
from flowctl.core.text.output import say
from flowctl.core.text.printable import printable
from flowctl.demo.plan import Kind
from flowctl.demo.watch import Watched
from flowctl.log import use_colours
from flowctl.units import format_count, format_duration, format_size

_COLOURS: Final = {
    SendState.READY: "green",
    SendState.OVERLOADED: "yellow",
    SendState.SOFT_LIMIT: "dark_orange",
    SendState.HARD_LIMIT: "red",
}
_LINE_EVERY_S: Final = 5.0
_WHY_CHARS: Final = 170
_FRAME_LINES: Final = 8
"""Lines of a screen that are no rows: title, frame and heads, the healthy viewers, and what is said above."""


class Display(Protocol):
    """Shows the demonstration while it runs."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show no more."""

    def say(self, text: str) -> None:
        """Show one line of text."""

    def show(self, at_s: float, viewers: list[Watched], changed: list[Watched]) -> None:
        """Show where everybody is, `at_s` seconds after the first viewer joined."""


def choose_display(*, table: bool) -> Display:
    """Return the live table if that is wanted and standard error is a terminal, else lines."""
    return TableDisplay() if table and sys.stderr.isatty() else LineDisplay()


def _queue(watched: Watched) -> str:
    load = watched.load
    if not load.messages:
        return "-"
    count = format_count(load.messages, "message")
    return f"{format_size(load.size_bytes)}, {count}, {format_duration(load.age_ms / 1000)}"


def _drops(watched: Watched) -> str:
    return ", ".join(f"{count} {name}" for name, count in watched.dropped.items()) or "0"


def _healthy_row(viewers: list[Watched]) -> tuple[str, str, str, str, str]:
    """Return the healthy viewers as one row: twenty equal ones would hide the others."""
    healthy = [watched for watched in viewers if watched.plan.kind is Kind.HEALTHY]
    there = [watched for watched in healthy if watched.cut is None]
    states = ", ".join(
        f"{count} {state.name}" for state in SendState if (count := sum(watched.state is state for watched in there))
    )
    largest = max((watched.load.size_bytes for watched in there), default=0)
    drops = sum(watched.dropped_total for watched in healthy)
    gone = len(healthy) - len(there)
    missing = sum(watched.picture_share < 1 for watched in there)
    why = f"{gone} have left" if gone else f"{missing} miss pictures" if missing else "keeping up"
    return f"{len(healthy)} healthy", states or "-", f"largest {format_size(largest)}", str(drops), why


def _row(watched: Watched) -> tuple[str, str, str, str, str]:
    state = "-" if watched.state is None else watched.state.name
    if watched.picture_share < 1:
        state += f", {watched.picture_share:.0%}"  # of the pictures
    if watched.cut is not None:
        state = f"{'cut' if watched.was_cut else 'left'} after {format_duration(watched.connected_s)}"
    # The state stands in a column of its own.
    why = watched.why.partition("; ")[2] or watched.why
    return watched.plan.label, state, _queue(watched), _drops(watched), why[:_WHY_CHARS]


def _cell(text: str) -> str:
    return escape(printable(text))


class TableDisplay:
    """A table that is drawn anew with each look."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, no_color=not use_colours(sys.stderr))
        self._live = Live(console=self._console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Show a line above the table."""
        self._console.print(printable(text), markup=False, highlight=False)

    def show(self, at_s: float, viewers: list[Watched], changed: list[Watched]) -> None:
        """Draw the table."""
        del changed
        table = Table(title=f"flowctl demo, {at_s:.0f} s", title_justify="left", expand=True)
        # One line for each: what does not fit is cut, so that the last kind of viewer is on the screen too.
        for name, width in (("viewer", 11), ("state", 16), ("queue", 14), ("dropped", 7)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("why", ratio=1, no_wrap=True)
        table.add_row(*map(_cell, _healthy_row(viewers)), style="green")
        others = [watched for watched in viewers if watched.plan.kind is not Kind.HEALTHY]
        room = max(self._console.size.height - _FRAME_LINES, 1)
        for watched in others[:room]:
            style = "red" if watched.cut is not None else _COLOURS[watched.state or SendState.READY]
            label, state, _, _, why = _row(watched)
            queue = f"{format_size(watched.load.size_bytes)}" if watched.load.messages else "-"
            table.add_row(*map(_cell, (label, state, queue, str(watched.dropped_total), why)), style=style)
        if len(others) > room:
            table.add_row(f"and {len(others) - room} more")
        self._live.update(table)


class LineDisplay:
    """One line per change, and one for the healthy ones and for each that misses pictures from time to time."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Write the line."""
        say(text, to_stderr=True)

    def show(self, at_s: float, viewers: list[Watched], changed: list[Watched]) -> None:
        """Write what has changed."""
        for watched in changed:
            if watched.plan.kind is not Kind.HEALTHY or watched.dropped_total:
                self._line(at_s, _row(watched))
        if at_s >= self._next_at:
            self._next_at = at_s + _LINE_EVERY_S
            self._line(at_s, _healthy_row(viewers))
            for watched in viewers:
                if watched.picture_share < 1 and watched.cut is None and watched not in changed:
                    self._line(at_s, _row(watched))

    def _line(self, at_s: float, row: tuple[str, str, str, str, str]) -> None:
        label, state, queue, drops, why = row
        self.say(f"{at_s:5.1f} s  {label:<12} {state:<18} queue {queue}; dropped {drops}; {why}")
