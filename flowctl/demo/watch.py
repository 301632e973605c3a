"""Watches the demonstration's viewers at the server: where each is now, where it has been, and how it ended.

The server knows a viewer by its address; each peer of the crowd has one of its own. An attacker may have several
connections: each is watched. It looks at them a few times a second, so a state that lasted shorter may not be seen, but
nothing is lost by that: times, drops and the end come from the server's own account of each connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from rich.markup import escape
from rich.table import Table

from flowctl.connection import Connection
from flowctl.core.flow.state import EMPTY_LOAD, Load, SendState
from flowctl.core.sending.figures import SenderStatistics
from flowctl.core.text.printable import printable
from flowctl.demo.plan import ViewerKind, ViewerPlan
from flowctl.live.access.request import RequestKind
from flowctl.live.hub import Viewer
from flowctl.live.observer import Observer
from flowctl.load.results.table import Display
from flowctl.reasons import CloseReason
from flowctl.units import format_count, format_duration, format_size


class EndedViewer(NamedTuple):
    """A viewer that has gone."""

    number: int
    host: str
    reason: CloseReason
    details: str
    sender: SenderStatistics
    connected_s: float


@dataclass(slots=True)
class WatchedViewer:
    """One viewer as the server sees it."""

    plan: ViewerPlan
    state: SendState | None = None
    load: Load = EMPTY_LOAD
    peak_bytes: int = 0
    peak_age_ms: float = 0.0  # the oldest message seen in its queue
    dropped: dict[str, int] = field(default_factory=dict)  # messages dropped for it, by class and summed over reasons
    reasons: dict[str, int] = field(default_factory=dict)
    # seconds in READY, OVERLOADED, SOFT_LIMIT and HARD_LIMIT
    time_in_states_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    picture_share: float = 1.0
    why: str = "joining"  # the server's words for its present state
    connected_s: float = 0.0
    cut: str | None = None  # why the server ended its connection, or how it ended otherwise. None: it is there.
    cut_details: str = ""

    def update(self, connection: Connection) -> None:
        sender = connection.sender.statistics()
        self.load = sender.load
        self.why = connection.why()
        self.connected_s = connection.now() - connection.opened_at
        self._note_figures(sender)

    def end(self, viewer: EndedViewer) -> None:
        self.load = EMPTY_LOAD
        self.connected_s = viewer.connected_s
        self.cut = viewer.reason.value
        self.cut_details = viewer.details
        self.why = f"{viewer.reason.value}: {viewer.details}" if viewer.details else viewer.reason.value
        self._note_figures(viewer.sender)

    def _note_figures(self, sender: SenderStatistics) -> None:
        self.state = sender.state
        self.peak_bytes = max(self.peak_bytes, sender.load.size_bytes)
        self.peak_age_ms = max(self.peak_age_ms, sender.load.age_ms)
        self.time_in_states_s = sender.time_in_states_s
        self.picture_share = sender.picture_share
        dropped: dict[str, int] = {}
        # What was queued when a connection ended is no loss of a viewer that was served until then.
        reasons = {reason: counts for reason, counts in sender.dropped.items() if reason.name not in _AT_THE_END}
        for counts in reasons.values():
            for name, count in counts.by_name().items():
                dropped[name] = dropped.get(name, 0) + count
        self.dropped = dropped
        self.reasons = {reason.value: counts.total_messages for reason, counts in reasons.items()}

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    @property
    def was_cut(self) -> bool:
        """Whether the server ended its connection, rather than the viewer or the end of the demonstration."""
        return self.cut is not None and self.cut not in _NO_CUT

    @property
    def reached(self) -> SendState:
        return max((state for state in SendState if self.time_in_states_s[state] > 0), default=SendState.READY)

    def as_dict(self) -> dict[str, Any]:
        return {
            "state": None if self.state is None else self.state.name,
            "reached": self.reached.name,
            "picture_share": round(self.picture_share, 4),
            "peak_queue_bytes": self.peak_bytes,
            "peak_age_ms": round(self.peak_age_ms),
            "dropped": self.dropped,
            "reasons": self.reasons,
            "time_in_states_s": [round(seconds, 2) for seconds in self.time_in_states_s],
            "connected_s": round(self.connected_s, 2),
            "cut": self.cut,
            "cut_details": self.cut_details,
        }


_AT_THE_END = frozenset({"CLOSED", "UNFOLLOWED"})
_NO_CUT = frozenset(
    reason.value
    for reason in (CloseReason.PEER_CLOSED, CloseReason.PEER_RESET, CloseReason.FINISHED, CloseReason.SHUTDOWN)
)


class ViewerWatch(Observer):
    """All viewers of the demonstration."""

    def __init__(self, viewers: list[ViewerPlan]) -> None:
        # what is known of each; further connections of an attacker are added as they are seen
        self.viewers = [WatchedViewer(viewer) for viewer in viewers]
        self._by_host = {watched.plan.host: watched for watched in self.viewers}
        self._by_connection: dict[int, WatchedViewer] = {}
        self._players: set[int] = set()  # numbers of the connections that have asked to play; any thread
        self._ended: deque[EndedViewer] = deque()  # any thread

    def asked(self, connection: Connection, kind: RequestKind, stream: str, now: float) -> None:
        if kind == "play":
            self._players.add(connection.number)

    def closed(self, connection: Connection, reason: CloseReason, details: str, limit: str | None) -> None:
        if connection.number in self._players:
            sender, open_s = connection.sender.statistics(), connection.now() - connection.opened_at
            self._ended.append(EndedViewer(connection.number, connection.peer[0], reason, details, sender, open_s))

    def _find(self, number: int, host: str) -> WatchedViewer | None:
        """Return the viewer on connection `number` from `host`. None: it is none of ours."""
        watched = self._by_connection.get(number)
        if watched is not None:
            return watched
        first = self._by_host.get(host)
        if first is None:
            return None
        others = sum(item.plan.host == host for item in self._by_connection.values())
        if others:
            watched = WatchedViewer(replace(first.plan, label=f"{first.plan.label} {others + 1}"))
            self.viewers.append(watched)
        else:
            watched = first
        self._by_connection[number] = watched
        return watched

    def update_viewers(self, viewing: Iterable[tuple[str, Viewer]]) -> list[WatchedViewer]:
        """Update all viewers; return those that have changed their state or ended, in their order."""
        changed: list[WatchedViewer] = []
        for _, viewer in viewing:
            watched = self._find(viewer.number, viewer.peer[0])
            if watched is not None and watched.cut is None:
                before = watched.state
                watched.update(viewer.connection)
                if watched.state is not before:
                    changed.append(watched)
        while self._ended:
            ended = self._ended.popleft()
            watched = self._find(ended.number, ended.host)
            if watched is not None and watched.cut is None:
                watched.end(ended)
                changed.append(watched)
        return [watched for watched in self.viewers if any(watched is item for item in changed)]


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

    def show_viewers(self, at_s: float, viewers: list[WatchedViewer], changed: list[WatchedViewer]) -> None:
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
