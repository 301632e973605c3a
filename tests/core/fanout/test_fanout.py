"""A fan-out: the cohort, who leaves it, joins it, moves to another one."""

from __future__ import annotations

import errno
import itertools
import ssl

import pytest
from connection_kit import Noting, Reader, ask, failures, groups, link, wait_until
from fanout_kit import Stage
from flow_kit import (
    HEAD_BYTES,
    LOG,
    RESTART,
    Peer,
    Published,
    Viewer,
    check_accounts,
    frame,
    move,
)
from sender_kit import OVERLOADED, READY, SOFT_LIMIT, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.fanout.following import Fanouts, FollowPlace
from flowctl.core.flow.limits import AxisLimits, Limits
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import ClosedError, ConfigError, LocalProtocolError
from flowctl.reasons import CloseReason, DropReason
from flowctl.sender import Sender
from flowctl.testing import ManualGroup

# -- the cohort


def test_flush_when_viewers_keep_up_costs_one_send_each():
    stage = Stage(3)
    before = [viewer.peer.writes for viewer in stage.viewers]
    stage.publish("IADX")
    assert [viewer.peer.writes for viewer in stage.viewers] == [count + 1 for count in before]
    assert [viewer.numbers() for viewer in stage.viewers] == [[0, 1, 2, 3, 4]] * 3
    assert stage.fanout.statistics().cohort_bytes == 3 * 4 * HEAD_BYTES
    stage.check()


def test_flush_when_interval_is_set_writes_at_once_after_a_pause_and_then_together():
    stage = Stage(1, interval_s=0.04, adaptive=False)
    (viewer,) = stage.viewers
    before = viewer.peer.writes
    stage.publish("I")
    assert viewer.peer.writes == before + 1
    stage.publish("II")
    stage.group.run(0.039)
    assert viewer.peer.writes == before + 1
    stage.group.run(0.002)
    assert viewer.peer.writes == before + 2
    assert viewer.numbers() == [0, 1, 2, 3]


def test_flush_when_the_log_comes_in_batches_follows_them_and_is_no_more_frequent():
    stage = Stage(1, interval_s=0.04, adaptive=False)
    peer = stage.viewers[0].peer
    stage.published.log.batched = True
    stage.group.run(1.0)
    stage.publish("I")
    stage.group.run(0.025)  # the first batches come at a bad moment
    waits = []
    for _ in range(10):
        before = peer.writes
        stage.published.script("II")
        stage.group.run()
        waits.append(peer.writes == before)
        stage.group.run(0.04)
    assert waits == [False] * 10
    before = peer.writes
    for _ in range(200):
        stage.published.script("I")
        stage.group.run(0.005)
    assert peer.writes - before <= 1.0 / 0.04 + 1
    stage.check()


def test_member_when_kernel_is_full_leaves_and_returns():
    stage = Stage(3)
    slow = stage.viewers[0]
    slow.peer.room = 15
    stage.publish("IAI")
    assert stage.fanout.statistics().members == 2
    assert stage.fanout.statistics().left == 1
    assert slow.sender.state is OVERLOADED
    stage.publish("AI")
    assert [viewer.numbers() for viewer in stage.viewers[1:]] == [[0, 1, 2, 3, 4, 5]] * 2
    slow.drain()
    stage.group.run(1.0)
    assert slow.numbers() == [0, 1, 2, 3, 4, 5]
    assert [change.new for change in slow.edges.changes] == [OVERLOADED, READY]
    assert stage.fanout.statistics().members == 3
    assert not slow.sender.statistics().dropped
    stage.check()


def test_viewers_that_take_nothing_are_looked_at_some_times_a_second_however_many_key_frames_come(monkeypatch):
    stage, looks = Stage(40), []
    log_grew = Sender.log_grew
    monkeypatch.setattr(Sender, "log_grew", lambda sender: (looks.append(sender), log_grew(sender))[1])
    for viewer in stage.viewers:
        viewer.peer.room = 0
    for _ in range(240):
        stage.published.script("K", 100)
        stage.group.run(1 / 60)
    assert 0 < len(looks) <= 40 * (4 * 4 + 2)
    for viewer in stage.viewers:
        viewer.peer.room = None
        viewer.host.poll_writable()
    stage.group.run(3.0)
    stage.check()


