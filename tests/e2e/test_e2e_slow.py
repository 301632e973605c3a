"""Slow viewers: thinned at key frames and back in step when their link recovers, or cut with a reason.

The limits are small here, so that what takes many seconds with the defaults takes a few. The stream is a real
recording, played again and again, because a synthetic picture would look right however many frames were missing.
"""

from __future__ import annotations

import pytest
import structlog
from e2e_kit import (
    PICTURES,
    connection_to,
    ended_viewer,
    key_frames_after_gaps,
    keys_in,
    sounds_older_than_the_restart,
    viewer_of,
    wait_for_end,
    wait_for_states,
    wait_for_viewers,
    wait_until,
)
from e2e_programs import watch, write_flv
from e2e_raw import RawPlayer
from structlog.testing import capture_logs

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import SendState
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.flv import FlvReader, FlvWriter
from flowctl.reasons import CloseReason
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource

HEALTHY_VIEWERS = 20
EARLY = SocketOptions(notsent_lowat_bytes=32 * 1024)
"""The kernel says EAGAIN early, so that a stream of 2 Mbit/s shows a slow viewer in less than a second."""
SMALL_BUFFERS = SocketOptions(notsent_lowat_bytes=16 * 1024, send_buffer_bytes=16 * 1024)
"""The same for the recordings, which have 0.5 Mbit/s."""
PATIENT = SenderSettings(stuck_s=0, soft_too_long_s=0)
SOFT = "soft limit"
BIG_KEYS = SyntheticSource(video_bit_rate=2_000_000, key_frame_bytes=120_000, key_interval_s=1.0)
"""A key frame under way cannot be dropped: with a soft limit below its size SOFT_LIMIT lasts until it is read."""


@pytest.mark.parametrize("name", ["plain", "b_frames"])
def test_throttled_viewer_recovers_and_what_it_got_decodes(name, live, clients, programs, sample, tmp_path):
    """A viewer read too slowly becomes OVERLOADED and SOFT_LIMIT; set free, READY; 20 others get every frame.

    What it got is decodable throughout: after each gap come the headers and a key frame, and no older sound.
    """
    limits = Limits.parse("48KiB,0,1500ms", "1MiB,0,60s")
    server = live(limits=limits, settings=PATIENT, socket_options=SMALL_BUFFERS)
    healthy = [clients.play(server) for _ in range(HEALTHY_VIEWERS)]
    tags = FlvReader().feed(sample(name).read_bytes())
    with (tmp_path / "slow.flv").open("wb") as file:
        slow = clients.play(server, PlayProfile(rate=150_000, resume_after_s=4.0), writer=FlvWriter(file))
        number = connection_to(server, slow).number
        wait_for_viewers(server, HEALTHY_VIEWERS + 1)
        publishing = clients.publish(server, tags, loop=True, duration_s=7.0)
        wait_for_states(server, number, SendState.OVERLOADED)
        # Thinning ends SOFT_LIMIT as soon as it begins; what is left to see of it is that input was paused.
        wait_until(lambda: viewer_of(server, number).input_pauses.get(SOFT), "SOFT_LIMIT")
        wait_until(lambda: slow.player._pace is None, "the throttle lifted")
        wait_until(lambda: viewer_of(server, number).state is SendState.READY, "READY again")
        figures = viewer_of(server, number)
        assert figures.sender.restarts + figures.sender.recoveries >= 1
        wait_for_end(publishing, slow, *healthy)

    for player in healthy:
        assert publishing.messages == player.messages
    gaps = key_frames_after_gaps(slow.messages, publishing.messages, publishing.classes)
    assert gaps >= 1
    assert len(slow.messages) < len(publishing.messages)
    assert publishing.messages[-1] == slow.messages[-1]
    assert sounds_older_than_the_restart(slow.messages, publishing.messages, publishing.classes) == []
    assert programs.decode(tmp_path / "slow.flv") == (0, "")
    right = watch(write_flv(tmp_path / "sent.flv", publishing.messages)).pictures
    seen = watch(tmp_path / "slow.flv")
    assert {time: right[time] for time in seen.pictures} == seen.pictures
    assert len(seen.pictures) == sum(item in PICTURES for item in slow.classes)
    assert len(seen.pictures) < len(right)
    assert keys_in(slow.classes)


def test_stalled_viewer_is_reset_with_its_reason_and_others_lose_nothing(live, clients):
    server = live(settings=SenderSettings(stuck_s=1.0, soft_too_long_s=0), socket_options=EARLY)
    healthy = [clients.play(server) for _ in range(HEALTHY_VIEWERS)]
    with RawPlayer(server) as stalled:
        wait_for_viewers(server, HEALTHY_VIEWERS + 1)
        end = connection_to(server, stalled)
        number = end.number
        end.sender.set_limits(Limits.parse("64KiB,0", "8MiB,0"))
        publishing = clients.publish(server, BIG_KEYS, duration_s=4.0)
        ended = wait_until(lambda: ended_viewer(server, number), "the stalled viewer cut")
        wait_for_viewers(server, HEALTHY_VIEWERS)
        assert ended.reason is CloseReason.STUCK
        assert "took nothing" in ended.details
        assert server.closed_by_reason == {CloseReason.STUCK: 1}
        with pytest.raises(ConnectionResetError):
            stalled.read_to_end()
        wait_for_end(publishing, *healthy)
    for player in healthy:
        assert publishing.messages == player.messages


def test_viewers_that_all_stop_at_once_are_kept_and_it_is_said_once(live, clients):
    """A line that they share stands still for longer than a viewer alone may; then all go on."""
    server = live(settings=SenderSettings(stuck_s=3.0, soft_too_long_s=3.0), socket_options=EARLY)
    profile, count = PlayProfile(stall_after_s=1.0, resume_after_s=9.0), 12
    stopping = [clients.play(server, profile) for _ in range(count)]
    wait_for_viewers(server, count)
    structlog.reset_defaults()  # a command that ran in this process may have left a level at which nothing is said
    with capture_logs() as said:
        source = SyntheticSource(video_bit_rate=1_000_000, key_interval_s=1.0)
        publishing = clients.publish(server, source, duration_s=12.0)
        wait_for_end(publishing, *stopping)
    told = [line["event"] for line in said if line["event"].startswith("most viewers")]
    assert told, [line["event"] for line in said]
    assert len(told) == 2 * len({line["thread"] for line in said if "thread" in line}), "once per thread and way"
    loud = [line for line in said if line["event"] == "viewer slow" and line["log_level"] == "info"]
    assert len(loud) < count / 2, "not once per viewer"
    assert CloseReason.STUCK not in server.closed_by_reason
    for player in stopping:
        assert publishing.messages[-1] == player.messages[-1]


def test_joining_viewer_loses_nothing_when_the_cache_is_larger_than_its_limits(live, clients):
    server = live(limits=Limits.parse("32KiB,32,1s", "64KiB,64,5s"), settings=PATIENT)
    source = SyntheticSource(video_bit_rate=3_000_000, key_interval_s=600.0, key_frame_bytes=20_000)
    publishing = clients.publish(server, source)
    wait_until(lambda: len(publishing.messages) > 100, "a cache beyond the limits")
    late = clients.play(server)
    wait_until(lambda: len(late.messages) > 180, "the cache and more")
    clients.group.call_soon(publishing.publisher.finish, "the test is over")
    wait_for_end(publishing, late)
    assert publishing.messages == late.messages
