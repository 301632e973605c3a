"""Handlers on worker threads, batches, timers and injected tasks, through nodes over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future, wait

import pytest

from flowctl.errors import ClosedError, LocalProtocolError, RpcError, RpcTimeoutError
from flowctl.nodes.rpc.jobs.batch import NODE_THREAD, Batch
from flowctl.nodes.rpc.node import RpcNode
from flowctl.pollgroup import GroupState

WAIT_S = 20.0


class Gate:
    """A handler that tells which message it runs for, and holds it until it is let go."""

    def __init__(self):
        self.began = {}
        self.open = {}

    def name(self, octets):
        self.began.setdefault(octets, threading.Event())
        return self.open.setdefault(octets, threading.Event())

    def handler(self, message):
        octets = message.data[0]
        self.name(octets)
        self.began[octets].set()
        assert self.open[octets].wait(WAIT_S)
        return octets

    def wait_for(self, octets):
        self.name(octets)
        assert self.began[octets].wait(WAIT_S)

    def let_go(self, *names):
        for octets in names:
            self.name(octets).set()


class Pair:
    """A server with categories a (two reserved) and c, four general threads, and a client that is connected to it."""

    def __init__(self, node, tmp_path, general=4, reserved=2, max_queue=200):
        self.gate = Gate()
        self.server, self.client = node("server"), node("client")
        self.server.set_general_threads(general)
        self.server.set_batch_threads(0)
        self.server.set_reply_threads(0)
        self.server.add_category("a", reserved_threads=reserved)
        self.server.add_category("c", max_queue=max_queue)
        for category in "ac":
            self.server.add_request_command(category, "hold", self.gate.handler)
        self.server.add_request_command("c", "thread", lambda message: threading.current_thread().name)

    def start(self, tmp_path):
        address = self.server.listen_plain(f"ipc://{tmp_path}/jobs")
        self.server.start()
        self.client.start()
        self.conn = self.client.connect_remote(address)
        return self

    def ask(self, names, **options):
        """Request one after the other, A1 of category a and so on; return the futures by name."""
        return {
            name: self.client.request_future(self.conn, f"{name[0].lower()}.hold", name, **options)
            for name in names.split()
        }

    def settled(self, waiting):
        """Wait until so many commands wait at the server."""
        while self.server.job_statistics().waiting != waiting:
            self.client.request_future(self.conn, "none.none", timeout_s=WAIT_S).exception(WAIT_S)
        return self.server.job_statistics().active


@pytest.fixture
def pair(node, tmp_path):
    return Pair(node, tmp_path).start(tmp_path)


@pytest.mark.parametrize(
    ("names", "active", "waiting"),
    [
        ("A1 A2 C1 C2 C3 C4", 4, 2),
        ("A1 A2 C1 C2 A3 A4", 4, 2),
        ("C1 C2 C3 A1 A2 A3", 5, 1),
        ("C1 C2 C3 C4 C5 C6 A1 A2 A3", 6, 3),
    ],
)
def test_requests_when_they_come_in_some_order_run_by_the_reservation_rule(pair, names, active, waiting):
    """The four examples of OxenMQ's README over real sockets and threads (OX-52, OX-53, OX-54)."""
    futures = pair.ask(names)
    assert pair.settled(waiting) == active
    assert pair.server.job_statistics().threads == active
    pair.gate.let_go(*(name.encode() for name in futures))
    assert [future.get(WAIT_S) for future in futures.values()] == [[name.encode()] for name in futures]
    assert pair.server.job_statistics().most_active == active


def test_request_when_the_queue_is_full_is_told_at_once(node, tmp_path):
    """Where OxenMQ drops silently the caller learns of it; the connection and the others go on (OX-56)."""
    pair = Pair(node, tmp_path, general=1, reserved=0, max_queue=1).start(tmp_path)
    futures = pair.ask("C1 C2 C3")
    with pytest.raises(RpcError) as raised:
        futures["C3"].get(WAIT_S)
    assert raised.value.code == "QUEUE_FULL"
    pair.gate.let_go(b"C1", b"C2")
    assert [futures[name].get(WAIT_S) for name in ("C1", "C2")] == [[b"C1"], [b"C2"]]


def test_handler_when_it_is_a_plain_function_runs_on_a_worker_thread(pair):
    names = {pair.client.request_future(pair.conn, "c.thread").get(WAIT_S)[0] for _ in range(5)}
    assert names == {b"server worker 1"}


