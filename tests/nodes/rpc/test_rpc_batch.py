"""Batches as objects: what they refuse, and whom they tell what."""

from __future__ import annotations

import pytest

from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.rpc.jobs.batch import NODE_THREAD, Batch, TaggedThread
from flowctl.nodes.rpc.jobs.slots import Slots


def test_results_when_jobs_end_in_any_order_are_in_the_order_of_the_jobs():
    batch: Batch[int] = Batch()
    for number in range(3):
        batch.add_job(lambda number=number: number)
    got = []
    batch.completion(got.extend)
    jobs = batch.start()
    error = ValueError("no 1s")
    assert batch.note_outcome(2, jobs[2][0](), None) is False
    assert batch.note_outcome(1, None, error) is False
    assert batch.note_outcome(0, jobs[0][0](), None) is True
    call, thread = batch.complete()
    call()
    assert thread is None
    assert [got[0].get(), got[1].error, got[2].get()] == [0, error, 2]
    with pytest.raises(ValueError, match="no 1s"):
        got[1].get()
    assert repr(got) == "[JobResult(0), JobResult(error=ValueError('no 1s')), JobResult(2)]"


def test_batch_when_it_could_not_be_run_is_refused():
    """No jobs, a second completion, which could replace one unnoticed, or a job on the node's own thread (OX-78)."""
    batch: Batch[int] = Batch()
    with pytest.raises(LocalProtocolError, match="no jobs"):
        batch.start()
    with pytest.raises(ConfigError, match="the node's own"):
        batch.add_job(lambda: 1, NODE_THREAD)
    batch.add_job(lambda: 1)
    batch.completion(lambda _: None, NODE_THREAD)
    with pytest.raises(LocalProtocolError, match="one completion"):
        batch.completion(lambda _: None)
    batch.start()
    assert batch.note_outcome(0, 1, None)
    assert batch.complete()[1] is NODE_THREAD


def test_batch_when_submitted_takes_nothing_more():
    batch: Batch[int] = Batch()
    batch.add_job(lambda: 1, TaggedThread("disk", Slots.tagged_thread("disk")))
    assert [thread.name for _, thread in batch.start()] == ["disk"]
    for late in (lambda: batch.add_job(lambda: 2), lambda: batch.completion(lambda _: None), batch.start):
        with pytest.raises(LocalProtocolError, match="was submitted"):
            late()


def test_batch_when_no_completion_is_set_ends_silently():
    batch: Batch[None] = Batch()
    batch.add_job(lambda: None)
    batch.start()
    assert not batch.has_completion
    assert batch.note_outcome(0, None, None)
    assert batch.complete() is None
