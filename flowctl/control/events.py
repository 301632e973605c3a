"""What `flow.events` tells: what happened since the last time that one asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowctl.live.server import LiveServer


def events(server: LiveServer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the events after a cursor, and the cursor to go on from.

    A cursor has ``run:number`` for each process of the server, with commas between them.
    """
    recent, known = server.recent, cursors_of(asked["since"])
    # A process that a cursor does not know is new, and has all to tell.
    number = known.get(recent.run, 0) if known else None
    found, last, lost = recent.since(number, asked["limit"])
    return {"events": found, "cursor": f"{recent.run}:{last}", "lost": lost}


def cursors_of(text: str) -> dict[str, int]:
    """Return the numbers of a cursor by run; parts that are none are left out."""
    parts = (part.partition(":") for part in text.split(","))
    return {run: int(number) for run, _, number in parts if run and number.isascii() and number.isdecimal()}
