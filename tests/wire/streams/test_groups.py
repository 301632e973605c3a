"""Where groups of pictures begin for those who follow a publication: at key frames of the lowest track."""

from __future__ import annotations

import pytest
from live_kit import AVC_HEADER, audio, disposable, inter, key

from flowctl.core.flow.state import MessageClass
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO
from flowctl.wire.streams.groups import LONGEST_KEY_INTERVAL_S, GroupPlace, PictureGroups
from flowctl.wire.streams.wirelog import HEADERS_BYTES

KEY, INTER = MessageClass.KEY, MessageClass.INTER


def of_track(track, payload):
    """Return a classic H.264 picture as one of a track of Enhanced RTMP."""
    return bytes([0x80 | payload[0] >> 4 << 4 | 6, payload[1]]) + b"avc1" + bytes([track]) + payload[2:]


class Publication:
    def __init__(self):
        self.groups = PictureGroups()

    def place(self, payload, type_id=TYPE_VIDEO, at=0.0):
        return self.groups.place(inspect(type_id, payload), int(at * 1000), payload, at)


def test_place_when_there_is_one_track_is_what_the_message_is():
    publication = Publication()
    payloads = [AVC_HEADER, key(b"k"), inter(b"i"), disposable(b"d"), key(b"k")]
    assert [publication.place(item) for item in payloads] == [
        GroupPlace(inspect(TYPE_VIDEO, item).message_class) for item in payloads
    ]
    assert publication.place(audio(b"a"), TYPE_AUDIO) == GroupPlace(MessageClass.AUDIO)


def test_place_when_there_are_two_tracks_opens_groups_at_the_lower_one():
    publication = Publication()
    assert publication.place(of_track(1, key(b"k"))).message_class is KEY  # it is the lowest so far
    assert publication.place(of_track(0, key(b"k"))).message_class is KEY
    assert publication.place(of_track(1, key(b"k"))).message_class is INTER
    assert publication.place(of_track(0, key(b"k"))).message_class is KEY


def test_place_when_the_lower_track_has_ended_opens_groups_at_the_next_one():
    publication = Publication()
    publication.place(of_track(0, key(b"k")))
    assert publication.place(of_track(1, key(b"k")), at=LONGEST_KEY_INTERVAL_S).message_class is INTER
    assert publication.place(of_track(1, key(b"k")), at=LONGEST_KEY_INTERVAL_S + 0.1).message_class is KEY


def test_place_when_a_key_frame_of_another_track_comes_first_goes_ahead_of_the_next_group():
    publication = Publication()
    publication.place(of_track(0, key(b"k")))
    assert publication.place(of_track(1, inter(b"i"))).ahead is None
    assert publication.place(of_track(1, key(b"k"))).ahead is True
    assert publication.place(of_track(1, inter(b"i"))).ahead is True
    assert publication.place(of_track(0, key(b"k"))) == GroupPlace(KEY)
    assert publication.place(of_track(1, inter(b"i"))).ahead is None


@pytest.mark.parametrize("payload", [of_track(0, inter(b"i")), of_track(1, inter(b"i", HEADERS_BYTES))])
def test_place_when_what_went_ahead_leads_to_no_group_says_so_once(payload):
    publication = Publication()
    publication.place(of_track(0, key(b"k")))
    assert publication.place(of_track(1, key(b"k"))).ahead is True
    assert publication.place(payload).ahead is False
    assert publication.place(payload).ahead is None
