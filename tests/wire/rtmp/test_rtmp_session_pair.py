"""Our client and our server against each other, and the server against octets that nobody planned."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rtmp_session_kit import SPLITS, Pair, ScriptedClient, metadata_of

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.chunk.writer import ChunkWriter, serialise
from flowctl.wire.rtmp.events import (
    ConnectRequested,
    HandshakeDone,
    MetadataReceived,
    PlayRequested,
    PlayStarted,
    PublishRequested,
    PublishStarted,
    StreamClosed,
    StreamEnded,
)
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.server.replies import COURTESIES
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.session_config import ClientSessionConfig, ServerSessionConfig
from flowctl.wire.rtmp.states import ClientState, ConnectionState, StreamState
from flowctl.wire.rtmp.wire import Message

AUDIO, VIDEO = 8, 9


@pytest.fixture(params=SPLITS, ids=lambda split: split.__name__)
def split(request):
    """How octets are handed over: whole, one at a time, or at random places."""
    return request.param


def publishing(split=None, **settings_of):
    """Return a pair whose client is publishing."""
    pair = Pair(**settings_of) if split is None else Pair(split=split, **settings_of)
    pair.client.publish()
    pair.client.connect("rtmp://example.com/live/room?k=v")
    pair.run()
    assert pair.client_events[-1] == PublishStarted(1)
    return pair


def playing(split=None, **settings_of):
    """Return a pair whose client is playing."""
    pair = Pair(**settings_of) if split is None else Pair(split=split, **settings_of)
    pair.client.play()
    pair.client.connect("rtmp://example.com/live/room?k=v")
    pair.run()
    assert pair.client_events[-1] == PlayStarted(1)
    return pair


@pytest.mark.parametrize("style", ["simple", "digest"])
def test_client_and_server_agree_on_the_way_to_publishing(split, style):
    """Handshake in both styles, connect and publish: both ends report the same address and stream."""
    pair = publishing(split, client=ClientSessionConfig(handshake=style))
    handshake, connect, publish = pair.server_events
    assert handshake == HandshakeDone(style)
    assert isinstance(connect, ConnectRequested)
    assert isinstance(publish, PublishRequested)
    assert (connect.url.app, connect.caps_ex, publish.name, publish.url.path) == ("live", 13, "room", "live/room")
    assert publish.query == {"k": "v"}
    assert pair.server.stream_state(1) is StreamState.PUBLISHING


def test_media_of_the_client_reaches_the_server(split):
    pair = publishing(split)
    octets = pair.client.send_tag(18, 0, amf0.encode("onMetaData", {"width": 640.0}))
    stamps = [0, 0xFFFFFF - 1, 0xFFFFFF, 0xFFFFFFFF, 20]
    octets += b"".join(pair.client.send_tag(9, at, b"\x17\1" + bytes(300)) for at in stamps)
    octets += pair.client.send_tag(8, 5, b"\xaf\1x")
    del pair.server_events[:]
    for piece in split(octets):
        pair.up(piece)
    metadata, *media = pair.server_events
    assert isinstance(metadata, MetadataReceived)
    assert metadata_of(metadata) == {"width": 640.0}
    assert [message.timestamp for message in media] == [*stamps, 5]
    assert [message.type_id for message in media] == [VIDEO] * 5 + [AUDIO]


def test_media_of_a_shared_log_reaches_the_client_between_replies(split):
    pair = playing(split)
    del pair.client_events[:]
    expected = []
    for number in range(20):
        message = Message(6, 40 * number, VIDEO, 1, bytes([number]) * 70_000)
        expected.append(message)
        octets = serialise(VIDEO, 1, message.timestamp, message.payload, 6, 65536)
        if number % 3 == 0:
            pair.server._ping(0.0)
            octets = pair.server.data_to_send() + octets
        for piece in split(octets) if number == 0 else [octets]:
            pair.client_events += pair.client.receive(piece, 0.0)
    assert pair.client_events == expected


def test_client_that_closes_is_let_go(split):
    pair = publishing(split)
    pair.client.close_stream()
    pair.run()
    assert [event for event in pair.server_events if isinstance(event, StreamClosed)] == [
        StreamClosed(1, "FCUnpublish")
    ]
    pair.client.play("other")
    pair.run()
    assert isinstance(pair.server_events[-1], PlayRequested)
    assert pair.client.state is ClientState.ACTIVE


def test_error_of_the_peer_is_explained_to_it(split):
    limits = WireLimits(commands_per_second=8)
    pair = publishing(split, server=ServerSessionConfig(limits=limits))
    octets = b"".join(pair.client.send_message(commands.command("_checkbw", number, None)) for number in range(10, 20))
    with pytest.raises(RemoteProtocolError):
        pair.up(octets)
    assert pair.server.state is ConnectionState.CLOSED
    events = pair.client.receive(pair.server.data_to_send(), 0.0)
    assert "commands_per_second" in events[-2].description
    assert events[-1] == StreamEnded(1, "NetStream.Failed")


def test_acknowledgements_flow_while_publishing():
    """10 MB at the default windows: a handful of acknowledgements, the last one close to the end."""
    pair = publishing()
    for number in range(100):
        pair.up(pair.client.send_tag(9, number, bytes(100_000)))
        pair.client.receive(pair.server.data_to_send(), 0.0)
    behind = pair.server.bytes_received - pair.client.last_acknowledged_bytes
    assert 0 <= behind < 2_500_000


# ---------------------------------------------------------------------------------- octets nobody planned


def outcome(client, octets, sizes):
    """Feed `octets` in pieces of `sizes` and answer requests; "ok", or the code of the error that ended it.

    Any exception but RemoteProtocolError fails the test, and so does memory beyond the limits.
    """
    session = client.session
    at = 0
    try:
        for size in [*sizes, len(octets)]:
            for event in session.receive(octets[at : at + size], client.now):
                answer(session, event)
            at += size
            session.resume(client.now)
            assert session._reader.unfinished_bytes <= session._config.limits.unfinished_bytes
            assert session.held_bytes <= session._config.paused_input_bytes
            assert len(session._out or b"") <= session._config.pending_output_bytes
    except RemoteProtocolError as error:
        assert session.closed
        return error.code
    return "ok"


def answer(session, event):
    if isinstance(event, ConnectRequested) and session.state is ConnectionState.DECIDING:
        session.accept_connect()
    elif isinstance(event, PublishRequested) and session.stream_state(event.stream_id) is StreamState.PUBLISH_DECIDING:
        session.accept_publish(event.stream_id)
    elif isinstance(event, PlayRequested) and session.stream_state(event.stream_id) is StreamState.PLAY_DECIDING:
        session.accept_play(event.stream_id)


def in_state(state):
    client = ScriptedClient()
    if state != "connecting":
        getattr(client, state)()
    return client


STATES = st.sampled_from(["connecting", "connect", "publish", "play"])
SIZES = st.lists(st.integers(1, 64), max_size=12)


@settings(max_examples=150, deadline=None)
@given(STATES, st.binary(max_size=600), SIZES)
def test_random_octets_raise_nothing_but_remote_errors(state, octets, sizes):
    assert isinstance(outcome(in_state(state), octets, sizes), str)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=8), st.sampled_from(["live", "room", "../x"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
NAMES = st.sampled_from([*ServerSession.rules, *COURTESIES, "x"])


@st.composite
def messages(draw):
    """Draw a command with any arguments, or a message of any type with any short body."""
    msid = draw(st.integers(0, 2))
    if draw(st.booleans()):
        values = draw(st.lists(VALUES, max_size=4))
        return commands.command(draw(NAMES), draw(st.integers(0, 3)), *values, stream_id=msid)
    type_id = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 9, 15, 16, 17, 18, 19, 20, 22, 99]))
    return Message(
        draw(st.integers(3, 6)), draw(st.integers(0, 2**32 - 1)), type_id, msid, draw(st.binary(max_size=40))
    )


@settings(max_examples=200, deadline=None)
@given(STATES, st.lists(messages(), max_size=8), SIZES)
def test_random_messages_raise_nothing_but_remote_errors(state, script, sizes):
    octets = b"".join(
        serialise(message.type_id, message.msid, message.timestamp, message.payload, message.csid, 128)
        for message in script
    )
    assert isinstance(outcome(in_state(state), octets, sizes), str)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 40))
def test_one_changed_octet_raises_nothing_but_remote_errors(position, value, count):
    writer = ChunkWriter()
    script = [
        commands.command("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live"}),
        commands.command("createStream", 2, None),
        commands.command("publish", 3, None, "room", "live", stream_id=1),
        Message(6, 0, VIDEO, 1, b"\x17\0" + bytes(200)),
        commands.command("FCUnpublish", 4, None, "room"),
        commands.command("deleteStream", 5, None, 1.0),
    ]
    octets = bytearray(b"".join(map(writer.write, script)))
    octets[position % len(octets)] = value
    rng = random.Random(position)
    assert isinstance(outcome(ScriptedClient(), bytes(octets), [rng.randint(1, 50) for _ in range(count)]), str)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=4000), SIZES)
def test_random_octets_from_the_start_raise_nothing_but_remote_errors(octets, sizes):
    assert isinstance(outcome(ScriptedClient(handshake=False), b"\3" + octets, sizes), str)


@settings(max_examples=150, deadline=None)
@given(st.lists(messages(), max_size=8), st.binary(max_size=60))
def test_client_survives_any_server(script, octets):
    pair = playing()
    data = b"".join(
        serialise(message.type_id, message.msid, message.timestamp, message.payload, message.csid, 65536)
        for message in script
    )
    try:
        pair.client.receive(data + octets, 0.0)
    except RemoteProtocolError:
        assert pair.client.state is ClientState.CLOSED
    else:
        assert len(pair.client._out or b"") <= pair.client._config.pending_output_bytes


def test_memory_of_a_session_is_bounded_under_noise():
    client = ScriptedClient(ServerSessionConfig(control_messages_per_second=0, paused_input_bytes=64 * 1024))
    client.play()
    noise = b"".join(serialise(99, 0, 0, bytes(100), 3, 65536) for _ in range(1000))
    client.octets(noise)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            client.octets(noise)
        with pytest.raises(RemoteProtocolError, match="paused_input_bytes"):
            client.octets(noise * 10, control_only=True)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Each held message is an object of its own besides its octets, which is what the overhead per message counts.
    assert grown < 3 * 64 * 1024
