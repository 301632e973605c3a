"""Files of HLS on a disk that fails."""

from __future__ import annotations

import os
from unittest.mock import MagicMock

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
