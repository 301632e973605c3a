"""Agents beside their servers: each ban once at each, no circles, nobody else's bans. In-process, manual clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from math import inf
from pathlib import Path

import pytest
from fleet_kit import FakeServer

from flowctl.control.fleet.agent import Agent
from flowctl.control.fleet.replica import Letter
from flowctl.control.fleet.stamp import Stamp
from flowctl.control.fleet.store import Store
from flowctl.control.fleet.table import version
from flowctl.control.fleet.values import ban_value
from flowctl.control.fleet.wire import Changes, encode
from flowctl.core.server.bans import Ban
from flowctl.errors import BrokenError, BusyError, ConfigError, FlowctlError

NOW = 1_700_000_000.0
BAN = Ban(cidr="203.0.113.1/32", expires=None)
ONE, TWO, THREE = "203.0.113.1/32", "203.0.113.2/32", "203.0.113.3/32"


class Fleet:
    """Servers with their agents; letters to a member that is down wait, as the Messenger keeps those that last."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.names = names
        self.now = NOW
        self.servers = {name: FakeServer(NOW) for name in names}
        self.agents: dict[str, Agent] = {}
        self.stores: dict[str, Store] = {}
        self.mail: list[tuple[str, Letter]] = []
        for name in names:
            self.begin(name)

    def begin(self, name: str) -> None:
        """Start an agent."""
        store = self.stores[name] = Store(self.folder / name)

        async def call(operation, arguments):
            return await self.servers[name].call(operation, arguments)

        others = [other for other in self.names if other != name]
        self.agents[name] = Agent(
            name, others, store, call, lambda letter: self.mail.append((name, letter)), lambda: self.now
        )

    def kill(self, name: str) -> None:
        """End an agent; only what it stored is left."""
        del self.agents[name]
        self.stores.pop(name).close()

    def run(self, rounds: int = 3) -> None:
        """Let everything happen that is going to."""
        asyncio.run(self._run(rounds))

    async def _run(self, rounds: int) -> None:
        for _ in range(rounds):
            for server in self.servers.values():
                server.now = self.now
            for agent in self.agents.values():
                agent.tick()
            for _ in range(60):
                more = [await agent.step() for agent in self.agents.values()]
                more.append(self._deliver())
                if not any(more):
                    break
            else:
                raise AssertionError("it does not come to rest")
            self.now += 5

    def _deliver(self) -> bool:
        mail, self.mail = self.mail, []
        for sender, letter in mail:
            if letter.to in self.agents:
                self.agents[letter.to].received(sender, letter.octets)
            elif letter.lasting:
                self.mail.append((sender, letter))
        return len(self.mail) < len(mail)

    def banned(self) -> list[set[str]]:
        return [server.banned() for server in self.servers.values()]


@pytest.fixture
def fleet(tmp_path: Path):
    made = Fleet(tmp_path, "a", "b", "c")
    made.run()
    yield made
    for store in made.stores.values():
        store.close()


def test_ban_when_made_at_one_server_is_made_once_at_each(fleet):
    """A ban of one server is made at the others once, under the agent's name, and comes back nowhere."""
    fleet.servers["a"].do_ban(ONE, 3600, "why")
    fleet.run()
    assert fleet.banned() == [{ONE}] * 3
    assert [server.count("ban", ONE) for server in fleet.servers.values()] == [1, 1, 1]
    assert [item[2] for item in fleet.servers["b"].log] == ["fleet b"]
    (ban,) = fleet.servers["c"].bans.values()
    assert ban.reason == "why"
    assert abs(ban.expires.timestamp() - NOW - 3615) < 20
    assert fleet.agents["a"].keeper.applied.local == 1


def test_unban_when_made_at_another_server_is_made_once_at_each(fleet):
    """A ban is lifted at all servers, also by one that did not make it."""
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    fleet.servers["c"].do_unban(ONE)
    fleet.run()
    assert fleet.banned() == [set()] * 3
    assert [server.count("unban", ONE) for server in fleet.servers.values()] == [1, 1, 1]


