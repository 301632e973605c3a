r"""Text of others made safe for a terminal (pure).

What a peer, a file or a command line brings may hold characters that a terminal acts on instead of showing them:
escape sequences, which move the cursor, rename the window or answer as if typed; marks that turn the direction of
writing, so that a line reads as another one; separators that begin a new line, and so forge one; surrogates by
themselves, which no encoding takes. Such characters are written as ``\uXXXX``, which JSON reads as the character
again. Letters of all scripts stay as they are, and so do blanks of any width and the joiners that emoji need.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final

_UNFIT_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode that a terminal acts on: control and format characters (marks of direction are such), halves
of surrogate pairs, separators of lines and paragraphs. Blanks of any kind are fine, and so is what this Python does not
know yet: its tables are older than the emoji of the users' telephones."""
_JOINERS: Final = frozenset({"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))})
"""Format characters that are part of words and emoji: the zero width (non-)joiners, and the tags of flags."""


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with every character that a terminal would act on written as ``\uXXXX``.

    Args:
        text: of anybody.
        lines: whether line breaks and tabs stay: for a text of several lines that is our own but for words in it.
    """
    if text.isprintable():  # no control, format or surrogate characters, and no separator but the blank
        return text
    kept = "\n\t" if lines else ""
    return "".join(_escape(char) if _is_unfit(char) and char not in kept else char for char in text)


def foreign(text: Any, most: int = 200) -> str:
    """Return a foreign text on one line, fit for a terminal and for HTML: without control characters, not too long.

    What a server says may hold escape sequences, marks that turn the direction of writing, or a megabyte.

    Args:
        text: anything; taken as a string.
        most: characters left of it.
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
