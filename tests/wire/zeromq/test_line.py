"""Connections by their descriptors, and who has an identity that several claim."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import zmq

from flowctl.wire.zeromq.line import MOST_OUSTED, DuplicateLog, IdentityHolder, PeerLine


class Line(PeerLine):
    """A connection whose end is noted."""

    def cut(self) -> None:
        CUT.append(self.address)


CUT: list[str] = []


@pytest.fixture
def holder():
    CUT.clear()
    return IdentityHolder()


def line(address: str) -> Line:
    return Line(1, 1, address)


def test_line_when_cut_ends_that_connection_and_no_other_one_of_its_number():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        inode = os.fstat(ours.fileno()).st_ino
        PeerLine(ours.fileno(), inode + 1, "").cut()
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        PeerLine(ours.fileno(), inode, "").cut()
        assert theirs.recv(1) == b""
    with Path(os.devnull).open("rb") as other:
        PeerLine(other.fileno(), inode, "").cut()
    PeerLine(ours.fileno(), inode, "").cut()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "ipc://{}/s", "inproc://line"])
def test_line_of_a_message_is_the_connection_that_it_came_by(tmp_path, address):
    with zmq.Context() as context, context.socket(zmq.DEALER) as ours, context.socket(zmq.DEALER) as theirs:
        ours.rcvtimeo = theirs.rcvtimeo = 20_000
        ours.bind(address.format(tmp_path))
        theirs.connect(ours.getsockopt_string(zmq.LAST_ENDPOINT))
        theirs.send(b"hello")
        found = PeerLine.of(ours.recv(copy=False), ours.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        if found is None:
            assert address.startswith("inproc")
        elif address.startswith("ipc"):
            assert found.address.endswith(f":{os.getpid()}")
        else:
            with socket.socket(fileno=os.dup(found.descriptor)) as same:
                assert found.address == "{}:{}".format(*same.getpeername())
    assert PeerLine.of(None, "") is None


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_line_of_a_message_whose_connection_has_ended_is_no_other_one_of_its_number(kind, tmp_path):
    """By the time that a message is read, a viewer's may have the descriptor of its connection."""
    with contextlib.ExitStack() as stack:
        if kind == "unix":
            place = stack.enter_context(socket.socket(socket.AF_UNIX))
            place.bind(f"{tmp_path}/place")
            place.listen()
            theirs = stack.enter_context(socket.socket(socket.AF_UNIX))
            theirs.connect(place.getsockname())
            come, at, elsewhere = (
                f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}",
                f"ipc://{tmp_path}/place",
                "ipc://x",
            )
        else:
            place = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(socket.create_connection(place.getsockname()))
            come, at, elsewhere = "127.0.0.1", f"tcp://127.0.0.1:{place.getsockname()[1]}", "tcp://127.0.0.1:1935"
        ours = stack.enter_context(place.accept()[0])
        frame = {zmq.SRCFD: ours.fileno(), "Peer-Address": "192.0.2.1"}
        assert PeerLine.of(frame, at) is None
        assert PeerLine.of(frame | {"Peer-Address": "localhost:0:0:1"}, at) is None
        assert PeerLine.of(frame | {"Peer-Address": come}, elsewhere) is None  # a viewer behind the peer's address
        assert PeerLine.of(frame | {"Peer-Address": come}, at) is not None


def test_identity_when_a_life_that_was_taken_over_comes_again_stays_with_the_newest(holder):
    """The connection that was taken over is ended, so that its peer comes and is told; then that of the holder is."""
    assert holder.came(1, line("a"))
    assert holder.came(1, line("a2"))
    assert CUT == []
    assert holder.came(2, line("b"))
    assert CUT == ["a2"]
    assert not holder.came(1, line("a3"))
    assert holder.note_return(line("a3"))
    assert CUT == ["a2", "b"]
    assert not holder.came(1, line("a3"))
    assert not holder.note_return(line("a3"))
    assert holder.came(2, line("b2"))
    assert holder.count == 1
    assert CUT == ["a2", "b"]


def test_identity_when_found_with_two_is_told_once_a_minute_with_both_addresses_and_the_count(holder):
    for life in (1, 2):
        holder.came(life, line(f"of {life}"))
    told = []
    for second in range(90):
        holder.note_return(line(f"again {second}"))
        told.append(holder.told(100.0 + second))
    assert [item for item in told if item] == [
        "again 0 and of 2 (1 so far)",
        "again 60 and of 2 (61 so far)",
    ]


def test_log_when_many_identities_are_found_with_two_stays_short():
    """Where there are no keys, anybody may claim one after the other."""
    log = DuplicateLog()
    lines = [log.note(IdentityHolder(), now=number / 10) for number in range(1000)]
    assert (log.count, sum(map(bool, lines))) == (1000, 40)


def test_identity_when_the_next_life_has_the_same_connection_does_not_end_it(holder):
    """The last word of a life was read when the next one had the number of its descriptor already."""
    holder.came(1, line("a"))
    assert holder.came(2, line("a"))
    assert CUT == []


@pytest.mark.parametrize("unknown", [0, ""])
def test_identity_when_lives_are_not_told_ends_no_connection(holder, unknown):
    """Peers that name no life connect again as soon as they are cut off: they would take turns for ever."""
    assert all(holder.came(life, line("x")) for life in (unknown, 7, unknown, 7, unknown))
    assert CUT == []


def test_identity_when_many_lives_have_had_it_remembers_the_last_ones(holder):
    assert all(holder.came(life, line("x")) for life in range(1, 20))
    assert not any(holder.came(life, None) for life in range(19 - MOST_OUSTED, 19))
    assert holder.came(18 - MOST_OUSTED, None)
