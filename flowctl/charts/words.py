"""Figures as people read them (pure). Below `FEW`, a share is written as "3 of 7" and never as a percentage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from flowctl.core.text.printable import foreign
from flowctl.units import format_bit_rate, format_duration, format_size

FEW: Final = 20
"""Below so many, one more or less is 5 % of them."""


def number(value: Any) -> float | None:
    """Return a finite number as one, anything else (text that is none, None, NaN, infinity, a flag) as None."""
    if value is None or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int:
    """Return a count; what is none is 0."""
    return int(number(value) or 0)


def figure(value: Any) -> str:
    """Return a figure, with a digit behind the point where it has any; "-" for what is none."""
    found = number(value)
    return "-" if found is None else f"{found:,.0f}" if found == int(found) else f"{found:,.1f}"


def percent(value: Any) -> str:
    """Return a share (0 to 1); what is not nothing is never written as 0 %, what is not all never as 100 %."""
    found = number(value)
    if found is None:
        return "-"
    if 0 < found < 0.0005 or 0.9995 <= found < 1:
        return "< 0.1 %" if found < 0.5 else "> 99.9 %"
    return f"{found * 100:,.1f}".removesuffix(".0") + " %"


def share(part: Any, of: Any, *, brief: bool = False) -> str:
    """Return a part of a whole: "3 of 7", and from `FEW` on "12.5 % (50 of 400)"; brief: the first half of that."""
    told = f"{whole(part):,} of {whole(of):,}"
    if whole(of) < FEW:
        return told
    return percent(whole(part) / whole(of)) if brief else f"{percent(whole(part) / whole(of))} ({told})"


def span(value: Any) -> str:
    found = number(value)
    if found is None:
        return "-"
    if found < 7200:
        return f"{found * 1000:.1f} ms" if 0 < found < 0.01 else format_duration(found)
    return f"{found / 3600:,.1f} h" if found < 2 * 86400 else f"{found / 86400:,.1f} days"


def ms(value: Any) -> str:
    found = number(value)
    return span(None if found is None else found / 1000)


def size(value: Any) -> str:
    found = number(value)
    if found is None:
        return "-"
    return format_size(found) if found < 1024**4 else f"{found / 1024**4:,.1f} TiB"


def rate(value: Any) -> str:
    found = number(value)
    return "-" if found is None else format_bit_rate(found)


def words(value: Any, most: int = 60) -> str:
    """Return a text of a peer on one line; "-" for none, and for a number that is none."""
    found = "" if value is None or (isinstance(value, float) and number(value) is None) else foreign(value, most)
    return found or "-"


_UNITS: Final[Mapping[str, Callable[[Any], str]]] = {
    "per_s": figure,
    "_ms": ms,
    "_s": span,
    "_bytes": size,
    "bit_rate": rate,
    "_id": str,
    **dict.fromkeys(("share", "_ratio", "load_peak", "busy_peak", "line_of_stream"), percent),
}
"""End of a name -> how its value is written; the first that fits counts."""


def told(name: str, value: Any) -> str:
    """Return a value of that name: a figure by the unit at the end of its name, a flag as yes or no, a text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float) or number(value) is None:
        return words(value, 160)
    return next((write for end, write in _UNITS.items() if name.endswith(end)), figure)(value)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a text with values in it where it has their names: ``{delay_p95_ms}``; one that is not there is a "-"."""
    return re.sub(r"\{(\w+)\}", lambda name: told(name[1], values.get(name[1])), template)


def plural(found: Any, one: str, many: str | None = None) -> str:
    """Return a count with its noun, like ``1 viewer`` or ``2,000 viewers``."""
    return f"{figure(found)} {one if number(found) == 1 else many or one + 's'}"


def sentences(facts: Mapping[str, Any], text: str) -> str:
    """Return the lines of a text with facts in them (``{name}``), those that lack one left out."""

    def fact(found: re.Match[str]) -> str:
        value = facts[found[1]]
        return "" if found[0].endswith("?}") else value if isinstance(value, str) else told(found[1], value)

    lines = [line for line in text.strip().splitlines() if all(facts.get(name) for name in _FACT.findall(line))]
    return " ".join(_FACT.sub(fact, line) for line in lines)


_FACT: Final = re.compile(r"\{(\w+)\??\}")


def apart(part: float, of: float, other_part: float, other_of: float) -> float:
    """Return by how many standard errors two shares differ, for few as well (Agresti and Caffo, 2000).

    One success and one failure more on each side: that keeps chance from looking certain.
    """
    here, there = (part + 1) / (of + 2), (other_part + 1) / (other_of + 2)
    return (here - there) / math.sqrt(here * (1 - here) / (of + 2) + there * (1 - there) / (other_of + 2))
