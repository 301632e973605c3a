"""Origins and edges in one process, over loopback TCP."""

from __future__ import annotations

from follow_kit import HEADERS, close_clients, pictures, playing, publisher, server, until

from flowctl.live.cluster.edge.edge import Edge, EdgeConfig
from flowctl.live.cluster.edge.upstream import OriginAddress
from flowctl.live.cluster.origin import Origin


class OriginServer:
    """A live server that offers its streams."""

    def __init__(self, *, window=None, offer="127.0.0.1:0", **fields):
        self.server = server(**fields)
        self.origin = Origin(self.server, offer, window=window, wall_clock=lambda: 1_000_000.0)
        self.server.companions.append(self.origin)
        self.server.start()
        self.where = OriginAddress("127.0.0.1", int(self.origin.offers.rpartition(":")[2]), self.server.address[1])

    def publish(self, name="live/room"):
        return publisher(self.server.address, name)

    def kill(self):
        """End at once: all connections break."""
        self.origin.stop(0.0)
        self.server.stop(0.0)

    def segments(self, name="live/room"):
        return [item.id for item in self.origin.pool.streams.get(name, ())]


class EdgeServer:
    """An edge; `records`, `media`: settings of its records, and of what it writes."""

    def __init__(self, *origins, offer="", streams=("live/*",), records=None, media=None, **settings):
        fields = {"events": records, "media": media}
        self.server = server(**{name: value for name, value in fields.items() if value is not None})
        where = tuple(getattr(item, "where", item) for item in origins)
        self.edge = Edge(self.server, EdgeConfig(origins=where, streams=tuple(streams), **settings), offer=offer)
        self.server.companions.append(self.edge)
        self.server.start()

    @property
    def where(self):
        return OriginAddress("127.0.0.1", int(self.edge.offers.rpartition(":")[2]), self.server.address[1])

    def play(self, name="live/room"):
        return playing(self.server.address, name)

    def origins(self):
        return self.edge.statistics().origins

    def states(self):
        return [item.state for item in self.origins()]

    def stream(self, name="live/room"):
        return next((item for item in self.edge.statistics().copies if item.stream == name), None)


class House:
    """All servers of a test."""

    def __init__(self):
        self.all = []

    def origin(self, **fields):
        self.all.append(OriginServer(**fields))
        return self.all[-1]

    def edge(self, *origins, **settings):
        self.all.append(EdgeServer(*origins, **settings))
        return self.all[-1]

    def close(self):
        close_clients()
        for item in reversed(self.all):
            item.server.stop(1.0)


def frames(media):
    heads = {(type_id, payload) for type_id, _, payload in HEADERS}
    return [item for item in media if (item[0], item[2]) not in heads]


class Encoder:
    """Sends the same stream to several origins, some of which may go."""

    def __init__(self, *origins, name="live/room"):
        self.sent = []
        self.count = 0
        self.links = [item.publish(name) for item in origins]
        self.send(HEADERS)

    def send(self, messages):
        for link in self.links:
            try:
                link.put(*messages)
            except OSError:
                self.links = [item for item in self.links if item is not link]

    def pictures(self, count):
        made = pictures(self.count, self.count + count, key_every=25)
        self.count += count
        self.sent += made
        self.send(made)


def whole(viewer, encoder, last=None):
    """Wait until a viewer has what was sent up to `last`; return what it got, which must have no hole."""
    last = encoder.sent[-1] if last is None else last
    until(lambda: frames(viewer.media)[-1:] == [last], "the last message")
    got = frames(viewer.media)
    start = encoder.sent.index(got[0])
    assert got == encoder.sent[start : start + len(got)]
    return got


def cut_off(encoder):
    return encoder.sent[(len(encoder.sent) - 1) // 50 * 50 - 1]


__all__ = ["Encoder", "House", "cut_off", "frames", "until", "whole"]
