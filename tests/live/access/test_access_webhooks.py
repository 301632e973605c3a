"""HTTP hooks: what they are sent, what their answers mean, and what a dead, slow or strange one does."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import logging
import socket
import threading
import time

import pytest
import structlog
from hook_kit import HookServer, answer_of, http

from flowctl.errors import LimitExceededError
from flowctl.live.access.request import UNDECIDED, LiveRequest, Why
from flowctl.live.access.rules import HookFailure, StreamAccess
from flowctl.live.access.turns import Turns
from flowctl.live.access.webhooks import WebHooks, body_of
from flowctl.live.config import LiveConfig
from flowctl.live.gate import AccessGate
from flowctl.wire.rtmp.url import parse_url

WAIT_S = 20.0
SECRET = "a-key-that-nobody-guesses"


@pytest.fixture
def server():
    server = HookServer()
    yield server
    server.close()


@pytest.fixture
def hooks():
    failures = []
    hooks = WebHooks(lambda *failure: failures.append(failure))
    hooks.start()
    yield hooks
    hooks.stop(1.0)
    assert failures == []


def request_of(kind="publish", text=f"rtmp://media.example/live/room?key={SECRET}", address="192.0.2.7", number=7):
    url = parse_url(text)
    return LiveRequest(kind=kind, connection=number, peer=(address, 1), url=url, page_url="http://page.example/")


def ask(hooks, access, request=None):
    return answer_of(hooks.ask, access, request or request_of())


def asks(*urls, **more):
    return StreamAccess(on_publish=tuple(urls), **({"hook_timeout_s": 10.0} | more))


@pytest.mark.parametrize("body", ["0", " 0\r\n", '{"code": 0}', '{"code":0,"data":null}'])
def test_answer_of_zero_allows(hooks, server, body):
    """As SRS takes it: the number alone, or as code of an object."""
    server.answer = lambda _: http(body)
    assert ask(hooks, asks(server.url("/api?x=1"))) is None
    assert server.paths == ["/api?x=1"]


@pytest.mark.parametrize("failure", list(HookFailure))
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (http("1"), Why.FORBIDDEN),
        (http("-1"), Why.FORBIDDEN),
        (http('{"code": 403, "msg": "no"}'), Why.FORBIDDEN),
        (http("", "403 Forbidden"), Why.FORBIDDEN),
        (http("0", "401 Unauthorized"), Why.UNAUTHORIZED),
    ],
)
def test_answer_that_refuses_does_so_whatever_failures_do(hooks, server, answer, why, failure):
    """A number that is not 0, or a status that says no: that is a decision, and 401 alone tells of a guess."""
    server.answer = lambda _: answer
    refusal = ask(hooks, asks(server.url(), hook_failure=failure))
    assert (refusal.why, refusal.text) == (why, "The server's hook does not allow this.")
    assert refusal.guess is (why is Why.UNAUTHORIZED)


def _redirect(server):
    return http("0", "302 Found", f"Location: {server.url('/elsewhere')}")


BAD = {
    "no JSON": lambda _: http("OK"),
    "nothing": lambda _: http(""),
    "truth": lambda _: http("false"),
    "no code": lambda _: http("{}"),
    "code of text": lambda _: http('{"code": "0"}'),
    "list": lambda _: http("[0]"),
    "deep": lambda _: http("[" * 60_000),
    "number without end": lambda _: http("9" * 60_000),
    "huge": lambda _: http(b" " * 200_000 + b"0"),
    "endless": lambda _: [b"HTTP/1.1 200 OK\r\n\r\n", *[b" " * 65536] * 64],
    "long header": lambda _: http("0", "200 OK", "X: " + "x" * 300_000),
    "bomb": lambda _: http(gzip.compress(b" " * 10_000_000 + b"0"), "200 OK", "Content-Encoding: gzip"),
    "cut": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0",
    "no HTTP": lambda _: b"220 mail.example ESMTP\r\n",
    "not found": lambda _: http("0", "404 Not Found"),
    "broken": lambda _: http("0", "500 Internal Server Error"),
    "created": lambda _: http("0", "201 Created"),
    "redirect": _redirect,
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("failure", list(HookFailure))
def test_answer_that_is_none_is_a_failure(hooks, server, what, failure):
    """Whatever it is: refused where failures refuse, let in where they allow; a redirect is not followed."""
    server.answer = lambda _: BAD[what](server)
    refusal = ask(hooks, asks(server.url(), hook_failure=failure))
    assert (None if refusal is None else refusal.why) == (Why.UNAVAILABLE if failure is HookFailure.REFUSE else None)
    assert server.paths == ["/hook"]


@pytest.mark.parametrize("failure", list(HookFailure))
def test_hook_that_is_dead_or_hangs_is_a_failure_in_its_time(hooks, server, failure):
    """Nobody listens; somebody does and never answers; an octet comes now and then for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/"
    server.answer = lambda _: None

    def drip(_):
        def pieces():
            yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
            while not server.release.wait(0.05):
                yield b" "

        return list_of(pieces)

    dripping = HookServer(drip)
    expected = Why.UNAVAILABLE if failure is HookFailure.REFUSE else None
    for url in (dead, server.url(), dripping.url(), "http://name.invalid/"):
        refusal = ask(hooks, asks(url, hook_timeout_s=0.3, hook_failure=failure))
        assert (None if refusal is None else refusal.why) is expected
    dripping.close()


