"""What goes along with a call: items that are streamed to its handler, metadata, and what wraps calls."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace

import pytest
from connection_kit import wait_until

from flowctl.errors import ClosedError, LocalProtocolError, RpcError
from flowctl.nodes.rpc.message import served_message
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import MAX_PART_BYTES
from flowctl.nodes.rpc.streams import ITEMS_IN_A_ROW, Credit
from flowctl.nodes.rpc.wire.frames import TAG_BYTES, make_tag

WAIT_S = 20.0


class Made:
    """Items, as an asynchronous generator makes them: how many were, and whether it was closed."""

    def __init__(self, count, *, fails_at=None):
        self.count, self.fails_at = count, fails_at
        self.made, self.closed = 0, False

    async def __aiter__(self):
        try:
            for number in range(self.count):
                if number == self.fails_at:
                    raise ZeroDivisionError("no more of them")
                self.made += 1
                yield b"%d" % number
        finally:
            self.closed = True


class Serving:
    """A node with handlers that take items."""

    def __init__(self, node):
        self.go_on, self.taken, self.messages, self.cancelled = threading.Event(), [], [], 0
        self.node = node
        node.add_category("a")
        for handler in (self.total, self.double, self.slow, self.first, self.fails, self.ignores, self.waits):
            node.add_request_command("a", handler.__name__, handler)
        node.add_request_command("a", "thread", lambda message: message.items())
        node.add_command("a", "told", self.ignores)

    async def total(self, message):
        return str(sum([int(parts[0]) async for parts in message.items()]))

    async def double(self, message):
        async for parts in message.items(credit=2):
            yield [*parts, *parts]

    async def slow(self, message):
        async for parts in message.items(credit=4):
            self.taken.append(parts)
            await until(self.go_on.is_set)
        return "done"

    async def first(self, message):
        async with aclosing(message.items()) as items:
            async for parts in items:
                return parts
        return "none"

    async def fails(self, message):
        async for _ in message.items():
            raise ValueError("broken")

    async def ignores(self, message):
        self.messages.append(message)
        return "no matter"

    async def waits(self, message):
        self.messages.append(message)
        self.items = message.items(credit=3)
        try:
            self.first_item = await anext(self.items)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture
def server():
    """A node on a thread of its own, with handlers that take items."""
    reported = []
    made = Serving(RpcNode(name="server", on_error=lambda where, error: reported.append((where, error))))
    made.reported = reported
    made.address = made.node.listen_plain("tcp://127.0.0.1:*")
    made.node.start()
    yield made
    made.node.stop()


@pytest.fixture(params=["its own loop", "another loop"])
def play(request, server):
    """Run a coroutine that is given a node and its connection to the server: on the node's loop, and on another one."""

    def run(coroutine, prepare=lambda node: None):
        async def on_its_own():
            node = RpcNode(name="caller")
            prepare(node)
            async with node:
                return await coroutine(node, await node.connect(server.address))

        async def on_another():
            node = RpcNode(name="caller")
            prepare(node)
            node.start()
            try:
                return await coroutine(node, await node.connect(server.address))
            finally:
                await asyncio.to_thread(node.stop)

        there = on_its_own() if request.param == "its own loop" else on_another()
        return asyncio.run(asyncio.wait_for(there, WAIT_S))

    return run


async def until(is_so):
    while not is_so():  # noqa: ASYNC110  (what is waited for happens on another node)
        await asyncio.sleep(0.005)


# --- items -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 32, 33, 1000])
def test_call_when_it_has_items_streams_them_to_its_handler(play, count):
    items = Made(count)
    assert play(lambda node, conn: node.call(conn, "a.total", items=items, returns=int)) == sum(range(count))
    assert (items.made, items.closed) == (count, True)


def test_stream_when_it_has_items_goes_both_ways(play):
    """Each answer comes when its item was sent, and not behind the last one."""
    turns = []

    async def both(node, conn):
        answered = asyncio.Event()

        async def items():
            for number in range(20):
                turns.append(f"asked {number}")
                yield str(number)
                await answered.wait()
                answered.clear()

        async for parts in node.stream(conn, "a.double", items=items(), credit=1):
            turns.append(f"answered {parts[0].decode()}")
            assert parts[0] == parts[1]
            answered.set()

    play(both)
    assert turns == [f"{what} {number}" for number in range(20) for what in ("asked", "answered")]


