"""Comparison: flowctl, nginx-rtmp, Node-Media-Server and a bare loop, in one run, at several crowds and bit rates.

They take turns, several times; the table has medians and ratios. ``python bench compare`` measures for about
half an hour and goes on where it was interrupted; ``--quick`` looks at a small crowd once. Points at which the
machine or the server was full are marked, with what was full: they say who breaks first, not what a viewer costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Final

from compare import measure, plan, render, rivals
from kit import processes
from kit.machine import RESULTS, commit
from kit.tables import table

SMALL: Final[dict[str, Any]] = {"viewers": (100,), "bit_rates": (600_000,), "repeat": 1, "window_s": 3.0}
"""One look at a small crowd: half a minute for four contenders."""


def carry_out(settings: plan.Plan, path: Path) -> list[dict[str, Any]]:
    """Make the measurements of a plan that `path` does not hold yet, and return the rows of all."""
    processes.raise_open_files()
    absent = {name: why for name in settings.contenders if (why := rivals.CONTENDERS[name].absent())}
    for name, why in absent.items():
        print(f"# {name} is left out: {why}", file=sys.stderr, flush=True)
    present = dataclasses.replace(settings, contenders=tuple(set_apart(settings.contenders, absent)))
    store = plan.Store(path, settings.identity(commit()))
    items = list(present.items())
    kept = sum(item in store.found for item in items)
    if kept:
        print(f"# goes on with {kept} of {len(items)} measurements of an interrupted run", file=sys.stderr)
    progress = plan.Progress([item for item in items if item not in store.found], settings.window_s)
    for item in items:
        if item not in store.found:
            figures = _measure(item, settings, store)
            store.add(item, figures)
            progress.done(item)
            print(f"# {item}: {summary(figures)}; {progress}", file=sys.stderr, flush=True)
    return render.rows({item: store.found[item] for item in items}, absent)


def set_apart(names: tuple[str, ...], absent: dict[str, str]) -> list[str]:
    return [name for name in names if name not in absent]


def _measure(item: plan.Item, settings: plan.Plan, store: plan.Store) -> dict[str, Any]:
    """Make one measurement; one that fails is a figure too."""
    told = rivals.Settings(
        viewers=item.viewers,
        bit_rate=item.bit_rate,
        flush_s=settings.flush_s,
        interval_s=interval_s(item, settings, store),
        duration_s=settings.window_s + 90 + item.viewers / 100,
        nap_s=item.nap_s,
        settle_s=settings.settle_s,
    )
    try:
        contender = rivals.CONTENDERS[item.name]
        figures = measure.measure(contender, told, window_s=settings.window_s, measured=settings.measured)
    except (OSError, RuntimeError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {**figures, "interval_ms": told.interval_s * 1000} if item.name == "bare loop" else figures


def interval_s(item: plan.Item, settings: plan.Plan, store: plan.Store) -> float:
    """Return the interval that flowctl was seen to use at this point, for the loop beside it; else its ceiling."""
    for found, figures in store.found.items():
        same = (found.viewers, found.bit_rate, found.nap_s) == (item.viewers, item.bit_rate, item.nap_s)
        if found.name == "flowctl" and same and figures.get("rounds_per_s"):
            return min(max(1 / float(figures["rounds_per_s"]), 0.005), settings.flush_s or 0.04)
    return settings.flush_s or 0.016


def summary(figures: dict[str, Any]) -> str:
    """Return one measurement in a few words."""
    if "failed" in figures:
        return str(figures["failed"])
    text = f"{figures['cpu_us_per_viewer_s']:.0f} us"
    if figures["delay_p99_ms"] is not None:
        text += f", p99 {figures['delay_p99_ms']:.0f} ms"
    return f"{text} ({'; '.join(figures['doubts'])})" if figures["doubts"] else text


QUICK: Final[dict[str, Any]] = {"quick": True}
"""Arguments of `run` for a look at whether it works."""


def run(*, quick: bool = False) -> list[dict[str, Any]]:
    """Compare the usual contenders, and return the medians."""
    path = RESULTS / ("compare-quick.jsonl" if quick else "compare.jsonl")
    if quick:
        path.unlink(missing_ok=True)
    else:
        rivals.install_node()
    rows = carry_out(plan.Plan(contenders=rivals.USUAL, **(SMALL if quick else {})), path)
    path.unlink(missing_ok=True)
    return rows


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns and words of the table."""
    return render.shown(rows)


def document(rows: list[dict[str, Any]], images: Path) -> str:
    """Write the chart into `images`, and return the part of the document: chart and table."""
    return render.document(rows, images)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    usual = plan.Plan(contenders=rivals.USUAL)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small crowd, once")
    parser.add_argument("--only", action="append", choices=list(rivals.CONTENDERS), help="contender; repeatable")
    parser.add_argument("--viewers", type=int, nargs="+", default=None)
    parser.add_argument("--bit-rate", type=int, nargs="+", default=None)
    parser.add_argument("--repeat", type=int, default=None)
    parser.add_argument("--window", type=float, default=None, help="measured seconds")
    parser.add_argument("--flush", type=float, default=usual.flush_s, help="flush interval in seconds")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep measurements here, and go on with them")
    parser.add_argument("--install", action="store_true", help="install Node-Media-Server from npm, and end")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def plan_of(arguments: argparse.Namespace) -> plan.Plan:
    """Return the plan that the command line asks for."""
    given: dict[str, Any] = dict(SMALL) if arguments.quick else {}
    named = {
        "viewers": arguments.viewers and tuple(arguments.viewers),
        "bit_rates": arguments.bit_rate and tuple(arguments.bit_rate),
        "repeat": arguments.repeat,
        "window_s": arguments.window,
    }
    given |= {name: value for name, value in named.items() if value}
    contenders = tuple(arguments.only or rivals.USUAL)
    return plan.Plan(contenders=contenders, flush_s=arguments.flush, everywhere=bool(arguments.only), **given)


def main() -> int:
    """Measure and print."""
    arguments = parse()
    if arguments.install:
        reason = rivals.install_node()
        print(reason or f"Node-Media-Server {rivals.NODE_VERSION} is in {rivals.node_folder()}")
        return 1 if reason else 0
    path = arguments.resume or RESULTS / "compare-cli.jsonl"
    rows = carry_out(plan_of(arguments), path)
    if not arguments.resume:
        path.unlink(missing_ok=True)
    print(json.dumps(rows) if arguments.json else table(shown(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
