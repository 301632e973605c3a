"""Listeners of a node and raw peers of ZeroMQ that come to them: admission, keys, routes; over real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import pytest
from connection_kit import wait_until
from zmq_kit import ask

from flowctl.errors import ClosedError, ConfigError, RpcError
from flowctl.nodes.rpc.access.access import Access, AuthLevel, key_route
from flowctl.nodes.rpc.access.logins import TRIES_PER_CONNECTION, HashCost, PasswordHash
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.listener import LIFE_PROPERTY
from flowctl.nodes.rpc.peers.peer import Reach
from flowctl.nodes.rpc.wire.addresses import Address
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.listen import bind_socket

WAIT_S = 20.0
TAG = b"123456789012345"


LOGIN = (b"rpc.login", TAG, b"ada", b"open sesame")
GRANTED = [b"REPLY", TAG, b"admin"]
WRONG = [b"FORBIDDEN", b"REPLY", TAG, b"wrong user or password"]
FORBIDDEN = [b"FORBIDDEN", b"REPLY", TAG]
ADA = PasswordHash.of("open sesame", HashCost(log_n=1, r=1, p=1))


@pytest.fixture
def node(node) -> Callable[..., RpcNode]:
    """Make nodes that serve ``any.who``, ``admin.who``, ``sn.who`` and ``any.wait``, and know ada."""

    def make(**settings: object) -> RpcNode:
        made = node(**settings)
        serve(made)
        made.add_login("ada", ADA, AuthLevel.ADMIN)
        return made

    return make


def serve(node: RpcNode) -> None:
    async def who(message: RpcMessage) -> list[bytes]:
        identity = message.peer.identity
        return [identity.auth.name.encode(), identity.pubkey, identity.address.encode()]

    async def wait(message: RpcMessage) -> None:
        await asyncio.sleep(WAIT_S)

    for category, access in (
        ("any", AuthLevel.NONE),
        ("admin", AuthLevel.ADMIN),
        ("sn", Access(remote_sn=True)),
        ("ours", Access(local_sn=True)),
    ):
        node.add_category(category, access)
        node.add_request_command(category, "who", who)
    node.add_request_command("any", "wait", wait)


def test_peers_when_plain_are_shaken_hands_with_and_answered_byte_for_byte(node, raw, tmp_path):
    server = node()
    address = server.listen_plain(f"ipc://{tmp_path}/s", AuthLevel.BASIC)
    server.start()
    dealer = raw(address)
    assert ask(dealer, b"HI") == [b"HELLO"]
    reply = ask(dealer, b"any.who", TAG)
    assert reply[:4] == [b"REPLY", TAG, b"BASIC", b""]
    assert reply[4].startswith(b"localhost:")


def test_service_nodes_when_changed_count_from_the_next_message_on(node, raw):
    server, keys = node(keys=KeyPair.generate(), service_node=True), KeyPair.generate()
    asked: list[tuple[str, bytes, bool]] = []
    address = server.listen_curve("tcp://127.0.0.1:*", lambda *args: asked.append(args) or AuthLevel.NONE)
    server.start()
    dealer = raw(address, keys, server.keys.public)
    assert ask(dealer, b"sn.who", TAG) == [b"FORBIDDEN_SN", b"REPLY", TAG]
    server.set_active_sns([keys.public])
    assert ask(dealer, b"sn.who", TAG)[:2] == [b"REPLY", TAG]
    server.update_active_sns([], [keys.public])
    assert ask(dealer, b"sn.who", TAG) == [b"FORBIDDEN_SN", b"REPLY", TAG]
    assert ask(dealer, b"ours.who", TAG)[:2] == [b"REPLY", TAG]
    assert asked == [("127.0.0.1", keys.public, False)]


@pytest.mark.parametrize("curve", [False, True])
def test_connection_when_denied_never_gets_through(node, raw, curve):
    """Nothing of it is answered, while a peer that is let in later is (OX-68)."""
    server, keys = node(), KeyPair.generate() if curve else None
    answers, asked = iter([AuthLevel.DENIED, AuthLevel.NONE]), Future()

    def allow(*_: object) -> AuthLevel:
        answer = next(answers)
        if answer is AuthLevel.DENIED:
            asked.set_result(answer)
        return answer

    address = (server.listen_curve if curve else server.listen_plain)("tcp://127.0.0.1:*", allow)
    server.start()
    denied = raw(address, keys, server.keys.public)
    denied.send_multipart([b"HI"])
    asked.result(WAIT_S)
    assert ask(raw(address, keys, server.keys.public), b"HI") == [b"HELLO"]
    assert denied.poll(0) == 0


def test_connect_when_denied_fails_as_timed_out(node):
    """The one who dials is told after its timeout, in the words of the original (OX-68)."""
    server, client = node(), node()
    address = server.listen_plain("tcp://127.0.0.1:*", AuthLevel.DENIED)
    for item in (server, client):
        item.start()
    with pytest.raises(RpcError, match="connection attempt timed out"):
        client.connect_remote(address, timeout_s=0.1)


def test_route_when_taken_by_another_plain_connection_has_none_of_its_authority(node, raw):
    server = node()
    levels = iter([AuthLevel.ADMIN, AuthLevel.NONE])
    address = server.listen_plain("tcp://127.0.0.1:*", lambda *asked: next(levels))
    server.start()
    admin = raw(address, route=b"chosen")
    assert ask(admin, b"admin.who", TAG)[:3] == [b"REPLY", TAG, b"ADMIN"]
    thief = raw(address, route=b"chosen")
    assert ask(thief, b"admin.who", TAG) == [b"FORBIDDEN", b"REPLY", TAG]
    assert ask(thief, b"any.who", TAG)[2] == b"NONE"


def test_route_when_it_is_the_key_of_another_is_refused(node, raw):
    server, keys, victim = node(), KeyPair.generate(), KeyPair.generate()
    address = server.listen_curve("tcp://127.0.0.1:*")
    server.start()
    impostor = raw(address, keys, server.keys.public, key_route(victim.public))
    assert ask(impostor, b"HI") == [b"BYE"]
    impostor.send_multipart([b"any.who", TAG])
    honest = raw(address, victim, server.keys.public, key_route(victim.public))
    assert ask(honest, b"any.who", TAG)[3] == victim.public
    wait_until(lambda: server.statistics().malformed_count == 2, "what it says is counted, and not heard")
    assert impostor.poll(0) == 0


def test_requests_when_the_peers_connection_ends_fail_at_once(node, raw):
    server = node()
    address = server.listen_plain("tcp://127.0.0.1:*")
    told: Future[list[bytes]] = Future()

    async def meet(message: RpcMessage) -> bytes:
        server.request(
            message.conn, "x.y", on_reply=lambda ok, data: told.set_result([str(ok).encode(), *data]), timeout_s=WAIT_S
        )
        return b"met"

    server.add_request_command("any", "meet", meet)
    server.start()
    dealer = raw(address)
    dealer.send_multipart([b"any.meet", TAG])
    assert b"x.y" in {dealer.recv_multipart()[0], dealer.recv_multipart()[0]}
    dealer.close(linger=0)
    assert told.result(WAIT_S) == [b"False", b"DISCONNECTED"]


def test_route_when_a_peer_dials_again_with_its_key_is_taken_over_and_both_live_where_ephemeral(node, raw):
    """The newest connection of a key has its route; with routing ids of ZeroMQ's own both are answered (OX-77)."""
    server, keys = node(), KeyPair.generate()
    address = server.listen_curve("tcp://127.0.0.1:*")
    server.start()
    for _ in range(2):
        newest = raw(address, keys, server.keys.public, key_route(keys.public))
        assert ask(newest, b"HI") == [b"HELLO"]
    assert ask(newest, b"any.who", TAG)[:2] == [b"REPLY", TAG]
    both = [raw(address, keys, server.keys.public) for _ in range(2)]
    for dealer in (*both, *both):
        assert ask(dealer, b"any.who", TAG)[3] == keys.public


