"""Headers of proxies: whom they speak for, read in pieces that never pass the end, bounded, and refused where wrong."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.server.proxyheader import HEADER_BYTES, LINE_BYTES, HeaderReader, ProxyHeaderError, TrustedProxies
from flowctl.errors import ConfigError

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
SIX = ipaddress.ip_address("2001:db8::1").packed
MAPPED = ipaddress.ip_address("::ffff:192.0.2.7").packed


def binary(command=0x21, kind=0x11, body=b"\xc0\0\2\7\x0a\0\0\1\x30\x39\x07\x8f"):
    return SIGNATURE + bytes([command, kind]) + len(body).to_bytes(2, "big") + body


def crc32c(octets):
    """Divide by the polynomial 1EDC6F41, as RFC 3720 (12.1) has it: the first bit is the lowest of each octet."""
    bits = int("".join(f"{octet:08b}"[::-1] for octet in octets) + "0" * 32, 2)
    bits ^= 0xFFFFFFFF << 8 * len(octets)
    while bits.bit_length() > 32:
        bits ^= 0x11EDC6F41 << bits.bit_length() - 33
    return int(f"{bits ^ 0xFFFFFFFF:032b}"[::-1], 2).to_bytes(4, "big")


def summed(*values, **given):
    """Return a header with values of type and content behind its addresses; None: the checksum."""
    body = b"\xc0\0\2\7\x0a\0\0\1\x30\x39\x07\x8f" if given.get("kind", 0x11) == 0x11 else SIX + SIX + b"\0\1\0\2"
    at = None
    for kind, value in values:
        at = 16 + len(body) + 3 if value is None else at
        content = bytes(4) if value is None else value
        body += bytes([kind]) + len(content).to_bytes(2, "big") + content
    header = binary(body=body, **given)
    return header[:at] + crc32c(header) + header[at + 4 :]


GOOD = [
    (summed((3, None)), ("192.0.2.7", 12345)),
    (summed((3, None), (1, b"h2"), (4, bytes(9))), ("192.0.2.7", 12345)),
    (summed((2, b"live.example"), (3, None), kind=0x21), ("2001:db8::1", 1)),
    (binary(command=0x20, body=bytes(12) + b"\3\0\4abcd"), None),  # of the proxy itself: nothing in it counts
    (b"PROXY TCP4 192.0.2.7 10.0.0.1 12345 1935\r\n", ("192.0.2.7", 12345)),
    (b"PROXY TCP6 2001:db8::1 ::1 65535 0\r\n", ("2001:db8::1", 65535)),
    (b"PROXY TCP6 ::ffff:192.0.2.7 ::1 1 2\r\n", ("192.0.2.7", 1)),
    (b"PROXY UNKNOWN\r\n", None),
    (b"PROXY UNKNOWN ffff::1 whatever 1 2\r\n", None),
    (binary(), ("192.0.2.7", 12345)),
    (binary(body=b"\xc0\0\2\7\x0a\0\0\1\x30\x39\x07\x8f" + b"\x20\0\3abc"), ("192.0.2.7", 12345)),
    (binary(kind=0x21, body=SIX + bytes(16) + b"\0\1\0\2"), ("2001:db8::1", 1)),
    (binary(kind=0x21, body=MAPPED + bytes(16) + b"\0\1\0\2"), ("192.0.2.7", 1)),
    (binary(command=0x20), None),
    (binary(command=0x20, kind=0x00, body=b""), None),
    (binary(kind=0x00, body=b""), None),
    (binary(kind=0x31, body=bytes(216)), None),
    (b"\xf3\0\4\xc0\0\2\7", ("192.0.2.7", None)),
    (b"\xf3\0\x10" + SIX, ("2001:db8::1", None)),
    (b"\xf3\0\6\xc0\0\2\7??", ("192.0.2.7", None)),
]
BAD = [
    summed((3, None))[:-1] + b"\0",
    summed((3, None)).replace(b"\xc0\0\2\7", b"\xc0\0\2\6"),
    summed((2, b"live.example"), (3, None)).replace(b"live", b"life"),
    summed((3, None), (3, bytes(4))),
    binary(body=bytes(12) + b"\3\0\0"),
    binary(body=bytes(12) + b"\3\0\5" + bytes(5)),
    binary(body=bytes(12) + b"\1\0\4abc"),
    binary(body=bytes(12) + b"\1\0"),
    b"\x03" + bytes(1536),
    b"\x16\x03\x01",
    b"GET / HTTP/1.1\r\n\r\n",
    b"PROXY\r\n",
    b"PROXY TCP4\r\n........",
    b"PROXY TCP5 192.0.2.7 10.0.0.1 1 2\r\n",
    b"PROXY TCP4 2001:db8::1 ::1 1 2\r\n",
    b"PROXY TCP4 192.0.2.777 10.0.0.1 1 2\r\n",
    b"PROXY TCP4 192.0.2.7 10.0.0.1 65536 2\r\n",
    b"PROXY TCP4 192.0.2.7 10.0.0.1 -1 2\r\n",
    b"PROXY TCP4 192.0.2.7 10.0.0.1  1 2\r\n",
    b"PROXY TCP4 192.0.2.7 10.0.0.1 1 2 3\r\n",
    b"PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n",
    b"PROXY TCP4 " + b"1" * 200,
    SIGNATURE[:-1] + b"X" + bytes(20),
    binary(command=0x11),
    binary(command=0x22),
    binary(kind=0x12),
    binary(kind=0x99),
    binary(body=b"\xc0\0\2\7"),
    binary(kind=0x21),
    binary(body=bytes(HEADER_BYTES)),
    b"\xf3\0\3abc",
    b"\xf3\4\1",
    b"\xf3\xff\xff",
]


def read(data, most=None):
    """Return the reader, and how many octets it took of `data`; `most` at a time, as a network brings them."""
    reader, taken = HeaderReader(), 0
    while reader.wanted and taken < len(data):
        piece = data[taken : taken + min(reader.wanted, most or reader.wanted)]
        taken += len(piece)
        reader.read(piece)
    return reader, taken


def test_checksum_when_of_known_octets_is_that_of_the_specification():
    """The examples of RFC 3720, B.4, which give the octets in the order in which they are sent there: lowest first."""
    for octets, expected in ((bytes(32), "aa36918a"), (b"\xff" * 32, "43aba862"), (bytes(range(32)), "4e79dd46")):
        assert crc32c(octets)[::-1].hex() == expected


@pytest.mark.parametrize("most", [None, 1, 2, 7])
@pytest.mark.parametrize(("header", "origin"), GOOD)
def test_header_when_right_says_whom_the_proxy_speaks_for_and_takes_no_octet_more(header, origin, most):
    reader, taken = read(header + b"\3" + bytes(1536), most)
    assert (reader.origin, taken, reader.wanted) == (origin, len(header), 0)


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("header", BAD)
def test_header_when_wrong_is_refused(header, most):
    with pytest.raises(ProxyHeaderError) as caught:
        read(header + bytes(64), most)
    assert caught.value.code == "proxy-header"


@pytest.mark.parametrize("header", [header for header, _ in GOOD])
def test_header_when_cut_off_wants_more_and_knows_nobody(header):
    for end in range(len(header)):
        reader, taken = read(header[:end])
        assert (reader.origin, taken) == (None, end)
        assert 0 < reader.wanted <= len(header) - end
        assert reader.begun is bool(end)


@given(
    st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE, SIGNATURE + b"!\x11", b"\xf3"]),
    st.binary(max_size=4000),
)
def test_header_when_anything_is_bounded(head, tail):
    try:
        reader, taken = read(head + tail)
    except ProxyHeaderError:
        return
    assert taken + reader.wanted <= max(HEADER_BYTES, LINE_BYTES)


def test_trusted_proxies_when_asked_know_their_networks_and_nobody_else():
    trusted = TrustedProxies(["127.0.0.1", " 10.0.0.0/8", "2001:db8::/32"])
    assert all(address in trusted for address in ("127.0.0.1", "10.255.0.1", "::ffff:10.0.0.1", "2001:db8::5"))
    assert not any(address in trusted for address in ("127.0.0.2", "11.0.0.1", "::1", "local", "", None))
    assert "127.0.0.1" not in TrustedProxies()
    with pytest.raises(ConfigError, match="'nowhere' is no address and no network"):
        TrustedProxies(["nowhere"])
