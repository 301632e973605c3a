"""Fakes and fixtures for the tests of poll groups; imported by them."""

from __future__ import annotations

import asyncio
import threading

import pytest
import uvloop

from flowctl.deferred import Registration
from flowctl.pollgroup import PollGroup

WAIT_S = 20


class Errors(list):
    def __call__(self, where: str, error: Exception) -> None:
        self.append((where, error))


class FakePollable:
    def __init__(self, weight: float | None = None) -> None:
        self.registration = Registration()
        self.log: list[tuple[str, str, bool]] = []
        self.attached_event, self.detached_event = threading.Event(), threading.Event()
        self.on_attached = self.on_detached = lambda group: None
        if weight is not None:
            self.load = lambda: weight

    def attached(self, group: PollGroup) -> None:
        self.log.append(("attached", group.name, group.in_thread()))
        self.attached_event.set()
        self.on_attached(group)

    def detached(self, group: PollGroup) -> None:
        self.log.append(("detached", group.name, group.in_thread()))
        self.detached_event.set()
        self.on_detached(group)

    def what(self) -> list[str]:
        return [entry[0] for entry in self.log]


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def factory(request):
    return request.param


@pytest.fixture
def errors() -> Errors:
    return Errors()


@pytest.fixture
def make_group(factory, errors):
    groups: list[PollGroup] = []

    def make(name: str = "g", start: bool = True, **options) -> PollGroup:
        group = PollGroup(name, loop_factory=factory, on_error=errors, **options)
        groups.append(group)
        if start:
            group.start()
        return group

    yield make
    for group in groups:
        assert group.stop(WAIT_S)


@pytest.fixture
def group(make_group) -> PollGroup:
    return make_group()


def on_thread(group: PollGroup, function, *args):
    done = threading.Event()
    outcome: list = []

    def call() -> None:
        try:
            outcome.append(("value", function(*args)))
        except Exception as error:  # noqa: BLE001  (handed to the waiting thread, which raises it)
            outcome.append(("error", error))
        done.set()

    group.call_soon(call)
    assert done.wait(WAIT_S)
    kind, value = outcome[0]
    if kind == "error":
        raise value
    return value
