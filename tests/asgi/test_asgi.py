"""WebSockets of a FastAPI application under uvicorn: handed over, left with uvicorn, refused, and ended."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
from certificate_kit import Pair
from connection_kit import WAIT_S, wait_until
from fastapi import Depends, FastAPI, Request, WebSocket, WebSocketException
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect, unix_connect
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, TextMessage
from wsproto.events import Request as Handshake
from wsproto.frame_protocol import FrameProtocol

from flowctl.asgi import Bridge, WebSocketProtocol
from flowctl.core.flow.limits import Limits
from flowctl.core.loop import lingering
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.server.bans import Ban, BanList
from flowctl.errors import ConfigError, FlowctlError, LocalProtocolError
from flowctl.reasons import CloseReason
from flowctl.websocket import Topic, WebSocketSession

STACKS = (("asyncio", "h11"), ("uvloop", "httptools"))
"""The loop and the HTTP protocol of uvicorn: what it uses alone, and with its extra ``standard``."""
FREE = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)
LARGE = 200_000
DESCRIPTORS = Path("/proc/self/fd")


class Echo(WebSocketSession):
    """Answers with what it is told, and says first for whom it is."""

    def __init__(self, user="") -> None:
        super().__init__()
        self.user = user
        self.got, self.ends = [], []

    def accepted(self) -> None:
        self.send_message(f"hello {self.user} of {self.connection.peer[0]}")

    def received_message(self, message) -> None:
        self.got.append(message)
        self.send_message(message)

    def closed(self, reason, details) -> None:
        self.ends.append(reason)


class Follower(Echo):
    def __init__(self, topic) -> None:
        super().__init__()
        self.topic = topic

    def accepted(self) -> None:
        self.follow(self.topic)


class Cookie:
    """A middleware that adds a header to what accepts a WebSocket."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        async def with_cookie(message):
            if message["type"] == "websocket.accept":
                message["headers"] = [*message["headers"], (b"set-cookie", b"seen=1")]
            await send(message)

        await self.app(scope, receive, with_cookie if scope["type"] == "websocket" else send)


class Shop:
    """An application, and what its tests look at."""

    def __init__(self, **settings) -> None:
        self.bridge = Bridge(**{"admission": FREE, **settings})
        self.sessions, self.returned, self.raised, self.freed = [], [], [], []
        self.waiting, self.gate = threading.Event(), threading.Event()
        self.topic = Topic("prices")
        self.app = FastAPI(lifespan=self.bridge.lifespan)
        self.app.add_middleware(Cookie)

        async def current_user(websocket: WebSocket):
            user = websocket.query_params.get("user")
            if user is None:
                raise WebSocketException(1008)
            yield user
            self.freed.append(user)

        @self.app.websocket("/echo")
        async def echo(websocket: WebSocket, user: str = Depends(current_user)):
            self.sessions.append(Echo(user))
            spoken = websocket.scope["subprotocols"][:1]
            connection = await self.bridge.hand_over(
                websocket, self.sessions[-1], subprotocol=next(iter(spoken), None), headers=[(b"x-shop", b"open")]
            )
            self.returned.append(connection)

        @self.app.websocket("/prices")
        async def prices(websocket: WebSocket):
            self.sessions.append(Follower(self.topic))
            await self.bridge.hand_over(websocket, self.sessions[-1])

        @self.app.websocket("/plain")
        async def plain(websocket: WebSocket):
            await self.wait_at_gate(websocket)
            await websocket.accept()
            async for message in websocket.iter_text():
                await websocket.send_text(message.upper())

        @self.app.websocket("/slow")
        async def slow(websocket: WebSocket):
            await self.wait_at_gate(websocket)
            self.sessions.append(Echo())
            await self.bridge.hand_over(websocket, self.sessions[-1])

    async def wait_at_gate(self, websocket) -> None:
        self.waiting.set()
        if "wait" in websocket.query_params:
            await asyncio.to_thread(self.gate.wait, WAIT_S)

    def route(self, handler) -> None:
        """Add a route that runs `handler`, and keep what it raises."""

        @self.app.websocket("/try")
        async def attempt(websocket: WebSocket):
            try:
                await handler(websocket)
            except FlowctlError as error:
                self.raised.append(error)
                raise WebSocketException(1008) from error


