"""Recorded addresses (ossrs/srs unit tests) against the address parser."""

import json
from pathlib import Path

import pytest

from flowctl.wire.rtmp.url import from_connect

VECTORS = Path(__file__).resolve().parents[2].parent / "shared" / "vectors"


def load():
    """Return the recorded addresses as pytest parameters; one that skips visibly where there are none."""
    found = []
    for name in ("rtmp_vectors.json", "rtmp_vectors_more.json"):
        path = VECTORS / name
        if path.exists():
            found += [vector for vector in json.loads(path.read_text("utf-8"))["vectors"] if vector["kind"] == "tcurl"]
    if not found:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no recorded vectors in {VECTORS}"))]
    return [pytest.param(vector, id=vector["id"]) for vector in found]


@pytest.mark.parametrize("vector", load())
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
