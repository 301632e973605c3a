"""A viewer of a load run against a scripted server: what it acknowledges is what it has read, to the octet."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time

import pytest

from flowctl.core.loop.sockets import unacknowledged_bytes
from flowctl.load.peers.link import HANDSHAKE_BYTES, Target
from flowctl.load.peers.skim import FrameBook
from flowctl.load.peers.viewer import LoadViewer
from flowctl.load.profiles import parse_profile
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult
from flowctl.wire.client.measure import StreamClock, ViewerMeasure
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.chunk.writer import serialise
from flowctl.wire.rtmp.events import Acknowledged, ConnectRequested, PlayRequested
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.wire.rtmp.url import parse_url

CONFIG = ServerSessionConfig()


class ScriptedReactor:
    """A reactor whose time the test moves."""

    def __init__(self):
        self.now, self.calls, self.handler, self.epoll = 100.0, [], None, select.epoll()

    def add(self, fd, handler, events):
        self.handler = handler
        self.epoll.register(fd, events)

    def watch(self, fd, events):
        self.epoll.modify(fd, events)

    def remove(self, fd):
        self.epoll.unregister(fd)

    def call_at(self, when, call):
        self.calls.append((when, call))

    def turn(self, seconds):
        self.now += seconds
        due = [item for item in self.calls if item[0] <= self.now]
        self.calls = [item for item in self.calls if item[0] > self.now]
        for _, call in due:
            yield call(self.now)
        for _, events in self.epoll.poll(0):
            yield self.handler.ready(events, self.now)


class Stage:
    """One viewer, and a server that sends it pieces of a stream of any size."""

    def __init__(self, profile, *, parsed=True, seed=1):
        self.rng = random.Random(seed)
        self.reactor = ScriptedReactor()
        self.listener = socket.create_server(("127.0.0.1", 0))
        url = parse_url(f"rtmp://127.0.0.1:{self.listener.getsockname()[1]}/live/room")
        self.result = PeerResult(number=0, profile=profile, kind=PeerKind.SLOW, url=str(url))
        self.viewer = LoadViewer(
            reactor=self.reactor,
            target=Target(socket.AF_INET, self.listener.getsockname()),
            url=url,
            result=self.result,
            config=ClientSessionConfig(),
            began=self.reactor.now,
            on_end=lambda viewer: None,
            manner=parse_profile(profile).manner,
            measure=ViewerMeasure(StreamClock()),
            book=FrameBook(),
            parsed=parsed,
        )
        self.viewer.start("", 1e9)
        self.peer, _ = self.listener.accept()
        self.peer.setblocking(False)
        self.rtmp = ServerSession(CONFIG, now=0.0)
        self.acknowledged = []
        self.playing = False
        self.waiting = bytearray()  # what the viewer's kernel has not taken yet
        self.sent = 0

    def step(self, seconds=0.01):
        """Let time pass, the viewer read if it wants to, and the server take what the viewer says."""
        for _ in self.reactor.turn(seconds):
            with contextlib.suppress(BlockingIOError):
                self._hear(self.peer.recv(65536))
        if self.waiting:
            try:
                count = self.peer.send(self.waiting)
            except BlockingIOError:
                return
            self.sent += count
            del self.waiting[:count]

    def _hear(self, data):
        for event in self.rtmp.receive(data, 0.0):
            if isinstance(event, ConnectRequested):
                self.rtmp.accept_connect()
                self.rtmp.resume(0.0)
            elif isinstance(event, PlayRequested):
                self.rtmp.accept_play(event.stream_id)
                self.playing = True
            elif isinstance(event, Acknowledged):
                self.acknowledged.append(event.sequence_number)
                # One read is acknowledged at most once, so nothing was read since.
                assert event.sequence_number == self.result.wire_bytes - HANDSHAKE_BYTES
        self.waiting += self.rtmp.data_to_send()

    def close(self):
        self.viewer.end(PeerEnd.RUN_ENDED, "", self.reactor.now)
        self.reactor.epoll.close()
        self.peer.close()
        self.listener.close()


@pytest.fixture
def open_stage():
    """Make stages that are closed at the end."""
    stages = []

    def make(*arguments, **settings):
        stages.append(Stage(*arguments, **settings))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def play(stage, total_bytes, *, first_bytes=0):
    """Play a stream in pieces of odd sizes until the viewer has read so much; `first_bytes` come at once."""
    for _ in range(1000):
        stage.step()
        if stage.playing and not stage.waiting:
            break
    wire = bytearray()
    for tag in SyntheticSource(video_bit_rate=2_000_000):
        wire += serialise(tag.type_id, 1, tag.timestamp, tag.payload, 4 + tag.type_id % 3, CONFIG.out_chunk_size)
        if len(wire) > total_bytes + 300_000:
            break
    at = first_bytes
    stage.waiting += wire[:at]
    for _ in range(200_000):
        if stage.result.wire_bytes >= total_bytes:
            return
        stage.step()
        if len(stage.waiting) < 40_000:
            size = stage.rng.choice((1, 17, 1447, 8191, stage.rng.randrange(1, 60_000)))
            stage.waiting += wire[at : at + size]
            at += size
    raise AssertionError(f"it has read {stage.result.wire_bytes} of {total_bytes}")


@pytest.mark.parametrize("parsed", [True, False])
@pytest.mark.parametrize(
    "profile", ["healthy", "slow@4M", "sawtooth@1M-8M/1s", "pause@200ms/300ms", "burst@2s", "tiny-window@8KiB"]
)
def test_acknowledgement_when_reads_are_of_odd_sizes_is_what_was_read(open_stage, profile, parsed):
    stage = open_stage(profile, parsed=parsed)
    play(stage, 1_200_000, first_bytes=70_001)
    assert len(stage.acknowledged) >= 3
    assert stage.acknowledged == sorted(stage.acknowledged)
    assert stage.acknowledged[-1] <= stage.sent - HANDSHAKE_BYTES


def test_acknowledgement_when_one_was_read_without_is_of_a_quarter_megabyte_at_most(open_stage):
    stage = open_stage("healthy")
    play(stage, 2_000_000)
    steps = [after - before for before, after in zip(stage.acknowledged, stage.acknowledged[1:], strict=False)]
    assert all(250_000 <= step <= 250_000 + 128 * 1024 for step in steps)


def test_first_read_when_the_viewer_has_a_pace_is_small(open_stage):
    stage = open_stage("slow@200k")
    play(stage, HANDSHAKE_BYTES + 1000, first_bytes=200_000)
    while not stage.viewer.playing:
        before = stage.result.wire_bytes
        stage.step(0.0)
        assert stage.result.wire_bytes - before <= 1400
    before = stage.result.wire_bytes
    for _ in range(100):
        stage.step(0.0)
    assert stage.result.wire_bytes == before


@pytest.mark.realtime
@pytest.mark.parametrize("rate", [300_000, 1_275_000])
def test_reads_when_a_line_is_always_full_go_a_few_packets_at_a_time(open_stage, rate):
    stage = open_stage(f"slow@{rate}", parsed=False)
    play(stage, 150_000, first_bytes=120_000)
    assert stage.viewer.playing
    began = last = time.monotonic()
    read, steps = stage.result.wire_bytes, []
    while last < began + 2.0:
        stage.waiting += bytes(max(60_000 - len(stage.waiting), 0))
        before = stage.sent - unacknowledged_bytes(stage.peer)
        now = time.monotonic()
        stage.step(now - last)
        last = now
        steps.append(stage.sent - unacknowledged_bytes(stage.peer) - before)
        time.sleep(0.001)
    steps = sorted(step for step in steps if step)
    assert steps[len(steps) // 2] <= 3 * 1400
    assert stage.result.wire_bytes - read == pytest.approx(rate / 8 * 2, rel=0.1)
