"""The faulty link that tests and benches put between messengers: what it loses, doubles and keeps whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from messenger.link import Faults, FaultyLink

WAIT_MS = 20_000
NONE = Faults(drop=0, duplicate=0, late=0)


@pytest.fixture
def make() -> Iterator[Callable[[int], zmq.Socket]]:
    """Make sockets of one context; they are closed at the end."""
    context = zmq.Context()
    made: list[zmq.Socket] = []

    def make(kind: int) -> zmq.Socket:
        made.append(context.socket(kind))
        made[-1].set(zmq.RCVTIMEO, WAIT_MS)
        return made[-1]

    yield make
    for item in made:
        item.close(linger=0)
    context.term()


@pytest.fixture
def router(make: Callable[[int], zmq.Socket]) -> zmq.Socket:
    router = make(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    return router


def port_of(router: zmq.Socket) -> int:
    return int(router.get(zmq.LAST_ENDPOINT).rpartition(b":")[2])


def dealer_to(make: Callable[[int], zmq.Socket], address: str) -> zmq.Socket:
    dealer = make(zmq.DEALER)
    dealer.set(zmq.ROUTING_ID, b"someone")
    dealer.set(zmq.RECONNECT_IVL, 10)
    dealer.connect(address)
    return dealer


def test_link_when_without_faults_passes_all_in_order(make, router):
    link = FaultyLink(port_of(router), NONE, 1)
    link.start()
    dealer = dealer_to(make, link.address)
    sent = [[b"", b"x" * size, bytes(size)] for size in (0, 1, 255, 256, 70_000, 1_000_000)]
    for frames in sent:
        dealer.send_multipart(frames)
    assert [[b"someone", *frames] for frames in sent] == [router.recv_multipart() for _ in sent]
    for frames in sent:
        router.send_multipart([b"someone", *frames])
    assert sent == [dealer.recv_multipart() for _ in sent]
    link.stop()
    assert (link.passed.messages, link.passed.dropped, link.passed.late, link.passed.connections) == (12, 0, 0, 1)


def test_link_when_faulty_loses_doubles_and_overtakes_whole_messages(make, router):
    link = FaultyLink(port_of(router), Faults(drop=0.2, duplicate=0.1, late=0.1, late_s=0.001), 7)
    link.start()
    dealer = dealer_to(make, link.address)
    for number in range(2000):
        dealer.send_multipart([b"", b"%d" % number, b"%d" % -number])
    passed = link.passed
    arrived = []
    while passed.messages < 2000 or len(arrived) < passed.messages - passed.dropped + passed.duplicated:
        arrived.append(router.recv_multipart())
    link.stop()
    numbers = [int(frames[2]) for frames in arrived]
    assert {tuple(frames) for frames in arrived} <= {(b"someone", b"", b"%d" % n, b"%d" % -n) for n in range(2000)}
    assert 320 < passed.dropped < 480
    assert 100 < passed.duplicated < 220
    assert len(numbers) - len(set(numbers)) == passed.duplicated
    assert numbers != sorted(numbers)
