"""Files of results, written whole or not at all: into a temporary file beside, which then takes the name.

A reader of the file, a CI job that was interrupted for instance, never finds half of a report. A link keeps leading to
the file that it names; a device or a pipe (/dev/stdout, /dev/null) is written to as it is and never replaced by a file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flowctl.errors import ConfigError, FlowctlError

_HINT: Final = "check that the disk has room and the folder is writable"


def check_target(path: Path, field: str) -> None:
    """See to it that a file can be written there, before a run that may take hours.

    Raises:
        ConfigError: `path` is a folder, or its folder is none or not writable; names `field`.
    """
    try:
        _check_target(path, field)
    except OSError as error:  # what is in a folder that may not be looked into
        raise ConfigError(f"{field} {path}: {error.strerror}", hint="name a file in a folder of your own") from error


def _check_target(path: Path, field: str) -> None:
    folder = Path(os.path.realpath(path)).parent  # Path.resolve raises on links that lead in a circle
    if path.is_dir():
        raise ConfigError(f"{field} {path} is a folder", hint="name a file in it")
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{field} {path} is not writable", hint="name a file in a folder of your own")
        return
    if not folder.is_dir():
        raise ConfigError(f"{field} {path}: there is no folder {folder}", hint="make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{field} {path}: the folder {folder} is not writable", hint="name a file in a folder of your own"
        )


def _is_special(path: Path) -> bool:
    """Return whether something is there that is no file: a device, a pipe, a terminal."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it becomes `path` at the end, and nothing is left of it after an error.

    A device or a pipe is given itself.

    Raises:
        FlowctlError: the file cannot be made, or cannot take its name.
    """
    if _is_special(path):
        try:
            yield path
        except OSError as error:
            raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
        return
    target = Path(os.path.realpath(path))
    try:
        number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(number)
    except OSError as error:
        raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes it for the owner alone; a result is as readable as any file of its user.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    except OSError as error:
        raise FlowctlError(f"cannot write {path}: {error.strerror}", hint=_HINT) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        FlowctlError: it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
