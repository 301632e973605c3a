"""An agent as a process: a thread with a loop, the Messenger to the others, RPC to the server, and a socket for status.

All of it runs on one thread, so nothing here is locked. The server is looked at every `LOOK_S`, and at once when
another member has told of something. What cannot be sent now is not lost: members compare their tables.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final

import structlog

from flowctl.control.fleet.agent import Agent
from flowctl.control.fleet.config import FleetConfig
from flowctl.control.fleet.link import ServerLink
from flowctl.control.fleet.replica import COMPARE_S, Letter
from flowctl.control.fleet.store import Store
from flowctl.control.fleet.wire import MOST_MESSAGE_BYTES
from flowctl.control.place import make_way
from flowctl.core.outcomes.backoff import Backoff
from flowctl.errors import BrokenError, BusyError, ConfigError, FlowctlError
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination, Message
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.nodes.messenger.store import Store as Outbox
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.node import RpcNode
from flowctl.pollgroup import PollGroup
from flowctl.wire.zeromq.curve import KeyPair

_log: Final = structlog.get_logger("flowctl.fleet")
LOOK_S: Final = 0.5
"""Between two looks at the server's changes: one small call; how late a ban is told to the others, at most."""
_START_S: Final = 20.0
OUTBOX_BYTES: Final = 64 * 1024 * 1024
"""Size of the outbox on the disk: what does not go in is found by comparing."""
WINDOW: Final = 1024
"""Changes kept for a member that is away; what is more, it gets by comparing."""
LASTING_S: Final = 7 * 86_400.0
"""How long a change is kept for a member that is away; after that, the member gets it by comparing."""
_PASSING_S: Final = 2 * COMPARE_S
"""How long a comparison is tried: the next one says more."""
_MOST_PASSING: Final = 8
"""Comparisons under way to one member: one that is away is not to be met by a hundred of them."""


class AgentProcess:
    """An agent with its thread and sockets.

    Attributes:
        fault: why it ended by itself. None: it did not.
    """

    def __init__(self, config: FleetConfig, ended: Callable[[], object]) -> None:
        self._config: Final = config
        self._ended: Final = ended
        self._group: Final = PollGroup(f"fleet-{config.name}")
        self._done: Future[None] | None = None
        self.fault: BaseException | None = None
        # The loop's thread:
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._agent: Agent
        self._messenger: Messenger
        self._connections: dict[str, int] = {}
        self._passing: Counter[str] = Counter()  # comparisons under way, by member
        self._unsent = 0

    def start(self) -> None:
        """Start, and return when it listens."""
        self._group.start()
        listening: Future[None] = Future()
        self._done = asyncio.run_coroutine_threadsafe(self._run(listening), self._group.loop)
        self._done.add_done_callback(partial(self._over, listening))
        try:
            listening.result(_START_S)
        except BaseException:
            self._group.stop()
            raise

    def stop(self, deadline_s: float = 5.0) -> None:
        """End it, and wait for it; idempotent."""
        with suppress(FlowctlError):
            self._group.call_soon(self._stop.set)
        if self._done is not None:
            with suppress(Exception):  # `fault` has it
                self._done.result(deadline_s)
        self._group.stop(deadline_s)

    def _over(self, listening: Future[None], done: Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if not listening.done():
            listening.set_exception(error or BrokenError("the agent has ended"))
        elif error is not None:
            self.fault = error
            self._ended()

    async def _run(self, listening: Future[None]) -> None:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            listening.set_result(None)
            tasks = [asyncio.create_task(work) for work in (self._ticking(), self._keeping(), self._stop.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self._config
        keys = self._keys()
        store = Store(config.folder)
        stack.callback(store.close)
        make_way(config.status_socket)
        node = RpcNode(name="flowctl-fleet", keys=keys)
        node.add_category("fleet", AuthLevel.BASIC)
        node.add_request_command("fleet", "status", self._status)
        link = ServerLink(node, config.server)
        self._agent = Agent(config.name, config.others, store, link.call, self._send)
        await stack.enter_async_context(node)
        node.listen_plain(f"ipc://{config.status_socket}", AuthLevel.BASIC)
        retry = Backoff(first_s=0.25, factor=2.0, most_s=COMPARE_S)
        names = {item.pubkey: name for name, item in config.members.items() if item.pubkey is not None}
        self._messenger = await stack.enter_async_context(
            Messenger(
                identity=config.name,
                settings=DeliverySettings(window=WINDOW, max_attempts=None, retry=retry),
                open_store=partial(Outbox, config.folder / "outbox.sqlite", max_bytes=OUTBOX_BYTES),
                max_message_bytes=MOST_MESSAGE_BYTES,
                keys=keys,
                allow=None if keys is None else lambda pubkey: names.get(pubkey, False),
            )
        )
        for name, item in config.others.items():
            destination = Destination(name, item.address, item.pubkey or b"")
            self._connections[name] = self._messenger.make_connection(destination)
        self._messenger.listen_for_connection(Destination(config.name, config.listens_at), config.name, self._received)
        _log.info("agent started", member=config.name, at=config.listens_at, others=sorted(config.others))

    def _keys(self) -> KeyPair | None:
        config = self._config
        if config.key_file is None:
            return None
        keys = KeyPair.read(config.key_file)
        if keys.public != config.members[config.name].pubkey:
            raise ConfigError(
                f"the keys in {config.key_file} are not those of the member {config.name}",
                hint=f"[members.{config.name}] has to have the public key of that file",
            )
        return keys

    def _received(self, messenger: Messenger, message: Message) -> None:
        """Take a message; it is acknowledged once this returns, and comes again if this raises."""
        del messenger
        self._agent.received(message.routing_id.decode("ascii", "replace"), message.message)
        if self._agent.waiting:
            self._wake.set()

    def _send(self, letter: Letter) -> None:
        """Send a letter, or do without: what is in it is found by comparing."""
        name, over = letter.to, None
        if not letter.lasting:
            if self._passing[name] >= _MOST_PASSING:
                return
            self._passing[name] += 1
            over = partial(self._passed, name)
        try:
            self._messenger.send_message(
                self._connections[name],
                letter.octets,
                deadline=LASTING_S if letter.lasting else _PASSING_S,
                on_ack=over,
                on_failure=over,
            )
        except BusyError:
            self._unsent += 1
            if over is not None:
                over()

    def _passed(self, name: str, *_: object) -> None:
        self._passing[name] -= 1

    async def _ticking(self) -> None:
        while True:
            self._agent.tick()
            await asyncio.sleep(COMPARE_S)

    async def _keeping(self) -> None:
        while True:
            self._wake.clear()
            if not await self._agent.step():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_S)

    async def _status(self, message: object) -> bytes:
        del message
        figures = self._messenger.statistics()
        status = self._agent.status(lambda name: self._messenger.pending_count(self._connections[name]))
        status["outbox"] = {"pending": figures.pending, "bytes": figures.pending_bytes, "not_taken": self._unsent}
        return json.dumps(status).encode()
