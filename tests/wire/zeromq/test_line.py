"""Connections by their descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import zmq

from flowctl.wire.zeromq.line import PeerLine


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
