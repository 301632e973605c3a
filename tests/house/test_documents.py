"""README and docs are true: their code runs, their commands parse, links lead somewhere, tables are current.

Blocks marked ``python`` are executed in order, those of one document in one namespace. A block that ends in a call of
`serve` is run as a program of its own and talked to. In blocks marked ``console``, each line that begins with ``$`` is
checked: targets of make must exist, options and arguments of flowctl must parse.
"""

from __future__ import annotations
import __future__

import ast
import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import generate_docs
import pytest
import websockets.sync.client as websocket_client
import yaml
from source_kit import ROOT, module_files, nodes_of

DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in generate_docs.DOCUMENTS}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
KNOWN_FENCES = {"python", "console", "text", "mermaid", "json", "make", "toml", "yaml"}
WAIT_S = 30
INSIDE = {"ARCHITECTURE.md", "CONTRIBUTING.md", *(name for name in DOCUMENTS if name.startswith("docs/design/"))}
"""Documents for those who change flowctl, in the words of its source."""


def blocks(document: str, kind: str) -> list[str]:
    return [text for language, text in FENCE.findall(DOCUMENTS[document]) if language == kind]


def is_server(block: str) -> bool:
    return block.rstrip().splitlines()[-1].startswith("serve(")


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "<!-- generated:" in DOCUMENTS[name]])
def test_generated_parts_when_compared_are_current(document):
    """Diagrams and tables are what the code says; ``python tests/generate_docs.py`` rewrites them."""
    assert generate_docs.regenerated(DOCUMENTS[document]) == DOCUMENTS[document]


def test_generators_when_listed_are_all_used():
    used = {name for text in DOCUMENTS.values() for name in re.findall(r"<!-- generated: ([a-z-]+) -->", text)}
    assert used == generate_docs.GENERATED.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_when_fenced_have_a_known_language(document):
    """Every block says what it is, so that none escapes being checked."""
    assert set() == {language for language, _ in FENCE.findall(DOCUMENTS[document])} - KNOWN_FENCES
    assert DOCUMENTS[document].count("```") == 2 * len(FENCE.findall(DOCUMENTS[document]))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_when_in_a_document_have_one_count_of_columns(document):
    """A line too many between two rows, or a bar in a cell, makes text of what follows."""
    text = FENCE.sub("", DOCUMENTS[document])
    for block in re.findall(r"(?:^ *\|.*\n)+", text + "\n", re.MULTILINE):
        head, line, *rows = [re.split(r"(?<!\\)\|", row.strip()) for row in block.splitlines()] + ([[]] * 2)
        assert re.fullmatch(r"(?: *:?-+:? *)+", "".join(line)), f"no head: {block[:100]}"
        assert {len(row) for row in rows if row} <= {len(head)} == {len(line)}, block


def test_ids_that_players_may_use_up_when_told_are_those_of_the_source():
    from flowctl.live.settings.renditions import MOST_RENDITIONS
    from flowctl.live.stream import GIVEN_WIRES, MOST_WIRES

    text = " ".join(DOCUMENTS["docs/security.md"].split())
    others = f"and {MOST_WIRES - GIVEN_WIRES} others at a time (`player_stream_ids`)"
    assert f"the lowest {GIVEN_WIRES}, which are never refused, {others}" in text
    assert f"that of each of up to {MOST_RENDITIONS})" in text


def test_site_when_made_says_where_it_is(tmp_path):
    folder = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8").partition("plugins:")[0])["site_dir"]
    builder = tmp_path / "bin" / "mkdocs"
    builder.parent.mkdir()
    builder.write_text("#!/bin/sh\n")
    builder.chmod(0o755)
    (tmp_path / ".ready").touch()
    done = subprocess.run(
        ["make", "-s", "site", f"VENV={os.path.relpath(tmp_path, ROOT)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == str(ROOT / folder / "index.html")


def test_yaml_when_in_a_document_can_be_read():
    found = [yaml.safe_load(block) for name in DOCUMENTS for block in blocks(name, "yaml")]
    assert found
    assert all(found)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if blocks(name, "python")])
def test_python_when_in_a_document_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    future = any("from __future__ import annotations" in block for block in blocks(document, "python"))
    flags = __future__.annotations.compiler_flag if future else 0  # the blocks of a document are one module
    for number, block in enumerate(blocks(document, "python"), 1):
        if not is_server(block):
            name = f"{document}, Python block {number}"
            exec(compile(block, name, "exec", flags, dont_inherit=True), namespace)


