"""The book of bans and its SQLite file: what they keep through restarts, crashes, damage, full disks and clocks."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
import structlog
from process_kit import small_disk

from flowctl.core.server.bans import Ban, BanAction, BanList
from flowctl.errors import ConfigError, LocalProtocolError
from flowctl.live.bans import store as ban_store
from flowctl.live.bans.book import BanBook
from flowctl.live.bans.store import BanStore
from flowctl.live.bans.words import Stamp, Word

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)
ONE = Ban(
    cidr="203.0.113.7/32",
    expires=NOON,
    reason="guessed keys",
    score=3.5,
    evidence={"refused tries": 600},
    source="penalty",
)
TWO = Ban(cidr="2001:db8::/48", expires=None, action=BanAction.LIMIT, source="command of ops")
THREE = Ban(cidr="192.0.2.0/24", expires=None)


def words_of(*bans):
    """Return bans as a store is given them."""
    words = [Word.of_ban(ban, Stamp(7, at, "")) for at, ban in enumerate(bans)]
    return {word.place: word for word in words}


def kept(book):
    return [word.ban for word in book.words if word.ban is not None]


def fill(store):
    """Have no more room on the disk; SQLite meets its own limit as it meets that of a disk."""
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages}")


def steps_of(act):
    """Return how many calls are made, of Python and of C, and how many lines are run."""
    count = 0

    def traced(*_):
        nonlocal count
        count += 1
        return traced

    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(lambda *_: traced() and None)
    sys.settrace(traced)
    try:
        act()
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])
    return count


MANY = [Ban(cidr=f"10.0.{n >> 8}.{n & 255}/32", expires=None, reason="x" * 100) for n in range(2000)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bans.sqlite"


def bans_of(path):
    """Return what a new life finds in the file."""
    store = BanStore(path)
    try:
        return {(word.key, word.ban.action): word.ban for word in store.read()[0] if word.ban is not None}
    finally:
        store.close()


def test_store_when_opened_again_has_all_of_each_ban(path):
    store = BanStore(path)
    store.write(words_of(ONE, TWO, THREE), 7.0)
    store.write(dict.fromkeys(words_of(THREE)), 9.0)
    assert store.read()[1] == 9.0
    store.close()
    assert bans_of(path) == {(ONE.cidr, ONE.action): ONE, (TWO.cidr, TWO.action): TWO}
    assert path.stat().st_mode & 0o777 == 0o600


KILLED = """
import sys
from pathlib import Path
from flowctl.live.bans.store import BanStore
from flowctl.core.server.bans import Ban
from flowctl.live.bans.words import Stamp, Word
store = BanStore(Path(sys.argv[1]))
for number in range(1_000_000):
    block = f"10.{number >> 8 & 255}.{number & 255}"
    words = [Word.of_ban(Ban(cidr=f"{block}.{at}/32", expires=None), Stamp(1, at, "")) for at in range(4)]
    store.write({word.place: word for word in words}, float(number))
    if number == 3:
        print("writes", flush=True)
