"""Connections to the admin surface that send no request, too many, or read no answer, and what they leave to others."""

from __future__ import annotations

import contextlib
import socket
import ssl
from types import SimpleNamespace

import httpx
import pytest
from certificate_kit import Pair
from e2e_kit import open_live_server, wait_until
from loopback_kit import FAMILY, LOOPBACK, loopback, many_addresses

from flowctl.live.admin import protocol
from flowctl.live.admin.guard import HEAD_BYTES
from flowctl.live.admin.listener import admin_of

NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("tls"))


class Speaking:
    """Connects with TLS or without."""

    def __init__(self, pair):
        self.pair, self.trust = pair, pair and pair.client()
        self.settings = {}
        if pair is not None:
            self.settings = {"tls_certificate": pair.certificate, "tls_key": pair.key}
        self.admin = loopback() if pair is None else f"tls://{loopback()}"

    def connect(self, address, timeout=20, source_address=None):
        sock = socket.create_connection(address, timeout, source_address)
        return sock if self.trust is None else self.trust.wrap_socket(sock, server_hostname=LOOPBACK)

    def get(self, url):
        return httpx.get(url, verify=self.verify)

    @property
    def verify(self):
        return True if self.trust is None else self.trust


@pytest.fixture(params=["plain", "tls"])
def speak(request, pair):
    return Speaking(None if request.param == "plain" else pair)


@pytest.fixture
def started():
    """Return the admin surfaces that were started."""
    return []


@pytest.fixture
def server_of(started):
    """Return a function that returns what uvicorn knows of the surface."""
    return lambda: started[0]._server.server_state


