"""What a watch has written: batches that are run again, expiry, folding, and whose checkpoint it is."""

from __future__ import annotations

import pytest

from flowctl.bans import Ban, BanList
from flowctl.errors import ConfigError
from flowctl.pipeline.watch_state import KEPT_BATCHES, BatchRecord, WatchState, merge

NOW_S = 1_790_000_000


def ban(address="192.0.2.1", score=12.0, lasts_s=600, **evidence):
    return Ban(
        cidr=f"{address}/32", score=score, evidence=evidence or {"handshake_timeout": 4}, expires_s=NOW_S + lasts_s
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
        assert (merged.score, merged.expires_s, dict(merged.evidence)) == (20.0, NOW_S + 99, {"deaf_close": 20})
