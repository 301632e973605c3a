"""What TLS costs a whole server: processor time per viewer, plain and with TLS, beside nginx.

nginx-rtmp does not speak TLS: nginx's stream module does, in the same worker process, and hands on what it decrypts.
Each runs in turn, several times, with the same certificate, publisher and crowd; medians are reported, and all speak
TLS 1.3 with TLS_AES_256_GCM_SHA384.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kit.machine import HERE, PROGRAMS
from kit.options import parse_crowd
from kit.processes import (
    free_port,
    process,
    raise_open_files,
    read_json,
    resident_bytes,
    wait_for_children,
    wait_for_port,
)
from kit.tables import print_rows
from whole.fanout import watch

sys.path.insert(0, str(HERE.parent / "tests"))

Pair: Final[Any] = importlib.import_module("certificate_kit").Pair  # of the tests

MODULES: Final = Path("/usr/lib/nginx/modules")
SETTLE_S: Final = 5.0
"""Time in which all begin to play, before the window."""
NGINX_MODULES: Final = (MODULES / "ngx_rtmp_module.so", MODULES / "ngx_stream_module.so")


@contextlib.contextmanager
def flowctl(pair: Any, flush_s: float) -> Iterator[tuple[int, int, list[int]]]:
    """Run the live server; yields the port, the port with TLS, and the process ids."""
    command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
    command += ["--per-address", "0", "--new-per-address", "0", "--flush", f"{flush_s * 1000:g}ms", "--control", "off"]
    command += ["--rtmps", "127.0.0.1:0", "--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)]
    with process(command, stdout=subprocess.PIPE) as child:
        ready = read_json(child)
        yield int(ready["port"]), int(ready["rtmps"][0].rpartition(":")[2]), [child.pid]


@contextlib.contextmanager
def nginx(pair: Any, flush_s: float) -> Iterator[tuple[int, int, list[int]]]:
    """Run nginx-rtmp, and the stream module before it, with one worker; yields the same."""
    del flush_s  # it writes each message
    port, secure = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(
            f"{''.join(f'load_module {module};' for module in NGINX_MODULES)}\nworker_processes 1;\ndaemon off;\n"
            f"pid {folder}/pid;\nerror_log {folder}/log;\nuser root;\n"
            "worker_rlimit_nofile 40000;\nevents { worker_connections 20000; }\n"
            f"stream {{ server {{ listen 127.0.0.1:{secure} ssl; proxy_pass 127.0.0.1:{port}; ssl_protocols TLSv1.3;\n"
            f"ssl_certificate {pair.certificate}; ssl_certificate_key {pair.key}; }} }}\n"
            f"rtmp {{ server {{ listen 127.0.0.1:{port}; chunk_size 65536; access_log off;\n"
            "application live { live on; } } }\n",
            encoding="ascii",
        )
        with process(["nginx", "-c", str(config), "-p", folder], stderr=subprocess.DEVNULL) as child:
            wait_for_port(port, child)
            yield port, secure, [child.pid, *wait_for_children(child.pid)]


def measure(server: Any, pair: Any, arguments: argparse.Namespace, *, secure: bool) -> dict[str, Any]:
    """Run a server once and return its figures."""
    with server(pair, arguments.flush) as (port, secure_port, pids):
        base = resident_bytes(pids)
        publish = [sys.executable, str(PROGRAMS / "publisher.py"), f"rtmp://127.0.0.1:{port}/live/bench"]
        publish += ["--bit-rate", str(arguments.bit_rate), "--duration", str(arguments.window + 120)]
        with process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            time.sleep(1.0)
            more = ["--settle", str(SETTLE_S)]
            if not secure:
                return watch(port, pids, base, arguments, more)
            return watch(secure_port, pids, base, arguments, [*more, "--ca-file", str(pair.authority)])


def run(arguments: argparse.Namespace | None = None) -> list[dict[str, Any]]:
    """Run all in turn, several times, and return the medians, with what TLS costs of what it is without."""
    arguments = arguments or parse([])
    raise_open_files()
    servers = {"flowctl": flowctl}
    if shutil.which("nginx") and all(module.exists() for module in NGINX_MODULES):
        servers["nginx"] = nginx
    kinds = [(name, secure) for name in servers for secure in (False, True)]
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        for _ in range(arguments.repeat):
            for name, secure in kinds:
                figures = measure(servers[name], pair, arguments, secure=secure)
                found[name, secure].append(figures)
                print(f"# {name} {secure} {json.dumps(figures)}", file=sys.stderr, flush=True)
    rows = []
    for name, secure in kinds:

        def median(key: str, of: tuple[str, bool] = (name, secure)) -> float:
            return float(statistics.median(figures[key] for figures in found[of]))

        cost = median("cpu_us_per_viewer_s")
        rows.append(
            {
                "server": name,
                "viewers speak": "TLS 1.3" if secure else "plain",
                "viewers": arguments.viewers,
                "us per viewer and s": round(cost),
                "of plain": f"{cost / median('cpu_us_per_viewer_s', (name, False)):.2f} x",
                "delay_p50_ms": round(median("delay_p50_ms"), 1),
                "delivered": f"{median('bytes_per_viewer_and_s') * 8 / arguments.bit_rate:.0%}",
                "kB per viewer": round(median("memory_kb_per_viewer")),
                "frames missing": sum(figures["missing"] for figures in found[name, secure]),
                "viewers lost": sum(figures["lost"] for figures in found[name, secure]),
            }
        )
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    return parse_crowd(argv, __doc__, viewers=300, flush=True)


QUICK: Final[dict[str, Any]] = {"arguments": parse(["--viewers", "20", "--window", "1", "--repeat", "1"])}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    arguments = parse()
    print_rows(run(arguments), as_json=arguments.json)


if __name__ == "__main__":
    main()
