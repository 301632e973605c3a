"""The servers that are compared, each in a process of its own on a free port of loopback, and whether they are there.

nginx-rtmp comes from the distribution. Node-Media-Server comes from npm, in one pinned version, into a folder of
caches outside of what is committed; nothing of it is run while it is installed. Both are told to use one process, and
flowctl one poll group, so that figures are those of one thread of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from compare.plan import PATIENT
from kit import processes
from kit.machine import HERE, PROGRAMS

NGINX_MODULE: Final = Path("/usr/lib/nginx/modules/ngx_rtmp_module.so")
NODE_VERSION: Final = "2.7.4"
"""The last of the second generation."""
PATIENT_FLUSH_S: Final = 0.12
"""Node-Media-Server gathers messages for about this long; cost is compared at equal delay."""
_INSTALL_TIMEOUT_S: Final = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What every contender is told.

    Args:
        flush_s: flush interval of flowctl, or its ceiling, in seconds.
        duration_s: after which a server that nobody ends should end by itself.
        nap_s: pause of the crowd between two rounds of reading, in seconds.
        settle_s: head start of the publisher, in which it fills the servers' caches with a group of pictures of two
            seconds, and pause before the window.
    """

    viewers: int
    bit_rate: int
    flush_s: float = 0.04
    interval_s: float = 0.04
    duration_s: float = 120.0
    nap_s: float = 0.0
    settle_s: float = 2.5
    host: str = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that runs.

    Args:
        ask: returns the server's own figures. None: it has none to give.
    """

    port: int
    pids: list[int]
    ask: Callable[[], dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Args:
        absent: returns why it cannot run here and how that is changed. "" means that it can.
        bare: whether it is no RTMP server: viewers read bytes from it, and nobody publishes.
    """

    name: str
    start: Callable[[Settings], AbstractContextManager[Running]]
    absent: Callable[[], str]
    bare: bool = False


@contextlib.contextmanager
def flowctl(settings: Settings) -> Iterator[Running]:
    """Run the live server with one poll group."""
    with _live_server(settings, groups=1) as running:
        yield running


@contextlib.contextmanager
def flowctl_patient(settings: Settings) -> Iterator[Running]:
    """Run the live server with a flush interval that gives about the delay of Node-Media-Server."""
    with _live_server(dataclasses.replace(settings, flush_s=PATIENT_FLUSH_S), groups=1) as running:
        yield running


@contextlib.contextmanager
def flowctl_two_groups(settings: Settings) -> Iterator[Running]:
    """Run the live server with two poll groups."""
    with _live_server(settings, groups=2) as running:
        yield running


@contextlib.contextmanager
def _live_server(settings: Settings, *, groups: int) -> Iterator[Running]:
    command = [
        sys.executable,
        str(PROGRAMS / "live_server.py"),
        "--flush",
        str(settings.flush_s),
        "--groups",
        str(groups),
    ]
    with processes.process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        port = int(processes.read_json(child)["port"])

        def ask() -> dict[str, Any]:
            processes.tell(child, "rounds")
            return processes.read_json(child)

        yield Running(port, [child.pid], ask)


def served(*options: str) -> Callable[[Settings], AbstractContextManager[Running]]:
    """Return what runs ``flowctl serve live`` with these options, as operators do, with all of its processes."""

    @contextlib.contextmanager
    def run(settings: Settings) -> Iterator[Running]:
        command = [sys.executable, "-m", "flowctl", "--log-level", "error", "serve", "live", "--port", "0", "--json"]
        command += ["--per-address", "0", "--new-per-address", "0", "--publishers-per-address", "0"]
        command += ["--control", "off", "--flush", f"{settings.flush_s * 1000:g}ms", *options]
        with processes.process(command, stdout=subprocess.PIPE) as child:
            ready = processes.read_json(child)
            yield Running(int(ready["port"]), [int(ready["pid"]), *ready.get("workers", ())])

    return run


@contextlib.contextmanager
def bare_loop(settings: Settings) -> Iterator[Running]:
    """Run the loop that sends the same bytes to the same number of sockets, and does nothing else."""
    command = [sys.executable, str(PROGRAMS / "bare_loop.py"), "--viewers", str(settings.viewers)]
    command += ["--bit-rate", str(settings.bit_rate), "--interval", str(settings.interval_s)]
    command += ["--duration", str(settings.duration_s)]
    with processes.process(command, stdout=subprocess.PIPE) as child:
        yield Running(int(processes.read_json(child)["port"]), [child.pid])


