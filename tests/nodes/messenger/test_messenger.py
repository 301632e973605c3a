"""A messenger over real sockets: with others of its kind, and with raw ZeroMQ peers that follow the format."""

from __future__ import annotations

import inspect
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import zmq

from flowctl.core.flow.state import SendState
from flowctl.core.outcomes.backoff import Backoff
from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import BusyError, ClosedError, ConfigError, LocalProtocolError
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination, Failure, ReceivedMessage
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import open_store
from flowctl.nodes.messenger.wire import ECHO, Extension

WAIT_S = 20.0
QUICK = Backoff(first_s=0.02, factor=1.5, most_s=0.1)
SLOW = Backoff(first_s=30.0, most_s=30.0)


def at(address: str) -> Destination:
    return Destination("peer", address)


def test_messages_when_sent_over_a_connection_are_those_of_the_format(make, raw, address):
    """Ids are 0, 1, 2; the first callback is 4; without a callback the source is 0; three frames (ME-08, ME-09)."""
    router, client = raw(zmq.ROUTER, bind=address), make("client")
    connection = client.make_connection(at(address))
    for body in ("a", b"b-b", "c"):
        client.send_message(connection, body)
    client.send_message(connection, "d", lambda *_: None, 9, payload=[b"p1", b""])
    assert [router.recv_multipart() for _ in range(4)] == [
        [b"client", b"", b"0-0-0-a"],
        [b"client", b"", b"1-0-0-b-b"],
        [b"client", b"", b"2-0-0-c"],
        [b"client", b"", b"3-4-9-d", b"p1", b""],
    ]
    assert client.statistics().callbacks == 1


@pytest.mark.parametrize("durable", [False, True])
def test_messages_when_ordered_and_to_a_raw_peer_go_one_at_a_time(make, raw, address, tmp_path, durable):
    router = raw(zmq.ROUTER, bind=address)
    client = make("client", open_store=open_store(tmp_path / "client.db") if durable else None)
    connection = client.make_connection(at(address))
    for number in range(4):
        client.send_message(connection, b"%d" % number, ordered=True)
    for number in range(4):
        assert router.recv_multipart() == [b"client", b"", b"%d-0-0-%d" % (number, number)]
        assert not router.poll(20)
        router.send_multipart([b"client", b"", b"%d-0-2-" % number])


EXCHANGES = {
    "message": ["> 0-0-0-hi", "< 0-0-2-"],
    "message again": ["> 0-0-0-hi", "< 0-0-2-", "> 0-0-0-hi", "< 0-0-2-"],
    "ids of another sender too (ME-18)": ["> 0-0-0-same", "< 0-0-2-", "other> 0-0-0-same", "other< 0-0-2-"],
    "echo, twice (ME-19, ME-27)": ["> 3-7-1-e-e", "> 3-7-1-e-e", "< 0-0-7-e-e 3-0-2- 3-0-2-"],
    "echo after an echo": ["> 3-7-1-e", "< 0-0-7-e 3-0-2-", "> 4-7-1-x", "< 1-0-7-x 4-0-2-"],
    "echo that would be an acknowledgement": ["> 7-2-1-e", "< 0-0-0-e 7-0-2-"],
}
"""What raw DEALERs send (``>``) to a listener, and what comes back (``<``), in any order."""


@pytest.mark.parametrize("script", EXCHANGES.values(), ids=EXCHANGES.keys())
def test_messages_when_they_come_to_a_listener_are_answered_in_these_octets(make, raw, address, tmp_path, script):
    got, sent, dealers = Queue(), set(), {}
    server = make("server", 0, ipc_dir=tmp_path)
    server.listen_for_connection(at(address), "desk", lambda _, message: got.put((message.routing_id, message.message)))
    for step in script:
        way, *frames = step.split()
        name = b"raw" + way[:-1].encode()
        if name not in dealers:
            dealers[name] = raw(zmq.DEALER, name, connect=address)
        if way.endswith(">"):
            dealers[name].send_multipart([b"", frames[0].encode()])
            sent.add((name, frames[0].split("-", 3)[3].encode()))
        else:
            wanted = sorted([b"desk", b"", frame.encode()] for frame in frames)
            assert sorted(dealers[name].recv_multipart() for _ in frames) == wanted
    assert {got.get(timeout=WAIT_S) for _ in sent} == sent
    assert got.empty()