def test_members_when_several_fail_in_one_flush_end_alone():
    stage = Stage(5)
    for index in (0, 2, 4):
        stage.viewers[index].peer.failure = OSError(errno.ECONNRESET, "scripted")
    stage.viewers[3].peer.room = 0
    stage.publish("II")
    stage.viewers[3].drain()
    stage.publish("I")
    ended = [[reason for reason, _ in viewer.host.closed] for viewer in stage.viewers]
    assert ended == [[CloseReason.PEER_RESET], [], [CloseReason.PEER_RESET], [], [CloseReason.PEER_RESET]]
    assert [stage.viewers[index].numbers() for index in (1, 3)] == [[0, 1, 2, 3]] * 2
    stage.check()


def test_member_when_own_message_is_sent_gets_it_between_two_of_the_log():
    stage = Stage(2)
    viewer = stage.viewers[0]
    stage.publish("I")
    viewer.sender.send(b"".join([b"O", bytes([0]), (7).to_bytes(4, "big"), HEAD_BYTES.to_bytes(5, "big")]))
    stage.publish("I")
    assert viewer.numbers(b"O") == [7]
    assert viewer.numbers() == [0, 1, 2]
    assert stage.fanout.statistics().members == 2


def test_member_when_it_leaves_the_log_goes_on_without_it():
    stage = Stage(2)
    stage.published.script("I")
    stage.viewers[0].sender.unfollow()
    stage.publish("I")
    assert [viewer.numbers() for viewer in stage.viewers] == [[0], [0, 1, 2]]
    assert stage.viewers[0].sender.statistics().dropped[DropReason.UNFOLLOWED].by_name() == {"inter": 1}
    stage.check()


def test_fanout_when_misused_says_so():
    stage = Stage(1)
    (viewer,) = stage.viewers
    with pytest.raises(ConfigError, match="flush_interval_s is 11"):
        Fanout(stage.published.log, stage.group, flush_interval_s=11)
    with pytest.raises(LocalProtocolError, match="already"):
        viewer.sender.follow(stage.fanout)
    other = Fanout(Published(stage.group).log, stage.group)
    with pytest.raises(LocalProtocolError, match="of the log it follows"):
        viewer.sender.resume_following(stage.fanout)
    viewer.sender.suspend_following()
    with pytest.raises(LocalProtocolError, match="of the log it follows"):
        viewer.sender.resume_following(other)
    viewer.sender.resume_following(stage.fanout)
    stage.publish("I")
    assert viewer.numbers() == [0, 1]


def test_fanout_when_its_group_is_gone_stops_listening():
    class Gone(ManualGroup):
        calls = 0

        def call_soon(self, callback, *args):
            self.calls += 1
            raise ClosedError("the group is closed")

    group = Gone()
    published = Published(group)
    Fanout(published.log, group)
    published.script("KII")
    assert group.calls == 1
    assert published.log.tail.sequence == 3


# -- joining


def test_joiner_when_there_is_a_cache_gets_headers_and_the_whole_group():
    stage = Stage(script="KIKIA")
    viewer = stage.viewer()
    viewer.follow(stage.fanout)
    stage.group.run()
    assert [(origin, number) for origin, _, number, _ in viewer.frames] == [
        (RESTART, 2),
        (RESTART, 2),
        (LOG, 2),
        (LOG, 3),
        (LOG, 4),
    ]
    stage.publish("I")
    assert viewer.numbers() == [2, 3, 4, 5]
    assert stage.fanout.statistics().members == 1


def test_joiner_when_load_falls_loses_nothing():
    stage = Stage(script="K" + "IDA" * 10)
    viewer = stage.viewer(Peer(room=0), limits=by_messages(10, 20))
    stage.viewers.append(viewer)
    viewer.follow(stage.fanout)
    stage.group.run()
    for step in range(60):
        if step % 3 == 0:
            stage.publish("A")
        stage.group.run(0.2)
        viewer.give(2 * HEAD_BYTES)
    viewer.drain()
    stage.group.run(1.0)
    assert viewer.numbers() == list(range(len(stage.published.classes)))
    assert not viewer.sender.statistics().dropped
    assert max(change.new for change in viewer.edges.changes) is OVERLOADED
    assert stage.fanout.statistics().members == 1
    stage.check()


