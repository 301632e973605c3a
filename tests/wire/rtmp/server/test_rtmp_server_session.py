"""The server session: what it answers to each command, what it tells its caller, and what it refuses."""

import pytest
from rtmp_session_kit import AUDIO, DATA, SPLITS, VIDEO, ScriptedClient, metadata_of, video

from flowctl.errors import LocalProtocolError, RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import UNDEFINED
from flowctl.wire.rtmp.chunk.reader import ChunkReader
from flowctl.wire.rtmp.events import (
    ConnectRequested,
    HandshakeDone,
    Ignored,
    MetadataReceived,
    PauseRequested,
    PlayRequested,
    PublishRequested,
    ReceiveAudio,
    ReceiveVideo,
    SeekRefused,
    StreamClosed,
)
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.messages import (
    EVENT_STREAM_BEGIN,
    EVENT_STREAM_EOF,
    Command,
    PeerBandwidth,
    SetChunkSize,
    UserControl,
    WindowAckSize,
    decode_message,
)
from flowctl.wire.rtmp.session_config import ServerSessionConfig
from flowctl.wire.rtmp.states import ConnectionState, StreamState
from flowctl.wire.rtmp.wire import Message

# ------------------------------------------------------------------------------------------------- connect


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.__name__)
def test_handshake_is_reported(split):
    client = ScriptedClient(split=split, handshake=False)
    assert client.shake() == [HandshakeDone("simple")]
    assert client.session.state is ConnectionState.CONNECTING


def test_connect_is_reported(client):
    (event,) = client.call(
        "connect",
        1,
        {
            "app": "live/inst?k=v",
            "tcUrl": "rtmp://example.com/live/inst?k=v",
            "flashVer": "FMLE/3.0",
            "pageUrl": "http://example.com/",
            "objectEncoding": 3.0,
            "fourCcList": ["av01", 5.0, "hvc1"],
            "audioFourCcInfoMap": {"Opus": 7.0},
            "capsEx": 3.0,
        },
    )
    assert isinstance(event, ConnectRequested)
    assert (event.url.app, event.url.query) == ("live/inst", {"k": "v"})
    assert (event.tc_url, event.url.host) == ("rtmp://example.com/live/inst?k=v", "example.com")
    assert (event.flash_ver, event.page_url, event.object_encoding) == ("FMLE/3.0", "http://example.com/", 3)
    assert (event.enhanced, event.caps_ex, event.multitrack, event.user) == (True, 3, True, None)


@pytest.mark.parametrize(
    ("said", "codecs"),
    [
        ({}, set()),
        ({"fourCcList": ["av01", 5.0, "hvc1", "Opus", "x" * 5000]}, {"av01", "hvc1"}),
        ({"fourCcList": ["*"]}, {"avc1", "hvc1", "av01", "vp08", "vp09", "vvc1"}),
        ({"fourCcList": "hvc1"}, set()),
        (
            {"fourCcList": ["*"], "videoFourCcInfoMap": {"hvc1": 1.0, "avc1": 7.0, "av01": 6.0, "vp09": "7"}},
            {"hvc1", "avc1"},
        ),
        ({"videoFourCcInfoMap": {"*": 4.0, "hvc1": 5.0, "vp09": float("inf")}}, {"hvc1"}),
    ],
)
def test_codecs_are_those_that_a_client_says_it_decodes(client, said, codecs):
    """The map says what for; the list, which is older, does not."""
    (event,) = client.call("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live"} | said)
    assert event.video_codecs == client.session.client_codecs == codecs


def test_accept_connect_announces_chunk_size_before_the_result(client):
    """Window, bandwidth and chunk size stand before the result, which OBS needs; it has level before code."""
    client.call("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live"})
    client.session.accept_connect()
    window, bandwidth, chunk_size, result = client.replies()
    assert (window, bandwidth, chunk_size) == (WindowAckSize(2500000), PeerBandwidth(2500000), SetChunkSize(65536))
    assert (result.name, result.transaction_id, result.object["fmsVer"]) == ("_result", 1.0, "FMS/3,0,1,123")
    (information,) = result.arguments
    assert list(information) == ["level", "code", "description", "objectEncoding"]
    assert (information["level"], information["code"]) == ("status", "NetConnection.Connect.Success")