@pytest.mark.parametrize(
    ("document", "block"),
    [(name, block) for name in DOCUMENTS for block in blocks(name, "python") if is_server(block)],
    ids=lambda value: value if value in DOCUMENTS else "server",
)
def test_server_when_in_a_document_serves(document, block, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = tmp_path / "server.py"
    text, count = re.subn(r"port=\d+", f"port={port}", block)
    assert count == 1
    program.write_text(text)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        try:
            if "WebSocketSession" in block:
                talk_as_a_browser(port, process)
            else:
                talk_in_lines(port, process)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def talk_in_lines(port: int, process: subprocess.Popen) -> None:
    """Have a second peer hear what the first one says."""
    with connect(port, process) as first, connect(port, process) as second:
        first.settimeout(WAIT_S)
        second.settimeout(0.1)
        for _ in range(100):  # the second may not have been let in when the first one speaks
            first.sendall(b"hello\n")
            assert first.recv(6)
            try:
                heard = second.recv(6)
            except TimeoutError:
                continue
            break
        assert heard == b"hello\n"


def talk_as_a_browser(port: int, process: subprocess.Popen) -> None:
    """Hear of three prices, and the answer to what was said, by a client of another project."""
    connect(port, process).close()
    with websocket_client.connect(f"ws://127.0.0.1:{port}") as browser:
        browser.send("hello")
        heard = set()
        while len(heard) < 4:
            message = browser.recv(WAIT_S)
            heard.add(message if message.startswith("you") else next(iter(json.loads(message))))
    assert heard == {"EUR", "USD", "JPY", "you said hello"}


def connect(port: int, process: subprocess.Popen) -> socket.socket:
    """Connect as soon as the server listens."""
    for _ in range(WAIT_S * 20):
        assert process.poll() is None
        try:
            return socket.create_connection(("127.0.0.1", port), WAIT_S)
        except ConnectionRefusedError:
            time.sleep(0.05)
    pytest.fail("the server does not listen")


def commands(document: str) -> list[str]:
    """Return the commands of a document's console blocks, continuation lines joined."""
    lines = "".join(blocks(document, "console")).replace("\\\n", " ").splitlines()
    return [line[2:].split(" #")[0].removesuffix("&").strip() for line in lines if line.startswith("$ ")]


def test_commands_when_in_a_document_are_there():
    for document in DOCUMENTS:
        for command in commands(document):
            check_command(document, command)


def check_command(document: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        names = [item for item in arguments if "=" not in item]
        assert set() == set(names) - set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif program == "flowctl":
        parse_flowctl(arguments)
    elif program.startswith("python"):
        assert arguments[0] in {"-m", "-X"} or (ROOT / arguments[0]).exists()
    else:
        assert program in {"git", "cd", "kill", "pip", "nc", "curl", "ffmpeg", "ffplay"}, f"{document}: {command}"


@functools.cache
def command_line() -> Any:
    import typer

    from flowctl.cli import app

    return typer.main.get_command(app)


def parse_flowctl(arguments: list[str]) -> None:
    group = command_line()
    context = group.make_context("flowctl", list(arguments))
    name = next(item for item in arguments if item in group.commands)
    rest = arguments[arguments.index(name) + 1 :]
    if "--help" not in rest:
        group.commands[name].make_context(name, rest, parent=context)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_when_inside_the_project_lead_somewhere(document):
    here = (ROOT / document).parent
    for target in LINK.findall(DOCUMENTS[document]):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = (here / file).resolve() if file else ROOT / document
        assert path.exists(), f"{document}: {target}"
        if heading:
            assert heading in headings(path), f"{document}: {target}"


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in INSIDE])
def test_documents_when_they_count_data_say_bytes(document):
    assert re.findall(r"\w*[Oo]ctets?(?!-stream)\w*", DOCUMENTS[document]) == []


def test_messages_when_they_count_data_say_bytes():
    found = []
    for path in module_files().values():
        told = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
        texts = (node for node in nodes_of(path) if isinstance(node, ast.Constant) and id(node) not in told)
        found += [f"{path.name}: {node.value}" for node in texts if re.search(r"[Oo]ctet(?!-stream)", str(node.value))]
    assert found == []


def headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def hints() -> list[str]:
    """Return the texts of the source that tell a user what to do: those given as a hint, and those called so."""
    found = []
    for path in module_files().values():
        for node in nodes_of(path):
            value = None
            if isinstance(node, ast.keyword) and node.arg == "hint":
                value = node.value
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                value = node.value if isinstance(target, ast.Name) and "hint" in target.id.lower() else None
            texts = (item.value for item in ast.walk(value) if isinstance(item, ast.Constant)) if value else ()
            found += [text for text in texts if isinstance(text, str) and "flowctl " in text]
    return found


def test_commands_when_in_a_hint_are_there():
    from flowctl.live.settings.model import LiveSettings

    top = command_line()
    settings = {f"--{name.replace('_', '-')}" for name in LiveSettings.model_fields}  # options of serve
    seen = 0
    for hint in hints():
        for said in re.findall(r"\bflowctl ((?:(?!\bflowctl )[^;,:`])*)", hint):
            command, words = top, said.split()
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            if command is top:
                continue  # a sentence about flowctl
            seen += 1
            known = settings | {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
            wrong = [word for word in words if word.startswith("--") and word not in known]
            assert not wrong, f"{hint!r}: {wrong}"
    assert seen > 20


def test_features_when_listed_name_tests_and_benches_that_are_there():
    text = DOCUMENTS["docs/features.md"]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| feature", "| ---"))]
    tried = [re.findall(r"`((?:tests/|python bench |make |flowctl )[^`]+)`", row) for row in rows]
    assert [row for row, names in zip(rows, tried, strict=True) if not names] == []
    for name in {name for names in tried for name in names}:
        if name.startswith("tests/"):
            assert (ROOT / name).exists(), name
        elif name.startswith("python bench "):
            assert list((ROOT / "bench").rglob(f"{name.split()[2]}.py")), name
        else:
            check_command("docs/features.md", name)
