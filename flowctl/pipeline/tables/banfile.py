"""The ban list of a folder of results, which more than one may write: `abuse`, `all`, `watch`, and people.

Who writes takes a lock on the folder, reads what is there, adds its own (`flowctl.server.bans.merge_bans`) and replaces
the file by rename. So none of them ends a ban of another, and a server that watches the file finds the old or the new
list. A list that cannot be read is never written over: it may be what somebody wrote by hand, with a typing error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flowctl.errors import ConfigError
from flowctl.pipeline.tables.place import local_path
from flowctl.server.bans import MOST_BYTES, Ban, BanList

if TYPE_CHECKING:
    from flowctl.pipeline.tables.place import Place

BANS_FILE: Final = "bans.jsonl"
_HINT: Final = "mend or move the file, or begin a new list with --replace-bans"


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Within this context no other job on this machine changes the ban list of `folder`.

    The lock is on the folder itself, so no file is left; it goes with the process. Elsewhere than on this machine there
    is none: do not let two jobs write one list on an object store at once.
    """
    path = local_path(folder)
    if path is None:
        yield
        return
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def read_bans(place: Place) -> list[Ban]:
    """Return the bans of the list in `place`; none where there is no list.

    Raises:
        ConfigError: it cannot be read; names it.
    """
    if not place.exists(BANS_FILE):
        return []
    text = place.read_text(BANS_FILE)
    if text is None:
        raise ConfigError(f"{place.path(BANS_FILE)} is no file of at most {MOST_BYTES} bytes", hint=_HINT)
    return _parsed(text, place.path(BANS_FILE))


def read_local(path: Path) -> list[Ban]:
    """Return the bans of a list on this machine; none where there is no list.

    Raises:
        ConfigError: it cannot be read; names it.
    """
    try:
        size_bytes = path.stat().st_size
        text = path.read_text("utf-8") if size_bytes <= MOST_BYTES else None
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=_HINT) from error
    if text is None:
        raise ConfigError(f"{path} has {size_bytes} bytes, allowed are {MOST_BYTES}", hint=_HINT)
    return _parsed(text, str(path))


def _parsed(text: str, where: str) -> list[Ban]:
    try:
        return BanList.parse(text, where).bans
    except ConfigError as error:
        raise ConfigError(
            f"the ban list that is there cannot be read, so it is not replaced: {error}", hint=_HINT
        ) from error
