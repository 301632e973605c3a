"""The Receiver: reading, verdicts, leftovers, limits, and the end of the stream."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from receiver_kit import EOF, Kit

from flowctl.errors import InternalError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.receiver import ALL, BLOCK, DONE, NEED_MORE, InputResult, InputVerdict


@pytest.fixture
def kit() -> Kit:
    return Kit()


# --- reading and verdicts ----------------------------------------------------------------------------------------


def test_input_ready_when_all_is_taken_hands_on_the_scratch_memory(kit):
    memory = []
    kit.handler.on_offer = lambda data: memory.append(data.obj)
    kit.ready(b"hello")
    assert kit.handler.offers == [b"hello"]
    assert kit.handler.control == [False]
    assert memory == [kit.host.scratch.obj]
    assert memory[0] is kit.host.scratch.obj
    statistics = kit.receiver.statistics()
    assert (statistics.bytes_in, statistics.kept_bytes, statistics.reads) == (5, 0, 1)
    assert kit.host.bytes_in == 5


def test_input_ready_when_the_read_was_short_spares_the_next(kit):
    """A read that did not fill the room has emptied the socket: the read that would meet EAGAIN is not made."""
    kit.ready(b"short")
    assert kit.reads == [1024]


def test_first_input_when_another_has_read_it_is_offered_before_what_is_read():
    kit = Kit(first_input=b"ab")
    kit.handler.answers = [InputResult(InputVerdict.NEED_MORE, 1), DONE]
    kit.ready(b"cd")  # readable before the job of the offer has run
    kit.settle()
    assert kit.handler.offers == [b"ab", b"bcd"]
    assert kit.receiver.statistics().bytes_in == 4


def test_input_ready_when_there_is_nothing_does_nothing(kit):
    kit.ready()
    kit.ready(InterruptedError())
    assert kit.handler.offers == []
    assert kit.handler.ends == []
    assert kit.receiver.reading


def test_need_more_when_answered_offers_the_rest_with_what_comes_next(kit):
    kit.handler.answers = [InputResult(InputVerdict.NEED_MORE, 2), InputResult(InputVerdict.NEED_MORE, 0), DONE]
    kit.ready(b"abcd")
    assert kit.receiver.statistics().kept_bytes == 2
    kit.ready(b"ef")
    kit.ready(b"g")
    assert kit.handler.offers == [b"abcd", b"cdef", b"cdefg"]
    assert kit.receiver.statistics().kept_bytes == 0


def test_done_when_only_part_was_consumed_offers_the_rest_at_once(kit):
    kit.handler.answers = [InputResult(InputVerdict.DONE, 1), InputResult(InputVerdict.DONE, 2), DONE]
    kit.ready(b"abcdef")
    assert kit.handler.offers == [b"abcdef", b"bcdef", b"def"]


def test_block_when_answered_stops_reading_until_triggered(kit):
    kit.handler.answers = [InputResult(InputVerdict.BLOCK, 1)]
    kit.ready(b"abc")
    assert kit.watched == [True, False]
    assert kit.receiver.statistics().blocked
    kit.ready(b"d")
    kit.rounds()
    assert kit.handler.offers == [b"abc"]
    kit.receiver.trigger_input()
    assert kit.handler.offers == [b"abc"]
    kit.settle()
    assert kit.handler.offers == [b"abc", b"bc", b"d"]
    assert kit.watched == [True, False, True]


def test_block_when_all_was_consumed_waits_all_the_same(kit):
    kit.handler.answers = [BLOCK]
    kit.ready(b"abc")
    assert not kit.receiver.reading
    kit.receiver.trigger_input()
    kit.rounds()
    assert kit.handler.offers == [b"abc", b""]
    assert kit.receiver.reading


def test_trigger_input_when_called_inside_the_handler_runs_after_it(kit):
    """A handler that triggers itself is not re-entered, and a BLOCK answered after the trigger is lifted by it."""

    def once(data) -> None:
        kit.handler.on_offer = lambda data: None
        kit.receiver.trigger_input()
        kit.receiver.input_ready()

    kit.handler.on_offer = once
    kit.handler.answers = [InputResult(InputVerdict.BLOCK, 1)]
    kit.ready(b"xyz")
    assert kit.handler.offers == [b"xyz"]
    kit.rounds()
    assert kit.handler.offers == [b"xyz", b"yz"]
    assert kit.receiver.reading


def test_trigger_input_when_nothing_is_kept_offers_nothing_once(kit):
    for _ in range(5):
        kit.receiver.trigger_input()
    kit.rounds()
    assert kit.handler.offers == [b""]


def test_input_ready_when_there_is_much_serves_the_others_after_the_budget(monkeypatch):
    """A connection with more than its budget goes to the tail of the round; the descriptor does not jump the queue."""
    monkeypatch.setattr("flowctl.receiver.TURN_BUDGET_BYTES", 250)
    kit = Kit(capacity_bytes=100)
    kit.ready(b"x" * 600)
    assert kit.reads == [100, 100, 50]
    kit.receiver.input_ready()
    assert kit.reads == [100, 100, 50]
    assert kit.processor.run_round() is True
    assert kit.reads == [100, 100, 50, 100, 100, 50]
    kit.rounds()
    assert sum(map(len, kit.handler.offers)) == 600
    assert kit.receiver.statistics().bytes_in == 600


# --- errors ------------------------------------------------------------------------------------------------------


def test_need_more_when_the_buffer_is_full_is_a_protocol_error():
    kit = Kit(capacity_bytes=16)
    kit.handler.answers = [InputResult(InputVerdict.NEED_MORE, 0)] * 10
    kit.ready(b"0123456789")
    kit.ready(b"0123456789")
    (error,) = kit.handler.ends
    assert isinstance(error, LimitExceededError)
    assert (error.limit, error.value, error.maximum) == ("input_buffer_bytes", 16, 16)
    assert kit.watched == [True, False]
    kit.receiver.trigger_input()
    kit.ready(b"more")
    kit.rounds()
    assert len(kit.handler.offers) == 2
    assert kit.receiver.statistics().kept_bytes == 0


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (InputResult(InputVerdict.ERROR, 0, RemoteProtocolError("bad chunk")), RemoteProtocolError, "bad chunk"),
        (InputResult(InputVerdict.ERROR, 0), RemoteProtocolError, "refused"),
        (RemoteProtocolError("raised"), RemoteProtocolError, "raised"),
        (ValueError("bug"), InternalError, "bug"),
        (InputResult(InputVerdict.DONE, 4), InternalError, "4 of 3"),
        (InputResult(InputVerdict.NEED_MORE, -2), InternalError, "-2 of 3"),
        (InputResult(InputVerdict.DONE, 0), InternalError, "nothing"),
    ],
)
def test_handler_when_it_fails_gets_one_error_and_no_more_input(kit, answer, kind, text):
    kit.handler.answers = [answer]
    kit.ready(b"abc", b"def")
    (error,) = kit.handler.ends
    assert type(error) is kind
    assert text in str(error)
    assert error.__cause__ is (answer if isinstance(answer, ValueError) else None)
    kit.settle()
    assert kit.handler.offers == [b"abc"]
    assert kit.watched == [True, False]


def test_process_error_when_it_raises_leaves_the_descriptor_unwatched(kit):
    def fail() -> None:
        raise KeyError("in process_error")

    kit.handler.on_end = fail
    with pytest.raises(KeyError):
        kit.ready(ConnectionResetError())
    assert kit.watched == [True, False]
    kit.rounds()
    assert len(kit.handler.ends) == 1


# --- the end of the stream ---------------------------------------------------------------------------------------


def test_eof_when_read_is_delivered_once_after_the_input(kit):
    kit.ready(b"last")
    kit.ready(EOF)
    kit.ready(EOF)
    kit.settle()
    assert kit.handler.offers == [b"last"]
    assert kit.handler.ends == ["eof"]
    assert kit.watched == [True, False]


def test_eof_when_input_is_held_waits_for_the_resumption(kit):
    """An end met while input is held for control only is kept, and delivered after what is kept was offered again."""
    kit.handler.answers = [InputResult(InputVerdict.NEED_MORE, 1)]
    kit.ready(b"ab")
    kit.receiver.pause("sender", "soft limit", control_bytes=100)
    kit.rounds()
    kit.ready(EOF)
    kit.rounds()
    assert kit.handler.ends == []
    assert kit.receiver._end
    assert not kit.receiver.reading
    kit.receiver.resume("sender")
    assert kit.handler.ends == []
    kit.rounds()
    assert kit.handler.ends == ["eof"]
    assert not kit.receiver._end


def test_read_error_when_input_is_held_is_delivered_at_once(kit):
    error = ConnectionResetError()
    kit.receiver.pause("sender", "soft limit", control_bytes=100)
    kit.ready(error)
    kit.rounds()
    assert kit.handler.ends == [error]
    kit.receiver.resume("sender")
    kit.rounds()
    assert kit.handler.ends == [error]


def test_eof_when_the_handler_blocks_on_resumption_waits_for_the_trigger(kit):
    kit.receiver.pause("a", "x", control_bytes=10)
    kit.ready(EOF)
    kit.receiver.resume("a")
    kit.handler.answers = [BLOCK]
    kit.rounds()
    assert kit.handler.ends == []
    kit.receiver.trigger_input()
    kit.rounds()
    assert kit.handler.ends == ["eof"]


def test_close_when_called_inside_the_handler_ends_everything(kit):
    kit.handler.on_offer = lambda data: kit.receiver.close()
    kit.handler.answers = [InputResult(InputVerdict.DONE, 1)]
    kit.ready(b"abc", b"def", EOF)
    assert kit.receiver.statistics().kept_bytes == 0
    kit.receiver.trigger_input()
    kit.receiver.close()
    kit.settle()
    kit.receiver.input_ready()
    assert kit.handler.offers == [b"abc"]
    assert kit.handler.ends == []
    assert kit.watched == [True, False]
    assert kit.receiver.statistics().kept_bytes == 0
    assert kit.receiver.pause("a", "x") is False
    assert not kit.receiver.resume("a")


# --- groups ------------------------------------------------------------------------------------------------------


def test_attached_when_moved_to_another_group_takes_along_what_is_kept():
    kit = Kit()
    kit.handler.answers = [InputResult(InputVerdict.NEED_MORE, 1)]
    kit.ready(b"abc")
    kit.receiver.detached()
    kit.receiver.detached()
    assert kit.watched == [True, False]
    kit.host = other = type(kit.host)()
    kit.receiver.attached(other)
    assert kit.watched == [True, False, True]
    kit.ready(b"d")
    assert kit.handler.offers == [b"abc", b"bcd"]
    assert other.bytes_in == 1


def test_attached_when_something_is_due_goes_on_with_it():
    kit = Kit(attach=False)
    assert kit.receiver.reading is False
    kit.receiver.trigger_input()
    kit.rounds()
    assert kit.handler.offers == []
    kit.receiver.attached(kit.host)
    kit.rounds()
    assert kit.handler.offers == [b""]
    assert kit.watched == [True]


def test_attached_when_it_cannot_be_is_refused(kit):
    with pytest.raises(LocalProtocolError):
        kit.receiver.attached(kit.host)
    with pytest.raises(LocalProtocolError):
        Kit(scratch_bytes=4096, capacity_bytes=4097)


def test_capacity_when_it_is_none_is_refused():
    with pytest.raises(LocalProtocolError):
        Kit(capacity_bytes=0)


def test_idle_receiver_when_many_exist_owns_no_buffer(kit):
    receiver = kit.receiver
    owned = [receiver, receiver._lock, receiver._kept, receiver._holds]
    assert sum(map(sys.getsizeof, owned)) < 1024
    assert not hasattr(receiver, "__dict__")


# --- any input in any pieces -------------------------------------------------------------------------------------


def parse_lines(handler_lines: list[bytes], blocks: list[bool]):
    def answer(data: memoryview) -> InputResult:
        text = bytes(data)
        end = text.find(b"\n")
        if end < 0:
            return InputResult(InputVerdict.NEED_MORE, 0) if text else NEED_MORE
        handler_lines.append(text[:end])
        if blocks and blocks.pop(0):
            return InputResult(InputVerdict.BLOCK, end + 1)
        return InputResult(InputVerdict.DONE, end + 1) if end + 1 < len(text) else InputResult(InputVerdict.DONE, ALL)

    return answer


class Forever(list):
    """An answer list that never ends."""

    def pop(self, index: int = 0):
        return self[0]


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    blocks=st.lists(st.booleans(), max_size=12),
    holds=st.lists(st.sampled_from(["", "stop", "control", "resume"]), max_size=40),
    budget=st.integers(1, 40),
)
def test_lines_when_cut_anywhere_come_out_whole(lines, cuts, blocks, holds, budget):
    with mock.patch("flowctl.receiver.TURN_BUDGET_BYTES", budget):
        kit = Kit(capacity_bytes=16)
        seen: list[bytes] = []
        kit.handler.answers = Forever([parse_lines(seen, list(blocks))])
        stream = b"".join(line + b"\n" for line in lines)
        position = turn = 0
        while position < len(stream):
            size = cuts[turn % len(cuts)]
            kit.ready(stream[position : position + size])
            position += size
            hold = holds[turn] if turn < len(holds) else ""
            if hold == "resume":
                kit.receiver.resume("test")
            elif hold:
                kit.receiver.pause("test", hold, control_bytes=3 if hold == "control" else 0)
            if turn % 3 == 0:
                kit.rounds()
            turn += 1
        kit.feed.append(EOF)
        kit.receiver.resume("test")
        for _ in range(len(lines) + 2):
            kit.settle()
            kit.receiver.trigger_input()
        assert seen == lines
        assert kit.handler.ends == ["eof"]
        assert kit.receiver.statistics().bytes_in == len(stream) == kit.host.bytes_in
