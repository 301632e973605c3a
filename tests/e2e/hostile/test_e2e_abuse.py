"""Peers that break the rules, seen from outside: each is refused or cut with its reason, and nobody else notices.

In every test a publisher and a healthy viewer run beside the abuse; at the end the viewer must have every frame, and
the server must take newcomers.
"""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
from e2e_kit import PATIENCE_S, connection_to, resident_bytes, viewer_of, wait_for_end, wait_for_viewers, wait_until
from e2e_raw import RawPlayer

from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.reasons import CloseReason
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.messages import EVENT_PING_REQUEST, UserControl, encode_control

SOURCE = SyntheticSource(video_bit_rate=500_000, key_interval_s=0.5)
BYSTANDER = "live/bystander"
MANY = AdmissionLimits(connections_per_address=0, new_per_address_and_s=0)


@contextlib.contextmanager
def nobody_disturbed(server, clients):
    """Publish to a viewer meanwhile; fail unless it gets every frame, and a newcomer is served afterwards."""
    player = clients.play(server, name=BYSTANDER)
    wait_for_viewers(server, 1, BYSTANDER)
    publishing = clients.publish(server, SOURCE, name=BYSTANDER)
    wait_until(lambda: player.messages, "the first frame")
    yield
    seen = len(player.messages)
    wait_until(lambda: len(player.messages) > seen + 10, "more frames")
    newcomer = wait_until(lambda: try_to_play(server, clients), "a newcomer served")
    clients.group.call_soon(publishing.publisher.finish, "the test is over")
    wait_for_end(publishing, player, newcomer)
    assert publishing.messages == player.messages
    assert publishing.messages[-10:] == newcomer.messages[-10:]


def try_to_play(server, clients):
    """Return a player that gets the stream; None when it was refused."""
    player = clients.play(server, name=BYSTANDER)
    wait_until(lambda: len(player.messages) > 20 or player.end is not None, "frames, or refused")
    return player if player.end is None else None


