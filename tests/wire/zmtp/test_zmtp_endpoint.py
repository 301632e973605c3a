"""Ports of endpoints: ZeroMQ takes any number, and binds to another one."""

from __future__ import annotations

import pytest

from flowctl import ConfigError, Destination, RpcNode
from flowctl.wire.zmtp.endpoint import check_port


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:*", "tcp://127.0.0.1:0", "tcp://[::1]:65535", "ipc:///a:99999", "tcp://h"]
)
def test_port_when_it_is_one_is_let_pass(endpoint):
    assert check_port(endpoint) is None


@pytest.mark.parametrize("port", ["65536", "99999", "9" * 5000])
def test_port_when_out_of_range_is_refused_by_all_who_bind_or_connect(port):
    """ZeroMQ would take its last 16 bits: 99999 would listen at 34463, and nobody would hear of it."""
    endpoint = f"tcp://127.0.0.1:{port}"
    with pytest.raises(ConfigError, match="it must be 0 to 65535"):
        check_port(endpoint)
    with pytest.raises(ConfigError, match="it must be 0 to 65535"):
        Destination("far", endpoint)
    node = RpcNode()
    with pytest.raises(ConfigError, match="it must be 0 to 65535"):
        node.listen_plain(endpoint)
    assert node.stop()