def test_items_when_their_handler_is_slow_are_not_made(play, server):
    items = Made(100)

    async def slow(node, conn):
        call = asyncio.ensure_future(node.call(conn, "a.slow", items=items))
        await until(lambda: items.made == 4 and server.taken)
        assert server.taken == [[b"0"]]
        server.go_on.set()
        return await call

    assert play(slow) == [b"done"]
    assert items.made == len(server.taken) == 100


@pytest.mark.parametrize("command", ["a.first", "a.fails", "a.ignores", "a.none"])
def test_items_when_their_call_ends_before_are_closed(play, command):
    """Also where nobody ever asked for them."""
    items = Made(1_000_000)

    async def end(node, conn):
        try:
            return await node.call(conn, command, items=items)
        except RpcError as error:
            return error.code

    found = {"a.first": [b"0"], "a.fails": "HANDLER_FAILED", "a.ignores": [b"no matter"], "a.none": "UNKNOWNCOMMAND"}
    assert play(end) == found[command]
    assert items.closed or not items.made
    assert items.made <= 32 + 1


@pytest.mark.parametrize("kind", ["call", "stream"])
def test_items_when_they_raise_end_the_call_with_that(play, server, kind):
    items = Made(10, fails_at=2)

    async def call(node, conn):
        if kind == "call":
            await node.call(conn, "a.waits", items=items)
        async for _ in node.stream(conn, "a.double", items=items):
            pass

    with pytest.raises(ZeroDivisionError, match="no more of them"):
        play(call)
    if kind == "call":
        wait_until(lambda: server.cancelled == 1, "its handler is cancelled")


@pytest.mark.parametrize("end", ["cancelled", "disconnected", "out of time"])
def test_items_when_their_call_is_given_up_are_closed_and_count_no_more(play, server, end):
    items = Made(1000)

    async def give_up(node, conn):
        timeout_s = 0.2 if end == "out of time" else WAIT_S
        call = asyncio.ensure_future(node.call(conn, "a.waits", items=items, timeout_s=timeout_s))
        await until(lambda: items.made == 3 or call.done())
        if end == "cancelled":
            call.cancel()
        elif end == "disconnected":
            node.disconnect(conn)
        with pytest.raises((RpcError, asyncio.CancelledError)):
            await call
        assert items.closed

    play(give_up)
    wait_until(lambda: server.cancelled == 1, "its handler is cancelled")
    (message,) = server.messages
    wait_until(lambda: (message.peer.waiting_count, message.peer.waiting_bytes) == (0, 0), "it counts no more")
    category = server.node._categories["a"]
    assert (category.running_count, category.running_bytes) == (0, 0)


def test_items_when_nobody_streams_them_end_at_once(play, server):
    async def call(node, conn):
        return await node.call(conn, "a.first"), [item async for item in node.stream(conn, "a.double")]

    assert play(call) == ([b"none"], [])


def test_items_when_they_are_no_iterator_or_asked_for_where_they_cannot_be_are_an_error(play, server):
    async def call(node, conn):
        with pytest.raises(LocalProtocolError, match="items is of type list, it must be an asynchronous iterator"):
            await node.call(conn, "a.total", items=[1])
        with pytest.raises(RpcError, match="HANDLER_FAILED"):
            await node.call(conn, "a.thread", items=Made(1))
        with pytest.raises(LocalProtocolError, match=r"an item of a\.total is text, bytes, or a list of them, not int"):
            await node.call(conn, "a.total", items=numbers())
        node.send(conn, "a.told")
        await until(lambda: server.messages)

    async def numbers():
        yield 1

    play(call)
    assert "a plain function takes no items" in str(server.reported[0][1])
    with pytest.raises(LocalProtocolError, match="a request has items"):
        server.messages[0].items()
    with pytest.raises(LocalProtocolError, match="credit is 0, it must be 1 to 255"):
        server.messages[0].items(0)
    with pytest.raises(LocalProtocolError, match="credit is '2', it must be 1 to 255"):
        server.messages[0].items("2")


