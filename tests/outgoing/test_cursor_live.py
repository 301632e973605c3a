"""The cursor of a viewer that is refused whole classes, and its way back to live."""

from __future__ import annotations

import pytest
from cursor_kit import ROOMY, Follower
from flow_kit import AUDIO, DISPOSABLE, INTER, KEY

from flowctl.core.flow.counts import as_counts
from flowctl.core.flow.limits import OFF_MARK
from flowctl.core.flow.policy import Room
from flowctl.reasons import DropReason

NO_DISPOSABLE = 1 << DISPOSABLE
KEY_FRAMES = NO_DISPOSABLE | 1 << INTER
SOUND = KEY_FRAMES | 1 << KEY


def room(messages):
    return Room(OFF_MARK, messages, -float(OFF_MARK), 0)


def refuse(follower, mask):
    """Refuse classes from the log's end on."""
    follower.cursor.refuse(mask, DropReason.REFUSED, follower.now)


def test_thinning_when_frames_go_with_the_sound_waits_for_a_key_frame_afterwards():
    follower = Follower("K")
    follower.publish("IIA")
    follower.cursor.refuse(SOUND, DropReason.REFUSED, follower.now)
    follower.cursor.thin_to_key_frame(room(0), follower.now)
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("IA")
    assert follower.take() == ""
    follower.publish("KI")
    assert follower.take() == "rrKI"


def test_skip_when_nothing_newer_is_wanted_leaves_what_was_accepted_before():
    follower = Follower("K")
    follower.publish("IAKI")
    follower.cursor.refuse(SOUND, DropReason.HELD, follower.now)
    follower.publish("KIA")
    assert not follower.cursor.skip_to_live(room(1), follower.now)
    assert follower.take() == "IAKI" + "A"


def test_skip_when_a_key_frame_is_ahead_goes_to_the_newest():
    follower = Follower("K")
    follower.publish("IAKAIKAI")
    assert follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.take() == "rrKAI"
    assert follower.dropped(DropReason.RETURNED) == "KIIAA"


@pytest.mark.parametrize("script", ["", "IA", "IDA"])
def test_skip_when_no_key_frame_is_ahead_leaves_everything(script):
    follower = Follower("K")
    follower.publish(script)
    assert not follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.take() == script
    assert follower.dropped() == ""


def test_skip_when_the_viewer_is_joining_ends_that():
    follower = Follower("KI")
    follower.cursor.joining_to = follower.log.tail
    follower.publish("AKI")
    assert follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.cursor.joining_to is None
    assert follower.take() == "rrKI"


def test_skip_when_control_messages_lie_between_hands_them_over():
    follower = Follower("K")
    follower.publish("ICACKI")
    assert follower.cursor.skip_to_live(ROOMY, follower.now)
    assert follower.take() == "CCrrKI"


def test_skip_when_there_is_only_sound_keeps_what_fits():
    follower = Follower("A")
    follower.publish("AAAA")
    assert not follower.cursor.skip_to_live(room(4), follower.now)
    assert follower.cursor.skip_to_live(room(2), follower.now)
    assert follower.take() == "AA"
    assert follower.dropped(DropReason.RETURNED) == "A" * 2
    assert as_counts(follower.cursor.books())[0].of(AUDIO) == 4
