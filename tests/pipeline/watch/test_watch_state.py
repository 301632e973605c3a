"""What a watch has written: batches that are run again, expiry, folding, and whose checkpoint it is."""

from __future__ import annotations

import ipaddress

import pytest
from abuse_kit import at

from flowctl.errors import ConfigError
from flowctl.pipeline.watch import state as watch_state
from flowctl.pipeline.watch.state import KEPT_BATCHES, BatchRecord, WatchState, merge
from flowctl.server.bans import Ban, BanList, render

NOW_S = 1_790_000_000


def ban(address="192.0.2.1", score=12.0, lasts_s=600, **evidence):
    return Ban(
        cidr=f"{address}/32", score=score, evidence=evidence or {"handshake_timeout": 4}, expires=at(NOW_S + lasts_s)
    )


def record(number, *bans, rows=10):
    return BatchRecord(number, list(bans), files=1, rows_in=rows, rows_out=rows - 1, by_reason={"ts: null": 1})


def listed(tmp_path):
    return {item.cidr for item in BanList.parse((tmp_path / "bans.jsonl").read_text()).bans}


def test_state_when_a_batch_is_run_again_counts_it_once(tmp_path):
    """Entering a batch a second time, in the same process or in the next, changes neither sums nor bans."""
    state = WatchState(tmp_path, 100)
    assert state.enter(record(0, ban()), NOW_S) == 1
    assert state.enter(record(0, ban()), NOW_S) == 0
    text = (tmp_path / "bans.jsonl").read_text()
    again = WatchState(tmp_path, 100)
    assert again.enter(record(0, ban()), NOW_S) == 0
    assert (again.totals()["rows_in"], again.totals()["batches"]) == (10, 1)
    assert (tmp_path / "bans.jsonl").read_text() == text


def test_state_when_a_process_starts_anew_has_the_bans_of_the_one_before(tmp_path):
    """Bans of earlier batches stay in the list that the first batch after a restart writes."""
    WatchState(tmp_path, 100).enter(record(0, ban("192.0.2.1")), NOW_S)
    WatchState(tmp_path, 100).enter(record(1, ban("192.0.2.2")), NOW_S)
    assert listed(tmp_path) == {"192.0.2.1/32", "192.0.2.2/32"}


def test_state_when_bans_expire_leaves_them_out(tmp_path):
    """A ban is in the list until it expires, and not after."""
    state = WatchState(tmp_path, 100)
    state.enter(record(0, ban("192.0.2.1", lasts_s=10), ban("192.0.2.2", lasts_s=20)), NOW_S)
    state.write_bans(NOW_S + 10)
    assert listed(tmp_path) == {"192.0.2.2/32"}


def test_state_when_there_are_too_many_bans_keeps_the_worst(tmp_path):
    """The list has at most as many bans as were asked for, the highest scores first."""
    state = WatchState(tmp_path, 2)
    state.enter(record(0, *(ban(f"192.0.2.{n}", score=float(n)) for n in range(1, 6))), NOW_S)
    assert listed(tmp_path) == {"192.0.2.4/32", "192.0.2.5/32"}


def test_state_when_batches_are_old_folds_them_and_keeps_their_sums(tmp_path):
    """Old batches without a ban in force become one line of totals, before and after a restart."""
    state = WatchState(tmp_path, 100)
    count = KEPT_BATCHES * 3
    for number in range(count):
        state.enter(record(number, ban(lasts_s=-5)), NOW_S)
    files = list((tmp_path / "watch").glob("batch-*.json"))
    assert KEPT_BATCHES <= len(files) <= 2 * KEPT_BATCHES
    for item in (state, WatchState(tmp_path, 100)):
        sums = item.totals()
        assert (sums["batches"], sums["rows_in"], sums["by_reason"]) == (count, 10 * count, {"ts: null": count})


def test_state_when_a_ban_is_in_force_is_not_folded(tmp_path):
    """A batch stays as long as a ban of it does."""
    state = WatchState(tmp_path, 100)
    state.enter(record(0, ban(lasts_s=10_000)), NOW_S)
    for number in range(1, KEPT_BATCHES * 3):
        state.enter(record(number), NOW_S)
    assert listed(tmp_path) == {"192.0.2.1/32"}
    assert WatchState(tmp_path, 100).totals()["batches"] == KEPT_BATCHES * 3


def test_state_when_late_rows_are_told_twice_counts_them_once(tmp_path):
    """Late rows belong to their batch."""
    state = WatchState(tmp_path, 100)
    for _ in range(2):
        state.note_late(3, 7)
    assert WatchState(tmp_path, 100).totals()["late"] == 7


def test_state_when_it_belongs_to_another_checkpoint_is_refused(tmp_path):
    """Numbers of batches of another stream would overwrite these; so that is an error with a way out."""
    state = WatchState(tmp_path, 100)
    state.claim(None)
    state.own("one")
    state.enter(record(0, ban()), NOW_S)
    WatchState(tmp_path, 100).claim("one")
    for other in ("two", None):
        with pytest.raises(ConfigError, match="another checkpoint") as caught:
            WatchState(tmp_path, 100).claim(other)
        assert "--checkpoint" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"batch": 1}', "null"])
