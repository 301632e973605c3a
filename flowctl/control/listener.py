"""Serves the operations on a live server over RPC: on a unix socket for its own user, with keys from elsewhere.

A node of RPC on a thread of its own; the poll groups know nothing of it. What is called runs on one of two other
threads: one for what only looks, one for what changes the server, so that changes are made in the order of the calls
and nobody who looks waits for them.

Who may do what belongs to the connection: who can open the unix socket is the user of the server (or root) and may do
all; from elsewhere the level is that of the key in the clients file, and without a key in it there is no connection.

That file has one client a line, ``KEY LEVEL [NAME]``; LEVEL is ``basic`` (look) or ``admin`` (change), and ``#`` begins
a comment::

    8f3b...64 hex digits...  admin   night shift
    0c11...                  basic   monitoring

The file is read again when it has changed and somebody connects: a key that is taken out is not let in again. Who is
connected stays so until the connection ends. While the file cannot be read nobody is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import structlog

from flowctl.control.operations import CATEGORY, OPERATIONS, Operation, Permission, answer
from flowctl.control.place import check_path, draining_name, is_draining, make_way, usual_socket
from flowctl.core.loop.faults import ErrorHook
from flowctl.core.text.printable import short
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.nodes.rpc.access.access import AuthLevel
from flowctl.nodes.rpc.message import RpcMessage
from flowctl.nodes.rpc.node import RpcNode
from flowctl.wire.zmtp.keys import KeyPair
from flowctl.wire.zmtp.keytext import parse_key

_log: Final = structlog.get_logger("flowctl.control")
MOST_CLIENTS_BYTES: Final = 256 * 1024
"""Largest file of clients: it has room for some thousand of them."""
_LEVELS: Final = {"basic": Permission.BASIC, "admin": Permission.ADMIN}
_HINT: Final = "one KEY LEVEL [NAME] a line; flowctl rpc keygen makes keys and shows the public one"
MOST_WAITING_CALLS: Final = 64
"""Most calls of a kind that are carried out or wait: more people than that do not change one server at a time. One
caller gets half of the places that are left at most, so a flood leaves room for others."""
_FAR: Final = "tcp://"
_LENT_WITHIN_S: Final = 1.0
"""Time in which calls from other machines may end, while a successor waits."""
_BUSY: Final = json.dumps(
    {"error": {"code": "BUSY", "message": "too many calls are waiting already", "hint": "try again"}}
).encode()


CarryOut: TypeAlias = Callable[[str, bytes, Permission, str], bytes]


def listener_of(server: LiveServer) -> ControlListener:
    listener = ControlListener(server.config, server.address, partial(answer, server), server.hub.oversight.report)
    server.on_drain.append(listener.leave_names)
    server.loans.append(listener.lend)
    return listener


def keys_of(config: LiveConfig) -> tuple[KeyPair | None, Clients | None]:
    missing = [name for name in ("control_keys", "control_clients") if getattr(config, name) is None]
    if missing and any(address.startswith("tcp://") for address in config.control_addresses):
        raise ConfigError(
            f"control is {short(config.control)}, but {missing[0]} is missing: anybody could operate the server",
            hint="flowctl rpc keygen FILE makes keys; control_clients has a line KEY LEVEL for each client",
        )
    keys = None if config.control_keys is None else KeyPair.read(config.control_keys)
    return keys, None if config.control_clients is None else Clients(config.control_clients)


def check_sockets(config: LiveConfig) -> None:
    """See that unix sockets can be where the settings name them; without the usual one a server starts all the same."""
    for address in config.control_addresses:
        if address.startswith("ipc://"):
            try:
                check_path(Path(address.removeprefix("ipc://")))
            except ConfigError as error:
                raise ConfigError(f"control: {error}", hint=error.hint) from error


class ControlListener:
    """Listens for operations on a live server as its settings say; a companion of the server."""

    def __init__(
        self, config: LiveConfig, address: tuple[str, int], carry_out: CarryOut, report: ErrorHook | None = None
    ) -> None:
        self._address: Final = address
        self._answer: Final = carry_out
        self._report: Final = report
        self._addresses: Final = config.control_addresses
        self._keys, self._clients = keys_of(config)
        self._nodes: dict[bool, RpcNode] = {}  # by whether it is for other machines
        self._pools: dict[bool, ThreadPoolExecutor] = {}  # by whether it only looks
        self._waiting: dict[bool, Counter[object]] = {True: Counter(), False: Counter()}  # by caller; the node's thread
        self.bound: list[str] = []
        self._left: dict[str, Path] = {}  # by what of these was renamed: its usual name

    def start(self) -> None:
        self._pools = {
            True: ThreadPoolExecutor(1, thread_name_prefix="flowctl-control-looks"),
            False: ThreadPoolExecutor(1, thread_name_prefix="flowctl-control-changes"),
        }
        self._start_node(far=False)
        self._start_node(far=True)
        _log.info("control", addresses=self.bound, clients=0 if self._clients is None else len(self._clients))

    def _start_node(self, *, far: bool) -> None:
        addresses = [item for item in self._addresses if item.startswith(_FAR) is far]
        if not addresses:
            return
        node = self._nodes[far] = RpcNode(name="flowctl-control", keys=self._keys, on_error=self._report)
        node.add_category(CATEGORY, AuthLevel.BASIC)
        node.add_request_command(CATEGORY, "describe", _describe)
        for operation in OPERATIONS:
            node.add_request_command(CATEGORY, operation.name, self._handler(operation))
        for address in addresses:
            self._listen(node, address)
        node.start()

    def _listen(self, node: RpcNode, address: str) -> None:
        usual = address == "ipc"
        try:
            if address.startswith(_FAR):
                self.bound.append(node.listen_curve(address, self._allow))
                return
            path = usual_socket(*self._address) if usual else Path(address.removeprefix("ipc://"))
            make_way(path)
            node.listen_plain(f"ipc://{path}", AuthLevel.ADMIN)
            path.chmod(0o600)
            self.bound.append(f"ipc://{path}")
        except (ConfigError, OSError) as error:
            hint = getattr(error, "hint", None)
            if not usual:
                raise ConfigError(f"control: {error}", hint=hint) from error
            _log.warning("no operations can be called", fault=str(error), **({"hint": hint} if hint else {}))

    def _allow(self, address: str, pubkey: bytes, is_service_node: bool) -> AuthLevel | None:  # noqa: FBT001 - as called
        """Return the level of a new connection from another machine. The node's thread."""
        del is_service_node
        client = None
        try:
            client = None if self._clients is None else self._clients.find(pubkey)
        except ConfigError as error:
            _log.error("nobody is let in, the clients file is not valid", fault=str(error), hint=error.hint)
        if client is None:
            _log.warning("control connection refused", peer=address, key=pubkey.hex())
            return None
        _log.info("control connection", peer=address, client=client.name, level=client.permission.name.lower())
        return AuthLevel(client.permission)

    def _handler(self, operation: Operation) -> Callable[[RpcMessage], Awaitable[bytes]]:
        """Return what carries out an operation; nodes tell the first line of its docstring."""

        async def handle_call(message: RpcMessage) -> bytes:
            return await self._run_call(operation, message)

        handle_call.__doc__ = operation.summary
        return handle_call

    async def _run_call(self, operation: Operation, message: RpcMessage) -> bytes:
        """Carry out a call on the thread for its kind. The node's thread."""
        peer, waiting = message.peer, self._waiting[operation.looks]
        who = peer.identity.pubkey or peer  # a key may have many connections
        if waiting[who] >= MOST_WAITING_CALLS - waiting.total():
            return _BUSY
        waiting[who] += 1
        try:
            loop, pool = asyncio.get_running_loop(), self._pools[operation.looks]
            return await loop.run_in_executor(pool, self._carry_out, operation, message)
        finally:
            waiting[who] -= 1
            if not waiting[who]:
                del waiting[who]

    def _carry_out(self, operation: Operation, message: RpcMessage) -> bytes:
        if message.deadline is not None and time.monotonic() >= message.deadline:
            return b""  # the caller waits no more, and would not learn that it was done
        caller = self._caller(message)
        reply = self._answer(operation.name, b" ".join(message.data), Permission(message.auth), caller)
        if not operation.looks:
            _log.info("operation", name=operation.name, caller=caller, done=reply.startswith(b'{"result"'))
        return reply

    def _caller(self, message: RpcMessage) -> str:
        pubkey = message.peer.identity.pubkey
        if not pubkey:
            return "local"
        try:
            client = None if self._clients is None else self._clients.find(pubkey)
        except ConfigError:
            client = None
        return client.name if client is not None and client.name else pubkey.hex()[:16]

    def leave_names(self) -> None:
        """Rename the unix sockets of a server that drains: the usual names are its successor's. Any thread."""
        for number, address in enumerate(self.bound):
            path = Path(address.removeprefix("ipc://"))
            left = draining_name(path)
            if address.startswith("ipc://") and not is_draining(path):
                with contextlib.suppress(OSError):  # then the successor says that it cannot be operated
                    path.rename(left)
                    self.bound[number] = f"ipc://{left}"
                    self._left[self.bound[number]] = path

    def lend(self, _: Path) -> Callable[[], None]:
        """Leave all addresses to a successor; sockets of this machine are renamed, for it speaks over one of them."""
        self.leave_names()
        if (node := self._nodes.pop(True, None)) is not None:
            node.stop(_LENT_WITHIN_S)
            self.bound = [address for address in self.bound if not address.startswith(_FAR)]
        return self._take_back

    def _take_back(self) -> None:
        self._start_node(far=True)
        for left, path in tuple(self._left.items()):
            make_way(path)
            Path(left.removeprefix("ipc://")).rename(path)
            self.bound[self.bound.index(left)] = f"ipc://{path}"
            del self._left[left]

    def stop(self, deadline_s: float) -> None:
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.stop(deadline_s)
        for address in self.bound:
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


