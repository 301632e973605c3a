"""Peers that do not read: what waits for one, what for all together, and what the others notice of it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
import zmq
from connection_kit import wait_until
from zmq_kit import ask

from flowctl.core.flow.limits import AxisLimits, HardPolicy, Limits
from flowctl.core.flow.state import SendState
from flowctl.errors import ClosedError, RpcError
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.peers import reaching
from flowctl.reasons import CloseReason
from flowctl.wire.zmtp.frames import command, greeting, properties
from flowctl.wire.zmtp.link import why_cut
from flowctl.wire.zmtp.peer import SILENT

WAIT_S = 20.0
MIB = 1 << 20
SMALL = Limits(size=AxisLimits(soft=MIB, hard=4 * MIB), hard_policy=HardPolicy.HOLD)
DEAF = {"rcvhwm": 1, "rcvbuf": 4096, "sndhwm": 0}


@pytest.fixture
def listening(node, raw):
    """Return a function that starts a node that echoes, and one that dials it by hand."""

    def start(**settings):
        server = node(**settings)

        async def echo(message: RpcMessage) -> list[bytes]:
            return message.data

        server.add_category("a")
        server.add_request_command("a", "echo", echo)
        address = server.listen_plain("tcp://127.0.0.1:*")
        server.start()
        return server, lambda **options: raw(address, **options)

    return start


@pytest.fixture
def raw_line():
    """Shake hands as a DEALER by octets, and return the socket."""
    lines = []

    def dial(port: int) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", port), WAIT_S)
        lines.append(line)
        line.sendall(greeting(b"NULL", as_server=False) + command(b"READY", properties({b"Socket-Type": b"DEALER"})))
        answer = b""
        while b"ROUTER" not in answer:
            answer += line.recv(1000)
        return line

    yield dial
    for line in lines:
        line.close()


def row_of(server, route: bytes):
    return next((row for row in server.connections() if row.conn.route == route), None)


def pile_up(peer: zmq.Socket[bytes], count: int) -> None:
    """Ask for so many answers of a mebibyte, none of which is read."""
    for number in range(count):
        peer.send_multipart([b"a.echo", b"%d" % number, bytes(MIB)])


def test_peer_when_it_does_not_read_among_a_hundred_that_do_is_named_and_they_do_not_notice(listening):
    server, dial = listening(limits=SMALL)
    deaf = dial(route=b"deaf", **DEAF)
    others = [dial(route=b"%03d" % number) for number in range(100)]
    pile_up(deaf, 100)
    wait_until(lambda: row_of(server, b"deaf") and row_of(server, b"deaf").state is SendState.HARD_LIMIT, "it is held")
    for round_number in range(3):
        for other in others:
            assert ask(other, b"a.echo", b"t", b"%d" % round_number) == [b"REPLY", b"t", b"%d" % round_number]
    row = row_of(server, b"deaf")
    assert 2 * MIB < row.waiting_bytes < 6 * MIB
    assert "HARD_LIMIT" in row.why
    assert server.why(row.conn).partition(" ")[0] == row.why.partition(" ")[0]
    states = {item.state for item in server.connections() if item.conn.route != b"deaf"}
    assert states == {SendState.READY}
    wait_until(lambda: server.statistics().unsent_count > 0, "what it asks for further is not begun")
    called = server.statistics().called_count["a.echo"]
    assert called < 300 + 100
    deaf.close(0)
    wait_until(lambda: row_of(server, b"deaf") is None, "it is gone")
    with pytest.raises(ClosedError):
        server.why(row.conn)


def test_peers_when_more_waits_for_all_than_a_node_may_hold_the_one_that_hoards_most_is_cut(listening, caplog):
    """What was asked of it ends with the reason, and what another one hoards stays."""
    server, dial = listening(most_waiting_bytes=10 * MIB)
    less, more = dial(route=b"less", **DEAF), dial(route=b"more", **DEAF)
    for peer in (less, more):
        assert ask(peer, b"HI") == [b"HELLO"]
    asked = server.request_future(row_of(server, b"more").conn, "x.y", timeout_s=3600)
    pile_up(less, 6)
    wait_until(lambda: row_of(server, b"less").waiting_bytes > MIB, "something waits")
    pile_up(more, 30)
    with pytest.raises(RpcError, match=r"DISCONNECTED: \d+ of the \d+ bytes that wait for peers waited for this one"):
        asked.get(WAIT_S)
    assert server.statistics().cut_count == 1
    assert row_of(server, b"more") is None
    assert row_of(server, b"less").waiting_bytes > MIB
    (line,) = [item.getMessage() for item in caplog.records if "is cut" in item.getMessage()]
    assert "127.0.0.1:" in line
    assert ask(dial(), b"a.echo", b"t", b"x") == [b"REPLY", b"t", b"x"]


def test_notifications_when_a_peer_does_not_read_are_the_newest_of_each_key_for_it_and_all_for_others(listening):
    server, dial = listening(limits=SMALL)
    deaf, other = dial(route=b"deaf", **DEAF), dial(route=b"other")
    for peer in (deaf, other):
        assert ask(peer, b"HI") == [b"HELLO"]
    conns = [row.conn for row in server.connections()]
    pile_up(deaf, 8)
    wait_until(lambda: row_of(server, b"deaf").state is SendState.HARD_LIMIT, "it is held")
    for number in range(50):
        server.publish(conns, "their.value", b"%d" % number, key="a" if number % 2 else "b")
        server.publish(conns, "their.event", b"%d" % number)
    assert [other.recv_multipart()[1] for _ in range(100)] == [b"%d" % (number // 2) for number in range(100)]
    row = row_of(server, b"deaf")
    assert (row.latest, server.statistics().conflated_count) == (2, 48)
    told = []
    while len(told) < 2:
        frames = deaf.recv_multipart()
        if frames[0] != b"REPLY":
            told.append(frames)
    assert sorted(told) == [[b"their.value", b"48"], [b"their.value", b"49"]]
    wait_until(lambda: row_of(server, b"deaf").state is SendState.READY, "it reads again")
    server.publish(conns, "their.event", b"last")
    assert deaf.recv_multipart() == other.recv_multipart() == [b"their.event", b"last"]


def test_notifications_when_of_more_keys_than_are_kept_leave_the_rest_out(listening, monkeypatch):
    monkeypatch.setattr(reaching, "MOST_LATEST", 3)
    server, dial = listening(limits=SMALL)
    deaf = dial(route=b"deaf", **DEAF)
    assert ask(deaf, b"HI") == [b"HELLO"]
    pile_up(deaf, 8)
    wait_until(lambda: row_of(server, b"deaf").state is SendState.HARD_LIMIT, "it is held")
    before = server.statistics().unsent_count
    for number in range(10):
        server.publish(row_of(server, b"deaf").conn, "their.value", b"%d" % number, key=str(number))
    wait_until(lambda: server.statistics().unsent_count - before >= 7, "the rest is counted")
    assert row_of(server, b"deaf").latest == 3


def test_answers_when_they_are_large_and_given_at_once_count_for_the_node_too(listening):
    """They are not gathered with others, of which nobody hears what became of them."""
    server, dial = listening(most_waiting_bytes=16 * MIB)
    peers = [dial(**DEAF) for _ in range(6)]
    for peer in peers:
        assert ask(peer, b"HI") == [b"HELLO"]
        peer.send_multipart([b"a.echo", b"t", *[bytes(MIB - 100)] * 6])
    wait_until(lambda: server.statistics().called_count["a.echo"] == 6, "all have been answered")
    wait_until(lambda: server.statistics().cut_count >= 2, "those that are too much are cut")
    wait_until(lambda: sum(row.waiting_bytes for row in server.connections()) <= 17 * MIB, "no more waits")


def test_notifications_when_they_are_large_have_a_limit_in_bytes(listening, monkeypatch):
    monkeypatch.setattr(reaching, "MOST_UNSENT_BYTES", 3 * MIB)
    server, dial = listening(limits=SMALL)
    deaf = dial(route=b"deaf", **DEAF)
    assert ask(deaf, b"HI") == [b"HELLO"]
    pile_up(deaf, 8)
    wait_until(lambda: row_of(server, b"deaf").state is SendState.HARD_LIMIT, "it is held")
    before = row_of(server, b"deaf").waiting_bytes
    for number in range(10):
        server.publish(row_of(server, b"deaf").conn, "their.value", bytes(MIB - 100), key=str(number))
    wait_until(lambda: server.statistics().unsent_count >= 7, "the rest is counted")
    row = row_of(server, b"deaf")
    assert row.latest == 3
    assert row.waiting_bytes - before > 2 * MIB
    conflated = server.statistics().conflated_count
    server.publish(row.conn, "their.value", bytes(MIB - 100), key="0")
    wait_until(lambda: server.statistics().conflated_count > conflated, "what takes another's place needs no more room")


def test_messages_when_they_never_end_are_kept_up_to_a_limit_for_all_together(node, raw_line, monkeypatch):
    """The connection that has most is ended, and the others stay."""
    monkeypatch.setattr("flowctl.wire.zmtp.link.MOST_UNFINISHED_BYTES", 4 * MIB)
    server = node()
    port = int(server.listen_plain("tcp://127.0.0.1:*").rpartition(":")[2])
    server.start()
    few, many = raw_line(port), raw_line(port)
    part = b"\x03" + (900_000).to_bytes(8, "big") + bytes(900_000)  # MORE, LONG
    for _ in range(2):
        few.sendall(part)
    with suppress(OSError):  # it is reset in the middle
        for _ in range(10):
            many.sendall(part)
    wait_until(lambda: len(server.connections()) == 1, "one is ended")
    few.sendall(b"\x00\x01x")
    few.sendall(b"\x00\x02HI")
    answer = b""
    while not answer.endswith(b"HELLO"):
        answer += few.recv(1000)


@pytest.mark.parametrize("side", ["listener", "dialler"])
def test_peer_when_it_takes_nothing_for_too_long_is_counted_logged_and_told_why(node, tmp_path, caplog, side):
    nodes, begun = {"listener": node(), "dialler": node()}, []

    async def hangs(message: RpcMessage) -> None:
        begun.append(message)
        await asyncio.Event().wait()

    for each in nodes.values():
        each.add_category("a")
        each.add_request_command("a", "hangs", hangs)
    address = nodes["listener"].listen_plain(f"ipc://{tmp_path}/cut")
    for each in nodes.values():
        each.start()
    conn = nodes["dialler"].connect_remote(address)
    cutter = nodes[side]
    to = conn if side == "dialler" else cutter.connections()[0].conn
    future = cutter.request_future(to, "a.hangs")
    wait_until(lambda: begun, "it is asked")
    link = cutter._reaching.connected_peer(to).link
    cutter._calls.group.call_soon(link.connection.close, CloseReason.STUCK, "took nothing for 30.0 s")
    with pytest.raises(RpcError, match="DISCONNECTED: stuck: took nothing for 30"):
        future.get(WAIT_S)
    assert cutter.statistics().cut_count == 1
    assert "is cut: stuck: took nothing for 30.0 s" in caplog.text


def test_end_when_it_is_no_cut_has_no_why():
    assert (
        why_cut(CloseReason.PROTOCOL_ERROR, f"{SILENT} 30.0 s")
        == "protocol error: the peer has said nothing for 30.0 s"
    )
    assert [why_cut(reason, "a frame") for reason in (CloseReason.PROTOCOL_ERROR, CloseReason.PEER_CLOSED)] == ["", ""]