class list_of(list):  # noqa: N801 - a list whose items are made when they are sent
    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return self._make()


def test_each_of_several_hooks_must_allow_and_one_that_hangs_hides_none(hooks, server):
    other = HookServer(lambda _: None)
    for failure in HookFailure:
        server.answer = lambda _: http("1")
        refusal = ask(hooks, asks(other.url(), server.url(), hook_timeout_s=0.5, hook_failure=failure))
        assert refusal.why is Why.FORBIDDEN
        server.answer = lambda _: http("0")
        refusal = ask(hooks, asks(other.url(), server.url(), hook_timeout_s=0.2, hook_failure=failure))
        assert (refusal is None) is (failure is HookFailure.ALLOW)
    other.answer = lambda _: http("0")
    assert ask(hooks, asks(other.url(), server.url())) is None
    other.close()


def test_bodies_have_the_names_of_srs():
    """What tools for SRS read, with the parameters that the client put behind the name."""
    connect = LiveRequest(
        kind="connect",
        connection=7,
        peer=("192.0.2.7", 1),
        url=parse_url("rtmp://media.example/live?key=k"),
        page_url="http://page.example/",
    )
    common = {"client_id": "7", "ip": "192.0.2.7", "vhost": "media.example", "app": "live"}
    stream = {"stream": "room", "param": f"?key={SECRET}", "stream_url": "/live/room"}
    stream["stream_id"] = "vid-6e0cb2a6"
    page = {"pageUrl": "http://page.example/"}
    expected = {
        "on_connect": (connect, {"tcUrl": "rtmp://media.example/live?key=k"} | page),
        "on_close": (connect, {"tcUrl": "rtmp://media.example/live?key=k"}),
        "on_publish": (request_of(), {"tcUrl": "rtmp://media.example/live"} | stream),
        "on_unpublish": (request_of(), {"tcUrl": "rtmp://media.example/live"} | stream),
        "on_play": (request_of("play"), {"tcUrl": "rtmp://media.example/live"} | stream | page),
        "on_stop": (request_of("play"), {"tcUrl": "rtmp://media.example/live"} | stream),
    }
    for action, (request, more) in expected.items():
        body = body_of(action, request)
        assert body.pop("server_id").startswith("vid-")
        assert len(body.pop("service_id")) == 8
        assert body == {"action": action} | common | more


def test_thread_that_asks_is_never_blocked_and_questions_do_not_wait_for_each_other(hooks, server):
    server.answer = lambda _: None
    other = HookServer()
    answers = []
    for number in range(40):
        hooks.ask(asks(server.url()), request_of(number=number), lambda *answer: answers.append(answer))
    assert ask(hooks, asks(other.url()), request_of(address="192.0.2.8")) is None
    assert answers == []
    other.close()


def test_question_that_is_withdrawn_is_not_answered(hooks, server):
    server.answer = lambda _: None
    answers = []
    question = hooks.ask(asks(server.url(), hook_timeout_s=0.1), request_of(), lambda *answer: answers.append(answer))
    question.cancel()
    assert ask(hooks, asks(server.url(), hook_timeout_s=0.3)).why is Why.UNAVAILABLE
    assert answers == []


def test_news_of_a_connection_come_in_order_and_a_hook_that_fails_is_passed_by(hooks, server):
    access = StreamAccess(on_end=("http://127.0.0.1:1/", server.url()))
    server.answer = lambda _: http("1", "500 No")
    connect = LiveRequest(kind="connect", connection=7, peer=("192.0.2.7", 1), url=parse_url("rtmp://h/live"))
    hooks.tell(access, request_of())
    hooks.tell(access, connect, send_bytes=10, recv_bytes=20)
    hooks.stop(WAIT_S)
    assert server.actions() == ["on_unpublish", "on_close"]
    assert (server.bodies[1]["send_bytes"], server.bodies[1]["recv_bytes"]) == (10, 20)
    assert hooks._untold == {}


