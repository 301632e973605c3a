"""Names that commands publish: nobody else gets one, and a pass lets its command do just what it is for."""

from __future__ import annotations

import pytest
from live_kit import World, config

from flowctl.live.access.passes import PASS_PARAMETER, Passes
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile
from flowctl.live.settings.renditions import RenditionNames
from flowctl.live.settings.runs import RunRule
from flowctl.wire.rtmp.events import Rejected

RULES = (RunRule(on="live/*", command=("/bin/sh",), publish=("{app}/{stream}_720",)),)
CLOSED = StreamAccess(
    publish_auth=(Proof.TOKEN,), play_auth=(Proof.TOKEN,), token_secrets=SecretFile("key", (b"0123456789abcdef",))
)


def refusal_of(world, peer):
    world.run()
    return peer.has(Rejected)


def publishes(world, name, publisher):
    stream = world.hub.find_stream(name)
    return stream is not None and stream.publisher is publisher.live


@pytest.mark.parametrize("query", ["", f"?{PASS_PARAMETER}=guessed", f"?{PASS_PARAMETER}="])
def test_name_of_a_command_when_a_stranger_publishes_it_is_refused(query):
    world = World(config(run=RULES))
    stranger = world.connect().publish(f"live/bob_720{query}")
    assert refusal_of(world, stranger)
    assert not world.hub.is_published("live/bob_720")
    other = world.connect().publish("live/bob_721")
    world.run()
    assert publishes(world, "live/bob_721", other)


def test_pass_when_it_is_brought_lets_a_command_publish_its_names_and_view_its_stream_alone():
    world = World(config(run=RULES, access=CLOSED))
    token = world.hub.gate.passes.give("live/bob", ["live/bob_720"])
    command = world.connect().publish(f"live/bob_720?{PASS_PARAMETER}={token}")
    viewer = world.connect().play(f"live/bob?{PASS_PARAMETER}={token}")
    world.run()
    assert publishes(world, "live/bob_720", command)
    assert world.hub.is_viewed("live/bob")
    assert not refusal_of(world, viewer)
    for wrong in (
        world.connect().publish(f"live/ann_720?{PASS_PARAMETER}={token}"),
        world.connect().publish(f"live/bob?{PASS_PARAMETER}={token}"),
        world.connect().play(f"live/bob_720?{PASS_PARAMETER}={token}"),
    ):
        assert refusal_of(world, wrong)
    assert viewer.live.is_node  # no edge is told to it, and it counts as no viewer
    world.hub.gate.passes.revoke(token)
    assert refusal_of(world, world.connect().play(f"live/bob?{PASS_PARAMETER}={token}"))


def test_command_when_a_stranger_has_had_the_name_since_before_the_settings_changed_gets_it():
    world = World(config())
    stranger = world.connect().publish("live/bob_720")
    world.run()
    assert publishes(world, "live/bob_720", stranger)
    world.hub.configure(config(run=RULES))
    token = world.hub.gate.passes.give("live/bob", ["live/bob_720"])
    command = world.connect().publish(f"live/bob_720?{PASS_PARAMETER}={token}")
    world.run()
    assert publishes(world, "live/bob_720", command)
    assert stranger.connection.ended is not None


def test_streams_of_commands_when_they_are_many_count_for_no_address():
    world = World(config(run=RULES, publishers_per_address=1))
    for name in ("live/ann", "live/bob", "live/eve"):
        token = world.hub.gate.passes.give(name, [f"{name}_720"])
        command = world.connect().publish(f"{name}_720?{PASS_PARAMETER}={token}")
        world.run()
        assert publishes(world, f"{name}_720", command)
    own = world.connect().publish("live/own")
    world.run()
    assert publishes(world, "live/own", own)


def test_stream_of_a_command_when_it_is_a_rendition_joins_the_set_of_its_source():
    """It is of the publisher whose stream it is made from, though it comes from another address."""
    rules = (RunRule(on="live/*_1080", command=("/bin/sh",), publish=("{app}/{base}_720",)),)
    world = World(config(run=rules, renditions=RenditionNames(suffixes=("_1080", "_720"))))
    world.publisher("live/bob_1080", address="198.51.100.1")
    token = world.hub.gate.passes.give("live/bob_1080", ["live/bob_720"])
    world.publisher(f"live/bob_720?{PASS_PARAMETER}={token}")
    face = world.hub.find_stream("live/bob")
    assert {item.name for item in world.hub.renditions.find(face).renditions()} == {"1080", "720"}


def test_passes_when_they_are_kept_hold_no_token():
    passes = Passes()
    token = passes.give("live/a", ["live/b"])
    assert token not in str(passes._passes)
