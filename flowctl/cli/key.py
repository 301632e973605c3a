"""``flowctl key``: stream keys, their hashes, and signed addresses that expire."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowctl.core.text.addresses import parse_network
from flowctl.core.text.output import say
from flowctl.core.text.userfiles import text_of
from flowctl.errors import ConfigError
from flowctl.units import parse_duration

if TYPE_CHECKING:
    from flowctl.live.access.request import Use

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Make stream keys, hash them, and sign addresses.")

_For = Annotated[
    str, typer.Option("--for", metavar="publish|play|edge", help="What it is for; without it to publish and to play.")
]
_Streams = Annotated[str, typer.Option(metavar="PATTERN", help="Of app/stream, with * and ?; without it all.")]


_File = Annotated[Path | None, typer.Argument(help="keys_file that gets its hash as a line; made if absent.")]


@app.callback()
def key() -> None:
    """Make stream keys, hash them, and sign addresses."""


@app.command("make")
def make(
    file: _File = None,
    *,
    kind: _For = "",
    streams: _Streams = "",
) -> None:
    """Make a stream key and write it. The server gets its hash alone.

    A file that it is written into (> my.key) is for its owner alone then.
    """
    from flowctl.live.access.keys import make_key

    new_key = make_key()
    line = _kept(file, new_key, kind, streams)
    if file is None:
        say(line, to_stderr=True)
    else:
        say(f"its hash is in {file}; this is the key, behind the name: app/stream?key=...", to_stderr=True)
    _say_secret(new_key)


@app.command("hash")
def hash_(file: _File = None, *, kind: _For = "", streams: _Streams = "") -> None:
    """Write the line of a stream key for keys_file. The key is read from standard input."""
    line = _kept(file, _given_key(), kind, streams)
    if file is None:
        say(line)


@app.command("revoke")
def revoke(file: Annotated[Path, typer.Argument(help="keys_file that loses it.")]) -> None:
    """Take a stream key out of keys_file, at once. The key is read from standard input.

    A server that runs refuses it from the next request on; who uses it stays (flowctl kick).
    """
    from flowctl.live.access.keys import without_key

    stream_key = _given_key()
    with _rewriting(file) as lines:
        before = "".join(lines)
        lines[:] = [without_key(before, stream_key)]
        if lines[0] == before:
            raise ConfigError(f"the key is not in {file}", hint="give the key itself, not its hash")
        if not lines[0].strip():
            lines[:] = ["# no key\n"]  # an empty file could be one that is being written
    say(f"{file} has it no more; flowctl kick ends who uses it", to_stderr=True)


@app.command("secret")
def secret(file: Annotated[Path, typer.Argument(help="token_secret_file; a new file.")]) -> None:
    """Make a secret for signed addresses. Its file can be read by its owner only."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{file} is there already", hint="secrets are not overwritten: name another file") from error
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_urlsafe(32) + "\n")


@app.command("sign")
def sign(
    file: Annotated[Path, typer.Argument(metavar="SECRET_FILE", help="Of flowctl key secret.")],
    kind: Annotated[str, typer.Argument(metavar="publish|play", help="What it allows.")],
    stream: Annotated[str, typer.Argument(help="app/stream")],
    *,
    within: Annotated[str, typer.Option("--within", help="How long it is good for, from now on.")] = "1h",
    address: Annotated[str, typer.Option(help="Address or network that alone may use it.")] = "",
) -> None:
    """Write app/stream with a signed token that expires."""
    from flowctl.live.access.tokens import read_secrets, signed_query
    from flowctl.wire.rtmp.url import NAMES_HINT, check_name, fits_names, is_path

    use = _kind(kind)
    check_name(stream, "stream name")
    if not fits_names(stream):
        raise ConfigError(f"no stream has the name {stream!r:.100}", hint=NAMES_HINT)
    if use is None or use == "edge" or not is_path(stream):
        raise ConfigError("it is publish or play, and a stream", hint="flowctl key sign tokens.secret play live/room")
    if address:
        parse_network(address, "--address")
    expires = int(time.time() + parse_duration(within, "--within"))
    _say_secret(f"{stream}?{signed_query(read_secrets(file).secrets[0], use, stream, expires, address)}")


def _given_key() -> str:
    return sys.stdin.readline().removeprefix("\ufeff").strip()  # as of files, see text_of


def _say_secret(text: str) -> None:
    """Write it; a file that standard output leads to becomes its owner's alone, as ``?key=@FILE`` asks for."""
    with contextlib.suppress(OSError):
        number = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(number).st_mode):
            os.fchmod(number, 0o600)
    say(text)


def _kind(text: str) -> Use | None:
    from flowctl.live.access.keys import USES

    known_use = next((use for use in USES if use == text), None)
    if text and known_use is None:
        raise ConfigError(f"{text!r:.40} is nothing that is allowed", hint="publish, play or edge")
    return known_use


def _kept(file: Path | None, key: str, kind: str, streams: str) -> str:
    """Return the line of a key, put into a file where one is named, with the salt of the keys there."""
    from flowctl.live.access.keys import hash_key, salt_of

    if file is None:
        return _line(hash_key(key), kind, streams)
    with _rewriting(file) as lines:
        line = _line(hash_key(key, salt_of("".join(lines))), kind, streams)
        lines.append(("" if not lines or lines[-1].endswith("\n") else "\n") + line + "\n")
    return line


@contextlib.contextmanager
def _rewriting(file: Path) -> Iterator[list[str]]:
    """Give the lines of a file, which takes their place whole afterwards; one command at a time does so."""
    from flowctl.core.text.files import write_text

    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", hint="make its folder first") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        lines = text_of(file.read_bytes()).splitlines(keepends=True) if file.exists() else []
        yield lines
        write_text(file, "".join(lines), shared=True)
    finally:
        os.close(folder)


def _line(stored: str, kind: str, streams: str) -> str:
    from flowctl.wire.rtmp.url import NAMES_HINT, fits_names

    if len(streams.split()) > 1 or streams in ("publish", "play", "edge"):
        raise ConfigError("--streams is a pattern of app/stream", hint="such as live/*")
    if not fits_names(streams):
        raise ConfigError(f"--streams {streams!r:.100} fits no stream", hint=NAMES_HINT)
    return " ".join(filter(None, [stored, _kind(kind), streams]))


def add_to(program: typer.Typer) -> None:
    program.add_typer(app, name="key")
