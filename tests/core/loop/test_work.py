"""Accounts of work: shares kept, whom they slow and cut, addresses, turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowctl.core.loop.work import (
    ADDRESS_TURN_S,
    MEMORY_S,
    NO_WORK_LIMITS,
    PER_ADDRESS,
    PER_CONNECTION,
    ThreadWork,
    WorkAccount,
    WorkLimits,
)
from flowctl.core.text.addresses import address_key
from flowctl.errors import ConfigError

LIMITS = WorkLimits(share_per_connection=0.25, share_per_address=0.5, cut_after_s=10.0)
STEP_S = 0.004


class Thread:
    """A book whose turns are begun by hand."""

    def __init__(self, limits=LIMITS) -> None:
        self.limits, self.calls = limits, []
        self.book = ThreadWork(self.calls.append)

    def enter(self, key="192.0.2.1", now=0.0) -> WorkAccount:
        account = WorkAccount(self.limits, now)
        self.book.enter(account, key, now)
        return account

    def next_turn(self) -> None:
        calls, self.calls[:] = list(self.calls), []
        for call in calls:
            call()


def push(accounts, seconds, step_s=STEP_S, now=0.0):
    """Let all work as much as they may; return (work of each, time, what followed and when)."""
    free = dict.fromkeys(accounts, now)
    found = []
    end = now + seconds
    while now < end:
        ready = [account for account in accounts if free[account] <= now]
        for account in ready:
            now += step_s
            overrun = account.charge(step_s, now)
            if overrun is not None:
                free[account] = overrun.resumes_at
                found.append((now, account, overrun))
        if not ready:
            now = min(free.values())
    return [account.work_s for account in accounts], now, found


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 5.0)), max_size=60), st.floats(0.05, 1.0))
def test_work_when_holds_are_kept_never_passes_share_and_burst(steps, share):
    """However work comes, no stretch of time holds more than its share, the burst, and the step that went over."""
    account = WorkAccount(WorkLimits(share_per_connection=share, share_per_address=0), 0.0)
    now = 0.0
    done = []
    for took_s, pause_s in steps:
        now += pause_s + took_s
        overrun = account.charge(took_s, now)
        done.append((now, took_s))
        if overrun is not None:
            assert overrun.resumes_at > now
            now = overrun.resumes_at
    step_s = max((took_s for _, took_s in done), default=0.0)
    for first, (ended, took_s) in enumerate(done):
        began, total = ended - took_s, 0.0
        for until, more_s in done[first:]:
            total += more_s
            most_s = share * MEMORY_S + step_s  # of the sum
            assert total <= most_s / MEMORY_S * (until - began) + most_s + 1e-6


def test_account_when_within_its_share_is_never_slowed():
    """A publisher of 50 Mbit/s, 6 % of a thread, and one that sends what ten seconds away have left, go free."""
    account = WorkAccount(LIMITS, 0.0)
    assert all(account.charge(0.0018, index * 0.03) is None for index in range(10_000))
    burst = WorkAccount(LIMITS, 0.0)
    assert all(burst.charge(0.004, index * 0.004) is None for index in range(150))


def test_crowd_when_a_thousand_join_behind_one_address_is_not_slowed():
    """A thousand viewers of one router who join at once, 1.5 ms each, and acknowledge from then on, go free."""
    thread = Thread()
    viewers = [thread.enter() for _ in range(1000)]
    now = 0.0
    for viewer in viewers:
        for _ in range(3):
            now += 0.0005
            assert viewer.charge(0.0005, now) is None
    for index in range(5000):
        now += 0.001
        assert viewers[index % 1000].charge(0.00005, now) is None


def test_account_when_over_its_share_is_slowed_to_it_and_cut_in_time():
    account = WorkAccount(LIMITS, 0.0)
    (work_s,), now, found = push([account], 9.0)
    assert work_s <= 0.25 * now + 0.25 * MEMORY_S + STEP_S
    assert work_s >= 0.25 * now
    assert [overrun.begins for _, _, overrun in found].count(True) == 1
    assert account.slowed_count == 1
    assert {overrun.error.limit for _, _, overrun in found} == {PER_CONNECTION}
    assert found[0][2].error.value > found[0][2].error.maximum == 0.25
    assert not any(overrun.ends for _, _, overrun in found)
    began = found[0][0]
    _, _, more = push([account], 5.0, now=now)
    ended = [at for at, _, overrun in more if overrun.ends]
    assert began + 10.0 <= ended[0] < began + 10.5
    last = next(overrun for _, _, overrun in more if overrun.ends)
    assert "slowed for 10" in str(last.error)
    assert "of work in all" in str(last.error)


def test_account_when_it_kept_to_its_share_for_a_while_begins_anew():
    account = WorkAccount(LIMITS, 0.0)
    _, now, _ = push([account], 6.0)
    assert account.slowed(now)
    assert not account.slowed(now + 4.0)
    _, now, found = push([account], 9.0, now=now + 4.0)
    assert found[0][2].begins
    assert account.slowed_count == 2
    assert not any(overrun.ends for _, _, overrun in found)


def test_limits_when_off_slow_nobody():
    thread = Thread(NO_WORK_LIMITS)
    account = thread.enter()
    assert all(account.charge(1.0, float(index)) is None for index in range(100))
    assert account.work_s == 100.0
    patient = WorkAccount(WorkLimits(cut_after_s=0), 0.0)
    _, _, found = push([patient], 60.0)
    assert found
    assert not any(overrun.ends for _, _, overrun in found)


@pytest.mark.parametrize("fields", [{"share_per_connection": 1.5}, {"share_per_address": -1}, {"cut_after_s": "x"}])
def test_limits_when_out_of_range_are_refused(fields):
    with pytest.raises((ConfigError, TypeError), match=f"{next(iter(fields))}|not supported"):
        WorkLimits(**fields)


def test_address_when_its_connections_share_it_gets_its_share_in_all():
    thread = Thread()
    accounts = [thread.enter() for _ in range(16)]
    done, now, found = push(accounts, 9.0)
    assert sum(done) <= 0.5 * now + 0.5 * MEMORY_S + 16 * STEP_S
    assert {overrun.error.limit for _, _, overrun in found} == {PER_ADDRESS}
    assert max(done) < 1.5 * min(done)


def test_address_when_one_of_many_is_the_cause_holds_that_one_alone():
    thread = Thread(WorkLimits(share_per_connection=0, share_per_address=0.5))
    attacker, publisher, *viewers = [thread.enter() for _ in range(42)]
    now, free = 0.0, 0.0
    for index in range(20_000):
        now += 0.001
        if now >= free:
            overrun = attacker.charge(0.001, now)
            free = now if overrun is None else overrun.resumes_at
        if index % 33 == 0:
            assert publisher.charge(0.001, now) is None
        if index % 25 == 0:
            assert viewers[index // 25 % 40].charge(0.00005, now) is None
    assert attacker.slowed_count
    assert attacker.work_s > 5 * publisher.work_s


@pytest.mark.parametrize("prepared", [0, 20])
def test_address_when_others_work_and_leave_spares_who_stays(prepared):
    """Behind one router, a publisher is not held for those who come, work and leave again and again; they are."""
    thread = Thread()
    publisher, waiting = thread.enter(), [thread.enter() for _ in range(prepared)]
    slowed = 0
    for round_ in range(20 * 60):
        now = round_ * 0.05
        assert publisher.charge(0.0006, now) is None
        guest = waiting.pop() if waiting else thread.enter(now=now)
        for step in range(10):
            if guest.charge(0.003, now + (step + 1) * 0.003) is not None:
                slowed += 1
                break
        thread.book.leave(guest, "192.0.2.1", now + 0.04)
    assert slowed > 100


def test_address_when_newcomers_do_nothing_slows_those_who_do_as_before():
    thread = Thread()
    guest, *workers = [thread.enter() for _ in range(5)]
    for index in range(300):
        guest.charge(0.0099, index * 0.01)
    thread.book.leave(guest, "192.0.2.1", 3.0)
    idle = [thread.enter(now=3.0) for _ in range(40)]
    done, now, _ = push(workers, 6.0, now=3.0)
    assert guest.work_s + sum(done) <= 0.5 * now + 0.5 * MEMORY_S + 4 * STEP_S
    assert not any(account.slowed(now) for account in idle)


def test_address_when_over_cuts_nobody_who_did_little_itself():
    """Forty neighbours who do a little each may have a publisher slowed with them, but not cut."""
    thread = Thread()
    publisher, neighbours = thread.enter(), [thread.enter() for _ in range(40)]
    slowed, now, free = 0, 0.0, 0.0
    for _ in range(3000):
        now += 0.02
        for neighbour in neighbours:
            neighbour.charge(0.0003, now)
        if now >= free and (overrun := publisher.charge(0.0006, now)) is not None:
            slowed, free = slowed + 1, overrun.resumes_at
            assert not overrun.ends
    assert slowed


def test_address_when_its_last_connection_left_is_remembered_until_its_sum_has_faded():
    thread = Thread()
    first = thread.enter()
    push([first], 3.0)
    thread.book.leave(first, "192.0.2.1", 3.0)
    thread.book.leave(first, "192.0.2.1", 3.0)
    again = thread.enter(now=3.0)
    assert again.address.recent_s(3.0) > 1.0
    thread.book.leave(again, "192.0.2.1", 3.0)
    other = thread.enter("192.0.2.2", now=100.0)
    thread.book.leave(other, "192.0.2.2", 100.0)
    assert not thread.book._addresses


def test_turn_when_an_address_has_had_its_part_is_over_until_the_next():
    thread = Thread()
    first, second, other = thread.enter(), thread.enter(), thread.enter("192.0.2.2")
    now = 0.0
    while not first.turn_over:
        now += 0.001
        (first if first.work_s <= second.work_s else second).charge(0.001, now)
    assert first.work_s + second.work_s == pytest.approx(ADDRESS_TURN_S / 2)
    assert second.turn_over
    assert not other.turn_over
    joiner = thread.enter()
    assert not joiner.turn_over  # half is kept for those that have hardly done anything
    joiner.charge(ADDRESS_TURN_S / 2, now)
    assert thread.enter().turn_over
    assert len(thread.calls) == 1
    thread.next_turn()
    assert not first.turn_over


def test_address_key_when_ipv6_is_its_64():
    """Who has one IPv6 address has 2^64 of them; IPv4 addresses count one by one, whatever form they come in."""
    assert address_key("2001:db8:1:2:3::4") == address_key("2001:db8:1:2:ffff::1") == "2001:db8:1:2::/64"
    assert address_key("2001:db8:1:3::1") != address_key("2001:db8:1:2::1")
    assert address_key("::ffff:192.0.2.7") == address_key("192.0.2.7") == "192.0.2.7"
    assert address_key("fe80::1%eth0") == "fe80::/64"
    assert address_key("local") == "local"


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("::ffff:cb00:7105", "203.0.113.5"),
        ("::ffff:0:203.0.113.5", "203.0.113.5"),
        ("64:ff9b::203.0.113.5", "203.0.113.5"),
        ("2002:cb00:7105:9::1", "203.0.113.5"),
        ("2001:0:4136:e378:8000:63bf:34ff:8efa", "203.0.113.5"),
        ("64:ff9b:0:0:0:1:cb00:7105", "64:ff9b::/64"),
        ("64:ff9b:1::cb00:7105", "64:ff9b:1::/64"),
        ("2001:1::cb00:7105", "2001:1::/64"),
        ("::203.0.113.5", "::/64"),
    ],
)
def test_address_key_when_an_ipv4_address_is_within_is_that(address, key):
    """Who comes through NAT64 is not all of IPv4, and who has a tunnel of 6to4 or Teredo is not many."""
    assert address_key(address) == key
