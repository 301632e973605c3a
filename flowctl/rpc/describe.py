"""What a node says of itself: `rpc.describe`, a request that is answered with what its caller may call, as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from flowctl.rpc.commands import Command, HandlerKind

CATEGORY: Final = "rpc"
COMMAND: Final = "describe"
MOST_BYTES: Final = 900_000
"""Of one answer, which is to stay below the limit of a message; what is beyond is left out."""
_MOST_SUMMARY: Final = 120


def described(commands: Mapping[bytes, Command], may_call: Callable[[Command], bool]) -> str:
    """Return the commands that the caller may call, with aliases, as JSON.

    ``{"commands": [{"name": ..., "kind": "command" | "request" | "stream", "access": "none" | ..., "summary": ...}]}``
    in the order of their names; the summary is the first line of the handler's docstring.
    """
    entries: list[str] = []
    left = MOST_BYTES
    for name, command in sorted(commands.items()):
        if may_call(command):
            entries.append(json.dumps(_entry(name, command)))
            left -= len(entries[-1]) + 2
            if left < 0:
                entries.pop()
                break
    return f'{{"commands": [{", ".join(entries)}]}}'


def _entry(name: bytes, command: Command) -> dict[str, Any]:
    stream = command.kind is HandlerKind.STREAM
    return {
        "name": name.decode(),
        "kind": "stream" if stream else "request" if command.is_request else "command",
        "access": command.category.access.auth.name.lower(),
        "summary": (inspect.getdoc(command.handler) or "").partition("\n")[0][:_MOST_SUMMARY],
    }
