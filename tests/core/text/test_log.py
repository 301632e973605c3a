"""Logging: one line per record for people or machines, secrets masked, the standard library routed through it."""

from __future__ import annotations

import io
import json
import logging
import re
from datetime import datetime, timedelta

import pytest

from flowctl import log
from flowctl.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_line_when_fields_are_given():
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    log.get_logger("flowctl.test").info("viewer slow", peer="192.0.2.1:5", queued_bytes=7)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "viewer slow",
        "level": "info",
        "logger": "flowctl.test",
        "peer": "192.0.2.1:5",
        "queued_bytes": 7,
    }


def test_text_line_says_that_its_time_is_utc(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    stream = io.StringIO()
    log.configure("info", stream=stream)
    log.get_logger("flowctl.test").info("viewer slow")
    assert datetime.fromisoformat(stream.getvalue().split()[0]).utcoffset() == timedelta(0)


def test_level_when_below_the_least():
    stream = io.StringIO()
    log.configure("warning", json=True, stream=stream)
    log.get_logger("a").info("no")
    logging.getLogger("b").info("no")
    log.get_logger("a").warning("yes")
    logging.getLogger("b").warning("yes, %s", "too")
    assert [line["event"] for line in lines(stream)] == ["yes", "yes, too"]


def test_level_when_unknown():
    with pytest.raises(ConfigError, match="debug, info, warning, error, critical"):
        log.configure("loud")


def test_standard_library_when_exception_is_logged():
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    try:
        int("rtmp://host/live/room?key=abc")
    except ValueError:
        logging.getLogger("flowctl.loop").exception("handler failed")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("handler failed", "error", "flowctl.loop")
    assert "ValueError" in line["exception"]
    assert "abc" not in stream.getvalue()


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_when_logged_in_any_place(as_json):
    stream = io.StringIO()
    log.configure("info", json=as_json, stream=stream)
    log.get_logger("a").info(
        "joined rtmp://host/live/room?token=S3CRET",
        stream_key="S3CRET",
        api_token=b"S3CRET",
        password=12345678,
        nested={"user": "ann", "Authorization": "S3CRET", "list": ["rtmp://u:S3CRET@host/live?sign=S3CRET&x=1"]},
        raw=b"GET /live/room?key=S3CRET HTTP/1.1",
    )
    logging.getLogger("b").warning("play %s", "room?secret=S3CRET", extra={"session_secret": "S3CRET"})
    text = stream.getvalue()
    assert "S3CRET" not in text
    assert "12345678" not in text
    assert "ann" in text
    assert "x=1" in text


def test_names_when_they_carry_secrets_are_hashes_and_plain_ones_stay():
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    said = (
        {"stream": "live/room", "app": "live", "agent": "Mozilla/5.0 (X11; Linux x86_64)"},
        {"stream": "live/room;key:S3CRET", "app": "live%3FS3CRET", "agent": "OBS rtmp://h/live/S3CRET"},
        {"stream": "live/room;key:S3CRET", "app": "x=S3CRET", "agent": "player Bearer S3CRET"},
        {"stream": "rtmp://h/S3CRET/x", "app": "a%2526S3CRET", "agent": "x%3Ftoken%3DS3CRET"},
        {"why": "live%3Fkey%3DS3CRET is published", "reason": "no live%253Fkey%253DS3CRET"},
        {"why": "100% of caf%C3%A9 at line_in_use=83%"},
    )
    for fields in said:
        log.get_logger("a").info("play started", **fields)
    assert "S3CRET" not in stream.getvalue()
    shown = [{name: line[name] for name in fields} for fields, line in zip(said, lines(stream), strict=True)]
    assert (shown[0], shown[-1]) == (said[0], said[-1])
    assert shown[1]["stream"] == shown[2]["stream"]
    assert shown[1]["stream"].startswith("live/h:")
    assert [line["agent"] for line in shown[1:3]] == ["OBS rtmp", "player "]


@pytest.mark.parametrize("text", ["%25" * 20_000, ";%3F" * 20_000, ":/" * 30_000, "bearer" * 10_000])
def test_names_when_made_to_be_dear_take_as_long_as_any(text):
    """Names of 60,000 characters take linear work: its square would not end within the test's time."""
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    log.get_logger("a").info("play started", stream=text, app=text, agent=text, why=text)
    assert len(stream.getvalue()) < 20_000


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("key", True),
        ("stream_key", True),
        ("streamKey", True),
        ("X-Auth-Token", True),
        ("passwordHash", True),
        ("key_frames", False),
        ("keyInterval", False),
        ("author", False),
        ("monkey", False),
        ("", False),
    ],
)
def test_secret_key_when_words_decide(key, expected):
    assert log.is_secret_key(key) is expected


