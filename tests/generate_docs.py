"""Writes the parts of the documents that come from the code: diagrams of state machines, tables of limits and reasons.

A generated part stands between ``<!-- generated: name -->`` and ``<!-- end -->``. ``python tests/generate_docs.py``
rewrites all of them in place; test_documents.py fails while one is not what this would write.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

from hostile_defences import DEFENCES, default_of

from flowctl import pollgroup
from flowctl.core.flow.limits import DEFAULT_LIMITS, AxisLimits, HardPolicy, Limits
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.state import _STATE_OF, EMPTY_LOAD, FlowCore, Load, MessageClass, SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.loop.work import WorkLimits
from flowctl.core.outgoing.streamlog import CacheLimits
from flowctl.core.sending.contract import STEPS, Standing
from flowctl.core.sending.settings import SenderSettings
from flowctl.core.server.admission import AdmissionLimits
from flowctl.live.config import LiveConfig
from flowctl.live.httpd.exchange import HttpLimits
from flowctl.live.judging.shares import ShareSettings
from flowctl.live.settings.model import settings_of
from flowctl.live.settings.runs import RunRule
from flowctl.live.settings.showing import sample
from flowctl.load.hostile.attacks import HOSTILE, NOT_POSSIBLE
from flowctl.load.profiles import as_dicts
from flowctl.load.results.figures import FIGURES
from flowctl.load.results.parquet import column_types
from flowctl.load.results.result import PeerResult
from flowctl.nodes.diffusion.wire import protocol
from flowctl.reasons import CloseReason, DropReason
from flowctl.records.telemetry.schema import ARROW_TYPES, TABLES, EventName
from flowctl.sender import Sender
from flowctl.units import format_duration, write_size
from flowctl.wire.rtmp.amf.limits import AmfLimits
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ControlConfig, ServerSessionConfig
from flowctl.wire.rtmp.states import CLIENT_TABLE, CONNECTION_TABLE, STREAM_TABLE, ConnectionInput

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "docs" / "flowctl.toml"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


# -- tables


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def profile_rows(*names: str, hostile: bool = False) -> list[list[str]]:
    found = [item for item in as_dicts() if (item["kind"] == "hostile") is hostile]
    return [
        [f"`{item[name]}`" if name in {"usage", "name", "alias"} else item[name] for name in names] for item in found
    ]


def notes_of(cls: type) -> dict[str, str]:
    """Return what the source says of each field: in comments, a docstring under it, or ``Args`` of the class."""
    source = inspect.getsource(cls)
    notes: dict[str, str] = {}
    for match in re.finditer(r"^((?: {4}#.*\n)*) {4}(\w+): .*?(?:  # (.*))?$", source, re.MULTILINE):
        if text := match[3] or " ".join(match[1].replace("    # ", "").split()):
            notes[match[2]] = text if text.endswith(".") else f"{text}."
    for match in re.finditer(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", inspect.getdoc(cls) or "", re.MULTILINE):
        notes[match[1]] = " ".join(match[2].split())
    body = ast.parse(textwrap.dedent(source)).body[0].body
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            notes[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return {name: note.replace("``", "`") for name, note in notes.items()}


def value_text(name: str, value: object) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, enum.IntEnum):
        return value.name.lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value):
        return f"`{type(value).__name__}()`"
    if name.endswith("_bytes") or name == "out_chunk_size":
        return re.sub("(?=[KMG]iB)", " ", write_size(value))
    if name.endswith("_s") and "_per_" not in name and "_and_" not in name:
        return format_duration(value).replace(".0 ", " ") if value else "0"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_table(cls: type, *, leave_out: frozenset[str] = frozenset(), instance: object = None) -> str:
    """Return the fields of a dataclass with default and meaning; of `instance` where it needs arguments."""
    notes = notes_of(cls)
    instance = instance or cls()
    rows = [
        [f"`{item.name}`", value_text(item.name, getattr(instance, item.name)), notes.get(item.name, "")]
        for item in dataclasses.fields(cls)
        if item.init and item.name not in leave_out and item.name in notes
    ]
    return table(["setting", "default", "meaning"], rows)


def serve_settings() -> str:
    rows = [[f"`{item.name}`", item.kind, item.default, item.what] for item in settings_of()]
    return table(["setting", "type", "default", "what it does"], rows)


def default_limits() -> str:
    limits = DEFAULT_LIMITS
    axes = {"bytes": limits.size, "messages": limits.messages, "age": limits.age_ms}
    show = {
        "bytes": lambda value: value_text("size_bytes", value),
        "messages": str,
        "age": lambda value: value_text("age_s", value / 1000),
    }
    rows = [[name, show[name](axis.low), show[name](axis.soft), show[name](axis.hard)] for name, axis in axes.items()]
    return table(["axis", "low", "soft", "hard"], rows)


def live_policy() -> str:
    policy = LivePolicy()
    classes = [item for item in MessageClass if item is not MessageClass.CONTROL]
    rows = [
        [state.name, *(policy.decide(state, item).value for item in classes), policy.thin(state).value]
        for state in SendState
    ]
    return table(["state", *(item.name for item in classes), "when entered"], rows)


def close_reasons() -> str:
    rows = [[f"`{item.name}`", item.value, "reset" if item.abortive else "in order"] for item in CloseReason]
    return table(["reason", "text", "the socket is closed"], rows)


def drop_reasons() -> str:
    return table(["reason", "text"], [[f"`{item.name}`", item.value] for item in DropReason])


# -- attacks


def hostile_table() -> str:
    rows = []
    for name, defence in DEFENCES.items():
        profile = HOSTILE[name]
        acts = [f"`{name}` ({value_text(name, default_of(name))})" for name in defence.settings]
        seen = [f"ends `{reason.name}`" for reason in defence.closed]
        seen += [f"counts `{name}`" for name in defence.limits]
        seen += [f"refuses by `{name}`" for name in defence.refused]
        seen += [defence.seen] if defence.seen else []
        rows.append([name, f"`{profile.alias}`", profile.summary, ", ".join(acts), "; ".join(seen)])
    return table(["id", "profile", "what it does", "settings that act (default)", "what is seen"], rows)


def work_table() -> str:
    rows = [[name, f"`{item.alias}`", item.summary] for name, item in HOSTILE.items() if name.startswith("W")]
    return table(["id", "profile", "what it does"], rows)


HTTP_ACTS = {
    "H01": ("request_time_s",),
    "H02": ("body_bytes", "request_time_s"),
    "H03": ("request_time_s",),
    "H04": ("target_bytes", "header_bytes", "header_count"),
    "H05": ("requests",),
    "H06": (),
    "H07": ("frames_per_second",),
    "H08": ("frames_per_second",),
}
"""Limits of HTTP that act; tests/live/httpd/test_http_attacks.py runs each attack."""


def http_attacks_table() -> str:
    limits, rows = HttpLimits(), []
    for name, item in HOSTILE.items():
        if item.over_http:
            acts = ", ".join(f"`{name}` ({getattr(limits, name):g})" for name in HTTP_ACTS[name])
            rows.append([name, f"`{item.alias}`", item.summary, acts])
    return table(["id", "profile", "what it does", "limits of HTTP that act (default)"], rows)


def hostile_not_possible() -> str:
    return table(["id", "reason"], [[name, reason] for name, reason in NOT_POSSIBLE.items()])


# -- load tests


def load_figures() -> str:
    rows = [[f"`{name}`", figure.unit, figure.meaning] for name, figure in FIGURES.items()]
    return table(["figure", "unit", "what it is"], rows)


def load_columns() -> str:
    notes = notes_of(PeerResult)
    rows = [
        [f"`{name}`", f"{kind}{', nullable' if nullable else ''}", notes[name]]
        for name, (kind, nullable) in column_types().items()
    ]
    return table(["column", "type", "meaning"], rows)


def record_columns(name: str) -> str:
    rows = [
        [f"`{column.name}`", f"{ARROW_TYPES[column.kind]}{', nullable' if column.nullable else ''}", column.meaning]
        for column in TABLES[name].columns
    ]
    return table(["column", "type", "meaning"], rows)


def event_names() -> str:
    source = inspect.getsource(EventName)
    notes = dict(re.findall(r'= "(\w+)"(?:  # (.*))?', source))
    return table(["event", "says"], [[f"`{item.value}`", notes[item.value]] for item in EventName])


# -- pipeline


def pipeline_columns(module: str, **contracts: str) -> str:
    loaded = importlib.import_module(f"flowctl.analyze.{module}")
    parts = []
    for name, contract in contracts.items():
        found = getattr(loaded, contract)
        if isinstance(found, str):
            found = dict(item.split(" ", 1) for item in found.split(", "))
        kinds: dict[str, list[str]] = defaultdict(list)  # by type: tables of sixty lines are hard to read
        for column, kind in found.items():
            kinds[kind].append(f"`{column}`")
        rows = [[", ".join(columns), kind] for kind, columns in kinds.items()]
        parts.append(f"Columns of `{name}` (order in the file aside):\n\n{table(['columns', 'type'], rows)}")
    return "\n".join(parts)


# -- diagrams


def diagram(edges: dict[tuple[str, str], list[str]], first: str) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {old} --> {new}: {', '.join(labels)}" for (old, new), labels in edges.items()]
    return "\n".join([*lines, "```", ""])


def from_table(states: dict[tuple[enum.Enum, enum.Enum], enum.Enum], leave_out: enum.Enum | None = None) -> str:
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (old, event), new in states.items():
        if event is not leave_out:
            edges[old.name, new.name].append(event.value)
    return diagram(edges, next(iter(states))[0].name)


def send_states() -> str:
    """Return the diagram of the send states, found by trying every input in every situation of a small queue.

    The states of the flow core are worked out from two facts, so there is no table of arrows to draw; the arrows are
    what `FlowCore` really does, explored with a queue of 0 to 5 messages and marks at 1 (low), 2 (soft) and 4 (hard).
    """
    limits = Limits(messages=AxisLimits(low=1, soft=2, hard=4), hard_policy=HardPolicy.HOLD)
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    open_ = [(FlowCore(limits, 0.0), 0)]
    seen: set[tuple[int, bool, int]] = set()
    while open_:
        core, queued = open_.pop(0)
        if (core._level, core.would_block, queued) in seen:
            continue
        seen.add((core._level, core.would_block, queued))
        for event, after in inputs(queued):
            following = copy.deepcopy(core)
            load = Load(0, after, 0.0) if after else EMPTY_LOAD
            change = following.drained(1.0) if event == "drained" else getattr(following, event)(load, 1.0)
            if change is not None:
                label = label_of(event, change.old, change.new)
                if label not in edges[change.old.name, change.new.name]:
                    edges[change.old.name, change.new.name].append(label)
            open_.append((following, after))
    return diagram(
        dict(sorted(edges.items(), key=lambda item: [SendState[name] for name in item[0]])), SendState.READY.name
    )


def inputs(queued: int) -> list[tuple[str, int]]:
    """Return (input, messages queued after it) for everything that can happen to a queue of `queued` messages."""
    found = [("drained", 0)] if queued else []
    # Several at once stand for one message of many bytes.
    found += [("queued", more) for more in range(queued + 1, 6)]
    if queued:
        found.append(("blocked", queued))
        found += [("dropped", left) for left in range(queued)]
    if queued > 1:
        found += [("sent", left) for left in range(1, queued)]
    return found


def label_of(event: str, old: SendState, new: SendState) -> str:
    if new > old:
        marks = {SendState.SOFT_LIMIT: "any axis at its soft mark", SendState.HARD_LIMIT: "any axis at its hard mark"}
        return marks.get(new, "EAGAIN")
    if event == "drained":
        return "all taken"
    return "all axes at their low mark" if old >= SendState.SOFT_LIMIT else event


def state_table() -> str:
    names = ["none", "soft", "hard"]
    rows = [[name, row[0].name, row[1].name] for name, row in zip(names, _STATE_OF, strict=True)]
    return table(["level reached", "the kernel takes everything", "EAGAIN since the queue was last empty"], rows)


# -- source


def echo_source(first: str, after: str) -> str:
    """Return the part of the echo server from the line that begins with `first` to that with `after`, which is left."""
    text = (ROOT / "servers" / "flowctl_servers" / "echo.py").read_text("utf-8")
    part = text[text.index(f"\n{first}") :].partition(f"\n{after}")[0]
    return f"```python\n{part.strip()}\n```\n"


# -- rooms

FIRST_FILE = re.compile(r"^Begin with `(\w+\.py)`\.$", re.MULTILINE)


def sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).rstrip(".")


def rooms() -> str:
    """Return the folders of flowctl, each with its rule and the file to read first: what their docstrings say."""
    rows = []
    for path in sorted((ROOT / "flowctl").glob("*/**/__init__.py")):
        folder = path.parent.relative_to(ROOT)
        first = FIRST_FILE.search(path.read_text("utf-8"))
        rows.append([f"`{folder}/`", sentence(path), f"`{first[1]}`" if first else ""])
    return table(["room", "what belongs into it", "read first"], rows)


def districts() -> str:
    rows = []
    for path in sorted((ROOT / "flowctl").glob("*/__init__.py")):
        inside = sorted(item.parent.name for item in path.parent.glob("*/__init__.py"))
        rows.append([f"`flowctl/{path.parent.name}/`", sentence(path), ", ".join(f"`{name}`" for name in inside)])
    return table(["folder", "what belongs into it", "rooms in it"], rows)


def sender_members() -> str:
    rows = [[f"`{name}`", item.__doc__.split("\n")[0]] for name, item in vars(Sender).items() if name[0] != "_"]
    return table(["member", "what it does"], rows)


def flat_files() -> str:
    files = sorted(path for path in (ROOT / "flowctl").glob("*.py") if not path.name.startswith("__"))
    return table(["file", "what it is"], [[f"`flowctl/{path.name}`", sentence(path)] for path in files])


GENERATED = {
    "districts": districts,
    "rooms": rooms,
    "flat-files": flat_files,
    "echo-begin": lambda: echo_source("from __future__", "class Room"),
    "echo-room": lambda: echo_source("class Room", "class Peer"),
    "echo-peer": lambda: echo_source("class Peer", "def build"),
    "echo-build": lambda: echo_source("def build", "never"),
    "send-states": send_states,
    "state-table": state_table,
    "default-limits": default_limits,
    "live-policy": live_policy,
    "sender-settings": lambda: settings_table(SenderSettings),
    "admission-limits": lambda: settings_table(AdmissionLimits),
    "work-limits": lambda: settings_table(WorkLimits),
    "socket-options": lambda: settings_table(SocketOptions),
    "cache-limits": lambda: settings_table(CacheLimits),
    "share-settings": lambda: settings_table(ShareSettings),
    "run-rules": lambda: settings_table(
        RunRule, leave_out=frozenset({"step"}), instance=RunRule(on="app/stream", command=("/bin/sh",))
    ),
    "live-config": lambda: settings_table(
        LiveConfig, leave_out=frozenset({"rtmp", "cache", "work", "events", "flights"})
    ),
    "flow-closes": lambda: record_columns("flow_closes"),
    "flow-events": lambda: record_columns("flow_events"),
    "flow-samples": lambda: record_columns("flow_samples"),
    "event-names": event_names,
    "serve-settings": serve_settings,
    "close-reasons": close_reasons,
    "drop-reasons": drop_reasons,
    "sender-members": sender_members,
    "load-profiles": lambda: table(
        ["profile", "what it does", "a sound server"], profile_rows("usage", "explanation", "expectation")
    ),
    "load-hostile": lambda: table(
        ["id", "name", "what it does"], profile_rows("name", "alias", "summary", hostile=True)
    ),
    "load-figures": load_figures,
    "load-columns": load_columns,
    "hostile-table": hostile_table,
    "work-table": work_table,
    "http-attacks": http_attacks_table,
    "hostile-not-possible": hostile_not_possible,
    "wire-limits": lambda: settings_table(WireLimits, leave_out=frozenset({"amf"})),
    "amf-limits": lambda: settings_table(AmfLimits),
    "control-config": lambda: settings_table(ControlConfig, leave_out=frozenset({"limits"})),
    "session-config": lambda: settings_table(ServerSessionConfig),
    "pipeline-sessions": lambda: pipeline_columns("viewers.sessions", sessions="COLUMNS"),
    "pipeline-experience": lambda: "\n".join(
        (
            pipeline_columns("viewers.experience", experience="COLUMNS"),
            pipeline_columns("viewers.ingest", ingest="COLUMNS"),
        )
    ),
    "pipeline-fleet": lambda: pipeline_columns(
        "viewers.fleet", fleet_streams="STREAM_COLUMNS", fleet_subnets="SUBNET_COLUMNS"
    ),
    "pipeline-capacity": lambda: pipeline_columns("capacity.job", capacity_nodes="NODE_COLUMNS"),
    "pipeline-whatif": lambda: pipeline_columns("whatif.job", whatif_choices="CHOICE_COLUMNS"),
    "group-states": lambda: from_table(pollgroup._TABLE),
    "standings": lambda: diagram(
        {(old.name, new.name): [why] for (old, new), why in STEPS.items()}, Standing.GONE.name
    ),
    "connection-states": lambda: from_table(CONNECTION_TABLE, ConnectionInput.FAIL),
    "stream-states": lambda: from_table(STREAM_TABLE),
    "client-states": lambda: from_table(CLIENT_TABLE),
    "diffusion-states": lambda: from_table(protocol.TABLE),
}


def regenerated(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{GENERATED[match[2]]()}{match[3]}", text)


def main() -> None:
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        new = regenerated(text)
        if new != text:
            path.write_text(new, "utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    if not SAMPLE.exists() or SAMPLE.read_text("utf-8") != sample():
        SAMPLE.write_text(sample(), "utf-8")
        sys.stdout.write(f"{SAMPLE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
