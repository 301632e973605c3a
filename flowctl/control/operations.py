"""The operations on a running live server, each defined once.

A definition has the name, the permission, what it does in a line, the arguments with their types and ranges, and the
function that does it. The surface that serves them (`flowctl.control.listener`), the command line (`flowctl.cli`) and
`flowctl rpc describe` are made from the table below, so that another operation is another entry. Nothing here knows how
a call arrives: a surface gives the name, the arguments as JSON has them, and what its caller may do, and gets JSON.

The command line imports this module to show its help, so what is imported here is light.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from flowctl.control import effects, together
from flowctl.control.arguments import (
    FLAG,
    MARKS,
    MOMENT,
    NETWORK,
    TARGET_DELAY,
    Argument,
    choice,
    duration,
    number,
    read_arguments,
    text,
)
from flowctl.control.together import CONNECTION_SORTS, MOST_PAGE, MOST_ROWS, STREAM_SORTS, Merge, Processes, merge_same
from flowctl.core.flow.state import SendState
from flowctl.core.text.printable import short
from flowctl.errors import BusyError, ClosedError, ConfigError, FlowctlError, LocalProtocolError

if TYPE_CHECKING:
    from flowctl.live.server import LiveServer

CATEGORY: Final = "flow"
"""First part of the names of operations where they are called: ``flow.stats``."""
CURSOR_CHARS: Final = 2400
"""Longest cursor of events, characters: a place of 30 for each process."""
MOST_CALL_BYTES: Final = 64 * 1024
"""Longest call, octets: a hundred times what all arguments of any operation take."""
MOST_ANSWER_BYTES: Final = (1 << 20) - 1024
"""Longest answer, octets: what one message of RPC may have, its other frames aside."""
MOST_DRAIN_S: Final = 86_400.0


class Permission(enum.IntEnum):
    """What a caller may do; each includes those before."""

    NONE = 0
    BASIC = 1
    ADMIN = 2


class ForbiddenError(FlowctlError):
    """The caller may not do this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation, and how several processes that are one server carry it out."""

    name: str
    permission: Permission = Permission.ADMIN
    summary: str
    arguments: tuple[Argument, ...] = ()
    effect: Callable[[LiveServer, Mapping[str, Any]], dict[str, Any]]  # returns JSON; not on a poll group's thread
    looks: bool = False  # it need not wait for what others change, and is not worth a line of the log
    processes: Processes = Processes.ALL
    merge: Merge = merge_same  # the answers of the processes to one
    lists: tuple[str, ...] = ()  # lists of the answer that are read page by page as far as the page asked for
    whole: frozenset[str] = frozenset()  # those of them that are read to their ends, since entries are added

    @property
    def page(self) -> int:
        """Entries of a list that one process is asked for at a time: as many as the argument takes."""
        return next(int(item.kind.schema["maximum"]) for item in self.arguments if item.name == "limit")

    def describe(self) -> dict[str, Any]:
        return {
            "name": f"{CATEGORY}.{self.name}",
            "permission": self.permission.name.lower(),
            "summary": self.summary,
            "arguments": [
                {
                    "name": item.name,
                    "type": item.kind.word,
                    "required": item.required,
                    "default": item.default,
                    "what": item.what,
                }
                for item in self.arguments
            ],
        }


Effect: TypeAlias = Callable[[Operation, Mapping[str, Any]], dict[str, Any]]
_CONNECTION: Final = number(1, 2**63 - 1)
_FITS: Final = "Streams whose app/stream fits; * and ? stand for any."
_REVERSE: Final = Argument(name="reverse", kind=FLAG, what="The other way round.", default=False)
_ORIGIN: Final = Argument(
    name="origin", kind=text(most=100), what="Who asks, for the log and the changes.", default="", hidden=True
)
_PAGE: Final = (
    Argument(name="limit", kind=number(1, MOST_PAGE), what=f"Most of each list, up to {MOST_PAGE}.", default=50),
    Argument(name="offset", kind=number(0, 10**9), what="How many of each list to pass over.", default=0),
)
_PAGE_OF_ROWS: Final = (
    Argument(name="limit", kind=number(1, MOST_ROWS), what=f"Most of each list, up to {MOST_ROWS}.", default=50),
    _PAGE[1],
)
_NETWORK: Final = Argument(
    name="network",
    kind=NETWORK,
    what="Address or network, like 203.0.113.7 or 2001:db8::/64.",
    required=True,
    first=True,
)


def _listings() -> Any:
    """Return what only looks at a server; it is loaded with one, for help takes none."""
    from flowctl.control import listings  # noqa: PLC0415 - as said

    return listings


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        name="stats",
        permission=Permission.BASIC,
        summary="Show a server: figures, streams, and who is slow and why.",
        arguments=(
            Argument(name="stream", kind=text(), what=_FITS, default="*"),
            Argument(name="viewers", kind=choice("slow", "all", "none"), what="Which viewers.", default="slow"),
            *_PAGE_OF_ROWS,
        ),
        effect=lambda server, asked: _listings().stats(server, asked),
        merge=together.merge_stats,
        lists=("streams", "viewers"),
        whole=frozenset({"streams"}),
        looks=True,
    ),
    Operation(
        name="streams",
        permission=Permission.BASIC,
        summary="List the streams with their publishers and viewers by state.",
        arguments=(
            Argument(name="stream", kind=text(), what=_FITS, default="*", first=True),
            Argument(name="sort", kind=choice(*STREAM_SORTS), what="In which order.", default="viewers"),
            _REVERSE,
            *_PAGE,
        ),
        effect=lambda server, asked: _listings().streams(server, asked),
        merge=together.merge_streams,
        lists=("streams",),
        whole=frozenset({"streams"}),
        looks=True,
    ),
    Operation(
        name="connections",
        permission=Permission.BASIC,
        summary="List the connections, or show one with its ledger. Each has its state, what waits, drops, and why.",
        arguments=(
            Argument(name="connection", kind=_CONNECTION, what="Only this one, with its ledger.", first=True),
            Argument(name="state", kind=choice(*(item.name for item in SendState), "slow"), what="In which state."),
            Argument(name="stream", kind=text(), what=_FITS, default="*"),
            Argument(name="role", kind=choice("viewer", "publisher", "none"), what="What it does."),
            Argument(name="protocol", kind=text(most=20), what="What it speaks, such as rtmp."),
            Argument(name="peer", kind=NETWORK, what="Who comes from this address or network."),
            Argument(name="sort", kind=choice(*CONNECTION_SORTS), what="In which order.", default="worst"),
            _REVERSE,
            *_PAGE_OF_ROWS,
        ),
        effect=lambda server, asked: _listings().connections(server, asked),
        merge=together.merge_connections,
        lists=("connections",),
        looks=True,
    ),
    Operation(
        name="events",
        permission=Permission.BASIC,
        summary="Tell what happened: drops, limits that were hit, ends. Changes of state and publishers, too.",
        arguments=(
            Argument(name="since", kind=text(most=CURSOR_CHARS), what="The cursor of the last answer.", default=""),
            Argument(name="limit", kind=number(1, MOST_PAGE), what=f"Most of them, up to {MOST_PAGE}.", default=200),
        ),
        effect=lambda server, asked: _listings().events(server, asked),
        merge=together.merge_events,
        looks=True,
    ),
    Operation(
        name="metrics",
        permission=Permission.BASIC,
        summary="Tell sums for monitoring. They are by stream, role, state and reason, for each process.",
        effect=lambda server, asked: _listings().metrics(server, asked),
        merge=together.merge_metrics,
        looks=True,
    ),
    Operation(
        name="kick",
        summary="End one connection, or all that fit what is given. They may come again.",
        arguments=(
            Argument(name="connection", kind=_CONNECTION, what="Its number, as lists show it.", first=True),
            Argument(name="stream", kind=text(), what="Who plays or publishes this app/stream."),
            Argument(name="peer", kind=NETWORK, what="Who comes from this address or network."),
            Argument(name="reason", kind=text(), what="Why: for the log, the records, and who is ended.", default=""),
        ),
        effect=effects.kick,
        merge=together.merge_kick,
    ),
    Operation(
        name="limits",
        summary="Show the limits, or set them. They are of open and new connections, of one, or of those of a stream.",
        arguments=(
            Argument(name="connection", kind=_CONNECTION, what="Only of this one.", first=True),
            Argument(name="stream", kind=text(), what="Only of those that play or publish such a stream now."),
            Argument(name="soft", kind=MARKS, what="Soft limit of what waits for one peer."),
            Argument(name="hard", kind=MARKS, what="Hard limit; without it twice the soft one."),
            Argument(name="low", kind=MARKS, what="Low mark; without it half the soft one."),
            Argument(name="target_delay", kind=TARGET_DELAY, what="How late pictures may reach a slow viewer."),
            _ORIGIN,
        ),
        effect=effects.limits,
        merge=together.merge_limits,
    ),
    Operation(
        name="ban",
        summary="Keep an address or a network out, and end its connections.",
        arguments=(
            _NETWORK,
            Argument(name="duration", kind=duration(), what="For how long, like 10min or 7d; else until it is lifted."),
            Argument(name="expires", kind=MOMENT, what="When it ends, like 2026-01-31T12:00:00Z: no duration."),
            Argument(name="reason", kind=text(), what="Why, in a few words.", default=""),
            Argument(
                name="action",
                kind=choice("ban", "limit"),
                what="limit: only few new connections at a time.",
                default="ban",
            ),
            _ORIGIN,
        ),
        effect=effects.ban,
        processes=Processes.HERE,
    ),
    Operation(
        name="unban",
        summary="Let a banned address or network in again.",
        arguments=(_NETWORK, _ORIGIN),
        effect=effects.unban,
        processes=Processes.HERE,
    ),
    Operation(
        name="bans",
        summary="List who is banned, until when and why.",
        arguments=(
            Argument(name="peer", kind=NETWORK, what="Only what concerns this address or network.", first=True),
            *_PAGE,
        ),
        effect=effects.bans,
        processes=Processes.ONE,
        looks=True,
    ),
    Operation(
        name="fleet",
        permission=Permission.BASIC,
        summary="Show how the fleet stands, as this server sees it. That is who is behind, and by how much.",
        effect=effects.fleet,
        processes=Processes.HERE,
        looks=True,
    ),
    Operation(
        name="drain",
        summary="Let clients go elsewhere, and end. No new connections are taken; clients are asked to reconnect.",
        arguments=(
            Argument(
                name="within",
                kind=duration(MOST_DRAIN_S),
                what="Time for clients to leave by themselves.",
                default=10.0,
            ),
            Argument(
                name="successor",
                kind=text(),
                what="Socket at which the server that takes its place waits, of serve --replace.",
                default="",
                hidden=True,
            ),
            _ORIGIN,
        ),
        effect=effects.drain,
        merge=together.merge_drain,
    ),
    Operation(
        name="reload",
        summary="Read all files now, and say what changed or is wrong. That is settings, limits, bans and certificate.",
        effect=effects.reload,
        merge=together.merge_reload,
    ),
    Operation(
        name="changes",
        summary="List what files and commands changed while it ran.",
        arguments=(
            Argument(name="since", kind=number(0, 2**63 - 1), what="Only what came after this version.", default=0),
            Argument(name="limit", kind=number(1, MOST_PAGE), what=f"Most of them, up to {MOST_PAGE}.", default=50),
        ),
        effect=effects.changes,
        processes=Processes.HERE,
        looks=True,
    ),
)
"""All operations."""

BY_NAME: Final[Mapping[str, Operation]] = {item.name: item for item in OPERATIONS}


def perform(server: LiveServer, name: str, given: Mapping[str, object], permission: Permission) -> dict[str, Any]:
    operation = allowed_operation(name, permission)
    return operation.effect(server, read_arguments(name, operation.arguments, given))


def allowed_operation(name: str, permission: Permission) -> Operation:
    operation = BY_NAME.get(name)
    if operation is None:
        raise ConfigError(f"there is no operation {short(name)}", hint=f"there are {', '.join(BY_NAME)}")
    if permission < operation.permission:
        raise ForbiddenError(
            f"{CATEGORY}.{name} takes the level {operation.permission.name.lower()}, the caller has "
            f"{permission.name.lower()}",
            hint="who runs the server gives levels to keys, in its clients file",
        )
    return operation


def answer(server: LiveServer, name: str, call: bytes, permission: Permission, caller: str = "") -> bytes:
    return answer_with(lambda found, asked: found.effect(server, asked), name, call, permission, caller)


def answer_with(effect: Effect, name: str, call: bytes, permission: Permission, caller: str = "") -> bytes:
    """Carry out an operation that is called with a JSON object, and return the answer as JSON.

    The answer is ``{"result": ...}``, or ``{"error": {"code": ..., "message": ..., "hint": ...}}``.
    """
    try:
        operation = allowed_operation(name, permission)  # first: a caller who may not call it is not worth our work
        arguments = _arguments_of(call)
        if caller and not arguments.get("origin") and any(item.name == "origin" for item in operation.arguments):
            arguments = {**arguments, "origin": caller}
        value: dict[str, Any] = {"result": effect(operation, read_arguments(name, operation.arguments, arguments))}
    except (FlowctlError, OSError) as error:
        value = {"error": error_dict(error)}
    reply = _as_json(value)
    if len(reply) > MOST_ANSWER_BYTES:
        message = f"the answer has {len(reply)} bytes, a message has up to {MOST_ANSWER_BYTES}"
        return _as_json({"error": {"code": "TOO_LONG", "message": message, "hint": "ask for less with --limit"}})
    return reply


ANSWERED: Final = b'{"result": '
"""First octets of an answer that is no error; the rest, without the last octet, is the result."""


def _as_json(value: Any) -> bytes:
    # Half a surrogate pair (of a file's name) is written as JSON's escape for it.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _arguments_of(call: bytes) -> Mapping[str, object]:
    if len(call) > MOST_CALL_BYTES:
        raise ConfigError(f"the arguments have {len(call)} bytes, {MOST_CALL_BYTES} are allowed")
    if not call.strip():
        return {}
    try:
        value = json.loads(call)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the arguments are no JSON: {short(call[:60])}", hint='write {"name": value}') from error
    if not isinstance(value, dict):
        raise ConfigError(f"the arguments are {short(value)}, they must be a JSON object", hint='write {"name": value}')
    return value


_CODES: Final = (
    (ForbiddenError, "FORBIDDEN"),
    (ConfigError, "WRONG_ARGUMENT"),
    (LocalProtocolError, "NOT_POSSIBLE"),
    (BusyError, "BUSY"),
    (ClosedError, "ENDING"),
)


def code_of(error: FlowctlError) -> str:
    return next((code for kind, code in _CODES if isinstance(error, kind)), "FAILED")


def error_dict(error: FlowctlError | OSError) -> dict[str, Any]:
    if isinstance(error, FlowctlError):
        return {"code": code_of(error), "message": str(error), "hint": error.hint}
    message = f"{error.filename or 'the server'}: {error.strerror or error}"  # a file of the server's
    return {"code": "FAILED", "message": message, "hint": None}


def error_of(fault: Mapping[str, Any]) -> FlowctlError:
    kind = next((kind for kind, code in _CODES if code == fault["code"]), FlowctlError)
    return kind(str(fault["message"]), hint=fault.get("hint"))
