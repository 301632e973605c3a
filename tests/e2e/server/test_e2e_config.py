"""A live server that runs takes its whole configuration again: over real sockets, for open connections and new ones."""

from __future__ import annotations

import dataclasses
import json

import pytest
from e2e_kit import NAME, connection_to, put, wait_for_viewers, wait_until

from flowctl.analyze.whatif.grid import in_force as choice_in_force
from flowctl.core.flow.limits import Limits
from flowctl.core.flow.limitsfile import LimitsFile
from flowctl.core.flow.limitsfile import render as render_limits
from flowctl.core.flow.policy import LIVE_POLICIES
from flowctl.core.server.program import ServerProgram
from flowctl.errors import ConfigError
from flowctl.live.config import LiveConfig
from flowctl.live.records.recording import in_force
from flowctl.live.server import build_live_server
from flowctl.live.settings.sources import read_settings
from flowctl.wire.media.synthetic import SyntheticSource

LIVE = ServerProgram(name="live", summary="", default_port=0, build=build_live_server)
FIRST = 'soft = "1MiB,1000,4s"\nstuck = "15s"\nmemory_budget = "1GiB"\ncontrol = "off"\n'


@pytest.fixture
def configured(live, tmp_path):
    path = tmp_path / "flowctl.toml"

    def start(text=FIRST, **sources):
        path.write_text(text, "utf-8")
        settings = read_settings(LIVE, file=path, **sources)
        usual = LiveConfig()
        given = [item.name for item in dataclasses.fields(settings) if item.init and item.name != "rtmp"]
        fields = {name: getattr(settings, name) for name in given if getattr(settings, name) != getattr(usual, name)}
        return live(**fields)

    return start, path


def reload(server, path, text):
    before = server.changes.version
    put(path, text)
    server.reload.run_job(server.reload.read_now)
    return [change.detail for change in server.changes.since(before)[0] if change.what == "config file"]


def test_config_when_the_file_changes_is_in_force_for_open_connections_at_once(configured, clients):
    start, path = configured
    server = start()
    clients.publish(server, SyntheticSource(video_bit_rate=500_000), pace=1.0)
    viewer = clients.play(server)
    wait_for_viewers(server, 1)
    sender, stream = connection_to(server, viewer).sender, server.hub._streams[NAME]
    [told] = reload(
        server,
        path,
        'soft = "2MiB,1000,4s"\nstuck = "9s"\npolicy = "audio-first"\nper_address = 7\nmemory_budget = "2GiB"\n'
        'control = "off"\ngop_cache = "1MiB"\n[role.viewer]\ntarget_delay = "700ms"\n'
        f'[stream."{NAME}"]\nflush = "80ms"\n[stream."{NAME}".publisher]\nsoft = "3MiB,1000,4s"\n',
    )
    wait_until(lambda: sender.limits == Limits.parse("2MiB,1000,4s", target_delay_ms=700), "the viewer's limits")
    wait_until(lambda: sender.settings.stuck_s == 9.0, "the viewer's times")
    wait_until(lambda: sender.policy is LIVE_POLICIES["audio-first"], "the viewer's policy")
    publisher = next(item for item in server.connections() if item.session._publishing)
    wait_until(lambda: publisher.sender.limits.size.soft == 3 << 20, "the publisher's limits")
    assert server.admission.limits.connections_per_address == 7
    assert server.hub.oversight.statistics().budget.limit_bytes == 2 << 30
    assert stream._wires[1].log.cache.size_bytes == 1 << 20
    assert {fanout.pacing.ceiling_s for fanout in stream._wires[1].fanouts.active} == {0.08}
    assert told == {
        "changed": [
            "soft, hard",
            "stuck",
            "policy",
            "memory_budget",
            "per_address",
            "gop_cache",
            f'[role.viewer], [stream."{NAME}"], [stream."{NAME}".publisher]',
        ]
    }
    newcomer = clients.play(server)
    wait_for_viewers(server, 2)
    assert connection_to(server, newcomer).sender.limits.target_delay_ms == 700
    reload(server, path, FIRST)
    usual = Limits.parse("1MiB,1000,4s")
    wait_until(lambda: sender.limits == usual, "the limits of before")
    wait_until(lambda: sender.policy is LIVE_POLICIES["all-or-cut"], "the policy of before")
    wait_until(lambda: publisher.sender.limits == usual, "the publisher's limits of before")