class Host:
    """uvicorn with an application, on a thread."""

    def __init__(self, app, stack, **settings) -> None:
        loop, http = stack
        settings = {"host": "127.0.0.1", "port": 0, "ws": "flowctl.asgi:WebSocketProtocol", **settings}
        self.server = uvicorn.Server(uvicorn.Config(app, loop=loop, http=http, log_config=None, **settings))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started, "the start of uvicorn")
        self.address = self.server.servers[0].sockets[0].getsockname()

    def url(self, path) -> str:
        return f"ws://127.0.0.1:{self.address[1]}{path}"

    @property
    def idle(self) -> bool:
        """Whether uvicorn knows of no connection and no task."""
        state = self.server.server_state
        return not state.connections and not state.tasks

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@contextmanager
def hosting(app, stack=STACKS[1], **settings):
    host = Host(app, stack, **settings)
    try:
        yield host
    finally:
        host.stop()


@pytest.fixture(params=STACKS, ids="-".join)
def stack(request):
    return request.param


class Raw:
    """A client that reads and writes when a test says so."""

    def __init__(self, host, path, *, receive_buffer_bytes=0) -> None:
        self.sock = socket.socket()
        if receive_buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(host.address)
        self.conn = WSConnection(ConnectionType.CLIENT)
        self.sock.sendall(self.conn.send(Handshake(host="localhost", target=path)))
        self.events = []

    def send_early(self, *messages) -> None:
        """Send messages without an answer to the handshake."""
        frames = FrameProtocol(client=True, extensions=[])
        self.sock.sendall(b"".join(frames.send_data(message, fin=True) for message in messages))

    def until(self, kind):
        """Return the next event of a kind; those before it are dropped."""
        while True:
            while self.events:
                event = self.events.pop(0)
                if isinstance(event, kind):
                    return event
            data = self.sock.recv(65536)
            assert data, "the server ended the connection"
            self.conn.receive_data(data)
            self.events += self.conn.events()

    def until_message(self) -> str:
        """Return the next text, whole."""
        text = ""
        while True:
            event = self.until(TextMessage)
            text += event.data
            if event.message_finished:
                return text

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.sock.close()


def test_hand_over_when_the_user_is_known_serves_the_socket_without_uvicorn(stack):
    """Routing, dependency, middleware and trusted proxy are the application's; the rest is flowctl's."""
    shop = Shop()
    with hosting(shop.app, stack) as host:
        headers = {"X-Forwarded-For": "192.0.2.7"}
        with connect(
            host.url("/echo?user=ann"), subprotocols=["v2", "v1"], additional_headers=headers, compression="deflate"
        ) as client:
            assert client.recv(WAIT_S) == "hello ann of 192.0.2.7"
            answer = client.response.headers
            assert (client.subprotocol, answer["X-Shop"], answer["Set-Cookie"]) == ("v2", "open", "seen=1")
            assert answer["Server"] == "uvicorn"
            wait_until(lambda: host.idle and shop.freed == ["ann"], "the end of the request")
            for message in ("again", b"octets", "x" * LARGE):
                client.send(message)
                assert client.recv(WAIT_S) == message
            (connection,) = shop.bridge.server.connections()
            assert shop.returned == [connection]
            assert shop.bridge.server.statistics().accepted == 1
        wait_until(lambda: shop.sessions[0].ends == [CloseReason.PEER_CLOSED])


def test_hand_over_when_a_proxy_lets_any_address_through_keeps_it_short_and_printable(stack):
    """A client's own X-Forwarded-For may hold what a terminal acts on: here the C1 character that begins a colour."""
    shop = Shop()
    headers = {"X-Forwarded-For": "\x9b31m" + "a" * 3000}
    with hosting(shop.app, stack) as host:
        with connect(host.url("/echo?user=ann"), additional_headers=headers) as client:
            said = client.recv(WAIT_S)
        assert "31maaaa" in said, "it was not taken from the header"
        assert said.isprintable()
        assert len(said) < 100


