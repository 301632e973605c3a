r"""A pool in files, bounded by bytes and by number: one file for each object, which survive the process.

Theory of operation. A file is written under another name and renamed when it is complete, so a process that is killed
leaves whole objects and perhaps a part, which the next start removes. Its name is the object's ticket, 16 digits: order
and eviction go on where they were. The layout, numbers big-endian::

    "FDO1"  length of the id (2)  length of the object (8)  id  object

Files are written and read on other threads; what is in the pool is known on the loop's thread. An evicted object's file
goes when nobody holds its entry any more, so what was announced can be sent. Where the disk is full the oldest objects
make room; where that does not help, the object is not kept, as one too large for the pool.

The data is not forced to the disk: what a failure of power loses or damages is found by its length, or by its id when
it is read, and fetched again.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from flowctl.core.folders.folders import opened_folder, replacing_below, resolve_folder
from flowctl.errors import ConfigError, StoreError
from flowctl.nodes.diffusion.objects import short_id
from flowctl.nodes.diffusion.pool.memory import accept_all
from flowctl.nodes.diffusion.pool.pool import PoolEntry, check_own, sha256_of
from flowctl.nodes.diffusion.pool.shelf import Shelf

DEFAULT_MAX_BYTES: Final = 4 << 30
DEFAULT_MAX_OBJECTS: Final = 100_000
_MAGIC: Final = b"FDO1"
_HEADER: Final = struct.Struct(">4sHQ")
_SUFFIX: Final = ".object"
_PART: Final = ".part"
_LOCK: Final = "lock"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_log = logging.getLogger("flowctl.diffusion")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class StoredFile:
    ticket: int
    object_id: bytes
    size_bytes: int
    path: Path
    identify: Callable[[bytes], bytes]
    topic: str = ""

    def read(self) -> bytes:
        try:
            data = self.path.read_bytes()[_HEADER.size + len(self.object_id) :]
            sound = len(data) == self.size_bytes and self.identify(data) == self.object_id
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}", code="path") from error
        except ValueError:
            sound = False
        if not sound:
            raise StoreError(f"{self.path} does not hold object {short_id(self.object_id)} any more", code="damaged")
        return data

    def doom(self) -> None:
        weakref.finalize(self, _remove, self.path).atexit = False


class FilePool:
    """Objects in the files of a folder. An `ObjectPool`, for one process at a time."""

    def __init__(
        self,
        folder: Path | str,
        *,
        identify: Callable[[bytes], bytes] = sha256_of,
        validate: Callable[[bytes, bytes], str | None] = accept_all,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_objects: int = DEFAULT_MAX_OBJECTS,
    ) -> None:
        try:
            self._folder: Final = resolve_folder(Path(folder), "pool")
        except ConfigError as error:
            raise StoreError(str(error), code="path") from error
        self._identify = identify
        self._validate = validate
        self._shelf: Final[Shelf[StoredFile]] = Shelf(max_bytes, max_objects, StoredFile.doom)
        self._turn = asyncio.Lock()  # one file after the other
        self._storing: asyncio.Future[None] | None = None  # a loop holds its tasks only weakly
        self.lost_count = 0  #: objects that were not kept because the disk was full
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be used: {error.strerror}", code="path") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except OSError as error:
            os.close(self._lock)
            code = "busy" if isinstance(error, BlockingIOError) else "path"
            raise StoreError(f"{self._folder} cannot be used: {error.strerror}", code=code) from error

    def _load(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.suffix == _PART:
                _remove(path)
            elif path.suffix == _SUFFIX:
                entry = self._entry_of(path)
                if entry is None or self._shelf.knows(entry.object_id) or entry.size_bytes > self._shelf.max_bytes:
                    _remove(path)
                    continue
                self._shelf.make_room(entry.object_id, entry.size_bytes)
                self._shelf.put(entry)
        self._shelf.tell()

    def _entry_of(self, path: Path) -> StoredFile | None:
        """Return what a file holds; None: it is damaged, or not ours."""
        try:
            ticket = int(path.stem, 16)
            with path.open("rb") as file:
                magic, id_bytes, size_bytes = _HEADER.unpack(file.read(_HEADER.size))
                object_id = file.read(id_bytes)
                whole = os.fstat(file.fileno()).st_size == _HEADER.size + id_bytes + size_bytes
        except (ValueError, struct.error):
            return None
        if magic != _MAGIC or not whole or not object_id:
            return None
        return StoredFile(ticket, object_id, size_bytes, path, self._identify)

    def __len__(self) -> int:
        return len(self._shelf)

    @property
    def size_bytes(self) -> int:
        return self._shelf.size_bytes

    async def get(self, object_id: bytes) -> bytes | None:
        entry = self._shelf.get(object_id)
        return None if entry is None else (await self.read_objects([entry]))[0]

    async def add(self, objects: Mapping[bytes, bytes]) -> Mapping[bytes, str]:
        check_own(objects, self._identify)
        return await self.add_objects(objects)

    async def add_objects(self, objects: Mapping[bytes, bytes]) -> Mapping[bytes, str]:
        rejected: dict[bytes, str] = {}
        for object_id, data in objects.items():
            wrong = None if self._shelf.knows(object_id) else self._validate(object_id, data)
            if wrong is not None:
                rejected[object_id] = wrong
                continue
            # Finished also where the caller is cancelled: a file without an entry would stay.
            storing = self._storing = asyncio.ensure_future(self._store(object_id, data))
            await asyncio.shield(storing)
        return rejected

    async def _store(self, object_id: bytes, data: bytes) -> None:
        shelf = self._shelf
        async with self._turn:
            if shelf.knows(object_id) or not shelf.make_room(object_id, len(data)):
                return
            path = self._folder / f"{shelf.next_ticket:016x}{_SUFFIX}"
            while True:
                try:
                    await asyncio.to_thread(_write, path, object_id, data)
                    break
                except OSError as error:
                    if error.errno not in _FULL:
                        raise StoreError(f"{path} cannot be written: {error.strerror}", code="path") from error
                    if not shelf:
                        self.lost_count += 1
                        shelf.forget(object_id)
                        _log.warning("%s is full: object %s is not kept", self._folder, short_id(object_id))
                        return
                    shelf.free(len(data))
            shelf.put(StoredFile(shelf.next_ticket, object_id, len(data), path, self._identify))
        shelf.tell()

    def object_id(self, data: bytes) -> bytes:
        return self._identify(data)

    def has_object(self, object_id: bytes) -> bool:
        return self._shelf.knows(object_id)

    def objects_after(self, ticket: int, limit: int) -> Sequence[PoolEntry]:
        return self._shelf.after(ticket, limit)

    def watch(self, callback: Callable[[], object]) -> Callable[[], None]:
        return self._shelf.watch(callback)

    async def read_objects(self, entries: Sequence[PoolEntry]) -> list[bytes]:
        return await asyncio.to_thread(lambda: [entry.read() for entry in entries])

    def close(self) -> None:
        """Let another process use the folder; nothing more may be asked of this object. A second call has no effect."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _write(path: Path, object_id: bytes, data: bytes) -> None:
    with (
        opened_folder(path.parent, None) as folder,
        replacing_below(folder, path.name, path.stem + _PART, 0o666) as file,
    ):
        file.write(_HEADER.pack(_MAGIC, len(object_id), len(data)) + object_id)
        file.write(data)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
