"""A fleet of three live servers, all processes of their own, one of which is killed and one of which has workers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from cli_kit import PATIENCE_S, Served, run, start
from e2e_kit import wait_until

from flowctl.control.client import OperationError, call_operation
from flowctl.wire.zmtp.keys import KeyPair

ONE, TWO, THREE = "203.0.113.1/32", "203.0.113.0/24", "2001:db8::/64"


class Fleet:
    def __init__(self, folder: Path, names: str) -> None:
        self.folder = folder
        self.running: dict[str, Served] = {}
        folder.chmod(0o700)
        members = ""
        for name in names:
            keys = KeyPair.generate()
            keys.write(folder / f"{name}.key")
            members += f'[members.{name}]\naddress = "ipc://{name}.ipc"\nkey = "{keys.public.hex()}"\n'
        for name in names:
            (folder / f"{name}.toml").write_text(f'name = "{name}"\nkey_file = "{name}.key"\n{members}')

    def address(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}.sock"

    def begin(self, names: str) -> None:
        started = {}
        for name in names:
            own = ("--fleet", str(self.folder / f"{name}.toml"), "--ban-store", str(self.folder / f"{name}.sqlite"))
            serve = ("serve", "live", "--host", "127.0.0.1", "--port", "0", "--control", self.address(name), *own)
            started[name] = start(*serve, *(("--workers", "2") if name == "b" else ()), "--json")
        self.running |= {name: Served(process) for name, process in started.items()}

    def kill(self, name: str) -> None:
        process = self.running.pop(name).process
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()

    def end(self) -> list[int]:
        for served in self.running.values():
            served.process.terminate()
        for served in self.running.values():
            served.process.wait(PATIENCE_S)  # a second signal to one that is ending would kill it
            served.stop()
        return [served.status for served in self.running.values()]

    def call(self, name: str, operation: str, **given: object) -> dict:
        return call_operation(self.address(name), operation, given)

    def bans(self, name: str) -> dict[str, dict]:
        try:
            return {ban["cidr"]: ban for ban in self.call(name, "bans")["bans"]}
        except OperationError:  # it has only begun
            return {}

    def wait_banned(self, expected: set[str], names: str) -> None:
        for name in names:
            wait_until(lambda name=name: self.bans(name).keys() == expected, f"{expected} at {name}")

    def done(self, name: str) -> Counter:
        """Return how often each was banned or let in at a server since it began."""
        changes = self.call(name, "changes", limit=1000)["changes"]
        return Counter((item["what"], item["detail"].get("cidr")) for item in changes)

    def status(self, name: str) -> tuple[int, str]:
        return run("fleet", "status", "--server", self.address(name), "--json")[:2]

    def is_one(self, name: str) -> dict | None:
        """Return the status of a member to whom all others are the same. None: some are not."""
        found = json.loads(self.status(name)[1])
        return found if all(item["same"] and not item["waiting"] for item in found["members"]) else None


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path, "abc")
    yield made
    for name in [*made.running]:
        made.kill(name)


def test_fleet_when_a_member_is_killed_has_the_same_at_each_again(fleet):
    fleet.begin("abc")
    fleet.call("a", "ban", network=ONE, duration="1h", reason="rude", origin="ops")
    fleet.wait_banned({ONE}, "abc")
    assert fleet.bans("a") == fleet.bans("b") == fleet.bans("c")
    assert fleet.bans("c")[ONE]["source"] == "command of ops"
    assert {item["origin"] for item in fleet.call("b", "changes")["changes"]} == {"fleet a"}
    fleet.kill("c")
    fleet.call("a", "ban", network=TWO, action="limit")
    fleet.call("b", "ban", network=THREE)
    fleet.call("b", "unban", network=ONE, origin="night shift")
    fleet.call("b", "limits", soft="3MiB,300,3s")
    fleet.wait_banned({TWO, THREE}, "ab")
    fleet.begin("c")
    fleet.wait_banned({TWO, THREE}, "abc")
    soft = fleet.call("b", "limits")["soft"]
    wait_until(lambda: fleet.call("c", "limits")["soft"] == soft, "the limits at c")
    missed = Counter([("ban", TWO), ("ban", THREE), ("unban", ONE), ("limits", None)])
    assert fleet.done("c") == missed
    (lifted,) = (item for item in fleet.call("c", "changes")["changes"] if item["what"] == "unban")
    assert (lifted["origin"], lifted["detail"]["source"]) == ("fleet b", "night shift")
    assert fleet.done("a") == fleet.done("b") == missed + Counter([("ban", ONE)])
    found = wait_until(lambda: fleet.is_one("c"), "all hold the same")
    assert (found["bans"], found["lifted"], found["limits"], found["strangers"]) == (2, 1, True, 0)
    output = run("fleet", "status", "--server", fleet.address("a"))[1]
    assert "member:     a" in output
    assert "name taken: no" in output
    assert "  duplicates" in output
    assert all(len(line) <= 80 for line in output.splitlines())
    assert fleet.end() == [0] * 3
    fleet.running.clear()
    fleet.begin("a")  # alone: what it was told outlives it
    assert fleet.bans("a").keys() == {TWO, THREE}
    assert fleet.call("a", "limits")["soft"] == soft
    assert fleet.end() == [0]
