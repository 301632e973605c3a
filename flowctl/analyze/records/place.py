"""Folders on this machine or a store: where records lie (`Storage`), and where results go (`RecordPlace`).

Results are made in a folder of their own (`RecordPlace.staging`) and take the names of the earlier ones when all is
done (`RecordPlace.adopt`), each by a rename: nobody ever finds half a table. Object stores have no rename of folders:
there they are copied, and a reader can come in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from flowctl.core.folders.folders import check_way, planted
from flowctl.core.text.files import held, write_text
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError, FlowctlError

MOST_TEXT_BYTES: Final = 64 * 1024 * 1024
"""Longest text file that is read here: four times the longest ban list, so that one that outgrew it can be cut."""
_STAGING: Final = "_new-"
"""Prefix of folders that are not complete yet: Spark passes over names that begin with ``_``."""
_MARK: Final = "_flowctl"
"""File that marks a folder of results as ours; folders without it are left alone."""
_PATIENCE_S: Final = 60.0
"""Longest wait for another writer of a file, who takes seconds; any reader of a folder can lock it for ever."""
_FOR_ALL: Final = stat.S_ISVTX | stat.S_IWOTH
"""Mode bits of a folder that all users write to, like /tmp."""
_FLAT: Final = ("s3", "gcs")
"""Stores that cannot rename a folder."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def local_path(text: str) -> Path | None:
    """Return the path on this machine that a text means; None: it is elsewhere."""
    if text.startswith("file:"):
        return Path(unquote("/" + text.removeprefix("file:").lstrip("/")))
    return None if _SCHEME.match(text) else Path(text)


def resolved(text: str) -> str:
    path = local_path(text)
    return text.rstrip("/") if path is None else str(path.absolute().resolve())


