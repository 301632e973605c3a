"""Operations over RPC: who may do what by socket and by key, and what a caller is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import zmq
from e2e_kit import open_live_server, wait_until

from flowctl.control.client import OperationError, call_operation, call_parts
from flowctl.control.listener import MOST_WAITING_CALLS, listener_of
from flowctl.control.operations import BY_NAME
from flowctl.errors import ConfigError
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.node import RpcNode
from flowctl.wire.zmtp.keys import KeyPair

WAIT_S = 20.0
SHORT_S = 0.3
"""For callers that are not let in: nobody answers them."""


@pytest.fixture
def listening(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with contextlib.ExitStack() as stack:

        def start(**settings):
            server = stack.enter_context(open_live_server(**settings))
            listener = listener_of(server)
            stack.callback(listener.stop, 5.0)
            listener.start()
            return server, listener

        yield start


@pytest.fixture
def keys(tmp_path):
    """Return settings of a server that is reached by keys, and the keys of two clients: one may do all, one look."""
    server, admin, basic = (KeyPair.generate() for _ in range(3))
    server.write(tmp_path / "server.key")
    clients = tmp_path / "clients"
    clients.write_text(f"{admin.public.hex()} admin night shift\n{basic.public.hex()} basic\n")
    clients.chmod(0o600)
    settings = {
        "control": "tcp://127.0.0.1:*",
        "control_keys": tmp_path / "server.key",
        "control_clients": clients,
    }
    return SimpleNamespace(server=server, admin=admin, basic=basic, clients=clients, settings=settings)


def test_calls_when_two_have_one_key_are_both_answered():
    """As of two operators, or two commands at once: none takes the connection of the other over."""
    keys, called, go_on = KeyPair.generate(), threading.Event(), threading.Event()

    def wait() -> str:
        called.set()
        return "waited" if go_on.wait(WAIT_S) else "not called meanwhile"

    node = RpcNode(keys=KeyPair.generate())
    node.add_category("any", reserved_threads=2)
    node.add_request_command("any", "wait", lambda _: wait())
    node.add_request_command("any", "go", lambda _: go_on.set() or "gone")
    address = node.listen_curve("tcp://127.0.0.1:*").replace("tcp:", "curve:") + f"/{node.keys.public.hex()}"

    def call(command: str) -> list[bytes]:
        return asyncio.run(call_parts(address, command, [], keys, WAIT_S))

    with ThreadPoolExecutor() as pool:
        node.start()
        try:
            first = pool.submit(call, "any.wait")
            assert called.wait(WAIT_S)
            assert call("any.go") == [b"gone"]
            assert first.result() == [b"waited"]
        finally:
            go_on.set()
            node.stop()


def test_call_when_by_the_socket_of_the_user_may_do_all(listening):
    server, listener = listening()
    [address] = listener.bound
    assert call_operation(address, "stats", {})["server"]["connections"] == 0
    assert call_operation(address, "ban", {"network": "192.0.2.1"})["cidr"] == "192.0.2.1/32"
    assert [change.origin for change in server.changes.since(0)[0]] == ["local"]
    with pytest.raises(ConfigError, match="network is missing") as caught:
        call_operation(address, "ban", {})
    assert caught.value.hint.startswith("NETWORK")
    with pytest.raises(OperationError, match="there is no connection 7") as refused:
        call_operation(address, "connections", {"connection": 7_777_777})
    assert refused.value.code == "NOT_POSSIBLE"
    with pytest.raises(OperationError) as unknown:
        call_operation(address, "fly", {})
    assert unknown.value.code == "UNKNOWNCOMMAND"
    described = call_operation(address, "describe", {})["operations"]
    assert [item["name"] for item in described] == [f"flow.{name}" for name in BY_NAME]


def test_call_when_by_a_raw_peer_is_answered_with_one_part(listening):
    _, listener = listening()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(listener.bound[0])
        peer.send_multipart([b"flow.stats", b"tag-of-15-octets", b'{"viewers": "none"}'])
        assert peer.poll(20_000)
        reply, tag, answer = peer.recv_multipart()
    assert (reply, tag) == (b"REPLY", b"tag-of-15-octets")
    assert json.loads(answer)["result"]["viewers"] == []


def test_call_when_several_come_at_once_changes_in_order(listening):
    server, listener = listening()
    [address] = listener.bound
    threads = [
        threading.Thread(target=call_operation, args=(address, "ban", {"network": f"192.0.2.{number}"}))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [change.version for change in server.changes.since(0)[0]] == list(range(1, 9))
    assert len(server.admission.bans) == 8


def test_call_when_nobody_waits_any_more_is_not_carried_out(listening):
    """What its caller has given up would be a surprise."""
    server, listener = listening()
    message = SimpleNamespace(deadline=time.monotonic() - 1, data=[b'{"network": "192.0.2.1"}'], auth=AuthLevel.ADMIN)
    assert listener._carry_out(BY_NAME["ban"], message) == b""
    assert len(server.admission.bans) == 0


def test_calls_when_too_many_wait_are_told_so(listening):
    _, listener = listening()
    listener._waiting[True]["somebody"] = MOST_WAITING_CALLS
    with pytest.raises(OperationError) as caught:
        call_operation(listener.bound[0], "stats", {})
    assert caught.value.code == "BUSY"


def test_calls_when_one_caller_floods_leave_others_their_places(listening, keys):
    """Who may only look cannot keep an administrator from looking, and even less from changing something."""
    _, listener = listening(**keys.settings)
    address = listener.bound[0].replace("tcp", "curve") + "/" + keys.server.public.hex()
    listener._waiting[True][keys.basic.public] = MOST_WAITING_CALLS // 2
    with pytest.raises(OperationError) as caught:
        call_operation(address, "stats", {}, keys=keys.basic)
    assert caught.value.code == "BUSY"
    assert "server" in call_operation(address, "stats", {}, keys=keys.admin)
    listener._waiting[True][keys.basic.public] = MOST_WAITING_CALLS
    assert call_operation(address, "ban", {"network": "192.0.2.1"}, keys=keys.admin)["cidr"] == "192.0.2.1/32"


@pytest.mark.parametrize("missing", ["control_keys", "control_clients"])
def test_listener_when_it_would_listen_to_anybody_does_not_begin(keys, missing, listening):
    """There is no tcp without keys, be it on this machine, and no key that everybody knows."""
    with pytest.raises(ConfigError, match=f"{missing} is missing: anybody could operate the server"):
        listening(**keys.settings | {missing: None})


def test_listener_when_a_place_cannot_be_used_says_so(listening, tmp_path):
    """A place that was named is an error; the usual one, which nobody asked for, is a line of the log."""
    (tmp_path / "flowctl").write_text("in the way")
    _, listener = listening()
    assert listener.bound == []
    with pytest.raises(ConfigError, match="control: cannot use the folder"):
        listening(control=f"ipc://{tmp_path}/absent/x.sock")


def test_call_when_by_key_may_do_what_its_line_says(listening, keys):
    server, listener = listening(**keys.settings)
    where = f"{listener.bound[0].replace('tcp://', 'curve://')}/{keys.server.public.hex()}"
    assert call_operation(where, "ban", {"network": "192.0.2.1"}, keys=keys.admin)["cidr"] == "192.0.2.1/32"
    assert server.changes.since(0)[0][0].origin == "night shift"
    assert call_operation(where, "stats", {}, keys=keys.basic)["server"]["bans"] == 1
    with pytest.raises(OperationError, match=r"flow.unban takes the level admin, the caller has basic") as caught:
        call_operation(where, "unban", {"network": "192.0.2.1"}, keys=keys.basic)
    assert caught.value.code == "FORBIDDEN"
    for stranger in (KeyPair.generate(), None):
        with pytest.raises(OperationError, match="does not let this caller in"):
            call_operation(where, "stats", {}, keys=stranger, timeout_s=SHORT_S)
    keys.clients.write_text(f"{keys.basic.public.hex()} basic\n")
    with pytest.raises(OperationError):
        call_operation(where, "stats", {}, keys=keys.admin, timeout_s=SHORT_S)
    assert call_operation(where, "stats", {}, keys=keys.basic)["server"]["bans"] == 1


def test_call_when_the_server_has_another_key_is_not_made(listening, keys):
    _, listener = listening(**keys.settings)
    address = listener.bound[0]
    other = f"{address.replace('tcp://', 'curve://')}/{KeyPair.generate().public.hex()}"
    for where in (other, address):
        with pytest.raises(OperationError) as caught:
            call_operation(where, "stats", {}, keys=keys.admin, timeout_s=SHORT_S)
        assert caught.value.code == "NOT_THERE"


def test_answer_when_it_is_too_long_for_a_message_says_so(listening, monkeypatch):
    server, listener = listening()
    for number in range(3):
        server.changes.note("ban", {"reason": "x" * 400_000, "number": number})
    [address] = listener.bound
    assert [item["version"] for item in call_operation(address, "changes", {})["changes"]] == [1]
    assert [item["version"] for item in call_operation(address, "changes", {"since": 1})["changes"]] == [2]
    server.changes.note("ban", {"reason": "x" * 2_000_000})
    with pytest.raises(OperationError) as caught:
        call_operation(address, "changes", {"since": 3})
    assert caught.value.code == "TOO_LONG"
    assert wait_until(lambda: call_operation(address, "stats", {}), "an answer")
