"""One viewer of a log with keys beside plain lists: the same messages in the same order, the same accounts."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowctl.core.flow.counts import as_counts
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.conflation import ConflatingCursor
from flowctl.core.outgoing.streamlog import Place, StreamLog
from flowctl.core.outgoing.thinning import drop_droppable
from flowctl.reasons import DropReason

DATA, CONTROL = MessageClass.DATA, MessageClass.CONTROL
KEYS = "abcde"
DATA_BIT = 1 << DATA
LARGE = 10**9


class Model:
    """What waits for the viewer, as items (number, key, class, wire): `first`, then `stopped`, then `fresh`.

    `first` holds control messages out of what was dropped; `stopped` is what waited when not all values were taken; of
    `fresh`, the keys behind `turn` come first.
    """

    def __init__(self):
        self.first, self.stopped, self.fresh = [], [], []
        self.turn = None
        self.refuses = False
        self.accepted = self.sent = 0
        self.dropped = {}

    def publish(self, item, newest):
        """Take a message; `newest` is the number of the value of its key before it."""
        self.accepted += 1
        if item[1] is not None:
            self.remove(lambda other: other[0] == newest, DropReason.SUPERSEDED)
        if item[1] is None and item[2] is DATA and self.refuses:
            self.drop(DropReason.REFUSED)
        else:
            self.fresh.append(item)

    def remove(self, goes, reason):
        for queue in (self.first, self.stopped, self.fresh):
            for item in [item for item in queue if goes(item)]:
                queue.remove(item)
                self.drop(reason)

    def drop(self, reason):
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def queue(self, numbers):
        """Return what waits in its order; `numbers` are those of the newest values by key."""
        values = [item for item in self.stopped if item[1] is not None]
        fresh = [item for item in self.fresh if item[1] is not None]
        turn = numbers.get(self.turn, -1)
        values += [item for item in fresh if item[0] > turn] + [item for item in fresh if item[0] <= turn]
        rest = sorted(item for item in (*self.stopped, *self.fresh) if item[1] is None)
        result = [*self.first]
        for value in values:
            while rest and rest[0][0] < value[0]:
                result.append(rest.pop(0))
            result.append(value)
        return result + rest

    def take(self, queue, count):
        taken, left = queue[:count], queue[count:]
        values = [item for item in taken if item[1] is not None]
        self.sent += len(taken)
        self.first = [item for item in self.first if item not in taken]
        left = [item for item in left if item not in self.first]
        if not values:
            for part in (self.stopped, self.fresh):
                part[:] = [item for item in part if item not in taken]
            return
        if values[-1] in self.fresh:
            self.turn = values[-1][1]
            self.stopped, self.fresh = left, []
        else:
            self.stopped = [item for item in self.stopped if item not in taken]
            self.fresh = [item for item in self.fresh if item not in taken]
        if not any(item[1] is not None for item in left):
            self.stopped, self.fresh, self.turn = [], left, None

    def catch_up(self):
        """Serve it with the cohort: in the order of the log, all there is."""
        self.first, self.stopped, self.fresh, self.turn = [], [], [], None


def shortened(wire):
    return wire[:-1]


class ConflationHistory(RuleBasedStateMachine):
    """Messages with keys and without are published, handed over in part, refused, dropped; in and out of a cohort."""

    twin = False

    def __init__(self):
        super().__init__()
        self.log = self.published = StreamLog(max_keys=len(KEYS))
        self.sent_bytes = 0
        self.numbers = {}  # number of the newest value by key
        self.model = Model()
        for number in range(3):
            self.append("a", number)
        if self.twin:
            self.log = self.published.begin_twin(shortened)
        self.cursor = ConflatingCursor(self.log, now=0.0, latest=True)
        self.cursor.end_joining(DropReason.REFUSED, 0.0)
        self.model = Model()
        self.model.fresh = [(2, "a", DATA, b"a2 2")]
        self.model.accepted = 1
        self.member = False
        self.count = 3
        self.over = False

    def append(self, key, number, message_class=DATA):
        wire = f"{key or '.'}{number} {number % 3}".encode()
        newest = self.numbers.get(key)
        self.published.append(wire, message_class, number / 10, key=key, twin_wire=shortened(wire))
        if self.twin and key is None:
            wire = shortened(wire)
        self.model.publish((number, key, message_class, wire), newest)
        if key is not None:
            self.numbers[key] = number

    @rule(texts=st.lists(st.sampled_from([*KEYS, "a", "b", ".", "!"]), min_size=1, max_size=8))
    def publish(self, texts):
        for text in texts:
            if self.over:
                self.published.append(b"late", DATA, 0.0, key=None if text in ".!" else text)
            elif self.member:
                self.publish_to_member(text)
            else:
                self.append(None if text in ".!" else text, self.count, CONTROL if text == "!" else DATA)
                self.count += 1

    @precondition(lambda self: not self.member and not self.over)
    @rule(rounds=st.integers(1, 3), count=st.integers(1, 4))
    def publish_rounds(self, rounds, count):
        """Publish every key again and again, while the kernel takes less than that."""
        for _ in range(rounds):
            for key in KEYS:
                self.append(key, self.count)
                self.count += 1
            self.take(9, count, LARGE)

    def publish_to_member(self, text):
        """Have the cohort write it at once, whatever it is."""
        self.append(None if text in ".!" else text, self.count)
        self.count += 1
        assert self.cursor.load() == (self.log.tail.offset - self.cursor.entry.offset, 1)
        (item,) = self.cursor.peek(9, LARGE)
        self.cursor.pass_messages(1)
        self.sent_bytes += len(item[1])
        self.model.sent += 1
        self.model.catch_up()

    @precondition(lambda self: not self.member)
    @rule(most=st.integers(1, 9), count=st.integers(0, 9), budget=st.sampled_from([1, 12, LARGE]))
    def take(self, most, count, budget):
        expected = self.model.queue(self.numbers)
        items = self.cursor.peek(most, budget)
        assert [(item, wire) for item, wire, _ in items] == [
            (item, shortened(wire) if self.twin and key is not None else wire)
            for _, key, item, wire in expected[: len(items)]
        ]
        before = sum(len(wire) for _, wire, _ in items[:-1])
        assert not items or before < budget
        if len(items) < most and before + len(items[-1:] and items[-1][1]) < budget:
            assert len(items) == len(expected)
        count = min(count, len(items))
        self.cursor.pass_messages(count)
        self.sent_bytes += sum(len(wire) for _, wire, _ in items[:count])
        self.model.take(expected, count)

    @precondition(lambda self: not self.member and not self.over)
    @rule()
    def enter_cohort(self):
        at = self.log.tail
        taken = not self.model.queue(self.numbers)
        assert self.cursor.stands_at(at) is (taken and self.cursor.caught_up)
        if taken and self.cursor.stands_at(at) and self.cursor.plain:
            self.cursor.enter(Place(at))
            self.model.catch_up()
            self.member = True

    @precondition(lambda self: self.member)
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4), written=st.integers(0, 4))
    def leave_cohort(self, keys, written):
        """Leave it behind `written` of the messages that were to be written together."""
        for key in keys:
            self.append(key, self.count)
            self.count += 1
        done = min(written, len(keys))
        items = self.cursor.peek(99, LARGE)
        assert len(items) == len(keys)
        self.cursor.pass_messages(done)
        self.sent_bytes += sum(len(wire) for _, wire, _ in items[:done])
        self.cursor.stand_alone()
        # The model took what was superseded off the queue at once, the cohort sends it all the same.
        first = self.count - len(keys)
        sent = set(range(first, first + done))
        superseded = [number for number in sent if all(item[0] != number for item in self.model.fresh)]
        self.model.dropped[DropReason.SUPERSEDED] = self.model.dropped.get(DropReason.SUPERSEDED, 0) - len(superseded)
        self.model.fresh = [item for item in self.model.fresh if item[0] not in sent]
        self.model.sent += done
        self.member = False

    @precondition(lambda self: not self.member and not self.over)
    @rule(refuse=st.booleans())
    def refuse(self, refuse):
        self.cursor.refuse(DATA_BIT if refuse else 0, DropReason.REFUSED, 0.0)
        self.model.refuses = refuse

    @precondition(lambda self: not self.member)
    @rule(reason=st.sampled_from([DropReason.REQUESTED, DropReason.THINNED]))
    def drop(self, reason):
        asked = reason is DropReason.REQUESTED and not self.over
        drop_droppable(self.cursor, reason, 0.0)
        self.model.remove(lambda item: item[2] is DATA and (item[1] is None or asked or self.over), reason)
        waiting = self.model.queue(self.numbers)
        self.model.first = [item for item in waiting if item[1] is None]  # control: it goes on before what is left
        for part in (self.model.stopped, self.model.fresh):
            part[:] = [item for item in part if item[1] is not None]
        if asked:
            self.model.turn = None

    @precondition(lambda self: not self.member and not self.over)
    @rule(key=st.sampled_from(KEYS))
    def forget(self, key):
        self.published.forget(key)
        self.model.remove(lambda item: item[1] == key, DropReason.SUPERSEDED)
        self.numbers.pop(key, None)

    @precondition(lambda self: not self.member and not self.over)
    @rule()
    def finish(self):
        queue = self.model.queue(self.numbers)
        self.cursor.finish(0.0)
        # What waits is copied, in its order, and nothing supersedes it any more.
        self.model.first, self.model.stopped = [], []
        self.model.fresh = [(number, None, item, wire) for number, (_, _, item, wire) in enumerate(queue)]
        self.over = True

    @invariant()
    def accounts_are_those_of_the_model(self):
        accepted, dropped, queued = as_counts(self.cursor.balance())
        waiting = self.model.queue(self.numbers)
        assert accepted.total_messages == self.model.accepted
        assert queued.total_messages == len(waiting)
        assert queued.total_bytes == sum(len(item[3]) for item in waiting)
        lost = {reason: counts.total_messages for reason, counts in dropped.items()}
        assert lost == {reason: count for reason, count in self.model.dropped.items() if count}
        assert self.model.accepted == self.model.sent + sum(lost.values()) + len(waiting)
        lost_bytes = sum(counts.total_bytes for counts in dropped.values())
        assert accepted.total_bytes == self.sent_bytes + lost_bytes + queued.total_bytes
        if not self.member:
            assert self.cursor.load() == (queued.total_bytes, queued.total_messages)
            assert self.cursor.caught_up is (not waiting)
            times = [item[0] / 10 for item in waiting]
            if not self.over:
                assert self.cursor.oldest_at() == (min(times) if times else None)
                loose = [item for item in waiting if item[1] is None]
                counted = sum(len(item[3]) for item in loose), len(loose)
                assert self.cursor.bounded() == counted
                oldest = [item[0] / 10 for item in loose] + [-1.0] * (len(loose) < len(waiting))
                assert self.cursor.counted(-1.0) == (*counted, min(oldest, default=None))

    def teardown(self):
        rest = self.model.queue(self.numbers)
        if not self.member:
            self.cursor.drop_everything(DropReason.UNFOLLOWED)
            _, dropped, queued = as_counts(self.cursor.balance())
            assert not queued.total_messages
            left = dropped.get(DropReason.UNFOLLOWED)
            assert (left.total_messages if left else 0) == len(rest)


class TwinHistory(ConflationHistory):
    """The same for a viewer of a twin: it is handed the shorter form, and what waits counts as it is in the log."""

    twin = True


TestConflationHistory, TestTwinHistory = ConflationHistory.TestCase, TwinHistory.TestCase
TestConflationHistory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestTwinHistory.settings = TestConflationHistory.settings