def test_messages_when_sent_by_a_listener_are_those_of_the_format(make, raw, address):
    """A DEALER gets the listener's identity, an empty frame and the message; acknowledgements too (ME-09)."""
    server = make("server")
    listener = server.listen_for_connection(at(address), "desk", None)
    dealer = raw(zmq.DEALER, b"raw", connect=address)
    dealer.send_multipart([b"", b"0-0-0-hi"])
    assert dealer.recv_multipart() == [b"desk", b"", b"0-0-2-"]
    server.send_message((listener, "raw"), "x")
    assert dealer.recv_multipart() == [b"desk", b"", b"0-0-0-x"]


def test_input_when_malformed_is_counted_and_the_loop_lives(make, raw, address):
    """No acknowledgement, no callback, and the next good message is handled (ME-07)."""
    got, errors = Queue(), []
    server = make("server", on_error=lambda where, error: errors.append(str(error)))
    server.listen_for_connection(at(address), "server", lambda _, message: got.put(message.message))
    dealer = raw(zmq.DEALER, b"raw", connect=address)
    bad = [[b"", b"x-1-2-3"], [b"", b"1-2-3"], [b"", b""], [b"", b"%d-0-0-" % 2**64], [b"x"], [b"x", b"0-0-0-"], [b""]]
    for frames in bad:
        dealer.send_multipart(frames)
    dealer.send_multipart([b"", b"5-0-0-good"])
    assert got.get(timeout=WAIT_S) == b"good"
    assert dealer.recv_multipart() == [b"server", b"", b"5-0-2-"]
    assert server.statistics().malformed == len(bad)
    assert len(errors) == 1, "a flood is reported once in a while"


def test_message_when_for_a_callback_and_a_listener_is_given_to_both_in_order(make, raw, address):
    """The message-specific callback comes first; acknowledgements reach no listener, messages to NOOP do (ME-13)."""
    got = Queue()
    server = make("server")
    listener = server.listen_for_connection(at(address), "server", lambda _, message: got.put(("slc", message.message)))
    dealer = raw(zmq.DEALER, b"raw", connect=address)
    dealer.send_multipart([b"", b"0-0-0-noop"])
    assert got.get(timeout=WAIT_S) == ("slc", b"noop")
    dealer.recv_multipart()
    server.send_message((listener, "raw"), "ask", lambda _, message: got.put(("msc", message.message)))
    assert dealer.recv_multipart()[2] == b"0-4-0-ask"
    dealer.send_multipart([b"", b"0-0-2-"])
    dealer.send_multipart([b"", b"1-0-4-answer"])
    assert [got.get(timeout=WAIT_S) for _ in range(2)] == [("msc", b"answer"), ("slc", b"answer")]
    assert got.empty()


@pytest.mark.parametrize("kind", ["ipc", "inproc", "tcp"])
def test_sender_when_it_restarts_under_its_name_is_heard_from_its_first_message_on(make, tmp_path, kind):
    """Its ids begin at 0 again, its incarnation is another one (ME-21)."""
    got = Queue()
    server = make("server", 0, ipc_dir=tmp_path, callback=lambda _, message: got.put(message.message))
    where = at(next(endpoint for endpoint in server.endpoints() if endpoint.startswith(kind)))
    for life in range(3):
        client = make("client")
        connection = client.make_connection(where)
        for number in range(5):
            assert client.send_message(connection, b"%d.%d" % (life, number)) == number
            assert got.get(timeout=WAIT_S) == b"%d.%d" % (life, number)
        client.stop()
    assert (server.statistics().repeated, server.statistics().duplicates) == (0, 0)