def test_nodes_when_two_have_one_key_the_last_goes_on_and_the_other_is_told(node, caplog):
    """Afterwards there is room for both, under routing ids of ZeroMQ's own."""
    server, keys = node(), KeyPair.generate()
    address = server.listen_curve("tcp://127.0.0.1:*").replace("tcp:", "curve:") + f"/{server.keys.public.hex()}"
    server.start()

    def dial(dialler: RpcNode):
        conn = dialler.connect_remote(address, timeout_s=WAIT_S)
        assert who(dialler, conn) == keys.public
        return conn

    def who(dialler: RpcNode, conn) -> bytes:
        return dialler.request_future(conn, "any.who", timeout_s=WAIT_S).get()[1]

    older, newer = node(keys=keys), node(keys=keys)
    for dialler in (older, newer):
        dialler.start()
    by_older, by_newer = dial(older), dial(newer)
    waiting = older.request_future(by_older, "any.wait", timeout_s=WAIT_S)
    assert getattr(waiting.exception(WAIT_S), "code", "") == "DISCONNECTED"
    wait_until(lambda: older.statistics().duplicates == 1, "the older one is told")
    wait_until(lambda: newer.request_future(by_newer, "any.who").exception() is None, "the newer one is back")
    again = dial(older)
    assert who(newer, by_newer) == who(older, again) == keys.public
    assert [item.statistics().duplicates for item in (server, older, newer)] == [1, 1, 0]
    # An answer to the newer one may have gone to the older one while that had its route.
    told = [item for item in caplog.records if item.name == "flowctl.rpc" and "hint:" in item.getMessage()]
    assert [item.levelname for item in told] == ["WARNING", "ERROR"]
    warning, error = (item.getMessage() for item in told)
    assert keys.public.hex() in warning
    assert warning.count("127.0.0.1:") == 2
    assert "another node with the keys of this one" in error
    assert "hint: give each its own keys" in error


