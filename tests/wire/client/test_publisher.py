"""The publisher over real loopback sockets: all arrives, in order; a server that does not read is waited for."""

from __future__ import annotations

import io
import itertools
import os
import threading
import time

import pytest
from client_kit import PATIENCE_S, Sink, address, client_group, live_server, sink_server, small_source, wait_until
from rtmp_session_kit import metadata_of

from flowctl.core.flow.state import MessageClass
from flowctl.errors import BrokenError, ConfigError, FlowctlError, RemoteProtocolError
from flowctl.flv import FlvTag, FlvWriter
from flowctl.reasons import CloseReason
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.base import ClientEnd, Status
from flowctl.wire.client.connect import ClientRun, connect_socket, start_client
from flowctl.wire.client.publisher import MAX_QUEUED_BYTES, RtmpPublisher
from flowctl.wire.client.source import FlvFile, FlvPipe, Tracks, check_has_media
from flowctl.wire.media.stamp import Stamper, read_stamp
from flowctl.wire.rtmp.events import ConnectRefused, MetadataReceived, PublishRequested, StreamClosed
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.wire import TYPE_AUDIO, TYPE_VIDEO


def media(tags):
    return [tag for tag in tags if tag.type_id in (TYPE_AUDIO, TYPE_VIDEO)]


def publish(group, server, source, **settings):
    publisher = RtmpPublisher(address(server), source, **settings)
    start_client(group, publisher)
    return publisher


def write_file(path, tags):
    with path.open("wb") as file:
        writer = FlvWriter(file)
        for tag in tags:
            writer.write(*tag)
    return path


def test_publish_when_unpaced():
    sent = []
    with client_group() as group, sink_server() as (server, sinks):
        publisher = publish(
            group, server, small_source(), pace=0, duration_s=4.0, on_sent=lambda tag, _: sent.append(tag)
        )
        wait_until(lambda: publisher.ended, "the publisher's end")
        (sink,) = sinks
        wait_until(lambda: any(isinstance(event, StreamClosed) for event in sink.events), "the stream's end")
    arrived = [(message.type_id, message.timestamp, message.payload) for message in sink.messages]
    assert arrived == [tuple(tag) for tag in media(sent)]
    assert publisher.end.as_wanted
    assert publisher.statistics().sent.messages == (0, 3, 8, 112, 0, 188, 0)
    (metadata,) = [event for event in sink.events if isinstance(event, MetadataReceived)]
    assert metadata_of(metadata)["encoder"] == "flowctl synthetic source"


def test_publish_when_frames_are_synthetic():
    before = time.time_ns() // 1000
    with client_group() as group, sink_server() as (server, sinks):
        publisher = publish(group, server, small_source(), pace=0, duration_s=2.0)
        wait_until(lambda: publisher.ended and sinks[0].messages[-1].timestamp > 1950, "all frames")
    after = time.time_ns() // 1000
    for type_id in (TYPE_AUDIO, TYPE_VIDEO):
        stamps = [read_stamp(message.payload) for message in sinks[0].messages if message.type_id == type_id]
        stamps = [stamp for stamp in stamps if stamp is not None]
        assert [number for number, _ in stamps] == list(range(len(stamps)))
        assert all(before <= at <= after for _, at in stamps)


def test_publish_when_frames_are_stamped_already_leaves_them_as_they_are():
    source = [
        FlvTag(tag.type_id, tag.timestamp, Stamper().stamped(1, tag.payload, 7)) for tag in small_source().tags(0.5)
    ]
    with client_group() as group, sink_server() as (server, sinks):
        one = publish(group, server, source, pace=0, stamped=True)
        wait_until(lambda: one.ended, "the publisher's end")
        wait_until(lambda: any(isinstance(event, StreamClosed) for event in sinks[0].events), "the stream's end")
    sent = [(message.type_id, message.timestamp, message.payload) for message in sinks[0].messages]
    assert sent == [tuple(tag) for tag in media(source)]


def test_publish_when_told_when_it_begins_sends_at_once_what_was_due_before():
    with client_group() as group, sink_server() as (server, sinks):
        publisher = publish(group, server, small_source(), begins=lambda now: now - 3600.0, duration_s=30.0)
        wait_until(lambda: publisher.ended, "the publisher's end")
        wait_until(lambda: any(isinstance(event, StreamClosed) for event in sinks[0].events), "the stream's end")
    assert sinks[0].messages[-1].timestamp > 29_900


def test_publish_when_a_file_loops(tmp_path):
    path = write_file(tmp_path / "a.flv", small_source().tags(1.0))
    with client_group() as group, sink_server() as (server, sinks):
        publisher = publish(group, server, FlvFile(path), pace=0, loop=True, duration_s=3.5)
        wait_until(lambda: publisher.ended and sinks[0].messages[-1].timestamp > 3400, "all rounds")
    video = [message for message in sinks[0].messages if message.type_id == TYPE_VIDEO]
    steps = [later.timestamp - earlier.timestamp for earlier, later in itertools.pairwise(video[1:])]
    # A round ends when the audio does, 1 ms after the next picture would have been due.
    assert set(steps) == {33, 34, 35}
    assert len(video) == 1 + 105
    assert publisher.statistics().rounds == 4