@pytest.mark.parametrize("moment", ["bans", "changes"])
def test_ban_when_made_while_the_agent_lists_its_server_is_lifted_with_the_fleets(fleet, moment):
    """The list may have it or not: it is a command's all the same, and an unban elsewhere reaches it."""
    server = fleet.servers["a"] = fleet.servers["a"].restarted()  # the agent lists its bans anew
    server.after[moment] = lambda: server.do_ban(ONE, 3600)
    fleet.run()
    assert fleet.banned() == [{ONE}] * 3
    fleet.servers["c"].do_unban(ONE)
    fleet.run()
    assert fleet.banned() == [set()] * 3
    assert [server.count("unban", ONE) for server in fleet.servers.values()] == [1, 1, 1]


def test_bans_when_their_orders_are_carried_out_late_end_when_they_were_to(fleet):
    """However long an order was on its way, the ban ends at the same second everywhere, and nobody lifts it."""
    late = fleet.servers["b"]
    call = late.call

    async def slow(operation, arguments):
        if operation == "ban":
            late.now += 7  # its clock goes on while the order waits
        return await call(operation, arguments)

    late.call = slow
    networks = [f"198.51.100.{number}/32" for number in range(100)]
    for number, network in enumerate(networks):
        fleet.servers["a"].do_ban(network, 36_000 + number)
    fleet.run(rounds=8)
    ends = [{ban.cidr: ban.expires for ban in server.bans.values()} for server in fleet.servers.values()]
    assert len(ends[0]) == len(networks)
    assert ends[0] == ends[1] == ends[2]
    assert [item for server in fleet.servers.values() for item in server.log if item[0] == "unban"] == []


def test_limits_when_changed_at_one_server_are_given_once_to_each(fleet):
    """Limits that a command gives one server are given to the others; a server that is started anew gets them."""
    fleet.servers["b"].do_limits(soft="9MiB,0,0")
    fleet.run()
    assert [server.limits["soft"] for server in fleet.servers.values()] == ["9MiB,0,0"] * 3
    assert [len(server.log) for server in fleet.servers.values()] == [1, 1, 1]
    fleet.servers["b"] = fleet.servers["b"].restarted()
    fleet.run()
    assert fleet.servers["b"].limits["soft"] == "9MiB,0,0"
    assert len(fleet.servers["b"].log) == 1


@pytest.mark.parametrize("file", [None, []], ids=["no-ban-file", "ban-file"])
def test_member_when_killed_and_started_anew_has_what_it_missed_once(fleet, file):
    """A server and its agent miss bans and an unban: both come back, and each is made once."""
    fleet.servers["c"].file = file
    fleet.servers["a"].do_ban(ONE)
    fleet.servers["b"].do_ban(TWO)
    fleet.run()
    fleet.kill("c")
    fleet.servers["a"].do_unban(TWO)
    fleet.servers["a"].do_ban(THREE)
    fleet.run()
    server = fleet.servers["c"] = fleet.servers["c"].restarted()
    fleet.begin("c")
    fleet.run()
    assert fleet.banned() == [{ONE, THREE}] * 3
    assert server.count("ban", THREE) == 1
    assert server.count("ban", TWO) == 0
    assert server.count("ban", ONE) == (1 if file is None else 0)
    assert server.count("unban", TWO) == (0 if file is None else 1)
    assert [item.count("ban", ONE) for item in (fleet.servers["a"], fleet.servers["b"])] == [1, 1]


def test_server_when_changed_while_its_agent_was_away_is_heard(fleet):
    """Commands that a server was given while its agent was down go to the fleet once it is back."""
    fleet.servers["c"].do_ban(ONE)
    fleet.run()
    fleet.kill("c")
    fleet.servers["c"].do_unban(ONE)
    fleet.servers["c"].do_ban(TWO)
    fleet.begin("c")
    fleet.run()
    assert fleet.banned() == [{TWO}] * 3


