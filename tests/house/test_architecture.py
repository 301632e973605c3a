"""ARCHITECTURE.md and CONTRIBUTING.md are true: what they point at is there, and walks follow real calls."""

from __future__ import annotations

import ast
import re

import pytest
from source_kit import ROOT, tree_of

FILE = re.compile(r"`((?:flowctl|servers|tests|bench|docs)/[\w/]*(?:\w\.\w+|/))`")
STEP = re.compile(r"^\d+\. `(flowctl/[\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
NAMED = re.compile(r"`(flowctl/[\w/]+\.py)`,? `([A-Za-z_]\w*(?:\.\w+)*)`")
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/design/rooms.md")


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def definition(path: str, name: str) -> ast.AST | None:
    """Return what defines `name`, dotted, in a file. None: nothing does."""
    node: ast.AST | None = tree_of(ROOT / path)
    for part in name.split("."):
        body = getattr(node, "body", ())
        node = next((item for item in body if part in names_of(item)), None)
    return node


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {item.id for item in targets if isinstance(item, ast.Name)}


def called_from(path: str, name: str) -> set[str]:
    """Return every name that a method uses, itself or in what it calls of its own class and module."""
    around = [tree_of(ROOT / path)]
    if "." in name:
        around.append(definition(path, name.split(".", maxsplit=1)[0]))
    functions = {
        item.name: item
        for scope in around
        for item in getattr(scope, "body", ())
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    used: set[str] = set()
    open_ = [name.rsplit(".", maxsplit=1)[-1]]
    while open_:
        node = functions.pop(open_.pop(), None)
        for item in ast.walk(node) if node is not None else ():
            found = item.attr if isinstance(item, ast.Attribute) else getattr(item, "id", None)
            if found is not None:
                used.add(found)
                open_.append(found)
    return used


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_when_named_in_a_guide_exist(document):
    text = text_of(document)
    assert FILE.findall(text)
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []
    assert [found for found in NAMED.findall(text) if definition(*found) is None] == []


def test_walks_when_followed_lead_from_step_to_step():
    walks = text_of("ARCHITECTURE.md").split("## Two walks")[1].split("\n## ")[0]
    parts = re.split(r"\n\n(?=[A-Z])", walks)
    steps = [found for part in parts if (found := STEP.findall(part))]
    assert [len(walk) for walk in steps] == [10, 15]
    lost = []
    for walk in steps:
        reached: set[str] = set()
        for number, (path, name) in enumerate(walk):
            if number and name.rsplit(".", maxsplit=1)[-1] not in reached:
                lost.append(name)
            reached |= called_from(path, name)
    assert lost == []
