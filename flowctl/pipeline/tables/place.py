"""The folder that results go to: on this machine, or wherever Spark can write (hdfs, s3a, ...).

Results of a run of several jobs are made in a folder of their own within it (`Place.staging`) and take the names of the
earlier ones when all is done (`Place.adopt`), each of them by a rename: a file at once, a folder after the earlier one
was renamed aside. So nobody ever finds half a report or half a table, and a file that a server watches (``bans.jsonl``)
is there at every moment. On object stores a rename is a copy: there a reader can come in between.

On this machine files are handled by Python; elsewhere by Hadoop's file systems, which Spark brings along.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from flowctl.errors import ConfigError, FlowctlError
from flowctl.text.files import write_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_TEXT_BYTES: Final = 16 * 1024 * 1024
"""Longest text file that is read here: the longest ban list; anything longer is not one of ours."""

_STAGING: Final = "_new-"
"""Begin of the names of folders in the making: Spark passes over names that begin with ``_``. Host and number of the
process follow, so that what a killed run has left is told from what another one is making."""

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def local_path(text: str) -> Path | None:
    """Return the path on this machine that a text means; None: it is elsewhere."""
    if text.startswith("file:"):
        return Path(unquote("/" + text.removeprefix("file:").lstrip("/")))
    return None if _SCHEME.match(text) else Path(text)


def is_staging(folder: str) -> bool:
    """Return whether a folder is one of `Place.staging`, in which a run of several jobs makes its results."""
    return folder.rstrip("/").rpartition("/")[2].startswith(_STAGING)


class Place:
    """A folder for results.

    Args:
        spark: session, for places that are not on this machine.
        folder: path or address of it; made if it is missing.

    Raises:
        ConfigError: it is a file, or cannot be made or written.
    """

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark = spark
        self.folder = folder.rstrip("/") or "/"
        self._local = local_path(self.folder)
        if self._local is None:
            return
        try:
            self._local.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {folder}: {error.strerror}", hint="--out names a folder of your own"
            ) from error
        if not os.access(self._local, os.W_OK):
            raise ConfigError(f"the folder {folder} is not writable", hint="--out names a folder of your own")

    def path(self, name: str) -> str:
        """Return where an output of that name lies."""
        return str(self._local / name) if self._local is not None else f"{self.folder}/{name}"

    def staging(self) -> Place:
        """Return a new folder within this one to make results in."""
        return Place(self._spark, self.path(f"{_staging_prefix()}{os.getpid()}-{secrets.token_hex(4)}"))

    def exists(self, name: str) -> bool:
        """Return whether there is an output of that name."""
        if self._local is not None:
            return (self._local / name).exists()
        system, path = self._hadoop(name)
        return bool(system.exists(path))

    def names(self) -> list[str]:
        """Return what is in it, by name, without hidden files."""
        if self._local is not None:
            found = [path.name for path in self._local.iterdir()]
        else:
            system, path = self._hadoop("")
            found = [str(item.getPath().getName()) for item in system.listStatus(path)]
        return sorted(name for name in found if not name.startswith((".", "_")))

    def delete(self, name: str) -> None:
        """Delete an output, a file or a folder; one that is not there is well."""
        if self._local is not None:
            path = self._local / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            return
        system, path = self._hadoop(name)
        system.delete(path, True)

    def read_text(self, name: str) -> str | None:
        """Return a text file; None: there is none, or it is too long to be one of ours."""
        if self._local is not None:
            path = self._local / name
            if not path.is_file() or path.stat().st_size > MOST_TEXT_BYTES:
                return None
            return path.read_text("utf-8", errors="replace")
        system, path = self._hadoop(name)
        if not system.exists(path) or system.getFileStatus(path).getLen() > MOST_TEXT_BYTES:
            return None
        stream = system.open(path)
        try:
            octets = self._jvm().org.apache.commons.io.IOUtils.toByteArray(stream)
        finally:
            stream.close()
        return bytes(octets).decode("utf-8", errors="replace")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file, whole or not at all.

        Raises:
            FlowctlError: it cannot be written.
        """
        if self._local is not None:
            write_text(self._local / name, text)
            return
        system, path = self._hadoop(name)
        _, temporary = self._hadoop(f"_{name}.{secrets.token_hex(4)}")
        stream = system.create(temporary, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        system.delete(path, True)
        self._rename(system, temporary, path)

    def adopt(self, staging: Place, name: str) -> None:
        """Give an output that was made in `staging` its name here, in place of an earlier one.

        Raises:
            FlowctlError: it cannot be moved.
        """
        if self._local is not None and staging._local is not None:
            try:
                _replace(staging._local / name, self._local / name)
            except OSError as error:
                raise FlowctlError(f"cannot replace {self.path(name)}: {error.strerror}") from error
            return
        system, target = self._hadoop(name)
        _, source = staging._hadoop(name)
        system.delete(target, True)
        self._rename(system, source, target)

    def remove(self) -> None:
        """Delete the folder with all that is in it; one that is gone already is well."""
        if self._local is not None:
            shutil.rmtree(self._local, ignore_errors=True)
            return
        system, path = self._hadoop("")
        system.delete(path, True)

    def clear_staging(self) -> int:
        """Delete what runs that were killed have left in the making, and return how many folders that were."""
        if self._local is None:
            return 0  # elsewhere another run may be at work, and nothing tells whether it is
        begin = _staging_prefix()
        left = [path for path in self._local.glob(f"{begin}*") if path.is_dir() and not _runs(path.name[len(begin) :])]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return len(left)

    def _jvm(self) -> Any:
        return self._spark._jvm  # noqa: SLF001 - the way to Hadoop's file systems

    def _hadoop(self, name: str) -> tuple[Any, Any]:
        path = self._jvm().org.apache.hadoop.fs.Path(f"{self.folder}/{name}".rstrip("/"))
        return path.getFileSystem(self._spark._jsc.hadoopConfiguration()), path  # noqa: SLF001 - the same

    def _rename(self, system: Any, source: Any, target: Any) -> None:
        if not system.rename(source, target):
            raise FlowctlError(f"cannot rename {source.toString()} to {target.toString()}")


def _staging_prefix() -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "", socket.gethostname()) or "host"
    return f"{_STAGING}{host}-"


def _runs(rest: str) -> bool:
    """Return whether the process runs whose number `rest` begins with; what is no number is not ours to judge."""
    number = rest.partition("-")[0]
    if not number.isascii() or not number.isdigit():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _replace(new: Path, old: Path) -> None:
    """Give `new` the name of `old`. A file in one step; a folder cannot replace one that is not empty, so in two."""
    if new.is_file() and not old.is_dir():
        new.replace(old)
        return
    aside = new.with_name(f"old-{old.name}")
    if old.exists():
        old.rename(aside)
    new.rename(old)
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