def test_agent_when_its_server_is_down_goes_on_and_tells_it_later(fleet):
    """A server that is away gets what was decided meanwhile; its agent says why it is not reached."""
    fleet.servers["b"].down = BrokenError("nobody listens")
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    assert fleet.banned() == [{ONE}, set(), {ONE}]
    assert fleet.agents["b"].status(lambda name: 0)["server"]["fault"] == "nobody listens"
    fleet.servers["b"] = fleet.servers["b"].restarted()
    fleet.run()
    assert fleet.banned() == [{ONE}] * 3
    assert fleet.agents["b"].status(lambda name: 0)["server"] == {"reached": True, "fault": None, "waiting": 0}


def test_bans_of_a_file_when_the_fleet_lifts_the_same_network_stay(fleet):
    """The fleet lifts what it put there, and never what somebody else's ban file says."""
    fleet.servers["b"].write_file([Ban(cidr=ONE, expires=None, reason="of the file", score=3.0)])
    fleet.run()
    assert fleet.banned() == [set(), {ONE}, set()]  # a file is its server's own
    fleet.servers["a"].do_ban(ONE, 3600)
    fleet.run()
    fleet.servers["a"].do_unban(ONE)
    fleet.run()
    assert fleet.banned() == [set(), {ONE}, set()]
    assert fleet.servers["b"].count("unban", ONE) == 0


def test_ban_of_the_fleet_when_a_file_is_written_over_is_made_again(fleet):
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    fleet.servers["b"].write_file([Ban(cidr=TWO, expires=None)])
    fleet.run()
    assert fleet.banned() == [{ONE}, {ONE, TWO}, {ONE}]


def test_ban_when_made_shorter_on_purpose_is_shorter_everywhere(fleet):
    """Lifted and made again for a shorter time: the other servers end the longer one."""
    fleet.servers["a"].do_ban(ONE, 36_000)
    fleet.run()
    fleet.servers["a"].do_unban(ONE)
    fleet.servers["a"].do_ban(ONE, 60)
    fleet.run()
    ends = [next(iter(server.bans.values())).expires for server in fleet.servers.values()]
    assert max(ends) < datetime.fromtimestamp(fleet.now + 120, tz=UTC)
    fleet.now += 120
    fleet.run()
    assert fleet.banned() == [set()] * 3
    assert len(fleet.agents["a"].mirror.present) == len(fleet.agents["b"].mirror.known) == 0


def test_commands_when_two_servers_are_told_the_same_do_not_go_round(fleet):
    """The same ban made at two servers at once ends up once at each, and nothing goes on happening."""
    fleet.servers["a"].do_ban(ONE, 3600)
    fleet.servers["b"].do_ban(ONE, 3600)
    fleet.run()
    before = [len(server.log) for server in fleet.servers.values()]
    fleet.run(20)
    assert [len(server.log) for server in fleet.servers.values()] == before == [1, 1, 1]


def test_agent_when_it_missed_more_changes_than_are_kept_compares(fleet):
    """A server whose list of changes does not go back far enough is listed: what is missing there is made again."""
    server = fleet.servers["b"]
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    fleet.kill("b")
    server.kept = 2
    for number in range(5):
        server.do_ban(f"10.0.0.{number}/32", origin="somebody")
    fleet.begin("b")
    fleet.run()
    assert fleet.banned()[0] == {ONE, "10.0.0.3/32", "10.0.0.4/32"}


def test_ban_of_the_fleet_when_the_agent_ends_before_it_hears_of_it_is_lifted_with_the_others(fleet):
    """An agent that is killed right after it told its server knows afterwards that the ban is the fleet's."""
    server = fleet.servers["c"]
    server.file, server.now = [], fleet.now
    made = server.do_ban

    def ban_and_end(**arguments):
        made(**arguments)
        raise BrokenError("killed")

    server.do_ban = ban_and_end
    fleet.servers["a"].do_ban(ONE, 3600, "why")
    for name in "ab":
        asyncio.run(fleet.agents[name].step())
    fleet._deliver()
    asyncio.run(fleet.agents["c"].step())
    assert server.banned() == {ONE}
    fleet.kill("c")
    fleet.servers["a"].do_unban(ONE)
    fleet.run()
    fleet.servers["c"] = server.restarted()
    fleet.begin("c")
    fleet.run()
    assert fleet.banned() == [set()] * 3


