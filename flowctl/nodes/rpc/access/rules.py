"""Whether a command may run, and what a routing id says of who sent it (pure)."""

from __future__ import annotations

from typing import Final

from flowctl.nodes.rpc.access.access import Access, AuthLevel
from flowctl.nodes.rpc.wire.frames import FORBIDDEN, FORBIDDEN_SN, NO_REPLY_TAG, NOT_A_SERVICE_NODE
from flowctl.wire.zeromq.keytext import KEY_BYTES

_KEY_ROUTE: Final = b"L"
"""First octet of a routing id that is a public key: one that begins with a zero, as a key may, is ZeroMQ's own."""
_ASSIGNED_ROUTE: Final = b"\0"
"""First octet of a routing id that ZeroMQ has made up; no peer can choose one."""


def refusal_code(
    access: Access, auth: AuthLevel, *, remote_sn: bool, local_sn: bool, is_request: bool, tag: bytes | None
) -> bytes | None:
    """Return the code with which a known command is refused; None: it may run.

    The order is that of OxenMQ: access level, the state of this node, the state of the caller, and then the tag.
    """
    if auth < access.auth:
        return FORBIDDEN
    if access.local_sn and not local_sn:
        return NOT_A_SERVICE_NODE
    if access.remote_sn and not remote_sn:
        return FORBIDDEN_SN
    if is_request and tag is None:
        return NO_REPLY_TAG
    return None


def key_route(pubkey: bytes) -> bytes:
    """Return the routing id with which a node dials that has this public key."""
    return _KEY_ROUTE + pubkey


def is_assigned(route: bytes) -> bool:
    """Return whether a routing id was made up by ZeroMQ: then it is one connection's, and never another's."""
    return route[:1] == _ASSIGNED_ROUTE


def is_claimed(route: bytes, pubkey: bytes) -> bool:
    """Return whether a routing id claims a key other than the one that its connection has proven."""
    return bool(pubkey) and len(route) == KEY_BYTES + 1 and route[:1] == _KEY_ROUTE and route[1:] != pubkey
