"""The one template of pages that stand alone: no script, no request, light and dark, readable without their pictures.

Names of streams, user agents, addresses and reasons come from peers: every text is made printable and escaped where it
becomes HTML (`text`), and a page forbids itself to load or run anything (its content security policy), so that what a
peer said can do nothing but be read.

The series colours were chosen to be told apart by people with any kind of colour vision in their fixed order, and to
stand out from the paper in light and dark; text never wears them. Tables scroll in their own box, the page never does.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowctl.charts.axes import Picture, draw
from flowctl.charts.pictures import Lines
from flowctl.core.text.printable import foreign

PALETTE: Final = """
:root{color-scheme:light dark;--paper:#fcfcfb;--card:#fff;--ink:#0b0b0b;--soft:#52514e;--muted:#75736e;--grid:#e6e5e0;
--base:#bdbbb3;--edge:#e3e2dd;--good:#0a7a2f;--bad:#c3302f;--doubt:#8a5a00;--quiet:#a3a19a;
--s1:#2a78d6;--s2:#eb6834;--s3:#1baf7a;--s4:#eda100;--s5:#e87ba4;--s6:#4a3aa7;--s7:#7b7a75;--s8:#e34948}
@media(prefers-color-scheme: dark){:root{--paper:#131312;--card:#1c1c1a;--ink:#f7f6f2;--soft:#c5c3ba;--muted:#98968e;
--grid:#2f2f2c;--base:#4a4944;--edge:#32322f;--good:#4cc274;--bad:#f07c78;--doubt:#e0a93b;--quiet:#6d6c66;
--s1:#3987e5;--s2:#d95926;--s3:#199e70;--s4:#c98500;--s5:#d55181;--s6:#9085e9;--s7:#98968e;--s8:#e66767}}
""".strip()
"""Two sets of colours, by the colour scheme of the reader."""

MARKS: Final = """
svg text{font-size:12px;fill:var(--muted);font-family:inherit;
font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--grid);fill:none}svg .base{stroke:var(--base);fill:none}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .area{stroke:none}svg text.strong{fill:var(--ink)}
svg .dot{fill-opacity:.75;stroke:var(--card)}svg .hollow{stroke-width:2}
svg .marked{fill-opacity:1;stroke:var(--ink);stroke-width:1.5}
svg .hit{fill:transparent}svg .hit:hover{fill:var(--ink);fill-opacity:.07}
""".strip()
"""How pictures are drawn."""

_LAYOUT: Final = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 40px}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}h2,h3{font-size:15px;margin:0 0 8px}
p{margin:0 0 8px;color:var(--soft)}code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
.command code{display:block;background:var(--card);border:1px solid var(--edge);border-radius:6px;padding:8px 10px}
section{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:14px 16px;margin:0 0 16px;
min-width:0}
.good{border-left:4px solid var(--good)}.bad{border-left:4px solid var(--bad)}.doubt{border-left:4px solid var(--doubt)}
ul{margin:0;padding-left:20px}.verdicts,.legend{list-style:none;padding:0}.verdicts li{padding:2px 0}
.verdicts span{color:var(--soft)}
b.no{color:var(--bad)}b.yes{color:var(--good)}.verdicts b{display:inline-block;min-width:84px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:12px;margin:0 0 16px}
.tiles div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 14px;display:flex;
flex-direction:column-reverse;justify-content:flex-end}
.tiles dt{color:var(--soft);font-size:13px;line-height:1.35}
.tiles dd{margin:0;font-size:24px;font-weight:600;white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:16px;margin-bottom:16px}
.plots section{margin:0}
svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 6px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.legend i.box{width:11px;height:11px;border-radius:2px;border:1px solid var(--edge)}.note{font-size:13px}
details{margin-top:6px;font-size:13px}summary{cursor:pointer;color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 7px;border-bottom:1px solid var(--edge);text-align:right;vertical-align:top}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom}
.figures td{white-space:nowrap}
th:first-child,td:first-child,.words th,.words td{text-align:left}tbody th{font-weight:600;white-space:nowrap}
.words td{white-space:nowrap}.words td:last-child,.words td.long{white-space:normal;overflow-wrap:anywhere;
min-width:220px}
tbody tr:last-child th,tbody tr:last-child td{border-bottom:0}
footer p{font-size:13px;color:var(--muted)}
@media print{section,.tiles div{break-inside:avoid}details{display:none}}
""".strip()

STYLE: Final = f"{PALETTE}\n{MARKS}\n{_LAYOUT}"
"""The style sheet of every page."""

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Html(str):
    """A text that is HTML already: every other text is escaped."""

    __slots__ = ()


def text(value: Any, most: int = 200) -> Html:
    """Return anything as text of the page, of at most `most` characters; what is HTML already as it is."""
    return value if isinstance(value, Html) else Html(html.escape(foreign(value, most)))


def page(title: str, body: Iterable[str], *, style: str = "") -> str:
    """Return a whole page."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title>",
            f"<style>{STYLE}{style}</style></head><body><main>",
            *filter(None, body),
            "</main></body></html>",
            "",
        ]
    )


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], *, kind: str = "figures") -> str:
    """Return a table; the first cell of a row is its head."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    lines = "".join(
        f'<tr><th scope="row">{text(row[0], 400)}</th>{"".join(f"<td>{text(cell, 400)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def tiles(found: Iterable[tuple[str, str]]) -> str:
    """Return the few figures that one looks for first, as (label, value); "" if there are none."""
    items = "".join(f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd></div>" for label, value in found)
    return f'<dl class="tiles">{items}</dl>' if items else ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its figures as a table.

    Args:
        legend: (label, CSS colour) each. Empty: of lines their own, of anything else none.
    """

    picture: Picture
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


def figure(shown: Figure, *, level: int = 2) -> str:
    """Return a figure in its box, under a heading of `level`."""
    picture = shown.picture
    legend = shown.legend or (picture.legend if isinstance(picture, Lines) else ())
    box = "" if isinstance(picture, Lines) else ' class="box"'
    keys = "".join(f'<li><i{box} style="background:{paint}"></i>{text(label)}</li>' for label, paint in legend)
    parts = [
        f"<h{level}>{text(picture.title)}</h{level}>",
        f'<ul class="legend">{keys}</ul>' if keys else "",
        draw(picture),
        f'<p class="note">{text(shown.note, 600)}</p>' if shown.note else "",
        f"<details><summary>As figures</summary>{table(shown.heads, shown.rows)}</details>" if shown.rows else "",
    ]
    return f"<section>{''.join(parts)}</section>"


def figures(found: Iterable[Figure], *, level: int = 2) -> str:
    """Return figures side by side where there is room; "" if there are none."""
    drawn = "".join(figure(item, level=level) for item in found)
    return f'<div class="plots">{drawn}</div>' if drawn else ""
