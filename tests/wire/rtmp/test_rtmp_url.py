"""RTMP addresses: every way that clients split and decorate them leads to one address, and bad ones are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.url import (
    canonical,
    check_name,
    fits_names,
    from_connect,
    is_path,
    parse_query,
    parse_url,
    redact_url,
    url_of,
)


def code_of(function, *arguments, **keywords):
    with pytest.raises(RemoteProtocolError) as caught:
        function(*arguments, **keywords)
    return caught.value.code


@pytest.mark.parametrize(
    ("text", "host", "port", "app", "stream"),
    [
        ("rtmp://example.com/live/room", "example.com", 1935, "live", "room"),
        ("rtmp://example.com:19350/live/room", "example.com", 19350, "live", "room"),
        ("rtmp://EXAMPLE.com/live/inst/room", "example.com", 1935, "live/inst", "room"),
        ("rtmp://example.com/live", "example.com", 1935, "live", ""),
        ("rtmp://example.com", "example.com", 1935, "__defaultApp__", ""),
        ("rtmp://example.com/", "example.com", 1935, "__defaultApp__", ""),
        ("rtmp://example.com//live///room/", "example.com", 1935, "live", "room"),
        ("rtmps://example.com/live/room", "example.com", 443, "live", "room"),
        ("rtmp://[::1]:1936/live/room", "::1", 1936, "live", "room"),
        ("rtmp://[2001:db8::7]/live/room", "2001:db8::7", 1935, "live", "room"),
        ("rtmp://example.com/live/_definst_/room", "example.com", 1935, "live", "room"),
        ("rtmp://example.com/live/mp4:film.mp4", "example.com", 1935, "live", "mp4:film.mp4"),
    ],
)
def test_parse_url_reads_host_port_application_and_stream(text, host, port, app, stream):
    url = parse_url(text)
    assert (host, port, app, stream) == (url.host, url.port, url.app, url.stream)


def test_parse_url_reads_query_and_credentials():
    url = parse_url("rtmp://bob:p@ss@example.com/live/room?token=a%2Bb/c=&x")
    assert (url.user, url.password, url.raw_query) == ("bob", "p@ss", "token=a%2Bb/c=&x")
    assert url.query == {"token": "a%2Bb/c=", "x": ""}


def test_parse_url_moves_a_query_that_stands_before_the_stream():
    """``app?k=v/stream``, the form of Flash media encoders, names a stream when the path alone names none."""
    url = parse_url("rtmp://example.com/live?vhost=demo/room")
    assert (url.app, url.stream, url.query, url.vhost) == ("live", "room", {"vhost": "demo"}, "demo")


def test_parse_url_keeps_a_slash_in_a_query_when_the_path_names_the_stream():
    url = parse_url("rtmp://example.com/live/room?token=a/b")
    assert (url.stream, url.query["token"]) == ("room", "a/b")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "bad-url"),
        ("example.com/live", "bad-url"),
        ("rtmp:/example.com/live", "bad-url"),
        ("rtmp://example.com:0/live/room", "bad-url"),
        ("rtmp://example.com:65536/live/room", "bad-url"),
        ("rtmp://example.com:" + "9" * 4000 + "/live/room", "bad-url"),
        ("rtmp://exa[mple/live/room", "bad-url"),
        ("rtmp://example.com/live/room?" + "x" * 9000, "bad-url"),
        ("rtmp://example.com/live/room?" + "&".join(f"k{i}=v" for i in range(65)), "bad-url"),
        ("rtmp://example.com/live/../room", "bad-name"),
        ("rtmp://example.com/live/ro\0om", "bad-name"),
    ],
)
def test_parse_url_refuses_what_is_no_address(text, code):
    assert code == code_of(parse_url, text)


@pytest.mark.parametrize(
    ("tc_url", "app", "name"),
    [
        ("rtmp://h/live", "live", "room?k=v"),
        ("rtmp://h/live/", "live/", "room?k=v"),
        ("rtmp://h/live/room", "live/room", "?k=v"),
        ("rtmp://h/live/room?k=v", "live/room?k=v", ""),
        ("rtmp://h/live?k=v", "live?k=v", "room"),
        ("rtmp://h/", "", "live/room?k=v"),
        ("rtmp://h", None, "/live/room?k=v"),
        ("rtmp://h/live/_definst_", "live/_definst_", "room?k=v"),
        ("'rtmp://h/live'", "live", "room?k=v"),
        ('"rtmp://h/live" ', "live", "room?k=v"),
    ],
)
def test_every_split_of_an_address_gives_the_same_stream(tc_url, app, name):
    """OBS users put the path and the query into "Server" or "Stream Key" as they like."""
    url = from_connect(tc_url, app).with_stream(name)
    assert (url.host, url.app, url.stream, url.path, url.query) == ("h", "live", "room", "live/room", {"k": "v"})


@pytest.mark.parametrize("tc_url", [None, "", "  ", "''", "live", "garbage", "rtmp://h:x/live"])
def test_from_connect_uses_the_application_when_tcurl_is_no_address(tc_url):
    url = from_connect(tc_url, "live/inst?token=t").with_stream("room")
    assert (
        url.host,
        url.app,
        url.instance,
        url.stream,
        url.query,
    ) == ("", "live/inst", "inst", "room", {"token": "t"})


def test_from_connect_without_anything_has_the_default_application():
    assert from_connect(None, None).with_stream("room").path == "__defaultApp__/room"


def test_with_stream_merges_queries_and_the_later_value_wins():
    """A query may stand in tcUrl (multitrack OBS) and in the key."""
    url = from_connect("rtmp://h/live?a=1&b=1", "live").with_stream("room?b=2&c=3")
    assert (url.query, url.raw_query) == ({"a": "1", "b": "2", "c": "3"}, "a=1&b=1&b=2&c=3")


@pytest.mark.parametrize("name", ["", "?token=t", "/", "//"])
def test_with_stream_refuses_no_name_without_an_application(name):
    assert code_of(from_connect("rtmp://h/", "").with_stream, name) == "bad-name"


@pytest.mark.parametrize(
    ("tc_url", "app", "name"),
    [
        ("rtmp://h/room?token=t", "room?token=t", ""),  # FFmpeg, for rtmp://h/room?token=t
        ("rtmp://h/room", "room", "?token=t"),
        ("rtmp://h/", "", "room?token=t"),
        ("rtmp://h", None, "/room?token=t"),
        ("rtmp://h/?token=t", "?token=t", "room"),
    ],
)
def test_address_of_one_segment_is_a_stream_of_the_default_application(tc_url, app, name):
    """Wherever the only segment stands: MediaMTX tells its users to leave the key empty."""
    url = from_connect(tc_url, app).with_stream(name)
    assert (url.path, url.stream, url.query) == ("__defaultApp__/room", "room", {"token": "t"})


@pytest.mark.parametrize(
    ("tc_url", "app", "name"),
    [
        ("rtmp://h/live?secret=x", "live?secret=x", "room"),
        ("rtmp://h/live?secret=x/room", "live?secret=x", "room"),
        ("rtmp://h/live?secret=x/room", "live?secret=x/room", ""),  # OBS with all of it in "Server"
        ("rtmp://h/live", "live?secret=x/room", ""),
        ("rtmp://h/live", "live", "?secret=x/room"),
    ],
)
def test_name_behind_the_query_is_found(tc_url, app, name):
    """``app?secret=x/stream`` in any of the three places: the secret ends before the slash."""
    url = from_connect(tc_url, app).with_stream(name)
    assert (url.path, url.query) == ("live/room", {"secret": "x"})


def test_slash_in_a_value_stays_there_when_the_address_has_a_name():
    url = from_connect("rtmp://h/live?sign=a/b", "live?sign=a/b").with_stream("room?time=1/2")
    assert (url.path, url.query) == ("live/room", {"sign": "a/b", "time": "1/2"})
    one = from_connect("rtmp://h/room?sign=a/b==", "room?sign=a/b==").with_stream("")
    assert (one.stream, one.query) == ("room", {"sign": "a/b=="})


@pytest.mark.parametrize(
    ("query", "vhost"),
    [
        ("vhost=Demo", "demo"),
        ("domain=demo", "demo"),
        ("vhost=__defaultVhost__", "h"),
        ("vhost=", "h"),
        ("x=1", "h"),
    ],
)
def test_vhost_is_the_query_or_the_host(query, vhost):
    assert vhost == parse_url(f"rtmp://h/live/room?{query}").vhost
    assert vhost == from_connect("rtmp://h/live", "live").with_stream(f"room?{query}").vhost


def test_vhost_is_read_from_the_old_dotted_form():
    """``app...vhost...name`` is how SRS took a vhost before it took queries."""
    url = from_connect("rtmp://h/live...vhost...demo", "live").with_stream("room")
    assert (url.vhost, url.app, url.stream) == ("demo", "live", "room")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../b",
        "..",
        ".",
        "a/./b",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\x85b",
        "a\u202eb",
        "a\ud800b",
        "a\\b",
        "a\u2028b",
        "a\u2029b",
        "a\u200eb",
        "a\u2066b",
        "a\ufeffb",
        "a\u00adb",
        "a\u061cb",
        "a\uffffb",
        "a\ufdd0b",
    ],
)
def test_check_name_refuses_traversal_and_control_characters(name):
    assert code_of(check_name, name, "stream name") == "bad-name"
    assert code_of(from_connect("rtmp://h/live", "live").with_stream, name) == "bad-name"


@pytest.mark.parametrize(
    "name",
    [
        "room",
        "room-1_2.flv",
        "mp4:film",
        "комната",
        "a..b",
        "...",
        "room 1",
        "直播",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "a\u3000b",
        "a\u00a0b",
        "क्\u200cष",
        "\U0001fae8",
        "\u2764\ufe0f",
    ],
)
def test_check_name_allows_names_in_use(name):
    assert name == from_connect("rtmp://h/live", "live").with_stream(name).stream


def test_check_name_holds_the_length_to_the_limit():
    base = from_connect("rtmp://h/live", "live")
    assert len(base.with_stream("x" * 256).stream) == 256
    with pytest.raises(RemoteProtocolError, match=r"257 characters, the limit is 256") as caught:
        base.with_stream("x" * 257)
    assert "xxx" not in str(caught.value)
    assert code_of(base.with_stream, "x" * 9, name_max_chars=8) == "bad-name"
    assert code_of(from_connect, "rtmp://h/" + "x" * 9, "live", name_max_chars=8) == "bad-name"


@pytest.mark.parametrize(
    "name", ["key", "secret", "token", "pass", "password", "auth", "sign", "txSecret", "X-JWT", "streamKey", "wsSign"]
)
def test_secret_values_are_in_no_text_form(name):
    url = from_connect(f"rtmp://h/live?{name}=hunter2", "live").with_stream(f"room?{name}=hunter2&n=5")
    for text in (str(url), repr(url), repr(url.query), url.redacted(), redact_url(f"rtmp://h/a?{name}=hunter2")):
        assert "hunter2" not in text
        assert "***" in text
    assert "n=5" in str(url)


def test_password_is_in_no_text_form():
    url = parse_url("rtmp://bob:hunter2@h/live/room")
    assert str(url) == "rtmp://h/live/room"
    assert redact_url("rtmp://bob:hunter2@h/live/room?a=1") == "rtmp://bob:***@h/live/room?a=1"


def test_redact_url_covers_adobe_authentication():
    text = "rtmp://h/live?a=1?authmod=adobe&user=bob&challenge=c&response=r0ger"
    assert redact_url(text) == "rtmp://h/live?a=1?authmod=***&user=bob&challenge=c&response=***"


@pytest.mark.parametrize(
    "text", ["rtmp://h/live", "rtmp://h:19350/live/inst", "rtmp://[::1]:1936/live", "rtmps://h/live"]
)
def test_tc_url_is_what_a_client_sends(text):
    assert text == parse_url(f"{text}/room?k=v").tc_url


def test_parse_query_takes_leading_question_mark_and_empty_parts():
    assert parse_query("?a=1&&b&c=x=y") == {"a": "1", "b": "", "c": "x=y"}


NAMES = st.text(st.characters(categories=["Lu", "Ll", "Nd"]), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=5), st.dictionaries(NAMES, NAMES, max_size=4), st.data())
def test_any_split_of_any_path_gives_the_same_address(segments, query, data):
    cut = data.draw(st.integers(0, len(segments)))
    raw = "&".join(f"{name}={value}" for name, value in query.items())
    app, name = "/".join(segments[:cut]), "/".join(segments[cut:])
    url = from_connect(f"rtmp://h/{app}", app).with_stream(f"{name}?{raw}" if raw else name)
    path = "/".join(segments) if len(segments) > 1 else f"__defaultApp__/{segments[0]}"
    assert (path, query) == (url.path, dict(url.query))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.none(), st.text(max_size=60)), st.one_of(st.none(), st.text(max_size=40)), st.text(max_size=40))
def test_no_text_of_a_peer_raises_anything_else(tc_url, app, name):
    try:
        url = from_connect(tc_url, app).with_stream(name)
    except RemoteProtocolError as error:
        code = error.code
    else:
        code = "no error"
        assert url.stream
        assert ".." not in url.path.split("/")
        assert isinstance(repr(url), str)
    assert code in {"no error", "bad-url", "bad-name"}


@pytest.mark.parametrize(
    "path",
    [
        "live/room",
        "a/b/room",
        "live/room#2",
        "a#b/room",
        "a...vhost...b/room",
        " a/'b'",
        "ü/ä ö",
        "b" * 256 + "/" + "x" * 256,
    ],
)
def test_url_of_a_stream_asks_for_this_stream(path):
    url = url_of(path, "example.com", 1936)
    assert from_connect(url.tc_url, url.app).with_stream(url.stream).path == path
    assert (url.host, url.port, is_path(path)) == ("example.com", 1936, True)


@pytest.mark.parametrize(
    "path", ["", "room", "live/..", "live//room", "/room", "live/room?a=b", "live/\n", "live/_definst_/a"]
)
def test_name_when_no_server_can_have_it_is_no_path(path):
    assert not is_path(path)


@pytest.mark.parametrize(
    ("app", "name", "path"),
    [
        ("live", "my%20show", "live/my show"),  # FFmpeg, for rtmp://h/live/my%20show
        ("live", "my show?k=%20", "live/my show"),
        ("live", "mp4:talk.mp4", "live/talk"),  # FFmpeg, for talk.mp4
        ("live", "mp4:talk", "live/talk"),  # librtmp, for talk.mp4
        ("live", "talk.mp4", "live/talk"),
        ("live", "flv:clip", "live/clip"),
        ("live", "clip.flv", "live/clip"),
        ("live/inst", "mp4:b/talk.mp4", "live/inst/b/talk"),
        ("live/mp4:talk.mp4", "", "live/talk"),
        ("live", "mp4:flv:a.mp4.flv", "live/a"),
        ("my%20app", "a%2Fb", "my app/a/b"),
        ("live?k=v/my%20show", "", "live/my show"),
        ("live", "50%", "live/50%"),
        ("live", "50%25", "live/50%"),
        ("live", "%D0%BA%D0%BE%D1%82", "live/кот"),
        ("live", "a.b:c", "live/a.b:c"),
        ("live", "film.mp4.old", "live/film.mp4.old"),
        ("live", "a+b", "live/a+b"),
    ],
)
def test_canonical_when_clients_spell_a_name_in_their_ways_gives_one(app, name, path):
    url = canonical(from_connect(f"rtmp://h/{app}", app).with_stream(name))
    assert (url.path, url.raw_query) == (path, {"my show?k=%20": "k=%20", "": url.raw_query}.get(name, ""))
    assert is_path(path)


@pytest.mark.parametrize(
    "name",
    [
        "my%2520show",
        "a%252e%252e",
        "%2e%2e",
        "mp4:..",
        "a/mp4:../b",
        "...flv",
        "a%00b",
        "a%0ab",
        "a%5cb",
        "a%3Fb",
        "a%ff",
        "mp4:.flv",
        ".mp4",
        "_definst_.flv",
        "%2E%2E%2Fsecret",
    ],
)
def test_canonical_when_a_name_cannot_be_one_refuses_it(name):
    base = from_connect("rtmp://h/live", "live")
    assert code_of(lambda: canonical(base.with_stream(name))) == "bad-name"


SPELLED = st.lists(
    st.sampled_from([*"ab/.:?%2", "%25", "%2e", "%2F", "mp4:", "flv:", ".flv", ".mp4", "..", "_definst_", "ü", " "]),
    max_size=9,
).map("".join)


@settings(max_examples=1000, deadline=None)
@given(SPELLED, SPELLED, st.booleans())
def test_canonical_when_it_is_done_again_changes_nothing(app, name, decoded):
    """Nobody reaches a name by a spelling that a rule does not see, here or in the next server."""
    try:
        url = canonical(from_connect(f"rtmp://h/{app}", app).with_stream(name), decoded=decoded)
    except RemoteProtocolError:
        return
    assert is_path(url.path)
    asked = url_of(url.path, "h")  # by another server of ours
    for again in (url, from_connect(asked.tc_url, asked.app).with_stream(asked.stream)):
        assert [canonical(again).path, canonical(again, decoded=True).path] == [url.path] * 2
    assert fits_names(url.path)


@pytest.mark.parametrize(
    "pattern",
    ["live/a%20b", "live/mp4:*", "*.flv", "mp4:live/*", "/live/*", "live/", "live//*", "./live/*", "live/../*"],
)
def test_pattern_when_no_name_is_spelled_so_fits_none(pattern):
    assert not fits_names(pattern)
    assert all(map(fits_names, ["*", "live/*", "live/50%", "live/?.old", "live.mp4/*"]))
