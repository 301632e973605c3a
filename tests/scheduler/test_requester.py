"""One question asked until it is answered: tries, time, hedges, budget, and that it ends exactly once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_kit import TIMEOUT_S, World

from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import ClosedError, ConfigError, ExhaustedError, LocalProtocolError
from flowctl.nodes.scheduler.policies.budget import RetryBudget
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.requests.hedging import Hedging
from flowctl.nodes.scheduler.requests.requester import LEAST_TRY_S, LOOK_AGAIN_S, MOST_TRY_S, Requester

WAIT_S = 20


class Asked(World):
    """A world in which each peer's requests are known by number."""

    def ask(self, **options):
        options.setdefault("accept", lambda response: response.value or None)
        return Requester(self.scheduler, "question", **options)

    def sent(self):
        found = [(request_id, peer_id) for peer_id, peer in self.peers.items() for request_id, _ in peer.sent]
        self.asked = dict(found)
        self.requests = sorted(self.asked)
        return [self.asked[request_id] for request_id in self.requests]

    def answer_last(self, value=""):
        self.sent()
        return self.answer(self.requests[-1], value=value)

    def idle(self):
        figures = self.scheduler.statistics()
        return figures.waiting_senders == 0 and not self.scheduler._core.calls


def world_of(count, **options):
    world = Asked(**options)
    for peer_id in range(1, count + 1):
        world.connect(peer_id)
    return world


def test_requester_when_the_answer_is_of_use_has_it():
    world = world_of(1)
    future = world.ask().start()
    world.answer_last("answer")
    assert future.result(0) == "answer"
    assert world.idle()


def test_requester_when_a_reply_is_empty_tries_an_untried_peer():
    """Each empty reply makes it ask another; one that was tried is not asked again while others are left (MS-42)."""
    world = world_of(3)
    future = world.ask().start()
    world.answer_last()
    world.answer_last()
    assert world.sent() == [1, 2, 3]
    world.answer_last("answer")
    assert future.result(0) == "answer"


def test_requester_when_all_were_tried_begins_anew_with_tries_of_a_second():
    """With time left the tried list is cleared; no try is shorter than its least, nor longer than its most (MS-42)."""
    world = world_of(40)
    future = world.ask(timeout_s=10.0).start()
    tries_s = []
    for _ in range(3):
        tries_s.append(world.scheduler.next_deadline() - world.clock())
        world.advance(tries_s[-1])
    assert tries_s == pytest.approx([LEAST_TRY_S] * 3, abs=0.02)
    for _ in range(37):
        world.answer_last()
    assert world.sent() == [*range(1, 41), 1], "the first is open again, so it is asked again"
    assert not future.done()


def test_requester_when_few_peers_are_left_gives_each_its_share_of_the_time():
    world = world_of(5)
    world.ask(timeout_s=10.0).start()
    assert world.scheduler.next_deadline() - world.clock() == pytest.approx(2.0, abs=0.02)
    alone = world_of(1)
    alone.ask().start()
    assert alone.scheduler.next_deadline() - alone.clock() == pytest.approx(MOST_TRY_S, abs=0.02)


def test_requester_when_time_is_up_withdraws_and_says_how_many_it_tried():
    """The error has the peers tried and those there; queue and requests are taken back (MS-42)."""
    world = world_of(3)
    future = world.ask(timeout_s=3.0).start()
    world.answer_last()
    world.advance(3.1)
    with pytest.raises(ExhaustedError, match="exhausted 2 of 3 peers in 3 s"):
        future.result(0)
    assert world.idle()
    assert world.take_events() == []


def test_requester_when_no_peer_is_there_waits_for_one_until_its_time():
    world = Asked()
    first, second = world.ask(timeout_s=2.0).start(), world.ask(timeout_s=9.0).start()
    world.advance(2.1)
    with pytest.raises(ExhaustedError, match="exhausted 0 of 0 peers"):
        first.result(0)
    world.connect(7)
    world.answer_last("late")
    assert second.result(0) == "late"


