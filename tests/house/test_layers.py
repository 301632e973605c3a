"""Which module may import which: the table of legal arrows, and what the lower layers do without.

Below, each layer names its modules (a package stands for everything in it) and the layers it may import. A new module
has to be given a layer here, which is the moment to ask where it belongs.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import generate_docs
from source_kit import ROOT, Import, imports_of, module_files, shown


@dataclass(frozen=True)
class Layer:
    modules: frozenset[str]
    may_import: frozenset[str]
    pure: bool = False


def layer(modules: str, may_import: str = "", *, pure: bool = False) -> Layer:
    return Layer(frozenset(modules.split()), frozenset(may_import.split()), pure)


LAYERS = {
    "words": layer(
        "errors units reasons core.text.addresses core.text.fieldtypes core.text.printable "
        "core.text.tomltext core.text.userfiles",
        pure=True,
    ),
    "outcomes": layer("core.outcomes", "words", pure=True),
    "folders": layer("core.folders", "words"),
    "text": layer("core.text", "words outcomes folders"),
    "sqlite": layer("core.text.sqlitefile", "words"),
    "flow": layer("core.flow", "words", pure=True),
    "rtmp": layer("wire.rtmp flv", "words flow", pure=True),
    "frames": layer("wire.websocket", "words", pure=True),
    "outgoing": layer("core.outgoing", "words flow", pure=True),
    "judging": layer("live.judging", "words outcomes flow", pure=True),
    "clocks": layer("live.renditions.clocks", "words outcomes rtmp", pure=True),
    "charts": layer("charts", "words", pure=True),
    "log": layer("log", "words text rtmp"),
    "loop": layer("core.loop deferred pollgroup pollgroups", "words flow"),
    "access": layer("live.access", "words text rtmp loop"),
    "scheduler": layer("nodes.scheduler", "words outcomes loop"),
    "zmtp": layer("wire.zmtp", "words", pure=True),
    "sending": layer("sender core.sending", "words flow outgoing loop"),
    "receiver": layer("receiver", "words loop"),
    "fanout": layer("core.fanout", "words flow outgoing loop sending"),
    "streams": layer("wire.streams", "words flow rtmp outgoing loop sending fanout"),
    "streamset": layer("streamset", "words flow outgoing loop sending fanout"),
    "connection": layer("connection core.connecting", "words flow outgoing loop sending receiver fanout"),
    "keys": layer("wire.zmtp.keys", "words text zmtp"),
    "diffusion": layer("nodes.diffusion", "words folders flow outcomes loop sending receiver connection"),
    "websocket": layer("websocket", "words frames flow outgoing loop sending receiver fanout connection"),
    "server": layer("core.server", "words text outcomes flow loop sending receiver connection"),
    "zmtplink": layer(
        "wire.zmtp.session wire.zmtp.link wire.zmtp.inproc wire.zmtp.listen wire.zmtp.dial",
        "words outcomes flow loop sending receiver connection server zmtp",
    ),
    "rpc": layer("nodes.rpc", "words text outcomes flow loop sending zmtp keys zmtplink scheduler"),
    "messenger": layer("nodes.messenger", "words sqlite flow outcomes loop sending zmtp keys zmtplink"),
    "asgi": layer("asgi", "words text frames flow loop sending connection websocket server"),
    "telemetry": layer("records.telemetry", "words text folders flow outgoing loop sending"),
    "flight": layer("records.flight", "words flow outgoing loop sending telemetry"),
    "testing": layer("testing", "words flow loop sending connection"),
    "media": layer("wire.media", "words rtmp"),
    "client": layer(
        "wire.client", "words text outcomes flow rtmp outgoing loop sending receiver fanout streams connection media"
    ),
    "live": layer(
        "live",
        "words text sqlite outcomes access flow rtmp outgoing judging clocks log loop sending receiver fanout "
        "streams streamset connection server telemetry flight",
    ),
    "fleet": layer("live.fleet", "words outcomes keys zmtp rpc messenger live"),
    "httpd": layer(
        "live.httpd",
        "words access flow rtmp frames outgoing log loop sending receiver streams connection server live",
    ),
    "control": layer("control", "words text flow log loop keys zmtp rpc sending connection server live"),
    "admin": layer("live.admin", "words text loop access server live control"),
    "cluster": layer(
        "live.cluster",
        "words text folders flow rtmp access outgoing judging outcomes charts log loop keys zmtp rpc scheduler "
        "diffusion sending receiver fanout streams connection server telemetry client live fleet control admin",
    ),
    "remux": layer(
        "live.remux live.playback",
        "words folders access flow rtmp outcomes judging log loop sending streams connection server live httpd client "
        "cluster",
    ),
    "relay": layer("live.relay", "words flow rtmp outcomes loop sending streams connection server live client cluster"),
    "run": layer("live.run", "words outcomes access rtmp loop server live cluster remux"),
    "loadtest": layer("load", "words text flow rtmp charts log loop media client"),
    "demo": layer(
        "demo",
        "words text access flow rtmp charts log loop media sending connection server live client control admin httpd "
        "cluster loadtest",
    ),
    "pipeline": layer("analyze", "words text folders flow charts server telemetry flight"),
    "cli": layer(
        "cli __main__",
        "words text folders access flow rtmp judging log keys zmtp server telemetry flight media client live control "
        "cluster loop remux loadtest demo pipeline",
    ),
}
"""Lower layers first. `__init__` of flowctl, which re-exports, belongs to none: nothing in flowctl imports it."""

IMPURE_NAMES = (
    "asyncio datetime logging multiprocessing os select selectors signal socket ssl structlog subprocess threading "
    "time uvloop"
)
IMPURE = frozenset(IMPURE_NAMES.split())
"""What a pure module does without: input and output, threads, logs, and the clock, which is an argument there."""

CLI_MAY_LOAD = (
    *(
        "flowctl.cli",
        "flowctl.analyze.options",
        "flowctl.errors",
        "flowctl.units",
        "flowctl.core.flow",
        "flowctl.control",
        "flowctl.core.text.addresses",
        "flowctl.core.text.extras",
        "flowctl.core.text.fieldtypes",
        "flowctl.reasons",
        "flowctl.core.server.bans",
        "flowctl.core.text.output",
        "flowctl.core.text.printable",
        "flowctl.core.text.tomltext",
        "flowctl.core.text.userfiles",
    ),
    *("typer", "click"),
)
"""What `flowctl --help` may cost, beside the standard library; everything else is imported inside the commands."""

DISTRICTS = {"flowctl.core", "flowctl.wire", "flowctl.nodes", "flowctl.records"}
"""Folders of rooms that are no rooms themselves: their `__init__` holds a sentence and nothing else."""
MODULES = sorted(name for name in module_files() if name.startswith("flowctl.") and name not in DISTRICTS)


def layer_of(module: str) -> str:
    parts = module.split(".")[1:]
    for count in range(len(parts), 0, -1):
        found = [name for name, item in LAYERS.items() if ".".join(parts[:count]) in item.modules]
        if found:
            assert len(found) == 1, f"{module} is in {len(found)} layers"
            return found[0]
    raise AssertionError(f"{module} is in no layer: give it one in tests/house/test_layers.py")


def is_pure(module: str) -> bool:
    return LAYERS[layer_of(module)].pure


def arrows(module: str) -> list[Import]:
    return list(imports_of(module_files()[module]))


def test_imports_when_between_layers_follow_the_table():
    wrong = []
    for module, item in ((name, found) for name in MODULES for found in arrows(name)):
        own = layer_of(module)
        if item.module == "flowctl":
            wrong.append(f"{shown(module_files()[module], item.line)} imports flowctl itself: import the module")
        elif item.module.split(".")[0] == "flowctl_servers":
            wrong.append(f"{shown(module_files()[module], item.line)} imports {item.module}: found by its entry point")
        elif item.module.startswith("flowctl."):
            target = layer_of(item.module)
            if target != own and target not in LAYERS[own].may_import:
                wrong.append(f"{shown(module_files()[module], item.line)} ({own}) imports {item.module} ({target})")
    assert wrong == []


def test_imports_when_the_module_is_pure_are_without_io_threads_logs_and_clock():
    wrong = [
        f"{shown(module_files()[module], item.line)} imports {item.module}"
        for module in MODULES
        if is_pure(module)
        for item in imports_of(module_files()[module])
        if item.module.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_table_when_read_from_below_has_arrows_down_only():
    before: set[str] = set()
    for name, item in LAYERS.items():
        assert set() == item.may_import - before, f"{name} points up"
        assert not item.pure or all(LAYERS[below].pure for below in item.may_import), f"{name} is pure above impure"
        before.add(name)


def test_table_when_a_module_is_gone_names_it_no_longer():
    there = {name.removeprefix("flowctl.") for name in MODULES}
    assert set() == {name for item in LAYERS.values() for name in item.modules} - there


def test_modules_when_all_imports_count_have_no_cycle():
    needs = {
        module: {item.module for item in imports_of(path)} & module_files().keys() - {module}
        for module, path in module_files().items()
    }
    while free := {module for module, needed in needs.items() if not needed & needs.keys()}:
        for module in free:
            del needs[module]
    assert not needs, "a cycle"


def loaded_by(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after `code`, beside those it always loads."""
    show = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"
    command = [sys.executable, "-c", show.format(code)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())


