"""Figures as people read them (pure). A share of fewer than `FEW` is written as "3 of 7", never as a percentage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from flowctl.core.text.printable import foreign
from flowctl.units import format_bit_rate, format_duration, format_size

FEW: Final = 20
"""Total from which a share may be a percentage: of fewer, one more or less is over 5 %."""


def number(value: Any) -> float | None:
    """Return a finite number as a float, anything else (other text, None, NaN, infinity, a flag) as None."""
    if value is None or isinstance(value, bool):
        return None
    try:
        amount = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return amount if math.isfinite(amount) else None


def count_of(value: Any) -> int:
    """Return a count; 0 for anything that is no number."""
    return int(number(value) or 0)


def figure(value: Any) -> str:
    """Return a number as text, with one decimal if it is not whole; "-" for anything that is no number."""
    amount = number(value)
    return "-" if amount is None else f"{amount:,.0f}" if amount == int(amount) else f"{amount:,.1f}"


def percent(value: Any) -> str:
    """Return a share (0 to 1) as a percentage: 0 % and 100 % are exact, and never rounded."""
    amount = number(value)
    if amount is None:
        return "-"
    if 0 < amount < 0.0005 or 0.9995 <= amount < 1:
        return "< 0.1 %" if amount < 0.5 else "> 99.9 %"
    return f"{amount * 100:,.1f}".removesuffix(".0") + " %"


def share(part: Any, of: Any, *, brief: bool = False) -> str:
    """Return a part of a whole: "3 of 7", and from `FEW` on "12.5 % (50 of 400)"; brief: the first half of that."""
    text = f"{count_of(part):,} of {count_of(of):,}"
    if count_of(of) < FEW:
        return text
    return percent(count_of(part) / count_of(of)) if brief else f"{percent(count_of(part) / count_of(of))} ({text})"


def span(value: Any) -> str:
    amount = number(value)
    if amount is None:
        return "-"
    if amount < 7200:
        return f"{amount * 1000:.1f} ms" if 0 < amount < 0.01 else format_duration(amount)
    return f"{amount / 3600:,.1f} h" if amount < 2 * 86400 else f"{amount / 86400:,.1f} days"


def ms(value: Any) -> str:
    amount = number(value)
    return span(None if amount is None else amount / 1000)


def size(value: Any) -> str:
    amount = number(value)
    if amount is None:
        return "-"
    return format_size(amount) if amount < 1024**4 else f"{amount / 1024**4:,.1f} TiB"


def rate(value: Any) -> str:
    amount = number(value)
    return "-" if amount is None else format_bit_rate(amount)


def words(value: Any, most: int = 60) -> str:
    """Return a text of a peer on one line; "-" for no text, and for NaN and infinity."""
    text = "" if value is None or (isinstance(value, float) and number(value) is None) else foreign(value, most)
    return text or "-"


_UNITS: Final[Mapping[str, Callable[[Any], str]]] = {
    "per_s": figure,
    "_ms": ms,
    "_s": span,
    "_bytes": size,
    "bit_rate": rate,
    "_id": str,
    **dict.fromkeys(("share", "_ratio", "load_peak", "busy_peak", "line_of_stream"), percent),
}
"""End of a name -> function that writes its value; the first that fits counts."""


def value_text(name: str, value: Any) -> str:
    """Return a value as text: a number by the unit at the end of `name`, a flag as yes or no, a text on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float) or number(value) is None:
        return words(value, 160)
    return next((write for end, write in _UNITS.items() if name.endswith(end)), figure)(value)


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    """Return `template` with the values for its names, like ``{delay_p95_ms}``; "-" for a missing value."""
    return re.sub(r"\{(\w+)\}", lambda name: value_text(name[1], values.get(name[1])), template)


def plural(count: Any, one: str, many: str | None = None) -> str:
    """Return a count with its noun, like ``1 viewer`` or ``2,000 viewers``."""
    return f"{figure(count)} {one if number(count) == 1 else many or one + 's'}"


def sentences(facts: Mapping[str, Any], text: str) -> str:
    """Return the lines of a text with their facts (``{name}``) filled in; lines that lack a fact are left out."""

    def fact(match: re.Match[str]) -> str:
        value = facts[match[1]]
        return "" if match[0].endswith("?}") else value if isinstance(value, str) else value_text(match[1], value)

    lines = [line for line in text.strip().splitlines() if all(facts.get(name) for name in _FACT.findall(line))]
    return " ".join(_FACT.sub(fact, line) for line in lines)


_FACT: Final = re.compile(r"\{(\w+)\??\}")


def standard_errors_between(part: float, of: float, other_part: float, other_of: float) -> float:
    """Return by how many standard errors two shares differ, also for small counts (Agresti and Caffo, 2000).

    One success and one failure are added to each side: that keeps chance from looking certain.
    """
    here, there = (part + 1) / (of + 2), (other_part + 1) / (other_of + 2)
    return (here - there) / math.sqrt(here * (1 - here) / (of + 2) + there * (1 - there) / (other_of + 2))
