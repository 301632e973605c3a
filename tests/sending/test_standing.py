"""Where a viewer stands with its fan-out: the table of legal steps, and that Sender and fan-out take no other."""

from __future__ import annotations

import itertools

import pytest
from fanout_kit import Stage
from flow_kit import HEAD_BYTES, Peer

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.state import MessageClass
from flowctl.core.sending.standing import STEPS, Standing, step
from flowctl.errors import InternalError

GONE, QUEUED, SERVED, REFUSED, COHORT = Standing


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Standing, Standing)))
def test_step_when_it_is_not_in_the_table_is_refused(old, new):
    if (old, new) in STEPS:
        assert step(old, new) is new
    else:
        with pytest.raises(InternalError, match=f"{old.name} cannot become {new.name}"):
            step(old, new)


def test_table_when_followed_leads_everywhere_and_out_again():
    assert {new for old, new in STEPS if old is GONE} == {QUEUED}
    assert {old for old, new in STEPS if new is GONE} == set(Standing) - {GONE}
    assert {new for _, new in STEPS} == set(Standing)
    assert all(old is not new for old, new in STEPS)


def test_viewer_when_it_keeps_up_lags_and_comes_back_stands_where_it_is_served():
    stage = Stage(0)
    viewer = stage.viewer(Peer())
    assert viewer.sender.stands is GONE
    viewer.follow(stage.fanout)
    assert viewer.sender.stands is QUEUED
    stage.group.run()
    assert viewer.sender.stands is COHORT
    viewer.peer.room = 5
    stage.publish("I")
    assert viewer.sender.stands is REFUSED
    viewer.peer.room = 2 * HEAD_BYTES
    viewer.sender.writable()
    assert viewer.sender.stands is QUEUED
    stage.group.run()
    assert viewer.sender.stands is COHORT
    viewer.sender.suspend_following()
    assert viewer.sender.stands is GONE
    viewer.sender.resume_following(stage.fanout)
    viewer.sender.unfollow()
    assert viewer.sender.stands is GONE
    assert stage.fanout.empty


def test_viewer_when_it_waits_for_a_key_frame_has_a_turn_with_each_round():
    stage = Stage(0)
    viewer = stage.viewer(Peer())
    viewer.sender.follow(stage.fanout, wait_for_key=True)
    stage.publish("I")
    assert viewer.sender.stands is SERVED
    turns = stage.fanout.statistics().turns
    stage.group.run()
    assert (viewer.sender.stands, stage.fanout.statistics().turns) == (SERVED, turns)
    stage.publish("KI")
    assert viewer.sender.stands is COHORT


def test_viewer_when_moved_in_its_turn_is_left_to_its_new_fanout():
    stage = Stage(1)
    (viewer,) = stage.viewers
    other = Fanout(stage.published.log, stage.group, flush_interval_s=0)
    viewer.peer.room = 5
    stage.publish("I")
    viewer.sender.send(b"own", MessageClass.CONTROL)
    viewer.sender.when_drained(lambda _: viewer.sender.move_to(other))
    viewer.peer.room = None
    viewer.sender.writable()
    stage.group.run()
    assert (viewer.sender.stands, stage.fanout.empty, other.statistics().members) == (COHORT, True, 1)
