"""What the load tester itself cannot do is not blamed on the server: its own end, its own warning, a run that fails."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time

import pytest
from result_kit import some_run, viewer

from flowctl.load.hostile.base import STAYS, AttackContext, AttackForm, AttackOutcome, hostile
from flowctl.load.peers.link import PeerLink, Target
from flowctl.load.peers.reactor import Reactor
from flowctl.load.results import summary
from flowctl.load.results.result import PeerEnd, PeerKind, PeerResult
from flowctl.wire.rtmp.client.session import ClientSession
from flowctl.wire.rtmp.session_config import ClientSessionConfig
from flowctl.wire.rtmp.url import parse_url

pytestmark = pytest.mark.realtime

FOREIGN = "192.0.2.77"
"""An address for documentation: no machine has it."""


@contextlib.contextmanager
def no_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        lowest = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def verdict_of(run, *, probe=False, **options):
    profile = hostile("T01 test", "s", "e", AttackForm(name="", run=run, allowed=STAYS))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        context = AttackContext(host="127.0.0.1", port=port, duration_s=1.0, watch_s=0.1, probe=probe, **options)
        return asyncio.run(profile.attack(context))


async def knock(attack):
    await attack.open()


async def knock_without_descriptors(attack):
    with no_descriptors():
        await attack.open()


def test_attack_when_there_is_no_descriptor_left_is_the_testers_fault():
    """EMFILE is met before anything has left this machine: nothing is said about the server."""
    verdict = verdict_of(knock_without_descriptors)
    assert (verdict.end, verdict.outcome, verdict.met) == (PeerEnd.TESTER_FAILED, AttackOutcome.UNREACHABLE, None)
    assert "Too many open files" in verdict.details


def test_attack_when_its_source_address_is_not_ours_is_the_testers_fault(monkeypatch):
    monkeypatch.setattr("flowctl.load.hostile.base.PROBE_S", 0.3)
    verdict = verdict_of(knock, source=FOREIGN, probe=True)
    assert (verdict.end, verdict.met, verdict.newcomer) == (PeerEnd.TESTER_FAILED, None, None)


def clumsy(session):
    del session
    raise ZeroDivisionError("a mistake of ours")


def end_of(source="", asks=ClientSession.play, guard=contextlib.nullcontext):
    """Start a link to a port that accepts; return its row when it has ended."""

    async def run():
        loop = asyncio.get_running_loop()
        reactor = Reactor(loop)
        ended = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as server:
            target = Target(socket.AF_INET, server.getsockname())
            row = PeerResult(number=0, profile="healthy", kind=PeerKind.HEALTHY, url="")
            item = PeerLink(
                reactor=reactor,
                target=target,
                url=parse_url(f"rtmp://127.0.0.1:{target.address[1]}/live/room"),
                result=row,
                asks=asks,
                config=ClientSessionConfig(),
                began=time.monotonic(),
                on_end=lambda _: ended.set(),
            )
            with guard():
                item.start(source, 2.0)
            await asyncio.wait_for(ended.wait(), 5.0)
            reactor.close()
        return row

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guard": no_descriptors}, "no socket: Too many open files"),
        ({"source": FOREIGN}, "Cannot assign requested address"),
        ({"asks": clumsy}, "in the load tester: ZeroDivisionError: a mistake of ours"),
    ],
)
def test_viewer_when_the_tester_fails_is_not_counted_as_the_servers_doing(options, words):
    row = end_of(**options)
    assert (row.end, row.end_details, row.cut) == (PeerEnd.TESTER_FAILED, words, False)


def test_run_when_the_tester_failed_for_somebody_has_failed():
    peers = [viewer(number, "healthy", PeerKind.HEALTHY) for number in range(9)]
    assert summary.what_failed(some_run(peers=peers)) is None
    peers.append(viewer(9, "B04", PeerKind.HOSTILE, end=PeerEnd.TESTER_FAILED, end_details="no socket"))
    found = some_run(peers=peers)
    assert summary.what_failed(found) == "the load tester failed for 1 of its peers: no socket"
    assert summary.summarize(found)["passed"] is False