async def _describe(message: RpcMessage) -> bytes:
    del message
    return json.dumps({"result": {"operations": [operation.describe() for operation in OPERATIONS]}}).encode()


class Client(NamedTuple):
    """The owner of a key, as the file names it."""

    permission: Permission
    name: str


class Clients:
    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._seen: tuple[int, int, int] | None = None
        self._clients: dict[bytes, Client] = {}
        self.read()

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, pubkey: bytes) -> Client | None:
        """Return the client that has this key now. None: it is in no line of the file."""
        self.read()
        return self._clients.get(pubkey)

    def read(self) -> None:
        try:
            self._read()
        except ConfigError:
            self._seen, self._clients = None, {}
            raise

    def _read(self) -> None:
        try:
            status = self.path.stat()
            version = status.st_mtime_ns, status.st_size, status.st_ino
            if version == self._seen:
                return
            if stat.S_IMODE(status.st_mode) & 0o022:
                raise ConfigError(f"others than its owner can write to {self.path}", hint=f"chmod 600 {self.path}")
            with self.path.open("rb") as file:
                data = file.read(MOST_CLIENTS_BYTES + 1)
            text = text_of(data)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the clients in {self.path}: {error}", hint=_HINT) from error
        if len(data) > MOST_CLIENTS_BYTES:
            raise ConfigError(f"{self.path}: it has more than {MOST_CLIENTS_BYTES} bytes", hint=_HINT)
        self._clients = parse_clients(text, str(self.path))
        self._seen = version


def parse_clients(text: str, where: str) -> dict[bytes, Client]:
    clients: dict[bytes, Client] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split(maxsplit=2)
        if not words:
            continue
        place = f"{where}, line {number}"
        key = parse_key(words[0], f"{place}: the key")
        level = words[1] if len(words) > 1 else ""
        if level not in _LEVELS:
            raise ConfigError(f"{place}: the level is {short(level)}, it must be basic or admin", hint=_HINT)
        if key in clients:
            raise ConfigError(f"{place}: this key is in the file twice", hint=_HINT)
        clients[key] = Client(_LEVELS[level], words[2].strip() if len(words) > 2 else "")
    return clients
