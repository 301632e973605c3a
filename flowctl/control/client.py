"""The caller's side of operations: one call to a server, and its answer or what went wrong in words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flowctl.control.operations import CATEGORY
from flowctl.control.place import server_answers
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError, FlowctlError, RpcError
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.wire.addresses import Address, AddressTransport
from flowctl.wire.zmtp.keys import KeyPair

CONNECT_S: Final = 5.0
"""Longest wait for a connection: a server that is there answers in milliseconds."""
MOST_ERROR_CHARS: Final = 1000
"""Most characters that are shown of an error text of a server."""
MOST_CODE_CHARS: Final = 64


class OperationError(FlowctlError):
    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


def call_operation(
    address: str, name: str, arguments: Mapping[str, object], *, keys: KeyPair | None = None, timeout_s: float = 15.0
) -> dict[str, Any]:
    command = f"{CATEGORY}.{name}"
    return result_of(
        address, command, asyncio.run(call_parts(address, command, [json.dumps(dict(arguments))], keys, timeout_s))
    )


def result_of(address: str, command: str, parts: list[bytes]) -> dict[str, Any]:
    try:
        value = json.loads(parts[0] if parts else b"")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("result"), dict):
        result: dict[str, Any] = value["result"]
        return result
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        raise OperationError(
            f"{address} answers {command} with something else", code="FOREIGN", hint="is it a flowctl server?"
        )
    # A server says what it likes: on one line each, so that none of it reads as a line of ours.
    code, message = foreign(error.get("code"), MOST_CODE_CHARS), foreign(error.get("message"), MOST_ERROR_CHARS)
    hint = foreign(error["hint"], MOST_ERROR_CHARS) if isinstance(error.get("hint"), str) else None
    if code == "WRONG_ARGUMENT":
        raise ConfigError(message, hint=hint)
    raise OperationError(message, code=code, hint=hint)


async def call_parts(
    address: str,
    command: str,
    parts: list[str | bytes],
    keys: KeyPair | None,
    timeout_s: float,
    *,
    reply: bool = True,
) -> list[bytes]:
    """Call any command of any server that speaks OxenMQ, and return the parts of its reply."""
    where = Address.parse(address)
    if where.transport is AddressTransport.IPC:
        _check_there(Path(where.socket))
    async with RpcNode(name="flowctl-call", keys=keys) as node:
        try:
            # Ephemeral: with one key, the next command would take the connection of this one over.
            conn = await node.connect(address, timeout_s=min(timeout_s, CONNECT_S), ephemeral_routing_id=True)
        except RpcError as error:
            raise _not_reached(address, where) from error
        if not reply:
            node.send(conn, command, *parts)
            return []
        try:
            return await node.call(conn, command, *parts, timeout_s=timeout_s)
        except RpcError as error:
            raise _failed(address, command, error, timeout_s) from error


def _check_there(path: Path) -> None:
    """See that a server listens at a unix socket, without waiting for one that does not."""
    try:
        there = server_answers(path)
    except PermissionError as error:
        raise OperationError(
            f"you may not speak to the server at {path}: it is another user's",
            code="FORBIDDEN",
            hint="call it as that user, or from elsewhere with a key",
        ) from error
    if not there:
        raise OperationError(
            f"no server listens at {path}", code="NOT_THERE", hint="is it running? flowctl serve live starts one"
        )


def _not_reached(address: str, where: Address) -> OperationError:
    if where.pubkey:
        return OperationError(
            f"{address} does not let this caller in, or is not there",
            code="NOT_THERE",
            hint="is its address and key right, and does its clients file have the public key of --key?",
        )
    return OperationError(
        f"{address} does not answer",
        code="NOT_THERE",
        hint="is it running? One that takes keys is reached as curve://host:port/ITS_PUBLIC_KEY",
    )


def _failed(address: str, command: str, error: RpcError, timeout_s: float) -> OperationError:
    if error.code == "TIMEOUT":
        return OperationError(
            f"{address} has not answered {command} within {timeout_s:g} s; it may do it yet",
            code="TIMEOUT",
            hint="--timeout waits longer",
        )
    hints = {
        "FORBIDDEN": "the level that the server gives this caller does not allow it",
        "UNKNOWNCOMMAND": "flowctl rpc describe ADDRESS lists what a flowctl server knows",
        "DISCONNECTED": "the server has ended, or has cut the connection",
    }
    hint = hints.get(error.code, error.hint)
    return OperationError(foreign(error, MOST_ERROR_CHARS), code=foreign(error.code, MOST_CODE_CHARS), hint=hint)
