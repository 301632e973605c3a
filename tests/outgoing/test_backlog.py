"""A Sender's own queue: lanes and accounts, thinning to a key frame, the wait for one, headers sent again."""

from __future__ import annotations

import pytest
from flow_kit import AUDIO, CLASS_OF, CONTROL, DATA, HEADER, INTER, KEY

from flowctl.flow.counts import total
from flowctl.flow.policy import KEY_WAIT_S, Room
from flowctl.flow.state import MessageClass
from flowctl.outgoing.backlog import MOST_TRACKS, Backlog
from flowctl.reasons import DropReason

NO_ROOM = Room(0, 0, 0.0, 0)


def room(messages, since=0.0):
    """Return room for a number of messages of any size that were queued at `since` or later."""
    return Room(1 << 40, messages, since, 0)


def fill(text, backlog=None, *, now=0.0, mask=0, **options):
    """Offer a message per letter (C H K I D A X), a second apart; each wire is its letter and place."""
    backlog = Backlog() if backlog is None else backlog  # an empty one is false
    for index, letter in enumerate(text):
        wire = f"{letter}{index}".encode()
        options = {"droppable": None, "track": 0, **options}
        backlog.offer(wire, CLASS_OF[letter], now + index, mask=mask, **options)
    return backlog


def queue(backlog):
    """Return the wires that are queued, in the order in which they go out."""
    return " ".join(wire.decode() for _, wire, _ in backlog.peek(1000, 1 << 40))


def check(backlog):
    """Check lengths and accounts against what `peek` returns."""
    items = backlog.peek(1000, 1 << 40)
    assert len(backlog) == len(items)
    assert backlog.size_bytes == sum(len(wire) for _, wire, _ in items)
    queued, dropped = backlog.queued(), total(backlog.dropped().values())
    for item in MessageClass:
        assert queued.of(item) == sum(kind is item for kind, _, _ in items)
        parts = queued.of(item) + dropped.of(item) + backlog.taken.messages[item]
        assert backlog.accepted.messages[item] == parts


def test_peek_when_both_lanes_hold_messages_gives_control_first_within_bounds():
    """Control comes first; `most` and the budget end the list, which holds the message that passes the budget."""
    backlog = fill("XCXC")
    assert queue(backlog) == "C1 C3 X0 X2"
    assert len(backlog.peek(3, 1000)) == 3
    assert len(backlog.peek(1000, 3)) == 2
    backlog.take(3)
    assert queue(backlog) == "X2"
    assert backlog.control is None
    assert backlog.oldest_at == 2.0
    backlog.take(1)
    assert backlog.oldest_at is None
    check(backlog)


@pytest.mark.parametrize(
    ("text", "messages", "left"),
    [
        pytest.param("KIAKIA", 6, "K0 I1 A2 K3 I4 A5", id="all-fits"),
        pytest.param("IAKIAKIA", 6, "K2 I3 A4 K5 I6 A7", id="first-that-fits"),
        pytest.param("IAKIAKIA", 4, "K5 I6 A7", id="the-next-that-fits"),
        pytest.param("KIAKIIIA", 2, "K3 A7", id="newest-with-sound-alone"),
        pytest.param("KIAKIIAA", 2, "", id="none-fits"),
        pytest.param("AAAA", 2, "A2 A3", id="oldest-sound"),
        pytest.param("AAAA", 0, "", id="no-room-for-sound"),
    ],
)
def test_thin_when_room_is_given_keeps_what_fits(text, messages, left):
    """What stays begins with a key frame, the oldest one possible, with no older sound; else with what comes next."""
    backlog = fill(text)
    backlog.thin_to_key_frame(room(messages), 100.0)
    assert queue(backlog) == left
    check(backlog)


def test_thin_when_only_age_counts_skips_to_the_first_young_enough():
    """Room is also a time: the first key frame queued since then stays, with all that follows."""
    backlog = fill("KIKIKI")
    backlog.thin_to_key_frame(room(1000, since=1.5), 6.0)
    assert queue(backlog) == "K2 I3 K4 I5"


