"""Members of a fleet that tell each other what was said: over links that lose, reorder and are cut. No sockets."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from itertools import count, islice
from math import inf
from random import Random

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.server.bans import Ban, BanAction
from flowctl.errors import LocalProtocolError
from flowctl.live.bans.book import BanBook
from flowctl.live.bans.words import BUCKETS, MEMORY_S, MOST_WORD_BYTES, WordKind
from flowctl.live.fleet import member as member_module
from flowctl.live.fleet.member import COMPARE_S, Gossip

NOW = 1_700_000_000.0
NAMES = "abcd"
SKEW_S = 20.0
NETWORKS = ("203.0.113.7/32", "203.0.113.0/24", "2001:db8::/64")
LASTS_S = (60.0, 3600.0, 86_400.0, None)


class Shelf:
    """A store in memory, which outlives its book."""

    path = "a shelf"

    def __init__(self):
        self.words = {}

    def read(self):
        return list(self.words.values()), 0.0

    def write(self, changed, seen, *, anew=False):
        del seen
        if anew:
            self.words.clear()
        self.words |= changed
        self.words = {place: word for place, word in self.words.items() if word is not None}

    def whole(self):
        return True

    def close(self):
        """Keep what it has."""


class Fleet:
    """Members whose messages are under way until a test delivers or loses them; and all that was ever said."""

    def __init__(self, names=NAMES, skews=(), rng=None):
        self.now = NOW
        self.rng = rng or Random(7)
        self.names = names
        self.skews = dict(zip(names, [*skews, *[0.0] * len(names)], strict=False))
        self.shelves = {name: Shelf() for name in names}
        self.queue = []
        self.cut = set()  # who cannot be reached
        self.said = {}  # what was said, by where and when it stands: what the members are to agree on
        self.books, self.gossips = {}, {}
        for name in names:
            self.begin(name)

    def begin(self, name):
        """Start a member with what its store has."""
        book = BanBook(self.shelves[name], lambda: self.now + self.skews[name], lambda: self.now)
        book.join(name)
        others = [other for other in self.names if other != name]
        gossip = Gossip(
            book, others, lambda to, text: self.send(name, to, text), book.merge, rng=self.rng, clock=lambda: self.now
        )
        book.listeners.append(lambda words: self.said.update({(word.place, word.stamp): word for word in words}))
        book.listeners.append(gossip.tell)
        self.books[name], self.gossips[name] = book, gossip

    def send(self, sender, to, text):
        if not {sender, to} & self.cut:
            self.queue.append((sender, to, text))

    def deliver(self, most=10**6):
        """Deliver messages in any order, and what comes of them."""
        while self.queue and most:
            most -= 1
            sender, to, text = self.queue.pop(self.rng.randrange(len(self.queue)))
            self.gossips[to].received(sender, text.encode())

    def settle(self):
        """Let all reach all, and compare until that changes nothing."""
        self.cut.clear()
        for _ in range(3):
            self.now += COMPARE_S
            for gossip in self.gossips.values():
                gossip.compare_all()
            self.deliver()

    def ban(self, name, cidr, lasts_s=None, action=BanAction.BAN, source="command"):
        time_s = self.now + self.skews[name]
        ends = None if lasts_s is None else datetime.fromtimestamp(time_s + lasts_s, UTC)
        (word,) = self.books[name].ban([Ban(cidr=cidr, expires=ends, action=action, source=source)])
        assert word.ban in self.books[name].in_force().bans

    def lift(self, name, cidr):
        book = self.books[name]
        with contextlib.suppress(LocalProtocolError):  # it is not banned there
            book.lift(cidr, book.in_force().bans, "ops")
            assert cidr not in {ban.cidr for ban in book.in_force().bans}

    def in_force(self, name):
        """Return what a member keeps out, until when, by now of the test."""
        found = self.books[name].in_force().still(self.now).bans
        return {(ban.cidr, ban.action): ban.expires for ban in found}

    def limits(self, name):
        word = self.books[name].words.get("", WordKind.LIMITS)
        return None if word is None else word.value["soft"]

    def expected(self):
        """Return what is to be in force, of all that was ever said: nothing of merging is in this."""
        lifted = {}
        for word in self.said.values():
            if word.kind is WordKind.LIFT:
                lifted[word.key] = max(lifted.get(word.key, word.stamp), word.stamp)
        ends = {}
        for word in self.said.values():
            counts = word.ban is not None and word.ban.lasts(self.now)
            if counts and (word.key not in lifted or word.stamp > lifted[word.key]):
                key = word.key, word.ban.action
                ends[key] = max(ends.get(key, 0.0), word.ends_s)
        return {key: None if end == inf else datetime.fromtimestamp(end, UTC) for key, end in ends.items()}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ban"), st.sampled_from(NAMES), st.sampled_from(NETWORKS), st.sampled_from(LASTS_S)),
        st.tuples(st.just("limit"), st.sampled_from(NAMES), st.sampled_from(NETWORKS), st.sampled_from(LASTS_S)),
        st.tuples(st.just("lift"), st.sampled_from(NAMES), st.sampled_from(NETWORKS)),
        st.tuples(st.just("limits"), st.sampled_from(NAMES), st.integers(1, 9)),
        st.tuples(st.just("cut"), st.sampled_from(NAMES)),
        st.tuples(st.just("heal"), st.sampled_from(NAMES)),
        st.tuples(st.just("lose"), st.sampled_from(NAMES)),
        st.tuples(st.just("deliver"), st.integers(1, 9)),
        st.tuples(st.just("compare"), st.sampled_from(NAMES)),
        st.tuples(st.just("restart"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 1.0, 50.0, 4000.0])),
    ),
    max_size=40,
)


def carry_out(fleet, step):
    match step:
        case ("ban", name, cidr, lasts_s):
            fleet.ban(name, cidr, lasts_s)
        case ("limit", name, cidr, lasts_s):
            fleet.ban(name, cidr, lasts_s, BanAction.LIMIT, "penalty")
        case ("lift", name, cidr):
            fleet.lift(name, cidr)
        case ("limits", name, number):
            marks = {"soft": f"{number}MiB", "hard": "9MiB", "low": "1MiB", "target_delay": "auto"}
            fleet.books[name].say_limits(marks)
        case ("cut", name):
            fleet.cut.add(name)
        case ("heal", name):
            fleet.cut.discard(name)
        case ("lose", name):
            fleet.queue = [item for item in fleet.queue if name not in item[:2]]
        case ("deliver", count):
            fleet.deliver(count)
        case ("compare", name):
            fleet.gossips[name].compare_all()
        case ("restart", name, keeps):
            others = [fleet.shelves[other].words for other in NAMES if other != name]
            if keeps or not all(
                word in other.values() for word in fleet.shelves[name].words.values() for other in others
            ):
                fleet.begin(name)
            else:  # its disk was lost, with nothing that others do not have
                fleet.shelves[name] = Shelf()
                fleet.begin(name)
        case ("pass", seconds):
            fleet.now += seconds
            for book in fleet.books.values():
                book.follow_clock()


@given(steps=steps, skews=st.lists(st.sampled_from([0.0, -SKEW_S, SKEW_S]), min_size=4, max_size=4), rng=st.randoms())
def test_fleet_when_anything_happens_comes_to_agree_on_what_was_said(steps, skews, rng):
    with structlog.testing.capture_logs():
        fleet = Fleet(skews=skews, rng=rng)
        for step in steps:
            carry_out(fleet, step)
    while any(abs(word.ends_s - fleet.now) < 2 * SKEW_S + 1 for word in fleet.said.values()):
        fleet.now += SKEW_S  # what is about to end is over at one clock and not at another
    for book in fleet.books.values():
        book.follow_clock()
    fleet.settle()
    expected = fleet.expected()
    assert {name: fleet.in_force(name) for name in NAMES} == dict.fromkeys(NAMES, expected)
    said = [word for word in fleet.said.values() if word.kind is WordKind.LIMITS]
    latest = max(said, key=lambda word: word.stamp).value["soft"] if said else None
    assert {fleet.limits(name) for name in NAMES} == {latest}
    assert len({tuple(fleet.books[name].words.sums) for name in NAMES}) == 1


ONE, TWO, THREE = NETWORKS
LIMITS = {"soft": "3MiB", "hard": "6MiB", "low": "1MiB", "target_delay": "auto"}


def test_fleet_when_two_say_something_at_the_same_moment_agrees_on_one():
    fleet = Fleet("ab")
    fleet.books["a"].say_limits(LIMITS)
    fleet.books["b"].say_limits(LIMITS | {"soft": "4MiB"})
    fleet.ban("a", ONE, source="command")
    fleet.ban("b", ONE, 600.0, source="penalty")
    fleet.settle()
    assert [fleet.limits(name) for name in "ab"] == ["4MiB", "4MiB"]
    assert [fleet.in_force(name) for name in "ab"] == [{(ONE, BanAction.BAN): None}] * 2


def test_ban_when_it_comes_late_ends_when_it_was_to():
    fleet = Fleet("ab")
    fleet.cut.add("b")
    fleet.ban("a", ONE, 3600.0)
    fleet.now += 1800.0
    fleet.settle()
    assert fleet.in_force("b") == {(ONE, BanAction.BAN): datetime.fromtimestamp(NOW + 3600, UTC)}
    fleet.now += 1801.0
    assert fleet.in_force("b") == {}


def test_unban_when_others_were_away_is_not_undone_by_them():
    """A member that is back after most of a year brings no ban back; a ban that nobody lifted stays."""
    fleet = Fleet("abc")
    fleet.ban("a", ONE)
    fleet.ban("b", TWO)
    fleet.settle()
    fleet.cut.add("c")
    fleet.lift("b", ONE)
    fleet.deliver()
    fleet.now += MEMORY_S - 86_400.0
    fleet.begin("c")
    for name in "abc":
        fleet.books[name].follow_clock()
    fleet.settle()
    assert [fleet.in_force(name) for name in "abc"] == [{(TWO, BanAction.BAN): None}] * 3


def test_fleet_when_a_clock_is_set_has_the_end_that_was_meant():
    fleet = Fleet("ab", skews=[-86_400.0])
    fleet.ban("a", ONE, 600.0)
    fleet.skews["a"] = 0.0
    with structlog.testing.capture_logs():
        fleet.books["a"].follow_clock()
    fleet.settle()
    end = datetime.fromtimestamp(NOW + 600, UTC)
    assert [fleet.in_force(name) for name in "ab"] == [{(ONE, BanAction.BAN): end}] * 2
    fleet.lift("b", ONE)
    fleet.settle()
    assert [fleet.in_force(name) for name in "ab"] == [{}, {}]


def test_unban_when_the_clock_of_the_bans_maker_was_set_meanwhile_lifts_the_ban():
    fleet = Fleet("ab", skews=[0.0, 3600.0])
    fleet.ban("b", ONE, 86_400.0)
    fleet.settle()
    fleet.cut.add("b")
    fleet.lift("a", ONE)
    with structlog.testing.capture_logs():
        for skew_s in (1800.0, 0.0):
            fleet.skews["b"] = skew_s
            fleet.books["b"].follow_clock()
    fleet.settle()
    assert [fleet.in_force(name) for name in "ab"] == [{}, {}]


def test_server_when_it_comes_into_a_fleet_brings_what_it_said_before():
    fleet = Fleet("ab")
    for name, lasts_s in (("a", 3600), ("b", 600)):
        book = BanBook(fleet.shelves[name], lambda: NOW, lambda: NOW)
        book.ban([Ban(cidr=ONE, expires=datetime.fromtimestamp(NOW + lasts_s, UTC))])
        fleet.begin(name)
    fleet.settle()
    end = datetime.fromtimestamp(NOW + 3600, UTC)
    assert [fleet.in_force(name) for name in "ab"] == [{(ONE, BanAction.BAN): end}] * 2
    assert {word.stamp.node for word in fleet.books["a"].words} == {"a", "b"}


def test_member_when_it_is_new_gets_all_that_the_others_hold_and_they_what_it_has(monkeypatch):
    monkeypatch.setattr(member_module, "_REST_S", 0.0)
    monkeypatch.setattr(member_module, "PAGE_BYTES", 64 * 1024)
    fleet = Fleet("abc")
    fleet.cut.add("c")
    many = [f"10.0.{at >> 8}.{at & 255}/32" for at in range(3000)]
    fleet.books["a"].ban([Ban(cidr=cidr, expires=None, source="command of ops") for cidr in many])
    fleet.cut.add("a")
    fleet.ban("c", ONE)
    fleet.cut.clear()
    fleet.gossips["c"].compare_all()
    fleet.deliver()
    assert len(fleet.books["c"].words) == 3001 == len(fleet.books["a"].words)
    assert {ban.source for ban in fleet.books["c"].in_force().bans} == {"command of ops", "command"}
    fleet.settle()
    assert [other.same for other in fleet.gossips["b"].others.values()] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        '{"sums": "00"}',
        '{"sums": 7}',
        '{"buckets": [512]}',
        '{"buckets": ["x"]}',
        '{"words": 7}',
        '{"words": ["x"]}',
        '{"words": [], "count": Infinity}',
        json.dumps({"words": [f'["lift","10.0.0.0/32",1,0,"a",{{"ends":1{"0" * 400}}}]']}),
        json.dumps({"words": ['["ban","10.0.0.0/32",1,0,"a",{}]']}),
        json.dumps({"words": ['["ban","10.0.0.0/32",1,0,"a",{"cidr":"10.0.0.1/32","expires":null}]']}),
        json.dumps({"words": ['["limit","10.0.0.0/32",1,0,"a",{"cidr":"10.0.0.0/32","expires":null}]']}),
        json.dumps({"words": ['["lift","10.0.0.0",1,0,"a",{"ends":null}]']}),
        json.dumps({"words": ['["lift","10.0.0.0/32",1.5,0,"a",{"ends":null}]']}),
        json.dumps({"words": ['["lift","10.0.0.0/32",1,-1,"a",{"ends":null}]']}),
        json.dumps({"words": ['["lift","10.0.0.0/32",1,0,"a",{"ends":"x"}]']}),
        json.dumps({"words": ['["lift","10.0.0.0/32",1,0,"a",{"ends":NaN}]']}),
        json.dumps({"words": ['["limits","",1,0,"a",{"soft":"1MiB"}]']}),
        json.dumps({"words": ['["kick","10.0.0.0/32",1,0,"a",{}]']}),
        json.dumps({"words": ["[" * 9000]}),
        json.dumps({"words": ['["lift","10.0.0.0/32",9000000000000,0,"a",{"ends":null,"x":"y"}]']}),
        json.dumps({"words": ['["lift","10.0.0.0/32",9000000000000,0,"a",{"ends":null,"source":{}}]']}),
        json.dumps({"words": ['["lift","10.0.0.0/32",9000000000000,0,"a",{"ends":null,"source":"\\n"}]']}),
        json.dumps({"words": ['["ban","10.0.0.0/32",1,0,"\\ud800",{"cidr":"10.0.0.0/32","expires":null}]']}),
        json.dumps(
            {"words": [json.dumps(["ban", "10.0.0.0/32", 1, 0, "a" * 65, {"cidr": "10.0.0.0/32", "expires": None}])]}
        ),
        json.dumps(
            {"words": ['["ban","10.0.0.0/32",1,0,"a",{"cidr":"10.0.0.0/32","expires":null,"evidence":{"\\ud800":1}}]']}
        ),
        json.dumps({"words": ['["lift","10.0.0.0/32",1,0,"a",{"x":"' + "y" * MOST_WORD_BYTES + '"}]']}),
    ],
)
def test_message_when_no_member_would_send_it_changes_nothing_and_is_counted(text):
    """What cannot be read is dropped whole, and the status says of whom; a stranger's is not even read."""
    fleet = Fleet("ab")
    gossip = fleet.gossips["a"]
    gossip.received("b", text.encode("utf-8", "replace"))
    gossip.received("mallory", b'{"words": []}')
    assert (gossip.others["b"].dropped, gossip.strangers, len(fleet.books["a"].words)) == (1, 1, 0)


