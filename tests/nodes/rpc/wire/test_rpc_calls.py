"""Requests that wait for one peer, against a plain list of them."""

from __future__ import annotations

from random import Random

from flowctl.nodes.rpc.peers.peer import PendingCall, PendingCalls


def call(number: int, command: bytes = b"a.b") -> PendingCall:
    return PendingCall(b"%d" % number, command, lambda ok, data: None)


def test_calls_when_taken_in_any_way_are_those_of_a_plain_list():
    """By tag, by command, by deadline: each comes once, the oldest first, and nothing is kept of it (OX-58)."""
    random = Random(7)
    calls, model = PendingCalls(print), []
    for number in range(4000):
        now, command = number // 8, b"a.%d" % random.randrange(4)
        kind = random.randrange(8)
        if kind < 4:
            asked = call(number, command)
            deadline = now + random.randrange(1, 40)
            calls.add(asked.tag, asked, deadline)
            model.append((deadline, asked))
        elif kind == 4 and model:
            _, asked = model.pop(random.randrange(len(model)))
            assert (calls.take(asked.tag), calls.take(asked.tag)) == (asked, None)
        elif kind == 5:
            found = next((each for each in model if each[1].command == command), None)
            assert calls.take_oldest(command) is (None if found is None else found[1])
            if found is not None:
                model.remove(found)
        else:
            due = [each for each in model if each[0] <= now]
            assert calls.take_due(now) == [asked for _, asked in sorted(due, key=lambda each: each[0])]
            model = [each for each in model if each not in due]
        assert len(calls) == len(model)
    assert calls.take_all() == [asked for _, asked in model]
    assert (len(calls), calls.next_deadline(), calls.take_oldest(b"a.0")) == (0, None, None)
    assert not calls._of_command


def test_calls_when_a_command_is_unknown_to_a_busy_peer_are_not_searched():
    class Counted(bytes):
        count = 0

        def __eq__(self, other: object) -> bool:
            Counted.count += 1
            return bytes.__eq__(self, other)

        __hash__ = bytes.__hash__

    calls, commands = PendingCalls(print), [Counted(b"a.%d" % number) for number in range(500)]
    for number, command in enumerate(commands):
        calls.add(b"%d" % number, call(number, command), 1.0)
    Counted.count = 0
    assert calls.take_oldest(b"a.none") is None
    last = calls.take_oldest(b"a.499")
    assert last is not None
    assert last.tag == b"499"
    assert Counted.count < 20
