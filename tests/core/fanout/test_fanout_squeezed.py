"""A thread that has no room for all of a stream: rounds stay short, and what is late is left out for all at once."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import median

import pytest
from fanout_kit import Stage
from flow_kit import HEADER, Peer, check_accounts
from structlog.testing import capture_logs

from flowctl.core.fanout.cohort import Squad
from flowctl.core.fanout.fanout import Fanout
from flowctl.core.fanout.pacing import LONGEST_ROUND_S, RoundSpan
from flowctl.core.flow.limits import NO_LIMITS
from flowctl.reasons import DropReason
from flowctl.sender import Sender

FRAME_S = 0.04
FRAME_BYTES = 1000
GROUP = "K" + "I" * 49
"""Two seconds."""


class DearPeer(Peer):
    """A peer that takes all, each write to which takes time of the thread."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.pause_s = 0.0  # once

    def send(self, data, /):
        until, self.pause_s = self.stage.group.now() + self.pause_s, 0.0
        while self.stage.group.now() < until:  # another thread publishes meanwhile
            self.stage.group.clock.advance(FRAME_S)
            self.stage.publish_due()
        self.stage.group.clock.advance(self.stage.write_s + len(data) * self.stage.byte_s)
        return super().send(data)


class SqueezedStage(Stage):
    """Viewers of a stream of 25 frames a second, written to by a thread that can be given less room."""

    def __init__(self, count, *, script=GROUP, limits=NO_LIMITS, interval_s=FRAME_S):
        self.write_s = self.byte_s = 0.0
        super().__init__(count, interval_s=interval_s, squad_size=2, turn_s=0, limits=limits)
        self.script = script
        self.due_at = self.group.now()
        self.number = 0
        self._publish_next()

    def viewer(self, peer=None, **settings):
        return super().viewer(peer or DearPeer(self), **settings)

    def squeeze(self, share):
        """Have the thread carry `share` of the stream where it writes much at once."""
        self.write_s = 0.002
        self.byte_s = FRAME_S / FRAME_BYTES / len(self.viewers) / share

    def relieve(self):
        self.write_s = self.byte_s = 0.0

    def publish_due(self):
        while self.due_at <= self.group.now():
            self.published.script(self.script[self.number % len(self.script)], FRAME_BYTES)
            self.number += 1
            self.due_at += FRAME_S

    def _publish_next(self):
        self.publish_due()
        self.group.call_later(max(self.due_at - self.group.now(), 0.0), self._publish_next)

    def pass_time(self, seconds):
        """Let some time pass; return which share of the stream each viewer got meanwhile, least first."""
        before, began = [len(viewer.peer.received) for viewer in self.viewers], self.group.now()
        self.group.run(seconds)
        rate = FRAME_BYTES / FRAME_S * (self.group.now() - began)
        return sorted(
            (len(viewer.peer.received) - size) / rate for viewer, size in zip(self.viewers, before, strict=True)
        )

    def late_s(self, viewer):
        return (len(self.published.classes) - 1 - viewer.numbers()[-1]) * FRAME_S


@pytest.mark.parametrize(("share", "window_s"), [(0.7, 1.0), (0.4, 1.0), (0.15, 3.0)])
def test_viewers_when_the_thread_has_no_room_get_alike_and_go_on_at_the_newest_key_frame(share, window_s):
    stage = SqueezedStage(12)
    stage.squeeze(share)
    stage.pass_time(4.0)  # what it has room for shows
    shares, late_s = [], []
    for _ in range(12):
        shares.append(stage.pass_time(window_s))
        late_s.append(max(map(stage.late_s, stage.viewers)))
    assert all(least >= median(shares) / 2 for least, *shares in shares)
    assert max(late_s) < 2.0 + 1.5 + 2 * LONGEST_ROUND_S / share  # a group, what is waited for, and a round
    assert sum(map(sum, shares)) > 12 * 12 * 0.75 * share
    statistics = stage.fanout.statistics()
    assert (statistics.members, statistics.alone, statistics.left) == (12, 0, 0)
    stage.relieve()
    stage.group.run(1.0)
    assert max(map(stage.late_s, stage.viewers)) <= 2 * FRAME_S
    stage.check(headers_known=True)  # none was published between the frames that were left out


def test_viewers_of_one_squad_when_the_thread_has_no_room_have_short_rounds_too():
    stage = SqueezedStage(2)
    stage.squeeze(0.5)
    for _ in range(20):
        stage.pass_time(1.0)
        assert max(map(stage.late_s, stage.viewers)) < 2.0 + 1.5 + LONGEST_ROUND_S
    assert stage.fanout.statistics().longest_turn_s < 2 * LONGEST_ROUND_S
    stage.relieve()
    stage.group.run(1.0)
    assert max(map(stage.late_s, stage.viewers)) <= 2 * FRAME_S
    stage.check(headers_known=True)