def test_destination_when_it_vanishes_disturbs_nobody_and_ends_in_a_dead_letter(make, raw, address):
    """Its messages are tried again and given up; those to others arrive meanwhile (ME-23)."""
    dead: Queue[Failure] = Queue()
    quick = DeliverySettings(retry=QUICK, max_attempts=3)
    server = make("server", settings=quick, dead_letter=lambda _, failure: dead.put(failure))
    listener = server.listen_for_connection(at(address), "server", None)
    gone = raw(zmq.DEALER, b"gone", connect=address)
    gone.send_multipart([b"", b"0-0-0-"])
    gone.recv_multipart()
    gone.close()
    living = raw(zmq.DEALER, b"living", connect=address)
    living.send_multipart([b"", b"0-0-0-"])
    living.recv_multipart()
    server.send_message((listener, "gone"), "lost")
    server.send_message((listener, "living"), "kept")
    assert living.recv_multipart()[2] == b"1-0-0-kept"
    living.send_multipart([b"", b"1-0-2-"])
    failure = dead.get(timeout=WAIT_S)
    assert failure == Failure(0, (listener, b"gone"), Outcome.REJECTED, False, b"lost")
    living.send_multipart([b"", b"1-0-1-still here"])
    # What was kept may have come again before its acknowledgement was read.
    assert any(living.recv_multipart()[2] == b"1-0-2-" for _ in range(2 + quick.max_attempts))
    assert server.pending_count() <= 1  # the echo


def test_send_when_inside_a_callback_works_and_blocks_nothing(make, address):
    """From a message-specific and from a server-loop callback, with callbacks of their own (ME-24)."""
    done = Queue()

    def serve(messenger: Messenger, message: ReceivedMessage) -> None:
        if message.message == b"one":
            messenger.send_message(message.sender, "reply", answered, message.source_callback_id)

    def answered(_: Messenger, message: ReceivedMessage) -> None:
        done.put(("server", message.message))

    def first(messenger: Messenger, message: ReceivedMessage) -> None:
        messenger.send_message(message.sender, "to you", remote_callback_id=message.source_callback_id)
        messenger.send_message(message.sender, "two", second, ECHO)

    def second(_: Messenger, message: ReceivedMessage) -> None:
        done.put(("client", message.message))

    server, client = make("server"), make("client")
    server.listen_for_connection(at(address), "server", serve)
    client.send_message(client.make_connection(at(address)), "one", first)
    assert {done.get(timeout=WAIT_S) for _ in range(2)} == {("server", b"to you"), ("client", b"two")}


def test_ipc_file_when_stale_is_replaced_and_removed_at_the_end(make, tmp_path):
    """A crash leaves it; one that somebody listens on, and what is no socket, are left alone (ME-29)."""
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as item:
        item.bind(str(stale))
    assert stale.exists()
    server = make("server")
    server.listen_for_connection(Destination.ipc("server", str(stale)), "server", None)
    with pytest.raises(BusyError, match="somebody listens"):
        make("other").listen_for_connection(Destination.ipc("server", str(stale)), "server", None)
    client = make("client")
    acknowledged = threading.Event()
    connection = client.make_connection(Destination.ipc("server", str(stale)))
    client.send_message(connection, "x", on_ack=lambda *_: acknowledged.set())
    assert acknowledged.wait(WAIT_S)
    server.stop()
    assert not stale.exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LocalProtocolError, match="is no socket"):
        make("third").listen_for_connection(Destination.ipc("x", str(tmp_path / "file")), "x", None)
    assert (tmp_path / "file").read_text() == "mine"


