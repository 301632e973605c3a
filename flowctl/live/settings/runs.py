"""Settings of the commands that a server runs for its streams: which, for which streams, and what they publish.

They stand in the file of settings alone, as tables ``[[run]]``: who may say a word to a server, or start it, may not by
that have it run a program. There is no shell: a command is a list of words, and what stands for a stream in them is
filled in word by word. Names of streams come from the network, so only plain ones get a command (`plain_name`).

What a command publishes is named before, by the name of its stream (``{app}/{stream}_720``). So each such name is of
one stream, and can be kept from everybody else, whether that stream is published or not (`made_from`).
"""

from __future__ import annotations

import enum
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from flowctl.core.text.fieldtypes import check_fields
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError
from flowctl.units import parse_size, write_size
from flowctl.wire.rtmp.url import NAMES_HINT, fits_names, is_path

_MOST_RULES: Final = 64
_MOST_WORDS: Final = 256
_MOST_PUBLISHED: Final = 8
_LEAST_MEMORY_BYTES: Final = 16 << 20
"""Below that not even an interpreter of commands begins."""
_WILD: Final = frozenset("*?[")
_PLAIN: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)+")
_MOST_NAME_BYTES: Final = 200
"""Room for an ending in a file's name, which has 255 octets."""
_PLACEHOLDER: Final = re.compile(r"\{(\{?)(\w+)\}(\}?)")
_HINT: Final = (
    'write [[run]], on = "live/*" and command = ["program", "word", "{url}"]; see docs/how-to/run-commands.md'
)
ONLY_IN_FILE: Final = "tables of the file"


