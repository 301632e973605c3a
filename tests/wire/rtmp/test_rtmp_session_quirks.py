"""What real clients do and a server must take: each test is one habit, sent as that client sends it."""

import tracemalloc

import pytest
from rtmp_session_kit import ScriptedClient, metadata_of, single, video, whole

from flowctl.errors import LimitExceededError, RemoteProtocolError
from flowctl.wire.rtmp import commands
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.amf.values import UNDEFINED, Date, EcmaArray, TypedObject
from flowctl.wire.rtmp.events import ConnectRequested, Ignored, MetadataReceived, PublishRequested, StreamClosed
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.states import StreamState
from flowctl.wire.rtmp.wire import Message

AUDIO, VIDEO, DATA_AMF3, COMMAND_AMF3, DATA = 8, 9, 15, 17, 18


def connect_with(client, values, *more):
    """Send a connect with any command object and return the event."""
    (event,) = client.call("connect", 1, values, *more)
    assert isinstance(event, ConnectRequested)
    client.session.accept_connect()
    client.replies()
    return event


def test_obs_sets_its_chunk_size_before_connect(client):
    """OBS sends Set Chunk Size first, and its connect in chunks of that size; ours is not changed by it."""
    assert client.octets(client.writer.set_chunk_size(4096)) == []
    event = connect_with(client, {"app": "live", "tcUrl": "rtmp://h/live", "flashVer": "F" * 200})
    assert event.flash_ver == "F" * 200
    assert client.session._writer.chunk_size == 65536


def test_control_messages_come_on_any_chunk_stream(client):
    """PTZ cameras send them on 3 to 6 (mediamtx 4909)."""
    client.publish()
    for csid in range(3, 7):
        assert client.send(Message(csid, 0, 5, 0, (2500000).to_bytes(4, "big"))) == []
    assert client.send(video()) == [video()]


@pytest.mark.parametrize("event", [31, 32, 200])
def test_undocumented_user_control_is_ignored(event):
    """Flash Media Server's 31 and 32 are reported once and end nothing (gortmplib 75, mediamtx 5512)."""
    client = ScriptedClient()
    client.publish()
    message = Message(2, 0, 4, 0, event.to_bytes(2, "big") + b"\0\0\0\1")
    assert client.send(message) == [Ignored("user-control-event", str(event))]
    assert client.send(message, video()) == [video()]
    assert client.session.counters["user-control-event"] == 2


@pytest.mark.parametrize(
    "values",
    [
        {"app": "live"},
        {"app": "live", "tcurl": "rtmp://h/live"},
        {"app": "live", "tcUrl": "'rtmp://h/live'"},
        {"app": "live", "tcUrl": ""},
        {"app": "live", "tcUrl": None},
        {"app": "live", "tcUrl": UNDEFINED, "swfUrl": UNDEFINED, "pageUrl": None},
        {"app": None, "tcUrl": "rtmp://h/live"},
        {"tcUrl": "rtmp://h/live", "objectEncoding": UNDEFINED, "audioCodecs": None},
        EcmaArray({"app": "live", "tcUrl": "rtmp://h/live"}),
        TypedObject("Connection", {"app": "live"}),
    ],
    ids=[
        "no tcUrl",
        "tcurl",
        "quotes",
        "empty tcUrl",
        "null tcUrl",
        "undefined members",
        "null app",
        "no app",
        "ECMA array",
        "typed object",
    ],
)
def test_connect_object_may_be_odd(values):
    """Cameras, iOS publishers, Neko, ZLMediaKit (mediamtx 1405, lal 102, gortmplib objectOrArray)."""
    client = ScriptedClient()
    event = connect_with(client, values)
    assert (event.url.app, event.object_encoding) == ("live", 0)


@pytest.mark.parametrize("more", [(None,), ("user", "password"), (5.0,), (["x"],)])
def test_connect_may_have_further_arguments_of_any_kind(more):
    assert connect_with(ScriptedClient(), {"app": "live"}, *more).url.app == "live"


def test_connect_object_may_be_in_the_wrong_place():
    assert connect_with(ScriptedClient(), None, {"app": "live"}).url.app == "live"


def test_haivision_checks_bandwidth_first_and_announces_after_createstream(client):
    connect_with(client, {"app": "live"})
    client.call("_checkbw", 2, None)
    client.call("createStream", 3, None)
    client.call("FCPublish", 4, None, "room")
    assert [reply.name for reply in client.replies()] == ["_result", "_result", "_result", "onFCPublish"]
    (event,) = client.call("publish", 5, None, "room", "live", stream_id=1)
    assert event.name == "room"


