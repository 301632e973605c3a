"""What-if over flights: the limits that were in force do to a recorded viewer what they did to it."""

from __future__ import annotations

import json

import pytest
from fanout_kit import kept
from flight_kit import ROOMS, Rows, World, linked, outputs, recorded_scene
from slow_kit import Steady

from flowctl.analyze.whatif.grid import in_force, levels_of
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.policy import (
    LIVE_POLICIES,
    POLICIES,
    AudioFirst,
    DropDroppable,
    KeepAll,
    LivePolicy,
    PicturesFirst,
)
from flowctl.core.sending.settings import SenderSettings
from flowctl.live.config import LiveConfig
from flowctl.live.records.recording import _described
from flowctl.live.settings.levels import Level
from flowctl.records.flight.reading import read_flights
from flowctl.records.flight.recorded import begin_detail
from flowctl.records.flight.replay import Rerun, replay
from flowctl.records.flight.whatif.engine import evaluate
from flowctl.records.flight.whatif.run import WhatifRun
from flowctl.records.flight.whatif.sets import SetRun
from flowctl.records.flight.whatif.types import REFUSED, TAKEN, Choice, Work
from flowctl.records.flight.whatif.viewing import stream_and_link
from flowctl.records.flight.words import TablePolicy
from flowctl.records.telemetry.schema import FlightKind
from tests.analyze.flight_files import flight_viewer

__all__ = ["kept"]  # a fixture

EXTEND_S = 30.0


def check_again(viewer):
    rows = viewer.rows.stored()
    flight = read_flights(rows)
    was = replay(flight)
    again = flight_viewer(rows, EXTEND_S)
    (outcome,) = evaluate(again, [in_force(flight.rows[0].detail)])
    assert outcome.closed is viewer.sender.statistics().close_reason
    assert outcome.edges == len(outputs(was, FlightKind.STATE))
    dropped = sum(sum(count for count, _ in classes.values()) for classes in was.figures["dropped"].values())
    assert sum(count for _, count in outcome.dropped_by_reason) == dropped
    if outcome.closed:
        assert again.assumed_from is not None
        assert again.events[0][0] + outcome.watched_s == pytest.approx(flight.duration_s, abs=0.01)
    return flight, outcome


@pytest.mark.parametrize("kind", ROOMS)
def test_evaluate_when_the_choice_was_in_force_does_what_was_done(kind):
    _, outcome = check_again(linked(*ROOMS[kind]))
    assert outcome.edges > 0
    assert kind.startswith("cut") == (outcome.closed is not None)


def test_evaluate_when_the_kernel_was_full_before_the_join_begins_blocked():
    world = World("4000,0", "8000,0", room=100)
    world.reply(300)
    world.join(size=900)
    world.viewer.give(None)
    world.go_on(4)
    flight, outcome = check_again(world.viewer)
    events, given, *_ = stream_and_link(flight)
    assert given == 6
    assert events[given][1:] == (REFUSED, 0)
    assert outcome.closed is None


def test_evaluate_when_a_message_comes_between_two_turns_knows_that_the_first_left_something():
    """A used-up turn is not a write of which everything was taken: else the whole cache would count as sent."""
    world = World("0,0,1s", "0,0,1s", turn_bytes=2000)
    world.reply(300)
    world.viewer.peer.room = 3000
    world.join(size=900, between=True)
    world.go_on(8, room=0)
    flight, outcome = check_again(world.viewer)
    assert outcome.closed is not None
    assert max(size for _, what, size in stream_and_link(flight).events if what == REFUSED) == 3000


@pytest.mark.parametrize("room", [150, 200, 350])
def test_evaluate_when_our_own_thread_had_no_room_does_what_was_done_all_the_same(room):
    world = World("0,0,1s", "0,0,2s", target_ms=400)
    world.reply(300)
    world.join(size=150)
    world.go_on(4, room)
    world.group.is_strained = True
    world.go_on(60, room)
    rows, was = world.viewer.rows.stored(), world.viewer.sender.statistics()
    again = flight_viewer(rows, EXTEND_S)
    (outcome,) = evaluate(again, [in_force(rows[0]["detail"])])
    assert outcome.closed is was.close_reason is None
    assert outcome.edges == was.transitions


def test_stream_and_link_when_there_is_no_cache_begins_with_the_stream():
    world = World("0,0,1s", "0,0,9s")
    world.reply(300)
    world.viewer.follow(world.fanout)
    world.go_on(4)
    flight = read_flights(world.viewer.rows.stored())
    found = stream_and_link(flight)
    assert (found.given, found.close_reason) == (0, None)
    assert found.events[0][1] >= 0
    taken = sum(size for _, what, size in found.events if what == TAKEN)
    assert taken == world.viewer.sender.statistics().bytes_sent - 300


def test_stream_and_link_when_a_viewer_pauses_ends_with_the_first_log():
    world = World("0,0,1s", "0,0,1s")
    world.join(size=900)
    world.go_on(4)
    world.viewer.sender.unfollow()
    left_s = world.group.now()
    world.go_on(7)
    world.viewer.follow(world.fanout)
    world.go_on(1, room=0)
    world.viewer.give(None)
    world.go_on(4)
    rows = world.viewer.rows.stored()
    flight = read_flights(rows)
    found = stream_and_link(flight)
    assert found.given == 6
    assert found.ended_s == pytest.approx(left_s - world.began_s, abs=0.001)
    assert found.ended_s < flight.duration_s - 1
    (outcome,) = evaluate(flight_viewer(rows, EXTEND_S), [in_force(flight.rows[0].detail)])
    assert outcome.closed is None is world.viewer.sender.statistics().close_reason