@contextlib.contextmanager
def nginx(settings: Settings) -> Iterator[Running]:
    """Run nginx-rtmp with one worker."""
    port = processes.free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(
            f"load_module {NGINX_MODULE};\nworker_processes 1;\ndaemon off;\n"
            f"pid {folder}/pid;\nerror_log {folder}/log;\n"
            f"worker_rlimit_nofile {settings.viewers + 2000};\n"
            f"events {{ worker_connections {settings.viewers + 1000}; }}\n"
            f"rtmp {{ server {{ listen {settings.host}:{port}; chunk_size 65536; access_log off;\n"
            "application live { live on; } } }\n",
            encoding="ascii",
        )
        with processes.process(["nginx", "-c", str(config), "-p", folder], stderr=subprocess.DEVNULL) as child:
            processes.wait_for_port(port, child)
            yield Running(port, [child.pid, *processes.wait_for_children(child.pid)])


def no_nginx() -> str:
    """Return why nginx-rtmp cannot run here. "" means that it can."""
    if shutil.which("nginx") and NGINX_MODULE.exists():
        return ""
    return "nginx with the RTMP module is not installed (Debian, Ubuntu: nginx and libnginx-mod-rtmp)"


@contextlib.contextmanager
def srs(settings: Settings) -> Iterator[Running]:
    """Run SRS (5 or 6), with its cache of a group of pictures, as its own documentation shows."""
    port = processes.free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "srs.conf"
        config.write_text(
            f"listen {settings.host}:{port}; max_connections {min(settings.viewers, 900)}; daemon off;\n"
            f"pid {folder}/pid; srs_log_tank file; srs_log_file {folder}/log; srs_log_level error;\n"
            "heartbeat { enabled off; } stats { enabled off; }\n"
            "vhost __defaultVhost__ { play { gop_cache on; } }\n",
            encoding="ascii",
        )
        with processes.process(["srs", "-c", str(config)], cwd=folder, stdout=subprocess.DEVNULL) as child:
            processes.wait_for_port(port, child)
            yield Running(port, [child.pid])


def no_srs() -> str:
    """Return why SRS cannot run here. "" means that it can."""
    return "" if shutil.which("srs") else "srs is not on the path (it is built from its source)"


def node_folder() -> Path:
    """Return where Node-Media-Server is installed: a folder of its own in FLOWCTL_CACHE, or beside the benches."""
    named = os.environ.get("FLOWCTL_CACHE")
    return (Path(named) if named else HERE / ".cache") / f"node-media-server-{NODE_VERSION}"


def no_node() -> str:
    """Return why Node-Media-Server cannot run here. "" means that it can."""
    if not shutil.which("node"):
        return "Node.js is not installed (Debian, Ubuntu: nodejs and npm)"
    if not (node_folder() / "node_modules" / "node-media-server").is_dir():
        return "Node-Media-Server is not installed (make rivals, or python bench compare --install)"
    return ""


def install_node() -> str:
    """Install Node-Media-Server with npm where it is missing, and return why it cannot run. "" means that it can."""
    reason = no_node()
    if not reason or not shutil.which("node"):
        return reason
    if not shutil.which("npm"):
        return "npm is not installed (Debian, Ubuntu: npm)"
    folder = node_folder()
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-save", "--ignore-scripts"]
    command += ["--fetch-retries=1", f"node-media-server@{NODE_VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"npm did not finish within {_INSTALL_TIMEOUT_S} s"
    if done.returncode:
        return f"npm could not install it: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
    return no_node()


@contextlib.contextmanager
def node(settings: Settings) -> Iterator[Running]:
    """Run Node-Media-Server, RTMP only, with its GOP cache, as its own documentation shows."""
    del settings
    command = ["node", str(HERE / "compare" / "node_server.js"), str(processes.free_port())]
    environment = {**os.environ, "NODE_PATH": str(node_folder() / "node_modules"), "NODE_ENV": "production"}
    with processes.process(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        processes.wait_for_port(int(command[-1]), child)
        yield Running(int(command[-1]), [child.pid])


def _always() -> str:
    return ""


CONTENDERS: Final = {
    contender.name: contender
    for contender in (
        Contender("flowctl", flowctl, _always),
        Contender("bare loop", bare_loop, _always, bare=True),
        Contender("nginx-rtmp", nginx, no_nginx),
        Contender("node-media-server", node, no_node),
        Contender(PATIENT, flowctl_patient, _always),
        Contender("flowctl, 2 groups", flowctl_two_groups, _always),
        Contender("one process", served(), _always),
        Contender("two groups", served("--groups", "2"), _always),
        Contender("two workers", served("--workers", "2"), _always),
    )
}
"""All, in the order in which they take turns. Those that are not in `USUAL` run only when they are asked for."""

USUAL: Final = tuple(CONTENDERS)[:5]
"""Those that are compared when nobody says otherwise."""


def versions() -> dict[str, str]:
    """Return what the rivals call themselves, by name; those that are absent are left out."""
    found = {}
    if not no_nginx():
        said = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=False).stderr
        found["nginx-rtmp"] = said.strip().rpartition("nginx/")[2]
    if not no_node():
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
        found["node-media-server"] = f"{NODE_VERSION}, Node.js {said.strip().removeprefix('v')}"
    return found
