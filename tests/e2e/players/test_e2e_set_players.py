"""Real players of a set of renditions: large pictures as long as the line carries them, then small ones, and no fault.

All of them play at once, each behind a line of its own that becomes slow when all have large pictures; each test judges
one of them.
"""

from __future__ import annotations

import contextlib
import time
from itertools import pairwise

import pytest
from e2e_kit import Clients, open_live_server
from e2e_players import LARGE, RENDITIONS, SHALLOW, SMALL, THIN, Ffmpeg, GStreamer, Mpv, Vlc, publish_set
from loopback_kit import LOOPBACK, loopback

from flowctl.demo.line import ProxyLine
from flowctl_servers.live import SERVER

PATIENCE_S = 20.0
"""Within which all have been given large pictures, or small ones again; the recordings are longer than twice that."""
PLAYS = [(Ffmpeg, "rtmp"), (Ffmpeg, "http"), (Mpv, "rtmp"), (Vlc, "http"), (GStreamer, "rtmp")]


@pytest.fixture(scope="module")
def played(sample, tmp_path_factory):
    """Return each player that is here after it has played, by kind and transport."""
    found, lines = {}, []
    with (
        open_live_server(make=SERVER.build, http=loopback(), renditions=RENDITIONS) as server,
        Clients() as clients,
        contextlib.ExitStack() as stack,
    ):
        publish_set(server, clients, sample)
        ports = {item.name: item.address[1] for item in server.listeners}
        for kind, transport in PLAYS:
            if not kind.missing():
                lines.append(stack.enter_context(ProxyLine(ports[transport], buffer_bytes=SHALLOW, host=LOOPBACK)))
                url = f"{transport}://{loopback(lines[-1].port)}/live/show{'.flv' if transport == 'http' else ''}"
                player = kind(url, tmp_path_factory.mktemp(transport))
                found[kind, transport] = stack.enter_context(player)
        wait_for_all(found.values(), LARGE)
        for line in lines:
            line.rate = THIN
        wait_for_all(found.values(), SMALL)
        return found


def wait_for_all(players, size):
    """Wait until all show pictures of one size, or for so long that the tests are to say who does not."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and not all(player.shown()[-1:] == [size] for player in players):
        time.sleep(0.1)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("kind", "transport"), PLAYS, ids=lambda value: getattr(value, "__name__", value))
def test_player_when_its_line_becomes_slow_goes_from_large_to_small_pictures(kind, transport, played):
    if kind.missing():
        pytest.skip(f"not here: {kind.missing()}")
    player = played[kind, transport]
    assert player.shown() == [SMALL, LARGE, SMALL], player.log
    assert player.complaints() == []


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["rtmp", "http"])
def test_pictures_change_their_size_at_key_frames_and_sound_goes_on(transport, played):
    if Ffmpeg.missing():
        pytest.skip(f"not here: {Ffmpeg.missing()}")
    player = played[Ffmpeg, transport]
    pictures, sounds = player.frames(0), player.frames(1)
    changes = [at for (_, before), (at, octets) in pairwise(pictures) if octets != before]
    assert len(changes) == 2
    # One key frame a second; the clock of RTMP rounds to 1 ms.
    assert all((at - pictures[0][0] + 1) % 1000 <= 2 for at in changes)
    assert all(abs(later - at - 1024) <= 48 for (at, _), (later, _) in pairwise(sounds))
