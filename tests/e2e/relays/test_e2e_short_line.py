"""Publishers of ours on a line that is too short: they stay live, say so, and what arrives decodes.

The line is a socket that is read at its rate; the server behind it, and a viewer there, are healthy. Of a real
recording, since a synthetic picture would look right however many frames were missing.
"""

from __future__ import annotations

import contextlib

import pytest
import structlog
from e2e_kit import (
    NAME,
    PATIENCE_S,
    Publish,
    frames_of,
    key_frames_after_gaps,
    sounds_older_than_the_restart,
    wait_for_end,
    wait_until,
)
from relay_kit import relaying

from flowctl.core.flow.state import MessageClass, SendState
from flowctl.core.sending.settings import SenderSettings
from flowctl.flv import TAG_AUDIO, FlvReader, FlvWriter
from flowctl.reasons import CloseReason, DropReason
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import start_client
from flowctl.wire.client.publisher import RtmpPublisher
from programs.thinline import FAST, ThinLine

HALF = 260_000
"""Bits per second of the line: half of what the recordings have."""
LEAST_LOST = 20
AUDIO = MessageClass.AUDIO
KNOWN_MS = 5000


@contextlib.contextmanager
def published_by_us(clients, target, tags):
    """A publisher of ours behind a line. Yields what it sends, the line, and its figures of what was left out."""
    with ThinLine(target.address[1], FAST, least=HALF) as line:
        url = f"rtmp://127.0.0.1:{line.port}/{NAME}"
        publishing = Publish(clients.group, url, tags, loop=True, target_delay_ms=1600)
        yield publishing, line, lambda: publishing.connection.sender


@contextlib.contextmanager
def pushed_by_a_relay(clients, target, tags):
    """A relay behind a line, and a publisher of its stream."""
    with ThinLine(target.address[1], FAST, least=HALF) as line:
        push = f"{NAME}=rtmp://127.0.0.1:{line.port}/{{app}}/{{stream}} target-delay=1600ms"
        with relaying(push=push) as (server, relays):
            publishing = clients.publish(server, tags, loop=True)

            def sender():
                (push,) = relays._pushes.values()
                return push._session.connection.sender

            yield publishing, line, sender


def late(sender):
    return sender.statistics().dropped.get(DropReason.LATE)


def told(lines, event):
    return [item for item in lines if item["event"] == event]


@pytest.mark.parametrize(("way", "name"), [(published_by_us, "b_frames"), (pushed_by_a_relay, "plain")])
def test_line_when_too_short_leaves_out_late_pictures_and_all_is_sent_again_once_it_carries_it(
    way, name, live, clients, programs, sample, tmp_path
):
    target = live()
    tags = FlvReader().feed(sample(name).read_bytes())
    with (tmp_path / "seen.flv").open("wb") as file, structlog.testing.capture_logs() as lines:
        player = clients.play(target, writer=FlvWriter(file))
        with way(clients, target, tags) as (publishing, line, sender):
            # Once the rate of the stream is known, the kernel is not given seconds of it ahead.
            wait_until(lambda: player.messages and player.messages[-1][1] > KNOWN_MS, "the stream at the far server")
            line.set_rate(HALF)
            wait_until(lambda: (lost := late(sender())) and lost.total_messages >= LEAST_LOST, "late pictures left out")
            assert sender().limits.target_delay_ms == 1600
            assert "of the pictures" in sender().why()
            line.set_rate(FAST)
            wait_until(lambda: sender().state is SendState.READY, "READY again")
            lost, whole_from = late(sender()), len(publishing.messages)
            wait_until(lambda: told(lines, "line carries all again"), "the word of it", 3 * PATIENCE_S)
            peer = sender()
            wait_until(lambda: len(publishing.messages) > whole_from + 150, "a while on the line that carries it")
            assert late(sender()) == lost
            clients.group.call_soon(publishing.publisher.finish, "enough")
            wait_for_end(publishing)
            wait_until(lambda: player.messages[-1] == publishing.messages[-1], "the last message at the far viewer")
    assert key_frames_after_gaps(player.messages, publishing.messages, publishing.classes) >= 1
    assert sounds_older_than_the_restart(player.messages, publishing.messages, publishing.classes) == []
    sound, heard = (frames_of(messages, TAG_AUDIO) for messages in (publishing.messages, player.messages))
    sound = sound[sound.index(heard[0]) :]
    # On a line of half the rate none is late, but a thread that has no room may go on at a key frame, and says so.
    assert len(sound) - len(heard) <= sum(lost.of(AUDIO) for lost in peer.statistics().dropped.values())
    assert [item for item in sound if item in set(heard)] == heard
    assert player.messages[-100:] == publishing.messages[-100:]
    assert programs.decode(tmp_path / "seen.flv") == (0, "")
    (short,) = told(lines, "line short")
    assert "bit rate" in short["hint"]
    assert short.get("to", short.get("url")).startswith(f"rtmp://127.0.0.1:{line.port}/live/")
    (again,) = told(lines, "line carries all again")
    assert sum(again["dropped"].values()) >= LEAST_LOST


