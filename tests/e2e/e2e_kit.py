"""What the end-to-end tests use: a live server, players and publishers of ours, FFmpeg processes, and waiting.

Nothing here asserts a time. `wait_until` looks for a condition until it holds and fails, naming it, when it does not
within a time that is far longer than any machine needs.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from traceback import format_exception

from live_kit import ends_of, viewer_figures
from loopback_kit import LOOPBACK

from flowctl.core.flow.state import MessageClass
from flowctl.core.server.admission import AdmissionLimits
from flowctl.core.text.addresses import join_host_port
from flowctl.flv import TAG_AUDIO, TAG_VIDEO, FlvReader
from flowctl.live.config import LiveConfig
from flowctl.live.server import LiveServer
from flowctl.pollgroup import PollGroup
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.player import HEALTHY, RtmpPlayer
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.session_config import ServerSessionConfig

PATIENCE_S = 20.0
NAME = "live/stream"
MEDIA = frozenset({TAG_AUDIO, TAG_VIDEO})
PICTURES = frozenset({MessageClass.KEY, MessageClass.INTER, MessageClass.DISPOSABLE})
CLOCK = 1 << 32


def wait_until(condition, what, timeout_s=PATIENCE_S):
    """Return the first true value of `condition()`; fail when none came in time."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)


def put(path, text):
    """Write beside and rename, as writers should."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, "utf-8")
    beside.replace(path)


# -- the server


@contextlib.contextmanager
def open_live_server(*, limits=None, wire=None, rtmp=None, make=LiveServer, **options):
    failures = []
    if limits is not None:
        options["limits"] = limits
    # Twenty healthy players, several bad ones and a publisher all come from one address within a moment.
    options.setdefault("host", LOOPBACK)
    options.setdefault("admission", AdmissionLimits(connections_per_address=64, burst_per_address=64))
    session = ServerSessionConfig(limits=WireLimits(**(wire or {})), **(rtmp or {}))
    server = make(
        LiveConfig(
            rtmp=session,
            on_error=lambda where, error: failures.append((where, "".join(format_exception(error)))),
            **options,
        ),
    )
    with server:
        yield server
    assert failures == [], failures


def address_of(server, name=NAME):
    """Return the URL of a stream, with TLS where the server speaks it."""
    for listener in getattr(server, "listeners", ()):
        if listener.name == "rtmps":
            return f"rtmps://{join_host_port(*listener.address)}/{name}"
    return f"rtmp://{join_host_port(*server.address)}/{name}"


def figures(server, name=NAME):
    return server.hub.find_stream(name)


def wait_for_viewers(server, count, name=NAME):
    wait_until(lambda: (stream := figures(server, name)) and len(stream.viewers) == count, f"{count} viewers")


def wait_for_keys(server, count, name=NAME):
    return wait_until(
        lambda: (stream := figures(server, name)) and stream.messages_in[MessageClass.KEY] >= count,
        f"{count} key frames published",
    )


def wait_for_states(server, number, *states, name=NAME):
    def been():
        viewer = viewer_of(server, number, name)
        return viewer and all(viewer.sender.time_in_states_s[state] > 0 for state in states)

    wait_until(been, f"viewer in states {[state.name for state in states]}")


def viewer_of(server, number, name=NAME):
    """Return the figures of the viewer with this connection number. None: it is not there."""
    found = (viewer for its, viewer in server.hub.viewing() if its == name and viewer.number == number)
    return next(map(viewer_figures, found), None)


def ended_viewer(server, number):
    return next((item for item in ends_of(server) if item.number == number), None)


def connection_to(server, client):
    """Return the server's end of the connection of a player or publisher of ours."""
    return wait_until(
        lambda: next((item for item in server.connections() if item.peer[1] == client.local_port), None),
        "the server's end",
    )


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


# -- our own clients


class Play:
    """A player of ours and everything it got.

    Attributes:
        messages: (type, timestamp, payload) of each audio and video message, in order.
    """

    def __init__(self, group, url, profile, keep, **settings):
        self.messages = []
        self.classes = []
        self.player = RtmpPlayer(
            parse_address(url), profile, on_message=self._take if keep is None else keep, **settings
        )
        self.connection = start_client(
            group,
            self.player,
            receive_buffer_bytes=profile.receive_buffer_bytes,
            capacity_bytes=profile.capacity_bytes,
        )
        self.local_port = self.connection.core.host.sock.getsockname()[1]

    def _take(self, message, message_class):
        self.messages.append((message.type_id, message.timestamp, message.payload))
        self.classes.append(message_class)

    @property
    def codes(self):
        return [status.code for status in self.player.statuses]

    @property
    def end(self):
        return self.player.end


