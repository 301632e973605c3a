"""Logins of raw peers at a node, and encrypted connections between nodes; over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import zmq
from zmq_kit import NEVER_MS

from flowctl.errors import ConfigError, RpcError
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.access.logins import TRIES_PER_CONNECTION, Cost, PasswordHash
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.wire.addresses import Address
from flowctl.pollgroup import LoopFactory
from flowctl.wire.zeromq.curve import KeyPair, dial_curve

WAIT_S = 20.0
TAG = b"123456789012345"
CHEAP = Cost(log_n=1, r=1, p=1)
LOGIN = (b"rpc.login", TAG, b"ada", b"open sesame")
GRANTED = [b"REPLY", TAG, b"admin"]
WRONG = [b"FORBIDDEN", b"REPLY", TAG, b"wrong user or password"]
FORBIDDEN = [b"FORBIDDEN", b"REPLY", TAG]


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def node(loop_factory: LoopFactory, reports: list[str]) -> Iterator[Callable[..., RpcNode]]:
    """Make nodes that serve ``admin.who`` and know ada; they are stopped at the end."""
    made: list[RpcNode] = []

    async def who(message: RpcMessage) -> list[bytes]:
        return [message.auth.name.encode(), message.peer.identity.pubkey]

    def make() -> RpcNode:
        node = RpcNode(loop_factory=loop_factory, on_error=lambda *told: reports.append(str(told)))
        node.add_category("admin", AuthLevel.ADMIN)
        node.add_request_command("admin", "who", who)
        node.add_login("ada", PasswordHash.of("open sesame", CHEAP), AuthLevel.ADMIN)
        made.append(node)
        return node

    yield make
    for item in made:
        item.stop()


@pytest.fixture
def raw() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    context = zmq.Context()
    dialled: list[zmq.Socket[bytes]] = []

    def dial(address: str, server: bytes = b"", route: bytes = b"") -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.rcvtimeo, dealer.reconnect_ivl = int(WAIT_S * 1000), NEVER_MS
        if route:
            dealer.routing_id = route
        if server:
            dial_curve(dealer, KeyPair.generate(), server)
        dealer.connect(address)
        dialled.append(dealer)  # one that nobody holds would be closed
        return dealer

    yield dial
    context.destroy(linger=0)


def ask(dealer: zmq.Socket[bytes], *frames: bytes) -> list[bytes]:
    dealer.send_multipart(frames)
    return dealer.recv_multipart()


@pytest.mark.parametrize("curve", [False, True])
def test_login_when_right_raises_the_level_of_that_connection_alone(node, raw, reports, curve):
    """Wrong ones leave it as it was; another connection of the same peer has nothing of it (OX-83)."""
    server = node()
    address = (server.listen_curve if curve else server.listen_plain)("tcp://127.0.0.1:*")
    server.start()
    key = server.keys.public if curve else b""
    dealer, other = raw(address, key), raw(address, key)
    assert ask(dealer, b"admin.who", TAG) == FORBIDDEN
    assert ask(dealer, *LOGIN[:3], b"open sesam") == WRONG
    assert ask(dealer, *LOGIN[:2], b"eve", b"open sesame") == WRONG
    assert ask(dealer, *LOGIN, b"more")[0] == b"FORBIDDEN"
    assert ask(dealer, b"admin.who", TAG) == FORBIDDEN
    assert ask(dealer, *LOGIN) == GRANTED
    assert ask(dealer, b"admin.who", TAG)[2] == b"ADMIN"
    assert ask(other, b"admin.who", TAG) == FORBIDDEN
    assert "sesame" not in "".join(reports)


def test_login_when_tried_too_often_is_refused_unheard(node, raw):
    server = node()
    address = server.listen_plain("tcp://127.0.0.1:*")
    server.start()
    dealer = raw(address)
    for _ in range(TRIES_PER_CONNECTION):
        assert ask(dealer, *LOGIN[:3], b"guess") == WRONG
    assert ask(dealer, *LOGIN) == [b"FORBIDDEN", b"REPLY", TAG, b"too many tries, or too many at once"]
    assert ask(dealer, b"admin.who", TAG) == FORBIDDEN
    assert ask(raw(address), *LOGIN) == GRANTED


def test_nodes_when_encrypted_know_each_others_keys(node, tmp_path):
    for listen in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/s"):
        server, client = node(), node()
        address = server.listen_curve(listen, AuthLevel.ADMIN)
        for item in (server, client):
            item.start()
        conn = client.connect_remote(str(Address.parse(address).with_pubkey(server.keys.public)))
        assert conn.pubkey == server.keys.public
        assert client.request_future(conn, "admin.who").get(WAIT_S) == [b"ADMIN", client.keys.public]


def test_connect_when_the_key_is_anothers_fails(node):
    server, client = node(), node()
    address = server.listen_curve("tcp://127.0.0.1:*")
    for item in (server, client):
        item.start()
    wrong = str(Address.parse(address).with_pubkey(KeyPair.generate().public))
    for text in (wrong, address):  # and one that names none, where encryption is asked for
        with pytest.raises(RpcError, match="timed out"):
            client.connect_remote(text, timeout_s=0.1)
    with pytest.raises(ConfigError, match="no address"):
        client.connect_remote("somewhere")


def test_connections_when_two_of_a_node_go_to_one_address_both_live(node):
    """The second has a routing id of ZeroMQ's own, so that it does not take the route of the first (OX-77)."""
    server, client = node(), node()
    address = server.listen_plain("tcp://127.0.0.1:*", AuthLevel.ADMIN)
    for item in (server, client):
        item.start()
    conns = [client.connect_remote(address) for _ in range(3)]
    for conn in (*conns, *conns):
        assert client.request_future(conn, "admin.who").get(WAIT_S) == [b"ADMIN", b""]


