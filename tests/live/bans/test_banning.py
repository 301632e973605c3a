"""Bans of the file, of commands and of penalties side by side: none outlasts its maker's word or shortens another's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flowctl.core.server.bans import MOST_BYTES, NO_BANS, Ban, BanAction, BanList, render
from flowctl.live.bans.banning import Banning
from flowctl.live.bans.kept import KeptBans
from flowctl.live.bans.store import BanStore
from flowctl.live.reload.watchfile import WatchedFile

CIDR = "192.0.2.1/32"


def limit(minutes):
    """Return a limit of `CIDR`; None: one that stays."""
    expires = None if minutes is None else datetime.now(UTC) + timedelta(minutes=minutes)
    return Ban(cidr=CIDR, expires=expires, action=BanAction.LIMIT)


@pytest.mark.parametrize("minutes", [None, 600])
def test_penalty_when_the_file_takes_its_own_back_ends_by_itself(minutes):
    """A penalty does not keep what the file said for the same network beyond the file."""
    lists = []
    banning = Banning(lambda bans: lists.append(bans) or 0, lambda: None)
    banning.take_file(BanList([limit(minutes)]))
    banning.punish([limit(10)])
    assert [ban.expires for ban in lists[-1].bans] == [limit(minutes).expires]
    banning.take_file(NO_BANS)
    (left,) = lists[-1].bans
    assert left.expires is not None
    assert left.expires <= datetime.now(UTC) + timedelta(minutes=11)


def test_penalty_when_a_command_has_limited_for_longer_does_not_shorten_it():
    """Of two ends of one network and action the later one counts."""
    lists = []
    banning = Banning(lambda bans: lists.append(bans) or 0, lambda: None)
    banning.ban(limit(600))
    banning.punish([limit(10)])
    assert lists[-1].bans[0].expires > datetime.now(UTC) + timedelta(minutes=500)


def test_ban_when_it_has_ended_does_not_come_back_with_a_clock_that_is_set_back():
    """The list in force knows the time of day alone, so it is made anew without what is over."""
    wall, steady = [1.8e9], [0.0]
    lists = []
    kept = KeptBans(None, lambda: wall[0], lambda: steady[0])
    banning = Banning(lambda bans: lists.append(bans) or 0, lambda: None, kept, lambda: wall[0])
    banning.punish([Ban(cidr=CIDR, expires=datetime.fromtimestamp(wall[0] + 60, UTC), action=BanAction.LIMIT)])
    wall[0] += 400
    steady[0] += 400
    banning.look()
    wall[0] -= 4000
    banning.look()
    assert lists[-1].match("192.0.2.1", wall[0]) is None


def test_lift_when_the_store_cannot_be_written_to_changes_nothing(tmp_path, monkeypatch):
    """A network that file and store name stays in both, and in force, when one of them cannot be changed."""
    path = tmp_path / "bans.jsonl"
    path.write_text(render([limit(None)]))
    file = WatchedFile(path, lambda text, where: banning.take_file(BanList.parse(text, where)) and None, MOST_BYTES)
    store = BanStore(tmp_path / "bans.sqlite")
    lists = []
    banning = Banning(lambda bans: lists.append(bans) or 0, lambda: file, KeptBans(store))
    try:
        file.read()
        banning.ban(limit(10))

        def full(*_):
            raise OSError(28, "no space left", str(store.path))

        with monkeypatch.context() as patched:
            patched.setattr(store, "replace", full)
            with pytest.raises(OSError, match="no space"):
                banning.lift(CIDR)
        assert CIDR in path.read_text()
        assert len(banning.here(CIDR)) == 2
        banning.lift(CIDR)
        assert path.read_text() == ""
        assert lists[-1].bans == []
    finally:
        banning.close()
