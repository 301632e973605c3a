"""Who may do what on the admin surface: tokens of a file, compared in constant time; their text is kept nowhere."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

import structlog

from flowctl.control.operations import Permission
from flowctl.errors import ConfigError
from flowctl.live.reload.watchfile import WatchedFile

_log: Final = structlog.get_logger("flowctl.admin")
_LEAST: Final = 16
"""Shortest token, characters: one that is made at random has 80 bits with that."""
_MOST_BYTES: Final = 64 * 1024
_LEVELS: Final = {"basic": Permission.BASIC, "admin": Permission.ADMIN}


class Tokens:
    """The tokens of a file: lines ``TOKEN [basic|admin]``, without a level admin; ``#`` begins a comment.

    A file that has changed is read again before the next token is looked at; one that is not valid changes nothing.
    One thread.
    """

    def __init__(self, path: Path) -> None:
        self._digests: list[tuple[bytes, Permission]] = []
        self._file: Final = WatchedFile(path, self._take, _MOST_BYTES)
        if not self._file.read():
            raise ConfigError(f"admin_token_file: there is no file {path}", hint="a line of it is TOKEN [basic|admin]")

    def _look(self) -> None:
        try:
            if self._file.read():
                _log.info("admin tokens changed", tokens=len(self._digests))
        except ConfigError as error:
            _log.error("admin_token_file is not valid, the tokens of before stay in force", fault=str(error))

    def _take(self, text: str, path: str) -> None:
        digests: list[tuple[bytes, Permission]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            level = _LEVELS.get(words[1] if len(words) > 1 else "admin")
            if level is None or len(words) > 2 or len(words[0]) < _LEAST or not words[0].isascii():
                raise ConfigError(
                    f"{path}, line {number}: not TOKEN [basic|admin] with a token of {_LEAST} characters or more",
                    hint="python -c 'import secrets; print(secrets.token_urlsafe())' makes one",
                )
            digests.append((digest_of(words[0]), level))
        if not digests:
            raise ConfigError(f"admin_token_file: {path} has no token", hint="a line of it is TOKEN [basic|admin]")
        self._digests = digests

    def permission(self, token: str) -> Permission:
        self._look()
        given, found = digest_of(token), Permission.NONE
        for digest, level in self._digests:
            if hmac.compare_digest(digest, given):
                found = max(found, level)
        return found


def digest_of(token: str) -> bytes:
    """Return what is kept of a token: it tells tokens apart, and not what they are."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
