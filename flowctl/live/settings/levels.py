"""Levels of settings: what differs from the server's for an application, a stream or a role (pure).

Theory of operation. Four levels, from the farthest to the nearest: the server, the application, the stream (by a
pattern of its name), and the role that a connection has there. A level of a role may stand within an application or a
stream; it is nearer than any level without a role, and among those of a role the one of a stream is nearer than that of
an application, and that one nearer than that of the whole server. Of two patterns that fit, a name without wildcards is
nearest, then the one with more letters that are no wildcards, then the one that was written first.

Each setting is that of the nearest level which says it. The marks of the limits are two settings (soft, hard)
that have to go together, so a farther mark that does not go with a nearer one is left out: what is nobody's follows the
soft one, as it does everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any, Final, Generic, Literal, TypeVar

from flowctl.core.flow.limits import Limits, write_marks
from flowctl.core.text.fieldtypes import check_fields
from flowctl.errors import ConfigError
from flowctl.wire.rtmp.url import NAMES_HINT, fits_names

MOST_LEVELS: Final = 1000
"""Levels of a server: each new name is compared with all of them, once, in some milliseconds."""
_MOST_REMEMBERED: Final = 4096
"""Streams, by role, whose settings are remembered; those of another are looked up anew, in some 10 us per level."""
_WILDCARDS: Final = frozenset("*?[")
MARKS: Final[dict[str, Literal["soft", "hard"]]] = {"limits.soft": "soft", "limits.hard": "hard"}
"""Values of a level that are texts: they become limits only together."""

_T = TypeVar("_T")


class Takes(enum.Enum):
    """When a server that runs takes another value of a setting."""

    NOW = "now"
    NEW = "new connections"
    RESTART = "restart"


class Role(enum.Enum):
    """Roles of a connection in a stream."""

    PUBLISHER = "publisher"
    VIEWER = "viewer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Settings that differ from the server's for some streams, one role, or one role of some streams.

    Args:
        application: pattern of the application, the first part of a stream's name; empty: any.
        stream: pattern of ``app/stream``, with ``*`` and ``?``; empty: any. Not together with `application`.
        values: by place in `flowctl.live.config.LiveConfig`: ``policy``, ``settings.stuck_s``; of the limits
            ``limits.soft`` and ``limits.hard`` are texts (``2MiB,2048,4s``).
    """

    application: str = ""
    stream: str = ""
    role: Role | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.application and self.stream:
            raise ConfigError(f"a level is of an application or of streams, not of both: {self}")
        if not fits_names(self.stream or f"{self.application or '*'}/*"):
            raise ConfigError(f"{self} fits no stream", hint=NAMES_HINT)
        if not (self.application or self.stream or self.role):
            raise ConfigError("a level is of an application, of streams or of a role", hint="name one of them")

    def __str__(self) -> str:
        role = "" if self.role is None else self.role.value
        for word, name in (("application", self.application), ("stream", self.stream)):
            if name:
                quoted = name.replace("\\", "\\\\").replace('"', '\\"')
                return f'[{word}."{quoted}"{"." + role if role else ""}]'
        return f"[role.{role}]"

    @property
    def nearness(self) -> tuple[bool, int, bool, int]:
        pattern = self.stream or self.application
        letters = sum(letter not in _WILDCARDS for letter in pattern)
        return self.role is not None, bool(pattern) + bool(self.stream), letters == len(pattern), letters


