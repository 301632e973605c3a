"""The connection of an agent to the server that it keeps; opened when it is needed, and again after it broke."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flowctl.control.client import OperationError, result_of
from flowctl.control.fleet.keeper import RefusedError
from flowctl.control.operations import CATEGORY
from flowctl.control.place import answers, find_server
from flowctl.errors import BrokenError, ConfigError, RpcError
from flowctl.nodes.rpc.node import RpcNode
from flowctl.nodes.rpc.peers.peer import ConnectionID

CALL_S: Final = 10.0
"""How long a call may take; writing a ban file of the greatest length takes seconds."""
_CONNECT_S: Final = 2.0


class ServerLink:
    """Calls operations of one server. The node's thread."""

    def __init__(self, node: RpcNode, server: str | None) -> None:
        self._node: Final = node
        self._server: Final = server
        self._conn: ConnectionID | None = None
        self._address = ""

    async def call(self, operation: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carry out an operation; see `keeper.Call`."""
        conn = await self._connected()
        name = f"{CATEGORY}.{operation}"
        try:
            parts = await self._node.call(conn, name, json.dumps(dict(arguments)), timeout_s=CALL_S)
        except RpcError as error:
            self._node.disconnect(conn)
            self._conn = None
            raise BrokenError(f"{self._address} does not answer {name}: {error}") from error
        try:
            return result_of(self._address, name, parts)
        except OperationError as error:
            raise RefusedError(str(error), code=error.code) from error
        except ConfigError as error:
            raise RefusedError(str(error), code="WRONG_ARGUMENT") from error

    async def _connected(self) -> ConnectionID:
        if self._conn is not None:
            return self._conn
        address = find_server(self._server)
        scheme, _, path = address.partition("://")
        try:
            if scheme == "ipc" and not answers(Path(path)):
                raise BrokenError(f"no server listens at {path}")
            self._conn = await self._node.connect(address, timeout_s=_CONNECT_S)
        except PermissionError as error:
            raise BrokenError(f"the server at {path} is another user's") from error
        except RpcError as error:
            raise BrokenError(f"{address} does not answer: {error}") from error
        self._address = address
        return self._conn
