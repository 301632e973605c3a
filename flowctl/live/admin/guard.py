"""The guard before the application: it checks the caller, its address, the size of a request and the time it takes.

A page of another site that its visitor's browser opens can send requests to this surface (CSRF), and with a name of its
own that it has resolve to this machine it could read the answers too (DNS rebinding). So without tokens the Host has to
be a name of this machine itself, an Origin has to be our own, and what changes something has to be JSON, which no form
of a browser sends. Tokens of a file are compared in constant time; their text is kept nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog
from starlette.exceptions import HTTPException

from flowctl.control.operations import MOST_CALL_BYTES, Permission
from flowctl.core.text.addresses import address_key, bracketed, is_loopback, is_own_origin, parse_host
from flowctl.core.text.watchfile import WatchedFile
from flowctl.errors import ConfigError
from flowctl.live.admin.asking import CallRefused

_log: Final = structlog.get_logger("flowctl.admin")
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_S: Final = 30.0
"""Longest time of a request: more than twice what the server waits for workers that hang."""
HEAD_BYTES: Final = 16 * 1024
EVENTS: Final = "/api/v1/events"
"""Path of the events: the one request that has no end."""
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Paths that need no token: whether the server is there, in a word."""
_HOST: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
"""Hosts that may stand in the policy of pages, where other characters have a meaning."""
_CHANGES: Final = frozenset({"POST", "PUT", "PATCH"})
HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
)

_LEAST_CHARS: Final = 16
"""Shortest token, characters: one that is made at random has 80 bits with that."""
_MOST_BYTES: Final = 64 * 1024
_LEVELS: Final = {"basic": Permission.BASIC, "admin": Permission.ADMIN}


def policy_for(host: str) -> str:
    """Return the content security policy of pages: no other host, and of this one any port, where the media are."""
    # CSP has no way to write an address of IPv6: pages there are shown media of their own port alone.
    near = "".join(f" {scheme}://{host}:*" for scheme in ("http", "https", "ws", "wss")) if host[:1] != "[" else ""
    return f"{_POLICY}connect-src 'self'{near}; media-src 'self' blob:{near}"


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
            if level is None or len(words) > 2 or len(words[0]) < _LEAST_CHARS or not words[0].isascii():
                raise ConfigError(
                    f"{path}, line {number}: not TOKEN [basic|admin] with a token of {_LEAST_CHARS} characters or more",
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
    """Return the digest that is kept of a token: it tells tokens apart without showing them."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Lets requests through to an ASGI application that may go there."""

    app: App
    tokens: Tokens | None
    is_static: Callable[[str], bool]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        sending = _Sending(send)
        try:
            headers = _headers(scope)
            sending.host = self._check_place(headers)
            self._check_form(scope, headers)
            state = scope.setdefault("state", {})
            state["permission"] = self._permission(scope["path"], headers)
            state["caller"] = self._caller(scope, headers)
            async with asyncio.timeout(None if scope["path"] == EVENTS else REQUEST_S):
                await self.app(scope, _Body(receive).receive, sending.send)
        except CallRefused as refused:
            await sending.answer(refused)
        except TimeoutError:
            await sending.answer(CallRefused("TIMEOUT", "the request took too long"))

    def _check_place(self, headers: dict[bytes, bytes]) -> str:
        """See that the request is for us, and not sent by the page of another site; return our name."""
        host = headers.get(b"host", b"").decode("latin-1")
        found = parse_host(host)
        if found is None or not _HOST.fullmatch(found[0]) or (self.tokens is None and not is_loopback(found[0])):
            raise CallRefused("WRONG_HOST", "the Host is no name of this machine", "open it as 127.0.0.1")
        origin = headers.get(b"origin")
        if origin is not None and not is_own_origin(origin.decode("latin-1"), host):
            raise CallRefused("WRONG_ORIGIN", "the page that asks is of another origin")
        if headers.get(b"sec-fetch-site", b"none") not in {b"none", b"same-origin"}:
            raise CallRefused("WRONG_ORIGIN", "the page that asks is of another site")
        return bracketed(found[0])

    def _check_form(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > MOST_CALL_BYTES:
            raise CallRefused("TOO_LONG", f"the body may have {MOST_CALL_BYTES} bytes", status=413)
        if scope["method"] in _CHANGES:
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise CallRefused("WRONG_TYPE", "the body must be application/json")

    def _permission(self, path: str, headers: dict[bytes, bytes]) -> Permission:
        if self.tokens is None:
            return Permission.ADMIN
        token = _token(headers)
        found = self.tokens.permission(token) if token else Permission.NONE
        if found is Permission.NONE and not (path in _OPEN_PATHS or self.is_static(path)):
            raise CallRefused("UNAUTHORIZED", "a token is missing or wrong", "Authorization: Bearer TOKEN")
        return found

    def _caller(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        if self.tokens is not None:
            return digest_of(_token(headers)).hex()
        return address_key(scope["client"][0]) if scope.get("client") else ""


def _token(headers: dict[bytes, bytes]) -> str:
    word, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if word.lower() == "bearer" else ""


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers by name; a request that repeats a header which may come only once is refused."""
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if size + sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES:
        # Uvicorn sees to that only where a head comes in several pieces.
        raise CallRefused("TOO_LONG", f"the head of a request may have {HEAD_BYTES} bytes", status=431)
    by_name: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in by_name and name in {b"host", b"origin", b"authorization", b"content-type", b"content-length"}:
            raise CallRefused("WRONG_ARGUMENT", f"there are two headers {name.decode('latin-1')}", status=400)
        by_name[name] = value
    return by_name


class _Body:
    """The body of a request, up to what one may have."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._left = receive, MOST_CALL_BYTES

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, f"the body may have {MOST_CALL_BYTES} bytes")
        return message


class _Sending:
    """The answer to a request, with our headers."""

    def __init__(self, send: Send) -> None:
        self._send, self._began, self.host = send, False, "localhost"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._began = True
            given = list(message.get("headers", ()))
            message["headers"] = [*given, *HEADERS, (b"content-security-policy", policy_for(self.host).encode())]
            if all(name != b"cache-control" for name, _ in given):
                message["headers"].append((b"cache-control", b"no-store"))
        await self._send(message)

    async def answer(self, refused: CallRefused) -> None:
        if self._began:
            return  # what has begun can only end
        body = json.dumps(refused.said).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refused.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
