"""Operations over the links of workers: who is asked, when, and what is kept for those that come later."""

from __future__ import annotations

import json
import socket
import time

import pytest
from live_kit import config

from flowctl.control import effects
from flowctl.control.operations import BY_NAME, Permission, read_arguments
from flowctl.core.loop.locks import OwnedLock
from flowctl.core.server.bans import Ban, BanList
from flowctl.errors import RpcError, RpcTimeoutError
from flowctl.live.bans.book import BanBook
from flowctl.live.bans.penalties import overflow_line, overflow_of
from flowctl.live.bans.words import Stamp, Word
from flowctl.live.changes import Changes
from flowctl.live.cluster.workers.operating import MOST_PAGE_WORDS, WorkerOperations, behaving, carry_out, take_words
from flowctl.live.judging.penalties import Offence, Overflow
from flowctl.live.server import LiveServer
from flowctl.nodes.rpc.message import parts_of
from flowctl.nodes.rpc.peers.peer import ConnectionID

NOW_MS = int(time.time() * 1000)


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


def told(server, call):
    return str(take_words(server, call)).encode()


class Crew:
    """Workers and what operates them; stands for the node between them too."""

    def __init__(self, count, limits_file=None):
        self.workers = [Worker(number) for number in range(1, count + 1)]
        self.expected, self.drained, self.heirs = [], [], []
        self.lock = OwnedLock()
        self.book = BanBook()
        self.changes = Changes(lambda where, error: None)
        self.operating = WorkerOperations(
            self,
            lambda: self.workers,
            lambda: self.expected,
            lock=self.lock,
            book=self.book,
            changes=self.changes,
            drains=lambda: self.drained.append(None),
            hands_over=lambda path, drain: self.heirs.append((path, drain)),
            limits_file=limits_file,
        )

    def request_future(self, conn, command, call, *, timeout_s):
        does = {"worker.operate": carry_out, "worker.behaving": behaving, "worker.words": told}[command]
        assert timeout_s > 0
        (worker,) = (item for item in self.workers if item.conn == conn)
        worker.asked.append(call)
        worker.does = does
        return worker

    def call(self, name, **given):
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
    late = Worker(3)

    def comes():
        if late not in crew.workers:
            crew.workers.append(late)

    crew.workers[1].meanwhile = comes
    assert crew.call("limits", soft="1MiB,100,2s")["result"]["soft"] == "1MiB,100,2s"
    assert len({str(item.server.limits) for item in crew.workers}) == 1
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
    with crew.lock:
        words, following = crew.operating.words_page(0)
        limits = crew.operating.limits_in_force()
    take_words(later.server, words.encode(), told=False)
    effects.limits(later.server, limits)
    assert (banned(later), following) == (["192.0.2.1/32"], 0)
    assert later.server.limits == crew.workers[0].server.limits
    first, second = (item.server.admission.bans.bans for item in (crew.workers[0], later))
    assert first == second


def test_change_when_it_is_refused_everywhere_is_not_in_force(crew):
    assert crew.call("unban", network="192.0.2.1")["error"]["code"] == "NOT_POSSIBLE"
    assert crew.call("limits", soft="1MiB,100,2s", hard="1KiB,1,1s")["error"]["code"] == "WRONG_ARGUMENT"
    assert crew.changes.version == 0
    assert len(crew.book.words) == 0


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
    crew.expected = [1, 2]
    crew.workers[1].fault = RpcError("gone", code="DISCONNECTED")
    found = crew.call("stats")["result"]
    rows = [(row["worker"], row["state"]) for row in found["server"]["workers"]]
    assert rows == [(1, "serving"), (2, "being started")]
    assert found["warning"] == "worker 2 is being started"


def test_change_of_a_file_when_all_workers_take_it_is_one(crew):
    for digest in ("a", "a", "b", "b"):
        crew.operating.note_file("bans file", {"bans": 1}, digest)
    crew.operating.note_file("limits file", {}, "b")
    assert [item.what for item in crew.changes.since(0)[0]] == ["bans file", "bans file", "limits file"]


def test_drain_when_it_is_asked_for_begins_before_the_workers_do(crew):
    """The supervisor lets go of the port first: a worker that is started meanwhile would not know of it."""
    crew.workers[0].meanwhile = lambda: crew.drained.append(False)
    crew.call("drain", within="1s")
    assert crew.drained == [None, False]


def test_drain_when_a_successor_waits_begins_once_that_one_serves(crew, tmp_path):
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.bind(str(tmp_path / "hand"))
        found = crew.call("drain", within="1s", successor=str(tmp_path / "hand"))["result"]
    assert (found["draining"], crew.drained) == (False, [])
    ((path, drain),) = crew.heirs
    assert path == tmp_path / "hand"
    assert drain()["draining"] is True
    assert crew.drained == [None]
    assert [len(worker.asked) for worker in crew.workers] == [1] * len(crew.workers)


