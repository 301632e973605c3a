"""The file of an agent: what it says, and what is told of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from source_kit import ROOT

from flowctl.control.fleet.config import MOST_MEMBERS, parse_config, read_config
from flowctl.errors import ConfigError

KEY = "0b" * 32
BASE = Path("/etc/flowctl")
GOOD = """\
name = "a"
folder = "state"

[members.a]
address = "ipc:///run/a.sock"

[members.b]
address = "ipc://b.sock"
"""


def test_sample_when_read_is_a_configuration():
    """The sample of the documents is valid, and its members have keys."""
    config = read_config(ROOT / "docs" / "fleet.toml")
    assert config.name == "amsterdam"
    assert sorted(config.others) == ["berlin", "cadiz"]
    assert all(len(item.pubkey or b"") == 32 for item in config.members.values())
    assert config.listens_at == "tcp://192.0.2.10:7710"


def test_config_when_all_is_of_one_user_needs_no_keys():
    """Paths begin where the file is; what is left out has its default."""
    config = parse_config(GOOD, "fleet.toml", BASE)
    assert config.folder == BASE / "state"
    assert config.members["b"].address == "ipc:///etc/flowctl/b.sock"
    assert (config.server, config.key_file, config.listens_at) == (None, None, "ipc:///run/a.sock")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "members is missing"),
        ("name =", "not valid TOML"),
        (GOOD.replace('name = "a"', 'name = "c"'), "line 1: name is 'c', it must be one of the members: a, b"),
        (GOOD.replace('name = "a"', "name = 7"), "name is 7"),
        (GOOD.replace("folder", "holder"), "line 2: unknown key 'holder'"),
        (GOOD.replace('folder = "state"', ""), "folder is missing"),
        (GOOD.replace("state", "s" * 120), "folder is"),
        (GOOD.replace("ipc:///run/a.sock", "7001"), "line 5: address"),
        (GOOD.replace("ipc:///run/a.sock", "inproc://x"), "address is 'inproc://x'"),
        (GOOD.replace("ipc:///run/a.sock", "tcp://127.0.0.1:7001"), "members.a has no key"),
        (GOOD.replace('"a"', '"a"\nlisten = "tcp://0.0.0.0:7001"', 1), "members.a has no key"),
        (GOOD.replace('"a"', '"a"\nkey_file = "k"', 1), "members.a has no key, but some have keys"),
        (GOOD.replace("ipc://b.sock", "ipc:///run/a.sock"), "one that no other member has"),
        (GOOD.replace("[members.b]", "[members.'b c']"), "the member 'b c'"),
        (GOOD + 'key = "secret"', "line 9: key is a text of 6 letters"),
        (GOOD + "port = 1", "unknown key 'port'"),
        (GOOD + "\n[members]\nc = 1", "line 11: c is 1, it must be a table"),
        (GOOD.partition("[members.a]")[0] + "members = 1", "line 4: members is 1"),
        (GOOD + "".join(f'\n[members.m{at}]\naddress = "ipc://{at}"' for at in range(MOST_MEMBERS)), "34 members"),
        ("\n".join(f'{line}\nkey = "{KEY}"' if "address" in line else line for line in GOOD.splitlines()), "key_file"),
        (
            'key_file = "k"\n' + GOOD.replace('.sock"', f'.sock"\nkey = "{KEY}"'),
            "members.b has the key of members.a",
        ),
    ],
)
def test_config_when_wrong_says_what_and_where(text, said):
    """An error names the file, the line, the value and what is allowed; never what may be a secret."""
    with pytest.raises(ConfigError, match=r"^fleet\.toml") as caught:
        parse_config(text, "fleet.toml", BASE)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_config_when_not_there_says_so(tmp_path):
    """A file that is not there, or no text, is named."""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path / "x")