def test_nodes_when_within_the_process_meet_without_a_network(node):
    server, client = node(), node()
    server.listen_plain("inproc://test-meeting", lambda address, key, sn: AuthLevel.ADMIN)
    for item in (server, client):
        item.start()
    conn = client.connect_remote("inproc://test-meeting")
    assert client.request_future(conn, "admin.who").get(WAIT_S) == [b"ADMIN", b""]


@pytest.mark.parametrize("stopped", ["server", "client"])
def test_request_when_within_the_process_and_its_peer_stops_fails_at_once(node, stopped):
    server, client = node(), node()
    asked: Future[RpcError] = Future()

    def ask_back(message: RpcMessage) -> str:
        told = server.request_future(message.conn, "any.wait", timeout_s=3600)
        told.add_done_callback(lambda told: asked.set_result(told.exception()))
        return "asked"

    server.add_category("back")
    server.add_request_command("back", "ask", ask_back)
    for item in (server, client):
        item.add_category("any")
        item.add_request_command("any", "wait", lambda message: None)
    server.listen_plain("inproc://test-end")
    for item in (server, client):
        item.start()
    conn = client.connect_remote("inproc://test-end")
    assert client.request_future(conn, "back.ask").get(WAIT_S) == [b"asked"]
    waits = client.request_future(conn, "any.wait", timeout_s=3600)
    client.request_future(conn, "rpc.describe").get(WAIT_S)  # it has arrived
    (server if stopped == "server" else client).stop()
    codes = {waits.exception(WAIT_S).code, asked.result(WAIT_S).code}
    assert codes == {"DISCONNECTED", "SHUTTING_DOWN"}


def test_node_when_connected_to_itself_calls_its_own_commands_as_admin(node):
    both, up = node(), Future()
    both.start()
    conn = both.connect_inproc(up.set_result)
    assert both.request_future(conn, "admin.who").get(WAIT_S) == [b"ADMIN", b""]
    assert up.result(WAIT_S) == conn
    second = both.connect_inproc()
    assert both.request_future(second, "admin.who").get(WAIT_S) == [b"ADMIN", b""]
    both.disconnect(conn)
    assert both.request_future(second, "admin.who").get(WAIT_S) == [b"ADMIN", b""]
    with pytest.raises(RpcError, match="DISCONNECTED"):
        both.request_future(conn, "admin.who").get(WAIT_S)