def test_accept_connect_tells_enhanced_capabilities_to_those_who_told_theirs(client):
    client.call("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live", "capsEx": 1.0})
    client.session.accept_connect()
    (information,) = client.replies()[-1].arguments
    assert information["videoFourCcInfoMap"] == information["audioFourCcInfoMap"] == {"*": 4.0}
    assert (information["fourCcList"], information["capsEx"]) == (["*"], 15.0)


def test_reject_connect_says_why_and_ignores_the_rest(client):
    client.call("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live"})
    client.session.reject_connect("no such application")
    chunk_size, error = client.replies()
    assert chunk_size == SetChunkSize(65536)
    assert (error.name, error.transaction_id) == ("_error", 1.0)
    assert error.arguments[0] == {
        "level": "error",
        "code": "NetConnection.Connect.Rejected",
        "description": "no such application",
    }
    assert client.call("createStream", 2, None) == []
    assert client.call("connect", 1, {"app": "live"}) == []
    assert client.send(video()) == []
    assert (client.session.state, client.session.counters) == (ConnectionState.REFUSED, {"after-refusal": 3})


@pytest.mark.parametrize(
    ("name", "values", "code"),
    [
        ("connect", (None,), "bad-connect"),
        ("connect", (), "bad-connect"),
        ("connect", ("live",), "bad-connect"),
        ("connect", ({"app": "../etc"},), "bad-name"),
        ("connect", ({"app": "live", "tcUrl": "rtmp://h/a/../b"},), "bad-name"),
        ("connect", ({"app": "live", "tcUrl": "rtmp://h/" + "a" * 9000},), "bad-url"),
        ("createStream", (None,), "unexpected-command"),
        ("publish", (None, "room"), "unexpected-command"),
    ],
)
def test_bad_first_command_is_refused_with_a_reason(name, values, code):
    client = ScriptedClient()
    with pytest.raises(RemoteProtocolError) as caught:
        client.call(name, 1, *values)
    assert caught.value.code == code
    error = client.replies()[-1]
    assert (error.name, error.arguments[0]["description"]) == ("_error", str(caught.value))
    assert client.session.closed
    with pytest.raises(LocalProtocolError, match="the session has ended"):
        client.send(video())


def test_second_connect_is_an_error_of_the_peer(client):
    client.connect()
    with pytest.raises(RemoteProtocolError) as caught:
        client.call("connect", 1, {"app": "live"})
    assert caught.value.code == "unexpected-command"
    assert client.statuses() == [("error", "NetConnection.Call.Failed")]


def test_media_before_connect_is_an_error_of_the_peer(client):
    with pytest.raises(RemoteProtocolError) as caught:
        client.send(video())
    assert caught.value.code == "unexpected-message"


# ------------------------------------------------------------------------------------------------- publish


def test_encoder_dialogue_is_answered(client):
    """releaseStream, FCPublish, createStream and publish get the replies that FMLE, OBS and FFmpeg wait for."""
    client.connect()
    client.call("releaseStream", 2, None, "room")
    client.call("FCPublish", 3, None, "room")
    client.call("createStream", 4, None)
    release, publish, notify, create = client.replies()
    assert (release.name, release.transaction_id, release.arguments) == ("_result", 2.0, (UNDEFINED,))
    assert (publish.name, publish.transaction_id) == ("_result", 3.0)
    assert (notify.name, notify.arguments[0]["code"]) == ("onFCPublish", "NetStream.Publish.Start")
    assert (create.name, create.transaction_id, create.object, create.arguments) == ("_result", 4.0, None, (1.0,))
    (event,) = client.call("publish", 5, None, "room?token=t", "live", stream_id=1)
    assert isinstance(event, PublishRequested)
    assert (event.stream_id, event.name, event.query, event.kind) == (1, "room", {"token": "t"}, "live")
    assert event.url.path == "live/room"
    client.session.accept_publish(1)
    begin, started = client.replies()
    assert begin == UserControl(EVENT_STREAM_BEGIN, stream_id=1)
    assert (started.name, started.transaction_id) == ("onStatus", 0.0)
    assert list(started.arguments[0]) == ["level", "code", "description"]
    assert started.arguments[0]["code"] == "NetStream.Publish.Start"


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("live", "live"),
        ("record", "record"),
        ("append", "append"),
        ("appendWithGap", "append"),
        ("app", "live"),
        (None, "live"),
    ],
)
def test_publish_type_is_read(word, kind):
    """The publishing type of section 7.2.2.6; anything else is live."""
    client = ScriptedClient()
    client.connect()
    events = client.call("publish", 3, None, "room", word, stream_id=client.create_stream())
    assert events[-1].kind == kind


