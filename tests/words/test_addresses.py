"""Networks as people write them."""

from __future__ import annotations

import ipaddress

import pytest

from flowctl.core.text.addresses import (
    address_of,
    is_loopback,
    join_host_port,
    listen_addresses,
    listen_hosts,
    parse_network,
)
from flowctl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        (" 192.0.2.7 ", "192.0.2.7/32"),
        ("192.0.2.7/24", "192.0.2.0/24"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("2001:db8::1", "2001:db8::1/128"),
    ],
)
def test_network_when_written_as_people_do_is_read(text, expected):
    assert parse_network(text, "allow") == ipaddress.ip_network(expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("text", ["somewhere", "", "10.0.0.0/33", "1"])
def test_network_when_it_is_none_is_refused_by_name(text, exact):
    with pytest.raises(ConfigError, match=f"allow: '{text}' is no address and no network") as caught:
        parse_network(text, "allow", exact=exact)
    assert caught.value.hint


def test_network_when_it_has_to_be_exact_has_no_bits_behind_its_prefix():
    """Where a list decides who is spared, 192.0.2.7/24 may mean one address or 256."""
    with pytest.raises(ConfigError, match="has host bits set"):
        parse_network("192.0.2.7/24", "allow", exact=True)


def test_listen_addresses_when_there_are_several_are_hosts_and_ports():
    assert listen_addresses(" 0.0.0.0:443, [::1]:8443 ,host.example:1", "https") == (
        ("0.0.0.0", 443),
        ("::1", 8443),
        ("host.example", 1),
    )
    assert listen_addresses("", "https") == ()
    assert listen_hosts("0.0.0.0, [::]") == ("0.0.0.0", "::")


@pytest.mark.parametrize("text", ["443", "::1:443", "[::1]", "a:b", "a:70000", "a b:1", "[x]:1", "a:1,b"])
def test_listen_addresses_when_one_is_none_are_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"https: '.*' is no address to listen on"):
        listen_addresses(text, "https")


@pytest.mark.parametrize(
    ("host", "text"),
    [("10.0.0.5", "10.0.0.5:1935"), ("a.example", "a.example:1935"), ("::1", "[::1]:1935"), ("[::1]", "[::1]:1935")],
)
def test_address_when_host_and_port_are_joined_is_read_again(host, text):
    assert join_host_port(host, 1935) == text == address_of((host, 1935))
    assert listen_addresses(text, "http") == ((host.strip("[]"), 1935),)


def test_address_of_a_peer_without_a_port_is_what_stands_there():
    """The server itself follows another: where it does so is one text."""
    assert address_of(("[::1]:1936", 0)) == "[::1]:1936"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "localhost.", "tv.localhost", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
)
def test_host_when_it_is_this_machine_alone_is_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "mylocalhost", "10.0.0.1", "::", "[::1]"]
)
def test_host_when_others_may_have_it_is_not_loopback(host):
    assert not is_loopback(host)