def test_buckets_when_one_is_asked_for_again_and_again_are_answered_once():
    fleet = Fleet("ab")
    fleet.books["a"].ban([Ban(cidr=NETWORKS[0], expires=None)])
    fleet.queue.clear()
    (word,) = fleet.books["a"].words
    full = next(number for number in range(BUCKETS) if fleet.books["a"].words.bucket(number))
    fleet.gossips["a"].received("b", json.dumps({"words": [], "buckets": [full] * 1000}).encode())
    assert [json.loads(item[-1]) for item in fleet.queue] == [{"words": [word.line()], "answer": True}]


def test_bucket_when_somebody_fills_it_is_told_in_parts_that_a_message_takes(monkeypatch):
    monkeypatch.setattr(member_module, "_MOST_MESSAGE_BYTES", 16 * MOST_WORD_BYTES)
    fleet = Fleet("ab")
    words = fleet.books["a"].words
    fleet.cut.add("b")
    networks = (f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}/32" for at in count())
    chosen = islice((cidr for cidr in networks if words.number_of((cidr, WordKind.BAN, "a")) == 7), 40)
    fleet.books["a"].ban([Ban(cidr=cidr, expires=None) for cidr in chosen])
    assert len(words.bucket(7)) == 40
    fleet.cut.clear()
    fleet.gossips["a"].compare_all()
    sizes = []
    while fleet.queue:
        sizes += [len(json.loads(text).get("words", ())) for _, _, text in fleet.queue]
        fleet.deliver(1)
    assert max(sizes) == 8
    for _ in range(100):
        fleet.settle()
    assert len(fleet.books["b"].words) == 40
