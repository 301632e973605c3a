"""Headers by which a proxy names its peer: PROXY protocol v1 and v2, and the real-IP prefix of go-oryx (pure).

A header stands in front of everything else on a connection. It is read in pieces that never pass its end
(`HeaderReader.wanted`), so nothing of what follows has to be given back; and it is bounded, so a proxy that is not one
costs nothing. It is to be read from trusted proxies only: anybody else could lie.

Layouts:

- v1, one line: ``PROXY TCP4|TCP6 source destination source-port destination-port CRLF``, or ``PROXY UNKNOWN ... CRLF``;
- v2: signature (12), version and command (1), family and transport (1), length (2), addresses and more (length): values
  of type (1) and length (2), of which a checksum is looked at where it is there;
- real-IP prefix: octet 0xF3, length (2), address (4, or 16 for IPv6), and more.

Source: "The PROXY protocol", versions 1 and 2 (HAProxy, 2020/03/05), sections 2.1 and 2.2; SRS, ``SrsComplexHandshake``
for the prefix.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from typing import Final

from flowctl.core.text.addresses import meanings, parse_network
from flowctl.errors import ConfigError, RemoteProtocolError

HEADER_BYTES: Final = 2048
"""Longest header. A line of v1 has at most 107 octets; v2 with a certificate's names in it stays below 1 KiB."""
LINE_BYTES: Final = 107
HEADER_TIME_S: Final = 5.0
"""Longest time for a header: proxies send it at once, so this is for a lossy network (nginx waits 30 s)."""

_SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
_LINE: Final = b"PROXY "
_REAL_IP: Final = 0xF3
_REAL_IP_BYTES: Final = 3 + 1024
"""Longest prefix that SRS takes; go-oryx sends 3 and 4 octets."""
_SHORTEST_LINE: Final = len(b"PROXY UNKNOWN\r\n")
_HEAD_BYTES: Final = 16
_LOCAL, _PROXY = 0x20, 0x21
_CRC32C: Final = 0x03
"""Type of the value with a checksum of the header, in which that value itself counts as zeros (section 2.2.3)."""
_CASTAGNOLI: Final = tuple(
    functools.reduce(lambda rest, _: rest >> 1 ^ (0x82F63B78 if rest & 1 else 0), range(8), octet)
    for octet in range(256)
)
"""What an octet adds to the checksum, by its polynomial."""
_ADDRESS_BYTES: Final = {0x11: 4, 0x21: 16}
"""Octets of an address, by family and transport: TCP over IPv4 and over IPv6."""
_NO_ADDRESS: Final = frozenset({0x00, 0x31})
"""Families without an address: unspecified, and a stream socket of the machine itself."""

Origin = tuple[str, int | None] | None
"""The peer that a proxy speaks for: address and port (None: not said). None: the proxy itself, as in health checks."""


class ProxyHeaderError(RemoteProtocolError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code="proxy-header")


class TrustedProxies:
    def __init__(self, networks: Iterable[str] = ()) -> None:
        if isinstance(networks, str):  # it would be read letter by letter
            raise ConfigError(
                f"trusted_proxies is {networks!r} (str), it must be several", hint=f"{networks.split(',')!r}"
            )
        self.networks: Final = tuple(parse_network(text, "trusted proxies") for text in networks)

    def __bool__(self) -> bool:
        return bool(self.networks)

    def __contains__(self, address: object) -> bool:
        if not self.networks or not isinstance(address, str):
            return False
        own = meanings(address)[:1]  # it is trusted by its own address only
        return any(item in network for item in own for network in self.networks)


