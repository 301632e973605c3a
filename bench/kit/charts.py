"""Charts as SVG files that are the same for the same figures, readable in light and dark, and small.

Text stays text. Page and text follow the reader's colour scheme where the program that shows the file knows it; the
colours of what is drawn are of middle lightness, so that they can be told from either page.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Final

INK: Final = "#767e88"
"""Of text and axes: at least 4 to 1 against white and against the darkest grey of the usual dark pages."""
COLOURS: Final = ("#2f81f7", "#db6d28", "#2da44e", "#a371f7", "#bf8700", "#e5534b")
"""In turn. The shapes and labels differ as well: colour alone tells nobody apart for everyone."""
MOST_BYTES: Final = 150_000
"""Of one file: these are in the repository."""

_SCHEME: Final = (
    "<style>.page{fill:#ffffff} @media (prefers-color-scheme: light){text{fill:#1f2328!important}} "
    "@media (prefers-color-scheme: dark){.page{fill:#0d1117} text{fill:#e6edf3!important}}</style>"
    '<rect class="page" width="100%" height="100%" fill="#ffffff"/>'
)
"""The page is a part of the picture: a site may be light for a reader whose system is dark."""
_STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flowctl",  # else identifiers are random, and the file differs each time
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
}


def plotting() -> Any:
    """Return matplotlib's pyplot in our style, drawing into files only.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - measuring needs none of it
    except ImportError:
        raise SystemExit("error: charts need matplotlib\nhint: pip install '.[dev]'") from None
    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of what it draws with

    settings: dict[Any, Any] = _STYLE  # the names are too many for a type
    plt.rcdefaults()
    plt.rcParams.update(settings)
    return plt


def save(figure: Any, path: Path, alt: str) -> None:
    """Write a figure as SVG and close it.

    Args:
        figure: of `plotting`.
        path: of the file; its folder is made where it is missing.
        alt: what the chart shows, for those who do not see it.

    Raises:
        ValueError: the file would be larger than `MOST_BYTES`.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Title": alt}, bbox_inches="tight")
    plotting().close(figure)
    text = re.sub(r"(<svg [^>]*>)", lambda match: match[1] + _SCHEME, out.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(r"[ \t]+\n", "\n", text)
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"{path.name} has {len(text.encode())} bytes, it may have {MOST_BYTES}: draw fewer points")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
