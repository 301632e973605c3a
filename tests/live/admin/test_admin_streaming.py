"""Streams of events by themselves: what a listener gets that is slow, that comes back, or hears nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from flowctl.control.operations import Permission
from flowctl.live.admin import streaming
from flowctl.live.admin.asking import OperationAsker
from flowctl.live.admin.streaming import KEPT, MOST_QUEUED, EventStreams


class Server:
    """Tells what it was given, as the table of operations does."""

    def __init__(self):
        self.events, self.changes = [], []

    def carry_out(self, name, call, permission, caller):
        asked = json.loads(call)
        if name == "changes":
            found = [item for item in self.changes if item["version"] > asked["since"]]
            said = {"run": "r", "version": len(self.changes), "whole": True, "changes": found}
        else:
            number = int(asked["since"].rpartition(":")[2] or 0)
            found = self.events[number:][: asked["limit"]]
            said = {"events": found, "cursor": f"run:{number + len(found)}", "lost": 0}
        return json.dumps({"result": said}).encode()


class Peer:
    """One that listens, as ASGI has it; takes nothing while `taking` is not set."""

    def __init__(self, streams, last_id="", permission=Permission.ADMIN):
        self.headers = [(b"last-event-id", last_id.encode())] if last_id else []
        self.streams, self.text = streams, ""
        self.taking, self.gone = asyncio.Event(), asyncio.Event()
        self.taking.set()
        scope = {"headers": self.headers, "state": {"permission": permission}}
        self.task = asyncio.ensure_future(streams.serve(scope, self._receive, self._send))

    async def _receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.taking.wait()
        self.text += message.get("body", b"").decode()

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition(self.events):  # noqa: ASYNC110 - what is waited for is not only in what was sent
                await asyncio.sleep(0.001)

    @property
    def events(self):
        """(id, what, data) of each event."""
        found = []
        for block in self.text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and line[0] != ":")
            if "event" in lines:
                found.append((lines.get("id"), lines["event"], json.loads(lines["data"])))
        return found

    async def leave(self):
        self.gone.set()
        await asyncio.wait_for(self.task, 20)


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a coroutine with a server and its streams."""
    monkeypatch.setattr(streaming, "POLL_S", 0.001)

    def start(test):
        async def whole():
            server = Server()
            asking = OperationAsker(server.carry_out)
            streams = EventStreams(asking)
            try:
                await test(server, streams)
            finally:
                streams.end()
                asking.stop()

        asyncio.run(whole())

    return start


def event(number):
    """Return an event of a connection, with words of a peer that would end a line."""
    return {"what": "state", "connection": number, "why": "a\nevent: evil\n\n"}


def test_listener_when_it_is_too_slow_loses_the_oldest_and_is_told_how_many(run):
    async def check(server, streams):
        slow, quick = Peer(streams), Peer(streams)
        await quick.until(lambda _: quick.text.startswith("retry"))
        slow.taking.clear()
        server.events.append(event(-1))
        await quick.until(lambda events: len(events) == 1)
        for first in range(0, MOST_QUEUED + 100, 50):
            server.events += [event(number) for number in range(first, first + 50)]
            await quick.until(lambda events: len(events) == len(server.events))
        slow.taking.set()
        await slow.until(lambda events: events and events[-1][2] == server.events[-1])
        lost = sum(item[2]["count"] for item in slow.events if item[1] == "lost")
        assert lost > 0
        assert lost + sum(item[1] == "state" for item in slow.events) == len(server.events) == len(quick.events)
        await slow.leave()
        await quick.leave()
        assert streams.count == 0

    run(check)


def test_listener_when_it_comes_back_goes_on_where_it_was(run):
    async def check(server, streams):
        peer = Peer(streams)
        server.events += [event(number) for number in range(5)]
        await peer.until(lambda events: len(events) == 5)
        third = peer.events[2][0]
        again, stranger = Peer(streams, third), Peer(streams, "elsewhere-7")
        await again.until(lambda events: len(events) == 2)
        await stranger.until(bool)
        assert [item[2]["connection"] for item in again.events] == [3, 4]
        assert [(item[1], item[2]["count"]) for item in stranger.events] == [("lost", None)]
        server.events += [event(number) for number in range(KEPT + 10)]
        await peer.until(lambda events: len(events) + sum(e[2]["count"] for e in events if e[1] == "lost") >= KEPT)
        late = Peer(streams, third)
        await late.until(lambda events: any(item[1] == "lost" for item in events))
        assert sum(item[2]["count"] for item in late.events if item[1] == "lost") >= 1
        for item in (peer, again, stranger, late):
            await item.leave()

    run(check)


def test_events_when_peers_choose_their_words_are_one_line_each(run):
    async def check(server, streams):
        peer = Peer(streams)
        server.events.append(event(1))
        await peer.until(bool)
        assert [item[1] for item in peer.events] == ["state"]
        assert peer.events[0][2]["why"] == event(1)["why"]
        await peer.leave()

    run(check)


def test_changes_when_made_after_the_first_look_are_told_to_those_who_may_list_them(run):
    async def check(server, streams):
        server.changes.append({"version": 1, "what": "ban"})
        peer, looks = Peer(streams), Peer(streams, permission=Permission.BASIC)
        await peer.until(lambda _: streams._version == ("r", 1))
        server.changes.append({"version": 2, "what": "unban"})
        await peer.until(bool)
        server.events.append(event(1))
        await looks.until(bool)
        again = Peer(streams, peer.events[0][0].rpartition("-")[0] + "-0", permission=Permission.BASIC)
        await again.until(bool)
        assert peer.events[0][2]["what"] == "unban"
        assert [item[1] for item in looks.events] == [item[1] for item in again.events] == ["state"]
        for item in (peer, looks, again):
            await item.leave()

    run(check)


def test_listener_when_nothing_happens_hears_a_heartbeat(run, monkeypatch):
    """A comment comes so that nobody on the way cuts what is silent."""
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.01)

    async def check(server, streams):
        peer = Peer(streams)
        await peer.until(lambda _: peer.text.count(": heartbeat") >= 2)
        assert peer.events == []
        await peer.leave()

    run(check)
