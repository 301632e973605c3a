"""Which records were read, told without naming their files (pure).

(`node`, `seq`) names a record of a table, and a recorder counts on without a gap: so what was read is told by a few
spans of `seq`, however many files it came in. A file that was joined of others brings nothing new, one that was removed
takes nothing away, and a month of a node is some lines.

What has no such name is a *source* of its own: a file that no recorder wrote, or whose footer does not tell of one node
(by its identity), and one that was put aside (by its name).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

Span = Sequence[int]
"""First and last `seq`, both inclusive, and how many records there are from one to the other."""
Content = Mapping[str, Sequence[Span]]
"""Source (``flow_events n1``: table and node) -> its spans, by `seq`."""


def _dense(span: Span) -> bool:
    return span[1] - span[0] + 1 == span[2]


def joined(contents: Iterable[Content]) -> dict[str, list[Span]]:
    """Return all of several contents; spans without a gap that follow each other are one."""
    found: dict[str, list[Span]] = {}
    pairs = [(source, [*span]) for content in contents for source, spans in content.items() for span in spans]
    for source, span in sorted(pairs):
        spans = found.setdefault(source, [])
        last = spans[-1] if spans else None
        if last is not None and span[0] <= last[1] + 1 and _dense(last) and _dense(span):
            high = max(last[1], span[1])
            spans[-1] = [last[0], high, high - last[0] + 1]
        elif last is None or [*last] != span:
            spans.append(span)
    return found


def _inside(spans: Sequence[Span], low: int, high: int) -> list[Span]:
    """Return what of `spans` is certainly from `low` to `high`: of one with gaps that reaches further, nobody knows."""
    found: list[Span] = []
    for one in spans:
        if _dense(one) and one[0] <= high and low <= one[1]:
            begin, end = max(low, one[0]), min(high, one[1])
            found.append([begin, end, end - begin + 1])
        elif low <= one[0] <= one[1] <= high:
            found.append([*one])
    return found


def _holds(spans: Sequence[Span], span: Span) -> bool:
    """Return whether records of `spans` are all those of a span: the first, the last, and as many as it has."""
    there = _inside(spans, span[0], span[1])
    ends = {end for one in there for end in one[:2]}
    return {*span[:2]} <= ends and sum(one[2] for one in there) >= span[2]


def refined(content: Content, known: Content) -> dict[str, list[Span]]:
    """Return the same content, where spans that have gaps are told as `known` tells them, if it has just the same."""
    found: dict[str, list[Span]] = {}
    for source, spans in content.items():
        for span in spans:
            there = _inside(known.get(source, ()), span[0], span[1])
            same = _holds(there, span) and sum(one[2] for one in there) == span[2]
            found.setdefault(source, []).extend(there if same else [span])
    return found


def holds(content: Content, other: Content) -> bool:
    """Return whether all records of `other` are in `content`, as far as spans tell."""
    return all(_holds(content.get(source, ()), span) for source, spans in other.items() for span in spans)


def apart(content: Content, other: Content) -> bool:
    pairs = chain.from_iterable(
        ((one, span) for one in content.get(source, ()) for span in spans) for source, spans in other.items()
    )
    return not any(one[0] <= span[1] and span[0] <= one[1] for one, span in pairs)
