"""A viewer on its way between two fan-outs, and one that is led where nobody takes it."""

from __future__ import annotations

import pytest
from fanout_kit import Stage
from flow_kit import OWN, Published, check_accounts, check_edges, frame
from sender_kit import SOFT_LIMIT, by_messages

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.core.flow.state import MessageClass
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.core.sending.contract import Hop, Standing
from flowctl.errors import ClosedError, LocalProtocolError
from flowctl.reasons import CloseReason, DropReason

CONTROL = MessageClass.CONTROL


def on_its_way(*, limits=NO_LIMITS, room=None, foreign=True):
    """Return a stage with one viewer that has left its fan-out for another, and whom other threads call."""
    stage = Stage(1, limits=limits)
    (viewer,) = stage.viewers
    viewer.peer.room = room
    viewer.sender.suspend_following()
    viewer.host.foreign = foreign
    return stage, viewer


def test_viewer_on_its_way_when_another_thread_sends_has_no_edge_before_it_is_served_again():
    stage, viewer = on_its_way(limits=by_messages(3, 1000), room=0)
    assert viewer.sender.stands is Standing.SUSPENDED
    for number in range(10):
        viewer.sender.send(frame(OWN, CONTROL, number), CONTROL)
    viewer.sender.set_limits(by_messages(2, 1000))
    assert viewer.edges.changes == []
    assert viewer.peer.writes == viewer.peer.eagains + 1, "another thread wrote"
    viewer.host.foreign = False
    viewer.sender.resume_following(stage.fanout)
    stage.group.run()
    assert [change.new for change in viewer.edges.changes] == [SOFT_LIMIT]
    viewer.drain()
    assert viewer.numbers(OWN) == list(range(10))
    stage.check()


def test_viewer_on_its_way_when_it_is_closed_ends_at_once():
    """No thread may serve it, and none may ever again: its group has stopped."""
    stage, viewer = on_its_way()
    stage.publish("I")
    viewer.sender.close(CloseReason.SHUTDOWN, "the group stopped")
    assert viewer.host.closed == [(CloseReason.SHUTDOWN, "the group stopped")]
    assert viewer.sender.stands is Standing.GONE
    stage.check()


def test_viewer_on_its_way_follows_its_log_still():
    stage, viewer = on_its_way(foreign=False)
    stage.publish("I")
    with pytest.raises(LocalProtocolError, match="already"):
        viewer.sender.follow(stage.fanout)
    assert viewer.sender.statistics().queued.total_messages == 1
    viewer.sender.unfollow()
    assert viewer.sender.stands is Standing.GONE
    assert viewer.sender.statistics().dropped[DropReason.UNFOLLOWED].total_messages == 1
    viewer.follow(stage.fanout)
    check_accounts(viewer)
    check_edges(viewer)


class Refusing(Fanout):
    """A fan-out that takes no viewer."""

    def add(self, sender):
        raise ClosedError("the group is closed")


def test_viewer_when_no_fanout_takes_it_follows_nothing():
    stage = Stage()
    viewer = stage.viewer()
    with pytest.raises(ClosedError):
        viewer.follow(Refusing(stage.published.log, stage.group))
    assert viewer.sender.stands is Standing.GONE
    check_edges(viewer)
    viewer.follow(stage.fanout)
    stage.viewers.append(viewer)
    stage.publish("I")
    assert viewer.numbers() == [0, 1]
    stage.check()


def test_viewer_on_its_way_when_the_next_fanout_does_not_take_it_goes_to_another():
    stage, viewer = on_its_way(foreign=False)
    with pytest.raises(ClosedError):
        viewer.sender.resume_following(Refusing(stage.published.log, stage.group))
    assert viewer.sender.stands is Standing.SUSPENDED
    stage.publish("I")
    viewer.sender.resume_following(stage.fanout)
    stage.publish("A")
    assert viewer.numbers() == [0, 1, 2]
    stage.check()


class Leading:
    """A guide that leads to `hop` at each key frame."""

    def __init__(self, hop):
        self.hop = hop

    def choose_log(self, key):
        return self.hop


def hop_to(stage, fanout=Fanout, **log):
    other = StreamLog("other", **log)
    return Hop(fanout(other, stage.group, flush_interval_s=0), other.tail)


@pytest.mark.parametrize("guided", [False, True])
def test_viewer_when_it_is_led_to_a_log_with_keys_stays_and_says_so(guided):
    stage = Stage(1)
    (viewer,) = stage.viewers
    hop = hop_to(stage, max_keys=9)
    if guided:
        viewer.sender.set_guide(Leading(hop))
        stage.publish("KI")
        ((where, error),) = viewer.host.failures
        assert where == "choose_log"
        assert isinstance(error, LocalProtocolError)
    else:
        with pytest.raises(LocalProtocolError, match="keys"):
            viewer.sender.switch(hop)
        stage.publish("KI")
    assert viewer.numbers() == [0, 1, 2]
    stage.check()


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    ("lead", "fault"),
    [
        (lambda stage: hop_to(stage, Refusing), ClosedError),
        (lambda stage: hop_to(stage)._replace(start=None), AttributeError),
    ],
    ids=["not taken", "no start"],
)
def test_viewer_when_it_is_led_where_it_cannot_go_on_ends(lead, fault, guided):
    stage = Stage(1)
    (viewer,) = stage.viewers
    hop = lead(stage)
    if guided:
        viewer.sender.set_guide(Leading(hop))
        stage.publish("K")
    else:
        with pytest.raises(fault):
            viewer.sender.switch(hop)
    ((reason, details),) = viewer.host.closed
    assert reason is CloseReason.INTERNAL
    assert fault.__name__ in details
    assert viewer.sender.stands is Standing.GONE
    assert stage.fanout.empty
    stage.check()


def test_viewer_when_it_goes_on_in_another_log_on_a_thread_without_room_is_served_there():
    """More than a turn waits for it there, so that it is queued again when the turn that led it there ends."""
    stage = Stage(2)
    other = Published(stage.group)
    other.script("K" + "I" * 20, 40_000)
    viewer = stage.viewers[0]
    viewer.sender.set_guide(Leading(Hop(Fanout(other.log, stage.group, flush_interval_s=0), other.log.cached)))
    stage.group.is_strained = True
    stage.publish("KI")
    assert viewer.sender.stands is Standing.COHORT
    assert viewer.numbers() == [0, *range(21)]
    assert stage.viewers[1].numbers() == [0, 1, 2]
