"""What a cursor leaves out for being late: scripts of messages, ages and rates in, entries out."""

from __future__ import annotations

import pytest
from cursor_kit import ROOMY, Follower
from flow_kit import HEADER, RESTART, frame

from flowctl.core.flow.policy import DROPPABLE_MASK, AudioFirst, KeepAll, LivePolicy, PicturesFirst, patience_of
from flowctl.core.flow.state import MessageClass
from flowctl.core.flow.timing import Timing
from flowctl.reasons import DropReason

LATE = DropReason.LATE
TARGET_S = 1.0


def take(follower, *, rate, held=0, policy=None, most=1 << 60):
    """Take what is handed over at this moment of a viewer that takes `rate` bytes a second, `held` of which wait."""
    patience = patience_of(policy or LivePolicy())
    letters = ""
    while most:
        timing = Timing(follower.now, rate, held, TARGET_S, patience)
        items = follower.cursor.peek(min(most, 3), 1 << 60, timing)
        if not items:
            break
        letters += "".join("r" if wire[:1] == b"R" else "CHKIDAX"[item] for item, wire, _ in items)
        held += sum(len(wire) for _, wire, _ in items)
        follower.cursor.pass_messages(len(items))
        most -= len(items)
    return letters


def slow(text, *, age_s=0.0, size=100):
    """Return a follower with `text` queued since `age_s` seconds."""
    follower = Follower("K")
    follower.publish(text, size)
    follower.now += age_s
    return follower


@pytest.mark.parametrize(
    ("text", "rate", "age_s", "given", "late"),
    [
        ("IIIAII", 10_000, 0.0, "IIIAII", ""),  # all of it arrives in time
        ("IIIAII", 500, 0.0, "IIIAI", "I"),  # the fifth message ends at 1 s
        ("IIAII", 10_000, 1.5, "A", "IIII"),  # too old, whatever the rate
        ("IIAKI", 10_000, 1.5, "ArrK", "III"),  # no newer key frame: it goes, and what follows is late
        ("IIKIKI", 10_000, 1.5, "rrK", "HHKIIII"),  # a newer one waits: the older one is left out with its headers
        ("DIDI", 250, 0.0, "DI", "DI"),  # disposable ones are late at half of the target, then the rest of the group
    ],
)
def test_pictures_when_they_would_be_late_are_left_out_with_the_rest_of_their_group(text, rate, age_s, given, late):
    follower = slow(text, age_s=age_s)
    assert take(follower, rate=rate) == given
    assert sorted(follower.dropped(LATE)) == sorted(late)
    assert follower.dropped() == follower.dropped(LATE)


def test_disposable_frames_when_late_are_left_out_alone():
    follower = slow("IDIDI", age_s=0.6)
    assert take(follower, rate=10_000) == "III"
    assert follower.dropped(LATE) == "DD"