def test_requester_when_all_open_peers_were_tried_waits_for_one_that_is_busy():
    world = world_of(2)
    world.schedule("other", want=1, accepts={2})
    world.ask().start()
    world.answer_last()
    asked = world.sent()
    assert asked == [2, 1]
    world.answer(world.requests[0])
    assert world.sent() == [2, 1, 2]


def test_requester_when_an_untried_peer_is_no_more_begins_anew():
    """A peer whose object died without a disconnect is not waited for: those that live are asked again (MS-42)."""
    world = world_of(2)
    world.ask().start()
    del world.peers[2]
    world.answer_last()
    assert world.sent() == [1, 1]


def test_requester_when_the_untried_peer_leaves_begins_anew():
    """No offer comes when a busy peer leaves, so it looks again by itself, and asks those that are there (MS-42)."""
    world = world_of(2)
    world.schedule("other", accepts={2})
    future = world.ask().start()
    world.answer_last()
    assert world.sent() == [2, 1]
    world.scheduler.disconnect(2)
    world.advance(LOOK_AGAIN_S + 1 / 32)
    assert len(world.peers[1].sent) == 2
    world.answer_last("answer")
    assert future.result(0) == "answer"
    assert world.idle()


def test_requester_when_the_untried_peer_stays_busy_keeps_its_place():
    world = world_of(2)
    world.schedule("other", accepts={2})
    world.ask(timeout_s=4.0).start()
    world.answer_last()
    for _ in range(3):
        world.advance(LOOK_AGAIN_S + 1 / 32)
        assert world.scheduler.statistics().waiting_senders == 1
    world.advance(LOOK_AGAIN_S)
    assert world.sent() == [2, 1]
    assert world.idle()


def test_requester_when_its_peer_leaves_asks_another():
    world = world_of(2)
    future = world.ask().start()
    world.scheduler.disconnect(1)
    assert world.sent() == [1, 2]
    world.answer_last("answer")
    assert future.result(0) == "answer"


def test_requester_when_the_scheduler_stops_fails():
    world = world_of(1)
    futures = [world.ask().start(), world.ask().start()]
    world.scheduler.stop()
    futures.append(world.ask().start())
    for future in futures:
        assert isinstance(future.exception(0), ClosedError)


def test_requester_when_its_future_is_cancelled_takes_everything_back():
    world = world_of(1)
    asked, waiting = world.ask().start(), world.ask().start()
    assert waiting.cancel()
    assert asked.cancel()
    assert world.idle()
    assert not world.answer_last("answer")
    assert world.sent() == [1]


@pytest.mark.parametrize("where", ["accept", "message"])
def test_requester_when_its_functions_raise_fails_with_that(where):
    def fail(*_):
        raise KeyError(where)

    world = world_of(1)
    future = Requester(world.scheduler, *((lambda: 1, fail) if where == "accept" else (fail, None))).start()
    if where == "accept":
        world.answer_last()
    with pytest.raises(KeyError, match=where):
        future.result(0)
    assert world.errors == []
    assert world.idle()


def test_requester_when_the_message_is_a_function_asks_for_what_is_missing():
    missing, asked = {1, 2, 3}, []

    def accept(response):
        missing.difference_update(response.value)
        return "all" if not missing else None

    world = world_of(3)
    future = Requester(world.scheduler, lambda: asked.append(set(missing)), accept).start()
    for value in ((1,), (), (2, 3)):
        world.answer_last(value)
    assert future.result(0) == "all"
    assert asked == [{1, 2, 3}, {2, 3}, {2, 3}]


def test_requester_when_the_budget_is_spent_fails_rather_than_trying_again():
    budget = RetryBudget(share=0.0, least_per_s=0.0, most=1.0)
    world = world_of(3)
    future = world.ask(budget=budget).start()
    world.answer_last()
    world.answer_last()
    with pytest.raises(ExhaustedError, match="exhausted 2 of 3 peers: the retry budget is spent"):
        future.result(0)
    assert world.idle()


