"""The fuzz target, for a few seconds: long runs are started by hand, see fuzz_rtmp.py."""

from __future__ import annotations

import random

import fuzz_rtmp
import pytest

from flowctl.wire.rtmp.wire import Message


@pytest.mark.parametrize("data", [*fuzz_rtmp.FOUND, "", "00", "ff", "00c4", "0006"])
def test_input_that_failed_once_is_read_now(data):
    fuzz_rtmp.check(bytes.fromhex(data))


def test_recorded_and_generated_inputs_are_read_unchanged():
    rng = random.Random(1)
    for data in [*fuzz_rtmp.recorded(), *(fuzz_rtmp.generated(rng) for _ in range(50))]:
        fuzz_rtmp.check(b"\0" + data)


def test_mutated_inputs_break_no_promise():
    """Five seconds of inputs; the failing one would be printed in hex."""
    assert fuzz_rtmp.run(seconds=5, seed=20) > 0


def test_target_notices_a_broken_reader(monkeypatch):
    """A reader that loses the last octet of a message does not pass: the target is able to fail."""
    read = fuzz_rtmp.ChunkReader.feed

    def lossy(self, data):
        messages = read(self, data)
        return [Message(m.csid, m.timestamp, m.type_id, m.msid, m.payload[: len(data)]) for m in messages]

    monkeypatch.setattr(fuzz_rtmp.ChunkReader, "feed", lossy)
    with pytest.raises(AssertionError, match=r"^input [0-9a-f]+ of seed 3"):
        fuzz_rtmp.run(seconds=5, seed=3)