def test_hand_over_when_the_user_is_unknown_is_never_asked_for(stack):
    shop = Shop()
    with hosting(shop.app, stack) as host:
        with pytest.raises(InvalidStatus) as refused:
            connect(host.url("/echo"))
        assert refused.value.response.status_code == 403
        wait_until(lambda: host.idle)
        assert shop.sessions == []


@pytest.mark.parametrize("last", ["call", "answer", "refusal"])
def test_hand_over_when_the_client_has_gone_meanwhile_returns_none_and_blames_nobody(stack, last, caplog):
    """Before the call, on the way of the answer through a middleware, or where it would have been refused."""
    caplog.set_level("INFO")
    shop, returned = Shop(), []

    async def hand_over(websocket):
        async def send(message):
            await shop.wait_at_gate(websocket)
            await websocket.send(message)

        if last == "call":
            await shop.wait_at_gate(websocket)
        if last == "refusal":
            shop.bridge.server.stop(0.0)
        through = WebSocket(websocket.scope, websocket.receive, websocket.send if last == "call" else send)
        returned.append(await shop.bridge.hand_over(through, Echo()))

    shop.route(hand_over)
    with hosting(shop.app, stack) as host:
        with Raw(host, "/try?wait=1"):
            assert shop.waiting.wait(WAIT_S)
            (protocol,) = host.server.server_state.connections
        wait_until(protocol.transport.is_closing, "the end of the connection")
        shop.gate.set()
        wait_until(lambda: host.idle and returned)
        assert (returned, shop.raised) == ([None], [])
        assert [item.getMessage() for item in caplog.records if item.levelname in {"WARNING", "ERROR"}] == []
        assert sum("gone before it was handed over" in item.getMessage() for item in caplog.records) == 1
        if last == "refusal":
            return
        assert shop.bridge.server.statistics().accepted == 0
        with connect(host.url("/echo?user=ann")) as client:
            assert client.recv(WAIT_S).startswith("hello ann")


@pytest.mark.parametrize("path", ["/slow", "/plain"])
def test_frames_when_sent_before_the_answer_reach_who_answers(stack, path):
    """A client that does not wait for the answer loses nothing, neither with flowctl nor with the application."""
    shop = Shop()
    with hosting(shop.app, stack) as host, Raw(host, f"{path}?wait=1") as client:
        assert shop.waiting.wait(WAIT_S)
        messages = ["a" * LARGE, "b", "c" * LARGE]
        sender = threading.Thread(target=client.send_early, args=messages)
        sender.start()
        (protocol,) = host.server.server_state.connections
        wait_until(lambda: protocol._early, "a part of them")
        shop.gate.set()
        client.until(AcceptConnection)
        if path == "/slow":
            assert client.until_message().startswith("hello")
        expected = messages if path == "/slow" else [message.upper() for message in messages]
        assert [client.until_message() for _ in messages] == expected
        sender.join(WAIT_S)


def test_session_when_it_refuses_the_request_answers_for_itself(stack):
    """The session sees the request as on a listener of its own: a page of another host may not connect."""
    shop = Shop()
    with hosting(shop.app, stack) as host:
        with pytest.raises(InvalidStatus) as refused:
            connect(host.url("/echo?user=ann"), origin="https://elsewhere.example")
        assert refused.value.response.status_code == 403
        wait_until(lambda: shop.sessions[0].ends == [CloseReason.AUTH_REFUSED])
        with connect(host.url("/echo?user=ann"), origin=f"http://127.0.0.1:{host.address[1]}") as client:
            assert client.recv(WAIT_S).startswith("hello ann")


def test_websocket_when_not_handed_over_is_served_by_uvicorn(stack):
    shop = Shop()
    with hosting(shop.app, stack) as host:
        with connect(host.url("/plain")) as client:
            client.send("as ever")
            assert client.recv(WAIT_S) == "AS EVER"
            assert not host.idle
        wait_until(lambda: host.idle)