def test_message_when_nobody_listens_yet_is_delivered_when_somebody_does(make, raw, address):
    """The connection is made at once, and what is sent waits with us (ME-31)."""
    client = make("client")
    connection = client.make_connection(at(address))
    acknowledged = threading.Event()
    client.send_message(connection, "early", on_ack=lambda *_: acknowledged.set())
    router = raw(zmq.ROUTER, bind=address)
    assert router.recv_multipart() == [b"client", b"", b"0-0-0-early"]
    router.send_multipart([b"client", b"", b"0-0-2-"])  # without its own identity, as some peers do (ME-38)
    assert acknowledged.wait(WAIT_S)
    assert client.pending_count() == 0


def test_send_when_from_many_threads_loses_and_doubles_nothing(make, address):
    """Each gets an id of its own at once, and all arrive (ME-32)."""
    got, done = [], threading.Event()

    def received(_: Messenger, message: ReceivedMessage) -> None:
        got.append(message.message)
        if len(got) == 800:
            done.set()

    server, client = make("server"), make("client")
    server.listen_for_connection(at(address), "server", received)
    connection = client.make_connection(at(address))

    with ThreadPoolExecutor(8) as workers:
        ids = list(workers.map(lambda number: client.send_message(connection, b"%d" % number), range(800)))
    assert done.wait(WAIT_S)
    assert sorted(ids) == list(range(800))
    assert len(set(got)) == 800


def test_ordered_messages_when_thousands_wait_for_the_first_are_let_go_one_after_the_other(make, raw, address):
    got, done = [], threading.Event()

    def received(_: Messenger, message: ReceivedMessage) -> None:
        got.append(message.message)
        if len(got) == 3000:
            done.set()

    server = make("server")
    server.listen_for_connection(at(address), "server", received)
    dealer = raw(zmq.DEALER, b"raw", connect=address, incarnation=77)
    for number in [*range(2, 3001), 1]:
        extension = Extension(77, number, 1, number - 1)
        dealer.send_multipart([b"", b"%d-0-0-%d" % (number, number), extension.encode()])
    assert done.wait(WAIT_S)
    assert got == [b"%d" % number for number in range(1, 3001)]
    assert server.statistics().repeated == 0


def test_extension_when_not_what_its_sender_announced_is_payload(make, raw, address):
    got = Queue()
    make("server").listen_for_connection(at(address), "server", lambda _, message: got.put(message.payload))
    forged = Extension(77, 2**40, 2**40).encode()
    for name, announced in ((b"raw", 0), (b"ours", 78)):
        dealer = raw(zmq.DEALER, name, connect=address, incarnation=announced)
        dealer.send_multipart([b"", b"0-0-0-x", forged])
        assert got.get(timeout=WAIT_S) == (forged,)


def test_connection_when_closed_gives_up_its_messages(make, address):
    client, withdrawn = make("client"), Queue()
    nobody = client.make_connection(at(address))
    client.send_message(nobody, "x", on_failure=lambda _, failure: withdrawn.put(failure.outcome))
    client.close_connection(nobody)
    assert withdrawn.get(timeout=WAIT_S) is Outcome.WITHDRAWN
    with pytest.raises(LocalProtocolError, match="no connection"):
        client.send_message(nobody, "x")


def test_peers_when_more_than_are_known_make_room_for_each_other(make, raw, address):
    got = Queue()
    server = make("server", max_peers=3)
    listener = server.listen_for_connection(at(address), "server", lambda _, message: got.put(message.routing_id))
    server.send_message((listener, "absent"), "x")
    names = [b"peer%d" % number for number in range(6)]
    for number, name in enumerate([*names, *names]):
        dealer = raw(zmq.DEALER, name, connect=address)
        dealer.send_multipart([b"", b"%d-0-0-" % number])
        assert got.get(timeout=WAIT_S) == name
        dealer.recv_multipart()
        dealer.close()
    assert server.statistics().peers == 3
    assert server.pending_count((listener, "absent")) == 1