class Publish:
    """A publisher of ours and everything it sent: (type, timestamp, payload) of audio and video, and the classes."""

    def __init__(self, group, url, source, **settings):
        self.messages = []
        self.classes = []
        self.publisher = RtmpPublisher(parse_address(url), source, on_sent=self._take, **settings)
        self.connection = start_client(group, self.publisher)
        self.local_port = self.connection.core.host.sock.getsockname()[1]

    def _take(self, tag, message_class):
        if tag.type_id in MEDIA:
            self.messages.append((tag.type_id, tag.timestamp, tag.payload))
            self.classes.append(message_class)

    @property
    def end(self):
        return self.publisher.end


class Clients:
    """A thread for players and publishers of ours, beside the server's threads."""

    def __init__(self):
        self.failures = []
        self.group = PollGroup("e2e-clients", on_error=lambda where, error: self.failures.append((where, repr(error))))

    def __enter__(self):
        self.group.start()
        return self

    def __exit__(self, *exc_info):
        self.group.stop(5.0)
        assert self.failures == []

    def play(self, server, profile=HEALTHY, *, name=NAME, keep=None, **settings):
        return Play(self.group, address_of(server, name), profile, keep, **settings)

    def publish(self, server, source, *, name=NAME, **settings):
        return Publish(self.group, address_of(server, name), source, **settings)


def wait_for_end(*clients):
    wait_until(lambda: all(client.end is not None for client in clients), "the clients' connections over")


def keys_in(classes):
    return [index for index, item in enumerate(classes) if item is MessageClass.KEY]


def frames_of(messages, type_id):
    """Return (timestamp, payload) of the frames of one track: no headers, and nothing that marks an end."""
    wanted = PICTURES if type_id == TAG_VIDEO else {MessageClass.AUDIO}
    return [
        (timestamp, payload)
        for kind, timestamp, payload in messages
        if kind == type_id and inspect(kind, payload).message_class in wanted
    ]


def read_flv(path):
    return [tuple(tag) for tag in FlvReader().feed(Path(path).read_bytes()) if tag.type_id in MEDIA]


def key_frames_after_gaps(received, sent, classes):
    """Fail unless what a thinned viewer got is a stream that can be decoded; return the number of gaps."""
    place = {message: index for index, message in enumerate(sent)}
    headers = {payload for (_, _, payload), item in zip(sent, classes, strict=True) if item is MessageClass.HEADER}
    at, gaps, since_picture = -1, 0, []
    for message in received:
        if message[2] in headers:
            since_picture.append(message)
            continue
        index = place[message]  # nothing was changed: payload and timestamp are those of the publisher
        assert index > at, "out of order, or twice"
        at = index
        if classes[index] not in PICTURES:
            continue
        lost = [item for item in classes[last_picture(since_picture, place) + 1 : index] if item in PICTURES]
        if any(item is not MessageClass.DISPOSABLE for item in lost):
            gaps += 1
            assert classes[index] is MessageClass.KEY
            restart = [item for item in since_picture if item[2] in headers]
            assert {item[0] for item in restart} == {TAG_VIDEO, TAG_AUDIO}, "no headers before the key frame"
            # They are the very octets that were published, so they have the time of then.
            assert max(item[1] for item in restart) <= message[1]
        since_picture = [message]
    return gaps


def last_picture(since_picture, place):
    """Return where in the stream the picture is with which the list begins; -1 before the first one."""
    return place.get(since_picture[0], -1) if since_picture else -1


def sounds_older_than_the_restart(received, sent, classes):
    """Return the audio frames that came after a key frame that ended a gap, but belong before it."""
    place = {message: index for index, message in enumerate(sent)}
    newest_key, late = 0, []
    for message in received:
        index = place.get(message)
        if index is None or classes[index] is MessageClass.HEADER:
            continue
        if classes[index] is MessageClass.KEY:
            newest_key = message[1]
        if message[0] == TAG_AUDIO and (message[1] - newest_key) % CLOCK >= CLOCK // 2:
            late.append(message)
    return late
