"""The live RTMP server: publish and play, with slow viewers named, thinned at key frames, and cut at their limit."""

from __future__ import annotations

from flowctl.live import build_live_server
from flowctl.live.server import EXTRA_SETTINGS
from flowctl.serving import ServerProgram

SERVER = ServerProgram(
    name="live",
    summary="Live RTMP server: publish and play; slow viewers are thinned at key frames, then cut.",
    default_port=1935,
    build=build_live_server,
    extra=EXTRA_SETTINGS,
)