def test_node_when_another_one_of_its_key_came_and_went_is_told_all_the_same(node, raw, caplog):
    """As a command of seconds that has the keys of a monitor: what that waited for is lost, and it is to know why."""
    server, keys = node(), KeyPair.generate()
    bound = server.listen_curve("tcp://127.0.0.1:*")
    server.start()
    older = node(keys=keys)
    older.start()
    older.connect_remote(bound.replace("tcp:", "curve:") + f"/{server.keys.public.hex()}", timeout_s=WAIT_S)
    life = b"%s:another" % LIFE_PROPERTY.encode()
    newer = raw(bound, keys, server.keys.public, key_route(keys.public), metadata=life)
    assert ask(newer, b"HI") == [b"HELLO"]
    newer.close(linger=0)
    wait_until(lambda: older.statistics().duplicates == 1, "the older one is told")
    (warning,) = (item.getMessage() for item in caplog.records if "two nodes come" in item.getMessage())
    assert warning.count("127.0.0.1:") == 2


def test_node_when_another_key_has_taken_its_routing_id_comes_back(node, raw):
    server, keys, thief = node(), KeyPair.generate(), KeyPair.generate()
    bound = server.listen_curve("tcp://127.0.0.1:*")
    server.start()
    victim = node(keys=keys)
    victim.start()
    address = bound.replace("tcp:", "curve:") + f"/{server.keys.public.hex()}"
    conn = victim.connect_remote(address, timeout_s=WAIT_S)
    assert ask(raw(bound, thief, server.keys.public, key_route(keys.public)), b"HI") == [b"BYE"]
    wait_until(lambda: victim.request_future(conn, "any.who", timeout_s=1).exception() is None, "it is answered")
    assert (server.statistics().duplicates, victim.statistics().duplicates) == (0, 0)


def test_life_when_a_peer_tells_one_of_any_length_is_not_remembered(node, raw):
    server = node()
    address = server.listen_plain("tcp://127.0.0.1:*", AuthLevel.BASIC)
    server.start()
    for number in range(2):
        life = b"%s:%d%s" % (LIFE_PROPERTY.encode(), number, b"x" * 5_000)
        assert ask(raw(address, route=b"r", metadata=life), b"HI") == [b"HELLO"]
    ((peer,),) = ([*listener.routes.values()] for listener in server._reaching.listeners.values())
    assert len(repr(peer.holder)) < 1000


def test_listener_when_opened_after_start_is_like_one_before(node, raw, tmp_path):
    server, keys, bound = node(), KeyPair.generate(), []
    before = server.listen_curve(f"ipc://{tmp_path}/a", AuthLevel.BASIC, bound.append)
    server.start()
    after = server.listen_plain("tcp://127.0.0.1:*", AuthLevel.ADMIN, bound.append)
    assert ask(raw(before, keys, server.keys.public), b"any.who", TAG)[2:4] == [b"BASIC", keys.public]
    assert ask(raw(after), b"any.who", TAG)[2:4] == [b"ADMIN", b""]
    assert server.listen_plain(after, on_bind=bound.append) == after
    assert bound == [True, True, False]
    with pytest.raises(OSError, match="cannot listen on"):
        server.listen_plain(after)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        *(({"pubkey": bytes(32)}, "only one key"), ({"privkey": bytes(32)}, "only one key")),
        *(({"service_node": True}, "a service node needs keys"), ({"pubkey": b"x", "privkey": b"y"}, "1 bytes")),
        *(
            ({"pubkey": bytes(32), "privkey": b"\1" * 32}, "belong"),
            ({"keys": KeyPair.generate(), "pubkey": b"x"}, "twice"),
        ),
    ],
)
def test_node_when_its_keys_are_no_pair_is_an_error(settings, match):
    """Only one of two, none for a service node, wrong lengths, two that do not belong together (OX-69)."""
    with pytest.raises(ConfigError, match=match):
        RpcNode(**settings)