def test_request_when_its_deadline_passes_in_the_queue_is_never_begun(node, tmp_path):
    """The deadline travels with the request: when a thread is free at last, the handler is not called (OX-56)."""
    pair = Pair(node, tmp_path, general=1, reserved=0).start(tmp_path)
    first = pair.ask("C1")
    pair.gate.wait_for(b"C1")
    late = pair.ask("C2", timeout_s=0.05)["C2"]
    with pytest.raises(RpcTimeoutError):
        late.get(WAIT_S)
    assert pair.settled(0) == 1
    pair.gate.let_go(b"C1", b"C2")
    assert first["C1"].get(WAIT_S) == [b"C1"]
    assert pair.client.request_future(pair.conn, "c.thread").get(WAIT_S) == [b"server worker 1"]
    assert [lane.late_count for lane in pair.server.job_statistics().lanes if lane.name == "c"] == [1]
    assert not pair.gate.began.get(b"C2", threading.Event()).is_set()


def test_reply_callback_when_it_blocks_holds_up_no_connection(pair):
    got = Future()

    def on_reply(ok, data):
        got.set_result((ok, pair.client.request_future(pair.conn, "c.thread").get(WAIT_S)))

    pair.client.request(pair.conn, "c.thread", on_reply=on_reply)
    assert got.result(WAIT_S) == (True, [b"server worker 1"])


def test_batch_when_submitted_by_a_handler_goes_on_in_its_completion(node, tmp_path):
    pair = Pair(node, tmp_path)
    disk = pair.server.add_tagged_thread("disk")

    def task(number):
        if number % 10 == 7:
            raise ValueError("I don't do '7s, sorry")
        return 5 if number == 1 else 3 * number

    def start(message):
        answer = message.later()
        batch = Batch()
        for number in range(32):
            batch.add_job(lambda number=number: task(number), disk if number % 2 else None)
        batch.completion(lambda results: answer(str(sum(r.get() for r in results if r.error is None))))
        pair.server.batch(batch)

    pair.server.add_request_command("c", "sum", start)
    pair.start(tmp_path)
    assert pair.client.request_future(pair.conn, "c.sum").get(WAIT_S) == [b"1337"]


def test_inject_task_when_the_category_is_busy_waits_in_its_queue(node, tmp_path, errors):
    pair = Pair(node, tmp_path, general=1, reserved=0, max_queue=1).start(tmp_path)
    first = pair.ask("C1")
    pair.gate.wait_for(b"C1")
    ran, dropped = Future(), []
    pair.server.inject_task("c", "check", "10.0.0.1", lambda: ran.set_result(threading.current_thread().name))
    pair.settled(1)
    pair.server.inject_task("c", "other", "10.0.0.2", lambda: dropped.append(1))
    while not errors:
        pair.client.request_future(pair.conn, "none.none").exception(WAIT_S)
    pair.gate.let_go(b"C1")
    assert first["C1"].get(WAIT_S) == [b"C1"]
    assert ran.result(WAIT_S) == "server worker 1"
    assert (["c.other of 10.0.0.2" in where for where, _ in errors], dropped) == ([True], [])
    with pytest.raises(LocalProtocolError, match="category 'none'"):
        pair.server.inject_task("none", "x", "", print)


def test_stop_when_handlers_run_waits_for_them_and_starts_no_other(node, tmp_path):
    """What runs is waited for and its reply still goes out; what waits is refused; threads end (OX-82)."""
    pair = Pair(node, tmp_path, general=1, reserved=0).start(tmp_path)
    futures = pair.ask("C1 C2")
    pair.gate.wait_for(b"C1")
    pair.settled(1)
    stopped = Future()
    thread = threading.Thread(target=lambda: stopped.set_result(pair.server.stop(WAIT_S)))
    thread.start()
    with pytest.raises(RpcError) as raised:
        futures["C2"].get(WAIT_S)
    assert raised.value.code == "SHUTTING_DOWN"
    assert not stopped.done()
    pair.gate.let_go(b"C1")
    assert futures["C1"].get(WAIT_S) == [b"C1"]
    assert stopped.result(WAIT_S) is True
    thread.join(WAIT_S)
    assert b"C2" not in pair.gate.began
    assert not [item for item in threading.enumerate() if item.name.startswith("server")]
    with pytest.raises(ClosedError):
        pair.server.job(print)


