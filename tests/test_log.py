"""Logging: one line per record for people or machines, secrets masked, the standard library routed through it."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from flowctl import log
from flowctl.errors import ConfigError


@pytest.fixture(autouse=True)
def _logging_as_before():
    """Leave the process's logging as it was found."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def lines(stream) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_line_when_fields_are_given():
    """A JSON line holds event, level, logger, time and the fields."""
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


def test_level_when_below_the_least():
    """Records below the level are not written, from either logging system."""
    stream = io.StringIO()
    log.configure("warning", json=True, stream=stream)
    log.get_logger("a").info("no")
    logging.getLogger("b").info("no")
    log.get_logger("a").warning("yes")
    logging.getLogger("b").warning("yes, %s", "too")
    assert [line["event"] for line in lines(stream)] == ["yes", "yes, too"]


def test_level_when_unknown():
    """An unknown level is refused with the list of known ones."""
    with pytest.raises(ConfigError, match="debug, info, warning, error, critical"):
        log.configure("loud")


def test_standard_library_when_exception_is_logged():
    """The core's errors come out as one line with their traceback."""
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
    """A secret appears in no line: by the name of its field, inside nested values, in addresses, in messages."""
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
    """Whole words make a field a secret; key frames are none."""
    assert log.is_secret_key(key) is expected


def test_counts_when_they_are_named_like_secrets():
    """Numbers of key frames, and flags, are shown."""
    fields = {"event": "x", "key": 7, "waiting_for_key": True, "token": None}
    assert log.mask_secrets(None, "info", dict(fields)) == fields


def test_colours_when_the_stream_is_a_terminal(monkeypatch):
    """A terminal gets colours, unless NO_COLOR says no; a file never does."""
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
    """A second call replaces the first: nothing is written twice."""
    first, second = io.StringIO(), io.StringIO()
    log.configure("info", json=True, stream=first)
    log.configure("info", json=True, stream=second)
    log.get_logger("a").info("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1
