"""Addresses of peers: those of ZeroMQ, and the maintainers' own, which name the key of the peer too (pure).

::

    tcp://HOST:PORT            ipc://PATH                inproc://NAME
    curve://HOST:PORT/KEY      ipc+curve://PATH/KEY      (tcp+curve:// is curve://)

HOST is a name, an IPv4 address or an IPv6 one in brackets. KEY is the public key of the peer in hex, base32z or base64.
``TCP://`` and ``CURVE://`` are of QR codes: all in capitals, an IPv6 address between dollars, KEY in hex or base32z.
Source: oxen-mq, ``oxenmq/address.h`` and ``oxenmq/address.cpp``.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import Final, Self

from flowctl.core.text.addresses import LAST_PORT, join_host_port
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.wire.zmtp.keytext import KEY_BYTES, LETTERS, KeyEncoding, decode_key, encode_key

MOST_CHARS: Final = 512
"""Longest address: a host name has 253 characters at most, a key 64."""
MOST_HOST_CHARS: Final = 253
"""Longest host name (RFC 1035, 2.3.4)."""
MOST_PATH_BYTES: Final = 107
"""Longest path of a Unix socket: ``sun_path`` has 108 octets, one of them for the end (unix(7))."""
MOST_NAME_BYTES: Final = 255
"""Longest inproc name: ZeroMQ accepts any, but its manual promises this."""

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._\-]*[A-Za-z0-9._])?")
_IPV6: Final = re.compile(r"[:.0-9a-fA-F]+")
_QR: Final = re.compile(r"[A-Z0-9$:.\-]+(/[A-F0-9]{64}|/[A-Z0-9]{52})?")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_HINT: Final = "write it like tcp://host:port, ipc://path, curve://host:port/KEY or ipc+curve://path/KEY"
_CURVE_ENCODINGS: Final = (KeyEncoding.HEX, KeyEncoding.BASE32Z, KeyEncoding.BASE64)
_ALLOWED: Final = ", ".join(f"{encoding.value} ({LETTERS[encoding]} letters)" for encoding in _CURVE_ENCODINGS)


class AddressTransport(enum.Enum):
    TCP = "tcp"
    IPC = "ipc"
    INPROC = "inproc"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer is, and which key it has; equal are those that say the same, however they are written.

    Args:
        host: of tcp; an IPv6 address is in brackets. Otherwise empty.
        socket: path of ipc, name of inproc. Otherwise empty.
        pubkey: public key of the peer, 32 octets. Empty: the connection is not encrypted.
    """

    transport: AddressTransport
    host: str = ""
    port: int = 0
    socket: str = ""
    pubkey: bytes = b""

    def __post_init__(self) -> None:
        if self.pubkey and len(self.pubkey) != KEY_BYTES:
            raise ConfigError(f"pubkey has {len(self.pubkey)} bytes, it must have {KEY_BYTES}, or none")
        if self.transport is AddressTransport.TCP:
            _check_host(self.host)
            if not 1 <= self.port <= LAST_PORT:
                raise ConfigError(f"port is {self.port}, it must be 1 to {LAST_PORT}")
        elif self.transport is AddressTransport.IPC:
            _check_name("the path of an ipc address", self.socket, MOST_PATH_BYTES)
        else:
            _check_name("the name of an inproc address", self.socket, MOST_NAME_BYTES)
            if self.pubkey:
                raise ConfigError("an inproc address has no key: it never leaves the process")

    @classmethod
    def parse(cls, text: str) -> Self:
        if len(text) > MOST_CHARS:
            raise ConfigError(f"an address has {len(text)} characters, the limit is {MOST_CHARS}", hint=_HINT)
        scheme, found, rest = text.partition("://")
        if not found or not rest:
            raise ConfigError(f"{short(text)} is no address", hint=_HINT)
        try:
            if scheme in {"TCP", "CURVE"}:
                scheme, rest = scheme.lower(), _of_qr_code(rest)
            match scheme:
                case "tcp" | "curve" | "tcp+curve":
                    return cls._parse_tcp(rest, curve=scheme != "tcp")
                case "ipc":
                    return cls(AddressTransport.IPC, socket=rest)
                case "ipc+curve":
                    return cls._parse_ipc_curve(rest)
                case "inproc":
                    return cls(AddressTransport.INPROC, socket=rest)
        except ConfigError as error:
            raise ConfigError(f"address {short(text)}: {error}", hint=_HINT) from None
        raise ConfigError(f"address {short(text)}: {short(scheme)} is no transport", hint=_HINT)

    @classmethod
    def _parse_tcp(cls, rest: str, *, curve: bool) -> Self:
        end = rest.find("]") + 1 if rest[0] == "[" else rest.find(":")
        if rest[0] == "[" and not end:
            raise ConfigError("the IPv6 address has no closing ]")
        if end < 0 or rest[end : end + 1] != ":":
            raise ConfigError("there is no :port behind the host")
        host = rest[:end]
        port, slash, text = rest[end + 1 :].partition("/")
        if not _PORT.fullmatch(port):
            raise ConfigError(f"{short(port)} is no port, it must be 1 to {LAST_PORT}")
        if bool(slash) != curve:
            raise ConfigError("there is no /KEY behind the port" if curve else "there is more behind the port")
        return cls(AddressTransport.TCP, host, int(port), pubkey=_key_of(text) if curve else b"")

    @classmethod
    def _parse_ipc_curve(cls, rest: str) -> Self:
        # From the end, since a path has slashes, and so may a key in base64.
        for encoding in _CURVE_ENCODINGS:
            letters = LETTERS[encoding] + (encoding is KeyEncoding.BASE64 and rest.endswith("="))
            key = decode_key(rest[-letters:], encoding)
            if key is not None and rest[-letters - 1 : -letters] == "/":
                return cls(AddressTransport.IPC, socket=rest[: -letters - 1], pubkey=key)
        raise ConfigError(f"there is no /KEY behind the path, in {_ALLOWED}")

    @property
    def zmq_address(self) -> str:
        """The address as ZeroMQ takes it, which knows no keys."""
        if self.transport is AddressTransport.TCP:
            return f"tcp://{join_host_port(self.host, self.port)}"
        return f"{self.transport.value}://{self.socket}"

    def with_pubkey(self, pubkey: bytes) -> Self:
        """Return the address of the peer with that key, 32 octets; empty: not encrypted."""
        return replace(self, pubkey=pubkey)

    def __str__(self) -> str:
        if not self.pubkey:
            return self.zmq_address
        key = encode_key(self.pubkey, KeyEncoding.BASE32Z)
        if self.transport is AddressTransport.TCP:
            return f"curve://{join_host_port(self.host, self.port)}/{key}"
        return f"ipc+curve://{self.socket}/{key}"


