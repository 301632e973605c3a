"""Live streaming over RTMP: the hub, streams and their headers, publish and play sessions, hooks, settings.

A name is loaded when it is first used, as those of `flowctl` are: to read settings takes no server.

Begin with `session.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowctl.live.access.request import LiveRequest, Refusal, Why
    from flowctl.live.config import LiveConfig, SecondPublisher
    from flowctl.live.hooks import LiveFrame, LiveHooks
    from flowctl.live.server import LiveServer, build_live_server
    from flowctl.live.settings.levels import Level, Role

__all__ = [
    "Level",
    "LiveConfig",
    "LiveFrame",
    "LiveHooks",
    "LiveRequest",
    "LiveServer",
    "Refusal",
    "Role",
    "SecondPublisher",
    "Why",
    "build_live_server",
]

_HOMES = {
    "flowctl.live.access.request": ("LiveRequest", "Refusal", "Why"),
    "flowctl.live.config": ("LiveConfig", "SecondPublisher"),
    "flowctl.live.hooks": ("LiveFrame", "LiveHooks"),
    "flowctl.live.server": ("LiveServer", "build_live_server"),
    "flowctl.live.settings.levels": ("Level", "Role"),
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
