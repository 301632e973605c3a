"""What the programs write: in one place, safe for a terminal, and said plainly where it cannot be written."""

from __future__ import annotations

import ast
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flowctl.cli.control.rpc import call
from flowctl.cli.errors import complain
from flowctl.core.text import output
from flowctl.errors import FlowctlError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
FLOWCTL = f"{shlex.quote(sys.executable)} -m flowctl"
HOSTILE = "\x1b]0;title\x07\x9b2J\u202e\u2028\udc80"


def shell(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", "-c", command.replace("flowctl", FLOWCTL, 1)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT,
    )


def test_text_when_it_is_written_anywhere_goes_through_one_function():
    wrong = []
    allowed = {"flowctl/core/text/output.py", "flowctl/load/worker.py"}  # the latter speaks JSON to its own parent
    for path in sorted([*(ROOT / "flowctl").rglob("*.py"), *(ROOT / "servers").rglob("*.py")]):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and name not in allowed:
                called = ast.unparse(node.func)
                if called in {"print", "typer.echo", "typer.secho", "click.echo"} or called.endswith(
                    ("stdout.write", "stderr.write", "stderr.buffer.write", "stdout.writelines", "stderr.writelines")
                ):
                    wrong.append(f"{name}:{node.lineno} {called}")
    assert wrong == []


@pytest.mark.parametrize("to_stderr", [False, True])
def test_say_when_the_text_is_hostile_writes_escapes(capsys, to_stderr):
    output.say(f"line one\nname {HOSTILE}", to_stderr=to_stderr)
    found = capsys.readouterr()
    text = found.err if to_stderr else found.out
    assert text == "line one\nname \\u001b]0;title\\u0007\\u009b2J\\u202e\\u2028\\udc80\n"


def test_say_when_the_encoding_has_no_such_letter_writes_an_escape(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    output.say("a東b")
    assert stream.buffer.getvalue() == b"a\\u6771b\n"


@pytest.mark.parametrize("command", ["version", "version --json", "load --list-profiles", "--help", "serve --help"])
@pytest.mark.parametrize(("where", "word"), [("/dev/full", "No space left"), ("&-", "is closed")])
def test_standard_output_when_it_takes_nothing_is_said(command, where, word):
    done = shell(f"flowctl {command} >{where}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("version 2>/dev/full", 0),
        ("version 2>&-", 0),
        ("nonsense 2>/dev/full", 2),
        ("nonsense 2>&-", 2),
        ("version >/dev/full 2>/dev/full", 1),
        ("version >&- 2>&-", 1),
        ("version <&-", 0),
        ("load rtmp://127.0.0.1:9/a/b --viewers 1 --duration 1s 2>/dev/full", 1),
    ],
)
def test_standard_error_when_it_takes_nothing_leaves_the_status(command, status):
    done = shell(f"flowctl {command}")
    assert done.returncode == status
    assert "Traceback" not in done.stdout + done.stderr


def test_log_when_standard_error_is_full_makes_the_status_tell():
    script = """
import sys
from flowctl.cli import app, main
from flowctl.log import configure, get_logger

@app.command("only-logs")
def only_logs() -> None:
    configure("info")
    get_logger("a").info("hello")
    sys.stdout.write("done\\n")

sys.exit(main(["only-logs"]))
"""
    command = [sys.executable, "-c", script]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, "done\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "hello" in done.stderr


def test_streams_when_they_are_closed_are_not_taken_by_files_of_ours():
    script = (
        "from flowctl.core.text.output import open_missing_streams; open_missing_streams(); f = open('/dev/null'); "
    )
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        code = f"{script} raise SystemExit(f.fileno() < 3)"
        done = subprocess.run(
            ["sh", "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"], check=False, cwd=ROOT
        )
        assert done.returncode == 0, closed


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/srv/x"), ("/srv/x: Permission denied", "you may not use it")),
        (OSError(28, "No space left on device", "/srv/x"), ("/srv/x: No space left", "make room")),
        (IsADirectoryError(21, "Is a directory", "/srv/x"), ("/srv/x: Is a directory", "name a file in it")),
    ],
)
def test_error_of_the_system_when_no_command_has_words_for_it_is_no_bug(capsys, error, words):
    import typer

    from flowctl.cli.errors import run

    app = typer.Typer()

    @app.command("only")
    def fail() -> None:
        raise error

    assert run(app, []) == 1
    text = capsys.readouterr().err
    assert "bug" not in text
    assert all(word in text for word in words)


@pytest.mark.parametrize("command", ["version", "serve --help", "load --list-profiles", "config show"])
def test_failure_when_the_reader_has_gone_is_silent(command):
    gone, ours = os.pipe()
    os.close(gone)
    done = subprocess.run(
        [*FLOWCTL.split(), *command.split()],
        stdout=ours,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT,
    )
    os.close(ours)
    assert (done.returncode, done.stderr) == (141, b"")


def test_say_when_standard_output_fails_raises_what_can_be_told(monkeypatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(FlowctlError, match="standard output: No space left"):
        output.say("x")


def test_error_when_it_quotes_a_peer_is_a_line_and_so_is_its_hint(capsys):
    complain("the server said: no\nhint: run this", "there\nis none")
    assert capsys.readouterr().err == "error: the server said: no\\u000ahint: run this\nhint: there\\u000ais none\n"


def test_parts_of_a_reply_when_they_hold_breaks_are_a_line_each(capsys, monkeypatch):
    async def answer(*_, **__):
        return [b"one\ntwo", b"three"]

    monkeypatch.setattr("flowctl.control.client.call_parts", answer)
    call("tcp://127.0.0.1:1", "x")
    assert capsys.readouterr().out == "one\\u000atwo\nthree\n"
