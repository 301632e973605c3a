"""The hub's books: who publishes and views what, what they were sent and spared, and that nothing is left over."""

from __future__ import annotations

import pytest
from live_kit import key

from flowctl.core.flow.limits import Limits
from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.config import LiveConfig, SecondPublisher
from flowctl.live.hub import Hub
from flowctl.testing import ManualClock, ManualGroup
from flowctl.wire.rtmp import commands

TIGHT = Limits.parse("8KiB,0", "32KiB,0", target_delay_ms=0)


class Member:
    """A publisher or viewer that notes what the hub tells it."""

    def __init__(self, address="192.0.2.1") -> None:
        self.peer = (address, 1)
        self.number = 1
        self.told = []

    def on_thread(self, callback, *args) -> None:
        callback(*args)

    def stream_ended(self, stream) -> None:
        self.told.append("ended")

    def stream_published(self, stream) -> None:
        self.told.append("published")

    def publish_replaced(self, stream) -> None:
        self.told.append("replaced")


def make_hub(**fields):
    group = ManualGroup(ManualClock())
    return Hub(LiveConfig(**fields), group.clock, group.call_later), group


def test_publish_when_name_is_taken_does_not_tell_a_stranger_by_whom():
    hub, _ = make_hub()
    hub.publish("live/a", Member("192.0.2.7"))
    with pytest.raises(BusyError) as caught:
        hub.publish("live/a", Member())
    assert str(caught.value) == "stream live/a is being published already"
    assert "192.0.2.7" not in repr(caught.value) + str(caught.value.hint)
    assert (hub.publisher_of("live/a"), hub.publisher_of("live/b")) == (("192.0.2.7", 1), None)


def test_publish_when_the_owner_is_back_replaces_a_silent_predecessor_and_a_name_is_kept_for_it():
    """One that sends is not replaced; within the grace time a stranger is refused, and viewers hear of nothing."""
    hub, group = make_hub(return_grace_s=3.0)
    old, new, last, stranger, viewer = (Member(), Member(), Member(), Member("192.0.2.2"), Member("192.0.2.99"))
    stream = hub.publish("live/a", old)
    hub.view("live/a", viewer)
    group.run(0.9)
    with pytest.raises(BusyError):
        hub.publish("live/a", new)
    group.run(0.1)
    assert hub.publish("live/a", new).publisher is new
    assert old.told == ["replaced"]
    hub.unpublish(stream, old, grace=True)
    hub.unpublish(stream, new, grace=True)
    with pytest.raises(BusyError, match="is kept for its publisher"):
        hub.publish("live/a", stranger)
    group.run(2.9)
    assert hub.publish("live/a", last).publisher is last
    assert viewer.told == []
    hub.unpublish(stream, last, grace=True)
    group.run(3.1)
    assert hub.publish("live/a", stranger).publisher is stranger
    assert viewer.told == ["ended", "published"]


def test_publish_when_the_owner_is_back_with_another_address_of_its_ipv6_network_gets_its_name(world):
    world.publisher(address="2001:db8:0:1::1").vanish()
    assert world.connect("2001:db8:0:2::1").publish().codes == [commands.PUBLISH_BAD_NAME]
    again = world.publisher(address="2001:db8:0:1::2")
    assert again.codes == []
    (stream,) = world.hub.streams()
    assert stream.publisher is again.live


def test_unpublish_when_repeated_or_foreign_changes_nothing():
    hub, _ = make_hub(publishers_per_address=1)
    first, other = Member(), Member("192.0.2.9")
    stream = hub.publish("live/a", first)
    hub.unpublish(stream, other, grace=False)
    assert stream.publisher is first
    hub.unpublish(stream, first, grace=False)
    hub.unpublish(stream, first, grace=False)
    hub.publish("live/a", first)
    with pytest.raises(LimitExceededError) as caught:
        hub.publish("live/b", first)
    assert (caught.value.limit, caught.value.value, caught.value.maximum) == ("publishers_per_address", 2, 1)


def test_replace_when_the_old_one_leaves_late_does_not_end_the_new_one():
    hub, _ = make_hub(second_publisher=SecondPublisher.REPLACE)
    old, new, viewer = Member(), Member(), Member()
    stream = hub.publish("live/a", old)
    hub.view("live/a", viewer)
    hub.publish("live/a", new)
    hub.unpublish(stream, old, grace=False)
    assert stream.publisher is new
    assert (old.told, viewer.told) == (["replaced"], [])


def test_grace_when_nobody_views_runs_too_and_leaves_nothing():
    hub, group = make_hub()
    publisher = Member()
    stream = hub.publish("live/a", publisher)
    hub.unpublish(stream, publisher, grace=True)
    assert hub.is_published("live/a")
    group.run(3.0)
    assert hub.streams() == {}


def test_grace_when_nobody_views_keeps_no_media(world):
    """All that is kept for the owner is the name: connections that publish and break are no way to fill memory."""
    publisher = world.publisher()
    publisher.video(0, key(b"k"))
    (stream,) = world.hub.streams()
    assert stream.wires[0].log.cached is not None
    publisher.vanish()
    assert world.hub.is_published("live/room")
    assert stream.wires[0].log.cached is None


def test_grace_when_zero_tells_viewers_at_once_and_otherwise_after_it():
    for grace_s, at_once in ((0.0, ["ended"]), (3.0, [])):
        hub, group = make_hub(return_grace_s=grace_s)
        publisher, viewer = Member(), Member()
        stream = hub.publish("live/a", publisher)
        hub.view("live/a", viewer)
        hub.unpublish(stream, publisher, grace=True)
        assert viewer.told == at_once
        group.run(3.1)
        assert viewer.told == ["ended"]
        hub.publish("live/a", publisher)
        assert viewer.told == ["ended", "published"]


def test_set_when_its_first_member_has_gone_before_it_is_published_takes_no_name():
    """It would be nobody's set, which keeps the name from the very owner of the members."""
    hub, _ = make_hub()
    first = Member()
    member = hub.publish("live/show_720", first)
    hub.unpublish(member, first, grace=False)
    with pytest.raises(BusyError, match="has gone meanwhile"):
        hub._compose("live/show", Member("renditions"), member)
    assert not hub.is_published("live/show")
    hub.publish("live/show", first)
