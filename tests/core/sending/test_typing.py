"""A program of a user is checked as strictly as flowctl itself: mistakes are found before it runs."""

from __future__ import annotations

import inspect

import pytest
from mypy import api
from source_kit import ROOT

import flowctl

RIGHT = """
import asyncio
from collections.abc import Callable

from flowctl import AdmissionLimits, CloseReason, Limits, LivePolicy, ServeOptions, Server, Session, serve
from flowctl.live import LiveFrame, LiveHooks, LiveRequest, build_live_server
from flowctl.testing import drive


class Chat(Session):
    def __init__(self, room: list["Chat"]) -> None:
        self.room = room

    def opened(self) -> None:
        self.room.append(self)

    async def received(self, data: memoryview) -> None:
        await asyncio.sleep(0)
        for peer in self.room:
            peer.send(bytes(data))

    def closed(self, reason: CloseReason, details: str) -> None:
        self.room.remove(self)


class Hooks(LiveHooks):
    async def may_publish(self, request: LiveRequest) -> str | None:
        return None if request.query.get("key") == "k" else "no"

    def may_play(self, request: LiveRequest) -> str | None:
        return None

    def frame(self, frame: LiveFrame) -> None:
        print(frame.stream, frame.timestamp_ms, len(frame.payload))


room: list[Chat] = []
factory: Callable[[], Session] = lambda: Chat(room)
reason: CloseReason | None = (drive(Chat(room)).closed or (None,))[0]
server = Server(Session, limits=Limits.parse("1MiB,10"), policy=LivePolicy(), group_count=2)
live = build_live_server(ServeOptions(port=1935), Hooks())


def main() -> None:
    serve(Session)
    serve(lambda: Chat(room), "127.0.0.1", 7000, limits=Limits.parse("1MiB,10"), admission=AdmissionLimits())
    serve(factory, port=7000, on_error=lambda where, error: print(where, error))
"""
WRONG = [
    ('serve(Session, limits="1MiB,10")', "arg-type"),
    ("serve(Session, prot=7000)", "call-arg"),
    ('serve(Session, port="7000")', "arg-type"),
    ("serve(lambda: 7)", "return-value"),
    ("serve()", "call-arg"),
    ("serve(Session, on_error=lambda where: None)", "misc"),
]


def check(tmp_path, program):
    """Return what mypy says of a program, in strict mode and without the settings of this project."""
    path = tmp_path / "program.py"
    path.write_text(program, "utf-8")
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'programs'}"
    said, trouble, _ = api.run(["--strict", "--config-file=", "--no-error-summary", cache, str(path)])
    assert trouble == ""
    return said.splitlines()


def test_program_of_a_user_passes_in_strict_mode(tmp_path):
    assert check(tmp_path, RIGHT) == []


def test_mistakes_in_a_call_of_serve_are_found(tmp_path):
    lines = ["from flowctl import Session, serve", *(call for call, _ in WRONG)]
    said = check(tmp_path, "\n".join(lines) + "\n")
    for number, (call, code) in enumerate(WRONG, 2):
        assert [line for line in said if f":{number}: error" in line and f"[{code}]" in line], (call, said)


@pytest.mark.parametrize("name", ["limits", "policy", "admission", "group_count", "on_error"])
def test_help_of_serve_has_the_arguments_of_the_server(name):
    assert inspect.signature(flowctl.serve).parameters[name] == inspect.signature(flowctl.Server).parameters[name]
    assert "SIGTERM" in flowctl.serve.__doc__