def test_group_when_it_was_cut_ends_at_the_next_key_frame_with_its_headers():
    follower = slow("II", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    follower.publish("IAI")
    assert take(follower, rate=10_000) == "A"
    follower.publish("KII")
    assert take(follower, rate=10_000) == "rrKII"
    assert follower.dropped(LATE) == "IIII"
    assert follower.cursor.plain


def test_what_follows_when_something_is_handed_over_is_judged_in_its_own_turn():
    follower = slow("IIII")
    timing = Timing(follower.now, 250, 0, TARGET_S, patience_of(LivePolicy()))
    assert len(follower.cursor.peek(100, 1 << 60, timing)) == 2
    assert follower.dropped() == ""
    follower.cursor.pass_messages(2)
    assert take(follower, rate=10_000) == "II"


def test_sound_when_late_is_left_out_last_and_the_oldest_first():
    follower = slow("IAA", age_s=1.5)
    assert take(follower, rate=10_000) == "AA"
    follower = slow("IA", age_s=2.5)
    follower.publish("A")
    assert take(follower, rate=10_000) == "A"
    assert follower.dropped(LATE) == "IA"
    follower = slow("A", age_s=9.0)
    assert take(follower, rate=10_000) == "A", "no picture could give way to it, and none was left out"


@pytest.mark.parametrize(
    ("policy", "given"), [(AudioFirst(), "AA"), (PicturesFirst(), "rrK"), (KeepAll(), "IAKIA")], ids=["a", "p", "all"]
)
def test_policies_when_all_is_late_give_up_different_things(policy, given):
    follower = slow("IAKIA", age_s=5.0)
    assert take(follower, rate=10_000, policy=policy) == given


def test_joiner_is_not_judged_and_headers_and_control_messages_always_go():
    follower = slow("CHII", age_s=5.0)
    assert take(follower, rate=10_000) == "CH"
    other = slow("II", age_s=5.0)
    other.cursor.joining_to = other.log.tail
    assert take(other, rate=10_000) == "II"


def test_pictures_when_counted_are_those_up_to_the_place():
    follower = slow("IDAII", age_s=0.6)
    take(follower, rate=10_000)
    assert follower.cursor.pictures() == (4, 1)
    assert follower.cursor.late == 1
    follower.cursor.refuse(1 << MessageClass.KEY | 1 << MessageClass.INTER, DropReason.REFUSED, follower.now)
    assert follower.cursor.pictures() == (0, 0)


def test_cut_when_the_next_key_frame_is_long_in_coming_is_not_given_up():
    """What goes out without a key frame cannot be decoded; groups of 17 s are usual for cameras."""
    follower = slow("II", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    follower.publish("II")
    follower.now += 17.0
    follower.cursor.poll(follower.now)
    follower.publish("II")
    assert take(follower, rate=10_000) == ""
    follower.publish("KI")
    assert take(follower, rate=10_000) == "rrKI"


@pytest.mark.parametrize("refused", [DROPPABLE_MASK, 1 << MessageClass.KEY | 1 << MessageClass.INTER])
def test_queue_when_key_frames_are_refused_behind_it_is_not_cut(refused):
    follower = slow("IIA", age_s=1.5)
    follower.publish("KIIA")
    follower.cursor.refuse(refused, DropReason.REFUSED, follower.now)
    follower.publish("II")
    assert take(follower, rate=10_000).startswith("IIAKII")


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


def test_what_a_cut_takes_is_late_whatever_else_is_refused_meanwhile():
    follower = slow("IAI", age_s=1.5)
    follower.cursor.refuse(1 << MessageClass.AUDIO, DropReason.REFUSED, follower.now)
    follower.publish("AIA")
    assert take(follower, rate=10_000) == "A"
    assert (follower.dropped(LATE), follower.dropped(DropReason.REFUSED)) == ("III", "AA")
    follower.cursor.refuse(DROPPABLE_MASK, DropReason.HELD, follower.now)
    follower.publish("XAI")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("AIK")
    assert take(follower, rate=10_000) == "ArrK"
    assert (follower.dropped(LATE), follower.dropped(DropReason.HELD)) == ("IIIII", "AX")
    assert follower.dropped() == "IIIIIAAAX"
    assert follower.cursor.plain


def test_queue_when_it_is_cut_behind_what_waits_loses_what_will_be_late_of_the_open_group():
    follower = slow("IAIAI")
    timing = Timing(follower.now, 1000, 750, TARGET_S, patience_of(LivePolicy()))
    assert follower.cursor.cut_behind(timing)
    follower.publish("AI")
    assert (follower.dropped(LATE), follower.queued) == ("III", "IAAA")
    assert not follower.cursor.cut_behind(timing)
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
    assert not follower.cursor.cut_behind(timing)
    assert follower.dropped() == ""


def test_headers_when_a_key_frame_was_waited_for_in_vain_are_the_newest():
    follower = slow("I", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    follower.log.headers = (frame(RESTART, HEADER, 9),)
    follower.now += 100.0
    follower.publish("I")
    assert follower.cursor.poll(follower.now)
    assert [bytes(wire) for _, wire, _ in follower.cursor.peek(9, 1 << 60)] == [frame(RESTART, HEADER, 9)]


def test_leading_pictures_when_the_group_before_was_cut_are_left_out():
    follower = slow("II", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    follower.publish("AkidAdIDIkidI")
    assert take(follower, rate=10_000) == "ArrKAIDIKIDI"
    assert follower.dropped(LATE) == "II"
    assert follower.dropped(DropReason.KEY_WAIT) == "IDD"
    assert follower.cursor.plain


def test_leading_pictures_when_published_one_by_one_are_left_out():
    follower = slow("I", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    got = ""
    for letter in "kidAdI":
        follower.publish(letter)
        got += take(follower, rate=10_000)
        assert follower.cursor.plain is (letter == "I")
    assert got == "rrKAI"


@pytest.mark.parametrize("ask", ["thin_to_key_frame", "skip_to_live"])
def test_leading_pictures_when_the_viewer_is_thinned_to_their_key_frame_are_left_out(ask):
    follower = slow("IIIkidI")
    room = ROOMY._replace(messages=5)
    getattr(follower.cursor, ask)(room, follower.now)
    assert take(follower, rate=10_000) == "rrKI"


def test_leading_pictures_when_their_group_was_thinned_too_do_not_come_back():
    follower = slow("I", age_s=1.5)
    assert take(follower, rate=10_000) == ""
    follower.publish("kiI")
    follower.cursor.poll(follower.now)
    follower.cursor.refuse(1 << MessageClass.INTER, DropReason.REFUSED, follower.now)
    follower.publish("II")
    follower.cursor.refuse(0, DropReason.REFUSED, follower.now)
    follower.publish("kdI")
    follower.cursor.poll(follower.now)
    assert take(follower, rate=10_000) == "rrKIrrKI"


def test_what_follows_headers_that_wait_is_judged_behind_them():
    follower = slow("IIKI", age_s=1.5)
    assert take(follower, rate=10_000, most=1) == "r"
    follower.publish("IAIKIA")
    follower.cursor.peek(1, 1, Timing(follower.now, 1000, 5000, TARGET_S, patience_of(LivePolicy())))
    assert follower.dropped(LATE).count("K") == 1
    assert follower.cursor.entry.message_class in (MessageClass.AUDIO, MessageClass.KEY)
    assert take(follower, rate=1e9).replace("A", "").endswith("rrKI")
