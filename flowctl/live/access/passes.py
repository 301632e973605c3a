"""Passes of the commands that a server runs: what lets a command view its stream, and publish what it makes of it.

A pass is a random token in the query of the addresses that a command is given. It is in force while the command is
wanted, is in no file, and is kept here as a digest. It stands in place of every other proof: what a command may do is
for the settings that name it to say.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from flowctl.live.access.request import LiveRequest

PASS_PARAMETER: Final = "run_token"  # noqa: S105 - no password but a name
_BYTES: Final = 18


class _Pass(NamedTuple):
    stream: str  # that it may be viewed with
    publishes: frozenset[str]


class Passes:
    """The passes of a server. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[bytes, _Pass] = {}  # by digest, so that a look-up tells nothing; guarded by _lock

    def give(self, stream: str, publishes: Iterable[str]) -> str:
        token = secrets.token_urlsafe(_BYTES)
        with self._lock:
            self._passes[_digest(token)] = _Pass(stream, frozenset(publishes))
        return token

    def revoke(self, token: str) -> None:
        with self._lock:
            self._passes.pop(_digest(token), None)

    def source(self, request: LiveRequest) -> str | None:
        """Return the stream whose command asks, with a pass for just that. None: it is no such request."""
        token = request.query.get(PASS_PARAMETER)
        if not token:
            return None
        with self._lock:
            found = self._passes.get(_digest(token))
        if found is None:
            return None
        allowed = request.stream in found.publishes if request.kind == "publish" else request.stream == found.stream
        return found.stream if allowed else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
