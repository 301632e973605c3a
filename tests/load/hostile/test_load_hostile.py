"""Hostile profiles judge what a server does: servers that are sound, silent, rude, broken, or not there."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from flowctl.errors import ConfigError
from flowctl.load.hostile import base
from flowctl.load.hostile.attacks import HOSTILE, NOT_POSSIBLE
from flowctl.load.hostile.base import (
    ANY,
    ENDED,
    STAYS,
    AttackContext,
    AttackForm,
    AttackOutcome,
    AttackResult,
    FormResult,
    hostile,
)
from flowctl.load.hostile.octets import MARK_AT, picture
from flowctl.load.profiles import parse_profile
from flowctl.load.results.result import PeerEnd
from flowctl.wire.rtmp.limits import WireLimits
from flowctl.wire.rtmp.media.media import inspect
from flowctl.wire.rtmp.server.session import ServerSession
from flowctl.wire.rtmp.session_config import ServerSessionConfig

pytestmark = pytest.mark.realtime

SECONDS = 1.0


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(base, "PROBE_S", 0.6)


def profile_of(run, **options):
    return hostile("T01 test", "s", "e", AttackForm(name="", run=run, **options))


def judge(profile, serve, **options):
    """Attack a server whose connections `serve(reader, writer, count)` handles; return the verdict."""

    async def run():
        handlers = []

        async def handle(reader, writer):
            handlers.append(asyncio.current_task())
            try:
                await serve(reader, writer, len(handlers))
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.transport.abort()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            context = AttackContext(
                host="127.0.0.1",
                port=server.sockets[0].getsockname()[1],
                **({"duration_s": SECONDS, "watch_s": 0.2} | options),
            )
            verdict = await profile.attack(context)
            await asyncio.sleep(0.02)  # for those that see the end of their input
            for task in handlers:
                task.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)
            await asyncio.sleep(0)  # for the transports to be closed
            return verdict

    return asyncio.run(run())


async def sound(reader, writer, _count):
    """Serve RTMP with our own session: accept every connect."""
    session = ServerSession(ServerSessionConfig(limits=WireLimits()), now=0.0)
    while data := await reader.read(65536):
        try:
            if any(type(event).__name__ == "ConnectRequested" for event in session.receive(data, 0.0)):
                session.accept_connect()
                session.resume(0.0)
        finally:
            writer.write(session.data_to_send())
            with contextlib.suppress(ConnectionError):
                await writer.drain()


async def deaf(reader, _writer, _count):
    while await reader.read(65536):
        pass


async def rude(_reader, _writer, _count):
    """Close at once."""


async def broken(reader, writer, _count):
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await reader.read(65536)


async def knock(attack):
    await attack.connected()


def test_form_when_it_is_done_closes_its_connections_though_another_goes_on():
    ended = asyncio.Event()

    async def serve(reader, writer, count):
        await sound(reader, writer, count)
        ended.set()

    async def wait(attack):
        await attack.open()
        await ended.wait()
        attack.details = "the other one has left"

    forms = (AttackForm(name="quick", run=knock), AttackForm(name="slow", run=wait))
    verdict = judge(hostile("T01 test", "s", "e", *forms), serve, probe=False)
    assert {form.form: form.details for form in verdict.forms} == {"quick": "", "slow": "the other one has left"}


def test_attack_when_the_server_serves_on_is_contained():
    verdict = judge(profile_of(knock, allowed=STAYS), sound)
    assert (verdict.outcome, verdict.met, verdict.newcomer) == (AttackOutcome.CONTAINED, True, True)
    assert verdict.handshake_s is not None
    assert verdict.end is PeerEnd.RUN_ENDED


def test_attack_when_the_server_may_not_keep_it_is_not_met():
    verdict = judge(profile_of(knock, allowed=ENDED), sound)
    assert (verdict.outcome, verdict.met) == (AttackOutcome.CONTAINED, False)


def test_attack_when_too_short_to_tell_says_so():
    """A server that would have acted later than the attack ended is not judged."""
    verdict = judge(profile_of(knock, allowed=ENDED, needs_s=60.0), sound)
    assert verdict.met is None


def test_attack_when_the_server_closes_after_the_handshake_is_cut():
    async def cuts(reader, writer, count):
        if count != 2:  # the witness comes first, the newcomer last
            await sound(reader, writer, count)
        await reader.readexactly(1537)
        writer.write(b"\x03" + bytes(1536) + bytes(1536))
        await reader.read(4096)

    async def shake(attack):
        await attack.shaken()

    verdict = judge(profile_of(shake, allowed=ENDED), cuts)
    assert (verdict.outcome, verdict.cut, verdict.met) == (AttackOutcome.CUT, True, True)


def test_attack_when_the_server_closes_at_once_is_refused_and_newcomers_too():
    verdict = judge(profile_of(knock, allowed=ANY), rude)
    assert (verdict.outcome, verdict.newcomer, verdict.met) == (AttackOutcome.REFUSED, False, False)
    assert "newcomer" in verdict.details


def test_attack_when_the_server_breaks_the_protocol_is_an_error_of_the_server():
    verdict = judge(profile_of(knock, allowed=ANY), broken)
    assert (verdict.outcome, verdict.met, verdict.end) == (AttackOutcome.BROKEN, False, PeerEnd.ERROR)


def test_attack_when_the_server_never_answers_ends_at_its_deadline():
    async def run():
        loop = asyncio.get_running_loop()
        began = loop.time()
        verdict = await asyncio.to_thread(judge, profile_of(knock), deaf)
        return verdict, loop.time() - began

    verdict, took_s = asyncio.run(run())
    assert (verdict.newcomer, verdict.met) == (False, False)
    assert took_s < 20


def test_attack_when_nobody_listens_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = AttackContext(host="127.0.0.1", port=port, duration_s=SECONDS, probe=False)
    verdict = asyncio.run(profile_of(knock).attack(context))
    assert (verdict.outcome, verdict.met, verdict.end) == (AttackOutcome.UNREACHABLE, False, PeerEnd.NOT_CONNECTED)


def test_attack_when_the_server_dies_of_it_is_not_met_although_the_attacker_is_cut():
    everybody = []

    async def fragile(reader, writer, count):
        everybody.append(writer)
        if count == 2:
            for other in everybody:
                other.transport.abort()
        await sound(reader, writer, count)

    async def kill(attack):
        await attack.open()

    verdict = judge(profile_of(kill, allowed=ANY), fragile)
    assert (verdict.witness, verdict.newcomer, verdict.met) == (False, True, False)
    assert "without a word" in verdict.details
    assert judge(profile_of(knock), sound).witness is True


def test_attack_when_a_fault_was_seen_is_not_met_whatever_the_outcome():
    async def run(attack):
        await attack.connected()
        attack.fault("the server told a secret")

    verdict = judge(profile_of(run), sound)
    assert verdict.met is False
    assert "the server told a secret" in verdict.details


def test_attack_when_forms_end_alike_tells_them_in_one_line():
    ways = [
        ("zero", AttackOutcome.CUT, "C", True),
        ("one", AttackOutcome.CUT, "C", True),
        ("two", AttackOutcome.CONTAINED, None, False),
    ]
    forms = [FormResult(form=name, outcome=how, code=code, met=met) for name, how, code, met in ways]
    told = AttackResult(outcome=AttackOutcome.CUT, met=False, details="", end=PeerEnd.RUN_ENDED, forms=forms).form_words
    assert told.splitlines() == ["zero, one: cut (C)", "two: contained, which is not as it should be"]
    assert (
        AttackResult(outcome=AttackOutcome.CUT, met=True, details="", end=PeerEnd.LEFT, forms=forms[:1]).form_words
        == ""
    )


def test_attack_when_one_form_is_asked_for_runs_that_one_only():
    profile = HOSTILE["B03"]
    verdict = judge(profile, sound, forms=("zero",))
    assert [item.form for item in verdict.forms] == ["zero"]
    assert judge(profile, sound, forms=("nothing",), probe=False).met is None


def test_attack_when_the_server_answers_per_message_is_found_out():
    async def chatty(reader, writer, _count):
        config = ServerSessionConfig(ack_floor_bytes=1)
        session = ServerSession(config, now=0.0)
        while data := await reader.read(512):
            for event in session.receive(data, 0.0):
                kind = type(event).__name__
                if kind == "ConnectRequested":
                    session.accept_connect()
                elif kind == "PublishRequested":
                    session.accept_publish(event.stream_id)
            session.resume(0.0)
            writer.write(session.data_to_send())

    verdict = judge(HOSTILE["B32"], chatty, forms=("window-1",), duration_s=5.0)
    assert verdict.met is False
    assert "acknowledgements of 262144 bytes" in verdict.details


def test_profiles_when_listed_are_complete_and_explained():
    assert len({item.alias for item in HOSTILE.values()}) == len(HOSTILE) == 48
    for profile in HOSTILE.values():
        assert len({form.name for form in profile.forms}) == len(profile.forms)
        assert profile.summary
        assert "ound servers" in profile.explanation
        assert profile.expectation


def test_profile_when_looked_up_is_found_by_id_and_name():
    found = [parse_profile(name).profile for name in ("b04", "B04", "declared-length")]
    assert found == [HOSTILE["B04"]] * 3
    with pytest.raises(ConfigError, match="no HTTP"):
        parse_profile("B34")
    assert set(NOT_POSSIBLE) == {"B27", "B34"}


@pytest.mark.parametrize(("key", "name"), [(True, "KEY"), (False, "INTER")])
def test_picture_when_made_is_what_servers_take_for_one(key, name):
    body = picture(200, b"mark", key=key)
    assert inspect(9, body).message_class.name == name
    assert len(body) == 200
    assert body[MARK_AT : MARK_AT + 4] == b"mark"
