"""Extras stand in pyproject.toml alone: what is imported is declared there, and what lacks one names the right one.

An entry point says which extra it needs. All that can be reached from it has to be installed by that extra, by `cli` or
by the framework's own requirements, but for what is behind `BEHIND` and `ASKED_FOR`: imported inside of a function, and
only where it is asked for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
import sys
import tomllib

import generate_docs
import pytest
import typer
from smoke_readme import chapters
from source_kit import PACKAGES, ROOT, imports_of, module_files, shown

from flowctl.core.text.extras import IMPORTED_AS, packages_by_extra

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FRAMEWORK = {re.split(r"[^\w-]", item)[0] for item in PROJECT["dependencies"]}
POINTS = [
    point
    for point in importlib.metadata.distribution("flowctl").entry_points
    if point.group in {"flowctl.commands", "flowctl.servers"}
]
BEHIND = {
    "flowctl.live.admin.listener": "admin",
    "flowctl.live.remux.container": "media",
    "flowctl.live.remux.hls": "media",
}
"""Modules that need another extra than the command that imports them, once it has seen that they are wanted."""
ASKED_FOR = {"pyarrow": "telemetry", "httpx": "live", "jwt": "live"}
"""Packages of that kind: servers that record, or have hooks over HTTP or web tokens."""
BY_HAND = re.compile(r"""(?:(?:\.|flowctl)\[|EXTRAS(?::-|=)|require_extra\("|install_hint\(")([a-z,]+)[\]"}\n]""")
"""Extras that are named in documents, in packaging and in the source."""


@functools.cache
def imports(module: str) -> list[tuple[str, str, bool]]:
    """Return what a module imports at run time, where, and whether late; what is above it is imported with it."""
    parts = module.split(".")
    files = [module_files().get(".".join(parts[:count])) for count in range(1, len(parts) + 1)]
    return [
        (shown(path, item.line), item.module if top in PACKAGES else top, item.late)
        for path in filter(None, files)
        for item in imports_of(path)
        if not item.typing_only and (top := item.module.split(".")[0]) not in sys.stdlib_module_names
    ]


@functools.cache
def needs(module: str) -> dict[str, str]:
    """Return the packages without which a module cannot be imported, and where each is."""
    found, seen, todo = {}, set(), [module]
    while todo:
        seen.add(name := todo.pop())
        for place, target, late in imports(name):
            if late or target in seen:
                continue
            if target in module_files():
                todo.append(target)
            else:
                found[target] = place
    return found


def installs(extras) -> set[str]:
    return FRAMEWORK.union(*(packages_by_extra()[extra] for extra in extras))


def test_extras_when_read_from_what_is_installed_are_those_of_the_project():
    """An environment that is older than pyproject.toml is made anew by `make setup`."""
    assert packages_by_extra().keys() == PROJECT["optional-dependencies"].keys()
    assert {point.extras[0] for point in POINTS if point.extras} <= packages_by_extra().keys()


def test_packages_when_imported_by_another_name_than_they_are_installed_by_are_listed():
    """All of them are installed here, and tell."""
    tops = {
        name: {package.lower().replace("-", "_") for package in packages}
        for name, packages in importlib.metadata.packages_distributions().items()
    }
    distributions = {name: name for name in packages_by_extra()["all"]} | {v: k for k, v in IMPORTED_AS.items()}
    assert {name: name for name, package in distributions.items() if package not in tops.get(name, ())} == {}


def test_imports_when_of_other_projects_are_declared_and_what_is_declared_is_imported():
    found = {target: place for module in module_files() for place, target, _ in imports(module)}
    others = {target: place for target, place in found.items() if target.split(".")[0] not in PACKAGES}
    declared = installs(["all"])
    assert {target: place for target, place in others.items() if target not in declared} == {}
    assert declared - others.keys() == set()


def test_commands_when_all_that_they_reach_is_imported_need_their_own_extra_only():
    wrong, behind = [], set()
    for point in POINTS:
        have, seen, todo = installs(["cli", *point.extras]), set(), [(point.value, point.module)]
        while todo:
            place, module = todo.pop()
            if module in seen:
                continue
            seen.add(module)
            if lacking := needs(module).keys() - have:
                behind.add(module)
                if not lacking <= installs(["live", BEHIND.get(module, "cli")]):
                    wrong.append(f"{point.name} {point.extras}: {place} imports {module}, which needs {lacking}")
                continue
            for at, target, late in imports(module):
                if target in module_files():
                    todo.append((at, target))
                elif late and target not in have:
                    behind.add(target)
    assert wrong == []
    assert behind == BEHIND.keys() | ASKED_FOR.keys()
    assert all(package in packages_by_extra()[extra] for package, extra in ASKED_FOR.items())


def command_extras() -> dict[str, set[str]]:
    """Return what each word behind ``flowctl`` needs."""
    needed = {}
    for point in POINTS:
        if point.group == "flowctl.commands":
            point.load()(made := typer.Typer())
            for item in [*made.registered_commands, *made.registered_groups]:
                needed[item.name] = {"cli", *point.extras}
    return needed


WITH_CHAPTERS = [path for path in generate_docs.DOCUMENTS if any(chapters(path.read_text("utf-8")))]


@pytest.mark.parametrize("path", WITH_CHAPTERS, ids=lambda path: path.name)
def test_commands_when_behind_an_installation_in_a_document_need_no_more_than_it_installs(path):
    needed = command_extras()
    for extras, blocks in chapters(path.read_text("utf-8")):
        have = installs(extras)
        for words in (shlex.split(line, comments=True) for line in "".join(blocks).replace("\\\n", "").splitlines()):
            lacking = installs(needed[words[1]]) - have if words[0] == "flowctl" and words[1] in needed else set()
            lacking |= {"pyarrow"} - have if {"--events", "--parquet"} & set(words) else set()
            lacking |= {"fastapi"} - have if {"--admin", "--dashboard"} & set(words) else set()
            assert lacking == set(), f"{' '.join(words)} needs more than {sorted(extras)}"


def test_extras_when_named_anywhere_are_there():
    files = [*generate_docs.DOCUMENTS, *module_files().values(), ROOT / "Dockerfile", ROOT / "packaging/debian/build"]
    named = {
        (path.name, extra)
        for path in files
        for extras in BY_HAND.findall(path.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert {(name, extra) for name, extra in named if extra not in packages_by_extra()} == set()
    assert {"README.md", "Dockerfile", "build", "engine.py"} <= {name for name, _ in named}
    listed = re.search(r"the\s+extras are (.*?), and what", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]
    assert {*re.findall(r"`(\w+)`", listed), "dev"} == packages_by_extra().keys()
