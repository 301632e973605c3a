"""Socket options, and how a socket is closed: in order with the last words arriving, or with a reset."""

from __future__ import annotations

import ctypes
import socket
import struct
import time

import pytest

from flowctl.core.loop.sockets import (
    NOTSENT_LOWAT_BYTES,
    SocketOptions,
    close_socket,
    line_figures,
    peer_name,
    unacknowledged_bytes,
)
from flowctl.errors import ConfigError


@pytest.fixture
def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname(), 10)
        ours, _ = listener.accept()
    yield ours, peer
    ours.close()
    peer.close()


def test_apply_when_tcp_sets_what_was_asked(tcp):
    ours, _ = tcp
    SocketOptions(send_buffer_bytes=32768, receive_buffer_bytes=16384).apply(ours)
    assert ours.getblocking() is False
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_LOWAT_BYTES
    # The kernel doubles what it is asked for, for its own book-keeping (socket(7)).
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 65536
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 32768


def test_apply_when_zero_leaves_the_kernels_choice(tcp):
    ours, peer = tcp
    before = peer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    SocketOptions(notsent_lowat_bytes=0).apply(ours)
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) in {0, 0xFFFFFFFF, -1}
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= min(before, 16384)


def test_apply_when_not_tcp_sets_only_what_there_is():
    ours, peer = socket.socketpair()
    with ours, peer:
        SocketOptions().apply(ours)
        assert ours.getblocking() is False


@pytest.mark.parametrize("name", ["notsent_lowat_bytes", "send_buffer_bytes", "receive_buffer_bytes"])
def test_options_when_negative_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} is -1, it must be 0"):
        SocketOptions(**{name: -1})


def test_close_when_in_order_delivers_the_last_words_despite_unread_input(tcp):
    """The kernel resets a connection closed with unread input; what has come is read first, so it does not."""
    ours, peer = tcp
    SocketOptions().apply(ours)
    peer.sendall(b"x" * 1000)
    ours.sendall(b"refused because of a limit")
    close_socket(ours, abortive=False)
    assert peer.recv(100) == b"refused because of a limit"
    assert peer.recv(100) == b""


def test_close_when_abortive_resets(tcp):
    ours, peer = tcp
    ours.sendall(b"never mind")
    close_socket(ours, abortive=True)
    with pytest.raises(ConnectionResetError):
        peer.makefile("rb").read()


@pytest.mark.parametrize("abortive", [True, False])
def test_close_when_the_peer_has_gone_is_no_error(tcp, abortive):
    ours, peer = tcp
    close_socket(peer, abortive=True)
    close_socket(ours, abortive=abortive)
    assert ours.fileno() == -1


def test_peer_name_when_there_is_one_or_none(tcp):
    ours, peer = tcp
    assert peer_name(ours) == peer.getsockname()[:2]
    one, two = socket.socketpair()
    with one, two:
        assert peer_name(one) == ("local", 0)
    assert peer_name(one) == ("gone", 0)


def test_unacknowledged_when_the_peer_does_not_read_is_what_the_kernel_holds():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.setblocking(False)
            assert unacknowledged_bytes(server) == 0
            sent = 0
            for _ in range(10_000):
                try:
                    sent += server.send(bytes(65536))
                except BlockingIOError:
                    break
            assert 0 < unacknowledged_bytes(server) <= sent
        assert unacknowledged_bytes(server) == 0


def vanish(sock):
    """Have the kernel drop every packet for `sock` before it is looked at: its peer hears nothing more of it."""
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("@HP", 1, ctypes.addressof(drop_all)))  # SO_ATTACH_FILTER


@pytest.mark.parametrize("lost", [False, True])
def test_line_when_nothing_is_taken_tells_a_reader_that_stopped_from_a_line_that_vanished(tcp, lost):
    """A kernel that is there closes its window and answers probes; of one that has gone data is sent again, in vain."""
    ours, peer = tcp
    ours.setblocking(False)
    line = line_figures(ours)
    assert (line.retransmits, line.probes, line.window_bytes > 10_000) == (0, 0, True)
    if lost:
        vanish(peer)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            ours.send(bytes(65536))
        except BlockingIOError:
            time.sleep(0.02)
        line = line_figures(ours)
        if line.retransmits >= 2 if lost else not line.window_bytes and line.backoff:
            break
    assert (line.retransmits + line.probes >= 2, line.window_bytes >= 1460, line.unacked_segments > 0) == (lost,) * 3
    assert (line.acked_bytes < 10) == lost
    ours.close()
    assert line_figures(ours) is None
    pair = socket.socketpair()
    assert line_figures(pair[0]) is None
    for end in pair:
        end.close()