@pytest.mark.parametrize("kind", ["thread", "coroutine", "batch", "timer", "node timer"])
def test_stop_when_called_from_a_handler_or_job_ends_the_node(node, tmp_path, kind):
    """A node may be stopped from anything it runs: the call returns at once, and the node ends (OX-82)."""
    pair = Pair(node, tmp_path)
    answers = Future()

    def stop(*_):
        answers.set_result(pair.server.stop(WAIT_S))

    async def stop_too(message):
        stop()

    pair.server.add_command("c", "stop", stop_too if kind == "coroutine" else stop)
    pair.start(tmp_path)
    if kind in {"thread", "coroutine"}:
        pair.client.send(pair.conn, "c.stop")
    elif kind == "batch":
        pair.server.job(stop)
    else:
        pair.server.add_timer(stop, 0.01, thread=NODE_THREAD if kind == "node timer" else None)
    assert answers.result(WAIT_S) is False
    assert pair.server.stop(WAIT_S) is True


def test_stop_when_called_in_a_forked_child_leaves_the_node_alone(node, monkeypatch):
    server = node("server")
    server.start()
    with monkeypatch.context() as patch:
        patch.setattr("flowctl.pollgroup.os.getpid", lambda: 0)
        assert server.stop()
    assert server._calls.group.state is GroupState.RUNNING
    assert server.stop()


def test_stop_when_several_call_it_at_once_returns_to_all(node):
    """Nobody waits out his deadline because another one was first."""
    for _ in range(20):
        server = node("server")
        server.start()
        stopping = [threading.Thread(target=server.stop, args=(3600.0,), daemon=True) for _ in range(4)]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in stopping)


def test_stop_when_a_handler_never_ends_names_it_and_leaves_it_behind(node, tmp_path, errors):
    """After its deadline the stop returns, and says which command is left on which thread (OX-82)."""
    pair = Pair(node, tmp_path).start(tmp_path)
    pair.ask("C1")
    pair.gate.wait_for(b"C1")
    assert pair.server.stop(0.05) is False
    assert any("server worker 1: c.hold has not ended within 0.05 s" in str(error) for _, error in errors)
    pair.gate.let_go(b"C1")
    assert pair.server.stop(WAIT_S) is True


async def test_node_when_on_a_loop_runs_plain_handlers_on_threads(loop_factory, tmp_path):
    names, server = [], RpcNode(name="loop")

    def block(message):
        names.append(threading.current_thread().name)
        return b"done"

    server.add_category("a")
    server.add_request_command("a", "block", block)
    address = server.listen_plain(f"ipc://{tmp_path}/loop")
    async with server, RpcNode(name="caller") as client:
        conn = await client.connect(address)
        assert await asyncio.gather(*(client.call(conn, "a.block") for _ in range(3))) == [[b"done"]] * 3
    assert {name.partition(" worker")[0] for name in names} == {"loop"}
    deadline = time.monotonic() + 5  # one that has said it is done may still be on its way out
    while [item for item in threading.enumerate() if item.name.startswith("loop")]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_requests_when_made_while_the_node_stops_all_have_their_outcome(node, tmp_path):
    server = node("server")
    server.add_category("c")
    server.add_request_command("c", "echo", lambda message: message.data)
    address = server.listen_plain(f"ipc://{tmp_path}/late")
    server.start()
    for _ in range(5):
        client = node("client")
        client.start()
        conn = client.connect_remote(address)
        asked: list[Future] = []
        begun = threading.Barrier(4)

        def ask(client=client, conn=conn, asked=asked, begun=begun):
            begun.wait(WAIT_S)
            with contextlib.suppress(ClosedError):
                while True:
                    asked.append(client.request_future(conn, "c.echo", "x", timeout_s=3600))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(WAIT_S)
        assert client.stop(WAIT_S)
        for thread in threads:
            thread.join(WAIT_S)
        assert wait(asked, WAIT_S).not_done == set()


def test_connects_when_made_while_the_node_stops_all_end(node, tmp_path):
    for _ in range(5):
        client = node("client")
        client.start()
        begun = threading.Barrier(3)

        def dial(client=client, begun=begun):
            begun.wait(WAIT_S)
            with pytest.raises((ClosedError, RpcError)):
                client.connect_remote(f"ipc://{tmp_path}/nobody", timeout_s=3600)

        threads = [threading.Thread(target=dial, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        begun.wait(WAIT_S)
        client.stop(WAIT_S)
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
