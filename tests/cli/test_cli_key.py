"""``flowctl key``: what it writes is what a server takes."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from flowctl.cli.app import app
from flowctl.cli.key import _kept
from flowctl.core.text.keyfiles import with_files
from flowctl.live.access.keys import read_keys
from flowctl.live.access.tokens import read_secrets
from flowctl.wire.rtmp.url import parse_query


def run(*args, text=None):
    return CliRunner().invoke(app, ["key", *map(str, args)], input=text)


def test_key_that_is_made_is_good_and_its_hash_alone_is_kept(tmp_path):
    file = tmp_path / "keys"
    first = run("make", file, "--for", "publish", "--streams", "live/*").stdout.strip()
    second = run("make", file).stdout.strip()
    keys = read_keys(file)
    assert keys.allows([first], "publish", "live/room")
    assert not keys.allows([first], "play", "live/room")
    assert keys.allows([second], "play", "other/room")
    assert first not in file.read_text()
    assert first != second


def test_key_from_standard_input_is_hashed(tmp_path):
    """It is no argument, which others would see in the list of processes."""
    line = run("hash", "--for", "play", text="a-key-of-my-own-choice\n").stdout
    (tmp_path / "keys").write_text(line)
    assert run("hash", tmp_path / "keys", text="another-key-of-my-choice\n").stdout == ""
    keys = read_keys(tmp_path / "keys")
    assert keys.allows(["a-key-of-my-own-choice"], "play", "live/room")
    assert keys.allows(["another-key-of-my-choice"], "publish", "live/room")
    assert len({stored.salt for stored in keys.keys}) == 1


def test_key_that_is_revoked_is_gone_from_the_file_and_others_stay(tmp_path):
    file = tmp_path / "keys"
    first, second = (run("make", file).stdout.strip() for _ in range(2))
    file.write_text("# ours\n" + file.read_text())
    file.chmod(0o640)
    assert run("revoke", file, text="a-key-that-is-not-there\n").exit_code != 0
    assert run("revoke", file, text=f"{first}\n").exit_code == 0
    keys = read_keys(file)
    assert [keys.allows([key], "publish", "live/room") for key in (first, second)] == [False, True]
    assert file.read_text().startswith("# ours\n")
    assert file.stat().st_mode & 0o777 == 0o640
    file.write_text(file.read_text().replace("# ours\n", ""))
    assert run("revoke", file, text=f"{second}\n").exit_code == 0
    assert file.read_text() == "# no key\n"
    assert [item.name for item in tmp_path.iterdir()] == ["keys"]


def test_keys_when_several_commands_make_them_at_a_time_are_all_there(tmp_path):
    """Each reads the file and writes it anew: one that came between would be forgotten."""
    keys = [f"a-key-of-number-{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: _kept(tmp_path / "keys", key, "", ""), keys))
    made = read_keys(tmp_path / "keys")
    assert [made.allows([key], "publish", "live/room") for key in keys] == [True] * 40


@pytest.mark.parametrize(
    "args", [["hash", "--for", "both"], ["hash", "--streams", "a b"], ["hash"], ["make", "--for", "x"]]
)
def test_key_when_it_is_too_short_or_for_nothing_is_refused(args):
    result = run(*args, text="short\n" if args == ["hash"] else "a-key-of-my-own-choice\n")
    assert result.exit_code != 0
    assert "sha256" not in result.stdout


def test_address_that_is_signed_is_good_for_its_time(tmp_path):
    file = tmp_path / "tokens.secret"
    assert run("secret", file).exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    assert run("secret", file).exit_code != 0
    assert file.read_bytes() == before
    address = run("sign", file, "play", "live/room", "--within", "2h", "--address", "192.0.2.7").stdout.strip()
    stream, _, query = address.partition("?")
    pairs, secrets, now = parse_query(query), read_secrets(file), time.time()
    assert stream == "live/room"
    assert secrets.fault(pairs, "play", "live/room", "192.0.2.7", now, 0.0) is None
    assert secrets.fault(pairs, "play", "live/room", "192.0.2.7", now + 7100, 0.0) is None
    assert secrets.fault(pairs, "play", "live/room", "192.0.2.7", now + 7300, 0.0) is not None
    assert secrets.fault(pairs, "publish", "live/room", "192.0.2.7", now, 0.0) is not None


@pytest.mark.parametrize("args", ["view a/b", "play room", "play a/b?c", "play a/..", "play a/b%20", "play a/b.mp4"])
def test_address_when_it_makes_no_sense_is_not_signed(tmp_path, args):
    run("secret", tmp_path / "s")
    result = run("sign", tmp_path / "s", *args.split())
    assert result.exit_code != 0
    assert "token=" not in result.stdout


def test_key_that_goes_into_a_file_is_its_owners_alone_as_servers_ask_for(tmp_path):
    """``flowctl key make keys > edge.key``, and then ``?key=@edge.key``: other files of keys are refused."""
    file = tmp_path / "edge.key"
    with file.open("w") as opened:
        command = [sys.executable, "-m", "flowctl", "key", "make", tmp_path / "keys", "--for", "edge"]
        subprocess.run(command, stdout=opened, stderr=subprocess.DEVNULL, timeout=60, check=True)
    assert with_files(f"rtmp://host/live?key=@{file}").endswith("?key=" + file.read_text().strip())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