class HeaderReader:
    __slots__ = ("_buffer", "origin", "wanted")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.wanted = 1  # octets to read at most before the next call of `read`; 0 when the header is complete
        self.origin: Origin = None  # the peer that the proxy speaks for, once the header is complete

    @property
    def begun(self) -> bool:
        return bool(self._buffer)

    def read(self, data: bytes) -> bool:
        """Take the next octets, `wanted` at most; return whether the header is complete."""
        self._buffer += data
        first = self._buffer[0] if self._buffer else 0
        if not self._buffer:
            size = 1
        elif first == _REAL_IP:
            size = self._real_ip()
        elif first == _SIGNATURE[0]:
            size = self._binary()
        else:
            size = self._line()
        self.wanted = size - len(self._buffer)
        return not self.wanted

    def _real_ip(self) -> int:
        """Return how many octets the prefix has at least; take the address when they are there."""
        buffer = self._buffer
        if len(buffer) < 3:
            return 3
        length = int.from_bytes(buffer[1:3], "big")
        if not 4 <= length <= _REAL_IP_BYTES - 3:
            raise ProxyHeaderError(f"real-IP prefix of {length} bytes, allowed is 4 to {_REAL_IP_BYTES - 3}")
        if len(buffer) == 3 + length:
            self.origin = (_text(buffer[3 : 19 if length == 16 else 7]), None)
        return 3 + length

    def _binary(self) -> int:
        """Return how many octets a header of version 2 has at least; take the origin when they are there."""
        buffer = self._buffer
        if not _SIGNATURE.startswith(buffer[: len(_SIGNATURE)]):
            raise ProxyHeaderError("the signature of the PROXY protocol is not right")
        if len(buffer) < _HEAD_BYTES:
            return _HEAD_BYTES
        command, kind = buffer[12], buffer[13]
        size = _HEAD_BYTES + int.from_bytes(buffer[14:16], "big")
        if size > HEADER_BYTES:
            raise ProxyHeaderError(f"PROXY header of {size} bytes, at most {HEADER_BYTES} are read")
        if command not in (_LOCAL, _PROXY):
            raise ProxyHeaderError(f"PROXY version and command 0x{command:02x}, known are 0x20 and 0x21")
        octets = _ADDRESS_BYTES.get(kind)
        if command == _PROXY and kind not in _NO_ADDRESS:
            if octets is None:
                raise ProxyHeaderError(f"PROXY family and transport 0x{kind:02x}, known are TCP over IPv4 and IPv6")
            if size < _HEAD_BYTES + 2 * octets + 4:
                raise ProxyHeaderError(f"PROXY header of {size} bytes, too short for its addresses")
            if len(buffer) == size:
                _check_sum(buffer, _HEAD_BYTES + 2 * octets + 4)
                port_at = _HEAD_BYTES + 2 * octets
                address = _text(buffer[_HEAD_BYTES : _HEAD_BYTES + octets])
                self.origin = (address, int.from_bytes(buffer[port_at : port_at + 2], "big"))
        return size

    def _line(self) -> int:
        """Return that of a line of version 1, whose length shows at its end: CR and LF are still to come, or LF."""
        buffer = self._buffer
        if not _LINE.startswith(buffer[: len(_LINE)]):
            raise ProxyHeaderError("a trusted proxy sent no PROXY header")
        end = buffer.find(b"\n")
        if end >= 0:
            if not buffer.endswith(b"\r\n") or end < len(buffer) - 1:
                raise ProxyHeaderError("PROXY line does not end in CR and LF")
            self.origin = _read_line(bytes(buffer[:-2]))
            return len(buffer)
        if len(buffer) >= LINE_BYTES:
            raise ProxyHeaderError(f"PROXY line of more than {LINE_BYTES} bytes")
        return max(_SHORTEST_LINE, len(buffer) + (1 if buffer.endswith(b"\r") else 2))


def _check_sum(header: bytearray, at: int) -> None:
    """Refuse a header whose checksum, if one is among its values from `at` on, is not that of its octets."""
    summed = False
    while at < len(header):
        value = at + 3
        size = int.from_bytes(header[at + 1 : value], "big")
        if value + size > len(header):
            raise ProxyHeaderError("PROXY header with a value that goes beyond its end")
        if header[at] == _CRC32C:
            if summed:  # any number of them would be that much work
                raise ProxyHeaderError("PROXY header with two checksums")
            expected = _crc32c(header[:value] + bytes(size) + header[value + size :]).to_bytes(4, "big")
            if header[value : value + size] != expected:
                raise ProxyHeaderError("PROXY header whose checksum (CRC32C) is not right")
            summed = True
        at = value + size


def _crc32c(octets: bytes | bytearray) -> int:
    """Return the checksum of Castagnoli (RFC 9260, appendix A)."""
    rest = 0xFFFFFFFF
    for octet in octets:
        rest = rest >> 8 ^ _CASTAGNOLI[rest & 0xFF ^ octet]
    return rest ^ 0xFFFFFFFF


def _read_line(line: bytes) -> Origin:
    parts = line.decode("ascii", "replace").split(" ")
    if parts[:2] == ["PROXY", "UNKNOWN"]:
        return None  # what follows is to be ignored
    if len(parts) != 6 or parts[1] not in ("TCP4", "TCP6"):
        raise ProxyHeaderError("PROXY line is not of the form PROXY TCP4|TCP6 source destination ports")
    kind = ipaddress.IPv4Address if parts[1] == "TCP4" else ipaddress.IPv6Address
    try:
        source, _ = kind(parts[2]), kind(parts[3])
    except ValueError as error:
        raise ProxyHeaderError("PROXY line has an address that is none") from error
    ports = parts[4:]
    if not all(port.isdecimal() and port.isascii() and len(port) <= 5 and int(port) <= 0xFFFF for port in ports):
        raise ProxyHeaderError("PROXY line has a port that is none")
    if "%" in parts[2]:
        raise ProxyHeaderError("PROXY line has an address with a zone")
    return _text(source.packed), int(ports[0])


def _text(packed: bytes | bytearray) -> str:
    """Return an address as text; IPv4 in IPv6 as IPv4, so that one peer has one address."""
    return str(meanings(str(ipaddress.ip_address(bytes(packed))))[0])