def test_operations_when_named_in_the_table_can_be_asked_of_workers(crew):
    needed = {"network": "192.0.2.1", "peer": "192.0.2.1"}
    for operation in BY_NAME.values():
        names = {item.name for item in operation.arguments}
        asked = read_arguments(operation.name, operation.arguments, {k: needed[k] for k in names & needed.keys()})
        assert json.loads(json.dumps(asked)) == asked


def test_limits_when_set_by_command_are_for_later_workers_until_the_file_changes(tmp_path):
    """They last until the limits file says something else; those of one stream, or only shown, are for nobody else."""
    file = tmp_path / "limits.toml"
    file.write_text("soft = '1MiB'\n")
    crew = Crew(1, file)

    def in_force():
        with crew.lock:
            return crew.operating.limits_in_force()

    crew.call("limits")
    assert in_force() is None
    crew.call("limits", soft="1MiB,100,2s", origin="me")
    assert (in_force()["soft"], in_force()["origin"]) == ("1MiB,100,2s", "me")
    file.write_text("soft = '2MiB'\n")
    assert in_force() is None
    crew.workers[0].server.stop()


def test_words_when_there_are_more_than_a_page_are_told_once_each(crew):
    bans = [Ban(cidr=f"10.0.{at >> 8}.{at & 255}/32", expires=None) for at in range(3 * MOST_PAGE_WORDS)]
    crew.book.ban(bans)
    following, pages = 0, []
    while not pages or following:
        with crew.lock:
            page, following = crew.operating.words_page(following)
        pages.append([Word.read(line).key for line in json.loads(page)["words"]])
    assert sorted(key for page in pages for key in page) == sorted(ban.cidr for ban in bans)
    assert len(pages) == 3


def test_words_when_they_are_long_are_told_in_messages_that_a_link_takes(crew):
    """A word has up to 4 KiB: 600 of them are 2 MB, and a message of a link has one."""
    evidence = {f"{number:02d}{'x' * 50}": 1.0 for number in range(60)}
    stamps = (Stamp(NOW_MS, at, "berlin") for at in range(600))
    words = [
        Word.of_ban(
            Ban(cidr=f"10.0.{stamp.counter >> 8}.{stamp.counter & 255}/32", expires=None, evidence=evidence), stamp
        )
        for stamp in stamps
    ]
    crew.operating.take_words(words)
    assert [len(banned(item)) for item in crew.workers] == [600, 600]
    assert all(parts_of(call) for call in crew.workers[0].asked)  # it raises where one is too long
    following, found = 0, []
    while not found or following:
        with crew.lock:
            page, following = crew.operating.words_page(following)
        assert parts_of(json.dumps({"words": page}))
        found += json.loads(page)["words"]
    assert sorted(found) == sorted(word.line() for word in words)


def test_unban_when_only_the_ban_file_has_it_lets_it_in_at_all_workers(crew):
    """The supervisor reads no ban file: what it says the workers know, and what is lifted is lifted in each."""
    for item in crew.workers:
        item.server.book.replace_file_bans(BanList([Ban(cidr="192.0.2.1/32", expires=None)]))
        item.server.set_bans(item.server.book.in_force())
    assert [ban["cidr"] for ban in crew.call("unban", network="192.0.2.1")["result"]["lifted"]] == ["192.0.2.1/32"]
    assert [banned(item) for item in crew.workers] == [[], []]


def test_fleet_when_it_says_something_is_told_to_all_workers(crew):
    ban = Word.of_ban(Ban(cidr="192.0.2.1/32", expires=None, source="command of ops"), Stamp(NOW_MS, 0, "berlin"))
    limits = {"soft": "1MiB,100,2s", "hard": "2MiB,200,4s", "low": "0,0,0", "target_delay": "auto"}
    crew.operating.take_words([ban, Word.of_limits(limits, Stamp(NOW_MS, 1, "berlin"))])
    assert [banned(item) for item in crew.workers] == [["192.0.2.1/32"]] * 2
    assert {item.server.limits.size.soft for item in crew.workers} == {1 << 20}
    crew.operating.take_words([ban, Word.lifting(ban.key, ban.ends_s, "ops", Stamp(NOW_MS, 2, "cadiz"))])
    assert [banned(item) for item in crew.workers] == [[], []]
    changes = crew.call("changes")["result"]["changes"]
    assert [(item["what"], item["origin"]) for item in changes] == [
        ("ban", "fleet berlin"),
        ("limits", "fleet berlin"),
        ("unban", "fleet cadiz"),
    ]


def test_penalty_when_others_behave_at_another_worker_is_a_limit_everywhere(crew, monkeypatch):
    verdict = Overflow("192.0.2.1/32", Offence.REFUSED, 2, {"login": 600.0}, "600 in 5 min", wide=False)
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
    assert len(crew.book.words) == 2


def test_verdict_when_it_went_over_the_link_is_the_same():
    verdict = Overflow("2001:db8::/48", Offence.CONTROL, 1, {"control messages": 9.5}, "9 in 1 s", wide=True)
    assert overflow_of(json.loads(json.dumps(overflow_line(verdict)))) == verdict
