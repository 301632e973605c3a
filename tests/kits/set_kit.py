"""What the tests of sets share: a set with sound and pictures, its viewers, and a rule that wants what they say."""

from __future__ import annotations

from flow_kit import AUDIO, HEAD_BYTES, HEADER, INTER, KEY, Viewer, frame

from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.renditions import Choice, RenditionRule
from flowctl.core.outgoing.streamlog import StreamLog
from flowctl.streamset import StreamSet
from flowctl.testing import ManualGroup

SOUND, RESTART = b"S", b"R"
PICTURES_PER_S = 25
SOUND_PER_S = 50


class Connection:
    """What a set needs of a connection."""

    viewer_class = Viewer

    def __init__(self, group, peer=None, *, policy=None, **settings):
        self.viewer = self.viewer_class(group, peer, policy=policy or LivePolicy(), **settings)
        self.sender = self.viewer.sender
        self.group = group
        self.place = self.renditions = None

    @property
    def rule(self):
        return self.place.looks.rule


def media_time(wire):
    """Return the time of a message: its number."""
    return int.from_bytes(wire[2:6], "big")


class Show:
    """A set whose renditions have the same sound and the same key frames; a message's number tells its time in ms."""

    def __init__(self, rates=(("360", 60_000), ("720", 150_000)), *, group_s=2.0, groups=1):
        self.groups = [ManualGroup() for _ in range(groups)]
        self.group = self.groups[0]
        for other in self.groups[1:]:
            other.clock = self.group.clock
        self.set = StreamSet(time_of=media_time, flush_interval_s=0)
        self.rates = dict(rates)
        self.logs = {}
        self.silent = set()
        self.late_ms = {}  # by rendition: how long after its time a message is published
        self.pictures_per_group = round(group_s * PICTURES_PER_S)
        self.picture = self.sound = 0
        self.began = self.group.clock()
        for name in self.rates:
            self.logs[name] = StreamLog(name)
            self.set.put(name, self.logs[name])

    def origin(self, name):
        return bytes([ord("a") + list(self.rates).index(name)])

    def join(self, group=None, **options):
        connection = Connection(group or self.group)
        self.set.view(connection, **options)
        return connection

    def append(self, name, origin, item, at_ms, size=HEAD_BYTES):
        restart = (frame(RESTART, HEADER, list(self.rates).index(name)),) if item is KEY else ()
        self.logs[name].append(frame(origin, item, at_ms, size), item, self.group.clock(), restart=restart)

    def show_picture(self, name, number):
        key = number % self.pictures_per_group == 0
        share = self.rates[name] / PICTURES_PER_S
        size = 10 * share if key else share * (1 - 9 / (self.pictures_per_group - 1))
        self.append(name, self.origin(name), KEY if key else INTER, number * 1000 // PICTURES_PER_S, int(size))

    def run(self, seconds):
        """Publish and serve for a while; of each step, sound comes before the pictures of the same time."""
        end = self.group.clock() + seconds
        while (now := self.group.clock()) < end - 1e-9:
            while self.sound / SOUND_PER_S <= now - self.began + 1e-9:
                for name in self.logs:
                    self.append(name, SOUND, AUDIO, self.sound * 1000 // SOUND_PER_S, 100)
                self.sound += 1
            while self.picture / PICTURES_PER_S <= now - self.began + 1e-9:
                for name in self.logs:
                    if name not in self.silent:
                        self.show_picture(name, self.picture)
                self.picture += 1
            for group in self.groups:
                group.run()
            self.group.run(0.02)


class Wanting(RenditionRule):
    """A rule that chooses what the test wants, whatever the line does."""

    wanted = ""

    def decide(self, now, rates, present, **facts):
        if not present:
            return super().decide(now, rates, present, **facts)
        return None if self.wanted in ("", present) else Choice(self.wanted, "the test wants it")


def choose(connection, name):
    rule = Wanting(0.0)
    rule.wanted = name
    connection.place.looks.rule = rule
