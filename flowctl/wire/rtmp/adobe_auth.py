"""Adobe's publisher authentication ("authmod=adobe"): challenge and answer carried in connect and its refusal.

Theory of operation. Flash Media Server had no message for authentication, so encoders log in by being refused: each
refusal is a ``NetConnection.Connect.Rejected`` whose *description* carries the next step, and the client connects
anew, with its answer appended to ``app`` and ``tcUrl``::

    live                                                 P : [ code=403 need auth; authmod=adobe ] :
    live?authmod=adobe&user=U                            P : [ authmod=adobe ] : ?reason=needauth&Q
    live?authmod=adobe&user=U&challenge=D&response=R     accepted, or P : [ authmod=adobe ] : ?reason=authfailed

    P = [ AccessManager.Reject ] Q = user=U&salt=S&challenge=C R = base64(md5(base64(md5(U + S + password)) + C + D))

OBS, FFmpeg, librtmp, GStreamer and Wirecast speak it. The words around the parameters are those of Flash Media Server:
GStreamer matches all of them, the others look for parts. gortmplib alone wants shorter ones, but its client answers for
a user "myuser" in any case, so nothing is lost with it. We send no ``opaque`` parameter: FFmpeg would hash it in
place of the challenge where Wirecast hashes the challenge, and without it both do the same.

The steps arrive on different TCP connections, so the server would have to remember what it asked. Instead salt and
challenge are derived (HMAC-SHA-256) from a secret made at start, the user and the time, which costs no memory that a
stranger could fill. A challenge lives one to two periods, and an answer that was accepted is not accepted again.
MD5 is the protocol's choice; it keeps the password off the wire and no more, so use RTMPS where that matters.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

from flowctl.errors import ConfigError
from flowctl.wire.rtmp.url import parse_query

_PREFIX: Final = "[ AccessManager.Reject ] : "
NEED_AUTH: Final = _PREFIX + "[ code=403 need auth; authmod=adobe ] : "
"""Description of the first refusal."""

_ASKED: Final = _PREFIX + "[ authmod=adobe ] : ?reason="
AUTH_FAILED: Final = _ASKED + "authfailed"
"""Refusal of a wrong answer; unknown users get the same one, so that names cannot be guessed."""

CHALLENGE_PERIOD_S: Final = 60.0
"""A challenge is accepted for this long at least and twice this long at most: three TCP connects on a bad link."""

REMEMBERED_ANSWERS: Final = 4096
"""Accepted answers kept per period to refuse a second use; only holders of a password can add one."""

FIELD_MAX_CHARS: Final = 256
"""Limit on user, challenge and response; real ones are below 64."""

_AUTH_MARK = re.compile(r"[?&]authmod=adobe")
_AUTH_FIELDS: Final = frozenset({"authmod", "user", "challenge", "response", "opaque", "nonce"})


class AdobeAnswer(NamedTuple):
    """What a client appended to its address; "" for a field that it did not send."""

    user: str
    challenge: str  # the client's own random text
    response: str

    def __repr__(self) -> str:
        return f"Answer(user={self.user!r})"


class LoginResult(NamedTuple):
    accepted: bool
    refusal: str
    reason: str  # ``"accepted"``, ``"need-auth"``, ``"challenged"`` or ``"auth-failed"``, for logs and statistics
    user: str


def split_answer(text: str) -> tuple[str, AdobeAnswer | None]:
    """Separate an address (``tcUrl`` or ``app``) from the authentication appended to it.

    Parameters of the address that follow the authentication are kept.
    """
    mark = _AUTH_MARK.search(text)
    if mark is None:
        return text, None
    query = parse_query(text[mark.start() + 1 :])
    answer = AdobeAnswer(query.get("user", ""), query.get("challenge", ""), query.get("response", ""))
    address = text[: mark.start()]
    kept = "&".join(f"{name}={value}" for name, value in query.items() if name not in _AUTH_FIELDS)
    if kept:
        address += ("&" if "?" in address else "?") + kept
    return address, answer


def _digest(text: str) -> str:
    digest = hashlib.md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()
    return base64.b64encode(digest).decode("ascii")


def response(user: str, password: str, salt: str, server_challenge: str, client_challenge: str) -> str:
    """Return the proof R of the file's first docstring."""
    return _digest(_digest(user + salt + password) + server_challenge + client_challenge)


