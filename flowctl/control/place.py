"""Where the servers of a user listen for operations on this machine, and how one of them is found.

Each server has a unix socket in a folder of its user, ``$XDG_RUNTIME_DIR/flowctl`` or, where there is no such thing,
``flowctl-UID`` in the folder of temporary files. The folder is the user's alone (mode 0700): who can open what is in
it is that user, or root. So a folder or a socket that another user could have put there is refused, and not mended.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, FlowctlError

SUFFIX: Final = ".sock"
_PREFIX: Final = "live-"
_DRAINING: Final = "-draining-"
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._:-]")
_MOST_PATH_BYTES: Final = 107
"""Longest path of a unix socket (unix(7))."""
_LOOK_S: Final = 2.0
"""Longest wait for a socket that is asked whether a server listens: the answer is the kernel's."""
SERVICE_FOLDER: Final = Path("/run/flowctl/flowctl")
"""Where the service of packaging/systemd has its socket. Its folder is systemd's to make, so root may trust it; the
folders of other users are theirs, and what listens there could be anything."""
_ELSEWHERE: Final = "set XDG_RUNTIME_DIR to a folder of your own, or name a socket with --control ipc:///path"

_TO_CALL: Final = "set XDG_RUNTIME_DIR to a folder of your own, or name the server with --server ADDRESS"


class NotFoundError(FlowctlError):
    """No server, or more than one, is there to be spoken to."""


def runtime_folder() -> Path:
    """Return the folder of this user's sockets; it need not be there."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if Path(base).is_absolute() and _is_ours(Path(base)):
        return Path(base) / "flowctl"
    return Path(tempfile.gettempdir()) / f"flowctl-{os.geteuid()}"


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def usual_socket(host: str, port: int) -> Path:
    """Return the path for a server that listens on `host` and `port`, in a folder that is there and safe."""
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}", hint=_ELSEWHERE) from error
    return folder / f"{_PREFIX}{_UNFIT.sub('-', host)}-{port}{SUFFIX}"


def make_way(path: Path) -> None:
    """See that a socket can be made at `path` that is this user's alone; what a server of before has left goes."""
    if not check_path(path):
        return
    if server_answers(path):
        raise ConfigError(f"another server listens at {path}", hint="end it, or name another socket")
    path.unlink(missing_ok=True)


def check_path(path: Path) -> bool:
    """See that a socket of this user alone may be at `path`; return whether one is there."""
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ConfigError(
            f"the path {short(str(path))} has more than {_MOST_PATH_BYTES} bytes, a socket can have no more",
            hint=_ELSEWHERE,
        )
    check_private(path.parent)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{path} is there and is no socket of this user", hint=_ELSEWHERE)
    return True


def check_private(folder: Path) -> None:
    """See that a folder is this user's alone, and no link to another one."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}", hint=_ELSEWHERE) from error
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is no folder but a link or a file", hint=_ELSEWHERE)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"the folder {folder} belongs to another user", hint=_ELSEWHERE)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"others can use the folder {folder} (mode {stat.S_IMODE(status.st_mode):04o})", hint=f"chmod 700 {folder}"
        )


def server_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_LOOK_S)
        try:
            probe.connect(str(path))
        except PermissionError:
            raise
        except (BlockingIOError, TimeoutError):
            return True  # so many want to connect that its queue is full: it is there, and its socket is its own
        except OSError:
            return False
        return True


def servers_here() -> list[Path]:
    """Return the sockets of this user's servers that answer, by name; root finds that of the service too.

    Who calls, root above all, gives secrets away: what listens in a folder that another user could have made could be
    anything, so it is not looked into.
    """
    folders = [runtime_folder()]
    if os.path.lexists(folders[0]):
        try:
            check_private(folders[0])
        except ConfigError as error:
            raise ConfigError(f"no server is looked for: {error}", hint=_TO_CALL) from error
    if os.geteuid() == 0 and SERVICE_FOLDER not in folders:
        folders.append(SERVICE_FOLDER)
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError):
            paths += sorted(folder.glob(f"*{SUFFIX}"))
    return [path for path in paths if _is_our_server(path)]


def _is_our_server(path: Path) -> bool:
    try:
        return server_answers(path)
    except PermissionError:
        return False


def find_server(name: str | None) -> str:
    if name is not None and "://" in name:
        return name
    if name is not None and "/" in name:
        return f"ipc://{name}"
    here = servers_here()
    # Of two with one port, one of which drains, the one that stays is meant; the other has a name of its own.
    fitting = [path for path in here if not is_draining(path)] or here
    if name is not None:
        fitting = [path for path in here if _fits(path, name)]
    if len(fitting) == 1:
        return f"ipc://{fitting[0]}"
    names = ", ".join(map(name_of, fitting or here))
    if not here:
        raise NotFoundError(
            "no server of this user runs on this machine",
            hint="start one with flowctl serve live, or name one with --server ADDRESS",
        )
    if not fitting:
        raise NotFoundError(f"no server here is called {short(name)}", hint=f"there are {names}")
    raise NotFoundError(f"{len(fitting)} servers run here: {names}", hint="choose one with --server NAME")


def draining_name(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}{_DRAINING}{os.getpid()}{SUFFIX}")


def is_draining(path: Path) -> bool:
    return _DRAINING in path.name


def name_of(path: Path) -> str:
    """Return the name of a server by its socket: the address and port that it serves."""
    return path.name.removesuffix(SUFFIX).removeprefix(_PREFIX)


def _fits(path: Path, asked_name: str) -> bool:
    name = name_of(path)
    return asked_name == name or name.endswith(f"-{asked_name}")
