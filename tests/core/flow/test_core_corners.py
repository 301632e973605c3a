"""Corners where log, cursor, outbox, Sender and fan-out meet: what nobody must pay for who keeps up, and more."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from fanout_kit import KeyFramesOnly, Stage
from flow_kit import CONTROL, DATA, INTER, KEY, OWN, Peer, Published, check_accounts, check_stream, frame
from sender_kit import HARD_LIMIT, OVERLOADED, READY, SOFT_LIMIT, Talker, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import HardPolicy, Limits
from flowctl.core.flow.policy import DropDroppable, KeepAll, LivePolicy
from flowctl.core.sending.contract import SendOutcome
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import FlushResult

# --- who keeps up pays for nothing -------------------------------------------------------------------------------


def test_rest_of_a_turn_when_it_is_above_the_limit_is_no_sign_of_a_slow_peer():
    stage = Stage(limits=by_messages(5))
    viewer = stage.viewer(limits=by_messages(5, 100), settings=SenderSettings(turn_messages=10))
    viewer.follow(stage.fanout)
    stage.group.run()
    stage.published.script("I" * 25)
    viewer.sender.set_policy(KeepAll())
    viewer.sender.thin()
    viewer.sender.flush()
    stage.published.script("K" + "I" * 24)
    assert viewer.sender.flush() is FlushResult.MORE
    stage.group.run(1.0)
    assert viewer.edges.changes == []
    stage.published.script("I" * 20)
    viewer.sender.tick()
    assert viewer.sender.state is READY, "all was taken, so what comes next has to be offered first"
    check_accounts(viewer)


def test_policy_when_it_refuses_in_ready_keeps_sound_in_order_and_the_viewer_served():
    stage = Stage(1)
    (viewer,) = stage.viewers
    viewer.sender.set_policy(KeyFramesOnly())
    for _ in range(3):
        stage.publish("AIAKAI")
    assert viewer.classes().replace("H", "") == "K" + "AAKA" * 3
    viewer.sender.set_policy(KeepAll())
    stage.publish("AIAKAI")
    assert viewer.classes().replace("H", "") == "K" + "AAKA" * 3 + "AAKAI"
    stage.publish("I")
    assert stage.fanout.statistics().members == 1
    assert viewer.edges.changes == []
    check_accounts(viewer)


# --- joining -----------------------------------------------------------------------------------------------------


def test_joiner_when_its_cache_is_partly_out_is_not_judged_by_the_rest():
    stage = Stage(script="")
    stage.publish("K", 5000)
    joiner = stage.viewer(Peer(room=100), limits=Limits.parse("1000,2", "3000,4"))
    joiner.follow(stage.fanout)
    for _ in range(10):
        stage.group.run(0.3)
        assert joiner.sender.state is OVERLOADED
        joiner.give(300)
    joiner.drain()
    assert joiner.numbers() == [0]


def test_joiner_when_new_messages_reach_its_limit_is_not_thinned_before_its_cache_is_taken():
    stage = Stage(script="KIII")
    joiner = stage.viewer(Peer(room=0), limits=by_messages(6, 100))
    joiner.follow(stage.fanout)
    stage.group.run(0.1)
    for _ in range(8):
        stage.publish("I")
        joiner.give(7)
    assert joiner.sender.state is SOFT_LIMIT
    assert joiner.sender.statistics().dropped == {}
    joiner.give(11 * 5)
    stage.group.run(1.0)
    assert joiner.sender.statistics().dropped_messages > 0
    stage.publish("KI")
    joiner.drain()
    assert joiner.numbers()[:4] == [0, 1, 2, 3]
    assert joiner.numbers()[-2:] == [12, 13]
    check_accounts(joiner)


# --- limits ------------------------------------------------------------------------------------------------------


def test_limits_when_asked_for_from_two_threads_are_those_asked_for_last():
    stage = Stage(1)
    (viewer,) = stage.viewers
    viewer.host.foreign = True
    viewer.sender.set_limits(by_messages(5))
    viewer.host.foreign = False
    viewer.sender.set_limits(by_messages(7))
    stage.group.run()
    assert viewer.sender.limits == by_messages(7)
    kinds = [entry.kind for entry in viewer.sender.ledger()]
    assert kinds == [LedgerKind.LIMITS] * 2


def test_send_from_another_thread_to_a_blocked_viewer_is_still_limited():
    stage = Stage(1, limits=by_messages(1000))
    (viewer,) = stage.viewers
    viewer.sender.set_policy(KeepAll())
    viewer.give(0)
    stage.publish("I")
    viewer.sender.set_limits(by_messages(5, 10))
    viewer.host.foreign = True
    outcomes = [viewer.sender.send(frame(OWN, DATA, number), DATA).outcome for number in range(20)]
    assert outcomes == [SendOutcome.ACCEPTED] * 10 + [SendOutcome.DROPPED] * 10
    assert viewer.sender.state is OVERLOADED, "edges are for the owning thread while a log is followed"
    stage.group.run()
    assert viewer.sender.state is HARD_LIMIT
    assert viewer.host.closed[0][0] is CloseReason.HARD_LIMIT


@pytest.mark.parametrize(
    "limits",
    [by_messages(9, 100, low=5), Limits.parse("99,0", "0,0", "55,0", overhead_bytes=0, target_delay_ms=0)],
    ids=["messages", "bytes"],
)
def test_thinning_when_own_messages_are_queued_too_makes_room_for_both(limits):
    stage = Stage(1)
    (viewer,) = stage.viewers
    viewer.give(0)
    stage.publish("KIA")
    for number in range(3):
        viewer.sender.send(frame(OWN, DATA, number), DATA, droppable=False)
    viewer.sender.set_limits(limits)
    stage.publish("KI")
    assert viewer.sender.state is OVERLOADED
    stage.publish("I")
    assert [change.new for change in viewer.edges.changes] == [OVERLOADED, SOFT_LIMIT]
    assert viewer.sender.load().messages == 3 + 2 + 1, "headers and the key frame alone"
    viewer.drain()
    assert [number for origin, _, number, _ in viewer.frames if origin == OWN] == [0, 1, 2]
    assert viewer.numbers() == [0, 4]


# --- the cohort --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LivePolicy(), KeepAll()], ids=["live", "keep all"])
def test_member_when_a_control_message_meets_eagain_leaves_with_its_place(policy):
    stage = Stage(2)
    viewer = stage.viewers[0]
    viewer.sender.set_policy(policy)
    viewer.give(5)
    viewer.sender.send(frame(OWN, CONTROL, 0), CONTROL)
    stage.group.run()
    assert (stage.fanout.statistics().members, viewer.sender.state) == (1, OVERLOADED)
    stage.publish("IA")
    viewer.drain()
    stage.publish("I")
    assert viewer.classes() == "HHKCIAI"
    assert stage.fanout.statistics().members == 2
    stage.check()


def test_flush_when_one_viewer_fails_in_it_serves_the_others():
    stage = Stage(3)
    bad = stage.viewers[1]
    for viewer in stage.viewers:
        viewer.give(0)
    stage.publish("I")
    for viewer in stage.viewers:
        if viewer is not bad:
            viewer.give(None)
    bad.sender._judgement.meet_kernel_anew()
    stage.fanout.serve_in_turn(bad.sender)
    bad.peer.failure = RuntimeError("a fault of ours")
    stage.group.run()
    stage.publish("I")
    assert [viewer.host.closed for viewer in stage.viewers if viewer is not bad] == [[], []]
    assert bad.host.closed[0][0] is CloseReason.INTERNAL
    assert [where for where, _ in bad.host.failures] == ["flush"]
    assert [viewer.numbers() for viewer in stage.viewers if viewer is not bad] == [[0, 1, 2]] * 2
    assert (stage.fanout.statistics().members, stage.fanout.statistics().alone) == (2, 0)


def test_handler_when_it_publishes_to_the_log_it_follows_is_looked_at_afterwards():
    stage = Stage(1)
    (viewer,) = stage.viewers
    viewer.sender.set_policy(KeepAll())
    viewer.give(0)
    stage.publish("I")
    viewer.sender.set_limits(by_messages(3, 6, policy=HardPolicy.HOLD))
    running, most = [], []

    def publish(state, change):
        running.append(state)
        most.append(len(running))
        if state is SOFT_LIMIT:
            stage.published.script("AAAAA")
        running.pop()

    viewer.edges.hook = publish
    stage.published.script("II")
    assert (most, viewer.sender.state) == ([1], SOFT_LIMIT)
    stage.published.script("A")
    assert (most, viewer.sender.state) == ([1, 1], HARD_LIMIT)
    assert viewer.host.failures == []
    viewer.drain()
    assert viewer.numbers() == list(range(10))
    stage.check()


# --- gates and waits ---------------------------------------------------------------------------------------------


def test_ledger_when_a_viewer_waited_for_its_first_key_frame_tells_it():
    stage = Stage(script="KII")
    stage.published.log.drop_cache()
    viewer = stage.viewer()
    viewer.follow(stage.fanout)
    stage.publish("IIA")
    stage.publish("KI")
    (entry,) = [entry for entry in viewer.sender.ledger() if entry.kind is LedgerKind.DROPS]
    assert entry.dropped[DropReason.KEY_WAIT].by_name() == {"inter": 2}
    check_accounts(viewer)


# --- own queue ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
def test_frames_for_one_peer_when_a_log_of_its_own_has_them_restart_at_a_key_frame(deferred):
    talker = Talker(deferred=deferred, policy=DropDroppable())
    published = Published(talker.group)
    talker.follow(Fanout(published.log, talker.group, flush_interval_s=0))
    published.script("K")
    talker.group.run(0.1)
    talker.peer.room = 0
    published.script("I")
    talker.group.run(0.1)
    assert talker.sender.state is OVERLOADED
    published.script("I")
    talker.drain()
    published.script("IK")
    talker.drain()
    assert talker.classes() == "KIHHK"
    check_stream(talker, published)
    check_accounts(talker, Counter(published.classes))


@pytest.mark.parametrize("item", [KEY, INTER])
@pytest.mark.parametrize("droppable", [None, True])
def test_send_of_a_frame_that_others_refer_to_when_it_may_be_dropped_is_refused(item, droppable):
    talker = Talker(policy=LivePolicy())
    with pytest.raises(LocalProtocolError, match=item.name) as raised:
        talker.sender.send(b"frame", item, droppable=droppable)
    assert "StreamLog" in raised.value.hint
    assert talker.sender.statistics().accepted.total_messages == 0
    assert talker.say("KID", droppable=False)[-1].outcome is SendOutcome.ACCEPTED
    talker.drain()
    assert talker.classes() == "KID"


def test_handler_when_another_thread_sends_meanwhile_makes_it_wait_only():
    talker, results = Talker(Peer(room=0)), []
    thread = threading.Thread(target=lambda: results.append(talker.sender.send(b"from the other").outcome))

    def start(state, change):
        if thread.ident is None:
            thread.start()
            assert not results

    talker.edges.hook = start
    talker.say("X")
    talker.sender.flush()
    thread.join(60)
    assert results == [SendOutcome.ACCEPTED]
    assert talker.host.failures == []


def test_statistics_when_the_connection_has_ended_stand_still():
    talker = Talker(Peer(room=0), settings=SenderSettings(stuck_s=5))
    talker.say("X")
    talker.group.run(100)
    before = talker.sender.statistics()
    talker.group.run(100)
    assert talker.sender.statistics() == before
    assert before.longest_stall_s == pytest.approx(5.0)
    assert sum(before.time_in_states_s) == pytest.approx(5.0)
    assert talker.sender.why().startswith("closed: stuck (it took nothing for 5.0 s")
