"""The player over real loopback sockets against the live server: counts, gaps, and all kinds of bad behaviour."""

from __future__ import annotations

import io
import itertools
import time

import pytest
from client_kit import address, client_group, live_server, small_source, start_player, wait_until
from live_kit import ends_of, viewer_figures

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.flv import FlvReader, FlvWriter
from flowctl.reasons import CloseReason
from flowctl.wire.client import player as player_module
from flowctl.wire.client.base import Status
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.player import HEALTHY, PlayProfile, RtmpPlayer
from flowctl.wire.client.publisher import RtmpPublisher
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.wire.rtmp.wire import TYPE_VIDEO

QUICK_LIMITS = Limits.parse("64KiB,10000,600ms", "8MiB,10000,1500ms")
"""Limits that act within two seconds on a stream of 430 kbit/s."""

QUICK = {"limits": QUICK_LIMITS, "socket_options": SocketOptions(notsent_lowat_bytes=4096)}


def play(group, server, profile=HEALTHY, **settings):
    player = RtmpPlayer(address(server), profile, **settings)
    start_player(group, player, profile)
    return player


def publish(group, server, bit_rate=400_000, source=None, **settings):
    publisher = RtmpPublisher(address(server), source or small_source(video_bit_rate=bit_rate), **settings)
    start_client(group, publisher)
    return publisher


def viewer(server, player):
    sock = player.sock
    port = sock.getsockname()[1] if sock is not None else 0
    return next((viewer_figures(item) for _, item in server.hub.viewing() if item.peer[1] == port), None)


def test_play_when_nobody_publishes_ends_in_the_time_that_it_was_to_play(monkeypatch):
    """The server would let it wait for ever."""
    monkeypatch.setattr(player_module, "BEGINS_S", 0.1)
    with client_group() as group, live_server(rtmp=ServerSessionConfig(limits=WireLimits(player_wait_s=0.0))) as server:
        player = play(group, server, duration_s=0.2)
        wait_until(lambda: player.ended, "the player's end")
    assert player.nothing_came
    assert player.end.details == "nothing came"


def test_play_when_the_player_waits_for_the_publisher():
    with client_group() as group, live_server() as server:
        player = play(group, server)
        wait_until(lambda: player.statistics().wire_bytes, "the player's connection")
        publisher = publish(group, server, pace=8.0, duration_s=4.0)
        wait_until(lambda: player.ended, "the player's end")
    figures, sent = player.statistics(), publisher.statistics().sent
    assert figures.received == sent
    assert figures.received.messages == (0, 3, 8, 112, 0, 188, 0)
    assert (figures.missing_video, figures.missing_audio, figures.exact) == (0, 0, True)
    assert (figures.started_on_key, figures.broken_restarts) == (True, 0)
    assert player.ended_by_server
    assert player.end.as_wanted
    assert figures.mean_delay_s is not None
    assert 0 <= figures.mean_delay_s <= figures.max_delay_s


def test_play_when_many_share_a_thread():
    with client_group() as group, live_server() as server:
        players = [play(group, server) for _ in range(30)]
        wait_until(lambda: all(player.statistics().wire_bytes for player in players), "all connections")
        publish(group, server, pace=4.0, duration_s=4.0)
        wait_until(lambda: all(player.ended for player in players), "all ends")
    assert {player.statistics().received.messages for player in players} == {(0, 3, 8, 112, 0, 188, 0)}


def test_play_when_joining_late():
    with client_group() as group, live_server() as server:
        publisher = publish(group, server, pace=4.0, duration_s=6.0)
        wait_until(lambda: publisher.statistics().media_s > 1.2, "the middle of the stream")
        player = play(group, server)
        wait_until(lambda: player.ended, "the player's end")
    figures = player.statistics()
    assert figures.started_on_key
    assert (figures.missing_video, figures.missing_audio) == (0, 0)
    assert 0 < figures.received.of(MessageClass.KEY) < 12
    assert figures.first_frame_s is not None
    # What the server had in its cache came at once: it is media, but no time has passed, and its age is no delay.
    assert figures.media_s > figures.elapsed_s > 0


