"""Whose work gives way where all is more than a process has: the address that takes most, and nothing for one alone."""

from __future__ import annotations

import random

from remux_kit import Bench, source

from flowctl.errors import LimitExceededError
from flowctl.live.remux.shares import WorkTime


class Work:
    """Streams that take a share of a core each, second by second."""

    def __init__(self, limit_share=1.0):
        self.time = WorkTime(limit_share)
        self.now = 0.0
        self.shares = {}  # by key: address and share
        self.spent = {}
        self.gone = {}  # by key: why

    def add(self, key, address, share):
        self.shares[key] = address, share
        self.spent[key] = address, 0.0

    def run(self, seconds):
        """Return what gives way meanwhile."""
        before = set(self.gone)
        for _ in range(seconds):
            self.now += 1.0
            for key, (address, spent_s) in self.spent.items():
                self.spent[key] = address, spent_s + self.shares[key][1]
            over = self.time.look(self.now, self.spent)
            self.gone |= over
            for key in over:
                del self.spent[key]
        return set(self.gone) - before

    def may_begin(self, key, address):
        try:
            self.time.check(key, address, self.now)
        except LimitExceededError:
            return False
        return True

    @property
    def total(self):
        return sum(self.shares[key][1] for key in self.spent)


def test_time_when_there_is_enough_is_nobodys_to_give():
    work = Work()
    for number in range(9):
        work.add(number, f"192.0.{number}.1", 0.1)
    assert work.run(200) == set()


def test_time_when_all_is_too_much_is_given_by_the_address_that_takes_most():
    """Many tiny streams of some addresses, each of which is cheaper than the show of another."""
    work = Work()
    work.add("show", "203.0.113.1", 0.05)
    for number in range(120):
        work.add(number, f"192.0.{number % 8}.1", 0.01)
    gone = work.run(60)
    assert gone
    assert "show" not in gone
    assert work.total <= 1.0 + 1e-6
    left = [sum(key % 8 == place for key in work.spent if key != "show") for place in range(8)]
    assert max(left) - min(left) <= 1
    assert work.gone[min(gone)].startswith("streams take 1.")
    assert "more than 1.00" in work.gone[min(gone)]


def test_time_when_one_address_is_alone_is_all_its_own():
    work = Work()
    for number in range(50):
        work.add(number, "192.0.2.1", 0.04)
    assert work.run(100) == set()
    work.add("other", "198.51.100.1", 0.01)  # now it takes it from another
    assert work.run(30)
    assert "other" in work.spent


def test_time_when_addresses_of_one_network_take_it_is_charged_to_that():
    work = Work()
    for number in range(100):
        work.add(number, f"2001:db8:1:{number:x}::1", 0.01)
    for number in range(2):
        work.add(f"show{number}", f"203.0.{number}.1", 0.02)
    gone = work.run(60)
    assert gone
    assert not {"show0", "show1"} & gone


def test_time_when_a_network_takes_it_is_given_by_its_addresses_that_take_most():
    """And not by the dearest stream, which may be the only one of an address beside them."""
    work = Work(0.5)
    for number in range(100):
        work.add(number, f"192.0.2.{number % 10}", 0.02)
    work.add("show", "192.0.2.200", 0.03)
    assert work.run(60)
    assert "show" in work.spent


def test_time_when_a_stream_comes_from_another_server_is_its_own():
    work = Work()
    for number in range(30):
        work.add(f"edge{number}", "", 0.03)
    work.add("greedy", "192.0.2.1", 0.3)
    assert work.run(30) == {"greedy"}


def test_stream_when_it_gave_way_begins_again_once_there_is_time_and_no_other_name_helps():
    work = Work()
    for number in range(4):
        work.add(number, f"192.0.{number}.1", 0.3)
    (first, *rest) = sorted(work.run(30))
    address = f"192.0.{first}.1"
    assert not rest or work.total <= 0.8
    work.run(20)
    assert not work.may_begin(first, address)
    assert not work.may_begin("another name", address)
    assert work.may_begin("newcomer", "198.51.100.1")
    for key in list(work.spent):
        del work.spent[key]
    work.run(2)
    assert work.may_begin(first, address)
    assert sum(work.may_begin(f"name {number}", address) for number in range(9)) in {1, 2}  # the rest is set aside


def test_stream_when_another_address_had_its_name_does_not_rest_for_that():
    work = Work()
    work.add("show", "192.0.2.1", 0.7)
    work.add("other", "198.51.100.1", 0.5)
    assert work.run(30) == {"show"}
    assert not work.may_begin("show", "192.0.2.1")
    assert work.may_begin("show", "203.0.113.1")
    work.add("show", "203.0.113.1", 0.01)
    work.run(1)
    assert not work.may_begin("another name", "192.0.2.1")


def test_stream_when_another_network_has_its_name_now_is_not_charged_for_it():
    work = Work(0.5)
    work.add("show", "192.0.2.1", 0.46)
    work.run(40)
    work.shares["show"], work.spent["show"] = ("203.0.113.1", 0.01), ("203.0.113.1", work.spent["show"][1])
    for number in range(2):
        work.add(number, f"198.51.{number}.1", 0.3)
    gone = work.run(30)
    assert gone
    assert "show" not in gone


def test_stream_when_it_takes_more_than_all_may_begins_again_once_it_is_alone():
    work = Work(0.5)
    work.add("large", "192.0.2.1", 0.9)
    work.add("small", "203.0.113.1", 0.05)
    assert work.run(20) == {"large"}
    work.run(20)
    assert not work.may_begin("large", "192.0.2.1")
    del work.spent["small"]
    work.run(1)
    assert work.may_begin("large", "192.0.2.1")


def test_time_when_streams_are_over_in_less_than_a_look_is_charged():
    work = Work(0.4)
    work.add("show", "203.0.113.1", 0.05)
    for second in range(30):
        for number in range(20):
            work.add(f"{second}-{number}", "192.0.2.1", 0.0)
            work.spent[f"{second}-{number}"] = "192.0.2.1", 0.03
        work.run(1)
    assert work.gone
    assert "show" not in work.gone


def test_time_when_streams_come_and_go_keeps_to_its_limit():
    draw, work = random.Random(3), Work()
    for second in range(600):
        for _ in range(draw.randint(0, 3)):
            key, address = f"{second}-{draw.random()}", f"192.0.{draw.randint(0, 9)}.1"
            if work.may_begin(key, address):
                work.add(key, address, draw.choice((0.005, 0.02, 0.1)))
        if work.spent and draw.random() < 0.5:
            work.spent.pop(draw.choice(sorted(work.spent)))
        work.run(1)
        assert work.time._taken <= 1.0 + 1e-6
    assert work.gone


def test_writer_when_it_works_tells_what_that_took_and_for_how_many_bytes(tmp_path):
    recorder, tags = Bench(tmp_path).recorder, source(2)
    recorder.intake.begin(0.0)
    for tag in tags:
        recorder.intake.take(tag.type_id, tag.timestamp, tag.payload, 0.0)
    recorder.start()
    assert recorder.stop(20)
    assert recorder.taken_bytes == sum(len(tag.payload) for tag in tags)
    assert recorder.spent_s > 0