def open_socket(server):
    """Return a connected socket."""
    sock = socket.create_connection(("127.0.0.1", server.address[1]), timeout=PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


def shake_hands(server):
    """Return a socket on which the simple handshake is done."""
    sock = open_socket(server)
    sock.sendall(b"\x03" + bytes(8) + os.urandom(1528))
    answer = b""
    while len(answer) < 1 + 2 * 1536:
        data = sock.recv(65536)
        assert data
        answer += data
    sock.sendall(answer[1:1537])
    return sock


def is_cut(sock):
    """Read until the server ends the connection, however it does; a time-out fails."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def is_refused(server):
    """Connect; the reset may come before the connection is there, or after; a time-out fails."""
    with contextlib.suppress(ConnectionError), open_socket(server) as sock:
        return is_cut(sock)
    return True


def closed(server, reason):
    """Return how many connections ended for a reason."""
    return server.closed_by_reason.get(reason, 0)


def chunk(type_id, length, body=b"", csid=3):
    """Return the first chunk of a message with a full header that announces `length` octets."""
    return bytes((csid,)) + bytes(3) + length.to_bytes(3, "big") + bytes((type_id,)) + bytes(4) + body


def nested(depth):
    """Return a connect command whose object is nested `depth` times, in chunks of 128 octets."""
    body = b"\x02\x00\x07connect\x00\x3f\xf0\x00\x00\x00\x00\x00\x00" + b"\x03\x00\x01a" * depth
    parts = [body[at : at + 128] for at in range(0, len(body), 128)]
    return chunk(20, len(body), parts[0]) + b"".join(b"\xc3" + part for part in parts[1:])


WIRE = {
    "chunk_size_bomb": (chunk(1, 4, b"\x7f\xff\xff\xff", csid=2), "chunk_size_max_bytes"),
    "chunk_size_of_one": (chunk(1, 4, b"\x00\x00\x00\x01", csid=2), "chunk_size_min_bytes"),
    "16_mib_video": (chunk(9, 0xFFFFFF, bytes(128)), "media_message_bytes"),
    "16_mib_command": (chunk(20, 0xFFFFFF, bytes(128)), "command_message_bytes"),
    "1_kib_control": (chunk(4, 1024, bytes(128), csid=2), "control_message_bytes"),
    "65_chunk_streams": (
        # Numbers from 64 on take a second octet of the chunk's basic header.
        b"".join(bytes((0, item)) + chunk(9, 200, bytes(128))[1:] for item in range(65)),
        "chunk_streams",
    ),
    "nested_amf": (nested(200), "amf_depth"),
}


@pytest.mark.parametrize("case", WIRE)
def test_peer_is_cut_when_it_goes_over_a_limit_of_the_wire(case, live, clients):
    octets, limit = WIRE[case]
    server = live()
    with nobody_disturbed(server, clients), shake_hands(server) as sock:
        sock.sendall(octets)
        assert is_cut(sock)
        wait_until(lambda: closed(server, CloseReason.LIMIT_HIT) == 1, "the limit counted")
        assert server.hub.limits_hit == {limit: 1}


@pytest.mark.parametrize("octets", [b"", b"\x03" + bytes(700)], ids=["silent", "half"])
def test_peer_is_cut_when_its_handshake_takes_too_long(octets, live, clients):
    server = live(wire={"handshake_time_s": 0.5})
    with nobody_disturbed(server, clients), open_socket(server) as sock:
        sock.sendall(octets)
        sock.settimeout(0.05)
        drip = bool(octets)
        while drip:
            try:
                sock.sendall(b"\x00")
                drip = bool(sock.recv(4096))
            except TimeoutError:
                continue  # still waited for
            except ConnectionError:
                break
        sock.settimeout(PATIENCE_S)
        assert is_cut(sock)
        wait_until(lambda: closed(server, CloseReason.HANDSHAKE_TIMEOUT) == 1, "the reason counted")


def test_peer_is_cut_when_it_says_nothing_after_the_handshake(live, clients):
    server = live(wire={"first_command_s": 0.3})
    with nobody_disturbed(server, clients), shake_hands(server) as sock:
        assert is_cut(sock)
        wait_until(lambda: server.hub.limits_hit == {"first_command_s": 1}, "the limit counted")


def test_player_is_told_and_cut_when_nobody_publishes(live, clients):
    server = live(wire={"player_wait_s": 0.3})
    with nobody_disturbed(server, clients):
        waiting = clients.play(server, name="live/nothing", profile=PlayProfile(stay=True))
        wait_for_end(waiting)
        assert any("player_wait_s" in status.description for status in waiting.player.statuses)
        wait_until(lambda: server.hub.limits_hit == {"player_wait_s": 1}, "the limit counted")


def test_memory_follows_what_was_received_when_messages_are_announced(live, clients):
    server = live(admission=MANY)
    with nobody_disturbed(server, clients), contextlib.ExitStack() as stack:
        before = resident_bytes()
        for _ in range(40):
            sock = stack.enter_context(shake_hands(server))
            sock.sendall(chunk(9, 10 * 1024 * 1024, bytes(128)))
        wait_until(
            lambda: sum(item.receiver.statistics().bytes_in > 3000 for item in server.connections()) >= 40,
            "everything received",
        )
        assert resident_bytes() - before < 40 * 1024 * 1024


def test_connections_beyond_the_limit_of_an_address_are_refused_and_later_taken(live, clients):
    limit = 12
    server = live(admission=AdmissionLimits(connections_per_address=limit, new_per_address_and_s=0))
    with nobody_disturbed(server, clients):
        for _ in range(5):
            room = limit - len(server.connections())
            taken = [shake_hands(server) for _ in range(room)]
            before = server.admission.refused.get("connections_per_address", 0)
            for _ in range(20):
                assert is_refused(server)
            assert server.admission.refused["connections_per_address"] == before + 20
            assert len(server.connections()) == limit
            for sock in taken:
                sock.close()
            wait_until(lambda room=room: server.admission.connections == limit - room, "those who left counted")


def test_connections_that_come_too_fast_are_refused_and_later_taken(live, clients):
    server = live(admission=AdmissionLimits(new_per_address_and_s=20.0, burst_per_address=10))
    with nobody_disturbed(server, clients):
        for _ in range(100):
            with contextlib.suppress(ConnectionError):
                open_socket(server).close()
        wait_until(lambda: server.admission.refused.get("new_per_address_and_s", 0) >= 50, "refusals")


def test_ping_flooder_is_cut_at_the_limit_of_control_messages(live, clients):
    server = live()
    with nobody_disturbed(server, clients):
        flooder = clients.play(server, PlayProfile(pings_per_s=5000), name=BYSTANDER)
        wait_for_end(flooder)
        wait_until(lambda: closed(server, CloseReason.LIMIT_HIT) == 1, "the limit counted")
        assert server.hub.limits_hit == {"control_messages_per_second": 1}


def test_pings_below_the_limit_are_answered_once_per_interval(live, clients):
    server = live(rtmp={"ping_answer_interval_s": 3600.0})
    with nobody_disturbed(server, clients), RawPlayer(server, name=BYSTANDER) as viewer:
        end = connection_to(server, viewer)
        for number in range(100):
            viewer.send_control(UserControl(EVENT_PING_REQUEST, timestamp=number))
        viewer.send_acknowledgement(99)
        viewer.read_until(lambda: end.session._rtmp.last_acknowledged_bytes == 99 and viewer.pongs)
        assert viewer.pongs == [0]
        assert viewer_of(server, end.number, BYSTANDER) is not None


def test_ping_flooder_that_does_not_read_is_cut_when_its_answers_pile_up(live, clients):
    settings = SenderSettings(control_bytes=4096, stuck_s=0, soft_too_long_s=0)
    rtmp = {"ping_answer_interval_s": 0.0, "control_messages_per_second": 0}
    server = live(rtmp=rtmp, settings=settings)
    with nobody_disturbed(server, clients), RawPlayer(server, name="live/nothing") as flooder:
        number = connection_to(server, flooder).number
        ping = flooder.session.send_message(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=7)))
        with contextlib.suppress(ConnectionError):
            while any(item.number == number for item in server.connections()):
                flooder.sock.sendall(ping * 1000)
        wait_until(lambda: closed(server, CloseReason.LIMIT_HIT) == 1, "the limit counted")
