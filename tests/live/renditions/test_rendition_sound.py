"""The one sound of a set: from the largest member, without a gap where the next one takes over."""

from __future__ import annotations

import pytest
from live_kit import AAC_HEADER, audio

from flowctl.live.renditions.sound import CommonSound, Sound
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.wire import CLOCK_MASK, TYPE_AUDIO

OTHER_HEADER = b"\xaf\x00\x11\x90"


def sound(timestamp, tag=b"", payload=None):
    body = audio(tag) if payload is None else payload
    return Sound(timestamp, body, inspect(TYPE_AUDIO, body))


class Studio:
    """Offers the sound of members every 20 ms, and notes what is passed on."""

    def __init__(self, *ranks, headers=(AAC_HEADER,) * 3) -> None:
        self.common, self.heard, self.ranks, self.now = CommonSound(), [], list(ranks), 0.0
        for rank in ranks:
            self.offer(rank, sound(0, payload=headers[rank]))

    def offer(self, rank, message) -> None:
        self.heard += self.common.offer(rank, message, self.now)

    def run(self, count, *, late_ms=(0, 0, 0)) -> None:
        for _ in range(count):
            self.now += 0.02
            for rank in self.ranks:
                timestamp = round(self.now * 1000) - late_ms[rank]
                if timestamp > 0 or abs(late_ms[rank]) > 60_000:
                    self.offer(rank, sound(timestamp & CLOCK_MASK, b"%d" % rank))

    @property
    def times(self):
        return [item.timestamp for item in self.heard if item.info.sticky_key is None]

    @property
    def sources(self):
        return "".join(chr(item.payload[2]) for item in self.heard if item.info.sticky_key is None)


def test_sound_when_several_send_it_is_of_the_largest_from_its_first_message():
    studio = Studio(2)
    studio.run(10)
    studio.ranks = [2, 1, 0]
    studio.run(10, late_ms=(60, 0, 0))
    assert studio.times == list(range(20, 341, 20))
    assert studio.sources == "2" * 11 + "0" * 6  # the largest is 60 ms late, and goes on where the other was


@pytest.mark.parametrize("withdrawn", [True, False])
def test_sound_when_its_source_goes_or_falls_silent_goes_on_without_a_gap(withdrawn):
    """The next member may be ahead of or behind the source: each moment is heard once."""
    for late_ms in ((0, 0, 0), (0, 200, 0), (200, 0, 0)):
        studio = Studio(0, 1, 2)
        studio.run(50, late_ms=late_ms)
        studio.ranks = [1, 2]
        if withdrawn:
            studio.heard += studio.common.withdraw(0, studio.now)
        studio.run(100, late_ms=late_ms)
        assert studio.common.source == 1
        assert studio.times == list(range(20, studio.times[-1] + 1, 20))
        assert studio.times[-1] >= 3000 - max(late_ms)
        assert [item.payload for item in studio.heard if item.info.sticky_key] == [AAC_HEADER]


def test_sound_when_no_other_member_sends_any_waits_for_the_next_one():
    studio = Studio(1)
    studio.run(5)
    assert studio.common.withdraw(1, studio.now) == []
    assert (studio.common.source, studio.common.withdraw(7, studio.now)) == (None, [])
    studio.ranks = [2]
    studio.run(1)
    assert (studio.common.source, studio.times[-1]) == (2, 120)


def test_headers_when_the_source_changes_are_passed_on_where_they_are_others():
    studio = Studio(0, 1, headers=(AAC_HEADER, OTHER_HEADER))
    studio.run(2)
    studio.heard += studio.common.withdraw(0, studio.now)
    studio.ranks = [1]
    studio.run(1)
    headers = [item.payload for item in studio.heard if item.info.sticky_key]
    assert (headers, [item.payload for item in studio.common.headers]) == ([AAC_HEADER, OTHER_HEADER], [OTHER_HEADER])
    studio.offer(0, sound(0, payload=AAC_HEADER))
    studio.offer(1, sound(0, payload=OTHER_HEADER))
    assert studio.heard[-1].info.sticky_key is None  # not of the source, or in force already


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_sound_when_clocks_have_nothing_in_common_goes_on_with_the_next_message(jump_ms):
    studio = Studio(0, 1)
    studio.run(5, late_ms=(0, jump_ms, 0))
    studio.heard += studio.common.withdraw(0, studio.now)
    studio.ranks = [1]
    before = len(studio.heard)
    studio.run(5, late_ms=(0, jump_ms, 0))
    assert len(studio.heard) - before == 5


def test_sound_of_others_when_there_is_much_is_kept_within_bounds():
    studio = Studio(0, 1)
    for number in range(2000):
        studio.offer(0, sound(number))
        studio.offer(1, sound(number, b"x" * 100_000))
    member = studio.common._members[1]
    assert member.recent_bytes == sum(len(item.payload) for _, item in member.recent) <= 256 * 1024
    for number in range(2000):
        studio.offer(1, sound(number, b"x"))
    assert len(member.recent) <= 256
    assert len(studio.common.withdraw(0, studio.now)) <= 257
