"""The operations as commands, on a live server that is a process of its own."""

from __future__ import annotations

import json
import os
import socket
import time
from types import SimpleNamespace

import pytest
from cli_kit import PATIENCE_S, run, served
from e2e_kit import Clients, wait_until

from flowctl.cli import main
from flowctl.cli.control import operations
from flowctl.control import client, place
from flowctl.control.client import OperationError, call_operation
from flowctl.nodes.rpc.node import RpcNode
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource

OFF = ("--soft", "0,0,0", "--hard", "0,0,0", "--stuck", "0")


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "flowctl"


@pytest.fixture
def clients():
    with Clients() as clients:
        yield clients


@pytest.fixture
def here(capsys):
    """Return a function that runs a command in this process, which takes a tenth of the time; as `run`."""

    def command(*arguments):
        capsys.readouterr()
        status = main(arguments)
        return (status, *capsys.readouterr())

    return command


@pytest.fixture
def asked(here):
    """Return a function that runs a command that succeeds, and returns its answer."""

    def ask(*arguments):
        status, output, errors = here(*arguments, "--json")
        assert status == 0, errors
        return json.loads(output)

    return ask


def quickly(name, **given):
    return call_operation(place.find_server(None), name, given)


def viewers(count):
    found = wait_until(
        lambda: (shown := quickly("stats", viewers="all"))["found"]["viewers"] == count and (shown,), f"{count} viewers"
    )[0]
    return [viewer["connection"] for viewer in found["viewers"]]


def test_operations_when_called_as_commands_do_what_they_say(runtime, clients, tmp_path, here, asked):
    bans = tmp_path / "bans.jsonl"
    with served("live", *OFF, "--bans", str(bans)) as server:
        there = SimpleNamespace(address=("127.0.0.1", server.ready["port"]))
        clients.publish(there, SyntheticSource(video_bit_rate=4_000_000, key_interval_s=1.0))
        clients.play(there)
        slow = clients.play(there, PlayProfile(stall_after_s=0.1))
        viewers(2)
        number = wait_until(lambda: quickly("stats")["viewers"], "the slow one")[0]["connection"]
        assert any(viewer["connection"] == number for viewer in asked("stats", "--viewers", "all")["viewers"])
        assert [row["stream"] for row in asked("streams")["streams"]] == ["live/stream"]
        assert asked("connections", "--state", "slow")["connections"][0]["connection"] == number
        assert asked("connections", str(number))["connection"]["ledger"]
        status, output, _ = run("stats")
        assert status == 0
        assert "link: " in output or "to blame: peer's line" in output  # as far as there is room
        assert asked("limits", str(number))["soft"] == "0,0,0"
        asked("limits", str(number), "--soft", "32KiB,10", "--hard", "1GiB,1000000")
        ledger = wait_until(lambda: len(found := shown_ledger(number)) > 1 and found, "a change of its state")
        assert "SOFT_LIMIT" in str(ledger), ledger
        assert asked("kick", str(number), "--reason", "too slow")["connections"] == [number]
        wait_until(lambda: slow.end is not None, "its end")
        assert asked("ban", "127.0.0.1", "--duration", "1h", "--reason", "rude")["ended"] == 2
        viewers(0)
        assert turned_away(there.address)
        assert "rude" in here("bans")[1]
        assert asked("reload")["bans"]["state"] == "absent"
        assert len(asked("unban", "127.0.0.1")["lifted"]) == 1
        assert not bans.exists()
        clients.play(there)
        viewers(1)
        assert [item["what"] for item in asked("changes")["changes"]] == ["ban", "unban"]
        status, output, _ = run("drain", "--within", "0", "--json")
        assert (status, json.loads(output)["draining"]) == (0, True)
        assert server.process.wait(PATIENCE_S) == 0
        server.stop()
    assert "by an operator: too slow" in server.log
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_events_when_followed_go_on_from_the_cursor_until_interrupted(form, here, monkeypatch):
    """They stand under one head, and what was gone before it could be read is told."""
    begin = {"at": 0.0, "what": "publish", "connection": 3, "peer": "192.0.2.1:5"}
    answers = {
        "": {"events": [begin], "cursor": "a:1", "lost": 0},
        "a:1": {"events": [], "cursor": "a:2", "lost": 0},
        "a:2": {"events": [begin | {"what": "close", "reason": "idle"}], "cursor": "a:9", "lost": 6},
    }

    def call(_address, _name, given, **_settings):
        if given.get("since") not in answers:
            raise KeyboardInterrupt
        return answers[given["since"]]

    monkeypatch.setattr(client, "call_operation", call)
    monkeypatch.setattr(place, "find_server", lambda _: "ipc:///nowhere")
    monkeypatch.setattr(operations, "_FOLLOW_S", 0.0)
    status, output, errors = here("events", "--follow", "--since", "", *form)
    assert (status, errors) == (0, "warning: 6 events were gone before they could be read\n")
    if form:
        assert [json.loads(line)["what"] for line in output.splitlines()] == ["publish", "close"]
    else:
        first = "1970-01-01T00:00:00Z"
        assert [line.split()[0] for line in output.splitlines()] == ["at", first, first]
        assert output.split()[-1] == "idle"