"""


def test_store_when_its_process_is_killed_in_the_middle_has_whole_changes(path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"writes\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
    found = bans_of(path)
    assert len(found) >= 16
    blocks = {}
    for cidr, _ in found:
        blocks.setdefault(cidr.rpartition(".")[0], []).append(cidr)
    assert {len(items) for items in blocks.values()} == {4}
    assert list(path.parent.glob("*.damaged*")) == []


@pytest.mark.parametrize("damage", ["all", "middle", "text"])
def test_store_when_the_file_is_damaged_is_put_aside_told_and_begun_anew(path, damage):
    store = BanStore(path)
    store.write(words_of(*MANY), 1.0)
    store.close()
    data = bytearray(path.read_bytes())
    if damage == "all":
        data[:] = os.urandom(len(data))
    elif damage == "middle":
        data[4096:-4096] = bytes(len(data) - 8192)
    else:
        data = b"this is no database, but it is long enough to be looked at" * 20
    path.write_bytes(data)
    with structlog.testing.capture_logs() as lines:
        assert bans_of(path) == {}
    aside = next(path.parent.glob("bans.sqlite.damaged-*"))
    assert aside.read_bytes() == data
    told = next(line for line in lines if line["log_level"] == "error")
    assert (told["aside"], told["file"]) == (str(aside), str(path))
    assert "sqlite3" in told["hint"]
    again = BanStore(path)
    again.write(words_of(ONE), 1.0)
    again.close()
    assert list(bans_of(path).values()) == [ONE]


def remove(path):
    path.unlink()


def replace(path):
    path.with_name("other").write_text("not a database")
    path.with_name("other").rename(path)


def write_over(path):
    path.write_bytes(b"x" * path.stat().st_size)


def cut(path):
    path.write_bytes(b"")


def remove_log(path):
    path.with_name(f"{path.name}-wal").unlink()


def move_and_link(path):
    path.symlink_to(path.rename(path.with_name(f"moved-{time.monotonic_ns()}")))


@pytest.mark.parametrize("harm", [remove, replace, write_over, cut, remove_log, move_and_link])
def test_store_when_its_file_is_taken_away_while_it_is_open_is_begun_anew_and_told(path, harm):
    """SQLite would go on writing to what nobody finds again: the next look sees it, and all bans are in a new file."""
    book = BanBook(BanStore(path), wall=lambda: 1.8e9, steady=lambda: 7.0)
    book.ban([ONE, TWO])
    with structlog.testing.capture_logs() as lines:
        book.follow_clock()
        assert lines == []
        harm(path)
        book.follow_clock()
        book.ban([THREE])
        harm(path)
        book.lift(THREE.cidr, [THREE], "")
        harm(path)
        book.ban([THREE])
    assert [(line["log_level"], line["fault"]) for line in lines] == [
        ("error", "it was removed, replaced or written over while the server ran")
    ] * 3
    assert book.stored
    book.close()
    assert set(bans_of(path)) == {(ban.cidr, ban.action) for ban in (ONE, TWO, THREE)}
    if harm is write_over:  # what somebody put there is as it was
        aside = [item for item in path.parent.glob("*.damaged-*") if not item.name.endswith("-wal")]
        assert [set(item.read_bytes()) for item in aside] == [set(b"x")] * 3


def test_store_when_a_link_leads_to_it_sees_that_its_log_is_taken_away(path):
    real = path.with_name("real.sqlite")
    path.symlink_to(real)
    store = BanStore(path)
    store.write(words_of(ONE), 1.0)
    assert store.whole()
    remove_log(real)
    assert not store.whole()
    store.close()


def test_store_when_its_folder_is_gone_is_not_told_to_be_durable_until_it_is_back(path):
    now = [7.0]
    path = path.parent / "folder" / path.name
    path.parent.mkdir()
    book = BanBook(BanStore(path), wall=lambda: 1.8e9, steady=lambda: now[0])
    path.parent.rename(path.parent.with_name("elsewhere"))
    book.ban([ONE])
    assert "No such file" in book.fault
    assert not book.stored
    path.parent.mkdir()
    now[0] += 60
    book.follow_clock()
    assert book.stored
    book.close()
    assert set(bans_of(path)) == {(ONE.cidr, ONE.action)}


def test_book_when_it_takes_back_the_store_it_left_has_what_both_have_said(path):
    """A server that was to take the place of this one has banned somebody, and ended before it served."""
    book = BanBook(BanStore(path), wall=lambda: 1.8e9)
    book.ban([ONE])
    book.close()
    book.ban([TWO])
    assert not book.stored
    other = BanBook(BanStore(path), wall=lambda: 1.8e9)
    other.ban([THREE])
    with pytest.raises(ConfigError):
        book.take_back()
    other.close()
    book.take_back()
    assert book.stored
    assert {ban.cidr for ban in book.in_force().bans} == {ONE.cidr, TWO.cidr, THREE.cidr}
    book.lift(ONE.cidr, [ONE], "")
    book.take_back()  # harmless
    book.close()
    assert set(bans_of(path)) == {(ban.cidr, ban.action) for ban in (TWO, THREE)}


def test_book_when_its_store_was_left_to_a_successor_lifts_nothing_of_it(path):
    """Lifted here they would be back with the server that takes over; what was banned since is lifted as ever."""
    book = BanBook(BanStore(path), wall=lambda: 1.8e9)
    book.ban([ONE])
    book.close()
    book.ban([TWO])
    with pytest.raises(LocalProtocolError, match="left to the server"):
        book.lift(ONE.cidr, book.in_force().bans, "")
    book.lift(TWO.cidr, book.in_force().bans, "")
    assert kept(book) == [ONE]


def test_store_when_the_disk_is_full_says_so_and_has_what_it_had(path):
    store = BanStore(path)
    store.write(words_of(ONE), 1.0)
    fill(store)
    with pytest.raises(OSError, match="full") as failed:
        store.write(words_of(*MANY), 2.0)
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(path))
    assert ([word.ban for word in store.read()[0]], store.read()[1]) == ([ONE], 1.0)
    store.close()


def test_store_when_its_log_would_fill_the_disk_writes_on(tmp_path):
    with small_disk(tmp_path / "disk", "400k") as folder:
        store = BanStore(folder / "bans")
        for number in range(200):
            store.write(words_of(dataclasses.replace(ONE, score=float(number + 1))), float(number))
        assert [word.ban.score for word in store.read()[0]] == [200.0]
        store.close()


def test_book_when_the_disk_was_full_has_all_in_force_and_writes_it_once_there_is_room(path):
    """A ban does not wait for the disk: it counts at once, the fault is told once, and later the store has it.

    It is not lifted meanwhile, or it would be back after a restart.
    """
    now = [1000.0]
    store = BanStore(path)
    book = BanBook(store, wall=lambda: now[0] + 1.8e9, steady=lambda: now[0])
    book.ban([ONE])
    fill(store)
    with structlog.testing.capture_logs() as lines:
        book.ban(MANY)
        book.ban([TWO])
        now[0] += 60
        book.follow_clock()
        assert "full" in book.fault
        assert len(book.in_force()) == 2002
        with pytest.raises(OSError, match="full"):
            book.lift(ONE.cidr, [ONE], "")
        assert ONE in kept(book)
        store._database.execute("PRAGMA max_page_count = 1000000")
        book.follow_clock()
        assert book.fault  # not tried each second
        now[0] += 60
        book.follow_clock()
    assert book.stored
    assert [line["log_level"] for line in lines] == ["error", "info"]
    book.close()
    assert len(bans_of(path)) == 2002


@pytest.mark.parametrize(
    ("statement", "said"),
    [("PRAGMA user_version = 9", "version 9, this flowctl knows 2"), ("PRAGMA application_id = 7", "another program")],
)
def test_store_when_another_program_or_a_later_version_wrote_it_is_left_alone(path, statement, said):
    BanStore(path).close()
    database = sqlite3.connect(path)
    database.execute(statement)
    database.close()
    with pytest.raises(ConfigError, match=said):
        BanStore(path)
    assert [item.name for item in path.parent.iterdir()] == ["bans.sqlite"]


def test_store_when_another_server_has_it_says_so(path, monkeypatch):
    """Two writers would undo each other's bans, so the second is refused, and told what there is for two."""
    monkeypatch.setattr(ban_store, "_FORM", dataclasses.replace(ban_store._FORM, busy_s=0.05))
    first = BanStore(path)
    with pytest.raises(ConfigError, match="is open in another process") as refused:
        BanStore(path)
    assert "fleet" in refused.value.hint
    first.close()
    BanStore(path).close()


