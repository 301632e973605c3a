"""A fleet of three live servers with their agents, all processes of their own, one of which is killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from cli_kit import PATIENCE_S, Served, run, start
from e2e_kit import wait_until

from flowctl.control.client import OperationError, call_operation
from flowctl.core.server.bans import BanList
from flowctl.wire.zeromq.curve import KeyPair

ONE, TWO, THREE = "203.0.113.1/32", "203.0.113.0/24", "2001:db8::/64"
MOST_DISK_BYTES = 4 * 1024 * 1024


class Fleet:
    """Servers and agents by the name of their member."""

    def __init__(self, folder: Path, names: str) -> None:
        self.folder = folder
        self.names = names
        self.running: dict[tuple[str, str], Served] = {}
        folder.chmod(0o700)
        members = ""
        for name in names:
            keys = KeyPair.generate()
            keys.write(folder / f"{name}.key")
            members += f'[members.{name}]\naddress = "ipc://{name}.ipc"\nkey = "{keys.public.hex()}"\n'
        for name in names:
            top = (
                f'name = "{name}"\nfolder = "state-{name}"\nserver = "{self.address(name)}"\nkey_file = "{name}.key"\n'
            )
            self.config(name).write_text(top + members)

    def config(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def address(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}.sock"

    def begin(self, names: str) -> None:
        """Start servers and agents, all at once; return when they are ready."""
        started = {}
        for name in names:
            bans = ("--bans", str(self.folder / f"{name}.bans"))
            serve = ("serve", "live", "--host", "127.0.0.1", "--port", "0", "--control", self.address(name), *bans)
            workers = ("--workers", "2") if name == "b" else ()  # an agent sees one server
            started["server", name] = start(*serve, *workers, "--json")
            started["agent", name] = start("fleet", "run", "--config", str(self.config(name)), "--json")
        self.running |= {key: Served(process) for key, process in started.items()}

    def kill(self, name: str) -> None:
        """End a server and its agent as a failure of power would."""
        for what in ("server", "agent"):
            process = self.running.pop((what, name)).process
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def end(self) -> list[int]:
        """End all in order; return their exit statuses."""
        for served in self.running.values():
            served.process.terminate()
        for served in self.running.values():
            served.process.wait(PATIENCE_S)  # a second signal to one that is ending would kill it
            served.stop()
        return [served.status for served in self.running.values()]

    def call(self, name: str, operation: str, **given: object) -> dict:
        return call_operation(self.address(name), operation, given)

    def banned(self, name: str) -> set[str]:
        try:
            return {ban["cidr"] for ban in self.call(name, "bans")["bans"]}
        except OperationError:  # it has only begun
            return set()

    def in_file(self, name: str) -> set[str]:
        file = self.folder / f"{name}.bans"
        return {ban.cidr for ban in BanList.parse(file.read_text()).bans} if file.exists() else set()

    def wait_banned(self, expected: set[str], names: str) -> None:
        for name in names:
            wait_until(lambda name=name: self.banned(name) == expected, f"{expected} at {name}")

    def done(self, name: str) -> Counter:
        """Return how often each was banned or let in at a server since it began."""
        changes = self.call(name, "changes", limit=1000)["changes"]
        return Counter((item["what"], item["detail"].get("cidr")) for item in changes if "file" not in item["what"])

    def status(self, name: str) -> dict:
        status, output, errors = run("fleet", "status", "--config", str(self.config(name)), "--json")
        assert status == 0, errors
        return json.loads(output)

    def nobody_behind(self, name: str) -> dict | None:
        """Return the status of a member to whom all others are the same. None: some are not."""
        found = self.status(name)
        members = found["members"].values()
        return found if all(item["same"] and not item["pending"] for item in members) else None


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path, "abc")
    yield made
    for name in "abc":
        if ("server", name) in made.running:
            made.kill(name)


def test_fleet_when_a_member_is_killed_has_each_ban_once_at_each(fleet):
    """A ban of one server is at all; one that was killed has, back again, what it missed, and each was done once."""
    fleet.begin("abc")
    fleet.call("a", "ban", network=ONE, duration="1h", reason="rude")
    fleet.wait_banned({ONE}, "abc")
    wait_until(lambda: fleet.in_file("c") == {ONE}, "the ban in the file of c, from which it begins again")
    fleet.kill("c")
    fleet.call("a", "ban", network=TWO, action="limit")
    fleet.call("b", "ban", network=THREE)
    fleet.call("b", "unban", network=ONE)
    fleet.call("b", "limits", soft="3MiB,300,3s")
    fleet.wait_banned({TWO, THREE}, "ab")
    fleet.begin("c")
    fleet.wait_banned({TWO, THREE}, "abc")
    soft = fleet.call("b", "limits")["soft"]
    wait_until(lambda: fleet.call("c", "limits")["soft"] == soft, "the limits at c")
    missed = Counter([("ban", TWO), ("ban", THREE), ("unban", ONE), ("limits", None)])
    assert fleet.done("c") == missed
    assert fleet.done("a") == fleet.done("b") == missed + Counter([("ban", ONE)])
    found = wait_until(lambda: fleet.nobody_behind("c"), "nobody is behind")
    assert found["applied"] == {"bans": 2, "lifts": 1, "limits": 1, "local": 0, "refused": 0, "fault": ""}
    status, output, _ = run("fleet", "status", "--config", str(fleet.config("a")))
    assert status == 0
    assert "2 bans, limits" in output
    assert all(len(line) <= 80 for line in output.splitlines())
    assert fleet.end() == [0] * 6
    sizes = {name: sum(path.stat().st_size for path in (fleet.folder / f"state-{name}").iterdir()) for name in "abc"}
    assert max(sizes.values()) < MOST_DISK_BYTES, sizes
    assert run("fleet", "status", "--config", str(fleet.config("a")))[0] == 1