def test_play_when_written_to_a_file():
    sent, file = [], io.BytesIO()
    with client_group() as group, live_server() as server:
        player = play(group, server, writer=FlvWriter(file))
        wait_until(lambda: player.statistics().wire_bytes, "the player's connection")
        publish(group, server, pace=8.0, duration_s=2.0, on_sent=lambda tag, _: sent.append(tag))
        wait_until(lambda: player.ended, "the player's end")
    tags = FlvReader(check_back_pointers=True).feed(file.getvalue())
    assert [tag for tag in tags if tag.type_id != 18] == [tag for tag in sent if tag.type_id != 18]
    assert [tag.payload for tag in tags if tag.type_id == 18] == [tag.payload for tag in sent if tag.type_id == 18]
    assert player.statistics().written_tags == len(tags)


def test_play_when_the_time_is_up():
    with client_group() as group, live_server() as server:
        publisher = publish(group, server)
        player = play(group, server, duration_s=0.3)
        wait_until(lambda: player.ended, "the player's end")
        assert not publisher.ended
    assert player.end.as_wanted
    assert player.end.status is None  # neither an error nor the end of the stream, so it explains nothing
    assert str(player.end) == "finished (played as long as was asked for)"
    assert not player.ended_by_server


def test_play_when_the_rate_is_limited():
    rate = 150_000
    with client_group() as group, live_server(**QUICK) as server:
        publish(group, server, bit_rate=600_000)
        profile = PlayProfile(rate=rate)
        start = time.monotonic()
        player = play(group, server, profile)
        wait_until(lambda: (found := viewer(server, player)) and found.state >= SendState.SOFT_LIMIT, "the soft limit")
        wait_until(lambda: player.statistics().video_gaps >= 2, "thinning")
        read, took_s = player.statistics().wire_bytes, time.monotonic() - start
        seen = viewer(server, player)
    assert read <= rate / 8 * took_s + 2 * profile.capacity_bytes
    assert seen.sender.dropped_messages > 0
    assert player.statistics().broken_restarts == 0


def test_play_when_its_line_had_little_to_carry():
    """What a line could have carried while nothing came does not come in one lump later."""
    pictures = []  # when each came, and whether it is a key frame

    def note(message, message_class):
        if message.type_id == TYPE_VIDEO:
            pictures.append((time.monotonic(), message_class is MessageClass.KEY))

    with client_group() as group, live_server() as server:
        publish(group, server, source=small_source(key_interval_s=1.0, key_frame_bytes=40_000, audio=False))
        play(group, server, PlayProfile(rate=1_000_000), on_message=note)
        wait_until(lambda: sum(key for _, key in pictures) > 3, "four key frames")
    (first, *_), *_ = pictures
    took_s = [at - before for (before, _), (at, key) in itertools.pairwise(pictures) if key and at > first + 1.5]
    assert max(took_s) > 0.25  # 40 kB are 0.32 s of this line; the picture before was published 33 ms ago


def test_play_when_it_stalls_for_good():
    with client_group() as group, live_server(**QUICK) as server:
        publish(group, server, bit_rate=2_500_000)
        player = play(group, server, PlayProfile(stall_after_s=0.2))
        wait_until(lambda: player.ended, "the cut")
        (ended,) = wait_until(lambda: ends_of(server), "the server's account")
    assert ended.reason is CloseReason.HARD_LIMIT
    assert "limit 1.5 s" in ended.details
    assert player.end.reason is CloseReason.PEER_RESET
    assert str(player.end).startswith("server reset (")
    assert player.statistics().stalled
    assert player.stalled_at is not None


def test_play_when_it_stalls_and_nothing_moves():
    settings = SenderSettings(stuck_s=0.5)
    options = SocketOptions(notsent_lowat_bytes=4096, send_buffer_bytes=16 * 1024)
    with (
        client_group() as group,
        live_server(limits=Limits.parse("0,0"), settings=settings, socket_options=options) as server,
    ):
        publish(group, server, bit_rate=2_500_000)
        player = play(group, server, PlayProfile(stall_after_s=0.0))
        wait_until(lambda: player.ended, "the cut")
        (ended,) = wait_until(lambda: ends_of(server), "the server's account")
    assert ended.reason is CloseReason.STUCK


