"""Files that people write, such as settings, keys, bans, limits (pure): what their octets say.

They are UTF-8. Editors of Windows put U+FEFF in front ("UTF-8 with BOM"), which is no part of what was written: left
there, the first setting has no known name, and the first key fits nobody. So each is read by way of this file.
"""

from __future__ import annotations

import codecs
from typing import Final

from flowctl.errors import ConfigError

MARK: Final = codecs.BOM_UTF8


def without_mark(octets: bytes) -> bytes:
    return octets.removeprefix(MARK)


def text_of(octets: bytes, errors: str = "strict") -> str:
    """Return the text of a file; `errors`: what becomes of octets that are no UTF-8, as of `bytes.decode`."""
    return without_mark(octets).decode("utf-8", errors)


def check_no_mark(octets: bytes, what: str) -> None:
    """Refuse a file in PEM with such a mark: it is OpenSSL that reads it, and it would pass over what comes first."""
    if octets.startswith(MARK):
        raise ConfigError(f"{what} begins with a byte order mark", hint="save it as UTF-8 without BOM")