@pytest.fixture
def admin(started, speak):
    """Return a function that starts a server with an admin surface, which tells its address."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            server = stack.enter_context(open_live_server(admin=speak.admin, **speak.settings, **settings))
            started.append(listener := admin_of(server))
            stack.callback(listener.stop, 5.0)
            listener.start()
            port = int(listener.bound[0].rpartition(":")[2].strip("/"))
            return listener.bound[0], (LOOPBACK, port)

        yield start


def closed(sock):
    """Return whether the other end has closed a connection."""
    try:
        return sock.recv(1000) == b""
    except (ConnectionError, ssl.SSLError):
        return True


def test_head_when_it_never_comes_whole_is_given_up(admin, monkeypatch, speak):
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    base, address = admin()
    with contextlib.ExitStack() as stack:
        silent, slow = (stack.enter_context(speak.connect(address, timeout=20)) for _ in range(2))
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert closed(silent)
        assert closed(slow)
    assert speak.get(f"{base}healthz").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: example.com\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"POST /api/v1/kick HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1e3\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /%2e%2e/%2e%2e/listener.py HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
)
def test_head_when_it_is_malformed_or_leaves_the_folder_is_refused(admin, head, speak):
    base, address = admin()
    with speak.connect(address, timeout=20) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
        try:
            said = sock.recv(1000)
        except ConnectionError:
            said = b""
    assert said == b"" or int(said.split()[1]) >= 400
    assert speak.get(f"{base}healthz").status_code == 200


TOKEN = "k3tF2hD0mYw8cQz1"


@pytest.mark.parametrize("sources", [[LOOPBACK], pytest.param(["127.0.9.1", "127.0.9.2"], marks=many_addresses)])
def test_strangers_when_they_hold_all_places_do_not_keep_the_operator_out(admin, monkeypatch, tmp_path, sources, speak):
    monkeypatch.setattr(protocol, "MOST_STRANGERS", 4)
    monkeypatch.setattr(protocol, "MOST_PER_ADDRESS", 3)
    (tmp_path / "tokens").write_text(TOKEN)
    base, address = admin(admin_token_file=tmp_path / "tokens")
    with (
        httpx.Client(base_url=base, verify=speak.verify, headers={"authorization": f"Bearer {TOKEN}"}) as operator,
        contextlib.ExitStack() as stack,
    ):

        def half_sent(source):
            sock = stack.enter_context(speak.connect(address, 20, source_address=(source, 0)))
            sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
            return sock

        with operator.stream("GET", "/api/v1/events") as events:
            held = [half_sent(source) for _ in range(5) for source in sources]
            assert closed(held[0])
            assert operator.get("/api/v1/stats").status_code == 200
            assert speak.get(f"{base}healthz").status_code == 200
            assert next(events.iter_lines()) == "retry: 2000"


@many_addresses
def test_strangers_when_each_has_an_address_of_its_own_give_way_by_age(admin, monkeypatch, speak):
    monkeypatch.setattr(protocol, "MOST_STRANGERS", 4)
    monkeypatch.setattr(protocol, "HEAD_S", 600.0)
    _, address = admin()
    with contextlib.ExitStack() as stack:
        held = []
        for number in range(1, 25):
            sock = speak.connect(address, 5, source_address=(f"127.0.9.{number}", 0))
            held.append(stack.enter_context(sock))
            if len(held) > 4:
                with held.pop(0) as oldest:
                    assert closed(oldest)


def test_connections_with_a_token_when_there_are_too_many_are_of_whoever_has_the_most(
    admin, monkeypatch, tmp_path, speak
):
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", 3)
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{TOKEN}-basic basic")
    base, _ = admin(admin_token_file=tmp_path / "tokens")
    with contextlib.ExitStack() as stack:

        def listen(token):
            headers = {"authorization": f"Bearer {token}"}
            response = stack.enter_context(
                stack.enter_context(httpx.Client(base_url=base, verify=speak.verify, headers=headers)).stream(
                    "GET", "/api/v1/events"
                )
            )
            lines = response.iter_lines()
            assert next(lines) == "retry: 2000"
            return lines

        full, *basic = [listen(token) for token in (TOKEN, f"{TOKEN}-basic", f"{TOKEN}-basic")]
        with httpx.Client(base_url=base, verify=speak.verify, headers={"authorization": f"Bearer {TOKEN}"}) as operator:
            assert operator.get("/api/v1/stats").status_code == 200
        with pytest.raises(httpx.HTTPError):
            list(basic[0])
        assert next(full) == ": flowctl"


def test_requests_when_sent_before_they_are_answered_stay_in_the_kernel(admin, server_of, speak):
    """However many requests are sent ahead, and whatever they ask for, what is kept of them is one read."""
    _, address = admin()
    most = 0
    with speak.connect(address, timeout=20) as sock:
        sock.setblocking(False)
        ahead = memoryview(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50_000)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 40:
            with contextlib.suppress(*NOT_NOW):
                ahead = ahead[sock.send(ahead) :]
            with contextlib.suppress(*NOT_NOW):
                answers += sock.recv(1 << 20)
            for item in list(server_of().connections):
                most = max(most, len(item.conn.trailing_data[0]))
    assert 0 < most <= 2 * HEAD_BYTES


def test_answers_when_nobody_reads_them_are_given_up(admin, server_of, monkeypatch, speak):
    """One that asks for more than the kernel takes, and reads nothing, is closed in time, and waited for no longer."""
    monkeypatch.setattr(protocol, "SEND_S", 0.05)
    _, address = admin()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(FAMILY))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(address)
        if speak.trust is not None:
            sock = stack.enter_context(speak.trust.wrap_socket(sock, server_hostname=LOOPBACK))
        sock.sendall(b"GET /mpegts.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 60)
        assert sock.recv(1)
        wait_until(lambda: not server_of().connections, "the end of the connection")


def test_loop_when_it_has_worked_rests_three_times_as_long(monkeypatch):
    """The media share the interpreter's lock with it, so a flood of requests has a quarter of a core."""
    clock, rests = [0.0], []
    fake = SimpleNamespace(thread_time=lambda: clock[0], sleep=rests.append)
    monkeypatch.setattr(protocol, "time", fake)
    with protocol._Resting() as selector:
        for clock[0] in (0.0005, 0.004, 0.0045, 1.0):
            selector.select(0)
    assert rests == [pytest.approx(0.012), 0.1]
