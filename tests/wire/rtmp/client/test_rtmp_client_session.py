"""The client session: what it says to a server and when, what it makes of the replies, and when it gives up."""

import pytest
from rtmp_session_kit import SPLITS, ScriptedServer

from flowctl.errors import ConfigError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.events import (
    Acknowledged,
    HandshakeDone,
    Ignored,
    PlayStarted,
    PublishStarted,
    ReconnectRequested,
    Rejected,
    StatusReceived,
    StreamEnded,
)
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import (
    EVENT_PING_REQUEST,
    EVENT_PING_RESPONSE,
    EVENT_STREAM_EOF,
    Acknowledgement,
    Command,
    SetChunkSize,
    UserControl,
    WindowAckSize,
    decode_message,
    encode_control,
)
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.states import ClientState
from flowctl.wire.rtmp.wire import Message

URL = "rtmp://example.com/live/room?token=t"
PUBLISH_START, PLAY_START = "NetStream.Publish.Start", "NetStream.Play.Start"


@pytest.fixture(params=SPLITS, ids=lambda split: split.__name__)
def publisher(request):
    """A session that wants to publish; each test runs with octets whole, one at a time, and at random splits."""
    server = ScriptedServer(split=request.param)
    server.session.publish()
    server.session.connect(URL)
    return server


@pytest.fixture(params=SPLITS, ids=lambda split: split.__name__)
def player(request):
    """A session that wants to play, in the same three ways."""
    server = ScriptedServer(split=request.param)
    server.session.play()
    server.session.connect(URL)
    return server


def eof(stream_id=1):
    return encode_control(UserControl(EVENT_STREAM_EOF, stream_id=stream_id))


# ------------------------------------------------------------------------------------------- going ahead


def test_chunk_size_and_connect_follow_the_handshake(publisher):
    assert publisher.shake() == [HandshakeDone("simple")]
    chunk_size, connect = publisher.last
    assert (chunk_size, connect.name, connect.transaction_id) == (SetChunkSize(65536), "connect", 1.0)
    assert connect.object["app"] == "live"
    assert connect.object["tcUrl"] == "rtmp://example.com/live"
    assert connect.object["flashVer"].startswith("FMLE/")
    assert connect.object["fourCcList"][:2] == ["av01", "vp09"]
    assert connect.object["audioFourCcInfoMap"]["Opus"] == 7.0
    assert connect.object["capsEx"] == 13.0
    assert "audioCodecs" not in connect.object


def test_player_tells_its_decoders(player):
    """Players say which codecs they take, as FFmpeg does."""
    player.shake()
    connect = player.last[-1]
    assert (connect.object["audioCodecs"], connect.object["videoCodecs"]) == (4071.0, 252.0)


@pytest.mark.parametrize("multitrack", [False, True])
def test_player_says_whether_it_reads_several_tracks(multitrack):
    server = ScriptedServer(ClientSessionConfig(multitrack=multitrack))
    server.session.play()
    server.session.connect(URL)
    server.shake()
    assert bool(int(server.last[-1].object["capsEx"]) & commands.CAPS_MULTITRACK) is multitrack
    assert int(server.last[-1].object["capsEx"]) & commands.CAPS_RECONNECT


def test_publisher_goes_ahead_reply_by_reply(publisher):
    assert publisher.connected() == []
    window, release, fc_publish, create = publisher.requests()
    assert window == WindowAckSize(2500000)
    assert [release.name, fc_publish.name, create.name] == ["releaseStream", "FCPublish", "createStream"]
    assert release.arguments == fc_publish.arguments == ("room?token=t",)
    assert publisher.call("_result", create.transaction_id, None, 7.0) == []
    (publish,) = publisher.requests()
    assert (publish.name, publish.arguments) == ("publish", ("room?token=t", "live"))
    assert publisher.status("status", PUBLISH_START, stream_id=7) == [PublishStarted(7)]
    assert (publisher.session.state, publisher.session.stream_id) == (ClientState.ACTIVE, 7)


def test_player_goes_ahead_reply_by_reply(player):
    player.connected()
    create = player.named()["createStream"]
    player.call("_result", create.transaction_id, None, 1.0)
    buffer, play = player.requests()
    assert (buffer.stream_id, buffer.buffer_ms) == (1, 1000)
    assert (play.name, play.arguments) == ("play", ("room?token=t", -2000.0))
    assert player.status("status", "NetStream.Play.Reset") == [
        StatusReceived(1, "status", "NetStream.Play.Reset", "words")
    ]
    assert player.status("status", PLAY_START) == [PlayStarted(1)]


