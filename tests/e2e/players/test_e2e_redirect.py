"""Which players of other people go where a server sends them: the table of docs/redirect.md."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest
from e2e_kit import Clients, open_live_server
from e2e_players import Ffmpeg, GStreamer, Mpv, Vlc
from loopback_kit import loopback

from flowctl.live.cluster.redirect import EdgeReport
from flowctl.live.config import Redirect
from flowctl.wire.client.source import FlvFile
from flowctl_servers.live import SERVER

PATIENCE_S = 20.0
PLAYS = [(kind, transport) for kind in (Ffmpeg, Mpv, Vlc, GStreamer) for transport in ("http", "rtmp")]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "redirect.md"


@pytest.fixture(scope="module")
def played(sample, tmp_path_factory):
    """Return which players have shown pictures of the edge, of those that were sent there."""
    settings = {"http": loopback(), "make": SERVER.build}
    with (
        open_live_server(origin=loopback(), redirect=Redirect.ALL, **settings) as origin,
        open_live_server(**settings) as edge,
        Clients() as clients,
        contextlib.ExitStack() as stack,
    ):
        for server in (origin, edge):
            clients.publish(server, FlvFile(sample("small")), name="live/show")
        (book,) = [item.book for item in origin.companions if hasattr(item, "book")]
        bases = {item.name: f"{item.name}://{loopback(item.address[1])}" for item in edge.listeners}
        found = {}
        for kind, transport in PLAYS:
            if not kind.missing():
                tell(book, bases)
                port = {item.name: item.address[1] for item in origin.listeners}[transport]
                url = f"{transport}://{loopback(port)}/live/show{'.flv' if transport == 'http' else ''}"
                found[kind, transport] = stack.enter_context(kind(url, tmp_path_factory.mktemp(transport)))
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not all(
            player.shown() or player.process.poll() is not None for player in found.values()
        ):
            tell(book, bases)
            time.sleep(0.1)
        assert book.figures()["redirected"] >= len(found)
        assert not list(origin.hub.viewing())
        return {which: bool(player.shown()) for which, player in found.items()}


def tell(book, bases):
    """Tell an origin of an edge, as that would."""
    now = time.monotonic()
    report = EdgeReport(
        name="0" * 16, number=int(now * 1000), bases=bases, hls=False, connections=0, most=9, drains=False, made_at=now
    )
    book.take_report(report.words(now), 1)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("kind", "transport"), PLAYS, ids=lambda value: getattr(value, "__name__", value))
def test_player_when_sent_to_an_edge_follows_as_the_page_says(kind, transport, played):
    if kind.missing():
        pytest.skip(f"not here: {kind.missing()}")
    row = re.search(rf"^\| {kind.__name__}\b[^|]*\|([^|]+)\|([^|]+)\|", PAGE.read_text(), re.MULTILINE | re.IGNORECASE)
    said = row[1] if transport == "http" else row[2]
    assert played[kind, transport] == (said.strip() == "yes")