def test_publisher_when_all_is_to_be_sent_lags_on_a_short_line(live, clients, sample):
    target = live()
    tags = FlvReader().feed(sample("plain").read_bytes())
    with ThinLine(target.address[1], HALF) as line:
        player = clients.play(target)
        publishing = Publish(clients.group, f"rtmp://127.0.0.1:{line.port}/{NAME}", tags, loop=True)
        wait_until(lambda: publishing.connection.sender.load().size_bytes > HALF // 8, "a second of the line to wait")
        line.set_rate(FAST)
        clients.group.call_soon(publishing.publisher.finish, "enough")
        wait_for_end(publishing)
        wait_until(lambda: player.messages[-1] == publishing.messages[-1], "the last message at the far viewer")
    assert player.messages == publishing.messages
    figures = publishing.publisher.statistics()
    assert (figures.left_out.total_messages, figures.picture_share) == (0, 1.0)


def test_publisher_when_its_line_takes_nothing_any_more_ends_with_that_reason(live, clients, sample):
    target = live()
    tags = FlvReader().feed(sample("plain").read_bytes())
    with ThinLine(target.address[1], HALF) as line:
        url = parse_address(f"rtmp://127.0.0.1:{line.port}/{NAME}")
        publisher = RtmpPublisher(url, tags, loop=True, target_delay_ms=None)
        start_client(clients.group, publisher, settings=SenderSettings(stuck_s=0.5))
        wait_until(lambda: publisher.statistics().sent.total_messages > 20, "some media")
        line.set_rate(0)
        wait_until(lambda: publisher.end, "its end")
    assert publisher.end.reason is CloseReason.STUCK
    assert "took nothing" in publisher.end.details
    assert publisher.statistics().unsent.total_messages > 0


def test_push_when_its_line_takes_nothing_any_more_is_ended_with_that_reason_and_tried_again(live, clients, sample):
    target = live()
    tags = FlvReader().feed(sample("plain").read_bytes())
    with ThinLine(target.address[1], HALF) as line:
        push = f"{NAME}=rtmp://127.0.0.1:{line.port}/{{app}}/{{stream}}"
        with relaying(push=push, settings=SenderSettings(stuck_s=0.5)) as (server, relays):
            clients.publish(server, tags, loop=True)
            wait_until(lambda: target.hub.is_published(NAME), "the stream at the far server")
            line.set_rate(0)
            row = wait_until(
                lambda: next((row for row in relays.figures()["push"] if row["state"] == "waits"), None), "the wait"
            )
            assert "took nothing" in row["why"]
            line.set_rate(FAST)
            wait_until(lambda: line.connections > 1, "another try")
            wait_until(lambda: any("line" in row for row in relays.figures()["push"]), "the stream pushed again")
