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
"""Length of a Curve25519 key, secret or public."""

_BASE32: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"  # the standard library's letters, in the order of their values
_BASE32Z: Final = "ybndrfg8ejkmcpqxot1uwisza345h769"
_BASE85: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


class KeyEncoding(enum.Enum):
    """How a key is written."""

    HEX = "hex"  #: 64 digits
    BASE32Z = "base32z"  #: 52 letters
    BASE64 = "base64"  #: 43 letters, without padding
    Z85 = "z85"  #: 40 letters; ZeroMQ's own, in its key files


LETTERS: Final = {KeyEncoding.HEX: 64, KeyEncoding.BASE32Z: 52, KeyEncoding.BASE64: 43, KeyEncoding.Z85: 40}
"""Letters of a key, by encoding."""


def encode_key(key: bytes, encoding: KeyEncoding) -> str:
    match encoding:
        case KeyEncoding.HEX:
            return key.hex()
        case KeyEncoding.BASE64:
            return base64.b64encode(key).decode().rstrip("=")
        case KeyEncoding.BASE32Z:
            return base64.b32encode(key).decode().rstrip("=").translate(str.maketrans(_BASE32, _BASE32Z))
        case KeyEncoding.Z85:
            return base64.b85encode(key).decode().translate(str.maketrans(_BASE85, _Z85))


def decode_key(text: str, encoding: KeyEncoding) -> bytes | None:
    """Return the 32 octets that `text` stands for. None: it is no key in that encoding."""
    if encoding is KeyEncoding.BASE64:
        text = text.removesuffix("=")
    if len(text) != LETTERS[encoding] or not text.isascii():
        return None
    try:
        match encoding:
            case KeyEncoding.HEX:
                return binascii.unhexlify(text)
            case KeyEncoding.BASE64:
                return base64.b64decode(text + "=", validate=True)
            case KeyEncoding.BASE32Z:
                return base64.b32decode(_in_letters(text.lower(), _BASE32Z, _BASE32) + "====")
            case KeyEncoding.Z85:
                return base64.b85decode(_in_letters(text, _Z85, _BASE85))
    except ValueError:
        return None


def _in_letters(text: str, letters: str, others: str) -> str:
    """Return a text in other letters of the same values."""
    return "".join(others[letters.index(letter)] for letter in text)  # ValueError: it is none of them


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
