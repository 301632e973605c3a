"""What is whole of a recording that nobody finished, by its format."""

from __future__ import annotations

from flowctl.remux.flvform import SUFFIX as FLV
from flowctl.remux.flvform import whole_flv_bytes


def whole_bytes(number: int, suffix: str) -> int:
    """Return how many octets of a file are whole; 0 if it holds no media.

    Args:
        number: its descriptor.
        suffix: of its name.

    Raises:
        ValueError: it is none of our files.
    """
    if suffix == FLV:
        return whole_flv_bytes(number)
    raise ValueError(f"{suffix!r} is no recording")
