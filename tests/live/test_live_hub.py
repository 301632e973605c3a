"""The hub's books: who publishes and views what, what they were sent and spared, and that nothing is left over."""

from __future__ import annotations

import pytest
from live_kit import World, key

from flowctl.core.flow.limits import Limits
from flowctl.errors import BusyError, LimitExceededError
from flowctl.live.config import LiveConfig, SecondPublisher
from flowctl.live.hub import Hub
from flowctl.live.owner import Owner
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
    """The refusal goes to whoever asks; the operator is told by `publisher_of`."""
    hub, _ = make_hub()
    hub.publish("live/a", Member("192.0.2.7"))
    with pytest.raises(BusyError) as caught:
        hub.publish("live/a", Member())
    assert str(caught.value) == "stream live/a is being published already"
    assert "192.0.2.7" not in repr(caught.value) + str(caught.value.hint)
    assert (hub.publisher_of("live/a"), hub.publisher_of("live/b")) == (("192.0.2.7", 1), None)


OWNERS = [
    (Owner("192.0.2.1"), Owner("192.0.2.1"), True),
    (Owner("192.0.2.1"), Owner("192.0.2.2"), False),
    (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.2", key=b"k"), True),
    (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.2", key=b"l"), False),
    (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.2"), False),
    (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.1"), False),
    (Owner("192.0.2.1", key=b"k"), Owner("192.0.2.1", key=b"l"), False),
    (Owner("192.0.2.1"), Owner("192.0.2.1", key=b"k"), True),
    (Owner("192.0.2.1", "anna"), Owner("192.0.2.2", "anna"), True),
    (Owner("192.0.2.1", "anna", b"k"), Owner("192.0.2.1", "berta", b"k"), False),
    (Owner("192.0.2.1"), Owner("192.0.2.1", "berta"), False),
]


@pytest.mark.parametrize(("first", "second", "same"), OWNERS)
def test_publish_when_the_owner_is_back_replaces_a_silent_predecessor_of_its_own(first, second, same):
    """By user, else by key or address; one that still sends is not replaced, and a stranger is refused either way."""
    hub, group = make_hub(publishers_per_address=1)
    old, new = Member(first.address), Member(second.address)
    stream = hub.publish("live/a", old, first)
    group.run(0.9)
    with pytest.raises((BusyError, LimitExceededError)):
        hub.publish("live/a", new, second)
    group.run(0.1)
    if not same:
        with pytest.raises((BusyError, LimitExceededError)):
            hub.publish("live/a", new, second)
        assert stream.publisher is old
        return
    assert hub.publish("live/a", new, second).publisher is new
    assert old.told == ["replaced"]
    hub.unpublish(stream, old, grace=True)
    assert stream.publisher is new
    hub.unpublish(stream, new, grace=False)
    assert hub.streams() == {}


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize(("first", "second", "same"), OWNERS)
def test_publish_when_the_grace_runs_is_for_the_owner_alone(first, second, same, viewed):
    """A stranger does not get a name whose publisher's connection has just broken; afterwards anybody does."""
    hub, group = make_hub(return_grace_s=3.0)
    old, new, viewer = Member(first.address), Member(second.address), Member("192.0.2.99")
    stream = hub.publish("live/a", old, first)
    if viewed:
        hub.view("live/a", viewer)
    hub.unpublish(stream, old, grace=True)
    group.run(2.9)
    if same:
        assert hub.publish("live/a", new, second).publisher is new
        assert viewer.told == []
        return
    with pytest.raises(BusyError, match="is kept for its publisher"):
        hub.publish("live/a", new, second)
    group.run(0.2)
    assert hub.publish("live/a", new, second).publisher is new
    assert viewer.told == (["ended", "published"] if viewed else [])


def test_unpublish_when_an_address_has_broken_off_many_keeps_as_many_names_as_it_may_publish():
    """Who publishes, breaks off and publishes another name, again and again, does not hold them all."""
    hub, group = make_hub(publishers_per_address=2, return_grace_s=3.0)
    names = [f"live/{number}" for number in range(6)]
    for name in names:
        publisher = Member("192.0.2.1")
        hub.unpublish(hub.publish(name, publisher), publisher, grace=True)
    assert [hub.is_published(name) for name in names] == [True, True, False, False, False, False]
    publisher = Member("192.0.2.1")
    hub.unpublish(hub.publish(names[0], publisher), publisher, grace=False)  # back, and gone for good
    publisher = Member("192.0.2.1")
    hub.unpublish(hub.publish(names[2], publisher), publisher, grace=True)
    assert [hub.is_published(name) for name in names[:3]] == [False, True, True]
    group.run(3.1)
    assert (hub.streams(), hub._book._kept_for) == ({}, {})


@pytest.mark.parametrize("policy", list(SecondPublisher))
def test_names_when_kept_and_taken_up_are_forgotten(policy):
    """However a name that is kept ends or is taken up, nothing of it stays in the books."""
    hub, group = make_hub(second_publisher=policy)
    hub.view("live/a", Member("192.0.2.3"))
    for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2"):
        publisher = Member(address)
        if policy is SecondPublisher.REFUSE and address == "192.0.2.2":
            group.run(3.1)
        hub.unpublish(hub.publish("live/a", publisher), publisher, grace=True)
        assert hub._book._kept_for == {address: 1}
    group.run(3.1)
    assert hub._book._kept_for == {}


def test_publish_when_the_policy_lets_others_in_gives_a_name_in_grace_to_anybody():
    """With replace and standby the newcomer would have had it anyway."""
    for policy in (SecondPublisher.REPLACE, SecondPublisher.STANDBY):
        hub, _ = make_hub(second_publisher=policy)
        first, second = Member("192.0.2.1"), Member("192.0.2.2")
        hub.unpublish(hub.publish("live/a", first), first, grace=True)
        assert hub.publish("live/a", second).publisher is second


def test_standby_when_too_many_are_refused():
    """Each of them is a connection whose media is read for nothing."""
    hub, _ = make_hub(second_publisher=SecondPublisher.STANDBY, publishers_per_address=0)
    stream = hub.publish("live/a", Member())
    for _ in range(8):
        hub.publish("live/a", Member())
    with pytest.raises(LimitExceededError, match="standby_publishers is 9, the limit is 8"):
        hub.publish("live/a", Member())
    assert len(stream.standby) == 8


def test_publish_when_the_owner_is_back_with_another_address_of_its_ipv6_network_gets_its_name():
    """Hosts change their IPv6 addresses as they like; another /64 is another's."""
    world = World()
    world.publisher(address="2001:db8:0:1::1").vanish()
    assert world.connect("2001:db8:0:2::1").publish().codes == [commands.PUBLISH_BAD_NAME]
    again = world.publisher(address="2001:db8:0:1::2")
    assert again.codes == []
    (stream,) = world.hub.streams()
    assert stream.publisher is again.live


def test_owner_when_made_of_a_query_keeps_no_secret():
    """Of the secrets in a query nothing but a digest is kept; pairs that are no secrets say nothing about an owner."""
    owner = Owner.of("192.0.2.1", None, {"key": "canary", "name": "x"})
    assert "canary" not in repr(owner)
    assert owner.key == Owner.of("192.0.2.2", None, {"name": "y", "key": "canary"}).key != b""
    assert Owner.of("192.0.2.1", None, {"name": "x", "key": ""}).key == b""


def test_unpublish_when_repeated_or_foreign_changes_nothing():
    """Ending a publication that is over, or never was, leaves the books alone."""
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


def test_publisher_when_it_has_two_streams_ends_each_alone():
    """A publication is a pair of stream and connection: ending one says nothing about the other."""
    hub, _ = make_hub()
    publisher = Member()
    one, two = hub.publish("live/1", publisher), hub.publish("live/2", publisher)
    hub.unpublish(one, publisher, grace=False)
    assert (None, publisher) == (one.publisher, two.publisher)
    hub.unpublish(two, publisher, grace=False)
    assert two.publisher is None
    assert hub.streams() == {}


def test_standby_when_the_first_goes_takes_over_in_the_order_of_coming():
    """Standbys queue; one that leaves while waiting is forgotten."""
    hub, _ = make_hub(second_publisher=SecondPublisher.STANDBY)
    first, second, third = Member(), Member(), Member()
    stream = hub.publish("live/a", first)
    hub.publish("live/a", second)
    hub.publish("live/a", third)
    hub.unpublish(stream, second, grace=False)
    hub.unpublish(stream, first, grace=False)
    assert stream.publisher is third
    assert stream.standby == []


def test_replace_when_the_old_one_leaves_late_does_not_end_the_new_one():
    """The replaced publisher's own end finds that the stream is no longer its."""
    hub, _ = make_hub(second_publisher=SecondPublisher.REPLACE)
    old, new, viewer = Member(), Member(), Member()
    stream = hub.publish("live/a", old)
    hub.view("live/a", viewer)
    hub.publish("live/a", new)
    hub.unpublish(stream, old, grace=False)
    assert stream.publisher is new
    assert (old.told, viewer.told) == (["replaced"], [])


def test_grace_when_nobody_views_runs_too_and_leaves_nothing():
    """The name is kept for its owner, viewers or not; after that nothing of it is left."""
    hub, group = make_hub()
    publisher = Member()
    stream = hub.publish("live/a", publisher)
    hub.unpublish(stream, publisher, grace=True)
    assert hub.is_published("live/a")
    group.run(3.0)
    assert hub.streams() == {}


def test_grace_when_nobody_views_keeps_no_media():
    """All that is kept for the owner is the name: connections that publish and break are no way to fill memory."""
    world = World()
    publisher = world.publisher()
    publisher.video(0, key(b"k"))
    (stream,) = world.hub.streams()
    assert stream.wires[0].log.cached is not None
    publisher.vanish()
    assert world.hub.is_published("live/room")
    assert stream.wires[0].log.cached is None


def test_grace_when_zero_tells_viewers_at_once_and_otherwise_after_it():
    """The grace time is a setting; 0 turns it off."""
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
