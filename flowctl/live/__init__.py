"""Live streaming over RTMP: the hub, streams and their headers, publish and play sessions, hooks, settings.

Begin with `session.py`.
"""

from flowctl.live.config import Audience, LiveConfig, SecondPublisher
from flowctl.live.hooks import LiveFrame, LiveHooks, LiveRequest
from flowctl.live.server import LiveServer, build_live_server
from flowctl.live.statistics import EndedViewer, HubStatistics, StreamStatistics, ViewerStatistics

__all__ = [
    "Audience",
    "EndedViewer",
    "HubStatistics",
    "LiveConfig",
    "LiveFrame",
    "LiveHooks",
    "LiveRequest",
    "LiveServer",
    "SecondPublisher",
    "StreamStatistics",
    "ViewerStatistics",
    "build_live_server",
]
