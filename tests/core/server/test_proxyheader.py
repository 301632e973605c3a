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


GOOD = [
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