@pytest.mark.parametrize("name", ["publish", "play"])
def test_wirecast_stops_with_false_as_the_name(name):
    client = ScriptedClient()
    getattr(client, name)()
    assert client.call(name, 9, None, False, stream_id=1) == [StreamClosed(1, f"{name}(false)")]
    assert client.session.stream_state(1) is StreamState.IDLE
    assert client.call(name, 10, None, False, stream_id=1) == []


@pytest.mark.parametrize("name", [5.0, {"a": 1.0}, ["x"], True, Date(0.0), "../x", "x\0y", "x" * 4096])
@pytest.mark.parametrize(("command", "code"), [("publish", "Publish.BadName"), ("play", "Play.StreamNotFound")])
def test_name_that_cannot_be_is_refused_politely(command, code, name):
    client = ScriptedClient()
    connect_with(client, {"app": "live"})
    client.create_stream()
    (event,) = client.call(command, 3, None, name, stream_id=1)
    assert (event.what, isinstance(name, str) or "is no string but" in event.detail) == ("bad-name", True)
    assert client.statuses() == [("error", f"NetStream.{code}")]
    assert client.call(command, 4, None, "room", stream_id=1)[0].name == "room"


@pytest.mark.parametrize(
    ("payload", "values"),
    [
        (amf0.encode("@setDataFrame", "onMetaData", {}), {}),
        (amf0.encode("@setDataFrame", "onMetaData", None), {}),
        (amf0.encode("@setDataFrame", "onMetaData"), {}),
        (amf0.encode("onMetaData", EcmaArray({"width": 640.0})), {"width": 640.0}),
        (
            amf0.encode("@setDataFrame", "onMetaData", {"d": Date(1.0), "l": [1.0, "x"]}),
            {"d": Date(1.0), "l": [1.0, "x"]},
        ),
    ],
)
def test_metadata_may_be_empty_or_rich(payload, values):
    """Empty, missing, not wrapped, with dates and arrays (mediamtx 386, 3189; ossrs/srs 185)."""
    client = ScriptedClient()
    client.publish()
    (event,) = client.send(Message(4, 7, DATA, 1, payload))
    assert metadata_of(event) == values
    assert event.message == Message(4, 7, DATA, 1, payload.removeprefix(amf0.encode("@setDataFrame")))


@pytest.mark.parametrize(
    "payload",
    [b"\0\0\0\x2a", amf0.encode(5.0, "x"), amf0.encode({"a": 1.0}), b"", b"\x99\x01"],
    ids=["FFmpeg time code", "number first", "object first", "empty", "unknown marker"],
)
def test_other_data_is_passed_on_unread(payload):
    """FFmpeg's 4-octet time code, Uniview's nameless data, and what cannot be read at all (ossrs/srs 3803, 2731)."""
    client = ScriptedClient()
    client.publish()
    message = Message(4, 7, DATA, 1, payload)
    assert client.send(message) == [message]


@pytest.mark.parametrize(
    "values",
    [
        b"\x08\0\0\0\1\0\5width\0\x40\x84\0\0\0\0\0\0",  # an array without its end marker
        b"\x08\0\0\0\1\0\5width\x77\0\0\x09",  # a marker that there is not
        b"\3\0\5wid",
    ],
    ids=["no end marker", "unknown marker", "cut"],
)
def test_metadata_when_it_is_broken_is_metadata_all_the_same(values):
    client = ScriptedClient()
    client.publish()
    payload = amf0.encode("onMetaData") + values
    (event,) = client.send(Message(4, 7, DATA, 1, amf0.encode("@setDataFrame") + payload))
    assert (event.message.payload, metadata_of(event)) == (payload, {})


def test_amf3_commands_and_data_are_understood(client):
    """Flash with object encoding 3 sends types 17 and 15; players get metadata in AMF0."""
    connect_with(client, {"app": "live", "objectEncoding": 3.0})
    client.create_stream()
    publish = b"\0" + amf0.encode("publish", 3.0, None, "room", "live")
    (event,) = client.send(Message(8, 0, COMMAND_AMF3, 1, publish))
    assert isinstance(event, PublishRequested)
    client.session.accept_publish(1)
    body = b"\0" + amf0.encode("@setDataFrame", "onMetaData") + b"\x11\x0a\x0b\x01\x0bwidth\x04\x85\x00\x01"
    (metadata,) = client.send(Message(4, 0, DATA_AMF3, 1, body))
    assert metadata == MetadataReceived(1, Message(4, 0, DATA, 1, amf0.encode("onMetaData", {"width": 640.0})))
    assert metadata_of(metadata) == {"width": 640.0}


