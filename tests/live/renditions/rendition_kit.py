"""A live server without sockets whose publishers send renditions of one content."""

from __future__ import annotations

from live_kit import AAC_HEADER, World, audio, config, inter, key

from flowctl.core.flow.renditions import Choice, RenditionRule
from flowctl.live.settings.renditions import RenditionNames
from flowctl.wire.rtmp.amf.amf0 import encode
from flowctl.wire.rtmp.session_config import ClientSessionConfig

SUFFIXES = ("_1080", "_720", "_360")
ABLE = ClientSessionConfig(multitrack=True)
"""A client that announces that it reads several tracks, as recorders, edges and relays of ours."""
SIZES = {"_1080": 300, "_720": 150, "_360": 60}
NAMES = RenditionNames(suffixes=SUFFIXES)


def avc_header(number):
    """Return a sequence header that tells which rendition it is of."""
    return b"\x17\x00\x00\x00\x00\x01\x64\x00" + bytes((number,)) + b"\xff\xe1\x00\x00"


class SetWorld(World):
    """A server with renditions by suffix, and publishers of them.

    Attributes:
        members: publishers by suffix.
        at: media time of the next picture, in ms.
    """

    def __init__(self, settings=None, **options) -> None:
        super().__init__(settings or config(renditions=NAMES), **options)
        self.members, self.at = {}, 0

    def member(self, suffix, *, show="live/show", sound=True, codec_header=None):
        publisher = self.members[suffix] = self.connect().publish(show + suffix)
        number = SUFFIXES.index(suffix)
        publisher.send(publisher.session.send_tag(18, 0, encode("onMetaData", {"width": 1920.0 / (number + 1)})))
        publisher.video(0, codec_header or avc_header(number))
        if sound:
            publisher.audio(0, AAC_HEADER)
        publisher.sound = sound
        return publisher

    def all_members(self):
        return [self.member(suffix) for suffix in SUFFIXES]

    @staticmethod
    def put(publisher, type_id, timestamp, payload):
        """Have a publisher send a message with the next run: time goes by as that of the media does."""
        publisher.send(publisher.session.send_tag(type_id, timestamp, payload), run=False)

    def send(self, pictures=1, *, every=5, members=None, shift=None):
        """Send pictures and sound of all members, every 40 ms; each `every`-th picture is a key frame."""
        for _ in range(pictures):
            for suffix, publisher in self.members.items():
                if members is not None and suffix not in members:
                    continue
                at = self.at + (shift or {}).get(suffix, 0)
                tag = f"{suffix} {self.at}".encode()
                picture = tag.ljust(SIZES[suffix])
                self.put(publisher, 9, at, key(picture) if self.at % (40 * every) == 0 else inter(picture))
                if publisher.sound:
                    self.put(publisher, 8, at, audio(tag))
            self.at += 40
            self.run(0.04)


def choose(monkeypatch, name):
    """Have the rules of all viewers choose a rendition."""
    choice = Choice(name, "asked for")
    monkeypatch.setattr(
        RenditionRule, "decide", lambda self, now, rates, present, **_: choice if present != name else None
    )


def pictures(peer):
    """Return (rendition, ms that the picture says, timestamp) of each picture that a player got."""
    found = []
    for message in peer.media:
        if message.type_id == 9 and message.payload[1] == 1:
            suffix, at = message.payload[11:].decode().split()
            found.append((suffix, int(at), message.timestamp))
    return found


def sounds(peer):
    return [
        (*message.payload[2:].decode().split(), message.timestamp)
        for message in peer.media
        if message.type_id == 8 and message.payload[1] == 1
    ]