def test_purpose_may_be_said_late():
    server = ScriptedServer()
    server.session.connect("rtmp://h/live")
    server.connected()
    assert "createStream" not in server.named()
    server.session.publish("late?k=v", "record")
    requests = server.named()
    assert requests["FCPublish"].arguments == ("late?k=v",)
    server.call("_result", requests["createStream"].transaction_id, None, 1.0)
    assert server.named()["publish"].arguments == ("late?k=v", "record")


def test_manners_are_settable():
    config = ClientSessionConfig(out_chunk_size=4096)
    server = ScriptedServer(config)
    server.session.publish("key")
    server.session.connect("rtmp://h/live2", parameters="?authmod=adobe&user=bob")
    server.shake()
    chunk_size, connect = server.last
    assert chunk_size == SetChunkSize(4096)
    assert connect.object["app"] == "live2?authmod=adobe&user=bob"
    assert connect.object["tcUrl"] == "rtmp://h/live2?authmod=adobe&user=bob"


def test_digest_handshake_is_spoken():
    server = ScriptedServer(ClientSessionConfig(handshake="digest"))
    server.session.connect("rtmp://h/live")
    assert server.shake() == [HandshakeDone("digest")]
    assert server.handshake.verified


# ----------------------------------------------------------------------------------------------- replies


@pytest.mark.parametrize("transaction_id", [0, 1, 77])
def test_connect_reply_is_taken_whatever_its_id(publisher, transaction_id):
    """nginx-rtmp and SRS have answered with id 0."""
    publisher.shake()
    publisher.requests()
    assert publisher.call("_result", transaction_id, None, None) == []
    assert "createStream" in publisher.named()


def test_stream_reply_with_id_zero_is_taken(publisher):
    publisher.connected()
    assert publisher.call("_result", 0, None, None) == []
    assert publisher.call("_result", 0, None, 1.0) == []
    assert publisher.named()["publish"].arguments == ("room?token=t", "live")


@pytest.mark.parametrize("name", ["_error", "_result", "onStatus"])
def test_refused_connect_is_reported(publisher, name):
    publisher.shake()
    words = commands.status("error", "NetConnection.Connect.Rejected", "go away")
    (event,) = publisher.call(name, 1 if name != "onStatus" else 0, None, words)
    assert event == Rejected(what="connect", code="NetConnection.Connect.Rejected", description="go away")
    assert publisher.session.state is ClientState.REJECTED
    with pytest.raises(LocalProtocolError):
        publisher.session.play()


def test_error_to_what_nobody_needs_is_no_refusal(publisher):
    publisher.connected()
    release = publisher.named()["releaseStream"]
    assert publisher.call("_error", release.transaction_id, None, None) == []
    assert publisher.session.state is ClientState.CREATING


@pytest.mark.parametrize("reply", [("_error", None), ("_result", None), ("_result", -1.0), ("_result", 2.0**40)])
def test_refused_stream_is_reported(publisher, reply):
    publisher.connected()
    create = publisher.named()["createStream"]
    (event,) = publisher.call(reply[0], create.transaction_id, None, reply[1])
    assert event.what == "createStream"
    assert publisher.session.state is ClientState.CONNECTED


@pytest.mark.parametrize("code", ["NetStream.Publish.BadName", "NetStream.Publish.Unauthorized", "NetStream.Failed"])
def test_refused_publish_is_reported_and_may_be_tried_again(publisher, code):
    publisher.connected()
    publisher.call("_result", publisher.named()["createStream"].transaction_id, None, 1.0)
    publisher.requests()
    assert publisher.status("error", code) == [Rejected(what="publish", code=code, description="words")]
    publisher.session.publish("other")
    requests = publisher.named()
    assert requests["deleteStream"].arguments == (1.0,)
    assert requests["FCPublish"].arguments == ("other",)


def test_stream_that_is_taken_away_is_reported(publisher):
    publisher.start(PUBLISH_START)
    status, ended = publisher.status("error", "NetStream.Publish.BadName")
    assert (status.code, ended) == ("NetStream.Publish.BadName", StreamEnded(1, "NetStream.Publish.BadName"))
    assert publisher.session.state is ClientState.CONNECTED
    with pytest.raises(LocalProtocolError, match="not publishing"):
        publisher.session.send_tag(9, 0, b"")


def test_end_of_a_played_stream_is_reported_once(player):
    player.start(PLAY_START)
    assert player.send(eof()) == [StreamEnded(1, "stream_eof")]
    assert player.send(eof(9)) == []
    assert len(player.status("status", "NetStream.Play.UnpublishNotify")) == 1
    assert len(player.status("status", "NetStream.Play.PublishNotify")) == 1
    _, ended = player.status("status", "NetStream.Play.UnpublishNotify")
    assert ended == StreamEnded(1, "NetStream.Play.UnpublishNotify")


