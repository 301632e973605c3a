"""Counts the house: lines by room, classes, functions, settings, public names, requirements.

``python tests/house/count_house.py`` prints today's figures as a table, with ``--budget`` as the text of budget.toml.
Lines are all lines of Python, as ``wc -l`` counts them. A room is a folder of a district; what stands flat in
``flowctl/``, or flat in a district, is a row of its own.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def room_of(path: Path) -> str:
    """Return the room of a file, up to two folders deep."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:3])


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def lines_by_room(*folders: str) -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in [path for folder in folders for path in python_files(folder)]:
        lines[room_of(path)] += path.read_bytes().count(b"\n")
    return lines


def figures() -> dict[str, int]:
    sys.path.insert(0, str(ROOT))
    import flowctl
    from flowctl.live.settings.model import settings_of

    nodes = [node for path in python_files("flowctl") for node in ast.walk(ast.parse(path.read_bytes()))]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {name: items for name, items in project["optional-dependencies"].items() if name != "dev"}
    required = {item for items in extras.values() for item in items if not item.startswith("flowctl[")}
    return {
        "lines of flowctl": lines_by_room("flowctl").total(),
        "lines of tests": lines_by_room("tests").total(),
        "files of flowctl": len(python_files("flowctl")),
        "rooms": len(lines_by_room("flowctl")),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes),
        "settings": len(list(settings_of())),
        "public names": len(flowctl.__all__),
        "requirements": len(project["dependencies"]),
        "requirements of extras": len(required),
    }


def main(arguments: list[str]) -> None:
    rooms = lines_by_room("flowctl", "tests")
    if arguments == ["--budget"]:
        sys.stdout.write("".join(f'"{room}" = {count}\n' for room, count in sorted(rooms.items())))
        return
    sys.stdout.write("".join(f"{count:>8}  {name}\n" for name, count in figures().items()))
    sys.stdout.write("".join(f"{count:>8}  {room}\n" for room, count in rooms.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
