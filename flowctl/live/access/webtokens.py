"""JSON web tokens (RFC 7519), checked by PyJWT: only the algorithm of the setting, and a token must expire.

Claims: ``exp`` (seconds since 1970), ``actions`` (``"publish"``, ``"play"``, or a list of them) and ``streams`` (a
pattern of ``app/stream``, or a list); ``nbf`` and ``iat`` are held to where they are there, ``aud`` and ``iss`` where
the settings name whom a token is for and who makes it.

Keys are those of a file, which is followed, or of a set (JWKS, RFC 7517) that an address of HTTP serves. A set is
fetched again every five minutes, and for a token whose key (``kid``) is not in it, at most once in ten seconds, so
that tokens with made-up keys cause no more. What cannot be fetched, or is no set, changes nothing for a day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from flowctl.core.text.printable import short
from flowctl.core.text.private import check_private
from flowctl.core.text.watchfile import WatchedFile
from flowctl.errors import ConfigError
from flowctl.live.access.request import NOT_GENUINE, RequestKind, Use
from flowctl.live.access.tokens import watch_private
from flowctl.wire.rtmp.url import redact_url

_SHORTEST_SECRET_BYTES: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Shortest shared secret of an algorithm: as long as its hash (RFC 7518 section 3.2)."""
_PUBLIC: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_MOST_CHARS: Final = 8192
_MOST_PATTERNS: Final = 100
MOST_SET_BYTES: Final = 1 << 20
_MOST_KEYS: Final = 100
"""Most keys of a set, each of which takes a tenth of a millisecond to read: providers of identity have two to ten."""
_RSA_CHARS: Final = range(342, 1367)
"""Characters of a modulus of RSA: 2048 to 8192 bits. A longer one would make each check of a token slow."""
SET_S: Final = 300.0
"""Time between two fetches of a set: a key that is taken out of it is good for no longer (PyJWT has the same)."""
RETRY_S: Final = 10.0
"""Time between two fetches for keys that are not in a set, and after a failure."""
_KEEP_S: Final = 86_400.0
"""Time for which a set is good that cannot be fetched anew."""
_HINT: Final = "write it like HS256:/etc/flowctl/jwt.secret, RS256:/etc/flowctl/jwt.pem or RS256:https://host/jwks.json"


class WebTokenRules(NamedTuple):
    """What a web token must say, beside what it is for."""

    leeway_s: float = 0.0
    audience: tuple[str, ...] = ()  # one of these; empty: none, a token with an audience is not for us
    issuer: str = ""  # empty: any


@dataclass(slots=True)
class WebTokenKey:
    """The keys that web tokens are checked with; two of the same algorithm and source are the same."""

    algorithm: str
    source: str  # file of the secret, of the public key (PEM) or of a set (JSON), or address of a set
    keys: Mapping[str | None, Any] = field(default_factory=dict, repr=False, compare=False)  # by ``kid``
    is_set: bool = field(default=False, compare=False)  # tokens name their key; else there is but one, without a name
    file: WatchedFile | None = field(default=None, repr=False, compare=False)  # None: they are of no file
    # Of a set that is fetched; clock: monotonic seconds. The loop of the HTTP hooks writes, any thread reads:
    due_at: float = field(default=0.0, repr=False, compare=False)  # when it is fetched again in any case
    again_at: float = field(default=0.0, repr=False, compare=False)  # when it may be for the next unknown key
    good_until: float = field(default=0.0, repr=False, compare=False)
    fetching: Any = field(default=None, repr=False, compare=False)  # the task that does it. None: none does

    def __str__(self) -> str:
        return f"{self.algorithm}:{redact_url(self.source) if self.is_fetched else self.source}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process read or fetch the keys itself: those of `cryptography` cannot be handed on."""
        return read_web_token_key, (f"{self.algorithm}:{self.source}",)

    @property
    def is_fetched(self) -> bool:
        return is_address(self.source)

    def fault(self, token: str, kind: RequestKind | Use, stream: str, rules: WebTokenRules) -> str | None:
        """Return what is wrong with a token, without showing it. None: it allows `kind` on ``app/stream``."""
        import jwt  # noqa: PLC0415 - only servers that look at web tokens pay for it

        if not 0 < len(token) <= _MOST_CHARS:
            return "A web token is needed."
        try:
            claims = self._claims(token, rules)
        except jwt.ExpiredSignatureError:
            return "The token has expired."
        except Exception:  # noqa: BLE001 - whatever a stranger's text does to the library, the answer is no
            return NOT_GENUINE
        if kind not in _texts(claims.get("actions")):
            return f"The token is not one to {kind}."
        if not any(fnmatchcase(stream, pattern) for pattern in _texts(claims.get("streams"))):
            return "The token is one for another stream."
        return None

    def subject(self, token: str, rules: WebTokenRules) -> str | None:
        """Return the subject (``sub``) of a valid token. None: it is not valid, or has none."""
        try:
            subject = self._claims(token, rules).get("sub") if len(token) <= _MOST_CHARS else None
        except Exception:  # noqa: BLE001 - as above
            return None
        return subject if isinstance(subject, str) and subject else None

    def wants_fetch(self, token: str, now: float) -> bool:
        """Return whether a token names a key that is not in the set, and the set is or may be fetched for it."""
        if not self.is_fetched or not 0 < len(token) <= _MOST_CHARS or (now < self.again_at and self.fetching is None):
            return False
        try:
            return self._key_of(token) is None
        except Exception:  # noqa: BLE001 - as above
            return False

    def _claims(self, token: str, rules: WebTokenRules) -> dict[str, Any]:
        import jwt  # noqa: PLC0415 - as above

        return jwt.decode(
            token,
            self._key_of(token),
            algorithms=[self.algorithm],
            leeway=rules.leeway_s,
            audience=rules.audience or None,
            issuer=rules.issuer or None,
            options={"require": ["exp"]},
        )

    def _key_of(self, token: str) -> Any:
        """Return the key that a token names, which need not be the truth. None: there is none of that name."""
        import jwt  # noqa: PLC0415 - as above

        if not self.is_set:
            return self.keys.get(None)
        kid = jwt.get_unverified_header(token).get("kid")
        if kid is None and len(self.keys) == 1:
            return next(iter(self.keys.values()))
        return None if kid is None else self.keys.get(kid)

    # -- what the keys are

    def accept_set(self, octets: bytes, now: float) -> bool:
        """Put a set that was fetched in force; return whether it has others of the names than before."""
        keys = _keys_of_set(octets, self.algorithm, redact_url(self.source))
        changed = self.keys.keys() != keys.keys()
        self.keys, self.due_at, self.good_until = keys, now + SET_S, now + _KEEP_S
        return changed

    def inherit(self, old: WebTokenKey) -> None:
        """Take over what was fetched for a setting that says the same."""
        self.keys, self.due_at, self.good_until = old.keys, old.due_at, old.good_until

    def put_off(self, now: float) -> None:
        """Try again later to fetch the set; one that is too old is good for nothing."""
        self.due_at = now + RETRY_S
        if now >= self.good_until:
            self.keys = {}

    def read(self, text: str, _: str) -> None:
        """Put in force what a file says."""
        octets = text.encode("utf-8", "surrogateescape")
        if self.algorithm in _SHORTEST_SECRET_BYTES:
            check_private(Path(self.source))
            octets, least = octets.strip(), _SHORTEST_SECRET_BYTES[self.algorithm]
            if len(octets) < least:
                raise ConfigError(
                    f"the secret in {self.source} has {len(octets)} bytes, {self.algorithm} takes {least} or more"
                )
        if self.algorithm in _PUBLIC and octets.lstrip()[:1] == b"{":
            keys, is_set = _keys_of_set(octets, self.algorithm, self.source), True
        else:
            keys, is_set = {None: _prepared(self.algorithm, octets, self.source)}, False
        # Another thread that looks between the two finds a key of none, or none of a set, and refuses.
        self.keys, self.is_set = keys, is_set


