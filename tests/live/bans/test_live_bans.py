"""Bans of a running server: abusers are limited first, store, file and commands add theirs, others are untouched."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from ipaddress import ip_network

import pytest
import structlog
from e2e_kit import Clients, open_live_server, wait_for_viewers, wait_until
from live_kit import perform

from flowctl.core.server.admission import AdmissionLimits
from flowctl.errors import LocalProtocolError
from flowctl.live.hooks import LiveHooks
from flowctl.live.judging.penalties import Allowance, PenaltyLimits
from flowctl.live.server import LiveServer
from flowctl.load.hostile.attacks import HOSTILE
from flowctl.load.hostile.base import AttackContext
from flowctl.load.hostile.peer import Peer, RefusedError
from flowctl.reasons import CloseReason
from flowctl.wire.media.synthetic import SyntheticSource

ABUSER = "127.0.9.1"
OTHERS = "127.0.0.1"
FAST = AdmissionLimits(burst_per_address=0)


@pytest.fixture
def clients():
    with Clients() as clients:
        yield clients


def bans(server):
    """Return what is in force, by network and action."""
    return {(item["cidr"], item["action"]): item for item in perform(server, "bans", {})["bans"]}


def attack(server, name, source=ABUSER):
    """Run a hostile profile of the load tester once."""
    context = AttackContext(
        host="127.0.0.1", port=server.address[1], source=source, duration_s=5.0, watch_s=0.05, probe=False
    )
    asyncio.run(HOSTILE[name].attack(context))


def decided(server):
    server.reload.run_job(lambda: None)


def of_limits(count):
    return PenaltyLimits(limits=Allowance(count, 600))


async def peer_of(server, source):
    """Return a peer that has connected."""
    peer = Peer("127.0.0.1", server.address[1], app="live", rng=random.Random(1))
    await peer.open(source=source)
    await peer.handshake()
    await peer.connect()
    return peer


def turned_away(server, source):
    """Return whether a connection from `source` is reset at once."""
    before = server.accepted_count
    with (
        contextlib.suppress(ConnectionResetError),
        socket.create_connection(server.address, timeout=20, source_address=(source, 0)) as sock,
    ):
        if sock.recv(1):
            return False
    return server.accepted_count == before


def test_abuser_when_it_goes_on_is_limited_then_banned_and_bystanders_are_untouched(clients, tmp_path):
    store = tmp_path / "bans.sqlite"
    with open_live_server(penalties=of_limits(60), ban_store=store) as server:
        publish, play = clients.publish(server, SyntheticSource()), clients.play(server)
        wait_for_viewers(server, 1)
        for _ in range(20):
            attack(server, "B08")
            decided(server)
            if (f"{ABUSER}/32", "ban") in bans(server):
                break
        found = bans(server)
        assert set(found) == {(f"{ABUSER}/32", "limit"), (f"{ABUSER}/32", "ban")}
        ban = found[f"{ABUSER}/32", "ban"]
        assert (ban["source"], ban["score"]) == ("penalty", 2.0)
        assert ban["evidence"]["amf_depth"] >= 12
        assert ban["reason"] == "limit hits: more than 60 in 10 min 0 s, repeat 1"
        assert turned_away(server, ABUSER)
        assert [change.origin for change in server.changes.since(0)[0]] == ["penalty", "penalty"]
        assert (publish.end, play.end) == (None, None)
        taken = len(play.messages)
        wait_until(lambda: len(play.messages) > taken, "the bystander goes on")
    with open_live_server(ban_store=store) as server:
        assert turned_away(server, ABUSER)


def test_abuser_when_others_share_its_address_is_limited_and_never_banned(clients):
    """Who behaves there is not kept out for it, and the reason and the log say how many there are."""
    with open_live_server(penalties=of_limits(24)) as server, structlog.testing.capture_logs() as lines:
        publish, play = clients.publish(server, SyntheticSource()), clients.play(server)
        wait_for_viewers(server, 1)
        for _ in range(6):
            attack(server, "B08", OTHERS)
        decided(server)
        found = bans(server)
        assert set(found) == {(f"{OTHERS}/32", "limit")}
        assert "shared: " in found[f"{OTHERS}/32", "limit"]["reason"]
        assert (publish.end, play.end) == (None, None)
        told = [line for line in lines if line["event"] == "penalty"]
        assert len(told) >= 2
        assert all("other connections of it behave" in line["reason"] for line in told)


def test_abuser_when_it_plays_is_ended_and_its_neighbour_goes_on(clients, monkeypatch):
    monkeypatch.setattr("flowctl.live.bans.penalties.POLL_S", 0.0)
    penalties = PenaltyLimits(commands=Allowance(60, 600))

    async def flood(server):
        peer = await peer_of(server, OTHERS)
        await peer.play("stream")
        for _ in range(2):
            for _ in range(45):
                await peer.command("_checkbw")
            await peer.check_alive()
        wait_until(lambda: server.reload.run_job(server.penalties.look) or bans(server), "the penalty")
        async with asyncio.timeout(20):
            await peer.read_to_end()
        peer.close()

    with open_live_server(penalties=penalties, wire={"commands_per_second": 0}) as server:
        publish, play = clients.publish(server, SyntheticSource()), clients.play(server)
        wait_for_viewers(server, 1)
        asyncio.run(flood(server))
        assert set(bans(server)) == {(f"{OTHERS}/32", "limit")}
        wait_until(lambda: server.closed_by_reason.get(CloseReason.BANNED) == 1, "the guilty one ended")
        assert (publish.end, play.end) == (None, None)


class Nobody(LiveHooks):
    """Lets nobody publish."""

    async def may_publish(self, request):
        del request
        return "not you"


def test_guesser_when_hooks_refuse_it_again_and_again_is_banned():
    penalties = PenaltyLimits(refused=Allowance(4, 600))

    async def guess(server):
        for number in range(5):
            peer = await peer_of(server, ABUSER)
            with contextlib.suppress(RefusedError):
                await peer.publish(f"guess{number}")
            peer.close()

    with open_live_server(penalties=penalties, make=lambda config: LiveServer(config, Nobody())) as server:
        for _ in range(2):
            asyncio.run(guess(server))
            decided(server)
        ban = bans(server)[f"{ABUSER}/32", "ban"]
        assert ban["evidence"]["publish"] == 5
        assert turned_away(server, ABUSER)
        assert server.admission.ban_of(OTHERS) is None


def test_header_of_a_proxy_when_nobody_trusts_it_punishes_who_sent_it():
    """A stranger that claims to speak for another address has its own punished, and only limited for connections."""
    penalties = PenaltyLimits(connections=Allowance(3, 600))
    with open_live_server(penalties=penalties, admission=FAST) as server:
        for _ in range(12):
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection(server.address, timeout=20, source_address=(ABUSER, 0)) as sock,
            ):
                sock.sendall(b"PROXY TCP4 198.51.100.9 192.0.2.1 4000 1935\r\n" + bytes(2000))
                while sock.recv(65_536):
                    pass
        wait_until(lambda: decided(server) or bans(server), "a penalty")
        assert {key[0] for key in bans(server)} <= {f"{ABUSER}/32"}
        assert {key[1] for key in bans(server)} == {"limit"}


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"\x16\x03\x01\x00\x05", id="TLS"),
        pytest.param(b"GET /x.png HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(bytes.fromhex("000300082112a442") + b"a" * 12 + bytes.fromhex("0019000411000000"), id="TURN"),
        pytest.param(bytes.fromhex("001c000100082112a442") + b"a" * 12 + bytes.fromhex("0006000461626364"), id="ICE"),
        pytest.param(bytes.fromhex("8046010301002d00000010") + b"a" * 61, id="ICE as SSL"),
    ],
)
def test_browser_when_a_page_sends_it_to_the_port_of_rtmp_is_not_punished(said):
    penalties, admission = (
        PenaltyLimits(connections=Allowance(3, 600)),
        AdmissionLimits(new_per_address_and_s=1e5, burst_per_address=0),
    )

    def say():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(server.address, timeout=20, source_address=(ABUSER, 0)) as sock,
        ):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65_536):
                pass

    with open_live_server(penalties=penalties, admission=admission) as server:
        for _ in range(6):
            say()
        server.admission.set_limits(FAST)
        for _ in range(20):
            say()
        assert server.admission.refused["new_per_address_and_s"] > 3
        wait_until(lambda: not server.connections(), "the end of all")
        assert server.accepted_count >= 6
        decided(server)
        assert bans(server) == {}


def test_spared_when_it_does_what_others_are_punished_for_is_not():
    spared = (ip_network("127.0.9.0/24"),)
    with open_live_server(penalties=of_limits(24), penalties_spare=spared) as server:
        for _ in range(4):
            attack(server, "B08")
        decided(server)
        assert bans(server) == {}


@pytest.mark.parametrize(
    "limit", ["player_wait_s", "media_silence_s", "work_share_per_address", "streams", "chunk_size_max_bytes"]
)
def test_limit_when_others_can_have_it_broken_counts_for_nothing(limit):
    """To wait for a stream that nobody publishes is no offence, nor is the fault that an encoder repeats."""
    with open_live_server(penalties=of_limits(1)) as server:
        with socket.create_connection(server.address, timeout=20):
            (connection,) = wait_until(server.connections, "the connection")
            for _ in range(50):
                server.penalties.limit_hit(connection, limit, 1.0, 1.0, 0.0)
        decided(server)
        assert bans(server) == {}


# -- from a store, a file and commands at once


FILE = '{"cidr": "127.0.0.7/32", "reason": "flood", "score": 4, "evidence": {"hard limit": 9}, "expires": null}\n'


def do(server, name, **given):
    return perform(server, name, given)


@pytest.fixture
def paths(tmp_path):
    file = tmp_path / "bans.jsonl"
    file.write_text(FILE)
    return {"ban_store": tmp_path / "bans.sqlite", "bans_file": file}


def test_bans_when_there_are_store_and_file_come_from_both_and_say_from_where(paths):
    with open_live_server(**paths) as server:
        found = do(server, "ban", network="127.0.0.9", duration="1h", reason="rude", origin="ops")
        assert found["in_store"]
        assert found["kept"] == "in the ban store, and after a restart too"
    assert paths["bans_file"].read_text() == FILE
    with open_live_server(**paths) as server:
        assert turned_away(server, "127.0.0.9")
        assert turned_away(server, "127.0.0.7")
        shown = {item["cidr"]: item for item in do(server, "bans")["bans"]}
    assert [(shown[cidr]["source"], shown[cidr]["reason"]) for cidr in sorted(shown)] == [
        ("file", "flood"),
        ("command of ops", "rude"),
    ]
    assert shown["127.0.0.7/32"]["evidence"] == {"hard limit": 9}


def test_unban_when_the_ban_is_in_the_store_lasts(paths):
    with open_live_server(**paths) as server:
        do(server, "ban", network="127.0.0.9")
        do(server, "ban", network="127.0.0.7", duration="1h")
        assert len(do(server, "unban", network="127.0.0.9")["lifted"]) == 1
        assert len(do(server, "unban", network="127.0.0.7")["lifted"]) == 1
    assert paths["bans_file"].read_text() == FILE
    with open_live_server(**paths) as server:
        assert do(server, "bans")["bans"] == []
        with pytest.raises(LocalProtocolError, match="is not banned"):
            do(server, "unban", network="127.0.0.9")
