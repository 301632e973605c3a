"""Operations over the links of workers: who is asked, when, and what is kept for those that come later."""

from __future__ import annotations

import json

import pytest
from live_kit import config

from flowctl.control.operations import BY_NAME, Permission, read_arguments
from flowctl.core.loop.locks import OwnedLock
from flowctl.errors import RpcError, RpcTimeoutError
from flowctl.live.bans.penalties import verdict_line, verdict_of
from flowctl.live.changes import Changes
from flowctl.live.cluster.workers.inforce import InForce
from flowctl.live.cluster.workers.operating import (
    Operating,
    bans_of_lines,
    behaving,
    carry_out,
    punished,
    put_in_force,
)
from flowctl.live.judging.penalties import Offence, Verdict
from flowctl.live.server import LiveServer
from flowctl.nodes.rpc.peers.peer import ConnectionID


class Worker:
    """A process with a link: a live server that is not started, which carries out what it is asked for."""

    def __init__(self, number, serial=0):
        self.number, self.serial = number, serial or number
        self.conn = ConnectionID(self.serial)
        self.server = LiveServer(config(port=0))
        self.asked = []
        self.fault = None
        self.meanwhile = None

    def get(self):
        if self.meanwhile is not None:
            self.meanwhile()
        if self.fault is not None:
            raise self.fault
        return [self.does(self.server, self.asked[-1])]


class Crew:
    """Workers and what operates them; stands for the node between them too."""

    def __init__(self, count):
        self.workers = [Worker(number) for number in range(1, count + 1)]
        self.expected, self.drained = [], []
        self.lock = OwnedLock()
        self.in_force = InForce()
        self.changes = Changes(lambda where, error: None)
        self.operating = Operating(
            self,
            lambda: self.workers,
            lambda: self.expected,
            lock=self.lock,
            in_force=self.in_force,
            changes=self.changes,
            drains=lambda: self.drained.append(True),
        )

    def request_future(self, conn, command, call, *, timeout_s):
        does = {"worker.operate": carry_out, "worker.behaving": behaving, "worker.punish": punished}[command]
        assert timeout_s > 0
        (worker,) = (item for item in self.workers if item.conn == conn)
        worker.asked.append(call)
        worker.does = does
        return worker

    def call(self, name, **given):
        """Return what an operation comes to."""
        return json.loads(self.operating.answer(name, json.dumps(given).encode(), Permission.ADMIN, "me"))


@pytest.fixture
def crew():
    made = Crew(2)
    yield made
    for worker in made.workers:
        worker.server.stop()


def banned(worker):
    return [item.cidr for item in worker.server.admission.bans.bans]


def test_change_when_a_worker_comes_meanwhile_reaches_it_too(crew):
    """A worker that gets its link while others are asked is asked as well, before the operation is done."""
    late = Worker(3)

    def comes():
        if late not in crew.workers:
            crew.workers.append(late)

    crew.workers[1].meanwhile = comes
    assert crew.call("ban", network="192.0.2.1")["result"]["cidr"] == "192.0.2.1/32"
    assert [banned(item) for item in crew.workers] == [["192.0.2.1/32"]] * 3
    assert [len(item.asked) for item in crew.workers] == [1, 1, 1]


def test_change_when_it_is_done_is_one_and_is_there_for_later_workers(crew):
    crew.call("limits", soft="1MiB,100,2s", origin="night shift")
    crew.call("ban", network="192.0.2.1", duration="1h", reason="rude")
    crew.call("ban", network="192.0.2.2")
    crew.call("unban", network="192.0.2.2")
    found = crew.call("changes")["result"]
    assert [(item["what"], item["origin"]) for item in found["changes"]] == [
        ("limits", "night shift"),
        ("ban", "me"),
        ("ban", "me"),
        ("unban", "me"),
    ]
    later = Worker(1, serial=3)
    crew.workers.append(later)
    put_in_force(later.server, crew.in_force.orders(), bans_of_lines(crew.in_force.page()))
    assert banned(later) == ["192.0.2.1/32"]
    assert later.server.limits == crew.workers[0].server.limits
    first, second = (item.server.admission.bans.bans for item in (crew.workers[0], later))
    assert first == second


def test_change_when_it_is_refused_everywhere_is_not_in_force(crew):
    """What no worker could do is an error, changes nothing and is kept for nobody."""
    assert crew.call("unban", network="192.0.2.1")["error"]["code"] == "NOT_POSSIBLE"
    assert crew.call("limits", soft="1MiB,100,2s", hard="1KiB,1,1s")["error"]["code"] == "WRONG_ARGUMENT"
    assert crew.changes.version == 0
    assert crew.in_force.orders() == []