def test_items_when_they_are_more_than_allowed_cost_their_caller_the_request(server, raw):
    """Raw peers: more than the credit, items of nothing, ends and credit that nobody asked for."""
    dealer, tag = raw(server.address), make_tag(1, WAIT_S)
    send, receive = dealer.send_multipart, dealer.recv_multipart
    for frames in ([b"UP", tag, b"x"], [b"UP_END", tag], [b"UP"], [b"UP_CREDIT", tag, b"1"], [b"UP_CREDIT", tag, b"x"]):
        send(frames)
    assert receive() == [b"CANCEL", tag]  # of a call of its own that it does not have
    send([b"a.waits", tag])
    assert receive() == [b"UP_CREDIT", tag, b"3"]
    for _ in range(4):
        send([b"UP", tag, b"x"])
    # The first was taken, and with half of the credit used up there is more of it.
    assert receive() == [b"CREDIT_EXCEEDED", b"REPLY", tag]
    wait_until(lambda: server.cancelled == 1, "its handler is cancelled")
    assert server.node.statistics().malformed_count == 2
    send([b"a.ignores", make_tag(2, WAIT_S)])
    assert receive()[0] == b"REPLY"


def test_items_when_they_hold_too_much_cost_their_caller_the_request(server, raw, monkeypatch):
    monkeypatch.setattr("flowctl.nodes.rpc.serving.MOST_RUNNING_BYTES", 4000)
    monkeypatch.setattr("flowctl.nodes.rpc.serving.LEAST_ITEM_BYTES", 1000)
    greedy, other = raw(server.address), raw(server.address)
    tag = make_tag(1, WAIT_S)
    greedy.send_multipart([b"a.waits", tag])
    assert greedy.recv_multipart() == [b"UP_CREDIT", tag, b"3"]
    for _ in range(3):
        greedy.send_multipart([b"UP", tag, bytes(2000)])
    assert greedy.recv_multipart() == [b"QUEUE_FULL", b"REPLY", tag]
    wait_until(lambda: server.messages[0].peer.waiting_bytes == 0, "it holds nothing any more")
    other.send_multipart([b"a.ignores", tag])
    assert other.recv_multipart() == [b"REPLY", tag, b"no matter"]


def test_items_when_refused_for_a_moment_get_their_credit_all_the_same(play, server, monkeypatch):
    """Credit that finds no room is not lost: an upload would stand still for ever."""
    reaching, refused = server.node._reaching, []
    send = reaching.try_to_send

    def refuse_once(peer, frames):
        if frames[0] == b"UP_CREDIT" and len(refused) < 3:
            refused.append(frames)
            return b"QUEUE_FULL"
        return send(peer, frames)

    monkeypatch.setattr(reaching, "try_to_send", refuse_once)
    assert play(lambda node, conn: node.call(conn, "a.total", items=Made(100), returns=int)) == sum(range(100))
    assert len(refused) == 3


@pytest.mark.parametrize("refused_at", [1, 5, 31])
def test_items_when_one_finds_no_room_keep_their_order(play, server, monkeypatch, refused_at):
    """Also of a caller on another loop, which has handed over the next ones meanwhile."""
    seen = []

    async def call(node, conn):
        reaching = node._reaching
        send = reaching.try_to_send

        def refuse_once(peer, frames):
            if frames[0] == b"UP":
                seen.append(frames)
                if len(seen) == refused_at:
                    return b"QUEUE_FULL"
            return send(peer, frames)

        monkeypatch.setattr(reaching, "try_to_send", refuse_once)
        server.go_on.set()
        return await node.call(conn, "a.slow", items=Made(100))

    assert play(call) == [b"done"]
    assert [int(parts[0]) for parts in server.taken] == list(range(100))
    assert len(seen) == 101


@pytest.mark.parametrize("kind", ["call", "stream"])
def test_items_when_they_are_cancelled_end_the_call(play, kind):
    async def items():
        yield b"1"
        raise asyncio.CancelledError

    async def call(node, conn):
        if kind == "call":
            await node.call(conn, "a.total", items=items())
        async for _ in node.stream(conn, "a.double", items=items()):
            pass

    with pytest.raises(LocalProtocolError, match=r"the items of a\..* were cancelled"):
        play(call)


