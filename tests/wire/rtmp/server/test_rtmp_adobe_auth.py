"""Adobe's publisher authentication: the steps, the arithmetic, and what an attacker cannot do with it."""

import base64
import hashlib
import re
from urllib.parse import parse_qsl, urlsplit

import pytest
from rtmp_session_kit import SPLITS, Pair, ScriptedClient

from flowctl.errors import ConfigError
from flowctl.wire.rtmp.adobe_auth import (
    AUTH_FAILED,
    CHALLENGE_PERIOD_S,
    NEED_AUTH,
    REMEMBERED_ANSWERS,
    AdobeAnswer,
    AdobeAuthenticator,
    client_parameters,
    response,
    split_answer,
)
from flowctl.wire.rtmp.events import ConnectRefused, ConnectRequested, PublishStarted, Rejected
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.url import parse_query

USERS = {"bob": "hunter2"}
SECRET = b"0123456789abcdef"


def challenge(authenticator, user="bob", now=0.0):
    verdict = authenticator.check(AdobeAnswer(user, "", ""), now)
    asked = parse_query(verdict.refusal.partition("?reason=needauth&")[2])
    return asked["salt"], asked["challenge"]


def answer(authenticator, user="bob", password="hunter2", client_challenge="c1", now=0.0):
    salt, asked = challenge(authenticator, user, now)
    return AdobeAnswer(user, client_challenge, response(user, password, salt, asked, client_challenge))


def test_response_is_the_documented_arithmetic():
    """Base64 of MD5 over base64 of MD5, in the order of librtmp and FFmpeg."""
    inner = base64.b64encode(hashlib.md5(b"bobsalthunter2").digest())
    expected = base64.b64encode(hashlib.md5(inner + b"server" + b"client").digest()).decode()
    assert response("bob", "hunter2", "salt", "server", "client") == expected


def test_three_steps_lead_in():
    """Nothing, the user, the answer: two refusals in the words of Flash Media Server, then in."""
    authenticator = AdobeAuthenticator(USERS)
    first = authenticator.check(None, 0.0)
    assert (first.accepted, first.refusal, first.reason) == (False, NEED_AUTH, "need-auth")
    second = authenticator.check(AdobeAnswer("bob", "", ""), 0.0)
    assert second.refusal.startswith("[ AccessManager.Reject ] : [ authmod=adobe ] : ?reason=needauth&user=bob&salt=")
    assert "opaque" not in second.refusal
    third = authenticator.check(answer(authenticator), 0.0)
    assert (third.accepted, third.user) == (True, "bob")


@pytest.mark.parametrize(
    "wrong",
    [
        {"password": "hunter3"},
        {"user": "alice"},
        {"user": "alice", "password": ""},
    ],
)
def test_wrong_password_and_unknown_user_are_told_the_same(wrong):
    authenticator = AdobeAuthenticator(USERS)
    verdict = authenticator.check(answer(authenticator, **wrong), 0.0)
    assert (verdict.accepted, verdict.refusal, verdict.reason) == (False, AUTH_FAILED, "auth-failed")


def test_unknown_user_is_challenged_like_a_known_one():
    """The second step does not tell either: the same asking each time, of the same form."""
    authenticator = AdobeAuthenticator(USERS, secret=SECRET)
    assert challenge(authenticator, "alice") == challenge(authenticator, "alice")
    assert list(map(len, challenge(authenticator, "alice"))) == list(map(len, challenge(authenticator, "bob")))


def test_answer_is_accepted_once():
    authenticator = AdobeAuthenticator(USERS)
    right = answer(authenticator)
    assert [authenticator.check(right, now).accepted for now in (0.0, 1.0, 61.0)] == [True, False, False]
    assert authenticator.check(answer(authenticator, client_challenge="c2"), 0.0).accepted


def test_challenge_lives_one_to_two_periods():
    authenticator = AdobeAuthenticator(USERS)
    assert authenticator.check(answer(authenticator, client_challenge="a"), CHALLENGE_PERIOD_S).accepted
    late = answer(authenticator, client_challenge="b")
    assert not authenticator.check(late, 2 * CHALLENGE_PERIOD_S).accepted


def test_challenges_differ_by_server_and_time():
    one, two = AdobeAuthenticator(USERS), AdobeAuthenticator(USERS)
    assert challenge(one) != challenge(two)
    assert challenge(one)[1] != challenge(one, now=CHALLENGE_PERIOD_S)[1]
    assert challenge(AdobeAuthenticator(USERS, secret=SECRET)) == challenge(AdobeAuthenticator(USERS, secret=SECRET))


