"""Hooks: who may publish and play, what the client is told, and what the application hears; the wait holds one peer."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hook_kit import answer_of
from live_kit import AAC_HEADER, AVC_HEADER, STEP_S, World, audio, inter, key

from flowctl.core.flow.state import MessageClass
from flowctl.errors import ConfigError, LimitExceededError
from flowctl.live.access.request import TOO_SLOW, UNDECIDED, LiveRequest, Question, Refusal, Why
from flowctl.live.config import LiveConfig
from flowctl.live.hooks import HookRunner, LiveFrame, LiveHooks
from flowctl.live.rows import stream_row
from flowctl.live.server import build_live_server
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.events import PlayStarted, PublishStarted, Rejected
from flowctl.wire.rtmp.url import parse_url
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO, Message

WAIT_S = 10.0


class Asked:
    """Stands for a `HookRunner`: keeps the questions, and is told what to answer."""

    decide_s = 5.0
    most_news = 100

    def __init__(self):
        self.decides = {"connect": False, "publish": True, "play": True}
        self.told_kinds = {"publish"}
        self.tap = None
        self.questions, self.news = [], []

    def ask(self, request, answer):
        question = Question(answer)
        self.questions.append((request, question))
        return question

    def check_news(self, request):
        if len(self.news) >= self.most_news:
            raise LimitExceededError("hook_news", len(self.news) + 1, self.most_news)

    def note_begin(self, request):
        if request.kind in self.told_kinds:
            self.news.append((f"{request.kind} began", request.stream))

    def note_end(self, request, why):
        self.news.append((f"{request.kind} over", request.stream, why))


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def world(asked):
    world = World()
    world.hub.gate.hooks = asked
    yield world
    assert world.group.failures == []


def descriptions(peer):
    """Return (code, description) of the refusals that a client was told."""
    return [(event.code, event.description) for event in peer.events if isinstance(event, Rejected)]


def started(peer):
    """Return whether the client was told that it publishes or plays."""
    return any(isinstance(event, PublishStarted | PlayStarted) for event in peer.events)


def test_publisher_waits_for_the_answer_and_is_let_in(world, asked):
    peer = world.connect().publish("live/room?token=x")
    ((request, question),) = asked.questions
    assert (request.kind, request.stream, request.query, request.user) == ("publish", "live/room", {"token": "x"}, None)
    assert "'x'" not in repr(request)
    assert (started(peer), world.hub.is_published("live/room"), asked.news) == (False, False, [])
    question.tell(None)
    world.run()
    assert (started(peer), world.hub.is_published("live/room")) == (True, True)
    assert asked.news == [("publish began", "live/room")]
    peer.command("FCUnpublish", None, "room")
    world.run()
    assert asked.news[1:] == [("publish over", "live/room", "FCUnpublish")]


def test_only_the_connection_that_asks_waits(world, asked):
    asked.decides["play"] = False
    slow, other = world.connect().publish("live/slow"), world.connect().publish("live/other")
    viewer = world.connect().play("live/other")
    asked.questions[1][1].tell(None)
    world.run()
    other.video(0, key(b"o"))
    world.run(0.1)
    assert [item.payload for item in viewer.media] == [key(b"o")]
    assert slow.connection.receiver.paused
    asked.questions[0][1].tell(None)
    world.run()
    assert not slow.connection.receiver.paused
    slow.video(0, key(b"s"))
    world.run(0.1)
    assert world.hub.find_stream("live/slow").messages_in[MessageClass.KEY] == 1


def test_hook_that_does_not_answer_refuses(world, asked):
    peer = world.connect().publish()
    world.run(asked.decide_s + STEP_S)
    assert descriptions(peer) == [("NetStream.Publish.BadName", TOO_SLOW.text)]
    assert world.hub.limits_hit["decide_s"] == 1
    asked.questions[0][1].tell(None)
    world.run()
    assert (started(peer), asked.news) == (False, [])


def test_client_that_has_gone_is_not_let_in(world, asked):
    """An answer for it is nobody's."""
    gone = world.connect().publish("live/gone")
    gone.connection.close()
    world.run(0.1)
    asked.questions[0][1].tell(None)
    world.run()
    assert (asked.news, world.hub.streams()) == ([], {})


