"""Sets of web token keys (JWKS): which keys count, when they are fetched, and what a dead or strange server does."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import hmac
import json
import ssl
import threading
import time

import jwt
import pytest
import structlog
from certificate_kit import Pair
from hook_kit import HookServer, http

from flowctl.errors import ConfigError
from flowctl.live.access import webhooks
from flowctl.live.access.request import LiveRequest, Question, Why
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.webtokens import WebTokenRules, read_web_token_key
from flowctl.live.config import LiveConfig
from flowctl.live.gate import AccessGate
from flowctl.live.settings.levels import Level
from flowctl.wire.rtmp.url import parse_url

rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
from cryptography.hazmat.primitives import serialization  # noqa: E402 - as above
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402 - as above
from jwt.algorithms import ECAlgorithm, RSAAlgorithm  # noqa: E402 - as above

ONE, TWO = (rsa.generate_private_key(65537, 2048) for _ in range(2))
CURVE = ec.generate_private_key(ec.SECP256R1())
WAIT_S = 20.0
NOT_GENUINE = "The token is not one for this."
CLAIMS = {"exp": time.time() + 600, "actions": "publish", "streams": "live/*"}


def jwk(key, kid=None, **more):
    kind = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    named = {} if kid is None else {"kid": kid}
    return json.loads(kind.to_jwk(key.public_key())) | named | more


def set_of(*keys):
    return json.dumps({"keys": keys})


def token(key=ONE, kid="one", algorithm="RS256", **changed):
    claims = {"exp": time.time() + 60, "actions": ["publish", "play"], "streams": "live/*"} | changed
    return jwt.encode(claims, key, algorithm, headers={} if kid is None else {"kid": kid})


GOOD = set_of(jwk(ONE, "one"), jwk(TWO, "two", use="sig", alg="RS256"), jwk(CURVE, "curve"))


@pytest.fixture
def server():
    server = HookServer(lambda _: http(GOOD))
    yield server
    server.close()


class Deciding:
    """A gate whose web tokens are checked with the set of a server."""

    def __init__(self, url, **access):
        self.key = read_web_token_key(f"RS256:{url}")
        access = StreamAccess(publish_auth=(Proof.JWT,), jwt_key=self.key, **access)
        config = LiveConfig(access=access)
        self.gate, self.faults = AccessGate(lambda: config), []
        self.gate.on_error = lambda *fault: self.faults.append(fault)

    def ask(self, text):
        """Ask about a publication; return the answer, and the event and list of one that is given later."""
        url = parse_url(f"rtmp://h/live/room?jwt={text}")
        request = LiveRequest(kind="publish", connection=1, peer=("192.0.2.1", 1), url=url)
        found, done = [], threading.Event()
        answer = self.gate.ask(request, lambda _, refusal: (found.append(refusal), done.set()))
        return answer, done, found

    def refusal(self, text):
        """Return why a publication is refused. None: it is not."""
        answer, done, found = self.ask(text)
        if not isinstance(answer, Question):
            return answer and answer.why
        assert done.wait(WAIT_S)
        return found[0] and found[0].why

    def fetch(self):
        """Have the set fetched as when it is due."""
        self.key.due_at = self.key.again_at = 0.0
        self.gate.fetch_due()
        until = time.monotonic() + WAIT_S
        while self.key.again_at == 0.0 or self.key.fetching is not None:
            assert time.monotonic() < until
            time.sleep(0.002)


@pytest.fixture
def decide():
    made = []

    def make(server, path="/jwks.json", **access):
        made.append(Deciding(server if isinstance(server, str) else server.url(path), **access))
        return made[-1]

    yield make
    for item in made:
        item.gate.stop(0.1)
        assert item.faults == []


def test_first_token_has_the_set_fetched_and_is_let_in_and_others_ask_for_nothing(decide, server):
    gate = decide(server)
    assert gate.refusal(token()) is None
    assert [isinstance(gate.ask(token(TWO, "two"))[0], Question), gate.refusal(token(TWO, "two"))] == [False, None]
    assert server.paths == ["/jwks.json"]
    assert gate.gate.decide_s >= webhooks.FETCH_S + 1.0


@pytest.mark.parametrize(
    "forge",
    [
        lambda: token(ONE, "two"),
        lambda: token(ONE, "none such"),
        lambda: token(ONE, None),
        lambda: token(CURVE, "curve", "ES256"),
        lambda: token(CURVE, "one", "ES256"),
        lambda: token(ONE, "one", "RS512"),
        lambda: token(ONE, "one", "PS256"),
        lambda: token(ONE, "one")[:-4] + "AAAA",
        lambda: jwt.encode({"exp": time.time() + 60}, "", "none", headers={"kid": "one"}),
        lambda: jwt.encode(CLAIMS, TWO, "RS256", headers={"kid": "one", "jwk": jwk(TWO), "jku": "http://127.0.0.1:9/"}),
        lambda: signed_with_public_key(serialization.Encoding.PEM),
        lambda: signed_with_public_key(serialization.Encoding.DER),
        lambda: "a.b.c",
    ],
)
def test_token_that_no_key_of_the_set_has_signed_with_the_algorithm_is_refused(decide, server, forge):
    """A public key is none to check HS256 with, and what a token says of itself chooses a name and nothing else."""
    gate = decide(server)
    gate.fetch()
    assert gate.refusal(token()) is None
    assert gate.refusal(forge()) is Why.UNAUTHORIZED


def signed_with_public_key(encoding):
    secret = ONE.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    parts = ({"alg": "HS256", "typ": "JWT", "kid": "one"}, {"exp": time.time() + 60, "actions": "publish"})
    head = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    signature = base64.urlsafe_b64encode(hmac.digest(secret, head, hashlib.sha256)).rstrip(b"=")
    return (head + b"." + signature).decode()


def test_token_without_a_name_is_checked_with_the_only_key(decide, server):
    server.answer = lambda _: http(set_of(jwk(ONE), jwk(CURVE, "curve")))
    gate = decide(server)
    assert gate.refusal(token(ONE, None)) is None
    assert gate.refusal(token(TWO, None)) is Why.UNAUTHORIZED


def test_keys_with_made_up_names_cause_one_fetch_in_ten_seconds_and_hold_up_no_genuine_one(decide, server):
    gate = decide(server)
    gate.fetch()
    gate.key.again_at = 0.0  # ten seconds are over
    server.answer = lambda _: server.release.wait(WAIT_S) and http(GOOD)
    waiting = [gate.ask(token(ONE, f"made up {number}")) for number in range(300)]
    assert all(isinstance(answer, Question) for answer, _, _ in waiting)
    assert not isinstance(gate.ask(token())[0], Question)
    server.release.set()
    assert all(done.wait(WAIT_S) and found[0].why is Why.UNAUTHORIZED for _, done, found in waiting)
    for number in range(300):
        answer, _, _ = gate.ask(token(ONE, f"another {number}"))
        assert (answer.why, answer.guess) == (Why.UNAUTHORIZED, True)
    assert len(server.paths) == 2


def test_check_that_cannot_wait_has_the_set_fetched_for_the_next_one(decide, server):
    """An origin asks so, for edges."""
    gate = decide(server)
    url = parse_url(f"rtmp://h/live/room?jwt={token()}")
    request = LiveRequest(kind="publish", connection=1, peer=("192.0.2.1", 1), url=url)
    assert gate.gate.check(request).why is Why.UNAVAILABLE
    until = time.monotonic() + WAIT_S
    while gate.gate.check(request) is not None:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert server.paths == ["/jwks.json"]


def test_set_that_changes_is_in_force_for_a_new_key_at_once_and_without_an_old_one_when_it_is_due(decide, server):
    gate = decide(server)
    gate.fetch()
    server.answer = lambda _: http(set_of(jwk(TWO, "three")))
    assert gate.refusal(token(TWO, "three")) is Why.UNAUTHORIZED  # within ten seconds
    gate.key.again_at = 0.0
    assert gate.refusal(token(TWO, "three")) is None
    assert gate.refusal(token(ONE, "one")) is Why.UNAUTHORIZED
    server.answer = lambda _: http(GOOD)
    gate.fetch()
    assert [gate.refusal(token()), gate.refusal(token(TWO, "three"))] == [None, Why.UNAUTHORIZED]
    assert 290 < gate.key.due_at - time.monotonic() <= 300


BAD = {
    "no JSON": lambda _: http("<html>"),
    "no text": lambda _: http(b"\xff\xfe\x00"),
    "nothing": lambda _: http(""),
    "list": lambda _: http("[]"),
    "number": lambda _: http("7"),
    "no keys": lambda _: http("{}"),
    "keys of none": lambda _: http('{"keys": null}'),
    "empty": lambda _: http('{"keys": []}'),
    "keys of text": lambda _: http('{"keys": ["one", 7, null, []]}'),
    "deep": lambda _: http("[" * 200_000),
    "ten thousand keys": lambda _: http(set_of(*[{"kty": "RSA"}] * 10_000)),
    "a megabyte and more": lambda _: http(GOOD + " " * (1 << 20)),
    "endless": lambda _: [b"HTTP/1.1 200 OK\r\n\r\n", *[b" " * 65536] * 64],
    "bomb": lambda _: http(gzip.compress(b" " * 10_000_000), "200 OK", "Content-Encoding: gzip"),
    "cut": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + GOOD.encode()[:300],
    "no HTTP": lambda _: b"220 mail.example ESMTP\r\n",
    "not found": lambda _: http(GOOD, "404 Not Found"),
    "broken": lambda _: http(GOOD, "500 Internal Server Error"),
    "redirect": lambda server: http(GOOD, "302 Found", f"Location: {server.url('/elsewhere')}"),
    "other algorithm": lambda _: http(set_of(jwk(CURVE, "one"))),
    "for encryption": lambda _: http(set_of(jwk(ONE, "one", use="enc"))),
    "said to be another": lambda _: http(set_of(jwk(ONE, "one", alg="RS512"))),
    "private": lambda _: http(set_of(json.loads(RSAAlgorithm.to_jwk(ONE)) | {"kid": "one"})),
    "short": lambda _: http(set_of(jwk(ONE, "one", n="AQAB" * 20))),
    "long": lambda _: http(set_of(jwk(ONE, "one", n="x" * 100_000))),
    "no number": lambda _: http(set_of(jwk(ONE, "one", n="\u0661" * 400))),
    "secret": lambda _: http(set_of({"kty": "oct", "kid": "one", "k": "c2VjcmV0" * 8})),
    "name of a number": lambda _: http(set_of(jwk(ONE, 7))),
}


@pytest.mark.parametrize("what", BAD)
def test_set_that_is_none_changes_nothing_and_is_told_of(decide, server, what):
    """What was fetched before stays in force; there is no redirect to follow."""
    gate = decide(server, "/jwks.json?secret=of-the-address")
    gate.fetch()
    server.answer = lambda _: BAD[what](server)
    with structlog.testing.capture_logs() as lines:
        gate.fetch()
    assert [line["event"] for line in lines] == ["web token keys not fetched"]
    assert "of-the-address" not in repr(lines) + str(gate.key)
    assert gate.refusal(token()) is None
    assert len(server.paths) == 2
    assert 0 < gate.key.due_at - time.monotonic() <= 10
    server.answer = lambda _: http(set_of(jwk(TWO, "one")))
    gate.fetch()
    assert gate.refusal(token(TWO, "one")) is None


def test_server_that_hangs_delays_unknown_keys_alone_and_those_for_its_time(decide, server, monkeypatch):
    monkeypatch.setattr(webhooks, "FETCH_S", 0.2)
    server.answer = lambda _: None
    gate = decide(server)
    assert gate.refusal(token()) is Why.UNAVAILABLE  # it cannot be checked: nobody guesses
    assert not isinstance(gate.ask(token())[0], Question)
    server.answer = lambda _: http(GOOD)
    gate.fetch()
    server.answer = lambda _: None
    gate.key.again_at = 0.0
    assert gate.refusal(token(ONE, "unknown")) is Why.UNAUTHORIZED
    assert gate.refusal(token()) is None


def test_set_that_cannot_be_fetched_for_a_day_is_good_for_nothing(decide, server):
    gate = decide(server)
    gate.fetch()
    server.answer = lambda _: http("", "503 Service Unavailable")
    gate.fetch()
    assert gate.refusal(token()) is None
    gate.key.good_until = time.monotonic()
    gate.fetch()
    assert gate.refusal(token()) is Why.UNAVAILABLE


def test_set_stays_in_force_when_other_settings_of_its_level_change(server):
    """The level is read anew as a whole, perhaps while the server of the set is away."""
    names = ("access.publish_auth", "access.jwt_key", "access.jwt_issuer")

    def settings(issuer):
        key = read_web_token_key(f"RS256:{server.url()}")
        values = dict(zip(names, ((Proof.JWT,), key, issuer), strict=True))
        return LiveConfig(levels=(Level(application="live", values=values),))

    now = settings("")
    gate = AccessGate(lambda: now)
    url = parse_url(f"rtmp://h/live/room?jwt={token(iss='us')}")
    request = LiveRequest(kind="publish", connection=1, peer=("192.0.2.1", 1), url=url)
    gate.fetch_due()  # as the server does each second
    until = time.monotonic() + WAIT_S
    while gate.check(request) is not None:
        assert time.monotonic() < until
        time.sleep(0.005)
    server.answer = lambda _: http("", "503 Service Unavailable")
    now = settings("us")
    gate.fetch_due()
    assert gate.ask(request, None) is None
    now = settings("them")
    gate.fetch_due()
    assert gate.ask(request, None).why is Why.UNAUTHORIZED
    assert len(server.paths) == 1
    gate.stop(1.0)


def test_set_over_https_is_fetched_where_the_machine_trusts_the_authority(decide, server, tmp_path, monkeypatch):
    """A self-made authority counts once it is among those of the machine, as for curl."""
    pair = Pair(tmp_path)
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(pair.certificate, pair.key)
    url = f"https://127.0.0.1:{server.port}/jwks.json"
    with structlog.testing.capture_logs() as lines:
        assert decide(url).refusal(token()) is Why.UNAVAILABLE
    assert "unable to get local issuer certificate" in lines[0]["why"]
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.authority))
    assert decide(url).refusal(token()) is None


@pytest.mark.parametrize(
    ("rules", "claims", "expected"),
    [
        ({"audience": ("live", "other")}, {"aud": "live"}, None),
        ({"audience": ("live", "other")}, {"aud": ["x", "other"]}, None),
        ({"audience": ("live",)}, {"aud": "x"}, NOT_GENUINE),
        ({"audience": ("live",)}, {"aud": ["x", 7]}, NOT_GENUINE),
        ({"audience": ("live",)}, {}, NOT_GENUINE),
        ({}, {"aud": "live"}, NOT_GENUINE),
        ({"issuer": "https://id.example/"}, {"iss": "https://id.example/"}, None),
        ({"issuer": "https://id.example/"}, {"iss": "https://id.example"}, NOT_GENUINE),
        ({"issuer": "https://id.example/"}, {}, NOT_GENUINE),
        ({}, {"iss": "https://id.example/"}, None),
    ],
)
def test_token_when_audience_or_issuer_are_asked_for_must_say_them(tmp_path, rules, claims, expected):
    path = tmp_path / "jwks.json"
    path.write_text(GOOD)
    key = read_web_token_key(f"RS256:{path}")
    assert key.fault(token(**claims), "publish", "live/room", WebTokenRules(**rules)) == expected
    access = StreamAccess(
        publish_auth=(Proof.JWT,), jwt_key=key, **{f"jwt_{name}": value for name, value in rules.items()}
    )
    request = LiveRequest(
        kind="publish",
        connection=1,
        peer=("192.0.2.1", 1),
        url=parse_url(f"rtmp://h/live/room?jwt={token(**claims, sub='ann')}"),
    )
    assert (access.check(request, 0.0) is None) is (expected is None)
    assert access.identity(request, 0.0) == ("jwt ann" if expected is None else None)


def test_set_in_a_file_is_followed_and_half_of_it_changes_nothing(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_text(GOOD)
    key = read_web_token_key(f"RS256:{path}")
    other = set_of(jwk(TWO, "three"))

    def after(text):
        path.write_text(text)
        assert key.file.changed()
        with contextlib.suppress(ConfigError):
            key.file.read()
        tokens = (token(), token(TWO, "three"), token(TWO, None))
        return [key.fault(item, "publish", "live/room", WebTokenRules()) is None for item in tokens]

    assert after(other[:-40]) == [True, False, False]
    assert after(other) == [False, True, True]
    pem = ONE.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert after(pem.decode()) == [True, False, False]


def test_key_and_token_of_the_standard_are_read_as_it_says(tmp_path):
    """RFC 7515 appendix A.3: signed by others, expired in 2011, and for nothing of ours."""
    curve = {"kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU"}
    curve["y"] = "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"
    theirs = (
        "eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0c"
        "nVlfQ.DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q"
    )
    path = tmp_path / "jwks.json"
    path.write_text(set_of(curve))
    key = read_web_token_key(f"ES256:{path}")
    assert key.fault(theirs, "publish", "live/room", WebTokenRules()) == "The token has expired."
    rules = WebTokenRules(leeway_s=4e9, issuer="joe")
    assert key.fault(theirs, "publish", "live/room", rules) == "The token is not one to publish."
    assert key.fault(theirs[:-3] + "QQQ", "publish", "live/room", rules) == NOT_GENUINE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("HS256:https://id.example/jwks.json", "HS256 takes a secret"),
        ("none:https://id.example/jwks.json", "is no algorithm and source"),
    ],
)
def test_set_for_a_shared_secret_is_an_error_of_the_settings(text, said):
    with pytest.raises(ConfigError, match=said):
        read_web_token_key(text)
