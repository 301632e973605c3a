"""Recorded commands, metadata and fuzz inputs of other projects, played to a server session."""

import pytest
from rtmp_session_kit import SPLITS, ScriptedClient, metadata_of
from vector_kit import RECORDED, VECTORS

from flowctl.errors import RemoteProtocolError
from flowctl.wire.rtmp.amf import amf0
from flowctl.wire.rtmp.wire import Message

BY_ID = {vector["id"]: vector for vector in RECORDED}


def octets_of(vector_id):
    if vector_id not in BY_ID:
        pytest.skip(f"no recorded vector {vector_id} in {VECTORS}")
    return bytes.fromhex(BY_ID[vector_id]["input_hex"])


@pytest.fixture(params=SPLITS, ids=lambda split: split.__name__)
def client(request):
    return ScriptedClient(split=request.param)


def test_recorded_player_connect_is_understood(client):
    (event,) = client.send(Message(3, 0, 20, 0, octets_of("amf0-xiu-player-connect")))
    assert (event.url.app, event.tc_url, event.url.host) == ("live", "rtmp://localhost:1935/live", "localhost")


def test_recorded_ios_publisher_connect_is_understood(client):
    payload = amf0.encode("connect", 1.0) + octets_of("amf0-lal-ios-publisher-connect")
    (event,) = client.send(Message(3, 0, 20, 0, payload))
    assert (event.url.app, event.object_encoding, event.page_url) == ("live", 0, "")
    assert event.flash_ver == "FMLE/3.0 (compatible; FMSc/1.0)"


def test_recorded_publish_without_type_is_live(client):
    client.connect()
    client.create_stream()
    (event,) = client.send(Message(3, 0, 20, 1, octets_of("amf0-lal-publish-without-type")))
    assert (event.name, event.kind) == ("innertest", "live")


def test_recorded_play_is_understood(client):
    client.connect()
    client.create_stream()
    (event,) = client.send(Message(3, 0, 20, 1, octets_of("amf0-gortmplib-play")))
    assert (event.name, event.start_ms) == ("1", 0)


def test_recorded_release_of_obs_is_answered(client):
    """go2rtc's sample of OBS."""
    client.connect()
    client.send(Message(3, 0, 20, 0, octets_of("amf0-go2rtc-obs-key")))
    (reply,) = client.replies()
    assert (reply.name, reply.transaction_id) == ("_result", 2.0)


@pytest.mark.parametrize("vector_id", ["amf0-go2rtc-obs", "amf0-go2rtc-mediamtx-1"])
def test_recorded_metadata_is_unwrapped(vector_id):
    """OBS and MediaMTX: the values are read, and the octets behind @setDataFrame stay as they are."""
    client = ScriptedClient()
    client.publish()
    payload = octets_of(vector_id)
    (event,) = client.send(Message(4, 0, 18, 1, payload))
    assert event.message.payload == payload.removeprefix(amf0.encode("@setDataFrame"))
    assert metadata_of(event)["videocodecid"] == 7.0


@pytest.mark.parametrize("vector_id", [name for name in BY_ID if name.startswith("seed-")] or ["seed-none"])
@pytest.mark.parametrize("state", ["connecting", "publish", "play"])
def test_recorded_fuzz_input_ends_in_a_remote_error_at_most(vector_id, state):
    octets = octets_of(vector_id)
    for message in (None, Message(3, 0, 20, 1, octets), Message(4, 0, 18, 1, octets)):
        client = ScriptedClient()
        if state != "connecting":
            getattr(client, state)()
        try:
            client.octets(octets) if message is None else client.send(message)
        except RemoteProtocolError:
            assert client.session.closed
        else:
            assert not client.session.closed
