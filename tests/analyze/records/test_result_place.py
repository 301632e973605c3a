"""The folder of results: what replaces what, and that nothing half made is ever found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyarrow._fs import _MockFileSystem

from flowctl.analyze.records.place import MOST_TEXT_BYTES, RecordPlace, Storage, local_path, s3_options
from flowctl.analyze.run import locked
from flowctl.core.text.files import held
from flowctl.errors import BusyError, ConfigError


def made(place, name, text="new"):
    folder = Path(place.path(name))
    folder.mkdir(parents=True)
    (folder / "part.parquet").write_text(text)
    (folder / "_flowctl").write_text("")


def test_place_when_a_table_is_adopted_replaces_all_of_the_earlier_one(tmp_path):
    place = RecordPlace(str(tmp_path / "out"))
    made(place, "sessions", "old")
    (tmp_path / "out/sessions/second.parquet").write_text("old")
    staging = place.staging()
    made(staging, "sessions")
    place.adopt(staging, "sessions")
    staging.remove()
    assert sorted(path.name for path in (tmp_path / "out/sessions").iterdir()) == ["_flowctl", "part.parquet"]
    assert (tmp_path / "out/sessions/part.parquet").read_text() == "new"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sessions"]


def test_place_when_a_folder_is_somebody_elses_leaves_it_alone(tmp_path):
    place, staging = RecordPlace(str(tmp_path)), RecordPlace(str(tmp_path / "_new"))
    place.write_text("ingest/flow_events/a.parquet", "records")
    place.write_text("parts/mine.txt", "mine")
    for name in ("ingest", "parts/seen/date=2026-03-01/hour=12"):
        staging.write_text(f"{name}/b.parquet", "rows")
        with pytest.raises(ConfigError, match="is not a folder of results"):
            place.adopt(staging, name)
    assert place.read_text("ingest/flow_events/a.parquet") == "records"
    assert place.names("parts") == ["mine.txt"]
    (tmp_path / "parts/mine.txt").unlink()
    for _ in range(2):
        staging.write_text("parts/seen/date=2026-03-01/hour=12/b.parquet", "rows")
        staging.write_text("sums/b.parquet", "rows")
        for name in ("parts/seen/date=2026-03-01/hour=12", "sums"):
            RecordPlace(str(tmp_path)).adopt(staging, name)
    assert place.names("sums") == place.names("parts/seen/date=2026-03-01/hour=12") == ["b.parquet"]


def test_place_when_a_file_is_adopted_replaces_it_in_one_step(tmp_path):
    place = RecordPlace(str(tmp_path))
    staging = place.staging()
    for text in ("first", "second"):
        staging.write_text("bans.jsonl", text)
        place.adopt(staging, "bans.jsonl")
        assert text == place.read_text("bans.jsonl")


def test_place_when_a_file_is_where_a_table_goes_is_replaced(tmp_path):
    place = RecordPlace(str(tmp_path))
    place.write_text("sessions", "a file")
    made(place, "report.html")
    staging = place.staging()
    made(staging, "sessions")
    staging.write_text("report.html", "page")
    for name in staging.names():
        place.adopt(staging, name)
    assert (tmp_path / "sessions").is_dir()
    assert place.read_text("report.html") == "page"


def test_place_when_runs_were_killed_clears_what_they_left(tmp_path):
    place = RecordPlace(str(tmp_path))
    place.write_text("report.html", "page")
    place.staging().write_text("report.html", "half a page")
    assert place.names() == ["report.html"]
    place.clear_staging()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_place_when_another_user_has_put_links_there_takes_them_away(tmp_path, monkeypatch):
    """A link of another user would have results put anywhere; one's own stays."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("parts", "bans.jsonl"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr("flowctl.analyze.records.place.planted", lambda path: path.name == "parts")
    RecordPlace(str(tmp_path / "out")).clear_staging()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bans.jsonl"]
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize("name", ["shared", "shared/theirs", "shared/theirs/out"])
def test_place_when_another_user_can_turn_it_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "shared" / "theirs").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    theirs, lstat = (tmp_path / "shared" / "theirs").lstat().st_ino, Path.lstat

    def looked_at(path):
        found = lstat(path)
        return os.stat_result([*found[:4], 65534, *found[5:]]) if found.st_ino == theirs else found

    monkeypatch.setattr(Path, "lstat", looked_at)
    with pytest.raises(ConfigError, match=r"cannot write to .*everybody") as error:
        RecordPlace(str(tmp_path / name))
    assert error.value.hint == "--out names a folder of your own"
    assert RecordPlace(str(tmp_path / "shared" / "ours")).names() == []


def test_lock_when_it_is_a_link_is_not_made_elsewhere(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "out" / "_lock").symlink_to(tmp_path / "made")
    place = RecordPlace(str(tmp_path / "link"))
    place.change_text("notes", lambda there: f"{there}more")
    with pytest.raises(ConfigError, match="cannot lock"), locked(place):
        pass
    assert place.read_text("notes") == "more"
    assert not (tmp_path / "made").exists()


def test_text_when_another_program_holds_its_folder_is_waited_for_and_then_said(tmp_path, monkeypatch):
    monkeypatch.setattr("flowctl.analyze.records.place._PATIENCE_S", 0.05)
    place = RecordPlace(str(tmp_path))
    with held(tmp_path / "bans.jsonl"), pytest.raises(BusyError, match=r"another program writes to .*bans.jsonl"):
        place.change_text("bans.jsonl", lambda there: f"{there}more")
    place.change_text("bans.jsonl", lambda there: f"{there}more")
    assert place.read_text("bans.jsonl") == "more"


