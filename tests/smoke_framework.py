"""Is the framework whole without any extra? Run by .ci/run in an empty folder, where only the wheel is installed.

Runs the README's server as it stands there and lets two peers talk through it; holds the size of what is installed, the
lines that a program can reach and the time of the import against their bounds; and looks whether what needs an extra
names it, with the command that installs it. Ends with a status other than 0 at the first thing that is wrong.
"""

from __future__ import annotations

import re
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from smoke_wheel import WAIT_S, require, say

MOST_LINES = 35_000
MOST_BYTES = 30_000_000
"""Of site-packages, without pip and what came with it."""
MOST_IMPORT_S = 0.05
INSTALLER = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
NAMES = """
import sys, flowctl
lacking = []
for name in flowctl.__all__:
    try:
        getattr(flowctl, name)
    except flowctl.ConfigError as error:
        lacking.append(name)
        extra = "websocket" if flowctl._HOME_OF[name] == "flowctl.websocket" else "rpc"
        assert f"needs the extra '{extra}'" in str(error) and f"pip install '.[{extra}]'" in error.hint, error
lines = sum(
    len(open(module.__file__, encoding="utf-8").readlines())
    for name, module in sys.modules.items()
    if name.partition(".")[0] == "flowctl"
)
print(lines, *lacking)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def connect(port: int) -> socket.socket:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), WAIT_S)
        except ConnectionRefusedError:
            require(time.monotonic() < until, "the server of the README does not listen")
            time.sleep(0.05)


def check_readme(readme: Path) -> None:
    """The server in the README passes on what a peer sends, and ends with status 0 at SIGINT."""
    (code, *_) = re.findall(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    require("port=7000" in code, "the README's server has another port")
    port = free_port()
    Path("server.py").write_text(code.replace("port=7000", f"port={port}"), "utf-8")
    with subprocess.Popen([sys.executable, "server.py"]) as server:
        try:
            with connect(port) as first, connect(port) as second, second.makefile("rb") as lines:
                second.sendall(b"here\n")
                require(lines.readline() == b"here\n", "the second peer was not heard")
                first.sendall(b"hello\n")
                require(lines.readline() == b"hello\n", "the second peer was not passed a line")
            server.send_signal(signal.SIGINT)
            require(server.wait(WAIT_S) == 0, f"the server ended with status {server.returncode}")
        finally:
            server.kill()
    say("the server of the README: passed on a line, and ended")


def check_names() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=False, timeout=WAIT_S)
    require(done.returncode == 0, f"public names: {done.stderr}")
    lines, *lacking = done.stdout.split()
    require(int(lines) < MOST_LINES, f"{lines} lines can be reached")
    require(
        {"RpcNode", "Messenger", "ObjectDiffusion", "WebSocketSession"} <= set(lacking), f"lack their extra: {lacking}"
    )
    say(f"public names: {lines} lines; {len(lacking)} name the extra that they need")


def check_command() -> None:
    """The command names the extra that it needs."""
    command = str(Path(sys.executable).with_name("flowctl"))
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False, timeout=WAIT_S)
    hint = "hint: in flowctl's source folder: pip install '.[cli]'"
    require(done.returncode == 2 and hint in done.stderr, f"flowctl --help: {done.returncode}: {done.stderr}")
    say("flowctl --help: named the extra that it needs")


def check_size() -> None:
    folder = Path(sysconfig.get_paths()["purelib"])
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    ours = [path for path in files if not path.relative_to(folder).parts[0].startswith(INSTALLER)]
    size = sum(path.stat().st_size for path in ours)
    require(size < MOST_BYTES, f"{size} bytes are installed")
    say(f"installed: {size / 1e6:.1f} MB")


def check_import() -> None:
    """`import flowctl` takes little: the middle of nine, without the start of Python."""
    code = "import time; begun = time.perf_counter(); import flowctl; print(time.perf_counter() - begun)"
    took = statistics.median(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=WAIT_S).stdout)
        for _ in range(9)
    )
    require(took < MOST_IMPORT_S, f"import flowctl took {took:.3f} s")
    say(f"import flowctl: {took * 1000:.0f} ms")


if __name__ == "__main__":
    check_readme(Path(sys.argv[1]))
    check_names()
    check_command()
    check_size()
    check_import()
