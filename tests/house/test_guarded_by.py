"""Attributes marked ``# guarded by _lock`` are touched under that lock only; docs/locks.md has the rules for readers.

Checked on the text, class by class, bases in other files included:

- A marked attribute is touched (as ``self.name``) only in ``__init__``, inside ``with self._lock:``, in a method whose
  name ends in ``_locked``, or in a method that begins with ``self._lock.assert_owned()``.
- A method whose name ends in ``_locked`` is called only from such places too. Where the text cannot show that, because
  the method is called from a lambda or handed on as a value, it asserts that this thread owns the lock.
- The remaining touches are listed in `UNLOCKED`, each with the reason why it is right. An entry that is no longer
  needed fails.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from source_kit import classes_of, module_files, shown, text_of

MARK = re.compile(r"#.*\bguarded by (_\w*lock)\b")
MARKED = re.compile(r"\s*self\.(\w+)\s*[:=]")

UNLOCKED: dict[tuple[str, str], str] = {
    ("Sender.drained", "_outbox"): "never replaced, its parts as single references; stale by the time it is used",
    ("MessageScheduler._run", "_turning"): "who has put a call off had the lock since; whoever has the turn does it",
    ("RecordedSender.following", "_cohort"): "one reference, as in Sender.following",
    ("RecordedSender.following", "_feed"): "one reference; stale by the time it is used",
    ("Server._leave_to_parent", "_connections"): "in a forked child of one thread, where the lock may be held for ever",
    ("ConnectionCore._finish", "ending"): "runs after it was set; set once and never changed",
    ("ConnectionCore.process_input", "ending"): "set once; seen a moment late, input goes to a session about to end",
    ("ConnectionCore._charge", "ending"): "set once; seen a moment late, one that is about to end is slowed",
    ("ConnectionCore._call_timer", "ending"): "set once; seen a moment late, a session about to end is called",
    ("ConnectionCore._run_calls", "ending"): "set once; seen a moment late, a session about to end is called",
    ("SecureCore.attached", "ending"): "set once; seen a moment late, the handshake of one about to end begins",
    ("Serving.pulse", "_outbox"): "never replaced, its count one reference; stale by the time it is used",
    ("Serving.pulse", "_judgement"): "only asks whether a slow peer is known; stale by the time it is used",
    ("Sender.settings", "_judgement"): "the settings are one frozen object",
    ("Sender.limits", "_core"): "the core is never replaced, its limits as one frozen object",
    ("Sender.state", "_core"): "the core is never replaced, its state is one reference; stale by the time it is used",
    ("Sender.closed", "_judgement"): "a flag that only ever goes from False to True",
    ("Serving.blocked", "_judgement"): "asked by the owning thread, the only one that sets it",
    ("Sender.following", "_cohort"): "changed by the owning thread only; others get one reference, maybe a stale one",
    ("Serving.stands", "_judgement"): "one field, asked by the owning thread, the only one that sets it",
    ("Serving.change_standing", "_judgement"): "by the owning thread; in and out of the cohort under the lock",
    ("Serving.writable", "_cohort"): "changed by the owning thread only, which is the one that runs this",
}
"""(class.method, attribute): why it may be touched there without the lock."""

FOREIGN = re.compile(r"#.*\bguarded by the (\w+)'s lock\b")
UNLOCKED_FOREIGN: dict[tuple[str, str], str] = {
    ("Playing.stream_ended", "ended"): "asks again, on the viewer's thread, whether a job from the hub is outdated",
    ("Playing.stream_published", "ended"): "asks again, on the viewer's thread, whether a job is outdated",
    ("Playing.pause", "ended"): "as in Playing.begin",
    ("Playing.begin", "ended"): "the hub tells the viewer, through its thread, of every change after this",
}
"""The same for attributes that the lock of another object guards: (class.method, attribute)."""


@dataclass
class Guarded:
    name: str
    node: ast.ClassDef
    file: object
    attributes: dict[str, str] = field(default_factory=dict)  # name: lock, bases included


def marks_in(lines: list[str], mark: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield (attribute, what guards it) of every mark: behind the attribute, or in a comment of its own before it."""
    for number, line in enumerate(lines):
        found = mark.search(line)
        if found:
            attribute = MARKED.match(lines[number + 1] if line.lstrip().startswith("#") else line)
            if attribute:
                yield attribute[1], found[1]