def test_state_when_a_file_is_damaged_names_it(tmp_path, text):
    """A damaged file of the folder is an error that names it, not a wrong sum."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "batch-0000000001.json").write_text(text)
    with pytest.raises(ConfigError, match=r"batch-0000000001\.json is damaged"):
        WatchState(tmp_path, 100)


def test_bans_when_merged_last_as_long_as_the_longest_with_the_worst_evidence():
    """Of two bans of one network the later end and the evidence of the higher score are kept, in either order."""
    one, two = ban(score=20.0, lasts_s=10, deaf_close=20), ban(score=11.0, lasts_s=99, auth_refused=11)
    for order in ([one, two], [two, one]):
        [merged] = merge(order).values()
        assert (merged.score, merged.expires, dict(merged.evidence)) == (20.0, at(NOW_S + 99), {"deaf_close": 20})


def others(tmp_path, *bans):
    """Write a ban list as somebody else would: the whole file."""
    (tmp_path / "bans.jsonl").write_text(render(bans))


def test_state_when_others_write_the_list_keeps_their_bans_until_they_expire(tmp_path):
    """Bans of another job stay on the list beside the watch's own, over a restart too, and go when they expire."""
    others(tmp_path, ban("198.51.100.1", lasts_s=50), ban("198.51.100.2", lasts_s=-1))
    state = WatchState(tmp_path, 100)
    state.enter(record(0, ban("192.0.2.1")), NOW_S)
    assert listed(tmp_path) == {"198.51.100.1/32", "192.0.2.1/32"}
    others(tmp_path, ban("203.0.113.1", lasts_s=90))  # one that does not merge, like an earlier version
    state.write_bans(NOW_S)
    assert listed(tmp_path) == {"203.0.113.1/32", "192.0.2.1/32"}
    again = WatchState(tmp_path, 100)
    again.enter(record(1, ban("192.0.2.2")), NOW_S)
    assert (listed(tmp_path), again.others(NOW_S)) == ({"203.0.113.1/32", "192.0.2.1/32", "192.0.2.2/32"}, 1)
    again.write_bans(NOW_S + 90)
    assert listed(tmp_path) == {"192.0.2.1/32", "192.0.2.2/32"}


def test_state_when_told_to_begin_anew_drops_what_was_there_and_keeps_what_comes(tmp_path):
    """--replace-bans gives up the list of the start only, even one that cannot be read."""
    (tmp_path / "bans.jsonl").write_text("{broken")
    state = WatchState(tmp_path, 100, replace_bans=True)
    state.enter(record(0, ban("192.0.2.1")), NOW_S)
    assert listed(tmp_path) == {"192.0.2.1/32"}
    others(tmp_path, ban("203.0.113.1"))
    state.write_bans(NOW_S)
    assert listed(tmp_path) == {"192.0.2.1/32", "203.0.113.1/32"}


def test_state_when_the_list_cannot_be_read_names_it_and_leaves_it(tmp_path):
    """A list with a typing error is no reason to throw it away, at the start or later."""
    state = WatchState(tmp_path, 100)
    (tmp_path / "bans.jsonl").write_text("{broken\n")
    with pytest.raises(ConfigError, match=r"bans\.jsonl, line 1") as caught:
        state.write_bans(NOW_S)
    assert "--replace-bans" in caught.value.hint
    with pytest.raises(ConfigError, match=r"bans\.jsonl, line 1"):
        WatchState(tmp_path, 100)
    assert (tmp_path / "bans.jsonl").read_text() == "{broken\n"


def test_state_when_an_address_is_allowed_does_not_keep_a_ban_of_it(tmp_path):
    """What the watch may not ban it does not keep on the list either."""
    others(tmp_path, ban("198.51.100.1"), ban("203.0.113.1"))
    WatchState(tmp_path, 100, [ipaddress.ip_network("198.51.100.0/24")]).write_bans(NOW_S)
    assert listed(tmp_path) == {"203.0.113.1/32"}


def test_state_when_files_were_seen_knows_them_after_a_restart_and_folding(tmp_path, monkeypatch):
    """Files of earlier batches are known, those of the batch itself are not, and not more than are remembered."""
    monkeypatch.setattr(watch_state, "KNOWN_FILES", 30)
    state = WatchState(tmp_path, 100)
    count = KEPT_BATCHES * 3
    for number in range(count):
        entry = record(number)
        entry.identities = [f"uid {number}"]
        state.enter(entry, NOW_S)
    for item in (state, WatchState(tmp_path, 100)):
        known = item.known(count - 1)
        assert {f"uid {count - 2}", f"uid {count - KEPT_BATCHES - 1}"} <= known  # the second is of a folded batch
        assert not known & {f"uid {count - 1}", "uid 0"}
        assert len(known) <= 2 * KEPT_BATCHES + 30


def test_state_when_files_are_bad_tells_why_before_and_after_folding(tmp_path):
    """Files that were put aside are counted by reason, and those whose rows nobody knows as such."""
    state = WatchState(tmp_path, 100)
    for number in range(KEPT_BATCHES * 3):
        entry = record(number)
        entry.bad_files, entry.files_unknown_rows = [("a", "copy"), ("b", "empty file")], 1
        state.enter(entry, NOW_S)
    for item in (state, WatchState(tmp_path, 100)):
        sums = item.totals()
        assert sums["files_by_reason"] == {"copy": KEPT_BATCHES * 3, "empty file": KEPT_BATCHES * 3}
        assert (sums["bad_files"], sums["files_unknown_rows"]) == (KEPT_BATCHES * 6, KEPT_BATCHES * 3)


def test_state_when_rows_are_late_for_weeks_keeps_the_sum_in_a_small_file(tmp_path):
    """The file of late rows holds the newest batches and a sum, and a batch told again is not added to the sum."""
    state = WatchState(tmp_path, 100)
    for number in range(KEPT_BATCHES * 5):
        state.note_late(number, 2)
    state.note_late(3, 2)
    again = WatchState(tmp_path, 100)
    again.note_late(KEPT_BATCHES * 5 - 1, 2)
    assert again.totals()["late"] == KEPT_BATCHES * 10
    assert len((tmp_path / "watch" / "late.json").read_text()) < 20 * KEPT_BATCHES