class Pipe:
    """A named pipe that is written to by hand, as a program that encodes writes to it."""

    def __init__(self, path, tags):
        os.mkfifo(path)
        self.path, self.octets = path, io.BytesIO()
        writer = FlvWriter(self.octets)
        self.ends = []  # where in the octets each tag ends
        for tag in tags:
            writer.write(*tag)
            self.ends.append(self.octets.tell())
        self._end = os.open(path, os.O_RDWR)  # both ends: nobody is waited for
        self._written = 0

    def write(self, tag_count):
        end = self.ends[tag_count - 1]
        self._written += os.write(self._end, self.octets.getvalue()[self._written : end])
        assert self._written == end

    def close(self):
        os.close(self._end)


def test_publish_when_the_source_is_a_pipe_sends_each_tag_when_it_comes(tmp_path):
    """One is not held back until the next has come, and what is waited for does not keep the connection waiting."""
    tags = list(small_source().tags(0.5))
    pipe = Pipe(tmp_path / "pipe", tags)
    pipe.write(4)
    with client_group() as group, sink_server() as (server, sinks):
        source = FlvPipe(pipe.path)
        publisher = publish(group, server, source)

        def await_tags(count):
            sent = [(tag.type_id, tag.timestamp) for tag in media(tags[:count])]
            wait_until(lambda: sinks and [(x.type_id, x.timestamp) for x in media(sinks[0].messages)] == sent, "tags")

        for count in (4, 5, 9):
            pipe.write(count)
            await_tags(count)
        answered = threading.Event()
        group.call_soon(answered.set)
        assert answered.wait(PATIENCE_S)
        assert publisher.statistics().publishing
        pipe.write(len(tags))
        pipe.close()
        wait_until(lambda: publisher.ended, "the publisher's end")
        await_tags(len(tags))
    assert publisher.source_error is None


def test_pipe_when_it_breaks_or_is_no_flv_says_so(tmp_path):
    pipe = Pipe(tmp_path / "pipe", small_source().tags(0.2))
    pipe.write(2)
    source = FlvPipe(pipe.path)
    assert [next(source) is None for _ in range(4)] == [False, False, True, True]
    os.write(pipe._end, b"\xff" * 64)
    with pytest.raises(RemoteProtocolError):
        next(source)
    pipe.close()
    with pytest.raises(ConfigError, match="can be read once"):
        FlvFile(pipe.path)
    other = Pipe(tmp_path / "other", small_source().tags(0.2))
    os.write(other._end, b"RIFF" + bytes(100))
    with pytest.raises(ConfigError, match="is no FLV file"):
        FlvPipe(other.path)
    other.close()


def test_publish_when_the_server_does_not_read():
    sink = Sink()
    sink.hold_after = 1
    source = small_source(video_bit_rate=20_000_000)
    with client_group() as group, sink_server(sink) as (server, _):
        publisher = publish(group, server, source, pace=0, duration_s=10.0)
        wait_until(lambda: sink.hold_after is None and publisher.statistics().waits, "the wait for room")
        largest = 0
        for _ in range(20):
            largest = max(largest, publisher.statistics().bytes_queued)
        assert not publisher.ended
        sink.release()
        wait_until(lambda: publisher.ended, "the publisher's end")
        wait_until(lambda: any(isinstance(event, StreamClosed) for event in sink.events), "the stream's end")
    assert MAX_QUEUED_BYTES // 2 < largest < 2 * MAX_QUEUED_BYTES
    stamps = [read_stamp(message.payload) for message in sink.messages if message.type_id == TYPE_VIDEO]
    assert [stamp[0] for stamp in stamps if stamp is not None] == list(range(300))
    assert publisher.statistics().waited_s > 0


def test_publish_when_paced():
    times = []
    start = time.monotonic()
    with client_group() as group, sink_server() as (server, _):
        publisher = publish(
            group,
            server,
            small_source(),
            pace=4.0,
            duration_s=2.0,
            on_sent=lambda tag, _: times.append((time.monotonic() - start, tag.timestamp)),
        )
        wait_until(lambda: publisher.ended, "the publisher's end")
    assert len(times) == 3 + 60 + 94
    assert all(at >= timestamp / 4000 - 0.002 for at, timestamp in times)
    assert publisher.statistics().max_lag_s >= 0


def test_publish_when_the_name_is_taken():
    with client_group() as group, live_server() as server:
        first = publish(group, server, small_source())
        wait_until(lambda: first.statistics().publishing, "the first publisher")
        second = publish(group, server, small_source())
        wait_until(lambda: second.ended, "the second publisher's end")
        assert not first.ended
    assert second.end.status.code == "NetStream.Publish.BadName"
    assert not second.end.as_wanted
    assert second.statistics().sent.total_messages == 0


