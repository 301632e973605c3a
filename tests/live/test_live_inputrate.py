"""The rate of messages: what it allows, when it holds input, and that a held publisher loses nothing."""

from __future__ import annotations

import pytest
from live_kit import World, audio, config
from structlog.testing import capture_logs

from flowctl.live.inputrate import BURST_S, LONGEST_PAUSE_S, InputRate, weight_of
from flowctl.reasons import CloseReason
from flowctl.wire.rtmp.wire import TYPE_AUDIO, Message


def rate_of(per_second, now=0.0, cut_after_s=10.0):
    return InputRate("messages_per_second", per_second, cut_after_s, now)


def test_rate_when_the_burst_is_used_up_holds_until_it_is_kept_again():
    rate = rate_of(100.0, 5.0)
    assert rate.count(200, 5.0) is None
    overrun = rate.count(50, 5.0)
    assert (overrun.resumes_at, overrun.begins, overrun.ends) == (pytest.approx(5.5), True, False)
    assert overrun.error.limit == "messages_per_second"
    assert rate.count(0, 5.51) is None


def test_rate_when_kept_never_holds():
    rate = rate_of(100.0)
    for second in range(0, 3600, 2):
        assert rate.count(200, float(second)) is None


def test_rate_when_silent_for_long_saves_up_no_more_than_the_burst():
    rate = rate_of(100.0)
    assert rate.count(201, 0.0).begins
    assert not rate.count(201, 0.1).begins
    assert rate.count(201, 3600.0).begins


def test_rate_when_one_turn_is_worth_long_holds_for_a_second_at_most():
    rate = rate_of(1.0)
    assert rate.count(256, 0.0).resumes_at == LONGEST_PAUSE_S
    assert rate.count(1, LONGEST_PAUSE_S).resumes_at == pytest.approx(LONGEST_PAUSE_S + 1.0)


@pytest.mark.parametrize(("cut_after_s", "expected"), [(10.0, 10.0), (0.0, None)])
def test_rate_when_one_goes_on_asking_for_more_cuts(cut_after_s, expected):
    """Who takes all that it is allowed, and more is waiting, is cut after as long as for work; 0: never."""
    rate, now, ended = rate_of(100.0, cut_after_s=cut_after_s), 0.0, None
    while now < 60.0 and ended is None:
        overrun = rate.count(50, now)
        ended = now if overrun is not None and overrun.ends else None
        now = now + 0.01 if overrun is None else overrun.resumes_at
    assert ended == (None if expected is None else pytest.approx(expected, abs=1.0))


def flood(world, rate=500.0, count=3000):
    """Send `count` audio messages at once; return their publisher, a viewer and what came in the first moment."""
    publisher = world.publisher()
    viewer = world.player()
    session = publisher.session
    octets = b"".join(session.send_tag(8, number, audio(b"%0118d" % number)) for number in range(count))
    publisher.send(octets)
    return publisher, viewer, len(viewer.payloads)


def test_flood_when_beyond_the_rate_is_slowed_and_loses_nothing(monkeypatch):
    monkeypatch.setattr("flowctl.live.session.MESSAGES_PER_TURN", 64)
    world = World(config(wire={"messages_per_second": 500.0}))
    with capture_logs() as lines:
        publisher, viewer, first = flood(world)
        assert BURST_S * 500 <= first <= BURST_S * 500 + 2 * (64 + 4096 // 120)
        world.run(2)
        assert first + 1000 - 400 <= len(viewer.payloads) <= first + 1000 + 400
        world.run(4)
    assert viewer.payloads[2:] == [audio(b"%0118d" % number) for number in range(3000)]
    assert publisher.ended is None
    assert world.hub.limits_hit == {"messages_per_second": 1}
    found = [line for line in lines if line["event"] == "input slowed"]
    assert [(line["limit"], line["connection"]) for line in found] == [
        ("messages_per_second", publisher.connection.number)
    ]
    # Held hundreds of times, and yet no history of it: a ledger is for what an operator reads.
    assert publisher.connection.receiver.statistics().pauses["messages per second"] > 5
    assert [entry.kind.name for entry in publisher.connection.sender.ledger()].count("PAUSE") == 0


def test_flood_when_it_goes_on_is_cut_and_says_so():
    """A publisher with minutes of messages to send is read for as long as work may be too much, and no longer."""
    world = World(config(wire={"messages_per_second": 100.0}))
    publisher, viewer, _ = flood(world, count=9000)
    world.run(9)
    assert publisher.ended is None
    world.run(3)
    reason, details = publisher.ended
    assert reason is CloseReason.LIMIT_HIT
    assert details.startswith("messages_per_second: more than 100 a second")
    assert len(viewer.payloads) < 9000
    assert world.hub.limits_hit == {"messages_per_second": 2}  # it was slowed, and it was cut


def test_flood_when_the_rate_is_off_is_taken_at_once():
    world = World(config(wire={"messages_per_second": 0}))
    publisher, viewer, first = flood(world)
    assert first == len(viewer.payloads) == 3002
    assert "messages per second" not in publisher.connection.receiver.statistics().pauses


@pytest.mark.parametrize(("size", "times"), [(1, 10.0), (13, 120 / 13), (60, 2.0), (120, 1.0), (1500, 1.0)])
def test_weight_when_messages_are_small_is_in_proportion(size, times):
    """No size is the one below which a flood costs most: as many octets are never much more work."""
    assert weight_of(300, 300 * size) == pytest.approx(300 * times)


@pytest.mark.parametrize("body", [b"", bytes(11), bytes(20)])
def test_flood_when_its_messages_are_tiny_is_slowed_up_to_ten_times_as_much(body):
    """Silence is sent in tiny messages, 50 a second; a thousand are a flood that would be minutes of work."""
    world = World(config(wire={"messages_per_second": 500.0}))
    publisher = world.publisher()
    publisher.send(b"".join(publisher.session.send_tag(8, number, audio(body)) for number in range(250)))
    assert publisher.connection.receiver.paused
    publisher.send(b"".join(publisher.session.send_tag(8, number, audio(body)) for number in range(6000)))
    world.run(12)
    assert publisher.ended[0] is CloseReason.LIMIT_HIT


def test_flood_when_nobody_takes_it_is_slowed_as_well():
    """Media of a stream that is not published is thrown away, and costs the same work."""
    world = World(config(wire={"messages_per_second": 500.0}))
    publisher = world.publisher()
    publisher.command("createStream", None, stream_id=0, transaction_id=9)
    stray = [publisher.session.send_message(Message(5, 0, TYPE_AUDIO, 2, audio(bytes(12)))) for _ in range(3000)]
    publisher.send(b"".join(stray))
    assert publisher.connection.receiver.paused
    assert publisher.live._rtmp.counters["media-without-publish"] < 3000
    assert world.hub.limits_hit == {"messages_per_second": 1}


def test_flood_when_held_is_still_cut_by_its_limits_of_time():
    world = World(config(wire={"messages_per_second": 500.0}))
    publisher, _, _ = flood(world)
    publisher.send(b"\x02\x00\x00\x00\x00\x00\x04\x01\x00\x00\x00\x00\x7f\xff\xff\xff")
    assert publisher.ended is None
    world.run(10)
    assert publisher.ended is not None
    assert "chunk_size_max_bytes" in publisher.ended[1]
