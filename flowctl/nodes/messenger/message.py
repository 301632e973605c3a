"""What applications of a messenger hold in their hands: destinations, messages that came or failed, and handlers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flowctl.core.outcomes.pending import Outcome
from flowctl.core.text.addresses import join_host_port
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.messenger.storefile import Effect
from flowctl.pollgroup import PollGroup
from flowctl.wire.zmtp.endpoint import check_port

MAX_IPC_PATH_BYTES = 107
"""Longest path that the address of a Unix socket holds on Linux."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a messenger listens, or is to be found.

    Args:
        name: of the messenger there, for logs.
        endpoint: as ZeroMQ writes it, for example ``tcp://127.0.0.1:9000``.
        pubkey: public key of CURVE of the messenger there, 32 octets, for one that has keys. Empty: not encrypted.

    Raises:
        ConfigError: its port is out of range.
    """

    name: str
    endpoint: str
    pubkey: bytes = b""

    def __post_init__(self) -> None:
        check_port(self.endpoint)

    @classmethod
    def tcp(cls, name: str, host: str, port: int) -> Destination:
        """Return a TCP destination; to listen, port 0 is any free one.

        Raises:
            ConfigError: the port is out of range.
        """
        if not 0 <= port <= 65535:
            raise ConfigError(f"port is {port}, it must be 0 to 65535")
        return cls(name, f"tcp://{join_host_port(host, port)}")

    @classmethod
    def ipc(cls, name: str, path: str) -> Destination:
        """Return a destination that is a Unix socket at `path`.

        Raises:
            ConfigError: the path is empty or longer than a Unix socket's address holds.
        """
        if not 0 < len(path.encode()) <= MAX_IPC_PATH_BYTES:
            raise ConfigError(f"an ipc path has 1 to {MAX_IPC_PATH_BYTES} bytes, not {len(path.encode())}")
        return cls(name, f"ipc://{path}")

    @classmethod
    def inproc(cls, name: str, endpoint: str) -> Destination:
        """Return a destination within this process, of messengers and sockets of the same context."""
        return cls(name, f"inproc://{endpoint}")


To = int | tuple[int, str | bytes]
"""Who gets a message: the number of a connection, or that of a listener and the identity of a peer that came to it."""


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """A message that came.

    Args:
        source_callback_id: callback of the sender that a response may name; 0: it wants none.
        sender: who a response goes to, as `Messenger.send_message` takes it.
    """

    id: int
    source_callback_id: int
    destination_callback_id: int
    routing_id: bytes
    message: bytes
    payload: tuple[bytes, ...]
    sender: To
    effects: list[Effect] | None = field(default=None, repr=False)

    def apply(self, effect: Effect) -> None:
        """Have `effect` run in the transaction that notes this message as received: both are kept, or neither."""
        if self.effects is None:
            raise LocalProtocolError("the messenger has no store, or acknowledges on receipt", hint="give open_store")
        self.effects.append(effect)


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that was given up.

    Args:
        outcome: TIMEOUT: its deadline passed; REJECTED: all attempts were used, or the store refused it; WITHDRAWN:
            its connection was closed; SHUTDOWN: the messenger was stopped.
        message: the body; empty where it was acknowledged, it is not kept then.
    """

    message_id: int
    to: To
    outcome: Outcome
    acknowledged: bool = False
    message: bytes = b""
    payload: tuple[bytes, ...] = ()


Handler: TypeAlias = Callable[..., object]
"""Called with the messenger and the object of the event; may be a coroutine function."""


@dataclass(eq=False)
class Handlers:
    """Calls handlers of one messenger, which is their first argument."""

    _messenger: object
    _group: Callable[[], PollGroup]
    error_count: int = 0  #: exceptions of handlers, contained
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  #: coroutines of handlers that run

    def call(self, what: str, handler: Handler, *args: object) -> None:
        """Call a handler that decides nothing."""
        try:
            result = handler(self._messenger, *args)
        except BaseException as error:  # noqa: BLE001  (a handler's fault is its own)
            self.error_count += 1
            self._group().report(what, error)
            return
        if inspect.isawaitable(result):
            self.spawn(self._finish(what, result), result)

    async def _finish(self, what: str, result: Awaitable[object]) -> None:
        try:
            await result
        except BaseException as error:  # noqa: BLE001  (a handler's fault is its own)
            self.error_count += 1
            self._group().report(what, error)

    def spawn(self, work: Coroutine[Any, Any, None], waits_for: object) -> asyncio.Task[None]:
        """Run `work`, which awaits what a handler has returned."""
        task = self._group().loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if inspect.iscoroutine(waits_for):  # a task that is cancelled before it begins would never look at it
            task.add_done_callback(lambda _: waits_for.close())
        return task
