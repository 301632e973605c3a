"""What somebody brings to be let in: stream keys, signed tokens, and web tokens."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import time

import jwt
import pytest

from flowctl.errors import ConfigError
from flowctl.live.access import keys as keys_module
from flowctl.live.access.keys import hash_key, make_key, read_keys
from flowctl.live.access.request import LiveRequest
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, read_secrets, sign, signed_query
from flowctl.live.access.webtokens import WebTokenKey, WebTokenRules, read_web_token_key
from flowctl.wire.rtmp.url import parse_query, parse_url

SECRET = b"a secret of sixteen or more bytes, for tests"
LONG = SECRET * 2
KEY = "a-key-that-nobody-guesses"
NOW = 1_800_000_000


def written(path, *lines):
    """Write a file that only its owner can read."""
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


# -- keys


@pytest.mark.parametrize(
    ("line", "kind", "stream", "expected"),
    [
        ("", "publish", "live/room", True),
        ("", "play", "live/room", True),
        ("publish", "publish", "live/room", True),
        ("publish", "play", "live/room", False),
        ("play live/*", "play", "live/room", True),
        ("play live/*", "play", "other/room", False),
        ("live/room", "publish", "live/room2", False),
    ],
)
def test_key_is_good_for_what_its_line_says(tmp_path, line, kind, stream, expected):
    keys = read_keys(written(tmp_path / "keys", "# ours", "", f"{hash_key(KEY)} {line}"))
    assert keys.allows([KEY], kind, stream) is expected
    assert not keys.allows([KEY + "x"], kind, stream)
    assert not keys.allows([], kind, stream)


def test_keys_when_one_of_several_fits_are_good_and_none_is_stored_as_it_is(tmp_path):
    path = written(tmp_path / "keys", *(hash_key(make_key()) for _ in range(3)), hash_key(KEY))
    keys = read_keys(path)
    assert keys.allows(["", "wrong" * 5, KEY], "play", "live/room")
    assert not keys.allows(["", "wrong" * 5, "\udcff" * 20, "x" * 100_000], "play", "live/room")
    assert KEY not in path.read_text() + repr(keys)
    assert keys.keys[3].digest.hex() not in repr(keys)
    assert hash_key(KEY) != hash_key(KEY)  # salted


def test_key_that_is_tried_is_hashed_once_however_many_are_stored(tmp_path, monkeypatch):
    """Keys of one file share their salt, so strangers with wrong keys cost the server the same in any case."""
    salt = bytes(range(16))
    path = written(tmp_path / "keys", *(hash_key(f"{KEY}{number}", salt) for number in range(1000)))
    keys = read_keys(path)
    hashed = []
    digest = keys_module._digest
    monkeypatch.setattr(keys_module, "_digest", lambda *given: hashed.append(given) or digest(*given))
    assert not keys.allows(["wrong" * 5, "", "wrong" * 5], "play", "live/room")
    assert keys.allows([f"{KEY}999"], "play", "live/room")
    assert len(hashed) == 2


def test_key_that_stands_in_several_lines_is_good_for_what_any_says(tmp_path):
    salt = bytes(range(16))
    lines = (hash_key(KEY, salt) + " play one/*", hash_key(KEY, salt) + " play two/*", hash_key(KEY) + " play three/*")
    keys = read_keys(written(tmp_path / "keys", *lines))
    found = [keys.allows([KEY], "play", f"{name}/room") for name in ("one", "two", "three", "four")]
    assert found == [True, True, True, False]


def test_file_whose_keys_have_too_many_salts_is_an_error(tmp_path):
    lines = [hash_key(f"{KEY}{number}") for number in range(33)]
    with pytest.raises(ConfigError, match="33 salts, they may have 32"):
        read_keys(written(tmp_path / "keys", *lines))
    assert read_keys(written(tmp_path / "keys", *lines[1:])).allows([f"{KEY}32"], "play", "live/room")


@pytest.mark.parametrize("key", ["short", "x" * 15, "with blank in the middle", "a&b" * 8, "x" * 2000, "a?b" * 9, ""])
def test_key_that_is_none_is_not_hashed(key):
    with pytest.raises(ConfigError) as caught:
        hash_key(key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    "line", [KEY, "sha256:00", "sha256:0011223344556677:" + "0" * 63, f"{'x' * 5} publish", "md5:00:00"]
)
def test_line_that_is_no_stored_key_is_named_by_its_number_alone(tmp_path, line):
    path = written(tmp_path / "keys", hash_key(KEY), line)
    with pytest.raises(ConfigError, match="keys, line 2 is no stored key") as caught:
        read_keys(path)
    assert line not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_keys_file_without_a_key_lets_nobody_in_and_the_server_says_why(tmp_path, text):
    """A command may put the first key there while the server runs."""
    path = tmp_path / "keys"
    if text is not None:
        written(path, text)
    access = StreamAccess(publish_auth=(Proof.KEY,), keys=read_keys(path))
    assert not access.keys.allows([KEY], "publish", "live/room")
    assert access.missing() == f"publish_auth asks for key, but there is none in {path} yet"
    assert read_keys(path) == access.keys


def test_keys_when_the_file_changes_are_replaced_together_or_not_at_all(tmp_path):
    """Half a line would be a key for everything, where the whole says for what: it counts once it stays so."""
    path = written(tmp_path / "keys", hash_key(KEY) + " play live/*")
    keys = read_keys(path)
    line = hash_key("another-key-of-ours")
    whole = path.read_text() + f"{line} play other/*\n"

    def after(text):
        path.write_text(text)
        assert keys.file.changed()
        with contextlib.suppress(ConfigError):
            keys.file.read()
        return [keys.allows([key], "publish", "x/y") for key in (KEY, "another-key-of-ours")], len(keys.keys)

    old, new = ([False, False], 1), ([False, False], 2)
    assert after(whole[: whole.index(line) + len(line)]) == old  # without what it is for
    for size in range(1, len(line) - 1, 10):
        assert after(whole[: whole.index(line) + size]) == old
    assert after("") == old
    assert after(whole) == new
    assert after(whole + "nonsense\n") == new
    assert "line 3 is no stored key" in keys.file.status.fault
    path.unlink()
    assert not keys.file.changed()
    assert after("# no key\n") == ([False, False], 0)


@pytest.mark.parametrize("cut", [0, len(hash_key(KEY))])
def test_keys_when_many_are_let_in_while_the_file_is_being_written_stay_as_they_were(tmp_path, cut):
    """Decisions look at the file whenever it has changed, which may be twice between two words of its writer."""
    path = written(tmp_path / "keys", hash_key(KEY) + " play live/*")
    keys, whole = read_keys(path), path.read_text()

    def decided():
        if keys.file.changed():
            keys.file.read()
        return [keys.allows([KEY], kind, "live/room") for kind in ("play", "publish")]

    path.write_text(whole[:cut])
    assert [decided() for _ in range(3)] == [[True, False]] * 3
    path.write_text("# no key\n")
    assert decided() == [False, False]


# -- signed tokens


@pytest.fixture
def secrets(tmp_path):
    return read_secrets(written(tmp_path / "secrets", SECRET.decode(), "an older secret that is good still"))


def fault_of(secrets, query, kind="play", stream="live/room", address="192.0.2.7", now=NOW, leeway=10.0):
    return secrets.fault(parse_query(query), kind, stream, address, now, leeway)


def test_token_is_good_until_it_expires_and_no_longer(secrets):
    query = signed_query(SECRET, "play", "live/room", NOW + 60)
    for now, expected in ((NOW, None), (NOW + 60, None), (NOW + 70, None), (NOW + 71, "The token has expired.")):
        assert fault_of(secrets, query, now=now) == expected
    assert fault_of(secrets, query, now=NOW + 61, leeway=0.0) == "The token has expired."
    assert fault_of(secrets, query, now=NOW - 86400) is None  # a clock that was set back lets nobody out


@pytest.mark.parametrize(
    "asked", [{"kind": "publish"}, {"stream": "live/room2"}, {"stream": "live/roo"}, {"stream": "live"}]
)
def test_token_is_one_for_its_action_and_stream_alone(secrets, asked):
    query = signed_query(SECRET, "play", "live/room", NOW + 60)
    assert fault_of(secrets, query, **asked) == "The token is not one for this."


@pytest.mark.parametrize(
    "changed",
    [
        lambda query: query.replace(f"expires={NOW + 60}", f"expires={NOW + 61}"),
        lambda query: query.replace("expires=", "expires=0"),
        lambda query: query[:-1],
        lambda query: query + "A",
        lambda query: query.replace("token=", "token=\udcff"),
        lambda query: query + "&address=192.0.2.7",
        lambda query: query.split("&", maxsplit=1)[0],
        lambda query: query.split("&")[1],
        lambda query: query.replace("expires=", "expires=-"),
        lambda query: query.replace("expires=", "expires=\u0661"),
        lambda query: query.replace("expires=", "expires=1" + "0" * 5000),
        lambda _: "",
    ],
)
def test_token_when_anything_is_changed_is_refused(secrets, changed):
    assert fault_of(secrets, changed(signed_query(SECRET, "play", "live/room", NOW + 60))) is not None


@pytest.mark.parametrize(
    ("bound", "address", "good"),
    [
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "::ffff:192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.0/24", "192.0.2.8", True),
        ("2001:db8::/64", "2001:db8::5", True),
        ("2001:db8::/64", "192.0.2.7", False),
        ("nonsense", "192.0.2.7", False),
    ],
)
def test_token_when_bound_to_an_address_is_good_from_there_alone(secrets, bound, address, good):
    """The address is signed with the rest, so that it can neither be changed nor left out."""
    query = signed_query(SECRET, "play", "live/room", NOW + 60, bound)
    assert (fault_of(secrets, query, address=address) is None) is good
    assert fault_of(secrets, query.replace(f"&address={bound}", ""), address=address) is not None


def test_token_of_any_secret_of_the_file_is_good(secrets):
    """So that a secret can be replaced while tokens of the one before it are still about."""
    assert fault_of(secrets, signed_query(b"an older secret that is good still", "play", "live/room", NOW)) is None
    assert fault_of(secrets, signed_query(b"a secret that is not in the file", "play", "live/room", NOW)) is not None
    assert "older" not in repr(secrets)


def test_token_when_made_elsewhere_is_what_the_documents_say():
    """Five lines, HMAC-SHA256, base64 for addresses without padding: a fixed one, so that no change goes unnoticed."""
    assert sign(SECRET, "play", "live/room", NOW) == "sj6mo6rXLCq2dACeDvyxGrcTTijrc9P1Bfu-OSMY_bc"


@pytest.mark.parametrize(("mode", "text"), [(0o644, SECRET.decode()), (0o600, "short"), (0o600, "# none"), (0o600, "")])
def test_secrets_when_others_may_read_them_or_they_are_short_are_refused(tmp_path, mode, text):
    path = written(tmp_path / "secrets", text)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_secrets(path)
    assert not text or text not in str(caught.value)


# -- web tokens


@pytest.fixture
def key(tmp_path):
    return read_web_token_key(f"HS256:{written(tmp_path / 'jwt', LONG.decode())}")


def claims(**changed):
    return {"exp": time.time() + 60, "actions": ["play"], "streams": "live/*"} | changed


def web_fault(key, token, kind="play", stream="live/room", leeway=10.0, **rules):
    return key.fault(token, kind, stream, WebTokenRules(leeway, **rules))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, None),
        ({"exp": 1}, "The token has expired."),
        ({"exp": "tomorrow"}, "The token is not one for this."),
        ({"exp": float("inf")}, "The token is not one for this."),
        ({"nbf": 9e9}, "The token is not one for this."),
        ({"aud": "another service"}, "The token is not one for this."),
        ({"actions": "play"}, None),
        ({"actions": "publish"}, "The token is not one to play."),
        ({"actions": None}, "The token is not one to play."),
        ({"actions": {"play": 1}}, "The token is not one to play."),
        ({"streams": ["other/*", "live/room"]}, None),
        ({"streams": "other/*"}, "The token is one for another stream."),
        ({"streams": [1, None, {}]}, "The token is one for another stream."),
    ],
)
def test_web_token_is_good_for_what_it_claims(key, changed, expected):
    """The time must be there and not be over; actions and streams are named by it."""
    assert web_fault(key, jwt.encode(claims(**changed), LONG, "HS256")) == expected


def test_web_token_is_good_while_clocks_may_be_apart(key):
    token = jwt.encode(claims(exp=time.time() - 5), LONG, "HS256")
    assert web_fault(key, token, leeway=3600.0) is None
    assert web_fault(key, token, leeway=1.0) == "The token has expired."


def test_web_token_that_never_expires_is_refused(key):
    """One that was copied once would be good for ever."""
    found = claims()
    del found["exp"]
    assert web_fault(key, jwt.encode(found, LONG, "HS256")) == "The token is not one for this."


def part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "forge",
    [
        lambda: part({"alg": "none"}) + "." + part(claims()) + ".",
        lambda: part({"alg": "None", "typ": "JWT"}) + "." + part(claims()) + ".AAAA",
        lambda: jwt.encode(claims(), LONG, "HS512"),
        lambda: jwt.encode(claims(), LONG + b"another", "HS256"),
        lambda: jwt.encode(claims(), LONG, "HS256") + "A",
        lambda: "a.b.c",
        lambda: "." * 8000,
        lambda: "x" * 9000,
        lambda: "\udcff.\udcff.\udcff",
        lambda: "",
    ],
    ids=["none", "None", "other algorithm", "other secret", "changed", "garbage", "dots", "long", "no text", "empty"],
)
def test_web_token_that_is_forged_is_refused(key, forge):
    """The algorithm is that of the setting, whatever the token says of itself; nothing is raised for any text."""
    assert web_fault(key, forge()) in {"The token is not one for this.", "A web token is needed."}


def test_web_token_signed_with_the_public_key_as_a_secret_is_refused(tmp_path):
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization

    private = rsa.generate_private_key(65537, 2048)
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "jwt.pem").write_bytes(public)
    key = read_web_token_key(f"RS256:{tmp_path / 'jwt.pem'}")
    assert web_fault(key, jwt.encode(claims(), private, "RS256")) is None
    head = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims())}"
    forged = base64.urlsafe_b64encode(hmac.digest(public, head.encode(), hashlib.sha256)).rstrip(b"=").decode()
    assert web_fault(key, f"{head}.{forged}") == "The token is not one for this."


@pytest.mark.parametrize("text", ["none:{}", "HS256", "HS256:", "RS256:{}", "HS512:{}", "HS256:{}-absent", "XX:{}"])
def test_web_token_key_that_is_none_is_an_error_of_the_settings(tmp_path, text):
    path = written(tmp_path / "jwt", SECRET.decode())
    with pytest.raises(ConfigError) as caught:
        read_web_token_key(text.format(path))
    assert SECRET.decode() not in str(caught.value)


def test_web_token_key_that_others_may_read_is_refused(tmp_path):
    path = written(tmp_path / "jwt", LONG.decode())
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        read_web_token_key(f"HS256:{path}")


def test_publisher_when_it_is_back_with_another_token_is_the_same_owner():
    secret = b"a secret of thirty-two or more bytes, for tests"
    tokens = StreamAccess(publish_auth=(Proof.TOKEN,), token_secrets=SecretFile("secrets", (secret,)))
    web = StreamAccess(publish_auth=(Proof.JWT,), jwt_key=WebTokenKey("HS256", "jwt", {None: secret}))

    def owner(access, query):
        url = parse_url(f"rtmp://h/live/room?{query}")
        request = LiveRequest(kind="publish", connection=1, peer=("192.0.2.1", 1), url=url)
        return access.identity(request, 1000.0)

    first, second = (signed_query(secret, "publish", "live/room", expires) for expires in (2000, 3000))
    assert first != second
    assert owner(tokens, first) == owner(tokens, second) == "signed"
    assert owner(tokens, signed_query(secret, "publish", "live/other", 2000)) is None
    assert owner(tokens, signed_query(secret, "publish", "live/room", 900)) is None
    assert owner(tokens, "token=signed") is None
    assert owner(StreamAccess(), first) is None

    def token(**claims):
        return "jwt=" + jwt.encode({"exp": time.time() + 60, **claims}, secret, "HS256")

    assert owner(web, token(sub="ann", iat=1)) == owner(web, token(sub="ann", iat=2)) == "jwt ann"
    assert owner(web, token(sub="bob")) == "jwt bob"
    assert owner(web, token()) is None
    assert owner(web, token(sub="ann", exp=5)) is None
    assert owner(tokens, token(sub="ann")) is None
