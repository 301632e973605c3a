"""What a node says of itself: `rpc.describe`, a request that is answered with what its caller may call, as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

from flowctl.nodes.rpc.commands import HandlerKind, RpcCommand

CATEGORY: Final = "rpc"
COMMAND: Final = "describe"
MOST_BYTES: Final = 900_000
"""Of one answer, which is to stay below the limit of a message; what is beyond is left out."""
_MOST_SUMMARY: Final = 120


def described(commands: Mapping[bytes, RpcCommand], aliases: Mapping[bytes, bytes]) -> str:
    """Return commands, those that the caller may call, with aliases, as JSON.

    ``{"commands": [{"name": ..., "kind": "command" | "request" | "stream", "access": "none" | ..., "summary": ...}]}``
    in the order of their names; the summary is the first line of the handler's docstring. An alias has ``alias_of``,
    and what was added with `takes` has that: ``{"parts": [least, most]}``, and of a type its JSON schema as ``json``.
    """
    entries: list[str] = []
    left = MOST_BYTES
    for name, command in sorted(commands.items()):
        entries.append(json.dumps(_entry(name, command, aliases.get(name))))
        left -= len(entries[-1]) + 2
        if left < 0:
            entries.pop()
            break
    return f'{{"commands": [{", ".join(entries)}]}}'


def _entry(name: bytes, command: RpcCommand, alias_of: bytes | None) -> dict[str, Any]:
    stream = command.kind is HandlerKind.STREAM
    entry: dict[str, Any] = {
        "name": name.decode(),
        "kind": "stream" if stream else "request" if command.is_request else "command",
        "access": command.category.access.auth.name.lower(),
        "summary": (inspect.getdoc(command.handler) or "").partition("\n")[0][:_MOST_SUMMARY],
    }
    if alias_of is not None:
        entry["alias_of"] = alias_of.decode()
    if command.takes is not None:
        entry["takes"] = command.takes
    return entry
