"""The running coroutines of a session: what follows from their end, and that none outlives its connection unseen."""

from __future__ import annotations

import asyncio

import pytest

from flowctl.core.loop.coroutines import Coroutines
from flowctl.errors import InternalError


@pytest.fixture
def loop(loop_factory):
    loop = loop_factory()
    yield loop
    loop.close()


class Told(list):
    def __call__(self, where, error):
        self.append((where, type(error)))


def turns(loop, count=5):
    for _ in range(count):
        loop.call_soon(loop.stop)
        loop.run_forever()


async def answer(value=None):
    await asyncio.sleep(0)
    return value


async def fail(error):
    await asyncio.sleep(0)
    raise error


def test_coroutine_when_it_returns_is_followed_by_what_was_asked_for(loop):
    told, after = Told(), []
    running = Coroutines(told)
    running.start(loop, answer(), "opened", lambda: after.append("resumed"))
    assert running.running
    turns(loop)
    assert (running.running, after, told) == (False, ["resumed"], [])


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_coroutine_when_it_raises_anything_is_told_and_the_loop_goes_on(loop, error):
    told, after = Told(), []
    running = Coroutines(told)
    running.start(loop, fail(error), "opened", lambda: after.append("resumed"))
    turns(loop)
    ((where, kind),) = told
    assert (where, issubclass(kind, Exception), after, running.running) == ("opened", True, [], False)


@pytest.mark.parametrize(("taken", "fails"), [(3, True), (5, False), (None, False)])
def test_coroutine_of_received_when_it_leaves_something_has_failed(loop, taken, fails):
    told = Told()
    Coroutines(told).start(loop, answer(taken), "received", None, 5)
    turns(loop)
    assert told == ([("received", InternalError)] if fails else [])


def test_cancel_when_coroutines_run_ends_them_without_a_word(loop):
    told = Told()
    running = Coroutines(told)
    running.start(loop, asyncio.sleep(1000), "received")
    turns(loop, 2)
    running.start(loop, asyncio.sleep(1000), "opened")
    running.cancel()
    assert not running.let_go()
    turns(loop)
    assert (running.running, told) == (False, [])
    assert running.let_go()


def test_coroutine_when_somebody_else_cancels_it_is_told(loop):
    told = Told()
    Coroutines(told).start(loop, asyncio.sleep(1000), "received")
    turns(loop, 2)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    turns(loop)
    assert told == [("received", asyncio.CancelledError)]
