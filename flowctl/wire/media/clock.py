"""What synthetic video shows: a clock of the stream's time, and a square that walks along the lower edge (pure).

So a person sees at once whether a picture moves, how far two players are apart, and which pictures one of them missed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

BACKGROUND: Final = -5
"""Of the picture, in steps of `flowctl.wire.media.tiny_h264`: dark."""
_INK: Final = 7
_WALKER: Final = 3
_GLYPHS: Final = {
    "0": "### #.# #.# #.# ###",
    "1": ".#. ##. .#. .#. ###",
    "2": "### ..# ### #.. ###",
    "3": "### ..# .## ..# ###",
    "4": "#.# #.# ### ..# ..#",
    "5": "### #.. ### ..# ###",
    "6": "### #.. ### #.# ###",
    "7": "### ..# ..# .#. .#.",
    "8": "### #.# ### #.# ###",
    "9": "### #.# ### ..# ###",
    ":": "... .#. ... .#. ...",
    ".": "... ... ... ... .#.",
}
"""Rows of each character, three squares wide."""
_HEIGHT: Final = 5
_MARGIN: Final = 2
LEAST_COLUMNS: Final = 4 * len("00:00.0") + _MARGIN
LEAST_ROWS: Final = _HEIGHT + 2 * _MARGIN
"""Smaller pictures have no room for the clock, and show none."""
MOST_CHANGED: Final = 2 * 3 * _HEIGHT * len("00:00.0") + 2
"""Most squares that differ between any two pictures."""


def squares_at(time_s: float, columns: int, rows: int) -> dict[int, int]:
    """Return the picture of a moment of the stream: the steps of the squares that are not of the background.

    It changes ten times a second; in between the same object is returned, which is not to be changed.
    """
    return _picture(int(time_s * 10 + 1e-6), columns, rows)


@lru_cache(maxsize=8)
def _picture(tenths: int, columns: int, rows: int) -> dict[int, int]:
    seconds, tenth = divmod(tenths, 10)
    minutes, seconds = divmod(seconds, 60)
    text = f"{minutes % 100:02}:{seconds:02}.{tenth}"
    left, top = (columns - 4 * len(text) + 1) // 2, (rows - _HEIGHT) // 2
    found = {
        (top + down) * columns + left + 4 * place + across: _INK
        for place, character in enumerate(text)
        for down, row in enumerate(_GLYPHS[character].split())
        for across, ink in enumerate(row)
        if ink == "#"
    }
    found[(rows - 1) * columns + tenths % columns] = _WALKER
    return found
