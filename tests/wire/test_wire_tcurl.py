"""Recorded addresses (ossrs/srs unit tests) against the address parser."""

import pytest
from vector_kit import vectors

from flowctl.wire.rtmp.url import from_connect


@pytest.mark.parametrize("vector", vectors("tcurl"))
def test_recorded_address_is_read_as_stated(vector):
    expected = vector["expected"]
    text = bytes.fromhex(vector["input_hex"]).decode("utf-8")
    url = from_connect(text, None).with_stream(expected["given"]["stream"])
    actual = {
        "schema": url.scheme,
        "host": url.host,
        "vhost": url.vhost,
        "app": url.app,
        "stream": url.stream,
        "port": url.port,
    }
    assert {name: expected[name] for name in actual} == actual