@pytest.mark.parametrize("octet", [b"\0", b"\x01", b"\x02", b"\x03", b"\x11", b"\xff", b""])
def test_octet_in_front_of_amf3_messages_may_be_any(octet):
    """Nobody looks at the format octet but to skip it (librtmp, SRS), and some leave it out."""
    client = ScriptedClient()
    (event,) = client.send(Message(3, 0, 17, 0, octet + amf0.encode("connect", 1.0, {"app": "live"})))
    assert isinstance(event, ConnectRequested)
    client.session.accept_connect()
    client.send(Message(3, 0, 17, 0, octet + amf0.encode("createStream", 2.0, None)))
    (event,) = client.send(Message(3, 0, 17, 1, octet + amf0.encode("publish", 3.0, None, "room")))
    assert isinstance(event, PublishRequested)
    client.session.accept_publish(1)
    body = octet + amf0.encode("@setDataFrame", "onMetaData", {"width": 640.0})
    (metadata,) = client.send(Message(4, 0, DATA_AMF3, 1, body))
    assert metadata_of(metadata) == {"width": 640.0}
    body = octet + amf0.encode("onMetaData", {"width": 640.0})
    assert inspect(DATA_AMF3, body).packet == "metadata"


def key_frame_index(count):
    index = {"times": [float(at) for at in range(count)], "filepositions": [float(at * 1000) for at in range(count)]}
    return amf0.encode("onMetaData", EcmaArray({"duration": float(count), "keyframes": index, "width": 640.0}))


def test_key_frame_index_of_hours_is_passed_on_untouched():
    """Fourteen hours with a key frame a second: 100,000 numbers, as nginx-rtmp and SRS take them."""
    client = ScriptedClient()
    client.publish()
    body = key_frame_index(50_000)
    (event,) = client.send(Message(4, 0, DATA, 1, amf0.encode("@setDataFrame") + body))
    assert event == MetadataReceived(1, Message(4, 0, DATA, 1, body))
    assert metadata_of(event)["keyframes"]["times"][-1] == 49_999.0


def test_metadata_makes_no_objects_of_its_values():
    client = ScriptedClient()
    client.publish()
    for body in (key_frame_index(50_000), amf0.encode("onMetaData", [0.0] * 100_000)):
        octets = b"".join(map(client.writer.write, [Message(4, 0, DATA, 1, body)]))
        tracemalloc.start()
        client.octets(octets)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * len(body)


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (b"\x0a\0\0\0\1" * 33 + b"\5", "amf_depth"),
        (b"\x03\0\1a" * 33 + b"\5" + b"\0\0\x09" * 33, "amf_depth"),
        (b"\x0a" + (200_000).to_bytes(4, "big") + b"\5" * 200_000, "amf_nodes"),
        (b"\x08\0\0\0\0" + b"\0\1a\5" * 50_000 + b"\0\0\x09", "amf_nodes"),
        (b"\x11\x09" + b"\x81\x81\x01" + b"\x01" + b"\x04\x05" * 8192, "amf_nodes"),
    ],
)
def test_metadata_of_many_or_deep_values_ends_the_session(value, limit):
    client = ScriptedClient()
    client.publish()
    with pytest.raises(LimitExceededError, match=limit):
        client.send(Message(4, 0, DATA, 1, amf0.encode("onMetaData") + value))


@pytest.mark.parametrize("mark", [b"\0", b""], ids=["format byte", "none"])
def test_amf3_close_is_seen_while_input_is_held(mark):
    client = ScriptedClient()
    client.play()
    body = mark + amf0.encode("closeStream", 0.0, None)
    assert client.send(Message(3, 0, COMMAND_AMF3, 1, body), control_only=True) == [StreamClosed(1, "closeStream")]


def test_enhanced_rtmp_comes_without_announcement(client):
    """OBS sends FourCC packets and no fourCcList; they pass through."""
    event = connect_with(client, {"app": "live", "tcUrl": "rtmp://h/live"})
    assert not event.enhanced
    client.create_stream()
    client.call("publish", 3, None, "room", "live", stream_id=1)
    client.session.accept_publish(1)
    message = Message(6, 0, VIDEO, 1, b"\x90hvc1config")
    assert client.send(message) == [message]


@pytest.mark.parametrize("body", [b"", b"\x17", b"\xaf\0"])
def test_empty_and_short_media_is_passed_on(body):
    """Zero-length audio and video occur (SRS ProtocolRecvV0LenMessage, gortmplib 106)."""
    client = ScriptedClient()
    client.publish()
    messages = [Message(4, 0, AUDIO, 1, body), Message(6, 0, VIDEO, 1, body)]
    assert client.send(*messages) == messages


