"""Messengers as real processes over a faulty link, killed at random moments: each message is applied exactly once."""

from __future__ import annotations

import run as bench_run


def test_messages_when_both_ends_are_killed_again_and_again_are_each_applied_once():
    module = bench_run.load("messenger_faults")
    (row,) = module.run(messages=5000, kills=8, pause_s=(0.05, 0.6), limit_s=90.0, seed=4)
    assert (row["missing"], row["twice"], row["left"]) == (0, 0, 0)
    assert min(row["sender_killed"], row["receiver_killed"]) >= 1
    assert min(row["dropped"], row["doubled"], row["late"]) > 100
    assert row["outbox_most_mb"] + row["inbox_most_mb"] < 30
    assert row["rows_seen"] < 100