@pytest.mark.parametrize("between", [0, 6000], ids=["same piece", "later piece"])
def test_withdrawn_request_is_not_answered_and_the_next_one_is_asked(world, asked, between):
    """Publish, deleteStream, createStream, publish: if the first is asked at all, its answer is nobody's."""
    peer = world.connect()
    peer.publish("live/first")
    asked.questions[0][1].tell(Refusal("no"))
    world.run()

    def say(name, *values, stream_id=0):
        peer.wire.up += peer.session.send_message(commands.command(name, 9, None, *values, stream_id=stream_id))

    say("publish", "second", stream_id=1)
    peer.wire.up += peer.session.send_message(Message(4, 0, TYPE_AUDIO, 1, bytes(between)))
    say("deleteStream", 1.0)
    say("createStream")
    say("publish", "third", stream_id=1)
    world.run()
    assert asked.questions[-1][0].stream == "live/third"
    for _, question in asked.questions:
        question.tell(None)
    world.run()
    assert asked.news == [("publish began", "live/third")]


@pytest.mark.parametrize(
    ("ask", "why", "code"),
    [
        ("publish", Why.UNAUTHORIZED, "NetStream.Publish.Unauthorized"),
        ("publish", Why.FORBIDDEN, "NetStream.Publish.BadName"),
        ("publish", Why.UNAVAILABLE, "NetStream.Publish.BadName"),
        ("play", Why.UNAUTHORIZED, "NetStream.Play.Failed"),
        ("play", Why.FORBIDDEN, "NetStream.Play.Failed"),
        ("play", Why.NOT_FOUND, "NetStream.Play.StreamNotFound"),
        ("play", Why.UNAVAILABLE, "NetStream.Play.Failed"),
    ],
)
def test_refusal_has_the_code_that_rtmp_has_for_it(world, asked, ask, why, code):
    peer = getattr(world.connect(), ask)()
    asked.questions[0][1].tell(Refusal("No.", why))
    world.run()
    assert descriptions(peer) == [(code, "No.")]
    assert (asked.news, world.hub.streams()) == ([], {})


def test_connect_waits_for_the_answer_and_its_end_is_told(world, asked):
    asked.decides = {"connect": True, "publish": False, "play": False}
    asked.told_kinds = {"connect", "play"}
    peer = world.connect().play()
    ((request, question),) = asked.questions
    assert (request.kind, request.stream) == ("connect", "live")
    assert not started(peer)
    question.tell(None)
    world.run()
    assert started(peer)
    peer.connection.close()
    world.run(0.1)
    assert [item[:2] for item in asked.news] == [
        ("connect began", "live"),
        ("play began", "live/room"),
        ("play over", "live/room"),
        ("connect over", "live"),
    ]


def test_connect_that_is_refused_is_told_and_closed(world, asked):
    """The client reads the words, then the connection ends; nobody is told of the end of what was not let in."""
    asked.decides["connect"], asked.told_kinds = True, {"connect"}
    peer = world.connect().publish()
    asked.questions[0][1].tell(Refusal("Not from here."))
    world.run(0.1)
    assert descriptions(peer) == [("NetConnection.Connect.Rejected", "Not from here.")]
    assert peer.ended == (CloseReason.AUTH_REFUSED, "connect refused")
    assert asked.news == []


# -- the runner


class Recorder(LiveHooks):
    """Notes what it is told; the names of threads too."""

    def __init__(self):
        self.told, self.threads = [], set()
        self.gate = threading.Event()
        self.gate.set()

    def frame(self, frame):
        self.gate.wait(WAIT_S)
        self.told.append(frame)
        self.threads.add(threading.current_thread().name)

    async def published(self, request):
        self.told.append(("published", request.stream))

    def ended(self, request, why):
        self.told.append(("ended", request.stream, why))


def request_of(kind="publish", address="192.0.2.1"):
    return LiveRequest(kind=kind, connection=1, peer=(address, 1), url=parse_url("rtmp://h/live/room?key=s"))


@pytest.fixture
def run():
    """Return a function that starts a runner for hooks: (runner, failures)."""
    runners = []

    def start(hooks, **settings):
        failures = []
        runner = HookRunner(hooks, lambda where, error: failures.append((where, error)), **settings)
        runner.start()
        runners.append(runner)
        return runner, failures

    yield start
    for runner in runners:
        runner.stop(WAIT_S)


def hooks_that(decide):
    return type("Hooks", (LiveHooks,), {"may_publish": decide, "may_play": decide})()


async def _says_later(_self, _request):
    await asyncio.sleep(0)
    return "later"


