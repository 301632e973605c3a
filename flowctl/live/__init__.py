"""Live streaming: the hub of streams, publications, publish and play sessions, and the drop policy.

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
