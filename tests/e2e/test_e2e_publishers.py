"""Publishers come and go: killed and back in time, gone for good, and two of them for one name."""

from __future__ import annotations

import itertools

import pytest
from e2e_kit import (
    CLOCK,
    figures,
    frames_of,
    keys_in,
    read_flv,
    wait_for_end,
    wait_for_keys,
    wait_for_viewers,
    wait_until,
)
from e2e_programs import watch

from flowctl.core.flow.state import MessageClass
from flowctl.flv import TAG_AUDIO, TAG_VIDEO
from flowctl.live.config import SecondPublisher
from flowctl.reasons import CloseReason
from flowctl.wire.client.player import PlayProfile
from flowctl.wire.media.synthetic import SyntheticSource

STAY = PlayProfile(stay=True)
ENDED = "NetStream.Play.UnpublishNotify"
BEGUN = "NetStream.Play.PublishNotify"


def assert_no_jump_back(messages):
    for track in (TAG_VIDEO, TAG_AUDIO):
        times = [timestamp for timestamp, _ in frames_of(messages, track)]
        for before, after in itertools.pairwise(times):
            assert (after - before) % CLOCK < CLOCK // 2, f"{before} -> {after}"


def join_of(play, tags):
    """Return where in what a player got the second publication of `tags` begins: its video header."""
    header = next(tag[2] for tag in tags if tag[0] == TAG_VIDEO)
    places = [index for index, item in enumerate(play.messages) if item[2] == header and item[0] == TAG_VIDEO]
    return places[-1]


def assert_headers_then_key(play, start):
    """Fail if at `start` something else begins than headers, sound apart, followed by a key frame."""
    pictures = [item for item in play.classes[start:] if item not in (MessageClass.HEADER, MessageClass.AUDIO)]
    assert pictures[0] is MessageClass.KEY


def test_viewers_go_on_when_a_killed_publisher_is_back_in_time(live, clients, programs, sample, tmp_path):
    source = sample("plain")
    server = live(return_grace_s=15.0)
    ours = clients.play(server)
    recorded = programs.play(server, tmp_path / "recorded.flv")
    wait_for_viewers(server, 2)
    first = programs.publish(server, source)
    wait_for_keys(server, 3)
    first.kill()
    wait_until(lambda: figures(server).publisher is None, "the server has noticed")
    before = len(ours.messages)
    assert ours.codes.count(ENDED) == 0
    again = programs.publish(server, source, rate=4.0)
    assert again.wait() == 0
    wait_for_end(ours)
    assert recorded.wait() == 0

    assert ours.codes.count(ENDED) == 1  # that of the orderly end
    assert_no_jump_back(ours.messages)
    tags = read_flv(source)
    start = join_of(ours, tags)
    assert start >= before
    assert_headers_then_key(ours, start)
    for track in (TAG_VIDEO, TAG_AUDIO):
        played = [payload for _, payload in frames_of(ours.messages[start:], track)]
        assert played == [payload for _, payload in frames_of(tags, track)]
    assert programs.decode(tmp_path / "recorded.flv") == (0, "")
    whole, seen = watch(source), watch(tmp_path / "recorded.flv")
    # The second time all pictures of the file come, whatever the first publisher got out before it was killed.
    assert list(whole.pictures.values()) == list(seen.pictures.values())[-len(whole.pictures) :]


def test_players_are_told_and_ffmpeg_ends_when_a_publisher_is_gone_for_good(live, clients, programs, sample, tmp_path):
    source = sample("plain")
    server = live(return_grace_s=0.3)
    staying, leaving = clients.play(server, STAY), clients.play(server)
    recorded = programs.play(server, tmp_path / "recorded.flv")
    wait_for_viewers(server, 3)
    publisher = programs.publish(server, source)
    wait_for_keys(server, 3)
    publisher.kill()
    assert recorded.wait() == 0
    wait_for_end(leaving)
    assert leaving.player.ended_by_server
    wait_until(lambda: ENDED in staying.codes, "UnpublishNotify")
    assert staying.end is None
    assert programs.decode(tmp_path / "recorded.flv") == (0, "")
    received = watch(tmp_path / "recorded.flv").of("video")
    assert watch(source).of("video")[: len(received)] == received

    back = programs.publish(server, source, rate=4.0)
    assert back.wait() == 0
    wait_until(lambda: staying.codes.count(ENDED) == 2, "the second end")
    assert BEGUN in staying.codes
    assert_no_jump_back(staying.messages)