def test_requester_when_no_peer_takes_the_message_tries_each_once_an_offer():
    world = Asked()
    for peer_id, takes in ((1, False), (2, OSError("broken"))):
        world.connect(peer_id, takes=takes)
    future = world.ask(timeout_s=3.0).start()
    assert [len(peer.sent) for peer in world.peers.values()] == [1, 1]
    world.connect(3)
    world.answer_last("answer")
    assert future.result(0) == "answer"
    assert world.idle()


def hedging_of(delay_s=0.1, **options) -> Hedging:
    hedging = Hedging(**options)
    for _ in range(100):
        hedging.latencies.observe(delay_s)
    return hedging


def test_hedging_when_no_answer_comes_in_time_asks_another_and_takes_the_first():
    hedging = hedging_of()
    world = world_of(3)
    future = world.ask(hedging=hedging).start()
    assert world.sent() == [1]
    world.advance(0.2)
    assert world.sent() == [1, 2]
    world.advance(1.0)
    assert world.sent() == [1, 2], "two at a time are the most"
    assert world.answer_last("second")
    assert not world.answer(world.requests[0], value="first")
    assert future.result(0) == "second"
    assert (hedging.first_count, hedging.further_count, hedging.duplicate_count) == (1, 1, 1)
    assert world.idle()


def test_hedging_when_the_answer_comes_in_time_asks_nobody_else():
    hedging = hedging_of()
    world = world_of(3)
    future = world.ask(hedging=hedging).start()
    world.answer_last("soon")
    world.advance(1.0)
    assert world.sent() == [1]
    assert future.result(0) == "soon"
    assert hedging.duplicate_count == 0


def test_hedging_when_nothing_is_known_of_latencies_waits():
    world = world_of(3)
    world.ask(hedging=Hedging()).start()
    world.advance(0.9)
    assert world.sent() == [1]


def test_hedging_when_answers_are_of_no_use_does_not_learn_from_them():
    hedging = Hedging()
    world = world_of(3)
    future = world.ask(hedging=hedging).start()
    world.answer_last()
    world.answer_last("answer")
    assert future.done()
    assert hedging.latencies._total == 1


def test_hedging_when_several_are_asked_at_once_sends_to_that_many_of_all():
    hedging = hedging_of(at_once=2, most=3)
    world = world_of(3)
    world.ask(hedging=hedging).start()
    assert world.sent() == [1, 2]
    world.advance(0.2)
    assert world.sent() == [1, 2, 3]


def test_hedging_when_the_budget_is_spent_stays_with_the_first():
    hedging = hedging_of(budget=RetryBudget(share=0.0, least_per_s=0.0, most=1.0))
    world = world_of(4)
    futures = [world.ask(hedging=hedging).start() for _ in range(2)]
    world.advance(0.2)
    assert world.sent() == [1, 2, 3]
    assert world.idle() is False
    world.answer(world.requests[1], value="alone")
    assert futures[1].result(0) == "alone"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "answer", "empty", "wait", "leave", "join", "cancel", "stop"]), st.integers(0, 30)
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 3), st.integers(0, 2))
def test_requesters_when_anything_happens_end_exactly_once_within_the_budget(steps, at_once, more):
    budget = RetryBudget(share=0.5, least_per_s=0.0, most=3.0)
    hedging = hedging_of(at_once=at_once, most=at_once + more, budget=budget)
    world = world_of(3)
    futures, ends = [], []
    for kind, number in steps:
        world.sent()
        if kind == "start":
            futures.append(world.ask(hedging=hedging, timeout_s=5.0).start())
            futures[-1].add_done_callback(ends.append)
        elif kind in ("answer", "empty") and world.requests:
            request_id = world.requests[number % len(world.requests)]
            if world.asked[request_id] in world.peers:
                world.answer(request_id, value="yes" if kind == "answer" else "")
        elif kind == "wait":
            world.advance(number / 20)
        elif kind == "leave":
            world.scheduler.disconnect(number % 4)
        elif kind == "join" and number % 4 not in {state.peer_id for state in world.scheduler.peers()}:
            world.scheduler.connect(world.peers.get(number % 4) or world.connect(number % 4))
        elif kind == "cancel" and futures:
            futures[number % len(futures)].cancel()
        elif kind == "stop" and number == 0:
            world.scheduler.stop()
    world.advance(6.0)
    assert all(future.done() for future in futures)
    assert len(ends) == len(futures)
    assert world.idle()
    assert hedging.further_count <= budget.taken_count <= 3 + 0.5 * hedging.first_count
    assert len(world.sent()) == hedging.first_count + hedging.further_count
    assert world.errors == []


