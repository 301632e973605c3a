"""The project's own source as data: what the tests of the house rules share.

Everything is read with `ast`, nothing is imported: a rule must be checkable for a file that does not even run.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"flowctl": ROOT / "flowctl", "flowctl_servers": ROOT / "servers" / "flowctl_servers"}


@dataclass(frozen=True)
class Import:
    """One imported module, as written.

    Args:
        module: dotted name; for ``from package import name`` the submodule if there is one, else the package.
        typing_only: under ``if TYPE_CHECKING``: no arrow at run time.
        late: inside a function: no arrow at import time.
    """

    module: str
    line: int
    typing_only: bool
    late: bool


@functools.cache
def module_files() -> dict[str, Path]:
    """Return the file of every module of both packages, by dotted name."""
    files: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            files[".".join(parts)] = path
    return files


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return every import of a file, wherever it stands."""
    return tuple(_imports(tree_of(path).body, typing_only=False, late=False))


def _imports(body: list[ast.stmt], *, typing_only: bool, late: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, typing_only, late)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                module = whole if whole in module_files() else str(node.module)
                yield Import(module, node.lineno, typing_only, late)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _imports(node.body, typing_only=True, late=late)
            yield from _imports(node.orelse, typing_only=typing_only, late=late)
        else:
            inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for block in _blocks(node):
                yield from _imports(block, typing_only=typing_only, late=inside)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if block:
            yield block
    for handler in getattr(node, "handlers", []):
        yield handler.body
    for case in getattr(node, "cases", []):
        yield case.body


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def functions_of(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@functools.cache
def classes_of(path: Path) -> tuple[ast.ClassDef, ...]:
    return tuple(node for node in nodes_of(path) if isinstance(node, ast.ClassDef))


def shown(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"
