"""JSON web tokens (RFC 7519), checked by PyJWT: only the algorithm of the setting, and a token must expire.

Claims: ``exp`` (seconds since 1970), ``actions`` (``"publish"``, ``"play"``, or a list of them) and ``streams`` (a
pattern of ``app/stream``, or a list); ``nbf`` and ``iat`` are held to where they are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.live.access.request import NOT_GENUINE, RequestKind, Use
from flowctl.live.access.tokens import read_private

_SHORTEST_SECRET_BYTES: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Shortest shared secret of an algorithm: as long as its hash (RFC 7518 section 3.2)."""
_PUBLIC: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_MOST_CHARS: Final = 8192
_MOST_PATTERNS: Final = 100
_HINT: Final = "write it like HS256:/etc/flowctl/jwt.secret or RS256:/etc/flowctl/jwt.pem"


@dataclass(frozen=True, slots=True)
class WebTokenKey:
    """The key that web tokens are looked at with."""

    algorithm: str
    path: str  # file of the secret, or of the public key (PEM)
    key: Any = field(repr=False, compare=False)
    octets: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.path}"

    def fault(self, token: str, kind: RequestKind | Use, stream: str, leeway_s: float) -> str | None:
        """Return what is wrong with a token, without showing it. None: it allows `kind` on ``app/stream``."""
        import jwt  # noqa: PLC0415 - only servers that look at web tokens pay for it

        if not 0 < len(token) <= _MOST_CHARS:
            return "A web token is needed."
        try:
            claims = self._claims(token, leeway_s)
        except jwt.ExpiredSignatureError:
            return "The token has expired."
        except Exception:  # noqa: BLE001 - whatever a stranger's text does to the library, the answer is no
            return NOT_GENUINE
        if kind not in _texts(claims.get("actions")):
            return f"The token is not one to {kind}."
        if not any(fnmatchcase(stream, pattern) for pattern in _texts(claims.get("streams"))):
            return "The token is one for another stream."
        return None

    def subject(self, token: str, leeway_s: float) -> str | None:
        """Return the subject (``sub``) of a valid token. None: it is not valid, or has none."""
        try:
            subject = self._claims(token, leeway_s).get("sub") if len(token) <= _MOST_CHARS else None
        except Exception:  # noqa: BLE001 - as above
            return None
        return subject if isinstance(subject, str) and subject else None

    def _claims(self, token: str, leeway_s: float) -> dict[str, Any]:
        import jwt  # noqa: PLC0415 - as above

        options: Any = {"require": ["exp"]}
        return jwt.decode(token, self.key, algorithms=[self.algorithm], leeway=leeway_s, options=options)


def _texts(claim: object) -> list[str]:
    items = claim if isinstance(claim, list) else [claim]
    return [item for item in items[:_MOST_PATTERNS] if isinstance(item, str)]


def read_web_token_key(text: str) -> WebTokenKey:
    algorithm, colon, name = text.partition(":")
    if not (colon and name) or (algorithm not in _SHORTEST_SECRET_BYTES and algorithm not in _PUBLIC):
        algorithms = ", ".join((*_SHORTEST_SECRET_BYTES, *_PUBLIC))
        raise ConfigError(f"{short(text)} is no algorithm and path; algorithms are {algorithms}", hint=_HINT)
    path = Path(name)
    if algorithm in _SHORTEST_SECRET_BYTES:
        octets = read_private(path, "jwt_key").strip()
        if len(octets) < _SHORTEST_SECRET_BYTES[algorithm]:
            least = _SHORTEST_SECRET_BYTES[algorithm]
            raise ConfigError(f"the secret in {path} has {len(octets)} bytes, {algorithm} takes {least} or more")
    else:
        try:
            octets = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the public key {path}: {error.strerror}", hint=_HINT) from error
    return WebTokenKey(algorithm, str(path), _prepared(algorithm, octets, path), octets)


def _prepared(algorithm: str, octets: bytes, path: Path) -> Any:
    from jwt.algorithms import get_default_algorithms  # noqa: PLC0415 - as above

    found = get_default_algorithms().get(algorithm)
    if found is None:
        raise ConfigError(f"{algorithm} needs the package cryptography", hint="pip install cryptography, or use HS256")
    try:
        return found.prepare_key(octets)
    except Exception as error:
        raise ConfigError(f"{path} holds no key for {algorithm}: {type(error).__name__}", hint=_HINT) from error
