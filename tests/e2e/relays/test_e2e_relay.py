"""Relays between live servers of ours, and nginx-rtmp on either side: what arrives is what was published."""

from __future__ import annotations

import contextlib
import socket

import pyarrow.parquet
from e2e_kit import NAME, PATIENCE_S, Play, frames_of, open_live_server, wait_until
from loopback_kit import FAMILY, LOOPBACK, loopback
from relay_kit import nginx, relaying, same_frames, source

from flowctl.core.flow.limits import Limits
from flowctl.flv import TAG_VIDEO
from flowctl.live.config import LiveConfig
from flowctl.live.relay.relay import Relays
from flowctl.live.server import LiveServer
from flowctl.live.settings.relays import parse_relays
from flowctl.live.settings.renditions import RenditionNames
from flowctl.records.telemetry.options import EventsOptions, RecordedStreams
from flowctl.wire.client.player import HEALTHY
from flowctl.wire.client.source import FlvFile
from flowctl.wire.media.synthetic import SyntheticSource
from flowctl.wire.rtmp.events import StreamClosed
from flowctl.wire.rtmp.wire import Message


def test_push_of_a_set_gives_the_other_server_its_largest_rendition(live, clients):
    target = live()
    options = {"renditions": RenditionNames(suffixes=("_large", "_small"))}
    with relaying(push=f"live/show=rtmp://{loopback(target.address[1])}/copy/{{stream}}", **options) as (server, _):
        player = clients.play(target, name="copy/show")
        small = SyntheticSource(video_bit_rate=100_000, fps=50, key_interval_s=0.2)
        clients.publish(server, small, name="live/show_small")
        large = clients.publish(server, source(), name="live/show_large")
        wait_until(lambda: len(frames_of(list(player.messages), TAG_VIDEO)) > 100, "frames at the other server")
        sent = {payload for _, payload in frames_of(list(large.messages), TAG_VIDEO)}
        got = [payload for _, payload in frames_of(list(player.messages), TAG_VIDEO)]
        assert {payload for payload in got[-20:] if payload[0] != 0x17} <= sent  # key frames have parameter sets


def test_push_when_a_stream_is_published_gives_the_other_server_every_frame(live, clients):
    target = live()
    with relaying(push=f"live/*=rtmp://{loopback(target.address[1])}/copy/{{stream}}?key=SECRET") as (server, relays):
        player = clients.play(target, name="copy/stream")
        publisher = clients.publish(server, source())
        wait_until(lambda: same_frames(player, publisher), "frames at the other server")
        (row,) = relays.figures()["push"]
        assert row["state"] == "publishing"
        assert "SECRET" not in str(relays.figures())
        assert [viewer.protocol for viewer in server.hub.find_stream(NAME).viewers] == ["rtmp-push"]
        clients.group.call_soon(publisher.publisher.finish, "enough")
        wait_until(lambda: not relays.figures()["push"], "the end of the push")
        wait_until(lambda: not target.hub.is_published("copy/stream"), "its end at the other server")
        assert "NetStream.Play.UnpublishNotify" in player.codes or wait_until(
            lambda: "NetStream.Play.UnpublishNotify" in player.codes, "the player was told"
        )


def test_push_when_the_target_is_lost_is_tried_again(clients):
    with socket.socket(FAMILY) as sock:
        sock.bind((LOOPBACK, 0))
        port = sock.getsockname()[1]
    with relaying(push=f"live/*=rtmp://{loopback(port)}/live/KEYNAME") as (server, relays):
        clients.publish(server, source())
        wait_until(lambda: any(row["state"] == "waits" for row in relays.figures()["push"]), "a try that failed")
        assert "KEYNAME" not in str(relays.figures())
        with open_live_server(port=port) as target:
            wait_until(lambda: target.hub.is_published("live/KEYNAME"), "the stream at the other server")


def test_push_when_the_target_is_slow_is_a_slow_viewer(clients):
    with socket.create_server((LOOPBACK, 0), family=FAMILY) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with (
            relaying(
                push=f"live/*=rtmp://{loopback(listener.getsockname()[1])}/live/x",
                limits=Limits.parse("64KiB,100,500ms", "64MiB,100000,60s"),
            ) as (server, relays),
            deaf_server(listener),
        ):
            clients.publish(server, SyntheticSource(video_bit_rate=20_000_000, fps=50, key_interval_s=0.2))
            player = clients.play(server)
            row = wait_until(
                lambda: next((row for row in relays.figures()["push"] if row.get("dropped")), None), "something dropped"
            )
            assert row["flow"]
            wait_until(lambda: len(frames_of(list(player.messages), TAG_VIDEO)) > 50, "pictures for others")
            assert player.player.statistics().broken_restarts == 0


def test_push_when_the_publisher_goes_gives_the_slow_target_all_of_it_and_then_its_end(clients):
    with socket.create_server((LOOPBACK, 0), family=FAMILY) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with relaying(push=f"live/*=rtmp://{loopback(listener.getsockname()[1])}/live/x") as (server, relays):
            with deaf_server(listener) as came:
                publisher = clients.publish(server, SyntheticSource(video_bit_rate=20_000_000, fps=50))
                wait_until(lambda: len(publisher.messages) > 25, "more than a socket holds")
                clients.group.call_soon(publisher.publisher.finish, "enough")
                wait_until(lambda: not server.hub.is_published(NAME), "its end")
            wait_until(lambda: not relays.figures()["push"], "the end of the push")
        sent = [payload for _, payload in frames_of(publisher.messages, TAG_VIDEO)]
        media = [(item.type_id, item.timestamp, item.payload) for item in came if isinstance(item, Message)]
        assert [payload for _, payload in frames_of(media, TAG_VIDEO)] == sent
        assert [type(item) for item in came if not isinstance(item, Message)][-1] is StreamClosed