def test_second_publisher_is_refused_when_the_setting_says_so(live, clients, programs, sample):
    server = live()
    player = clients.play(server)
    wait_for_viewers(server, 1)
    first = clients.publish(server, SyntheticSource(video_bit_rate=500_000), duration_s=2.0)
    wait_for_keys(server, 1)
    second = programs.publish(server, sample("plain"))
    assert second.wait() != 0
    assert "NetStream.Publish.BadName" in second.log or "being published" in second.log
    wait_for_end(first, player)
    assert first.messages == player.messages
    assert first.end.reason is CloseReason.FINISHED


def test_viewers_go_on_with_the_second_publisher_when_it_replaces_the_first(live, clients, programs, sample):
    source = sample("other")
    server = live(second_publisher=SecondPublisher.REPLACE)
    player = clients.play(server)
    wait_for_viewers(server, 1)
    first = clients.publish(server, SyntheticSource(video_bit_rate=500_000, key_interval_s=0.5))
    wait_for_keys(server, 2)
    second = programs.publish(server, source, rate=4.0)
    assert (second.wait(), second.log) == (0, "")
    wait_for_end(first, player)
    assert first.end.status.level == "error"
    tags = read_flv(source)
    start = join_of(player, tags)
    assert keys_in(player.classes)[0] < start
    assert first.messages[:start] == player.messages[:start]
    assert_headers_then_key(player, start)
    assert_no_jump_back(player.messages)
    for track in (TAG_VIDEO, TAG_AUDIO):
        played = [payload for _, payload in frames_of(player.messages[start:], track)]
        assert played == [payload for _, payload in frames_of(tags, track)]


@pytest.mark.parametrize("orderly", [True, False], ids=["ended", "killed"])
def test_viewers_go_on_with_the_standby_when_the_first_publisher_goes(
    orderly, live, clients, programs, sample, tmp_path
):
    server = live(second_publisher=SecondPublisher.STANDBY)
    player = clients.play(server)
    wait_for_viewers(server, 1)
    first = programs.publish(server, sample("plain"))
    wait_for_keys(server, 1)
    standby = programs.publish(server, sample("other"))
    wait_until(lambda: len(figures(server).standby) == 1, "a publisher on standby")
    wait_for_keys(server, 3)
    if orderly:
        first.process.terminate()  # FFmpeg takes it as the wish to end in order
        first.wait()
    else:
        first.kill()
    wait_until(lambda: figures(server) is None or not figures(server).standby, "the standby has taken over")
    late = clients.play(server)
    recorded = programs.play(server, tmp_path / "late.flv")
    assert standby.wait() == 0
    wait_for_end(player, late)
    assert recorded.wait() == 0

    tags = read_flv(sample("other"))
    frames = {payload for _, payload in frames_of(tags, TAG_VIDEO)}
    for play in (player, late):
        start = join_of(play, tags)
        assert_headers_then_key(play, start)
        played = [payload for _, payload in frames_of(play.messages[start:], TAG_VIDEO)]
        assert played
        assert set(played) <= frames
        assert_no_jump_back(play.messages)
    first_frames = {payload for _, payload in frames_of(read_flv(sample("plain")), TAG_VIDEO)}
    assert {payload for _, payload in frames_of(player.messages[: join_of(player, tags)], TAG_VIDEO)} <= first_frames
    assert programs.decode(tmp_path / "late.flv") == (0, "")
    # A late viewer may have been given what was left of the first one's last group of pictures.
    right = {picture for name in ("plain", "other") for picture in watch(sample(name)).pictures.values()}
    assert set(watch(tmp_path / "late.flv").pictures.values()) <= right