def test_topic_when_a_client_stalls_ends_it_with_the_reason_and_disturbs_no_other(stack, monkeypatch):
    """Newcomers get the newest value of each key first; who does not read is ended at the hard limit, and told so."""
    monkeypatch.setattr(lingering, "LINGER_QUIET_S", WAIT_S)  # this machine may be slow to read what it was told
    shop = Shop(limits=Limits.parse("100K,0", "200K,0"), options=SocketOptions(send_buffer_bytes=16 * 1024))
    for price in (1, 2):
        for name in ("EUR", "USD"):
            shop.topic.publish(json.dumps({name: price}), key=name)
    with hosting(shop.app, stack) as host, Raw(host, "/prices", receive_buffer_bytes=4096) as stalled:
        stalled.until(AcceptConnection)
        with connect(host.url("/prices"), max_size=None) as client:
            values = [json.loads(client.recv(WAIT_S)) for _ in range(2)]
            assert values == [{"EUR": 2}, {"USD": 2}]
            number = 0
            while not any(session.ends for session in shop.sessions):
                number += 1
                assert number < 1000
                shop.topic.publish(f"{number}".ljust(4000))
                assert int(client.recv(WAIT_S)) == number
            ended, served = sorted(shop.sessions, key=lambda session: not session.ends)
            assert (ended.ends, served.ends) == ([CloseReason.HARD_LIMIT], [])
            close = stalled.until(CloseConnection)
            assert (close.code, "slow" in close.reason) == (1013, True)
            shop.topic.publish("still there")
            assert client.recv(WAIT_S) == "still there"


def test_lifespan_when_it_ends_tells_clients_that_the_server_goes_away(stack):
    """Sessions that were handed over hold the end of the application up by nothing; it can begin again."""
    shop = Shop()
    for _ in range(2):  # an application's lifespan may begin again
        shop.sessions.clear()
        host = Host(shop.app, stack)
        with connect(host.url("/echo?user=ann")) as client:
            client.recv(WAIT_S)
            host.stop()
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(WAIT_S)
            assert closed.value.rcvd.code == 1001
        assert shop.sessions[0].ends == [CloseReason.SHUTDOWN]
        with pytest.raises(LocalProtocolError, match="not running"):
            shop.bridge.server.statistics()


def test_sockets_when_five_hundred_are_handed_over_leave_neither_descriptor_nor_task(stack):
    shop = Shop()
    with hosting(shop.app, stack) as host:

        def crowd() -> None:
            with ExitStack() as clients:
                for _ in range(100):
                    clients.enter_context(Raw(host, "/echo?user=ann")).until(TextMessage)
                wait_until(lambda: host.idle, "the end of the requests")
                assert len(shop.bridge.server.connections()) == 100
                gc.collect()
                assert not any(isinstance(found, WebSocketProtocol) for found in gc.get_objects())
            wait_until(lambda: not shop.bridge.server.connections() and not shop.bridge.server.admission.connections)

        crowd()
        gc.collect()
        before = len(list(DESCRIPTORS.iterdir()))
        for _ in range(4):
            crowd()
        gc.collect()
        wait_until(lambda: len(list(DESCRIPTORS.iterdir())) <= before, "the end of the last descriptor")
        assert shop.bridge.server.statistics().accepted == 500
        assert not host.server.server_state.tasks


@pytest.mark.parametrize(
    ("admission", "bans", "status"),
    [
        (AdmissionLimits(connections_per_address=1, new_per_address_and_s=0.0), (), 429),
        (AdmissionLimits(connections=1, connections_per_address=0, new_per_address_and_s=0.0), (), 503),
        (FREE, (Ban(cidr="192.0.2.0/24", expires=None),), 403),
    ],
    ids=["address", "all", "banned"],
)
def test_hand_over_when_admission_refuses_says_so_and_goes_on(stack, admission, bans, status):
    """Limits and bans count by the client that a trusted proxy names, and on_refused is told."""
    refused = []
    shop = Shop(admission=admission, on_refused=lambda peer, error: refused.append(peer[0]))
    headers = {"X-Forwarded-For": "192.0.2.7"}
    with hosting(shop.app, stack) as host, ExitStack() as clients:
        if bans:
            shop.bridge.server.set_bans(BanList(bans))
        else:
            clients.enter_context(connect(host.url("/echo?user=ann"), additional_headers=headers))
        with pytest.raises(InvalidStatus) as answer:
            connect(host.url("/echo?user=bob"), additional_headers=headers)
        assert (answer.value.response.status_code, refused) == (status, ["192.0.2.7"])
        wait_until(lambda: host.idle)
        assert shop.returned[-1] is None
        clients.close()
        wait_until(lambda: not shop.bridge.server.admission.connections)
        with connect(host.url("/echo?user=ann")) as client:
            assert client.recv(WAIT_S).startswith("hello ann")


