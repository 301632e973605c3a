"""Messengers with keys: what goes between them is encrypted, and only those that are allowed come in."""

from __future__ import annotations

import asyncio

import pytest

from flowctl.errors import BrokenError, LocalProtocolError
from flowctl.nodes.messenger.message import Destination
from flowctl.nodes.messenger.messenger import Messenger
from flowctl.wire.zmtp.keys import KeyPair

WAIT_S = 20.0


async def test_messages_when_a_sender_is_not_allowed_do_not_arrive(loop_factory, tmp_path):
    own, member, stranger = (KeyPair.generate() for _ in range(3))
    place = f"ipc://{tmp_path}/m"
    got: list[bytes] = []
    async with (
        Messenger(identity="own", keys=own, allow={member.public}.__contains__) as receiver,
        Messenger(identity="member", keys=member) as friend,
        Messenger(identity="stranger", keys=stranger) as other,
        Messenger(identity="plain") as plain,
    ):
        receiver.listen_for_connection(
            Destination("own", place), "own", lambda _, message: got.append(message.routing_id)
        )
        there = Destination("own", place, own.public)
        strange = other.make_connection(there)
        bare = plain.make_connection(Destination("own", place))
        refused = [
            asyncio.create_task(item.deliver(to, "let me in", deadline=0.5))
            for item, to in ((other, strange), (plain, bare))
        ]
        await asyncio.wait_for(friend.deliver(friend.make_connection(there), "hello"), WAIT_S)
        for task in refused:
            with pytest.raises(BrokenError):
                await task
        assert other.pending_count(strange) == 0
        with pytest.raises(LocalProtocolError, match="no key of own"):
            friend.make_connection(Destination("own", place + "2"))
        with pytest.raises(LocalProtocolError, match="no keys of its own"):
            plain.make_connection(Destination("own", place + "2", own.public))
    assert got == [b"member"]


async def test_messages_when_the_listener_has_another_key_do_not_leave(loop_factory, tmp_path):
    own, member, wrong = (KeyPair.generate() for _ in range(3))
    place = f"ipc://{tmp_path}/m"
    async with Messenger(identity="own", keys=own) as receiver, Messenger(identity="member", keys=member) as sender:
        receiver.listen_for_connection(Destination("own", place), "own")
        to = sender.make_connection(Destination("own", place, wrong.public))
        with pytest.raises(BrokenError):
            await sender.deliver(to, "hello", deadline=0.3)
        assert receiver.statistics().received == 0


async def refused_once(messenger: Messenger) -> None:
    async with asyncio.timeout(WAIT_S):
        while not messenger.statistics().refused:  # noqa: ASYNC110  (nothing tells of a refusal)
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("forgotten", [False, True])
async def test_identity_when_another_key_takes_it_stays_with_the_first(loop_factory, tmp_path, forgotten):
    own, member, second, third = (KeyPair.generate() for _ in range(4))
    place = f"ipc://{tmp_path}/m"
    there = Destination("own", place, own.public)
    got: list[tuple[bytes, bytes]] = []
    async with (
        Messenger(identity="own", keys=own, max_peers=1 if forgotten else 8) as receiver,
        Messenger(identity="member", keys=member) as friend,
    ):
        receiver.listen_for_connection(
            Destination("own", place), "own", lambda _, message: got.append((message.routing_id, message.message))
        )
        to = friend.make_connection(there)
        await asyncio.wait_for(friend.deliver(to, "one"), WAIT_S)
        if forgotten:
            async with Messenger(identity="third", keys=third) as other:
                await asyncio.wait_for(other.deliver(other.make_connection(there), "room"), WAIT_S)
        async with Messenger(identity="member", keys=second) as thief:
            stolen = thief.make_connection(there)
            thief.send_message(stolen, "stolen")
            await refused_once(receiver)
            assert thief.pending_count(stolen) == 1
        if forgotten:  # nothing is known of its connection then, which is read no more
            friend.close_connection(to)
            to = friend.make_connection(there)
        await asyncio.wait_for(friend.deliver(to, "two"), WAIT_S)
    assert [item for item in got if item[0] == b"member"] == [(b"member", b"one"), (b"member", b"two")]