def test_media_of_a_server_comes_as_it_is(player):
    player.start(PLAY_START)
    messages = [
        Message(6, 0, 9, 1, b"\x17\1\0\0\0x"),
        Message(4, 0, 8, 1, b"\xaf\1x"),
        Message(5, 0, 18, 1, amf0.encode("onMetaData", {})),
    ]
    assert player.send(*messages) == messages
    assert player.send(Message(6, 50, 22, 1, b"\x09\0\0\1\0\0\0\0\0\0\0v\0\0\0\x0c")) == [Message(6, 50, 9, 1, b"v")]


def test_metadata_of_a_server_when_it_comes_as_amf3_is_amf0(player):
    """As Flash's encoders send it, and servers pass it on; in a file and to other players it is AMF0."""
    player.start(PLAY_START)
    body = b"\0" + amf0.encode("onMetaData") + b"\x11\x0a\x0b\x01\x0bwidth\x04\x85\x00\x01"
    expected = Message(5, 0, 18, 1, amf0.encode("onMetaData", {"width": 640.0}))
    assert player.send(Message(5, 0, 15, 1, body)) == [expected]
    tag = b"\x0f" + len(body).to_bytes(3, "big") + bytes(7) + body + (11 + len(body)).to_bytes(4, "big")
    (event,) = player.send(Message(5, 0, 22, 1, tag))
    assert (event.type_id, event.payload) == (18, expected.payload)
    other = Message(5, 0, 15, 1, b"\0" + amf0.encode("onTextData"))
    assert player.send(other) == [other]


def test_server_commands_are_ignored_once_and_answered(publisher):
    publisher.connected()
    publisher.requests()
    assert publisher.call("onBWDone", 0, None) == [Ignored("server-command", "'onBWDone'")]
    assert publisher.call("_onbwcheck", 9, None) == []
    assert publisher.requests() == [Command("_result", 9.0, None, (None,))]


def test_reconnect_request_is_reported(publisher):
    publisher.start(PUBLISH_START)
    words = commands.status("status", "NetConnection.Connect.ReconnectRequest", "moving")
    assert publisher.call("onStatus", 0, None, words) == [ReconnectRequested(None, "moving")]
    words["tcUrl"] = "rtmp://other/live"
    (event,) = publisher.call("onStatus", 0, None, words)
    assert event == ReconnectRequested("rtmp://other/live", "moving")
    assert "other" not in repr(event)
    assert publisher.session.send_tag(9, 0, b"x")


# ------------------------------------------------------------------------------------------------ sending


def test_tags_of_a_file_are_sent_as_messages(publisher):
    publisher.start(PUBLISH_START)
    publisher.requests()
    bare = amf0.encode("onMetaData", {"width": 640.0})
    wrapped = amf0.encode("@setDataFrame") + bare
    tags = [(18, 0, bare), (18, 0, wrapped), (8, 10, b"\xaf\1a"), (9, 20, b"\x17\1v")]
    found = publisher.reader.feed(b"".join(publisher.session.send_tag(*tag) for tag in tags))
    expected = [(18, 0, wrapped), (18, 0, wrapped), *tags[2:]]
    assert [(message.type_id, message.timestamp, message.payload) for message in found] == expected
    assert len({message.csid for message in found}) == 3


def test_pending_output_stands_before_media(publisher):
    publisher.start(PUBLISH_START)
    publisher.session.data_to_send()
    publisher.send(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=5)))
    pong, media = publisher.requests_of(publisher.session.send_tag(9, 0, b"x"))
    assert (pong.event, media.payload) == (EVENT_PING_RESPONSE, b"x")
    assert publisher.session.data_to_send() == b""


def test_media_before_the_start_is_an_error_of_the_caller(publisher):
    with pytest.raises(LocalProtocolError, match="not publishing"):
        publisher.session.send_tag(8, 0, b"")
    with pytest.raises(LocalProtocolError, match="handshake"):
        publisher.session.send_message(Message(3, 0, 99, 0, b""))
    publisher.shake()
    octets = publisher.session.send_message(Message(3, 0, 99, 0, b"x"))
    assert publisher.reader.feed(octets) == [Message(3, 0, 99, 0, b"x")]


def test_close_stream_says_goodbye(publisher):
    publisher.start(PUBLISH_START)
    publisher.requests()
    publisher.session.close_stream()
    unpublish, delete = publisher.requests()
    assert (unpublish.name, delete.name, delete.arguments) == ("FCUnpublish", "deleteStream", (1.0,))
    publisher.session.play("other")
    create = publisher.named()["createStream"]
    publisher.session.close_stream()
    assert publisher.requests() == []
    assert publisher.call("_result", create.transaction_id, None, 2.0) == []
    assert publisher.named()["deleteStream"].arguments == (2.0,)
    with pytest.raises(LocalProtocolError, match="close_stream is not allowed"):
        publisher.session.close_stream()


