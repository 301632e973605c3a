"""Text that becomes settings: each from file, environment and option, which of them counts, and what errors say."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from ipaddress import ip_network
from pathlib import Path

import pytest
import structlog
from source_kit import module_files, nodes_of

from flowctl.core.flow.limits import DEFAULT_LIMITS, Limits
from flowctl.core.server.program import ServeOptions, ServerProgram
from flowctl.errors import ConfigError
from flowctl.live.access.keys import KeyFile, StoredKey
from flowctl.live.access.rules import HookFailure, Proof
from flowctl.live.access.tokens import SecretFile
from flowctl.live.access.webtokens import WebTokenKey
from flowctl.live.config import LiveConfig, Redirect, SecondPublisher
from flowctl.live.server import LiveServer
from flowctl.live.settings.kinds import read_credentials
from flowctl.live.settings.ladder import Ladder, LadderStep
from flowctl.live.settings.media import RecordFormat, StreamPatterns
from flowctl.live.settings.model import LiveSettings, settings_of
from flowctl.live.settings.relays import RelayRule
from flowctl.live.settings.renditions import RenditionNames
from flowctl.live.settings.sources import read_file, read_settings
from flowctl.records.flight.options import FlightOptions
from flowctl.records.telemetry.options import Addresses, RecordedStreams

LIVE = ServerProgram(name="live", summary="", default_port=1935, build=LiveServer)
OTHER = dataclasses.replace(LIVE, name="other", has_streams=False, default_port=7000, extra={"colour": "of the lines"})
KEY = b"0123456789abcdef"
RECORDS = {"events": "/records"}
BESIDE = {
    "events_": RECORDS,
    "flights": RECORDS,
    "publish_auth": {"keys_file": "keys", "token_secret_file": "key", "jwt_key": "HS256:long"},
    "play_auth": {"keys_file": "keys", "token_secret_file": "key", "jwt_key": "HS256:long"},
}
"""Settings that others, by the begin of their name, do not go without."""

EXAMPLES = {
    "host": ("0.0.0.0", "host", "0.0.0.0"),
    "port": ("1936", "port", 1936),
    "groups": ("2", "group_count", 2),
    "workers": ("auto", "workers", 0),
    "trusted_proxies": ("10.0.0.0/8, 192.0.2.1", "trusted_proxies", ("10.0.0.0/8", "192.0.2.1/32")),
    "log_file": ("flowctl.log", "log.path", Path("flowctl.log")),
    "log_max_size": ("1GiB", "log.max_bytes", 1 << 30),
    "log_keep": ("3", "log.keep", 3),
    "soft": ("1MiB,100,1s", "limits", Limits.parse("1MiB,100,1s")),
    "hard": ("5MiB,5000,9s", "limits", Limits.parse("2MiB,2048,4s", "5MiB,5000,9s")),
    "limits": ("limits.toml", "limits_file", Path("limits.toml")),
    "stuck": ("7s", "settings.stuck_s", 7.0),
    "target_delay": ("800ms", "limits", dataclasses.replace(DEFAULT_LIMITS, target_delay_ms=800)),
    "policy": ("audio-first", "policy", "audio-first"),
    "memory_budget": ("2GiB", "memory_budget_bytes", 2 << 30),
    "max_connections": ("500", "admission.connections", 500),
    "per_address": ("0", "admission.connections_per_address", 0),
    "new_per_address": ("2.5", "admission.new_per_address_and_s", 2.5),
    "publishers_per_address": ("3", "publishers_per_address", 3),
    "bans": ("bans.jsonl", "bans_file", Path("bans.jsonl")),
    "ban_store": ("bans.sqlite", "ban_store", Path("bans.sqlite")),
    "fleet": ("fleet.toml", "fleet_file", Path("fleet.toml")),
    "penalties_spare": ("192.0.2.0/24", "penalties_spare", (ip_network("192.0.2.0/24"),)),
    "credentials_file": ("users", "rtmp.credentials", {"ann": "pw"}),
    "hooks": ("mine:Hooks", "hooks", "mine:Hooks"),
    "publish_auth": ("key, jwt", "access.publish_auth", (Proof.KEY, Proof.JWT)),
    "play_auth": ("token", "access.play_auth", (Proof.TOKEN,)),
    "keys_file": ("keys", "access.keys", KeyFile("keys", (StoredKey(bytes(16), bytes(32), "play", "live/*"),))),
    "token_secret_file": ("key", "access.token_secrets", SecretFile("key", (KEY,))),
    "jwt_key": ("HS256:long", "access.jwt_key", WebTokenKey("HS256", "long")),
    "jwt_audience": ("live.example, other", "access.jwt_audience", ("live.example", "other")),
    "jwt_issuer": ("https://id.example/", "access.jwt_issuer", "https://id.example/"),
    "allow_publish": ("10.0.0.1, ::1", "access.allow_publish", (ip_network("10.0.0.1"), ip_network("::1"))),
    "deny_publish": ("192.0.2.1", "access.deny_publish", (ip_network("192.0.2.1"),)),
    "allow_play": ("2001:db8::/32", "access.allow_play", (ip_network("2001:db8::/32"),)),
    "deny_play": ("192.0.2.1", "access.deny_play", (ip_network("192.0.2.1"),)),
    "on_connect": ("http://h:85/a https://h/b", "access.on_connect", ("http://h:85/a", "https://h/b")),
    "on_publish": ("http://h/", "access.on_publish", ("http://h/",)),
    "on_play": ("http://h/", "access.on_play", ("http://h/",)),
    "on_end": ("http://h/", "access.on_end", ("http://h/",)),
    "hook_failure": ("allow", "access.hook_failure", HookFailure.ALLOW),
    "flush": ("100ms", "flush_interval_s", 0.1),
    "gop_cache": ("1MiB", "cache.size_bytes", 1 << 20),
    "second_publisher": ("standby", "second_publisher", SecondPublisher.STANDBY),
    "return_grace": ("1500ms", "return_grace_s", 1.5),
    "media_silence": ("0", "media_silence_s", 0.0),
    "players_may_wait": ("no", "players_may_wait", False),
    "renditions": ("_1080, _720", "renditions", RenditionNames(suffixes=("_1080", "_720"))),
    "events": ("/records", "events.folder", "/records"),
    "events_rotate": ("1min", "events.rotate_s", 60.0),
    "events_max": ("2GiB", "events.max_bytes", 2 << 30),
    "events_addresses": ("truncated", "events.addresses", Addresses.TRUNCATED),
    "events_streams": ("plain", "events.streams", RecordedStreams.PLAIN),
    "events_key_file": ("key", "events.key", KEY),
    "flights": ("25%", "flights.share", 0.25),
    "flights_at_once": ("7", "flights.most_at_once", 7),
    "http": ("127.0.0.1:8080,[::1]:8080", "http", "127.0.0.1:8080,[::1]:8080"),
    "http_origins": ("https://a.example", "http_origins", "https://a.example"),
    "record": ("live/*, vod/?", "media.record", StreamPatterns(("live/*", "vod/?"))),
    "record_folder": ("/rec", "media.record_folder", Path("/rec")),
    "record_format": ("mp4", "media.record_format", RecordFormat.MP4),
    "record_length": ("10min", "media.record_length_s", 600.0),
    "record_keep": ("7d", "media.record_keep_s", 604800.0),
    "record_play": ("live/*", "media.record_play", StreamPatterns(("live/*",))),
    "keep_free": ("1GiB", "media.keep_free_bytes", 1 << 30),
    "hls": ("live/*", "media.hls", StreamPatterns(("live/*",))),
    "hls_segment": ("4s", "media.hls_segment_s", 4.0),
    "hls_part": ("200ms", "media.hls_part_s", 0.2),
    "hls_folder": ("/hls", "hls_folder", Path("/hls")),
    "relay_push": (
        "live/*=rtmp://h/x/{stream}?key=s",
        "relay_push",
        (RelayRule("live/*", "rtmp://h/x/{stream}?key=s"),),
    ),
    "relay_pull": (
        "live/cam=rtmp://h/x/cam always",
        "relay_pull",
        (RelayRule("live/cam", "rtmp://h/x/cam", always=True),),
    ),
    "ladder": ("live/*=360:400k", "ladder", Ladder((LadderStep(360, 400_000),), "live/*")),
    "run_at_once": ("3", "run_at_once", 3),
    "origin": ("10.0.0.5:1936", "origin", "10.0.0.5:1936"),
    "redirect": ("all", "redirect", Redirect.ALL),
    "rtmps": ("[::]:1936,0.0.0.0:1936", "rtmps", "[::]:1936,0.0.0.0:1936"),
    "https": ("0.0.0.0:443", "https", "0.0.0.0:443"),
    "tls_certificate": ("server.pem", "tls_certificate", Path("server.pem")),
    "tls_key": ("server.key", "tls_key", Path("server.key")),
    "ca_file": ("/ca.pem", "ca_file", Path("/ca.pem")),
    "control": ("ipc:///run/one.sock,tcp://[::1]:7000", "control", "ipc:///run/one.sock,tcp://[::1]:7000"),
    "control_keys": ("server.key", "control_keys", Path("server.key")),
    "control_clients": ("clients", "control_clients", Path("clients")),
    "admin": ("[::1]:1985", "admin", "[::1]:1985"),
    "admin_token_file": ("tokens", "admin_token_file", Path("tokens")),
}
"""What is written, the field of `LiveConfig` in which it is seen, and what stands there then."""


def at(settings, path):
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def read(program=LIVE, tmp_path=None, file=None, **given):
    if file is not None:
        given["file"] = tmp_path / "flowctl.toml"
        given["file"].write_text(file)
    return read_settings(program, **given)


def refused(*args, **given):
    """Return message and hint of the error of `read`."""
    with pytest.raises(ConfigError) as caught:
        read(*args, **given)
    return str(caught.value), caught.value.hint


def test_examples_when_compared_with_the_settings_are_all_of_them():
    assert list(EXAMPLES) == [item.name for item in settings_of() if item.is_text]


@pytest.mark.parametrize("name", EXAMPLES)
def test_setting_when_given_is_seen_in_its_place(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = f"sha256:{bytes(16).hex()}:{bytes(32).hex()} play live/*".encode()
    Path("ffmpeg").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for file, data in (("users", b"ann:pw\n"), ("key", KEY), ("long", KEY * 2), ("keys", stored)):
        Path(file).write_bytes(data)
        Path(file).chmod(0o600)
    text, path, expected = EXAMPLES[name]
    beside = next((also for start, also in BESIDE.items() if name.startswith(start)), {})
    given = {name: text} | beside
    usual = read(options=beside)
    for config in (
        read(tmp_path=Path(), file="".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())),
        read(environment={f"FLOWCTL_{key.upper()}": value for key, value in given.items()}),
        read(options=given),
        read(pairs=[f"{key}={value}" for key, value in given.items()]),
    ):
        assert isinstance(config, LiveConfig)
        assert at(config, path) == expected
        names = [item.name for item in dataclasses.fields(config) if item.compare]
        assert [item for item in names if getattr(config, item) != getattr(usual, item)] == [path.partition(".")[0]]


def test_settings_when_none_are_given_are_those_of_the_dataclasses():
    assert read() == dataclasses.replace(LiveConfig(), port=1935)
    assert read(OTHER) == ServeOptions(port=7000)
    assert LiveSettings().options(LIVE, {}) == read()


def test_defaults_when_written_as_text_read_as_the_same():
    written = {item.name: item.default for item in settings_of() if item.default}
    assert len(written) > 25
    assert read(options=written | RECORDS) == read(options=RECORDS)


def test_setting_when_given_by_all_is_that_of_the_option(tmp_path):
    file, environment = "stuck = 1\nflush = 0.1\ngroups = 2\n", {"FLOWCTL_STUCK": "2s", "FLOWCTL_FLUSH": "0"}
    config = read(tmp_path=tmp_path, file=file, environment=environment, options={"stuck": "3s"})
    assert (config.settings.stuck_s, config.flush_interval_s, config.group_count) == (3.0, 0.0, 2)


def test_file_when_it_has_numbers_and_lists_means_bytes_seconds_and_each(tmp_path):
    file = "stuck = 7.5\ntarget_delay = 2\nmemory_budget = 1024\nplayers_may_wait = false\n"
    file += 'trusted_proxies = ["10.0.0.0/8", "192.0.2.1"]\n'
    config = read(tmp_path=tmp_path, file=file)
    assert (config.settings.stuck_s, config.memory_budget_bytes, config.players_may_wait) == (7.5, 1024, False)
    assert config.trusted_proxies == ("10.0.0.0/8", "192.0.2.1/32")
    assert config.limits.target_delay_ms == 2000


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("groups", "0", "is 0, it must be 1 to 256"),
        ("port", "70000", "is 70000, it must be 0 (any) to 65535"),
        ("second_publisher", "both", "is 'both', allowed: refuse|replace|standby"),
        ("http", "8080", "no address to listen on"),
        ("origin", "1936", "no address to listen on"),
        ("rtmps", "1936", "'1936' is no address to listen on"),
        ("https", "a:1,b:70000", "'b:70000' is no address to listen on"),
        ("control", "ipc,udp://x", "'udp://x' is no address to listen on"),
        ("admin", "1985", "'1985' is no address to listen on"),
        ("admin", "127.0.0.1:65536", "'127.0.0.1:65536' is no address to listen on"),
        ("admin", "127.0.0.1:1,127.0.0.1:2", "it must be one address"),
        ("return_grace", "soon", "'soon' is not a number with a unit"),
        ("return_grace", "-1", "'-1' is not a number with a unit"),
        ("players_may_wait", "maybe", "is 'maybe', it must be yes or no"),
        ("publishers_per_address", "x", "is 'x', it must be a whole number"),
        ("publishers_per_address", "inf", "is 'inf', it must be a whole number"),
        ("publishers_per_address", "2.5", "is '2.5', it must be a whole number"),
        ("publishers_per_address", "9" * 5000, "is '999"),
        ("memory_budget", "big", "'big' is not a number with a unit"),
        ("new_per_address", "many", "is 'many', it must be a number"),
        ("new_per_address", "nan", "is 'nan', it must be a number, 0 or more"),
        ("media_silence", "1year", "unknown unit 'year'"),
        ("gop_cache", "-1", "'-1' is not a number with a unit"),
        ("flights", "2", "is '2', it must be a share, 0 to 1"),
        ("policy", "all", "is 'all', it must be all-or-cut, audio-first or pictures-first"),
        ("target_delay", "up", "'up' is not a number with a unit"),
        ("soft", "2MiB", "'2MiB' is not bytes,messages"),
        ("events_addresses", "none", "is 'none', allowed: plain|truncated|hashed"),
        ("events_rotate", "2h", "is 7200 s, allowed is 0.5 s to 1 h"),
        ("trusted_proxies", "somewhere", "'somewhere' is no address and no network"),
        ("penalties_spare", "somewhere", "'somewhere' is no address and no network"),
        ("renditions", "_a,_b/c", "is '_a,_b/c': '_b/c' cannot end a name"),
        ("renditions", "_720,-720", "is '_720,-720': a suffix is there twice"),
        ("renditions", "OFF,_720", "is 'OFF,_720': tracks and off stand alone"),
        ("renditions", "a,b,c,d,e,f,g,h,i", "is a list of 9, 8 are allowed"),
    ],
)
def test_setting_when_wrong_is_refused_with_source_value_and_hint(name, text, said, tmp_path):
    given = {name: text} | (RECORDS if name.startswith(("events_", "flights")) else {})
    file = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    option = "--" + name.replace("_", "-")
    for source, sources in (
        (option, {"options": given}),
        (f"FLOWCTL_{name.upper()}", {"environment": {f"FLOWCTL_{key.upper()}": value for key, value in given.items()}}),
        (f"{tmp_path}/flowctl.toml, line 1: {name}", {"tmp_path": tmp_path, "file": file}),
    ):
        message, hint = refused(**sources)
        assert message.startswith(source)
        assert said in message
        assert hint


@pytest.mark.parametrize("value", ["true", "[5]", '[{streams = "x"}]', "{a = 1}", "-1", "nan", "inf", "2026-11-22"])
def test_settings_when_the_file_has_another_type_are_refused(value, tmp_path):
    """No setting takes whatever the format can say: a truth value is no duration, nor is a table."""
    truths = {"players_may_wait"} if value == "true" else set()
    for name in EXAMPLES.keys() - truths:
        records = 'events = "x"\n' if name.startswith(("events_", "flights")) else "\n"
        message, hint = refused(tmp_path=tmp_path, file=f"{records}{name} = {value}\n")
        assert message.startswith(f"{tmp_path}/flowctl.toml, line 2: {name}")
        assert "Input" not in message
        assert hint


def test_limits_when_they_do_not_go_together_name_the_mark():
    message, hint = refused(options={"hard": "1MiB,100"})
    assert message == (
        "--hard: hard limit of bytes is 1048576, it must be at least the soft limit 2097152, which is the default"
    )
    assert hint == "give soft as well"
    message, _ = refused(environment={"FLOWCTL_SOFT": "2MiB,2"}, options={"hard": "1MiB,2"})
    assert message.startswith("--hard: hard limit of bytes is 1048576")


def test_limits_when_marks_stand_beside_a_file_of_limits_are_refused():
    """One of the two would be ignored: both are named, wherever they come from."""
    message, hint = refused(environment={"FLOWCTL_SOFT": "2MiB,2"}, options={"limits": "x"})
    assert (message, hint) == ("FLOWCTL_SOFT and --limits both set the limits", "leave one of the two out")


@pytest.mark.parametrize("name", ["events_rotate", "flights", "flights_at_once"])
def test_records_when_there_is_no_folder_are_refused(name):
    """A setting of records without a folder would do nothing, and says so."""
    message, hint = refused(pairs=[f"{name}={EXAMPLES[name][0]}"])
    assert message == f"--set {name} is set, but nothing is recorded"
    assert "--events" in hint


def test_setting_when_unknown_is_refused_with_the_nearest(tmp_path):
    listed = "flowctl serve live --list-settings lists what there is"
    assert refused(pairs=["gop_cach=1"]) == (
        "--set gop_cach: server 'live' has no setting 'gop_cach'",
        f"did you mean gop_cache? {listed}",
    )
    assert refused(pairs=["hsl=1"])[1] == f"did you mean hls? {listed}"
    assert refused(environment={"FLOWCTL_X": "1"}) == ("FLOWCTL_X: server 'live' has no setting 'x'", listed)
    message, _ = refused(tmp_path=tmp_path, file="stuck = 3\n[streams]\n")
    assert message == f"{tmp_path}/flowctl.toml, line 2: streams: server 'live' has no setting 'streams'"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *[(name, "log_file names its file") for name in ("log_level", "log", "logging")],
        *[
            (name, "allow_publish, deny_publish, allow_play and deny_play")
            for name in ("allow_connect", "deny_connect")
        ],
    ],
)
def test_setting_when_there_is_none_but_another_way_is_told_that(name, said):
    message, hint = refused(pairs=[f"{name}=x"])
    assert "has no setting" in message
    assert said in hint


def test_paths_when_in_a_file_are_relative_to_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "etc"
    folder.mkdir()
    path = folder / "flowctl.toml"
    text = 'bans = "bans.jsonl"\ntls_key = "/abs/key.pem"\nevents = "records"\njwt_key = "RS256:https://h/jwks.json"\n'
    here, elsewhere = "rtmp://h/x/{stream}?key=@push.key&a=@b.key", tmp_path / "pull.key"
    text += f'relay_push = "live/*?={here} target-delay=2s; a/b=rtmp://h/x/@push.key"\n'
    text += f'relay_pull = "live/a=rtmp://h/x/@{elsewhere}?@b.key always"\n'
    path.write_text(text + '[application.a]\nkeys_file = "keys"\n', "utf-8")
    for name in ("etc/push.key", "etc/b.key", "pull.key"):
        (tmp_path / name).write_text(Path(name).name)
        (tmp_path / name).chmod(0o600)
    (folder / "keys").write_text(f"sha256:{bytes(16).hex()}:{bytes(32).hex()} play live/*", "utf-8")
    monkeypatch.chdir(tmp_path)
    found = read_settings(LIVE, file=path, options={"ban_store": "bans.sqlite"})
    assert (found.bans_file, found.tls_key) == (folder / "bans.jsonl", Path("/abs/key.pem"))
    assert (found.events.folder, found.ban_store) == (str(folder / "records"), Path("bans.sqlite"))
    assert str(found.access.jwt_key) == "RS256:https://h/jwks.json"  # it is an address
    targets = [rule.target("a/b") for rule in (*found.relay_push, *found.relay_pull)]
    assert [(target.stream, target.raw_query) for target in targets] == [
        ("b", "key=push.key&a=b.key"),
        ("push.key", ""),
        ("pull.key", "b.key"),
    ]
    [level] = found.levels
    assert str(folder / "keys") in [getattr(value, "path", None) for value in level.values.values()]


def test_environment_when_it_has_variables_of_other_parts_leaves_them():
    others = dict.fromkeys(("FLOWCTL_LOG_LEVEL", "FLOWCTL_CACHE", "FLOWCTL_FFMPEG", "FLOWCTL_CONFIG", "STUCK"), "x")
    assert read(environment=others) == read()


@pytest.mark.parametrize("address", ["10.96.0.17", "fd00::17"])
@pytest.mark.parametrize("service", ["flowctl", "flowctl-publish", "flowctl-config", "flowctl-role--viewer"])
def test_environment_when_kubernetes_describes_its_services_leaves_them(service, address):
    """A pod gets these variables of each Service of its namespace, unless it says otherwise."""
    name, host = service.upper().replace("-", "_"), f"[{address}]" if ":" in address else address
    links = {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": "1935",
        f"{name}_SERVICE_PORT_RTMP": "1935",
        f"{name}_PORT": f"tcp://{host}:1935",
        f"{name}_PORT_1935_TCP": f"tcp://{host}:1935",
        f"{name}_PORT_1935_TCP_PROTO": "tcp",
        f"{name}_PORT_1935_TCP_PORT": "1935",
        f"{name}_PORT_1935_TCP_ADDR": address,
        f"{name}_PORT_53_UDP": f"udp://{host}:53",
    }
    with structlog.testing.capture_logs() as lines:
        assert read(environment=links | {"FLOWCTL_STUCK": "3s"}) == read(options={"stuck": "3s"})
    assert [line["variables"] for line in lines] == [", ".join(sorted(links))]


@pytest.mark.parametrize(
    ("name", "value"), [("PROT", "1936"), ("PORT", "tcp"), ("PUBLISH_SERVICE_HOST", "yes"), ("X_PORT", "1935")]
)
def test_environment_when_it_only_looks_like_that_of_kubernetes_is_refused(name, value):
    assert refused(environment={f"FLOWCTL_{name}": value})[0].startswith(f"FLOWCTL_{name}")


def test_environment_when_it_has_a_variable_of_another_command_starts_a_server():
    """Any that the source names: one is set by flowctl edge --insecure for processes that it starts."""
    named = {
        node.value
        for path in module_files().values()
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and re.fullmatch("FLOWCTL_[A-Z_]*[A-Z]", str(node.value))
    }
    assert {"FLOWCTL_CONFIG", "FLOWCTL_DNS", "FLOWCTL_TLS_INSECURE"} <= named
    assert read(environment=dict.fromkeys(named, "1")) == read()


@pytest.mark.parametrize("text", ["", " ", ",", " ; "])
def test_setting_when_empty_is_refused_wherever_it_stands(text, tmp_path):
    """A variable of compose that was not set is empty: a server without its rule would be open to everybody."""
    for name in (*EXAMPLES, "colour"):
        program = LIVE if name in EXAMPLES else OTHER
        for source, sources in (
            (f"--{name.replace('_', '-')}", {"options": {name: text}}),
            (f"--set {name}", {"pairs": [f"{name}={text}"]}),
            (f"FLOWCTL_{name.upper()}", {"environment": {f"FLOWCTL_{name.upper()}": text}}),
            (f"{tmp_path}/flowctl.toml, line 1: {name}", {"tmp_path": tmp_path, "file": f'{name} = "{text}"\n'}),
        ):
            message, hint = refused(program, **sources)
            assert message == f"{source} is empty"
            assert hint.startswith("leave it out")
    for name in ("CONFIG", "ROLE__PUBLISHER__PUBLISH_AUTH"):
        assert refused(environment={f"FLOWCTL_{name}": text})[0] == f"FLOWCTL_{name} is empty"
    assert "allow_play is empty" in refused(tmp_path=tmp_path, file=f'allow_play = ["{text}"]\n')[0]


def test_setting_when_off_is_none_of_what_a_weaker_source_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = set()
    for item in settings_of(LIVE):
        if "off" not in item.kind.split("|"):
            continue
        text, path, usual = EXAMPLES[item.name]
        config = read(tmp_path=Path(), file=f"{item.name} = {json.dumps(text)}\n", options={item.name: "off"})
        if isinstance(usual, tuple) or item.name in {"http", "rtmps", "https", "origin", "hooks", "jwt_issuer"}:
            assert at(config, path) in {"", ()}
            seen.add(item.name)
        if isinstance(usual, tuple) and not item.name.startswith("relay"):
            assert at(read(tmp_path=Path(), file=f"{item.name} = []\n"), path) == ()
    assert {"publish_auth", "allow_play", "trusted_proxies", "on_publish", "relay_pull", "http", "hooks"} <= seen


def test_setting_when_given_twice_is_refused():
    assert refused(pairs=["stuck=1s", "stuck=2s"])[0] == "--set stuck and --set stuck set the same"
    assert refused(options={"stuck": "1s"}, pairs=["stuck=2s"])[0] == "--stuck and --set stuck set the same"
    assert refused(pairs=["stuck"]) == ("--set 'stuck' is not name=value", "for example --set stuck=20s")


@pytest.mark.parametrize("source", ["--flush", "FLOWCTL_FLUSH"])
def test_setting_of_streams_when_the_server_has_none_is_refused(source):
    given = {"options": {"flush": "1s"}} if source == "--flush" else {"environment": {source: "1s"}}
    message, hint = refused(OTHER, **given)
    assert (message, hint) == (f"server 'other' has no streams, it would ignore {source}", "leave it out")


def test_setting_of_one_program_when_given_is_its_own_text(tmp_path):
    assert read(OTHER, pairs=["colour=red"]).extra == {"colour": "red"}
    assert read(OTHER, tmp_path=tmp_path, file='colour = "red"\n', environment={"FLOWCTL_COLOUR": "blue"}).extra == {
        "colour": "blue"
    }
    assert "no setting 'colour'" in refused(pairs=["colour=red"])[0]
    assert settings_of(OTHER)[-1][:4] == ("colour", "text", "", "of the lines")
    assert "flush" not in {item.name for item in settings_of(OTHER)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stuck = ", "not valid TOML"),
        ("stuck = 1\nstuck = 2\n", "line 2: stuck is there twice, line 1 has it already"),
        ("# \udcff", "cannot read the settings in"),
    ],
)
def test_file_when_it_cannot_be_read_is_named(text, said, tmp_path):
    path = tmp_path / "flowctl.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings(LIVE, file=path)
    assert str(path) in str(caught.value)
    assert caught.value.hint
    with pytest.raises(ConfigError, match="No such file"):
        read_settings(LIVE, file=tmp_path / "absent.toml")


def test_credentials_when_read_are_by_user_and_never_shown(tmp_path):
    path = tmp_path / "users"
    path.write_text("# people\nann:a:b\n\nbob:secret word\n")
    path.chmod(0o600)
    assert read_credentials(path) == {"ann": "a:b", "bob": "secret word"}
    for text, words in (("ann\n", "line 1"), (":pw-hidden\n", "line 1"), ("# nobody\n", "holds no user")):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_credentials(path)
        assert words in str(caught.value)
        assert "pw-hidden" not in str(caught.value)
    for mode in (0o644, 0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"users has mode {mode:04o}") as caught:
            read_credentials(path)
        assert caught.value.hint.startswith(f"chmod 600 {path};")
    with pytest.raises(ConfigError, match="cannot read"):
        read_credentials(tmp_path / "absent")


def test_server_when_built_of_settings_has_them_whole():
    config = read(options={"port": "0", "soft": "1MiB,100,1s", "stuck": "7s", "per_address": "5", "groups": "2"})
    server = LiveServer(config)
    server.stop()
    assert server.config is server.hub.config is config
    assert (server.limits, server._settings.stuck_s) == (Limits.parse("1MiB,100,1s"), 7.0)
    assert len(server.groups.groups) == 2
    assert server.admission.limits is config.admission


@pytest.mark.parametrize("name", ["FLOWCTL_stuck", "FLOWCTL_Stuck", "FLOWCTL_STUC\u212a"])
def test_variable_when_not_in_capitals_is_refused(name):
    """Two variables for one setting would count by the order of the environment; a sign that looks like K is no K."""
    said, hint = refused(environment={"FLOWCTL_STUCK": "3s", name: "9s"})
    assert name in said
    assert hint == "FLOWCTL_STUCK"


@pytest.mark.parametrize(
    "name",
    ["stuck", "gop_cache", "new_per_address", "flights", "policy", "soft", "groups", "trusted_proxies"],
)
def test_value_when_long_is_cut_in_the_error(name):
    """An error is one line of a log, whatever was given."""
    assert len(refused(pairs=[f"{name}={'9x' * 3000}"])[0]) < 250


@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "1_0", " 5 ", "\uff11\uff12", "-1"])
def test_rate_when_no_plain_number_is_told_what_one_is(value):
    assert refused(pairs=[f"new_per_address={value}"])[0].endswith("it must be a number, 0 or more, such as 2.5")


@pytest.mark.parametrize("value", ["11s", "1h", "999999999999999h"])
def test_flush_when_too_long_is_refused_at_the_start(value):
    """It is what a fan-out takes: else each viewer would be closed with an error of the server's."""
    assert refused(pairs=[f"flush={value}"])[0].startswith("--set flush is ")


