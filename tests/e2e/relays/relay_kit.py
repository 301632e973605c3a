"""Relays of a live server of ours, nginx-rtmp as the other server, and what to compare."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from e2e_kit import PATIENCE_S, frames_of
from loopback_kit import LOOPBACK

from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.config import LiveConfig
from flowctl.live.relay.relay import Relays
from flowctl.live.server import LiveServer
from flowctl.live.settings.relays import parse_relays
from flowctl.wire.media.synthetic import SyntheticSource

NGINX = Path("/usr/sbin/nginx")
NGINX_RTMP = Path("/usr/lib/nginx/modules/ngx_rtmp_module.so")
NGINX_STREAM = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
NGINX_CONFIG = """
load_module {module};
daemon off;
master_process off;
error_log {folder}/error.log warn;
pid {folder}/nginx.pid;
events {{ worker_connections 64; }}
rtmp {{
    access_log off;
    server {{
        listen 127.0.0.1:{port};
        application live {{ live on; }}
    }}
}}
"""

NGINX_TLS = """
stream {{
    server {{
        listen 127.0.0.1:{tls_port} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        proxy_pass 127.0.0.1:{port};
    }}
}}
"""


@contextlib.contextmanager
def relaying(push="", pull="", **options):
    """A live server with relays; fails if one of its handlers raised. Yields server and relays."""
    failures = []
    config = LiveConfig(
        host=LOOPBACK,
        port=0,
        relay_push=parse_relays(push, "relay_push"),
        relay_pull=parse_relays(pull, "relay_pull"),
        on_error=lambda where, error: failures.append((where, repr(error))),
        **options,
    )
    server = LiveServer(config)
    relays = Relays(server)
    server.companions.append(relays)
    with server:
        yield server, relays
    assert failures == []


def free_ports(count):
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


@contextlib.contextmanager
def nginx(folder, pair=None):
    """Nginx with RTMP; with a certificate its stream module terminates TLS in front. Yields the address of a stream."""
    missing = [
        path.name for path in (NGINX, NGINX_RTMP, *([] if pair is None else [NGINX_STREAM])) if not path.exists()
    ]
    if missing:
        pytest.skip(f"nginx is not installed, or lacks a module: {', '.join(missing)}")
    port, tls_port = free_ports(2)
    text = NGINX_CONFIG.format(module=NGINX_RTMP, folder=folder, port=port)
    if pair is not None:
        names = {"certificate": pair.certificate, "key": pair.key}
        text += NGINX_TLS.format(port=port, tls_port=tls_port, **names)
        text = f"load_module {NGINX_STREAM};{text}"
    config = folder / "nginx.conf"
    config.write_text(text)
    process = subprocess.Popen([NGINX, "-c", config, "-p", folder, "-e", folder / "error.log"])
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < end, "nginx does not listen"
            time.sleep(0.02)
        yield f"rtmp://127.0.0.1:{port}/live/stream" if pair is None else f"rtmps://127.0.0.1:{tls_port}/live/stream"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def same_frames(player, publisher):
    """Whether a player has a run of the publisher's frames without a gap; at least thirty pictures of them."""
    for track, least in ((TAG_VIDEO, 30), (TAG_AUDIO, 30)):
        got = [payload for _, payload in frames_of(list(player.messages), track)]
        sent = [payload for _, payload in frames_of(list(publisher.messages), track)]
        if len(got) < least or got[0] not in sent:
            return False
        begin = sent.index(got[0])
        assert got == sent[begin : begin + len(got)]
    return True


def source():
    return SyntheticSource(video_bit_rate=200_000, fps=50, key_interval_s=0.2)
