"""The folder of results: what replaces what, and that nothing half made is ever found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowctl.errors import ConfigError
from flowctl.pipeline.tables.place import MOST_TEXT_BYTES, Place, local_path


def made(place, name, text="new"):
    """Make a table of one file in a place."""
    folder = Path(place.path(name))
    folder.mkdir(parents=True)
    (folder / "part.parquet").write_text(text)


def test_place_when_a_table_is_adopted_replaces_all_of_the_earlier_one(tmp_path):
    """No file of the earlier table stays beside those of the new one, and nothing is left in the making."""
    place = Place(None, str(tmp_path / "out"))
    made(place, "sessions", "old")
    (tmp_path / "out/sessions/second.parquet").write_text("old")
    staging = place.staging()
    made(staging, "sessions")
    place.adopt(staging, "sessions")
    staging.remove()
    assert [path.name for path in (tmp_path / "out/sessions").iterdir()] == ["part.parquet"]
    assert (tmp_path / "out/sessions/part.parquet").read_text() == "new"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sessions"]


def test_place_when_a_file_is_adopted_replaces_it_in_one_step(tmp_path):
    """A watched file is never missing: it is another file under the same name afterwards, also where there was none."""
    place = Place(None, str(tmp_path))
    staging = place.staging()
    for text in ("first", "second"):
        staging.write_text("bans.jsonl", text)
        place.adopt(staging, "bans.jsonl")
        assert text == place.read_text("bans.jsonl")


def test_place_when_a_file_is_where_a_table_goes_is_replaced(tmp_path):
    """A table takes the place of a file of its name, and a file that of a table."""
    place = Place(None, str(tmp_path))
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
    """A staging folder goes if its process is gone; one of a process that runs, or of another host, stays."""
    place = Place(None, str(tmp_path))
    running = Path(place.staging().folder)
    dead = running.with_name(running.name.replace(f"-{os.getpid()}-", "-4194399-"))
    elsewhere = running.with_name("_new-another.host-12-abc")
    for folder in (dead, elsewhere):
        folder.mkdir()
    assert place.clear_staging() == 1
    assert {running, elsewhere} == set(tmp_path.iterdir())
    assert place.names() == []


def test_place_when_it_cannot_be_made_names_the_folder(tmp_path):
    """A file in the way is an error that says where."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file/out"):
        Place(None, str(tmp_path / "file" / "out"))


def test_place_when_a_text_is_missing_or_huge_reads_none(tmp_path):
    """What is not there, and what is too long to be one of ours, is None; wrong octets are replaced."""
    place = Place(None, str(tmp_path))
    assert place.read_text("bans.jsonl") is None
    (tmp_path / "odd").write_bytes(b"a\xffb")
    assert place.read_text("odd") == "a\ufffdb"
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MOST_TEXT_BYTES + 1)
    assert place.read_text("huge") is None


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
    """A path is on this machine, an address of another kind is not."""
    assert path == local_path(text)


def test_place_when_elsewhere_is_handled_by_the_file_systems_of_spark(spark, tmp_path):
    """The way of addresses that are not of this machine works the same: write, read, list, adopt, delete."""
    place = Place(spark, str(tmp_path / "out"))
    place._local = None  # the local file system of Hadoop stands in for a remote one
    place.folder = f"file://{tmp_path}/out"
    place.write_text("limits.toml", "version = 1\n")
    place.write_text("limits.toml", "version = 2\n")
    assert place.read_text("limits.toml") == "version = 2\n"
    assert place.read_text("nothing") is None
    assert place.exists("limits.toml")
    staging = Place(spark, str(tmp_path / "out/_new"))
    staging._local = None
    staging.folder = f"file://{tmp_path}/out/_new"
    spark.range(3).write.parquet(staging.path("sessions"))
    spark.range(5).write.parquet(place.path("sessions"))
    place.adopt(staging, "sessions")
    assert spark.read.parquet(place.path("sessions")).count() == 3
    assert place.names() == ["limits.toml", "sessions"]
    place.delete("sessions")
    staging.remove()
    assert place.names() == ["limits.toml"]