@pytest.mark.parametrize(("name", "said"), [("none/bans.sqlite", "No such file"), (".", "Is a directory")])
def test_store_when_it_cannot_be_made_names_the_path_and_why(tmp_path, name, said):
    with pytest.raises(ConfigError, match=f"ban_store: .*{said}"):
        BanStore(tmp_path / name)


def test_store_when_a_row_is_no_ban_has_the_others_and_says_how_many(path):
    """A row that somebody wrote by hand and got wrong costs that row alone."""
    store = BanStore(path)
    store.write(words_of(ONE), 1.0)
    store._database.execute("INSERT INTO words VALUES ('ban all', 'all')")
    store._database.execute('INSERT INTO words VALUES (\'x\', \'["ban","192.0.2.1/32",1,0,"",{}]\')')
    with structlog.testing.capture_logs() as lines:
        assert [word.ban for word in store.read()[0]] == [ONE]
    assert [line["rows"] for line in lines] == [2]
    store.close()


class Clocks:
    """A time of day that can be set, and one that cannot."""

    def __init__(self) -> None:
        self.steady_s = 500.0
        self.set_by_s = 0.0

    def wall(self) -> float:
        return NOON.timestamp() + self.steady_s - 500.0 + self.set_by_s

    def steady(self) -> float:
        return self.steady_s

    def book(self, store=None) -> BanBook:
        return BanBook(store, wall=self.wall, steady=self.steady)