def test_callbacks_when_more_than_are_kept_are_refused(make, address, monkeypatch):
    monkeypatch.setattr("flowctl.nodes.messenger.outbound.MAX_CALLBACKS", 2)
    monkeypatch.setattr("flowctl.nodes.messenger.outbound.MAX_PENDING_BYTES", 1000)
    client = make("client")
    connection = client.make_connection(at(address))
    for _ in range(2):
        client.send_message(connection, "x", lambda *_: None)
    with pytest.raises(BusyError, match="2 callbacks"):
        client.send_message(connection, "x", lambda *_: None)
    with pytest.raises(BusyError, match="bytes are unacknowledged"):
        client.send_message(connection, b"x" * 999)
    assert client.send_message(connection, "x") == 2


def test_status_when_a_message_was_only_sent_is_told_to_nobody(make, raw, address):
    """Who sends learns of acknowledgement, response and failure; that it left us means nothing (ME-34)."""
    options = set(inspect.signature(Messenger.send_message).parameters)
    assert {name for name in options if name.startswith("on_")} == {"on_ack", "on_failure"}
    router, client, told = raw(zmq.ROUTER, bind=address), make("client"), Queue()
    connection = client.make_connection(at(address))
    handlers = {"on_ack": lambda _, number: told.put(number), "on_failure": lambda _, failure: told.put(failure)}
    client.send_message(connection, "x", **handlers)
    router.recv_multipart()
    assert told.empty()
    router.send_multipart([b"client", b"server", b"", b"0-0-2-"])
    assert told.get(timeout=WAIT_S) == 0


def test_deadline_when_the_response_does_not_come_fails_once_and_a_late_one_is_ignored(make, raw, address):
    """The message was acknowledged, so only the response is missing (ME-36)."""
    router, client, told = raw(zmq.ROUTER, bind=address), make("client"), Queue()
    connection = client.make_connection(at(address))
    client.send_message(
        connection, "x", lambda _, message: told.put(message), deadline=0.05, on_failure=lambda _, why: told.put(why)
    )
    router.recv_multipart()
    router.send_multipart([b"client", b"server", b"", b"0-0-2-"])
    assert told.get(timeout=WAIT_S) == Failure(0, connection, Outcome.TIMEOUT, True)
    router.send_multipart([b"client", b"server", b"", b"0-0-4-late"])
    assert router.recv_multipart() == [b"client", b"", b"0-0-2-"]
    assert told.empty()
    assert client.statistics().callbacks == 0


@pytest.mark.parametrize("identity", ["", "x" * 256, b"\0reserved", "ü" * 128])
def test_identity_when_out_of_range_is_refused_at_construction(identity):
    """ZeroMQ takes 1 to 255 octets, of which the first is not NUL (ME-37)."""
    with pytest.raises(ConfigError, match="identity"):
        Messenger(identity=identity)
    assert len(Messenger(identity="x" * 255).identity) == 255


def test_peer_when_it_answers_and_never_acknowledges_is_heard_once(make, raw, address):
    """The answer says what an acknowledgement would; without one the attempts are bounded (ME-12, ME-26, ME-39)."""
    quick = DeliverySettings(retry=QUICK, max_attempts=3)
    router, client, got = (raw(zmq.ROUTER, bind=address), make("client", settings=quick), Queue())
    connection = client.make_connection(at(address))
    client.send_message(connection, "ask", lambda _, message: got.put(message.message))
    assert router.recv_multipart()[2] == b"0-4-0-ask"
    for _ in range(2):
        router.send_multipart([b"client", b"server", b"", b"0-0-4-answer"])
    assert got.get(timeout=WAIT_S) == b"answer"
    failed = threading.Event()
    client.send_message(connection, "tell", on_failure=lambda *_: failed.set())
    assert failed.wait(WAIT_S)
    seen = []
    while router.poll(200):
        seen.append(router.recv_multipart())
    assert seen.count([b"client", b"", b"1-0-0-tell"]) == 3
    assert seen.count([b"client", b"", b"0-0-2-"]) == 2
    assert got.empty()