def test_stream_when_it_has_failed_keeps_to_what_came_first(play, server):
    """What its items raise as they are closed, or what the server says behind that, is not why it has failed."""

    class Unclean(Made):
        async def __aiter__(self):
            try:
                yield b"1"
                await asyncio.Event().wait()
            finally:
                raise ValueError("in cleaning up")

    async def late(message):
        yield await anext(message.items())
        raise RpcError("mine", code="MINE")

    server.node._commands[b"a.late"] = dataclasses.replace(server.node._commands[b"a.double"], handler=late)

    async def follow(node, conn, items):
        async for _ in node.stream(conn, "a.late", items=items):
            await asyncio.sleep(0)

    with pytest.raises(RpcError, match="MINE"):
        play(lambda node, conn: follow(node, conn, Unclean(1)))


def test_items_when_their_handler_hands_them_to_another_task_end_with_the_handler(play, server):
    """They are never taken for all of them."""
    ends = []

    async def collect(message, items):
        try:
            ends.append([parts async for parts in items])
        except ClosedError as error:
            ends.append(str(error))
        message.reply("collected")

    async def hands_over(message):
        asyncio.get_running_loop().create_task(collect(message, message.items()))
        if server.go_on.is_set():
            await asyncio.sleep(0)

    server.node._commands[b"a.hands"] = dataclasses.replace(server.node._commands[b"a.total"], handler=hands_over)
    for waits in (False, True):
        if waits:
            server.go_on.set()
        assert play(lambda node, conn: node.call(conn, "a.hands", items=Made(100))) == [b"collected"]
    assert ends == ["the request has ended, and its items with it"] * 2


def test_handler_when_cancelled_twice_cleans_up_in_peace(server, raw):
    cleaned = []

    async def cleans(message):
        try:
            await anext(message.items())
            await asyncio.Event().wait()
        finally:
            server.cancelled += 1
            await until(server.go_on.is_set)
            cleaned.append(True)

    server.node._commands[b"a.cleans"] = dataclasses.replace(server.node._commands[b"a.total"], handler=cleans)
    dealer, tag = raw(server.address), make_tag(1, WAIT_S)
    dealer.send_multipart([b"a.cleans", tag])
    assert dealer.recv_multipart()[0] == b"UP_CREDIT"
    dealer.send_multipart([b"UP", tag, b"x"])
    dealer.send_multipart([b"CANCEL", tag])
    wait_until(lambda: server.cancelled == 1, "it is cancelled")
    for word in (b"CANCEL", b"UP", b"CANCEL"):
        dealer.send_multipart([word, tag])
    dealer.send_multipart([b"HI"])
    assert dealer.recv_multipart() == [b"HELLO"]
    server.go_on.set()
    wait_until(lambda: cleaned == [True], "it cleans up")


def test_items_when_large_are_allowed_by_their_bytes(play, server):
    """A few megabytes wait where they are taken, and their caller is slowed instead of refused."""
    made, most = [0], [0]

    async def items():
        for _ in range(24):
            made[0] += 1
            most[0] = max(most[0], made[0] - len(server.taken))
            yield [bytes(1_000_000)] * 3

    async def slow(node, conn):
        call = asyncio.ensure_future(node.call(conn, "a.slow", items=items()))
        await until(lambda: made[0] == 4 and server.taken)
        server.go_on.set()
        return await call

    assert play(slow) == [b"done"]
    assert len(server.taken) == 24
    assert most[0] <= 5


def test_items_when_begun_anew_by_a_retry_are_an_error_unless_they_can_be(play, server):
    """A generator that was used up would be an upload of nothing."""

    def retry(make):
        async def call(asked):
            wanted, asked.command = asked.command, "a.first"
            assert await make(asked) == [b"0"]
            asked.command = wanted
            return await make(asked)

        return call if inspect.iscoroutinefunction(make) else make

    async def ask(node, conn):
        assert await node.call(conn, "a.total", items=Made(3), returns=int) == 3
        with pytest.raises(LocalProtocolError, match="were used by the call that was made before"):
            await node.call(conn, "a.total", items=aiter(Made(3)))

    play(ask, lambda node: node.add_caller_middleware(retry))


def test_items_when_the_caller_is_none_of_ours_are_refused(server, raw):
    """A node of OxenMQ would never send any."""
    dealer = raw(server.address)
    dealer.send_multipart([b"a.total", b"its own tag"])
    assert dealer.recv_multipart()[:3] == [b"WRONG_ARGUMENT", b"REPLY", b"its own tag"]


