"""The measured parts of docs/benchmarks.md: written by the benches, never by hand.

A part stands between ``<!-- measured: NAME -->`` and ``<!-- /measured -->``. Writing the same figures again changes
nothing, so that a diff of the document is a change of figures.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
IMAGES: Final = DOCUMENT.parent / "images"
_PART: Final = re.compile(r"(<!-- measured: ([\w-]+) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)


def parts(text: str) -> dict[str, str]:
    """Return the measured parts of a document by name."""
    return {match[2]: match[3] for match in _PART.finditer(text)}


def written(text: str, name: str, part: str) -> str:
    """Return a document with one of its parts replaced."""
    if name not in parts(text):
        raise KeyError(f"the document has no part <!-- measured: {name} -->")
    body = part.strip() + "\n"
    return _PART.sub(lambda match: match[1] + body + match[4] if match[2] == name else match[0], text)


def write(name: str, part: str, path: Path = DOCUMENT) -> bool:
    text = path.read_text("utf-8")
    if name not in parts(text):
        return False
    path.write_text(written(text, name, part), "utf-8")
    return True
