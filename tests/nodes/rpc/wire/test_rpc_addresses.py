"""Addresses of RPC peers: what is parsed, printed and refused; the examples of the maintainers' own test among them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import ConfigError
from flowctl.nodes.rpc.wire.addresses import MOST_CHARS, MOST_PATH_BYTES, Address, AddressTransport
from flowctl.wire.zmtp.keytext import KeyEncoding, encode_key

KEY = bytes.fromhex("f16ba5591039f089b42a834175093094074d0d937a79e53e5ce730f946e14b88")
HEX = KEY.hex()
B32Z = "6fi4kseo88aeupbkopyzknjo1odw4dcuxjh6kx1hhhax1tzbjqry"
B64 = "8WulWRA58Im0KoNBdQkwlAdNDZN6eeU+XOcw+UbhS4g"
SLASHED = bytes([255]) * 32  # in base64 it is nothing but slashes, nearly


@pytest.mark.parametrize(
    ("text", "host", "port", "zmq"),
    [
        ("tcp://1.2.3.4:5678", "1.2.3.4", 5678, "tcp://1.2.3.4:5678"),
        ("tcp://[::1]:1111", "[::1]", 1111, "tcp://[::1]:1111"),
        ("tcp://example.com:80", "example.com", 80, "tcp://example.com:80"),
        (f"curve://a:1/{HEX}", "a", 1, "tcp://a:1"),
        (f"tcp+curve://a:1/{B32Z}", "a", 1, "tcp://a:1"),
        (f"curve://[::1]:1/{B32Z.upper()}", "[::1]", 1, "tcp://[::1]:1"),
        ("TCP://1.2.3.4:5678", "1.2.3.4", 5678, "tcp://1.2.3.4:5678"),
        (f"CURVE://EXAMPLE.COM:80/{HEX.upper()}", "example.com", 80, "tcp://example.com:80"),
        (f"CURVE://$2001:DB8::1$:1/{B32Z.upper()}", "[2001:db8::1]", 1, "tcp://[2001:db8::1]:1"),
    ],
)
def test_address_when_tcp_has_host_and_port(text, host, port, zmq):
    address = Address.parse(text)
    assert address.pubkey == (KEY if "curve" in text.lower() else b"")
    assert (AddressTransport.TCP, host, port, zmq) == (
        address.transport,
        address.host,
        address.port,
        address.zmq_address,
    )


@pytest.mark.parametrize(
    ("text", "socket"),
    [
        ("ipc:///path/to/foo", "/path/to/foo"),
        ("ipc://../foo", "../foo"),
        ("ipc://@abstract", "@abstract"),
        (f"ipc+curve://my.sock/{HEX}", "my.sock"),
        (f"ipc+curve://../my.sock/{B32Z}", "../my.sock"),
        (f"ipc+curve:///my.sock/{B32Z.upper()}", "/my.sock"),
        (f"ipc+curve://./my.sock/{B64}=", "./my.sock"),
        (f"ipc+curve://a/{HEX}/{B32Z}", f"a/{HEX}"),
    ],
)
def test_address_when_ipc_has_a_path(text, socket):
    address = Address.parse(text)
    assert (AddressTransport.IPC, socket, f"ipc://{socket}") == (address.transport, address.socket, address.zmq_address)
    assert address.pubkey == (KEY if "curve" in text else b"")


def test_address_when_the_key_has_slashes_in_base64_is_cut_at_the_right_one():
    address = Address(AddressTransport.IPC, socket="a/b", pubkey=SLASHED)
    text = f"ipc+curve://a/b/{encode_key(SLASHED, KeyEncoding.BASE64)}"
    assert text.count("/") > 40
    assert (address, address) == (Address.parse(text), Address.parse(text + "="))
    tcp = Address(AddressTransport.TCP, host="a", port=1, pubkey=SLASHED)
    assert tcp == Address.parse(f"curve://a:1/{encode_key(SLASHED, KeyEncoding.BASE64)}")


def test_addresses_when_they_say_the_same_are_equal():
    texts = [f"tcp+curve://a:1/{HEX}", f"curve://a:1/{B32Z}", f"curve://a:1/{B64}", f"curve://a:1/{B32Z.upper()}"]
    assert {Address.parse(text) for text in texts} == {Address(AddressTransport.TCP, host="a", port=1, pubkey=KEY)}
    assert Address.parse("tcp://a:1") != Address.parse(texts[0])
    assert Address.parse("tcp://A:1") != Address.parse("tcp://a:1")
    assert Address.parse(texts[0]).with_pubkey(b"") == Address.parse("tcp://a:1")


def test_address_when_printed_has_the_key_in_base32z():
    assert str(Address.parse(f"tcp+curve://a:1/{HEX}")) == f"curve://a:1/{B32Z}"
    assert str(Address.parse(f"ipc+curve://./s/{B64}")) == f"ipc+curve://./s/{B32Z}"


NO_ADDRESSES = f"""
TCP://a:1  TCP://$::1:1  TCP+CURVE://A:1/{HEX.upper()}  CURVE://A:1  CURVE://A:1/{B64}  CURVE://A:1/{B64.upper()}
tcp  tcp://  ://a:1  tcpz://a:1  Tcp://a:1  TCP://[::1]:1  IPC://A  CURVE://A:1/{B32Z}  inproc://  ipc://
tcp://abc  tcp://1:1:1  tcp://a:0  tcp://a:65536  tcp://a:  tcp://a:+1  tcp://a:\u0661  tcp://:1  tcp://a:1/  tcp://*:1
tcp://[::1:1080  tcp://[::1]1080  tcp://[]:1  tcp://[::g]:1  tcp://[::1]:  tcp://[::1]x:1  tcp://$::1$:1  tcp://é:1
tcp://a:1/{HEX}  curve://a:1  curve://a:1/  curve://a:1/{HEX}0  curve://a:1/{HEX}/x
ipc+curve://s  ipc+curve://s/  ipc+curve:///{HEX}  ipc+curve://{HEX}
ipc+curve://s/{HEX[:63]}  ipc+curve://s/{B32Z[:51]}  ipc+curve://s/{B64[:42]}
""".split()
LONG = ("ipc://" + "a" * (MOST_PATH_BYTES + 1), "tcp://" + "a" * MOST_CHARS, "tcp://" + "a" * 254 + ":1")


@pytest.mark.parametrize("text", [*NO_ADDRESSES, *LONG, "", "tcp://a:1 ", "tcp://a b:1", "tcp://a\n:1", "ipc://a\0b"])
def test_text_when_no_address_is_refused_with_a_short_line(text):
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert "tcp://host:port" in (caught.value.hint or "")


def test_address_when_made_of_parts_that_do_not_fit_is_refused():
    for parts in (
        {"transport": AddressTransport.TCP, "host": "a", "port": 1, "pubkey": b"short"},
        {"transport": AddressTransport.TCP, "host": "a"},
        {"transport": AddressTransport.TCP, "port": 1},
        {"transport": AddressTransport.INPROC, "socket": "a", "pubkey": KEY},
    ):
        with pytest.raises(ConfigError):
            Address(**parts)


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=120),
    st.sampled_from(["", "tcp://", "tcp://[", "curve://", "ipc://", "ipc+curve://", "inproc://"]),
)
def test_text_when_anything_is_an_address_or_an_error_of_ours(text, scheme):
    try:
        address = Address.parse(scheme + text)
    except ConfigError:
        return
    assert address == Address.parse(str(address))
