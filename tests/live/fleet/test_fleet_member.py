"""Members over real sockets with keys: who is heard, and who is not."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import pytest
import structlog
from e2e_kit import wait_until

from flowctl.core.server.bans import Ban
from flowctl.live.bans.book import BanBook
from flowctl.live.bans.words import Stamp, Word
from flowctl.live.fleet import member as member_module
from flowctl.live.fleet.config import FleetConfig
from flowctl.live.fleet.member import Member, OtherMember, look_at
from flowctl.nodes.messenger.delivery import DeliverySettings
from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.wire.zmtp.keys import KeyPair

CIDR = "192.0.2.1/32"


class Fleet:
    """Two members, a and b, and the keys of a third, c, which does not run."""

    def __init__(self, folder, stack):
        self.keys = {name: KeyPair.generate() for name in "abc"}
        self.members = {name: Destination(name, f"ipc://{folder}/{name}", self.keys[name].public) for name in "abc"}
        self.stack, self.folder = stack, folder
        self.books, self.at = {}, {}
        for name in "ab":
            self.at[name] = self.member(name, self.members[name])
        for member in self.at.values():
            member.start()

    def member(self, name, listen):
        jobs, self.books[name] = SimpleQueue(), BanBook()
        Thread(target=lambda: [job() for job in iter(jobs.get, None)], daemon=True).start()
        config = FleetConfig(name=name, members=self.members, listen=listen, keys=self.keys[name])
        member = Member(config, self.books[name], jobs.put, self.books[name].merge)
        self.stack.callback(jobs.put, None)
        self.stack.callback(member.stop)
        return member

    def row(self, name, of):
        """Return what a member shows of another one."""
        return next(row for row in self.at[name].status()["members"] if row["member"] == of)

    def banned(self, name):
        return [ban.cidr for ban in self.books[name].in_force().bans]


@pytest.fixture
def fleet():
    with tempfile.TemporaryDirectory(prefix="f-") as folder, contextlib.ExitStack() as stack:
        yield Fleet(Path(folder), stack)


def test_member_when_another_bans_or_lifts_does_so_at_once(fleet):
    fleet.books["a"].ban([Ban(cidr=CIDR, expires=None)])
    wait_until(lambda: fleet.banned("b") == [CIDR], "the ban at b")
    fleet.books["b"].lift(CIDR, fleet.books["b"].in_force().bans, "ops")
    wait_until(lambda: fleet.banned("a") == [], "its end at a")
    status = fleet.at["a"].status()
    assert {item["member"]: item["heard_s_ago"] is None for item in status["members"]} == {"b": False, "c": True}
    assert status["members"][0]["why"].startswith("READY")


@pytest.mark.parametrize("key", ["b", "of a stranger"])
def test_member_when_somebody_claims_to_be_another_does_not_hear_him(fleet, key):
    """A stranger is not let in, and a member speaks under the name that its key has, and no other."""
    fleet.books["a"].ban([Ban(cidr=CIDR, expires=None)])
    keys = fleet.keys.get(key) or KeyPair.generate()
    lift = Word.lifting(CIDR, 9e9, "mallory", Stamp(2**52, 0, "c"))
    with Messenger(identity="c", keys=keys, settings=DeliverySettings(max_attempts=None)) as mallory:
        to = mallory.make_connection(fleet.members["a"])
        mallory.send_message(to, json.dumps({"words": [lift.line()]}), deadline=1.0)
        wait_until(lambda: mallory.statistics().given_up == 1, "it gives up")
        assert mallory.statistics().acknowledged == 0
    assert fleet.banned("a") == [CIDR]
    row = fleet.at["a"].status()["members"][1]
    assert row.pop("why").startswith("not connected, it is dialled again")
    assert row | {"waiting": 0} == {
        "member": "c",
        "heard_s_ago": None,
        "same": None,
        "waiting": 0,
        "words": None,
        "dropped": 0,
        "duplicates": 0,
        "fault": None,
    }


def test_member_when_two_have_its_name_is_shown_at_both_ends(fleet):
    """The file of a member was copied with its name and its key: the server that started last is the member."""
    older = fleet.member("c", Destination("c", f"ipc://{fleet.folder}/older"))
    older.start()
    for name in "ab":
        wait_until(lambda name=name: fleet.row(name, "c")["heard_s_ago"] is not None, f"it is heard at {name}")
    newer = fleet.member("c", Destination("c", f"ipc://{fleet.folder}/newer"))
    newer.start()
    wait_until(lambda: older.status()["name_taken"], "the older one is told")
    for name in "ab":
        wait_until(lambda name=name: fleet.row(name, "c")["duplicates"], f"it is shown at {name}")
    fleet.books["c"].ban([Ban(cidr=CIDR, expires=None)])  # the newer one's
    wait_until(lambda: fleet.banned("a") == fleet.banned("b") == [CIDR], "its ban at the others")
    assert not newer.status()["name_taken"]


def test_member_when_it_is_a_copy_that_listens_elsewhere_learns_why_it_hears_nothing(fleet, monkeypatch):
    """As a container or a virtual machine that was copied: the others have the address of the original."""
    monkeypatch.setattr(member_module, "COMPARE_S", 0.25)
    original = fleet.member("c", fleet.members["c"])
    original.start()
    wait_until(lambda: all(row["heard_s_ago"] is not None for row in original.status()["members"]), "it hears all")
    copy = fleet.member("c", Destination("c", f"ipc://{fleet.folder}/elsewhere"))
    with structlog.testing.capture_logs() as lines:
        copy.start()
        wait_until(lambda: [row["fault"] for row in copy.status()["members"]] == ["not heard"] * 2, "it is shown")
        wait_until(lambda: fleet.row("a", "c")["duplicates"], "and at another one")
    told = [line for line in lines if line["event"] == "a member takes what this one says and is not heard"]
    assert sorted(line["member"] for line in told) == ["a", "b"]  # of each once
    assert all("a copy of another server" in line["hint"] for line in told)
    assert original.status()["name_taken"]


@pytest.mark.parametrize("found", ["not heard", "not reached"])
def test_member_when_messages_go_one_way_is_told_once_until_that_ends(found):
    other = OtherMember()

    def look(*, heard, taken):
        other.heard, other.taken = heard, taken
        with structlog.testing.capture_logs() as lines:
            look_at("b", other)
        return [line["member"] for line in lines], other.fault

    one_way = {"heard": found == "not reached", "taken": found == "not heard"}
    for _ in range(2):
        assert [look(heard=False, taken=False) for _ in range(9)] == [([], None)] * 9  # it is down, which is shown
        assert [look(**one_way) for _ in range(3)] == [([], None)] * 3  # connections may be about to be made anew
        assert [look(**one_way) for _ in range(2)] == [(["b"], found), ([], found)]
        assert look(heard=False, taken=False) == ([], found)
        assert look(heard=True, taken=True) == ([], None)


def test_member_when_it_takes_back_its_place_hears_and_is_heard(fleet):
    """It was lent to a server that was to take its place, and did not come to serve."""
    take_back = fleet.at["a"].lend(Path("nobody"))
    fleet.books["a"].ban([Ban(cidr=CIDR, expires=None)])
    with Messenger(identity="a", keys=fleet.keys["a"]) as other:
        other.listen_for_connection(fleet.members["a"], "a", lambda *_: None)  # the place is free
    take_back()
    wait_until(lambda: fleet.banned("b") == [CIDR], "what was said meanwhile, at b")
    fleet.books["b"].lift(CIDR, fleet.books["b"].in_force().bans, "ops")
    wait_until(lambda: fleet.banned("a") == [], "its end at a")
    fleet.books["a"].ban([Ban(cidr="192.0.2.2/32", expires=None)])
    wait_until(lambda: fleet.banned("b") == ["192.0.2.2/32"], "the next ban at b")
    assert len(fleet.books["a"].listeners) == 1


def test_member_when_another_sends_faster_than_it_reads_keeps_a_bounded_part():
    jobs, most = [], member_module._MOST_WAITING_BYTES
    members = {name: Destination(name, f"ipc:///nowhere/{name}") for name in "abc"}
    member = Member(FleetConfig(name="a", members=members, listen=members["a"]), BanBook(), jobs.append, list)

    def send(name, size):
        member._received(None, SimpleNamespace(routing_id=name.encode(), message=bytes(size)))

    try:
        for _ in range(20):
            send("b", most // 16)
        assert (len(jobs), member._gossip.others["b"].dropped) == (16, 4)
        send("c", 0)
        assert len(jobs) == 17
        for job in jobs:
            job()
        jobs.clear()
        for _ in range(most // 1024 + 5):
            send("b", 0)
        send("mallory", most + 1)
        assert len(jobs) == most // 1024
    finally:
        member.stop()
