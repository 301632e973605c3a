"""The faulty link that tests and benches put between messengers: what it loses, doubles and keeps whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq

from messenger.link import Faults, FaultyLink


@pytest.fixture
def linked(raw) -> Callable[[Faults], tuple[FaultyLink, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Put a link with these faults between a DEALER and a ROUTER."""

    def start(faults: Faults) -> tuple[FaultyLink, zmq.Socket[bytes], zmq.Socket[bytes]]:
        router = raw(zmq.ROUTER, bind="tcp://127.0.0.1:0")
        link = FaultyLink(int(router.get(zmq.LAST_ENDPOINT).rpartition(b":")[2]), faults, 7)
        link.start()
        return link, raw(zmq.DEALER, b"someone", connect=link.address), router

    return start


def test_link_when_without_faults_passes_all_in_order(linked):
    link, dealer, router = linked(Faults(drop=0, duplicate=0, late=0))
    sent = [[b"", b"x" * size, bytes(size)] for size in (0, 1, 255, 256, 70_000, 1_000_000)]
    for frames in sent:
        dealer.send_multipart(frames)
    assert [[b"someone", *frames] for frames in sent] == [router.recv_multipart() for _ in sent]
    for frames in sent:
        router.send_multipart([b"someone", *frames])
    assert sent == [dealer.recv_multipart() for _ in sent]
    link.stop()
    assert (link.passed.messages, link.passed.dropped, link.passed.late, link.passed.connections) == (12, 0, 0, 1)


def test_link_when_faulty_loses_doubles_and_overtakes_whole_messages(linked):
    link, dealer, router = linked(Faults(drop=0.2, duplicate=0.1, late=0.1, late_s=0.001))
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