def test_credit_when_there_is_much_leaves_the_loop_to_others_and_a_flood_of_it_costs_one_turn():
    async def run():
        loop, turns, calls = asyncio.get_running_loop(), [0], []

        async def count():
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        credit = Credit(loop, here=True, count=1 << 20)
        for _ in range(1000):
            await credit.take()
        counting.cancel()
        foreign = Credit(SimpleNamespace(call_soon_threadsafe=lambda *call: calls.append(call)), here=False)
        for _ in range(100_000):
            foreign.add(1)
        (call,) = calls
        call[0](*call[1:])
        return turns[0], foreign.count

    turns, count = asyncio.run(run())
    assert turns >= 1000 // ITEMS_IN_A_ROW
    assert count <= 10_000


# --- metadata ----------------------------------------------------------------------------------------------------

METADATA = {"tenant": "müller", "hops": "1"}


@pytest.fixture
def telling():
    """A node whose handlers answer with the metadata that came."""
    node = RpcNode(name="telling", on_error=lambda *_: None)

    def told(message):
        return [f"{name}={value}" for name, value in message.metadata.items()]

    async def coroutine(message):
        assert served_message() is message
        return told(message)

    async def stream(message):
        yield told(message)

    node.add_category("a")
    for name, handler in (("thread", told), ("coroutine", coroutine), ("stream", stream)):
        node.add_request_command("a", name, handler)
    node.add_command("a", "command", lambda message: None)
    node.address = node.listen_plain("tcp://127.0.0.1:*")
    node.start()
    yield node
    node.stop()


def test_metadata_when_given_comes_to_every_kind_of_handler_by_every_kind_of_call(telling):
    async def ask():
        async with RpcNode() as node:
            conn = await node.connect(telling.address)
            future = node.request_future(conn, "a.thread", metadata=METADATA)
            replies = asyncio.Queue()
            loop = asyncio.get_running_loop()
            told = partial(loop.call_soon_threadsafe, replies.put_nowait)
            node.request(conn, "a.coroutine", metadata=METADATA, on_reply=lambda ok, data: told(data))
            pool = node.pool(conn)
            found = [
                await node.call(conn, "a.thread", metadata=METADATA),
                await node.call(conn, "a.coroutine", metadata=METADATA),
                *[parts async for parts in node.stream(conn, "a.stream", metadata=METADATA)],
                await asyncio.wrap_future(future),
                await replies.get(),
                await pool.call("a.coroutine", metadata=METADATA),
                *[parts async for parts in pool.stream("a.stream", metadata=METADATA)],
            ]
            pool.close()
            return found, await node.call(conn, "a.coroutine")

    found, without = asyncio.run(asyncio.wait_for(ask(), WAIT_S))
    assert found == [["tenant=müller".encode(), b"hops=1"]] * 7
    assert without == []


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"a": 1}, "metadata 'a' is 1, both must be text"),
        ({b"a": "1"}, "metadata b'a' is '1', both must be text"),
        ({"a": "x" * 8192}, "metadata has 8200 bytes, the limit is 8192"),
        ({"a": "\ud800"}, "metadata has half a character"),
        ([("a", "1")], "metadata is of type list, it must be a mapping of texts to texts"),
    ],
)
def test_metadata_when_it_cannot_be_sent_is_an_error(telling, metadata, told):
    async def ask():
        async with RpcNode() as node:
            await node.call(await node.connect(telling.address), "a.thread", metadata=metadata)

    with pytest.raises(LocalProtocolError, match=told):
        asyncio.run(ask())


def test_metadata_when_a_message_has_no_room_for_it_costs_that_call_alone(telling):
    async def ask():
        async with RpcNode() as node:
            conn = await node.connect(telling.address)
            parts = [bytes(MAX_PART_BYTES)] * 15 + [bytes(MAX_PART_BYTES - 2000)]
            other = asyncio.ensure_future(node.call(conn, "a.coroutine"))
            with pytest.raises(LocalProtocolError, match="bytes in all, the limit is"):
                await node.call(conn, "a.coroutine", *parts, metadata={"a": "x" * 8000})
            return await other

    assert asyncio.run(ask()) == []


