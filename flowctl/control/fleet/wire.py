"""What members of a fleet tell each other (pure): four kinds of message, as JSON.

- `Changes`: entries that were changed, as soon as they are.
- `Compare`: one text that stands for the whole table, every few seconds; where it differs, the other answers with
- `Sums`: one number per bucket; where these differ,
- `Part`: the entries of some of the buckets, asked for with one's own, and answered with the other's.

Only members can send, so nothing here has to stand up to an enemy; but a member may be of another version, or damaged,
so what is read is checked, and bounded in octets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from flowctl.control.fleet.stamp import MOST_COUNTER, Stamp
from flowctl.control.fleet.table import BUCKETS, Entry
from flowctl.control.fleet.values import ends_s
from flowctl.core.text.printable import short
from flowctl.errors import ConfigError, RemoteProtocolError

VERSION: Final = 1
"""Counted up when a message changes its meaning; what another version sends is counted and dropped."""
MOST_MESSAGE_BYTES: Final = 1024 * 1024
"""Longest message that is read: that of the Messenger's and RPC's sockets."""
PAGE_BYTES: Final = 256 * 1024
"""Values of one message that is sent, before the next one begins: with keys and stamps it stays below the longest."""
_ENTRY_BYTES: Final = 160
"""What an entry costs beside its value, at most as a rule: key, stamp, times."""
MOST_NAME: Final = 64
"""Longest name of a member, characters."""
_MOST_KEY: Final = 80
_MOST_MS: Final = 253_402_300_800_000
"""End of the year 9999, as for bans."""

Entries = Sequence[tuple[str, Entry]]


@dataclass(frozen=True, slots=True)
class Changes:
    """Entries that were changed."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class Compare:
    """What stands for a whole table.

    Args:
        stale: the sender was away for so long that its own table counts for little (`replica.py`).
    """

    root: str
    count: int
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Sums:
    """One number per bucket of a table."""

    sums: Sequence[int]


@dataclass(frozen=True, slots=True)
class Part:
    """All that the sender has in some buckets."""

    numbers: Sequence[int]
    entries: Entries
    answer: bool = False
    stale: bool = False


Message = Changes | Compare | Sums | Part


def encode(message: Message) -> bytes:
    """Return a message as octets."""
    value: dict[str, Any] = {"fleet": VERSION}
    if isinstance(message, Changes):
        value |= {"kind": "changes", "entries": _written(message.entries)}
    elif isinstance(message, Compare):
        value |= {"kind": "compare", "root": message.root, "count": message.count, "stale": message.stale}
    elif isinstance(message, Sums):
        value |= {"kind": "sums", "sums": "".join(f"{item:016x}" for item in message.sums)}
    else:
        value |= {"kind": "part", "numbers": list(message.numbers), "entries": _written(message.entries)}
        value |= {"answer": message.answer, "stale": message.stale}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def pages(entries: Iterable[tuple[str, Entry]]) -> list[Entries]:
    found: list[list[tuple[str, Entry]]] = []
    room = 0
    for item in entries:
        size = size_of(item[1])
        if not found or size > room:
            found.append([])
            room = PAGE_BYTES
        found[-1].append(item)
        room -= size
    return list(found)


def size_of(entry: Entry) -> int:
    """Return about how many octets an entry takes in a message."""
    return _ENTRY_BYTES + len((entry.value or "").encode())


def _written(entries: Entries) -> list[list[Any]]:
    return [
        [key, *entry.stamp, None if entry.kept_until_s == inf else entry.kept_until_s, entry.value]
        for key, entry in entries
    ]


def decode(data: bytes) -> Message:
    """Return the message that octets stand for."""
    if len(data) > MOST_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes, the limit is {MOST_MESSAGE_BYTES}", code="too-long")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError("a message that is not JSON", code="no-json") from error
    if not isinstance(value, dict):
        raise _fault("message", value)
    if value.get("fleet") != VERSION:
        version = short(value.get("fleet"))
        raise RemoteProtocolError(f"a message of version {version}, this is {VERSION}", code="version")
    kind = value.get("kind")
    try:
        return _READERS[kind](value)
    except ConfigError as error:
        raise RemoteProtocolError(f"a message of kind {short(kind)}: {error}", code="value") from error
    except (KeyError, TypeError) as error:  # TypeError: a kind that is a list
        raise _fault("kind", kind) from error


def entry_of(item: object) -> tuple[str, Entry]:
    """Return the entry that a list of a message stands for."""
    if not isinstance(item, list) or len(item) != 6:
        raise _fault("entry", item)
    key, ms, counter, node, kept_s, value = item
    if not isinstance(key, str) or len(key) > _MOST_KEY or not key.isprintable():
        raise _fault("key", key)
    if type(ms) is not int or not 0 <= ms < _MOST_MS or type(counter) is not int or not 0 <= counter < MOST_COUNTER:
        raise _fault("stamp", [ms, counter])
    if not isinstance(node, str) or not 0 < len(node) <= MOST_NAME or not node.isprintable():
        raise _fault("node", node)
    kept_s = inf if kept_s is None else kept_s
    if type(kept_s) not in (int, float) or not kept_s >= 0:
        raise _fault("kept", kept_s)
    if value is not None and not (isinstance(value, str) and value.isprintable()):  # half a surrogate is not either
        raise _fault("value", value)
    ends = ends_s(key, value)
    if kept_s < ends:
        raise _fault("kept", kept_s)
    return key, Entry(Stamp(ms, counter, node), value, ends, float(kept_s))


def _entries(value: dict[str, Any]) -> Entries:
    items = value.get("entries")
    if not isinstance(items, list):
        raise _fault("entries", items)
    return [entry_of(item) for item in items]


def _compare(value: dict[str, Any]) -> Compare:
    root, count = value.get("root"), value.get("count")
    if not isinstance(root, str) or len(root) != 32:
        raise _fault("root", root)
    if type(count) is not int or not 0 <= count < MOST_COUNTER:
        raise _fault("count", count)
    return Compare(root, count, value.get("stale") is True)


def _sums(value: dict[str, Any]) -> Sums:
    text = value.get("sums")
    if not isinstance(text, str) or len(text) != 16 * BUCKETS:
        raise _fault("sums", text)
    try:
        octets = bytes.fromhex(text)
    except ValueError as error:
        raise _fault("sums", text) from error
    if len(octets) != 8 * BUCKETS:  # fromhex passes over blanks
        raise _fault("sums", text)
    return Sums([int.from_bytes(octets[at : at + 8], "big") for at in range(0, 8 * BUCKETS, 8)])


def _part(value: dict[str, Any]) -> Part:
    numbers = value.get("numbers")
    if not isinstance(numbers, list) or not all(type(item) is int and 0 <= item < BUCKETS for item in numbers):
        raise _fault("numbers", numbers)
    return Part(sorted(set(numbers)), _entries(value), value.get("answer") is True, value.get("stale") is True)


_READERS: Final[Mapping[Any, Callable[[dict[str, Any]], Message]]] = {
    "changes": lambda value: Changes(_entries(value)),
    "compare": _compare,
    "sums": _sums,
    "part": _part,
}


def _fault(what: str, value: object) -> RemoteProtocolError:
    return RemoteProtocolError(f"{what} is {short(value)}", code="value")