HOUR = Ban(cidr="192.0.2.1/32", expires=NOON + timedelta(hours=1))


@pytest.mark.parametrize("set_by_s", [-86_400.0, 86_400.0, -5.0])
def test_book_when_the_clock_is_set_has_bans_last_as_long_as_they_were_to(set_by_s):
    clocks = Clocks()
    book = clocks.book()
    book.ban([HOUR, TWO])
    clocks.steady_s += 600
    clocks.set_by_s = set_by_s
    with structlog.testing.capture_logs() as lines:
        assert book.follow_clock()
    assert (lines[0]["by_s"], lines[0]["bans"]) == (set_by_s, 1)
    clocks.steady_s += 2999
    assert len(book.in_force()) == 2
    clocks.steady_s += 2
    book.follow_clock()
    assert book.in_force().bans == [TWO]


def test_book_when_the_clock_was_set_back_lifts_what_it_banned_before_that():
    clocks = Clocks()
    book = clocks.book()
    book.ban([HOUR])
    for back_s in (600.0, 1200.0):
        clocks.set_by_s = -back_s
        assert book.follow_clock()
    book.lift(HOUR.cidr, book.in_force().bans, "ops")
    assert book.in_force().bans == []


def test_book_when_the_clock_is_corrected_little_by_little_leaves_bans_as_they_are():
    clocks = Clocks()
    book = clocks.book()
    book.ban([HOUR])
    for _ in range(100):
        clocks.steady_s += 1
        clocks.set_by_s -= 0.5
        assert not book.follow_clock()
    assert kept(book) == [HOUR]


@pytest.mark.parametrize("member", ["", "a"])
def test_book_when_the_clock_was_set_back_while_it_was_off_has_bans_last_no_longer_than_they_had_left(path, member):
    clocks = Clocks()
    book = clocks.book(BanStore(path))
    book.join(member)
    book.ban([HOUR])
    book.close()
    clocks.set_by_s = -30 * 86_400.0
    with structlog.testing.capture_logs() as lines:
        book = clocks.book(BanStore(path))
        book.join(member)
    assert "set back" in lines[0]["event"]
    assert sum(line.get("bans", 0) for line in lines if "set back" in line["event"]) == 1
    clocks.steady_s += 3601
    assert book.in_force().bans == []
    book.close()


def test_book_when_bans_ended_while_it_was_off_says_how_many(path):
    clocks = Clocks()
    book = clocks.book(BanStore(path))
    book.ban([HOUR, TWO])
    book.close()
    clocks.steady_s += 7200
    with structlog.testing.capture_logs() as lines:
        book = clocks.book(BanStore(path))
    assert [(line["bans"], line["ended_meanwhile"]) for line in lines] == [(1, 1)]
    book.close()
    assert list(bans_of(path).values()) == [TWO]


def test_ban_when_it_has_ended_does_not_come_back_with_a_clock_that_is_set_back():
    clocks = Clocks()
    book = clocks.book()
    book.ban([HOUR])
    clocks.steady_s += 4000
    book.follow_clock()
    clocks.set_by_s = -4000.0
    assert book.follow_clock()
    assert book.in_force().match("192.0.2.1", clocks.wall()) is None


# -- beside the ban file


