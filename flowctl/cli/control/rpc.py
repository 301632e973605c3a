"""``flowctl rpc``: keys, and calls of any server that speaks OxenMQ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flowctl.cli.common import print_json
from flowctl.cli.control.operations import AsJson, Key, Timeout, keys_of, timeout_of
from flowctl.cli.errors import terminable
from flowctl.core.text.output import say
from flowctl.core.text.printable import foreign, printable, short
from flowctl.errors import ConfigError

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Make keys, and call servers that speak OxenMQ.",
)


@app.callback()
def rpc() -> None:
    """Make keys, and call servers that speak OxenMQ."""


@app.command("keygen")
def keygen(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where the keys go; a new file.")] = Path(
        "flowctl.key"
    ),
    *,
    as_json: AsJson = False,
) -> None:
    """Make a pair of keys, and write the public one.

    Both are in a file that only its owner can read. A server gives its public key to its clients, who name it in its
    address, curve://host:port/KEY. A client gives its own to the server, which has it in the file of control_clients.
    """
    from flowctl.wire.zmtp.keys import KeyPair

    keys = KeyPair.generate()
    keys.write(file)
    if as_json:
        print_json({"public": keys.public.hex(), "file": str(file)})
    else:
        say(keys.public.hex())
        say(f"both keys are in {file}; this is the public one", to_stderr=True)


@app.command("call")
def call(
    address: Annotated[str, typer.Argument(help="tcp://, ipc:// or curve://host:port/KEY, or a server's name here.")],
    command: Annotated[str, typer.Argument(help="category.command")],
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="[PARTS]...", help="Sent as they are; 0x...: bytes.")
    ] = None,
    *,
    no_reply: Annotated[bool, typer.Option("--no-reply", help="Send a command, which has no reply.")] = False,
    key: Key = None,
    timeout: Timeout = "15s",
    as_json: AsJson = False,
) -> None:
    """Call any command of a server, and write its reply.

    Each part of the reply is a line. A part that is no text is written in hex, with 0x in front.
    """
    import asyncio

    from flowctl.control.client import call_parts
    from flowctl.control.place import find_server

    seconds, keys = timeout_of(timeout), keys_of(key)
    sent = [_octets(part) for part in parts or ()]
    where = find_server(address)
    with terminable():
        reply = asyncio.run(call_parts(where, command, sent, keys, seconds, reply=not no_reply))
    if as_json:
        print_json([_text(part) for part in reply])
        return
    for part in reply:
        say(printable(_text(part)))  # one line, whatever the server puts into it


@app.command("describe")
def describe(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[ADDRESS]", help="A server, or its name here; none: what this flowctl knows."),
    ] = None,
    *,
    key: Key = None,
    timeout: Timeout = "15s",
    as_json: AsJson = False,
) -> None:
    """Show the operations of a server. Of each: what it takes, and who may call it."""
    from flowctl.control.operations import OPERATIONS
    from flowctl.control.place import find_server

    if address is None:
        found: dict[str, Any] = {"operations": [operation.describe() for operation in OPERATIONS]}
    else:
        seconds, keys = timeout_of(timeout), keys_of(key)
        with terminable():
            found = _described(find_server(address), keys, seconds)
    if as_json:
        print_json(found)
        return
    try:
        lines = [line for operation in found["operations"] for line in _lines_of(operation)]
    except (AttributeError, KeyError, TypeError) as error:
        raise _foreign(address) from error
    for line in lines:
        say(line)


def _lines_of(operation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show an operation, without line breaks of the server's own in them."""
    name, permission, summary = (foreign(operation[key]) for key in ("name", "permission", "summary"))
    yield f"{name} ({permission}): {summary}"
    for item in operation.get("arguments", ()):
        name, word, what = (foreign(item[key]) for key in ("name", "type", "what"))
        needed = ", required" if item["required"] else ""
        default = "" if item["default"] in (None, "") else f" Default: {foreign(item['default'])}."
        yield f"    {name} ({word}{needed}): {what}{default}"


def _foreign(address: str | None) -> Exception:
    from flowctl.control.client import OperationError

    return OperationError(f"{address} describes itself in another way", code="FOREIGN", hint="is it a flowctl server?")


def _described(address: str, keys: Any, timeout_s: float) -> dict[str, Any]:
    """Return the operations of a server; of a node of flowctl that serves others, its commands."""
    import asyncio

    from flowctl.control.client import OperationError, call_operation, call_parts

    try:
        return call_operation(address, "describe", {}, keys=keys, timeout_s=timeout_s)
    except OperationError as error:
        if error.code != "UNKNOWNCOMMAND":
            raise
    reply = asyncio.run(call_parts(address, "rpc.describe", [], keys, timeout_s))
    try:
        commands: list[dict[str, Any]] = json.loads(reply[0])["commands"]
        return {"operations": [{**item, "permission": item["access"], "arguments": []} for item in commands]}
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _foreign(address) from error


def _octets(part: str) -> str | bytes:
    if not part.startswith("0x"):
        return part

    try:
        return bytes.fromhex(part[2:])
    except ValueError as error:
        raise ConfigError(f"{short(part)} is no hex", hint="two digits for each byte, like 0x00ff") from error


def _text(part: bytes) -> str:
    try:
        text = part.decode()
    except UnicodeDecodeError:
        return f"0x{part.hex()}"
    return f"0x{part.hex()}" if text.startswith("0x") else text


def add_to(program: typer.Typer) -> None:
    program.add_typer(app, name="rpc")