def shown_ledger(number):
    """Return what was done to a connection, in words, from its new limits on."""
    ledger = quickly("connections", connection=number)["connection"]["ledger"]
    places = [at for at, entry in enumerate(ledger) if entry["what"] == "limits"]
    return ledger[places[-1] :] if places else []


def turned_away(address):
    """Return whether a connection is ended without a word, be it while it is being made."""
    try:
        with socket.create_connection(address, PATIENCE_S) as sock:
            return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_commands_when_they_cannot_be_carried_out_say_why_and_what_to_do(runtime, tmp_path, here, asked, monkeypatch):
    assert here("stats")[::2] == (
        1,
        """error: no server of this user runs on this machine
hint: start one with flowctl serve live, or name one with --server ADDRESS
""",
    )
    assert here("kick", "first")[0] == 2
    assert here("stats", "--server", "ipc:///nowhere.sock")[::2] == (
        1,
        "error: no server listens at /nowhere.sock\nhint: is it running? flowctl serve live starts one\n",
    )
    limits = tmp_path / "limits.toml"
    limits.write_text('version = 1\n[limits]\nsoft = "1MiB,100"\n')
    with served("live", "--limits", str(limits)) as first, served("live") as second:
        status, _, errors = here("stats")
        assert status == 1
        assert "2 servers run here" in errors
        assert str(first.ready["port"]) in errors
        limits.write_text('version = 1\n[limits]\nsoft = "much"\n')
        status, output, errors = here("reload", "--server", str(first.ready["port"]))
        assert (status, "invalid" in output) == (1, True)
        assert f"error: {limits}, line 3" in errors
        monkeypatch.setenv("FLOWCTL_SERVER", str(second.ready["port"]))
        status, _, errors = here("reload")
        assert (status, errors.splitlines()[1]) == (1, "hint: start it with --config, --limits or --bans")
        status, output, errors = here("rpc", "call", str(second.ready["port"]), "flow.stats", '{"viewers": "none"}')
        assert (status, json.loads(output)["result"]["viewers"]) == (0, [])
        assert here("rpc", "call", str(second.ready["port"]), "flow.fly")[0] == 1
        described = asked("rpc", "describe", str(second.ready["port"]))
        assert described == asked("rpc", "describe")
        refused = call_as_another_user(f"ipc://{next(runtime.glob('*.sock'))}")
    assert refused is None or refused.code == "FORBIDDEN"


def call_as_another_user(address):
    """Return what a user of this machine is told who is not the server's. None: only root can be another user."""
    if os.geteuid() != 0:
        return None
    os.seteuid(65534)
    try:
        call_operation(address, "stats", {})
    except OperationError as error:
        return error
    finally:
        os.seteuid(0)
    raise AssertionError("another user was let in")