def test_config_when_the_file_is_wrong_changes_nothing_and_says_where(configured):
    start, path = configured
    server = start()
    before = server.hub.config
    put(path, 'soft = "2MiB,1000,4s"\n\nstuck = "soon"\n')
    server.reload.run_job(server.reload.read_now)
    assert server.reload.status["config"].fault == f"{path}, line 3: stuck: 'soon' is not a number with a unit"
    assert server.hub.config is before
    assert server.limits == Limits.parse("1MiB,1000,4s")
    put(path, 'soft = "1MiB,1000,4s"\n[role.viewer]\nhard = "1KiB,1,1ms"\n')  # wrong only together
    server.reload.run_job(server.reload.read_now)
    assert "line 3: role.viewer.hard: hard limit of bytes is 1024" in server.reload.status["config"].fault
    assert server.hub.config is before
    reload(server, path, FIRST.replace("15s", "16s"))
    assert (server.reload.status["config"].fault, server.hub.config.settings.stuck_s) == ("", 16.0)


def test_config_when_the_file_is_emptied_or_cut_later_keeps_the_rules_in_force(configured):
    start, path = configured
    server = start()
    gated = FIRST + 'deny_play = "192.0.2.0/24"\nper_address = 70\n'
    reload(server, path, gated)
    for cut, fault in ("", "is empty"), (FIRST, "no longer sets deny_play"), (gated[:-2], "ends in the middle"):
        assert reload(server, path, cut) == []
        assert fault in server.reload.status["config"].fault
        assert len(server.hub.config.access.deny_play) == 1
    reload(server, path, FIRST + "deny_play = []\n")
    assert (server.reload.status["config"].fault, server.hub.config.access.deny_play) == ("", ())


def test_config_when_a_key_cannot_change_live_says_that_it_waits(configured):
    start, path = configured
    server = start()
    text = FIRST + 'groups = 3\nport = 1999\nhooks = "mine:Hooks"\n'
    [told] = reload(server, path, text.replace("15s", "16s"))
    assert told == {"changed": ["stuck"], "waits_for_restart": ["groups", "hooks", "port"]}
    assert (server.hub.config.settings.stuck_s, server.hub.config.group_count) == (16.0, 1)
    [told] = reload(server, path, FIRST + "groups = 3\n")
    assert told == {"changed": ["stuck"], "waits_for_restart": ["groups"]}
    [told] = reload(server, path, FIRST)
    assert told == {"waits_for_restart": []}
    assert server.waiting == ()
    assert reload(server, path, FIRST + "# a comment\n") == []  # nothing has changed


def test_config_when_a_file_that_it_names_changes_is_read_again_on_demand(configured, tmp_path):
    start, _ = configured
    users = tmp_path / "users"
    users.write_text("ann:first\n")
    users.chmod(0o600)
    server = start(FIRST + f'credentials_file = "{users}"\n')
    users.write_text("ann:second\n")
    server.reload.look_now()
    wait_until(lambda: server.hub.config.rtmp.credentials == {"ann": "second"}, "the new password")
    users.write_text("nobody\n")
    server.reload.look_now()
    wait_until(lambda: server.reload.status["config"].fault, "the fault")
    assert f"{users}, line 1" in server.reload.status["config"].fault
    assert server.hub.config.rtmp.credentials == {"ann": "second"}


def test_config_when_an_option_says_otherwise_keeps_what_the_option_says(configured):
    start, path = configured
    server = start(options={"stuck": "3s"})
    reload(server, path, FIRST.replace("15s", "16s"))
    assert server.hub.config.settings.stuck_s == 3.0


def test_config_when_there_is_a_limits_file_leaves_the_limits_to_it(configured, tmp_path):
    start, path = configured
    limits = tmp_path / "limits.toml"
    limits.write_text(render_limits(LimitsFile(limits=Limits.parse("5MiB,500,5s"), stuck_s=5.0)), "utf-8")
    text = f'limits = "{limits}"\ncontrol = "off"\n'
    server = start(text)
    reload(server, path, text + 'stuck = "1s"\nreturn_grace = "7s"\n')
    assert server.limits == server.hub.config.limits == Limits.parse("5MiB,500,5s")
    assert (server.hub.config.settings.stuck_s, server.hub.config.return_grace_s) == (5.0, 7.0)
    put(limits, render_limits(LimitsFile(limits=Limits.parse("6MiB,600,6s"))))
    server.reload.run_job(server.reload.read_now)
    assert server.limits == Limits.parse("6MiB,600,6s")
    assert server.hub.config.settings.stuck_s == 1.0  # of the other file, now that this one says none