class RunWhen(enum.Enum):
    """When a command is started."""

    PUBLISHED = "published"  #: as soon as its stream is published
    VIEWED = "viewed"  #: once somebody wants to view what it publishes
    NEEDED = "needed"  #: while a viewer's line does not carry what there is; of a ladder alone


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRule:
    """One table of them.

    Args:
        on: streams for each of which it is run, a pattern of ``app/stream``.
        command: the program, found in PATH or with its whole path, and its words, in which ``{name}``, ``{app}``,
            ``{stream}``, ``{base}``, ``{url}``, ``{publish_1}`` and so on stand for those of the stream.
        publish: names of streams that it publishes, by ``{app}`` and ``{stream}``, or ``{base}``, the name without what
            stands behind the last wildcard of `on`; nobody else may publish under them.
        when: ``published``: as soon as the stream is; ``viewed``: once one of the names that it publishes is viewed,
            until some time after the last viewer.
        at_once: how many are run at a time for this table; 0: as many as `run_at_once` allows.
        nice: how much it gives way to others for processor time, 0 to 19.
        memory: address space that each of its processes may take; 0: any.
    """

    on: str
    command: tuple[str, ...] = field(repr=False)
    publish: tuple[str, ...] = ()
    when: RunWhen = RunWhen.PUBLISHED
    at_once: int = 0
    nice: int = 10
    memory: int = 0
    step: str = ""  # of a ladder, whose rendition it makes; empty: it is of a table

    def __post_init__(self) -> None:
        check_fields(self)
        if not ("/" in self.on and fits_names(self.on)):
            raise ConfigError(f"on is {short(self.on)}, it must be a pattern of app/stream", hint=NAMES_HINT)
        if len(self.publish) > _MOST_PUBLISHED:
            raise ConfigError(f"publish is a list of {len(self.publish)}, {_MOST_PUBLISHED} are allowed")
        for name in self.publish:
            self._check_published(name)
        if self.when is RunWhen.VIEWED and not self.publish:
            raise ConfigError("when is viewed, but it publishes nothing", hint="name what it publishes: publish")
        self._check_command()
        for name, most in (("at_once", 10_000), ("nice", 19)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be 0 to {most}")
        if self.memory and self.memory < _LEAST_MEMORY_BYTES:
            raise ConfigError(f"memory is {self.memory}, it must be 0 or {write_size(_LEAST_MEMORY_BYTES)} and more")

    def _check_published(self, template: str) -> None:
        app, _, stream = template.rpartition("/")
        wild = not _WILD.isdisjoint(self.on)
        example = f"app/stream{self.ending}" if wild else self.on
        if not is_path(self.made(template, example)) or "{" in app.replace("{app}", "", 1):
            raise ConfigError(f"publish has {short(template)}, it must be like {{app}}/{{stream}}_720", hint=NAMES_HINT)
        rest = stream.replace("{stream}", "", 1).replace("{base}", "", "{stream}" not in stream)
        if "{" in rest or (wild and not ("{app}" in app and rest != stream)):
            raise ConfigError(
                f"publish has {short(template)}, it must have {{app}} before the last / and {{stream}} behind it",
                hint="or {base}; else several streams would be published under one name",
            )
        if self.made(template, example) == example:
            raise ConfigError(f"publish has {short(template)}, which is the stream itself", hint="add an ending: _720")

    def _check_command(self) -> None:
        program = self.command[0] if self.command else ""
        if not program or len(self.command) > _MOST_WORDS or any("\0" in word for word in self.command):
            raise ConfigError(f"command has {len(self.command)} words, it must be 1 to {_MOST_WORDS}", hint=_HINT)
        known = {
            "name",
            "app",
            "stream",
            "base",
            "url",
            *(f"publish_{number + 1}" for number in range(len(self.publish))),
        }
        for word in self.command:
            for begin, name, end in _PLACEHOLDER.findall(word):
                if name not in known and not (begin and end):
                    hint = f"there are {', '.join(sorted(known))}; write {{{{{name}}}}} for the word itself"
                    raise ConfigError(f"command has {{{name}}}, which stands for nothing", hint=hint)
        if _PLACEHOLDER.search(program):
            raise ConfigError("command begins with a name of peers", hint="name the program")
        if (Path(program).name != program and not Path(program).is_absolute()) or shutil.which(program) is None:
            hint = "is it installed? write its whole path, or a name that is in PATH"
            raise ConfigError(f"command is {short(program)}, there is no such program", hint=hint)

    def fits(self, stream: str) -> bool:
        return fnmatchcase(stream, self.on) and all(map(is_path, self.names(stream)))

    @property
    def program(self) -> str:
        """Name of its program, for people."""
        return Path(self.command[0]).name

    @property
    def ending(self) -> str:
        """What all its streams end with, behind the last wildcard of `on`; of a whole name nothing."""
        return re.split(r"[*?\]]", self.on.rpartition("/")[2])[-1] if not _WILD.isdisjoint(self.on) else ""

    def made(self, template: str, stream: str) -> str:
        app, _, name = stream.rpartition("/")
        before, slash, behind = template.rpartition("/")
        base = name.removesuffix(self.ending)
        return before.replace("{app}", app) + slash + behind.replace("{stream}", name).replace("{base}", base)

    def names(self, stream: str) -> tuple[str, ...]:
        """Return the names under which it publishes for a stream."""
        return tuple(self.made(template, stream) for template in self.publish)

    def source(self, name: str) -> str | None:
        """Return the stream for which it publishes under `name`. None: for none."""
        for template in self.publish:
            found = self.on if _WILD.isdisjoint(self.on) else self._inverse(template, name)
            if found and self.fits(found) and name in self.names(found):
                return found
        return None

    def _inverse(self, template: str, name: str) -> str:
        """Return the stream of which `template` makes `name`; empty: of none."""
        (app, _, last), (before, _, behind) = name.rpartition("/"), template.rpartition("/")
        whole = "{stream}" in behind
        stream = _between(last, behind, "{stream}" if whole else "{base}")
        if stream is None or not (app := _between(app, before, "{app}") or ""):
            return ""
        return f"{app}/{stream}{'' if whole else self.ending}"

    def words(self, values: Mapping[str, str]) -> list[str]:
        """Return the command with the values of a stream for its placeholders."""

        def put(found: re.Match[str]) -> str:
            begin, name, end = found.groups()
            return f"{{{name}}}" if begin and end else f"{begin}{values[name]}{end}"

        return [_PLACEHOLDER.sub(put, word) for word in self.command]

    def __str__(self) -> str:
        return f"{self.on}: {self.program}"


def _between(text: str, template: str, word: str) -> str | None:
    """Return what stands in `text` where `template` has `word`. None: it is not made of it."""
    before, _, behind = template.partition(word)
    fits = text.startswith(before) and text.endswith(behind) and len(text) >= len(before) + len(behind)
    return text[len(before) : len(text) - len(behind)] if fits else None


def made_from(rules: Iterable[RunRule], name: str) -> str | None:
    """Return the stream of which a command makes the stream `name`. None: no command publishes under that name."""
    return next((source for rule in rules if (source := rule.source(name)) is not None), None)


def rules_for(rules: Iterable[RunRule], stream: str) -> list[RunRule]:
    """Return the rules that are of a stream: where several publish under one name, for it or others, the first one."""
    known, found, taken = tuple(rules), list[RunRule](), set[str]()
    for rule in known:
        names = rule.names(stream)
        if rule.fits(stream) and taken.isdisjoint(names) and all(made_from(known, name) == stream for name in names):
            found.append(rule)
            taken.update(names)
    return found


def plain_name(stream: str) -> bool:
    """Return whether a name means the same in a word of a command, in a file's name and even in a shell.

    Letters, digits, ``_``, ``-`` and ``.``, of which the last two begin no part of it.
    """
    return len(stream.encode(errors="replace")) <= _MOST_NAME_BYTES and _PLAIN.fullmatch(stream) is not None


def parse_runs(value: object, source: str) -> tuple[RunRule, ...]:
    """Return the rules of the tables ``[[run]]`` of a file, which TOML gives as a list."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(
            f"{source}: commands are taken from the file of settings alone, as tables [[run]]", hint=_HINT
        )
    if len(value) > _MOST_RULES:
        raise ConfigError(f"{source} has {len(value)} tables, {_MOST_RULES} are allowed")
    rules: list[RunRule] = []
    for number, table in enumerate(value, 1):
        try:
            rules.append(_rule_of(table))
        except ConfigError as error:
            raise ConfigError(f"{source}, table {number}: {error}", hint=error.hint or _HINT) from error
    taken = [(rule.on, name) for rule in rules for name in rule.publish]
    if twice := [name for on, name in taken if taken.count((on, name)) > 1]:
        raise ConfigError(f"{source}: two commands publish {short(twice[0])} of the same streams", hint=_HINT)
    return tuple(rules)


def _rule_of(table: Mapping[str, Any]) -> RunRule:
    known = [item.name for item in fields(RunRule) if item.name != "step"]
    if unknown := [key for key in table if key not in known]:
        raise ConfigError(f"there is no {short(unknown[0])} in it", hint=f"there are {', '.join(known)}")
    if lacking := [key for key in ("on", "command") if key not in table]:
        raise ConfigError(f"{lacking[0]} is missing")
    values = dict(table)
    for key in ("command", "publish"):
        if key in values:
            if not (isinstance(values[key], list) and all(isinstance(word, str) for word in values[key])):
                raise ConfigError(f"{key} is {short(values[key])}, it must be a list of words; there is no shell")
            values[key] = tuple(values[key])
    if "when" in values:
        words = [item.value for item in RunWhen if item is not RunWhen.NEEDED]
        if values["when"] not in words:
            raise ConfigError(f"when is {short(values['when'])}, it must be {' or '.join(words)}")
        values["when"] = RunWhen(values["when"])
    if isinstance(values.get("memory"), str):
        values["memory"] = parse_size(values["memory"], "memory")
    return RunRule(**values)
