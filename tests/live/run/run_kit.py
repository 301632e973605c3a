"""A server without connections, sockets and processes, whose commands a test brings on by hand."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from flowctl.live.config import LiveConfig
from flowctl.live.hub import Hub
from flowctl.live.run.commands import Commands
from flowctl.live.settings.runs import RunRule
from flowctl.testing import ManualClock


def rule(on="live/*", words=("-i", "{url}"), **more):
    return RunRule(on=on, command=("/bin/sh", *words), **more)


class Process:
    """A process that does what a test says; `status`: how it has ended, None: it lives."""

    def __init__(self, pid, words, values, **limits):
        self.pid, self.words, self.values, self.limits = pid, words, values, limits
        self.output, self._other = os.pipe()
        self.status, self.said, self.asked, self.silent = None, [], 0, False
        self.stubborn = False

    def lines(self):
        said, self.said = self.said, []
        return said

    def take_unread(self):
        return 0

    @property
    def ended(self):
        return self.status is not None

    def end(self, status=0):
        self.status, self.silent = status, True

    def ask_to_end(self):
        self.asked += 1
        if self.status is None and not self.stubborn:
            self.end(-signal.SIGTERM)

    def finish(self):
        if self.status is None:
            self.end(-signal.SIGKILL)
        os.close(self.output)
        os.close(self._other)
        return self.status


class Publisher:
    number = 1

    def __init__(self, address="192.0.2.1", query=None):
        self.peer = (address, 7)
        self.query = query or {}

    def query_of(self, _):
        return self.query

    def on_thread(self, callback, *args):
        callback(*args)

    def publish_replaced(self, stream):
        pass


class Desk:
    """A server without connections, and its commands."""

    def __init__(self, *rules, **config):
        self.clock = ManualClock()
        self.hub = Hub(LiveConfig(run=rules, **config), self.clock, lambda *_: None)
        self.server = SimpleNamespace(
            hub=self.hub, clock=self.clock, address=("0.0.0.0", 1935), stopping=False, drains_for_s=None
        )
        self.processes = []
        self.fails = None
        self.commands = Commands(self.server, self._make)
        self.publishers = {}

    def _make(self, words, values, **limits):
        if self.fails is not None:
            raise self.fails
        self.processes.append(Process(100 + len(self.processes), words, values, **limits))
        return self.processes[-1]

    def publish(self, name, *, codecs=True, **of):
        publisher = self.publishers[name] = Publisher(**of)
        stream = self.hub.publish(name, publisher)
        if codecs:
            stream.codecs.update(video="avc1", audio="mp4a")
        return self.look()

    def leave(self, name, *, grace=False):
        stream = self.hub.find_stream(name)
        self.hub.unpublish(stream, self.publishers.pop(name), grace=grace)
        return self.look()

    def look(self, seconds=0.0):
        """Let time pass in steps, and look each time; return the processes that live."""
        for _ in range(max(1, round(seconds * 10))):
            self.clock.advance(min(seconds, 0.1))
            self.commands.look(self.clock())
        return [item for item in self.processes if item.status is None]

    def rows(self, name="live/bob"):
        return self.hub.find_stream(name).commands

    def configure(self, **changes):
        self.hub.configure(LiveConfig(**changes))
        return self.look()