def test_limits_when_a_command_set_them_stay_until_the_file_says_others(configured):
    start, path = configured
    server = start()
    server.change_limits(Limits.parse("8MiB,800,8s"))
    reload(server, path, FIRST.replace("15s", "16s"))
    assert server.limits == server.hub.config.limits == Limits.parse("8MiB,800,8s")
    reload(server, path, FIRST.replace("1MiB", "2MiB"))
    assert server.limits == Limits.parse("2MiB,1000,4s")
    assert server.limits_from == "config file"


def test_limits_when_a_command_does_not_go_with_a_level_are_refused(configured):
    start, _ = configured
    server = start(FIRST + '[role.viewer]\nhard = "2MiB,2000,8s"\n')
    with pytest.raises(ConfigError, match=r"\[role.viewer\]: hard limit of bytes is 2097152, it must be at least"):
        server.change_limits(Limits.parse("5MiB,500,5s"))
    assert server.limits == server.hub.config.limits == Limits.parse("1MiB,1000,4s")
    assert server.limits_from == "start"


def test_config_when_levels_change_is_recorded_without_names_of_streams(configured, tmp_path, monkeypatch):
    start, path = configured
    records = tmp_path / "records"
    text = FIRST + f'events = "{records}"\n'
    server = start(text)
    said = []
    monkeypatch.setattr(
        server.recording.events, "config_changed", lambda now, what, detail: said.append((what, detail))
    )
    [told] = reload(server, path, text.replace("15s", "16s") + '[stream."live/s3cret"]\nflush = "80ms"\n')
    assert told == {"changed": ["stuck", '[stream."live/s3cret"]']}
    assert said == [("config file", {"changed": ["stuck", "levels"]} | in_force(server.hub.config))]


def test_limits_when_they_change_are_recorded_as_at_the_start(configured, tmp_path, monkeypatch):
    start, _ = configured
    limits = tmp_path / "limits.toml"
    limits.write_text(render_limits(LimitsFile(limits=Limits.parse("5MiB,500,5s"))), "utf-8")
    server = start(f'limits = "{limits}"\nevents = "{tmp_path / "records"}"\ncontrol = "off"\n')
    said = []
    monkeypatch.setattr(
        server.recording.events, "config_changed", lambda now, what, detail: said.append((what, detail))
    )
    put(limits, render_limits(LimitsFile(limits=Limits.parse("6MiB,600,6s"), stuck_s=5.0)))
    server.reload.run_job(server.reload.read_now)
    server.change_limits(Limits.parse("8MiB,800,8s"))
    assert [what for what, _ in said] == ["limits file", "limits"]
    choices = [choice_in_force(json.dumps(detail)) for _, detail in said]
    assert [choice.limits for choice in choices] == [Limits.parse("6MiB,600,6s"), Limits.parse("8MiB,800,8s")]
    assert [choice.stuck_s for choice in choices] == [5.0, 5.0]


def test_config_when_a_worker_takes_it_has_its_part_of_what_all_share(live, tmp_path):
    path = tmp_path / "flowctl.toml"
    text = 'memory_budget = "1GiB"\nworkers = 2\ncontrol = "off"\n'
    path.write_text(text, "utf-8")
    settings = read_settings(LIVE, file=path)
    server = live(source=settings.source, memory_budget_bytes=1 << 29, control="off")
    assert reload(server, path, text.replace("1GiB", "3GiB")) == [{"changed": ["memory_budget"]}]
    assert server.hub.oversight.statistics().budget.limit_bytes == 3 << 29


def test_config_when_it_changed_before_the_start_is_the_new_one(live, tmp_path):
    path = tmp_path / "flowctl.toml"
    path.write_text(FIRST, "utf-8")
    settings = read_settings(LIVE, file=path)
    put(path, FIRST.replace("15s", "16s"))
    server = live(source=settings.source)
    assert server.hub.config.settings.stuck_s == 16.0
    assert server.waiting == ()
