"""What a cursor leaves out for being late: scripts of messages, ages and rates in, entries out."""

from __future__ import annotations

import pytest
from cursor_kit import Follower
from flow_kit import HEADER, INTER, KEY, RESTART, ManualGroup, Peer, Published, frame

from flowctl.core.flow.meters import Trail
from flowctl.core.flow.policy import (
    BROKEN_MASK,
    DROPPABLE_MASK,
    AudioFirst,
    KeepAll,
    LivePolicy,
    PicturesFirst,
    patience_of,
)
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.core.outgoing.cursor import LogCursor
from flowctl.core.outgoing.lateness import cut_behind, peek_in_time
from flowctl.core.outgoing.outbox import Outbox
from flowctl.core.outgoing.splice import go_on_in
from flowctl.core.outgoing.streamlog import Place
from flowctl.reasons import DropReason

LATE = DropReason.LATE
TARGET_S = 1.0


def take(follower, *, rate, held=0, policy=None, most=1 << 60):
    return follower.take_in_time(rate, held=held, policy=policy, most=most)


def slow(text, *, age_s=0.0, size=100):
    """Return a follower with `text` queued since `age_s` seconds."""
    follower = Follower("K")
    follower.publish(text, size)
    follower.now += age_s
    return follower


def test_what_follows_when_something_is_handed_over_is_judged_in_its_own_turn():
    follower = slow("IIII")
    timing = Timing(follower.now, 250, 0, TARGET_S, patience_of(LivePolicy()))
    assert len(peek_in_time(follower.cursor, 100, 1 << 60, timing)) == 2
    assert follower.dropped() == ""
    follower.cursor.pass_messages(2)
    assert take(follower, rate=10_000) == "II"


@pytest.mark.parametrize(
    ("policy", "given"), [(AudioFirst(), "AA"), (PicturesFirst(), "rrK"), (KeepAll(), "IAKIA")], ids=["a", "p", "all"]
)
def test_policies_when_all_is_late_give_up_different_things(policy, given):
    follower = slow("IAKIA", age_s=5.0)
    assert take(follower, rate=10_000, policy=policy) == given


@pytest.mark.parametrize(("age_s", "given"), [(0.9, "KI"), (1.1, "")])
def test_key_frame_that_takes_longer_than_pictures_wait_goes_if_it_begins_in_time(age_s, given):
    """One that begins late is left out though none is newer: the next one begins in time, and its pictures go too."""
    follower = slow("K", age_s=age_s, size=2000)
    follower.publish("I", 100)
    assert take(follower, rate=1000) == given


def test_pictures_behind_a_key_frame_that_went_late_may_be_as_late_as_that():
    follower = slow("K", age_s=0.9, size=2000)
    assert take(follower, rate=1000) == "K"
    follower.publish("I", 100)
    follower.now += 2.9  # the key frame has taken 2 s, and went 0.9 s late
    assert take(follower, rate=1000) == "I"


def test_key_frame_before_is_the_last_that_was_handed_over_and_not_taken_along_into_another_log():
    """Sound behind one that was left out waits for the one before; in another log places mean something else."""
    follower, other = slow("K", size=2000), slow("K")
    assert take(follower, rate=1000) == "K"
    follower.publish("I", 100)
    picture = follower.cursor.entry
    assert follower.cursor.key_before(picture) == (2000, 0, follower.now, 0.0)
    follower.publish("K", 10)
    sound = follower.log.tail
    follower.publish("A", 10)
    assert follower.cursor.key_before(sound)[:2] == (2000, 111)
    picture = other.log.tail
    other.publish("I")
    go_on_in(follower.cursor, other.log, picture, (), follower.now)
    assert follower.cursor.key_before(picture)[:2] == (picture.gop.key_bytes, 0)


def test_key_frame_before_is_that_of_the_group_where_the_cohort_was_given_it():
    """Who left the cohort on a line that has become short lost what is behind a large one, for an old one was small."""
    follower = slow("K")
    assert take(follower, rate=1000) == "K"
    place = Place(follower.cursor.entry)
    follower.cursor.enter(place)
    follower.publish("K", 2000)
    follower.publish("I", 100)
    place.entry = follower.log.tail
    follower.cursor.place = Place(place.entry)
    follower.cursor.stand_alone()
    follower.publish("I", 100)
    assert follower.cursor.key_before(place.entry)[:2] == (2000, 100)
    follower.now += 2.0
    assert take(follower, rate=1000) == "I"


def with_sound(**options):
    """Return a follower whose stream has had sound for 4 s, with nothing queued."""
    follower = Follower("K", **options)
    for _ in range(5):
        follower.publish("IA", 100)
        follower.take()
        follower.now += 1.0
    return follower


@pytest.mark.parametrize(("rate", "given"), [(100, "rrKA"), (49, "A")])
def test_key_frame_when_the_sound_behind_it_would_be_late_too_is_left_out_though_none_is_newer(rate, given):
    follower = with_sound()
    follower.publish("K", 100)
    follower.publish("A", 1)
    assert take(follower, rate=rate).removeprefix("rr") == given.removeprefix("rr")
    assert follower.dropped(LATE) == ("" if "K" in given else "K")


