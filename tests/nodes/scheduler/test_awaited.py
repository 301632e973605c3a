"""The scheduler for coroutines, and what drives its time."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading

import pytest
from scheduler_kit import FakePeer, FakeSender, Response, World

from flowctl.errors import BrokenError, ClosedError, ConfigError
from flowctl.nodes.scheduler.scheduler import MessageScheduler
from flowctl.pollgroup import PollGroup
from flowctl.testing import ManualClock

LIMIT_S = 20.0


def run(loop_factory, coroutine):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(asyncio.wait_for(coroutine, LIMIT_S))


def on_both_loops(test):
    """Run a test that is a coroutine function on each kind of loop."""

    @functools.wraps(test)
    def played(loop_factory, **named):
        run(loop_factory, test(**named))

    signature = inspect.signature(test)
    also = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    played.__signature__ = signature.replace(parameters=[*signature.parameters.values(), also])
    return played


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Echo(FakePeer):
    """A peer that answers each request with its message, within `send` or when it is told to."""

    def __init__(self, peer_id, scheduler, prompt=True):
        super().__init__(peer_id)
        self.scheduler = scheduler
        self.prompt = prompt
        self.came = asyncio.Event()

    def send(self, request_id, message):
        super().send(request_id, message)
        self.came.set()
        if self.prompt and request_id is not None:
            self.answer(request_id, message)

    def answer(self, request_id, message):
        return self.scheduler.receive(self, Response(request_id, message))


@on_both_loops
async def test_request_when_answered_returns_the_response():
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler)
    scheduler.connect(peer)
    answers = await asyncio.gather(*(scheduler.request(str(number), timeout=LIMIT_S) for number in range(5)))
    assert [answer.value for answer in answers] == list("01234")
    figures = scheduler.statistics()
    assert (figures.open_channels, figures.waiting_senders, figures.outstanding) == (1, 0, 0)
    assert scheduler.next_deadline() is None


@on_both_loops
async def test_request_when_peers_are_preferred_or_excluded_goes_where_it_should():
    scheduler = MessageScheduler()
    peers = [Echo(number, scheduler, prompt=number != 3) for number in (1, 2, 3)]
    for peer in peers:
        scheduler.connect(peer)
    await scheduler.request("a", timeout=LIMIT_S)
    await scheduler.request("b", timeout=LIMIT_S, prefer=[9, 2])
    await scheduler.request("c", timeout=LIMIT_S, exclude=[1], prefer=[1])
    waiting = asyncio.create_task(scheduler.request("d", timeout=LIMIT_S, exclude=[1, 2]))
    await peers[2].came.wait()
    asked = [[message for _, message in peer.sent] for peer in peers]
    assert asked == [["a"], ["b", "c"], ["d"]]
    last = asyncio.create_task(scheduler.request("e", timeout=LIMIT_S, exclude=[1, 2]))
    await asyncio.sleep(0)
    assert scheduler.statistics().waiting_senders == 1
    peers[2].answer(peers[2].sent[0][0], "late")
    assert (await waiting).value == "late"
    peers[2].answer(peers[2].sent[1][0], "last")
    assert (await last).value == "last"


@pytest.mark.parametrize("connected", [True, False])
@on_both_loops
async def test_request_when_the_time_is_over_raises(connected):
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler, prompt=False)
    if connected:
        scheduler.connect(peer)
    with pytest.raises(TimeoutError, match="no response" if connected else "no channel"):
        await scheduler.request("a", timeout=0.01)
    figures = scheduler.statistics()
    assert (figures.waiting_senders, figures.outstanding) == (0, 0)


@pytest.mark.parametrize("end", ["disconnect", "stop", "stop while waiting", "stopped before"])
@on_both_loops
async def test_request_when_its_peer_or_the_scheduler_goes_raises(end):
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler, prompt=False)
    if end != "stop while waiting":
        scheduler.connect(peer)
    if end == "stopped before":
        scheduler.stop()
    task = asyncio.create_task(scheduler.request("a", timeout=LIMIT_S))
    await asyncio.sleep(0)
    if end == "disconnect":
        scheduler.disconnect(1)
    else:
        scheduler.stop()
    with pytest.raises(BrokenError if end == "disconnect" else ClosedError):
        await task


@pytest.mark.parametrize("sent", [True, False])
@on_both_loops
async def test_request_when_cancelled_is_withdrawn(sent):
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler, prompt=False)
    if sent:
        scheduler.connect(peer)
    task = asyncio.create_task(scheduler.request("a", timeout=LIMIT_S))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    figures = scheduler.statistics()
    assert (figures.waiting_senders, figures.withdrawn_senders) == (0, int(not sent))
    assert (figures.withdrawn_requests, figures.closed_channels) == (int(sent), int(sent))
    if sent:
        assert peer.answer(peer.sent[0][0], "") is False
        assert scheduler.statistics().open_channels == 1


def test_request_when_its_time_is_out_of_range_is_refused(loop_factory):
    with pytest.raises(ConfigError, match="timeout is 0 s"):
        run(loop_factory, MessageScheduler().request("a", timeout=0))


def test_request_when_its_response_type_is_none_is_refused(loop_factory):
    with pytest.raises(ConfigError, match="response_type is 1"):
        run(loop_factory, MessageScheduler().request("a", timeout=1.0, response_type=1))


@on_both_loops
async def test_request_when_the_answer_comes_on_another_thread_wakes_the_coroutine():
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler, prompt=False)
    scheduler.connect(peer)
    task = asyncio.create_task(scheduler.request("a", timeout=LIMIT_S))
    await asyncio.sleep(0)
    await asyncio.to_thread(peer.answer, peer.sent[0][0], "far")
    assert (await task).value == "far"


@on_both_loops
async def test_offers_when_iterated_give_one_channel_at_a_time():
    scheduler = MessageScheduler()
    peers = [Echo(number, scheduler) for number in (1, 2, 3)]
    for peer in peers:
        scheduler.connect(peer)
    seen = []
    async for channel in scheduler.offers(size=3):
        seen.append(channel.peer_id)
        assert scheduler.statistics().closed_channels == 1
        if channel.peer_id == 2:
            response = await channel.request("ask", LIMIT_S)
            assert response.value == "ask"
            with pytest.raises(BrokenError, match="nothing was sent"):
                channel.notify("again", 1.0)
    assert seen == [1, 2, 2]
    assert scheduler.statistics().closed_channels == 0
    assert [len(peer.sent) for peer in peers] == [0, 2, 0]


@on_both_loops
async def test_offers_when_all_were_passed_over_wait_for_what_is_new():
    scheduler = MessageScheduler()
    peers = [Echo(number, scheduler, prompt=False) for number in (1, 2)]
    scheduler.connect(peers[0])
    seen = []

    async def look():
        async for channel in scheduler.offers():
            seen.append(channel.peer_id)  # noqa: PERF401  (what was seen so far is looked at)

    task = asyncio.create_task(look())
    await settle()
    assert seen == [1]
    other = asyncio.create_task(scheduler.request("m", timeout=LIMIT_S))
    await settle()
    peers[0].answer(peers[0].sent[0][0], "")
    await other
    scheduler.connect(peers[1])
    await settle()
    scheduler.stop()
    await task
    assert seen == [1, 1, 2]


@on_both_loops
async def test_offers_when_the_channel_is_notified_keep_it_closed():
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler)
    scheduler.connect(peer)
    async for channel in scheduler.offers(size=1):
        channel.notify("note", LIMIT_S)
    assert peer.sent == [(None, "note")]
    figures = scheduler.statistics()
    assert (figures.notifications, figures.closed_channels) == (1, 1)


@pytest.mark.parametrize("takes", [False, OSError()])
@on_both_loops
async def test_offers_when_the_peer_does_not_take_it_raise_and_open_the_channel(takes):
    errors = []
    scheduler = MessageScheduler(on_error=lambda *error: errors.append(error))
    peer = FakePeer(1, takes)
    scheduler.connect(peer)
    async for channel in scheduler.offers(size=1):
        with pytest.raises(BrokenError):
            await channel.request("m", LIMIT_S)
    figures = scheduler.statistics()
    assert (figures.open_channels, figures.outstanding, figures.requests) == (1, 0, 0)
    assert len(errors) == isinstance(takes, OSError)


@pytest.mark.parametrize("when", ["waiting", "in the body"])
@on_both_loops
async def test_offers_when_cancelled_hold_nothing(when):
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler)
    if when == "in the body":
        scheduler.connect(peer)

    async def look():
        async for _ in scheduler.offers():
            await asyncio.sleep(LIMIT_S)

    task = asyncio.create_task(look())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert scheduler.statistics().closed_channels == 0
    assert scheduler.statistics().waiting_senders == 0


@on_both_loops
async def test_offers_when_their_loop_is_left_give_the_channel_back():
    scheduler = MessageScheduler()
    peer = Echo(1, scheduler)
    scheduler.connect(peer)
    async for _ in scheduler.offers():
        break
    await settle()
    assert scheduler.statistics().closed_channels == 0
    assert scheduler.statistics().open_channels == 1


def test_time_when_run_on_a_poll_group_passes_on_its_thread():
    group = PollGroup("scheduler")
    group.start()
    world = World()
    world.scheduler = scheduler = MessageScheduler()
    told = threading.Event()
    threads = []
    try:
        scheduler.run_on(group)
        world.connect(1)
        sender = FakeSender(world, "a")
        sender.receiver.then = lambda *_: (threads.append(threading.get_ident()), told.set())
        sender.on_offer = lambda offer: next(iter(offer)).send("m", sender.receiver, 0.01)
        scheduler.schedule(sender)
        assert told.wait(LIMIT_S)
        assert threads == [group.thread_id]
        scheduler.stop()
    finally:
        assert group.stop()


def test_time_when_its_loop_has_ended_goes_on_with_the_next(loop_factory):
    scheduler = MessageScheduler()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            run(loop_factory, scheduler.request("a", timeout=0.01))
    scheduler.stop()
    assert scheduler.statistics().waiting_senders == 0


def test_coroutines_of_a_loop_that_is_closed_take_no_channel():
    errors = []
    scheduler = MessageScheduler(ManualClock(), on_error=lambda *error: errors.append(error))
    loop = asyncio.new_event_loop()

    async def channels():
        return await anext(scheduler.offers())

    waiting = [loop.create_task(scheduler.request("m", timeout=5.0)), loop.create_task(channels())]
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert scheduler.statistics().waiting_senders == 2
    peer = FakePeer(1)
    scheduler.connect(peer)
    figures = scheduler.statistics()
    assert (figures.waiting_senders, figures.open_channels, figures.closed_channels) == (0, 1, 0)
    assert (peer.sent, errors) == ([], [])
    for task in waiting:
        task._log_destroy_pending = False  # they are left as they are