def test_requesters_when_started_and_answered_by_many_threads_all_end():
    world = world_of(8)
    futures, stop = [], threading.Event()

    def answering():
        while not stop.is_set():
            for peer in list(world.peers.values()):
                for request_id, _ in list(peer.sent[-4:]):
                    world.scheduler.receive(peer, "yes", request_id)

    def asking(number):
        for count in range(100):
            future = Requester(world.scheduler, "question", timeout_s=60.0).start()
            futures.append(future)
            if (count + number) % 10 == 0:
                future.cancel()

    answerer = threading.Thread(target=answering)
    askers = [threading.Thread(target=asking, args=(number,)) for number in range(3)]
    for thread in [answerer, *askers]:
        thread.start()
    for thread in askers:
        thread.join(WAIT_S)
    for future in futures:
        assert future.cancelled() or future.result(WAIT_S) == "yes"
    stop.set()
    answerer.join(WAIT_S)
    assert world.idle()
    assert world.errors == []


@pytest.mark.parametrize("way", ["disconnected", "ejected"])
def test_requester_when_the_untried_peer_that_it_waits_for_goes_begins_anew_with_the_open_ones(way):
    """All that are left were tried, and there is time: nobody has to become free for it to ask them again (MS-42)."""

    class Ejects:
        """Leaves out a peer for ever with its first failure."""

        def connected(self, peer, now):
            pass

        def ended(self, peer, outcome, latency_s, now):
            return 1e6 if outcome is Outcome.TIMEOUT else 0.0

        def left(self, peer):
            pass

    world = world_of(2, policy=SchedulerPolicy(ejection=Ejects()))
    world.schedule("other", accepts={2})
    future = world.ask().start()
    world.answer_last()
    assert world.sent() == [2, 1]
    if way == "disconnected":
        world.scheduler.disconnect(2)
    else:
        world.advance(TIMEOUT_S + 1)  # of the other sender
    world.advance(LEAST_TRY_S * 2)
    assert world.sent() == [2, 1, 1]
    world.answer_last("answer")
    assert future.result(0) == "answer"
    assert world.idle()


def test_requester_that_waits_for_an_untried_peer_keeps_its_place():
    world = world_of(2)
    world.schedule("other", accepts={2})
    future = world.ask().start()
    world.answer_last()
    world.schedule("later", accepts={2})
    for _ in range(3):
        world.advance(LEAST_TRY_S)
    world.answer(min(world.requests), 2)
    assert world.sent() == [2, 1, 2]
    world.answer_last("answer")
    assert future.result(0) == "answer"


@pytest.mark.parametrize("wrong", [{"quantile": 1.0}, {"at_once": 0}, {"at_once": 3, "most": 2}])
def test_hedging_when_a_value_is_out_of_range_refuses(wrong):
    with pytest.raises(ConfigError, match=list(wrong)[-1]):
        Hedging(**wrong)


def test_requester_when_started_again_refuses():
    requester = world_of(1).ask()
    requester.start()
    with pytest.raises(LocalProtocolError, match="started before"):
        requester.start()


def test_requester_when_its_time_is_nothing_refuses():
    with pytest.raises(ConfigError, match="timeout_s"):
        Asked().ask(timeout_s=0.0)


def test_requester_when_the_response_type_is_none_refuses():
    with pytest.raises(ConfigError, match="response_type is 'text'"):
        world_of(0).ask(response_type="text")