def test_memory_of_answers_is_bounded():
    authenticator = AdobeAuthenticator(USERS)
    for number in range(REMEMBERED_ANSWERS + 10):
        assert authenticator._first_use(str(number), 0)
    assert len(authenticator._fresh) + len(authenticator._stale) <= 2 * REMEMBERED_ANSWERS
    assert not authenticator._first_use("5", 0)


@pytest.mark.parametrize("field", [0, 1, 2])
def test_fields_of_absurd_length_are_refused(field):
    fields = ["bob", "c", "r"]
    fields[field] = "x" * 257
    verdict = AdobeAuthenticator(USERS).check(AdobeAnswer(*fields), 0.0)
    assert (verdict.refusal, verdict.user) == (AUTH_FAILED, "")


def test_user_name_with_control_characters_is_not_echoed():
    """It would forge a log line."""
    assert AdobeAuthenticator(USERS).check(AdobeAnswer("a\nb", "", ""), 0.0).user == ""


@pytest.mark.parametrize(
    ("text", "address", "user"),
    [
        ("live", "live", None),
        ("live?authmod=adobe&user=bob", "live", "bob"),
        ("live?k=v?authmod=adobe&user=bob", "live?k=v", "bob"),
        ("live?k=v&authmod=adobe&user=bob", "live?k=v", "bob"),
        ("live?authmod=adobe&user=bob&k=v", "live?k=v", "bob"),
        ("live?a=b?authmod=adobe&user=bob&k=v", "live?a=b&k=v", "bob"),
        ("live?authmod=llnw&user=bob", "live?authmod=llnw&user=bob", None),
    ],
)
def test_authentication_is_taken_out_of_the_address(text, address, user):
    """What FFmpeg, OBS and gortmplib append does not become part of the application or the query."""
    rest, found = split_answer(text)
    assert (rest, found.user if found else None) == (address, user)


def test_response_with_slashes_and_equal_signs_survives():
    _, found = split_answer("rtmp://h/live?authmod=adobe&user=bob&challenge=c&response=a/b+c==")
    assert found == AdobeAnswer("bob", "c", "a/b+c==")
    assert "a/b" not in repr(found)


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("code=403 need auth; authmod=adobe", "?authmod=adobe&user=bob"),
        ("[ AccessManager.Reject ] : [ code=403 need auth; authmod=adobe ] : ", "?authmod=adobe&user=bob"),
        ("authmod=adobe ?reason=authfailed", None),
        ("[ AccessManager.Reject ] : [ authmod=adobe ] : ?reason=nosuchuser", None),
        ("code=403 need auth; authmod=llnw", None),
        ("go away", None),
    ],
)
def test_client_answers_a_request_to_authenticate(description, expected):
    """In our form and in that of Flash Media Server; a final refusal is final."""
    assert client_parameters(description, "bob", "hunter2") == expected
    assert client_parameters(description, None, None) is None


def test_client_hashes_opaque_when_the_server_sent_one():
    """Flash Media Server and Wowza do; it is then hashed in place of the challenge, and sent back."""
    description = "[ authmod=adobe ] : ?reason=needauth&user=bob&salt=s&challenge=c&opaque=o"
    fields = parse_query(client_parameters(description, "bob", "hunter2") or "")
    assert fields["opaque"] == "o"
    assert fields["response"] == response("bob", "hunter2", "s", "o", fields["challenge"])


@pytest.mark.parametrize("secret", [b"", b"short"])
def test_short_secret_is_refused(secret):
    with pytest.raises(ConfigError, match="secret has"):
        AdobeAuthenticator(USERS, secret=secret)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.__name__)
def test_client_and_server_log_in_over_three_connections(split):
    config = ServerSessionConfig(credentials=USERS)
    parameters, reasons = "", []
    for _ in range(3):
        pair = Pair(config, split=split)
        pair.client.publish()
        pair.client.connect("rtmp://bob:hunter2@h/live/room?k=v", parameters=parameters)
        pair.run()
        reasons += [event.reason for event in pair.server_events if isinstance(event, ConnectRefused)]
        parameters = next((event.retry_parameters for event in pair.client_events if isinstance(event, Rejected)), "")
    assert reasons == ["need-auth", "challenged"]
    assert pair.client_events[-1] == PublishStarted(1)
    (connect,) = [event for event in pair.server_events if isinstance(event, ConnectRequested)]
    assert (connect.user, connect.tc_url, connect.url.app) == ("bob", "rtmp://h/live", "live")


@pytest.mark.parametrize("place", ["app", "tcUrl"])
def test_authentication_may_stand_in_one_place_only(place):
    values = {"app": "live", "tcUrl": "rtmp://h/live"}
    values[place] += "?authmod=adobe&user=bob"
    client = ScriptedClient(ServerSessionConfig(credentials=USERS))
    assert client.call("connect", 1, values) == [ConnectRefused("challenged", "bob")]


