"""Writing bit fields and Exp-Golomb codes, most significant bit first, as H.264 and AAC headers are made of them."""

from __future__ import annotations

import re

_START_CODE_LIKE = re.compile(rb"\x00\x00(?=[\x00-\x03])")


class BitWriter:
    """Collects bits into one growing integer, which for headers is both short and fast.

    Not meant for long streams: appending n bits costs time proportional to what is there already.
    """

    __slots__ = ("_bits", "_value")

    def __init__(self) -> None:
        self._value = 0
        self._bits = 0

    def u(self, value: int, bits: int) -> BitWriter:
        """Append `value` as an unsigned field of `bits` bits; returns self. The caller makes sure that it fits."""
        self._value = self._value << bits | value
        self._bits += bits
        return self

    def ue(self, value: int) -> BitWriter:
        """Append `value`, 0 or more, as an unsigned Exp-Golomb code (H.264 9.1); returns self."""
        code = value + 1
        return self.u(code, 2 * code.bit_length() - 1)

    def se(self, value: int) -> BitWriter:
        """Append `value` as a signed Exp-Golomb code (H.264 9.1.1); returns self."""
        return self.ue(2 * value - 1 if value > 0 else -2 * value)

    def append(self, other: BitWriter) -> BitWriter:
        return self.u(other._value, other._bits)

    def align(self) -> BitWriter:
        return self.u(0, -self._bits % 8)

    def stop(self) -> BitWriter:
        """Append the stop bit 1 and fill the octet with zeros (H.264 7.3.2.11, rbsp_trailing_bits); returns self."""
        return self.u(1, 1).align()

    def to_bytes(self) -> bytes:
        filling = -self._bits % 8
        return (self._value << filling).to_bytes((self._bits + filling) // 8, "big")


def escape(rbsp: bytes) -> bytes:
    """Return `rbsp` with an octet 3 wherever three octets would look like a start code (H.264 7.4.1.1).

    Required in length-prefixed streams as well: decoders remove the octets whatever the framing is.
    """
    return _START_CODE_LIKE.sub(b"\x00\x00\x03", rbsp)