def test_news_of_a_rendition_that_is_over_are_of_its_set_too(server):
    """A web server that was asked about both takes both for begun."""
    access = StreamAccess(on_publish=(server.url(),), on_end=(server.url(),))
    gate = AccessGate(lambda: LiveConfig(access=access))
    request = dataclasses.replace(request_of(text="rtmp://media.example/live/show_720?a=b"), face="live/show")
    try:
        assert answer_of(gate.ask, request) is None
        assert answer_of(gate.ask_face, request) is None
        gate.note_end(request, "over")
        gate.note_face_end(request)
    finally:
        gate.stop(10.0)
    assert [(body["action"], body["stream"], body["param"]) for body in server.bodies] == [
        (action, stream, "?a=b") for action in ("on_publish", "on_unpublish") for stream in ("show_720", "show")
    ]


def test_news_that_wait_for_a_server_that_hangs_are_bounded_for_each_address(hooks, server):
    """One that comes and goes all the time does not push out the news of others, nor fill the memory."""
    server.answer = lambda _: None
    access = StreamAccess(on_end=(server.url(),), hook_timeout_s=60.0)
    for _ in range(1000):
        hooks.tell(access, request_of())
    for _ in range(10):
        hooks.tell(access, request_of(address="192.0.2.8"))
    assert hooks._untold == {"192.0.2.7": 256, "192.0.2.8": 10}
    for number in range(6000):
        hooks.tell(access, request_of(address=f"10.0.{number >> 8}.{number & 255}"))
    assert sum(hooks._untold.values()) == 4096
    hooks.stop(0.05)


def test_requests_are_not_logged_by_the_library(hooks, server, caplog):
    """It would write the whole address of each, with what secrets it has, into the log of the server."""
    caplog.set_level(logging.DEBUG)
    assert ask(hooks, asks(server.url(f"/{SECRET}?token={SECRET}"))) is None
    assert [record.name for record in caplog.records if record.name.startswith("http")] == []
    assert SECRET not in caplog.text


def test_nothing_of_a_request_is_logged_when_a_hook_fails(hooks, server):
    server.answer = lambda _: http(f"the key {SECRET} is wrong", "500 Oops")
    access = asks(
        f"http://user:{SECRET}@127.0.0.1:{server.port}/{SECRET}?token={SECRET}", f"http://name.invalid/{SECRET}"
    )
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            assert ask(hooks, access).why is Why.UNAVAILABLE
    assert SECRET not in repr(lines)
    assert {(line["action"], line["hook"]) for line in lines} == {
        ("on_publish", f"http://127.0.0.1:{server.port}"),
        ("on_publish", "http://name.invalid"),
    }
    assert len(lines) == 2


def test_question_after_the_end_is_undecided(server):
    """A server that stops lets nobody in any more."""
    hooks = WebHooks(lambda *_: None)
    hooks.start()
    assert ask(hooks, asks(server.url())) is None
    hooks.stop(1.0)
    assert ask(hooks, asks(server.url())) is UNDECIDED
    hooks.tell(StreamAccess(on_end=(server.url(),)), request_of())


def test_question_under_way_at_the_end_is_undecided(server):
    server.answer = lambda _: None
    hooks = WebHooks(lambda *_: None)
    hooks.start()
    found, done = [], threading.Event()
    hooks.ask(asks(server.url()), request_of(), lambda _, refusal: (found.append(refusal), done.set()))
    end = time.monotonic() + WAIT_S
    while not server.bodies and time.monotonic() < end:
        time.sleep(0.005)
    hooks.stop(0.1)
    assert done.wait(WAIT_S)
    assert found == [UNDECIDED]


# -- turns


@pytest.fixture
def run(loop_factory):
    """Return a function that runs a coroutine on a loop."""
    loop = loop_factory()
    yield loop.run_until_complete
    loop.close()


def test_turns_when_one_key_has_its_share_are_there_for_others(run):
    async def main():
        turns = Turns(1, 100, 2)
        await turns.acquire("first")
        tasks = [asyncio.ensure_future(turns.acquire(key)) for key in "aab"]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceededError, match="hook_questions"):
            await turns.acquire("a")
        for _ in tasks:
            turns.release()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert turns._waiting_count == 0

    run(main())


def test_turns_when_one_key_asks_much_go_round(run):
    async def main():
        turns, order = Turns(1, 5, 5), []

        async def work(key):
            await turns.acquire(key)
            order.append(key)
            await asyncio.sleep(0)
            turns.release()

        await turns.acquire("first")
        tasks = [asyncio.ensure_future(work(key)) for key in "aaabc"]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceededError, match="hook_questions"):
            await turns.acquire("d")
        tasks[1].cancel()
        await asyncio.sleep(0)
        turns.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "b", "c", "a"]
        await turns.acquire("again")
        assert turns._waiting_count == 0

    run(main())