def test_orders_when_refused_are_given_again_after_a_while(fleet):
    """An order that the server refuses is told of, and given again after a minute, not at once."""
    fleet.servers["b"].refuses = "ban"
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    applied = fleet.agents["b"].keeper.applied
    assert (applied.refused, applied.fault) == (1, "it will not")
    fleet.servers["b"].refuses = ""
    fleet.run()
    assert fleet.banned() == [{ONE}, set(), {ONE}]
    fleet.now += 60
    fleet.run()
    assert fleet.banned() == [{ONE}] * 3


def test_orders_when_there_are_many_are_given_in_steps(fleet):
    """A new server gets hundreds of bans, each once, with looks at its changes in between."""
    for number in range(300):
        fleet.servers["a"].do_ban(f"10.0.{number >> 8}.{number & 255}/32")
    fleet.run(6)
    assert all(len(server.log) == len(server.banned()) == 300 for server in fleet.servers.values())
    assert fleet.agents["c"].keeper.applied.bans == 300


def test_orders_when_thousands_wait_let_a_new_one_go_first(fleet):
    """A ban that is made while a new server is still told of old ones is made there at once."""
    for number in range(100):
        fleet.servers["a"].do_ban(f"10.0.0.{number}/32")
    fleet.run()
    fleet.kill("c")
    fleet.servers["c"] = fleet.servers["c"].restarted()
    fleet.begin("c")
    agent = fleet.agents["c"]

    async def two_steps() -> None:
        await agent.step()
        fleet.now += 5
        await agent.step()
        entry = version(Stamp(int(fleet.now * 1000), 0, "a"), ban_value(BAN), inf, None, fleet.now)
        agent.received("a", encode(Changes([(f"ban {ONE}", entry)])))
        await agent.step()

    asyncio.run(two_steps())
    banned = [subject for _, subject, _ in fleet.servers["c"].log]
    assert len(banned) == 32
    assert banned.index(ONE) == 16


def test_answers_when_not_understood_are_a_fault_and_no_end(fleet):
    """A server of another version is told of; the agent goes on with the others."""

    async def nonsense(operation, arguments):
        return {"run": 1}

    fleet.servers["b"].call = nonsense
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    assert "not understood" in fleet.agents["b"].server_fault
    assert fleet.banned() == [{ONE}, set(), {ONE}]


def test_status_when_asked_for_says_who_is_behind(fleet):
    """The status names each member, whether it has the same, and what waits for it."""
    fleet.servers["a"].do_ban(ONE)
    fleet.run()
    fleet.kill("c")
    fleet.servers["a"].do_ban(TWO)
    fleet.run()
    status = fleet.agents["a"].status({"b": 0, "c": 1}.__getitem__)
    assert status["entries"] == {"bans": 2, "limits": False, "remembered": 0}
    assert status["members"]["b"]["same"] is True
    assert status["members"]["b"]["heard_s_ago"] == 5
    assert status["members"]["c"]["pending"] == 1
    assert status["members"]["c"]["same"] is False
    assert status["members"]["c"]["heard_s_ago"] == 20
    assert status["applied"] == {"bans": 0, "lifts": 0, "limits": 0, "local": 2, "refused": 0, "fault": ""}


def test_store_when_used_twice_or_damaged_says_so(tmp_path):
    """A folder belongs to one agent, and a file that is none of ours is not written over."""
    first = Store(tmp_path / "x")
    with pytest.raises(BusyError):
        Store(tmp_path / "x")
    first.close()
    Store(tmp_path / "x").close()
    (tmp_path / "x" / "table.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(FlowctlError, match="damaged"):
        Store(tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        Store(tmp_path / "file" / "x")
