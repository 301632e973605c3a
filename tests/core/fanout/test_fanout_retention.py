"""Who holds a log: no kind of follower keeps what everybody has been sent, while it follows or afterwards.

Entries are linked forwards, so an attribute that keeps one keeps all that is published after it, for ever.
"""

from __future__ import annotations

import pytest
from fanout_kit import KeyFramesOnly, kept
from flight_kit import RecordedViewer
from flow_kit import DATA, LOG, Published, Viewer, frame
from sender_kit import TIMELESS, by_messages
from set_kit import Connection, Show, choose, retime

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.limits import HardPolicy
from flowctl.core.flow.policy import LivePolicy
from flowctl.core.outgoing.streamlog import CacheLimits, StreamLog
from flowctl.testing import ManualGroup

__all__ = ["kept"]  # a fixture

SIZE = 3000
MOST_KEPT = 400
"""Entries that a viewer which takes nothing may hold: 1 MiB, see `LogCursor.compact`."""
ROUNDS = 700
NO_CACHE = CacheLimits(size_bytes=0)


class Channel:
    """A log that keeps nothing by itself, its fan-out, and a viewer; what happens to that one are methods."""

    script = "KIADA"

    def __init__(self, kind, **options):
        self.group = ManualGroup()
        self.log = self.new_log()
        self.fanout = Fanout(self.log, self.group, flush_interval_s=0.0)
        self.viewer = kind(self.group, **{"policy": LivePolicy(), "settings": TIMELESS} | options)

    def new_log(self):
        self.published = Published(self.group, cache=NO_CACHE)
        return self.published.log

    def publish(self):
        self.published.script(self.script, SIZE)

    def run(self, rounds=3):
        for _ in range(rounds):
            self.publish()
            self.group.run(0.1)
            if self.viewer.peer.room is None and self.viewer.host.wants_writable:
                self.viewer.host.poll_writable()

    def pictures(self):
        self.published.script("KIADA", SIZE)
        self.group.run(0.1)

    def cache(self):
        self.log.cache = CacheLimits()
        self.pictures()

    def join(self):
        self.viewer.follow(self.fanout)
        self.group.run(0.1)
        self.log.cache = NO_CACHE

    def leave(self):
        self.viewer.sender.unfollow()

    def close(self):
        self.viewer.sender.close_after_flush()

    def nearly_full(self):
        self.viewer.give(100)

    def full(self):
        self.viewer.give(0)

    def drain(self):
        self.viewer.drain()

    def suspend(self):
        self.viewer.sender.suspend_following()

    def resume(self):
        self.viewer.sender.resume_following(self.fanout)

    def guide(self):
        self.viewer.sender.set_guide(self)

    def guide_everywhere(self):
        self.viewer.sender.set_guide(self, everywhere=True)

    def choose_log(self, key):
        """Say that the viewer stays in its log."""
        del key

    def end_flight(self):
        if isinstance(self.viewer, RecordedViewer):
            self.viewer.sender.end_flight()


class SoundChannel(Channel):
    """No key frame ends what waits for one."""

    script = "AAA"


class Topic(Channel):
    """The same with a log with keys, which takes no pictures."""

    number = 0

    def new_log(self):
        return StreamLog("prices", max_keys=5)

    def publish(self):
        for key in ("a", "b", None):
            self.log.append(frame(LOG, DATA, self.number, SIZE), DATA, self.group.now(), key=key)
            self.number += 1

    pictures = cache = publish

    def join(self):
        self.viewer.sender.follow(self.fanout, latest=True)
        self.group.run(0.1)


HELD = {"limits": by_messages(4, 4, policy=HardPolicy.HOLD)}
LIVES = {
    "keeps up": ("join", {}),
    "joined with the cache": ("cache join", {}),
    "waits for a key frame": ("pictures join", {}),
    "left": ("join run leave", {}),
    "left while it was behind": ("join run full run leave", {}),
    "joined again": ("join run leave run join", {}),
    "reads the rest": ("join run nearly_full run close", {}),
    "reads the rest of the cache": ("cache nearly_full join close", {}),
    "caught up": ("join full run run run drain", {}),
    "is held": ("join run full", HELD),
    "was held": ("join full run run drain", HELD),
    "wants key frames only": ("join", {"policy": KeyFramesOnly()}),
    "moved": ("join run suspend run resume", {}),
    "is asked at key frames": ("join run guide", {}),
    "is asked at pictures": ("join run guide_everywhere", {}),
    "flight has ended": ("join run end_flight", {}),
}


@pytest.mark.parametrize("channel_class", [Channel, SoundChannel, Topic])
@pytest.mark.parametrize("kind", [Viewer, RecordedViewer])
@pytest.mark.parametrize("life", LIVES)
def test_log_when_a_viewer_has_taken_it_is_let_go(kept, life, kind, channel_class):
    steps, options = LIVES[life]
    channel = channel_class(kind, **options)
    for step in steps.split():
        getattr(channel, step)()
    channel.run(ROUNDS)
    assert channel.log.tail.sequence > 5 * MOST_KEPT
    assert kept() < MOST_KEPT


class RecordedConnection(Connection):
    viewer_class = RecordedViewer


@pytest.mark.parametrize("end", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize("first", [0, 20], ids=["key frames meet", "key frames apart"])
@pytest.mark.parametrize("kind", [Connection, RecordedConnection])
def test_logs_of_a_set_when_a_viewer_has_changed_over_are_let_go(kept, kind, first, end):
    show = Show(retime=retime)
    show.groups["360"] = (50, first)
    show.run(5.0)
    connection = kind(show.group)
    show.set.view(connection)
    for wanted in ("720", "360", "720"):
        choose(connection, wanted)
        show.run(6.0)
    if end:
        connection.place.end()
    show.run(30.0)
    assert connection.renditions.name == ("" if end else "720")
    at_most = sum(log.tail.sequence - log.oldest.sequence for log in show.logs.values())
    assert kept() < at_most + 100
