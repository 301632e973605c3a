"""Orders of lists of streams and connections (pure): the same in each process and where their lists are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from flowctl.core.flow.state import SendState

Json: TypeAlias = Mapping[str, Any]
Rank: TypeAlias = Callable[[Json], tuple[Any, ...]]


def worst_first(row: Json) -> tuple[Any, ...]:
    return -SendState[row["state"]], row["pictures"], -row["delay_ms"], row["connection"]


def _most(name: str) -> Rank:
    return lambda row: (-row[name], row["connection"])


CONNECTION_SORTS: Final[Mapping[str, Rank]] = {
    "worst": worst_first,
    "delay": _most("delay_ms"),
    "pictures": lambda row: (row["pictures"], row["connection"]),
    "queued": _most("queued_bytes"),
    "dropped": _most("dropped"),
    "sent": _most("sent_bytes"),
    "open": _most("open_s"),
    "number": lambda row: (row["connection"],),
}
"""Orders of connections by name."""
STREAM_SORTS: Final[Mapping[str, Rank]] = {
    "viewers": lambda row: (-row["viewers"], row["stream"]),
    "slow": lambda row: (-row["slow"], -row["viewers"], row["stream"]),
    "in": lambda row: (-row["in_bytes"], row["stream"]),
    "name": lambda row: (row["stream"],),
}
"""Orders of streams by name."""