def test_stream_and_link_when_a_turn_was_used_up_is_one_write():
    viewer = linked("0,0,1s", "0,0,9s", [None] * 4)
    flight = read_flights(viewer.rows.stored())
    sent = [row.size_bytes for row in flight.rows if row.kind == "sent"]
    events, given, *_ = stream_and_link(flight)
    assert sent[0] == 300  # the answer, before the stream
    assert sent[1] < 6 * 900  # a part of the join
    assert (given, [what >= 0 for _, what, _ in events[:given]]) == (6, [True] * 6)
    assert events[given][1] == TAKEN
    later = sum(size for _, what, size in events[given + 1 :] if what == TAKEN)
    assert events[given][2] == viewer.sender.statistics().bytes_sent - 300 - later == 6 * 900 + 31


def test_stream_and_link_when_a_turn_gave_no_more_than_was_due_was_refused_without_an_eagain():
    rows = Rows()
    scene = recorded_scene(Steady, rows, 0.6)
    scene.kernel.host = None  # it takes as much as ever, and hardly refuses anything that it is offered in a turn
    scene.go(20.0).sender.end_flight()
    flight = read_flights(rows.stored())
    refused = [event for event in stream_and_link(flight).events if event[1] == REFUSED]
    assert len(refused) > 10
    assert sum(row.kind == "would_block" for row in flight.rows) < 10


def test_stream_and_link_when_nobody_looked_has_messages_where_they_were_published():
    viewer = linked("0,0,1s", "0,0,2s", [None] * 4 + [0] * 30)
    flight = read_flights(viewer.rows.stored())
    events = stream_and_link(flight).events
    seen = [row.offset_us / 1e6 for row in flight.rows if row.kind == "queued" and row.reason == "log"]
    published = [at for at, what, _ in events if what >= 0]
    assert max(was - at for at, was in zip(published, seen, strict=True)) > 0.4
    assert published == sorted(published)


def test_choice_when_read_from_a_flight_is_the_one_in_force():
    """Limits, policy and times of the recording, so that the comparison above compares anything."""
    flight = read_flights(linked("0,0,1s", "0,0,2s", [0]).rows.stored())
    choice = in_force(flight.rows[0].detail)
    limits = Limits.parse("0,0,1s", "0,0,2s", target_delay_ms=0)
    assert choice == Choice(limits=limits, stuck_s=0, soft_too_long_s=0, return_after_s=0)


@pytest.mark.parametrize("policy", [LivePolicy, AudioFirst, PicturesFirst, KeepAll, DropDroppable])
def test_choice_when_read_from_a_flight_has_the_policy_in_force(policy):
    table = TablePolicy.of(policy(), pytest.fail)
    choice = in_force(begin_detail(0.0, Limits(), SenderSettings(), table, deferred=False))
    assert type(POLICIES[choice.policy]) is policy
    own = TablePolicy(table.refused, table.thinned, (7.0,) * len(table.waits))
    assert in_force(begin_detail(0.0, Limits(), SenderSettings(), own, deferred=False)).policy == "all-or-cut"


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_choice_when_read_from_the_start_of_a_server_has_its_policy(name, tmp_path):
    level = Level(application="talk", values={"policy": "audio-first"})
    detail = _described(LiveConfig(policy=name, levels=(level,)))
    assert detail["levels"] == "talk/*=audio-first"
    assert POLICIES[in_force(json.dumps(detail)).policy].__class__ is LIVE_POLICIES[name].__class__
    del detail["policy"]
    assert in_force(json.dumps(detail)).policy == "all-or-cut"


@pytest.mark.parametrize("detail", [None, "", "{", "5", "[]", "[" * 100_000, '{"levels": 5}', '{"marks": [[]]}'])
def test_settings_in_force_when_a_record_is_damaged_are_not_known(detail):
    assert in_force(detail) is None
    assert levels_of(detail) == ""


def test_log_when_a_flight_is_replayed_or_tried_with_something_else_is_let_go(kept, monkeypatch):
    world = World("6000,0,2s", "60000,0,20s", room=350)
    world.join(size=900)
    world.go_on(20, 350)
    for _ in range(400):  # no key frame any more
        world.published.script("AAA", 150)
        world.group.run(0.25)
        world.viewer.give(350)
    rows, runs = world.viewer.rows.stored(), []
    monkeypatch.setattr("flowctl.records.flight.replay.Rerun", lambda flight: runs.append(Rerun(flight)) or runs[-1])
    replay(read_flights(rows))
    assert runs[0].fanout.log.tail.sequence > 1200
    assert kept() < 100
    for run_class, renditions in (WhatifRun, ()), (SetRun, (1000, 2000)):
        choice = Choice(limits=Limits.parse("3000,40,1s"), renditions=renditions)
        runs.append(run_class(flight_viewer(rows, 0.0), [choice], Work()))
        runs[-1].run()
        assert kept() < 200
