"""The live server in a process of its own, so that its memory, processor time and descriptors can be told from ours.

``python hostile_server.py``: writes one JSON line when it is ready, answers each line of its input with its figures as
JSON, and stops at the end of its input, so it cannot outlive the test that started it. The log goes to standard error.

The server is the one of ``flowctl serve live`` with its default sizes, counts and rates; only times are shorter, so
that each limit acts within a test, and the kernel's buffers smaller, so that a slow reader shows within a second.
docs/security.md says so, too.
"""

from __future__ import annotations

import json
import sys
from traceback import format_exception

from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.live.config import LiveConfig, SecondPublisher
from flowctl.live.server import LiveServer
from flowctl.log import configure
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ServerSessionConfig

TIMES = {
    "handshake_time_s": 1.5,
    "first_command_s": 3.0,
    "first_media_s": 3.0,
    "player_wait_s": 2.5,
    "ping_after_s": 3.0,
    "ping_timeout_s": 3.5,
}
"""Instead of the defaults of `WireLimits`, which are 5 s to 60 s; all other limits of the wire are the defaults.

Silence takes longer to be noticed than a kernel that takes nothing (`stuck_s` below): each has a victim of its own."""


def build(failures: list[str]) -> LiveServer:
    return LiveServer(
        LiveConfig(
            rtmp=ServerSessionConfig(limits=WireLimits(**TIMES)),
            second_publisher=SecondPublisher(sys.argv[1]) if len(sys.argv) > 1 else SecondPublisher.REFUSE,
            return_grace_s=0.5,
            media_silence_s=3.5,
            settings=SenderSettings(stuck_s=2.5, soft_too_long_s=5.0),
            socket_options=SocketOptions(
                notsent_lowat_bytes=16 * 1024, send_buffer_bytes=64 * 1024, receive_buffer_bytes=64 * 1024
            ),
            on_error=lambda where, error: failures.append(f"{where}: {''.join(format_exception(error))}"),
        )
    )


def figures(server: LiveServer, failures: list[str]) -> dict:
    streams = {
        stream.name: {"published": stream.publisher is not None, "viewers": count, "trouble": 0}
        for stream, count in server.hub.streams().items()
    }
    for name, viewer in server.hub.viewing():
        streams[name]["trouble"] += viewer.connection.sender.state is not SendState.READY
    return {
        "closed": {reason.name: count for reason, count in server.closed_by_reason.items()},
        "limits_hit": server.hub.limits_hit,
        "streams": streams,
        "ended": [item["why"] for item in server.recent.since(None, 1000)[0] if item["what"] == "close"],
        "connections": len(server.connections()),
        "refused": server.admission.refused,
        "failures": failures,
    }


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    configure("debug")
    failures: list[str] = []
    server = build(failures)
    server.start()
    try:
        say(json.dumps({"port": server.address[1]}))
        for _ in sys.stdin:
            say(json.dumps(figures(server, failures)))
    finally:
        server.stop(2.0)


if __name__ == "__main__":
    main()