def test_response_when_from_another_peer_is_foreign(make, raw, address):
    server, got, handled = make("server"), [], Queue()
    listener = server.listen_for_connection(at(address), "server", lambda _, message: handled.put(message.routing_id))
    dealers = [raw(zmq.DEALER, name, connect=address) for name in (b"a", b"b")]
    for dealer in dealers:
        dealer.send_multipart([b"", b"0-0-0-"])
        dealer.recv_multipart()
        handled.get(timeout=WAIT_S)
    server.send_message((listener, "a"), "ask", lambda _, message: got.append(message.routing_id))
    dealers[0].recv_multipart()
    dealers[1].send_multipart([b"", b"0-0-2-"])
    dealers[1].send_multipart([b"", b"1-0-4-forged"])
    assert handled.get(timeout=WAIT_S) == b"b"
    assert (got, server.pending_count()) == ([], 1)
    dealers[0].send_multipart([b"", b"1-0-4-true"])
    assert handled.get(timeout=WAIT_S) == b"a"
    assert (got, server.pending_count()) == ([b"a"], 0)


def test_message_when_too_large_costs_its_sender_alone(make, raw, address):
    got = Queue()
    server = make("server", max_message_bytes=1000)
    server.listen_for_connection(at(address), "server", lambda _, message: got.put(message.message))
    greedy, modest = (raw(zmq.DEALER, b"greedy", connect=address), raw(zmq.DEALER, b"modest", connect=address))
    greedy.send_multipart([b"", b"0-0-0-" + b"x" * 5000])
    greedy.send_multipart([b"", b"0-0-0-", *[b"x" * 900] * 3])
    modest.send_multipart([b"", b"0-0-0-small"])
    assert got.get(timeout=WAIT_S) == b"small"
    assert got.empty()
    with pytest.raises(LocalProtocolError, match="max_message_bytes"):
        server.send_message((0, "modest"), b"x" * 1001)


def test_handler_when_it_raises_is_given_the_message_again(make, address):
    calls, errors, done = [], [], threading.Event()

    def handler(_: Messenger, message: ReceivedMessage) -> None:
        calls.append(message.message)
        if len(calls) == 1:
            raise ValueError("first time")

    server = make("server", on_error=lambda where, error: errors.append(str(error)))
    server.listen_for_connection(at(address), "server", handler)
    client = make("client", settings=DeliverySettings(retry=QUICK))
    client.send_message(client.make_connection(at(address)), "x", on_ack=lambda *_: done.set())
    assert done.wait(WAIT_S)
    assert (calls, errors) == ([b"x", b"x"], ["first time"])


def test_window_when_used_up_refuses_or_waits_and_its_edges_are_told(make, raw, address):
    router, edges = raw(zmq.ROUTER, bind=address), Queue()
    client = make(
        "client",
        settings=DeliverySettings(retry=SLOW, window=4),
        send_state_changed=lambda _, to, edge: edges.put((to, edge.old.name, edge.new.name)),
    )
    connection = client.make_connection(at(address))
    ready = threading.Event()
    client.send_message(connection, "0", on_ack=lambda *_: ready.set())
    router.recv_multipart()
    router.send_multipart([b"client", b"server", b"", b"0-0-2-"])
    assert ready.wait(WAIT_S)
    while not edges.empty():  # it may have been OVERLOADED before it was connected
        edges.get()
    for number in range(4):
        client.send_message(connection, b"%d" % number)
    assert client.send_state(connection) is SendState.HARD_LIMIT
    with pytest.raises(BusyError, match="window is 4 messages"):
        client.send_message(connection, "more")
    assert [edges.get(timeout=WAIT_S) for _ in range(2)] == [
        (connection, "READY", "SOFT_LIMIT"),
        (connection, "SOFT_LIMIT", "HARD_LIMIT"),
    ]
    waited = Queue()
    thread = threading.Thread(target=lambda: waited.put(client.send_message(connection, "more", wait_s=WAIT_S)))
    thread.start()
    for number in range(4):
        router.recv_multipart()
        router.send_multipart([b"client", b"server", b"", b"%d-0-2-" % (number + 1)])
    assert waited.get(timeout=WAIT_S) == 5
    thread.join(WAIT_S)


