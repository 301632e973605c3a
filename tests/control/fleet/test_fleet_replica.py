"""Members of a fleet that tell each other what changed: over links that lose, repeat and reorder. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.control.fleet.replica import PART_BUCKETS, Letter, Outcome, Replica
from flowctl.control.fleet.stamp import MOST_AHEAD_S, Clock
from flowctl.control.fleet.table import BUCKETS, Table
from flowctl.control.fleet.values import LIMITS, MOST_VALUE_BYTES, ban_key, ban_of, ban_value, ends_s, limits_value
from flowctl.control.fleet.wire import Changes, Compare, Part, Sums, decode, encode, entry_of, pages
from flowctl.core.server.bans import Ban
from flowctl.errors import ConfigError, RemoteProtocolError

NOW = 1_700_000_000.0


def ban(cidr: str = "203.0.113.7/32", for_s: float = inf, reason: str = "", **rest) -> tuple[str, str]:
    """Return key and value of a ban that lasts for some seconds from `NOW`."""
    expires = None if for_s == inf else datetime.fromtimestamp(NOW + for_s, tz=UTC)
    made = Ban(cidr=cidr, expires=expires, reason=reason, **rest)
    return ban_key(made.cidr, made.action), ban_value(made)


class Fleet:
    """Members whose letters are delivered, lost, repeated or kept, as a test wants it."""

    def __init__(self, *names: str, now: float = NOW) -> None:
        self.now = now
        self.names = names
        self.members = {name: self.born(name) for name in names}
        self.queue: list[tuple[str, Letter]] = []
        self.skew = dict.fromkeys(names, 0.0)

    def born(self, name: str, table: Table | None = None, clock: Clock | None = None, heard=None) -> Replica:
        others = [other for other in self.names if other != name]
        return Replica(name, others, table or Table(), clock or Clock(name), heard)

    def restart(self, name: str) -> None:
        """Begin a member anew with what it would have stored."""
        old = self.members[name]
        self.members[name] = self.born(name, old.table, Clock(name, old.clock.last), old.heard)

    def time(self, name: str) -> float:
        return self.now + self.skew[name]

    def put(self, sender: str, outcome: Outcome) -> None:
        self.queue += [(sender, letter) for letter in outcome.letters]

    def change(self, name: str, key: str, value: str | None) -> None:
        self.put(name, self.members[name].change(key, value, self.time(name)))

    def deliver(self, keep: Callable[[str, Letter], bool] = lambda sender, letter: True) -> int:
        """Deliver all that is under way, and what comes of it; return how many letters that was."""
        count = 0
        while self.queue:
            sender, letter = self.queue.pop(0)
            if keep(sender, letter):
                count += 1
                self.put(letter.to, self.members[letter.to].received(sender, letter.octets, self.time(letter.to)))
        return count

    def settle(self, rounds: int = 4) -> None:
        for _ in range(rounds):
            for name, member in self.members.items():
                self.put(name, member.tick(self.time(name)))
            self.deliver()

    def held(self, name: str) -> dict[str, str | None]:
        """Return what is in force at a member."""
        return {key: entry.value for key, entry in self.members[name].table.in_force(self.time(name))}


def test_ban_when_made_at_one_is_at_all():
    """A ban goes to all others at once, and is kept by the Messenger for those that are away."""
    fleet = Fleet("a", "b", "c")
    key, value = ban()
    fleet.change("a", key, value)
    assert [letter.lasting for _, letter in fleet.queue] == [True, True]
    assert fleet.deliver() == 2
    assert all(fleet.held(name) == {key: value} for name in fleet.names)


def test_ban_when_delivered_again_changes_nothing_and_tells_nobody():
    """What is known already is no change, and no cause for a message: nothing goes round in a circle."""
    fleet = Fleet("a", "b")
    fleet.change("a", *ban())
    (_, letter) = fleet.queue[0]
    assert [ban()[0]] == list(fleet.members["b"].received("a", letter.octets, NOW).changed)
    assert Outcome([], []) == fleet.members["b"].received("a", letter.octets, NOW)


def test_member_when_it_missed_changes_gets_them_by_comparing():
    """Bans and an unban that were lost on the way are found by the next comparison."""
    fleet = Fleet("a", "b", "c")
    fleet.change("a", *ban("203.0.113.1/32"))
    fleet.deliver()
    fleet.change("a", ban("203.0.113.1/32")[0], None)
    fleet.change("b", *ban("203.0.113.2/32"))
    fleet.deliver(lambda sender, letter: letter.to != "c")
    assert fleet.held("c") == dict([ban("203.0.113.1/32")])
    fleet.settle(1)
    assert fleet.held("c") == fleet.held("a") == dict([ban("203.0.113.2/32")])
    fleet.settle(1)
    assert all(member.equal for member in fleet.members["c"].members.values())


def test_member_when_new_gets_the_whole_table_a_little_at_a_time():
    """A new member fetches part after part without waiting for the next comparison; no message is large."""
    fleet = Fleet("a", "b")
    for number in range(5000):
        fleet.members["a"].change(*ban(f"10.0.{number >> 8}.{number & 255}/32", reason="r" * 100), NOW)
    sizes: list[int] = []
    fleet.put("a", fleet.members["a"].tick(NOW))

    def seen(sender: str, letter: Letter) -> bool:
        sizes.append(len(letter.octets))
        return True

    assert fleet.deliver(seen) > BUCKETS / PART_BUCKETS
    assert len(fleet.held("b")) == 5000
    assert max(sizes) < 512 * 1024


def test_member_when_all_is_equal_sends_only_what_stands_for_it():
    """A quiet fleet costs a short message per pair and comparison."""
    fleet = Fleet("a", "b")
    fleet.change("a", *ban())
    fleet.deliver()
    fleet.put("a", fleet.members["a"].tick(NOW))
    assert max(len(letter.octets) for _, letter in fleet.queue) < 150
    assert fleet.deliver() == 1


def test_member_when_away_too_long_takes_the_table_of_the_others():
    """A member that missed an unban that is forgotten does not bring the ban back; what it made itself stays."""
    fleet = Fleet("a", "b", "c")
    fleet.change("a", *ban("203.0.113.1/32"))
    fleet.change("a", *ban("203.0.113.2/32"))
    fleet.settle()
    fleet.change("a", ban("203.0.113.1/32")[0], None)
    fleet.deliver(lambda sender, letter: letter.to != "c")
    for _ in range(40):
        fleet.now += 86_400
        for name in "ab":
            fleet.put(name, fleet.members[name].tick(fleet.now))
        fleet.deliver(lambda sender, letter: letter.to != "c")
    assert len(fleet.members["a"].table) == 1  # the unban is forgotten
    fleet.change("c", *ban("203.0.113.3/32"))
    fleet.restart("c")
    fleet.settle()
    expected = dict([ban("203.0.113.2/32"), ban("203.0.113.3/32")])
    assert all(fleet.held(name) == expected for name in fleet.names)
    assert not fleet.members["c"].stale


def test_members_when_all_were_away_lose_nothing():
    """Where no member knows better, tables are merged: a fleet that was off for months comes back with its bans."""
    fleet = Fleet("a", "b")
    fleet.change("a", *ban("203.0.113.1/32"))
    fleet.settle()
    fleet.now += 100 * 86_400
    for name in fleet.names:
        fleet.restart(name)
    fleet.settle()
    assert fleet.held("a") == fleet.held("b") == dict([ban("203.0.113.1/32")])
    assert not any(member.stale for member in fleet.members.values())


def test_bans_when_made_at_two_members_apart_end_with_the_later_end():
    """A shorter ban is made by a member that does not know of the longer one: the maker of that makes it again."""
    fleet = Fleet("a", "b", "c")
    long, short = ban(for_s=7 * 86_400), ban(for_s=3600)
    fleet.change("a", *long)
    fleet.now += 1
    fleet.change("b", *short)
    fleet.deliver()
    assert all(fleet.held(name) == dict([long]) for name in fleet.names)
    fleet.now += 1
    fleet.change("b", *short)  # now on purpose
    fleet.deliver()
    assert all(fleet.held(name) == dict([short]) for name in fleet.names)


def test_changes_when_the_clock_is_wrong_follow_what_was_seen():
    """A member whose clock is an hour behind lifts a ban that it has seen: it is lifted everywhere."""
    fleet = Fleet("a", "b")
    fleet.skew["b"] = -3600.0
    fleet.change("a", *ban())
    fleet.deliver()
    fleet.change("b", ban()[0], None)
    fleet.deliver()
    assert fleet.held("a") == fleet.held("b") == {}


def test_changes_when_from_far_ahead_are_refused_and_counted():
    """A member whose clock is days ahead cannot drag the others along."""
    fleet = Fleet("a", "b")
    fleet.skew["a"] = 2.0 * MOST_AHEAD_S
    fleet.change("a", *ban())
    fleet.deliver()
    assert fleet.held("b") == {}
    assert fleet.members["b"].members["a"].dropped == {"future": 1}
    assert fleet.members["b"].clock.last.ms == 0


def test_changes_when_a_clock_that_was_far_ahead_is_set_right_reach_the_others():
    """What a member changed while its clock was days ahead is stamped anew once the clock is right."""
    fleet = Fleet("a", "b")
    fleet.change("b", *ban("203.0.113.3/32"))
    fleet.deliver()
    fleet.skew["a"] = 400 * 86_400.0
    fleet.change("a", *ban("203.0.113.1/32"))
    fleet.change("a", *ban("203.0.113.2/32"))
    fleet.change("a", ban("203.0.113.3/32")[0], None)
    fleet.deliver()
    assert len(fleet.held("b")) == 1
    fleet.skew["a"] = 0.0
    fleet.restart("a")
    fleet.settle()
    assert fleet.held("b") == fleet.held("a") == dict([ban("203.0.113.1/32"), ban("203.0.113.2/32")])
    fleet.change("a", ban("203.0.113.1/32")[0], None)
    fleet.deliver()
    assert fleet.held("b") == dict([ban("203.0.113.2/32")])


def test_comparing_when_a_part_stays_different_ends_and_finds_the_rest():
    """Entries that a member refuses for ever neither keep the two busy nor stop what comes behind them."""
    fleet = Fleet("a", "b")
    for number in range(300):  # stamped far ahead, as by a clock that is wrong all the time
        key, value = ban(f"10.0.{number >> 8}.{number & 255}/32")
        fleet.members["a"].change(key, value, NOW + 2 * MOST_AHEAD_S)
    fleet.skew["a"] = 2.0 * MOST_AHEAD_S
    for number in range(50):
        fleet.members["b"].change(*ban(f"10.1.0.{number}/32"), NOW)
    fleet.put("a", fleet.members["a"].tick(fleet.time("a")))
    assert 0 < fleet.deliver() < 200
    fleet.put("b", fleet.members["b"].tick(NOW))
    assert 0 < fleet.deliver() < 200
    assert len(fleet.held("a")) == 350


def test_messages_when_foreign_or_malformed_are_counted_and_dropped():
    """Senders that are no members, and what is no message, change nothing."""
    replica = Replica("a", ["b"], Table(), Clock("a"))
    good = encode(Changes([]))
    assert Outcome() == replica.received("x", good, NOW)
    assert replica.foreign_count == 1
    for octets in (b"", b"\xff", b"[]", b"{}", b"[" * 100_000, good[:-1], b" " * 2_000_000):
        assert Outcome() == replica.received("b", octets, NOW)
    assert replica.members["b"].dropped == {"no-json": 4, "value": 1, "version": 1, "too-long": 1}
    assert replica.members["b"].heard_s is None


ENTRY = ["ban 203.0.113.7/32", 1, 0, "a", None, ban()[1]]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        *((0, item) for item in (7, "", "ban x", "ban 203.0.113.8/32", "limit 203.0.113.7/32", "x" * 200, LIMITS)),
        *((1, item) for item in (-1, 1.5, True, None, 10**18)),
        *((2, item) for item in (-1, 2**40, "0")),
        *((3, item) for item in ("", "a" * 65, "a\n", None)),
        *((4, item) for item in (-1, "1", True, float("nan"), 5)),  # 5: sooner than it ends
        *((5, item) for item in (7, "", "{}", "x" * 2000, "\ud800", ban("203.0.113.8/32")[1], ban()[1] + "\n{}")),
    ],
    ids=repr,
)
def test_entries_when_wrong_are_refused(at, wrong):
    """Each field of an entry is checked: no wrong value comes into a table."""
    assert entry_of(ENTRY)[0] == ENTRY[0]
    with pytest.raises((RemoteProtocolError, ConfigError)):
        entry_of([*ENTRY[:at], wrong, *ENTRY[at + 1 :]])
    octets = json.dumps({"fleet": 1, "kind": "changes", "entries": [[*ENTRY[:at], wrong, *ENTRY[at + 1 :]]]}).encode()
    with pytest.raises(RemoteProtocolError):
        decode(octets)


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "compare", "root": "x", "count": 1},
        {"kind": "compare", "root": "x" * 32, "count": -1},
        {"kind": "sums", "sums": "0"},
        {"kind": "sums", "sums": "x" * 16 * BUCKETS},
        {"kind": "sums", "sums": " " * 16 * BUCKETS},
        {"kind": "part", "numbers": [BUCKETS], "entries": []},
        {"kind": "part", "numbers": [True], "entries": []},
        {"kind": "part", "numbers": [], "entries": {}},
        {"kind": "part", "numbers": 7, "entries": []},
        {"kind": "changes"},
        {"kind": "changes", "entries": [[1]]},
        {"kind": ["changes"], "entries": []},
        {"kind": "other"},
    ],
    ids=repr,
)
def test_messages_when_a_field_is_wrong_are_refused(value):
    with pytest.raises(RemoteProtocolError):
        decode(json.dumps({"fleet": 1, **value}).encode())


@settings(max_examples=60)
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5).map(
        lambda value: json.dumps({"fleet": 1, "kind": "changes", "entries": value}).encode()
    )
)
def test_messages_when_random_raise_nothing_else(octets):
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode(octets), Changes)


def test_messages_when_written_read_the_same():
    """All kinds of message come back as they were."""
    key, value = ban(for_s=60, evidence={"é": 1.5})
    replica = Replica("a", ["b"], Table(), Clock("a"))
    replica.change(key, value, NOW)
    replica.change(LIMITS, limits_value({"soft": "1MiB,0,0"}), NOW)
    replica.change(key, None, NOW)
    entries = list(replica.table.items())
    for message in (
        Changes(entries),
        Compare("0" * 32, 7, stale=True),
        Sums(list(range(2**64 - BUCKETS, 2**64))),
        Part([1, 5], entries, answer=True),
    ):
        assert message == decode(encode(message))


def test_values_when_evidence_is_long_leave_it_out():
    """A ban always fits: evidence that would make it too long stays at the server that has it."""
    evidence = {f"{number:0>90}": 1.0 for number in range(20)}
    key, value = ban(reason="é" * 200, evidence=evidence)
    assert len(value.encode()) <= MOST_VALUE_BYTES
    assert ban_of(value).reason == "é" * 200
    assert ends_s(key, value) == inf


def test_pages_when_there_is_much_are_short():
    """Many entries become several messages, in order, none of which is too long to be read."""
    replica = Replica("a", ["b"], Table(), Clock("a"))
    for number in range(2000):
        replica.change(*ban(f"10.0.{number >> 8}.{number & 255}/32", reason="r" * 200), NOW)
    found = pages(replica.table.items())
    assert len(found) > 2
    assert [item for page in found for item in page] == list(replica.table.items())
    assert all(decode(encode(Changes(page))) == Changes(page) for page in found)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_members_when_links_are_bad_and_members_restart_agree_in_the_end(seed, count):
    """Whatever is lost, repeated or late, whoever restarts, and whatever the clocks say: all hold the same."""
    rng = Random(seed)
    fleet = Fleet(*"abcde"[:count])
    for name in fleet.names:
        fleet.skew[name] = rng.uniform(-3600, 3600)
    for _ in range(40):
        fleet.now += rng.uniform(0, 60)
        name = rng.choice(fleet.names)
        key, value = ban(f"203.0.113.{rng.randrange(4)}/32", rng.choice([inf, 600, 10_000, 1e6]))
        wanted = rng.random()
        if wanted < 0.5:
            fleet.change(name, key, value)
        elif wanted < 0.7 and key in fleet.held(name):
            fleet.change(name, key, None)
        elif wanted < 0.8:
            fleet.restart(name)
        elif wanted < 0.9:
            fleet.put(name, fleet.members[name].tick(fleet.time(name)))
        rng.shuffle(fleet.queue)
        fleet.queue += [item for item in fleet.queue if rng.random() < 0.2]
        late = [item for item in fleet.queue if rng.random() < 0.3]
        fleet.queue = [item for item in fleet.queue if item not in late]
        fleet.deliver(lambda sender, letter: rng.random() > 0.2)
        fleet.queue = late
    fleet.skew = dict.fromkeys(fleet.names, 0.0)
    fleet.now += 3600
    fleet.settle(6)
    held = [fleet.held(name) for name in fleet.names]
    assert all(item == held[0] for item in held)
    roots = {member.table.root() for member in fleet.members.values()}
    assert len(roots) == 1
    key = ban()[0]  # and a change that is made knowing all others is the one that counts
    fleet.change("b", *ban(reason="last"))
    fleet.deliver()
    assert all(fleet.held(name)[key] == ban(reason="last")[1] for name in fleet.names)
