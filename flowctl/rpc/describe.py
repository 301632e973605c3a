"""What a node says of itself: `rpc.describe`, a request that is answered with what its caller may call, as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from flowctl.rpc.commands import Command, HandlerKind

CATEGORY: Final = "rpc"
COMMAND: Final = "describe"
MOST_COMMANDS: Final = 5_000
"""In one answer, which is to stay below the limit of a message."""
_MOST_SUMMARY: Final = 120


def described(commands: Mapping[bytes, Command], may_call: Callable[[Command], bool]) -> str:
    """Return the commands that the caller may call, with aliases, as JSON.

    ``{"commands": [{"name": ..., "kind": "command" | "request" | "stream", "access": "none" | ..., "summary": ...}]}``
    in the order of their names; the summary is the first line of the handler's docstring.
    """
    found = [_entry(name, command) for name, command in sorted(commands.items()) if may_call(command)]
    return json.dumps({"commands": found[:MOST_COMMANDS]})


def _entry(name: bytes, command: Command) -> dict[str, Any]:
    stream = command.kind is HandlerKind.STREAM
    return {
        "name": name.decode(),
        "kind": "stream" if stream else "request" if command.is_request else "command",
        "access": command.category.access.auth.name.lower(),
        "summary": (inspect.getdoc(command.handler) or "").partition("\n")[0][:_MOST_SUMMARY],
    }