def test_media_of_a_publisher_comes_as_it_is(client):
    client.publish()
    messages = [video(0), Message(4, 5, AUDIO, 1, b"\xaf\x01x"), Message(4, 9, DATA, 1, b"\x02\0\5onCue"), video(40)]
    assert client.send(*messages) == messages


def test_metadata_is_unwrapped(client):
    client.publish()
    body = b"\x02\0\x0aonMetaData\x08\0\0\0\1\0\5width\0\x40\x84\0\0\0\0\0\0\0\0\x09"
    (event,) = client.send(Message(4, 0, DATA, 1, b"\x02\0\x0d@setDataFrame" + body))
    assert event == MetadataReceived(1, Message(4, 0, DATA, 1, body))
    assert metadata_of(event) == {"width": 640.0}


def test_aggregate_is_split(client):
    client.publish()
    part = b"\x09\0\0\3\0\0\x10\0\0\0\0abc\0\0\0\x0e"
    assert client.send(Message(6, 100, 22, 1, part)) == [Message(6, 100, VIDEO, 1, b"abc")]


def test_reject_publish_names_the_reason_and_frees_the_stream(client):
    client.connect()
    stream_id = client.create_stream()
    client.call("publish", 3, None, "room", stream_id=stream_id)
    client.session.reject_publish(stream_id, "NetStream.Publish.Unauthorized", "wrong key")
    assert client.statuses() == [("error", "NetStream.Publish.Unauthorized")]
    assert client.send(video()) == [Ignored("media-without-publish", "9")]
    (event,) = client.call("publish", 4, None, "other", stream_id=stream_id)
    assert event.name == "other"


@pytest.mark.parametrize(
    ("name", "stream_id", "arguments", "reason"),
    [
        ("FCUnpublish", 0, ("room",), "FCUnpublish"),
        ("closeStream", 1, (), "closeStream"),
        ("publish", 1, (False,), "publish(false)"),
    ],
)
def test_publisher_that_stops_is_told_so(name, stream_id, arguments, reason):
    client = ScriptedClient()
    client.publish()
    assert client.call(name, 9, None, *arguments, stream_id=stream_id) == [StreamClosed(1, reason)]
    assert client.statuses() == [("status", "NetStream.Unpublish.Success")]
    assert client.session.stream_state(1) is StreamState.IDLE


def test_media_behind_the_end_in_one_read_is_not_delivered(client):
    client.publish()
    stop = commands.command("FCUnpublish", 9, None, "room")
    events = client.send(video(1), stop, video(2))
    assert events == [video(1), StreamClosed(1, "FCUnpublish"), Ignored("media-without-publish", "9")]


@pytest.mark.parametrize(("name", "closed"), [("b", [2]), ("live/b?k=v", [2]), ("c", [])])
def test_fcunpublish_ends_the_stream_it_names(name, closed):
    client = ScriptedClient()
    client.publish("a")
    client.create_stream()
    client.call("publish", 3, None, "b?k=v", stream_id=2)
    client.session.accept_publish(2)
    events = client.call("FCUnpublish", 9, None, name)
    assert [event.stream_id for event in events] == closed


@pytest.mark.parametrize(
    ("name", "closed"), [("a/room", [1]), ("b/room?k=v", [2]), ("live/b/room", [2]), ("room", [3]), ("hall", [])]
)
def test_fcunpublish_when_names_differ_in_their_folder_ends_the_one_it_names(name, closed):
    client = ScriptedClient()
    client.publish("a/room")
    for stream_id, other in ((2, "b/room"), (3, "room")):
        client.create_stream()
        client.call("publish", 3, None, other, stream_id=stream_id)
        client.session.accept_publish(stream_id)
        client.replies()
    events = client.call("FCUnpublish", 9, None, name)
    assert [event.stream_id for event in events] == closed