@pytest.mark.parametrize("setting", ["credentials_file", "events_key_file"])
def test_file_of_secrets_when_a_folder_is_not_to_be_shut(setting, tmp_path):
    """Nobody is told to take the rights off a folder."""
    said, hint = refused(options={**RECORDS, setting: str(tmp_path)})
    assert "is a folder" in said
    assert hint == "name a file in it"


@pytest.mark.parametrize(
    ("error", "why", "hint"),
    [
        (PermissionError(13, "Permission denied"), "x.toml: Permission denied", "let the user"),
        (IsADirectoryError(21, "Is a directory"), "x.toml: Is a directory", "name the file in it"),
        (FileNotFoundError(2, "No such file or directory"), "x.toml: No such file", "is the path right"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "x.toml: 'utf-8'", "UTF-8"),
    ],
)
def test_read_file_when_it_cannot_be_read_has_a_hint_that_fits(monkeypatch, error, why, hint):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError, match=why) as caught:
        read_file(Path("x.toml"))
    assert hint in caught.value.hint


GATED = (
    'stuck = "20s"\non_play = "http://127.0.0.1:8085/"\ndeny_publish = "192.0.2.0/24"\n'
    '[stream."vip/*"]\nallow_play = "10.0.0.0/8"\n[role.viewer]\npolicy = "audio-first"\n'
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty, it set 5 settings before"),
        ("# all of it\n", "is empty, it set 5 settings before"),
        (GATED[:8], "line 1"),
        (GATED[:-2], "line 7"),
        (GATED[: GATED.index('"192') - 2], "line 3"),
        (
            GATED[: GATED.index("deny")],
            'no longer sets deny_publish, stream."vip/*".allow_play, which keeps people out',
        ),
        (GATED[: GATED.index("on_play")], "no longer sets on_play, deny_publish"),
        ('stuck = "9s"\n[role.viewer]\npolicy = "audio-first"\n', "no longer sets on_play"),
        (
            GATED.replace('[stream."vip/*"]\nallow_play = "10.0.0.0/8"\n', ""),
            'no longer sets stream."vip/*".allow_play',
        ),
    ],
)
def test_file_when_it_is_cut_or_no_longer_keeps_people_out_changes_nothing(tmp_path, text, fault):
    path = tmp_path / "flowctl.toml"
    path.write_text(GATED)
    source = read_settings(LIVE, file=path).source
    with pytest.raises(ConfigError, match=re.escape(fault)) as caught:
        source.read(text)
    assert str(path) in str(caught.value)


