"""Files of HLS on a disk that fails, and those that come just while they are looked for."""

from __future__ import annotations

import itertools
import os
import time
from unittest.mock import MagicMock

import pytest
from e2e_kit import wait_until

from flowctl.live.remux import serving
from flowctl.live.remux.serving import HlsFiles


def test_segment_when_the_disk_cannot_read_it_ends_the_connection_and_closes_once(tmp_path, monkeypatch):
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "room-1.ts").write_bytes(b"x" * 9)
    exchange = MagicMock()
    exchange.request.path, exchange.request.method = "/live/room-1.ts", "GET"
    exchange.request.header.return_value = ""
    monkeypatch.setattr(os, "pread", MagicMock(side_effect=OSError(5, "EIO")))
    HlsFiles(tmp_path).handle(exchange)
    exchange.connection.close.assert_called_once()
    exchange.respond.assert_not_called()


def write(path, text):
    """Write a file as our writers do."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    beside.rename(path)


def playlist(hint):
    return f'#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:1\n#EXT-X-PRELOAD-HINT:TYPE=PART,URI="{hint}"\n'


@pytest.fixture
def room(tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    write(folder / "room.m3u8", playlist("room-1.0.m4s"))
    return folder


def asked_for(files, name):
    """Return the exchange of a request, once it is answered, or waits."""
    exchange = MagicMock()
    exchange.request.path, exchange.request.method = f"/live/{name}", "GET"
    exchange.request.header.return_value = ""
    files.handle(exchange)
    return exchange


def test_part_when_another_process_has_told_of_it_just_now_is_waited_for(room):
    """Workers share a port: the playlist came from one of them, and the part that it names is asked of another."""
    files = HlsFiles(room.parent, lambda: 7.0)
    assert files.playlists.get("live", "room.m3u8").hint == "room-1.0.m4s"
    write(room / "room-1.0.m4s", "part")
    write(room / "room.m3u8", playlist("room-1.1.m4s"))
    asked_for(files, "room-1.1.m4s").respond.assert_not_called()


def test_part_when_it_comes_while_it_is_looked_for_is_given(room, monkeypatch):
    files = HlsFiles(room.parent)
    opened = serving.open_below

    def come(*place):
        monkeypatch.setattr(serving, "open_below", opened)
        try:
            return opened(*place)
        finally:
            write(room / "room-1.0.m4s", "part")
            write(room / "room.m3u8", playlist("room-1.1.m4s"))

    monkeypatch.setattr(serving, "open_below", come)
    exchange = asked_for(files, "room-1.0.m4s")
    exchange.respond.assert_not_called()
    exchange.write.assert_called_once_with(b"part")


def test_playlist_when_the_clock_of_its_writer_was_put_back_is_the_new_one(room):
    files = HlsFiles(room.parent, MagicMock(side_effect=itertools.count()))
    os.utime(room / "room.m3u8", (time.time() + 3600,) * 2)
    assert files.playlists.get("live", "room.m3u8").hint == "room-1.0.m4s"
    write(room / "room.m3u8", playlist("room-1.1.m4s"))
    assert files.playlists.get("live", "room.m3u8").hint == "room-1.1.m4s"


def test_requests_when_there_was_no_thread_for_one_before_wait(room, monkeypatch):
    """At a limit of processes, for a moment: later ones would have waited for ever."""
    files = HlsFiles(room.parent)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", MagicMock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            asked_for(files, "room-1.0.m4s")
    answered = asked_for(files, "room-1.0.m4s").connection.call_soon
    wait_until(lambda: answered.called, "it is looked after")
