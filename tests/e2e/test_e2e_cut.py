"""The rule for slow viewers over real sockets: one on a slow line decodes all it gets, and harms nobody."""

from __future__ import annotations

from e2e_kit import connection_to, viewer_of, wait_for_end, wait_for_viewers, wait_until

from flowctl.core.flow.limits import Limits
from flowctl.core.flow.state import MessageClass
from flowctl.core.loop.sockets import SocketOptions
from flowctl.core.sending.settings import SenderSettings
from flowctl.flv import FlvReader, FlvWriter
from flowctl.reasons import DropReason
from flowctl.wire.client.player import PlayProfile

SLOW = 200_000
"""Bits per second that the slow viewer reads; the recording has 0.5 Mbit/s."""
SMALL_BUFFERS = SocketOptions(notsent_lowat_bytes=16 * 1024, send_buffer_bytes=16 * 1024)


def test_viewer_when_its_link_is_slow_is_given_part_of_the_pictures_and_decodes_them(
    live, clients, programs, sample, tmp_path
):
    server = live(
        limits=Limits.parse("4MiB,0,30s", "8MiB,0,60s", target_delay_ms=500),
        settings=SenderSettings(stuck_s=0, soft_too_long_s=0, sample_s=0.2),
        socket_options=SMALL_BUFFERS,
    )
    healthy = [clients.play(server) for _ in range(10)]
    with (tmp_path / "slow.flv").open("wb") as file:
        slow = clients.play(server, PlayProfile(rate=SLOW), writer=FlvWriter(file))
        wait_for_viewers(server, len(healthy) + 1)
        number = connection_to(server, slow).number
        tags = FlvReader().feed(sample("b_frames").read_bytes())
        publishing = clients.publish(server, tags, loop=True)
        wait_until(lambda: viewer_of(server, number).sender.picture_share < 0.9, "pictures left out")
        seen = len(slow.messages)
        wait_until(lambda: len(slow.messages) > seen + 100, "what it is given there")
        figures = viewer_of(server, number).sender
        clients.group.call_soon(publishing.publisher.finish, "seen enough")
        wait_for_end(publishing, slow, *healthy)
    assert 0 < figures.picture_share < 1
    assert figures.dropped[DropReason.LATE].of(MessageClass.INTER) > 0
    assert figures.sent.of(MessageClass.AUDIO) > 50
    assert len(slow.messages) < len(publishing.messages)
    for player in healthy:
        assert publishing.messages == player.messages
    assert programs.decode(tmp_path / "slow.flv") == (0, "")
