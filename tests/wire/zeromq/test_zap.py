"""Admission of connections: the rule by frames, and a handler that real peers of ZeroMQ come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from flowctl.pollgroup import LoopFactory, PollGroup
from flowctl.wire.zeromq.curve import KeyPair
from flowctl.wire.zeromq.socket import new_context
from flowctl.wire.zeromq.zap import ZapHandler, ZapRefusal, ZapRequest, answer, bind_zap, plain_address, zap_domain

WAIT_S = 20.0
KEY = bytes(range(32))
NULL = [b"1.0", b"id", b"i0e", b"127.0.0.1", b"", b"NULL"]
CURVE = [b"1.0", b"id", b"i12e", b"::1", b"", b"CURVE", KEY]


def let_in(request: ZapRequest) -> Mapping[str, str]:
    return {"X-AuthLevel": "basic"}


def test_request_when_null_is_answered_with_the_metadata_and_no_user():
    """The reply has the six frames of RFC 27; a property has two lengths, of one and four octets."""
    metadata = b"\x0bX-AuthLevel\x00\x00\x00\x05basic"
    assert [b"1.0", b"id", b"200", b"", b"", metadata] == answer(NULL, let_in)


def test_request_when_curve_names_the_key_in_hex_as_the_user():
    seen: list[ZapRequest] = []
    reply = answer(CURVE, lambda request: seen.append(request) or {})
    assert [b"1.0", b"id", b"200", b"", KEY.hex().encode(), b""] == reply
    assert [ZapRequest(12, "::1", KEY)] == seen


@pytest.mark.parametrize(("refusal", "status"), [(ZapRefusal.DENIED, b"400"), (ZapRefusal.TRY_LATER, b"300")])
def test_request_when_refused_has_the_status_and_no_user(refusal, status):
    reply = answer(CURVE, lambda request: refusal)
    assert (b"1.0", b"id", status, b"", b"") == (*reply[:3], *reply[4:])


@pytest.mark.parametrize(
    "frames",
    [
        *(
            [],
            [b"1.0"],
            NULL[:5],
            [b"2.0", *NULL[1:]],
            [*NULL, b"more"],
            CURVE[:6],
            [*CURVE, b""],
            [*CURVE[:6], KEY[:31]],
        ),
        *([*NULL[:5], b"PLAIN", b"user", b"password"], [*NULL[:5], b"GSSAPI", b"x"], [*NULL[:5], b""]),
        *(
            [*NULL[:2], domain, *NULL[3:]]
            for domain in (b"", b"0", b"i-1e", b"i01e", b"i0e ", b"i9999999999e", b"ie", b"i\xff")
        ),
        [*NULL[:3], b"1" * 256, *NULL[4:]],
    ],
)
def test_request_when_malformed_is_refused_without_asking(frames):
    def never(request: ZapRequest) -> Mapping[str, str]:
        raise AssertionError(request)

    reply = answer(frames, never)
    assert (len(reply), reply[0], reply[2], reply[4], reply[5]) == (6, b"1.0", b"500", b"", b"")
    assert not any(frame in reply[3] for frame in frames[2:] if len(frame) > 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([*NULL, *CURVE]), max_size=9))
def test_request_when_of_any_frames_has_a_reply_of_six(frames):
    reply = answer(frames, let_in)
    assert len(reply) == 6
    if reply[2] == b"200":
        assert (frames[0], frames[5] in (b"NULL", b"CURVE")) == (b"1.0", True)


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        *(("::ffff:192.168.0.1", "192.168.0.1"), ("::FFFF:1.2.3.4", "1.2.3.4"), ("::ffff:abcd:1", "::ffff:abcd:1")),
        *(("::1", "::1"), ("10.0.0.1", "10.0.0.1"), ("", ""), ("::ffff:1.2.3.4\n", "::ffff:1.2.3.4\n")),
    ],
)
def test_address_when_ipv4_came_by_ipv6_is_shown_as_ipv4(address, plain):
    assert plain == plain_address(address)


@pytest.fixture
def group(loop_factory: LoopFactory) -> Iterator[PollGroup]:
    group = PollGroup("zap", loop_factory=loop_factory, on_error=lambda where, error: None)
    group.start()
    yield group
    group.stop()


class Scene:
    def __init__(self, group: PollGroup, admit, handshake_ms: int) -> None:
        self.group, self.context, self.keys = group, new_context(), KeyPair.generate()
        raw = bind_zap(self.context)
        self.handler = self.on(lambda: ZapHandler(group, raw, admit))
        self.clients: list[tuple[zmq.Context, zmq.Socket[bytes]]] = []
        self.ports: list[int] = []
        self.routers: list[zmq.Socket[bytes]] = []
        for number in (0, 1):
            router = self.context.socket(zmq.ROUTER)
            router.zap_domain = zap_domain(number)
            router.rcvtimeo = int(WAIT_S * 1000)
            router.handshake_ivl = handshake_ms
            if number:
                router.curve_server = True
                router.curve_secretkey, router.curve_publickey = self.keys.secret, self.keys.public
            self.ports.append(router.bind_to_random_port("tcp://127.0.0.1"))
            self.routers.append(router)

    def on(self, call: Callable[[], object]):
        done: Future = Future()
        self.group.call_soon(lambda: done.set_result(call()))
        return done.result(WAIT_S)

    def client(self, listener: int, keys: KeyPair | None = None) -> zmq.Socket[bytes]:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        if keys is not None:
            dealer.curve_serverkey = self.keys.public
            dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
        self.clients.append((context, dealer))
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        monitor.rcvtimeo = int(WAIT_S * 1000)
        dealer.connect(f"tcp://127.0.0.1:{self.ports[listener]}")
        # A peer that was denied before this line has nobody left to send to: a send that waits would wait for ever.
        with suppress(zmq.Again):
            dealer.send(b"hello", zmq.DONTWAIT)
        return dealer

    def close(self) -> None:
        for context, dealer in self.clients:
            monitor = dealer.get_monitor_socket()
            dealer.disable_monitor()
            monitor.close(linger=0)
            context.destroy(linger=0)
        for router in self.routers:
            router.close(linger=0)
        self.on(self.handler.close)
        self.context.term()


@pytest.fixture
def scene(group) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(admit, handshake_ms: int = 20_000) -> Scene:
        made.append(Scene(group, admit, handshake_ms))
        return made[-1]

    yield make
    for item in made:
        item.close()


def read(router: zmq.Socket[bytes]) -> tuple[bytes, zmq.Frame]:
    _, frame = router.recv_multipart(copy=False)
    return frame.bytes, frame


def test_peers_when_let_in_bring_their_metadata_with_each_message(scene):
    requests: list[ZapRequest] = []

    def admit(request: ZapRequest) -> Mapping[str, str]:
        requests.append(request)
        return {"X-AuthLevel": "admin" if request.pubkey else "none", "X-Connection": str(len(requests))}

    here, keys = scene(admit), KeyPair.generate()
    here.client(0)
    text, plain = read(here.routers[0])
    assert (
        text,
        plain.get("X-AuthLevel"),
        plain.get("X-Connection"),
        plain.get("Peer-Address"),
    ) == (b"hello", "none", "1", "127.0.0.1")
    assert plain.get("User-Id") == ""
    here.client(1, keys)
    _, frame = read(here.routers[1])
    assert (keys.public.hex(), "admin", "2") == (
        frame.get("User-Id"),
        frame.get("X-AuthLevel"),
        frame.get("X-Connection"),
    )
    assert [ZapRequest(0, "127.0.0.1", b""), ZapRequest(1, "127.0.0.1", keys.public)] == requests


@pytest.mark.parametrize("listener", [0, 1])
def test_peers_when_denied_are_told_and_nothing_of_them_arrives(scene, listener):
    """The handshake fails with 400, and the message that waited behind it is not delivered (OX-68)."""
    here = scene(lambda request: ZapRefusal.DENIED)
    client = here.client(listener, KeyPair.generate() if listener else None)
    event = recv_monitor_message(client.get_monitor_socket())
    assert (event["event"], event["value"]) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    assert here.routers[listener].poll(0) == 0
    assert here.on(lambda: here.handler.refused_count) == 1


@pytest.mark.parametrize("listener", [0, 1])
def test_peers_when_told_to_try_later_get_in_once_they_may(scene, listener):
    tries: list[int] = []

    def admit(request: ZapRequest) -> Mapping[str, str] | ZapRefusal:
        tries.append(request.listener)
        return ZapRefusal.TRY_LATER if len(tries) < 2 else {}

    here = scene(admit, handshake_ms=200)
    here.client(listener, KeyPair.generate() if listener else None)
    assert read(here.routers[listener])[0] == b"hello"
    assert tries == [listener] * 2


def test_peers_when_the_hook_raises_are_denied_and_others_are_not(scene):
    errors: list[BaseException] = [SystemExit(), ValueError()]

    def admit(request: ZapRequest) -> Mapping[str, str]:
        if errors:
            raise errors.pop()
        return {}

    here = scene(admit)
    for _ in range(2):
        assert recv_monitor_message(here.client(0).get_monitor_socket())["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    here.client(0)
    assert read(here.routers[0])[0] == b"hello"


def test_handler_when_a_second_one_is_made_for_a_context_is_an_error(scene):
    here = scene(let_in)
    with pytest.raises(zmq.ZMQError):
        bind_zap(here.context)
    here.client(0)
    assert read(here.routers[0])[0] == b"hello"


def test_handler_when_a_flood_of_malformed_requests_comes_answers_each(scene):
    here = scene(let_in)
    rogue = here.context.socket(zmq.DEALER)
    rogue.rcvtimeo = int(WAIT_S * 1000)
    rogue.connect("inproc://zeromq.zap.01")
    for _ in range(600):
        rogue.send_multipart([b"", b"1.0", b"x"])
        rogue.send(b"no envelope")
    here.client(0)
    assert read(here.routers[0])[0] == b"hello"
    assert {rogue.recv_multipart()[3] for _ in range(600)} == {b"500"}
    rogue.close(linger=0)
    assert here.on(lambda: here.handler.refused_count) == 600
