"""Runs benchmarks, prints their tables and writes them into the document: ``python bench/run.py [NAME ...]``.

A benchmark is a file ``NAME.py`` in one of the rooms of `ROOMS` with a function ``run()`` that takes no
arguments that must be given and returns rows: dictionaries with the same keys, and a dictionary ``QUICK`` of arguments
with which that takes seconds. Its docstring says what is measured and beside what. All rows are also written to
``bench/results/NAME.json``, with machine and time, so that runs can be compared.

What it wrote stands in docs/benchmarks.md, between the marks of that name, where the document has them. A module with
a function ``document(rows, images)`` says itself what that is; for others it is the table. A function
``shown(rows)`` returns the rows as they go to the screen. With ``--quick`` each one
takes seconds, for a look at whether it works; such figures are printed only.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kit import documents
from kit.machine import HERE, RESULTS, machine
from kit.tables import table

ROOMS: Final = ("core", "whole", "viewers", "web", "cluster", "faults")
"""Those that hold benchmarks, each in a file of its own."""
ON_REQUEST: Final = frozenset({"fanout", "prediction", "watched"})
"""Left out unless named: what they show is a part of what another one shows, or stands in another document."""
MACHINE_PART: Final = "machine"


def names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    return sorted(_room_of())


def _room_of() -> dict[str, str]:
    return {path.stem: room for room in ROOMS for path in (HERE / room).glob("[a-z]*.py")}


def load(name: str) -> ModuleType:
    """Import a benchmark."""
    room = _room_of().get(name)
    if room is None:
        raise SystemExit(f"error: no benchmark {name!r}\nhint: there are {', '.join(names())}")
    module = importlib.import_module(f"{room}.{name}")
    if not callable(getattr(module, "run", None)) or not isinstance(getattr(module, "QUICK", None), dict):
        raise SystemExit(f"error: bench/{room}/{name}.py has no run() or no QUICK")
    return module


def title(module: ModuleType) -> str:
    """Return the first line of what a benchmark says of itself."""
    return (module.__doc__ or module.__name__).strip().splitlines()[0]


def measure(name: str, *, quick: bool) -> dict[str, Any]:
    """Run one benchmark, print its table, keep and return its record."""
    module = load(name)
    print(f"\n## {name}: {title(module)}\n", flush=True)
    begun = time.monotonic()
    rows: list[dict[str, Any]] = module.run(**module.QUICK) if quick else module.run()
    print(table(module.shown(rows) if hasattr(module, "shown") else rows))
    print(f"\n({time.monotonic() - begun:.0f} s)", flush=True)
    RESULTS.mkdir(exist_ok=True)
    record = {
        "name": name,
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": rows,
    }
    path = RESULTS / f"{name}{'-quick' if quick else ''}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return record


def part_of(record: dict[str, Any], images: Path) -> str:
    """Return what a record looks like in the document, and write the images that it shows."""
    render = getattr(load(record["name"]), "document", None)
    text: str = render(record["rows"], images) if render else table(words(record["rows"]))
    measured_at = dt.datetime.fromisoformat(record["at"])
    command = record.get("command", f"make bench ARGS={record['name']}")
    return f"{text.strip()}\n\nMeasured on {measured_at:%Y-%m-%d} with `{command}`."


def words(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with heads as a reader would write them."""
    return [{key.replace("_per_s", " per s").replace("_", " "): value for key, value in row.items()} for row in rows]


def machine_part(found: dict[str, Any]) -> str:
    """Return the machine of a record as a table."""
    rows = [{"": name, " ": found[name]} for name in ("cpu", "cores", "system", "python")]
    return table(rows)


def write(record: dict[str, Any], document: Path, images: Path) -> bool:
    if record["name"] not in documents.parts(document.read_text("utf-8")):
        return False
    documents.write(MACHINE_PART, machine_part(record["machine"]), document)
    return documents.write(record["name"], part_of(record, images), document)


def parse() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description="Run benchmarks, print their figures, write them into the document.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all but those that others contain")
    parser.add_argument("--list", action="store_true", help="list them and end")
    parser.add_argument("--quick", action="store_true", help="seconds each; the document is left as it is")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the last results again")
    parser.add_argument("--document", type=Path, default=documents.DOCUMENT, help="default: docs/benchmarks.md")
    return parser.parse_args()


def main() -> int:
    """Run what was asked for; a benchmark that fails does not keep the others from running."""
    arguments = parse()
    if arguments.list:
        print("\n".join(names()))
        return 0
    for name in arguments.names:
        load(name)
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    failed = []
    for name in arguments.names or [name for name in names() if name not in ON_REQUEST]:
        path = RESULTS / f"{name}.json"
        if arguments.render and not path.exists():
            continue
        try:
            record = json.loads(path.read_text("utf-8")) if arguments.render else measure(name, quick=arguments.quick)
            if not arguments.quick and write(record, arguments.document, arguments.document.parent / "images"):
                print(f"(written into {arguments.document})", flush=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an hour of figures must not be lost to one mistake
            failed.append(name)
            print(f"{name} failed: {error!r}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