def test_stop_when_messages_wait_tells_each_once(make, address):
    client, told = make("client"), Queue()
    connection = client.make_connection(at(address))
    client.send_message(connection, "x", on_failure=lambda _, failure: told.put(failure.outcome))
    client.send_message(connection, "y", lambda *_: None, on_failure=lambda _, failure: told.put(failure.outcome))
    client.stop()
    client.stop()
    assert [told.get(timeout=WAIT_S) for _ in range(2)] == [Outcome.SHUTDOWN] * 2
    assert told.empty()
    with pytest.raises(ClosedError, match="stopped"):
        client.send_message(connection, "z")


def test_coroutine_handler_when_it_waits_is_acknowledged_at_its_end(make, raw, address):
    gates, calls = Queue(), []

    async def handler(_: Messenger, message: ReceivedMessage) -> None:
        import asyncio

        calls.append(message.message)
        gate = asyncio.Event()
        gates.put((asyncio.get_running_loop(), gate))
        await gate.wait()

    server = make("server")
    server.listen_for_connection(at(address), "server", handler)
    dealer = raw(zmq.DEALER, b"raw", connect=address)
    for _ in range(2):
        dealer.send_multipart([b"", b"0-0-0-slow"])
    loop, gate = gates.get(timeout=WAIT_S)
    dealer.rcvtimeo = 50
    with pytest.raises(zmq.Again):
        dealer.recv_multipart()
    loop.call_soon_threadsafe(gate.set)
    dealer.rcvtimeo = int(WAIT_S * 1000)
    assert dealer.recv_multipart()[2] == b"0-0-2-"
    assert calls == [b"slow"]


def test_acknowledgement_when_asked_for_on_receipt_does_not_wait_for_the_handler(make, raw, address):
    never = threading.Event()

    async def handler(_: Messenger, message: ReceivedMessage) -> None:
        import asyncio

        await asyncio.get_running_loop().run_in_executor(None, never.wait, WAIT_S)

    server = make("server", ack_on_receipt=True)
    server.listen_for_connection(at(address), "server", handler)
    dealer = raw(zmq.DEALER, b"raw", connect=address)
    dealer.send_multipart([b"", b"0-0-0-slow"])
    assert dealer.recv_multipart()[2] == b"0-0-2-"
    never.set()


async def test_connection_within_the_process_when_its_listener_has_closed_before_it_accepted_goes_to_the_next(
    loop_factory,
):
    place, got = Destination.inproc("s", "passed on"), []
    async with Messenger(identity="client") as client:
        first = Messenger(identity="first")
        await first.__aenter__()
        first.listen_for_connection(place, "s")
        connection = client.make_connection(place)
        first.stop()
        async with Messenger(identity="second") as second:
            second.listen_for_connection(place, "s", lambda _, message: got.append(message.message))
            await client.deliver(connection, "hello", deadline=WAIT_S)
    assert got == [b"hello"]


def test_message_when_it_has_more_frames_than_are_taken_is_refused_to_its_sender(make, address):
    client = make("client")
    with pytest.raises(LocalProtocolError, match="1001 further frames, the most are 1000"):
        client.send_message(client.make_connection(at(address)), "x", payload=[b""] * 1001)


@pytest.mark.parametrize("message", [5, True, None, {"a": 1}])
def test_message_when_neither_text_nor_bytes_is_an_error(make, message):
    """``bytes(5)`` would be five zeros."""
    with pytest.raises(LocalProtocolError, match=f"a message is text or bytes, not {type(message).__name__}"):
        make("client").send_message(1, message)