@pytest.mark.parametrize("kind", ["publish", "play"])
@pytest.mark.parametrize(
    ("decide", "refusal"),
    [
        (lambda _self, _request: None, None),
        (lambda _self, request: f"no {request.kind}", "no {kind}"),
        (_says_later, "later"),
        (lambda *arguments: _says_later(*arguments), "later"),  # noqa: PLW0108 - it is what is tested
    ],
    ids=["plain yes", "plain no", "coroutine function", "plain, gives a coroutine"],
)
def test_hook_may_be_plain_or_a_coroutine_function(run, kind, decide, refusal):
    runner, failures = run(hooks_that(decide))
    assert answer_of(runner.ask, request_of(kind)) == (refusal and Refusal(refusal.format(kind=kind)))
    assert failures == []


def _raises(_self, _request):
    raise ValueError("a mistake")


def _exits(_self, _request):
    raise SystemExit(1)


async def _exits_later(_self, _request):
    raise SystemExit(1)


@pytest.mark.parametrize(
    "decide",
    [
        *(_raises, _exits, _exits_later, lambda *_: True, lambda *_: False, lambda *_: ""),
        *(lambda *_: Refusal(None), lambda *_: Refusal("no", 403), lambda *_: Refusal),
    ],
)
def test_hook_that_fails_refuses_and_is_reported(run, decide):
    """Whatever it raises, and an answer that is none: closed, contained, told; the next question is answered."""
    runner, failures = run(hooks_that(decide))
    for count in (1, 2):
        assert answer_of(runner.ask, request_of()) == UNDECIDED
        assert len(failures) == count
        assert failures[0][0] == "hook may_publish"


def test_slow_plain_hooks_do_not_wait_for_each_other(run):
    release = threading.Event()
    first = threading.Event()

    def decide(_self, _request):
        if not first.is_set():
            first.set()
            release.wait(WAIT_S)

    runner, _ = run(hooks_that(decide))
    answers = []
    runner.ask(request_of(), lambda _question, refusal: answers.append(refusal))
    assert first.wait(WAIT_S)
    assert answer_of(runner.ask, request_of()) is None
    assert answers == []
    release.set()


def test_questions_of_one_address_wait_for_each_other_and_withdrawn_ones_are_not_asked(run):
    gate, asked, answered = threading.Semaphore(0), [], threading.Event()

    def decide(_self, request):
        asked.append(request.peer[0])
        gate.acquire(timeout=WAIT_S)

    runner, failures = run(hooks_that(decide))
    questions = [runner.ask(request_of(), lambda *_: None) for _ in range(300)]
    for question in questions[:200]:
        question.cancel()
    runner.ask(request_of(address="192.0.2.2"), lambda *_: answered.set())
    gate.release(1 + len(asked))  # those under way end, and the other one has its turn
    for _ in range(200):
        if "192.0.2.2" in asked:
            break
        time.sleep(0.01)
        gate.release()
    assert asked.index("192.0.2.2") < 40
    gate.release(400)
    assert answered.wait(WAIT_S)
    assert not runner._waiting.count_of("192.0.2.2")
    assert failures == []


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine function", "plain, gives a coroutine"])
def test_coroutine_that_hangs_is_cancelled_when_its_time_is_over(run, plain):
    ended = threading.Event()

    async def hangs(_self, _request):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    hooks = hooks_that((lambda *arguments: hangs(*arguments)) if plain else hangs)  # noqa: PLW0108 - it is what is tested
    hooks.decide_s = 0.05
    runner, failures = run(hooks)
    answers = []
    runner.ask(request_of(), lambda _question, refusal: answers.append(refusal))
    assert ended.wait(WAIT_S)
    runner.stop(WAIT_S)
    assert (answers, failures) == ([], [])


def test_coroutines_at_a_time_are_bounded_and_withdrawn_questions_are_not_asked(run, monkeypatch):
    monkeypatch.setattr("flowctl.live.hooks._MOST_COROUTINES", 8)
    under_way, peak, calls, answers, done = 0, 0, 0, [], threading.Event()

    async def decide(_self, _request):
        nonlocal under_way, peak, calls
        calls, under_way = calls + 1, under_way + 1
        peak = max(peak, under_way)
        await asyncio.sleep(0)
        under_way -= 1

    def answer(_question, refusal):
        answers.append(refusal)
        if len(answers) == 90:
            done.set()

    runner, failures = run(hooks_that(decide))

    def ask_all():  # in one turn of the loop, so that all of them are there at once
        for question in [runner.ask(request_of(), answer) for _ in range(100)][-10:]:
            question.cancel()

    runner._loop.call_soon_threadsafe(ask_all)
    assert done.wait(WAIT_S)
    runner.stop(WAIT_S)
    assert (peak, calls, answers, failures) == (8, 90, [None] * 90, [])