def test_import_when_all_pure_modules_are_loaded_brings_no_loop_and_no_sockets():
    pure = [name for name in MODULES if is_pure(name)]
    assert pure
    loaded = loaded_by("; ".join(f"import {name}" for name in pure))
    assert set(pure) <= loaded
    assert set() == loaded & {"asyncio", "socket", "selectors", "subprocess", "ssl", "uvloop", "structlog"}


def test_import_when_only_flowctl_is_asked_for_loads_nothing_else():
    loaded = loaded_by("import flowctl")
    assert {"flowctl"} == {name for name in loaded if name.startswith("flowctl")}
    assert "asyncio" not in loaded


def test_cli_when_only_its_help_is_wanted_loads_no_server():
    """Modules of the command line import heavy things inside the commands, so that ``flowctl --help`` is fast."""
    reached, wrong = set(), []
    commands = importlib.metadata.entry_points(group="flowctl.commands")
    open_ = ["flowctl.cli", *{point.module for point in commands}]
    while open_:
        module = open_.pop()
        reached.add(module)
        for item in arrows(module):
            top = item.module.split(".")[0]
            if item.late or item.typing_only or top in sys.stdlib_module_names:
                continue
            if not item.module.startswith(CLI_MAY_LOAD):
                wrong.append(f"{shown(module_files()[module], item.line)} imports {item.module}")
            elif item.module in module_files() and item.module not in reached:
                open_.append(item.module)
    assert wrong == []
    assert len(reached) > 5
    loaded = loaded_by("import flowctl.cli")
    assert set() == loaded & {
        "flowctl.core.server.server",
        "flowctl.live",
        "flowctl.wire.client",
        "uvloop",
        "structlog",
        "asyncio",
        "pydantic",
    }


