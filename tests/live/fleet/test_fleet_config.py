"""The file of a fleet: what it says, and what is told of one that is wrong."""

from __future__ import annotations

import re

import pytest
from source_kit import ROOT

from flowctl.errors import ConfigError
from flowctl.live.fleet.config import MOST_MEMBERS, read_config
from flowctl.wire.zmtp.keys import KeyPair

KEY = "0b" * 32
GOOD = """\
name = "a"

[members.a]
address = "ipc:///run/a.sock"

[members.b]
address = "ipc://b.sock"
"""


def written(folder, text):
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_sample_when_it_has_the_key_of_its_member_is_a_configuration(tmp_path):
    keys = KeyPair.generate()
    keys.write(tmp_path / "fleet.key")
    text = (ROOT / "docs" / "fleet.toml").read_text().replace("/etc/flowctl/", "")
    with pytest.raises(ConfigError, match=r"members\.amsterdam\.key is .* the public key of fleet\.key"):
        read_config(written(tmp_path, text))
    config = read_config(written(tmp_path, re.sub('key = "0b[^"]*"', f'key = "{keys.public.hex()}"', text)))
    assert (config.name, sorted(config.others), config.keys) == ("amsterdam", ["berlin", "cadiz"], keys)
    assert config.listen.endpoint == "tcp://192.0.2.10:7710"


def test_config_when_all_is_of_one_user_needs_no_keys(tmp_path):
    config = read_config(written(tmp_path, GOOD))
    assert config.members["b"].endpoint == f"ipc://{tmp_path}/b.sock"
    assert (config.keys, config.listen.endpoint) == (None, "ipc:///run/a.sock")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "members is missing"),
        ("name =", "not valid TOML"),
        (GOOD.replace('name = "a"', 'name = "c"'), "line 1: name is 'c', it must be one of the members: a, b"),
        (GOOD.replace('name = "a"', "name = 7"), "name is 7"),
        (GOOD.replace('name = "a"', 'name = "a"\nserver = "1935"'), "line 2: unknown key 'server'"),
        (GOOD.replace("ipc:///run/a.sock", "7001"), "line 4: address"),
        (GOOD.replace("ipc:///run/a.sock", "inproc://x"), "members.a.address is 'inproc://x'"),
        (GOOD.replace("ipc:///run/a.sock", "tcp://127.0.0.1:7001"), "members.a has no key"),
        (GOOD.replace('"a"', '"a"\nlisten = "tcp://0.0.0.0:7001"', 1), "members.a has no key"),
        (GOOD.replace("ipc://b.sock", "ipc:///run/a.sock"), "one that no other member has"),
        (GOOD.replace("[members.b]", "[members.'b c']"), "a table whose name has 1 to 64 letters"),
        (GOOD + 'key = "secret"', "line 8: key is a text of 6 letters"),
        (GOOD + "port = 1", "unknown key 'port'"),
        (GOOD + "\n[members]\nc = 1", "members.c is 1, it must be a table"),
        (GOOD.partition("[members.a]")[0] + "members = 1", "line 3: members is 1"),
        (GOOD + "".join(f'\n[members.m{at}]\naddress = "ipc://{at}"' for at in range(MOST_MEMBERS)), "1 to 32 tables"),
        (
            "\n".join(f'{line}\nkey = "{KEY}"' if "b.sock" in line else line for line in GOOD.splitlines()),
            "a has no key",
        ),
        (GOOD.replace('.sock"', f'.sock"\nkey = "{KEY}"'), "one that no other member has: it is known by it"),
    ],
)
def test_config_when_wrong_says_what_and_where(tmp_path, text, said):
    with pytest.raises(ConfigError, match=r"fleet\.toml") as caught:
        read_config(written(tmp_path, text))
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_config_when_not_there_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path / "x")
