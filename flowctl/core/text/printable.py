r"""Text of others made safe for a terminal, and what of it carries a secret (pure).

What a peer, a file or a command line brings may hold characters that a terminal acts on instead of showing them:
escape sequences, which move the cursor, rename the window or answer as if typed; marks that turn the direction of
writing, so that a line reads as another one; separators that begin a new line, and so forge one; surrogates by
themselves, which no encoding takes. Such characters are written as ``\uXXXX``, which JSON reads as the character
again. Letters of all scripts stay as they are, and so do blanks of any width and the joiners that emoji need.

A name or what a peer calls itself may hold a query, credentials or a token: records and logs ask the same functions
(`carries_secret`, `without_secret`), and write a keyed hash of what does.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

_UNFIT_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode that a terminal acts on: control and format characters (marks of direction are such), halves
of surrogate pairs, separators of lines and paragraphs. Blanks of any kind are fine, and so is what this Python does not
know yet: its tables are older than the emoji of the users' telephones."""
_JOINERS: Final = frozenset({"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))})
"""Format characters that are part of words and emoji: the zero width (non-)joiners, and the tags of flags."""

_SECRET_SIGNS: Final = re.compile("[?=&@;]|://")
"""A name with one of these carries a query, credentials or an address."""
_AGENT_ENDS: Final = re.compile(r"\?|://|\b(?:bearer|basic)\s", re.IGNORECASE)
"""Signs that end a peer's name for itself: an address may have a key in its path. ``;`` is in names of browsers."""
_AGENT_SIGNS: Final = re.compile("[?=@]|://")
_MOST_DECODED: Final = 4
"""Rounds of percent-decoding; text that still changes then is no name. Each round is linear in the length."""


def carries_secret(name: str) -> bool:
    """Return whether a name carries a query, credentials or an address, as it is or percent-encoded."""
    return _has_sign(name, _SECRET_SIGNS)


def without_secret(text: str, most: int, hashed: Callable[[str], str]) -> str:
    """Return what a peer calls itself, printable and without what is behind ``?``, ``://``, ``Bearer`` or ``Basic``."""
    shown = _AGENT_ENDS.split(text, 1)[0][:most]
    return hashed(text) if _has_sign(shown, _AGENT_SIGNS) else printable(shown)[:most]


def decoded(text: str) -> str:
    """Return a text percent-decoded, also if that was encoded; what still changes after some rounds becomes ``?``."""
    for _ in range(_MOST_DECODED):
        if "%" not in text or (plain := unquote(text)) == text:
            return text
        text = plain
    return "?"


def _has_sign(text: str, signs: re.Pattern[str]) -> bool:
    """Return whether a text has one of these signs, as it is or percent-decoded."""
    return signs.search(text) is not None or ("%" in text and signs.search(decoded(text)) is not None)


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with every character that a terminal would act on written as ``\uXXXX``."""
    if text.isprintable():  # no control, format or surrogate characters, and no separator but the blank
        return text
    kept = "\n\t" if lines else ""
    return "".join(_escape(char) if _is_unfit(char) and char not in kept else char for char in text)


def foreign(text: Any, most: int = 200) -> str:
    """Return a foreign text on one line, fit for a terminal and for HTML: without control characters, not too long.

    What a server says may hold escape sequences, marks that turn the direction of writing, or a megabyte.
    """
    whole = " ".join(str(text)[: most * 4 + 100].split())
    shown = printable(whole)
    return shown if len(shown) <= most else shown[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def short(value: object) -> str:
    """Return `value` for an error: what is long is cut, since an error is one line of a log."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_unfit(char: str) -> bool:
    if unicodedata.category(char) in _UNFIT_CATEGORIES:
        return char not in _JOINERS
    # The last two of each plane and 32 more are reserved for never being a character.
    return ord(char) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(char) <= 0xFDEF


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD7C0 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"  # as JSON writes them
