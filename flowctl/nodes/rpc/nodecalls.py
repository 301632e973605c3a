"""Calls that others hand to a node's thread: each is made once, also those that a stop leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.pollgroup import PollGroup


@dataclass(slots=True, eq=False)
class NodeCalls:
    """Calls on the node's thread; any thread."""

    group: PollGroup  #: whose thread it is; another one where the node runs on its caller's loop
    started: bool = False  #: nothing is added to the node any more
    stopping: bool = False  #: nothing new begins
    #: What has an outcome to tell and waits for the node's thread; any thread appends.
    _undone: dict[Callable[[], object], object] = field(default_factory=dict)
    _over: bool = False  #: nothing that is queued on the loop is sure to run

    def do(self, what: Callable[..., object], *args: Any) -> None:
        """Do it on the node's thread: now if this is it, else soon and in the order of the calls."""
        self._check()
        if self.group.in_thread():
            what(*args)
        else:
            self.group.call_soon(what, *args)

    def do_or_fail(self, what: Callable[..., object], *args: Any) -> None:
        """Do as `do` what has an outcome to tell, on whatever thread if the node is stopped before it is done.

        What is queued on a loop that has been stopped never runs, and nothing says so: it is kept here until it has.
        """
        self._check()
        if self.group.in_thread():
            what(*args)
            return
        if self.stopping:
            raise ClosedError("the node was stopped")
        undone = partial(what, *args)
        self._undone[undone] = None
        try:
            self.group.call_soon(self._do_once, undone)
        except ClosedError:
            if self._undone.pop(undone, self) is None:
                raise
            return  # the one that has stopped the node has done it
        if self._over:
            self.fail_undone()

    def _check(self) -> None:
        if not self.started:
            raise LocalProtocolError("the node was not started", hint="start(), or async with")
        if self._over:
            raise ClosedError("the node was stopped")

    def _do_once(self, undone: Callable[[], object]) -> None:
        if self._undone.pop(undone, self) is None:
            undone()

    def fail_undone(self) -> None:
        """Do what the loop, which is over, has left: told that the node is stopped, each fails."""
        self.stopping = self._over = True
        for undone in list(self._undone):
            self.make(self._do_once, undone)

    def make(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back on this thread; what it raises is reported."""
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001  (a callback's fault must not cost others their messages)
            self.group.report(getattr(callback, "__qualname__", "callback"), error)