def test_joiner_when_it_stalls_is_spared_until_its_age_passes_the_low_mark():
    limits = Limits(messages=AxisLimits(soft=8, hard=1000), age_ms=AxisLimits(soft=4000, hard=60_000, low=2000))
    stage = Stage(script="K" + "I" * 20)
    viewer = stage.viewer(Peer(room=0), limits=limits)
    stage.viewers.append(viewer)
    viewer.follow(stage.fanout)
    stage.publish("DD")
    stage.group.run(1.9)
    assert viewer.sender.state is OVERLOADED
    assert not viewer.sender.statistics().dropped
    assert "still taking the GOP cache" in viewer.sender.why()
    stage.group.run(1.5)
    assert viewer.sender.state is OVERLOADED, "SOFT_LIMIT was entered, and thinning led back below it"
    assert SOFT_LIMIT in [change.new for change in viewer.edges.changes]
    assert viewer.sender.statistics().dropped[DropReason.THINNED].total_messages > 8
    assert "still taking" not in viewer.sender.why()
    viewer.drain()
    stage.publish("KI")
    assert viewer.numbers()[-2:] == [23, 24]
    stage.check()


# -- moving between fan-outs


@pytest.mark.parametrize("room", [None, 0, 1, 17, 40])
def test_move_between_fanouts_loses_and_repeats_no_byte(room):
    stage = Stage(1)
    (viewer,) = stage.viewers
    fanouts = itertools.cycle([Fanout(stage.published.log, stage.group, flush_interval_s=0), stage.fanout])
    for _ in range(6):
        viewer.peer.room = room
        stage.publish("IAI")
        move(viewer.sender, next(fanouts))
        stage.publish("AI")
        check_accounts(viewer)
        viewer.give(None)
        stage.group.run()
    assert viewer.numbers() == list(range(len(stage.published.classes)))
    stage.check()


@pytest.mark.parametrize("room", [None, 0, 17])
def test_suspended_viewer_resumes_with_what_was_published_meanwhile(room):
    stage = Stage(1)
    (viewer,) = stage.viewers
    viewer.peer.room = room
    stage.publish("IA")
    viewer.sender.suspend_following()
    assert viewer.sender.following is None
    assert stage.fanout.empty is True
    viewer.peer.room = None
    written = len(viewer.peer.received)
    stage.publish("IAIA")
    assert len(viewer.peer.received) == written
    group = ManualGroup(stage.group.clock)
    other = Fanout(stage.published.log, group)
    viewer.host.group = viewer.group = group
    viewer.sender.resume_following(other)
    viewer.drain()
    group.run(1.0)
    assert viewer.numbers() == list(range(7))
    assert other.statistics().members == 1
    stage.check()


@pytest.mark.parametrize("error", [ssl.SSLWantWriteError(3, "want write"), ssl.SSLWantReadError(2, "want read")])
def test_member_when_tls_wants_to_wait_leaves_as_at_eagain(error):
    stage = Stage(2)
    viewer = stage.viewers[0]
    send, sendmsg = viewer.peer.send, viewer.peer.sendmsg
    waits = [error, error]

    def refuse(write, data):
        if waits:
            raise waits.pop()
        return write(data)

    (squad,) = stage.fanout._cohort.squads()
    squad.sends[0] = lambda data: refuse(send, data)
    viewer.peer.sendmsg = lambda buffers: refuse(sendmsg, buffers)
    stage.publish("I")
    assert (waits, viewer.sender.closed, viewer.sender.blocked) == ([], False, True)
    assert stage.viewers[1].numbers() == [0, 1]
    viewer.sender.writable()
    stage.publish("I")
    assert [item.numbers() for item in stage.viewers] == [[0, 1, 2]] * 2
    stage.check()


@pytest.mark.parametrize("as_file", [False, True])
def test_member_when_its_transport_raises_anything_ends_alone(as_file, monkeypatch):
    monkeypatch.setattr("flowctl.core.fanout.fanout.FILE_VIEWERS", 1 if as_file else 1000)
    stage = Stage(3)

    def fail(data):
        raise ValueError("a transport of the application's")

    (squad,) = stage.fanout._cohort.squads()
    squad.sends[1] = fail
    stage.publish("I", 30_000)
    stage.publish("I")
    assert [item.numbers() for item in (stage.viewers[0], stage.viewers[2])] == [[0, 1, 2]] * 2
    assert stage.viewers[1].sender.statistics().close_reason is not None
    assert stage.fanout.statistics().members == 2


