"""Counts of connections over all workers: never too few, exact in total, gone with their worker."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowctl.core.server.admission import Admission, AdmissionLimits
from flowctl.errors import LimitExceededError
from flowctl.live.cluster.workers.counts import REGION_BYTES, WorkerCounts, clear

KEY = bytes(16)
ADDRESSES = [f"203.0.113.{number}" for number in range(12)]


def counts_of(count):
    memory = memoryview(bytearray(count * REGION_BYTES))
    return [WorkerCounts(memory, own, count, KEY) for own in range(count)], memory


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ADDRESSES), st.booleans()), max_size=60))
def test_counts_when_connections_come_and_go_are_those_of_the_others(steps):
    workers, _ = counts_of(3)
    held = [Counter() for _ in workers]
    for at, address, comes in steps:
        if comes:
            total, of_address = workers[at].enter(address)
            others = [item for index, item in enumerate(held) if index != at]
            assert total == sum(item.total() for item in others)
            exact = sum(item[address] for item in others)
            assert of_address >= exact
            assert of_address == exact  # twelve addresses do not meet in four rows of 65536
            held[at][address] += 1
        elif held[at][address]:
            workers[at].leave(address)
            held[at][address] -= 1


def test_counts_when_a_worker_has_ended_are_without_it():
    (first, second, third), memory = counts_of(3)
    for worker in (first, second):
        worker.enter("192.0.2.1")
    clear(memory, 0)
    assert third.enter("192.0.2.1") == (1, 1)


def test_counts_when_there_are_many_addresses_seldom_say_too_much():
    (first, second), _ = counts_of(2)
    for number in range(20_000):
        first.enter(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    told = 0
    for number in range(500):
        told += second.enter(f"198.51.{number >> 8}.{number & 255}")[1]
    assert told <= 25


def test_admission_when_other_workers_have_connections_counts_them():
    limits = AdmissionLimits(connections=4, connections_per_address=2, new_per_address_and_s=0)
    admissions = []
    for counts in counts_of(2)[0]:
        admission = Admission(limits)
        admission.others = counts
        admissions.append(admission)
    first, second = admissions
    first.enter("192.0.2.1", 0.0)
    second.enter("192.0.2.1", 0.0)
    for admission in admissions:
        with pytest.raises(LimitExceededError) as refused:
            admission.enter("192.0.2.1", 0.0)
        assert (refused.value.limit, refused.value.value) == ("connections_per_address", 3)
    first.leave("192.0.2.1")
    second.enter("192.0.2.1", 0.0)
    first.enter("192.0.2.2", 0.0)
    first.enter("192.0.2.3", 0.0)
    with pytest.raises(LimitExceededError) as refused:
        second.enter("192.0.2.4", 0.0)
    assert refused.value.limit == "connections"
    assert (first.connections, second.connections) == (2, 2)


def test_admission_when_there_are_workers_lets_each_have_its_part_of_a_rate():
    admission = Admission(AdmissionLimits(new_per_address_and_s=20, burst_per_address=1, connections_per_address=0))
    admission.others = counts_of(2)[0][0]
    admission.enter("192.0.2.1", 0.0)
    with pytest.raises(LimitExceededError):
        admission.enter("192.0.2.1", 0.09)
    admission.enter("192.0.2.1", 0.2)
