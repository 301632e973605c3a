"""Every regular expression of the packages takes time in proportion to its text, whatever the text is.

How it works: the expressions are found in the sources, each with the way in which it is used. Texts that could make
it slow are derived from itself: what leads to one of its repetitions, then something repeated, then something that
does not fit. They are run by a matcher of our own that backtracks as the standard one does and counts its steps, so
that no clock is needed: twice the repetitions may cost a little more than twice the steps, and no more.
"""

from __future__ import annotations

import ast
import fnmatch
import heapq
import importlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from source_kit import ROOT, nodes_of, text_of

from flowctl.load.profiles import SLOW_PROFILES, pattern_of

PACKAGES = (ROOT / "flowctl", ROOT / "servers")
OF_RE = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
OF_SPARK = {"rlike": 0, "regexp_extract": 1, "regexp_replace": 1, "regexp_like": 1}
"""Functions of Spark that take an expression, and the place of it; the first argument of a method is not counted."""
ANCHORED = {"match", "fullmatch"}
FEW_REPETITIONS = 6
REPETITIONS = 24
MOST_STEPS = 20_000
MOST_COMPARED = 24
"""Texts per expression, those that cost most with few repetitions, that are compared with themselves grown."""
MOST_GROWTH = 2.6
"""Steps at twice the repetitions over those at once: linear is 2 at most, quadratic close to 4."""

parser = importlib.import_module("re._parser")
constants = importlib.import_module("re._constants")
CHARACTERS = {constants.LITERAL, constants.NOT_LITERAL, constants.ANY, constants.IN}
REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT)


# -- finding the expressions


@dataclass(frozen=True)
class Expression:
    where: str
    pattern: str
    flags: int
    anchored: bool  # tried at the start of the text alone
    whole: bool  # must reach its end


def expressions() -> list[Expression]:
    found = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            found += _of_file(path, package)
    return found


def _of_file(path: Path, package: Path) -> Iterator[Expression]:
    source = text_of(path)
    if not re.search(r"^import re$|regexp|rlike", source, re.MULTILINE):
        return
    nodes = nodes_of(path)
    module_name = ".".join(
        path.relative_to(package.parent if package.name == "flowctl" else package).with_suffix("").parts
    )
    names = None
    uses = _uses(nodes)
    assigned = {
        id(node.value): node.targets[0].id if isinstance(node, ast.Assign) else node.target.id
        for node in nodes
        if (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
        or (isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name))
    }
    for node in nodes:
        argument = _argument(node)
        if argument is None:
            continue
        if names is None:
            names = vars(importlib.import_module(module_name))
        method = node.func.attr
        flags = 0
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if "re." in ast.unparse(value) and value is not argument:
                flags |= int(eval(ast.unparse(value), {"re": re}) if ast.unparse(value).startswith("re.") else 0)
        methods = {method}
        if method == "compile":
            methods = uses.get(assigned.get(id(node), ""), {"search"})
        pattern = _text(argument, names)
        if method in OF_SPARK:
            pattern = pattern.replace(r"\z", r"\Z")  # the end of the text, as Java and RE2 write it
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        yield Expression(where, pattern, flags, methods <= ANCHORED, methods <= {"fullmatch"})


def _argument(node: ast.AST) -> ast.expr | None:
    """Return the expression that a call is given; None: it is no such call."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and name in OF_RE:
        return node.args[0]
    return node.args[OF_SPARK[name]] if name in OF_SPARK else None


def _uses(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Return which methods are called of each name."""
    uses: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in OF_RE:
            uses.setdefault(node.value.id, set()).add(node.attr)
    return uses


