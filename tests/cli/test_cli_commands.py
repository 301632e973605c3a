"""Commands of other packages, and what the command line says without an extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points

import pytest
import typer

import flowctl
from flowctl.cli import app as program
from flowctl.cli.app import GROUP, add_commands
from flowctl.core.text.extras import missing_extra
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


@pytest.mark.parametrize(
    ("absent", "words", "extra"),
    [
        (["typer"], ["--help"], "cli"),
        (["zmq"], ["rpc", "keygen", "key"], "rpc"),
        (["pydantic"], ["serve", "live", "--list-settings"], "live"),
    ],
)
def test_command_when_an_extra_lacks_names_it_with_its_command(absent, words, extra):
    done = run_without(absent, f"from flowctl.cli import main; sys.exit(main({words!r}))")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"needs the extra {extra!r}: {absent[0]} is not installed" in done.stderr
    assert f"hint: in flowctl's source folder: pip install '.[{extra}]'" in done.stderr


@pytest.mark.parametrize(
    ("name", "absent", "extra"),
    [("ObjectDiffusion", "cbor2", "rpc"), ("WebSocketSession", "wsproto", "websocket"), ("Topic", "h11", "websocket")],
)
def test_public_name_when_its_extra_lacks_names_it(name, absent, extra):
    done = run_without([absent], f"import flowctl\ntry: flowctl.{name}\nexcept ValueError as e: print(e)")
    assert done.stdout == f"flowctl.{name} needs the extra {extra!r}: {absent} is not installed\n"


def test_missing_extra_when_the_module_is_of_none_is_none():
    assert missing_extra(ModuleNotFoundError("no", name="flowctl.nothing"), "x") is None
    assert isinstance(missing_extra(ModuleNotFoundError("no", name="zmq.asyncio"), "x"), ConfigError)
    assert flowctl.ConfigError is ConfigError
