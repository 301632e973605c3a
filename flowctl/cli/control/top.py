"""``flowctl top``: a table of a running server that redraws itself, the viewers in most trouble first."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from flowctl.cli.control.operations import Key, Server, Timeout, keys_of, timeout_of
from flowctl.cli.control.rowlines import connection_lines
from flowctl.cli.errors import terminable
from flowctl.control.together import CONNECTION_SORTS
from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign
from flowctl.units import format_duration, parse_duration

_STREAM_ROWS: Final = 5
"""Most streams that are shown; the rest of the screen is for connections."""


def top(
    *,
    sort: Annotated[str, typer.Option(metavar="|".join(CONNECTION_SORTS), help="In which order.")] = "worst",
    stream: Annotated[str, typer.Option(help="Streams whose app/stream fits; * and ? stand for any.")] = "*",
    state: Annotated[str | None, typer.Option(help="Only connections in this state; slow: all in trouble.")] = None,
    every: Annotated[str, typer.Option(metavar="DURATION", help="Between two looks.")] = "1s",
    count: Annotated[int, typer.Option(min=0, help="Looks; 0: until interrupted.")] = 0,
    server: Server = None,
    key: Key = None,
    timeout: Timeout = "15s",
    as_json: Annotated[bool, typer.Option("--json", help="Write each look as one line of JSON.")] = False,
) -> None:
    """Show a running server again and again, the worst first.

    That is its streams and its connections. On a terminal the table redraws itself and fits it; elsewhere one look
    follows the other. Ends with Ctrl-C.
    """
    from flowctl.control.client import call_operation
    from flowctl.control.place import find_server

    every_s, timeout_s, keys = max(0.1, parse_duration(every, "--every")), timeout_of(timeout), keys_of(key)
    arguments = {"sort": sort, "stream": stream, "limit": 200 if as_json else 100} | ({"state": state} if state else {})

    def look(address: str) -> dict[str, Any]:
        def call(name: str, **given: Any) -> dict[str, Any]:
            return call_operation(address, name, given, keys=keys, timeout_s=timeout_s)

        figures = call("stats", stream="", viewers="none")
        return {
            "at": round(time.time(), 3),
            "server": figures["server"],
            "streams": call("streams", stream=stream)["streams"],
            **call("connections", **arguments),
        }

    looks = 0
    with terminable(), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        address = find_server(server)
        drawing = not as_json and sys.stdout.isatty()
        draw = _drawing(stack) if drawing else say
        while True:
            found = look(address)
            if as_json:
                say(json.dumps(found))
            else:
                size = shutil.get_terminal_size()
                lines = screen(found, size.columns, size.lines if drawing else 10_000)
                draw("\n".join(lines))
            looks += 1
            if looks == count:
                break
            time.sleep(every_s)


def _drawing(stack: Any) -> Callable[[str], None]:
    """Return what draws a screen in the place of the one before."""
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(screen=True, auto_refresh=False))
    return lambda text: live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


def screen(figures: Mapping[str, Any], columns: int, rows: int) -> list[str]:
    server, streams, connections = figures["server"], figures["streams"], figures["connections"]
    closed = sum(server.get("closed", {}).values())
    lines = [
        (
            f"flowctl top  {server.get('url', '')}  up {format_duration(server.get('up_s', 0))}  "
            f"busy {server.get('busy', 0):.0%}  connections {server['connections']}"
        ),
        f"accepted {server['accepted']}  closed {closed}  refused {sum(server.get('refused', {}).values())}  "
        f"bans {server['bans']}" + ("  DRAINING" if "drains_for_s" in server else ""),
        "",
        f"{'stream':<30} {'viewers':>7} {'ready':>6} {'over':>5} {'SOFT':>5} {'HARD':>5} {'slow':>5}",
    ]
    for row in streams[:_STREAM_ROWS]:
        states = row["states"]
        lines.append(
            f"{foreign(row['stream'], 30):<30} {row['viewers']:>7} {states['READY']:>6} {states['OVERLOADED']:>5} "
            f"{states['SOFT_LIMIT']:>5} {states['HARD_LIMIT']:>5} {row['slow']:>5}"
        )
    room = max(1, rows - len(lines) - 3)
    lines += ["", *connection_lines(connections[:room], columns, widest=True)]
    hidden = figures["found"]["connections"] - min(room, len(connections))
    if hidden > 0:
        lines.append(f"and {hidden} more")
    return [line[:columns] for line in lines[:rows]]


def add_to(app: typer.Typer) -> None:
    app.command("top")(top)
