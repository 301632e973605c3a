"""RTMP with TLS from end to end: FFmpeg and clients of ours publish and play, from a server that they trust."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest
from certificate_kit import Pair, serial_of
from e2e_kit import NAME, address_of, frames_of, read_flv, wait_for_end, wait_for_viewers, wait_until
from e2e_programs import watch
from live_kit import perform

from flowctl.core.loop.tls import TlsSocket
from flowctl.errors import RemoteProtocolError
from flowctl.flv import TAG_VIDEO
from flowctl.wire.client.address import parse_address
from flowctl.wire.client.connect import connect_socket


@pytest.fixture
def secured(live, tmp_path, monkeypatch):
    """Return a live server with rtmps, whose authority clients of ours trust, and its certificate's files."""
    pair = Pair(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.authority))
    return live(rtmps="127.0.0.1:0,127.0.0.2:0", tls_certificate=pair.certificate, tls_key=pair.key), pair


def test_ffmpeg_and_our_player_when_they_speak_rtmps_get_every_packet(secured, clients, programs, sample, tmp_path):
    server, _ = secured
    source = sample("plain")
    recorded = programs.play(server, tmp_path / "recorded.flv")
    ours = clients.play(server)
    wait_for_viewers(server, 2)
    assert all(isinstance(item.core.host.sock, TlsSocket) for item in server.connections())
    published = programs.publish(server, source, rate=4.0)
    assert (published.wait(), published.log) == (0, "")
    assert recorded.wait() == 0
    wait_for_end(ours)
    sent, copied = watch(source), watch(tmp_path / "recorded.flv")
    assert sent.of("video") == copied.of("video")
    assert sent.of("audio") == copied.of("audio")
    assert frames_of(ours.messages, TAG_VIDEO) == frames_of(read_flv(source), TAG_VIDEO)


def test_our_player_when_the_servers_certificate_is_not_trusted_ends_and_says_why(secured, clients, monkeypatch):
    server, _ = secured
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(RemoteProtocolError, match="we do not trust the server's certificate") as caught:
        clients.play(server)
    assert "--ca-file" in caught.value.hint
    monkeypatch.setenv("FLOWCTL_TLS_INSECURE", "1")
    clients.play(server)
    wait_for_viewers(server, 1)


def test_certificate_when_renewed_is_shown_soon_and_a_broken_one_is_told_of_and_changes_nothing(secured, clients):
    server, pair = secured
    clients.play(server)
    wait_for_viewers(server, 1)

    def shown():
        sock = connect_socket(parse_address(address_of(server)))
        sock.settimeout(10)
        with sock:
            while not sock.established:
                with contextlib.suppress(BlockingIOError):
                    sock.recv(1)
            return serial_of(sock)

    now = pair.renew()
    server.reload.look_now()
    wait_until(lambda: server.changes.since(0)[0], "the certificate taken")
    assert [change.what for change in server.changes.since(0)[0]] == ["certificate"]
    assert shown() == now
    pair.certificate.write_text("nothing")
    said = perform(server, "reload", {})
    assert (said["certificate"]["state"], said["certificate"]["changed"]) == ("invalid", False)
    assert "there is no certificate in" in said["faults"][0]
    assert shown() == now
    now = pair.renew()
    said = perform(server, "reload", {})
    assert (list(said), said["certificate"]["state"]) == (["certificate"], "valid")
    assert shown() == now
    wait_for_viewers(server, 1)


def test_ffmpeg_when_it_verifies_us_goes_by_the_same_authority_and_name(secured, programs, sample, tmp_path):
    server, pair = secured
    published = programs.publish(server, sample("plain"))
    wait_until(lambda: server.hub.is_published(NAME), "the stream")
    trusting = ("-tls_verify", 1, "-ca_file", pair.authority)
    name = address_of(server).replace("127.0.0.1", "localhost")
    played = programs.start(*trusting, "-i", name, "-t", 1, "-c", "copy", "-f", "flv", "-y", tmp_path / "played.flv")
    assert played.wait() == 0
    assert watch(tmp_path / "played.flv").of("video")
    other = server.listeners[-1].address[1]
    refused = programs.start(*trusting, "-i", f"rtmps://127.0.0.2:{other}/{NAME}", "-f", "null", "-")
    assert refused.wait() != 0
    assert any(words in refused.log for words in ("verify failed", "does not match hostname")), refused.log
    published.process.terminate()
    published.process.wait(10)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_when_it_connects_verifies_chain_and_name_and_is_refused_an_old_version(secured):
    server, pair = secured
    host, port = server.listeners[-1].address
    command = ["openssl", "s_client", "-connect", f"{host}:{port}", "-brief", "-CAfile", pair.authority]

    def said(*options):
        done = subprocess.run([*command, *options], input="", capture_output=True, text=True, timeout=20, check=False)
        return done.returncode, done.stderr

    name = ("-servername", "localhost", "-verify_hostname", "localhost", "-verify_return_error")
    status, text = said(*name)
    assert (status, "Verification: OK" in text, "TLSv1.3" in text) == (0, True, True), text
    pair.renew()
    assert perform(server, "reload", {})["certificate"]["changed"]
    status, text = said(*name, "-tls1_2")
    assert (status, "Verification: OK" in text, "TLSv1.2" in text) == (0, True, True), text
    status, text = said("-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0")
    assert (status, "alert protocol version" in text) == (1, True), text
    status, text = said("-verify_hostname", "other.example", "-verify_return_error")
    assert (status, "hostname mismatch" in text) == (1, True), text
