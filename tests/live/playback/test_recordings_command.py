"""``flowctl recordings``: lists and fetches what a server or a folder has, and says why it cannot."""

from __future__ import annotations

import json

import pytest
from loopback_kit import loopback
from playback_kit import FIRST, Recorder, frames
from remux_kit import tags_of

from flowctl.cli import main
from flowctl.cli.remux import _show_recordings
from flowctl.live.access.rules import Proof, StreamAccess
from flowctl.live.access.tokens import SecretFile, signed_query
from flowctl.live.playback.library import Library

SECRET = b"a secret of thirty-two or more bytes, for tests"


@pytest.fixture
def sources(playback, folder):
    """The same recordings: in a folder, and at a server."""

    def make(**options):
        web = playback(**options)
        return [str(folder / "live" / "room"), f"http://{loopback(web.address[1])}/live/room"]

    return make


def test_command_when_recordings_are_there_lists_them(sources, folder, capsys):
    made = Recorder(folder, max_s=5).all(12)
    for source in sources():
        capsys.readouterr()  # the log so far
        assert main(["recordings", source]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == [
            f"2025-11-30T10:00:{second}.000Z" for second in ("10", "05", "00")
        ]
        assert lines[-1].endswith(FIRST)
        assert main(["recordings", source, "--json", "--to", "2025-11-30T10:00:06Z", "--limit", "1"]) == 0
        said = capsys.readouterr()
        (row,) = map(json.loads, said.out.splitlines())
        assert (row["start"], row["bytes"]) == ("2025-11-30T10:00:05.000Z", (made.folder / row["file"]).stat().st_size)
        assert "there are more: --to 2025-11-30T10:00:05.000Z" in said.err
        assert main(["recordings", source, "--from", "2026-01-01"]) == 0
        assert "no recordings" in capsys.readouterr().err


def test_command_when_a_time_is_fetched_writes_it(sources, folder, tmp_path, capsys):
    made = Recorder(folder, max_s=5).all(12)
    every = [tag.payload for path in sorted(made.folder.iterdir()) for tag in frames(tags_of(path))]
    for source in sources():
        out = tmp_path / "part.flv"
        assert main(["recordings", source, "--from", "2025-11-30T10:00:03.5Z", "--fetch", str(out)]) == 0
        assert "from 2025-11-30T10:00:03.000Z on" in capsys.readouterr().err
        found = [tag.payload for tag in frames(tags_of(out))]
        assert found == every[-len(found) :]
        assert tags_of(out)[-1].timestamp > 8500
        assert main(["recordings", source, "--from", "2026-01-01", "--fetch", str(out)]) == 1
        assert "hint: " in capsys.readouterr().err


def test_command_when_a_token_is_asked_for_takes_it_from_the_address(sources, folder, capsys):
    Recorder(folder).all(1)
    access = StreamAccess(play_auth=(Proof.TOKEN,), token_secrets=SecretFile("secrets", (SECRET,)))
    _, url = sources(access=access)
    assert main(["recordings", url]) == 1
    assert "behind the address, as for playing" in capsys.readouterr().err
    query = signed_query(SECRET, "play", "live/room", 4_000_000_000)
    assert main(["recordings", f"{url}?{query}"]) == 0
    assert FIRST in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["http://127.0.0.1:1/live/room"], "cannot be asked", "its setting http"),
        (["rtmp://127.0.0.1/live/room"], "scheme 'rtmp' is not supported", "http://"),
        (["nowhere"], "is no folder", "recordings/live/room"),
        ([".", "--from", "noon"], "--from 'noon' is no time", "2026-11-30T10:00:00Z"),
        ([".", "--from", "2026-01-02", "--to", "2026-01-01"], "--to is not after --from", ""),
        ([".", "--fetch", "out.flv"], "nothing was recorded then as FLV", "--fetch"),
    ],
)
def test_command_when_it_cannot_says_why(words, error, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recordings", *words]) in {1, 2}
    said = capsys.readouterr().err
    assert error in said
    assert hint in said
    assert not (tmp_path / "out.flv").exists()


def test_command_when_the_server_gives_none_says_which_setting_would(sources, folder, capsys):
    _, url = sources(players_may_wait=False)
    assert main(["recordings", url.replace("/live/", "/other/")]) == 1
    assert "record_play" in capsys.readouterr().err


def test_command_when_a_server_tells_figures_that_make_no_sense_lists_without_them(capsys):
    rows = [{"duration_s": float("nan"), "bytes": 10**400}, {"duration_s": float("inf"), "bytes": -1}]
    _show_recordings(rows, more=False, as_json=False)
    assert [line.split()[1:3] for line in capsys.readouterr().out.splitlines()] == [["?", "?"]] * 2


def test_command_when_a_file_goes_while_it_is_fetched_says_how_much_came(folder, tmp_path, monkeypatch, capsys):
    made = Recorder(folder, max_s=2).all(5)
    planned = Library.span
    monkeypatch.setattr(Library, "span", lambda *given: (planned(*given), sorted(made.folder.iterdir())[1].unlink())[0])
    assert main(["recordings", str(made.folder), "--fetch", str(tmp_path / "part.flv")]) == 1
    assert " came" in capsys.readouterr().err


def test_command_when_a_folder_is_called_as_no_server_calls_it_looks_into_it(folder, tmp_path, capsys):
    copied = Recorder(folder).all(1).folder.rename(tmp_path / "my show")
    capsys.readouterr()  # the log so far
    assert main(["recordings", str(copied)]) == 0
    assert FIRST in capsys.readouterr().out
