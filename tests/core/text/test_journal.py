"""The journal: entries in its protocol, as journald itself reads them (tests/e2e has that)."""

from __future__ import annotations

import os
import socket

import pytest

from flowctl import log
from flowctl.core.text import journal
from flowctl.core.text.journal import JournalTarget, journal_entry

PATIENCE_S = 20.0


def entry_of(octets):
    """Return the fields of an entry: NAME=value, or a name, a length of eight octets, and so many octets."""
    fields = {}
    while octets:
        line, _, octets = octets.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(octets[:8], "little")
            value, end, octets = octets[8 : 8 + size], octets[8 + size : 9 + size], octets[9 + size :]
            assert end == b"\n"
        fields[name.decode()] = value.decode()
    return fields


@pytest.fixture
def journald(tmp_path, monkeypatch):
    """A socket in the place of the journal's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "socket"))
        sock.settimeout(PATIENCE_S)
        monkeypatch.setattr(journal, "SOCKET", sock.getsockname())
        yield sock


def test_entry_when_a_field_has_lines_or_a_strange_name_is_read_as_it_was():
    octets = journal_entry("two\nlines", "warning", {"stream": "live/a=b", "what.is-it": {"a": 1}, "x" * 99: "é"})
    assert entry_of(octets) == {
        "MESSAGE": "two\nlines",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "flowctl",
        "FLOWCTL_STREAM": "live/a=b",
        "FLOWCTL_WHAT_IS_IT": '{"a": 1}',
        "FLOWCTL_" + "X" * 56: "é",
    }


def test_target_when_an_entry_is_too_large_for_a_datagram_hands_over_sealed_memory(journald):
    target = JournalTarget(journald.getsockname())
    large = journal_entry("x" * 2_000_000, "info", {})
    assert target.write([b"", b"A=1\n", large]) is None
    assert journald.recv(100) == b"A=1\n"
    octets, descriptors, _, _ = socket.recv_fds(journald, 100, 1)
    assert octets == b""
    with os.fdopen(descriptors[0], "rb") as file:
        assert os.pread(file.fileno(), len(large) + 1, 0) == large
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), 0)
    target.close()


def test_target_when_the_journal_is_not_there_says_so(tmp_path):
    target = JournalTarget(str(tmp_path / "none"))
    assert isinstance(target.write([b"A=1\n"]), FileNotFoundError)
    target.close()


@pytest.mark.parametrize(("named", "as_json"), [(True, False), (True, True), (False, False)])
def test_log_when_standard_error_is_the_journal_goes_there_with_its_fields(
    journald, tmp_path, monkeypatch, named, as_json
):
    """Without the variable of systemd, of another file, or as JSON, it is lines on standard error."""
    with (tmp_path / "stderr").open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + (not named)}")
        log.configure("info", json=as_json, stream=stream)
        try:
            log.get_logger("flowctl.a").warning("viewer slow", stream="live/a", peer="192.0.2.1:5", token="hush")
            log.flush()
        finally:
            log.configure("info")
        if not named or as_json:
            assert "viewer slow" in (tmp_path / "stderr").read_text()
            return
    found = entry_of(journald.recv(10_000))
    assert found.pop("MESSAGE") == "viewer slow [flowctl.a] peer=192.0.2.1:5 stream=live/a token=***"
    assert found == {
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "flowctl",
        "FLOWCTL_LOGGER": "flowctl.a",
        "FLOWCTL_PEER": "192.0.2.1:5",
        "FLOWCTL_STREAM": "live/a",
        "FLOWCTL_TOKEN": "***",
    }