async def test_identity_when_a_key_has_a_name_is_that_name_alone(loop_factory, tmp_path):
    own, member = KeyPair.generate(), KeyPair.generate()
    place = f"ipc://{tmp_path}/m"
    there = Destination("own", place, own.public)
    names = {member.public: "member"}
    got: list[bytes] = []
    async with Messenger(identity="own", keys=own, allow=lambda key: names.get(key, False)) as receiver:
        receiver.listen_for_connection(
            Destination("own", place), "own", lambda _, message: got.append(message.routing_id)
        )
        async with Messenger(identity="chief", keys=member) as thief:
            stolen = thief.make_connection(there)
            thief.send_message(stolen, "obey")
            await refused_once(receiver)
            assert thief.pending_count(stolen) == 1
        assert receiver.statistics().peers == 0
        async with Messenger(identity="member", keys=member) as friend:
            await asyncio.wait_for(friend.deliver(friend.make_connection(there), "hello"), WAIT_S)
    assert got == [b"member"]


async def test_identity_when_its_owner_was_forgotten_is_not_given_to_another_key(loop_factory, tmp_path):
    """Room for one peer: each that comes makes it forget the last, but not whose the identity is."""
    own, owner, other, thief = (KeyPair.generate() for _ in range(4))
    place, got = f"ipc://{tmp_path}/m", []
    async with Messenger(identity="own", keys=own, max_peers=1) as receiver:
        receiver.listen_for_connection(Destination("own", place), "own", lambda _, message: got.append(message.message))

        async def say(identity: str, keys: KeyPair, text: str, deadline: float) -> None:
            async with Messenger(identity=identity, keys=keys) as sender:
                await sender.deliver(
                    sender.make_connection(Destination("own", place, own.public)), text, deadline=deadline
                )

        await say("x", owner, "first", WAIT_S)
        await say("y", other, "between", WAIT_S)
        with pytest.raises(BrokenError):
            await say("x", thief, "stolen", 1.5)
        await say("x", owner, "second", WAIT_S)
    assert got == [b"first", b"between", b"second"]


async def test_identity_when_two_keys_come_with_it_by_two_ways_is_of_the_first_before_it_has_spoken(
    loop_factory, tmp_path
):
    own, first, second = (KeyPair.generate() for _ in range(3))
    async with (
        Messenger(0, identity="own", ipc_dir=tmp_path, keys=own) as receiver,
        Messenger(identity="x", keys=first) as owner,
        Messenger(identity="x", keys=second) as thief,
    ):
        tcp, ipc, _ = receiver.endpoints()
        connection = owner.make_connection(Destination("own", tcp, own.public))
        while owner._connections[connection].link_to(b"") is None:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)
        with pytest.raises(BrokenError):
            await thief.deliver(thief.make_connection(Destination("own", ipc, own.public)), "stolen", deadline=0.5)
        await owner.deliver(connection, "hello", deadline=WAIT_S)
        assert receiver.statistics().received == 1


@pytest.mark.parametrize("verdict", [b"member", 1, object(), ValueError("no")])
async def test_newcomer_when_allow_returns_what_is_no_verdict_is_not_let_in(loop_factory, tmp_path, verdict):
    """As a coroutine, which is true whatever it would say; and one that raises."""
    own, member, reported = KeyPair.generate(), KeyPair.generate(), []
    place = Destination("own", f"ipc://{tmp_path}/m", own.public)

    def allow(_: bytes) -> object:
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    async with (
        Messenger(identity="own", keys=own, allow=allow, on_error=lambda *told: reported.append(told)) as receiver,
        Messenger(identity="member", keys=member) as sender,
    ):
        receiver.listen_for_connection(Destination("own", place.endpoint), "own")
        with pytest.raises(BrokenError):
            await sender.deliver(sender.make_connection(place), "hello", deadline=0.3)
        assert receiver.statistics().received == 0
    assert {where.partition(": ")[2] for where, _ in reported} == {"deciding on a new connection"}