def test_answer_that_cannot_be_given_is_reported_and_the_next_one_is(run):
    runner, failures = run(hooks_that(lambda *_: None))

    def gone(*_):
        raise RuntimeError("stopped")

    runner.ask(request_of(), gone)
    assert answer_of(runner.ask, request_of()) is None
    assert answer_of(runner.ask, request_of()) is None
    assert [where for where, _ in failures] == ["the answer of a hook"]


def test_coroutines_run_on_the_loop_of_the_application(loop_factory):
    loop = loop_factory()
    where = []

    async def decide(_self, _request):
        where.append(asyncio.get_running_loop())

    failures = []
    runner = HookRunner(hooks_that(decide), lambda *failure: failures.append(failure), loop)
    runner.start()

    async def ask():
        answered = asyncio.Event()
        runner.ask(request_of(), lambda *_: loop.call_soon_threadsafe(answered.set))
        await answered.wait()

    loop.run_until_complete(ask())
    loop.close()
    assert where == [loop]
    assert answer_of(runner.ask, request_of()) == UNDECIDED
    runner.stop(WAIT_S)


def test_news_come_in_order_on_one_thread(run):
    recorder = Recorder()
    runner, failures = run(recorder)
    runner.note_begin(request_of())
    for at in range(100):
        runner.tap("live/room", MessageClass.AUDIO, TYPE_AUDIO, at, b"%d" % at)
    runner.note_end(request_of(), "closeStream")
    runner.stop(WAIT_S)
    frames = [LiveFrame("live/room", MessageClass.AUDIO, TYPE_AUDIO, at, b"%d" % at) for at in range(100)]
    assert recorder.told == [("published", "live/room"), *frames, ("ended", "live/room", "closeStream")]
    assert (recorder.threads, failures) == ({"flowctl-hooks-news"}, [])


class Owner(LiveHooks):
    def __init__(self):
        self.told = []

    def unwritten(self, request, what, why):
        self.told.append((request.peer, request.stream, what, why))


def test_publication_that_is_not_recorded_is_told_to_the_application_once_and_shown(run, world):
    owner = Owner()
    runner, failures = run(owner)
    world.hub.gate.hooks = runner
    first = world.publisher()
    world.run()
    for why in ({}, {"record": "no place"}, {"record": "still none"}, {"hls": "no room"}, {}, {"hls": "no room"}):
        world.hub.note_unwritten("live/room", why)
    world.hub.note_unwritten("live/other", {"record": "no place"})  # has gone meanwhile
    row = stream_row(world.hub.find_stream("live/room"), 0)
    assert row["unwritten"] == {"hls": "no room"}
    first.leave()
    world.run(5.0)
    second = world.publisher()
    world.run()
    assert stream_row(world.hub.find_stream("live/room"), 0)["unwritten"] == {}  # of this publication nothing lacks yet
    world.hub.note_unwritten("live/room", {"hls": "no room"})
    second.leave()
    world.run(5.0)
    runner.stop(WAIT_S)
    told = [("record", "no place"), ("hls", "no room"), ("record", ""), ("hls", ""), ("hls", "no room")]
    assert [item[2:] for item in owner.told] == [*told, ("hls", "no room")]
    assert {item[1] for item in owner.told} == {"live/room"}
    assert (runner._publishing, failures) == ({}, [])


def test_publications_that_nobody_has_heard_of_are_limited_by_address(run):
    recorder = Recorder()
    runner, _ = run(recorder)
    recorder.gate.clear()
    runner.tap("live/room", MessageClass.KEY, 9, 0, b"key")  # holds the one thread
    request, other = request_of(), request_of(address="192.0.2.2")
    for _ in range(32):
        runner.check_news(request)
        runner.note_begin(request)
        runner.note_end(request, "closeStream")
    with pytest.raises(LimitExceededError, match="hook_news is 33, the limit is 32"):
        runner.check_news(request)
    runner.check_news(other)
    recorder.gate.set()
    runner.stop(WAIT_S)
    assert len(recorder.told) == 65
    runner.check_news(request)
    assert runner._untold == {}