def _of_qr_code(rest: str) -> str:
    """Return what stands behind the transport as others write it."""
    if not _QR.fullmatch(rest):
        raise ConfigError("an address of a QR code has capitals, digits and $:/.- only, and no key in base64")
    return rest.lower().replace("$", "[", 1).replace("$", "]", 1)


def _check_host(host: str) -> None:
    if len(host) > MOST_HOST_CHARS:
        raise ConfigError(f"the host has {len(host)} characters, the limit is {MOST_HOST_CHARS}")
    if host[:1] == "[":
        if host[-1] != "]" or not _IPV6.fullmatch(host[1:-1]):
            raise ConfigError(f"{short(host)} is no IPv6 address in brackets")
    elif not _HOST.fullmatch(host):
        raise ConfigError(f"{short(host)} is no host: a name of letters, digits and .-_ or an address")


def _check_name(what: str, name: str, most_bytes: int) -> None:
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= most_bytes:
        raise ConfigError(f"{what} has {size} bytes, it must have 1 to {most_bytes}")
    if not name.isprintable():
        raise ConfigError(f"{what} has a control character: {short(name)}")


def _key_of(text: str) -> bytes:
    for encoding in _CURVE_ENCODINGS:
        key = decode_key(text, encoding)
        if key is not None:
            return key
    raise ConfigError(f"{short(text)} is no key, it must be in {_ALLOWED}")
