"""Runs one client from connect to end on a poll group of its own, for command-line tools: retries a login, waits.

Adobe authentication takes up to three connections: the server refuses the first with what it wants to know, and each
refusal says how to connect next (`flowctl.wire.rtmp.events.Rejected.retry_parameters`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from flowctl.pollgroup import PollGroup
from flowctl.wire.client.base import RtmpClient
from flowctl.wire.client.connect import start_client

_STOP_S: Final = 2.0

ClientT = TypeVar("ClientT", bound=RtmpClient)


class ClientRun(Generic[ClientT]):
    """One client and its poll group; use it as a context."""

    client: ClientT  # the present attempt. Set by `start`.

    def __init__(self, make: Callable[[str, Callable[[Any], None]], ClientT], **settings: Any) -> None:
        self._make = make
        self._settings = settings
        self._group = PollGroup("client")
        self._ended = threading.Event()

    def __enter__(self) -> ClientRun[ClientT]:
        self._group.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._group.stop(_STOP_S)

    def start(self, parameters: str = "") -> None:
        """Connect; blocks until the connection is made."""
        self._ended.clear()
        self.client = self._make(parameters, lambda _: self._ended.set())
        start_client(self._group, self.client, **self._settings)

    def wait(self) -> None:
        """Wait until the client has ended, logging in where the server wants it."""
        while self._ended.wait() and (rejected := self.client.rejected) is not None:
            if rejected.retry_parameters is None:
                return
            self.start(rejected.retry_parameters)

    def finish(self, details: str, deadline_s: float = _STOP_S) -> bool:
        if not self.client.ended:
            self._group.call_soon(self.client.finish, details)
        return self._ended.wait(deadline_s)
