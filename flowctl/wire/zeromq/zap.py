"""Admission of connections (ZAP, RFC 27): each new one of a context is put to one handler, before its first message.

Frames, without the empty one that a REQ socket puts in front::

    request  1.0 | request id | domain | address | identity | mechanism | credentials...
    reply    1.0 | request id | status | text    | user id  | metadata

The domain is that of the listener: its number, bt-encoded (``i0e``), as OxenMQ has it. The identity is that of the
*listener's* socket, not the routing id of the newcomer, which ZeroMQ tells to nobody before the first message. The
metadata of the reply come with every message of that connection, and with no other's: they, and not a routing id, say
whose a message is.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import zmq

from flowctl.core.text.addresses import plain_address
from flowctl.wire.zeromq.keytext import KEY_BYTES
from flowctl.wire.zeromq.socket import ZmqSocket

if TYPE_CHECKING:
    from flowctl.pollgroup import PollGroup

ENDPOINT: Final = "inproc://zeromq.zap.01"
"""Address at which ZeroMQ looks for the handler of a context."""
VERSION: Final = b"1.0"
NULL: Final = b"NULL"
CURVE: Final = b"CURVE"

MOST_ADDRESS_BYTES: Final = 255
"""Longest address in a request: ZeroMQ writes no longer ones."""
MOST_REQUEST_ID_BYTES: Final = 255

_DOMAIN: Final = re.compile(rb"i(0|[1-9][0-9]{0,8})e")


class ZapRefusal(enum.Enum):
    """Why a connection is not let in."""

    #: It is told nothing; the connection ends when the time for its handshake is up, and then its peer dials again.
    TRY_LATER = b"300"
    DENIED = b"400"  #: It is told, and a peer of ZeroMQ does not try again.


@dataclass(frozen=True, slots=True)
class ZapRequest:
    """A connection that asks to be let in."""

    listener: int
    address: str  # address of the newcomer, for ipc as the system tells it; IPv4 in IPv6 is shown as IPv4
    pubkey: bytes  # key that it has proven to hold, 32 octets; empty: the mechanism is NULL


#: Decides on a connection: the metadata of one that is let in (names that begin with ``X-``), or why it is not.
Admit = Callable[[ZapRequest], Mapping[str, str] | ZapRefusal]


def zap_domain(listener: int) -> bytes:
    return b"i%de" % listener


def answer(frames: Sequence[bytes], admit: Admit) -> list[bytes]:
    request_id = frames[1] if len(frames) > 1 and len(frames[1]) <= MOST_REQUEST_ID_BYTES else b""
    request = parse_request(frames)
    if isinstance(request, str):
        return _reply(request_id, b"500", request)
    verdict = admit(request)
    if isinstance(verdict, ZapRefusal):
        return _reply(request_id, verdict.value, "Access denied" if verdict is ZapRefusal.DENIED else "Try later")
    metadata = b"".join(_property(name, value) for name, value in verdict.items())
    return _reply(request_id, b"200", "", request.pubkey.hex(), metadata)


def parse_request(frames: Sequence[bytes]) -> ZapRequest | str:
    if len(frames) < 6 or frames[0] != VERSION:
        return "no ZAP request of version 1.0"
    domain = _DOMAIN.fullmatch(frames[2])
    if domain is None:
        return "unknown domain"
    if len(frames[3]) > MOST_ADDRESS_BYTES:
        return "address too long"
    mechanism, credentials = frames[5], frames[6:]
    if mechanism == NULL and not credentials:
        pubkey = b""
    elif mechanism == CURVE and len(credentials) == 1 and len(credentials[0]) == KEY_BYTES:
        pubkey = credentials[0]
    else:
        return "unknown mechanism or credentials"
    return ZapRequest(int(domain[1]), plain_address(frames[3].decode("ascii", "replace")), pubkey)


class ZapHandler:
    """Answers the requests of one context; made and closed on the group's thread."""

    __slots__ = ("_admit", "_group", "_socket", "refused_count")

    def __init__(self, group: PollGroup, raw: zmq.Socket[bytes], admit: Admit) -> None:
        self._group: Final = group
        self._admit: Final = admit
        #: Connections not let in, those whose request was malformed included.
        self.refused_count = 0
        self._socket: Final = ZmqSocket(group, raw, self._received)
        self._socket.start()

    def close(self) -> None:
        """Stop answering; idempotent. Close the listeners before: later connections would wait in vain."""
        self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or frames[1]:
            return  # no envelope, so no answer is awaited
        try:
            reply = answer(frames[2:], self._admit)
        except BaseException as error:  # noqa: BLE001  (a hook's fault must not let a connection in, nor leave it waiting)
            self._group.report("deciding on a new connection", error)
            reply = _reply(frames[3], ZapRefusal.DENIED.value, "Access denied")
        self.refused_count += reply[2] != b"200"
        self._socket.send([*frames[:2], *reply])


def bind_zap(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return the socket to which a context brings its new connections; before its first listener is bound.

    They wait there for a `ZapHandler`. Without this socket they would be turned away.
    """
    raw = context.socket(zmq.ROUTER)
    try:
        raw.bind(ENDPOINT)
    except zmq.ZMQError:
        raw.close(linger=0)
        raise
    return raw


def _reply(request_id: bytes, status: bytes, text: str, user_id: str = "", metadata: bytes = b"") -> list[bytes]:
    return [VERSION, request_id, status, text.encode(), user_id.encode(), metadata]


def _property(name: str, value: str) -> bytes:
    """Return a property as ZMTP has it: length and name, length and value (RFC 23)."""
    key, octets = name.encode("ascii"), value.encode()
    return bytes([len(key)]) + key + len(octets).to_bytes(4, "big") + octets
