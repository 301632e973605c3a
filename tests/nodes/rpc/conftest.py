"""Nodes, and raw ZeroMQ peers that dial them, as the tests of this room start them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq_kit import NEVER_MS, dial_curve

from flowctl.nodes.rpc.node import RpcNode
from flowctl.wire.zmtp.keys import KeyPair

WAIT_MS = 20_000


@pytest.fixture
def errors() -> list[tuple[str, BaseException]]:
    """What nodes have reported: where, and what was raised."""
    return []


@pytest.fixture
def node(loop_factory, errors) -> Iterator[Callable[..., RpcNode]]:
    """Make nodes."""
    made: list[RpcNode] = []

    def note(where: str, error: BaseException) -> None:
        errors.append((where, error))

    def make(name: str = "rpc", **settings) -> RpcNode:
        made.append(RpcNode(name=name, loop_factory=loop_factory, on_error=note, **settings))
        return made[-1]

    yield make
    for item in made:
        item.stop()


@pytest.fixture
def raw() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Dial with DEALERs, each of a context of its own."""
    contexts: list[zmq.Context] = []
    dialled: list[zmq.Socket[bytes]] = []  # one that nobody holds would be closed

    def dial(
        address: str, keys: KeyPair | None = None, server_key: bytes = b"", route: bytes = b"", **options
    ) -> zmq.Socket[bytes]:
        contexts.append(zmq.Context())
        dealer = contexts[-1].socket(zmq.DEALER)
        dialled.append(dealer)
        # One that lost its route would take it back.
        options = {"rcvtimeo": WAIT_MS, "reconnect_ivl": NEVER_MS} | options
        for option, value in options.items():
            setattr(dealer, option, value)
        if route:
            dealer.routing_id = route
        if keys is not None:
            dial_curve(dealer, keys, server_key)
        dealer.connect(address)
        return dealer

    yield dial
    for context in contexts:
        context.destroy(linger=0)
