"""Fan-out: what happens to viewers that all stop at once, to one that stops alone, and to some one after another."""

from __future__ import annotations

from fanout_kit import Stage
from flow_kit import KEY, LOG, check_accounts, check_edges, check_stream
from sender_kit import READY

from flowctl.core.flow.limits import Limits
from flowctl.core.sending.settings import SenderSettings
from flowctl.reasons import CloseReason

LIMITS = Limits.parse("0,0", "400000,6000,8s")
SETTINGS = SenderSettings(stuck_s=10, soft_too_long_s=12, return_after_s=3)
COUNT = 20


class Crowd(Stage):
    """Viewers of a stream that goes on: a group of pictures a second."""

    def __init__(self, count=COUNT, limits=LIMITS, settings=SETTINGS):
        self._settings = settings
        super().__init__(count, limits=limits)
        self.said = self.group.stalls_said

    def viewer(self, peer=None, *, limits, settings=None):
        return super().viewer(peer, limits=limits, settings=self._settings)

    def pass_s(self, seconds):
        for letter in "KIAIAIAIAI" * seconds:
            self.published.script(letter, 100)
            self.group.run(0.1)
            for viewer in self.viewers:
                if viewer.peer.room is None:
                    viewer.host.poll_writable()

    def stop(self, viewers):
        for viewer in viewers:
            viewer.peer.room = 0

    def go_on(self, viewers):
        for viewer in viewers:
            viewer.peer.room = None

    def closed(self):
        return [reason for viewer in self.viewers for reason, _ in viewer.host.closed]


def check_all_go_on(crowd):
    assert crowd.closed() == []
    for viewer in crowd.viewers:
        assert viewer.sender.state is READY
        assert viewer.numbers()[-1] == len(crowd.published.classes) - 1
        check_accounts(viewer)
        check_edges(viewer)
        check_stream(viewer, crowd.published)


def test_viewers_when_all_stop_at_once_stay_and_go_on_at_a_key_frame():
    crowd = Crowd()
    crowd.pass_s(3)
    crowd.stop(crowd.viewers)
    crowd.pass_s(20)
    assert [said[:3] for said in crowd.said] == [(False, COUNT, COUNT)]
    stopped_at = len(crowd.published.classes)
    crowd.go_on(crowd.viewers)
    crowd.pass_s(5)
    check_all_go_on(crowd)
    assert len(crowd.said) == 2
    for viewer in crowd.viewers:
        missed = [number for number in range(stopped_at) if number not in set(viewer.numbers(LOG))]
        assert crowd.published.classes[missed[-1] + 1] is KEY
        assert len(missed) > 100


def test_viewers_when_some_kernels_stay_silent_for_longer_have_their_time_anew():
    crowd = Crowd()
    crowd.pass_s(3)
    crowd.stop(crowd.viewers)
    crowd.pass_s(20)
    late, others = crowd.viewers[:3], crowd.viewers[3:]
    crowd.go_on(others)
    crowd.pass_s(5)  # the kernel tries again seldom after such a time
    crowd.go_on(late[:2])
    crowd.pass_s(15)
    assert crowd.closed() == [CloseReason.HARD_LIMIT]
    assert late[2].host.closed


def test_viewer_when_it_stops_alone_is_closed():
    crowd = Crowd()
    crowd.pass_s(3)
    crowd.stop(crowd.viewers[:1])
    crowd.pass_s(20)
    assert (crowd.closed(), crowd.said) == ([CloseReason.HARD_LIMIT], [])


def test_viewer_when_it_stopped_before_the_others_is_closed():
    crowd = Crowd()
    crowd.pass_s(3)
    crowd.stop(crowd.viewers[:1])
    crowd.pass_s(6)
    crowd.stop(crowd.viewers)
    crowd.pass_s(20)
    assert crowd.closed() == [CloseReason.HARD_LIMIT]
    assert crowd.viewers[0].host.closed


def test_viewers_when_they_stop_one_after_another_are_closed():
    crowd = Crowd()
    crowd.pass_s(3)
    for viewer in crowd.viewers:
        crowd.stop([viewer])
        crowd.pass_s(3)
    crowd.pass_s(10)
    assert crowd.closed() == [CloseReason.HARD_LIMIT] * COUNT
    assert crowd.said == []


def test_viewers_when_age_has_no_limit_are_not_stuck_for_a_stall_of_all():
    limits = Limits.parse("200000,3000", "400000,6000")
    crowd = Crowd(limits=limits)
    crowd.pass_s(3)
    crowd.stop(crowd.viewers)
    crowd.pass_s(30)
    crowd.go_on(crowd.viewers)
    crowd.pass_s(5)
    check_all_go_on(crowd)
    crowd.stop(crowd.viewers[:1])
    crowd.pass_s(15)
    assert crowd.closed() == [CloseReason.STUCK]


def test_viewers_when_memory_is_full_are_closed_in_a_stall_of_all():
    crowd = Crowd(limits=Limits.parse("0,0", "9000,0,8s"))
    crowd.pass_s(3)
    crowd.stop(crowd.viewers)
    crowd.pass_s(20)
    assert crowd.closed() == [CloseReason.HARD_LIMIT] * COUNT


def test_viewers_when_their_kernels_take_for_more_or_less_time_all_stay():
    """The buffers of most are larger: they are full three seconds after the first ones."""
    crowd = Crowd()
    crowd.pass_s(3)
    crowd.stop(crowd.viewers[:7])
    crowd.pass_s(3)
    crowd.stop(crowd.viewers)
    crowd.pass_s(17)
    assert crowd.closed() == []
    crowd.go_on(crowd.viewers)
    crowd.pass_s(5)
    check_all_go_on(crowd)
