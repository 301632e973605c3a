"""The loopback address that servers under test listen on and their clients come from: 127.0.0.1, or another by `WHERE`.

``make ipv6`` runs the tests of all that speaks HTTP once more on ``::1``.
"""

from __future__ import annotations

import os
import socket

import pytest

from flowctl.core.text.addresses import address_key, join_host_port, parse_network

WHERE = "TEST_LOOPBACK"
"""No name of a setting: servers that tests start would read it."""
LOOPBACK = os.environ.get(WHERE, "127.0.0.1")
NETWORK = str(parse_network(address_key(LOOPBACK), WHERE))
"""What is banned with it."""
FAMILY = socket.AF_INET6 if ":" in LOOPBACK else socket.AF_INET
SETTINGS = {"FLOWCTL_HOST": LOOPBACK} if WHERE in os.environ else {}
"""Environment of servers that are processes of their own: where they listen unless they are told."""
many_addresses = pytest.mark.skipif(FAMILY == socket.AF_INET6, reason="IPv6 has one loopback address")


def why_not(address):
    """Return why nothing can listen on an address; "" where it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            sock.bind((address, 0))
    except OSError as error:
        return f"this machine has no {address}: {error}"
    return ""


def loopback(port=0):
    """Return the address with a port, as it is written in settings and URLs; 0: any that is free."""
    return join_host_port(LOOPBACK, port)