@pytest.mark.parametrize(("header_bytes", "given", "late"), [(5, "rrKIrrK", "KIII"), (5000, "rrK", "HHHHKKIIII")])
def test_headers_when_their_key_frame_is_left_out_are_left_out_too(header_bytes, given, late):
    follower = slow("I", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    restart = (b"R" * header_bytes, b"Rr")
    for _ in range(3):
        follower.log.append(b"K" * 4000, MessageClass.KEY, follower.now, restart=restart)
        follower.log.append(b"I" * 10, MessageClass.INTER, follower.now)
    assert take(follower, rate=10_000, held=5000) == given
    assert follower.dropped(LATE) == late
    assert follower.cursor.load() == (0, 0)


@pytest.mark.parametrize("quiet", ["no sound", "sound refused", "pictures first"])
def test_key_frame_when_no_sound_waits_behind_it_goes_whatever_it_takes(quiet):
    follower = Follower("K") if quiet == "no sound" else with_sound()
    if quiet == "sound refused":
        follower.cursor.refuse(1 << MessageClass.AUDIO, DropReason.REFUSED, follower.now)
    follower.publish("K", 100)
    policy = PicturesFirst() if quiet == "pictures first" else None
    assert take(follower, rate=1, policy=policy).endswith("K")
    assert follower.dropped(LATE) == ""


def test_queue_when_it_is_cut_behind_what_waits_loses_what_will_be_late_of_the_open_group():
    follower = slow("IAIAI")
    timing = Timing(follower.now, 1000, 750, TARGET_S, patience_of(LivePolicy()))
    assert cut_behind(follower.cursor, timing)
    follower.publish("AI")
    assert (follower.dropped(LATE), follower.queued) == ("III", "IAAA")
    assert not cut_behind(follower.cursor, timing)
    follower.publish("KI", 1)
    assert take(follower, rate=10_000) == "IAAArrKI"
    assert follower.cursor.plain


@pytest.mark.parametrize("why", ["in time", "another group", "pictures refused", "joining"])
def test_queue_when_nothing_of_the_open_group_can_be_cut_stays(why):
    follower = slow("IAKI" if why == "another group" else "IAI")
    if why == "pictures refused":
        follower.cursor.refuse(DROPPABLE_MASK, DropReason.REFUSED, follower.now)
    if why == "joining":
        follower.cursor.joining_to = follower.log.tail
    timing = Timing(follower.now, 1000, 0 if why == "in time" else 5000, TARGET_S, patience_of(LivePolicy()))
    assert not cut_behind(follower.cursor, timing)
    assert follower.dropped() == ""


def test_headers_when_a_key_frame_was_waited_for_in_vain_are_the_newest():
    follower = slow("I", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    follower.log.headers = (frame(RESTART, HEADER, 9),)
    follower.now += 100.0
    follower.publish("I")
    assert follower.cursor.poll(follower.now)
    assert [bytes(wire) for _, wire, _ in follower.cursor.peek(9, 1 << 60)] == [frame(RESTART, HEADER, 9)]


def test_what_follows_headers_that_wait_is_judged_behind_them():
    follower = slow("IIKI", age_s=1.5)
    assert take(follower, rate=10_000, most=1) == "r"
    follower.publish("IAIKIA")
    peek_in_time(follower.cursor, 1, 1, Timing(follower.now, 1000, 5000, TARGET_S, patience_of(LivePolicy())))
    assert follower.dropped(LATE).count("K") == 1
    assert follower.cursor.entry.message_class in (MessageClass.AUDIO, MessageClass.KEY)
    assert take(follower, rate=1e9).replace("A", "").endswith("rrKI")


def test_viewer_of_an_open_gop_when_it_is_cut_before_a_key_frame_that_it_was_to_go_on_at_is_served():
    """The key frame at which a cut ends comes before the one at which what was refused is accepted again."""
    group = ManualGroup()
    published = Published(group, leads=2)
    published.publish(KEY, 100)
    cursor = LogCursor(published.log, now=group.now())
    cursor.joining_to = None
    published.script("IIII", 100)
    group.clock.advance(2)  # these are late
    published.script("KIIII", 100)
    cursor.refuse(BROKEN_MASK, DropReason.REFUSED, group.now())
    published.script("IIKIIII", 100)
    cursor.poll(group.now())
    cursor.refuse(0, DropReason.REFUSED, group.now())
    published.script("KIIIIKIII", 100)
    for _ in range(20):
        timing = Timing(group.now(), 10_000, 0, 1.0, patience_of(LivePolicy()))
        cursor.pass_messages(len(peek_in_time(cursor, 100, 1 << 20, timing)))
    assert cursor.caught_up
    assert not cursor.leading


def test_trail_when_publishing_has_gaps_tells_how_old_each_byte_is():
    group = ManualGroup()
    published, outbox, trail = Published(group), Outbox(), Trail(0, group.now())
    published.publish(KEY, 100)
    cursor, began_at = LogCursor(published.log, now=group.now()), group.now()
    cursor.joining_to = None
    outbox.follow(cursor)
    for at in (0.0, 0.01, 2.0, 2.01):
        group.clock.advance(began_at + at - group.now())
        published.publish(INTER, 1000)
    assert outbox.write(Peer(), 100, 1 << 20, with_log=True, trail=trail) == (4000, False, None)
    ages = [group.now() - trail.since(place, 4000, group.now()) for place in (1000, 1999, 2000, 2999)]
    assert ages == pytest.approx([2.0, 2.0, 0.01, 0.0], abs=0.011)


@pytest.mark.parametrize("taken", [[10_000], [4_000, 6_000]])
def test_trail_when_the_kernel_takes_just_one_message_does_not_count_the_one_behind_it(taken):
    """As over TLS, where a large message is written by itself."""
    group = ManualGroup()
    published, outbox, trail = Published(group), Outbox(), Trail(0, group.now())
    cursor, began_at = LogCursor(published.log, now=group.now()), group.now()
    cursor.joining_to = None
    outbox.follow(cursor)
    published.publish(KEY, 10_000)
    for room in taken:
        group.clock.advance(5.0)
        published.publish(INTER, 100)
        assert outbox.write(Peer(room=room), 100, 1 << 20, with_log=True, trail=trail) == (room, True, None)
    assert trail.since(9_999, 10_000, group.now()) == pytest.approx(began_at)