def test_client_with_a_wrong_password_stops_trying():
    config = ServerSessionConfig(credentials=USERS)
    parameters, attempts = "", 0
    while parameters is not None:
        attempts += 1
        pair = Pair(config)
        pair.client.publish()
        pair.client.connect("rtmp://bob:wrong@h/live/room", parameters=parameters)
        pair.run()
        (rejected,) = [event for event in pair.client_events if isinstance(event, Rejected)]
        parameters = rejected.retry_parameters
    assert (attempts, rejected.description) == (3, AUTH_FAILED)


def test_client_gives_up_on_a_server_that_asks_for_ever():
    """A server that challenges each answer anew would have us connect without end."""
    pair = Pair()
    pair.client.publish()
    pair.client.connect("rtmp://bob:p@h/live/room", parameters="?authmod=adobe&user=bob&challenge=a&response=b")
    pair.answer = lambda _event: pair.server.reject_connect("authmod=adobe ?reason=needauth&salt=s&challenge=c")
    for _ in range(4):
        for event in pair.server.receive(pair.client.data_to_send(), 0.0):
            if isinstance(event, ConnectRequested):
                pair.answer(event)
        pair.client_events += pair.client.receive(pair.server.data_to_send(), 0.0)
    assert pair.client_events[-1].retry_parameters is None


# How each client reads a refusal: it returns ("ask", "") for a request of the user name, ("prove", parameters) for a
# challenge and ("give up", "") for the end.


def as_gstreamer_reads(refusal):
    """As gst-plugins-bad ``rtmpclient.c`` with authmod auto: its regular expression, and a query of an address."""
    if "code=403 need auth" in refusal and "authmod=adobe" in refusal:
        return "ask", {}
    found = re.search(
        r"\[ *AccessManager.Reject *\] *: *\[ *authmod=(?P<authmod>.*?) *\] *: *(?P<query>\?.*)\Z", refusal, re.DOTALL
    )
    if found is None or found["authmod"] != "adobe":
        return "give up", {}
    query = dict(parse_qsl(urlsplit(found["query"]).query))
    return ("prove", query) if query["reason"] == "needauth" else ("give up", {})


def as_ffmpeg_reads(refusal):
    """As FFmpeg ``rtmpproto.c``: parts of the text, the parameters in a buffer of 300 octets."""
    if refusal.partition("authmod=")[2].partition(" ")[0] != "adobe" or "?reason=authfailed" in refusal:
        return "give up", {}
    if "code=403 need auth" in refusal:
        return "ask", {}
    query = refusal[refusal.index("?reason=needauth") + 1 :][:299]
    return "prove", dict(part.partition("=")[::2] for part in query.split("&"))


def as_librtmp_reads(refusal):
    """As librtmp ``PublisherAuth``: "?reason=needauth" and everything behind it, cut at each "&"."""
    if "authmod=adobe" not in refusal:
        return "give up", {}
    if "code=403 need auth" in refusal:
        return "ask", {}
    start = refusal.find("?reason=needauth")
    return (
        ("prove", dict(part.partition("=")[::2] for part in refusal[start:].split("&")))
        if start >= 0
        else ("give up", {})
    )


@pytest.mark.parametrize("read", [as_gstreamer_reads, as_ffmpeg_reads, as_librtmp_reads])
@pytest.mark.parametrize("user", ["bob", "b" * 64, "Zoë"])
def test_refusals_lead_every_known_client_in_or_end_its_attempt(read, user):
    """GStreamer, FFmpeg and librtmp find the request, then salt and challenge, and the end of a wrong password."""
    authenticator = AdobeAuthenticator({user: "hunter2"})
    assert read(authenticator.check(None, 0.0).refusal) == ("ask", {})
    step, query = read(authenticator.check(AdobeAnswer(user, "", ""), 0.0).refusal)
    assert (step, query["user"]) == ("prove", user)
    proof = response(user, "hunter2", query["salt"], query.get("opaque") or query["challenge"], "c1")
    assert authenticator.check(AdobeAnswer(user, "c1", proof), 0.0).accepted
    wrong = response(user, "hunter3", query["salt"], query["challenge"], "c1")
    assert read(authenticator.check(AdobeAnswer(user, "c1", wrong), 0.0).refusal) == ("give up", {})


def test_server_without_credentials_ignores_authentication():
    client = ScriptedClient()
    event = client.connect(app="live?authmod=adobe&user=bob", tcUrl="rtmp://h/live?authmod=adobe&user=bob")
    assert (event.user, event.url.app, event.url.query, event.tc_url) == (None, "live", {}, "rtmp://h/live")
