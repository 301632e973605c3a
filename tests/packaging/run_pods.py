"""Runs the pods of all three kinds as a kubelet would, and writes what it saw to standard output, as JSON.

Run as root in a sandbox with the files of the image (see `test_image`), in a network of its own; its argument is the
folder of pods.json. Origin and edge have one network here, so the edge is given other ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from dns_kit import DnsServer

USER = "10001"
VOLUMES = """
mkdir -p /etc/flowctl/secrets
mount -t tmpfs secret /etc/flowctl/secrets
cp {given}/secret/* /etc/flowctl/secrets
chown 0:{user} /etc/flowctl/secrets/*
chmod 0440 /etc/flowctl/secrets/*
mount -t tmpfs -o gid={user},mode=2777 state /var/lib/flowctl
mount -t tmpfs -o mode=0777 tmp /tmp
mount -o remount,bind,ro /
cd /var/lib/flowctl
exec "$@"
"""
RIGHTS = ["setpriv", "--reuid", USER, "--regid", USER, "--groups", USER, "--no-new-privs", "--bounding-set", "-all"]
WAIT_S = 60


class Pod:
    """A container of a pod: its process, in mounts of its own."""

    def __init__(self, given: Path, spec: dict, changes: dict[str, str], admin_port: int) -> None:
        (container,) = spec["spec"]["containers"]
        assert spec["spec"]["securityContext"]["runAsUser"] == int(USER)
        self.admin = f"http://127.0.0.1:{admin_port}"
        self.container = container
        env = {item["name"]: value_of(item, given / "secret") for item in container["env"]}
        self.env = {**os.environ, **env, **changes}
        args = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in container["args"]]
        self.log = (given / f"log-{admin_port}").open("w")
        volumes = VOLUMES.format(given=given, user=USER)
        words = ["unshare", "--mount", "sh", "-ec", volumes, "sh", *RIGHTS, "flowctl", *args]
        self.process = subprocess.Popen(words, env=self.env, stdout=self.log, stderr=self.log)

    def probe(self, name: str) -> int:
        """Ask as a kubelet does, by the address of the pod; 0: nothing answers."""
        path = self.container[name]["httpGet"]["path"]
        with contextlib.suppress(httpx.TransportError):
            headers = {"Host": "10.1.2.3:8936", "User-Agent": "kube-probe/1.37"}
            return httpx.get(self.admin + path, headers=headers, timeout=5).status_code
        return 0

    def await_probe(self, name: str, status: int) -> float:
        began = time.monotonic()
        while self.probe(name) != status:
            assert self.process.poll() is None, Path(self.log.name).read_text()
            assert time.monotonic() - began < WAIT_S, Path(self.log.name).read_text()
            time.sleep(0.1)
        return time.monotonic() - began

    def metrics(self, token: str) -> str:
        return httpx.get(f"{self.admin}/metrics", headers={"Authorization": f"Bearer {token}"}).text

    def pre_stop(self) -> subprocess.Popen:
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--root", "--wd"]
        return subprocess.Popen([*enter, *RIGHTS, *command], env=self.env, stdout=self.log, stderr=self.log)


def value_of(item: dict, secret: Path) -> str:
    if "value" in item:
        return item["value"]
    return (secret / item["valueFrom"]["secretKeyRef"]["key"]).read_text()


def make_secret(given: Path, script: str) -> None:
    """Do what the documents say, with a kubectl that keeps the secret instead of sending it."""
    work, secret = given / "work", given / "secret"
    for folder in (work / "bin", secret):
        folder.mkdir(parents=True)
    (work / "bin" / "kubectl").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >>../said\n')
    (work / "bin" / "kubectl").chmod(0o755)
    path = f"{work}/bin:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", script], cwd=work, env={**os.environ, "PATH": path}, check=True)
    for word in (given / "said").read_text().split("\0"):
        kind, _, rest = word.partition("=")
        name, _, value = rest.partition("=")
        if kind == "--from-file":
            (secret / name).write_bytes((work / name).read_bytes())
        elif kind == "--from-literal":
            (secret / name).write_text(value)


def flowctl(words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["flowctl", *shlex.split(words)], capture_output=True, text=True, timeout=WAIT_S, check=False)


def view(viewer: socket.socket, seen: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := viewer.recv(65536):
            seen.append(data)


def main(given: Path) -> None:
    asked = json.loads((given / "pods.json").read_text())
    make_secret(given, asked["secret"])
    key = (given / "work" / "encoder.key").read_text().strip()
    token = (given / "secret" / "metrics-token").read_text()
    names = DnsServer(53)
    names.put("flowctl-origins.default.svc.cluster.local", "A", "127.0.0.1")

    others = {"FLOWCTL_PORT": "2935", "FLOWCTL_ADMIN": "0.0.0.0:9936"}
    origin, edge = Pod(given, asked["origin"], {}, 8936), Pod(given, asked["edge"], others, 9936)
    said = {"started_s": [pod.await_probe("startupProbe", 200) for pod in (origin, edge)]}
    said["strangers"] = httpx.get(f"{edge.admin}/api/v1/stats").status_code
    said["metrics"] = "flowctl_build_info" in edge.metrics(token)

    url = "rtmp://127.0.0.1:1935/live/room"
    encoder = subprocess.Popen(["flowctl", "publish", "synthetic", f"{url}?key={key}", "--duration", "60s"])
    said["no_key"] = flowctl(f"publish synthetic {url}2 --duration 1s").returncode
    said["at_edge"] = flowctl("publish synthetic rtmp://127.0.0.1:2935/live/own --duration 1s").returncode
    said["played"] = json.loads(flowctl("play rtmp://127.0.0.1:2935/live/room --duration 2s --json").stdout)

    # The edge is to go while somebody views.
    with socket.create_connection(("127.0.0.1", 8080), WAIT_S) as viewer:
        viewer.sendall(b"GET /live/room.flv HTTP/1.1\r\nHost: edge\r\n\r\n")
        said["viewed"] = viewer.recv(65536).decode("latin-1").partition("\r\n")[0]
        seen: list[bytes] = []
        threading.Thread(target=view, args=(viewer, seen), daemon=True).start()
        hook = edge.pre_stop()
        said["unready_s"] = edge.await_probe("readinessProbe", 503)
        said["alive"] = edge.probe("livenessProbe")
        before = len(seen)
        time.sleep(1)
        said["goes_on"] = len(seen) > before
        viewer.shutdown(socket.SHUT_RDWR)
    said["edge_ended"] = edge.process.wait(WAIT_S)  # before any SIGTERM: all have left
    hook.kill()

    encoder.terminate()
    origin.process.send_signal(signal.SIGTERM)
    said["origin_ended"] = origin.process.wait(WAIT_S)
    # One of several workers: nobody is there when it is to go, so it ends by itself.
    server = Pod(given, asked["server"], {"FLOWCTL_WORKERS": "2"}, 8936)
    said["started_s"].append(server.await_probe("startupProbe", 200))
    said["workers"] = re.findall(r"^flowctl_workers (\d)", server.metrics(token), re.MULTILINE)
    hook = server.pre_stop()
    said["server_ended"] = server.process.wait(WAIT_S)
    hook.kill()
    sys.stdout.write(f"== pods\n{json.dumps(said)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
