"""Coroutines that become tasks only if they wait, on uvloop and asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from flowctl.nodes.rpc.jobs.begin import begin

NAME: ContextVar[str] = ContextVar("NAME", default="none")


async def _begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Begin it where a node does: in a callback of the loop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[asyncio.Task[None] | None] = loop.create_future()

    def call() -> None:
        try:
            done.set_result(begin(loop, coroutine))
        except Exception as error:  # noqa: BLE001  (handed to the one who waits)
            done.set_exception(error)

    loop.call_soon(call)
    return await done


async def test_coroutine_when_it_never_waits_is_done_without_a_task(loop_factory):
    seen: list[str] = []

    async def quick() -> None:
        seen.append("ran")

    async def bad() -> None:
        raise ValueError("bad")

    assert await _begun(quick()) is None
    assert seen == ["ran"]
    with pytest.raises(ValueError, match="bad"):
        await _begun(bad())


async def test_coroutine_when_it_waits_goes_on_as_a_task(loop_factory):
    loop = asyncio.get_running_loop()
    good: asyncio.Future[int] = loop.create_future()
    bad: asyncio.Future[int] = loop.create_future()
    seen: list[object] = []

    async def waits() -> None:
        seen.append(await good)
        await asyncio.sleep(0)
        try:
            await bad
        except ValueError as error:
            seen.append(str(error))

    task = await _begun(waits())
    assert task is not None
    good.set_result(1)
    bad.set_exception(ValueError("bad"))
    await task
    assert seen == [1, "bad"]


async def test_coroutine_when_cancelled_before_the_first_step_of_its_task_is_told_where_it_waits(loop_factory):
    """Its own `finally` runs: it had begun, so it must be able to end."""
    seen: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            seen.append("ended")

    loop = asyncio.get_running_loop()
    task_of: asyncio.Future[asyncio.Task[None]] = loop.create_future()

    def call() -> None:
        task = begin(loop, waits())
        assert task is not None
        task.cancel()
        task_of.set_result(task)

    loop.call_soon(call)
    task = await task_of
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "ended"]


async def test_timeout_when_entered_before_the_first_wait_cancels_the_task_it_became(loop_factory):
    seen: list[str] = []

    async def late() -> None:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")

    async def fails() -> None:
        raise ValueError("child")

    async def group() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fails())
                await asyncio.Event().wait()
        except* ValueError:
            seen.append("group")

    for coroutine in (late(), group()):
        task = await _begun(coroutine)
        assert task is not None
        await task
    assert seen == ["timeout", "group"]


async def test_coroutine_when_it_cancels_itself_at_first_is_cancelled_where_it_waits(loop_factory):
    async def cancels() -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.Event().wait()

    task = await _begun(cancels())
    assert task is not None
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_coroutine_when_begun_within_a_task_is_not_that_task(loop_factory):
    seen: list[object] = []

    async def looks() -> None:
        seen.append(asyncio.current_task())

    mine = asyncio.current_task()
    assert begin(asyncio.get_running_loop(), looks()) is None
    assert asyncio.current_task() is mine
    assert seen[0] is not mine


async def test_context_when_a_coroutine_sets_a_variable_is_its_own(loop_factory):
    seen: list[str] = []

    async def sets(name: str) -> None:
        seen.append(NAME.get())
        NAME.set(name)
        await asyncio.sleep(0)
        seen.append(NAME.get())

    for name in ("one", "two"):
        task = await _begun(sets(name))
        assert task is not None
        await task
    assert seen == ["none", "one", "none", "two"]
    assert NAME.get() == "none"