def test_change_when_a_worker_does_not_answer_is_the_others_with_a_warning(crew):
    """One that is silent is named; one that has ended is not, since its successor is told what is in force."""
    crew.workers[1].fault = RpcTimeoutError("too late", code="TIMEOUT")
    found = crew.call("ban", network="192.0.2.1")["result"]
    assert found["warning"] == "worker 2 has not answered within 10 s, it may do it yet"
    crew.workers[1].fault = RpcError("gone", code="DISCONNECTED")
    assert "warning" not in crew.call("ban", network="192.0.2.3")["result"]
    crew.workers[0].fault = crew.workers[1].fault
    assert crew.call("kick", peer="192.0.2.3")["error"]["code"] == "BUSY"


def test_stats_when_a_worker_is_down_name_it(crew):
    """A worker without a link has a line that says what it does, and so does one that is silent."""
    crew.expected = [1, 2, 3]
    crew.workers[1].fault = RpcTimeoutError("too late", code="TIMEOUT")
    found = crew.call("stats")["result"]
    assert [(row["worker"], row["state"]) for row in found["server"]["workers"]] == [
        (1, "serving"),
        (2, "has not answered within 10 s, it may do it yet"),
        (3, "being started"),
    ]
    assert "worker 3 is being started" in found["warning"]


def test_stats_when_a_worker_ends_while_it_is_asked_name_it(crew):
    """A worker whose link breaks before it has answered has a line too: it is started again."""
    crew.expected = [1, 2]
    crew.workers[1].fault = RpcError("gone", code="DISCONNECTED")
    found = crew.call("stats")["result"]
    rows = [(row["worker"], row["state"]) for row in found["server"]["workers"]]
    assert rows == [(1, "serving"), (2, "being started")]
    assert found["warning"] == "worker 2 is being started"


def test_change_of_a_file_when_all_workers_take_it_is_one(crew):
    """The same contents of a file are one change, whichever worker saw them first; other contents are another."""
    for digest in ("a", "a", "b", "b"):
        crew.operating.note_file("bans file", {"bans": 1}, digest)
    crew.operating.note_file("limits file", {}, "b")
    assert [item.what for item in crew.changes.since(0)[0]] == ["bans file", "bans file", "limits file"]


def test_drain_when_it_is_asked_for_begins_before_the_workers_do(crew):
    """The supervisor lets go of the port first: a worker that is started meanwhile would not know of it."""
    crew.workers[0].meanwhile = lambda: crew.drained.append(False)
    crew.call("drain", within="1s")
    assert crew.drained == [True, False]


def test_operations_when_named_in_the_table_can_be_asked_of_workers(crew):
    """Every operation has values that go over the link and come back the same."""
    needed = {"network": "192.0.2.1", "peer": "192.0.2.1"}
    for operation in BY_NAME.values():
        names = {item.name for item in operation.arguments}
        asked = read_arguments(operation.name, operation.arguments, {k: needed[k] for k in names & needed.keys()})
        assert json.loads(json.dumps(asked)) == asked


def test_change_of_the_ban_file_when_a_ban_was_the_cause_is_none(crew):
    """A worker that reads the file after another has written a ban to it tells of no other change than the ban."""
    digest = ""  # of servers without a file
    crew.workers[1].meanwhile = lambda: crew.operating.note_file("bans file", {}, digest)
    crew.call("ban", network="192.0.2.1")
    crew.operating.note_file("bans file", {}, digest)
    crew.operating.note_file("bans file", {}, "of somebody else")
    assert [item.what for item in crew.changes.since(0)[0]] == ["ban", "bans file"]


def test_penalty_when_others_behave_at_another_worker_is_a_limit_everywhere(crew, monkeypatch):
    """The supervisor decides by who behaves at any worker, and what it decides is in force in all and one change."""
    verdict = Verdict("192.0.2.1/32", Offence.REFUSED, 2, {"login": 600.0}, "600 in 5 min", wide=False)
    crew.operating.punish([verdict])
    assert [ban.action.value for item in crew.workers for ban in item.server.admission.bans.bans] == ["ban", "ban"]
    monkeypatch.setattr(crew.workers[1].server, "end_guilty", lambda verdicts: [3 for _ in verdicts])
    crew.operating.punish([verdict._replace(cidr="192.0.2.9/32")])
    for item in crew.workers:
        found = item.server.admission.ban_of("192.0.2.9")
        assert (found.action.value, found.source) == ("limit", "penalty")
        assert "shared: 3 other connections" in found.reason
    changes = crew.call("changes")["result"]["changes"]
    assert [(item["what"], item["origin"]) for item in changes] == [("ban", "penalty"), ("ban", "penalty")]
    assert len(crew.in_force.page()) == 2


def test_verdict_when_it_went_over_the_link_is_the_same():
    """A worker tells the supervisor what it saw, in JSON."""
    verdict = Verdict("2001:db8::/48", Offence.CONTROL, 1, {"control messages": 9.5}, "9 in 1 s", wide=True)
    assert verdict_of(json.loads(json.dumps(verdict_line(verdict)))) == verdict
