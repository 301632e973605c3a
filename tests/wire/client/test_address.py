"""Addresses of operators: what they may say, keys from files, and that no error shows a key."""

from __future__ import annotations

import os

import pytest

from flowctl.errors import ConfigError
from flowctl.wire.client.address import parse_address


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "key"
    path.touch(mode=0o600)
    return path


@pytest.mark.parametrize(
    ("written", "held", "query"),
    [
        ("?key=@{}", "s3cret\n", "key=s3cret"),
        ("?user=ann&token=@{}&x=1", "a.b.c=", "user=ann&token=a.b.c=&x=1"),
        ("?@{}", "expires=5&sig=ab", "expires=5&sig=ab"),
        ("?@{}", "live/room?expires=5&sig=ab\n", "expires=5&sig=ab"),
        ("?key=a@b", "", "key=a@b"),
    ],
)
def test_address_when_it_names_a_file_has_what_the_file_holds(file, written, held, query):
    file.write_text(held)
    url = parse_address("rtmps://ann:pw@h/live/room" + written.format(file))
    assert (url.raw_query, url.path, url.tls, url.port) == (query, "live/room", True, 443)


def test_address_when_its_name_is_in_a_file_is_shown_without_it(file):
    file.write_text("abcd-efgh\n")
    for text in (f"rtmps://h/live2/@{file}", f"rtmps://h/live2/@{file}?backup=1"):
        url = parse_address(text)
        assert (url.app, url.stream) == ("live2", "abcd-efgh")
        shown = f"{url} {url!r} {url.masked('no such stream abcd-efgh')}"
        assert ("abcd" in shown, "rtmps://h/live2/***" in shown) == (False, True)
    assert parse_address("rtmp://ann:pw@h/live/a@b").path == "live/a@b"


@pytest.mark.parametrize(
    ("held", "mode", "why"), [("", 0o600, "no key"), ("a\nb", 0o600, "no key"), ("SECRET", 0o644, "may use it")]
)
def test_address_when_its_file_is_no_secret_is_refused(file, held, mode, why):
    file.write_text(held)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        parse_address(f"rtmp://h/live/room?key=@{file}")
    file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        parse_address(f"rtmp://h/live/room?key=@{file}")
    os.mkfifo(file, 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        parse_address(f"rtmp://h/live/room?key=@{file}")


@pytest.mark.parametrize(
    "text",
    ["rtmp://ann:SECRET@h:99999/a/b?key=SECRET", "rtmp:/h?key=SECRET", "srt://h/a/b?key=SECRET", "rtmp://h?key=SECRET"],
)
def test_address_when_wrong_is_refused_without_showing_a_key(text):
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"
