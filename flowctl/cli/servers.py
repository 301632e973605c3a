"""Finds server programs: whatever packages registered in the entry point group ``flowctl.servers``."""

from __future__ import annotations

import difflib
import importlib.metadata
from typing import Final

from flowctl.core.server.program import ServerProgram
from flowctl.core.text.extras import missing_extra
from flowctl.errors import ConfigError

GROUP: Final = "flowctl.servers"


def known_servers() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points by name, sorted; nothing is imported."""
    points = importlib.metadata.entry_points(group=GROUP)
    return {point.name: point for point in sorted(points, key=lambda point: point.name)}


def load_server(name: str) -> ServerProgram:
    points = known_servers()
    point = points.get(name)
    if point is None:
        listed = ", ".join(points) or "none: install the package that has it"
        near = difflib.get_close_matches(name, points, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown server {name!r}", hint=f"{meant}known servers: {listed}")
    try:
        program = point.load()
    except Exception as error:
        lacking = missing_extra(error, f"server {name!r}") if isinstance(error, ModuleNotFoundError) else None
        raise lacking or ConfigError(f"server {name!r} cannot be loaded from {point.value}: {error}") from error
    if not isinstance(program, ServerProgram):
        raise ConfigError(
            f"{point.value} is a {type(program).__name__}, not a flowctl.core.server.program.ServerProgram"
        )
    return program