def _text(node: ast.expr, names: dict) -> str:
    """Return the text of an expression; what only a call knows is an ``x`` in it."""
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(part.value)
            else:
                inner = part.value
                known = isinstance(inner, ast.Name) and inner.id in names
                parts.append(str(names[inner.id]) if known else "x")
        return "".join(parts)
    if isinstance(node, ast.BinOp):
        return _text(node.left, names)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "translate":
        return "^" + fnmatch.translate("*a*a?b*")  # an operator's pattern, as bad as they come; matched from the start
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pattern_of":
        return max((pattern_of(profile.parameters) for profile in SLOW_PROFILES), key=len)
    value = names[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
    return value.decode("latin-1") if isinstance(value, bytes) else value


# -- the matcher that counts


class TooManyStepsError(Exception):
    """A text costs so much that nothing needs to be compared."""


class Counter:
    """Backtracks over a parsed expression as the standard library does, and counts the steps."""

    def __init__(self, expression: Expression) -> None:
        self.tree = parser.parse(expression.pattern, expression.flags)
        self.flags = int(self.tree.state.flags)
        self.expression = expression
        self.steps = 0
        self.text = ""
        self.known: dict[tuple[object, str], bool] = {}

    def count(self, text: str) -> int:
        self.text, self.steps = text, 0
        place = 0
        while place <= len(text):
            ends = self._all(self.tree.data, 0, place)
            end = next((end for end in ends if not self.expression.whole or end == len(text)), None)
            if self.expression.anchored:
                break
            place = place + 1 if end is None or end == place else end
        return self.steps

    def _all(self, nodes, index: int, place: int) -> Iterator[int]:
        size = len(nodes)
        while index < size:
            kind, value = nodes[index]
            index += 1
            if kind in CHARACTERS:
                if not self._fits(kind, value, place):
                    return
                place += 1
            elif index == size:
                yield from self._one(kind, value, place)
                return
            else:
                for end in self._one(kind, value, place):
                    yield from self._all(nodes, index, end)
                return
        yield place

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooManyStepsError

    def _one(self, kind, value, place: int) -> Iterator[int]:
        self._step()
        c = constants
        if kind is c.SUBPATTERN:
            yield from self._all(value[3].data, 0, place)
        elif kind is c.BRANCH:
            for branch in value[1]:
                yield from self._all(branch.data, 0, place)
        elif kind in (c.MAX_REPEAT, c.MIN_REPEAT):
            yield from self._repeat(*value, place, greedy=kind is c.MAX_REPEAT)
        elif kind is c.POSSESSIVE_REPEAT:
            yield from itertools.islice(self._repeat(*value, place, greedy=True), 1)
        elif kind is c.ATOMIC_GROUP:
            yield from itertools.islice(self._all(value.data, 0, place), 1)
        elif kind is c.AT:
            if self._at(value, place):
                yield place
        elif kind in (c.ASSERT, c.ASSERT_NOT) and value[0] > 0:
            if (next(self._all(value[1].data, 0, place), None) is not None) is (kind is c.ASSERT):
                yield place
        else:
            raise NotImplementedError(f"{kind} in {self.expression.where}: teach this matcher what it is")

    def _fits(self, kind, value, place: int) -> bool:
        self._step()
        if place == len(self.text):
            return False
        character = self.text[place]
        key = (id(value) if kind is constants.IN else (kind, value), character)
        if key not in self.known:
            self.known[key] = fits(kind, value, character, self.flags)
        return self.known[key]

    def _repeat(self, least, most, nodes, place: int, *, greedy: bool, done: int = 0) -> Iterator[int]:
        if greedy and len(nodes.data) == 1 and nodes.data[0][0] in CHARACTERS:  # most are: without a frame for each
            end = place
            while end - place < most and self._fits(*nodes.data[0], end):
                end += 1
            yield from range(end, place + least - 1, -1)
            return
        if not greedy and done >= least:
            yield place
        if done < most:
            for end in self._all(nodes.data, 0, place):
                if end > place:
                    yield from self._repeat(least, most, nodes, end, greedy=greedy, done=done + 1)
        if greedy and done >= least:
            yield place

    def _at(self, where, place: int) -> bool:
        c = constants
        if where in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return place == 0
        if where in (c.AT_END, c.AT_END_STRING):
            left = self.text[place:]
            return not left or (left == "\n" and where is c.AT_END)
        inside = [0 <= spot < len(self.text) and is_word(self.text[spot]) for spot in (place - 1, place)]
        return (inside[0] != inside[1]) is (where is c.AT_BOUNDARY)


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def fits(kind, value, character: str, flags: int) -> bool:
    c = constants
    if kind is c.ANY:
        return character != "\n" or bool(flags & re.DOTALL)
    if kind is c.NOT_LITERAL:
        return ord(character) != value
    if kind is c.LITERAL:
        forms = {character, character.lower(), character.upper()} if flags & re.IGNORECASE else {character}
        return chr(value) in forms
    negated = value[0][0] is c.NEGATE
    return any(_within(*item, character, flags) for item in value if item[0] is not c.NEGATE) != negated


def _within(kind, value, character: str, flags: int) -> bool:
    c = constants
    if kind is c.CATEGORY:
        name = str(value).lower()
        tests = {"digit": str.isdigit, "space": str.isspace, "word": is_word}
        word = next(word for word in tests if name.endswith(word))
        return tests[word](character) != ("not" in name)
    forms = {character, character.lower(), character.upper()} if flags & re.IGNORECASE else {character}
    if kind is c.RANGE:
        return any(value[0] <= ord(form) <= value[1] for form in forms if len(form) == 1)
    return chr(value) in forms


# -- hostile texts


CANDIDATES = "a0A :/.-=?&@[]<>\"'#%,_\n\t\u00e9!~\\;()${}|*+^x1f"


def sample(kind, value, flags: int) -> str:
    c = constants
    if kind is c.LITERAL:
        return chr(value)
    if kind in (c.NOT_LITERAL, c.ANY, c.IN):
        return next((item for item in CANDIDATES if fits(kind, value, item, flags)), "\x01")
    if kind in REPEATS:
        return samples(value[2], flags) * max(1, min(value[0], 4))
    if kind in (c.ASSERT, c.ASSERT_NOT):
        return ""
    return "".join(samples(part, flags) for part in parts_of(kind, value)[:1])


def samples(nodes, flags: int) -> str:
    return "".join(sample(kind, value, flags) for kind, value in nodes)


def parts_of(kind, value) -> list:
    """Return the expressions within a node."""
    c = constants
    if kind in REPEATS:
        return [value[2]]
    if kind is c.BRANCH or kind in (c.ASSERT, c.ASSERT_NOT):
        return value[1] if kind is c.BRANCH else [value[1]]
    return [value[3]] if kind is c.SUBPATTERN else [value] if kind is c.ATOMIC_GROUP else []


def repetitions(nodes, flags: int, before: str) -> Iterator[tuple[str, str]]:
    """Return what leads to each repetition, and a text of what is repeated."""
    for kind, value in nodes:
        if kind in REPEATS:
            yield before, samples(value[2], flags)
        for part in parts_of(kind, value):
            yield from repetitions(part, flags, before)
        before += sample(kind, value, flags)


def letters(nodes, flags: int) -> set[str]:
    """Return one character for each thing that an expression tells apart."""
    c = constants
    found: set[str] = set()
    for kind, value in nodes:
        if kind in CHARACTERS:
            found.add(sample(kind, value, flags))
        if kind is c.NOT_LITERAL:
            found.add(chr(value))
        if kind is c.IN:
            found |= {chr(item[1]) for item in value[:12] if item[0] is c.LITERAL}
        for part in parts_of(kind, value):
            found |= letters(part, flags)
    return found


def hostile(counter: Counter) -> Iterator[tuple[str, str, str]]:
    """Return texts of three parts, of which the second is to be repeated."""
    known = sorted(letters(counter.tree, counter.flags))[:14]
    every = {"": set(known)}
    for before, repeated in repetitions(counter.tree, counter.flags, ""):
        every.setdefault(before, set()).add(repeated)
        every[before] |= set(known)
        every[""].add(repeated)
    pairs = {a + b for a in known[:7] for b in known[:7] if a != b}
    for before, pumps in every.items():
        for pump in sorted((pumps | pairs) - {""}):
            for after in ("", "\x01", *(letter + "\n\x01" for letter in ("\x01", *known)), *known[:6]):
                yield before, pump, after


def growth(expression: Expression) -> tuple[float, str]:
    counter = Counter(expression)

    def steps(text: tuple[str, str, str], count: int) -> float:
        try:
            return counter.count(text[0] + text[1] * count + text[2])
        except TooManyStepsError:
            return math.inf

    heaviest = heapq.nlargest(MOST_COMPARED, hostile(counter), key=lambda text: steps(text, FEW_REPETITIONS))
    worst = (0.0, "")
    for text in heaviest:
        once, twice = steps(text, REPETITIONS), steps(text, 2 * REPETITIONS)
        worst = max(
            worst, (math.inf if twice == math.inf else twice / once, f"{text[0]!r} + {text[1]!r} * n + {text[2]!r}")
        )
    return worst


def test_expressions_when_texts_grow_cost_in_proportion():
    found = expressions()
    assert len(found) >= 30
    slow = []
    for expression in found:
        ratio, text = growth(expression)
        if ratio > MOST_GROWTH:
            slow.append(f"{expression.where}: {expression.pattern} grows by {ratio:.1f} with {text}")
    assert slow == []


@pytest.mark.parametrize(
    ("pattern", "linear"),
    [
        (r"[^ ]*(?:://|\?[^ ]*=)[^ ]*", False),
        (r"(a+)+b", False),
        (r"\s*([a-z]*)\s*!", False),
        (r"a*b", False),
        (r"^a*b", True),
        (r"[a-z]+", True),
        (r"^(?P<a>[^/?]*)(?P<b>[^?]*)(?P<c>.*)$", False),
        (r"^(?P<a>[^/?]*+)(?P<b>[^?]*+)(?P<c>.*+)$", True),
    ],
)
def test_counter_when_an_expression_is_known(pattern, linear):
    ratio, text = growth(Expression("here", pattern, 0, pattern.startswith("^"), whole=False))
    assert (ratio <= MOST_GROWTH) is linear, text