class Levels(Generic[_T]):
    """The levels of one configuration, and the settings that result for each stream. Any thread."""

    def __init__(self, levels: Iterable[Level]) -> None:
        numbered = sorted(enumerate(levels), key=lambda item: (item[1].nearness, -item[0]))
        self._farthest_first: Final = tuple(level for _, level in numbered)
        # Compiled here: what the library remembers of patterns is less than there may be levels.
        self._patterns: Final = tuple(re.compile(translate(item.stream or item.application or "*")) for item in self)
        self._by_name: Final[dict[tuple[str, Role | None], _T]] = {}
        self._made: Final[dict[tuple[int, ...], _T]] = {}  # by which levels fit: names by the thousand share few

    def __bool__(self) -> bool:
        return bool(self._farthest_first)

    def __iter__(self) -> Iterator[Level]:
        return iter(self._farthest_first)

    def that_fit(self, stream: str, role: Role | None) -> list[Level]:
        return [self._farthest_first[number] for number in self._fitting(stream, role)]

    def _fitting(self, stream: str, role: Role | None) -> tuple[int, ...]:
        application = stream.partition("/")[0]
        return tuple(
            number
            for number, (level, pattern) in enumerate(zip(self, self._patterns, strict=True))
            if level.role in {None, role} and pattern.match(stream if level.stream else application)
        )

    def find(self, stream: str, role: Role | None, make: Callable[[list[Level]], _T]) -> _T:
        key = stream, role
        try:
            return self._by_name[key]
        except KeyError:
            fitting = self._fitting(stream, role)
        found = self._made.get(fitting)
        if found is None:
            found = make([self._farthest_first[number] for number in fitting])
            if len(self._made) >= MOST_LEVELS:
                self._made.clear()
            self._made[fitting] = found
        if len(self._by_name) >= _MOST_REMEMBERED:  # names are the peers' choice
            self._by_name.clear()
        self._by_name[key] = found
        return found


def differing(before: Iterable[Level], now: Iterable[Level]) -> str:
    before, now = tuple(before), tuple(now)
    others = [level for level in (*before, *now) if (level in before) != (level in now)]
    return ", ".join(dict.fromkeys(map(str, others))) or "the order of levels"


def split(levels: Iterable[Level], paths: Iterable[str]) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Return the levels with all values but those of `paths`, and with those alone; without levels of no value."""
    wanted, others, alone = frozenset(paths), list[Level](), list[Level]()
    for level in levels:
        for part, inside in ((others, False), (alone, True)):
            values = {path: value for path, value in level.values.items() if (path in wanted) is inside}
            if values:
                part.append(dataclasses.replace(level, values=values))
    return tuple(others), tuple(alone)


def merged(levels: Iterable[Level]) -> dict[str, Any]:
    """Return the values of levels, the farthest first: the nearest counts; without the marks of the limits."""
    values: dict[str, Any] = {}
    for level in levels:
        values |= level.values
    return {path: value for path, value in values.items() if path not in MARKS}


def with_marks(limits: Limits, levels: list[Level]) -> Limits:
    """Return `limits` with the marks of levels, the farthest first.

    A hard or low mark of `limits` that is what follows from its soft one follows the new soft one.
    """
    wanted: list[tuple[Literal["soft", "hard", "low"], str]] = [
        (which, level.values[path])
        for level in reversed(levels)
        for path, which in MARKS.items()
        if path in level.values
    ]
    if not wanted:
        return limits
    usual = Limits.parse(write_marks(limits, "soft"))
    wanted.append(("soft", write_marks(limits, "soft")))
    wanted += [
        (which, write_marks(limits, which))
        for which in ("hard", "low")
        if write_marks(limits, which) != write_marks(usual, which)
    ]
    chosen: dict[str, str] = {}
    found = limits
    for which, text in wanted:
        if which not in chosen:
            trial = {"soft": "0,0,0", **chosen, which: text}
            try:
                found = Limits.parse(trial["soft"], trial.get("hard"), trial.get("low"))
            except ConfigError:
                continue
            chosen[which] = text
    return dataclasses.replace(limits, size=found.size, messages=found.messages, age_ms=found.age_ms)


def placed(settings: Any, values: Mapping[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        put(tree, path, value)
    return replaced(settings, tree)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        tree = tree.setdefault(name, {})
    tree[last] = value


def replaced(settings: Any, tree: Mapping[str, Any]) -> Any:
    """Return the dataclass `settings` with the values of `tree`, whose tables are dataclasses within it."""
    changes = {}
    for name, value in tree.items():
        now = getattr(settings, name)
        within = isinstance(value, dict) and dataclasses.is_dataclass(now)
        changes[name] = replaced(now, value) if within else value
    return dataclasses.replace(settings, **changes)
