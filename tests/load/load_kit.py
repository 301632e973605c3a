"""What the tests of load runs use: a server that takes everybody, and the kernel's view of a connection."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from flowctl.core.server.admission import AdmissionLimits
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer


@contextlib.contextmanager
def open_server():
    """Run a live server that many viewers may come to from one address; fail if one of its handlers raised."""
    failures = []
    config = LiveConfig(
        admission=AdmissionLimits(connections_per_address=2000, burst_per_address=2000),
        on_error=lambda where, error: failures.append((where, repr(error))),
    )
    with LiveServer(config) as server:
        yield server
    assert failures == []


def url_of(server, name="live/room"):
    return f"rtmp://127.0.0.1:{server.address[1]}/{name}"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def unacknowledged(server_port):
    """Return octets that the server's kernel has sent or holds and that are not acknowledged, by the client's port."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == server_port:
            found[int(remote.rpartition(":")[2], 16)] = int(queues.partition(":")[0], 16)
    return found