def test_imports_of_the_library_of_settings_when_text_becomes_settings_are_the_only_ones():
    """Two rooms import Pydantic: that of the API, and that of settings, which only commands that read them import.

    RPC does where a command takes a type, and not before.
    """
    users = {name for name in MODULES for item in imports_of(module_files()[name]) if item.module == "pydantic"}
    assert {name.rpartition(".")[0] for name in users - {"flowctl.nodes.rpc.arguments"}} == {
        "flowctl.live.settings",
        "flowctl.live.admin",
    }
    assert "pydantic" not in loaded_by("import flowctl.nodes.rpc.node")
    users = {name for name in users if not name.startswith(("flowctl.live.admin.", "flowctl.nodes.rpc."))}
    importers = {name for name in MODULES for item in imports_of(module_files()[name]) if item.module in users}
    outside = {name for name in importers if not name.startswith("flowctl.live.settings.")}
    assert outside == {"flowctl.cli.config", "flowctl.cli.serve"}


MOST_FILES = 16
"""More modules than that in a room, and nobody finds the one he needs: part of it is a room of its own."""
MOST_FLAT = 18
"""Modules beside the rooms: a public class each, or words that everything uses."""


def test_rooms_when_counted_hold_few_files():
    folders = ("flowctl", "servers", "bench", "tests")
    files = Counter(path.parent for folder in folders for path in (ROOT / folder).rglob("*.py"))
    most = {ROOT / "flowctl": MOST_FLAT}
    assert {str(room): count for room, count in files.items() if count > most.get(room, MOST_FILES)} == {}


def test_rooms_when_opened_say_their_rule_and_where_to_begin():
    wrong = []
    for path in (ROOT / "flowctl").glob("*/**/__init__.py"):
        first = generate_docs.FIRST_FILE.search(path.read_text("utf-8"))
        modules = [item for item in path.parent.glob("*.py") if item != path]
        if bool(modules) != bool(first) or (first and not (path.parent / first[1]).exists()):
            wrong.append(str(path))
    assert wrong == []