def test_hand_over_when_it_is_cancelled_may_be_called_again(stack):
    """What it asked for ends with it: it is not the application's next answer that hands the socket over."""
    shop = Shop()

    async def hand_over(websocket):
        async def never(message):
            await asyncio.Event().wait()

        with suppress(TimeoutError):
            through = WebSocket(websocket.scope, websocket.receive, never)
            await asyncio.wait_for(shop.bridge.hand_over(through, Echo("nobody")), 0.01)
        shop.returned.append(await shop.bridge.hand_over(websocket, Echo("ann")))

    shop.route(hand_over)
    with hosting(shop.app, stack) as host, connect(host.url("/try")) as client:
        assert client.recv(WAIT_S).startswith("hello ann")
        assert (len(shop.returned), shop.raised) == (1, [])


async def twice(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo())
    await shop.bridge.hand_over(websocket, Echo())


async def after_accept(shop, websocket):
    await websocket.accept()
    await shop.bridge.hand_over(websocket, Echo())


async def send_after(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo())
    await websocket.send_text("too late")


async def receive_after(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo())
    await websocket.receive_text()


async def with_line_break(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo(), headers=[(b"x-a", b"b\r\nset-cookie: admin=1")])


async def with_handshake_header(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo(), headers=[(b"Sec-WebSocket-Protocol", b"v1")])


async def with_other_subprotocol(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo(), subprotocol="v9")


async def with_class(shop, websocket):
    await shop.bridge.hand_over(websocket, Echo)


async def with_used_session(shop, websocket):
    await shop.bridge.hand_over(websocket, shop.sessions[0])


async def with_idle_bridge(shop, websocket):
    await Bridge().hand_over(websocket, Echo())


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (twice, "handed over before"),
        (after_accept, "accepted, or refused, by the application"),
        (send_after, "neither send nor receive"),
        (receive_after, "neither send nor receive"),
        (with_line_break, "line break"),
        (with_handshake_header, "header of the handshake"),
        (with_other_subprotocol, "'v9', the client offers"),
        (with_class, "must be a new WebSocketSession"),
        (with_used_session, "must be a new WebSocketSession"),
        (with_idle_bridge, "the bridge is not running"),
    ],
)
def test_hand_over_when_called_wrongly_says_what_to_do(handler, words):
    shop = Shop()
    shop.route(lambda websocket: handler(shop, websocket))
    with hosting(shop.app) as host, connect(host.url("/echo?user=ann")) as client:
        client.recv(WAIT_S)
        with suppress(InvalidStatus), connect(host.url("/try")):
            pass
        (error,) = wait_until(lambda: shop.raised, "the error")
        assert isinstance(error, LocalProtocolError)
        assert words in str(error)
        assert error.hint
        wait_until(lambda: host.idle)
        client.send("undisturbed")
        assert client.recv(WAIT_S) == "undisturbed"


def test_hand_over_when_uvicorn_was_not_told_says_how(tmp_path):
    """The same error, with its hint, where the protocol class is another; and one of its own where TLS is uvicorn's."""
    shop = Shop()
    shop.route(lambda websocket: shop.bridge.hand_over(websocket, Echo()))
    pair = Pair(tmp_path)
    context = ssl.create_default_context(cafile=pair.authority)
    with hosting(shop.app, ws="wsproto") as host, pytest.raises(InvalidStatus):
        connect(host.url("/try"))
    with hosting(shop.app, ssl_certfile=str(pair.certificate), ssl_keyfile=str(pair.key)) as host:
        place = host.url("/try").removeprefix("ws://").partition("/")[0]
        asking = http.client.HTTPSConnection(place, context=context, timeout=WAIT_S)
        key = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        asking.request("GET", "/try", headers={"Upgrade": "websocket", "Connection": "Upgrade"} | key)
        status = asking.getresponse().status
        asking.close()
        assert status == 403  # as uvicorn answers where the application accepts nothing
    assert [type(error) for error in shop.raised] == [ConfigError, ConfigError]
    assert ["--ws flowctl.asgi:WebSocketProtocol" in shop.raised[0].hint, "TLS" in str(shop.raised[1])] == [True, True]