def test_counts_when_they_are_named_like_secrets():
    fields = {"event": "x", "key": 7, "waiting_for_key": True, "token": None}
    assert log.mask_secrets(None, "info", dict(fields)) == fields


def test_colours_when_the_stream_is_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for name, stream in (("terminal", Terminal()), ("file", io.StringIO())):
        log.configure("info", stream=stream)
        log.get_logger("a").info("hello")
        shown[name] = "\x1b[" in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    log.configure("info", stream=stream)
    log.get_logger("a").info("hello")
    assert shown == {"terminal": True, "file": False}
    assert "\x1b[" not in stream.getvalue()


def test_configure_when_called_again():
    first, second = io.StringIO(), io.StringIO()
    log.configure("info", json=True, stream=first)
    log.configure("info", json=True, stream=second)
    log.get_logger("a").info("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_text_when_a_peer_chose_it_neither_moves_a_terminal_nor_forges_a_line():
    stream = Terminal()
    log.configure("info", stream=stream)
    hostile = "\x1b]0;title\x07\x9b2J\u202e\u2066\r\n2026-01-01 [error] forged\u2028\udc80"
    log.get_logger("a").info(f"play started {hostile}", peer="192.0.2.1:5", agent=hostile, nested={hostile: [hostile]})
    logging.getLogger("b").warning("closed by %s", hostile)
    logging.getLogger("c").error("failed", exc_info=ValueError(hostile))
    text = re.sub(r"\x1b\[\d*m", "", stream.getvalue())  # our own colours
    assert not set(text) & set("\x1b\x07\x9b\u202e\u2066\r\u2028\udc80")
    assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]
    assert text.count("title") == 6


def test_text_when_it_is_long_is_cut_between_words_and_hides_no_less():
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    for offset in range(40):
        log.get_logger("a").info("x " * 1000 + "y" * offset + " rtmp://h/a?token=S3CRET " * 500, n=offset)
    log.get_logger("a").info("one", word="rtmp://h/a?x=" + "S3CRET" * 5000, many=["v"] * 10_000)
    assert "S3CRET" not in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) < 10_000
    assert "characters left out" in stream.getvalue()


@pytest.mark.parametrize("text", ["agent token=S3CRET", "x password=S3CRET&b=1", "FMLE key=S3CRET"])
def test_text_when_a_secret_is_named_outside_of_an_address_is_masked(text):
    assert "S3CRET" not in log.redact_text(text)
    assert log.redact_text("monkey=3 key_interval=2s") == "monkey=3 key_interval=2s"


def test_lines_when_one_peer_causes_many_are_kept_back_and_told():
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    for _ in range(1000):
        log.get_logger("a").info("play started", peer="192.0.2.1:5")
    log.get_logger("a").info("play started", peer="192.0.2.2:5")
    logging.getLogger("b").warning("something else")
    log.flush()
    found = lines(stream)
    of_one = [line for line in found if line.get("peer") == "192.0.2.1:5"]
    (told,) = [line for line in found if "kept back" in line["event"]]
    assert len(of_one) + told["lines"] == 1000
    assert len(of_one) < 300
    assert told["about"] == "192.0.2.1"
    assert {"192.0.2.2:5"} <= {line.get("peer") for line in found}
    assert "something else" in {line["event"] for line in found}


@pytest.mark.parametrize("peer", ["[2001:db8::{:x}]:4000", "[2001:db8:0:0:1:2:3:{:x}]:4000", "2001:db8::{:x}"])
def test_lines_when_one_network_of_ipv6_causes_them_have_one_share(peer):
    """Who has one address of IPv6 has 2^64 of them: the lines of all of them count together, with and without port."""
    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    for number in range(1, 1001):
        log.get_logger("a").info("play started", peer=peer.format(number))
    log.flush()
    found = lines(stream)
    (told,) = [line for line in found if "kept back" in line["event"]]
    assert told["about"] == "2001:db8::/64"
    assert len(found) < 300


def test_line_when_a_value_cannot_be_shown_says_so_and_ends_nothing(capfd):
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    stream = io.StringIO()
    log.configure("info", json=True, stream=stream)
    log.get_logger("a").info("shown", value=Broken())
    logging.getLogger("b").warning("%d", "no number")
    assert [line["event"] for line in lines(stream)] == ["a log line could not be rendered"] * 2
    assert capfd.readouterr().err == ""
