"""Origins of pages and hosts of requests: what is one, however it is written, and what is not."""

from __future__ import annotations

import pytest

from flowctl.core.text.addresses import is_among, is_host_among, is_own_origin, is_rebound, origin_key, parse_host

OWN = [
    ("https://example.com", "example.com"),
    ("https://example.com", "example.com:443"),
    ("http://example.com", "example.com:80"),
    ("https://EXAMPLE.com:443", "Example.Com"),
    ("https://example.com", "example.com."),
    ("http://example.com:8080", "example.com:8080"),
    ("http://[::1]:8080", "[0:0:0:0:0:0:0:1]:8080"),
    ("wss://example.com", "example.com:443"),
]
OTHER = [
    ("https://evil.example", "example.com"),
    ("https://example.com", "example.com:8443"),
    ("https://example.com", "example.com:80"),
    ("http://example.com", "example.com:443"),
    ("null", "example.com"),
    ("null", "null"),
    ("", ""),
    ("https://", ""),
    ("https://example.com.evil.example", "example.com"),
    ("https://example.com/@evil", "example.com/@evil"),
    ("https://[::1]", "::1"),
    ("https://example.com:0", "example.com:0"),
    ("https://example.com:99999", "example.com:99999"),
]


@pytest.mark.parametrize(("origin", "host"), OWN)
def test_origin_when_scheme_host_and_port_are_those_of_the_request_is_its_own(origin, host):
    assert is_own_origin(origin, host)


@pytest.mark.parametrize(("origin", "host"), OTHER)
def test_origin_when_it_is_another_or_none_is_not_its_own(origin, host):
    assert not is_own_origin(origin, host)


def test_origins_when_named_are_found_however_they_are_written():
    named = ["https://App.example:443/", "http://[::1]:80", "null"]
    assert all(
        is_among(item, named) for item in ("https://app.example", "http://[0::1]", "https://app.example.", "null")
    )
    assert not any(is_among(item, named) for item in ("http://app.example", "https://app.example:8443", "", "file://"))
    assert is_among("anything", {"*"})
    assert not is_among("https://app.example", ())


def test_hosts_when_an_origin_names_them_are_so_at_any_port():
    assert is_host_among("Tv.lan:8080", ["https://tv.lan"])
    assert is_host_among("evil.example", ["*"])
    assert not is_host_among("evil.example:80", ["http://tv.lan", "null"])
    assert not is_host_among("", ["null"])


@pytest.mark.parametrize("text", ["a:b", "[x]", "[::1", "::1", "a b", "a/b", "u@a", "a:0", "a:65536", "[::1::]"])
def test_host_when_it_is_no_host_and_port_is_none(text):
    assert parse_host(text) is None
    assert origin_key(f"http://{text}/x") is None


HERE = ("127.0.0.1", 8080)


@pytest.mark.parametrize(
    ("host", "listens_at", "peer", "rebound"),
    [
        ("evil.example:8080", HERE, "127.0.0.1", True),
        ("evil.example:8080", ("::1", 8080), "::1", True),
        ("evil.example", ("127.0.0.1", 80), "127.0.0.1", True),
        ("localhost.evil.example:8080", HERE, "127.0.0.1", True),
        ("192.168.1.7:8080", HERE, "127.0.0.1", True),
        ("LOCALHOST:8080", HERE, "127.0.0.1", False),
        ("[::1]:8080", ("::1", 8080), "::1", False),
        ("example.com", HERE, "127.0.0.1", False),  # a proxy's: a browser would have said its port
        ("example.com:443", HERE, "127.0.0.1", False),
        ("example.com:8080", HERE, "203.0.113.7", False),  # a proxy said for whom it asks
        ("example.com:8080", ("0.0.0.0", 8080), "127.0.0.1", False),  # others reach it anyway
        ("example.com:8080", None, "127.0.0.1", False),
    ],
)
def test_host_when_another_name_leads_to_this_machine_alone_is_rebound(host, listens_at, peer, rebound):
    assert is_rebound(host, listens_at, peer, secure=False) is rebound
