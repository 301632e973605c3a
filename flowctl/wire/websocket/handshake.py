"""The opening handshake of a server: the head of the request by h11, what it must hold, and the answers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

import h11
from wsproto.utilities import generate_accept_token

from flowctl.errors import LocalProtocolError, RemoteProtocolError

VERSION: Final = "13"
DEFLATE: Final = "permessage-deflate"
_AGREED: Final = "permessage-deflate; server_no_context_takeover; client_no_context_takeover"
"""No window is kept from message to message: what is deflated once is right for every client, and an idle client costs
no window (RFC 7692 section 7.1.1; a server may answer so whatever was offered)."""
_KEY_BYTES: Final = 16
"""Length of the decoded key; a handshake with another one is not valid (RFC 6455 section 4.2.1)."""
_WINDOW_BITS: Final = frozenset(map(str, range(8, 16)))
_PHRASES: Final = {int(status): status.phrase for status in HTTPStatus}
_NOT_IN_HEADERS: Final = frozenset("\r\n\0")

Headers = Sequence[tuple[bytes, bytes]]


class HeadReader:
    """Reads the head of one request.

    Args:
        most_bytes: of request line and headers.
    """

    __slots__ = ("_http", "_most_bytes", "_size")

    def __init__(self, most_bytes: int) -> None:
        self._http: Final = h11.Connection(h11.SERVER, max_incomplete_event_size=most_bytes)
        self._most_bytes: Final = most_bytes

    def feed(self, data: bytes) -> h11.Request | None:
        """Take input; return the request once its head is complete. What lies behind it is `rest_bytes`.

        Raises:
            RemoteProtocolError: it is no request; the code is the status to answer with.
        """
        self._http.receive_data(data)
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise RemoteProtocolError(str(error), code=str(error.error_status_hint)) from None
        return event if isinstance(event, h11.Request) else None

    @property
    def rest_bytes(self) -> int:
        return len(self._http.trailing_data[0])


def header(headers: Headers, name: bytes) -> str:
    """Return the values of a header, by its name in small letters, with commas between; empty: it is not there."""
    return ", ".join(value.decode("latin-1") for found, value in headers if found == name)


def tokens(headers: Headers, name: bytes) -> list[str]:
    """Return the items of a header that is a list, in their order."""
    return [item for part in header(headers, name).split(",") if (item := part.strip())]


def wants_websocket(headers: Headers, version: str | bytes) -> bool:
    """Return whether a request asks to go on with WebSocket; HTTP/1.0 cannot (RFC 9110 section 7.8)."""
    asked = {item.lower() for item in tokens(headers, b"upgrade")}
    return "websocket" in asked and version not in {"1.0", b"1.0"}


def check_request(method: bytes, headers: Headers) -> None:
    """Raise RemoteProtocolError, with a status as code, where a request can be neither a handshake nor a plain GET."""
    if method != b"GET":
        raise RemoteProtocolError("GET is served", code="405")
    if header(headers, b"transfer-encoding") or header(headers, b"content-length") not in {"", "0"}:
        raise RemoteProtocolError("a handshake has no body", code="400")


def accept_key(headers: Headers) -> bytes:
    """Return the answer to the key of a request that asks for WebSocket.

    Raises:
        RemoteProtocolError: the handshake is not valid; the code is the status to answer with.
    """
    version, key = header(headers, b"sec-websocket-version"), header(headers, b"sec-websocket-key")
    if "upgrade" not in {item.lower() for item in tokens(headers, b"connection")}:
        raise _invalid("Connection does not say Upgrade")
    if version != VERSION:
        what = f"Sec-WebSocket-Version is {version}, {VERSION} is served" if version else "no Sec-WebSocket-Version"
        raise _invalid(what, "426" if version else "400")
    try:
        size = len(base64.b64decode(key, validate=True))
    except ValueError:  # of base64 too
        size = 0
    if size != _KEY_BYTES:
        raise _invalid(f"Sec-WebSocket-Key is not {_KEY_BYTES} bytes")
    return generate_accept_token(key.encode())


def _invalid(why: str, status: str = "400") -> RemoteProtocolError:
    return RemoteProtocolError(f"no WebSocket handshake: {why}", code=status)


def agrees_to_deflate(headers: Headers) -> bool:
    """Return whether the client offers permessage-deflate in a form that fits what is deflated once for all.

    Its offers are taken in their order (RFC 7692 section 7.1). One that has the server use a smaller window does not
    fit; what it says of its own window needs no answer.
    """
    return any(_fits(offer) for offer in tokens(headers, b"sec-websocket-extensions"))


def _fits(offer: str) -> bool:
    name, *parts = (part.strip() for part in offer.split(";"))
    split = [part.partition("=") for part in parts]
    pairs = [(key.strip(), value.strip().strip('"') if equals else None) for key, equals, value in split]
    if name != DEFLATE or len(dict(pairs)) < len(pairs):
        return False
    for key, value in pairs:
        if key in {"server_no_context_takeover", "client_no_context_takeover"}:
            fits = value is None
        elif key == "client_max_window_bits":
            fits = value is None or value in _WINDOW_BITS
        else:
            fits = key == "server_max_window_bits" and value == "15"
        if not fits:
            return False
    return True


def switching_head(
    key: bytes, headers: Headers = (), *, subprotocol: str | None = None, deflates: bool = False
) -> bytes:
    """Return the head of the answer that accepts; `key` is what `accept_key` returned."""
    every = [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Accept", key)]
    if subprotocol is not None:
        every.append((b"Sec-WebSocket-Protocol", subprotocol.encode("latin-1")))
    if deflates:
        every.append((b"Sec-WebSocket-Extensions", _AGREED.encode()))
    return _head(HTTPStatus.SWITCHING_PROTOCOLS, [*every, *headers])


def whole_answer(status: int, body: bytes, headers: Headers = ()) -> bytes:
    """Return an answer of HTTP behind which the connection closes."""
    length = (b"Content-Length", str(len(body)).encode())
    return _head(status, [*headers, length, (b"Connection", b"close")]) + body


def _head(status: int, headers: Headers) -> bytes:
    lines = [f"{name.decode('latin-1')}: {value.decode('latin-1')}" for name, value in headers]
    if any(_NOT_IN_HEADERS & set(line) for line in lines):
        raise LocalProtocolError("a header of the answer has a line break in it", hint="leave it out")
    return "\r\n".join([f"HTTP/1.1 {status} {phrase(status)}", *lines, "", ""]).encode("latin-1")


def phrase(status: int) -> str:
    """Return the words of a status, also of one that is registered nowhere."""
    return _PHRASES.get(status, "Status")


# To pages of any origin: their players see the status then, and not just that something failed.
_WORDS: Final = [(b"Content-Type", b"text/plain"), (b"Access-Control-Allow-Origin", b"*")]
REFUSALS: Final = (
    whole_answer(429, b"Too many connections. Try again later.\n", [*_WORDS, (b"Retry-After", b"5")]),
    whole_answer(403, b"This address is kept out.\n", _WORDS),
)
"""What a client is told that a server refuses: because too many are there, and because its address is banned."""