@functools.cache
def guarded() -> dict[str, Guarded]:
    """Return every class that has marked attributes, its own or inherited."""
    classes: dict[str, Guarded] = {}
    for path in module_files().values():
        lines = text_of(path).splitlines()
        for node in classes_of(path):
            item = Guarded(node.name, node, path)
            item.attributes = dict(marks_in(lines[node.lineno - 1 : node.end_lineno], MARK))
            # Two rooms may have a class of one name: the first, or the one with marks, is known by it alone.
            other = classes.get(node.name)
            if other is not None and item.attributes and not other.attributes:
                classes[f"{node.name} of {other.file}"] = other
                other = None
            classes[node.name if other is None else f"{node.name} of {path}"] = item
    for item in classes.values():
        for base in bases_of(item, classes):
            item.attributes = {**base.attributes, **item.attributes}
    return {name: item for name, item in classes.items() if item.attributes}


def bases_of(item: Guarded, classes: dict[str, Guarded]) -> Iterator[Guarded]:
    for base in item.node.bases:
        known = classes.get(ast.unparse(base).split("[")[0])
        if known is not None:
            yield from bases_of(known, classes)
            yield known


def locks_taken(node: ast.With) -> set[str]:
    taken = [ast.unparse(item.context_expr) for item in node.items]
    return {name.removeprefix("self.") for name in taken if name.startswith("self.")}


def asserts_owned(method: ast.FunctionDef, lock: str) -> bool:
    """Return whether the method's first statement after the docstring asserts ownership of `lock`."""
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    return bool(body) and ast.unparse(body[0]) == f"self.{lock}.assert_owned()"


@dataclass(frozen=True)
class Touch:
    """``self.name`` somewhere: under which locks, and whether the text runs it at once (False: in a lambda, later)."""

    name: str
    line: int
    locks: frozenset[str]
    at_once: bool
    called: bool


def touches(node: ast.AST, locks: frozenset[str], *, at_once: bool = True) -> Iterator[Touch]:
    """Yield what is done with self in `node`, whose locks are held on entry."""
    if isinstance(node, ast.With):
        for item in node.items:
            yield from touches(item, locks, at_once=at_once)
        for child in node.body:
            yield from touches(child, locks | locks_taken(node), at_once=at_once)
        return
    if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
        # It runs when somebody calls it, which may be after the lock was given back.
        locks, at_once = frozenset(), False
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if called and ast.unparse(node.func.value) == "self":
        yield Touch(node.func.attr, node.lineno, locks, at_once, called=True)
        for child in (*node.args, *node.keywords):
            yield from touches(child, locks, at_once=at_once)
        return
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
        yield Touch(node.attr, node.lineno, locks, at_once, called=False)
    for child in ast.iter_child_nodes(node):
        yield from touches(child, locks, at_once=at_once)


def methods_of(item: Guarded) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in item.node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def inherited_methods(item: Guarded) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for base in (*bases_of(item, guarded()), item):
        found.update(methods_of(base))
    return found


def held_on_entry(item: Guarded, method: ast.FunctionDef) -> frozenset[str]:
    locks = frozenset(item.attributes.values())
    if method.name == "__init__" or method.name.endswith("_locked"):
        return locks
    return frozenset(lock for lock in locks if asserts_owned(method, lock))


def touches_of(item: Guarded) -> Iterator[tuple[ast.FunctionDef, Touch]]:
    for method in methods_of(item).values():
        held = held_on_entry(item, method)
        for statement in method.body:
            for touch in touches(statement, held):
                yield method, touch


def unlocked_touches() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in guarded().values():
        for method, touch in touches_of(item):
            lock = item.attributes.get(touch.name)
            if lock is not None and lock not in touch.locks:
                found[f"{item.name}.{method.name}", touch.name].append(shown(item.file, touch.line))
    return found


def test_marked_attributes_when_touched_are_touched_under_their_lock():
    wrong = {key: places for key, places in unlocked_touches().items() if key not in UNLOCKED}
    assert wrong == {}


