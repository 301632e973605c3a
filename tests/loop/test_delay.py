"""Delay of a peer as one number."""

from __future__ import annotations

import socket

import pytest

from flowctl.flow.drain import DelayMeter
from flowctl.loop.delay import unacknowledged_bytes


def test_sample_when_nothing_waits_is_zero():
    """A peer that has taken everything is not behind, whatever its rate."""
    meter = DelayMeter()
    assert meter.sample(0.0, 0, 0, 0) == 0.0
    assert meter.sample(1.0, 0, 1000, 0) == 0.0


def test_sample_when_the_peer_takes_steadily_is_what_waits_over_its_rate():
    """1000 bytes per second and 3000 bytes waiting, in queue and kernel together, are 3 s."""
    meter = DelayMeter()
    for second in range(20):
        delay_ms = meter.sample(float(second), 2000, 1000 * second + 1000, 1000)
    assert delay_ms == pytest.approx(3000.0)


def test_sample_when_the_peer_stops_grows_with_time():
    """A stalled peer falls behind by a second each second."""
    meter = DelayMeter()
    meter.sample(0.0, 0, 0, 0)
    before = meter.sample(1.0, 1000, 2000, 1000)
    after = [meter.sample(1.0 + second, 1000, 2000, 1000) for second in (1, 2, 3)]
    assert before == pytest.approx(2000.0)
    assert after == [pytest.approx(3000.0), pytest.approx(4000.0), pytest.approx(5000.0)]


def test_sample_when_repeated_at_once_does_not_disturb_the_rate():
    """Two looks within a flush interval give the same answer."""
    meter = DelayMeter()
    meter.sample(0.0, 0, 0, 0)
    first = meter.sample(1.0, 500, 1500, 500)
    assert meter.sample(1.001, 500, 1500, 500) == first


def test_unacknowledged_when_the_peer_does_not_read_is_what_the_kernel_holds():
    """The kernel's count covers what it could not deliver, and is 0 for a closed socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.setblocking(False)
            assert unacknowledged_bytes(server) == 0
            sent = 0
            for _ in range(10_000):
                try:
                    sent += server.send(bytes(65536))
                except BlockingIOError:
                    break
            assert 0 < unacknowledged_bytes(server) <= sent
        assert unacknowledged_bytes(server) == 0