def test_media_on_another_stream_is_taken_for_the_one_there_is():
    client = ScriptedClient()
    client.publish()
    assert client.send(video(msid=0)) == [video(msid=1)]
    metadata = Message(4, 0, DATA, 0, amf0.encode("@setDataFrame", "onMetaData", {"width": 1.0}))
    (event,) = client.send(metadata)
    assert (event.stream_id, metadata_of(event)) == (1, {"width": 1.0})
    assert client.session.counters == {"media-on-other-stream": 2}


def test_publish_on_a_stream_that_was_not_created_is_taken():
    client = ScriptedClient()
    connect_with(client, {"app": "live"})
    for stream_id in range(1, 9):
        assert client.call("publish", 3, None, f"room{stream_id}", stream_id=stream_id)[0].stream_id == stream_id
        client.session.accept_publish(stream_id)
    with pytest.raises(LimitExceededError, match="message_streams"):
        client.call("publish", 3, None, "room9", stream_id=9)


def test_delete_of_a_stream_that_is_gone_is_ignored(client):
    client.publish()
    assert client.call("FCUnpublish", 4, None, "room") == [StreamClosed(1, "FCUnpublish")]
    assert client.call("closeStream", 0, None, stream_id=1) == []
    assert client.call("deleteStream", 0, None, 1.0) == []
    assert client.call("deleteStream", 0, None, 1.0) == [Ignored("delete-of-no-stream", "1")]
    assert client.call("deleteStream", 0, None, "one") == []
    assert client.call("FCUnpublish", 5, None, False) == []


def test_media_after_the_end_is_ignored(client):
    client.publish()
    client.call("FCUnpublish", 4, None, "room")
    assert client.send(*[video()] * 300) == [Ignored("media-without-publish", "9")]
    assert client.session.counters == {"media-without-publish": 300}


def test_play_commands_without_a_stream_are_ignored(client):
    client.play()
    client.call("closeStream", 0, None, stream_id=1)
    assert client.call("pause", 0, None, True, 0.0, stream_id=1) == [Ignored("command-without-play", "pause")]
    assert client.call("seek", 0, None, 0.0, stream_id=7) == []


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\0\x03\xe8"[:3], b"\5\0\0\0\0", b"\2\0\x07conn"])
def test_command_that_cannot_be_read_ends_the_session(body):
    """Cut off, or no name in front: nothing after it could be trusted."""
    client = ScriptedClient()
    connect_with(client, {"app": "live"})
    with pytest.raises(RemoteProtocolError) as caught:
        client.send(Message(3, 0, 20, 0, body))
    assert caught.value.code in {"command-name", "amf-truncated"}


@pytest.mark.parametrize(
    "arguments", [(None, None, None), (UNDEFINED,) * 3, ("x", "y", "z"), (float("nan"), 1e308, {})]
)
def test_play_arguments_of_wrong_types_mean_the_default(arguments):
    client = ScriptedClient()
    connect_with(client, {"app": "live"})
    client.create_stream()
    (event,) = client.call("play", 3, None, "room", *arguments, stream_id=1)
    assert (event.start_ms, event.reset) == (-2000, True)
    assert event.duration_ms in (None, 2**40)


def test_command_names_are_found_without_decoding():
    assert commands.command_name(commands.command("deleteStream", 0, None, 1.0)) == "deleteStream"
    assert commands.command_name(Message(3, 0, COMMAND_AMF3, 0, b"\0\2\0\4play\xff")) == "play"
    assert commands.command_name(Message(3, 0, 20, 0, b"\5")) == ""
    assert commands.command_name(Message(3, 0, 20, 0, b"\2\xff\xff")) == ""


@pytest.mark.parametrize("split", [whole, single], ids=lambda split: split.__name__)
def test_events_show_no_secrets(split):
    client = ScriptedClient(split=split)
    connect = client.connect(
        app="live?token=hunter2",
        tcUrl="rtmp://bob:hunter2@h/live?token=hunter2",
        pageUrl="http://h/?token=hunter2",
    )
    client.create_stream()
    (publish,) = client.call("publish", 3, None, "room?secret=hunter2&n=5", stream_id=1)
    assert (publish.query["secret"], publish.query["token"]) == ("hunter2", "hunter2")
    assert "hunter2" not in repr(connect) + repr(publish) + str(publish.url)
    assert "n=5" in str(publish.url)


def test_connect_when_to_the_same_address_shares_it_unless_it_is_the_peers_own():
    found = {}
    for tc_url in ("rtmp://h/live", "rtmp://h/live?token=1", "rtmp://user:word@h/live"):
        clients = [ScriptedClient(split=whole) for _ in range(2)]
        one, two = (connect_with(item, {"app": "live", "tcUrl": tc_url}).url for item in clients)
        assert one == two
        found[tc_url] = one is two
    assert list(found.values()) == [True, False, False]