def test_exceptions_when_listed_are_still_needed():
    assert set() == UNLOCKED.keys() - unlocked_touches().keys()
    assert all(len(reason.split()) >= 4 for reason in UNLOCKED.values())


def test_locked_methods_when_called_are_called_under_the_lock_or_assert_it():
    wrong = []
    for item in guarded().values():
        methods = inherited_methods(item)
        locks = set(item.attributes.values())
        for method, touch in touches_of(item):
            target = methods.get(touch.name)
            if target is None or not touch.name.endswith("_locked"):
                continue
            seen = touch.called and touch.at_once and touch.locks & locks
            if not seen and not any(asserts_owned(target, lock) for lock in locks):
                wrong.append(f"{shown(item.file, touch.line)}: {item.name}.{method.name} -> {touch.name}")
    assert wrong == []


def test_marked_attributes_when_set_up_have_their_lock():
    for item in guarded().values():
        made = {
            touch.name
            for base in (*bases_of(item, guarded()), item)
            for _, touch in touches_of(base)
            if touch.name.endswith("lock")
        }
        assert set() == set(item.attributes.values()) - made, item.name


def test_marks_when_written_are_all_understood():
    seen = sum(len(set(item.attributes) & own_names(item)) for item in guarded().values())
    written = sum(bool(MARK.search(line)) for path in module_files().values() for line in text_of(path).splitlines())
    assert written == seen
    assert written > 50


def own_names(item: Guarded) -> set[str]:
    lines = text_of(item.file).splitlines()[item.node.lineno - 1 : item.node.end_lineno]
    return {attribute for attribute, _ in marks_in(lines, MARK)}


def foreign_touches() -> dict[tuple[str, str], list[str]]:
    """Return the touches of ``stream.name`` outside the lock of the other object that guards `name`."""
    guards: dict[tuple[object, str, str], str] = {}  # (folder, variable, attribute): class with the lock
    for path in module_files().values():
        lines = text_of(path).splitlines()
        for node in classes_of(path):
            for attribute, owner in marks_in(lines[node.lineno - 1 : node.end_lineno], FOREIGN):
                guards[path.parent, node.name.lower(), attribute] = owner.capitalize()
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in module_files().values():
        for node in classes_of(path):
            item = Guarded(node.name, node, path, {"": "_lock"})
            for method in methods_of(item).values():
                held = held_on_entry(item, method)
                for variable, name, line, locks in named_touches(method, held):
                    owner = guards.get((path.parent, variable, name))
                    if owner is not None and not (owner == node.name and "_lock" in locks):
                        found[f"{node.name}.{method.name}", name].append(shown(path, line))
    return found


def named_touches(node: ast.AST, locks: frozenset[str]) -> Iterator[tuple[str, str, int, frozenset[str]]]:
    """Yield (variable, attribute, line, locks held) of every ``variable.attribute`` and ``self.variable.attribute``."""
    if isinstance(node, ast.With):
        locks |= locks_taken(node)
    elif isinstance(node, ast.Lambda):
        locks = frozenset()
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id, node.attr, node.lineno, locks
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        yield node.value.attr, node.attr, node.lineno, locks
    for child in ast.iter_child_nodes(node):
        yield from named_touches(child, locks)


def test_attributes_when_another_objects_lock_guards_them_are_touched_under_it():
    found = foreign_touches()
    assert {key: places for key, places in found.items() if key not in UNLOCKED_FOREIGN} == {}
    assert set() == UNLOCKED_FOREIGN.keys() - found.keys()


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("with self._lock:\n    self.a += 1", set()),
        ("with self._lock:\n    f(lambda: self.a)", {"a"}),
        ("self._lock.assert_owned()\nself.a = 1", set()),
        ("if self.a:\n    return", {"a"}),
        ("with self._other:\n    self.b()", {"b"}),
    ],
)
def test_checker_when_given_a_method_sees_what_is_unlocked(body, names):
    source = "class X:\n    def m(self):\n" + "\n".join(f"        {line}" for line in body.splitlines())
    node = ast.parse(source).body[0]
    item = Guarded("X", node, "x.py", {"a": "_lock", "b": "_lock"})
    found = {touch.name for _, touch in touches_of(item) if touch.name in "ab" and "_lock" not in touch.locks}
    assert names == found
