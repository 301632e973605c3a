"""The rules of access in the settings: networks, keys and tokens that may connect, publish and play, and the hooks.

In this order, and all of them must allow: the networks that are denied, those that are allowed (where any are named),
a proof where one is asked for (a key, a signed token or a web token: one of those that count is enough), and then the
HTTP hooks and the application's own, which `flowctl.live.gate` asks. With none of these set everybody may.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from flowctl.core.text.addresses import Network
from flowctl.core.text.fieldtypes import check_fields
from flowctl.core.text.watchfile import WatchedFile
from flowctl.errors import ConfigError
from flowctl.live.access.keys import KeyFile
from flowctl.live.access.request import NOT_GENUINE, LiveRequest, Refusal, RequestKind, Why
from flowctl.live.access.tokens import SecretFile
from flowctl.live.access.webtokens import WebTokenKey, WebTokenRules
from flowctl.wire.rtmp.url import redact_url

KEY_PARAMETERS: Final = ("key", "secret")
"""Query parameters of a stream name in which clients send a key; ``secret`` is that of SRS."""
_MOST_LEEWAY_S: Final = 3600.0
_MOST_HOOK_S: Final = 60.0
_MOST_HOOKS: Final = 8
_NOT_FROM_THERE: Final = Refusal("This is not allowed from your address.", guess=False)
_WRONG_KEY: Final = "The stream key is wrong."
_UNCHECKED: Final = Refusal("The server cannot check this proof.", Why.UNAVAILABLE)


class Proof(enum.Enum):
    """Kinds of proof that let a client in."""

    KEY = "key"  #: a stream key whose hash is in the keys file
    TOKEN = "token"  # noqa: S105 - no password but a word: a signed token in the address
    JWT = "jwt"  #: a JSON web token, in the address or the Authorization header


class HookFailure(enum.Enum):
    """What happens to a request when an HTTP hook fails: it is dead, slow, or its answer is not valid."""

    REFUSE = "refuse"
    ALLOW = "allow"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamAccess:
    """The rules of access of a server, an application or a stream."""

    # what counts as a proof for publishers, one is enough; empty: none is asked for
    publish_auth: tuple[Proof, ...] = ()
    play_auth: tuple[Proof, ...] = ()  # the same for viewers
    keys: KeyFile | None = None  # contents of the keys file. None: there is none.
    token_secrets: SecretFile | None = None  # sign tokens. None: there are none.
    jwt_key: WebTokenKey | None = None  # looks at web tokens. None: there is none.
    jwt_audience: tuple[str, ...] = ()  # whom web tokens must be for, one of these; empty: for nobody in particular
    jwt_issuer: str = ""  # who must have made them; empty: any issuer with the key
    leeway_s: float = 10.0  # how far the clocks of those who make tokens may be apart from ours, seconds
    allow_publish: tuple[Network, ...] = ()  # networks that may publish; empty: all
    deny_publish: tuple[Network, ...] = ()  # networks that may not, whatever else is allowed
    allow_play: tuple[Network, ...] = ()  # networks that may play; empty: all
    deny_play: tuple[Network, ...] = ()  # networks that may not, whatever else is allowed
    on_connect: tuple[str, ...] = ()  # HTTP hooks (URLs) that decide about connections; all of them must allow one
    on_publish: tuple[str, ...] = ()  # those that decide about publishing
    on_play: tuple[str, ...] = ()  # those that decide about playing
    on_end: tuple[str, ...] = ()  # HTTP hooks that are told when a connection, a publication or a play is over
    hook_timeout_s: float = 5.0  # time that all hooks of a question have together
    hook_failure: HookFailure = HookFailure.REFUSE  # what happens when they fail

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.leeway_s <= _MOST_LEEWAY_S:
            raise ConfigError(f"leeway_s is {self.leeway_s}, it must be 0 to {_MOST_LEEWAY_S:g} s")
        if not 0.05 <= self.hook_timeout_s <= _MOST_HOOK_S:
            raise ConfigError(f"hook_timeout_s is {self.hook_timeout_s}, it must be 0.05 to {_MOST_HOOK_S:g} s")
        for name in ("on_connect", "on_publish", "on_play", "on_end"):
            urls: tuple[str, ...] = getattr(self, name)
            if len(urls) > _MOST_HOOKS:
                raise ConfigError(f"{name} has {len(urls)} addresses, at most {_MOST_HOOKS} are asked")
            for url in urls:
                _check_hook(name, url)

    def asked(self, kind: RequestKind) -> tuple[str, ...]:
        urls: tuple[str, ...] = getattr(self, f"on_{kind}")
        return urls

    def missing(self) -> str | None:
        there = {Proof.KEY: self.keys, Proof.TOKEN: self.token_secrets, Proof.JWT: self.jwt_key}
        for name, proofs in (("publish_auth", self.publish_auth), ("play_auth", self.play_auth)):
            for proof in proofs:
                if there[proof] is None:
                    return f"{name} asks for {proof.value}, but there is no {PROOF_SETTINGS[proof]}"
                if proof is Proof.KEY and self.keys is not None and not self.keys.keys:
                    return f"{name} asks for key, but there is none in {self.keys} yet"
        return None

    @property
    def files(self) -> dict[str, WatchedFile]:
        """The files that proofs are checked with, by what they hold."""
        named = (("keys", self.keys), ("token_secrets", self.token_secrets), ("jwt_key", self.jwt_key))
        return {name: item.file for name, item in named if item is not None and item.file is not None}

    def wants_fetch(self, request: LiveRequest, now: float) -> WebTokenKey | None:
        """Return the set of web token keys that has to be fetched before `request` can be checked. None: none has."""
        proofs = self.publish_auth if request.kind == "publish" else self.play_auth
        key = self.jwt_key
        wants = key is not None and Proof.JWT in proofs and key.wants_fetch(_web_token(request), now)
        return key if wants else None

    def open_to_all(self, kind: RequestKind, protocol: str = "rtmp") -> bool:
        """Return whether these settings let everybody publish, or play, from anywhere."""
        proofs = self.publish_auth if kind == "publish" else self.play_auth
        allowed = self.allow_publish if kind == "publish" else self.allow_play
        denied = self.deny_publish if kind == "publish" else self.deny_play
        connect = self.on_connect if protocol == "rtmp" else ()  # over HTTP nobody is asked about connections
        none_may = {network.version for network in denied if network.prefixlen == 0} == {4, 6}
        return not (proofs or allowed or connect or none_may or self.asked(kind))

    def check(self, request: LiveRequest, now_s: float) -> Refusal | None:
        """Return why networks or proofs do not allow a request at `now_s` (since 1970). None: they do."""
        if request.kind == "connect":
            return None  # the ban list and hooks decide about connections
        refusal = self.check_network(request)
        if refusal is not None:
            return refusal
        proofs = self.publish_auth if request.kind == "publish" else self.play_auth
        return self._prove(proofs, request, now_s) if proofs else None

    def check_network(self, request: LiveRequest) -> Refusal | None:
        publishes = request.kind == "publish"
        allowed = self.allow_publish if publishes else self.allow_play
        denied = self.deny_publish if publishes else self.deny_play
        if denied or allowed:
            host = _host(request.peer[0])
            if _covers(denied, host) or (allowed and not _covers(allowed, host)):
                return _NOT_FROM_THERE
        return None

    def identity(self, request: LiveRequest, now_s: float) -> str | None:
        """Return the publisher that a token names, so that one with a newer token is the same; None: no token does.

        A signed token is for one stream alone, so its holder is the one whom the signer lets publish that. Web tokens
        may be for many streams, and name their holder in ``sub``.
        """
        proofs = self.publish_auth if request.kind == "publish" else ()
        if Proof.TOKEN in proofs and _tries(Proof.TOKEN, request) and self._fault(Proof.TOKEN, request, now_s) is None:
            return "signed"
        if Proof.JWT in proofs and self.jwt_key is not None and _tries(Proof.JWT, request):
            subject = self.jwt_key.subject(_web_token(request), self._token_rules)
            return None if subject is None else f"jwt {subject}"
        return None

    def is_edge(self, request: LiveRequest) -> bool:
        """Return whether a request to play brings a key or a web token for an edge."""
        tried = [request.query.get(name, "") for name in KEY_PARAMETERS]
        if any(tried) and self.keys is not None and self.keys.allows(tried, "edge", request.stream):
            return True
        token = _web_token(request)
        key = self.jwt_key
        return bool(token) and key is not None and key.fault(token, "edge", request.stream, self._token_rules) is None

    @property
    def _token_rules(self) -> WebTokenRules:
        return WebTokenRules(self.leeway_s, self.jwt_audience, self.jwt_issuer)

    def _prove(self, proofs: tuple[Proof, ...], request: LiveRequest, now_s: float) -> Refusal | None:
        """Return why no proof is valid; the reason is that of the last proof that the client gave."""
        said = ""
        unchecked = False
        for proof in proofs:
            fault = self._fault(proof, request, now_s)
            if fault is None:
                return None
            unchecked |= fault is _NOTHING_TO_CHECK
            if not said or _tries(proof, request):
                said = fault
        if unchecked and len(proofs) == 1:
            return _UNCHECKED
        return Refusal(said, Why.UNAUTHORIZED, guess=said in {_WRONG_KEY, NOT_GENUINE})

    def _fault(self, proof: Proof, request: LiveRequest, now_s: float) -> str | None:
        query, kind, stream = request.query, request.kind, request.stream
        if proof is Proof.KEY and self.keys is not None:
            tried = [query.get(name, "") for name in KEY_PARAMETERS] + [request.bearer]
            if self.keys.allows(tried, kind, stream):
                return None
            return _WRONG_KEY if any(tried) else "A stream key is needed."
        if proof is Proof.TOKEN and self.token_secrets is not None:
            names = [stream, request.face] if request.face else [stream]  # one for a set is for its renditions too
            faults = [
                self.token_secrets.fault(query, kind, name, request.peer[0], now_s, self.leeway_s) for name in names
            ]
            return None if None in faults else faults[0]
        if proof is Proof.JWT and self.jwt_key is not None and self.jwt_key.keys:
            return self.jwt_key.fault(_web_token(request), kind, stream, self._token_rules)
        return _NOTHING_TO_CHECK


PROOF_SETTINGS: Final = {Proof.KEY: "keys_file", Proof.TOKEN: "token_secret_file", Proof.JWT: "jwt_key"}
"""Setting of the file with which each kind of proof is checked."""
_NOTHING_TO_CHECK: Final = "The server has nothing to check this proof with."


def _web_token(request: LiveRequest) -> str:
    query = request.query
    return query.get("jwt") or request.bearer or query.get("token", "")


def _tries(proof: Proof, request: LiveRequest) -> bool:
    query = request.query
    if proof is Proof.KEY:
        return any(query.get(name) for name in KEY_PARAMETERS)
    if proof is Proof.TOKEN:
        return "expires" in query
    return bool(_web_token(request)) and "expires" not in query


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None  # a Unix socket: it is in no network
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _covers(networks: tuple[Network, ...], host: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    return host is not None and any(host in network for network in networks)


def _check_hook(name: str, url: str) -> None:
    hint = "write it like http://127.0.0.1:8085/api/v1/streams"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isprintable() or " " in url:
        raise ConfigError(f"{name}: {redact_url(url)[:100]!r} is no address of HTTP", hint=hint)
