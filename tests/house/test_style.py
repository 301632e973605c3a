"""The house rules that ruff has no name for: size, words, and that a test can fail; CONTRIBUTING.md has the reasons."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from pathlib import Path

from source_kit import ROOT, functions_of, imports_of, module_files, shown, text_of, tree_of

MAX_FUNCTION_LINES = 80
"""Beyond that a function has more than one subject. Files have no such fence: a class is whole in one file."""
SOURCE = sorted(module_files().values())
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Not what stands in its cache: tools of others.
BENCHES = sorted(path for path in (ROOT / "bench").rglob("*.py") if ".cache" not in path.parts)
PYTHON = [*SOURCE, *TESTS, *BENCHES]
TEXTS = [
    *PYTHON,
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "bench").glob("*.md")),
    ROOT / "Makefile",
    ROOT / "pyproject.toml",
    ROOT / ".ci" / "run",
]
CHECKS = {"exec", "fail", "hears", "hears_nothing", "hears_the_end", "raises", "warns"}
"""Calls that make a test one that can fail: those of pytest, running code that asserts (the documents'),
and the peers of diffusion, who hear the octets that they were told to or fail."""
HOMES = {path.stem: path for path in TESTS if not path.stem.startswith("test_")}
"""Kits of tests, by the name under which they are imported."""
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|HA" + r"CK)\b|#\s*X" + r"XX\b")
FOREIGN_PATHS = re.compile(r"(?<![\w.])/(home|Users|root|work)/\w")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_functions_when_measured_are_of_readable_size():
    long = {
        f"{shown(path, node.lineno)} {node.name}": node.end_lineno - node.lineno + 1
        for path in PYTHON
        for node in functions_of(path)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_files_when_opened_say_what_they_are():
    first = {name_of(path): (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0].strip() for path in PYTHON}
    assert [name for name, line in first.items() if not line.endswith((".", ":", "?")) or len(line.split()) < 4] == []


def test_texts_when_shipped_are_finished_and_at_home_anywhere():
    wrong = [
        f"{shown(path, number)}: {line}"
        for path in TEXTS
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if UNFINISHED.search(line) or FOREIGN_PATHS.search(line)
    ]
    assert wrong == []


def joins_by_itself(node: ast.AST) -> bool:
    """Return whether an expression puts a host before a port: ``f"{host}:{port}"``, or by `str.format`."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and "{}:{}" in node.value
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return any(
        isinstance(host, ast.FormattedValue)
        and isinstance(port, ast.FormattedValue)
        and ast.unparse(colon) == "':'"
        and re.search(r"host|address|peer", ast.unparse(host.value))
        and re.search(r"port|\[1\]", ast.unparse(port.value))
        for host, colon, port in zip(values, values[1:], values[2:], strict=False)
    )


def test_addresses_when_composed_of_host_and_port_are_so_in_one_place():
    """An address of IPv6 needs brackets there, which whoever writes it anew forgets."""
    home = ROOT / "flowctl" / "core" / "text" / "addresses.py"
    found = [
        shown(path, node.lineno)
        for path in SOURCE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.expr) and joins_by_itself(node) and path != home
    ]
    assert found == []


def test_exemptions_when_taken_name_their_rule_and_their_reason():
    wrong = [
        f"{shown(path, number)}: {line.strip()}"
        for path in PYTHON
        for number, line in enumerate(text_of(path).splitlines(), 1)
        for mark in [re.search(r"#\s*(noqa|type:\s*ignore)(.*)$", line)]
        if mark and "re.search" not in line and not re.match(r"(:\s*[A-Z]|\[)[\w, -]*\]?\s*(-|#|\(|\s)\s*\S+", mark[2])
    ]
    assert wrong == []


def all_tests() -> list[tuple[Path, ast.FunctionDef]]:
    return [
        (path, node)
        for path in TESTS
        if path.name.startswith("test_")
        for node in functions_of(path)
        if node.name.startswith("test_")
    ]


@functools.cache
def helpers_of(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions that a test file may call by name: its own, and those of the kits that it imports."""
    kits = [HOMES[item.module] for item in imports_of(path) if item.module in HOMES]
    return {item.name: item for file in (*kits, path) for item in functions_of(file)}


def checks_something(path: Path, node: ast.FunctionDef) -> bool:
    helpers = helpers_of(path)
    seen: set[str] = set()
    open_ = [node]
    while open_:
        for inner in ast.walk(open_.pop()):
            if isinstance(inner, ast.Assert | ast.Raise):
                return True
            if not isinstance(inner, ast.Call):
                continue
            called = inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")
            if called in CHECKS or called.startswith(("check", "assert", "expect")):
                return True
            if called in helpers and called not in seen:
                seen.add(called)
                open_.append(helpers[called])
    return False


def test_tests_when_run_can_fail():
    idle = [shown(path, node.lineno) for path, node in all_tests() if not checks_something(path, node)]
    assert idle == []


def test_test_files_when_named_have_names_of_their_own():
    """No two test files share a name: tests are no package, so the names are module names."""
    counts = Counter(path.stem for path in TESTS if path.stem != "conftest")
    assert {name: count for name, count in counts.items() if count > 1} == {}


TWISTED = re.compile(r"\bwhoever\b|\b(?:for|of|by|to|with) who (?:\w+s|has|is)\b|\b[Tt]ake note\b")
"""Turns of phrase that nobody says aloud: "for callers that sample many", not "for who looks at many"."""


def test_words_when_read_aloud_are_plain():
    wrong = [
        shown(path, number)
        for path in SOURCE
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if TWISTED.search(line)
    ]
    assert wrong == []


def test_test_files_when_run_alone_find_what_they_import():
    """A file imports from its own folder and from those that pytest puts on the path, so that it runs alone too."""
    pytest_options = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["pytest"]["ini_options"]
    paths = {ROOT / name for name in pytest_options["pythonpath"]}
    homes = {path.stem: path.parent for path in (ROOT / "tests").rglob("*.py")}
    lost = [
        f"{path.name} imports {item.module}"
        for path in (ROOT / "tests").rglob("*.py")
        for item in imports_of(path)
        if (home := homes.get(item.module.split(".")[0])) and home not in {path.parent, *paths}
    ]
    assert lost == []