def test_viewers_when_they_are_late_say_whose_fault_it_is_and_it_is_said_once_for_all():
    stage = SqueezedStage(12)
    viewer = stage.viewers[0].sender
    assert viewer.why().startswith("READY")
    assert "blame" not in viewer.why()
    stage.squeeze(0.3)
    with capture_logs() as lines:
        stage.pass_time(12.0)
    assert [line["event"] for line in lines] == [
        "viewers go on at key frames: their thread has no room for all of the stream"
    ]
    assert lines[0]["viewers"] == 12
    assert "went on at a key frame, for the thread had no room; to blame: our loop" in viewer.why()
    statistics = viewer.statistics()
    assert statistics.returns >= 2
    assert statistics.picture_share < 0.8
    assert set(statistics.dropped) == {DropReason.RETURNED}
    stage.relieve()
    stage.group.run(30.0)
    assert "blame" not in viewer.why()
    assert viewer.statistics().picture_share == 1.0
    stage.check(headers_known=True)


def test_share_of_pictures_when_viewers_went_on_at_a_key_frame_counts_what_was_left_out_there():
    stage = SqueezedStage(12)
    stage.group.run(30.0)
    viewer = stage.viewers[0]
    for returns in (1, 2):
        stage.squeeze(0.3)
        while viewer.sender.statistics().returns < returns:
            stage.pass_time(0.2)
        stage.relieve()
        stage.group.run(1.0)
        got = [number for number in viewer.numbers() if number >= len(stage.published.classes) - 20 / FRAME_S]
        assert viewer.sender.statistics().picture_share == pytest.approx(len(got) * FRAME_S / 20, abs=0.03)


def test_accounts_when_another_thread_asks_while_viewers_go_on_at_a_key_frame_are_right(monkeypatch):
    stage = SqueezedStage(6)
    skip_in_cohort = Sender.skip_in_cohort

    def checked(sender, *args):
        skipped = skip_in_cohort(sender, *args)
        for viewer in stage.viewers:
            check_accounts(viewer)
        return skipped

    monkeypatch.setattr(Sender, "skip_in_cohort", checked)
    stage.squeeze(0.3)
    stage.group.run(12.0)
    assert all(viewer.sender.statistics().returns for viewer in stage.viewers)


def test_viewers_when_headers_come_between_key_frames_get_these():
    stage = SqueezedStage(6, script="K" + "I" * 30 + "H" + "I" * 18)
    stage.squeeze(0.3)
    stage.group.run(20.0)
    assert all(HEADER in [frame[1] for frame in viewer.frames] for viewer in stage.viewers)
    assert not any(DropReason.RETURNED in viewer.sender.statistics().dropped for viewer in stage.viewers)
    stage.relieve()
    stage.group.run(20.0)
    stage.check()


@pytest.mark.parametrize("script", ["I" * 50, "A" * 50])
def test_viewers_when_no_key_frame_comes_get_all_in_order(script):
    stage = SqueezedStage(6, script=script)
    stage.squeeze(0.5)
    stage.group.run(20.0)
    stage.relieve()
    stage.group.run(1.0)
    assert [viewer.numbers() for viewer in stage.viewers] == [list(range(len(stage.published.classes)))] * 6
    stage.check()


def test_viewers_when_rounds_are_far_apart_by_setting_lose_nothing_by_a_long_one():
    stage = SqueezedStage(6, interval_s=5.0)
    stage.squeeze(2.0)
    stage.group.run(60.0)
    assert stage.fanout.statistics().longest_round_s > LONGEST_ROUND_S
    assert not any(viewer.sender.statistics().dropped for viewer in stage.viewers)
    stage.check()


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_viewers_when_the_thread_pauses_once_in_a_round_lose_nothing(seconds):
    """It catches up with all there is, in a few rounds."""
    stage = SqueezedStage(12)
    stage.group.run(5.0)
    stage.viewers[3].peer.pause_s = seconds
    stage.group.run(seconds + 1.0)
    assert max(map(stage.late_s, stage.viewers)) <= 2 * FRAME_S
    assert not any(viewer.sender.statistics().dropped for viewer in stage.viewers)
    assert stage.fanout.statistics().left == 0
    stage.check()


