"""The help of every command: whole at 80 columns; settings and completion are there."""

from __future__ import annotations

import json
import re

import pytest
import typer
from cli_kit import run

from flowctl.cli.app import app


def commands():
    found = []
    top = typer.main.get_command(app)
    open_ = [((), top)]
    while open_:
        words, command = open_.pop()
        found.append((words, command))
        names = command.list_commands(None) if hasattr(command, "list_commands") else []
        open_ += [((*words, name), command.get_command(None, name)) for name in names]
    return found


def test_help_when_the_terminal_has_80_columns_shows_option_names_whole(monkeypatch, capsys):
    from flowctl.cli.errors import run as run_app

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    wrong = []
    for words, command in commands():
        run_app(app, [*words, "--help"])
        text = capsys.readouterr().out
        shown = set(re.findall(r"--[a-z][a-z0-9-]*", text))
        for parameter in command.get_params(typer.Context(command)):
            options = [item for item in getattr(parameter, "opts", []) if item.startswith("--")]
            wrong += [f"{' '.join(words)} {item}" for item in options if item not in shown and not parameter.hidden]
        wrong += [f"{' '.join(words)}: {line}" for line in text.splitlines() if len(line) > 80]
    assert len(commands()) > 12
    assert wrong == []


def test_help_when_commands_are_listed_in_80_columns_cuts_no_sentence(monkeypatch, capsys):
    from flowctl.cli.errors import run as run_app

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    cut = []
    for words, group in commands():
        if not hasattr(group, "list_commands"):
            continue
        run_app(app, [*words, "-h"])
        listed = " ".join(capsys.readouterr().out.split())
        for name in group.list_commands(None):
            sentence = group.get_command(None, name).get_short_help_str(200)
            if len(sentence) > 60 or f" {name} {sentence}" not in listed:
                cut.append(f"{' '.join((*words, name))}: {sentence}")
    assert cut == []


@pytest.mark.parametrize("name", ["live", "echo"])
def test_settings_when_listed_are_those_of_the_server(name):
    from flowctl.cli.servers import load_server
    from flowctl.live.settings.model import settings_of

    found = settings_of(load_server(name))
    status, output, errors = run("serve", name, "--list-settings", "--json")
    assert (status, errors) == (0, "")
    assert json.loads(output) == {
        item.name: {"type": item.kind, "default": item.default, "what": item.what} for item in found
    }
    status, output, _ = run("serve", name, "--list-settings")
    assert status == 0
    assert [item.name for item in found if f"{item.name}: " not in output] == []
    assert max(map(len, output.splitlines())) <= 80


def test_completion_when_asked_for_is_a_script():
    status, output, _ = run("--show-completion", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert "--show-completion" in run("--help")[1]
    assert status in {0, 2}, output


def test_help_of_drain_leaves_out_what_only_programs_give():
    _, output, _ = run("drain", "--help")
    assert "--within" in output
    assert not {"--successor", "--origin"} & set(output.split())