def test_answer_when_another_has_taken_the_routing_id_goes_to_nobody(node, raw):
    server, later = node(), []
    asked = threading.Event()

    async def defer(message: RpcMessage) -> None:
        later.append((message.later(), message.conn))
        asked.set()

    server.add_request_command("any", "defer", defer)
    address = server.listen_curve("tcp://127.0.0.1:*")
    server.start()
    victim = raw(address, KeyPair.generate(), server.keys.public, b"chosen")
    victim.send_multipart([b"any.defer", TAG])
    assert asked.wait(WAIT_S)
    thief = raw(address, KeyPair.generate(), server.keys.public, b"chosen")
    assert ask(thief, b"HI") == [b"HELLO"]
    (answer, conn), failed = later[0], threading.Event()
    answer("secret")
    server.send(conn, "their.secret", queue_failure=lambda why: failed.set())
    assert failed.wait(WAIT_S)
    assert ask(thief, b"HI") == [b"HELLO"]


def test_service_node_when_its_newest_connection_ends_is_reached_by_an_older_one(node, raw):
    server, keys = node(), KeyPair.generate()
    address = server.listen_curve("tcp://127.0.0.1:*")
    server.start()
    older = raw(address, keys, server.keys.public)
    assert ask(older, b"HI") == [b"HELLO"]
    newer = raw(address, keys, server.keys.public)
    assert ask(newer, b"HI") == [b"HELLO"]
    pending = server.request_future(server.service_node(keys.public, Reach(incoming=True)), "their.ask")
    assert newer.recv_multipart()[0] == b"their.ask"
    newer.close(0)
    with pytest.raises(RpcError):
        pending.get(WAIT_S)
    server.send(server.service_node(keys.public, Reach(incoming=True)), "their.note")
    assert older.recv_multipart() == [b"their.note"]


def test_listen_when_the_node_was_stopped_says_so(node):
    server = node()
    server.start()
    server.stop()
    with pytest.raises(ClosedError):
        server.listen_plain("tcp://127.0.0.1:*")


def test_listener_when_allow_is_no_level_is_an_error(node):
    """A level by its name, which would deny everybody without a word, is refused at once."""
    for allow in ("admin", None, {b"key"}, True):
        with pytest.raises(ConfigError, match="it must be an AuthLevel, or a function"):
            node().listen_plain("inproc://levels", allow)


