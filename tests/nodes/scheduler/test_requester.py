"""One question asked until it is answered: tries, time, hedges, budget, and that it ends exactly once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_kit import TIMEOUT_S, Script, World

from flowctl.core.outcomes.pending import Outcome
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.nodes.scheduler.policies.budget import RetryBudget
from flowctl.nodes.scheduler.policy import SchedulerPolicy
from flowctl.nodes.scheduler.requests.hedging import Hedging
from flowctl.nodes.scheduler.requests.requester import LEAST_TRY_S, MOST_TRY_S, Requester

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


def hedging_of(delay_s=0.1, **options) -> Hedging:
    hedging = Hedging(**options)
    for _ in range(100):
        hedging.latencies.observe(delay_s)
    return hedging


def spent():
    return RetryBudget(share=0.0, least_per_s=0.0, most=1.0)


class Asking(Script):
    """Scenarios of requesters by their names; `hedging` is that of those which hedge."""

    def __init__(self, hedging, budget):
        super().__init__(Asked())
        self.hedging, self.budget, self.futures = hedging, budget, {}

    def ask(self, name, timeout_s="30", *, hedge=False):
        hedging = self.hedging if hedge else None
        self.futures[name] = self.world.ask(timeout_s=float(timeout_s), hedging=hedging, budget=self.budget).start()

    def hedge(self, name):
        self.ask(name, hedge=True)

    def last(self, value=""):
        return self.world.answer_last(value)

    def sent(self):
        self.world.events.append(" ".join(map(str, self.world.sent())))

    def cancel(self, name):
        return self.futures[name].cancel()

    def answer(self, number):
        return self.world.answer(self.world.requests[int(number) - 1], value="yes")

    def ended(self, name):
        """Show how a requester has ended, and whether it has left anything behind."""
        future = self.futures[name]
        error = future.exception(0)
        self.world.events.append(future.result(0) if error is None else f"{type(error).__name__}: {error}")
        if not self.world.idle():
            self.world.events.append("busy")

    def cost(self):
        hedging = self.hedging
        self.world.events.append(f"{hedging.first_count}+{hedging.further_count}, {hedging.duplicate_count} in vain")


SCENARIOS = {
    "an answer of use": """
        connect 1 | ask q | last answer | ended q -> answer""",
    "each empty reply makes it ask another, and none twice while others are left (MS-42)": """
        connect 1 2 3 | ask q | last | last
        sent -> 1 2 3
        last answer | ended q -> answer""",
    "the error has the peers tried and those there, and everything is taken back (MS-42)": """
        connect 1 2 3 | ask q 3 | last | advance 3.1
        ended q -> ExhaustedError: exhausted 2 of 3 peers in 3 s""",
    "a peer that connects late is asked, and none at all is an error that says so": """
        ask q 2 | ask r 9 | advance 2.1
        ended q -> ExhaustedError: exhausted 0 of 0 peers in 2 s, busy
        connect 7 | last late | ended r -> late""",
    "a peer that is busy and was not tried is waited for": """
        connect 1 2 | schedule other 1 2 | ask q | last -> other/2:2
        sent -> 2 1
        answer 1 | sent -> other#1 success, 2 1 2""",
    "a peer whose object died is not waited for (MS-42)": """
        connect 1 2 | ask q | die 2 | last
        sent -> 1 1""",
    "it looks again by itself when the busy peer that it waits for leaves (MS-42)": """
        connect 1 2 | schedule other 1 2 | ask q | last -> other/2:2
        sent -> 2 1
        disconnect 2 | advance 1.03125 | last answer | ended q -> other#1 disconnect, answer""",
    "it looks again for as long as the busy peer stays, and leaves no timer when its time is up": """
        connect 1 2 | schedule other 1 2 | ask q 4 | last -> other/2:2
        advance 1.03125 | advance 1.03125 | advance 1.03125 | figures waiting_senders -> 1 waiting_senders
        advance 1 | sent -> 2 1
        ended q -> ExhaustedError: exhausted 1 of 2 peers in 4 s""",
    "however long it waits for a busy peer, it is asked before those that came after it": """
        connect 1 2 | schedule other 1 2 | ask q | last | schedule later 1 2 -> other/2:2, later/1:-
        advance 1 | advance 1 | advance 1 | answer 1 | sent -> other#1 success, 2 1 2
        last answer | ended q -> later/2:2, answer""",
    "a disconnect is one failed try": """
        connect 1 2 | ask q | disconnect 1 | last answer | sent -> 1 2
        ended q -> answer""",
    "waiting or asked, or begun later, it ends with a stop": """
        connect 1 | ask q | ask r | stop | ask s
        ended q -> ClosedError: the scheduler was stopped
        ended r -> ClosedError: the scheduler was stopped
        ended s -> ClosedError: the scheduler was stopped""",
    "of one that is cancelled the answer is late, and one that waits leaves the queue": """
        connect 1 | ask q | ask r | cancel r | cancel q
        last answer -> no
        sent -> 1""",
    "without an answer in time another is asked, two at a time, and the first answer counts": """
        connect 1 2 3 | hedge q | advance 0.2 | sent -> 1 2
        advance 1 | sent -> 1 2
        last second | ended q -> second
        answer 1 -> no
        cost -> 1+1, 1 in vain""",
    "with an answer in time nobody else is asked": """
        connect 1 2 3 | hedge q | last soon | advance 1 | sent -> 1
        ended q | cost -> soon, 1+0, 0 in vain""",
}
WITH_HEDGING = {
    "without a quantile there is no delay that would be right": (
        lambda: (Hedging(), None),
        "connect 1 2 3 | hedge q | advance 0.9 | sent -> 1",
    ),
    "two of three are asked at once, and the third when they take too long": (
        lambda: (hedging_of(at_once=2, most=3), None),
        """connect 1 2 3 | hedge q | sent -> 1 2
        advance 0.2 | sent -> 1 2 3""",
    ),
    "without a token the hedge is not sent, and the first try goes on": (
        lambda: (hedging_of(budget=spent()), None),
        """connect 1 2 3 4 | hedge q | hedge r | advance 0.2 | sent -> 1 2 3
        answer 2 | ended r -> yes, busy""",
    ),
    "further tries are paid for, the first one is free": (
        lambda: (None, spent()),
        """connect 1 2 3 | ask q | last | last
        ended q -> ExhaustedError: exhausted 2 of 3 peers: the retry budget is spent""",
    ),
}


@pytest.mark.parametrize(
    ("made", "script"),
    [*((lambda: (hedging_of(), None), script) for script in SCENARIOS.values()), *WITH_HEDGING.values()],
    ids=[*SCENARIOS, *WITH_HEDGING],
)
def test_scenario_when_played_goes_as_written(made, script):
    Asking(*made()).check(script)


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


def test_hedging_when_answers_are_of_no_use_does_not_learn_from_them():
    made = Asking(Hedging(), None)
    made.check("connect 1 2 3 | hedge q | last | last answer | ended q -> answer")
    assert made.hedging.latencies._total == 1


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
