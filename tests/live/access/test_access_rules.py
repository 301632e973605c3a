"""What the settings say: networks and proofs, for each that asks, and what is open to everybody."""

from __future__ import annotations

import time
from ipaddress import ip_network

import jwt
import pytest

from flowctl.errors import ConfigError
from flowctl.live.access.keys import KeyFile, StoredKey, hash_key
from flowctl.live.access.request import LiveRequest, Refusal, Why
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.access.webtokens import WebTokenKey
from flowctl.wire.rtmp.url import from_connect, parse_url

SECRET = b"a secret of thirty-two or more bytes, for tests"
KEY = "a-key-that-nobody-guesses"
_, _SALT, _DIGEST = hash_key(KEY).split(":")
KEYS = KeyFile("keys", (StoredKey(bytes.fromhex(_SALT), bytes.fromhex(_DIGEST)),))
SECRETS = SecretFile("secrets", (SECRET,))
WEB = WebTokenKey("HS256", "jwt", {None: SECRET})
FROM = "This is not allowed from your address."


def nets(*texts):
    return tuple(ip_network(text) for text in texts)


def ask(access, kind="play", query="", address="192.0.2.7", **more):
    """Return why a request is refused: text and reason, or None."""
    url = more.pop("url", None) or parse_url(f"rtmp://h/live/room?{query}")
    request = LiveRequest(kind=kind, connection=1, peer=(address, 5), url=url, **more)
    found = access.check(request, time.time())
    return None if found is None else (found.text, found.why)


@pytest.mark.parametrize("kind", ["connect", "publish", "play"])
def test_nothing_set_lets_everybody(kind):
    assert ask(StreamAccess(), kind) is None
    assert ask(StreamAccess(), kind, address="") is None


@pytest.mark.parametrize(("kind", "other"), [("publish", "play"), ("play", "publish")])
@pytest.mark.parametrize(
    ("allowed", "denied", "address", "good"),
    [
        (["10.0.0.0/8"], [], "10.1.2.3", True),
        (["10.0.0.0/8"], [], "192.0.2.7", False),
        (["10.0.0.0/8"], [], "::ffff:10.1.2.3", True),
        (["10.0.0.0/8"], [], "2001:db8::1", False),
        (["10.0.0.0/8"], [], "fe80::1%eth0", False),
        (["fe80::/10"], [], "fe80::1%eth0", True),
        (["10.0.0.0/8"], ["10.1.0.0/16"], "10.1.2.3", False),
        (["10.0.0.0/8"], ["10.1.0.0/16"], "10.2.2.3", True),
        ([], ["192.0.2.0/24"], "192.0.2.7", False),
        ([], ["192.0.2.0/24"], "::ffff:192.0.2.7", False),
        ([], ["192.0.2.0/24"], "192.0.3.7", True),
        (["10.0.0.0/8"], [], "", False),
        ([], ["0.0.0.0/0", "::/0"], "2001:db8::1", False),
    ],
)
def test_networks_are_held_to_for_each_kind(kind, other, allowed, denied, address, good):
    access = StreamAccess(**{f"allow_{kind}": nets(*allowed), f"deny_{kind}": nets(*denied)})
    assert ask(access, kind, address=address) == (None if good else (FROM, Why.FORBIDDEN))
    assert ask(access, other, address=address) is None
    assert ask(access, "connect", address=address) is None


@pytest.mark.parametrize(
    ("tc_url", "app", "name"),
    [
        (f"rtmp://h/live?key={KEY}", "live", "room"),
        ("rtmp://h/live", "live", f"room?key={KEY}"),
        ("rtmp://h/live", f"live?key={KEY}", "room"),
        ("rtmp://h/live", "live", f"room?secret={KEY}"),
        (f"rtmp://h/live/room?secret={KEY}", "live/room", ""),
        (f"rtmp://h/live?key={KEY}/room", f"live?key={KEY}/room", "room"),
        ("", f"live?other=1&key={KEY}", "room"),
    ],
)
@pytest.mark.parametrize("kind", ["publish", "play"])
def test_key_is_found_wherever_clients_put_it(tc_url, app, name, kind):
    access = StreamAccess(publish_auth=(Proof.KEY,), play_auth=(Proof.KEY,), keys=KEYS)
    url = from_connect(tc_url, app).with_stream(name)
    assert url.path == "live/room"
    assert ask(access, kind, url=url) is None
    wrong = from_connect(tc_url.replace(KEY, "x" * 20), app.replace(KEY, "x" * 20)).with_stream(
        name.replace(KEY, "x" * 20)
    )
    assert ask(access, kind, url=wrong) == ("The stream key is wrong.", Why.UNAUTHORIZED)


@pytest.mark.parametrize(
    ("query", "guess"),
    [
        ("", False),
        ("now=1798758000", False),
        ("key=wrong", True),
        (signed_query(SECRET, "play", "live/room", 4_000_000_000, "192.0.2.9"), False),
        (signed_query(SECRET, "play", "live/room", 1_000), False),
        ("expires=4000000000&token=guessed", True),
    ],
)
def test_refusal_when_nothing_was_made_up_is_of_no_guess(query, guess):
    access = StreamAccess(play_auth=(Proof.KEY, Proof.TOKEN), keys=KEYS, token_secrets=SECRETS)
    url = parse_url(f"rtmp://h/live/room?{query}")
    request = LiveRequest(kind="play", connection=1, peer=("192.0.2.7", 5), url=url)
    assert access.check(request, 2_000_000_000.0).guess is guess


