"""Viewers of a log with keys: what those that keep up get, and what stalled ones cost."""

from __future__ import annotations

import pytest
from fanout_kit import kept_of
from flight_kit import RecordedViewer, check_flight
from flow_kit import DATA, KEY, LOG, OWN, Peer, Published, Viewer, check_accounts, frame
from sender_kit import OVERLOADED, SOFT_LIMIT

from flowctl.core.fanout.fanout import Fanout
from flowctl.core.flow.ledger import LedgerKind
from flowctl.core.flow.limits import DEFAULT_LIMITS, NO_LIMITS, Limits
from flowctl.core.flow.policy import DropDroppable, LivePolicy
from flowctl.core.outgoing.streamlog import KeyedEntry, StreamLog
from flowctl.core.sending.contract import Hop
from flowctl.core.sending.settings import SenderSettings
from flowctl.errors import LocalProtocolError
from flowctl.reasons import CloseReason, DropReason
from flowctl.testing import ManualGroup

TIMELESS = SenderSettings(stuck_s=0, soft_too_long_s=0)


class Market:
    """A log with keys and its viewers, which have joined and are members of the cohort."""

    def __init__(self, viewers=1, *, keys=5, limits=NO_LIMITS, kind=Viewer):
        self.group = ManualGroup()
        self.log = StreamLog("prices", max_keys=keys)
        self.fanout = Fanout(self.log, self.group, flush_interval_s=0.0)
        self.keys, self.count = keys, 0
        self.viewers = [kind(self.group, limits=limits, settings=TIMELESS) for _ in range(viewers)]
        for viewer in self.viewers:
            viewer.sender.follow(self.fanout, latest=True)
        self.group.run(0.1)

    def publish(self, count=1, size=20):
        """Publish the next values, each of another key than the one before it."""
        for _ in range(count):
            key = str(self.count % self.keys)
            self.log.append(frame(LOG, DATA, self.count, size), DATA, self.group.now(), key=key)
            self.count += 1


def test_round_when_a_viewer_is_stalled_gives_the_others_every_message():
    market = Market(3)
    stalled, *others = market.viewers
    stalled.peer.room = 0
    for _ in range(7):
        market.publish(5)
        market.group.run(0.01)
    assert [viewer.numbers() for viewer in others] == [list(range(35))] * 2
    assert stalled.sender.load().messages == 5
    stalled.drain()
    assert stalled.numbers() == [30, 31, 32, 33, 34]
    assert market.fanout.statistics().members == 3
    for viewer in market.viewers:
        check_accounts(viewer)


@pytest.mark.parametrize("limits", ["0,0", "64KiB,1000", "1KiB,40"])
def test_stalled_viewers_when_values_come_hold_none_and_are_not_looked_at(limits, monkeypatch):
    market = Market(20, limits=Limits.parse(limits))
    looked = []
    monkeypatch.setattr(Fanout, "_watch_limits", lambda _self, sender: looked.append(sender))
    for viewer in market.viewers[1:]:
        viewer.peer.room = 0
    market.publish()
    market.group.run(0.01)
    looked.clear()
    before = kept_of(KeyedEntry)
    for _ in range(200):
        market.publish(50)
        market.group.run(0.005)
    assert kept_of(KeyedEntry) <= before + 5, "of ten thousand"
    assert len(market.viewers[0].numbers()) == market.count
    assert not looked
    assert {viewer.sender.load().messages for viewer in market.viewers[1:]} == {5}
    assert not any(viewer.host.closed for viewer in market.viewers)


@pytest.mark.parametrize(("keys", "size"), [(10_000, 20), (10, 1024 * 1024)])
def test_limits_when_more_values_wait_than_a_queue_may_hold_are_not_for_them(keys, size):
    market = Market(1, keys=keys, limits=DEFAULT_LIMITS)
    (viewer,) = market.viewers
    viewer.peer.room = 0
    for _ in range(3):
        market.publish(keys, size)
        market.group.run(1.0)
    assert viewer.sender.load().messages == keys
    assert viewer.sender.state is OVERLOADED
    viewer.drain()
    assert viewer.numbers() == [*range(2 * keys, 3 * keys)]
    assert market.fanout.statistics().members == 1


def test_limits_when_a_joiner_with_many_values_lags_for_a_while_are_not_for_them():
    market = Market(0, keys=10_000)
    market.publish(10_000)
    market.group.run(60.0)
    viewer = Viewer(market.group, Peer(room=5000), limits=DEFAULT_LIMITS)
    viewer.sender.follow(market.fanout, latest=True)
    for _ in range(20):
        market.group.run(2.0)
        viewer.give(5000)
    assert viewer.sender.state is OVERLOADED
    viewer.drain()
    assert sorted(viewer.numbers()) == [*range(10_000)]


def test_age_when_keys_change_rarely_is_the_time_in_which_a_viewer_gets_nothing():
    market = Market(1, limits=DEFAULT_LIMITS)
    (viewer,) = market.viewers
    viewer.peer.room = 0
    market.publish(5, 100)
    for _ in range(30):
        market.group.run(2.0)
        viewer.give(10)
    assert viewer.sender.state is OVERLOADED
    market.group.run(4.0)
    assert viewer.sender.state is SOFT_LIMIT
    viewer.give(10)
    market.group.run(0.1)
    assert viewer.sender.state is OVERLOADED
    market.group.run(8.0)
    assert viewer.sender.statistics().close_reason is CloseReason.HARD_LIMIT


def test_age_when_values_are_superseded_all_the_time_is_that_too():
    market = Market(1, limits=DEFAULT_LIMITS)
    (viewer,) = market.viewers
    viewer.peer.room = 0
    for _ in range(79):
        market.publish(5)
        market.group.run(0.1)
    assert viewer.sender.state is SOFT_LIMIT
    market.publish(5)
    market.group.run(0.3)
    assert viewer.sender.statistics().close_reason is CloseReason.HARD_LIMIT