def test_second_purpose_is_an_error_of_the_caller(publisher):
    with pytest.raises(LocalProtocolError, match="for publish"):
        publisher.session.play()
    with pytest.raises(LocalProtocolError, match="connect is not allowed"):
        publisher.session.connect("rtmp://h/live")


@pytest.mark.parametrize("url", ["", "http:/x", "rtmp://h:0/live/room"])
def test_bad_address_is_refused_before_anything_is_sent(url):
    server = ScriptedServer()
    with pytest.raises(RemoteProtocolError):
        server.session.connect(url)
    assert server.session.data_to_send() == b""
    with pytest.raises(LocalProtocolError, match="connect was not called"):
        server.session.receive(b"x", 0.0)


# --------------------------------------------------------------------------------- control, time, limits


def test_pings_are_answered_and_acknowledgements_sent(player):
    player.start(PLAY_START)
    player.requests()
    player.send(encode_control(WindowAckSize(200_000)), encode_control(UserControl(EVENT_PING_REQUEST, timestamp=5)))
    player.send(*[Message(6, at, 9, 1, bytes(10_000)) for at in range(11)])
    pong, acknowledgement = player.requests()
    assert (pong.event, pong.timestamp) == (EVENT_PING_RESPONSE, 5)
    assert 100_000 <= acknowledgement.sequence_number <= player.session.bytes_received
    assert player.send(encode_control(Acknowledgement(77))) == [Acknowledged(77)]
    assert player.session.last_acknowledged_bytes == 77


def test_hostile_manners_are_settable():
    silent = ScriptedServer(ClientSessionConfig(acknowledge=False, answer_pings=False))
    silent.session.play()
    silent.session.connect(URL)
    silent.start(PLAY_START)
    silent.requests()
    silent.send(encode_control(UserControl(EVENT_PING_REQUEST, timestamp=5)))
    silent.send(*[Message(6, at, 9, 1, bytes(100_000)) for at in range(20)])
    assert silent.requests() == []
    eager = ScriptedServer(ClientSessionConfig(ping_answer_interval_s=0))
    eager.session.connect(URL)
    eager.connected()
    eager.requests()
    eager.send(*[encode_control(UserControl(EVENT_PING_REQUEST, timestamp=at)) for at in range(5)])
    assert len(eager.requests()) == 5


@pytest.mark.parametrize(
    ("steps", "limit", "at"),
    [("connect", "handshake_time_s", 5.0), ("shake", "reply_time_s", 10.0), ("connected", "reply_time_s", 10.0)],
)
def test_silent_server_is_given_up(steps, limit, at):
    server = ScriptedServer()
    server.session.publish()
    server.session.connect(URL)
    if steps != "connect":
        getattr(server, steps)()
    assert server.session.next_deadline(0.0) == at
    assert server.session.tick(at - 0.01) == []
    with pytest.raises(LimitExceededError) as caught:
        server.session.tick(at)
    assert caught.value.limit == limit
    assert server.session.state is ClientState.CLOSED
    assert server.session.next_deadline(at) is None


def test_player_may_wait_for_a_publisher(player):
    """Play has no limit of time but silence: a ping, and then the end."""
    player.connected()
    player.call("_result", player.named()["createStream"].transaction_id, None, 1.0)
    player.requests()
    assert player.session.next_deadline(0.0) == 60.0
    player.session.tick(60.0)
    assert player.requests()[0].event == EVENT_PING_REQUEST
    with pytest.raises(LimitExceededError, match="ping_silence_s"):
        player.session.tick(90.0)


def test_flooding_server_is_given_up(player):
    player.start(PLAY_START)
    with pytest.raises(LimitExceededError, match="control_messages_per_second"):
        player.send(*[Message(2, 0, 99, 0, b"")] * 201)


def test_unknown_message_type_is_ignored(player):
    player.start(PLAY_START)
    assert player.send(Message(3, 0, 99, 0, b"x")) == [Ignored("unknown-message-type", "99")]
    assert player.session.counters["unknown-message-type"] == 1


@pytest.mark.parametrize(
    ("field", "value"), [("handshake", "rtmpe"), ("buffer_ms", -1), ("reply_time_s", -1.0), ("out_chunk_size", 1)]
)
def test_configuration_names_the_field_that_is_wrong(field, value):
    with pytest.raises(ConfigError, match=field):
        ClientSessionConfig(**{field: value})


def test_connect_is_readable_in_chunks_of_the_announced_size():
    server = ScriptedServer(ClientSessionConfig(out_chunk_size=256))
    server.session.connect("rtmp://h/" + "a" * 200)
    server.octets(server.handshake.receive(server.session.data_to_send()))
    octets = server.session.data_to_send()[1536:]
    size, connect = ChunkReader(WireLimits()).feed(octets)
    assert decode_message(size) == SetChunkSize(256)
    assert decode_message(connect).object["app"] == "a" * 200