def client_parameters(description: str, user: str | None, password: str | None) -> str | None:
    """Return what a client appends to its address after a refusal."""
    if "authmod=adobe" not in description or user is None or password is None:
        return None
    if "code=403 need auth" in description and "?reason=" not in description:
        return f"?authmod=adobe&user={user}"
    _, asked_for, rest = description.partition("?reason=needauth")
    if not asked_for:
        return None
    query = parse_query(rest)
    client_challenge = secrets.token_hex(8)
    opaque = query.get("opaque", "")
    proof = response(user, password, query.get("salt", ""), opaque or query.get("challenge", ""), client_challenge)
    parameters = f"?authmod=adobe&user={user}&challenge={client_challenge}&response={proof}"
    return f"{parameters}&opaque={opaque}" if opaque else parameters


class AdobeAuthenticator:
    """The server's side; one object serves all connections and may be shared by threads."""

    __slots__ = ("_credentials", "_fresh", "_period", "_secret", "_stale")

    def __init__(self, credentials: Mapping[str, str], *, secret: bytes | None = None) -> None:
        for user, password in credentials.items():
            if not user or len(user) > FIELD_MAX_CHARS or not user.isprintable() or set(user) & set("&?=# "):
                raise ConfigError(
                    f"user name {user!r} must be 1 to {FIELD_MAX_CHARS} characters, without & ? = # space"
                )
            if not password:
                raise ConfigError(f"the password of user {user!r} is empty")
        if secret is not None and len(secret) < 16:
            raise ConfigError(f"secret has {len(secret)} bytes, it must have 16 or more")
        self._credentials = credentials
        self._secret = secret or secrets.token_bytes(32)
        self._period = 0
        # Answers accepted in this period and in the one before, as keys. Only single dict operations touch them, which
        # the GIL makes whole: no lock, and the worst that two threads can do is to forget answers early.
        self._fresh: dict[str, object] = {}
        self._stale: dict[str, object] = {}

    def __repr__(self) -> str:
        return f"AdobeAuthenticator({len(self._credentials)} users)"

    def check(self, answer: AdobeAnswer | None, now: float) -> LoginResult:
        if answer is None or not answer.user:
            return LoginResult(accepted=False, refusal=NEED_AUTH, reason="need-auth", user="")
        # The name is echoed and logged, so it is held to what a user name can be.
        if max(map(len, answer)) > FIELD_MAX_CHARS or not answer.user.isprintable():
            return LoginResult(accepted=False, refusal=AUTH_FAILED, reason="auth-failed", user="")
        period = int(now // CHALLENGE_PERIOD_S)
        if not answer.response or not answer.challenge:
            refusal = (
                f"{_ASKED}needauth&user={answer.user}&salt={self._derive('salt', answer.user, 0)}"
                f"&challenge={self._derive('challenge', answer.user, period)}"
            )
            return LoginResult(accepted=False, refusal=refusal, reason="challenged", user=answer.user)
        if self._proves(answer, period):
            return LoginResult(accepted=True, refusal="", reason="accepted", user=answer.user)
        return LoginResult(accepted=False, refusal=AUTH_FAILED, reason="auth-failed", user=answer.user)

    def _proves(self, answer: AdobeAnswer, period: int) -> bool:
        """Compare in a time that depends neither on the user being known nor on where the answer differs."""
        password = self._credentials.get(answer.user)
        has_password = password is not None
        salt = self._derive("salt", answer.user, 0)
        their_response = answer.response.encode("utf-8", "surrogatepass")
        matched = False
        for candidate in (period, period - 1):
            challenge = self._derive("challenge", answer.user, candidate)
            expected = response(answer.user, password or salt, salt, challenge, answer.challenge)
            matched |= hmac.compare_digest(expected.encode("ascii"), their_response)
        if not (matched and has_password):
            return False
        return self._first_use(answer.response, period)

    def _first_use(self, proof: str, period: int) -> bool:
        """Remember `proof`; False when it was used in this period or the one before, the longest that it can live."""
        if period != self._period or len(self._fresh) >= REMEMBERED_ANSWERS:
            self._period, self._stale, self._fresh = period, self._fresh, {}
        mine = object()
        # setdefault tests and sets in one step, so of two connections with one answer exactly one gets in.
        return proof not in self._stale and self._fresh.setdefault(proof, mine) is mine

    def _derive(self, purpose: str, user: str, period: int) -> str:
        text = f"{purpose}\0{user}\0{period}".encode("utf-8", "surrogatepass")
        # Hexadecimal, since the text travels in a query where + / = & would need care.
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:16]
