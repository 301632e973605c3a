"""The ban list that a watch keeps beside others who write it: no Spark."""

from __future__ import annotations

import ipaddress
import os
import time

import pytest
from abuse_records import at

from flowctl.analyze.abuse.watch import SOURCE, merge_into
from flowctl.analyze.options import AbuseOptions, WatchOptions
from flowctl.analyze.records.place import MOST_TEXT_BYTES, RecordPlace
from flowctl.core.server import bans as bans_module
from flowctl.core.server.bans import Ban, BanList, render
from flowctl.core.text.files import held
from flowctl.errors import BusyError, ConfigError

NOW_S = time.time()


def ban(address="192.0.2.1", score=12.0, lasts_s=600.0, source=SOURCE):
    return Ban(cidr=f"{address}/32", score=score, expires=at(NOW_S + lasts_s), source=source)


def listed(tmp_path):
    return {item.cidr.partition("/")[0] for item in BanList.parse((tmp_path / "bans.jsonl").read_text()).bans}


def add(tmp_path, *bans, anew=False, **judge):
    merge_into(RecordPlace(str(tmp_path)), bans, AbuseOptions(**judge), anew=anew)


def others(tmp_path, *bans):
    (tmp_path / "bans.jsonl").write_text(render(bans))


def test_list_when_a_batch_is_run_again_is_the_same(tmp_path):
    add(tmp_path, ban())
    status = (tmp_path / "bans.jsonl").stat()
    add(tmp_path, ban())
    assert (tmp_path / "bans.jsonl").stat().st_mtime_ns == status.st_mtime_ns
    add(tmp_path, ban("192.0.2.2"))
    assert listed(tmp_path) == {"192.0.2.1", "192.0.2.2"}


def test_list_when_bans_expire_leaves_them_out(tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.analyze.abuse.watch.time.time", lambda: NOW_S)
    others(tmp_path, ban("198.51.100.1", lasts_s=15, source=""), ban("198.51.100.2", lasts_s=-1, source=""))
    add(tmp_path, ban("192.0.2.1", lasts_s=10), ban("192.0.2.2", lasts_s=20))
    assert listed(tmp_path) == {"198.51.100.1", "192.0.2.1", "192.0.2.2"}
    for later_s, left in ((11, {"198.51.100.1", "192.0.2.2"}), (16, {"192.0.2.2"}), (21, set())):
        monkeypatch.setattr("flowctl.analyze.abuse.watch.time.time", lambda later_s=later_s: NOW_S + later_s)
        add(tmp_path)
        assert listed(tmp_path) == left


def test_list_when_others_write_it_keeps_their_bans(tmp_path):
    add(tmp_path)
    others(tmp_path, ban("203.0.113.1", source=""))
    add(tmp_path, ban("192.0.2.1"))
    assert listed(tmp_path) == {"203.0.113.1", "192.0.2.1"}


@pytest.mark.parametrize("broken", [False, True])
def test_list_when_told_to_begin_anew_drops_those_of_others_and_keeps_its_own(tmp_path, broken):
    others(tmp_path, ban("203.0.113.1", source=""), ban("192.0.2.1"))
    if broken:
        (tmp_path / "bans.jsonl").write_text("{broken")
    add(tmp_path, anew=True)
    add(tmp_path, ban("192.0.2.2"))
    assert listed(tmp_path) == {"192.0.2.2"} | (set() if broken else {"192.0.2.1"})


def test_list_when_it_is_a_link_is_locked_for_all_who_write_the_file(tmp_path):
    folders = [tmp_path / name for name in ("etc", "out")]
    for folder in folders:
        folder.mkdir()
    real, link = (folder / "bans.jsonl" for folder in folders)
    others(folders[0], ban("198.51.100.1", source=""))
    link.symlink_to(real)

    def change(there):
        with pytest.raises(BusyError, match="another program writes"), held(real, 0.0):
            pass
        return there + render([ban()])

    RecordPlace(str(folders[1])).change_text("bans.jsonl", change)
    assert listed(folders[0]) == {"198.51.100.1", "192.0.2.1"}
    assert link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_list_when_it_is_a_servers_stays_its(tmp_path):
    others(tmp_path, ban("198.51.100.1", source=""))
    path = tmp_path / "bans.jsonl"
    os.chown(path, 1234, 1235)
    path.chmod(0o640)
    before = os.umask(0o077)
    try:
        add(tmp_path, ban())
    finally:
        os.umask(before)
    there = path.stat()
    assert (there.st_uid, there.st_gid, there.st_mode & 0o777) == (1234, 1235, 0o640)
    assert listed(tmp_path) == {"198.51.100.1", "192.0.2.1"}


def test_list_when_it_cannot_be_read_names_it_and_leaves_it(tmp_path):
    (tmp_path / "bans.jsonl").write_text("{broken\n")
    with pytest.raises(ConfigError, match=r"bans\.jsonl, line 1") as caught:
        add(tmp_path, ban())
    assert "--replace-bans" in caught.value.hint
    assert (tmp_path / "bans.jsonl").read_text() == "{broken\n"


def test_list_when_it_is_too_long_leaves_it(tmp_path):
    line = Ban(cidr="203.0.113.1/32", expires=None).line() + "\n"
    text = line * (MOST_TEXT_BYTES // len(line) + 1)
    (tmp_path / "bans.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"bans\.jsonl has \d+ bytes"):
        add(tmp_path, ban())
    assert (tmp_path / "bans.jsonl").read_text() == text


def full(monkeypatch, size):
    monkeypatch.setattr(bans_module, "MOST_BYTES", size)


def test_list_when_it_grows_too_long_is_cut_and_can_be_read_again(tmp_path, monkeypatch):
    told = []
    full(monkeypatch, 3 * len(render([ban("192.0.2.10")])) - 1)
    for number in range(10, 14):
        merge_into(
            RecordPlace(str(tmp_path)),
            [ban(f"192.0.2.{number}", score=float(number))],
            AbuseOptions(),
            tell=told.append,
        )
    assert listed(tmp_path) == {"192.0.2.13", "192.0.2.12"}
    assert told[0].startswith("1 of 3 bans and limits are not on the list")
    assert len(told) == 2


def test_list_when_the_one_that_is_there_is_too_long_is_cut_but_for_bans_by_hand(tmp_path, monkeypatch):
    hand = [ban(f"198.51.100.{number}", score=0.0, source="") for number in range(2)]
    full(monkeypatch, len(render([*hand, ban()])))
    others(tmp_path, ban(), ban("192.0.2.2", score=20.0), *hand)
    add(tmp_path)
    assert listed(tmp_path) == {"192.0.2.2", "198.51.100.0", "198.51.100.1"}
    full(monkeypatch, len(render(hand)) - 1)
    with pytest.raises(ConfigError, match="more bans made by hand"):
        add(tmp_path)


def test_list_when_an_address_is_allowed_does_not_keep_a_ban_of_it(tmp_path):
    others(tmp_path, ban("198.51.100.1", source=""), ban("203.0.113.1", source=""))
    add(tmp_path, allow=(ipaddress.ip_network("198.51.100.0/24"),))
    assert listed(tmp_path) == {"203.0.113.1"}


@pytest.mark.parametrize(
    ("name", "value"), [("trigger_s", 0), ("window_s", 0.5), ("watermark_s", -1), ("most_files", 0)]
)
def test_watch_options_when_out_of_range_name_the_option(name, value):
    with pytest.raises(ConfigError, match=r"--(trigger|window|watermark|max-files) is .*, allowed is"):
        WatchOptions(**{name: value})
