"""Sessions over WebSocket, with clients that keep to the rules: handshake, messages, topics."""

from __future__ import annotations

import json

import pytest
from connection_kit import wait_until
from loopback_kit import loopback
from websocket_kit import Served, Talk
from websockets.sync.client import connect

from flowctl import CloseReason, Topic


def url(served, path="/"):
    return f"ws://{loopback(served.address[1])}{path}"


@pytest.mark.parametrize("compression", ["deflate", None])
def test_messages_go_both_ways_when_the_client_is_the_library_websockets(compression):
    """Text and octets, short and long, come back as they went, deflated or not."""
    messages = ["", "hällo", b"\0\xff" * 9, "x" * 300, "y" * 70_000, b"z" * 300_000]
    with Served() as served, connect(url(served), compression=compression, max_size=None) as client:
        for message in messages:
            client.send(message)
        assert [client.recv(timeout=20) for _ in messages] == messages
        client.close(4001, "done")
        reason, details = served.sessions[0].wait_end()
    assert (reason, details) == (CloseReason.PEER_CLOSED, "the client closed: 4001 done")
    assert not served.errors


@pytest.mark.parametrize("compression", ["deflate", None])
def test_followers_get_the_newest_of_each_key_first_when_they_join_a_topic(compression):
    """Then they get what is published, in its order; what was forgotten, or has no key, is for those who were there."""
    prices = Topic("prices")
    for euro in range(3):
        prices.publish(json.dumps({"EUR": euro}), key="EUR")
    prices.publish("USD", key="USD")
    prices.publish("gone", key="old")
    prices.publish("for those who are there")
    prices.forget("old")
    with Served(accepted=lambda self: self.follow(prices)) as served:
        with connect(url(served), compression=compression) as client:
            assert [client.recv(timeout=20) for _ in range(2)] == ['{"EUR": 2}', "USD"]
            assert prices.statistics().deflated_followers == (compression is not None)
            sent = ["first", "w" * 5000, b"octets" * 999]
            for message in sent:
                prices.publish(message)
            assert [client.recv(timeout=20) for _ in sent] == sent
            session = served.sessions[0]
            assert (session.protocol, session.role, session.streams()) == ("websocket", "follower", ["prices"])
        wait_until(lambda: prices.statistics().followers == 0, "the end of following")


def test_a_slow_handler_slows_its_client_when_it_is_a_coroutine():
    """One message at a time is handled, in order, and the next is not read before."""

    class Slow(Talk):
        running = 0

        async def received_message(self, message):
            self.running += 1
            assert self.running == 1
            self.got.append(message)
            self.send_message(message)
            await self.connection.drained()
            self.running -= 1

    with Served(Slow) as served, connect(url(served)) as client:
        for number in range(50):
            client.send(str(number))
        assert [client.recv(timeout=20) for _ in range(50)] == [str(number) for number in range(50)]
    assert not served.errors