def literal(address: str) -> str:
    """Return an address whose name Spark takes letter by letter: to it ``[``, ``{``, ``*`` and ``?`` are patterns."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", address)


def s3_options(settings: Mapping[str, str]) -> dict[str, str]:
    """Return where an S3 store is, as pyarrow's `S3FileSystem` takes it; empty: Amazon's, the region asked for.

    pyarrow knows neither the settings of Hadoop nor an endpoint in the environment. Credentials are never among these.
    """
    named = ("spark.hadoop.fs.s3a.endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((settings[name] for name in named if settings.get(name)), "")
    if not endpoint:
        return {}
    plain = settings.get("spark.hadoop.fs.s3a.connection.ssl.enabled") == "false"
    scheme, _, host = endpoint.rpartition("://")
    found = {"endpoint_override": host.rstrip("/"), "scheme": scheme or ("http" if plain else "https")}
    region = settings.get("spark.hadoop.fs.s3a.endpoint.region") or settings.get("AWS_REGION")
    return found | ({"region": region} if region else {})


@dataclass(frozen=True, slots=True)
class Storage:
    """A folder and the file system that it lies on."""

    system: Any  # of `pyarrow.fs`
    base: str  # the folder, as `system` names it
    prefix: str  # its address, as Spark takes it, with which those of all in it begin; empty on this machine

    @staticmethod
    def of(address: str, settings: Mapping[str, str] | None = None) -> Storage:
        """Return the folder of an address, a path or like ``s3a://bucket/folder``; `settings`: see `s3_options`."""
        if (local := local_path(address)) is not None:
            return Storage(fs.LocalFileSystem(), str(local.absolute()), "")
        url = urlparse(address)
        s3 = url.scheme in ("s3", "s3a", "s3n")
        try:
            base = f"{url.netloc}{url.path}"
            if s3 and (options := s3_options(dict(os.environ) | dict(settings or {}))):
                system = fs.S3FileSystem(**options)
            else:
                system, base = fs.FileSystem.from_uri(f"s3://{base}" if s3 else address)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(f"{address} cannot be read: {str(error).splitlines()[0]}") from error
        return Storage(system, base.rstrip("/"), address.rstrip("/"))

    def path(self, name: str) -> str:
        """Return how the file system names what lies under that name in the folder; empty: the folder itself."""
        return f"{self.base}/{name}" if name else self.base

    def address(self, path: str) -> str:
        """Return the address by which Spark finds what the file system names `path`."""
        return f"{self.prefix}{path[len(self.base) :]}" if self.prefix else path

    def name(self, address: str) -> str:
        """Return how the file system names what has that address."""
        return f"{self.base}{address[len(self.prefix) :]}" if self.prefix else address

    def uri(self, path: str) -> str:
        """Return the same as `address` for Spark, to which a bare path may be one of another file system."""
        return self.address(path) if self.prefix else f"file://{path}"

    def is_folder(self, name: str) -> bool:
        return bool(self._info(self.path(name)).type == fs.FileType.Directory)

    def exists(self, name: str) -> bool:
        return bool(self._info(self.path(name)).type != fs.FileType.NotFound)

    def walk(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield all files below a folder, not behind links of folders: path below it, what the file system says."""
        folder = self.path(name)
        for info in self._info(fs.FileSelector(folder, recursive=True)) if self.prefix else self._local(folder):
            if info.type == fs.FileType.File or not self.prefix:
                yield info.path[len(folder) + 1 :], info

    def strange(self, info: Any) -> str:
        """Return why what `walk` yields is not to be opened; empty: it may be."""
        if not self.prefix and info.type != fs.FileType.File:
            return "it is no regular file"
        if self.prefix or Path(info.path).resolve().is_relative_to(Path(self.base).resolve()):
            return ""
        return "it is behind a link that leads out of the folder"

    def _local(self, folder: str) -> Iterator[Any]:
        """Yield what there is of all files below a folder of this machine."""
        with self._readable():
            for path, _, names in os.walk(folder, onerror=_raise):
                paths = [f"{path}/{name}" for name in names]
                for odd in (name for name in paths if not _is_text(name) and name.endswith(".parquet")):
                    raise ConfigError(f"{odd!a} is no name in UTF-8", hint="rename the file, or its folder")
                yield from self.system.get_file_info([name for name in paths if _is_text(name)])

    def _info(self, what: Any) -> Any:
        with self._readable():
            return self.system.get_file_info(what)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "run as who may read it, or ask its owner"
            raise ConfigError(f"{self.address(self.base)} cannot be read: {error}", hint=hint) from error


def _is_text(name: str) -> bool:
    """Return whether a name, as the system gave it, is UTF-8: Arrow takes no other."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _raise(error: OSError) -> None:
    raise error


class RecordPlace:
    """A folder for results, a path or an address; made if it is missing. `settings` are of Spark, see `s3_options`."""

    _ours: frozenset[str] = frozenset()  # folders in it that are marked

    def __init__(self, folder: str, settings: Mapping[str, str] | None = None, *, make: bool = True) -> None:
        self.storage = Storage.of(folder, settings)
        self.folder, self._settings = self.path(""), settings
        if make:
            self._make(folder)

    def _make(self, folder: str) -> None:
        try:
            if self.storage.prefix:
                self.storage.system.create_dir(self.storage.base, recursive=True)
            else:  # as hidden as the records' own: who else is to read it is in the group
                path = Path(self.storage.base)
                path.mkdir(0o750, parents=True, exist_ok=True)
                check_way(path)
                if path.stat().st_mode & _FOR_ALL == _FOR_ALL:  # what is found there counts, `record.json` for instance
                    raise PermissionError(errno.EACCES, "it is for everybody's files; name a folder in it")
                if not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, "permission denied")
        except OSError as error:
            reason = error.strerror or str(error).splitlines()[0]
            raise ConfigError(f"cannot write to {folder}: {reason}", hint="--out names a folder of your own") from error

    def path(self, name: str) -> str:
        """Return where an output of that name lies, as Spark takes it."""
        return self.storage.address(self.storage.path(name))

    def staging(self) -> RecordPlace:
        return self.inner(f"{_STAGING}{secrets.token_hex(4)}")

    def inner(self, name: str) -> RecordPlace:
        return RecordPlace(self.path(name), self._settings)

    def exists(self, name: str) -> bool:
        return bool(self._info(name).type != fs.FileType.NotFound)

    def names(self, folder: str = "") -> list[str]:
        """Return what is in it, or in a folder of it, by name, without hidden files; nothing if that is not there."""
        selector = fs.FileSelector(self.storage.path(folder), allow_not_found=True)
        found = (info.base_name for info in self.storage.system.get_file_info(selector))
        return sorted(name for name in found if not name.startswith((".", "_")))

    def state(self, name: str) -> list[tuple[str, int, int]]:
        """Return the path, size and time of change of each file of an output, which tell whether somebody wrote it."""
        info, path = self._info(name), self.storage.path(name)
        selector = fs.FileSelector(path, allow_not_found=True, recursive=True)
        files = [info] if info.type == fs.FileType.File else self.storage.system.get_file_info(selector)
        found = (file for file in files if file.type == fs.FileType.File)
        return sorted((file.path.removeprefix(path), file.size, file.mtime_ns) for file in found)

    def delete(self, name: str) -> None:
        """Delete an output, a file or a folder; one that is not there is well."""
        path, kind = self.storage.path(name), self._info(name).type
        if not self.storage.prefix:  # a link goes, what it leads to stays; files of another's are left
            link = Path(path).is_symlink()
            shutil.rmtree(path, ignore_errors=True) if Path(path).is_dir() and not link else Path(path).unlink(True)
        elif kind == fs.FileType.Directory:
            self.storage.system.delete_dir(path)
        elif kind != fs.FileType.NotFound:
            self.storage.system.delete_file(path)

    def read_text(self, name: str) -> str | None:
        info = self._info(name)
        if info.type != fs.FileType.File:
            return None
        if info.size > MOST_TEXT_BYTES:
            told = f"{self.path(name)} has {info.size} bytes, {MOST_TEXT_BYTES} are allowed, so it is left as it is"
            raise ConfigError(told, hint="move it away, or shorten it")
        try:
            with self.storage.system.open_input_stream(info.path) as stream:
                return text_of(bytes(stream.read()), "replace")
        except OSError as error:
            hint = "run as who may read it, or ask its owner"
            raise ConfigError(f"{self.path(name)} cannot be read: {error}", hint=hint) from error

    def change_text(self, name: str, change: Callable[[str], str]) -> None:
        """Change a text file that others write too, of "" where there is none: they wait, and it stays theirs."""
        with contextlib.nullcontext() if self.storage.prefix else held(Path(self.storage.path(name)), _PATIENCE_S):
            there = self.read_text(name)
            text = change(there or "")
            if text != there:
                self.write_text(name, text, shared=True)

    def write_text(self, name: str, text: str, *, shared: bool = False) -> None:
        """Write a text file, whole or not at all; `shared`: whether one of another user stays theirs."""
        path = self.storage.path(name)
        if not self.storage.prefix:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(path), text, shared=shared)
            return
        try:
            self.storage.system.create_dir(path.rpartition("/")[0], recursive=True)
            with self.storage.system.open_output_stream(path) as stream:  # stores show an object when it is whole
                stream.write(text.encode())
        except OSError as error:
            raise FlowctlError(f"cannot write {self.path(name)}: {error}") from error

    def check_ours(self, names: Iterable[str]) -> None:
        """See to it that folders of these names may be replaced: they are ours, empty or not there."""
        for name in names:
            if self.storage.is_folder(name) and self.names(name) and not self.exists(f"{name}/{_MARK}"):
                told = f"{self.path(name)} would be replaced by results, and is not a folder of results"
                raise ConfigError(told, hint="move it away, or name another folder with --out")

    def adopt(self, staging: RecordPlace, name: str) -> None:
        """Give an output that was made in `staging` its name here, in place of an earlier one."""
        folder = name.partition("/")[0]
        if folder not in self._ours:
            self.check_ours([folder])
            if staging.storage.is_folder(folder):
                owner = staging if folder == name else self
                owner.write_text(f"{folder}/{_MARK}", "Made by flowctl analyze, which replaces what is in here.\n")
            self._ours |= {folder} - {name}
        new, old = staging.storage.path(name), self.storage.path(name)
        aside = f"old-{name.replace('/', '-')}"
        file = fs.FileType.File
        try:
            self.storage.system.create_dir(old.rpartition("/")[0], recursive=True)
            if self.exists(name) and not staging._info(name).type == self._info(name).type == file:
                self._move(old, staging.storage.path(aside))
            self._move(new, old)
        except OSError as error:
            raise FlowctlError(f"cannot replace {self.path(name)}: {error}") from error
        staging.delete(aside)

    def remove(self) -> None:
        """Delete the folder with all that is in it; one that is gone already is well."""
        self.delete("")

    def clear_staging(self) -> None:
        """Delete what killed runs have left in the making; only on this machine, where the runner holds a lock."""
        for path in () if self.storage.prefix else Path(self.storage.base).iterdir():
            if re.fullmatch(f"{_STAGING}[0-9a-f]{{8}}", path.name) or planted(path):
                try:
                    self.delete(path.name)
                except OSError as error:
                    hint = "name a folder to which nobody else writes"
                    raise ConfigError(f"cannot delete {path}: {error.strerror}", hint=hint) from error

    def _info(self, name: str) -> Any:
        return self.storage.system.get_file_info(self.storage.path(name))

    def _move(self, source: str, target: str) -> None:
        system = self.storage.system
        if system.type_name in _FLAT and system.get_file_info(source).type == fs.FileType.Directory:
            system.create_dir(target, recursive=True)
            fs.copy_files(source, target, source_filesystem=system, destination_filesystem=system)
            system.delete_dir(source)
        else:
            system.move(source, target)