@pytest.mark.parametrize("said", [b"[1]", b"{", b'{"a": 1}', b"[" * 8000, b"\xff"])
def test_metadata_when_it_is_none_is_refused_where_the_handler_looks(telling, raw, said):
    dealer, tag = raw(telling.address), make_tag(1, WAIT_S, 0, said)
    dealer.send_multipart([b"a.thread", tag])
    code, word, echoed, text = dealer.recv_multipart()
    assert (code, word, echoed, text) == (
        b"WRONG_ARGUMENT",
        b"REPLY",
        tag[:TAG_BYTES],
        b"metadata is no JSON object of texts",
    )


def test_metadata_when_the_server_does_not_know_it_is_part_of_what_it_echoes(tmp_path):
    """As OxenMQ does: to it a tag is any octets."""
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/r")
        node = RpcNode()
        node.start()
        try:
            conn = node.connect_remote(f"ipc://{tmp_path}/r", lambda _: None, lambda *_: None)
            route, hello = router.recv_multipart()
            router.send_multipart([route, b"HELLO"])
            futures = [node.request_future(conn, "x.y", metadata=METADATA) for _ in range(2)]
            for frames in ([b"REPLY"], [b"UNKNOWN_THING", b"REPLY"]):
                route, _, tag = router.recv_multipart()
                assert len(tag) > TAG_BYTES
                router.send_multipart([route, *frames, tag])
            assert (hello, futures[0].get(WAIT_S)) == (b"HI", [])
            with pytest.raises(RpcError, match="UNKNOWN_THING"):
                futures[1].get(WAIT_S)
        finally:
            node.stop()


# --- what wraps calls --------------------------------------------------------------------------------------------


def test_caller_middleware_when_added_is_around_calls_and_streams_the_first_outermost(play, server):
    seen = []

    def noting(name):
        def wrap(make):
            async def call(asked):
                seen.append(f"{name} before {asked.command}")
                found = await make(asked)
                seen.append(f"{name} after")
                return found

            async def stream(asked):
                seen.append(f"{name} before {asked.command}")
                async for item in make(asked):
                    yield [name.encode(), *item]

            return call if inspect.iscoroutinefunction(make) else stream

        return wrap

    def prepare(node):
        node.add_caller_middleware(noting("outer"))
        node.add_caller_middleware(noting("inner"))

    async def ask(node, conn):
        found = await node.call(conn, "a.total", items=Made(3), returns=int)
        with pytest.raises(LocalProtocolError, match="add_caller_middleware"):
            node.add_caller_middleware(noting("late"))
        pool = node.pool(conn)
        pooled = await pool.call("a.ignores", returns=str)
        pool.close()
        return found, [item async for item in node.stream(conn, "a.double", items=Made(1))], pooled

    assert play(ask, prepare) == (3, [[b"outer", b"inner", b"0", b"0"]], "no matter")
    once = ["outer before {}", "inner before {}", "inner after", "outer after"]
    streamed = ["outer before a.double", "inner before a.double"]
    calls = [[line.format(command) for line in once] for command in ("a.total", "a.ignores")]
    assert sorted(seen) == sorted([*calls[0], *streamed, *calls[1]])
    assert seen[:4] == calls[0]


def test_caller_middleware_when_it_tries_again_or_changes_the_call_does_so(telling):
    def wrap(make):
        async def call(asked):
            asked.metadata["hops"] = "2"
            wanted = asked.command
            asked.command = "a.nothing"
            with pytest.raises(RpcError, match="UNKNOWNCOMMAND"):
                await make(asked)
            asked.command = wanted
            return await make(asked)

        return call if inspect.iscoroutinefunction(make) else make

    async def ask():
        node = RpcNode()
        node.add_caller_middleware(wrap)
        async with node:
            return await node.call(await node.connect(telling.address), "a.thread")

    assert asyncio.run(ask()) == [b"hops=2"]


def plain(asked):
    return asked


@pytest.mark.parametrize("made", [plain, None])
def test_caller_middleware_when_it_makes_another_kind_is_an_error(made):
    with pytest.raises(LocalProtocolError, match="has made a plain of a coroutine"):
        RpcNode().add_caller_middleware(lambda make: made)