__all__ = ["failures", "groups", "link"]  # fixtures


def test_follow_when_refused_leaves_the_first_place_as_it_was(link, groups):
    session = Noting()
    connection, peer = link(session)
    wait_until(lambda: session.calls)
    first, second = Fanouts(StreamLog("one"), flush_interval_s=0), Fanouts(StreamLog("two"), flush_interval_s=0)
    place = ask(connection, lambda: FollowPlace(connection, first))

    def refused() -> None:
        with pytest.raises(LocalProtocolError):
            FollowPlace(connection, second)

    ask(connection, refused)
    assert connection.place is place
    assert second.active == []
    assert groups[0].migrate(connection.core, groups[1])
    wait_until(lambda: connection.group is groups[1])
    ask(connection, lambda: first.log.append(b"still here", MessageClass.KEY, connection.now()))
    assert peer.recv(100) == b"still here"
    ask(connection, place.end)
    assert connection.place is None
    assert connection.sender.following is None
    wait_until(lambda: first.active == [])


def test_end_when_another_place_has_followed_is_harmless(link):
    session = Noting()
    connection, _ = link(session)
    wait_until(lambda: session.calls)
    logs = [Fanouts(StreamLog(name), flush_interval_s=0) for name in ("one", "two")]
    first = ask(connection, lambda: FollowPlace(connection, logs[0]))
    ask(connection, first.end)
    second = ask(connection, lambda: FollowPlace(connection, logs[1]))
    ask(connection, first.end)
    assert connection.place is second
    assert connection.sender.following is logs[1].log


def test_end_when_the_connection_closes_and_is_between_two_turns_lets_it_end(link, groups):
    """The rest of the log was for a turn of the fan-out that does not come any more."""
    session, fanouts = Noting(), Fanouts(StreamLog(), flush_interval_s=0)
    connection, peer = link(session, settings=SenderSettings(turn_messages=2, close_deadline_s=0.05))
    wait_until(lambda: session.calls)

    def close() -> None:
        place = FollowPlace(connection, fanouts)
        for _ in range(2000):
            fanouts.log.append(b"a message", MessageClass.DATA, connection.now())
        connection.close_after_flush()
        leave_between_turns(place)

    def leave_between_turns(place) -> None:
        taken = connection.sender.statistics().bytes_sent > 500  # by some turns of the fan-out: no flush is to come
        place.end() if taken else connection.call_soon(leave_between_turns, place)

    reader = Reader(peer)
    ask(connection, close)
    assert session.wait_end() == (CloseReason.FINISHED, "")
    assert 500 < len(reader.wait()) < 2000 * 9
    wait_until(lambda: groups[0].statistics().deadlines == 0, "the end of its last deadline")


def test_interval_of_fanouts_when_set_is_that_of_all_groups():
    fanouts = Fanouts(StreamLog(), adaptive=False)
    assert fanouts.interval_s() == 0.0
    groups = [ManualGroup(), ManualGroup()]
    both = [fanouts.on(group) for group in groups]
    fanouts.set_interval(2.0)
    assert [fanout.pacing.interval_s for fanout in both] == [2.0, 2.0]
    beside = Fanouts(StreamLog(), flush_interval_s=0, beside=fanouts).on(groups[0])
    both[0].pacing.interval_s = 0.5
    assert fanouts.interval_s() == 2.0
    peer = Viewer(groups[0])
    peer.follow(beside)
    groups[0].run(2.0)
    beside.log.append(frame(LOG, MessageClass.AUDIO, 0), MessageClass.AUDIO, 0.0)
    beside.log.append(frame(LOG, MessageClass.AUDIO, 1), MessageClass.AUDIO, 0.0)
    groups[0].run(0.0)
    beside.log.append(frame(LOG, MessageClass.AUDIO, 2), MessageClass.AUDIO, 0.0)
    groups[0].run(1.9)
    assert peer.numbers() == [0, 1]
    groups[0].run(0.2)
    assert peer.numbers() == [0, 1, 2]