def test_viewers_when_the_thread_pauses_long_after_it_had_no_room_lose_nothing():
    stage = SqueezedStage(12)
    stage.squeeze(0.15)
    stage.group.run(6.0)
    for viewer in stage.viewers[2:]:
        viewer.sender.unfollow()
    del stage.viewers[2:]
    stage.relieve()
    stage.group.run(60.0)
    before = [viewer.sender.statistics().dropped for viewer in stage.viewers]
    for _ in range(50):  # for 2 s, in which a viewer joins, so that the next round is not a short one
        stage.group.clock.advance(FRAME_S)
        stage.publish_due()
    stage.viewer().follow(stage.fanout)
    stage.group.run(3.0)
    assert [viewer.sender.statistics().dropped for viewer in stage.viewers] == before
    stage.check(headers_known=True)


def test_viewer_when_it_takes_late_media_too_gets_all_and_the_others_go_on():
    stage = SqueezedStage(6)
    patient = stage.viewers[3]
    patient.sender.set_limits(replace(patient.sender.limits, target_delay_ms=0))
    stage.squeeze(0.4)
    stage.group.run(6.0)
    assert stage.pass_time(20.0)[0] > 0.2  # nobody waits for the one that is far behind
    stage.relieve()
    stage.group.run(5.0)
    assert patient.numbers() == list(range(len(stage.published.classes)))
    assert not patient.sender.statistics().dropped
    assert all(viewer.sender.statistics().returns for viewer in stage.viewers if viewer is not patient)
    stage.check(headers_known=True)


def test_viewers_when_they_may_be_further_behind_are_and_stay_together():
    stage = SqueezedStage(6, limits=replace(NO_LIMITS, target_delay_ms=6000))
    stage.squeeze(0.5)
    late_s = []
    for _ in range(20):
        stage.pass_time(1.0)
        late_s.append(max(map(stage.late_s, stage.viewers)))
    assert max(late_s) > 5.0
    assert all(viewer.sender.statistics().returns >= 1 for viewer in stage.viewers)
    statistics = stage.fanout.statistics()
    assert (statistics.members, statistics.left) == (6, 0)
    stage.relieve()
    stage.group.run(2.0)
    stage.check(headers_known=True)


def test_member_when_it_is_led_to_another_log_is_asked_at_the_key_frame_that_the_others_go_on_at():
    stage = SqueezedStage(6)
    asked = []
    guided = stage.viewers[2]
    stage.squeeze(0.3)
    stage.group.run(4.0)
    guided.sender.set_guide(Asking(asked))
    stage.group.run(6.0)
    assert asked
    stage.relieve()
    stage.group.run(5.0)
    stage.check(headers_known=True)


class Asking:
    def __init__(self, asked):
        self.asked = asked

    def choose_log(self, key):
        self.asked.append(key.sequence)


def test_viewers_that_lag_when_rounds_are_long_have_as_much_time_as_these(monkeypatch):
    stage = SqueezedStage(12)
    for viewer in stage.viewers[6:]:
        viewer.give(0)
    stage.group.run(3.0)
    stage.squeeze(0.5)
    order = []
    monkeypatch.setattr(Squad, "write", noting(order, "squad", Squad.write))
    monkeypatch.setattr(Fanout, "_serve_viewer", noting(order, "viewer", Fanout._serve_viewer))
    for viewer in stage.viewers[6:]:
        viewer.give(None)
    stage.group.run(1.0)
    begun = order[: order.index("viewer") + 6]
    assert begun.count("squad") <= 3


def noting(order, word, method):
    def noted(*args, **options):
        order.append(word)
        return method(*args, **options)

    return noted


def test_span_of_rounds_when_one_took_too_long_is_less_until_they_are_short():
    span, rate = RoundSpan(), 100_000
    span.round_ended(20_000, LONGEST_ROUND_S, rate, 1.0)
    assert span.size_bytes == inf
    span.round_ended(200_000, 4 * LONGEST_ROUND_S, rate, 2.0)
    assert span.size_bytes == pytest.approx(50_000)
    span.round_ended(50_000, LONGEST_ROUND_S, rate, 3.0)  # as long as it may be
    assert span.size_bytes == pytest.approx(50_000)
    span.round_ended(5000, 1e9, rate, 4.0)
    assert rate / 10 < span.size_bytes < rate / 4
    assert span.since == 2.0
    span.round_ended(5000, 1e9, 0.0, 5.0)  # a stream whose rate is not known yet
    assert span.size_bytes > 0
    for _ in range(30):
        span.round_ended(5000, LONGEST_ROUND_S / 4, rate, 6.0)
    assert span.size_bytes == inf