def test_proof_is_asked_for_where_it_is_set_and_nowhere_else():
    access = StreamAccess(publish_auth=(Proof.KEY,), keys=KEYS)
    assert ask(access, "publish") == ("A stream key is needed.", Why.UNAUTHORIZED)
    assert ask(access, "play") is None
    assert ask(access, "connect") is None


def test_any_of_several_proofs_is_enough_and_what_is_said_is_of_the_one_that_was_tried():
    """A key, or a token, or a web token: in the address, or in the header of HTTP."""
    access = StreamAccess(play_auth=(Proof.KEY, Proof.TOKEN, Proof.JWT), keys=KEYS, token_secrets=SECRETS, jwt_key=WEB)
    good = jwt.encode({"exp": time.time() + 60, "actions": "play", "streams": "*"}, SECRET, "HS256")
    late = jwt.encode({"exp": time.time() - 60, "actions": "play", "streams": "*"}, SECRET, "HS256")
    signed = signed_query(SECRET, "play", "live/room", int(time.time()) + 60)
    old = signed_query(SECRET, "play", "live/room", int(time.time()) - 60)
    for given in (
        {"query": f"key={KEY}"},
        {"query": signed},
        {"query": f"jwt={good}"},
        {"query": f"token={good}"},
        {"bearer": good},
        {"bearer": KEY},
    ):
        assert ask(access, **given) is None
    for given, said in (
        ({"query": "key=wrong"}, "The stream key is wrong."),
        ({"query": old}, "The token has expired."),
        ({"query": f"jwt={late}"}, "The token has expired."),
        ({"bearer": late}, "The token has expired."),
    ):
        assert ask(access, **given) == (said, Why.UNAUTHORIZED)
    assert ask(access)[1] is Why.UNAUTHORIZED


def test_proof_that_cannot_be_checked_lets_nobody_in():
    access = StreamAccess(publish_auth=(Proof.KEY,))
    assert ask(access, "publish", query=f"key={KEY}") == (
        "The server cannot check this proof.",
        Why.UNAVAILABLE,
    )
    assert access.missing() == "publish_auth asks for key, but there is no keys_file"
    assert StreamAccess(play_auth=(Proof.JWT,)).missing() == "play_auth asks for jwt, but there is no jwt_key"
    assert StreamAccess(publish_auth=(Proof.KEY,), keys=KEYS).missing() is None


@pytest.mark.parametrize(
    ("fields", "publish", "play"),
    [
        ({}, True, True),
        ({"publish_auth": (Proof.KEY,)}, False, True),
        ({"allow_play": nets("10.0.0.0/8")}, True, False),
        ({"deny_play": nets("10.0.0.0/8")}, True, True),
        ({"deny_publish": nets("0.0.0.0/0", "::/0"), "deny_play": nets("0.0.0.0/0")}, False, True),
        ({"on_publish": ("http://h/",)}, False, True),
        ({"on_connect": ("http://h/",)}, False, False),
        ({"on_end": ("http://h/",)}, True, True),
    ],
)
def test_what_is_open_to_everybody_is_known(fields, publish, play):
    """So that a server which listens for the world can say it."""
    access = StreamAccess(**fields)
    assert (access.open_to_all("publish"), access.open_to_all("play")) == (publish, play)
    assert access.open_to_all("play", "http") == (play or bool(access.on_connect))


@pytest.mark.parametrize(
    "fields",
    [
        {"leeway_s": -1.0},
        {"leeway_s": float("nan")},
        {"leeway_s": 4000.0},
        {"hook_timeout_s": 0.0},
        {"hook_timeout_s": float("inf")},
        {"on_publish": ("ftp://h/",)},
        {"on_publish": ("h/hook",)},
        {"on_play": ("http://",)},
        {"on_end": ("http://h:99999/",)},
        {"on_connect": ("http://[::1/",)},
        {"on_connect": ("http://h/a\nb",)},
        {"on_end": tuple(f"http://h/{at}" for at in range(9))},
    ],
)
def test_access_when_a_value_is_out_of_range_is_refused(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        StreamAccess(**fields)


def test_no_secret_is_shown_by_any_of_it():
    access = StreamAccess(keys=KEYS, token_secrets=SECRETS, jwt_key=WEB)
    request = LiveRequest(
        kind="play", connection=1, peer=("h", 1), url=parse_url(f"rtmp://u:pw@h/live/room?key={KEY}"), bearer=KEY
    )
    shown = repr(access) + repr(request) + repr(Refusal("no"))
    assert not any(secret in shown for secret in (KEY, SECRET.decode(), "pw", _DIGEST))
    with pytest.raises(ConfigError) as caught:
        StreamAccess(on_publish=(f"ftp://u:{KEY}@h/?token={KEY}",))
    assert KEY not in str(caught.value)