@contextlib.contextmanager
def deaf_server(listener):
    """Let a publisher in, and read nothing of it until the end; then all, into the list that this yields."""
    import threading

    from flowctl.wire.rtmp.events import ConnectRequested, PublishRequested
    from flowctl.wire.rtmp.server.session import ServerSession
    from flowctl.wire.rtmp.session_config import ServerSessionConfig

    done, came = threading.Event(), []

    def serve():
        sock, _ = listener.accept()
        session, let_in = ServerSession(ServerSessionConfig(), now=0.0), False
        with sock:
            while not let_in:
                for event in session.receive(sock.recv(65536), 0.0):
                    if isinstance(event, ConnectRequested):
                        session.accept_connect()
                    elif isinstance(event, PublishRequested):
                        session.accept_publish(event.stream_id)
                        let_in = True
                sock.sendall(session.data_to_send())
            done.wait(PATIENCE_S)
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(65536):
                    came.extend(session.receive(data, 0.0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield came
    finally:
        done.set()
        thread.join(PATIENCE_S)


def test_push_when_servers_name_each_other_ends_after_some_relays(clients):
    with socket.socket(FAMILY) as one, socket.socket(FAMILY) as two:
        for sock in (one, two):
            sock.bind((LOOPBACK, 0))
        ports = [sock.getsockname()[1] for sock in (one, two)]
    rules = [f"live/*=rtmp://{loopback(port)}/live/c-{{stream}}" for port in reversed(ports)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(relaying_at(port, rule)) for port, rule in zip(ports, rules, strict=True)]
        clients.publish(servers[0][0], source())
        wait_until(lambda: sum(relays.figures()["loops_refused"] for _, relays in servers) == 1, "the end of the loop")
        names = {stream.name for server, _ in servers for stream in server.hub.streams()}
        assert names == {"live/stream", "live/c-stream", "live/c-c-stream", "live/c-c-c-stream"}


@contextlib.contextmanager
def relaying_at(port, push):
    config = LiveConfig(host=LOOPBACK, port=port, relay_push=parse_relays(push, "relay_push"))
    server = LiveServer(config)
    relays = Relays(server)
    server.companions.append(relays)
    with server:
        yield server, relays


def test_pull_when_somebody_views_is_followed_while_he_does(live, clients):
    origin = live()
    publisher = clients.publish(origin, source())
    with relaying(pull=f"edge/*=rtmp://{loopback(origin.address[1])}/live/{{stream}}") as (server, relays):
        assert relays.figures()["pull"] == []
        player = clients.play(server, name="edge/stream")
        wait_until(lambda: same_frames(player, publisher), "frames from the other server")
        (row,) = relays.figures()["pull"]
        assert (row["stream"], row["state"]) == ("edge/stream", "running")
        clients.group.call_soon(player.player.finish, "enough")
        wait_until(lambda: not relays.figures()["pull"], "the end of the pull")


def test_pull_when_always_needs_no_viewers(live, clients):
    origin = live()
    clients.publish(origin, source())
    with relaying(pull=f"edge/cam=rtmp://{loopback(origin.address[1])}/{NAME} always") as (server, _):
        wait_until(lambda: server.hub.is_published("edge/cam"), "the stream without viewers")
        assert not server.hub.is_viewed("edge/cam")


def test_pull_when_recorded_is_told_of_as_a_publisher(live, clients, tmp_path):
    origin = live()
    clients.publish(origin, source())
    pull = f"edge/*=rtmp://{loopback(origin.address[1])}/live/{{stream}}"
    with relaying(pull=pull, events=EventsOptions(folder=str(tmp_path), streams=RecordedStreams.PLAIN)) as (server, _):
        player = clients.play(server, name="edge/stream")
        wait_until(lambda: len(player.messages) > 30, "frames from the other server")
    rows = pyarrow.parquet.read_table(tmp_path / "flow_closes").to_pylist()
    (row,) = [item for item in rows if item["role"] == "publish"]
    assert (row["app"], row["stream"], row["peer_port"]) == ("edge", "stream", origin.address[1])
    assert row["ingest_pictures"] > 10


def test_pull_when_the_stream_is_published_here_is_none(live, clients):
    origin = live()
    clients.publish(origin, source())
    with relaying(pull=f"live/*=rtmp://{loopback(origin.address[1])}/live/{{stream}}") as (server, relays):
        own = clients.publish(server, source())
        player = clients.play(server)
        wait_until(lambda: same_frames(player, own), "its own frames")
        assert relays.figures()["pull"] == []


def test_nginx_when_it_is_pushed_to_plays_every_frame(clients, tmp_path, programs, sample):
    with nginx(tmp_path) as url, relaying(push=f"live/*={url}") as (server, _):
        publisher = clients.publish(server, FlvFile(sample("plain")), loop=True)
        player = wait_for_play(clients, url)
        wait_until(lambda: same_frames(player, publisher), "frames at nginx")


def test_nginx_when_it_is_pulled_from_is_an_origin(clients, tmp_path, sample):
    from e2e_kit import Publish

    with nginx(tmp_path) as url, relaying(pull=f"live/*={url}") as (server, _):
        publisher = Publish(clients.group, url, FlvFile(sample("plain")), loop=True)
        player = clients.play(server)
        wait_until(lambda: same_frames(player, publisher), "frames from nginx")


def wait_for_play(clients, url):
    return Play(clients.group, url, HEALTHY, None)