def test_fcunpublish_of_another_name_ends_the_only_stream():
    client = ScriptedClient()
    client.publish("a")
    assert client.call("FCUnpublish", 9, None, "live") == [StreamClosed(1, "FCUnpublish")]


def test_delete_stream_is_not_answered_and_frees_the_id(client):
    """Section 7.2.2.3 has no reply; the next createStream gets the id again."""
    client.publish()
    assert client.call("deleteStream", 9, None, 1.0) == [StreamClosed(1, "deleteStream")]
    assert client.replies() == []
    assert client.session.stream_state(1) is None
    assert client.create_stream() == 1


def test_publish_on_a_publishing_stream_is_an_error_of_the_peer(client):
    client.publish()
    with pytest.raises(RemoteProtocolError, match="message stream 1 is publishing"):
        client.call("publish", 9, None, "other", stream_id=1)
    assert client.statuses() == [("error", "NetStream.Failed")]


# ---------------------------------------------------------------------------------------------------- play


def test_play_is_reported_and_started(client):
    """Reset and Start, no NetStream.Data.Start, which FFmpeg would show as a data stream."""
    client.connect()
    client.create_stream()
    (event,) = client.call("play", 3, None, "room?t=1", -1000.0, 5000.0, False, stream_id=1)
    assert isinstance(event, PlayRequested)
    assert (event.name, event.query, event.start_ms, event.duration_ms) == ("room", {"t": "1"}, -1000, 5000)
    assert not event.reset
    client.session.accept_play(1)
    begin, *rest = client.replies()
    assert begin == UserControl(EVENT_STREAM_BEGIN, stream_id=1)
    assert [status.arguments[0]["code"] for status in rest] == ["NetStream.Play.Start"]


def test_play_defaults_are_those_of_the_specification(client):
    """Without arguments: live or recorded, to the end, with a reset."""
    client.connect()
    client.create_stream()
    (event,) = client.call("play", 3, None, "room", stream_id=1)
    assert (event.start_ms, event.duration_ms, event.reset) == (-2000, None, True)
    client.session.accept_play(1)
    assert client.statuses() == [("status", "NetStream.Play.Reset"), ("status", "NetStream.Play.Start")]


def test_sample_access_is_sent_when_it_is_on():
    """Only Flash players need it, so it is off by default."""
    client = ScriptedClient(ServerSessionConfig(sample_access=True))
    client.connect()
    client.create_stream()
    client.call("play", 3, None, "room", stream_id=1)
    client.session.accept_play(1)
    assert client.messages()[-1].payload == amf0.encode("|RtmpSampleAccess", True, True)


def test_waiting_player_hears_of_publisher_and_its_end(client):
    client.connect()
    client.create_stream()
    client.call("play", 3, None, "room", stream_id=1)
    client.session.play_waiting(1)
    assert client.statuses() == [("status", "NetStream.Play.Reset"), ("status", "NetStream.Play.Start")]
    client.session.accept_play(1)
    assert client.statuses() == [("status", "NetStream.Play.PublishNotify")]
    client.session.unpublish_notify(1)
    eof, notify = client.replies()
    assert eof == UserControl(EVENT_STREAM_EOF, stream_id=1)
    assert notify.arguments[0]["code"] == "NetStream.Play.UnpublishNotify"
    assert client.session.stream_state(1) is StreamState.WAITING
    client.session.publish_notify(1)
    client.session.unpublish_notify(1, send=False)
    client.replies()
    client.session.reject_play(1, description="nobody came")
    assert client.statuses() == [("error", "NetStream.Play.StreamNotFound")]


def test_end_of_stream_bytes_are_the_same_as_the_notification(client):
    client.play()
    client.session.unpublish_notify(1)
    expected = client.messages()
    octets = commands.stream_notice_bytes(1, published=False, chunk_size=65536)
    reader = ChunkReader(WireLimits())
    assert reader.feed(octets + octets) == expected + expected
    assert octets[0] >> 6 == 0


def test_pause_is_answered_and_reported(client):
    client.play()
    assert client.call("pause", 4, None, True, 1500.0, stream_id=1) == [PauseRequested(1, True)]
    status, eof = client.replies()
    assert (status.arguments[0]["code"], eof.event) == ("NetStream.Pause.Notify", EVENT_STREAM_EOF)
    assert client.call("pause", 5, None, None, 1500.0, stream_id=1) == [PauseRequested(1, False)]
    status, begin = client.replies()
    assert (status.arguments[0]["code"], begin.event) == ("NetStream.Unpause.Notify", EVENT_STREAM_BEGIN)


