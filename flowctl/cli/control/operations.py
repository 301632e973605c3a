"""The operations on a running server as commands: each is made of its definition in `flowctl.control.operations`."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from flowctl.cli.common import print_json
from flowctl.cli.errors import FAILED, complain, terminable
from flowctl.control.arguments import Argument, read_arguments
from flowctl.control.operations import OPERATIONS, Operation
from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign
from flowctl.errors import ConfigError
from flowctl.units import parse_duration

Server = Annotated[
    str | None,
    typer.Option(
        envvar="FLOWCTL_SERVER",
        metavar="NAME|ADDRESS",
        help="Which server: its port or name here, or an address, like curve://host:port/KEY.",
        show_default="the only one here",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(envvar="FLOWCTL_KEY", metavar="FILE", help="File of flowctl rpc keygen, for a server elsewhere."),
]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for the answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write the answer as one JSON object.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on with what happens, until Ctrl-C.")]
_SHARED: Final = {"server": (Server, None), "key": (Key, None), "timeout": (Timeout, "15s"), "as_json": (AsJson, False)}

_FOLLOW_S: Final = 1.0
"""Between two looks for events, where the last one found none."""


def add_to(app: typer.Typer) -> None:
    for operation in OPERATIONS:
        if operation.name != "fleet":  # which is a group of commands
            add_operation(app, operation.name, operation)


def add_operation(app: typer.Typer, name: str, operation: Operation) -> None:
    level = operation.permission.name.lower()
    who = f"Asks a server that runs; takes the level {level}, which its user has on its machine."
    app.command(name, help=f"{operation.summary}\n\n{who}")(_command(operation))


def _command(operation: Operation) -> Callable[..., None]:
    """Return the command of an operation; typer makes its options of the signature."""

    def command(*, follow: bool = False, **values: Any) -> None:
        shared = {name: values.pop(name) for name in _SHARED}
        given = {name: value for name, value in values.items() if value is not None}
        _run(operation, given, follow=follow, **shared)

    made: Any = command  # its signature is what typer looks at
    parameters = [_parameter(argument) for argument in sorted(operation.arguments, key=lambda item: not item.first)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=hint) for name, (hint, default) in _SHARED.items()
    ]
    if operation.name == "events":
        parameters.append(inspect.Parameter("follow", keyword, default=False, annotation=Follow))
    made.__annotations__ = {item.name: item.annotation for item in parameters}
    made.__signature__ = inspect.Signature(parameters)
    return command


def _parameter(argument: Argument) -> inspect.Parameter:
    """Return the parameter of an argument: text, which the operation reads, or a flag."""
    shown = None if argument.default in {None, ""} else str(argument.default)
    hint: Any
    if argument.first:
        metavar = argument.name.upper() if argument.required else f"[{argument.name.upper()}]"
        hint = Annotated[str | None, typer.Argument(metavar=metavar, help=argument.what, show_default=False)]
    elif argument.kind.flag:
        hint = Annotated[bool | None, typer.Option(help=argument.what, show_default=False)]
    else:
        text = argument.what + (f" [default: {_default(argument)}]" if shown is not None else "")
        option = typer.Option(metavar=argument.kind.word, help=text, show_default=False, hidden=argument.hidden)
        hint = Annotated[str | None, option]
    if argument.required:
        hint = Annotated[str, hint.__metadata__[0]]
        return inspect.Parameter(argument.name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
    return inspect.Parameter(argument.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _default(argument: Argument) -> str:
    if argument.kind.word == "DURATION":
        from flowctl.units import write_duration

        return write_duration(argument.default)
    return str(argument.default)


def _run(
    operation: Operation,
    given: Mapping[str, object],
    *,
    server: str | None,
    key: Path | None,
    timeout: str,
    as_json: bool,
    follow: bool,
) -> None:
    read_arguments(operation.name, operation.arguments, given)  # what is wrong is told without a server
    from flowctl.control.client import call_operation
    from flowctl.control.place import find_server

    seconds, keys = timeout_of(timeout), keys_of(key)
    with terminable():
        address = find_server(server)

        def call(**more: object) -> dict[str, Any]:
            return call_operation(address, operation.name, {**given, **more}, keys=keys, timeout_s=seconds)

        result = call()
        if not follow:
            _show(result, as_json=as_json)
            return
        with contextlib.suppress(KeyboardInterrupt):
            _follow(result, call, as_json=as_json)


def _show(result: Mapping[str, Any], *, as_json: bool) -> None:
    from flowctl.cli.control.showing import show
    from flowctl.control.client import MOST_ERROR_CHARS

    if as_json:
        print_json(result)
    else:
        show(result)
    _warn(result.get("warning"))
    faults = result.get("faults")
    for fault in faults if isinstance(faults, list) else ():
        complain(foreign(fault, MOST_ERROR_CHARS))
    if faults:
        raise typer.Exit(FAILED)


def _warn(warning: object) -> None:
    from flowctl.control.client import MOST_ERROR_CHARS

    if warning:
        say(f"warning: {foreign(warning, MOST_ERROR_CHARS)}", to_stderr=True)


def _follow(result: Mapping[str, Any], call: Callable[..., Mapping[str, Any]], *, as_json: bool) -> None:
    """Write events as they come: a line of JSON each, or rows of one table."""
    from flowctl.cli.control.showing import show_rows

    heads = True
    while True:
        rows = result["events"]
        if as_json:
            for row in rows:
                print_json(row)
        elif rows:
            show_rows(rows, heads=heads)
            heads = False
        _warn(result.get("warning"))
        if lost := result["lost"]:
            _warn(f"{lost} events were gone before they could be read")
        if not rows:
            time.sleep(_FOLLOW_S)
        result = call(since=result["cursor"])


def timeout_of(text: str) -> float:
    seconds = parse_duration(text, "--timeout")
    if seconds <= 0:
        raise ConfigError(f"--timeout is {text}, it must be more than 0", hint="leave it out for 15s")
    return seconds


def keys_of(key: Path | None) -> Any:
    if key is None:
        return None
    from flowctl.wire.zmtp.keys import KeyPair

    return KeyPair.read(key)
