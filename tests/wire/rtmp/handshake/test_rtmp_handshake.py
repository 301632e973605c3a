"""The RTMP handshake: simple and digest, both ends, and what is not RTMP at all."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rtmp_chunk_peer import pieces

from flowctl.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp.handshake import CLIENT_KEY, SERVER_KEY, Handshake, answer, find_digest, is_answer, with_digest

NOISE = bytes(range(256)) * 6
SIMPLE_C1 = b"\0\0\4\xd2" + bytes(4) + NOISE[8:]
MODERN_VERSION = b"\x80\0\7\2"


def digest_c1(schema: int) -> bytes:
    """Return a C1 as Flash sends it."""
    return with_digest(b"\0\0\4\xd2" + MODERN_VERSION + NOISE[8:], schema, CLIENT_KEY)[0]


def refused(handshake: Handshake, data: bytes) -> str:
    """Return the code with which `data` is refused; afterwards nothing more is taken."""
    with pytest.raises(RemoteProtocolError) as caught:
        handshake.receive(data)
    assert handshake.failed
    assert not handshake.done
    with pytest.raises(LocalProtocolError, match="failed"):
        handshake.receive(b"\3")
    return caught.value.code


# ------------------------------------------------------------------------------------------------- simple


def test_simple_client_gets_its_c1_back_exactly():
    """S0 is the version, S1 our time, zero and noise, S2 all 1536 octets of C1: StreamLabs compares them."""
    server = Handshake.server(random.Random(1), epoch_ms=0x01020304)
    out = server.receive(b"\3" + SIMPLE_C1)
    assert len(out) == 1 + 1536 + 1536
    assert out[:9] == b"\3\1\2\3\4\0\0\0\0"
    assert out[1537:] == SIMPLE_C1
    assert (server.style, server.done, server.verified) == ("simple", False, None)


def test_handshake_is_done_with_the_last_octet_of_c2():
    server = Handshake.server(random.Random(1))
    s1 = server.receive(b"\3" + SIMPLE_C1)[1:1537]
    assert server.receive(s1[:-1]) == b""
    assert not server.done
    assert server.receive(s1[-1:] + b"connect") == b""
    assert (server.done, server.leftover, server.verified) == (True, b"connect", True)
    with pytest.raises(LocalProtocolError, match="done"):
        server.receive(b"more")


def test_c2_with_the_time_it_was_read_is_a_right_answer():
    server = Handshake.server(random.Random(1))
    s1 = server.receive(b"\3" + SIMPLE_C1)[1:1537]
    server.receive(s1[:4] + b"\0\0\0\7" + s1[8:])
    assert server.verified is True


def test_wrong_c2_is_noticed_and_tolerated():
    server = Handshake.server(random.Random(1))
    server.receive(b"\3" + SIMPLE_C1 + bytes(1536))
    assert (server.done, server.verified) == (True, False)


def test_whole_client_side_in_one_piece_is_answered():
    """C0, C1, C2 and the first chunks at once: the client need not wait for us."""
    server = Handshake.server(random.Random(1))
    assert len(server.receive(b"\3" + SIMPLE_C1 + NOISE + b"chunks")) == 3073
    assert (server.done, server.leftover) == (True, b"chunks")


def test_noise_differs_between_connections_unless_it_is_given():
    first, second = (Handshake.server().receive(b"\3" + SIMPLE_C1)[1:1537] for _ in range(2))
    assert first != second
    first, second = (Handshake.server(random.Random(5)).receive(b"\3" + SIMPLE_C1) for _ in range(2))
    assert first == second


# ------------------------------------------------------------------------------------------------- digest


@pytest.mark.parametrize("schema", [0, 1])
def test_digest_client_is_answered_in_its_schema(schema):
    c1 = digest_c1(schema)
    server = Handshake.server(random.Random(1), epoch_ms=77)
    out = server.receive(b"\3" + c1)
    s1, s2 = out[1:1537], out[1537:]
    client_digest, server_digest = find_digest(c1, CLIENT_KEY), find_digest(s1, SERVER_KEY)
    assert (client_digest.schema, server_digest.schema) == (schema, schema)
    assert s1[:4] == b"\0\0\0\x4d"
    assert s1[4:8] != bytes(4)
    assert is_answer(s2, client_digest.value, SERVER_KEY)
    assert server.style == "digest"
    server.receive(answer(server_digest.value, CLIENT_KEY, NOISE[:1504]))
    assert (server.done, server.verified) == (True, True)


@pytest.mark.parametrize("schema", [0, 1])
@pytest.mark.parametrize("head", [bytes(4), b"\xff\xff\xff\xff", b"\2\xd8\0\0"])
def test_digest_is_found_wherever_its_position_octets_put_it(schema, head):
    """Their sum modulo 728 is the position: sums of 0, 1020 (so 292) and 218."""
    start = 772 if schema == 0 else 8
    packet = b"\0\0\0\1" + MODERN_VERSION + NOISE[8:start] + head + NOISE[start + 4 :]
    signed, value = with_digest(packet, schema, CLIENT_KEY)
    found = find_digest(signed, CLIENT_KEY)
    assert (found.schema, found.offset, found.value) == (schema, start + 4 + sum(head) % 728, value)
    assert signed[found.offset : found.offset + 32] == value


def test_c1_with_a_version_but_no_right_digest_is_simple():
    """One octet changed: the digest is wrong, and the client is served as a simple one instead of refused."""
    c1 = bytearray(digest_c1(1))
    c1[1500] ^= 1
    server = Handshake.server(random.Random(1))
    assert server.receive(b"\3" + bytes(c1))[1537:] == bytes(c1)
    assert server.style == "simple"


def test_digest_of_the_server_key_is_not_taken_from_a_client():
    s1, _ = with_digest(b"\0\0\0\1" + MODERN_VERSION + NOISE[8:], 0, SERVER_KEY)
    server = Handshake.server(random.Random(1))
    server.receive(b"\3" + s1)
    assert server.style == "simple"


# ------------------------------------------------------------------------------------------------- other protocols


@pytest.mark.parametrize("version", [0, 1, 2, 4, 5, 7, 10, 31])
def test_unknown_version_is_answered_with_3(version):
    """Section 5.2.2: a server that does not recognise the version answers 3, and the client decides."""
    out = Handshake.server(random.Random(1)).receive(bytes([version]) + SIMPLE_C1)
    assert out[0] == 3
    assert out[1537:] == SIMPLE_C1


@pytest.mark.parametrize("first", [6, 8, 9])
def test_encrypted_rtmp_is_refused_at_its_first_octet(first):
    assert refused(Handshake.server(), bytes([first])) == "rtmpe"


def test_tls_on_the_plain_port_is_named():
    assert refused(Handshake.server(), b"\x16\3\1\2\0") == "tls-on-plain-port"


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b" ", b"\xff", b"SSH-2.0"])
def test_other_protocols_are_refused_at_their_first_octet(data):
    assert refused(Handshake.server(), data) == "not-rtmp"


# ------------------------------------------------------------------------------------------------- real-IP prefix


def test_real_ip_prefix_is_refused():
    assert refused(Handshake.server(), b"\xf3\0\4\xc0\0\2\7\3") == "real-ip-prefix"


# ------------------------------------------------------------------------------------------------- client


@pytest.mark.parametrize("style", ["simple", "digest"])
def test_our_client_and_our_server_agree(style):
    client, server = Handshake.client(style, random.Random(1), epoch_ms=5), Handshake.server(random.Random(2))
    out = client.start()
    assert out[:5] == b"\3\0\0\0\5"
    c2 = client.receive(server.receive(out))
    assert server.receive(c2) == b""
    assert (client.style, client.done, client.verified) == (style, True, True)
    assert (server.style, server.done, server.verified) == (style, True, True)


def test_client_answers_as_soon_as_s1_is_there():
    client = Handshake.client(rng=random.Random(1))
    c1 = client.start()[1:]
    assert client.receive(b"\3" + NOISE) == NOISE
    assert not client.done
    assert client.receive(c1 + b"chunks") == b""
    assert (client.done, client.leftover, client.verified) == (True, b"chunks", True)


def test_digest_client_falls_back_to_a_server_without_digest():
    """S1 without digest: the answer is its echo, and the style says so."""
    client = Handshake.client("digest", random.Random(1))
    c1 = client.start()[1:]
    assert client.receive(b"\3" + NOISE + c1) == NOISE
    assert (client.style, client.done, client.verified) == ("simple", True, True)


@pytest.mark.parametrize(
    ("first", "code"),
    [(b"\6", "handshake-version"), (b"HTTP/1.1", "handshake-version"), (b"\x15", "tls-on-plain-port")],
)
def test_client_refuses_another_protocol(first, code):
    client = Handshake.client()
    client.start()
    assert refused(client, first) == code


def test_client_goes_first_and_once():
    client = Handshake.client()
    with pytest.raises(LocalProtocolError, match="start"):
        client.receive(b"\3")
    client.start()
    with pytest.raises(LocalProtocolError, match="started"):
        client.start()


def test_client_style_is_checked():
    with pytest.raises(ConfigError, match="style is 'rtmpe', allowed is 'simple' or 'digest'"):
        Handshake.client("rtmpe")


# ------------------------------------------------------------------------------------------------- pieces


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    longest=st.sampled_from([1, 3, 100, 1537, 5000]),
    style=st.sampled_from(["simple", "digest"]),
)
def test_handshake_does_not_depend_on_the_pieces(seed, longest, style):
    rng = random.Random(seed)
    client, server = Handshake.client(style, random.Random(1)), Handshake.server(random.Random(2))
    reply = b"".join(map(server.receive, pieces(client.start(), rng, longest)))
    c2 = b"".join(map(client.receive, pieces(reply, rng, longest)))
    assert b"".join(map(server.receive, pieces(c2, rng, longest))) == b""
    whole = Handshake.server(random.Random(2))
    assert whole.receive(Handshake.client(style, random.Random(1)).start()) == reply
    assert (client.verified, server.verified, client.leftover, server.leftover) == (True, True, b"", b"")


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=4000))
def test_server_takes_or_refuses_any_input(data):
    server = Handshake.server(random.Random(1))
    try:
        out = server.receive(data)
    except RemoteProtocolError:
        assert server.failed
    else:
        assert len(out) in (0, 3073)


@pytest.mark.parametrize("began", ["000300082112a442", "001c000100082112a442", "0200000101ec2112a442"])
def test_stun_is_refused_although_its_first_octet_could_be_a_version(began):
    """A page can have browsers take our port for a TURN server's, or for that of a peer, behind a length then."""
    with pytest.raises(RemoteProtocolError) as caught:
        Handshake.server().receive(bytes.fromhex(began) + b"a" * 12)
    assert caught.value.code == "not-rtmp"
