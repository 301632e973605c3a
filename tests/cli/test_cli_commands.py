"""Commands of other packages, and what the command line says without an extra."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, requires

import pytest
import typer
from packaging.requirements import Requirement

import flowctl
from flowctl.cli import app as program
from flowctl.cli.app import GROUP, add_commands
from flowctl.core.text.extras import IMPORTED_AS, missing_extra, packages_by_extra
from flowctl.errors import ConfigError


@pytest.fixture
def installed(monkeypatch):
    """Entry points as if they were all that is installed, added to a program of their own."""

    def install(**values):
        points = [EntryPoint(name, value, GROUP) for name, value in values.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
        made = typer.Typer()
        add_commands(made)
        return [command.name for command in made.registered_commands]

    return install


def test_commands_when_a_package_brings_some_are_added(installed):
    assert installed(top="flowctl.cli.control.top:add_to", version="flowctl.cli.version:add_to") == ["top", "version"]


def test_commands_when_a_package_cannot_be_loaded_are_named_and_the_others_work(installed, capsys):
    assert installed(bad="flowctl.cli.nothing:add_to", version="flowctl.cli.version:add_to") == ["version"]
    assert "error: commands of flowctl.cli.nothing:add_to cannot be loaded: No module named" in capsys.readouterr().err


def test_commands_when_listed_are_those_of_the_entry_points():
    modules = {point.module for point in entry_points(group=GROUP)}
    added = {command.callback.__module__ for command in program.registered_commands}
    added |= {"flowctl.cli.analyze.app", "flowctl.cli.config", "flowctl.cli.key"}
    assert added <= modules | {"flowctl.cli.control.operations"}


WITHOUT = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
{code}
"""


def run_without(absent, code):
    source = WITHOUT.format(absent=absent, code=code)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)


def installed_with(extra):
    """Return the packages that are there where flowctl is installed with that extra and nothing else."""
    has, todo = set(), [f"flowctl[{extra}]"]
    while todo:
        asked = Requirement(todo.pop())
        if (asked.name.lower(), *asked.extras) in has:
            continue
        has.add((asked.name.lower(), *asked.extras))
        for text in requires(asked.name) or ():
            marker = Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": name}) for name in asked.extras or {""}):
                todo.append(text.partition(";")[0])
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name, *_ in has}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("cli", ["--help"]),
        ("rpc", ["rpc", "keygen", "key"]),
        ("rpc", ["stats"]),
        ("rpc", ["top"]),
        ("live", ["serve", "live", "--port", "0"]),
        ("live", ["demo"]),
        ("live", ["load", "rtmp://127.0.0.1:1/a/b"]),
        ("live", ["edge", "127.0.0.1:1"]),
        ("live", ["config", "check", "empty"]),
        ("pipeline", ["analyze", "all", "events", "--out", "results"]),
        ("media", ["hls", "rtmp://127.0.0.1:1/a/b", "--out", "hls"]),
        ("telemetry", ["replay", "empty"]),
    ],
)
def test_command_when_only_the_extra_before_its_own_is_installed_names_its_own(extra, words, tmp_path):
    """What a command needs is one extra, whichever of its packages is missed first."""
    has = installed_with({"cli": "", "telemetry": "live"}.get(extra, "cli"))
    absent = sorted(packages_by_extra()["all"] - has)
    (tmp_path / "empty").touch()
    code = f"import os; os.chdir({str(tmp_path)!r}); from flowctl.cli import main; sys.exit(main({words!r}))"
    done = run_without(absent, code)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(rf"error: .* needs? the extra {extra!r}: .* not installed", done.stderr)
    assert f"hint: in flowctl's source folder: pip install '.[{extra}]'" in done.stderr


@pytest.mark.parametrize(
    ("name", "absent", "extra"),
    [
        ("ObjectDiffusion", "cbor2", "rpc"),
        ("WebSocketSession", "wsproto", "websocket"),
        ("Topic", "h11", "websocket"),
    ],
)
def test_public_name_when_its_extra_lacks_names_it(name, absent, extra):
    done = run_without([absent], f"import flowctl\ntry: flowctl.{name}\nexcept ValueError as e: print(e)")
    assert done.stdout == f"flowctl.{name} needs the extra {extra!r}: {absent} is not installed\n"


def test_missing_extra_when_the_module_is_of_none_is_none():
    assert missing_extra(ModuleNotFoundError("no", name="flowctl.nothing"), "x") is None
    assert missing_extra(ModuleNotFoundError("no", name="ctypes.nothing"), "x") is None
    assert isinstance(missing_extra(ModuleNotFoundError("no", name="zmq.asyncio"), "x"), ConfigError)
    assert flowctl.ConfigError is ConfigError


def test_missing_extra_when_no_extra_lists_the_package_is_no_bug_of_ours():
    """What a requirement requires, say, and somebody has removed."""
    error = ModuleNotFoundError("no", name="httpcore")
    assert missing_extra(error, "x", "live").hint == "in flowctl's source folder: pip install '.[live]'"
    assert str(missing_extra(error, "x")) == "x needs httpcore, which is not installed"
