"""Bans of a running server that come from a store, a file and commands at once."""

from __future__ import annotations

import contextlib
import socket

import pytest
from e2e_kit import open_live_server
from live_kit import perform

from flowctl.errors import LocalProtocolError

FILE = '{"cidr": "127.0.0.7/32", "reason": "flood", "score": 4, "evidence": {"hard limit": 9}, "expires": null}\n'


def do(server, name, **given):
    return perform(server, name, given)


def turned_away(server, source):
    """Return whether a connection from `source` is ended at once."""
    before = server.accepted_count
    with (
        contextlib.suppress(ConnectionResetError),
        socket.create_connection(server.address, timeout=20, source_address=(source, 0)) as sock,
    ):
        if server.admission.ban_of(source) is not None:
            assert sock.recv(1) == b""
    return server.accepted_count == before


@pytest.fixture
def paths(tmp_path):
    file = tmp_path / "bans.jsonl"
    file.write_text(FILE)
    return {"ban_store": tmp_path / "bans.sqlite", "bans_file": file}


def test_bans_when_there_are_store_and_file_come_from_both_and_say_from_where(paths):
    with open_live_server(**paths) as server:
        found = do(server, "ban", network="127.0.0.9", duration="1h", reason="rude", origin="ops")
        assert found["in_store"]
        assert found["kept"] == "in the ban store, and after a restart too"
    assert paths["bans_file"].read_text() == FILE
    with open_live_server(**paths) as server:
        assert turned_away(server, "127.0.0.9")
        assert turned_away(server, "127.0.0.7")
        shown = {item["cidr"]: item for item in do(server, "bans")["bans"]}
    assert [(shown[cidr]["source"], shown[cidr]["reason"]) for cidr in sorted(shown)] == [
        ("file", "flood"),
        ("command of ops", "rude"),
    ]
    assert shown["127.0.0.7/32"]["evidence"] == {"hard limit": 9}


def test_unban_when_the_ban_is_in_the_store_lasts(paths):
    with open_live_server(**paths) as server:
        do(server, "ban", network="127.0.0.9")
        do(server, "ban", network="127.0.0.7", duration="1h")
        assert len(do(server, "unban", network="127.0.0.9")["lifted"]) == 1
        assert len(do(server, "unban", network="127.0.0.7")["lifted"]) == 1
    assert paths["bans_file"].read_text() == FILE
    with open_live_server(**paths) as server:
        assert do(server, "bans")["bans"] == []
        with pytest.raises(LocalProtocolError, match="is not banned"):
            do(server, "unban", network="127.0.0.9")
