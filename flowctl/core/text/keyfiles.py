"""Keys in addresses, read from files.

A key in an address is seen by all users of the machine (``ps``), and stays in the shell's history. So ``?key=@FILE``
stands for ``?key=`` and what is in the file, ``?@FILE`` for a whole query, such as ``flowctl key sign`` writes, and
``/@FILE`` for a name that is a key: rtmps://host/live2/@youtube.key. Only what operators write is read so, never what a
peer says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from flowctl.core.text.private import check_private
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError

_MOST_CHARS: Final = 8192
"""Longest key or query: room for a signed token of 4 KiB, as in any address."""


def with_files(address: str) -> str:
    """Return an address with what the files that it names hold."""
    head, mark, query = address.partition("?")
    if file := name_file(head):
        head = head.removesuffix(f"@{file}") + _secret_in(Path(file))
    parts = []
    for part in query.split("&"):
        name, equals, value = part.partition("=")
        if part.startswith("@"):
            parts.append(_secret_in(Path(part[1:])).rpartition("?")[2])
        elif value.startswith("@"):
            parts.append(f"{name}{equals}{_secret_in(Path(value[1:]))}")
        else:
            parts.append(part)
    return head + mark + "&".join(parts)


def files_beside(address: str, folder: Path) -> str:
    """Return an address with the files that it names in a folder; a path that is absolute stays."""
    head, mark, query = address.partition("?")
    if file := name_file(head):
        head = head.removesuffix(file) + str(folder / file)
    parts = (re.sub("^((?:[^=]*=)?@)(.+)", lambda found: f"{found[1]}{folder / found[2]}", x) for x in query.split("&"))
    return head + mark + "&".join(parts)


def name_file(address: str) -> str:
    """Return the file that an address names in the place of its stream's name; empty: it names none."""
    path = address.partition("?")[0].partition("://")[2].partition("/")[2]
    return f"/{path}".partition("/@")[2]


def _secret_in(path: Path) -> str:
    hint = "it must hold the key, or the query, in one line"
    try:
        check_private(path)
        if not path.is_file():  # a pipe would have the thread that reads it wait
            raise ConfigError(f"{path}, which the address names, is no regular file", hint=hint)
        with path.open("rb") as file:
            text = text_of(file.read(4 * _MOST_CHARS)).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"cannot read {path}, which the address names: {why}", hint=hint) from error
    if not text or len(text) > _MOST_CHARS or not text.isprintable():
        raise ConfigError(f"{path}, which the address names, holds no key", hint=hint)
    return text
