"""What the tests of load runs use: a server that takes everybody, nginx-rtmp, and the kernel's view of a connection."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

from flowctl.core.server.admission import AdmissionLimits
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer

NGINX = Path("/usr/sbin/nginx")
NGINX_RTMP = Path("/usr/lib/nginx/modules/ngx_rtmp_module.so")

NGINX_CONFIG = """
load_module {module};
daemon off;
master_process off;
error_log {folder}/error.log warn;
pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
rtmp {{
    access_log off;
    server {{
        listen 127.0.0.1:{port};
        chunk_size 4096;
        application live {{ live on; }}
    }}
}}
"""


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


@contextlib.contextmanager
def open_nginx(folder):
    """Run nginx-rtmp; yield its port and its process id."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NGINX_CONFIG.format(module=NGINX_RTMP, folder=folder, port=port))
    process = subprocess.Popen(
        [NGINX, "-c", config, "-p", folder, "-e", folder / "error.log"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 10
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < end, "nginx does not listen"
            time.sleep(0.02)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def unacknowledged(server_port):
    """Return octets that the server's kernel has sent or holds and that are not acknowledged, by the client's port."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == server_port:
            found[int(remote.rpartition(":")[2], 16)] = int(queues.partition(":")[0], 16)
    return found