def test_hand_over_when_the_request_is_plain_http_says_so():
    bridge = Bridge()
    app = FastAPI(lifespan=bridge.lifespan)
    raised = []

    @app.get("/")
    async def page(request: Request) -> None:
        try:
            await bridge.hand_over(request, Echo())
        except LocalProtocolError as error:
            raised.append(str(error))

    with hosting(app) as host, socket.create_connection(host.address, WAIT_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    assert raised == ["hand_over was called for a connection of type 'http'"]


def test_hand_over_when_uvicorn_listens_on_a_unix_socket_serves_it(stack, tmp_path):
    shop = Shop()
    path = tmp_path / "web"
    host = Host(shop.app, stack, host=None, port=None, uds=str(path))
    try:
        with unix_connect(str(path), uri="ws://localhost/echo?user=ann") as client:
            assert client.recv(WAIT_S) == "hello ann of local"
    finally:
        host.stop()


def test_document_when_its_program_runs_does_what_it_says():
    page = (Path(__file__).parents[2] / "docs/how-to/fastapi.md").read_text()
    program = {}
    exec(page.split("```python\n")[1].split("```")[0], program)
    with hosting(program["app"]) as host, connect(host.url("/prices?token=ann")) as client:
        for price in ("1.5", "2.5"):
            with socket.create_connection(host.address, WAIT_S) as sock:
                sock.sendall(f"POST /prices/EUR?price={price} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
            assert json.loads(client.recv(WAIT_S)) == {"EUR": float(price)}
        client.send("hi")
        assert client.recv(WAIT_S) == "ann, you said hi"
        with connect(host.url("/prices?token=bob")) as newcomer:
            assert json.loads(newcomer.recv(WAIT_S)) == {"EUR": 2.5}
        with pytest.raises(InvalidStatus):
            connect(host.url("/prices"))


WORKER = """
import os
from fastapi import FastAPI, WebSocket
from flowctl import AdmissionLimits
from flowctl.asgi import Bridge
from flowctl.websocket import WebSocketSession

class Session(WebSocketSession):
    def accepted(self):
        self.send_message(str(os.getpid()))

bridge = Bridge(admission=AdmissionLimits(new_per_address_and_s=0.0))
app = FastAPI(lifespan=bridge.lifespan)

@app.websocket("/")
async def socket(websocket: WebSocket):
    await bridge.hand_over(websocket, Session())
"""


def test_workers_when_there_are_several_each_serve_what_they_accepted(tmp_path):
    (tmp_path / "shop.py").write_text(WORKER)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "shop:app", "--fd", str(listener.fileno()), "--workers", "2"]
        process = subprocess.Popen(
            [*command, "--ws", "flowctl.asgi:WebSocketProtocol", "--no-access-log"],
            cwd=tmp_path,
            pass_fds=[listener.fileno()],
        )
    try:
        clients = {}  # by worker

        def met_both() -> bool:
            client = connect(f"ws://127.0.0.1:{port}/", open_timeout=WAIT_S)
            clients.setdefault(int(client.recv(WAIT_S)), client)
            if client not in clients.values():
                client.close()
            return len(clients) == 2

        wait_until(met_both, "an answer of both workers")
        process.terminate()
        assert process.wait(WAIT_S) == 0
        for client in clients.values():
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(WAIT_S)
            assert closed.value.rcvd.code == 1001
    finally:
        process.kill()
        process.wait()


def test_asgi_when_uvicorn_is_missing_names_the_extra():
    code = "import sys; sys.modules['uvicorn'] = None\nimport flowctl.asgi"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "flowctl.asgi needs the extra 'asgi'" in done.stderr
