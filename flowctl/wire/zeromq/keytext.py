"""Keys of 32 octets as text (pure): hex, base32z, base64 and Z85, the four ways in which peers write them.

Base32z is that of Zooko (human-oriented base-32: the letters that are hard to mistake come most often), read from the
highest bit on; a key is 52 letters, the last of which has four bits that say nothing. Base64 is the plain alphabet, 43
letters without the padding.
"""

from __future__ import annotations

import base64
import binascii
import enum
from typing import Final

from flowctl.errors import ConfigError

KEY_BYTES: Final = 32
"""Of a key of Curve25519, secret or public."""

_BASE32Z: Final = "ybndrfg8ejkmcpqxot1uwisza345h769"
_VALUES: Final = {letter: value for value, letter in enumerate(_BASE32Z)}
_BASE32Z_LETTERS: Final = 52
_SPARE_BITS: Final = _BASE32Z_LETTERS * 5 - KEY_BYTES * 8

_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_VALUES: Final = {letter: value for value, letter in enumerate(_Z85)}


class KeyEncoding(enum.Enum):
    """How a key is written."""

    HEX = "hex"  #: 64 digits
    BASE32Z = "base32z"  #: 52 letters
    BASE64 = "base64"  #: 43 letters, without padding
    Z85 = "z85"  #: 40 letters; ZeroMQ's own, in its key files


LETTERS: Final = {KeyEncoding.HEX: 64, KeyEncoding.BASE32Z: 52, KeyEncoding.BASE64: 43, KeyEncoding.Z85: 40}
"""How many letters a key has, by encoding."""


def encode_key(key: bytes, encoding: KeyEncoding) -> str:
    if encoding is KeyEncoding.HEX:
        return key.hex()
    if encoding is KeyEncoding.BASE64:
        return base64.b64encode(key).decode("ascii").rstrip("=")
    if encoding is KeyEncoding.BASE32Z:
        number = int.from_bytes(key, "big") << _SPARE_BITS
        shifts = range((_BASE32Z_LETTERS - 1) * 5, -1, -5)
        return "".join(_BASE32Z[number >> shift & 31] for shift in shifts)
    words = (int.from_bytes(key[at : at + 4], "big") for at in range(0, KEY_BYTES, 4))
    return "".join(_Z85[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def decode_key(text: str, encoding: KeyEncoding) -> bytes | None:
    """Return the 32 octets that `text` stands for. None: it is no key in that encoding."""
    if encoding is KeyEncoding.BASE64 and text.endswith("="):
        text = text[:-1]
    if len(text) != LETTERS[encoding] or not text.isascii():
        return None
    if encoding is KeyEncoding.HEX:
        return _from_hex(text)
    if encoding is KeyEncoding.BASE32Z:
        return _from_base32z(text.lower())
    if encoding is KeyEncoding.BASE64:
        return _from_base64(text)
    return _from_z85(text)


def parse_key(text: str, name: str) -> bytes:
    """Return the 32 octets of a key in any of the encodings, told apart by their length."""
    for encoding in KeyEncoding:
        key = decode_key(text, encoding)
        if key is not None:
            return key
    raise ConfigError(
        f"{name} is a text of {len(text)} letters that is no key of {KEY_BYTES} bytes",
        hint="write it in hex (64 letters), base32z (52), base64 (43) or Z85 (40)",
    )


def _from_hex(text: str) -> bytes | None:
    try:
        return binascii.unhexlify(text)
    except ValueError:
        return None


def _from_base32z(text: str) -> bytes | None:
    number = 0
    for letter in text:
        value = _VALUES.get(letter)
        if value is None:
            return None
        number = number << 5 | value
    return (number >> _SPARE_BITS).to_bytes(KEY_BYTES, "big")


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text + "=", validate=True)
    except ValueError:
        return None


def _from_z85(text: str) -> bytes | None:
    octets = b""
    for at in range(0, len(text), 5):
        word = 0
        for letter in text[at : at + 5]:
            value = _Z85_VALUES.get(letter)
            if value is None:
                return None
            word = word * 85 + value
        if word >= 1 << 32:
            return None
        octets += word.to_bytes(4, "big")
    return octets