def test_place_when_it_cannot_be_made_names_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file/out"):
        RecordPlace(str(tmp_path / "file" / "out"))


def test_place_when_a_text_is_missing_or_huge_says_so(tmp_path):
    place = RecordPlace(str(tmp_path))
    assert place.read_text("bans.jsonl") is None
    (tmp_path / "odd").write_bytes(b"a\xffb")
    assert place.read_text("odd") == "a\ufffdb"
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MOST_TEXT_BYTES + 1)
    with pytest.raises(ConfigError, match=r"huge has \d+ bytes, \d+ are allowed"):
        place.read_text("huge")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("out", Path("out")),
        ("/a/b", Path("/a/b")),
        ("file:///a/b%20c", Path("/a/b c")),
        ("file:/a", Path("/a")),
        ("s3a://bucket/x", None),
        ("hdfs://host:9000/x", None),
    ],
)
def test_places_when_written_as_addresses_are_told_from_paths(text, path):
    assert path == local_path(text)


class Elsewhere(RecordPlace):
    """A place behind an address, as of a store, on a file system in memory."""

    def __init__(self, system, base):
        self.storage = Storage(system, base, f"mock://{base}")
        system.create_dir(base)
        self.folder, self._settings = self.path(""), None


@pytest.mark.parametrize("flat", [False, True])
def test_place_when_elsewhere_works_the_same(monkeypatch, flat):
    system = _MockFileSystem()
    if flat:
        monkeypatch.setattr("flowctl.analyze.records.place._FLAT", (system.type_name,))
    place, staging = Elsewhere(system, "bucket/out"), Elsewhere(system, "bucket/out/_new")
    for version in ("1", "2"):
        place.write_text("limits.toml", version)
        assert place.read_text("limits.toml") == version
    assert place.read_text("nothing") is None
    assert place.folder == "mock://bucket/out"
    assert place.path("x") == "mock://bucket/out/x"
    place.write_text("sessions/earlier", "old")
    place.write_text("sessions/_flowctl", "")
    staging.write_text("sessions/a", "new")
    place.adopt(staging, "sessions")
    assert place.names("sessions") == ["a"]
    assert place.read_text("sessions/a") == "new"
    assert place.names() == ["limits.toml", "sessions"]
    place.delete("sessions")
    place.delete("sessions")
    staging.remove()
    assert not place.exists("sessions")
    assert place.names() == ["limits.toml"]


def test_place_when_a_link_is_deleted_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/file").write_text("kept")
    place = RecordPlace(str(tmp_path / "out"))
    (tmp_path / "out/sessions").symlink_to(tmp_path / "theirs")
    place.delete("sessions")
    assert not place.exists("sessions")
    assert (tmp_path / "theirs/file").read_text() == "kept"


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        (
            {"spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9000/", "spark.hadoop.fs.s3a.endpoint.region": "eu"},
            {"endpoint_override": "127.0.0.1:9000", "scheme": "http", "region": "eu"},
        ),
        ({"AWS_ENDPOINT_URL": "https://store"}, {"endpoint_override": "store", "scheme": "https"}),
        ({"spark.hadoop.fs.s3a.endpoint": "a", "AWS_ENDPOINT_URL": "b"}, {"endpoint_override": "a", "scheme": "https"}),
        (
            {"spark.hadoop.fs.s3a.endpoint": "a", "spark.hadoop.fs.s3a.connection.ssl.enabled": "false"},
            {"endpoint_override": "a", "scheme": "http"},
        ),
    ],
)
def test_s3_options_when_spark_or_the_environment_tell_of_a_store_name_it(settings, options):
    assert s3_options(settings) == options


def test_storage_when_names_of_its_system_are_others_gives_addresses_of_its_own():
    storage = Storage(_MockFileSystem(), "records/events", "abfs://records@account.example/events")
    address = storage.address(storage.path("flow_closes/a.parquet"))
    assert (
        address == "abfs://records@account.example/events/flow_closes/a.parquet" == storage.uri(storage.name(address))
    )
    assert storage.name(address) == "records/events/flow_closes/a.parquet"
    local = Storage.of("/a b")
    assert (local.address("/a b/c"), local.name("/a b/c"), local.uri("/a b/c")) == ("/a b/c", "/a b/c", "file:///a b/c")
    s3 = Storage.of("s3a://bucket/events/", {"spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9"})
    assert (s3.base, s3.address("bucket/events/x")) == ("bucket/events", "s3a://bucket/events/x")


def test_storage_when_the_address_is_of_an_unknown_kind_says_so():
    with pytest.raises(ConfigError, match="gopher://host/x cannot be read"):
        Storage.of("gopher://host/x")


@pytest.mark.parametrize("links", [1, 2])
def test_storage_when_links_lead_to_their_own_folder_has_each_file_once(tmp_path, links):
    (tmp_path / "real" / "table").mkdir(parents=True)
    (tmp_path / "real" / "table" / "x.parquet").write_bytes(b"x")
    (tmp_path / "real" / "table" / "y.parquet").symlink_to("x.parquet")
    for number in range(links):
        (tmp_path / "real" / "table" / f"link{number}").symlink_to(".")
    (tmp_path / "events").symlink_to("real")
    found = [(name, info.size) for name, info in Storage.of(str(tmp_path / "events")).walk("table")]
    assert sorted(found) == [("x.parquet", 1), ("y.parquet", 1)]
