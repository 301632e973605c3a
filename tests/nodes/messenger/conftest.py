"""Messengers, and raw ZeroMQ peers that follow the format, as the tests of this room start them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq_kit import METADATA_OPTION

from flowctl.core.outcomes.backoff import Backoff
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.wire import encode_announcement

WAIT_MS = 20_000
SLOW = DeliverySettings(retry=Backoff(first_s=30.0, most_s=30.0))
"""For tests in which a second attempt would only disturb."""


@pytest.fixture
def make(loop_factory) -> Iterator[Callable[..., Messenger]]:
    """Make messengers that run on threads of their own."""
    made: list[Messenger] = []

    def new(identity: str, port: int | None = None, **options) -> Messenger:
        options.setdefault("settings", SLOW)
        options.setdefault("on_error", lambda where, error: None)
        made.append(Messenger(port, identity, loop_factory=loop_factory, **options))
        made[-1].start()
        return made[-1]

    yield new
    for item in made:
        item.stop()


@pytest.fixture
def raw() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Make raw sockets that wait for up to 20 s."""
    made: list[zmq.Socket[bytes]] = []

    def new(
        kind: int, identity: bytes = b"", *, connect: str = "", bind: str = "", incarnation: int = 0
    ) -> zmq.Socket[bytes]:
        item = zmq.Context.instance().socket(kind)
        made.append(item)
        item.linger, item.rcvtimeo, item.sndtimeo = (0, WAIT_MS, WAIT_MS)
        if identity:
            item.routing_id = identity
        if incarnation:
            item.setsockopt(METADATA_OPTION, encode_announcement(incarnation))
        if kind == zmq.ROUTER:
            item.router_mandatory = True
        if bind:
            item.bind(bind)
        if connect:
            item.connect(connect)
        return item

    yield new
    for item in made:
        item.close(linger=0)


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/s"
