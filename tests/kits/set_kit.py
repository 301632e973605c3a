"""What the tests of sets share: a set with sound and pictures, its viewers, and a rule that wants what they say."""

from __future__ import annotations

from flow_kit import AUDIO, HEAD_BYTES, HEADER, INTER, KEY, Viewer, frame

from flowctl.core.flow.policy import LivePolicy
from flowctl.core.flow.renditions import Choice, RenditionRule
from flowctl.core.flow.state import MessageClass
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

    def window_bytes(self):
        return None


def media_time(wire):
    """Return the time of a message: its number."""
    return int.from_bytes(wire[2:6], "big")


def retime(wire, at_ms, shown_ms):
    assert shown_ms >= at_ms
    return frame(wire[:1], MessageClass(wire[1]), at_ms, len(wire))


class Show:
    """A set whose renditions have the same sound and, if not told otherwise, the same key frames, each 2 s.

    Attributes:
        groups: of each rendition, pictures of a group and the number of the first key frame.
        late_s: how long after its time a picture of a rendition is published.
        silent: renditions without pictures from now on.
    """

    def __init__(self, rates=(("360", 60_000), ("720", 150_000)), **options):
        self.group = ManualGroup()
        self.set = StreamSet(time_of=media_time, flush_interval_s=0, **options)
        self.rates = dict(rates)
        self.logs = {}
        self.groups = dict.fromkeys(self.rates, (2 * PICTURES_PER_S, 0))
        self.late_s = dict.fromkeys(self.rates, 0.0)
        self.pictures = dict.fromkeys(self.rates, 0)
        self.silent = set()
        self.sound = 0
        self.began = self.group.clock()
        for name in self.rates:
            self.put(name)

    def put(self, name, log=None):
        self.logs[name] = log or StreamLog(name)
        self.set.put(name, self.logs[name])

    def remove(self, name):
        del self.logs[name]
        self.set.remove(name)

    def origin(self, name):
        return bytes([ord("a") + list(self.rates).index(name)])

    def join(self, peer=None, **options):
        connection = Connection(self.group, peer, **options)
        self.set.view(connection)
        return connection

    def append(self, name, origin, item, at_ms, size=HEAD_BYTES):
        restart = (frame(RESTART, HEADER, list(self.rates).index(name)),) if item is KEY else ()
        self.logs[name].append(frame(origin, item, at_ms, size), item, self.group.clock(), restart=restart)

    def show_picture(self, name):
        number, (length, first) = self.pictures[name], self.groups[name]
        self.pictures[name] += 1
        key = (number - first) % length == 0
        share = self.rates[name] / PICTURES_PER_S
        size = 10 * share if key else share * (1 - 9 / (length - 1))
        if name not in self.silent:
            self.append(name, self.origin(name), KEY if key else INTER, number * 1000 // PICTURES_PER_S, int(size))

    def run(self, seconds):
        """Publish and serve for a while."""
        end = self.group.clock() + seconds
        while (now := self.group.clock()) < end - 1e-9:
            passed = now - self.began + 1e-9
            while self.sound / SOUND_PER_S <= passed:
                for name in self.logs:
                    self.append(name, SOUND, AUDIO, self.sound * 1000 // SOUND_PER_S, 100)
                self.sound += 1
            for name in self.logs:
                while self.pictures[name] / PICTURES_PER_S + self.late_s[name] <= passed:
                    self.show_picture(name)
            self.group.run(0.02)


class Wanting(RenditionRule):
    """A rule that chooses what the test wants, whatever the line does."""

    wanted = ""

    def decide(self, now, rates, present, **facts):
        if not present:
            return super().decide(now, rates, present, **facts)
        return None if self.wanted in ("", present) else Choice(self.wanted, "the test wants it")


def choose(connection, name):
    """Have the rule choose a rendition, also of a viewer that is in the largest and keeps up."""
    place = connection.place
    place.looks.rule = Wanting(0.0)
    place.looks.rule.wanted = name
    place._set.watch(connection.group)._looked_at.add(place)