def is_address(text: str) -> bool:
    return text.startswith(("https://", "http://"))


def _texts(claim: object) -> list[str]:
    items = claim if isinstance(claim, list) else [claim]
    return [item for item in items[:_MOST_PATTERNS] if isinstance(item, str)]


def read_web_token_key(text: str) -> WebTokenKey:
    algorithm, colon, source = text.partition(":")
    if not (colon and source) or (algorithm not in _SHORTEST_SECRET_BYTES and algorithm not in _PUBLIC):
        algorithms = ", ".join((*_SHORTEST_SECRET_BYTES, *_PUBLIC))
        raise ConfigError(f"{short(text)} is no algorithm and source; algorithms are {algorithms}", hint=_HINT)
    key, path = WebTokenKey(algorithm, source), Path(source)
    if algorithm in _SHORTEST_SECRET_BYTES:
        if key.is_fetched:
            raise ConfigError(f"{algorithm} takes a secret, which is no public set of keys", hint=_HINT)
        key.file = watch_private(path, key.read, "jwt_key")
        return key
    _algorithm(algorithm)
    if key.is_fetched:
        key.is_set = True
        return key
    key.file = WatchedFile(path, key.read, MOST_SET_BYTES, errors="surrogateescape")
    if not key.file.read():
        raise ConfigError(f"cannot read the public key {path}: there is no such file", hint=_HINT)
    return key


def _algorithm(name: str) -> Any:
    from jwt.algorithms import get_default_algorithms  # noqa: PLC0415 - as above

    found = get_default_algorithms().get(name)
    if found is None:
        raise ConfigError(f"{name} needs the package cryptography", hint="pip install cryptography, or use HS256")
    return found


def _prepared(algorithm: str, octets: bytes, source: str) -> Any:
    try:
        return _algorithm(algorithm).prepare_key(octets)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{source} holds no key for {algorithm}: {type(error).__name__}", hint=_HINT) from error


def _keys_of_set(octets: bytes, algorithm: str, source: str) -> dict[str | None, Any]:
    """Return the keys of a set that are for signatures of an algorithm, by name; others are left out."""
    try:
        items = json.loads(octets)["keys"]
        few = isinstance(items, list) and len(items) <= _MOST_KEYS
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ConfigError(f"{source} is no set of keys (JWKS)", hint=_HINT) from error
    if not few:
        raise ConfigError(f"{source} is no set of {_MOST_KEYS} keys (JWKS) or less", hint=_HINT)
    keys: dict[str | None, Any] = {}
    for item in items:
        key = _key_of_set(item, algorithm) if isinstance(item, dict) else None
        if key is not None and isinstance(kid := item.get("kid"), str | None):
            keys.setdefault(kid, key)
    if not keys:
        raise ConfigError(f"{source} has no key for {algorithm}", hint="which algorithm are the tokens signed with?")
    return keys


def _key_of_set(item: dict[str, Any], algorithm: str) -> Any:
    import jwt  # noqa: PLC0415 - as above

    modulus = item.get("n")
    for_this = (
        item.get("use", "sig") == "sig"
        and item.get("alg", algorithm) == algorithm
        and "d" not in item  # a private key, which anybody may have seen
        and (modulus is None or (isinstance(modulus, str) and len(modulus) in _RSA_CHARS))
    )
    try:
        return jwt.PyJWK(item, algorithm).key if for_this else None
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it is none of ours
        return None
