"""Two hours of a stream in a few seconds: every timestamp right over 2^24 and 2^32 ms, nothing lost, memory bounded.

What may be expected of an unpaced publisher: nothing in RTMP lets a live server slow a publisher down because of a
viewer, and holding its input back would stop the stream for all the others. So a publisher that is faster than a
viewer's connection makes that viewer a slow one, rightly, however healthy it is. The publisher here is paced by its
viewers instead: it is never more than a window ahead of the slower one, as fast as that allows. Limits stay on at
their defaults, and no viewer may ever come near them.
"""

from __future__ import annotations

import gc

import pytest
from e2e_kit import (
    CLOCK,
    address_of,
    connection_to,
    resident_bytes,
    viewer_of,
    wait_for_end,
    wait_for_viewers,
    wait_until,
)
from live_kit import viewer_figures

from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.outgoing.streamlog import Entry
from flowctl.flv import TAG_AUDIO, TAG_SCRIPT, TAG_VIDEO
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.base import RtmpClient
from flowctl.wire.client.connect import start_client
from flowctl.wire.media.stamp import read_stamp
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.events import PublishStarted

TWO_HOURS_S = 7200.0
WINDOW = 600
"""Frames that the publisher may be ahead: about 0.3 MB, a seventh of the default soft limit."""
FPS = 2.5
AUDIO_RATE = 8000
MOST_ENTRIES = 5 * WINDOW
"""Messages that may be in memory: what is on its way, and the group of pictures that is cached."""
GROWTH_BYTES = 32 * 1024 * 1024
"""Two hours are 40 MB of media: a server that kept what it has sent would not stay below."""


class PacedPublisher(RtmpClient):
    """Publishes as fast as its viewers take it; `pump` is called by them, on the one thread that all of them share."""

    def __init__(self, url, tags, viewers):
        super().__init__(url)
        self._protocol.publish()
        self.tags = tags
        self.viewers = viewers
        self.frames = 0
        self.pumping = False

    def event(self, event, now):
        if isinstance(event, PublishStarted):
            self.pumping = True
            self.pump()

    def pump(self):
        protocol, sender = self._protocol, self.connection.sender
        while self.pumping and self.frames - min(viewer.frames for viewer in self.viewers) < WINDOW:
            tag = next(self.tags, None)
            if tag is None:
                self.pumping = False
                self.finish("everything was sent")
                return
            type_id, timestamp, payload = tag
            sender.send(protocol.send_tag(type_id, timestamp, payload), droppable=False)
            self.frames += type_id != TAG_SCRIPT and read_stamp(payload) is not None


class Checker:
    """Looks at each frame as it comes and keeps none."""

    def __init__(self, start):
        self.start = start
        self.frames = 0
        self.first = {}
        self.next = {}
        self.last_timestamp = None
        self.wrong = []
        self.publisher = None

    def take(self, message, message_class):
        found = read_stamp(message.payload)
        if found is None:
            return
        track, number, timestamp = message.type_id, found[0], message.timestamp
        self.first.setdefault(track, (number, message_class))
        period_ms = 1000 / FPS if track == TAG_VIDEO else 1000 * 1024 / AUDIO_RATE
        expected = (self.start + round(number * period_ms)) % CLOCK
        back = self.last_timestamp is not None and (timestamp - self.last_timestamp) % CLOCK >= CLOCK // 2
        if number != self.next.get(track, number) or timestamp != expected or back:
            self.wrong.append((track, number, timestamp, expected))
        self.next[track] = number + 1
        self.last_timestamp = timestamp
        self.frames += 1
        if self.publisher is not None and self.frames % 100 == 0:
            self.publisher.pump()


@pytest.mark.parametrize("limit", [1 << 24, 1 << 32], ids=["extended", "wrap"])
def test_two_hours_stay_right_when_the_clock_passes_a_limit_in_the_middle(limit, live, clients):
    start = (limit - int(TWO_HOURS_S * 500)) % CLOCK
    source = SyntheticSource(
        fps=FPS, video_bit_rate=24_000, sample_rate=AUDIO_RATE, audio_bit_rate=16_000, start_timestamp=start
    )
    server = live(flush_interval_s=0.01)
    checkers = [Checker(start), Checker(start)]
    players = [clients.play(server, keep=checker.take) for checker in checkers]
    wait_for_viewers(server, 2)
    publisher = PacedPublisher(parse_address(address_of(server)), source.tags(TWO_HOURS_S), checkers)
    for checker in checkers:
        checker.publisher = publisher
    total = int(TWO_HOURS_S * FPS) + int(TWO_HOURS_S * AUDIO_RATE / 1024)
    start_client(clients.group, publisher)

    wait_until(lambda: publisher.frames > total * 0.1, "a tenth published")
    early_bytes = resident_bytes()
    wait_until(lambda: publisher.frames > total * 0.6, "past the middle, where the clock passes the limit")
    late_checker = Checker(start)
    late = clients.play(server, keep=late_checker.take)
    number = connection_to(server, late).number
    wait_until(lambda: publisher.frames > total * 0.9 or publisher.end is not None, "nearly everything published")
    assert resident_bytes() - early_bytes < GROWTH_BYTES
    # Counted where they are: a log that somebody keeps from some old place on is not seen from its ends.
    assert sum(type(item) is Entry for item in gc.get_objects()) < MOST_ENTRIES
    viewers = [viewer_figures(viewer) for _, viewer in server.hub.viewing()]
    # The publisher sends as fast as it can: a full socket for a moment is no trouble, a limit would be.
    assert len(viewers) == 3
    assert max(viewer.state for viewer in viewers) <= SendState.OVERLOADED
    assert [viewer.sender.dropped_messages for viewer in viewers] == [0] * 3
    assert viewer_of(server, number) is not None
    wait_for_end(late, *players)

    for checker in (*checkers, late_checker):
        assert checker.wrong == []
        assert checker.next[TAG_VIDEO] == int(TWO_HOURS_S * FPS)
        assert checker.next[TAG_AUDIO] == publisher.frames - int(TWO_HOURS_S * FPS)
    for checker in checkers:
        assert checker.frames == publisher.frames
        assert checker.first == {TAG_VIDEO: (0, MessageClass.KEY), TAG_AUDIO: (0, MessageClass.AUDIO)}
    assert late_checker.first[TAG_VIDEO][1] is MessageClass.KEY
    assert late_checker.first[TAG_VIDEO][0] > 0
