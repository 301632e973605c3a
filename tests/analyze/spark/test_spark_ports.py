"""Ports of the driver on loopback, which every user of the machine reaches: they read nothing without the secret."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

REQUEST = 3
"""Type of an RPC request, see `org.apache.spark.network.protocol.Message`."""


def answer(port, body):
    message = struct.pack(">bqi", REQUEST, 7, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), 20) as peer:
        peer.sendall(struct.pack(">q", len(message) + 8) + message)
        peer.settimeout(None)  # with a timeout, recv does not wait for all
        size = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "big")
        return peer.recv(size - 8, socket.MSG_WAITALL)


@pytest.mark.parametrize("place", ["driver", "blocks"])
def test_port_when_asked_without_the_secret_reads_nothing(spark, place):
    driver = spark.sparkContext.getConf().get("spark.driver.port")
    blocks = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keys().head()  # HOST:PORT
    port = driver if place == "driver" else blocks.rpartition(":")[2]
    said = answer(int(port), b"\xac\xed\x00\x05 an object of Java")
    assert b"Expected SaslMessage" in said


def test_secret_when_made_is_on_no_command_line(spark):
    assert spark.sparkContext.getConf().get("spark.authenticate") == "true"
    line = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/cmdline").read_text()
    assert "spark.authenticate=true" in line
    assert "authenticate.secret" not in line
