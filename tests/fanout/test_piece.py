"""Pieces of a log: their bytes, the file with the same bytes, and whose transports may take it."""

from __future__ import annotations

import errno
import gc
import os
import ssl
import sys
from pathlib import Path

import pytest
from flow_kit import Published

from flowctl.core.fanout.piece import Piece, gather, socket_behind
from flowctl.testing import ManualGroup, ScriptedTransport

needs_files = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous memory files")


@pytest.fixture(name="piece")
def fixture_piece():
    published = Published(ManualGroup())
    start = published.log.tail
    published.script("KIA", 20_000)
    return Piece(start, published.log.tail)


def test_bytes_when_gathered_are_those_between_two_entries():
    published = Published(ManualGroup())
    entries = [published.log.tail]
    for letter in "KIA":
        published.script(letter)
        entries.append(published.log.tail)
    wires = [entry.wire for entry in entries[:-1]]
    assert gather(entries[0], entries[3]) == b"".join(wires)
    assert gather(entries[1], entries[2]) == wires[1]
    assert gather(entries[3], entries[3]) == b""


@needs_files
def test_file_when_asked_for_is_one_and_has_the_bytes(piece):
    descriptor = piece.descriptor()
    assert piece.descriptor() == descriptor >= 0
    assert os.pread(descriptor, 2 * len(piece.data), 0) == piece.data
    assert "flowctl-piece" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


@needs_files
def test_file_when_closed_is_gone_and_not_made_again(piece):
    descriptor = piece.descriptor()
    piece.close()
    piece.close()
    assert piece.descriptor() == -1
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@needs_files
def test_file_when_its_piece_is_forgotten_is_closed(piece):
    other = Piece(piece.start, piece.end)
    descriptor = other.descriptor()
    inode = os.fstat(descriptor).st_ino
    del other
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        assert os.fstat(descriptor).st_ino == inode


@needs_files
@pytest.mark.parametrize("where", ["memfd_create", "write"])
def test_file_when_there_is_no_room_for_it_is_none(piece, monkeypatch, where):
    def fail(*_arguments):
        raise OSError(errno.ENOMEM, "scripted")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, where, fail)
    assert piece.descriptor() == -1
    monkeypatch.undo()
    assert piece.descriptor() == -1
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_socket_when_bytes_must_pass_through_something_is_none():
    assert socket_behind(ScriptedTransport().send) is None
    assert socket_behind(len) is None
    assert socket_behind(bytearray().extend) is None
    assert socket_behind(ssl.SSLSocket.send.__get__(object())) is None


def test_piece_when_gathering_fails_ends_without_a_second_error(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def fail(start, end):
        raise MemoryError("no room for the bytes")

    monkeypatch.setattr("flowctl.core.fanout.piece.gather", fail)
    log = Published(ManualGroup()).log
    with pytest.raises(MemoryError):
        Piece(log.tail, log.tail)
    gc.collect()
    assert unraisable == []
