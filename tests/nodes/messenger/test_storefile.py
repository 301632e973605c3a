"""The file of a store: what is in it after it was closed, filled, damaged, or taken by two."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_kit import small_disk

from flowctl.errors import BusyError, LocalProtocolError, StoreError
from flowctl.nodes.messenger.storefile import (
    IDS,
    SEQUENCES,
    AddMessage,
    ForgetSeen,
    MarkSeen,
    RemoveMessage,
    RunEffect,
    StoredMessage,
    StoreFile,
    TakeOverSeen,
    Transaction,
)
from flowctl.nodes.messenger.wire import MAX_EARLIER

MAX_BYTES = 64 << 20
Answers = list[Exception | None]


@pytest.fixture
def answers() -> Answers:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def add(number: int, answers: Answers, *, peer: bytes = b"peer", record: bytes = b"record") -> AddMessage:
    return AddMessage(number, peer, number, record, answers.append)


def write(file: StoreFile, *changes) -> None:
    for done, error in file.write(changes)[0]:
        done(error)


def counting(number: int) -> Callable[[Transaction], object]:
    return lambda transaction: transaction.execute("INSERT INTO effects VALUES (?)", (number,))


def make_effects(file: StoreFile) -> None:
    write(
        file,
        RunEffect(lambda transaction: transaction.execute("CREATE TABLE effects (number INTEGER)"), lambda _: None),
    )


def size_of(path: Path) -> int:
    """Return how much of the disk a file and its log take."""
    return sum(item.stat().st_size for item in path.parent.glob(f"{path.name}*"))


def effects(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [row[0] for row in connection.execute("SELECT number FROM effects ORDER BY rowid")]
    finally:
        connection.close()


def test_outbox_when_opened_again_has_what_was_not_removed(path, answers):
    file = StoreFile(path, MAX_BYTES)
    write(file, *(add(number, answers) for number in range(3)), AddMessage(3, b"b", 0, b"\0-\xff", answers.append))
    write(file, RemoveMessage(0), RemoveMessage(2), RemoveMessage(99))
    before = file.life.incarnation
    file.close()
    again = StoreFile(path, MAX_BYTES)
    assert answers == [None] * 4
    assert [StoredMessage(1, b"peer", 1, b"record"), StoredMessage(3, b"b", 0, b"\0-\xff")] == list(again.pending())
    assert (4, {before: 4}) == (again.next_message_id(), again.life.earlier)
    assert before != again.life.incarnation
    again.close()


def test_incarnations_when_two_files_are_made_differ(tmp_path):
    files = [StoreFile(tmp_path / name, MAX_BYTES) for name in "ab"]
    assert files[0].life.incarnation != files[1].life.incarnation
    for file in files:
        file.close()


def test_lives_when_an_old_copy_is_opened_are_those_of_the_copy(path, answers):
    """Messages of the outbox are of the lives until the copy; a later life of the other line is none of them."""
    lives = []
    for number in range(3):
        file = StoreFile(path, MAX_BYTES)
        lives.append(file.life.incarnation)
        write(file, add(number, answers))
        file.close()
        if number == 0:
            shutil.copy(path, path.parent / "copy")
    copy, last = StoreFile(path.parent / "copy", MAX_BYTES), StoreFile(path, MAX_BYTES)
    assert {lives[0]: 1} == copy.life.earlier
    assert {lives[0]: 1, lives[1]: 2, lives[2]: 3} == last.life.earlier
    write(last, *(RemoveMessage(number) for number in range(3)))
    for item in (copy, last):
        item.close()
    again = StoreFile(path, MAX_BYTES)
    assert again.life.earlier == {}
    again.close()


def test_lives_when_very_many_are_the_latest_and_need_no_room(path, answers):
    for _ in range(2 * MAX_EARLIER):
        file = StoreFile(path, MAX_BYTES)
        write(file, add(0, answers))
        pages = file.path.stat().st_size
        before = file.life
        file.close()
    assert len(before.earlier) == MAX_EARLIER
    last = StoreFile(path, MAX_BYTES)
    assert [*list(before.earlier)[1:], before.incarnation] == list(last.life.earlier)
    last.close()
    assert pages == path.stat().st_size


@settings(max_examples=50, deadline=None)
@given(first=st.lists(st.integers(0, 30)), second=st.lists(st.integers(0, 30)), end=st.integers(1, 20))
def test_seen_when_a_new_life_has_taken_over_some_is_kept_of_those(tmp_path_factory, first, second, end):
    """Marks on the disk and of the same transaction, of message ids and of sequences, of which one more is kept."""
    file = StoreFile(tmp_path_factory.mktemp("seen") / "store.db", MAX_BYTES)

    def marks(numbers: list[int], life: int) -> list[MarkSeen]:
        return [
            MarkSeen(kind + b"p", life, item, item, lambda _: None) for kind in (IDS, SEQUENCES) for item in numbers
        ]

    write(file, *marks(first, 8), *marks([3], 7))
    write(file, *marks(second, 8), TakeOverSeen(b"p", 8, 9, end), *marks([25], 9))
    rows = file.seen()
    file.close()
    assert {life for _, life, _, _ in rows} == {9}
    for kind, limit in ((IDS, end), (SEQUENCES, end + 1)):
        found = {item for peer, _, low, high in rows if peer == kind + b"p" for item in range(low, high + 1)}
        assert {25, *(item for item in (*first, *second) if item < limit)} == found


@settings(max_examples=30, deadline=None)
@given(batches=st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1), max_size=8))
def test_seen_when_marked_in_any_order_and_batches_equals_the_set(tmp_path_factory, batches):
    file = StoreFile(tmp_path_factory.mktemp("seen") / "store.db", MAX_BYTES)
    wanted: set[int] = set()
    for batch in batches:
        write(file, *(MarkSeen(b"a", 1, first, first + more, lambda _: None) for first, more in batch))
        wanted.update(number for first, more in batch for number in range(first, first + more + 1))
    rows = file.seen()
    file.close()
    assert wanted == {number for _, _, first, last in rows for number in range(first, last + 1)}
    assert all(rows[index][3] + 1 < rows[index + 1][2] for index in range(len(rows) - 1)), "rows touch"


def test_forget_when_a_peer_begins_anew_keeps_its_new_life_only(path):
    file = StoreFile(path, MAX_BYTES)
    marks = [MarkSeen(peer, life, 1, 1, lambda _: None) for peer in (b"a", b"b") for life in (1, 2)]
    write(file, *marks, ForgetSeen(b"a", 2))
    assert file.seen() == [(b"a", 2, 1, 1), (b"b", 1, 1, 1), (b"b", 2, 1, 1)]
    write(file, ForgetSeen(b"b", None))
    assert file.seen() == [(b"a", 2, 1, 1)]
    file.close()


def test_effect_when_run_is_kept_with_its_mark_and_not_run_again(path, answers):
    file = StoreFile(path, MAX_BYTES)
    make_effects(file)
    same = [MarkSeen(b"a", 1, 5, 5, answers.append, counting(5)) for _ in range(2)]
    write(file, *same)
    write(
        file, MarkSeen(b"a", 1, 5, 5, answers.append, counting(5)), MarkSeen(b"a", 1, 6, 6, answers.append, counting(6))
    )
    assert answers == [None] * 4
    assert effects(path) == [5, 6]
    file.close()


def test_effect_when_it_raises_leaves_nothing_and_others_alone(path, answers):
    file = StoreFile(path, MAX_BYTES)
    make_effects(file)

    def fails(transaction: Transaction) -> None:
        transaction.execute("INSERT INTO effects VALUES (13)")
        raise ValueError("no")

    write(
        file,
        MarkSeen(b"a", 1, 1, 1, answers.append, counting(1)),
        MarkSeen(b"a", 1, 2, 2, answers.append, fails),
        AddMessage(0, b"a", 0, b"", answers.append, fails),
        AddMessage(1, b"a", 1, b"", answers.append, counting(2)),
    )
    assert [type(item).__name__ for item in answers] == ["NoneType", "ValueError", "ValueError", "NoneType"]
    assert (effects(path), file.seen()) == ([1, 2], [(b"a", 1, 1, 1)])
    assert [item.message_id for item in file.pending()] == [1]
    file.close()


@pytest.mark.parametrize("word", ["commit", " ROLLBACK", "Begin", "savepoint x", "release effect", "end"])
def test_effect_when_it_would_end_the_transaction_is_refused(path, answers, word):
    file = StoreFile(path, MAX_BYTES)
    write(file, RunEffect(lambda transaction: transaction.execute(word), answers.append), add(0, answers))
    assert [LocalProtocolError, type(None)] == [type(item) for item in answers]
    file.close()


def test_effect_when_it_ends_the_transaction_all_the_same_fails_with_a_reason(path, answers):
    file = StoreFile(path, MAX_BYTES)
    write(file, RunEffect(lambda transaction: transaction.execute("SELECT 1").connection.commit(), answers.append))
    write(file, add(0, answers))
    assert isinstance(answers[0], StoreError)
    assert (answers[0].code, answers[1]) == ("effect", None)
    file.close()


def test_file_when_full_refuses_what_is_to_be_sent_and_keeps_the_rest(path, answers):
    file = StoreFile(path, 1 << 20)
    marks: Answers = []
    for number in range(200):
        mark = MarkSeen(b"a", 1, number, number, marks.append)
        write(file, mark, add(number, answers, record=bytes(20_000)))
    refused = [item for item in answers if item is not None]
    assert 100 < len(refused) < 190
    assert {"full"} == {item.code for item in refused}
    assert "max_store_bytes" in refused[0].hint
    assert marks == [None] * 200
    kept = [item.message_id for item in file.pending()]
    assert len(kept) == answers.count(None)
    write(file, *(RemoveMessage(number) for number in kept))
    assert list(file.pending()) == []
    write(file, add(200, answers, record=bytes(20_000)))
    assert answers[-1] is None
    assert size_of(path) < 16 << 20
    file.close()


@pytest.mark.parametrize(("size", "expected"), [("600k", 100), ("3m", 1200)])
def test_disk_when_the_store_filled_it_takes_messages_again(tmp_path, answers, size, expected):
    with small_disk(tmp_path / "disk", size) as folder:
        file = StoreFile(folder / "store.db", MAX_BYTES)
        taken = []
        for _ in range(3):
            before = len(answers)
            number = before
            while not (answers and answers[-1] is not None and len(answers) > before):
                write(file, add(number := number + 1, answers, record=os.urandom(2000)))
            assert answers[-1].code == "full"
            kept = [item.message_id for item in file.pending()]
            taken.append(len(kept))
            for each in kept:
                assert file.write([RemoveMessage(each), MarkSeen(b"a", 1, each, each, answers.append)])[1] == []
            assert list(file.pending()) == []
        file.close()
    assert taken[0] > expected
    assert min(taken) > 0.9 * taken[0]


def test_disk_when_an_effect_does_not_fit_or_a_reader_holds_the_log_gives_room_back(tmp_path, answers):
    with small_disk(tmp_path / "disk", "4m") as folder:
        file = StoreFile(folder / "store.db", MAX_BYTES)
        for number in range(100):
            write(file, add(number, answers, record=bytes(2000)))

        def large(transaction: Transaction) -> None:
            transaction.execute("CREATE TABLE large (data BLOB)")
            transaction.execute("INSERT INTO large VALUES (zeroblob(6000000))")

        write(file, RunEffect(large, answers.append))
        assert answers[-1].code == "full"
        write(file, *(RemoveMessage(number) for number in range(100)))
        assert list(file.pending()) == []
        reader = sqlite3.connect(folder / "store.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM messenger_outbox").fetchone()
        number = 1000
        while answers[-1] is None or number == 1000:
            write(file, add(number := number + 1, answers, record=os.urandom(2000)))
        assert answers[-1].code == "full"
        reader.close()
        kept = [item.message_id for item in file.pending()]
        assert file.write([RemoveMessage(each) for each in kept])[1] == []
        write(file, add(5000, answers))
        assert answers[-1] is None
        file.close()


def test_file_when_removed_while_open_is_told_by_the_database_alone(path, answers):
    file = StoreFile(path, MAX_BYTES)
    for each in path.parent.glob("store.db*"):
        each.unlink()
    write(file, add(1, answers))
    assert len(answers) == 1
    file.close()


def test_disk_when_a_queue_comes_and_goes_is_given_back(path, answers):
    file = StoreFile(path, MAX_BYTES)
    for number in range(30):
        write(file, add(number, answers, record=bytes(1 << 20)))
    most = size_of(path)
    write(file, *(RemoveMessage(number) for number in range(30)))
    for number in range(100, 140):
        write(file, add(number, answers), RemoveMessage(number))
    file.close()
    assert most > 30 << 20
    assert path.stat().st_size < 12 << 20


def test_file_when_open_is_refused_to_another_store_and_process(path):
    """Two senders under the same numbers would lose messages; the error names the process that has it."""
    file = StoreFile(path, MAX_BYTES)
    with pytest.raises(BusyError, match=f"process '{os.getpid()}'"):
        StoreFile(path, MAX_BYTES)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply(_kind_of_refusal, (path,)) == "BusyError"
    file.close()
    StoreFile(path, MAX_BYTES).close()


def _kind_of_refusal(path: Path) -> str:
    try:
        StoreFile(path, MAX_BYTES)
    except BusyError:
        return "BusyError"
    return "opened"


def test_tables_when_prepared_at_opening_are_there(path):
    def prepare(transaction: Transaction) -> None:
        transaction.execute("CREATE TABLE IF NOT EXISTS effects (number INTEGER)")
        transaction.execute("INSERT INTO effects VALUES (1)")

    for _ in range(2):
        StoreFile(path, MAX_BYTES, prepare).close()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        StoreFile(path, MAX_BYTES, lambda transaction: transaction.execute("INSERT INTO none VALUES (1)"))
    StoreFile(path, MAX_BYTES).close()
    assert effects(path) == [1, 1]


def test_file_when_damaged_foreign_or_newer_says_so_and_stays(tmp_path):
    made = tmp_path / "made"
    file = StoreFile(made, MAX_BYTES)
    write(file, *(add(number, [], record=bytes(3000)) for number in range(50)))
    file.close()
    good = made.read_bytes()
    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    newer = bytearray(good)
    newer[60:64] = (2).to_bytes(4)
    holed = bytearray(good)
    holed[5 * 4096 : 40 * 4096] = os.urandom(35 * 4096)
    cases = {
        "text": (b"this is a text of mine\n" * 100, "damaged"),
        "foreign": (foreign.read_bytes(), "foreign"),
        "newer": (bytes(newer), "version"),
        "cut": (good[: len(good) // 2], "damaged"),
        "holed": (bytes(holed), "damaged"),
    }
    for name, (octets, code) in cases.items():
        path = tmp_path / f"case-{name}"
        path.write_bytes(octets)
        with pytest.raises(StoreError, match=str(path)) as caught:
            StoreFile(path, MAX_BYTES)
        assert (code, octets) == (caught.value.code, path.read_bytes()), name
        assert caught.value.hint


def test_file_when_its_tables_are_gone_is_the_error_of_a_store_and_free_again(path):
    StoreFile(path, MAX_BYTES).close()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE messenger_meta")
    connection.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="messenger_meta"):
            StoreFile(path, MAX_BYTES)


def test_file_when_another_program_writes_to_it_is_opened_all_the_same(path, answers):
    StoreFile(path, MAX_BYTES).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    file = StoreFile(path, MAX_BYTES)  # else it would wait, and give up
    assert connection.in_transaction
    connection.close()
    write(file, add(0, answers))  # and with that its life is written
    file.close()
    again = StoreFile(path, MAX_BYTES)
    assert {file.life.incarnation: 1} == again.life.earlier
    again.close()


def test_file_when_it_cannot_be_made_names_the_path(tmp_path):
    for path in (tmp_path / "none" / "store.db", tmp_path):
        with pytest.raises(StoreError) as caught:
            StoreFile(path, MAX_BYTES)
        assert caught.value.code == "path"
        assert str(path) in str(caught.value)


def test_file_when_made_is_for_its_owner_only(path, answers):
    file = StoreFile(path, MAX_BYTES)
    write(file, add(0, answers))
    modes = {item.stat().st_mode & 0o077 for item in path.parent.iterdir()}
    file.close()
    assert {0} == modes


def test_process_when_killed_in_the_middle_leaves_all_that_was_told(path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        file = StoreFile(path, MAX_BYTES)
        for number in range(100_000):
            for done, error in file.write([add(number, [])])[0]:
                done(error)
            os.write(writer, number.to_bytes(4))
        os._exit(0)
    os.close(writer)
    told = b""
    while len(told) < 4 * 50:
        told += os.read(reader, 4096)
    os.kill(child, 9)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        told += more
    os.close(reader)
    file = StoreFile(path, MAX_BYTES)
    kept = [item.message_id for item in file.pending()]
    file.close()
    count = len(told) // 4
    assert kept == list(range(len(kept)))
    assert count <= len(kept) <= count + 1