def test_age_when_one_large_value_takes_long_is_not_that_of_the_value():
    market = Market(1, limits=DEFAULT_LIMITS)
    (viewer,) = market.viewers
    viewer.peer.room = 10
    market.publish(1, 400)
    for _ in range(30):
        market.group.run(1.0)
        viewer.give(10)
    assert viewer.sender.state is OVERLOADED


def test_limits_when_messages_without_a_key_wait_are_for_these():
    market = Market(1, keys=100, limits=Limits.parse("0,10,4s"))
    (viewer,) = market.viewers
    viewer.peer.room = 0
    market.publish(100)
    market.group.run(0.1)
    for _ in range(9):
        market.log.append(frame(LOG, DATA, 0), DATA, market.group.now())
        market.group.run(0.1)
    assert viewer.sender.state is OVERLOADED
    market.log.append(frame(LOG, DATA, 0), DATA, market.group.now())
    market.group.run(0.1)
    assert viewer.sender.state is SOFT_LIMIT


def test_age_when_a_message_without_a_key_waits_is_how_long():
    market = Market(1, limits=Limits.parse("0,0,4s"))
    (viewer,) = market.viewers
    viewer.peer.room = 0
    for _ in range(5):
        market.log.append(frame(LOG, DATA, 0, 100), DATA, market.group.now())
    for _ in range(5):
        market.publish(5)
        market.group.run(1.0)
        viewer.give(5)
    assert viewer.sender.state is SOFT_LIMIT


def test_relieve_when_values_wait_leaves_them():
    market = Market(1)
    (viewer,) = market.viewers
    viewer.peer.room = 0
    market.publish(5)
    market.log.append(frame(LOG, DATA, 5), DATA, market.group.now())
    market.group.run(0.1)
    viewer.sender.relieve("memory")
    viewer.drain()
    assert viewer.numbers() == [0, 1, 2, 3, 4]
    check_accounts(viewer)


def test_thin_when_many_values_wait_leaves_own_messages_that_have_room():
    market = Market(1, keys=100, limits=Limits.parse("0,10"))
    (viewer,) = market.viewers
    viewer.sender.set_policy(LivePolicy())
    viewer.peer.room = 0
    market.publish(100)
    market.group.run(0.1)
    for number in range(10):
        viewer.sender.send(frame(OWN, DATA, number))
    viewer.drain()
    assert viewer.numbers(OWN) == [5, 6, 7, 8, 9], "down to the low mark"
    assert viewer.numbers() == [*range(100)]


def test_close_after_flush_when_more_values_wait_than_a_queue_may_hold_sends_them():
    market = Market(1, keys=10_000, limits=DEFAULT_LIMITS)
    (viewer,) = market.viewers
    viewer.peer.room = 0
    market.publish(10_000)
    market.group.run(3.0)
    viewer.sender.close_after_flush()
    market.group.run(1.0)
    viewer.drain()
    assert viewer.sender.statistics().close_reason is CloseReason.FINISHED
    assert len(viewer.numbers()) == 10_000


def test_account_when_values_were_superseded_says_so_in_words_and_in_the_ledger():
    market = Market(1)
    (viewer,) = market.viewers
    viewer.peer.room = 0
    market.publish(5)
    market.group.run(0.1)
    market.publish(10)
    assert "10 values superseded by newer ones" in viewer.sender.why()
    assert viewer.sender.forecast() is None
    viewer.drain()
    assert viewer.sender.statistics().dropped[DropReason.SUPERSEDED].of(DATA) == 10
    (entry,) = [entry for entry in viewer.sender.ledger() if entry.kind is LedgerKind.DROPS]
    assert entry.why == "superseded by a newer value: 10 data"


def test_why_of_a_viewer_of_values_says_how_far_behind_it_is_and_nothing_of_pictures():
    market = Market(1)
    (viewer,) = market.viewers
    market.publish(5)
    market.group.run(0.1)
    viewer.peer.room = 0
    for _ in range(8):
        market.publish(5)
        market.group.run(1.0)
        viewer.give(10)
    why = viewer.sender.why()
    assert " s behind" in why
    assert "pictures" not in why


def test_policy_when_it_refuses_data_leaves_values_to_wait():
    market = Market(1)
    (viewer,) = market.viewers
    viewer.sender.set_policy(DropDroppable())
    viewer.peer.room = 0
    market.publish(2)
    market.group.run(0.1)
    assert viewer.sender.state is OVERLOADED
    market.publish(5)
    market.log.append(frame(LOG, DATA, 7), DATA, market.group.now())
    viewer.drain()
    assert viewer.numbers() == [2, 3, 4, 5, 6]
    check_accounts(viewer)


def test_switch_when_a_log_has_keys_is_refused():
    market, other = Market(1), Published(ManualGroup())
    other.publish(KEY)
    fanout = Fanout(other.log, market.group)
    with pytest.raises(LocalProtocolError, match="log with keys"):
        market.viewers[0].sender.switch(Hop(fanout, other.log.tail, ()))


def test_flight_when_a_log_with_keys_is_followed_ends_and_says_why():
    market = Market(1, kind=RecordedViewer)
    (viewer,) = market.viewers
    assert not viewer.sender.recording
    flight, _, _ = check_flight(viewer.rows)
    assert flight.rows[-1].reason == "keys"
    market.publish(20)
    market.group.run(0.1)
    assert viewer.numbers() == list(range(20)), "it goes on as any viewer, in the cohort"
    assert market.fanout.statistics().members == 1
    check_accounts(viewer)
