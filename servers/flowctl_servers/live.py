"""The live RTMP server: slow viewers are named, get what their line carries, and are cut at their limits."""

from __future__ import annotations

from flowctl.live import build_live_server
from flowctl.server.program import ServerProgram

SERVER = ServerProgram(
    name="live",
    summary="Live RTMP server: publish and play; slow viewers get what their line carries, stalled ones are cut.",
    default_port=1935,
    build=build_live_server,
)