@pytest.mark.parametrize("hours", [None, 10])
def test_ban_when_the_file_has_its_network_too_ends_by_itself(hours):
    book = Clocks().book()
    of_file = Ban(cidr=HOUR.cidr, expires=None if hours is None else NOON + timedelta(hours=hours))
    book.replace_file_bans(BanList([of_file]))
    book.ban([HOUR])
    assert book.in_force().bans == [of_file]
    book.replace_file_bans(BanList())
    assert book.in_force().bans == [HOUR]


def test_unban_when_the_file_names_the_network_holds_until_the_file_says_something_later(path):
    clocks = Clocks()
    book = clocks.book(BanStore(path))
    assert book.replace_file_bans(BanList([HOUR, TWO])) == 0
    lifted, _ = book.lift(HOUR.cidr, book.in_force().bans, "ops")
    assert lifted == [HOUR]
    assert book.in_force().bans == [TWO]
    book.close()
    book = clocks.book(BanStore(path))
    assert book.replace_file_bans(BanList([HOUR, TWO])) == 1
    assert book.in_force().bans == [TWO]
    later = Ban(cidr=HOUR.cidr, expires=NOON + timedelta(hours=2))
    assert book.replace_file_bans(BanList([later])) == 0
    assert book.in_force().bans == [later]
    book.replace_file_bans(BanList([HOUR]))
    book.ban([HOUR])
    assert len(book.in_force()) == 1
    book.close()


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "memory"])
def test_ban_when_there_are_ten_times_as_many_takes_as_many_steps(path, stored):
    """Beside bans of commands, a store and a file: of a network that the file names too, and of two that are new."""
    steps = []
    for many in (200, 2000):
        book = BanBook(BanStore(path.with_name(f"{many}")) if stored else None)
        book.ban(MANY[:many])
        file = [dataclasses.replace(ban, cidr=ban.cidr.replace("10.0.", "198.18.")) for ban in MANY[:many]]
        book.replace_file_bans(BanList(file))
        book.ban([dataclasses.replace(HOUR, expires=None)])
        book.in_force()
        steps.append([])
        for cidr in ("172.16.0.1/32", "192.0.2.0/24", "198.18.0.1/32"):
            ban = Ban(cidr=cidr, expires=None)
            steps[-1].append(steps_of(lambda ban=ban, book=book: (book.ban([ban]), book.in_force())))
            assert book.in_force().get(cidr, BanAction.BAN) == ban
        assert len(book.in_force()) == 2 * many + 3
        book.close()
    assert steps[0] == pytest.approx(steps[1], rel=0.1)  # ten times as many would be in proportion


def test_list_in_force_when_changed_step_by_step_is_as_if_made_anew():
    """By bans, limits and liftings here and elsewhere, of networks that a file names, and by bans that end."""
    rng, clocks = random.Random(7), Clocks()
    book = clocks.book()
    networks = [f"10.0.0.{number}/32" for number in range(4)] + ["10.0.0.0/30", "2001:db8::/48"]
    for step in range(400):
        clocks.steady_s += rng.choice((0, 1, 40))
        book.follow_clock()
        now, cidr = clocks.wall(), rng.choice(networks)
        ends = rng.choice((None, datetime.fromtimestamp(int(now) + rng.randrange(2, 300), UTC)))
        ban = Ban(cidr=cidr, expires=ends, action=rng.choice(list(BanAction)))
        stamp = Stamp(int(now * 1000), step, rng.choice("ab"))
        match rng.randrange(6):
            case 0 | 1:
                book.ban([ban])
            case 2:
                book.merge([Word.of_ban(ban, stamp)])
            case 3:
                book.merge([Word.lifting(cidr, now + 500, "", stamp)])
            case 4:
                book.replace_file_bans(BanList([ban, *book._of_file.bans[:3]]))
            case _:
                if here := [item for item in book.in_force().bans if item.lasts(now)]:
                    book.lift(rng.choice(here).cidr, here, "")
        made_anew = clocks.book()
        made_anew.merge(book.words)
        made_anew.replace_file_bans(book._of_file)
        assert book.in_force() == made_anew.in_force()
