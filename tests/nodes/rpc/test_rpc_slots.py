"""The reservation rule, as scripts of arrivals and ends, and against a model that scans everything each time."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowctl.errors import ConfigError, InternalError
from flowctl.nodes.rpc.jobs import slots as slots_module
from flowctl.nodes.rpc.jobs.slots import (
    MOST_IN_LINE,
    SenderTurns,
    Slots,
    SlotVerdict,
    WorkerJob,
)

FEW_LINES = 8
"""What it costs whether a job has others of its sender before it; not how many."""


class Script:
    """Slots with lanes that have letters: "B" batch, "R" reply, others are categories; jobs are named like "A2"."""

    def __init__(self, general=4, batch=0, reply=0, **categories):
        self.slots = Slots(general, batch, reply)
        self.lanes = {"B": self.slots.batch, "R": self.slots.reply}
        for letter, options in categories.items():
            tagged = options is None
            self.lanes[letter] = Slots.tagged_thread(letter) if tagged else self.slots.add_category(letter, *options)
        self.counts = dict.fromkeys(self.lanes, 0)
        self.running = []
        self.now = 0.0

    def arrive(self, letters, deadline=inf, size_bytes=0, sender=None):
        verdicts = ""
        for letter in letters:
            self.counts[letter] += 1
            name = f"{letter}{self.counts[letter]}"
            job = WorkerJob(
                self.lanes[letter], lambda: None, deadline=deadline, size_bytes=size_bytes, name=name, sender=sender
            )
            verdict = self.slots.arrived(job, self.now)
            verdicts += verdict.value[0]
            if verdict is SlotVerdict.START:
                self.running.append(name)
        return verdicts

    def not_started(self):
        """Return the names of those that will not run, each once."""
        return [job.name for job, _ in self.slots.take_not_started()]

    def end(self, name):
        """End a running job; return the names of those that start."""
        self.running.remove(name)
        lane = self.lanes[name[0]]
        started = [job.name for job in self.slots.pass_on(lane, self.now) or self.slots.free_slot(lane, self.now)]
        self.running += started
        return started


A2 = {"general": 4, "A": (2,), "C": (0,)}
SCRIPTS = {
    "OX-52": (A2, ["AACCCC ssssww"]),
    "OX-53": (A2, ["AACCAA ssssww"]),
    "OX-54": (A2, ["CCCAAA sssssw"]),
    # A3 starts when an A ends, C5 not before only three run: the general slot goes to the oldest.
    "fourth example": (A2, ["CCCCCCAAA sssswwssw", "A1 A3", "C1", "C2", "A2 C5"]),
    "general slots have room": (A2, ["CCCCAAA ssssssw", "C1", "C2", "C3 A3"]),
    "default queue": ({"general": 1, "C": ()}, ["C" * 202 + " s" + "w" * 200 + "d"]),
    "own queues": ({"general": 1, "C": (0, 1), "D": (0, 1)}, ["CCCDD swdwd"]),
    "batch, reply, arrival (OX-57)": (
        {"general": 1, "C": (), "D": ()},
        ["CDCRDBB swwwwww", "C1 B1", "B1 B2", "B2 R1", "R1 D1", "D1 C2", "C2 D2"],
    ),
    # C3 is older than A2, but two run, and C reserves nothing; C2 and A2 are two.
    "overtaking (OX-57)": ({"general": 2, "A": (1,), "C": ()}, ["CCACA sssww", "A1 A2", "C1", "A2 C3"]),
    "general and reserved": ({"general": 1, "A": (1,)}, ["AABB swww", "A1 B1 A2"]),
    "reserved for the own": (
        {"general": 2, "batch": 1, "reply": 1, "C": ()},
        ["CCCBBRR sswswsw", "R1 R2", "B1 B2", "C1"],
    ),
    "tagged thread (OX-57)": ({"general": 1, "C": (), "T": None}, ["TTTC swws", "T1 T2", "T2 T3", "T3"]),
}
"""Lanes with their reserved threads and queues; then what arrives and its verdicts, or what ends and what starts."""


@pytest.mark.parametrize(("lanes", "steps"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_jobs_when_they_arrive_and_end_start_by_the_rule(lanes, steps):
    script = Script(**lanes)
    for step in steps:
        first, *rest = step.split()
        assert rest == (script.end(first) if first in script.running else [script.arrive(first)])
    assert script.slots.active <= script.slots.max_workers


@pytest.mark.parametrize(("max_queue", "waits"), [(0, 0), (3, 3), (-1, 250), (200, 200)])
def test_queue_when_full_drops_the_next_one(max_queue, waits):
    """Without a slot as many wait as the category says, none with 0, all with -1; the rest is dropped (OX-56)."""
    script = Script(1, C=(0, max_queue))
    assert script.arrive("C" * 251) == "s" + "w" * waits + "d" * (250 - waits)
    lane = script.lanes["C"]
    assert (lane.dropped_count, len(lane.waiting)) == (250 - waits, waits)


def test_queue_when_messages_are_large_is_bounded_in_octets_too(monkeypatch):
    monkeypatch.setattr(slots_module, "MOST_WAITING_BYTES", 1000)
    script = Script(1, C=(), D=(0, -1))
    assert script.arrive("CCCC", size_bytes=400) == "swwd"
    assert script.arrive("DD", size_bytes=10_000) == "ww"
    assert script.end("C1") == ["C2"]
    assert script.arrive("C", size_bytes=600) == "w"


@pytest.mark.parametrize(("general", "batch", "reply"), [(1, 1, 1), (4, 2, 1), (8, 4, 1), (9, 5, 2), (17, 9, 3)])
def test_threads_when_not_set_follow_the_general_ones(general, batch, reply):
    slots = Slots(general)
    assert (slots.batch.reserved, slots.reply.reserved, slots.max_workers) == (batch, reply, general + batch + reply)
    slots.set_threads(batch=0, reply=7)
    slots.set_threads(general=3)
    assert (slots.batch.reserved, slots.reply.reserved, slots.max_workers) == (0, 7, 10)
    slots.set_threads(batch=-1)
    assert slots.batch.reserved == 2


@pytest.mark.parametrize("numbers", [{"general": 0}, {"batch": -2}, {"reply": -2}, {"general": 1025}])
def test_threads_when_out_of_range_are_refused(numbers):
    slots = Slots(3)
    with pytest.raises(ConfigError, match=f"{next(iter(numbers))}_threads is"):
        slots.set_threads(**numbers)
    assert slots.general == 3


@pytest.mark.parametrize(("reserved", "max_queue"), [(-1, 0), (2000, 0), (0, -2), ("2", 0), (0, 1.5)])
def test_category_when_its_numbers_are_out_of_range_is_refused(reserved, max_queue):
    with pytest.raises(ConfigError):
        Slots().add_category("a", reserved, max_queue)


def test_deadline_when_passed_in_the_queue_has_the_job_not_started():
    script = Script(1, C=())
    script.arrive("C")
    script.arrive("CC", deadline=5.0)
    script.arrive("C", deadline=9.0)
    script.now = 5.0
    assert script.end("C1") == ["C4"]
    assert script.not_started() == ["C2", "C3"]
    assert (script.not_started(), script.lanes["C"].late_count) == ([], 2)


def test_queue_when_one_sender_fills_it_gives_others_their_share():
    script = Script(1, C=(0, 4))
    assert script.arrive("CCCCCC", sender="flood") == "swwwwd"
    assert script.arrive("CCC", sender="other") == "wwd"
    assert script.not_started() == ["C5", "C4"]
    assert script.not_started() == []
    assert script.arrive("C", sender="flood") == "d"
    assert len(script.lanes["C"].waiting) == 4
    assert script.lanes["C"].dropped_count == 5


def test_queue_when_none_may_wait_displaces_nobody():
    script = Script(1, C=(0, 0))
    script.arrive("C", sender="flood")
    assert script.arrive("C", sender="other") == "d"


def test_slots_when_one_sender_floods_serve_another_after_a_few_of_it():
    script = Script(1, C=(), D=())
    script.arrive("C" + "CD" * MOST_IN_LINE, sender="flood")
    script.arrive("C", sender="other")
    started = ["C1"]
    while following := script.end(started[-1]):
        started += following
    assert started.index(f"C{MOST_IN_LINE + 2}") == MOST_IN_LINE + 1
    assert [name for name in started if name[0] == "D"] == [f"D{number}" for number in range(1, MOST_IN_LINE + 1)]
    assert len(started) == 2 * MOST_IN_LINE + 2


def test_deadline_when_passed_makes_room_in_a_full_queue():
    script = Script(1, C=(0, 2))
    script.arrive("C")
    assert script.arrive("CCC", deadline=5.0) == "wwd"
    script.now = 6.0
    assert script.arrive("CCC") == "wwd"
    assert script.not_started() == ["C2", "C3"]


def test_expire_when_time_passes_removes_what_is_late_from_all_queues():
    script = Script(1, C=(), D=())
    script.arrive("C")
    script.arrive("CD", deadline=5.0)
    script.arrive("CD", deadline=7.0)
    script.slots.expire(4.9)
    assert script.slots.waiting == 4
    script.slots.expire(6.0)
    assert script.not_started() == ["C2", "D1"]
    assert script.end("C1") == ["C3"]


def test_close_when_jobs_wait_gives_them_back_and_starts_none_any_more():
    """After the close nothing starts: neither what arrives, nor what waited (OX-82)."""
    script = Script(1, C=())
    script.arrive("CCBR")
    assert [job.name for job in script.slots.close()] == ["B1", "R1", "C2"]
    assert script.arrive("CBR") == "ddd"
    assert script.end("C1") == []
    assert (script.slots.close(), script.slots.active, script.slots.waiting) == ([], 0, 0)


def test_ended_when_nothing_runs_is_an_error_of_ours():
    """Giving back a slot twice would let too many run: it is noticed."""
    slots = Slots()
    with pytest.raises(InternalError, match="more jobs of 'a' ended than ran"):
        slots.free_slot(slots.add_category("a"), 0.0)


def test_statistics_when_asked_for_are_a_snapshot_of_each_lane():
    script = Script(1, C=(1, 1))
    script.arrive("CCC")
    shot = Slots.statistics(script.lanes["C"])
    script.end("C1")
    assert (shot.name, shot.reserved, shot.running, shot.waiting, shot.dropped_count) == ("C", 1, 1, 1, 1)
    assert [lane.name for lane in script.slots.lanes()] == ["batch", "reply", "C"]


class Model:
    """What the rule says, without any thought of speed: at each event all that waits is looked at, in order."""

    def __init__(self, general, reserved, max_queue):
        self.general, self.reserved, self.max_queue = general, reserved, max_queue
        self.running = dict.fromkeys(reserved, 0)
        self.waiting = []  # (rank of the lane, arrival, lane, deadline)

    def may(self, lane):
        return self.running[lane] < self.reserved[lane] or sum(self.running.values()) < self.general

    def arrived(self, number, lane, deadline, now):
        if self.may(lane):
            self.running[lane] += 1
            return SlotVerdict.START
        mine = [item for item in self.waiting if item[2] == lane]
        if len(mine) >= self.max_queue[lane] >= 0:
            self.waiting = [item for item in self.waiting if item[2] != lane or item[3] > now]
            mine = [item for item in self.waiting if item[2] == lane]
        if len(mine) >= self.max_queue[lane] >= 0:
            return SlotVerdict.DROP
        rank = {"B": 0, "R": 1}.get(lane, 2)
        self.waiting = sorted([*self.waiting, (rank, number, lane, deadline)])
        return SlotVerdict.WAIT

    def ended(self, lane, now):
        self.running[lane] -= 1
        started = []
        for item in list(self.waiting):
            if self.may(item[2]):
                self.waiting.remove(item)
                if item[3] > now:
                    self.running[item[2]] += 1
                    started.append(item[1])
        return started


LETTERS = "BRACD"


@given(
    st.integers(1, 5),
    st.tuples(*[st.integers(0, 2)] * 5),
    st.tuples(*[st.integers(-1, 3)] * 3),
    st.lists(st.tuples(st.sampled_from([*LETTERS, "end", "end", "time"]), st.integers(0, 30)), max_size=120),
)
def test_slots_when_run_beside_the_plain_rule_do_the_same(general, reserved, queues, steps):
    script = Script(general, reserved[0], reserved[1], A=(reserved[2], queues[0]), C=(reserved[3], queues[1]))
    script.lanes["D"] = script.slots.add_category("D", reserved[4], queues[2])
    sizes = dict(zip(LETTERS, (-1, -1, *queues), strict=True))
    model = Model(general, dict(zip(LETTERS, reserved, strict=True)), sizes)
    running, verdicts, late, now = [], [], set(), 0.0
    for what, number in steps:
        if what == "time":
            now += number / 10
        elif what == "end":
            if running:
                lane, _ = running.pop(number % len(running))
                jobs = script.slots.pass_on(script.lanes[lane], now) if number % 2 else []
                jobs = jobs or script.slots.free_slot(script.lanes[lane], now)
                assert [job.size_bytes for job in jobs] == model.ended(lane, now)
                running += [(job.name, job.size_bytes) for job in jobs]
        else:
            key = len(verdicts)  # carried as the size, which is too small to matter
            deadline = inf if number > 20 else now + number / 10 + 0.05
            job = WorkerJob(script.lanes[what], lambda: None, deadline=deadline, size_bytes=key, name=what)
            verdicts.append(script.slots.arrived(job, now))
            assert verdicts[-1] is model.arrived(key, what, deadline, now)
            if verdicts[-1] is SlotVerdict.START:
                running.append((what, key))
        late |= {job.size_bytes for job, _ in script.slots.take_not_started()}
        slots = script.slots
        assert slots.active == len(running) == sum(model.running.values()) <= slots.max_workers
        assert not any(model.may(item[2]) for item in model.waiting)
        assert {lane: sum(item[0] == lane for item in running) for lane in LETTERS} == {
            lane: script.lanes[lane].running for lane in LETTERS
        }
    lanes = list(script.slots.lanes())
    waiting = sum(len(lane.waiting) for lane in lanes)
    assert waiting == script.slots.waiting == len(model.waiting)
    assert len(verdicts) == waiting + len(late) + sum(lane.started_count + lane.dropped_count for lane in lanes)
    assert len(late) == sum(lane.late_count for lane in lanes)


def test_memory_when_jobs_overtake_for_long_keeps_nothing_of_them():
    script = Script(1, A=(1, -1), C=(0, -1))
    assert script.arrive("CCAA") == "swsw"
    for number in range(1, 500):
        script.arrive("A")
        assert script.end(f"A{number}") == [f"A{number + 1}"]
    assert (script.slots.waiting, len(script.slots._commands)) == (2, 2)


def lines_run(call):
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what other tests left would run its own lines
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("what", ["overtaking", "general", "full"])
def test_cost_when_thousands_wait_is_that_of_ten(what):
    found = set()
    for waiting, categories in ((10, 1), (3000, 1), (3000, 300)):
        slots = Slots(1, 0, 0)
        most = waiting // categories if what == "full" else -1
        lanes = [slots.add_category(f"c{number}", 0, most) for number in range(categories)]
        own = slots.add_category("own", 1, -1)
        slots.arrived(WorkerJob(lanes[0], lambda: None), 0.0)
        slots.arrived(WorkerJob(own, lambda: None), 0.0)
        for number in range(waiting):
            slots.arrived(WorkerJob(lanes[number % categories], lambda: None, deadline=9.0), 0.0)
        last = WorkerJob(own if what == "overtaking" else lanes[0], lambda: None)
        if what == "general":
            slots.free_slot(own, 0.0)

        def step(slots=slots, lanes=lanes, own=own, last=last):
            slots.arrived(last, 0.0)
            if what == "overtaking":
                assert slots.free_slot(own, 0.0) == [last]
            elif what == "general":
                assert len(slots.free_slot(lanes[0], 0.0)) == 1

        found.add(lines_run(step))
    assert max(found) - min(found) <= FEW_LINES


@dataclass(eq=False)
class Item:
    """Something that waits."""

    sender: str | None
    number: int


def taken(turns: SenderTurns) -> list[Item]:
    found = []
    while (head := turns.head()) is not None:
        turns.remove(head)
        found.append(head)
    return found


def test_turns_when_nobody_sends_many_are_the_order_of_arrival():
    for senders in ("ab" * MOST_IN_LINE, "aabcab", "a" * 100):
        items = [Item(sender, number) for number, sender in enumerate(senders)]
        turns: SenderTurns = SenderTurns()
        for item in items:
            turns.add(item)
        assert taken(turns) == items


def test_turns_when_one_sends_without_end_keep_another_waiting_for_a_few():
    turns: SenderTurns = SenderTurns()
    for number in range(200):
        turns.add(Item("flood", number))
    for number in range(200, 203):
        turns.add(Item("other", number))
    order = [item.sender for item in taken(turns)]
    assert order[: MOST_IN_LINE + 3] == ["flood"] * MOST_IN_LINE + ["other"] * 3
    assert len(order) == 203


@given(
    st.lists(
        st.tuples(st.sampled_from("aaab"), st.sampled_from(["add", "add", "take", "withdraw"]), st.integers(0, 99))
    )
)
@example([("a", "add", 0)] * (MOST_IN_LINE + 5) + [("b", "add", 0), ("a", "withdraw", 3)] + [("b", "take", 0)] * 25)
def test_turns_when_anything_comes_and_goes_are_those_of_a_plain_list(steps):
    turns: SenderTurns = SenderTurns()
    line: list[Item] = []
    behind: list[Item] = []

    def leave(item: Item) -> None:
        turns.remove(item)
        if item in behind:
            behind.remove(item)
            return
        line.remove(item)
        following = next((other for other in behind if other.sender == item.sender), None)
        if following is not None:
            behind.remove(following)
            line.append(following)

    for number, (sender, what, which) in enumerate(steps):
        if what == "add":
            item = Item(sender, number)
            turns.add(item)
            mine = sum(other.sender == sender for other in line)
            (line if mine < MOST_IN_LINE else behind).append(item)
        elif what == "take" and line:
            leave(line[0])
        elif what == "withdraw" and (every := line + behind):
            leave(every[which % len(every)])
        assert turns.head() is (line[0] if line else None)
        assert len(turns) == len(line) + len(behind) == len(list(turns))
        assert all(item in turns for item in line + behind)


def test_share_when_some_wait_is_the_same_for_all():
    turns: SenderTurns = SenderTurns()
    assert turns.above_share("a")
    for number in range(4):
        turns.add(Item("a", number))
    assert turns.above_share("a")
    assert not turns.above_share("b")
    assert turns.newest_of_most().number == 3
    turns.add(Item("b", 9))
    assert [turns.above_share(sender) for sender in "abc"] == [True, False, False]