def test_new_play_is_not_paused(client):
    """A pause belongs to what was played: the next stream plays, so null pauses it."""
    client.play()
    client.call("pause", 4, None, True, 0.0, stream_id=1)
    client.call("play", 5, None, "other", stream_id=1)
    client.session.accept_play(1)
    assert client.call("pause", 6, None, None, 0.0, stream_id=1) == [PauseRequested(1, True)]


def test_seek_is_refused_politely(client):
    client.play()
    assert client.call("seek", 4, None, 5000.0, stream_id=1) == [SeekRefused(1)]
    assert client.statuses() == [("error", "NetStream.Seek.Failed")]
    assert client.session.stream_state(1) is StreamState.PLAYING


def test_receive_audio_and_video_are_reported(client):
    """False is answered by nothing, true by Seek.Notify and Play.Start (section 7.2.2.4)."""
    client.play()
    assert client.call("receiveAudio", 0, None, False, stream_id=1) == [ReceiveAudio(1, False)]
    assert client.replies() == []
    assert client.call("receiveVideo", 0, None, True, stream_id=1) == [ReceiveVideo(1, True)]
    assert client.statuses() == [("status", "NetStream.Seek.Notify"), ("status", "NetStream.Play.Start")]


def test_play_on_a_playing_stream_replaces_it(client):
    client.play()
    closed, asked = client.call("play", 4, None, "other", stream_id=1)
    assert (closed, asked.name) == (StreamClosed(1, "play"), "other")
    client.session.accept_play(1)
    closed, asked = client.call("play2", 5, None, {"streamName": "third", "start": -1000.0}, stream_id=1)
    assert (closed, asked.name, asked.start_ms, asked.reset) == (StreamClosed(1, "play2"), "third", -1000, False)


def test_player_that_stops_is_told_so(client):
    client.play()
    assert client.call("closeStream", 0, None, stream_id=1) == [StreamClosed(1, "closeStream")]
    assert client.statuses() == [("status", "NetStream.Play.Stop")]
    client.call("play", 4, None, "room", stream_id=1)
    client.session.accept_play(1)
    assert client.call("play", 5, None, False, stream_id=1) == [StreamClosed(1, "play(false)")]


def test_media_from_a_player_is_an_error_of_the_peer(client):
    client.play()
    with pytest.raises(RemoteProtocolError, match="media is not allowed, the message stream 1 is playing"):
        client.send(video())
    assert client.statuses() == [("error", "NetStream.Play.Failed")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("getStreamLength", [("_result", (0.0,))]),
        ("_checkbw", [("_result", (None,))]),
        ("checkBandwidth", [("_result", (None,))]),
        ("FCSubscribe", [("_result", (UNDEFINED,)), ("onFCSubscribe", None)]),
        ("FCUnsubscribe", [("_result", (UNDEFINED,)), ("onFCUnsubscribe", None)]),
        ("neverHeardOf", [("_result", (None,))]),
        ("_result", []),
        ("onStatus", []),
    ],
)
def test_other_commands_are_answered(name, expected):
    client = ScriptedClient()
    client.connect()
    client.call(name, 6, None, "room")
    found = [(reply.name, reply.arguments if reply.name == "_result" else None) for reply in client.replies()]
    assert found == expected
    client.call(name, 0, None, "room")
    assert [reply for reply in client.replies() if reply.name == "_result"] == []


# -------------------------------------------------------------------------------------- our caller's faults


@pytest.mark.parametrize(
    "method",
    ["accept_publish", "reject_publish", "accept_play", "play_waiting", "reject_play", "publish_notify"],
)
def test_answer_to_nothing_is_an_error_of_the_caller(method):
    client = ScriptedClient()
    client.connect()
    with pytest.raises(LocalProtocolError, match="there is no message stream 1"):
        getattr(client.session, method)(1)
    client.create_stream()
    with pytest.raises(LocalProtocolError, match="message stream 1 is idle"):
        getattr(client.session, method)(1)
    assert client.session.data_to_send() == b""


