"""The one way to make a page that stands alone: no request, light and dark, readable without its pictures.

Pages are templates of Jinja2, each beside what fills it; what they share is in `page.html` and `parts.html`. Names of
streams, user agents, addresses and reasons come from peers: every text that a template shows is made printable and
short and then escaped, in one place (`_shown`), so that what a peer said can do nothing but be read. Scripts are files
of ours in ``assets``, named to the browser by their digests: no other one runs.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from flowctl.charts.axes import WIDTH, Picture
from flowctl.core.text.printable import foreign

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST: Final = 2000
"""Characters of a text; of one that is long by mistake or malice only, a template says less (``|cut``)."""
_CUT: Final = 200
"""Characters of a text that a template cuts and does not say where: a line or two of a page."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its figures as a table."""

    picture: Picture
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    legend: Sequence[tuple[str, str]] = ()  # (label, CSS colour) each; empty: as the picture has it
    note: str = ""

    @property
    def keys(self) -> Sequence[tuple[str, str]]:
        return self.legend or self.picture.legend


def page(template: str, **values: Any) -> str:
    """Return a whole page; `template`: its path below ``flowctl/``, which gets `values`."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    """Return what knows the templates; loaded when the first page is made, for most commands make none."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PackageLoader("flowctl", ""),
    )
    made.filters["cut"] = lambda value, most=_CUT: _shown(value, most)
    made.globals |= {"width": WIDTH, "asset": asset, "digest": digest}
    return made


@functools.cache
def asset(name: str) -> str:
    """Return a file of ours as it is, for the inside of a script or style (``|safe``)."""
    return (resources.files("flowctl.charts") / "assets" / name).read_text("utf-8")


def digest(name: str) -> str:
    """Return a script as a policy of content names it, by what it is."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()}'"


def _shown(value: Any, most: int = _MOST) -> Any:
    """Return a value as text of a page; what is HTML already as it is."""
    if hasattr(value, "__html__"):
        return value
    return "" if value is None else foreign(value, most)


def draw(picture: Picture, **place: float) -> str:
    """Return a picture as an ``<svg>`` element, where `place` (attributes of SVG) says; "" for nothing to draw."""
    return page("charts/picture.svg", picture=picture, place=place).strip()