@pytest.mark.filterwarnings("ignore:unclosed <socket", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_node_when_never_stopped_is_collected_without_waiting():
    def abandon() -> None:
        abandoned = RpcNode()
        abandoned.listen_plain("tcp://127.0.0.1:*")
        del abandoned
        gc.collect()

    thread = threading.Thread(target=abandon, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("curve", [False, True])
def test_login_when_right_raises_the_level_of_that_connection_alone(node, raw, errors, curve):
    """Wrong ones leave it as it was; another connection of the same peer has nothing of it (OX-83)."""
    server = node()
    address = (server.listen_curve if curve else server.listen_plain)("tcp://127.0.0.1:*")
    server.start()
    keys = KeyPair.generate() if curve else None
    dealer, other = (raw(address, keys, server.keys.public) for _ in range(2))
    assert ask(dealer, b"admin.who", TAG) == FORBIDDEN
    assert ask(dealer, *LOGIN[:3], b"open sesam") == WRONG
    assert ask(dealer, *LOGIN[:2], b"eve", b"open sesame") == WRONG
    assert ask(dealer, *LOGIN, b"more")[0] == b"FORBIDDEN"
    assert ask(dealer, b"admin.who", TAG) == FORBIDDEN
    assert ask(dealer, *LOGIN) == GRANTED
    assert ask(dealer, b"admin.who", TAG)[2] == b"ADMIN"
    assert ask(other, b"admin.who", TAG) == FORBIDDEN
    assert "sesame" not in str(errors)


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
        assert client.request_future(conn, "admin.who").get(WAIT_S)[:2] == [b"ADMIN", client.keys.public]


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
        assert client.request_future(conn, "admin.who").get(WAIT_S)[:2] == [b"ADMIN", b""]


@pytest.mark.parametrize("stopped", ["server", "client"])
def test_request_when_within_the_process_and_its_peer_stops_fails_at_once(node, stopped):
    server, client = node(), node()
    asked: Future[RpcError] = Future()

    def ask_back(message: RpcMessage) -> str:
        told = server.request_future(message.conn, "any.silent", timeout_s=3600)
        told.add_done_callback(lambda told: asked.set_result(told.exception()))
        return "asked"

    server.add_category("back", AuthLevel.ADMIN)
    server.add_request_command("back", "ask", ask_back)
    for item in (server, client):
        item.add_request_command("any", "silent", lambda message: None)
    server.listen_plain("inproc://test-end", lambda address, key, sn: AuthLevel.ADMIN)
    for item in (server, client):
        item.start()
    conn = client.connect_remote("inproc://test-end")
    assert client.request_future(conn, "back.ask").get(WAIT_S) == [b"asked"]
    waits = client.request_future(conn, "any.silent", timeout_s=3600)
    client.request_future(conn, "rpc.describe").get(WAIT_S)  # it has arrived
    (server if stopped == "server" else client).stop()
    codes = {waits.exception(WAIT_S).code, asked.result(WAIT_S).code}
    assert codes == {"DISCONNECTED", "SHUTTING_DOWN"}


def test_node_when_connected_to_itself_calls_its_own_commands_as_admin(node):
    both, up = node(), Future()
    both.start()
    conn = both.connect_inproc(up.set_result)
    assert both.request_future(conn, "admin.who").get(WAIT_S)[:2] == [b"ADMIN", b""]
    assert up.result(WAIT_S) == conn
    second = both.connect_inproc()
    assert both.request_future(second, "admin.who").get(WAIT_S)[:2] == [b"ADMIN", b""]
    both.disconnect(conn)
    assert both.request_future(second, "admin.who").get(WAIT_S)[:2] == [b"ADMIN", b""]
    with pytest.raises(RpcError, match="DISCONNECTED"):
        both.request_future(conn, "admin.who").get(WAIT_S)


def test_connection_within_the_process_when_it_was_cut_is_made_again(node):
    server, client = node(most_waiting_bytes=4 << 20), node()
    server.listen_plain("inproc://cut", AuthLevel.ADMIN)
    for item in (server, client):
        item.start()
    conn = client.connect_remote("inproc://cut")
    goes_on, blocked = threading.Event(), threading.Event()
    client._calls.group.call_soon(lambda: (blocked.set(), goes_on.wait(WAIT_S)))
    assert blocked.wait(WAIT_S)
    (row,) = server.connections()
    for _ in range(20):
        server.send(row.conn, "their.note", bytes(900_000))
    wait_until(lambda: server.statistics().cut_count == 1, "it is cut")
    goes_on.set()
    wait_until(lambda: client.request_future(conn, "any.who").exception(WAIT_S) is None, "it is back")


def test_connection_when_its_host_cannot_be_a_name_is_tried_again_and_not_reported(node, errors):
    client = node()
    client.start()
    failed = Future()
    client.connect_remote("tcp://a..b:80", lambda _: None, lambda _, why: failed.set_result(why), timeout_s=WAIT_S)
    wait_until(lambda: [item._dialler.redials.tries > 1 for item in client._reaching.dialled.values()] == [True], "it")
    assert errors == []


def test_listeners_when_several_bind_one_path_at_once_one_has_it(tmp_path):
    """Also where a file is left over there, which each would remove."""
    for number in range(20):
        path, bound, ready = tmp_path / str(number), [], threading.Barrier(4)
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(path))

        def bind(path=path, bound=bound, ready=ready) -> None:
            ready.wait(WAIT_S)
            with suppress(OSError):
                bound.append(bind_socket(f"ipc://{path}"))

        threads = [threading.Thread(target=bind) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (only,) = bound
        only.close()
        assert not path.exists()