def test_thin_when_frames_are_lost_sends_the_newest_header_of_each_track_before_the_key_frame():
    """After a loss, decoders are set up anew right before the key frame; queued headers are never thinned away."""
    backlog = Backlog()
    for wire, item, track in (
        (b"v1", HEADER, 1),
        (b"a1", HEADER, 2),
        (b"i", INTER, 0),
        (b"v2", HEADER, 1),
        (b"k", KEY, 0),
    ):
        backlog.offer(wire, item, 0.0, mask=0, droppable=None, track=track)
    backlog.thin_to_key_frame(room(4), 1.0)
    assert queue(backlog) == "v1 a1 v2 v2 a1 k"
    assert backlog.restarts == 1
    check(backlog)


def test_thin_when_messages_may_not_be_dropped_leaves_them_in_place():
    """What the application marked, and control, stays in order whatever the room."""
    backlog = fill("XC")
    fill("A", backlog, droppable=False)
    fill("IX", backlog)
    backlog.thin_to_key_frame(NO_ROOM, 1.0)
    assert queue(backlog) == "C1 A0"
    check(backlog)


def test_wait_when_a_frame_was_refused_ends_with_a_key_frame():
    """After the loss of a frame no inter frame goes out before a key frame; sound and data do."""
    backlog = fill("HK")
    fill("I", backlog, mask=1 << INTER)
    assert backlog.waiting_for_key is True
    fill("IDAXKI", backlog)
    assert queue(backlog) == "H0 K1 A2 X3 H0 K4 I5"
    assert backlog.dropped()[DropReason.KEY_WAIT].by_name() == {"inter": 1, "disposable": 1}
    assert (backlog.restarts, backlog.key_waits_expired) == (1, 0)
    check(backlog)


@pytest.mark.parametrize(("gop_s", "expires_s"), [(1.0, KEY_WAIT_S), (20.0, 40.0)])
def test_wait_when_no_key_frame_comes_expires_after_the_longer_time(gop_s, expires_s):
    """The wait ends after 10 s or two groups of pictures, whichever is longer, headers first, and is counted."""
    backlog = fill("H")
    for now in (0.0, gop_s):
        fill("K", backlog, now=now)
    backlog.take(3)
    fill("I", backlog, now=gop_s, mask=1 << INTER)
    fill("I", backlog, now=gop_s + expires_s - 0.1)
    assert queue(backlog) == ""
    fill("I", backlog, now=gop_s + expires_s)
    assert queue(backlog) == "H0 I0"
    assert backlog.key_waits_expired == 1
    check(backlog)


def test_offer_when_held_refuses_all_but_control_and_headers():
    """Held, the mark of a message does not matter: only control and headers are taken."""
    backlog = fill("CHKIDAX", held=True, droppable=False)
    assert queue(backlog) == "C0 H1"
    assert backlog.dropped()[DropReason.HELD].total_messages == 5
    check(backlog)


def test_headers_when_there_are_too_many_tracks_forget_the_oldest():
    """What is remembered per peer is bounded: beyond 32 tracks the one that came first is forgotten."""
    backlog = Backlog()
    for track in range(MOST_TRACKS + 1):
        backlog.offer(b"h%d" % track, HEADER, 0.0, mask=0, droppable=None, track=track)
    backlog.take(MOST_TRACKS + 1)
    fill("I", backlog, mask=1 << INTER)
    fill("K", backlog)
    wires = queue(backlog).split()
    assert wires[:2] == ["h1", "h2"]
    assert len(wires) == MOST_TRACKS + 1


def test_pass_by_when_nothing_is_queued_counts_and_remembers():
    """A message that goes straight to the kernel is accounted for, and its header is there for a restart."""
    backlog = Backlog()
    backlog.pass_by(b"h", HEADER, 0.0, 0)
    backlog.pass_by(b"x", DATA, 0.0, 0)
    fill("I", backlog, mask=1 << INTER)
    fill("K", backlog)
    assert queue(backlog) == "h K0"
    assert backlog.taken.messages[DATA] == 1
    check(backlog)


def test_drop_everything_when_the_connection_ends_counts_control_too():
    """At the end nothing is left in any lane, and each message is counted with the reason."""
    backlog = fill("CKIAX")
    backlog.drop_everything(DropReason.CLOSED)
    assert queue(backlog) == ""
    closed = backlog.dropped()[DropReason.CLOSED]
    assert (closed.of(CONTROL), closed.of(AUDIO), closed.total_messages) == (1, 1, 5)
    check(backlog)