def test_play_when_the_stall_is_lifted():
    limits = Limits.parse("64KiB,10000,600ms", "8MiB,10000,60s")
    with client_group() as group, live_server(**(QUICK | {"limits": limits})) as server:
        publish(group, server, bit_rate=2_500_000)
        player = play(group, server, PlayProfile(stall_after_s=0.2, resume_after_s=2.0))
        wait_until(lambda: (found := viewer(server, player)) and found.state >= SendState.SOFT_LIMIT, "the soft limit")
        wait_until(lambda: (found := viewer(server, player)) and found.sender.recoveries, "the recovery")
        before = player.statistics().received.of(MessageClass.KEY)
        wait_until(lambda: player.statistics().received.of(MessageClass.KEY) > before + 1, "more key frames")
        assert not player.ended
    figures = player.statistics()
    assert figures.missing_video > 0
    assert figures.broken_restarts == 0
    assert not figures.stalled


def test_play_when_it_floods_pings():
    with client_group() as group, live_server() as server:
        publish(group, server)
        player = play(group, server, PlayProfile(pings_per_s=2000))
        wait_until(lambda: player.ended, "the cut")
        (ended,) = wait_until(lambda: ends_of(server), "the server's account")
    assert ended.reason is CloseReason.LIMIT_HIT
    assert "control_messages_per_second" in ended.details
    assert player.statistics().pings_sent >= 200
    assert "control_messages_per_second" in player.end.status.description
    assert not player.end.as_wanted


def test_play_when_pings_are_few():
    with client_group() as group, live_server() as server:
        publish(group, server, pace=2.0, duration_s=3.0)
        player = play(group, server, PlayProfile(pings_per_s=20))
        wait_until(lambda: player.ended, "the end")
    assert player.end.as_wanted
    assert player.statistics().pings_sent > 10


def test_play_when_it_does_not_acknowledge():
    config = ClientSessionConfig(acknowledge=False, answer_pings=False)
    with client_group() as group, live_server() as server:
        player = play(group, server, config=config)
        wait_until(lambda: player.statistics().wire_bytes, "the player's connection")
        publish(group, server, pace=8.0, duration_s=4.0)
        wait_until(lambda: player.ended, "the player's end")
    assert player.statistics().received.messages == (0, 3, 8, 112, 0, 188, 0)


def test_play_when_the_stream_is_absent_and_waiting_is_not_allowed():
    with client_group() as group, live_server(players_may_wait=False) as server:
        player = play(group, server)
        wait_until(lambda: player.ended, "the player's end")
    assert player.rejected is not None
    assert player.end.status.code == "NetStream.Play.StreamNotFound"
    assert not player.end.as_wanted


def test_play_when_the_publisher_comes_back():
    with client_group() as group, live_server() as server:
        player = play(group, server, PlayProfile(stay=True))
        for _ in range(2):
            publisher = publish(group, server, pace=8.0, duration_s=2.0)
            wait_until(lambda publisher=publisher: publisher.ended, "the publisher's end")
        wait_until(lambda: player.statistics().received.of(MessageClass.KEY) == 8, "both rounds")
        assert not player.ended
    assert player.statistics().missing_video == 0


def test_play_when_the_server_stops():
    with client_group() as group:
        with live_server() as server:
            publish(group, server)
            player = play(group, server)
            wait_until(lambda: player.statistics().playing, "media")
        wait_until(lambda: player.ended, "the player's end")
    assert player.end.reason in {CloseReason.PEER_CLOSED, CloseReason.PEER_RESET, CloseReason.FINISHED}
    assert str(player.end)


@pytest.mark.parametrize(
    ("level", "code", "explains"),
    [
        ("status", "NetStream.Play.UnpublishNotify", True),
        ("error", "NetStream.Play.StreamNotFound", True),
        ("status", "NetStream.Play.Reset", False),
    ],
)
def test_status_when_it_ends_something_explains_the_end(level, code, explains):
    assert Status(level, code, "").explains_end is explains
