"""How the demonstration is shown while it runs: who is in which state, what waits for it, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.markup import escape
from rich.table import Table

from flowctl.core.flow.state import SendState
from flowctl.core.text.printable import printable
from flowctl.demo.plan import ViewerKind
from flowctl.demo.watch import WatchedViewer
from flowctl.load.results.table import Display
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


def _healthy_row(viewers: list[WatchedViewer]) -> tuple[str, str, str, str, str]:
    """Return the healthy viewers as one row: twenty equal ones would hide the others."""
    healthy = [watched for watched in viewers if watched.plan.kind is ViewerKind.HEALTHY]
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


def _row(watched: WatchedViewer) -> tuple[str, str, str, str, str]:
    state = "-" if watched.state is None else watched.state.name
    if watched.picture_share < 1:
        state += f", {watched.picture_share:.0%}"  # of the pictures
    if watched.cut is not None:
        state = f"{'cut' if watched.was_cut else 'left'} after {format_duration(watched.connected_s)}"
    load, queue = watched.load, "-"
    if load.messages:
        count = format_count(load.messages, "message")
        queue = f"{format_size(load.size_bytes)}, {count}, {format_duration(load.age_ms / 1000)}"
    drops = ", ".join(f"{count} {name}" for name, count in watched.dropped.items()) or "0"
    # The state stands in a column of its own.
    why = watched.why.partition("; ")[2] or watched.why
    return watched.plan.label, state, queue, drops, why[:_WHY_CHARS]


class ViewerDisplay(Display):
    """A table of the viewers; elsewhere a line for each change, and now and then for all that are not well."""

    _next_at = 0.0

    def looked(self, at_s: float, viewers: list[WatchedViewer], changed: list[WatchedViewer]) -> None:
        self.show(lambda: self._table(at_s, viewers), lambda: self._lines(at_s, viewers, changed))

    def _table(self, at_s: float, viewers: list[WatchedViewer]) -> Table:
        table = Table(title=f"flowctl demo, {at_s:.0f} s", title_justify="left", expand=True)
        # One line for each: what does not fit is cut, so that the last kind of viewer is on the screen too.
        for name, width in (("viewer", 11), ("state", 16), ("queue", 14), ("dropped", 7)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("why", ratio=1, no_wrap=True)

        def add(cells: tuple[str, ...], style: str) -> None:
            table.add_row(*(escape(printable(cell)) for cell in cells), style=style)

        add(_healthy_row(viewers), "green")
        others = [watched for watched in viewers if watched.plan.kind is not ViewerKind.HEALTHY]
        room = max(self.console.size.height - _FRAME_LINES, 1) if self.console is not None else len(others)
        for watched in others[:room]:
            label, state, queue, _, why = _row(watched)
            cells = (label, state, queue.partition(",")[0], str(watched.dropped_total), why)
            add(cells, "red" if watched.cut is not None else _COLOURS[watched.state or SendState.READY])
        if len(others) > room:
            table.add_row(f"and {len(others) - room} more")
        return table

    def _lines(self, at_s: float, viewers: list[WatchedViewer], changed: list[WatchedViewer]) -> Iterator[str]:
        rows = [_row(item) for item in changed if item.plan.kind is not ViewerKind.HEALTHY or item.dropped_total]
        if at_s >= self._next_at:
            self._next_at = at_s + _LINE_EVERY_S
            unwell = (item for item in viewers if item.picture_share < 1 and item.cut is None and item not in changed)
            rows += [_healthy_row(viewers), *map(_row, unwell)]
        for label, state, queue, drops, why in rows:
            yield f"{at_s:5.1f} s  {label:<12} {state:<18} queue {queue}; dropped {drops}; {why}"
