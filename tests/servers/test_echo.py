"""The echo server's session alone: lines, whatever the pieces, to everybody who is in the room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowctl.errors import LimitExceededError
from flowctl.reasons import CloseReason
from flowctl_servers.echo import LINE_BYTES, SERVER, Peer, Room


class Deaf(Peer):
    """A peer that notes what it is sent."""

    __slots__ = ("sent",)

    def __init__(self, room) -> None:
        super().__init__(room)
        self.sent = []

    def send(self, data, message_class=None):
        self.sent.append(bytes(data))


def enter(room):
    peer = Deaf(room)
    peer.opened()
    return peer


def feed(peer, pieces):
    """Offer `pieces` as a receiver does: what is left together with what comes next. Return what is left over."""
    kept = b""
    for piece in pieces:
        kept += piece
        kept = kept[peer.received(memoryview(kept)) :]
    return kept


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_when_cut_anywhere_arrive_whole_at_everybody(pieces):
    room = Room()
    speaker, hearer = enter(room), enter(room)
    left = feed(speaker, pieces)
    text = b"".join(pieces)
    end = text.rfind(b"\n") + 1
    assert (b"".join(hearer.sent), left) == (text[:end], text[end:])
    assert speaker.sent == hearer.sent
    assert all(message.endswith(b"\n") for message in hearer.sent)


def test_line_when_too_long_is_refused_with_the_limit():
    peer = enter(Room())
    assert peer.received(memoryview(b"x" * LINE_BYTES)) == 0
    with pytest.raises(LimitExceededError) as caught:
        peer.received(memoryview(b"x" * (LINE_BYTES + 1)))
    assert (caught.value.limit, caught.value.maximum) == ("line_bytes", LINE_BYTES)


def test_room_when_a_peer_leaves_forgets_it():
    room = Room()
    speaker, gone = enter(room), enter(room)
    gone.closed(CloseReason.PEER_CLOSED, "")
    gone.closed(CloseReason.PEER_CLOSED, "")
    feed(speaker, [b"hello\n"])
    assert (gone.sent, speaker.sent) == ([], [b"hello\n"])
    assert room.peers == {speaker}


def test_program_when_listed_says_what_it_is():
    assert (SERVER.name, SERVER.default_port) == ("echo", 7000)
    assert SERVER.summary.startswith("Line broadcast")