def test_file_when_a_rule_is_lifted_in_words_is_taken(tmp_path):
    path = tmp_path / "flowctl.toml"
    path.write_text('deny_play = "192.0.2.0/24"\nstuck = "20s"\ngop_cache = "1MiB"\n')
    lifted = read_settings(LIVE, file=path).source.read('deny_play = []\nstuck = "20s"\n')
    assert lifted.access.deny_play == ()
    assert lifted.source.read('stuck = "2s"\ndeny_play = []').settings.stuck_s == 2.0
    kept = read_settings(LIVE, file=path, options={"deny_play": "192.0.2.0/24"}).source.read('stuck = "20s"\n')
    assert len(kept.access.deny_play) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_grace_s", -0.1),
        ("return_grace_s", float("nan")),
        ("publishers_per_address", -1),
        ("memory_budget_bytes", -1),
        ("flush_interval_s", -0.1),
        ("return_after_s", float("nan")),
    ],
)
def test_field_when_out_of_range_is_named_with_its_value(field, value):
    with pytest.raises(ConfigError, match=f"{field} is {value}, it must be"):
        LiveConfig(**{field: value})


def test_flights_when_nothing_is_recorded_are_refused():
    with pytest.raises(ConfigError, match="flights are asked for, but nothing is recorded"):
        LiveConfig(flights=FlightOptions(share=0.5))