def test_answer_to_a_closed_request_is_an_error_of_the_caller(client):
    client.connect()
    client.create_stream()
    client.call("publish", 3, None, "room", stream_id=1)
    assert client.call("deleteStream", 0, None, 1.0) == [StreamClosed(1, "deleteStream")]
    with pytest.raises(LocalProtocolError):
        client.session.accept_publish(1)
    with pytest.raises(LocalProtocolError):
        client.session.accept_connect()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "Gr\u00fc\u00dfe \u65e5\u672c \U0001f468\u200d\U0001f469",
            "Gr\u00fc\u00dfe \u65e5\u672c \U0001f468\u200d\U0001f469",
        ),
        ("name \udcff", "name \\udcff"),
        ("a\0b\x1b[2J", "a\\u0000b\\u001b[2J"),
        ("x" * 70_000, "x" * 1024),
    ],
    ids=["unicode", "surrogate", "control", "long"],
)
@pytest.mark.parametrize("what", ["publish", "play", "connect"])
def test_words_of_a_refusal_reach_the_client_whatever_they_are(what, words, told):
    client = ScriptedClient()
    if what == "connect":
        client.call("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live"})
        client.session.reject_connect(words)
    else:
        client.connect()
        client.create_stream()
        client.call(what, 3, None, "room", stream_id=1)
        getattr(client.session, f"reject_{what}")(1, description=words)
    assert client.replies()[-1].arguments[0]["description"] == told


def test_failure_status_says_why(client):
    client.play()
    client.session.failure_status(1, "kicked by an operator")
    (status,) = client.replies()
    assert status.arguments[0] == {
        "level": "error",
        "code": "NetStream.Play.Failed",
        "description": "kicked by an operator",
    }


def test_reconnect_is_asked_of_clients_that_understand_it():
    client = ScriptedClient()
    client.connect()
    assert not client.session.request_reconnect()
    able = ScriptedClient()
    able.connect(capsEx=1.0)
    assert able.session.request_reconnect()
    (message,) = able.messages()
    status = decode_message(message)
    assert (message.msid, status.transaction_id) == (0, 0.0)
    assert status.arguments[0] == {
        "level": "status",
        "code": "NetConnection.Connect.ReconnectRequest",
        "description": "The server is going down.",
    }


def test_reconnect_when_asked_before_the_client_is_let_in_is_told_behind_the_answer():
    """A drain that begins while somebody connects asks that client too."""
    client = ScriptedClient()
    assert not client.session.request_reconnect()
    client.call("connect", 1, {"app": "live", "tcUrl": "rtmp://h/live", "capsEx": 1.0})
    assert not client.session.request_reconnect()
    client.session.accept_connect()
    names = [reply.name for reply in client.replies() if isinstance(reply, Command)]
    assert names == ["_result", "onStatus"]


@pytest.mark.parametrize("name", ["my%20show", "my show", "mp4:my%20show.mp4", "my show.flv"])
def test_name_when_a_client_spells_it_in_its_way_is_the_streams(name):
    """In what is asked, and in what is published and ended."""
    client = ScriptedClient()
    assert client.connect(app="my%20app", tcUrl="rtmp://h/my%20app").url.app == "my app"
    for stream_id, spelled in ((1, name), (2, "other")):
        client.create_stream()
        (event,) = client.call("publish", 3, None, spelled, stream_id=stream_id)
        assert event.url.path == "my app/" + {name: "my show"}.get(spelled, spelled)
        client.session.accept_publish(stream_id)
        client.replies()
    assert client.call("FCUnpublish", 9, None, name) == [StreamClosed(1, "FCUnpublish")]


def test_name_when_it_is_encoded_twice_is_refused_in_words_and_may_be_mended(client):
    client.connect()
    client.create_stream()
    (event,) = client.call("publish", 3, None, "%2561", stream_id=1)
    assert event == Ignored("bad-name", "stream name is percent-encoded twice")
    assert client.statuses() == [("error", "NetStream.Publish.BadName")]
    (event,) = client.call("publish", 3, None, "%61" * 256, stream_id=1)
    assert event.name == "a" * 256
    with pytest.raises(RemoteProtocolError, match="twice"):
        ScriptedClient().connect(app="%2561", tcUrl="rtmp://h/%2561")
