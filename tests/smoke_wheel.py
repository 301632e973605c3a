"""Does the installed wheel work? Run by .ci/run in an empty folder, with the interpreter the wheel was installed for.

Looks into the wheel, imports both packages, and runs what a newcomer would: the echo server answering a line, and a
live server with a publisher and a player. Prints one line per step; the first thing that is wrong ends it with an
exception, that is with a status other than 0.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLOWCTL = str(Path(sys.executable).with_name("flowctl"))
WAIT_S = 60
"""For any step: only a hang takes that long."""
LIVE_S = 3


def say(step: str) -> None:
    sys.stdout.write(f"smoke: {step}\n")
    sys.stdout.flush()


def require(fact: object, what: str) -> None:
    if not fact:
        raise SystemExit(f"smoke: FAILED: {what}")


def check_wheel(path: Path) -> None:
    names = zipfile.ZipFile(path).namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    require(tops == {"flowctl", "flowctl_servers"}, f"the wheel holds {sorted(tops)}")
    require("flowctl/py.typed" in names, "the wheel lacks flowctl/py.typed")
    require(any(name.endswith("licenses/LICENSE") for name in names), "the wheel lacks the licence")
    for name in ("index.html", "app.js", "style.css", "mpegts.js", "mpegts.js.LICENSE.txt", "NOTICE.txt"):
        require(f"flowctl/live/admin/assets/{name}" in names, f"the wheel lacks the dashboard's {name}")
    for name in ("uplot.js", "uplot.css", "uplot.LICENSE.txt", "plots.js", "tables.js"):
        require(f"flowctl/charts/assets/{name}" in names, f"the wheel lacks the report's {name}")
    say(f"{path.name}: {len(names)} files, packages {', '.join(sorted(tops))}")


def check_imports() -> None:
    import flowctl
    import flowctl_servers

    for module in (flowctl, flowctl_servers):
        require("site-packages" in str(module.__file__), f"{module.__name__} came from {module.__file__}")
    for name in flowctl.__all__:
        getattr(flowctl, name)
    say(f"import flowctl: {len(flowctl.__all__)} public names")


def check_version() -> None:
    text = subprocess.run([FLOWCTL, "version"], capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
    version = importlib.metadata.version("flowctl")
    require(version in text, f"flowctl version printed {text!r}, the wheel is {version}")
    say(f"flowctl version: {version}")


@contextlib.contextmanager
def serving(name: str) -> Iterator[int]:
    """Run ``flowctl serve NAME`` on a free port, hand out the port, and stop it as an operator would."""
    command = [FLOWCTL, "serve", name, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            require(process.stdout is not None, "no standard output")
            ready = json.loads(process.stdout.readline())
            yield int(ready["port"])
            process.send_signal(signal.SIGINT)
            status = process.wait(WAIT_S)
        finally:
            process.kill()
    require(status == 0, f"flowctl serve {name} ended with status {status} on SIGINT")
    say(f"flowctl serve {name}: served and stopped")


def check_echo() -> None:
    with serving("echo") as port, socket.create_connection(("127.0.0.1", port), WAIT_S) as client:
        client.sendall(b"hello\n")
        line = client.makefile("rb").readline()
        require(line == b"hello\n", f"the echo server answered {line!r}")


def check_live() -> None:
    with serving("live") as port:
        url = f"rtmp://127.0.0.1:{port}/live/smoke"
        publish = [FLOWCTL, "publish", "synthetic", url, "--duration", f"{LIVE_S + 2}s", "--json"]
        play = [FLOWCTL, "play", url, "--duration", f"{WAIT_S}s", "--json"]  # ends with the stream
        with (
            subprocess.Popen(publish, stdout=subprocess.PIPE, text=True) as publisher,
            subprocess.Popen(play, stdout=subprocess.PIPE, text=True) as player,
        ):
            played = _summary(player, "play")
            published = _summary(publisher, "publish")
    sent, received = pictures(published["sent"]), pictures(played["received"])
    require(sent > 0, f"nothing was published: {published}")
    require(received > 0, f"nothing was played: {played}")
    require(played["missing"]["video"] == 0, f"a viewer that keeps up lost frames: {played}")
    say(f"flowctl publish, play: {sent} pictures sent, {received} played, none missing")


def check_load() -> None:
    with serving("live") as port:
        crowd = ["--viewers", "4", "--profile", "slow@200k:1", "--publishers", "1", "--bit-rate", "500k"]
        command = [FLOWCTL, "load", f"rtmp://127.0.0.1:{port}/live/smoke", *crowd, "--duration", f"{LIVE_S}s", "--json"]
        command += ["--fail-on", "healthy.missing>0", "--fail-on", "playing_share<100%", "--report", "load.html"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as load:
            summary = _summary(load, "load")
    require("</html>" in Path("load.html").read_text(), "flowctl load wrote no report")
    say(f"flowctl load: {summary['viewers']['connections']} viewers, none of the healthy ones lost a frame")


def _summary(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    output, _ = process.communicate(timeout=WAIT_S)
    require(process.returncode == 0, f"flowctl {name} ended with status {process.returncode}: {output}")
    summary: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return summary


def pictures(counts: dict[str, int]) -> int:
    return sum(counts.get(name, 0) for name in ("key", "inter", "disposable"))


if __name__ == "__main__":
    check_wheel(Path(sys.argv[1]))
    check_imports()
    check_version()
    check_echo()
    check_live()
    check_load()
