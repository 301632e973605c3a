"""Files that people write, with the mark that editors of Windows put in front: each is read as without it."""

from __future__ import annotations

import re

import pytest
from certificate_kit import Pair
from source_kit import module_files
from typer.testing import CliRunner

from flowctl.analyze import options
from flowctl.analyze.records.place import RecordPlace
from flowctl.cli.app import app
from flowctl.control.listener import Clients
from flowctl.core.loop.trust import trust
from flowctl.core.server.certificate import Certificate
from flowctl.core.server.program import ServerProgram
from flowctl.core.text.keyfiles import with_files
from flowctl.core.text.userfiles import MARK
from flowctl.errors import ConfigError
from flowctl.live.access.keys import hash_key, read_keys
from flowctl.live.access.tokens import read_secrets
from flowctl.live.access.webtokens import read_web_token_key
from flowctl.live.admin.guard import Tokens
from flowctl.live.config import LiveConfig
from flowctl.live.fleet.config import read_config
from flowctl.live.server import LiveServer
from flowctl.live.settings.kinds import read_credentials
from flowctl.live.settings.sources import read_named_files, read_settings
from flowctl.load.profiles import parse_profile
from flowctl.load.run import read_queries
from flowctl.records.telemetry.privacy import read_key
from flowctl.wire.zmtp.keys import KeyPair

LIVE = ServerProgram(name="live", summary="", default_port=1935, build=LiveServer)
STORED = hash_key("a-stream-key-of-a-test", bytes(16))
SECRET = "0123456789abcdef0123456789abcdef"
CLIENT = "0bf1b2e7e4fb1c1cc2d1d54fb9ac26bd42ed4bdcbfcdb34bbf7b5ea63bd4bd11"


def revoked(path):
    """Return what is left of a file of keys, whose only key is taken away."""
    done = CliRunner().invoke(app, ["key", "revoke", str(path)], input="\ufeffa-stream-key-of-a-test\n")
    assert done.exit_code == 0, done.output
    return path.read_text("utf-8")


def banned(path):
    with pytest.raises(ConfigError) as caught:  # what is wrong in it is told with its line, whatever stands in front
        read_named_files(LiveConfig(bans_file=path))
    return str(caught.value)


READERS = {
    "settings": ('stuck = "3s"', lambda path: read_settings(LIVE, file=path).settings),
    "limits": (
        'version = 1\nlimits = {soft = "1MiB,100,1s"}',
        lambda path: read_named_files(LiveConfig(limits_file=path)).limits,
    ),
    "bans": ("{", banned),
    "credentials": ("ann:pw", read_credentials),
    "keys": (STORED, lambda path: read_keys(path).keys),
    "secrets": (SECRET, lambda path: read_secrets(path).secrets),
    "web tokens": (SECRET, lambda path: read_web_token_key(f"HS256:{path}").keys),
    "admin tokens": (f"{SECRET} basic", lambda path: Tokens(path).permission(SECRET)),
    "key of an address": ("s3cret", lambda path: with_files(f"rtmp://h/a/b?key=@{path}")),
    "key of records": (SECRET, read_key),
    "key pair": ("", KeyPair.read),
    "fleet": ('name = "a"\n[members.a]\naddress = "ipc:///tmp/flowctl-a.sock"', read_config),
    "clients": (f"{CLIENT} admin me", lambda path: Clients(path).find(bytes.fromhex(CLIENT))),
    "queries": ("key=s3cret", lambda path: read_queries(str(path))),
    "trace": ("0,1000000", lambda path: parse_profile(f"trace@{path}").profile),
    "analysis": ("[x]", lambda path: options.OF_JOBS["whatif"].settings()["grid"].read(str(path), "--grid")),
    "results": ('{"a": 1}', lambda path: RecordPlace(str(path.parent)).read_text(path.name)),
    "revoke": (STORED, revoked),
}
"""What is written, and a function that reads such a file and returns what it came to."""


def written(path, text, mark=b""):
    path.write_bytes(mark + text.encode())
    path.chmod(0o600)


@pytest.mark.parametrize("name", READERS)
def test_file_when_it_begins_with_a_byte_order_mark_is_read_as_without(name, tmp_path):
    text, read = READERS[name]
    if name == "key pair":
        KeyPair.generate().write(tmp_path / "pair")
        text = (tmp_path / "pair").read_text("utf-8")
    path, seen = tmp_path / "file", []
    for mark in (b"", MARK):
        written(path, text + "\n", mark)
        seen.append(read(path))
    assert seen[0] == seen[1]
    assert seen[0] is not None


def test_keys_when_pem_begins_with_a_byte_order_mark_are_refused_by_that(tmp_path, monkeypatch):
    """OpenSSL passes over the certificate behind it, and takes the next one of the chain for the server's."""
    pair = Pair(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.authority))
    for path, read in (
        (pair.certificate, lambda: Certificate(pair.certificate, pair.key)),
        (pair.key, lambda: Certificate(pair.certificate, pair.key)),
        (pair.authority, lambda: trust(authorities=pair.authority)),
    ):
        read()
        octets = path.read_bytes()
        path.write_bytes(MARK + octets)
        with pytest.raises(ConfigError, match="begins with a byte order mark") as caught:
            read()
        assert str(path) in str(caught.value)
        path.write_bytes(octets)


def test_source_when_it_reads_files_of_people_does_it_in_one_place():
    """What is no file of people is read in another way: files of the package, what Linux tells, what a demo wrote."""
    reads = re.compile(r"""\.read_text\((?:encoding=|"(?:utf|ascii)|\))|\.open\(encoding=|\bdecode\("utf-8-sig""")
    found = {name for name, path in module_files().items() if reads.search(path.read_text("utf-8"))}
    of_package = {"flowctl.analyze.models", "flowctl.charts.page"}
    of_linux = {"flowctl.analyze.engine", "flowctl.load.procfs"}
    assert found == of_package | of_linux | {"flowctl.demo.loop", "flowctl.demo.processes", "flowctl.demo.run"}