def test_publish_when_the_application_has_not_heard_of_so_many_is_refused(world, asked):
    asked.most_news = 0
    peer = world.connect().publish("live/room")
    asked.questions[0][1].tell(None)
    world.run()
    assert not started(peer)
    assert peer.codes == [commands.PUBLISH_BAD_NAME]
    assert world.hub.limits_hit["hook_news"] == 1
    assert not world.hub.is_published("live/room")


def test_frames_for_a_recorder_that_stands_still_are_bounded_and_counted(run):
    """It holds nobody up: what does not fit is left out, and the next frame says how many were."""
    recorder = Recorder()
    recorder.gate.clear()
    runner, _ = run(recorder)
    sent = 80
    for at in range(sent):
        runner.tap("live/room", MessageClass.INTER, TYPE_VIDEO, at, bytes(1 << 20))
    recorder.gate.set()
    end = time.monotonic() + WAIT_S
    while len(recorder.told) < 31 and time.monotonic() < end:
        time.sleep(0.01)
    runner.tap("live/room", MessageClass.KEY, TYPE_VIDEO, sent, b"k")
    runner.stop(WAIT_S)
    assert len(recorder.told) < 40
    assert sent + 1 == len(recorder.told) + sum(frame.lost_count for frame in recorder.told)
    assert recorder.told[-1].lost_count > 0  # the queue was full when the last of them came


def test_hook_that_raises_on_news_is_reported_and_told_the_next(run):
    class Bad(LiveHooks):
        def __init__(self):
            self.count = 0

        def frame(self, frame):
            self.count += 1
            raise KeyboardInterrupt

    hooks = Bad()
    runner, failures = run(hooks)
    for at in range(3):
        runner.tap("live/room", MessageClass.AUDIO, TYPE_AUDIO, at, b"x")
    runner.stop(WAIT_S)
    assert (hooks.count, len(failures)) == (3, 3)
    assert all(isinstance(error, Exception) for _, error in failures)


def test_hooks_that_nobody_overrides_cost_nothing():
    runner = HookRunner(LiveHooks(), lambda *_: None)
    assert (runner.decides, runner.tap) == ({"connect": False, "publish": False, "play": False}, None)
    runner.note_begin(request_of())
    assert runner._news.empty()


def test_tap_gets_what_viewers_get(world, asked):
    taken = []
    asked.decides = {"connect": False, "publish": False, "play": False}
    asked.tap = lambda *frame: taken.append(frame)
    peer = world.connect().publish()
    peer.video(0, AVC_HEADER)
    peer.audio(0, AAC_HEADER)
    for at, (send, body) in enumerate([(peer.video, inter(b"0")), (peer.video, key(b"1")), (peer.audio, audio(b"2"))]):
        send(40 * at, body)
    world.run(0.1)
    assert [(frame[0], frame[1].name, frame[3]) for frame in taken] == [
        ("live/room", "HEADER", 0),
        ("live/room", "HEADER", 0),
        ("live/room", "KEY", 40),
        ("live/room", "AUDIO", 80),
    ]
    assert taken[2][4] == key(b"1")


# -- from the command line


def test_hooks_named_in_a_setting_are_made(tmp_path, monkeypatch):
    (tmp_path / "our_hooks_here.py").write_text(
        "from flowctl.live import LiveHooks\nclass Ours(LiveHooks):\n    decide_s = 1.5\nclass Other: pass\n"
    )
    monkeypatch.chdir(tmp_path)
    server = build_live_server(LiveConfig(hooks="our_hooks_here:Ours"))
    assert server.hub.gate.hooks.decide_s == 1.5
    server.stop(0.1)
    for text in ("our_hooks_here:Other", "our_hooks_here:None", "our_hooks_here", "no_such_module:Ours"):
        with pytest.raises(ConfigError, match="hooks"):
            build_live_server(LiveConfig(hooks=text))


@pytest.mark.parametrize("hooks", [LiveHooks, object(), "module:Hooks"])
def test_hooks_that_are_no_object_of_the_class_are_refused_at_once(hooks):
    """The class in the place of an object would be asked, fail, and refuse everybody."""
    with pytest.raises(ConfigError, match=r"hooks is .*it must be LiveHooks"):
        HookRunner(hooks, lambda *_: None)
