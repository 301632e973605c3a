"""Fan-out: CPU per viewer and second, delay and memory of the live server, beside a bare loop and nginx-rtmp.

Each contender runs in a process of its own, one after the other, several times, with the same publisher and the same
crowd of viewers on loopback; medians and ratios are reported. ``python bench fanout --viewers 1000``.
"""

from __future__ import annotations

import argparse
import contextlib
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

from kit.machine import PROGRAMS
from kit.options import parse_crowd
from kit.processes import (
    cpu_seconds,
    free_port,
    process,
    raise_open_files,
    read_json,
    resident_bytes,
    tell,
    wait_for_children,
    wait_for_port,
)
from kit.tables import print_rows

_NGINX_MODULE: Final = Path("/usr/lib/nginx/modules/ngx_rtmp_module.so")


@contextlib.contextmanager
def flowctl_server(arguments: argparse.Namespace) -> Iterator[tuple[int, list[int]]]:
    """Run the live server; yields (port, process ids)."""
    command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
    command += ["--per-address", "0", "--new-per-address", "0", "--flush", f"{arguments.flush * 1000:g}ms"]
    with process(command, stdout=subprocess.PIPE) as child:
        ready = read_json(child)
        yield int(ready["port"]), [child.pid]


@contextlib.contextmanager
def nginx_server(arguments: argparse.Namespace) -> Iterator[tuple[int, list[int]]]:
    """Run nginx-rtmp with one worker; yields (port, process ids)."""
    del arguments
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(
            f"load_module {_NGINX_MODULE};\nworker_processes 1;\ndaemon off;\n"
            f"pid {folder}/pid;\nerror_log {folder}/log;\n"
            "worker_rlimit_nofile 20000;\nevents { worker_connections 10000; }\n"
            f"rtmp {{ server {{ listen 127.0.0.1:{port}; chunk_size 65536; access_log off;\n"
            "application live { live on; } } }\n",
            encoding="ascii",
        )
        with process(["nginx", "-c", str(config), "-p", folder], stderr=subprocess.DEVNULL) as child:
            wait_for_port(port, child)
            yield port, [child.pid, *wait_for_children(child.pid)]


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one contender once and return its figures."""
    if name == "bare loop":
        return measure_bare(arguments)
    server = flowctl_server if name == "flowctl" else nginx_server
    with server(arguments) as (port, pids):
        base = resident_bytes(pids)
        publish = [sys.executable, str(PROGRAMS / "publisher.py"), f"rtmp://127.0.0.1:{port}/live/bench"]
        publish += ["--bit-rate", str(arguments.bit_rate), "--duration", str(arguments.window + 120)]
        with process(publish, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            time.sleep(1.0)
            return {"name": name, **watch(port, pids, base, arguments, [])}


def measure_bare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the bare loop once."""
    command = [sys.executable, str(PROGRAMS / "bare_loop.py"), "--viewers", str(arguments.viewers)]
    command += ["--bit-rate", str(arguments.bit_rate), "--interval", str(arguments.flush or 0.016)]
    command += ["--duration", str(arguments.window + 30)]
    with process(command, stdout=subprocess.PIPE) as child:
        port = int(read_json(child)["port"])
        base = resident_bytes([child.pid])
        return {"name": "bare loop", **watch(port, [child.pid], base, arguments, ["--bare"])}


def watch(port: int, pids: list[int], base: int, arguments: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Send the crowd to `port` and measure the server meanwhile."""
    command = [sys.executable, str(PROGRAMS / "crowd.py"), "--port", str(port), "--viewers", str(arguments.viewers)]
    command += ["--window", str(arguments.window), *more]
    with process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        ready = read_json(crowd)
        tell(crowd, "go")
        cpu, began = cpu_seconds(pids), time.monotonic()
        time.sleep(max(arguments.window - 0.5, 0.5))
        used, took = cpu_seconds(pids) - cpu, time.monotonic() - began
        memory = resident_bytes(pids) - base
        figures = read_json(crowd)
    viewers = max(figures["viewers"], 1)
    return {
        "cpu_us_per_viewer_s": used / took / viewers * 1e6,
        "memory_kb_per_viewer": memory / viewers / 1000,
        "playing": ready["playing"],
        **figures,
    }


def run(arguments: argparse.Namespace | None = None) -> list[dict[str, Any]]:
    """Run all contenders in turn, several times, and return the medians with ratios to flowctl's."""
    arguments = arguments or parse([])
    raise_open_files()
    names = ["flowctl", "bare loop"]
    if shutil.which("nginx") and _NGINX_MODULE.exists():
        names.append("nginx-rtmp")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repetition in range(arguments.repeat):
        for name in names:
            figures = measure(name, arguments)
            results[name].append(figures)
            print(f"# {repetition + 1}/{arguments.repeat} {json.dumps(figures)}", file=sys.stderr, flush=True)
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, "viewers": arguments.viewers, "bit_rate": arguments.bit_rate}
        row["flush_ms"] = arguments.flush * 1000 if name != "nginx-rtmp" else "each message"
        for key in ("cpu_us_per_viewer_s", "delay_p50_ms", "delay_p99_ms", "memory_kb_per_viewer", "missing", "lost"):
            values = [figures[key] for figures in results[name] if figures[key] is not None]
            row[key] = round(statistics.median(values), 1) if values else None
        rows.append(row)
    ours = rows[0]["cpu_us_per_viewer_s"]
    for row in rows:
        row["flowctl_ratio"] = round(ours / row["cpu_us_per_viewer_s"], 2) if row["cpu_us_per_viewer_s"] else None
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    return parse_crowd(argv, __doc__, viewers=1000, flush=True)


QUICK: Final[dict[str, Any]] = {"arguments": parse(["--viewers", "20", "--window", "1", "--repeat", "1"])}
"""Arguments of `run` for a look at whether it works."""


def main() -> None:
    """Run and print."""
    arguments = parse()
    rows = run(arguments)
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
