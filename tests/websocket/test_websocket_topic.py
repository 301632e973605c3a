"""Topics: what followers get when they are many, move, come and go, agree to deflate, or are slow."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
import threading
import zlib

import pytest
from certificate_kit import Pair
from connection_kit import WAIT_S, ask, wait_until
from loopback_kit import loopback
from websocket_kit import CLOSE, DEFLATE, PING, TEXT, RawClient, Served, Talk, handshake
from websockets.asyncio.client import connect as connect_async
from websockets.asyncio.client import connect as connect_over_tls

from flowctl import (
    AdmissionLimits,
    CloseReason,
    ConfigError,
    DropReason,
    FlowctlError,
    Limits,
    LocalProtocolError,
    ReentryError,
    SocketOptions,
    Topic,
    WebSocketSession,
)
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.server.certificate import Certificate
from flowctl.wire.websocket import frames

FREE = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0.0)
ROOMY = Limits.parse("1GB,1000000", "2GB,2000000")
NARROW = {"receive_bytes": 4096}


def following(topic, base=Talk):
    class Follower(base):
        def accepted(self):
            self.follow(topic)
            super().accepted()

    return Follower


def inflated(payload):
    return zlib.decompressobj(-15).decompress(payload + b"\0\0\xff\xff")


def test_followers_when_many_threads_publish_each_get_every_message_once():
    """Half of them deflated, on two threads: in the order of publishing of each publisher."""
    topic = Topic("t", flush_interval_s=0.005)
    sent = {name: [f"{name} {number} " + "x" * (number % 3 * 300) for number in range(100)] for name in "abc"}

    async def follow(port, compression):
        got = []
        async with connect_async(f"ws://{loopback(port)}/", compression=compression) as client:
            while len(got) < 300:
                got.append(await asyncio.wait_for(client.recv(), WAIT_S))
        return got

    async def follow_all(port):
        tasks = [asyncio.create_task(follow(port, ("deflate", None)[number % 2])) for number in range(20)]
        await asyncio.to_thread(wait_until, lambda: topic.statistics().followers == 20)
        assert topic.statistics().deflated_followers == 10
        publishers = [threading.Thread(target=lambda name=name: [*map(topic.publish, sent[name])]) for name in sent]
        for publisher in publishers:
            publisher.start()
        return await asyncio.gather(*tasks)

    with Served(following(topic), server={"group_count": 2, "admission": FREE, "limits": ROOMY}) as served:
        for got in asyncio.run(follow_all(served.address[1])):
            assert {name: [item for item in got if item[0] == name] for name in sent} == sent
        wait_until(lambda: topic.statistics().followers == 0)
        assert not served.errors


@pytest.mark.parametrize("offer", [DEFLATE, None])
def test_followers_when_moved_between_threads_miss_nothing(offer):
    topic = Topic(flush_interval_s=0.0)
    with Served(following(topic), server={"group_count": 2, "limits": ROOMY}) as served:
        client, session = served.open(Sec_WebSocket_Extensions=offer)
        with client:
            here, there = served.server.groups.groups
            if session.connection.group is there:
                here, there = there, here
            numbers = itertools.count()
            for _ in range(10):
                assert here.migrate(session.connection.core, there)
                while session.connection.group is not there:
                    topic.publish(str(next(numbers)))
                here, there = there, here
            topic.publish("end")
            last = next(numbers)
            assert [client.read_text() for _ in range(last)] == [str(number) for number in range(last)]
            assert client.read_text() == "end"
            assert topic.statistics().followers == 1


def test_messages_when_followers_agreed_to_deflate_are_deflated_once_for_all(monkeypatch):
    calls = []
    compressobj = zlib.compressobj
    monkeypatch.setattr(frames.zlib, "compressobj", lambda **how: calls.append(how) or compressobj(**how))
    topic = Topic()
    long = "price " * 200
    with Served(following(topic), server={"admission": FREE}) as served:
        plain = served.open()[0]
        topic.publish(long)
        assert plain.read_text() == long
        assert calls == []
        deflating = [served.open(Sec_WebSocket_Extensions=DEFLATE)[0] for _ in range(5)]
        assert all(f"{DEFLATE}; server_no_context_takeover" in client.head for client in deflating)
        topic.publish(long)
        topic.publish("short")
        wire = {client.read_frame() for client in deflating}
        assert len(wire) == 1
        first, payload = wire.pop()
        assert first == 0xC0 | TEXT
        assert inflated(payload).decode() == long
        assert len(payload) < 100
        assert {client.read_frame() for client in deflating} == {(0x80 | TEXT, b"short")}
        assert [plain.read_text(), plain.read_text()] == [long, "short"]
        assert len(calls) == 1
        for client in (plain, *deflating):
            client.sock.close()
        wait_until(lambda: topic.statistics().followers == 0)
        topic.publish(long)
        assert len(calls) == 1


def test_values_when_deflating_followers_come_and_go_are_deflated_once_and_only_for_who_takes_them(monkeypatch):
    """Joining is no work for the publisher: nothing is appended, and a client that takes little has little deflated."""
    calls, appended = [], []
    compressobj, append = zlib.compressobj, StreamLog.append
    topic = Topic(max_keys=3000)
    texts = [random.Random(number).randbytes(1000).hex() for number in range(3000)]
    for number, text in enumerate(texts):
        topic.publish(text, key=str(number))
    monkeypatch.setattr(frames.zlib, "compressobj", lambda **how: calls.append(how) or compressobj(**how))
    monkeypatch.setattr(StreamLog, "append", lambda *args, **how: appended.append(args) or append(*args, **how))
    narrow = {"limits": ROOMY, "options": SocketOptions(send_buffer_bytes=4096)}
    with Served(following(topic), server=narrow) as served:
        stalled, session = served.open(Sec_WebSocket_Extensions=DEFLATE, **NARROW)
        with stalled:
            wait_until(lambda: session.connection.sender.blocked)
            assert 0 < len(calls) < 1500
            for _ in range(3):
                with served.open(Sec_WebSocket_Extensions=DEFLATE)[0] as client:
                    taken = [client.read_frame() for _ in texts]
                assert {first for first, _ in taken} == {0xC0 | TEXT}
                assert [inflated(payload).decode() for _, payload in taken] == texts
                assert len(calls) == len(texts)
        wait_until(lambda: topic.statistics().followers == 0)
        with served.open(Sec_WebSocket_Extensions=DEFLATE)[0] as client:
            assert [inflated(client.read_frame()[1]).decode() for _ in texts] == texts
        assert (len(calls), appended) == (len(texts), [])


def test_newest_messages_when_deflating_followers_come_again_are_those_published_meanwhile():
    """Their log ends with the last of them, and begins anew with the next: with all that is the newest by then."""
    topic = Topic()
    want = {key: f"{key} 0" for key in "abc"}
    for key, text in want.items():
        topic.publish(text, key=key)
    with Served(following(topic)) as served:
        for meanwhile in (0, 2, 3, 10):
            with served.open(Sec_WebSocket_Extensions=DEFLATE)[0] as client:
                newest = [client.read_text() for _ in range(3)]
            assert newest == sorted(newest, key=lambda text: int(text[2:]))
            want = {
                key: next(item.wire for item in topic._plain.log.latest.values() if item.key == key) for key in "abc"
            }
            assert {text[0]: frames.frame(text.encode(), frames.TEXT) for text in newest} == want
            wait_until(lambda: topic.statistics().followers == 0)
            count = topic.statistics().messages
            for number in range(meanwhile):
                key = "abc"[number % 3]
                topic.publish(f"{key} {count + number}", key=key)


def test_slow_followers_when_values_have_keys_skip_to_the_newest_and_are_not_cut():
    """The others get everything; one that reads nothing for a while is behind by no more than a value for each key."""
    topic = Topic(flush_interval_s=0.0)
    values = {key: [f"{key} {number} ".ljust(1000, ".") for number in range(1500)] for key in "ab"}
    limits = Limits.parse("64KiB,100,600s", "128KiB,200,1200s")
    with Served(following(topic), server={"limits": limits}) as served:
        slow, session = served.open(**NARROW)
        fast, _ = served.open()
        with slow, fast:
            for pair in zip(*values.values(), strict=True):
                for key, value in zip(values, pair, strict=True):
                    topic.publish(value, key=key)
                    assert fast.read_text() == value
            assert session.connection.ended is None
            got = {key: [] for key in values}
            while any(not items or items[-1] != values[key][-1] for key, items in got.items()):
                text = slow.read_text()
                got[text[0]].append(text)
            for key, items in got.items():
                assert items == sorted(set(items), key=values[key].index)
                assert len(items) < len(values[key])
            superseded = session.connection.sender.statistics().dropped[DropReason.SUPERSEDED]
            assert sum(superseded.messages) == 3000 - sum(map(len, got.values()))


def test_messages_for_one_client_when_it_follows_go_before_what_waits_of_the_topic():
    topic = Topic()
    with Served(following(topic), server={"limits": ROOMY}) as served:
        client, session = served.open(**NARROW)
        with client:
            for _ in range(50):
                topic.publish("t" * 60_000)
            wait_until(lambda: session.connection.sender.blocked)
            session.send_message("for you")
            texts = [client.read_text() for _ in range(51)]
            assert 0 < texts.index("for you") < 50


def test_topics_when_followed_twice_or_out_of_place_say_so():
    topic = Topic("one")
    with Served() as served:
        client, session = served.open()
        with client:
            with pytest.raises(LocalProtocolError):
                session.follow(topic)  # another thread
            session.unfollow()
            ask(session.connection, session.follow, topic)
            assert isinstance(ask(session.connection, _caught, session.follow, Topic()), LocalProtocolError)
            assert (topic.statistics().followers, session.streams()) == (1, ["one"])
            ask(session.connection, session.unfollow)
            assert (topic.statistics().followers, session.streams(), session.role) == (0, [], "")
            other = Topic("other")
            ask(session.connection, session.follow, other)
            topic.publish("not for it")
            other.publish("for it")
            assert client.read_text() == "for it"
        session.wait_end()
        assert other.statistics().followers == 0


def test_topics_when_followed_at_the_end_of_a_client_keep_nothing_of_it():
    topic = Topic()

    class Late(Talk):
        def closed(self, reason, details):
            self.follow(topic)
            super().closed(reason, details)

    with Served(Late) as served:
        client, session = served.open()
        with client:
            session.close_with(4000, at_once=True)  # the socket lingers, on its thread
            session.wait_end()
            assert client.read_close() == (4000, "")
            assert topic.statistics().followers == 0


def _caught(function, *args):
    try:
        function(*args)
    except FlowctlError as error:
        return error
    return None


def test_topics_when_made_or_published_to_wrongly_say_so():
    for wrong in ({"flush_interval_s": -1.0}, {"flush_interval_s": 11.0}, {"max_keys": -1}, {"max_keys": "many"}):
        with pytest.raises(ConfigError):
            Topic(**wrong)
    topic = Topic(max_keys=2, max_value_bytes=1000)
    topic.publish("a", key="a")
    topic.publish("b", key="b")
    with pytest.raises(LocalProtocolError, match="max_keys"):
        topic.publish("c", key="c")
    with pytest.raises(LocalProtocolError, match="max_value_bytes"):
        topic.publish("a" * 1000, key="a")
    topic.forget("a")
    topic.forget("a")
    topic.publish("c", key="c")
    assert (topic.statistics().messages, topic.statistics().keys) == (3, 2)
    with pytest.raises(LocalProtocolError):
        Topic(max_keys=0).publish("a", key="a")
    for wrong in (5, {"price": 1}, None):
        with pytest.raises(LocalProtocolError, match="str or bytes"):
            topic.publish(wrong)
    topic.publish(bytearray(b"octets"))


def test_publish_when_called_from_a_notice_of_the_sender_raises_and_locks_nothing():
    topic, errors = Topic(), []

    def send_state_changed(self, state, change):
        errors.append(_caught(topic.publish, "from here"))

    with Served(following(topic), send_state_changed=send_state_changed) as served:
        client, session = served.open(**NARROW)
        with client:
            for _ in range(60):
                topic.publish("x" * 100_000)
                if errors:
                    break
                wait_until(lambda: errors or session.connection.sender.load().size_bytes < 200_000)
            assert isinstance(errors[0], ReentryError)
            topic.publish("still goes")


def test_sessions_when_over_tls_speak_and_end_as_over_tcp(tmp_path):
    topic, pair = Topic(), Pair(tmp_path)
    tls = Certificate(pair.certificate, pair.key)
    with Served(following(topic), server={"tls": tls}) as served:
        url = f"wss://{loopback(served.address[1])}/"

        async def talk():
            # Not the client with threads: one of them reads while another writes, which loses data over TLS before
            # Python 3.13 (python/cpython#124984).
            async with connect_over_tls(url, ssl=pair.client(), max_size=None) as client:
                await asyncio.to_thread(wait_until, lambda: topic.statistics().followers)
                topic.publish("t" * 300_000)
                assert await client.recv() == "t" * 300_000
                await client.send("echo")
                assert await client.recv() == "echo"
                session = served.sessions[0]
                assert session.request.secure
                session.close_with(4000, "over TLS")
                await client.wait_closed()
                assert (client.close_code, client.close_reason) == (4000, "over TLS")
                return session

        session = asyncio.run(asyncio.wait_for(talk(), WAIT_S))
        assert session.wait_end()[0] is CloseReason.FINISHED
        with RawClient(served.address, handshake()) as plain:
            session = wait_until(lambda: served.sessions[1:])[0]
            assert session.wait_end()[0] is CloseReason.PROTOCOL_ERROR
            assert plain.sock.getpeername()


def test_slow_clients_when_over_tls_are_told_why_at_a_hard_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.core.loop.lingering.LINGER_QUIET_S", 10.0)
    topic, pair = Topic(), Pair(tmp_path)
    limits = Limits.parse("64KiB,100,60s", "256KiB,400,120s")
    with Served(following(topic), server={"tls": Certificate(pair.certificate, pair.key), "limits": limits}) as served:
        client = RawClient(served.address, b"", **NARROW)
        client.sock = pair.client().wrap_socket(client.sock, server_hostname="localhost")
        client.sock.sendall(handshake())
        with client:
            client.opened()
            session = served.sessions[0]
            wait_until(lambda: topic.statistics().followers)
            for number in range(5000):
                if session.connection.ended is not None:
                    break
                topic.publish(bytes([number % 256]) * 20_000)
                if number % 8 == 0:
                    wait_until(lambda: session.connection.sender.blocked or topic_taken(session))
            assert session.wait_end()[0] is CloseReason.HARD_LIMIT
            expected = 0
            while (frame := client.read_frame())[0] != 0x80 | CLOSE:
                assert frame == (0x82, bytes([expected % 256]) * 20_000)
                expected += 1
            assert frame[1][:2] == (1013).to_bytes(2, "big")
            assert isinstance(client.sock, ssl.SSLSocket)


def topic_taken(session):
    return session.connection.ended or not session.connection.sender.load().messages


def test_sessions_when_they_have_nothing_overridden_are_served():
    with Served(WebSocketSession) as served, RawClient(served.address) as client:
        client.opened().send(TEXT, "into the void")
        client.send(PING, b"there?")
        assert client.read_frame() == (0x8A, b"there?")