def test_publish_when_a_login_is_wanted():
    config = ServerSessionConfig(credentials={"ann": "pw"})
    with sink_server(config=config) as (server, sinks):
        url = parse_address(f"rtmp://ann:pw@127.0.0.1:{server.address[1]}/live/room")
        with ClientRun(
            lambda parameters, on_end: RtmpPublisher(
                url, small_source(), pace=0, duration_s=1.0, parameters=parameters, on_end=on_end
            )
        ) as run:
            run.start()
            run.wait()
    refusals = [event.reason for sink in sinks for event in sink.events if isinstance(event, ConnectRefused)]
    assert refusals == ["need-auth", "challenged"]
    assert run.client.end.as_wanted
    assert any(isinstance(event, PublishRequested) for event in sinks[-1].events)


def test_publish_when_the_password_is_wrong():
    config = ServerSessionConfig(credentials={"ann": "pw"})
    with sink_server(config=config) as (server, _):
        url = parse_address(f"rtmp://ann:no@127.0.0.1:{server.address[1]}/live/room")
        with ClientRun(
            lambda parameters, on_end: RtmpPublisher(url, small_source(), parameters=parameters, on_end=on_end)
        ) as run:
            run.start()
            run.wait()
    assert run.client.rejected.retry_parameters is None
    assert not run.client.end.as_wanted
    assert "pw" not in str(run.client.end)


def test_publish_when_the_server_goes_away():
    with client_group() as group:
        with sink_server() as (server, _):
            publisher = publish(group, server, small_source())
            wait_until(lambda: publisher.statistics().sent.total_messages > 20, "some media")
        wait_until(lambda: publisher.ended, "the publisher's end")
    assert publisher.end.reason in {CloseReason.PEER_CLOSED, CloseReason.PEER_RESET}


def test_publish_when_the_file_is_broken(tmp_path):
    path = write_file(tmp_path / "a.flv", small_source().tags(1.0))
    with path.open("ab") as file:
        file.write(b"\xff" * 64)
    with client_group() as group, sink_server() as (server, _):
        publisher = publish(group, server, FlvFile(path), pace=0)
        wait_until(lambda: publisher.ended, "the publisher's end")
    assert publisher.source_error.code == "flv-out-of-step"
    assert publisher.statistics().sent.of(MessageClass.KEY) == 2


@pytest.mark.parametrize("pace", [-1.0, 1e9, float("nan")])
def test_publisher_when_the_pace_is_out_of_range(pace):
    with pytest.raises(ConfigError, match="pace"):
        RtmpPublisher(parse_address("rtmp://h/a/b"), [], pace=pace)


def test_publisher_when_it_has_no_pace_has_no_target_delay():
    with pytest.raises(ConfigError, match="without pace"):
        RtmpPublisher(parse_address("rtmp://h/a/b"), [], pace=0, target_delay_ms=None)


def test_file_when_it_is_cut_off(tmp_path):
    path = write_file(tmp_path / "a.flv", small_source().tags(1.0))
    whole = list(FlvFile(path))
    path.write_bytes(path.read_bytes()[:-10])
    assert list(FlvFile(path)) == whole[:-1]


@pytest.mark.parametrize("content", [b"", b"FL", b"RIFF" + bytes(100)])
def test_file_when_it_is_no_flv(tmp_path, content):
    """What is no FLV is refused with the command that would make one."""
    path = tmp_path / "a.flv"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        FlvFile(path)
    assert "ffmpeg" in caught.value.hint


def test_file_when_it_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.flv"):
        FlvFile(tmp_path / "nowhere.flv")


def test_tracks_when_one_is_left_out():
    source = list(small_source().tags(0.2))
    only_audio = Tracks(source, video=False)
    for _ in range(2):
        assert {tag.type_id for tag in only_audio} == {8, 18}
    with pytest.raises(FlowctlError, match="no audio and no video"):
        check_has_media(Tracks(list(Tracks(source, video=False)), audio=False), "it")
    with pytest.raises(ConfigError):
        Tracks(source, audio=False, video=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://host/live/room", "http"),
        ("rtmp://host/", "names no stream"),
        ("rtmp:///live/room", "no host"),
        ("room", "address"),
        ("rtmp://host:99999/live/room", "port"),
    ],
)
def test_address_when_it_cannot_be_used(text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_address(text)
    assert "rtmp://" in caught.value.hint


def test_connect_when_nobody_listens():
    with sink_server() as (server, _):
        url = address(server)
    with pytest.raises(BrokenError, match=f"127.0.0.1:{url.port}"):
        connect_socket(url)


def test_end_when_the_server_says_hostile_things_is_one_line():
    """A break of lines in its words would forge a line of what the command says by itself."""
    status = Status("error", "NetStream.Failed", "no\nended: finished \x1b[2J")
    shown = str(ClientEnd(CloseReason.PEER_CLOSED, "a\r\nb", status, 1.0))
    assert shown.isprintable()
    assert shown.endswith("no\\u000aended: finished \\u001b[2J")
