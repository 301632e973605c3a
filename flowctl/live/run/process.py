"""One process of a command: how it is started, what it may, what it says, and that it ends with all that it started.

How it works. A process begins as a small interpreter (`_LAUNCH`), which takes on what is to be in force and then
becomes the command: so nothing runs between fork and exec of a server with threads. It leads a process group of its
own; the end of a command is the end of the group. First it is asked (SIGTERM), some seconds later it is killed, and so
is what a command that ended by itself has left behind. It has no descriptor of the server, reads nothing, and its
environment has what a program needs and what is told of the stream, and nothing that the server was given.

That none outlives a server that is killed is seen to twice: the kernel kills the command when the thread that started
it has gone, and a guard, which reads from a pipe of which only the server has the other end, kills the groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

STOP_S: Final = 5.0
"""Time that a command has to end once it was asked: FFmpeg finishes a file in far less."""
_REAP_S: Final = 0.5
_READ_BYTES: Final = 1 << 14
_MOST_LINES: Final = 100
"""What is read, and of that looked at, in one go: one that writes without end waits for us, and costs us little."""
_MOST_LINE_BYTES: Final = 4096
"""Longest line that is waited for; of a longer one that much is shown. Its rest might begin with half a pass."""
_HANDED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME")
"""Variables of the server that a command has as well; no other one, since they may hold keys."""
_LAUNCH: Final = """
import ctypes, os, resource, signal, sys
parent, nice, memory, *words = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.nice(int(nice))
try:
    with open("/proc/self/oom_score_adj", "w") as file:  # before the server, where memory is short
        file.write("500")
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if int(memory):
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.exit(f"cannot be started: {error.strerror}")
"""
_GUARD: Final = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    group = int(line)
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
_PYTHON: Final = (sys.executable, "-I", "-S", "-c")


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: `values` are what is told of its stream, by name."""
    usual = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    told = {f"FLOWCTL_STREAM_{name.upper()}": value for name, value in values.items()}
    return {"PATH": os.defpath} | usual | told


class Guard:
    """Kills the groups that it knows when the server has gone. One thread."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1  # to it

    def add(self, group: int) -> None:
        self._groups.add(group)
        if self._process is None or self._process.poll() is not None:
            self.close()
            its, self._pipe = os.pipe()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this very program
                    [*_PYTHON, _GUARD], stdin=its, process_group=0, env=environment({})
                )
            finally:
                os.close(its)
            for known in self._groups:
                self._say(known)
        else:
            self._say(group)

    def remove(self, group: int) -> None:
        self._groups.discard(group)
        self._say(-group)

    def close(self) -> None:
        """End it; it kills what it still knows."""
        process, self._process = self._process, None
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if process is not None:
            process.wait()

    def _say(self, group: int) -> None:
        with contextlib.suppress(OSError):  # it was killed; the next group starts another one
            os.write(self._pipe, b"%d\n" % group)


class CommandProcess:
    """A process of a command, and all that it starts. The thread that started it, which has to live as long.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, words: Sequence[str], values: Mapping[str, str], *, nice: int, memory_bytes: int, guard: Guard
    ) -> None:
        self._guard: Final = guard
        self.output, its = os.pipe()  # what it writes to standard output and standard error
        os.set_blocking(self.output, False)
        try:
            self._process: Final = subprocess.Popen(  # noqa: S603 - words of the settings, and no shell
                [*_PYTHON, _LAUNCH, str(os.getpid()), str(nice), str(memory_bytes), *words],
                stdin=subprocess.DEVNULL,
                stdout=its,
                stderr=its,
                process_group=0,
                env=environment(values),
            )
        except OSError:
            os.close(self.output)
            raise
        finally:
            os.close(its)
        self.pid: Final = self._process.pid
        try:
            guard.add(self.pid)
        except OSError:  # no descriptor or process is left for it: what nobody would know must not go on
            self.finish()
            raise
        self.silent = False  # nobody of the group has its output open any more
        self._rest = b""
        self._cut = False  # whether the line that goes on was shown
        self._unread = 0  # lines that were not looked at

    def lines(self) -> list[str]:
        """Return lines that it has written since, some of them where they are many.

        What is shown by a carriage return counts as a line.
        """
        data = b""
        while not self.silent and len(data) < _READ_BYTES:
            try:
                came = os.read(self.output, _READ_BYTES)
            except BlockingIOError:
                break
            self.silent = not came
            data += came
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if self._cut and lines:
            del lines[0]
            self._cut = False
        if self._cut:
            self._rest = b""
        elif self._rest and (self.silent or len(self._rest) > _MOST_LINE_BYTES):
            lines, self._rest, self._cut = [*lines, self._rest], b"", True
        self._unread += max(0, len(lines) - _MOST_LINES)
        return [text for line in lines[:_MOST_LINES] if (text := line.decode(errors="replace").strip())]

    def take_unread(self) -> int:
        """Return how many lines came since and were not looked at."""
        unread, self._unread = self._unread, 0
        return unread

    @property
    def ended(self) -> bool:
        """Whether the command itself has ended; it is not reaped, so that its group is still its own."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the server was started with SIGCHLD ignored: the kernel has reaped it
            return True

    def ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def finish(self) -> int | None:
        """Kill what is left of it, and return its exit status; negative: the number of a signal. None: it lives on."""
        self._signal(signal.SIGKILL)
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # it has become another user's, or is deep in the kernel
            return None
        self._guard.remove(self.pid)
        os.close(self.output)
        return status

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