def test_operations_when_the_server_is_elsewhere_take_a_key_that_it_knows(runtime, tmp_path, here, asked, monkeypatch):
    public = {name: asked("rpc", "keygen", str(tmp_path / name))["public"] for name in ("server", "admin", "stranger")}
    clients = tmp_path / "clients"
    clients.write_text(f"{public['admin']} admin night shift\n")
    settings = ("--control-keys", str(tmp_path / "server"), "--control-clients", str(clients))
    with served("live", "--control", "tcp://127.0.0.1:*", *settings) as server:
        [bound] = server.ready["control"]
        monkeypatch.setenv("FLOWCTL_SERVER", f"{bound.replace('tcp:', 'curve:')}/{public['server']}")
        monkeypatch.setenv("FLOWCTL_KEY", str(tmp_path / "admin"))
        assert asked("ban", "192.0.2.1")["cidr"] == "192.0.2.1/32"
        assert asked("changes")["changes"][0]["origin"] == "night shift"
        status, _, errors = here("stats", "--key", str(tmp_path / "stranger"), "--timeout", "1s")
        assert status == 1
        assert "does not let this caller in" in errors
        assert list(runtime.glob("*")) == []
    status, _, errors = run("serve", "live", "--port", "0", "--control", "tcp://127.0.0.1:*")
    assert status == 2
    assert "control_keys is missing: anybody could operate the server" in errors


def test_call_when_the_server_does_not_answer_in_time_says_so(tmp_path, here):
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen(8)
        begun = time.monotonic()
        status, _, errors = here("stats", "--server", str(path), "--timeout", "200ms")
    assert status == 1
    assert "does not answer" in errors
    assert time.monotonic() - begun < PATIENCE_S


def test_describe_when_the_server_is_another_node_shows_its_commands(tmp_path, here):
    async def described(message):
        return json.dumps({"commands": [{"name": "echo.say", "access": "none", "summary": "Say it again."}]})

    node = RpcNode()
    node.add_category("rpc")
    node.add_request_command("rpc", "describe", described)
    path = tmp_path / "node.sock"
    node.listen_plain(f"ipc://{path}")
    node.start()
    try:
        assert here("rpc", "describe", str(path)) == (0, "echo.say (none): Say it again.\n", "")
    finally:
        node.stop()


FORGED = "\x1b]0;mine\x07\u202ewords\nerror: forged"


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"code": FORGED, "message": FORGED, "hint": FORGED}},
        {"error": {"code": "WRONG_ARGUMENT", "message": "x" * 500_000}},
        {"result": {"operations": [{"name": FORGED, "permission": FORGED, "summary": FORGED}]}},
        {"result": {"operations": [{"name": "x", "permission": "x", "summary": "x", "arguments": [{"default": []}]}]}},
        {"result": {"operations": 5}},
        {"result": {}},
    ],
)
def test_answers_when_a_server_forges_them_stay_on_their_lines(tmp_path, here, answer):
    async def described(message):
        return json.dumps(answer)

    node = RpcNode()
    node.add_category("flow")
    node.add_request_command("flow", "describe", described)
    path = tmp_path / "node.sock"
    node.listen_plain(f"ipc://{path}")
    node.start()
    try:
        _, shown, errors = here("rpc", "describe", str(path))
    finally:
        node.stop()
    lines = (shown + errors).splitlines()
    assert len(lines) <= 2
    assert not any(line.startswith("error: forged") or "\x1b" in line or len(line) > 3000 for line in lines)
    assert "bug of flowctl" not in errors


def test_keygen_when_asked_makes_a_file_for_its_owner_and_shows_the_public_key(tmp_path, here, asked):
    path = tmp_path / "server.key"
    found = asked("rpc", "keygen", str(path))
    assert len(bytes.fromhex(found["public"])) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    status, output, errors = here("rpc", "keygen", str(path))
    assert (status, output) == (2, "")
    assert "File exists" in errors
